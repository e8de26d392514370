"""The allocation that a thread makes after a sleep, in the place of the next wake."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from support import PAGE

from cumem_sleep import CuMemAllocator, _core, sim

pytestmark = pytest.mark.usefixtures("quick")


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
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_least_bytes", PAGE)
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_after_s", 0.01)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()
    monkeypatch.setattr(_core, "Scratch", made)
    return made


def wait_for_thread(allocator: CuMemAllocator) -> None:
    worker = allocator._entry.first_allocation._worker
    assert worker is not None
    assert worker.wait(30)


def test_after_a_sleep_there_is_one_and_nothing_of_it_stays(allocator: CuMemAllocator, made: Made) -> None:
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    before = _core.memory_info(0)
    wait_for_thread(allocator)
    assert made.devices == [0]
    assert _core.memory_info(0) == before
    allocator.wake_up()


@pytest.mark.sim
def test_on_every_device_with_sleeping_memory(allocator: CuMemAllocator, made: Made) -> None:
    sim.configure(devices=3)
    for device in (0, 2):
        allocator.malloc(PAGE, "weights", device=device)
    allocator.sleep()
    wait_for_thread(allocator)
    assert made.devices == [0, 2]


def test_a_small_sleep_needs_none(allocator: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_least_bytes", PAGE + 1)
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    assert allocator._entry.first_allocation._worker is None
    assert made.devices == []


@pytest.mark.sim
def test_none_where_others_have_taken_the_memory(allocator: CuMemAllocator, made: Made) -> None:
    """They have made that allocation, and may need the last page."""
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    free, _ = _core.memory_info(0)
    taken = _core.Scratch(0, free)
    made.devices.clear()
    wait_for_thread(allocator)
    taken.close()
    assert made.devices == []


def test_a_wake_before_it_makes_it_needless(
    allocator: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_after_s", 30.0)
    allocator.malloc(PAGE, "weights")
    for _ in range(2):
        allocator.sleep()
        worker = allocator._entry.first_allocation._worker
        assert worker is not None
        allocator.wake_up()
        assert worker.wait(20), "it still waits to allocate"
    assert made.devices == []


def test_the_next_sleep_begins_to_count_anew(
    allocator: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_after_s", 30.0)
    allocator.malloc(PAGE, "weights")
    allocator.malloc(PAGE, "kv_cache")
    allocator.discard("kv_cache")
    first = allocator._entry.first_allocation._worker
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_after_s", 0.01)
    allocator.sleep()
    assert first is not None
    assert first.wait(20)
    wait_for_thread(allocator)
    assert made.devices == [0]


def test_a_wake_waits_for_one_that_has_begun(allocator: CuMemAllocator, made: Made) -> None:
    """It finds all memory free, however little there is."""
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go.wait(30)

    made.about_to = wait
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    assert begun.wait(30)
    woken = threading.Thread(target=allocator.wake_up)
    woken.start()
    woken.join(0.1)
    assert woken.is_alive()
    assert allocator._entry.first_allocation._worker is None
    go.set()
    woken.join(30)
    assert made.devices == [0]
    assert not any(segment.sleep != _core.Segment.Sleep.AWAKE for segment in _core.segments())


def test_none_while_an_operation_has_the_lock(
    allocator: CuMemAllocator, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_after_s", 0.1)
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    with allocator._lock.hold():
        wait_for_thread(allocator)
    assert made.devices == []


@pytest.mark.sim
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemAddressReserve", "cuMemGetInfo_v2"])
def test_what_the_driver_refuses_is_left_to_the_wake(
    allocator: CuMemAllocator, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    sim.fail(call, times=2)
    with caplog.at_level(logging.INFO, "cumem_sleep"):
        wait_for_thread(allocator)
    assert "the next wake makes the first allocation on device 0 itself: " in caplog.text
    sim.reset()
    allocator.wake_up()


def test_the_thread_ends_with_the_process(allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "first_allocation_after_s", 30.0)
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    worker = allocator._entry.first_allocation._worker
    assert worker is not None
    assert worker.running
    allocator._stop_background_work()
    assert not worker.running
    allocator.wake_up()
