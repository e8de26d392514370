"""The limits on host memory that this process takes itself: how much it may still take, and what is refused.

The vault has its own (`vault/ledger.py`, `vault/pool.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import host_facts
from ..errors import OutOfHostMemory


@dataclass(frozen=True)
class HostLimit:
    """What one limit leaves for backups.

    Attributes:
        name: `budget`, `cgroup` or `MemAvailable`.
        available_bytes: what may still be taken; None if the limit does not bind.
    """

    name: str
    available_bytes: int | None


def of_this_process(
    budget_bytes: int | None, held_bytes: int, promised_bytes: int, needed_bytes: int | None
) -> list[HostLimit]:
    """The limits on memory that this process takes itself.

    Args:
        budget_bytes: `Settings.host_budget_bytes`.
        held_bytes: what backups take already.
        promised_bytes: of that, what has no pages yet, so the system still counts it as available.
        needed_bytes: limits that leave more than this need not be exact; None: all must be.
    """
    enough = None if needed_bytes is None else needed_bytes + promised_bytes
    return [
        HostLimit("budget", None if budget_bytes is None else max(0, budget_bytes - held_bytes)),
        HostLimit("cgroup", _less(host_facts.cgroup_available_bytes(), promised_bytes)),
        HostLimit("MemAvailable", _less(host_facts.mem_available_bytes(enough=enough), promised_bytes)),
    ]


def missing_bytes(limits: Sequence[HostLimit], needed_bytes: int, evictable: Callable[[], int]) -> int:
    """How much has to be evicted before `needed_bytes` can be taken.

    Args:
        evictable: returns how much could be evicted; called only if needed.

    Raises:
        OutOfHostMemory: that would not be enough.
    """
    short = [
        (limit.available_bytes, limit.name)
        for limit in limits
        if limit.available_bytes is not None and limit.available_bytes < needed_bytes
    ]
    if not short:
        return 0
    evictable_bytes = evictable()
    for available_bytes, name in short:
        if available_bytes + evictable_bytes < needed_bytes:
            raise OutOfHostMemory(needed_bytes, available_bytes, name)
    return max(needed_bytes - available_bytes for available_bytes, _ in short)


def _less(available_bytes: int | None, promised_bytes: int) -> int | None:
    return None if available_bytes is None else max(0, available_bytes - promised_bytes)
