"""Segments of random bytes, and what they have to hold after a wake."""

from __future__ import annotations

from support import AWAKE, Memory, assert_no_threads

from cumem_sleep import CuMemAllocator, _core


def fill(allocator: CuMemAllocator, memory: Memory, sizes: list[int], tag: str = "weights") -> dict[int, bytes]:
    contents = {}
    for nbytes in sizes:
        address = allocator.malloc(nbytes, tag)
        contents[address] = memory.fill_random(address, nbytes)
    return contents


def check_bytes(memory: Memory, contents: dict[int, bytes]) -> None:
    for address, content in contents.items():
        assert memory.read(address, len(content)) == content


def assert_all_asleep() -> None:
    """And no thread at work on it."""
    assert all(segment.sleep != AWAKE and not segment.has_memory for segment in _core.segments())
    assert_no_threads()
