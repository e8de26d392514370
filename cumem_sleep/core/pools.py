"""`Pools`: PyTorch's pools on this layer, and what a thread does to allocate from one."""

from __future__ import annotations

import sys
from typing import ClassVar

from .. import _core
from . import log
from .torch_pools import TorchPools, torch_with_cuda

_NEVER_EMPTY = ("weights", "kv_cache")


def entered(tag: str, backup: _core.BackupPlan = _core.BackupPlan.BY_LEVEL) -> _core.PoolScope:
    """Be in a pool with this tag and plan, on this thread, until it is left.

    Raises:
        InvalidState: another asyncio task of this thread is in a pool.
    """
    return _core.PoolScope(tag, backup, _task())


def _task() -> int:
    """Identifies the asyncio task that runs on this thread; 0: no event loop does."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return 0
    try:
        return id(asyncio.current_task())
    except RuntimeError:
        return 0


class Pools:
    """The pools of an allocator whose driver is open.

    Attributes:
        found: PyTorch's, once it was in use and reached the GPU.
    """

    warned_of_empty: ClassVar[set[str]] = set()  # the tags

    def __init__(self) -> None:
        self.found: TorchPools | None = None

    def find(self, *, import_torch: bool = False) -> TorchPools | None:
        """PyTorch's pools, if it is in use (or `import_torch`) and reaches the GPU of this driver."""
        if self.found is None and not _core.driver_is_simulated() and (import_torch or "torch" in sys.modules):
            torch = torch_with_cuda()
            if torch is not None:
                self.found = TorchPools(torch)
        return self.found

    def in_use(self) -> dict[int, list[tuple[int, int]]]:
        """What is in use of PyTorch's segments, as `TorchPools.in_use`; of those left out, all is."""
        return {} if self.found is None else self.found.in_use()

    def warn_of_empty(self, tag: str) -> None:
        """Say once why a pool is left without memory of its tag: nothing of it would sleep.

        A pool of any other tag may be empty, such as one for optional parts, unless this layer holds no memory at all.
        """
        if tag in Pools.warned_of_empty:
            return
        tags = {segment.tag for segment in _core.segments()}
        if tag in tags or (tag not in _NEVER_EMPTY and (tags or Pools.warned_of_empty)):
            return
        Pools.warned_of_empty.add(tag)
        if _core.driver_is_simulated():
            why = "on the simulated driver PyTorch does not allocate from this layer, nor does CuPy, only `malloc`"
        elif self.found is None:
            why = "PyTorch is not installed, or reaches no GPU (a build for the CPU?)"
        else:
            why = "what is built on the CPU and moved to the GPU later is not in it: build, or move, inside the pool"
        log.warning(
            "nothing was allocated in the memory pool %r, so nothing of it can sleep; if something should: %s", tag, why
        )
