"""Small blocks of pinned host memory, for tables and trials. What is backed up lies in the store's (`backup`)."""

from __future__ import annotations

from . import _core


def pinned_block(nbytes: int, device: int) -> _core.HostBlock:
    """A small block of host memory that the GPU reads and writes, so that a full GPU still works. Close it."""
    block = _core.HostBlock(nbytes, _core.device_info(device).numa_node)
    try:
        block.touch(0, block.bytes)
        block.pin(device)
    except BaseException:
        block.close()
        raise
    return block
