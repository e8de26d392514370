"""What is where: backups by segment and ranges, which may change their tier while their segments sleep."""

from __future__ import annotations

import pytest
from cold_tier import moved
from filled import fill
from support import PAGE, Memory

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.backups.backup import Backup

WHOLE, ONE, OTHER = (), ((0, PAGE),), ((0, PAGE), (2 * PAGE, PAGE))


@pytest.mark.sim
class TestKeys:
    def test_each_choice_of_ranges_of_a_segment_is_a_backup_of_its_own(self, allocator: CuMemAllocator) -> None:
        allocator.malloc(4 * PAGE, "weights")
        (segment,) = _core.segments()
        catalogue = allocator._store.catalogue
        with allocator._lock.hold():
            tier = allocator._store.room.tier
            backups = {}
            for ranges in (WHOLE, ONE, OTHER):
                nbytes = sum(nbytes for _, nbytes in ranges) or segment.bytes
                backups[ranges] = Backup(segment, tier, tuple(tier.reserve(0, [nbytes])), ranges=ranges)
                assert backups[ranges].content_bytes == nbytes
                assert catalogue.of(segment, ranges) is None
                catalogue.add(backups[ranges])
            assert {ranges: catalogue.of(segment, ranges) for ranges in backups} == backups
            assert [piece.address - segment.address for piece in backups[OTHER].pieces()] == [0, 2 * PAGE]
            assert allocator._store.room.bytes == (4 + 1 + 2) * PAGE
        allocator.free(segment.address)
        assert list(catalogue) == []
        assert allocator._store.room.bytes == 0


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
