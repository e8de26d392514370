"""Segments of random bytes, by tag, and how they sleep."""

from __future__ import annotations

from support import PAGE, Memory

from cumem_sleep import CuMemAllocator, OutOfDeviceMemory, _core


def sleep_states() -> dict[str, _core.Segment.Sleep]:
    """How each tag sleeps; every test that asks has one segment of each."""
    return {segment.tag: segment.sleep for segment in _core.segments()}


def fill(allocator: CuMemAllocator, memory: Memory, *tags: str, nbytes: int = PAGE) -> dict[str, tuple[int, bytes]]:
    """One segment of random bytes for each tag: its address and its bytes."""
    filled = {}
    for tag in tags:
        address = allocator.malloc(nbytes, tag)
        filled[tag] = (address, memory.fill_random(address, nbytes))
    return filled


def take_all_but(nbytes: int, allocator: CuMemAllocator, device: int = 0) -> list[int]:
    """Allocate until about `nbytes` are free on the device; returns the addresses."""
    taken = []
    _, size = _core.memory_info(device)
    while (size := min(size, (_core.memory_info(device)[0] - nbytes) // PAGE * PAGE)) > 0:
        try:
            taken.append(allocator.malloc(size, "eater", device))
        except OutOfDeviceMemory:  # a GPU needs some for itself
            size //= 2
    return taken
