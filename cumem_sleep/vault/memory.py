"""The vault's memory: slabs, which its clients can read when it has ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .. import _core

NO_MORE_FILES = "the vault can open no more files: raise the limit of its open files (ulimit -n)"
_PREFAULT_BYTES = 64 << 20


class Slab:
    """A memfd that is mapped and registered here. `descriptor` reads it; that is what owners get."""

    def __init__(self, block: _core.HostBlock, descriptor: int) -> None:
        self.block = block
        self.descriptor = descriptor

    @property
    def nbytes(self) -> int:
        """Of the whole slab."""
        return self.block.bytes

    def close(self) -> None:
        """Unmap it. Others who have a descriptor of it can still read it. No copy may be in flight."""
        os.close(self.descriptor)
        self.block.close()


def take(
    nbytes: int,
    node: int,
    device: int,
    threads: int,
    prefaulted: Callable[[int], None],
    *,
    reserved_huge_pages: bool = False,
) -> Slab:
    """A new slab, prefaulted and registered.

    Args:
        node: the NUMA node of its pages; -1: wherever.
        device: the GPU whose context registers it, for all GPUs.
        threads: how many of them prefault its pages.
        prefaulted: called with the number of bytes that were just prefaulted.
        reserved_huge_pages: use only huge pages that the system has reserved.

    Raises:
        OutOfHostMemory: the system gives no more memory, or the driver registers no more.
    """
    block = _core.HostBlock.shared(nbytes, node, reserved_huge_pages)
    try:
        with ThreadPoolExecutor(threads, "vault-prefault") as pool:
            starts = range(0, nbytes, _PREFAULT_BYTES)
            sizes = [min(_PREFAULT_BYTES, nbytes - start) for start in starts]
            for size, _ in zip(sizes, pool.map(block.prefault, starts, sizes), strict=True):
                prefaulted(size)
        block.pin(device)
        descriptor = os.open(f"/proc/self/fd/{block.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        block.close()
        raise
    return Slab(block, descriptor)
