"""Device memory that a stream fills: every byte of the range, and no other, wherever it begins."""

from __future__ import annotations

import pytest
from support import PAGE, Memory

from cumem_sleep import CuMemAllocator, _core


@pytest.mark.parametrize(("offset", "nbytes"), [(0, PAGE), (16, 64), (1, 8), (8, 7), (3, 1)])
@pytest.mark.parametrize("byte", [0, 0xA5, 0xFF])
def test_fill(offset: int, nbytes: int, byte: int, allocator: CuMemAllocator, memory: Memory) -> None:
    address = allocator.malloc(PAGE)
    content = bytearray(memory.fill_random(address, PAGE))
    content[offset : offset + nbytes] = bytes([byte]) * nbytes
    with _core.CopyStream(0) as stream:
        stream.fill(address + offset, byte, nbytes)
        stream.synchronize()
    assert memory.read(address, PAGE) == bytes(content)
