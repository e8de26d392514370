"""Backups whose bytes are not those of the segment."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from support import PAGE, free_everything
from world import World, awake_with_backups

from cumem_sleep import BackupMismatch, DriverError, sim

pytestmark = pytest.mark.sim


class TestDamage:
    @pytest.mark.parametrize("tag", ["weights", "default"])
    @pytest.mark.parametrize("place", [0, -1])
    def test_a_flipped_bit_in_a_backup(self, world: World, tag: str, place: int) -> None:
        world.allocator.sleep()
        world.note_drops()
        segment = next(segment for segment in world.segments if segment.tag == tag)
        backup = world.allocator._store.catalogue.get(segment)
        assert backup is not None
        content = np.frombuffer(memoryview(backup.extents[place]), np.uint8)
        before = world.state()
        content[place] ^= 4
        for _ in range(2):
            with pytest.raises(BackupMismatch) as raised:
                world.allocator.wake_up()
            assert tag in raised.value.segment
            assert f"0x{segment.address:x}" in raised.value.segment
            assert raised.value.expected != raised.value.actual
            assert raised.value.expected == str(backup.digest)
            assert world.state() == before
        content[place] ^= 4
        world.wake()

    def test_without_verification_nobody_notices(self, world: World) -> None:
        """What `verify=off` gives up."""
        free_everything()
        world.__init__(verify="off")  # type: ignore[misc]
        world.allocator.sleep()
        segment = world.segments[0]
        backup = world.allocator._store.catalogue.get(segment)
        assert backup is not None
        np.frombuffer(memoryview(backup.extents[0]), np.uint8)[7] ^= 1
        world.allocator.wake_up()
        assert ctypes.string_at(segment.address, PAGE) != world.contents[segment.id]

    def test_a_damaged_tag_can_be_left_asleep(self, world: World) -> None:
        """Damage of the weights does not keep the rest from waking, and they can be freed."""
        world.allocator.sleep()
        world.note_drops()
        weights = world.segments[0]
        backup = world.allocator._store.catalogue.get(weights)
        assert backup is not None
        np.frombuffer(memoryview(backup.extents[0]), np.uint8)[0] ^= 1
        del backup
        world.allocator.wake_up("kv_cache")
        world.check_bytes()
        world.allocator.free(weights.address)
        assert world.allocator.wake_up().mapped_bytes == 0

    def test_a_half_written_backup_is_not_trusted(self, world: World) -> None:
        """Not even when the bytes are again those that it held before a sleep failed half-way."""
        awake_with_backups(world)
        before = dict(world.contents)
        world.change()
        sim.fail(
            "cuMemcpyDtoHAsync", after=3 * 2 + 1, error="CUDA_ERROR_UNKNOWN"
        )  # the digests copy, then one block is
        with pytest.raises(DriverError, match="cuMemcpyDtoHAsync"):
            world.allocator.sleep(offload_tags=World.TAGS)
        sim.reset()
        for segment in world.segments:
            content = before[segment.id]
            assert content is not None
            ctypes.memmove(segment.address, content, PAGE)
            world.contents[segment.id] = content
        world.allocator.sleep(offload_tags=World.TAGS)
        world.wake()
