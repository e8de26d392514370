"""Segments of random bytes, whose backups have two blocks in each page."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support import MIB, PAGE, SIMULATED, Memory, ample_host_memory, quick_sums

from cumem_sleep import CuMemAllocator


@pytest.fixture(autouse=True)
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each page. And a busy machine is not to be taken for a device with work: then all is digested again."""
    monkeypatch.setattr(CuMemAllocator.tuning, "idle_s", 60.0)
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", MIB)
    ample_host_memory(monkeypatch)
    if SIMULATED:
        monkeypatch.setattr("cumem_sleep.digest.digester.sums_of", quick_sums)


def fill(allocator: CuMemAllocator, memory: Memory, pages: Sequence[int], tag: str = "weights") -> dict[int, bytes]:
    """A segment of random bytes of each size: the bytes by address."""
    addresses = [(allocator.malloc(count * PAGE, tag), count * PAGE) for count in pages]
    return {address: memory.fill_random(address, nbytes) for address, nbytes in addresses}


def check_bytes(memory: Memory, contents: dict[int, bytes]) -> None:
    for address, content in contents.items():
        assert memory.read(address, len(content)) == content


def change(memory: Memory, contents: dict[int, bytes], address: int, place: int = -1) -> None:
    """One byte of this segment."""
    content = bytearray(contents[address])
    content[place] ^= 0xFF
    contents[address] = bytes(content)
    memory.write(address, contents[address])
