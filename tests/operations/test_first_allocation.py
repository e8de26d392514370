"""The allocation that a thread makes after a sleep, in the place of the next wake."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from support import AWAKE, PAGE, assert_thread_ends_in_order, threads_refused

from cumem_sleep import CuMemAllocator, OutOfDeviceMemory, _core, sim

pytestmark = pytest.mark.usefixtures("small")

MUCH = 1 << 50  # freed bytes


class Made:
    """The devices on which a thread of this layer has allocated so far."""

    def __init__(self) -> None:
        self.devices: list[int] = []
        self.about_to: Callable[[], None] = lambda: None
        self._scratch = _core.Scratch

    def __call__(self, device: int, nbytes: int) -> _core.Scratch:
        if _core.thread_name() == "cumem-allocate":
            self.about_to()
            self.devices.append(device)
        return self._scratch(device, nbytes)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is worth it; and no thread goes ahead while a test prepares what it finds."""
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_least_bytes", PAGE)
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_after_s", 3600.0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()
    monkeypatch.setattr(_core, "Scratch", made)
    return made


def worker_of(allocator: CuMemAllocator) -> _core.Worker:
    worker = allocator._first_allocation._worker
    assert worker is not None
    return worker


@pytest.fixture
def asleep(allocator: CuMemAllocator) -> CuMemAllocator:
    """With one page."""
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    return allocator


def begin(allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> _core.Worker:
    """The time has come, as after a sleep; from here on it comes at once."""
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_after_s", 0.0)
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_retry_s", 0.001)
    allocator._first_allocation.after(MUCH)
    return worker_of(allocator)


def make(allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin(allocator, monkeypatch).wait(30)


def test_after_a_sleep_there_is_one_and_nothing_of_it_stays(
    allocator: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_after_s", 0.01)
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    assert worker_of(allocator).wait(30)
    assert made.devices == [0]
    before = _core.memory_info(0)
    make(allocator, monkeypatch)
    assert made.devices == [0, 0]
    assert _core.memory_info(0) == before
    allocator.wake_up()


@pytest.mark.sim
def test_on_every_device_with_memory(allocator: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    sim.configure(devices=3)
    for device in (0, 2):
        allocator.malloc(PAGE, "weights", device=device)
    allocator.sleep()
    make(allocator, monkeypatch)
    assert made.devices == [0, 2]


def test_a_small_sleep_needs_none(allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_least_bytes", PAGE + 1)
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    assert allocator._first_allocation._worker is None


@pytest.mark.sim
def test_none_where_others_have_taken_the_memory(
    asleep: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have made that allocation, and may need the last page."""
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_least_bytes", 2 * PAGE)
    free, _ = _core.memory_info(0)
    taken = _core.Scratch(0, free - PAGE)
    make(asleep, monkeypatch)
    taken.close()
    assert made.devices == []


@pytest.mark.parametrize("awake", ["some", "all"])
def test_none_beside_memory_that_is_awake(
    allocator: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch, awake: str
) -> None:
    """Something may run there, and would wait."""
    allocator.malloc(PAGE, "weights")
    allocator.malloc(PAGE, "kv_cache")
    if awake == "some":
        allocator.discard("kv_cache")
    make(allocator, monkeypatch)
    assert made.devices == []


@pytest.mark.sim
def test_there_is_one_after_a_wake_that_was_refused(
    asleep: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(asleep)
    free, _ = _core.memory_info(0)
    taken = _core.Scratch(0, free)
    with pytest.raises(OutOfDeviceMemory):
        asleep.wake_up()
    taken.close()
    assert worker_of(asleep) is worker
    assert worker.running
    make(asleep, monkeypatch)
    assert made.devices == [0]


def test_the_next_sleep_begins_to_count_anew(allocator: CuMemAllocator) -> None:
    allocator.malloc(PAGE, "weights")
    allocator.malloc(PAGE, "kv_cache")
    allocator.discard("kv_cache")
    first = worker_of(allocator)
    allocator.sleep()
    assert first.wait(20)
    assert worker_of(allocator) is not first
    assert worker_of(allocator).running


def test_a_wake_waits_for_one_that_has_begun(
    asleep: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds all memory free, however little there is."""
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go.wait(30)

    made.about_to = wait
    begin(asleep, monkeypatch)
    assert begun.wait(30)
    woken = threading.Thread(target=asleep.wake_up)
    woken.start()
    woken.join(0.1)
    assert woken.is_alive()
    go.set()
    woken.join(30)
    assert made.devices == [0]
    assert all(segment.sleep == AWAKE for segment in _core.segments())


def test_it_comes_when_the_lock_is_free(asleep: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gives host memory back has it for longer than that, block by block."""
    with asleep._lock.hold():
        worker = begin(asleep, monkeypatch)
        assert not worker.wait(0.05)
        assert made.devices == []
    assert worker.wait(30)
    assert made.devices == [0]


@pytest.mark.sim
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemAddressReserve", "cuMemGetInfo_v2"])
def test_what_the_driver_refuses_is_left_to_the_wake(
    asleep: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    sim.fail(call, times=2)
    with caplog.at_level(logging.INFO, "cumem_sleep"):
        make(asleep, monkeypatch)
    assert "the next wake makes the first allocation on device 0 itself: " in caplog.text
    sim.reset()
    asleep.wake_up()


@pytest.mark.slow
def test_the_thread_ends_with_the_process() -> None:
    assert_thread_ends_in_order(
        """
        CuMemAllocator.tuning.first_allocation_least_bytes = PAGE
        CuMemAllocator.tuning.first_allocation_after_s = 3600.0
        allocator = fresh_allocator()
        allocator.malloc(PAGE, "weights")
        allocator.sleep()
        """,
        thread="allocator._first_allocation._worker",
    )


def test_a_sleep_is_over_without_it_where_no_thread_can_be_started(
    allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    allocator.malloc(PAGE, "weights")
    with threads_refused(after=1), caplog.at_level(logging.INFO, "cumem_sleep"):  # the first is the operation's own
        assert allocator.sleep().freed_bytes == PAGE
    assert "the next wake makes the first allocation itself: " in caplog.text
    allocator._first_allocation.stop()
    allocator.wake_up()


def test_nothing_is_allocated_once_it_was_told_to_stop(
    asleep: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asleep._lock.hold():
        worker = begin(asleep, monkeypatch)
        asleep._first_allocation.stop()
        assert not worker.running
    assert made.devices == []
