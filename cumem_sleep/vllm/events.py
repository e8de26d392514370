"""What happens to a model that can sleep: the events of `SleepingModel`. None of them knows the time or the engine."""

from __future__ import annotations

from dataclasses import dataclass

from .worker_methods import Effect


@dataclass(frozen=True)
class Workers:
    """What all workers say of their memory.

    Attributes:
        asleep: tags of which something is asleep in any worker.
        mapped: tags of which everything is mapped in any worker. A tag in both is asleep in some workers only.
        lost: weights are asleep without a backup.
        checkpointed: a worker is at level 3.
    """

    asleep: frozenset[str] = frozenset()
    mapped: frozenset[str] = frozenset()
    lost: bool = False
    checkpointed: bool = False


@dataclass(frozen=True)
class Began:
    """A change begins. One that does not disturb changes nothing for a model that serves."""

    disturbs: bool = True


@dataclass(frozen=True)
class Ended:
    """The change is over, or failed: what is so now has to be asked."""


@dataclass(frozen=True)
class Doubted:
    """Something was called of which the gate does not know what it does: the workers have to be asked as well."""


@dataclass(frozen=True)
class Answered:
    """The engine said whether it sleeps, and the workers what is mapped, if they were asked and answered.

    Attributes:
        scheduler_paused: the engine's scheduler is known to be paused, which it calls sleeping as well.
    """

    sleeps: bool
    workers: Workers | None = None
    scheduler_paused: bool = False


@dataclass(frozen=True)
class WorkersSaid:
    """The workers alone were asked."""

    workers: Workers


@dataclass(frozen=True)
class Deepened:
    """A worker is at level 3, or none is any more."""

    checkpointed: bool


@dataclass(frozen=True)
class Slept:
    """The engine's sleep succeeded; that of memory which sleeps already does nothing.

    Attributes:
        level: 0 to 2, by what it does.
        kept: requests may have been left in the engine.
        again: the engine also sleeps when only the KV cache does, from vLLM 0.33 on.
    """

    level: int
    kept: bool = False
    again: bool = True


@dataclass(frozen=True)
class SleepFailed:
    """The engine takes what was awake to be awake, though its scheduler may have stopped and workers may sleep."""


@dataclass(frozen=True)
class Woken:
    """The engine's wake of these tags (none: all) succeeded; it ignores a call that names a tag that is awake.

    Attributes:
        loads_next: the gate woke them for a request, and loads weights that were dropped by itself.
    """

    tags: frozenset[str] = frozenset()
    loads_next: bool = False


@dataclass(frozen=True)
class WakeFailed:
    """The engine takes these tags (none: all) to be asleep still, whatever the workers did before the failure."""

    tags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Released:
    """The KV cache alone was dropped."""


@dataclass(frozen=True)
class Forgot:
    """Workers may have forgotten the backups of weights that sleep, and do not say."""


@dataclass(frozen=True)
class Paused:
    """Somebody paused the scheduler."""


@dataclass(frozen=True)
class WorkersWoken:
    """All workers were woken past the engine."""


@dataclass(frozen=True)
class WorkersPutToSleep:
    """All workers were put to sleep past the engine."""


@dataclass(frozen=True)
class Wrote:
    """A call that may write weights succeeded."""

    effect: Effect


@dataclass(frozen=True)
class LeftOut:
    """What the workers say that a load, which has not been noted yet, left out of the weights; "" if nothing, None if
    they do not say.
    """

    names: str | None


@dataclass(frozen=True)
class LoadFailed:
    """A call that was to load weights failed."""

    why: str


GateEvent = (
    Began
    | Ended
    | Doubted
    | Answered
    | WorkersSaid
    | Deepened
    | Slept
    | SleepFailed
    | Woken
    | WakeFailed
    | Released
    | Forgot
    | Paused
    | WorkersWoken
    | WorkersPutToSleep
    | Wrote
    | LeftOut
    | LoadFailed
)
