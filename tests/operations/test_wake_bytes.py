"""The bytes of a wake: in which order segments are mapped and filled, and how it goes wrong."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support import AWAKE, MIB, PAGE, Memory, patch_map
from waking import assert_all_asleep, check_bytes, fill

from cumem_sleep import BackupMismatch, CuMemAllocator, OutOfHostMemory, _core, sim
from cumem_sleep._core import ThreadPool


@pytest.mark.usefixtures("small_batches")
class TestWake:
    @pytest.mark.parametrize("batch_bytes", [MIB // 2, MIB, 3 * MIB, 64 * MIB])
    def test_bytes_in_batches_of_any_size(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", batch_bytes)
        contents = fill(allocator, memory, [PAGE, 3 * PAGE, PAGE, 2 * PAGE])
        allocator.sleep()
        report = allocator.wake_up()
        assert (report.restored_bytes, report.verified_bytes) == (7 * PAGE, 7 * PAGE)
        check_bytes(memory, contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("place", [0, 2, 4])
    @pytest.mark.parametrize("block", [0, -1])
    def test_a_flipped_bit_in_any_batch(
        self, allocator: CuMemAllocator, memory: Memory, place: int, block: int
    ) -> None:
        contents = fill(allocator, memory, [2 * PAGE] * 5)
        allocator.sleep()
        segment = _core.segments()[place]
        backup = allocator._store.catalogue.get(segment)
        assert backup is not None
        content = np.frombuffer(memoryview(backup.extents[block]), np.uint8)
        content[-7] ^= 0x10
        for _ in range(2):
            with pytest.raises(BackupMismatch) as raised:
                allocator.wake_up()
            assert f"0x{segment.address:x}" in raised.value.segment
            assert all(one.sleep != AWAKE and not one.has_memory for one in _core.segments())
        content[-7] ^= 0x10
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_what_has_bytes_is_mapped_first(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All of it, where it is one batch."""
        monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", 64 * MIB)
        assert self.order_of_mapping(allocator, memory, monkeypatch, 2) == ["weights", "weights", "kv_cache"]

    def test_half_of_what_has_bytes_is_mapped_first(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From then on the rest is mapped by another thread, which may be the faster one."""
        mapped = self.order_of_mapping(allocator, memory, monkeypatch, 4)
        assert sorted(mapped) == ["kv_cache", *["weights"] * 4]
        assert mapped[:2] == ["weights"] * 2

    def order_of_mapping(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, weights: int
    ) -> list[str]:
        mapped: list[str] = []
        kv_cache = fill(allocator, memory, [PAGE], "kv_cache")
        contents = fill(allocator, memory, [PAGE] * weights)
        allocator.sleep()
        map_segment = _core.Segment.map

        def noted(segment: _core.Segment) -> None:
            mapped.append(segment.tag)
            map_segment(segment)

        patch_map(monkeypatch, noted)
        allocator.wake_up()
        check_bytes(memory, contents)
        assert len(kv_cache) == 1
        return mapped

    def test_a_copy_begins_before_all_is_mapped(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last segment is mapped only once the first copy was asked for: nobody waits for all of the mapping."""
        contents = fill(allocator, memory, [PAGE] * 4)
        allocator.sleep()
        last = _core.segments()[-1].address
        copying = threading.Event()
        map_segment, to_device = _core.Segment.map, _core.CopyStream.to_device

        def wait_and_map(segment: _core.Segment) -> None:
            assert segment.address != last or copying.wait(30)
            map_segment(segment)

        def copy(stream: _core.CopyStream, address: int, *more: Any) -> None:
            to_device(stream, address, *more)
            copying.set()

        patch_map(monkeypatch, wait_and_map)
        monkeypatch.setattr(_core.CopyStream, "to_device", copy)
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("where", ["mapping", "copying"])
    @pytest.mark.parametrize("what", ["weights", "kv_cache"])
    def test_the_mapping_thread_is_at_rest_before_a_failed_wake_is_undone(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        where: str,
        what: str,
    ) -> None:
        """The error comes while the thread is in the middle of mapping; undoing at once would leave that mapped.

        One thread maps what will be restored, another, that begins later, what has no bytes to come.
        """
        contents = fill(allocator, memory, [PAGE] * 3)
        *_, last_copied = contents
        fill(allocator, memory, [PAGE] if what == "kv_cache" else [], "kv_cache")
        allocator.sleep()
        last = _core.segments()[-1]
        in_map, go = threading.Event(), threading.Event()
        at_undo: list[bool] = []
        map_segment, undo_wake = _core.Segment.map, _core.undo_wake
        wait, leave, to_device = ThreadPool.wait, ThreadPool.__exit__, _core.CopyStream.to_device

        def slow_map(segment: _core.Segment) -> None:
            if segment.address == last.address:
                in_map.set()
                assert go.wait(30)
            map_segment(segment)

        def fail() -> None:
            assert in_map.wait(30)
            raise OutOfHostMemory(1, 0, "here")

        def fail_to_wait(pool: ThreadPool, key: int) -> None:
            if key == last.id:
                fail()
            wait(pool, key)

        def fail_to_copy(stream: _core.CopyStream, address: int, *more: Any) -> None:
            if what == "weights" or address == last_copied:
                fail()
            to_device(stream, address, *more)

        fails: Any = (ThreadPool, "wait", fail_to_wait)
        if where != "mapping":
            fails = (_core.CopyStream, "to_device", fail_to_copy)

        def stop(pool: ThreadPool, *error: object) -> None:
            threading.Timer(0.02, go.set).start()  # after this has begun to wait, most likely; else nothing is shown
            leave(pool, *error)

        def undo(segments: list[_core.Segment]) -> None:
            at_undo.append(all(segment.has_memory for segment in segments))
            undo_wake(segments)

        with monkeypatch.context() as patch:
            patch_map(patch, slow_map)
            patch.setattr(_core, "undo_wake", undo)
            patch.setattr(ThreadPool, "__exit__", stop)
            patch.setattr(*fails)
            with pytest.raises(OutOfHostMemory):
                allocator.wake_up()
        assert at_undo == [True], "undone while the thread was mapping"
        assert_all_asleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.sim
    def test_devices_take_turns(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sim.configure(devices=2)
        contents = {}
        for device in (0, 0, 1):
            address = allocator.malloc(PAGE, "weights", device)
            contents[address, device] = memory.fill_random(address, PAGE, device)
        allocator.sleep()
        order: list[int] = []
        to_device = _core.CopyStream.to_device

        def noted(stream: _core.CopyStream, *more: Any) -> None:
            order.append(stream.device)
            to_device(stream, *more)

        with monkeypatch.context() as patch:
            patch.setattr(_core.CopyStream, "to_device", noted)
            allocator.wake_up()
        assert order == [0, 1] * 4 + [0] * 4
        for (address, device), content in contents.items():
            assert memory.read(address, PAGE, device) == content
        memory.close()
