"""Pools that do not end in the order in which they began, or not on their thread; and those of several tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
from support import BACKED_UP, HANGS_S, PAGE, Memory, hooks, in_thread

from cumem_sleep import CuMemAllocator, InvalidArgument, InvalidState, _core
from cumem_sleep.integrations.torch_memory_saver import TorchMemorySaver

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
    assert label_now() == label_of_hook() == NO_LABEL


MakeScope = Callable[[str], AbstractContextManager[object]]
REFUSED = "another asyncio task of this thread is in the memory pool 'kv_cache'"


class TestTasksOfOneThread:
    """PyTorch cannot tell them apart: while one is in a pool, no other enters one."""

    def test_another_one_is_refused_and_leaves_nothing(
        self, allocator: CuMemAllocator, scope: MakeScope, plan: _core.BackupPlan
    ) -> None:
        async def other() -> None:
            for enter, _ in SCOPES.values():
                with pytest.raises(InvalidState, match=REFUSED), enter(allocator, "weights"):
                    pytest.fail("it was entered")
            assert label_now() == label_of_hook() == ("kv_cache", plan)

        async def overlap() -> None:
            with scope("kv_cache"):
                await asyncio.create_task(other())
                asyncio.get_running_loop().call_soon(lambda: refused.append(self.is_refused(scope)))
                await asyncio.sleep(0)
                with scope("x"):
                    assert label_now() == label_of_hook() == ("x", plan), "nested in one task"
            with scope("y"):
                pass

        refused: list[bool] = []
        asyncio.run(overlap())
        assert refused == [True], "a callback of no task"
        assert_outside()

    def is_refused(self, scope: MakeScope) -> bool:
        with pytest.raises(InvalidState, match=REFUSED), scope("weights"):
            pass
        return True

    def test_one_after_the_other(self, scope: MakeScope, plan: _core.BackupPlan) -> None:
        async def enter(tag: str) -> None:
            with scope(tag):
                assert label_now() == label_of_hook() == (tag, plan)

        async def all_of_them() -> None:
            await asyncio.gather(*(enter(f"tag{number}") for number in range(3)))

        with scope("outer"):
            asyncio.run(all_of_them())  # which is inside
            assert label_now() == label_of_hook() == ("outer", plan)
        assert_outside()

    def test_each_on_a_thread_of_its_own(self, scope: MakeScope, plan: _core.BackupPlan) -> None:
        def enter() -> Label:
            assert_outside()
            with scope("weights"):
                return label_of_hook()

        async def overlap() -> Label:
            with scope("kv_cache"):
                return await asyncio.to_thread(enter)

        assert asyncio.run(overlap()) == ("weights", plan)

    def test_one_that_is_cancelled(self, scope: MakeScope) -> None:
        async def wait() -> None:
            with scope("kv_cache"):
                await asyncio.Event().wait()

        async def cancel() -> None:
            for _ in range(2):
                task = asyncio.create_task(wait())
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                assert_outside()

        asyncio.run(cancel())

    def test_an_asynchronous_generator_that_another_task_closes(self, scope: MakeScope) -> None:
        async def generate() -> AsyncIterator[None]:
            with scope("kv_cache"):
                yield

        async def close() -> None:
            generator = generate()
            await asyncio.create_task(anext(generator))  # type: ignore[arg-type]
            assert self.is_refused(scope)
            await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
            assert_outside()

        asyncio.run(close())


class TestOrder:
    def test_endless_overlapping_keeps_nothing(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Each begins before the one before it ends; what comes after them keeps its bytes."""
        before = _core.PoolScope("first")
        for number in range(2000):
            after = _core.PoolScope(f"tag{number % 3}")
            before.leave()
            before = after
            assert _core.thread_tag() == f"tag{number % 3}"
        before.leave()
        assert_outside()
        for address in (allocator.malloc(PAGE), hooks().cumem_sleep_malloc(PAGE, 0, None)):
            content = memory.fill_random(address, PAGE)
            allocator.sleep(level=1)
            assert all(segment.sleep == BACKED_UP for segment in _core.segments())
            allocator.wake_up()
            assert memory.read(address, PAGE) == content

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
    def test_it_ends_when_its_thread_has(self, scope: MakeScope) -> None:
        entered = scope("x")
        in_thread(entered.__enter__)
        assert_outside()
        entered.__exit__(None, None, None)
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

    def test_pools_that_another_thread_leaves_at_any_time(self, allocator: CuMemAllocator) -> None:
        """The hook looks at them without the interpreter lock, while they end."""
        allocator.free(allocator.malloc(1))
        entered: list[_core.PoolScope] = []
        done = threading.Event()

        def close() -> None:
            while not done.is_set() or entered:
                with contextlib.suppress(IndexError):
                    entered.pop(0).leave()

        thread = threading.Thread(target=close)
        thread.start()
        for number in range(1000):
            entered.append(_core.PoolScope(f"tag{number % 5}"))
            tag, _ = label_of_hook() if number % 10 == 0 else ("default", None)
            assert tag == "default" or tag.startswith("tag")
        done.set()
        thread.join(HANGS_S)
        assert_outside()


class TestTheSaversNativeInterface:
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


class TestRandomHistories:
    """Scopes that end in any order, on any thread, against a list of what is open."""

    @pytest.mark.parametrize("seed", range(6))
    def test_the_innermost_counts(self, allocator: CuMemAllocator, seed: int) -> None:
        choice = random.Random(seed)
        allocator.free(allocator.malloc(1))
        opened: list[tuple[AbstractContextManager[object], Label]] = []
        for _ in range(60):
            if opened and choice.random() < 0.5:
                scope, _ = opened.pop(choice.randrange(len(opened)))
                leave = partial(scope.__exit__, None, None, None)
                close = scope.gen.close  # type: ignore[attr-defined]
                choice.choice([leave, close, partial(in_thread, leave), partial(in_thread, close)])()
            else:
                enter, plan = choice.choice(list(SCOPES.values()))
                tag = choice.choice(["weights", "kv_cache", "x"])
                scope = enter(allocator, tag)
                scope.__enter__()
                opened.append((scope, (tag, plan)))
            assert label_now() == label_of_hook() == (opened[-1][1] if opened else NO_LABEL), seed
        while opened:
            opened.pop(choice.randrange(len(opened)))[0].__exit__(None, None, None)
        assert_outside()
