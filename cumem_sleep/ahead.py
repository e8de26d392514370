"""Work that threads do ahead of the one who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

Task = Callable[[], None]


class Ahead:
    """Threads that run tasks in order, each task under the key of what it is for; a context around their use.

    Where no thread can be started (at interpreter exit, or a limit), the one who waits does the work.
    """

    def __init__(self, threads: int, tasks: Mapping[int, Sequence[Task]]) -> None:
        self._tasks = dict(tasks)
        self._futures: dict[int, list[Future[None]]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cumem-sleep-ahead")

    def __enter__(self) -> Ahead:
        with suppress(RuntimeError):
            for key, tasks in self._tasks.items():
                self._futures[key] = [self._pool.submit(task) for task in tasks]
        return self

    def wait(self, key: int) -> None:
        """Return when the tasks of `key` have run, raise what one of them raised. Waiting again does nothing."""
        tasks = self._tasks.pop(key, ())
        futures = self._futures.pop(key, None)
        if futures is None:
            for task in tasks:
                task()
        for future in futures or ():
            future.result()

    def stop(self) -> None:
        """Wait for what runs, drop what has not begun. An interrupt is raised after that; stop again as you like."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._pool.shutdown(wait=True, cancel_futures=True)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def __exit__(self, *exception: object) -> None:
        self.stop()
