"""Who may use the GPUs, and when: every decision of the scheduler that is a matter of choice. Pure.

- A request wakes its model. Requests of one model cause one wake.
- Models that are waited for are served in the order of their oldest waiting request. A model in that queue keeps its
  GPUs from those behind it, so that one with many GPUs is not passed by for ever.
- Room is made by putting other models to sleep: idle ones first, the least recently used one before the others; then
  busy ones, the one that has been awake longest first. Nobody is evicted within `keep` of its wake.
- Where somebody else woke a model whose GPUs others hold, models leave in the same order, whatever their `keep`.
- A busy model is drained: it takes no new requests, and those that run have `drain` to end. Then they are revoked.
- So a model has at most one turn before a request that came before all of its own. With M models that share GPUs a
  request waits for at most M turns of (keep + drain + sleep + wake or start, each with its attempts), or for the
  `wait` of its model, whichever is less.
- How deep a model sleeps is decided before it does, by the host memory that it would hold: the first of its `levels`
  that fits. A model in the vault goes where the vault does not refuse it.
- KV cache that sleepers keep is expendable: it takes no room from backups, and leaves when they need it.
- What fails is tried again after a pause that doubles. After `ATTEMPTS` a server is stopped and started afresh.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

STOP = 100
"""The deepest sleep: no process. The others are levels of sleep."""

OF_LAYER = 3
"""The level that only servers with this package have; the others are vLLM's own."""

ATTEMPTS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
REVOKED_WITHIN_S = 10.0  # requests that are revoked end at once; one that does not is not waited for any longer
SHARE_ROUNDING = 1e-6
IDLE_ROUNDING_S = 1e-6  # a time that is due may be a hair less than its step after the last request


@dataclass(frozen=True)
class Spec:
    """What the scheduler has to know of a model.

    Attributes:
        gpus: that it uses while it is awake.
        share: of the memory of each of them, from 0 to 1.
        keep_s: after a wake nobody pushes it out for so long.
        drain_s: what running requests have to end when it is evicted.
        wait_s: what a request waits for it at most.
        idle: depths, each with the seconds without a request after which it is taken; the shortest time first.
        levels: the depths that it may be evicted to, the preferred one first.
        owned: its server is started and stopped here.
        at_start: whether it is started without a request, and stays awake then: `awake`, `asleep`, or `stopped`.
        host_bytes: what it holds in host memory at levels 1 and 3.
        identity: what only a restart of its server changes.
    """

    name: str
    gpus: frozenset[int]
    share: float = 1.0
    keep_s: float = 0.0
    drain_s: float = 60.0
    wait_s: float = 300.0
    idle: tuple[tuple[float, int], ...] = ()
    levels: tuple[int, ...] = (1, 2, STOP)
    owned: bool = True
    at_start: str = "asleep"
    host_bytes: int = 0
    identity: object = None

    def host_bytes_at(self, depth: int) -> int:
        """What it holds at a depth: level 2 drops what level 1 keeps, level 3 is level 1 and more."""
        return self.host_bytes if depth in (1, 3) else 0


@dataclass(frozen=True)
class Use:
    """What a model did, as far as it matters to whether it may be evicted.

    Attributes:
        is_idle: no request runs.
        last_used: when a request last ran.
        awake_since: when it woke.
        kept_bytes: host memory of the KV cache that it keeps while it sleeps, and may give up.
    """

    spec: Spec
    is_idle: bool
    last_used: float
    awake_since: float
    kept_bytes: int = 0

    def protected_until(self) -> float:
        """Nobody may push it out before."""
        return self.awake_since + self.spec.keep_s


def leaves_first(use: Use) -> tuple[bool, float]:
    """The key by which models are sorted that may be evicted."""
    return (not use.is_idle, use.last_used if use.is_idle else use.awake_since)


def models_to_evict(wanted: Spec, free: dict[int, float], uses: Sequence[Use]) -> list[str] | None:
    """Who has to leave so that a model fits, given what is free of its GPUs; None if that is not enough."""
    left = {gpu: free[gpu] for gpu in wanted.gpus}
    leaving = []
    for use in sorted(uses, key=leaves_first):
        if not any(gpu in use.spec.gpus for gpu, share in left.items() if not fits(wanted.share, share)):
            continue
        leaving.append(use.spec.name)
        left = {gpu: share + (use.spec.share if gpu in use.spec.gpus else 0.0) for gpu, share in left.items()}
    return leaving if all(fits(wanted.share, share) for share in left.values()) else None


def fits(share: float, free: float) -> bool:
    """Whether so much of a GPU is free. Shares are decimal fractions, whose sums are not exact."""
    return share <= free + SHARE_ROUNDING


def eviction_depth(spec: Spec, held_bytes: int, free_bytes: float, refused: Collection[int], first: int) -> int | None:
    """How deep a model sleeps when it leaves its GPUs; None if host memory allows no depth that it may take.

    Args:
        held_bytes: of host memory, that it holds already.
        free_bytes: of what sleepers may hold.
        refused: depths that have failed.
        first: a depth that is wanted, to be preferred; 0 for none.
    """
    depths = [first, *(depth for depth in spec.levels if depth > first)] if first else list(spec.levels)
    for depth in depths:
        if depth == STOP and not spec.owned:
            continue
        if depth not in refused and spec.host_bytes_at(depth) <= held_bytes + free_bytes:
            return depth
    return STOP if spec.owned else None


def to_give_up(uses: Iterable[Use], nbytes: float) -> list[str]:
    """Whose kept KV cache is given up for so much host memory, or for as much of it as there is."""
    leaving = []
    for use in sorted(uses, key=lambda use: use.last_used):
        if nbytes > 0 and use.kept_bytes > 0:
            leaving.append(use.spec.name)
            nbytes -= use.kept_bytes
    return leaving


def idle_depth(spec: Spec, idle_s: float) -> int:
    """How deep a model sleeps after so long without a request; 0 for awake."""
    return max((depth for after_s, depth in spec.idle if after_s <= idle_s + IDLE_ROUNDING_S), default=0)


def next_idle_step_s(spec: Spec, idle_s: float) -> float | None:
    """In how many seconds it goes deeper."""
    steps = (after_s - idle_s for after_s, _ in spec.idle if after_s > idle_s + IDLE_ROUNDING_S)
    return min(steps, default=None)


def pause_s(failures: int) -> float:
    """Before something is tried again that failed so often in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (min(failures, 30) - 1))
