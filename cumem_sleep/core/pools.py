"""`Pools`: PyTorch's pools on this layer, and what a thread does to allocate from one."""

from __future__ import annotations

import sys
from typing import ClassVar

from .. import _core
from . import log
from .tags import DEFAULT_TAG
from .torch_pools import TorchPools, torch_with_cuda

_NEVER_EMPTY = ("weights", "kv_cache")


class Pools:
    """The pools of an allocator whose driver is open.

    Attributes:
        found: PyTorch's, once it was in use and reached the GPU.
    """

    warned_of_empty: ClassVar[set[str]] = set()  # the tags
    warned_of_overlap: ClassVar[bool] = False

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

    def warn_of_overlap(self) -> None:
        """Say once what PyTorch does while tasks of this thread are in different pools."""
        if _core.labels_overlap() and not Pools.warned_of_overlap:
            Pools.warned_of_overlap = True
            log.warning(
                "tasks of one thread are in different memory pools (or regions) at the same time. PyTorch allocates for"
                " a thread and cannot tell them apart, so what it allocates meanwhile gets the tag %r: let no task wait"
                " in a pool, or give each a thread of its own",
                DEFAULT_TAG,
            )

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
