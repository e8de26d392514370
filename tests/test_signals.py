"""Signals in every call, whatever their handlers raise or do."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from support import PAGE, Memory, assert_no_threads, hooks, in_thread, run_script, threads_refused

from cumem_sleep import CuMemAllocator, CumemSleepError, InvalidState, _core, host_facts
from cumem_sleep.allocator import _forget_freed_backups
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
Threads = Callable[[], AbstractContextManager[None]]
THREADS: tuple[Threads, ...] = (nullcontext, threads_refused)


class TestRun:
    """One call on a thread of its own."""

    def test_returns_and_raises_what_the_work_does(self) -> None:
        lock = _core.OperationLock()
        assert lock.run(_core.thread_name) == "cumem-operation"
        assert lock.run(lambda: lock.run(_core.thread_name)) == "cumem-operation"
        with pytest.raises(KeyError, match="this"):
            lock.run(lambda: {}["this"])
        assert_no_threads()

    @pytest.mark.parametrize(
        ("errors", "expected"),
        [
            ([TimeoutError, TimeoutError], [TimeoutError]),
            ([KeyboardInterrupt, SystemExit, TimeoutError], [KeyboardInterrupt]),
            ([TimeoutError, KeyboardInterrupt, SystemExit], [KeyboardInterrupt, TimeoutError]),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("fails", [False, True])
    @pytest.mark.parametrize("threads", THREADS)
    def test_of_many_exceptions_of_handlers_the_first(
        self,
        handler: Handler,
        threads: Threads,
        errors: list[type[BaseException]],
        expected: list[type[BaseException]],
        fails: bool,
    ) -> None:
        """And one that ends programs before one that does not; what else there was is what it came from."""
        handled: list[type[BaseException]] = []
        lock = _core.OperationLock()

        def handle() -> None:
            handled.append(errors[len(handled)])
            raise handled[-1]

        def work() -> None:
            for number in range(len(errors)):
                signal_main()
                until(lambda number=number: len(handled) > number)  # type: ignore[misc]
            if fails:
                raise KeyError("of the work")
            with pytest.raises(_core.OperationStopped):
                _core.stop_if_asked()

        handler(handle)
        with threads(), pytest.raises(expected[0]) as raised:
            lock.run(work)
        chain, error = [], raised.value.__context__
        while error is not None:
            chain.append(type(error))
            error = error.__context__
        assert chain == expected[1:] + [KeyError] * fails
        assert handled == errors

    @pytest.mark.parametrize("links", [[(1, 2), (2, 1)], [(0, 2), (2, 0)], [(0, 1)], [(1, 0), (0, 2)], [(1, 1)]])
    @pytest.mark.parametrize("threads", THREADS)
    def test_handlers_may_raise_errors_that_are_each_others_context(
        self, handler: Handler, threads: Threads, links: list[tuple[int, int]]
    ) -> None:
        """In a circle, too: whoever follows it would never return."""
        errors: list[BaseException] = [TimeoutError("first"), KeyboardInterrupt("second"), ValueError("third")]
        for one, other in links:
            errors[one].__context__ = errors[other]
        handled: list[BaseException] = []
        lock = _core.OperationLock()

        def handle() -> None:
            handled.append(errors[len(handled)])
            raise handled[-1]

        def work() -> None:
            for number in range(2):
                signal_main()
                until(lambda number=number: len(handled) > number)  # type: ignore[misc]

        handler(handle)
        with threads(), pytest.raises(KeyboardInterrupt) as raised:
            lock.run(work)
        assert raised.value is errors[1]
        chain: list[BaseException] = []
        error: BaseException | None = raised.value
        while error is not None and all(error is not each for each in chain):
            chain.append(error)
            error = error.__context__
        assert error is None or len(links) == 2 or links == [(1, 1)], "the only circles are those that handlers made"
        if links == [(0, 2), (2, 0)]:
            assert chain == [errors[1], errors[0], errors[2]], "what does not lead back to it is its context"

    @pytest.mark.parametrize("threads", THREADS)
    def test_what_was_stopped_is_cleared_on_its_own_thread(self, handler: Handler, threads: Threads) -> None:
        """Where no signal disturbs what a generator does when it is closed."""
        handled, closed_on, ran_on = threading.Event(), [], []

        def generator() -> Iterator[None]:
            try:
                yield
            finally:
                closed_on.append(_core.thread_name())

        def handle() -> None:
            handled.set()
            raise TimeoutError

        def work() -> None:
            ran_on.append(_core.thread_name())
            suspended = generator()
            next(suspended)
            signal_main()
            assert handled.wait(30)
            until(_core.stop_if_asked)

        handler(handle)
        with threads(), pytest.raises(TimeoutError):
            _core.OperationLock().run(work)
        assert closed_on == ran_on == ["cumem-operation" if threads is THREADS[0] else ""]

    def test_is_no_exception_that_code_tries_out(self) -> None:
        assert not issubclass(_core.OperationStopped, Exception)

    def test_has_the_callers_context(self) -> None:
        import contextvars

        variable = contextvars.ContextVar("variable", default=0)
        variable.set(7)
        assert _core.OperationLock().run(variable.get) == 7

    def test_where_no_thread_can_be_had(self) -> None:
        with threads_refused():
            assert _core.OperationLock().run(threading.get_ident) == threading.get_ident()
            assert in_thread(lambda: _core.OperationLock().run(_core.thread_name)) == ""

    def test_where_no_thread_can_be_had_handlers_are_as_before(self, handler: Handler) -> None:
        """But for one that a handler sets, and for one that its owner keeps."""
        handled: list[int] = []
        kept: list[Any] = []
        handler(lambda: handled.append(1))
        before = [signal.getsignal(number) for number in signal.valid_signals()]
        signal.siginterrupt(signal.SIGUSR1, False)
        lock = _core.OperationLock()

        def work() -> None:
            kept.append(signal.getsignal(signal.SIGUSR1))
            signal_main()
            until(lambda: handled)

        with threads_refused():
            lock.run(work)
        assert [signal.getsignal(number) for number in signal.valid_signals()] == before
        handler(raising(KeyError()))
        kept[0](signal.SIGUSR1, None)
        assert handled == [1, 1]

        def replace() -> None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            raise TimeoutError

        handler(replace)
        with threads_refused(), pytest.raises(TimeoutError):
            lock.run(signal_main)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN

    def test_what_a_handler_raises_in_the_callback_of_a_free_arrives(
        self, handler: Handler, allocator: CuMemAllocator
    ) -> None:
        """Where no thread can be had the handler runs in the middle of the callback."""
        allocator._operations.open()
        library = hooks()
        address = library.cumem_sleep_malloc(PAGE, 0, None)
        allocator._store.room.take(_core.segments()[:1], [], {})
        handler(raising(TimeoutError()))
        _core.on_free(signal_main)
        try:
            with threads_refused(), pytest.raises(TimeoutError):
                until(lambda: library.cumem_sleep_free(address, PAGE, 0, None))
        finally:
            _core.on_free(_forget_freed_backups)
        allocator.usage()

    @pytest.mark.parametrize("threads", THREADS)
    def test_what_is_raised_after_the_last_look_for_it_undoes_nothing(self, handler: Handler, threads: Threads) -> None:
        """As when the ranks have agreed."""
        handled: list[int] = []
        done: list[int] = []

        def handle() -> None:
            handled.append(1)
            raise KeyboardInterrupt

        def work() -> None:
            signal_main()
            until(lambda: handled)
            done.append(1)

        handler(handle)
        with threads(), pytest.raises(KeyboardInterrupt):
            _core.OperationLock().run(work)
        assert done == [1]

    @pytest.mark.parametrize("threads", THREADS)
    def test_waiting_for_the_lock_can_be_stopped(self, handler: Handler, threads: Threads) -> None:
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
        import ctypes

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


class TestHandlersThatReturn:
    @pytest.mark.parametrize("call", ["usage", "sleep", "wake_up", "discard", "release_backups", "prepare", "free"])
    def test_any_call_within_a_sleep(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, handler: Handler, call: str
    ) -> None:
        """It waits until the sleep has ended, which does not wait for it."""
        address, freed = allocator.malloc(PAGE, "weights"), allocator.malloc(PAGE, "default")
        content = memory.fill_random(address, PAGE)
        calls: dict[str, Callable[[], object]] = {
            "discard": lambda: allocator.discard("kv_cache"),
            "free": lambda: allocator.free(freed),
        }
        returned: list[str] = []
        synchronize = _core.synchronize
        begun = threading.Event()

        def work() -> None:
            begun.set()
            calls.get(call, getattr(allocator, call))()
            returned.append(call)

        def signalled(device: int) -> None:
            monkeypatch.undo()
            signal_main()
            assert begun.wait(30)
            synchronize(device)

        handler(work)
        monkeypatch.setattr(_core, "synchronize", signalled)
        allocator.sleep()
        assert returned == [call]
        allocator.wake_up()
        assert memory.read(address, PAGE) == content

    def test_stop_within_stop_and_wait(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, handler: Handler
    ) -> None:
        memory.fill_random(allocator.malloc(PAGE, "weights"), PAGE)
        gate, at_gate = threading.Event(), threading.Event()
        stopped: list[bool] = []

        def wait_at_gate(*_: object) -> bool:
            at_gate.set()
            return gate.wait(30) and False

        monkeypatch.setattr(prepare.Preparation, "_copy", wait_at_gate)
        preparation = allocator.prepare()
        assert at_gate.wait(30)

        def stop() -> None:
            threading.Timer(0.02, gate.set).start()
            preparation.stop()
            stopped.append(preparation.running)

        handler(stop)
        threading.Timer(0.02, signal_main).start()
        preparation.stop()
        assert stopped == [False]

    @pytest.mark.usefixtures("allocator")
    def test_get_instance_within_the_first(self, monkeypatch: pytest.MonkeyPatch, handler: Handler) -> None:
        CuMemAllocator.instance = None
        made: list[CuMemAllocator] = []
        init = CuMemAllocator.__init__
        begun = threading.Event()

        def work() -> None:
            begun.set()
            made.append(CuMemAllocator.get_instance())

        def slow_init(self: CuMemAllocator) -> None:
            signal_main()
            begun.wait(1)
            init(self)

        handler(work)
        monkeypatch.setattr(CuMemAllocator, "__init__", slow_init)
        made.append(CuMemAllocator.get_instance())
        assert len(made) == 2
        assert made[0] is made[1] is CuMemAllocator.instance

    @pytest.mark.slow
    @pytest.mark.parametrize("call", ["sleep", "wake_up", "prepare"])
    def test_within_a_call_of_logging(self, call: str) -> None:
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


def test_an_allocator_that_fails_to_replace_another_leaves_that_in_use(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cumem_sleep.allocator.Copiers", raising(KeyboardInterrupt()))
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
        assert allocator._store.room.bytes == 0

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
            assert isinstance(preparation.error, InvalidState)
            assert "finaliser" in str(preparation.error)
            assert allocator._store.room.bytes == 0
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
        assert allocator._store.room.bytes == 0


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, TimeoutError])
def test_a_signal_while_freed_backups_are_forgotten_is_not_swallowed(
    allocator: CuMemAllocator,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    handler: Handler,
    error: type[BaseException],
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

    handler(raising(error()))
    monkeypatch.setattr(allocator._store.catalogue, "prune_freed", signalled)

    def free() -> None:
        hooks().cumem_sleep_free(address, PAGE, 0, None)
        until(lambda: False)

    with pytest.raises(error):
        free()
    monkeypatch.undo()
    assert allocator._store.room.bytes == 0


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
            patch.setattr("cumem_sleep.digest.device.sums_of", lambda _content, first_chunk=0: (first_chunk, 0))
            patch.setattr("cumem_sleep.backups.host._BETWEEN_LOOKS_S", 3600.0)  # else a slow machine looks more often
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
