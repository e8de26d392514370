"""A wake that may wait for device memory begins with what is free."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from filled import take_all_but
from support import AWAKE, PAGE, SIMULATED, Memory, assert_no_threads, patch_map
from waking import assert_all_asleep, check_bytes, fill

from cumem_sleep import CuMemAllocator, InvalidArgument, OutOfDeviceMemory, _core, sim

MakeAllocator = Callable[..., CuMemAllocator]
IN_TIME_S = 60.0
SIZE = PAGE if SIMULATED else 8 * PAGE  # a GPU's driver takes a page or two itself, and other threads' waits do


@pytest.fixture(autouse=True)
def spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process may still need is one page."""
    monkeypatch.setattr(CuMemAllocator.tuning, "spared_bytes", SIZE)


class Watched:
    """Which segments were mapped, what was free on the device after each, and when the first one was.

    Attributes:
        first: set when one is mapped.
        enough: set when `count` are.
    """

    def __init__(self, patch: pytest.MonkeyPatch, count: int = 1) -> None:
        self.tags: list[str] = []
        self.free_bytes: list[int] = []
        self.enough = threading.Event()
        map_segment = _core.Segment.map

        def noted(segment: _core.Segment) -> None:
            map_segment(segment)
            self.tags.append(segment.tag)
            self.free_bytes.append(_core.memory_info(segment.device)[0])
            if len(self.tags) >= count:
                self.enough.set()

        patch.setattr(_core.Segment, "map", noted)
        patch_map(patch, noted)


@contextmanager
def freed_meanwhile(allocator: CuMemAllocator, addresses: list[int], begin: threading.Event) -> Iterator[None]:
    """Another thread frees these, as another process would, when `begin` is set."""

    def free() -> None:
        if begin.wait(IN_TIME_S):
            for address in addresses:
                allocator.free(address)

    thread = threading.Thread(target=free)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def assert_weights_asleep() -> None:
    """And no thread at work on them."""
    weights = [segment for segment in _core.segments() if segment.tag == "weights"]
    assert weights
    assert all(segment.sleep != AWAKE and not segment.has_memory for segment in weights)
    assert_no_threads()


