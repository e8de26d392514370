"""Copies by the kernel that the extension brings itself, in PTX."""

from __future__ import annotations

import numpy as np
import pytest
from support import PAGE, Memory

from cumem_sleep import CuMemAllocator, InvalidState, _core


def test_bytes_by_the_kernel(allocator: CuMemAllocator, memory: Memory) -> None:
    """All of them, whatever their number, and no others; by a copy that is long enough for all of its threads, too."""
    address = allocator.malloc(PAGE, "weights")
    block = _core.HostBlock(PAGE, -1)
    block.pin(0)
    content = memoryview(block)
    content[:] = (bytes(range(1, 256)) * PAGE)[:PAGE]
    _core.load_copy_kernel(0)
    with _core.CopyStream(0) as stream:
        for offset, nbytes in ((0, PAGE), (16, 48), (32, 1), (64, 16 * 1000 + 7), (PAGE - 16, 16), (0, 0)):
            stream.fill(address, 0, PAGE)
            stream.to_device_by_kernel(address + offset, block, offset, nbytes)
            stream.synchronize()
            expected = bytes(offset) + bytes(content[offset : offset + nbytes]) + bytes(PAGE - offset - nbytes)
            assert memory.read(address, PAGE) == expected
        for at, offset in ((8, 0), (0, 8)):
            with pytest.raises(InvalidState, match="multiples of 16"):
                stream.to_device_by_kernel(address + at, block, offset, 16)
        with pytest.raises(InvalidState, match="registered"):
            stream.to_device_by_kernel(address, _core.HostBlock(PAGE, -1), 0, 16)
        with pytest.raises(IndexError):
            stream.to_device_by_kernel(address, block, 0, PAGE + 1)


def test_copies_that_take_several_launches(allocator: CuMemAllocator, memory: Memory) -> None:
    nbytes = (33 << 20) + 5
    address = allocator.malloc(17 * PAGE, "weights")
    written = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    block = _core.HostBlock(nbytes, -1)
    block.pin(0)
    np.frombuffer(memoryview(block), np.uint8)[:] = written
    with _core.CopyStream(0) as stream:
        stream.to_device_by_kernel(address, block, 0, nbytes)
        stream.synchronize()
    assert memory.read(address, nbytes) == written.tobytes()
