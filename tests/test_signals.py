"""Signals: their handlers run when an operation has ended, or while it waits for others."""

from __future__ import annotations

import contextvars
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
from support import (
    PAGE,
    Memory,
    assert_clean_exit,
    assert_no_threads,
    hooks,
    in_thread,
    run_script,
    thread_name,
    threads_refused,
)

from cumem_sleep import CuMemAllocator, CumemSleepError, InvalidState, _core, host_facts
from cumem_sleep.operations import prepare

pytestmark = pytest.mark.sim


@pytest.fixture
def handler() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Sets what SIGUSR1 does."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda work: signal.signal(signal.SIGUSR1, lambda *_: work()) and None
    signal.signal(signal.SIGUSR1, before)


def signal_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def signalled(work: Callable[[], object]) -> None:
    """Do it, and have the signal come meanwhile."""
    threading.Timer(0.02, signal_main).start()
    work()


def raising(error: BaseException) -> Callable[[], object]:
    def work(*_: object) -> None:
        raise error

    return work


Handler = Callable[[Callable[[], object]], None]


class TestRun:
    """One call on a thread of its own."""

    def test_returns_and_raises_what_the_work_does(self) -> None:
        lock = _core.OperationLock()
        assert lock.run(thread_name) == "cumem-operation"
        assert lock.run(lambda: lock.run(thread_name)) == "cumem-operation"
        with pytest.raises(KeyError, match="this"):
            lock.run(lambda: {}["this"])
        assert_no_threads()

    def test_has_the_callers_context(self) -> None:
        variable = contextvars.ContextVar("variable", default=0)
        variable.set(7)
        assert _core.OperationLock().run(variable.get) == 7

    def test_where_no_thread_can_be_had(self) -> None:
        with threads_refused():
            assert _core.OperationLock().run(threading.get_ident) == threading.get_ident()
            assert in_thread(lambda: _core.OperationLock().run(thread_name)) == ""

    @pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
    def test_handlers_run_when_it_has_ended(self, handler: Handler, error: type[BaseException]) -> None:
        order: list[str] = []

        def handle() -> None:
            order.append("handled")
            raise error

        def work() -> None:
            signal_main()
            time.sleep(0.2)
            order.append("ended")

        handler(handle)
        with pytest.raises(error):
            _core.OperationLock().run(work)
        assert order == ["ended", "handled"]

    def test_handlers_run_while_it_waits_for_others(self, handler: Handler) -> None:
        handled: list[int] = []

        def wait() -> str:
            signal_main()
            until(lambda: _core.stop_if_asked() or handled)
            return "went on"

        handler(lambda: handled.append(1))
        assert _core.OperationLock().run(wait) == "went on"

    def test_what_a_handler_raises_ends_the_wait(self, handler: Handler) -> None:
        stopped: list[BaseException] = []  # the caller gets the handler's error whatever became of the wait

        def wait() -> None:
            signal_main()
            with pytest.raises(_core.OperationStopped) as raised:
                until(_core.stop_if_asked)
            stopped.append(raised.value)
            raise raised.value

        handler(raising(KeyboardInterrupt("first")))
        with pytest.raises(KeyboardInterrupt, match="first"):
            _core.OperationLock().run(wait)
        assert len(stopped) == 1
        assert not issubclass(_core.OperationStopped, Exception), "code that tries something out would catch it"

    @pytest.mark.parametrize("threads", [nullcontext, threads_refused])
    def test_waiting_for_the_lock_can_be_stopped(
        self, handler: Handler, threads: Callable[[], AbstractContextManager[None]]
    ) -> None:
        lock, go = _core.OperationLock(), threading.Event()
        held = threading.Event()

        def hold() -> None:
            with lock.hold():
                held.set()
                go.wait(30)

        def wait() -> None:
            signal_main()
            with lock.hold():
                raise AssertionError("not held")

        handler(raising(TimeoutError()))
        holder = threading.Thread(target=hold, daemon=True)
        holder.start()
        assert held.wait(30)
        with threads(), pytest.raises(TimeoutError):
            lock.run(wait)
        go.set()
        holder.join(30)

    def test_an_asynchronous_exception_at_the_caller_comes_when_it_has_ended(self) -> None:
        lock, ended = _core.OperationLock(), []

        def call() -> None:
            ident = threading.get_ident()

            def work() -> None:
                count = ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(ident), ctypes.py_object(TimeoutError)
                )
                assert count == 1
                time.sleep(0.02)
                ended.append(True)

            def run() -> None:
                lock.run(work)
                until(lambda: False)

            with pytest.raises(TimeoutError):
                run()

        in_thread(call)
        assert ended == [True]


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline, "it never comes to that"
        time.sleep(0.0005)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["sleep", "wake_up", "prepare"])