class TestWake:
    def test_begins_with_what_is_free(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two weights fit beside the page that is spared; on a GPU, one at least. Others free the rest."""
        contents = fill(allocator, memory, [SIZE] * 4)
        fill(allocator, memory, [2 * SIZE], "kv_cache")
        allocator.sleep()
        eaters = take_all_but(3 * SIZE, allocator)
        watched = Watched(monkeypatch, 2 if SIMULATED else 1)
        allocator.expect_memory(IN_TIME_S)
        with freed_meanwhile(allocator, eaters, watched.enough):
            report = allocator.wake_up()
        assert report.restored_bytes == report.verified_bytes == 4 * SIZE
        assert watched.tags == ["weights"] * 4 + ["kv_cache"]
        assert watched.free_bytes[0] >= SIZE
        check_bytes(memory, contents)

    def test_without_bytes_to_restore(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(allocator, memory, [SIZE] * 4)
        fill(allocator, memory, [SIZE] * 2, "kv_cache")
        allocator.sleep(level=2)
        eaters = take_all_but(3 * SIZE, allocator)
        watched = Watched(monkeypatch)
        allocator.expect_memory(IN_TIME_S)
        with freed_meanwhile(allocator, eaters, watched.enough):
            assert allocator.wake_up().mapped_bytes == 6 * SIZE
        assert len(watched.tags) == 6

    @pytest.mark.usefixtures("small_batches")
    def test_goes_on_as_always_when_all_is_free(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Threads map ahead from then on, the cache too, if half of the weights are there by then."""
        contents = fill(allocator, memory, [SIZE] * 4)
        fill(allocator, memory, [SIZE] * 2, "kv_cache")
        allocator.sleep()
        eaters = take_all_but(4 * SIZE, allocator)
        watched = Watched(monkeypatch, 3 if SIMULATED else 1)
        started: list[int] = []
        start = _core.Ahead.start

        def noted(ahead: _core.Ahead) -> None:
            started.append(len(watched.tags))
            start(ahead)

        monkeypatch.setattr(_core.Ahead, "start", noted)
        allocator.expect_memory(IN_TIME_S)
        with freed_meanwhile(allocator, eaters, watched.enough):
            allocator.wake_up()
        assert len(started) == 3  # of what fits at once, of the other weights, of the cache
        assert started[0] == 0
        check_bytes(memory, contents)

    @pytest.mark.sim
    def test_of_compressed_backups_begins_when_all_is_free(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Decoding needs memory besides, and must not take that of a segment."""
        allocator = make_allocator(compress="auto")
        address = allocator.malloc(4 * SIZE, "weights")
        memory.write(address, bytes([0x80, 0x3F]) * (2 * SIZE))
        before = memory.read(address, 4 * SIZE)
        memory.close()
        report = allocator.sleep()
        assert report.stored_bytes < report.copied_bytes
        eaters = take_all_but(3 * SIZE, allocator)
        watched, begin = Watched(monkeypatch), threading.Event()
        allocator.expect_memory(IN_TIME_S)
        threading.Timer(0.05, begin.set).start()
        with freed_meanwhile(allocator, eaters, begin):
            allocator.wake_up()
        assert watched.free_bytes[0] >= 3 * SIZE
        assert memory.read(address, 4 * SIZE) == before


class TestRefusal:
    def test_if_it_does_not_come_in_time(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """What was taken goes back, and the next wake is refused at once, as without this."""
        contents = fill(allocator, memory, [SIZE] * 4)
        allocator.sleep()
        eaters = take_all_but(3 * SIZE, allocator)
        free_bytes, _ = _core.memory_info(0)
        allocator.expect_memory(0.05)
        with pytest.raises(OutOfDeviceMemory) as raised:
            allocator.wake_up()
        assert raised.value.needed_bytes < 4 * SIZE  # beside what it had by then
        assert "sleeping segments" in str(raised.value)
        assert_weights_asleep()
        assert _core.memory_info(0)[0] == free_bytes
        with pytest.raises(OutOfDeviceMemory) as raised:
            allocator.wake_up()
        assert raised.value.needed_bytes == 4 * SIZE
        for address in eaters:
            allocator.free(address)
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_at_once_of_what_the_device_does_not_have(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, [SIZE])
        _, total_bytes = _core.memory_info(0)
        parts = 3
        for _ in range(parts):
            allocator.malloc(total_bytes * 2 // 5 // PAGE * PAGE, "kv_cache")
            allocator.sleep()
        allocator.expect_memory(1e6)
        with pytest.raises(OutOfDeviceMemory) as raised:
            allocator.wake_up()
        assert raised.value.needed_bytes > total_bytes
        assert_all_asleep()

    @pytest.mark.sim
    def test_by_the_driver_undoes_all(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """It says that memory is free, and then does not give it: somebody else was faster."""
        contents = fill(allocator, memory, [SIZE] * 4)
        allocator.sleep()
        eaters = take_all_but(4 * SIZE, allocator)
        sim.fail("cuMemCreate", after=1)
        allocator.expect_memory(IN_TIME_S)
        with pytest.raises(OutOfDeviceMemory):
            allocator.wake_up()
        assert_weights_asleep()
        for address in eaters:
            allocator.free(address)
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_an_interrupt_ends_the_waiting(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, memory, [SIZE] * 4)
        allocator.sleep()
        eaters = take_all_but(3 * SIZE, allocator)
        watched = Watched(monkeypatch)

        def interrupt() -> None:
            if watched.enough.wait(IN_TIME_S):
                os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        allocator.expect_memory(IN_TIME_S)
        with pytest.raises(KeyboardInterrupt):
            allocator.wake_up()
        thread.join()
        assert_weights_asleep()
        for address in eaters:
            allocator.free(address)
        allocator.wake_up()
        check_bytes(memory, contents)


class TestArgument:
    @pytest.mark.parametrize("seconds", [-1, -0.001, float("inf"), float("nan"), True, "1", None])
    def test_nonsense_is_refused(self, allocator: CuMemAllocator, seconds: object) -> None:
        with pytest.raises(InvalidArgument, match="within_s="):
            allocator.expect_memory(seconds)  # type: ignore[arg-type]

    def test_is_counted_from_the_call(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """An expectation that was forgotten does not let a later wake wait."""
        fill(allocator, memory, [SIZE] * 4)
        allocator.sleep()
        take_all_but(3 * SIZE, allocator)
        allocator.expect_memory(0.02)
        time.sleep(0.03)
        with pytest.raises(OutOfDeviceMemory) as raised:
            allocator.wake_up()
        assert raised.value.needed_bytes == 4 * SIZE

    def test_nothing_expects_no_memory(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """The last call counts."""
        fill(allocator, memory, [SIZE] * 4)
        allocator.sleep()
        take_all_but(3 * SIZE, allocator)
        allocator.expect_memory(IN_TIME_S)
        allocator.expect_memory(0)
        with pytest.raises(OutOfDeviceMemory) as raised:
            allocator.wake_up()
        assert raised.value.needed_bytes == 4 * SIZE
