"""Segments of random bytes, and what they have to hold after a wake."""

from __future__ import annotations

from dataclasses import dataclass

from support import AWAKE, PAGE, Memory, assert_no_threads

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


@dataclass
class OldWeights:
    """Memory of three tags that sleeps at level 1: new weights, of as many bytes, are about to be loaded."""

    allocator: CuMemAllocator
    memory: Memory
    weights: dict[int, bytes]
    others: dict[int, bytes]

    @classmethod
    def asleep(cls, allocator: CuMemAllocator, memory: Memory) -> OldWeights:
        weights = fill(allocator, memory, [PAGE, 2 * PAGE])
        fill(allocator, memory, [PAGE], "kv_cache")
        others = fill(allocator, memory, [PAGE], "default")
        allocator.sleep()
        return cls(allocator, memory, weights, others)

    def check_that_they_are_gone(self) -> None:
        for address, content in self.weights.items():
            assert set(self.memory.read(address, len(content))) == {0xFF}, "not poisoned"

    def check_that_new_ones_survive(self) -> None:
        new = {address: content[::-1] for address, content in self.weights.items()}
        for address, content in new.items():
            self.memory.write(address, content)
        assert self.allocator.sleep().copied_bytes == 3 * PAGE
        self.allocator.wake_up()
        check_bytes(self.memory, new | self.others)


def states() -> dict[str, _core.Segment.Sleep]:
    return {segment.tag: segment.sleep for segment in _core.segments()}


def assert_all_asleep() -> None:
    """And no thread at work on it."""
    assert all(segment.sleep != AWAKE and not segment.has_memory for segment in _core.segments())
    assert_no_threads()