def test_a_handler_within_a_call_of_logging(call: str) -> None:
    """Whose lock the caller holds then, and which the operation must not wait for."""
    process = run_script(
        f"""
        import logging, os, signal

        class Handler(logging.StreamHandler):
            def format(self, record):
                if record.getMessage() == "of the program":
                    os.kill(os.getpid(), signal.SIGUSR1)
                return super().format(record)

        logging.basicConfig(level=logging.DEBUG, handlers=[Handler()])
        allocator = fresh_allocator()
        allocator.malloc(PAGE, "weights")
        if {call!r} == "wake_up":
            allocator.sleep()
        returned = []
        signal.signal(signal.SIGUSR1, lambda *_: returned.append(allocator.{call}()))
        logging.info("of the program")
        assert len(returned) == 1
        """
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("of the program") == 1
    if call != "prepare":
        assert f"] {call.removesuffix('_up')}: " in process.stderr


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


def test_an_allocator_that_fails_to_replace_another_leaves_that_in_use(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cumem_sleep.allocator.CopyChoosers", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        CuMemAllocator()
    assert CuMemAllocator.get_instance() is allocator
    allocator.free(allocator.malloc(PAGE))


class TestPreparation:
    @pytest.fixture
    def at_gate(self, monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> threading.Event:
        """Set when the preparing thread waits there."""
        at_gate, copy = threading.Event(), prepare.Preparation._copy

        def gated(*arguments: object) -> bool:
            at_gate.set()
            assert gate.wait(30)
            return copy(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(prepare.Preparation, "_copy", gated)
        return at_gate

    @pytest.fixture
    def gate(self) -> threading.Event:
        """What the preparing thread waits for before it copies anything."""
        return threading.Event()

    def test_tells_the_truth_after_a_wait_that_was_interrupted(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        gate: threading.Event,
        at_gate: threading.Event,
        handler: Handler,
    ) -> None:
        memory.fill_random(allocator.malloc(PAGE, "weights"), PAGE)
        preparation = allocator.prepare()
        assert at_gate.wait(30)
        handler(raising(KeyboardInterrupt()))
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                signalled(lambda: preparation.wait(30))
            assert preparation.running
            assert not preparation.wait(0)
        gate.set()
        assert preparation.wait(30)
        assert not preparation.running
        assert preparation.error is None
        assert allocator.sleep().copied_bytes == 0

    @pytest.mark.parametrize("call", ["stop", "release_backups", "prepare"])
    def test_interrupted_stops_leave_nothing_taken(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        gate: threading.Event,
        at_gate: threading.Event,
        handler: Handler,
        call: str,
    ) -> None:
        memory.fill_random(allocator.malloc(PAGE, "weights"), PAGE)
        preparation = allocator.prepare()
        assert at_gate.wait(30)
        work = preparation.stop if call == "stop" else getattr(allocator, call)
        handler(raising(KeyboardInterrupt()))
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                signalled(work)
        gate.set()
        allocator.release_backups()
        assert not preparation.running
        assert allocator._store.memory.bytes == 0

    @pytest.mark.parametrize("in_a_turn", [False, True])
    def test_backups_released_by_a_finaliser_on_its_own_thread(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, in_a_turn: bool
    ) -> None:
        addresses = [allocator.malloc(PAGE, "weights") for _ in range(4)]
        contents = {address: memory.fill_random(address, PAGE) for address in addresses}
        seen: list[object] = []
        place = "add_copy" if in_a_turn else "_pace"
        owner = prepare.DigestRun if in_a_turn else prepare.Preparation
        work = getattr(owner, place)

        def finalise(*arguments: object, **named: object) -> object:
            if not seen:
                try:
                    seen.append(allocator.release_backups())
                except CumemSleepError as error:
                    seen.append(error)
            return work(*arguments, **named)

        monkeypatch.setattr(owner, place, finalise)
        preparation = allocator.prepare()
        assert preparation.wait(30)
        if in_a_turn:
            assert isinstance(seen[0], InvalidState)
            assert preparation.error is None
            assert allocator.sleep().copied_bytes == 0
        else:
            assert isinstance(seen[0], int)
            assert preparation.error is None
            assert allocator._store.memory.bytes == 0
            allocator.sleep()
        allocator.wake_up()
        for address, content in contents.items():
            assert memory.read(address, PAGE) == content

    def test_a_finaliser_on_its_thread_while_somebody_ends_it(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who ends it holds the lock and waits for the thread, so the thread must not wait for the lock."""
        memory.fill_random(allocator.malloc(PAGE, "weights"), PAGE)
        at_pace, refused = threading.Event(), list[CumemSleepError]()

        def finalise(preparation: prepare.Preparation, _nbytes: int) -> None:
            at_pace.set()
            until(lambda: preparation._worker.asked_to_stop)
            with pytest.raises(InvalidState) as raised:
                allocator.release_backups()
            refused.append(raised.value)

        monkeypatch.setattr(prepare.Preparation, "_pace", finalise)
        preparation = allocator.prepare()
        assert at_pace.wait(30)
        in_thread(allocator.release_backups)
        assert len(refused) == 1
        assert not preparation.running
        assert allocator._store.memory.bytes == 0


def test_a_signal_while_freed_backups_are_forgotten_is_not_swallowed(
    allocator: CuMemAllocator,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    handler: Handler,
) -> None:
    """Python does that at a place of its own choosing on the main thread."""
    address = allocator.malloc(PAGE, "weights")
    memory.fill_random(address, PAGE)
    memory.close()
    allocator.sleep()
    allocator.wake_up()
    prune_freed = allocator._store.catalogue.prune_freed

    def signalled() -> None:
        signal_main()
        time.sleep(0.01)
        prune_freed()

    handler(raising(KeyboardInterrupt()))
    monkeypatch.setattr(allocator._store.catalogue, "prune_freed", signalled)

    def free() -> None:
        hooks().cumem_sleep_free(address, PAGE, 0, None)
        until(lambda: False)

    with pytest.raises(KeyboardInterrupt):
        free()
    monkeypatch.undo()
    assert allocator._store.memory.bytes == 0


class TestGrowth:
    """What grows with the number of segments does so in proportion: visits are counted, not seconds."""

    @pytest.mark.slow
    @pytest.mark.parametrize("operation", ["prepare", "first sleep"])
    def test_visits(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
        few, many = (self.visits(allocator, monkeypatch, operation, count) for count in (8, 64))
        assert few["looks"] >= 1
        for what, count in many.items():
            assert count <= 8 * few[what] + 64, (what, few, many)

    def visits(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, operation: str, count: int
    ) -> dict[str, int]:
        visits = {"looks": 0, "blocks": 0}
        addresses = [allocator.malloc(PAGE, "weights") for _ in range(count)]
        pinned = _core.HostBlock.pinned

        def look(**_: object) -> None:
            visits["looks"] += 1

        def visited(block: _core.HostBlock) -> bool:
            visits["blocks"] += 1
            return bool(pinned.__get__(block))  # type: ignore[attr-defined]

        with monkeypatch.context() as patch:
            patch.setattr("cumem_sleep.digest.digester.sums_of", lambda _content, first_chunk=0: (first_chunk, 0))
            patch.setattr(
                "cumem_sleep.backups.host_tier._BETWEEN_LOOKS_S", 3600.0
            )  # else a slow machine looks more often
            patch.setattr(host_facts, "cgroup_available_bytes", look)
            patch.setattr(host_facts, "mem_available_bytes", lambda **_: None)
            patch.setattr(_core.HostBlock, "pinned", property(visited))
            if operation == "prepare":
                preparation = allocator.prepare()
                assert preparation.wait(60)
                assert preparation.error is None
            else:
                allocator.sleep()
                allocator.wake_up()
        for address in addresses:
            allocator.free(address)
        allocator.release_backups()
        return visits
