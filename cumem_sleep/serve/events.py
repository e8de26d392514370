"""What the scheduler is told. Used as `events.Arrived`, beside `actions.Grant`."""

from __future__ import annotations

from dataclasses import dataclass

from .policy import Spec
from .status import Phase


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
class Outcome:
    """What became of a start, wake, sleep or stop, and of a look at what a server is in.

    Attributes:
        error: why it failed; None if it did what it should.
        state: what the server is certainly in, `Phase.AWAKE`, `Phase.ASLEEP` or `Phase.STOPPED` (nobody answers there);
            None where nobody knows.
        level: at which it sleeps, as far as is known.
        lacks_host_memory: the sleep failed for want of it, so a retry at this level is of no use.
        why_not_deeper: it sleeps at a lesser level than was wanted, and would again.
    """

    error: str | None = None
    state: Phase | None = None
    level: int | None = None
    lacks_host_memory: bool = False
    why_not_deeper: str = ""


@dataclass(frozen=True)
class Done:
    """A start, wake, sleep or stop has ended, well or not.

    Attributes:
        operation: the number that its action bore; others are out of date and are ignored.
    """

    model: str
    operation: int
    outcome: Outcome = Outcome()


@dataclass(frozen=True)
class Found:
    """A server was asked what it is in, while no change of it was under way: somebody else may have made one.

    Attributes:
        state: `Phase.AWAKE` or `Phase.ASLEEP`.
        level: at which it sleeps, if it does.
    """

    model: str
    state: Phase
    level: int | None = None


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
class KeptBytes:
    """How much of its KV cache a sleeping model keeps in host memory.

    Attributes:
        was_told: `actions.GiveUpKept` has been carried out, or failed.
    """

    model: str
    kept_bytes: int
    was_told: bool = False


@dataclass(frozen=True)
class LacksHostMemory:
    """A model cannot fall asleep for want of it: one sleeper is to give up the KV cache that it keeps."""

    model: str


@dataclass(frozen=True)
class HasLayer:
    """Whether cumem-sleep is in a model's server, and keeps its backups in the vault.

    Attributes:
        host_bytes: what it turned out to need on the host at level 1; None where that is configured.
    """

    model: str
    has_layer: bool
    in_vault: bool = False
    host_bytes: int | None = None


@dataclass(frozen=True)
class Configured:
    """The models from now on. Those that are gone are stopped; so are those that only a restart changes."""

    specs: tuple[Spec, ...]
    host_bytes: int


@dataclass(frozen=True)
class TimePassed:
    """It is `next_time`, or later."""


FrontEvent = (
    Arrived | Gone | Done | Found | Died | Ordered | KeptBytes | LacksHostMemory | HasLayer | Configured | TimePassed
)
