"""Wherever a signal's handler raises, the state stays whole."""

from __future__ import annotations

import contextlib
import dis
import gc
import linecache
import sys
import types
from collections.abc import Callable

import pytest
from interrupts import (
    MALLOC,
    PREPARE,
    SLEEP,
    WAKE,
    Position,
    Signals,
    assert_reached,
    check_interrupts,
    choose,
    is_traced,
    name_of_code,
    raises_exactly,
)
from support import PAGE, assert_clean_exit, assert_no_threads, free_everything, in_thread, run_script, threads_refused
from world import Phase, World, phases

pytestmark = pytest.mark.sim

INTERRUPTED = {"first sleep": SLEEP, "sleep of changed": SLEEP, "wake of all": WAKE}


@pytest.mark.slow
@pytest.mark.parametrize("phase", phases(*INTERRUPTED), ids=str)
def test_interrupt_anywhere(world: World, phase: Phase) -> None:
    check_interrupts(world, phase, INTERRUPTED[phase.name])


@pytest.mark.slow
@pytest.mark.parametrize("phase", phases(*INTERRUPTED), ids=str)
def test_interrupt_anywhere_where_no_thread_can_be_had(world: World, phase: Phase) -> None:
    with threads_refused():
        check_interrupts(world, phase, INTERRUPTED[phase.name])


@pytest.mark.slow
def test_interrupt_of_prepare(world: World) -> None:
    """What it began can be ended, wherever the signals came."""
    free_everything()
    world.__init__(prepare_bytes_per_second=1)  # type: ignore[misc]  # else it would end by itself
    allocator = world.allocator
    assert allocator._store.room.tier.bytes == 0  # the tier is opened once, which is not to shift the places
    with Signals() as clean:
        allocator.prepare()
    assert_reached(clean.positions, PREPARE)
    chosen = choose(clean.positions)
    problems = []
    for index in chosen:
        allocator.release_backups()
        allocator._preparation = None  # as at first, so that the places are the same
        signals = Signals(index)
        with signals:
            raises_exactly(signals.expected, allocator.prepare)
        assert signals.sent, "the place was not reached"
        file, line, event = clean.positions[index]
        in_thread(allocator.usage)
        allocator.release_backups()
        try:
            assert_no_threads()
            assert allocator._store.room.bytes == 0
        except AssertionError:
            problems.append(f"{event} at line {line} of {file}: it goes on")
    world.check_bytes()
    assert len(chosen) > 50
    assert not problems, f"{len(problems)} of {len(chosen)}:\n" + "\n".join(problems[:20])


class Interrupter:
    """Raises KeyboardInterrupt at one of the places of a call on this thread at which a signal may be handled.

    These are every line of this package's code and, above all, every return from a C function: that is where CPython
    looks for signals. Left out are lines of no instruction (`try:`) and a `with` line as the block is left: there it
    does not look, and no code could protect itself.
    """

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.positions: list[Position] = []
        self.raised = False
        self._interrupt_at = interrupt_at
        self._with_lines: set[tuple[int, int]] = set()

    def __enter__(self) -> Interrupter:
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _trace(self, frame: types.FrameType, event: str, _: object) -> Callable[..., object] | None:
        if not is_traced(frame):
            return None
        if event == "line" and "contextlib" not in frame.f_code.co_filename:
            is_nop = frame.f_code.co_code[frame.f_lasti] == dis.opmap["NOP"]
            if not is_nop and not self._leaves_with(frame):
                self._reach(frame, event)
        return self._trace

    def _profile(self, frame: types.FrameType, event: str, _: object) -> None:
        if event == "c_return" and is_traced(frame):
            self._reach(frame, event)

    def _leaves_with(self, frame: types.FrameType) -> bool:
        if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            return False
        visit = (id(frame), frame.f_lineno)
        seen = visit in self._with_lines
        self._with_lines.add(visit)
        return seen

    def _reach(self, frame: types.FrameType, event: str) -> None:
        if self.raised:
            return
        if self._interrupt_at == len(self.positions):
            self.raised = True
            raise KeyboardInterrupt
        self.positions.append((name_of_code(frame.f_code), frame.f_lineno, event))


@pytest.mark.slow
def test_interrupt_of_malloc(world: World) -> None:
    """Whoever did not get the address cannot free it, so nothing may be left there."""
    world.allocator.malloc(PAGE, "weights")
    with Interrupter() as clean:
        address = world.allocator.malloc(PAGE, "weights")
    world.allocator.free(address)
    assert_reached(clean.positions, MALLOC)
    before, held = world.state(), world.held()
    for index in choose(clean.positions):
        with contextlib.suppress(KeyboardInterrupt), Interrupter(index):
            world.allocator.malloc(PAGE, "weights")
        if world.state() != before:
            gc.collect()  # exceptions may hold frames
        assert world.state() == before, clean.positions[index]
        assert world.held() == held, clean.positions[index]


@pytest.mark.slow
def test_interrupt_of_malloc_by_a_signal() -> None:
    """Handlers that raise, at ever later moments: no address is lost on its way through this package."""
    process = run_script(
        """
        import signal, sys

        reset_simulation()
        allocator = fresh_allocator()
        allocator.malloc(PAGE, "warm")

        class Timeout(Exception):
            pass

        def handle(number, frame):
            # Not between the return of `malloc` and the assignment: from there on the address is the caller's.
            if armed and frame.f_code is not here:
                raise Timeout

        signal.signal(signal.SIGALRM, handle)
        hits, armed, here = 0, False, sys._getframe().f_code
        for turn in range(600):
            address = 0
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 2e-4 + turn % 300 * 4e-6)
                address = allocator.malloc(PAGE, "weights")
            except Timeout:
                hits += 1
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            if address:
                allocator.free(address)
            assert len(_core.segments()) == 1, (turn, address)
        assert hits > 20, hits
        free_everything()
        """
    )
    assert_clean_exit(process)


@pytest.mark.slow
def test_interrupt_by_a_signal() -> None:
    """SIGINT at ever later moments of a sleep and of a wake, in a process of its own."""
    process = run_script(
        """
        import signal
        import time

        reset_simulation()
        allocator, memory = fresh_allocator(), Memory()
        contents = {}
        for tag in ("weights", "default", "lora", "weights"):
            address = allocator.malloc(2 * PAGE, tag)
            contents[address] = memory.fill_random(address, 2 * PAGE)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))

        def interrupted(operation, delay_s):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, delay_s)
                    operation()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                return True
            return False

        def check():
            states = {segment.sleep != AWAKE for segment in _core.segments()}
            assert len(states) == 1, states
            assert all(segment.has_memory is (segment.sleep == AWAKE) for segment in _core.segments())

        hits = 0
        for operation in (allocator.sleep, allocator.wake_up):
            for turn in range(40):
                if operation == allocator.wake_up:
                    allocator.sleep()
                elif turn % 2:
                    allocator.release_backups()
                start = time.perf_counter()
                hits += interrupted(operation, 1e-4 + turn * 6e-4)
                check()
                allocator.wake_up()
                for address, content in contents.items():
                    assert memory.read(address, 2 * PAGE) == content, (operation, turn)
        assert hits > 10, hits
        memory.close()
        free_everything()
        """
    )
    assert_clean_exit(process)
