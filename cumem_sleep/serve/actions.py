"""What the scheduler wants done. Used as `actions.Start`, beside `events.Done`."""

from __future__ import annotations

from dataclasses import dataclass


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
class GiveUpKept:
    """Have a sleeper give up the KV cache that it keeps, before others fall asleep; `events.KeptBytes` follows."""

    model: str
    why: str


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


Change = Start | Wake | Sleep | Stop  # which takes time, and is answered by `events.Done`
Action = Change | GiveUpKept | Grant | Refuse | Revoke | Obeyed | Removed
