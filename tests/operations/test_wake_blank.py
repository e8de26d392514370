"""Segments without bytes to come are mapped while the others' are copied."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import MIB, PAGE, Memory, patch_map, threads_refused
from waking import assert_all_asleep, check_bytes, fill

from cumem_sleep import BackupMismatch, CuMemAllocator, DriverError, _core, sim
from cumem_sleep._core import ThreadPool


@pytest.mark.usefixtures("small_batches")
class TestBlankSegments:
    """What has no bytes to come is mapped by a second thread, in the second half of the copies."""

    @pytest.fixture
    def contents(self, allocator: CuMemAllocator, memory: Memory) -> dict[int, bytes]:
        """Blank segments first, so that nothing is in order just because segments are."""
        fill(allocator, memory, [PAGE] * 2, "kv_cache")
        contents = fill(allocator, memory, [PAGE] * 4)
        fill(allocator, memory, [PAGE], "kv_cache")
        return contents

    @pytest.fixture
    def begun(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
        """The sizes of the copies to the device that were asked for."""
        begun: list[int] = []
        to_device = _core.CopyStream.to_device

        def noted(stream: _core.CopyStream, address: int, block: _core.HostBlock, offset: int, nbytes: int) -> None:
            to_device(stream, address, block, offset, nbytes)
            begun.append(nbytes)

        monkeypatch.setattr(_core.CopyStream, "to_device", noted)
        yield begun
        monkeypatch.undo()

    def test_are_mapped_from_half_on(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        contents: dict[int, bytes],
        begun: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Not sooner; and not later, for the last copy but waits for them here."""
        begun_at_map: list[tuple[str, int]] = []
        blank_mapped = threading.Event()
        map_segment, to_device = _core.Segment.map, _core.CopyStream.to_device

        def noted(segment: _core.Segment) -> None:
            begun_at_map.append((segment.tag, sum(begun)))
            map_segment(segment)
            if [tag for tag, _ in begun_at_map].count("kv_cache") == 3:
                blank_mapped.set()

        def wait(stream: _core.CopyStream, *more: Any) -> None:
            if sum(begun) == 4 * PAGE - MIB // 2:
                assert blank_mapped.wait(30)
            to_device(stream, *more)

        allocator.sleep()
        begun.clear()
        patch_map(monkeypatch, noted)
        monkeypatch.setattr(_core.CopyStream, "to_device", wait)
        allocator.wake_up()
        assert len(begun_at_map) == 7
        assert all(nbytes >= 2 * PAGE for tag, nbytes in begun_at_map if tag == "kv_cache")
        assert blank_mapped.is_set()
        assert sum(begun) == 4 * PAGE
        check_bytes(memory, contents)

    @pytest.mark.sim
    @pytest.mark.parametrize(
        ("sizes", "devices"), [((8,), 1), ((8, 8), 2), ((20, 1, 1), 1), ((1, 1, 20), 3), ((7,) * 5, 2)], ids=str
    )
    def test_half_is_of_all_devices(
        self, allocator: CuMemAllocator, begun: list[int], monkeypatch: pytest.MonkeyPatch, sizes: Any, devices: int
    ) -> None:
        """Once, and a batch of each device after half of the bytes at the latest."""
        sim.configure(device_bytes=256 * MIB, devices=devices)
        for number, pages in enumerate(sizes):
            allocator.malloc(pages * PAGE, "weights", number % devices)
        allocator.malloc(PAGE, "kv_cache")
        allocator.sleep()
        begun.clear()
        begun_at_start: list[int] = []
        start = ThreadPool.start

        def noted(pool: ThreadPool) -> None:
            begun_at_start.append(sum(begun))
            start(pool)

        monkeypatch.setattr(ThreadPool, "start", noted)
        allocator.wake_up()
        half = sum(sizes) * PAGE // 2
        (at,) = (nbytes for nbytes in begun_at_start if nbytes)  # the other thread maps what has bytes, from the start
        assert half <= at < half + devices * MIB // 2

    @pytest.mark.parametrize("level", [1, 2])
    def test_alone_are_mapped_at_once(
        self, allocator: CuMemAllocator, memory: Memory, contents: dict[int, bytes], begun: list[int], level: int
    ) -> None:
        allocator.sleep(level)
        report = allocator.wake_up(tags="kv_cache")
        assert (report.mapped_bytes, report.restored_bytes) == (3 * PAGE, 0)
        assert begun == []
        assert all(segment.has_memory is (segment.tag == "kv_cache") for segment in _core.segments())
        if level == 1:
            allocator.wake_up()
            check_bytes(memory, contents)

    @pytest.mark.parametrize("refused", [1, 2])
    def test_where_only_so_many_threads_can_be_started(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        contents: dict[int, bytes],
        monkeypatch: pytest.MonkeyPatch,
        refused: int,
    ) -> None:
        allocator.sleep()
        with threads_refused(after=refused):  # the first is the operation's own
            assert allocator.wake_up().mapped_bytes == 7 * PAGE
        check_bytes(memory, contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("place", [0, 1, 2])
    @pytest.mark.parametrize("restored", [True, False])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, DriverError])
    def test_that_cannot_be_mapped_leave_all_asleep(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        contents: dict[int, bytes],
        monkeypatch: pytest.MonkeyPatch,
        place: int,
        restored: bool,
        error: type[BaseException],
    ) -> None:
        """With what was restored by then. An interrupt hits the one who waits, or who maps if nobody else does."""
        allocator.sleep(1 if restored else 2)
        before = [segment.sleep for segment in _core.segments()]
        chosen = [segment for segment in _core.segments() if segment.tag == "kv_cache"][place]
        map_segment, wait = _core.Segment.map, ThreadPool.wait

        def fail() -> None:
            raise error("cuMemCreate", "CUDA_ERROR_UNKNOWN", "", "") if error is DriverError else error

        def fail_to_map(segment: _core.Segment) -> None:
            if segment.id == chosen.id:
                fail()
            map_segment(segment)

        def fail_to_wait(pool: ThreadPool, key: int) -> None:
            if key == chosen.id:
                fail()
            wait(pool, key)

        with monkeypatch.context() as patch:
            if error is DriverError or not restored:
                patch_map(patch, fail_to_map)
            else:
                patch.setattr(ThreadPool, "wait", fail_to_wait)
            for _ in range(2):
                with pytest.raises(error):
                    allocator.wake_up()
                assert_all_asleep()
                assert [segment.sleep for segment in _core.segments()] == before
        allocator.wake_up()
        if restored:
            check_bytes(memory, contents)

    def test_a_mismatch_after_they_were_mapped(
        self, allocator: CuMemAllocator, memory: Memory, contents: dict[int, bytes]
    ) -> None:
        allocator.sleep()
        (first, *_) = [segment for segment in _core.segments() if segment.tag == "weights"]
        backup = allocator._store.catalogue.get(first)
        assert backup is not None
        content = np.frombuffer(memoryview(backup.extents[0]), np.uint8)
        content[5] ^= 1
        with pytest.raises(BackupMismatch):
            allocator.wake_up()
        assert_all_asleep()
        content[5] ^= 1
        allocator.wake_up()
        check_bytes(memory, contents)
