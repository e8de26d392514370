"""What a call costs grows no faster than what it is asked to do: lines of Python run and driver calls made, counted."""

from __future__ import annotations

import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from support import (
    AWAKE,
    DROPPED,
    PAGE,
    ample_host_memory,
    free_everything,
    fresh_allocator,
    hooks,
    quick_sums,
    reset_simulation,
)

import cumem_sleep
from cumem_sleep import CuMemAllocator, _core, sim
from cumem_sleep.backups.pruning import PruningLock

pytestmark = pytest.mark.sim

PACKAGE = str(pathlib.Path(cumem_sleep.__path__[0])) + os.sep
FEW, MANY = 16, 128
TOUCHED = 8  # segments that the calls about single ones are about


@dataclass
class Work:
    """What was done inside the context: by this thread, by those of operations, and by the driver."""

    lines: int = 0
    driver_calls: int = 0
    _patch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch, compare=False, repr=False)

    def __enter__(self) -> Work:
        run, forget = _core.OperationLock.run, PruningLock.after_a_free
        self._patch.setattr(_core.OperationLock, "run", lambda lock, work: run(lock, partial(self._traced, work)))
        # After a free by a hook the extension calls it on a thread of its own.
        self._patch.setattr(PruningLock, "after_a_free", lambda turns: self._traced(forget, turns))
        self.driver_calls = -sum(sim.stats().calls.values())
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self.driver_calls += sum(sim.stats().calls.values())
        self._patch.undo()

    def _traced(self, work: Callable[..., Any], *arguments: object) -> Any:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return work(*arguments)
        finally:
            sys.settrace(before)

    def _trace(self, frame: types.FrameType, event: str, _: object) -> Callable[..., object] | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        self.lines += event == "line"
        return self._trace


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("cumem_sleep.digest.digester.sums_of", quick_sums)
    ample_host_memory(monkeypatch)
    reset_simulation()
    yield
    free_everything()


def work_with(count: int, operate: Callable[[CuMemAllocator], object]) -> Work:
    """Of `operate`, with so many segments awake that have backups."""
    free_everything()
    reset_simulation()
    allocator = fresh_allocator()
    sim.configure(device_bytes=2 * (count + TOUCHED) * PAGE)
    for _ in range(count):
        allocator.malloc(PAGE)
    allocator.sleep()
    allocator.wake_up()
    with Work() as work:
        operate(allocator)
    return work


def free_by_hook(_: CuMemAllocator) -> None:
    library = hooks()
    for segment in _core.segments()[:TOUCHED]:
        library.cumem_sleep_free(segment.address, PAGE, 0, None)
        for _ in range(10):  # the free is told to this thread, between two instructions
            pass


def free(allocator: CuMemAllocator) -> None:
    for segment in _core.segments()[:TOUCHED]:
        allocator.free(segment.address)


def malloc(allocator: CuMemAllocator) -> None:
    for _ in range(TOUCHED):
        allocator.malloc(PAGE)


@pytest.mark.slow
@pytest.mark.parametrize("operate", [free_by_hook, free, malloc])
def test_calls_about_single_segments_do_not_look_at_the_others(operate: Callable[[CuMemAllocator], object]) -> None:
    few, many = work_with(FEW, operate), work_with(MANY, operate)
    assert many == few
    allocator = CuMemAllocator.instance
    assert allocator is not None
    kept = MANY if operate is malloc else MANY - TOUCHED
    assert allocator._store.memory.bytes == kept * PAGE


@pytest.mark.slow
@pytest.mark.parametrize("others", [AWAKE, DROPPED], ids=["awake", "asleep"])
def test_calls_about_a_small_region_do_not_look_at_the_others(others: _core.Segment.Sleep) -> None:
    """Unless these have backups, each of which is looked at when an operation ends."""

    def work_beside(count: int) -> Work:
        free_everything()
        reset_simulation()
        regions = fresh_allocator().regions
        sim.configure(device_bytes=2 * count * PAGE)
        for tag, segments in (("others", count), ("small", 1)):
            with regions.use(tag):
                for _ in range(segments):
                    CuMemAllocator.get_instance().malloc(PAGE)
        regions.sleep()
        regions.wake("small" if others == DROPPED else None)
        with Work() as work:
            regions.sleep("small")
            regions.wake("small")
            assert regions.has("small")
        return work

    assert work_beside(MANY) == work_beside(FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    "operate",
    [
        lambda allocator: allocator.usage(),
        lambda allocator: allocator.sleep(),
        lambda allocator: allocator.sleep(2),
        lambda allocator: (allocator.sleep(), allocator.wake_up()),
        lambda allocator: allocator.release_backups(),
        lambda allocator: (allocator.release_backups(), allocator.sleep()),
    ],
    ids=["usage", "sleep of clean", "sleep at level 2", "wake", "release backups", "first sleep"],
)
def test_calls_about_all_segments_look_at_each_a_few_times(operate: Callable[[CuMemAllocator], object]) -> None:
    few, many = work_with(FEW, operate), work_with(MANY, operate)
    growth = MANY // FEW
    assert few.lines > FEW  # the operation's thread is watched
    assert many.lines <= growth * few.lines
    assert many.driver_calls <= growth * few.driver_calls
