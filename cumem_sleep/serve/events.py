"""What the scheduler is told, and what it wants done."""

from __future__ import annotations

from dataclasses import dataclass

from .policy import Spec
from .status import Phase

# Events


@dataclass(frozen=True)
class Arrived:
    """A request for a model, to be granted or refused by its deadline."""

    request: int
    model: str
    deadline: float


@dataclass(frozen=True)
class Gone:
    """A request has ended: it was granted and is answered, or it waited and was withdrawn."""

    request: int


@dataclass(frozen=True)
class Done:
    """A start, wake, sleep or stop has ended, well or not.

    Attributes:
        operation: the number that its action bore; others are out of date and are ignored.
        error: why it failed; None if it did not.
        state: after a failure, and of a server found running: what the server is certainly in, `Phase.AWAKE`,
            `Phase.ASLEEP` or `Phase.STOPPED`; None where nobody knows.
        level: at which it sleeps, if it does.
        lacks_host_memory: the sleep failed for want of it, so a retry at this level is of no use.
        why_not_deeper: it sleeps at a lesser level than was wanted, and would again.
    """

    model: str
    operation: int
    error: str | None = None
    state: Phase | None = None
    level: int | None = None
    lacks_host_memory: bool = False
    why_not_deeper: str = ""


@dataclass(frozen=True)
class Died:
    """A server's process has ended without being told to, or a server by URL cannot be reached any more."""

    model: str
    error: str


@dataclass(frozen=True)
class Ordered:
    """An operator wants a model to sleep or stop. Answered by `Obeyed`."""

    model: str
    depth: int


@dataclass(frozen=True)
class HostBytes:
    """What a model turned out to need on the host at level 1."""

    model: str
    host_bytes: int


@dataclass(frozen=True)
class HasLayer:
    """Whether cumem-sleep is in a model's server."""

    model: str
    has_layer: bool


@dataclass(frozen=True)
class Configured:
    """The models from now on. Those that are gone are stopped; so are those that only a restart changes."""

    specs: tuple[Spec, ...]
    host_bytes: int


@dataclass(frozen=True)
class TimePassed:
    """It is `next_time`, or later."""


Event = Arrived | Gone | Done | Died | Ordered | HostBytes | HasLayer | Configured | TimePassed

# Actions


@dataclass(frozen=True)
class Start:
    """Start a server, or find out what a server by URL is in."""

    model: str
    operation: int


@dataclass(frozen=True)
class Wake:
    """Wake a model that sleeps at this level."""

    model: str
    operation: int
    level: int


@dataclass(frozen=True)
class Sleep:
    """Put a model to sleep.

    Attributes:
        more_bytes: of host memory, that it takes on top of what it holds.
        from_level: it sleeps already, and has to be woken before it can go deeper; but not from 1 to 3.
    """

    model: str
    operation: int
    level: int
    more_bytes: int = 0
    from_level: int | None = None


@dataclass(frozen=True)
class Stop:
    """End a server's process."""

    model: str
    operation: int


@dataclass(frozen=True)
class Grant:
    """The request may run: its model is awake, and stays so until `Gone`."""

    request: int


@dataclass(frozen=True)
class Refuse:
    """The request will not run.

    Attributes:
        failed: because the server fails, not because time is up.
    """

    request: int
    why: str
    retry_after_s: float
    failed: bool = False


@dataclass(frozen=True)
class Revoke:
    """The request has to end now; `Gone` is to follow."""

    request: int
    why: str


@dataclass(frozen=True)
class Obeyed:
    """An operator's order was carried out, or could not be."""

    model: str
    depth: int
    error: str | None = None


@dataclass(frozen=True)
class Removed:
    """A model that is not configured any more has been stopped."""

    model: str


Action = Start | Wake | Sleep | Stop | Grant | Refuse | Revoke | Obeyed | Removed
