"""Signals at every place of an operation, and what holds after them."""

from __future__ import annotations

import contextlib
import gc
import inspect
import pathlib
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
from support import AWAKE, HANGS_S, assert_no_threads, in_thread
from world import Phase, World, begin_anew

from cumem_sleep import _core, report
from cumem_sleep import allocator as allocator_module
from cumem_sleep.backups import backup, catalogue, filling, host, kept, room, turns
from cumem_sleep.codec import chunks, compressor, kernels, memory, plan, slots, workspace
from cumem_sleep.core import cuda_state, operation, pinned
from cumem_sleep.digest import device as digest_device
from cumem_sleep.operations import layer, prepare, sleep, wake
from cumem_sleep.transfer import copiers, engine_or_kernel, link, transfer

_PACKAGE = pathlib.Path(allocator_module.__file__).parent
# Which modules an operation runs. Each has to be reached: a rename would otherwise leave its test without places there.
_OPERATION = (operation, backup, host, catalogue, room, turns, digest_device, workspace, pinned, report)
SLEEP = (*_OPERATION, compressor, filling, layer, link, sleep, transfer)
WAKE = (*_OPERATION, wake, copiers, link, engine_or_kernel, transfer)
PREPARE = (allocator_module, operation, prepare, host, catalogue, room, turns, compressor)
MALLOC = (allocator_module, operation, cuda_state)
CODEC = (compressor, chunks, kernels, memory, plan, slots, workspace)
_TRACED_FILES = {str(module.__file__) for module in (*SLEEP, *WAKE, *PREPARE, *MALLOC, *CODEC, kept)}
Place = types.ModuleType | Callable[..., object]
Position = tuple[str, int, str]  # file and function, line, event
# What the handlers raise, one after the other, at one place; and what the caller is to get.
STORMS: list[tuple[type[BaseException], list[type[BaseException]]]] = [
    (KeyboardInterrupt, [KeyboardInterrupt]),
    (TimeoutError, [TimeoutError]),
    (SystemExit, [SystemExit, TimeoutError, KeyboardInterrupt, SystemExit, TimeoutError]),
    (KeyboardInterrupt, [TimeoutError, TimeoutError, KeyboardInterrupt, SystemExit, KeyboardInterrupt]),
]


class Signals:
    """Counts the places of an operation, and sends its caller signals at one of them, whose handlers raise.

    Places are every line of this package's code, and every return from a C function, on the operation's own thread.
    """

    def __init__(self, at: int | None = None) -> None:
        self.positions: list[Position] = []  # of one that only counts
        self._reached = 0
        self.expected, self._errors = STORMS[(at or 0) % len(STORMS)]
        self.sent = False
        self._at = at
        self._handled = 0
        self._patch = pytest.MonkeyPatch()
        self._main = threading.get_ident()

    def __enter__(self) -> Signals:
        run = _core.OperationLock.run

        def traced_run(lock: _core.OperationLock, work: Callable[[], object]) -> object:
            return run(lock, partial(self._traced, work))

        self._patch.setattr(_core.OperationLock, "run", traced_run)
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        gc.disable()  # what a handler raises inside a finaliser is lost, and Python says so
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()
        self._patch.undo()
        signal.signal(signal.SIGUSR1, self._before)

    def _traced(self, work: Callable[[], object]) -> object:
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            return work()
        finally:
            _stop_tracing()

    def _handle(self, *_: object) -> None:
        self._handled += 1
        raise self._errors[self._handled - 1]

    def _wait_for_handler(self, number: int) -> None:
        """Until it has raised: a handler that the next signal interrupts never would."""
        deadline = time.monotonic() + HANGS_S
        while self._handled <= number or sys._current_frames()[self._main].f_code is Signals._handle.__code__:
            assert time.monotonic() < deadline, "the caller does not let signals be handled"
            time.sleep(0.0002)

    def _trace(self, frame: types.FrameType, event: str, _: object) -> Callable[..., object] | None:
        if not is_traced(frame):
            return None
        if event == "line":
            self._reach(frame, event)
        return self._trace

    def _profile(self, frame: types.FrameType, event: str, _: object) -> None:
        if event == "c_return" and is_traced(frame):
            self._reach(frame, event)

    def _reach(self, frame: types.FrameType, event: str) -> None:
        if self.sent:
            return
        if self._at == self._reached:
            self.sent = True
            for number in range(len(self._errors)):
                signal.pthread_kill(self._main, signal.SIGUSR1)
                self._wait_for_handler(number)
            _stop_tracing()
            return
        self._reached += 1
        if self._at is None:
            self.positions.append((name_of_code(frame.f_code), frame.f_lineno, event))


def _stop_tracing() -> None:
    sys.settrace(None)
    sys.setprofile(None)


