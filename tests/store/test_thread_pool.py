"""What runs ahead of a copy, on threads of its own or without any."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from support import PAGE, Memory, assert_no_threads, threads_refused

from cumem_sleep import CuMemAllocator, OutOfHostMemory, _core
from cumem_sleep._core import ThreadPool


def pool_of(threads: int, tasks: dict[int, list[Callable[[], object]]]) -> ThreadPool:
    return ThreadPool(threads, as_tasks(tasks))


def as_tasks(tasks: dict[int, list[Callable[[], object]]]) -> dict[int, list[_core.Task]]:
    return {key: [_core.Task(task) for task in mine] for key, mine in tasks.items()}


class TestThreadPool:
    def run_all(self, pool: ThreadPool, keys: range) -> None:
        with pool:
            pool.start()
            for key in keys:
                pool.wait(key)
                pool.wait(key)

    @pytest.mark.parametrize("threads", [1, 4])
    def test_each_task_runs_once(self, threads: int) -> None:
        ran: list[tuple[int, int]] = []
        self.run_all(
            pool_of(
                threads, {key: [lambda key=key: ran.append((key, threading.get_ident()))] * 3 for key in range(20)}
            ),
            range(20),
        )
        assert sorted(key for key, _ in ran) == sorted(list(range(20)) * 3)
        assert threading.get_ident() not in {thread for _, thread in ran}

    def test_one_thread_keeps_the_order(self) -> None:
        ran: list[int] = []
        self.run_all(pool_of(1, {key: [lambda key=key: ran.append(key)] for key in (3, 1, 2)}), range(4))
        assert ran == [3, 1, 2]

    @pytest.mark.parametrize("threads_to_be_had", [True, False])
    def test_more_tasks(self, threads_to_be_had: bool) -> None:
        ran: list[tuple[int, int]] = []

        def tasks(*keys: int) -> dict[int, list[Callable[[], object]]]:
            return {key: [lambda key=key: ran.append((key, threading.get_ident()))] for key in keys}  # type: ignore[misc]

        with pool_of(1, tasks(1)) as pool:
            pool.start()
            pool.wait(1)
            if not threads_to_be_had:
                pool.stop()
            pool.add(as_tasks(tasks(4, 2)))
            pool.add(as_tasks(tasks(3)))
            for key in (2, 3, 4):
                pool.wait(key)
        keys = [key for key, _ in ran]
        assert keys == ([1, 4, 2, 3] if threads_to_be_had else [1, 2, 3, 4])
        by_threads = {thread != threading.get_ident() for _, thread in ran[1:]}
        assert by_threads == {threads_to_be_had}

    @pytest.mark.parametrize("error", [OutOfHostMemory(1, 0, "madvise"), MemoryError(), KeyboardInterrupt()])
    def test_raises_what_a_task_raised_where_it_is_waited_for(self, error: BaseException) -> None:
        """Whatever it is, the thread goes on."""

        def fail() -> None:
            raise error

        with pool_of(1, {1: [lambda: None], 2: [lambda: None, fail], 3: [lambda: None]}) as pool:
            pool.start()
            pool.wait(1)
            with pytest.raises(type(error)):
                pool.wait(2)
            pool.wait(3)

    def test_stop_waits_for_what_runs_and_drops_the_rest(self) -> None:
        begun, go, ran = threading.Event(), threading.Event(), []

        def first() -> None:
            begun.set()
            assert go.wait(30)
            ran.append(1)

        pool = pool_of(1, {1: [first], 2: [lambda: ran.append(2)]})
        pool.start()
        assert begun.wait(30)
        stopped = threading.Event()
        stopper = threading.Thread(target=lambda: (pool.stop(), stopped.set()), daemon=True)
        stopper.start()
        assert not stopped.wait(0.02)
        go.set()
        assert stopped.wait(30)
        assert ran == [1]
        pool.stop()
        assert_no_threads()

    @pytest.mark.parametrize("started", [0, 1, 2])
    def test_without_threads_who_waits_does_the_work(self, started: int) -> None:
        """Or with fewer threads than wanted. Each task runs once.

        Where the kernel cannot touch pages by itself, touching writes: a second time it would harm the copy.
        """
        ran: list[tuple[int, int]] = []
        tasks = {key: [lambda key=key: ran.append((key, threading.get_ident()))] for key in range(6)}
        with threads_refused(after=started), pool_of(3, tasks) as pool:  # type: ignore[arg-type]
            pool.start()
            for key in range(6):
                pool.wait(key)
        assert ran == [(key, threading.get_ident()) for key in range(6)]
        assert_no_threads()


class TestWithoutThreads:
    def test_sleep_and_wake(self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        contents = {allocator.malloc(PAGE, tag): b"" for tag in ("weights", "default", "kv_cache")}
        for address in contents:
            contents[address] = memory.fill_random(address, PAGE)
        with threads_refused():
            assert allocator.sleep().copied_bytes == 2 * PAGE
            assert allocator.wake_up().mapped_bytes == 3 * PAGE
        for address, content in list(contents.items())[:2]:
            assert memory.read(address, PAGE) == content
