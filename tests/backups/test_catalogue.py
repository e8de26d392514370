"""What is where: backups, which may change their tier while their segments sleep."""

from __future__ import annotations

import pytest
from cold_tier import moved
from filled import fill
from support import PAGE, Memory

from cumem_sleep import CuMemAllocator


@pytest.mark.sim
class TestMoving:
    def test_a_backup_moves_to_another_tier_while_its_segment_sleeps(
        self, allocator: CuMemAllocator, memory: Memory
    ) -> None:
        filled = fill(allocator, memory, "weights", "default", nbytes=3 * PAGE)
        allocator.sleep()
        store, first = allocator._store, allocator._store.room.tier
        (one, other) = store.catalogue
        second = moved(allocator, one)
        assert (first.bytes, second.bytes) == (sum(extent.bytes for extent in other.extents), one.bytes)
        assert (one.tier, other.tier) == (second, first)
        usage = allocator.usage()
        assert [usage[tag].host_bytes for tag in ("weights", "default")] == [0, first.bytes]
        for address, content in filled.values():
            read = allocator.read_backup(address, 3 * PAGE)
            assert read is not None
            assert read.tobytes() == content
        assert allocator.wake_up().verified_bytes == 6 * PAGE
        for address, content in filled.values():
            assert memory.read(address, 3 * PAGE) == content
        assert allocator.sleep().clean_bytes == 6 * PAGE
        allocator.wake_up()
        for address, content in filled.values():
            memory.write(address, content[::-1])
        assert allocator.sleep().copied_bytes == 6 * PAGE
        assert (first.bytes, second.bytes) == (6 * PAGE, 0), "what is written anew goes to the first tier"
        allocator.wake_up()
        for address, content in filled.values():
            assert memory.read(address, 3 * PAGE) == content[::-1]

    def test_what_was_moved_is_forgotten_in_its_tier(self, allocator: CuMemAllocator, memory: Memory) -> None:
        (filled,) = fill(allocator, memory, "weights").values()
        allocator.sleep()
        (backup,) = allocator._store.catalogue
        second = moved(allocator, backup)
        assert allocator._store.room.bytes == PAGE
        allocator.free(filled[0])
        assert (allocator._store.room.bytes, second.bytes) == (0, 0)