class Interrupts:
    """Raises KeyboardInterrupt in the thread that made this, by a signal's handler, whenever a test sends one."""

    def __init__(self) -> None:
        self.handled = 0
        self._main = threading.get_ident()

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGUSR1, self._before)

    def _handle(self, *_: object) -> None:
        self.handled += 1
        raise KeyboardInterrupt

    def send(self) -> None:
        """Return once it is handled and, on an operation's own thread, once that is asked to stop."""
        before, ends_at = self.handled, time.monotonic() + HANGS_S
        signal.pthread_kill(self._main, signal.SIGUSR1)
        with contextlib.suppress(_core.OperationStopped):
            while self.handled == before or _core.thread_name() == "cumem-operation":
                assert time.monotonic() < ends_at, "nobody handles it"
                if self.handled > before:
                    _core.stop_if_asked()
                time.sleep(0.0005)


def is_traced(frame: types.FrameType) -> bool:
    """Code of this package, and of contextlib where this package calls it."""
    file = frame.f_code.co_filename
    if file.endswith("contextlib.py") and frame.f_back is not None:
        file = frame.f_back.f_code.co_filename
    return file in _TRACED_FILES


def name_of_code(code: types.CodeType) -> str:
    """As `operations/sleep.py:sleep`."""
    return f"{code.co_filename.removeprefix(f'{_PACKAGE}/')}:{code.co_name}"


def name_of(place: Place) -> str:
    """What the names of its code begin with: a module's, or a function's."""
    if isinstance(place, types.ModuleType):
        return f"{place.__file__}:".removeprefix(f"{_PACKAGE}/")
    return name_of_code(inspect.unwrap(place).__code__)  # type: ignore[attr-defined]


def choose(positions: list[Position]) -> list[int]:
    """The first time that each place is reached, and the last return from each C function: loops make the rest.

    Of these every other one: neighbours are a line or a call apart, and all of them take ten minutes.
    """
    first = {position: index for index, position in reversed(list(enumerate(positions)))}
    last = {position: index for index, position in enumerate(positions) if position[2] == "c_return"}
    return sorted({*first.values(), *last.values()})[::2]


def assert_reached(positions: list[Position], places: Iterable[Place]) -> None:
    missed = [name for name in map(name_of, places) if not any(at.startswith(name) for at, *_ in positions)]
    assert not missed, f"not reached: {', '.join(name.rstrip(':') for name in missed)}"


def check_interrupts(world: World, phase: Phase, reached: Sequence[Place], *, only_there: bool = False) -> None:
    """At every place of the operation.

    Args:
        reached: modules and functions, each of which the operation has to reach.
        only_there: at no other place.
    """
    phase.prepare(world)
    phase.operate(world)  # what is done only once is not to shift the places
    phase.prepare(world)
    world.forget_devices()
    unaccounted_bytes = world.unaccounted_bytes()
    with Signals() as clean:
        phase.operate(world)
    problems = []
    assert_reached(clean.positions, reached)
    names = tuple(map(name_of, reached)) if only_there else ""
    chosen = [index for index in choose(clean.positions) if clean.positions[index][0].startswith(names)]
    for index in chosen:
        try:
            phase.prepare(world)
            world.forget_devices()
            _check_signals(world, phase, index)
            assert world.unaccounted_bytes() == unaccounted_bytes, "registered host memory is left"
        except Exception as error:
            file, line, event = clean.positions[index]
            problems.append(f"{event} at line {line} of {file}: {type(error).__name__}: {error}")
            begin_anew(world)
            unaccounted_bytes = world.unaccounted_bytes()
    assert len(chosen) > 100
    assert not problems, f"{len(problems)} of {len(chosen)}:\n" + "\n".join(problems[:20])


def _check_signals(world: World, phase: Phase, index: int) -> None:
    signals = Signals(index)
    with signals:
        raises_exactly(signals.expected, lambda: phase.operate(world))
    assert signals.sent, "the place was not reached"
    sleeps = {segment.sleep != AWAKE for segment in world.segments}
    assert len(sleeps) == 1, "some sleep and some do not"
    assert all(segment.has_memory is (segment.sleep == AWAKE) for segment in world.segments)
    world.check_bytes()
    assert_no_threads()
    in_thread(world.allocator.usage)  # the lock is free again
    assert world.allocator._compressor.on == (world.allocator.settings.compress == "auto"), "taken for a failure"
    world.wake()
    assert {segment.sleep for segment in world.segments} == {AWAKE}


def raises_exactly(error_type: type[BaseException], work: Callable[[], object]) -> None:
    raised: list[BaseException] = []
    try:
        work()
    except BaseException as error:
        raised.append(error)
    assert [type(error) for error in raised] == [error_type]
