"""Scopes that do not end in the order in which they began, or not on their thread, or that a signal interrupts."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime
import gc
import os
import random
import signal
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
from support import BACKED_UP, HANGS_S, PAGE, Memory, hooks, in_thread

from cumem_sleep import CuMemAllocator, InvalidArgument, _core
from cumem_sleep.core import scopes
from cumem_sleep.core.pools import Pools
from cumem_sleep.integrations.torch_memory_saver import TorchMemorySaver, configure_subprocess
from cumem_sleep.integrations.torch_memory_saver.environment import changed

Label = tuple[str, _core.BackupPlan]
Scope = Callable[[CuMemAllocator, str], AbstractContextManager[object]]
BY_LEVEL, ALWAYS, NEVER = _core.BackupPlan.BY_LEVEL, _core.BackupPlan.ALWAYS, _core.BackupPlan.NEVER
NO_LABEL: Label = ("default", BY_LEVEL)


@contextlib.contextmanager
def disabled(allocator: CuMemAllocator, tag: str) -> Iterator[None]:
    saver = TorchMemorySaver()
    with allocator.regions.use(tag), saver.disable():
        yield


# Each way of allocating with a label, and the plan of what is allocated there.
SCOPES: dict[str, tuple[Scope, _core.BackupPlan]] = {
    "pool": (lambda allocator, tag: allocator.use_memory_pool(tag), BY_LEVEL),
    "region": (lambda allocator, tag: allocator.regions.use(tag, backup=True), ALWAYS),
    "region without a pool": (lambda allocator, tag: allocator.regions.use_without_pool(tag), NEVER),
    "saver": (lambda _, tag: TorchMemorySaver().region(tag, enable_cpu_backup=True), ALWAYS),
    "saver's native region": (
        lambda _, tag: TorchMemorySaver()._initialized()._with_region_config(tag, enable_cpu_backup=False),
        NEVER,
    ),
}


@pytest.fixture(params=list(SCOPES))
def scope(request: pytest.FixtureRequest, allocator: CuMemAllocator) -> Callable[[str], AbstractContextManager[object]]:
    enter = SCOPES[request.param][0]
    allocator.free(allocator.malloc(1))  # opens the driver: a hook does not
    return lambda tag: enter(allocator, tag)


@pytest.fixture
def plan(request: pytest.FixtureRequest, scope: object) -> _core.BackupPlan:  # noqa: ARG001  (comes first)
    return SCOPES[request.node.callspec.params["scope"]][1]


def label_now() -> Label:
    """Of what `malloc` gets here, which is the same as what the layer says."""
    allocator = CuMemAllocator.get_instance()
    address = allocator.malloc(PAGE)
    found = next((segment.tag, segment.backup) for segment in _core.segments() if segment.address == address)
    allocator.free(address)
    assert found == (_core.thread_tag(), _core.thread_backup())
    return found


def label_of_hook() -> Label:
    """Of what PyTorch gets here."""
    library = hooks()
    address = library.cumem_sleep_malloc(PAGE, 0, None)
    found = next((segment.tag, segment.backup) for segment in _core.segments() if segment.address == address)
    library.cumem_sleep_free(address, PAGE, 0, None)
    return found


def assert_outside() -> None:
    assert label_now() == NO_LABEL
    assert label_of_hook() == NO_LABEL
    assert not _core.labels_overlap()


MakeScope = Callable[[str], AbstractContextManager[object]]


class Task:
    """A task of the running loop that enters a scope at once, and leaves it when told."""

    def __init__(self, scope: AbstractContextManager[object]) -> None:
        self._scope = scope
        self._entered, self._leave = asyncio.Event(), asyncio.Event()
        self._look = asyncio.Event()
        self._seen: asyncio.Queue[Label] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        with self._scope:
            self._entered.set()
            while True:
                await self._look.wait()
                self._look.clear()
                if self._leave.is_set():
                    return
                self._seen.put_nowait(label_now())

    async def entered(self) -> Task:
        await self._entered.wait()
        return self

    async def label(self) -> Label:
        self._look.set()
        return await self._seen.get()

    async def leave(self) -> None:
        self._leave.set()
        self._look.set()
        await self._task


class TestTasksOfOneThread:
    @pytest.mark.parametrize("first_to_leave", [0, 1])
    def test_each_has_its_own_label_and_nothing_is_left(
        self, scope: MakeScope, plan: _core.BackupPlan, first_to_leave: int
    ) -> None:
        async def overlap() -> None:
            tags = ["kv_cache", "weights"]
            tasks = [await Task(scope(tag)).entered() for tag in tags]
            for turn in range(2):
                for task, tag in zip(tasks, tags, strict=True):
                    assert await task.label() == (tag, plan), turn
                assert label_now() == NO_LABEL, "a task that entered nothing"
            await tasks.pop(first_to_leave).leave()
            tags.pop(first_to_leave)
            assert await tasks[0].label() == (tags[0], plan)
            assert label_now() == NO_LABEL
            await tasks[0].leave()
            assert_outside()

        asyncio.run(overlap())
        assert_outside()

    def test_what_comes_after_them_keeps_its_bytes(self, allocator: CuMemAllocator, memory: Memory) -> None:
        async def overlap() -> None:
            first = await Task(allocator.use_memory_pool("kv_cache")).entered()
            second = await Task(allocator.use_memory_pool("weights")).entered()
            await first.leave()
            await second.leave()

        asyncio.run(overlap())
        for address in (allocator.malloc(PAGE), hooks().cumem_sleep_malloc(PAGE, 0, None)):
            content = memory.fill_random(address, PAGE)
            allocator.sleep(level=1)
            assert all(segment.sleep == BACKED_UP for segment in _core.segments())
            allocator.wake_up()
            assert memory.read(address, PAGE) == content

    def test_a_task_inherits_its_starters_label_until_that_one_leaves(
        self, scope: MakeScope, plan: _core.BackupPlan
    ) -> None:
        async def start() -> None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(scope("outer"))
                idle = await Task(contextlib.nullcontext()).entered()
                inner = await Task(scope("inner")).entered()
                assert await idle.label() == label_now() == ("outer", plan)
                assert await inner.label() == ("inner", plan)
                assert label_of_hook() == ("inner", plan), "entered last, and inside of the other"
            assert await idle.label() == label_now() == NO_LABEL
            assert await inner.label() == ("inner", plan)
            await inner.leave()
            await idle.leave()
            assert_outside()

        asyncio.run(start())

    def test_a_loop_that_runs_inside_is_inside(self, scope: MakeScope, plan: _core.BackupPlan) -> None:
        async def look() -> tuple[Label, Label]:
            return label_now(), label_of_hook()

        with scope("outer"):
            assert asyncio.run(look()) == (("outer", plan), ("outer", plan))

    def test_a_thread_that_a_task_starts_is_not_inside(self, scope: MakeScope) -> None:
        async def start() -> Label:
            with scope("of the loop's thread"):
                return await asyncio.to_thread(label_now)

        assert asyncio.run(start()) == NO_LABEL

    def test_one_that_is_cancelled(self, scope: MakeScope) -> None:
        async def cancel() -> None:
            first, second = [await Task(scope(tag)).entered() for tag in ("kv_cache", "weights")]
            for task in (first, second):
                task._task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task._task
            assert_outside()

        asyncio.run(cancel())
        assert_outside()

    def test_an_asynchronous_generator_that_another_task_closes(self, scope: MakeScope) -> None:
        async def generate() -> AsyncIterator[None]:
            with scope("kv_cache"):
                yield

        async def close() -> None:
            generator = generate()
            await asyncio.create_task(anext(generator))  # type: ignore[arg-type]
            assert label_now() == NO_LABEL
            await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
            assert_outside()

        asyncio.run(close())
        assert_outside()


class TestPyTorchWhereTasksOverlap:
    """It cannot tell them apart, nor can its hook: nothing that it allocates then may be dropped."""

    @pytest.mark.parametrize("tags", [("kv_cache", "weights"), ("weights", "kv_cache")])
    def test_gets_memory_that_no_level_drops(
        self, scope: MakeScope, plan: _core.BackupPlan, tags: tuple[str, str]
    ) -> None:
        async def overlap() -> None:
            first, second = [await Task(scope(tag)).entered() for tag in tags]
            assert _core.labels_overlap()
            assert label_of_hook() == NO_LABEL
            await first.leave()
            assert label_of_hook() == (tags[1], plan)
            await second.leave()

        asyncio.run(overlap())

    def test_gets_the_label_that_both_have(self, scope: MakeScope, plan: _core.BackupPlan) -> None:
        async def overlap() -> None:
            tasks = [await Task(scope("weights")).entered() for _ in range(2)]
            assert not _core.labels_overlap()
            assert label_of_hook() == ("weights", plan)
            for task in tasks:
                await task.leave()

        asyncio.run(overlap())

    @pytest.mark.sim
    def test_says_so_once(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Used:
            device_in_use = staticmethod(lambda: None)
            is_capturing = staticmethod(lambda: True)
            use = staticmethod(contextlib.nullcontext)

        monkeypatch.setattr(Pools, "find", lambda *_, **__: Used)
        monkeypatch.setattr(Pools, "warned_of_overlap", False)

        async def overlap() -> None:
            tasks = [await Task(allocator.use_memory_pool(tag)).entered() for tag in ("a", "b", "a")]
            for task in tasks:
                task._leave.set()
                task._look.set()
                await task._task

        with allocator.use_memory_pool("a"), allocator.use_memory_pool("b"):
            assert "tasks of one thread" not in caplog.text
        asyncio.run(overlap())
        assert caplog.text.count("tasks of one thread are in different memory pools") == 1


class TestOrder:
    def test_scopes_of_one_task_may_end_in_any(self, scope: MakeScope, plan: _core.BackupPlan) -> None:
        for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]):
            entered = {number: scope(f"tag{number}") for number in range(3)}
            for number, each in entered.items():
                each.__enter__()
                assert label_now() == label_of_hook() == (f"tag{number}", plan)
            for number in order:
                entered.pop(number).__exit__(None, None, None)
                expected = (f"tag{max(entered)}", plan) if entered else NO_LABEL
                assert label_now() == label_of_hook() == expected, order
            assert_outside()

    def test_endless_overlapping_keeps_nothing(self, allocator: CuMemAllocator) -> None:
        """Each begins before the one before it ends: no chain of labels may grow, whose end would be deep."""
        before = allocator.use_memory_pool("first")
        before.__enter__()
        for number in range(20_000):
            after = _core.ThreadLabel(f"tag{number % 3}")
            (before.close() if isinstance(before, _core.ThreadLabel) else before.__exit__(None, None, None))
            before = after
            assert _core.thread_tag() == f"tag{number % 3}"
        before.close()
        assert_outside()

    def test_generators_that_take_turns(self, scope: MakeScope, plan: _core.BackupPlan) -> None:
        def hold(tag: str) -> Iterator[None]:
            with scope(tag):
                yield

        first, second = hold("kv_cache"), hold("weights")
        next(first)
        next(second)
        assert label_now() == ("weights", plan)
        del first
        assert label_now() == ("weights", plan)
        del second
        assert_outside()

    def test_an_exception_that_is_kept_keeps_no_scope(self, scope: MakeScope) -> None:
        kept = None
        try:
            with scope("outer"), scope("inner"):
                raise ZeroDivisionError
        except ZeroDivisionError as error:
            kept = error
            assert_outside()
        del kept
        assert_outside()

    def test_an_error_on_entering_leaves_the_outer_one(self, scope: MakeScope, plan: _core.BackupPlan) -> None:
        with scope("outer"):
            for bad in ("", "\0"):
                with pytest.raises(InvalidArgument), scope(bad):
                    pass
            assert label_now() == label_of_hook() == ("outer", plan)
        assert_outside()

    def test_another_context_of_the_same_thread_ends_it(self, scope: MakeScope) -> None:
        entered = scope("x")
        contextvars.Context().run(entered.__enter__)
        assert label_now() == NO_LABEL
        contextvars.copy_context().run(entered.__exit__, None, None, None)
        assert_outside()

    def test_disable_ends_before_or_after_its_region(self, allocator: CuMemAllocator) -> None:
        saver = TorchMemorySaver()
        for region_first in (True, False):
            region = saver.region("x", enable_cpu_backup=True)
            region.__enter__()
            disabled = saver.disable()
            disabled.__enter__()
            assert label_now() == NO_LABEL
            for each in (region, disabled) if region_first else (disabled, region):
                each.__exit__(None, None, None)
            assert_outside()
        assert allocator.regions.usage() == {}


class TestThreads:
    def test_another_one_ends_it(self, scope: MakeScope, plan: _core.BackupPlan) -> None:
        outer, inner = scope("outer"), scope("inner")
        outer.__enter__()
        inner.__enter__()
        in_thread(lambda: inner.__exit__(None, None, None))
        assert label_now() == label_of_hook() == ("outer", plan)
        in_thread(lambda: outer.__exit__(None, None, None))
        assert_outside()

    def test_it_ends_when_its_thread_has(self, scope: MakeScope) -> None:
        entered = scope("x")
        in_thread(entered.__enter__)
        assert_outside()
        entered.__exit__(None, None, None)
        assert_outside()

    def test_a_generator_is_closed_by_another_one(self, scope: MakeScope, plan: _core.BackupPlan) -> None:
        def hold() -> Iterator[None]:
            with scope("kv_cache"):
                yield

        generators = [hold()]
        next(generators[0])
        assert label_now() == ("kv_cache", plan)
        in_thread(generators.clear)
        assert_outside()

    def test_the_garbage_collector_closes_a_generator(self, scope: MakeScope) -> None:
        def hold() -> Iterator[None]:
            cycle = [sys._getframe()]
            with scope("kv_cache"):
                yield
            del cycle

        generator = hold()
        next(generator)
        del generator
        in_thread(gc.collect)
        gc.collect()
        assert_outside()

    def test_labels_that_another_thread_closes_at_any_time(self, allocator: CuMemAllocator) -> None:
        """The hook looks at them without the interpreter lock, while they end."""
        allocator.free(allocator.malloc(1))
        entered: list[_core.ThreadLabel] = []
        done = threading.Event()

        def close() -> None:
            while not done.is_set() or entered:
                with contextlib.suppress(IndexError):
                    entered.pop(0).close()

        thread = threading.Thread(target=close)
        thread.start()
        for number in range(3000):
            entered.append(_core.ThreadLabel(f"tag{number % 5}"))
            tag, _ = label_of_hook() if number % 10 == 0 else ("default", None)
            assert tag == "default" or tag.startswith("tag")
        done.set()
        thread.join(HANGS_S)
        assert_outside()


class TestSignalHandlersThatRaise:
    """At every line of entering, and after every call of a C function of entering and leaving."""

    FILES = (os.path.join("cumem_sleep", ""), "contextlib.py")

    def interrupted_at(self, number: int, work: Callable[[], object], wanted: tuple[str, ...]) -> bool:
        """Whether there were so many places; then `work` was interrupted there."""
        seen = 0

        def reach(frame: types.FrameType, event: str, _: object) -> Callable[..., object] | None:
            nonlocal seen
            if not any(part in frame.f_code.co_filename for part in self.FILES):
                return None
            if event in wanted and frame.f_code.co_name not in ("__exit__", "__del__"):
                seen += 1
                if seen == number + 1:
                    sys.settrace(None)
                    sys.setprofile(None)
                    signal.raise_signal(signal.SIGUSR1)
            return reach

        def handle(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, handle)
        sys.setprofile(reach) if wanted == ("c_return",) else sys.settrace(reach)
        try:
            work()
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            signal.signal(signal.SIGUSR1, before)
        return seen > number

    @pytest.mark.sim  # PyTorch does not survive everywhere that a pool of its own is interrupted as it is made
    @pytest.mark.parametrize("wanted", [("line",), ("c_return",)])
    def test_leave_no_label(self, scope: MakeScope, wanted: tuple[str, ...]) -> None:
        def nest() -> None:
            with scope("outer"), scope("kv_cache"):
                sys.settrace(None)

        number, interrupted = 0, True
        while interrupted:
            interrupted = False
            try:
                interrupted = self.interrupted_at(number, nest, wanted)
            except KeyboardInterrupt:
                interrupted = True
                # While the exception is there, whose traceback holds every frame.
                assert (_core.thread_tag(), _core.thread_backup()) == NO_LABEL, number
                assert label_of_hook() == NO_LABEL, number
            assert (_core.thread_tag(), _core.thread_backup()) == NO_LABEL, number
            number += 1
        assert number > 8
        assert_outside()

    def test_a_scope_that_is_interrupted_as_it_is_entered_or_left_has_ended(self) -> None:
        ended: list[str] = []

        @scopes.scoped
        def hold() -> Iterator[str]:
            try:
                yield "given"
            finally:
                ended.append("ended")

        class Interrupted:
            """In the place of the generator: the signal comes when it has run, and before its caller goes on."""

            def __init__(self, generator: Iterator[str]) -> None:
                self.generator = generator
                self.close = generator.close  # type: ignore[attr-defined]

            def __next__(self) -> str:
                next(self.generator)
                raise KeyboardInterrupt

        scope = hold()
        scope.gen = Interrupted(scope.gen)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt) as kept, scope:
            pytest.fail("it was not entered")
        assert ended == ["ended"]
        assert kept.value is not None
        with hold() as given:
            assert given == "given"
        assert ended == ["ended", "ended"]


class TestTheSaversNativeInterface:
    def test_tasks_leave_their_own_regions(self, allocator: CuMemAllocator) -> None:
        native = TorchMemorySaver()._initialized()
        allocator.free(allocator.malloc(1))

        async def run(tag: str, backend: str, turns: asyncio.Barrier) -> None:  # type: ignore[name-defined]
            with native._with_region_config(tag, True, backend):
                await turns.wait()
                assert (native.tms_get_current_tag(), native.tms_get_cpu_backup_backend()) == (
                    tag.encode(),
                    backend.encode(),
                )
                if tag == "a":
                    native.tms_set_interesting_region(False)
                await turns.wait()
                assert native.tms_get_interesting_region() is (tag != "a")
                await turns.wait()
                if tag == "b":
                    native.tms_set_interesting_region(False)
                else:
                    native.tms_set_interesting_region(True)
                await turns.wait()
                assert native.tms_get_interesting_region() is (tag == "a")

        async def both() -> None:
            turns = Turns(2)
            await asyncio.gather(run("a", "mmap", turns), run("b", "pinned", turns))  # type: ignore[arg-type]
            assert_outside()

        asyncio.run(both())
        assert native.tms_get_cpu_backup_backend() == b"pinned"
        assert not native.tms_get_interesting_region()
        assert_outside()

    def test_backends_that_end_in_another_order(self, allocator: CuMemAllocator) -> None:
        native = TorchMemorySaver()._initialized()
        allocator.free(allocator.malloc(1))
        first = native._with_region_config("a", True, "mmap")
        second = native._with_region_config("b", True)
        first.__enter__()
        second.__enter__()
        native.tms_set_interesting_region(False)
        first.__exit__(None, None, None)
        assert (native.tms_get_interesting_region(), native.tms_get_cpu_backup_backend()) == (False, b"mmap")
        native.tms_set_interesting_region(True)
        assert native.tms_get_current_tag() == b"b"
        second.__exit__(None, None, None)
        assert native.tms_get_cpu_backup_backend() == b"pinned"
        assert_outside()

    def test_a_region_that_was_left_and_ends_on_another_thread(self, allocator: CuMemAllocator) -> None:
        native = TorchMemorySaver()._initialized()
        allocator.free(allocator.malloc(1))
        region = native._with_region_config("a", True, "mmap")
        region.__enter__()
        native.tms_set_interesting_region(False)
        in_thread(lambda: region.__exit__(None, None, None))
        assert (native.tms_get_interesting_region(), native.tms_get_cpu_backup_backend()) == (False, b"pinned")
        native.tms_set_interesting_region(True)
        assert not native.tms_get_interesting_region()
        assert_outside()


class Turns:
    """A barrier for tasks (asyncio has one since Python 3.11)."""

    def __init__(self, parties: int) -> None:
        self._parties, self._waiting = parties, 0
        self._next = asyncio.Event()

    async def wait(self) -> None:
        self._waiting += 1
        current = self._next
        if self._waiting == self._parties:
            self._waiting, self._next = 0, asyncio.Event()
            current.set()
        await current.wait()


class TestEnvironmentVariables:
    @pytest.mark.parametrize("before", [None, "", "/other.so"])
    @pytest.mark.parametrize("first_to_leave", [0, 1])
    def test_are_as_before_after_threads_that_overlap(
        self, monkeypatch: pytest.MonkeyPatch, before: str | None, first_to_leave: int
    ) -> None:
        monkeypatch.setenv("LD_PRELOAD", before or "")
        if before is None:
            monkeypatch.delenv("LD_PRELOAD")
        entered = [threading.Event(), threading.Event()]
        leave = [threading.Event(), threading.Event()]

        def run(number: int) -> None:
            with configure_subprocess():
                assert "torch_memory_saver_hook" in os.environ["LD_PRELOAD"]
                entered[number].set()
                assert leave[number].wait(HANGS_S)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread, event in zip(threads, entered, strict=True):
            thread.start()
            assert event.wait(HANGS_S)
        for number in (first_to_leave, 1 - first_to_leave):
            assert "torch_memory_saver_hook" in os.environ["LD_PRELOAD"]
            leave[number].set()
            threads[number].join(HANGS_S)
        assert os.environ.get("LD_PRELOAD") == before

    def test_have_the_value_of_the_one_entered_last_of_those_that_are_there(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SOMETHING", "before")
        first, second = changed("SOMETHING", "first"), changed("SOMETHING", "second")
        first.__enter__()
        second.__enter__()
        assert os.environ["SOMETHING"] == "second"
        in_thread(lambda: first.__exit__(None, None, None))
        assert os.environ["SOMETHING"] == "second"
        second.__exit__(None, None, None)
        assert os.environ["SOMETHING"] == "before"


class TestForeignValues:
    """Of the context variable, which any Python code can reach through its context."""

    @pytest.mark.parametrize("foreign", [None, "label", datetime.datetime_CAPI])
    def test_are_refused(self, allocator: CuMemAllocator, foreign: object) -> None:
        def misuse() -> None:
            with allocator.regions.use_without_pool("weights"):
                (variable,) = (each for each in contextvars.copy_context() if each.name == "cumem_sleep_label")
                variable.set(foreign)
                with pytest.raises(ValueError, match="PyCapsule"):
                    allocator.malloc(PAGE)
                with pytest.raises(ValueError, match="PyCapsule"), allocator.regions.use_without_pool("kv_cache"):
                    pass

        allocator.free(allocator.malloc(1))
        contextvars.copy_context().run(misuse)
        assert_outside()


class TestRandomHistories:
    """Scopes of several tasks and threads, in any order, against a list of what is open."""

    @pytest.mark.parametrize("seed", range(24))
    def test_each_task_has_its_innermost_label(self, allocator: CuMemAllocator, seed: int) -> None:
        choice = random.Random(seed)
        allocator.free(allocator.malloc(1))
        # Contexts stand for tasks: that is what a task runs in.
        contexts = [contextvars.copy_context() for _ in range(3)]
        opened: list[tuple[int, AbstractContextManager[object], Label]] = []
        for _ in range(60):
            number = choice.randrange(3)
            if opened and choice.random() < 0.5:
                _, scope, _ = opened.pop(choice.randrange(len(opened)))
                leave = partial(scope.__exit__, None, None, None)
                ways = [leave, partial(in_thread, leave), partial(contexts[number].run, leave), scope.gen.close]
                choice.choice(ways)()
            else:
                enter, plan = choice.choice(list(SCOPES.values()))
                tag = choice.choice(["weights", "kv_cache", "x"])
                scope = enter(allocator, tag)
                contexts[number].run(scope.__enter__)
                opened.append((number, scope, (tag, plan)))
            innermost = []
            for each, context in enumerate(contexts):
                mine = [label for task, _, label in opened if task == each]
                assert context.run(label_now) == (mine[-1] if mine else NO_LABEL), seed
                innermost += mine[-1:]
            assert label_now() == NO_LABEL
            expected = NO_LABEL if len(set(innermost)) != 1 else innermost[0]
            assert label_of_hook() == expected, seed
        while opened:
            opened.pop(choice.randrange(len(opened)))[1].__exit__(None, None, None)
        assert_outside()
