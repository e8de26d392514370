"""Small blocks of pinned host memory, for tables and trials. Backups are in the memory of a tier (`backups`)."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from .. import _core
from ..errors import OutOfHostMemory


def pinned_block(nbytes: int, device: int, numa_node: int | None = None) -> _core.HostBlock:
    """A small block of host memory that the GPU reads and writes, so that a full GPU still works. The caller closes it.

    Args:
        numa_node: -1 is any node; None is the device's node.
    """
    return _pinned(_core.HostBlock(nbytes, node_of(device) if numa_node is None else numa_node), device)


def pinned_table(nbytes: int, device: int) -> _core.HostBlock:
    """As `pinned_block`, for what each operation needs: if it is small, the next one gets it without pinning it again.

    It holds whatever it held then.
    """
    block = _core.HostBlock.table(nbytes, device, node_of(device))
    return block if block.pinned else _pinned(block, device)


def bounce_block(nbytes: int, device: int) -> _core.HostBlock:
    """A small block of host memory for copies. A GPU without memory for its page tables copies unpinned, more slowly.

    Raises:
        OutOfHostMemory: there is too little.
        DriverError: the driver refused for another reason.
    """
    return _pinned(_core.HostBlock(nbytes, -1), device, OutOfHostMemory)


@cache  # it takes a dozen driver calls to find out, and never changes
def node_of(device: int) -> int:
    """The NUMA node of a device; -1: any.

    Raises:
        DriverError: the driver did not say.
    """
    return _core.device_info(device).numa_node


def _pinned(block: _core.HostBlock, device: int, *passed_over: type[Exception]) -> _core.HostBlock:
    """The block, prefaulted and pinned; not pinned, where that raises what is passed over."""
    try:
        block.prefault(0, block.bytes)
        with suppress(*passed_over):
            block.pin(device)
    except BaseException:
        block.close()
        raise
    return block
