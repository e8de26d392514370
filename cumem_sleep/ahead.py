"""Work that threads do ahead of the one who waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

Task = Callable[[], None]

_POLL_S = 0.001


class Ahead:
    """Threads that run tasks in order, each task under the key of what it is for; a context around their use.

    The first tasks begin when all threads have, or as many as there are tasks. Beside tasks that touch pages the start
    of a thread takes long, because each change of the address space has to wait for them.

    Where no thread can be started (at interpreter exit, or a limit), the one who waits does the work; then a task may
    run a second time, after the first.
    """

    def __init__(self, threads: int, tasks: Mapping[int, Sequence[Task]]) -> None:
        self._tasks = dict(tasks)
        self._futures: dict[int, list[Future[None]]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cumem-sleep-ahead")
        self._threads = threads
        self._ready = threading.Event()
        self._stopped = False
        self._at_work: set[int] = set()

    def __enter__(self) -> Ahead:
        return self

    def start(self) -> None:
        """Begin, inside the context: whatever interrupts this, leaving it ends the threads."""
        self._submit(self._tasks)

    def add(self, tasks: Mapping[int, Sequence[Task]]) -> None:
        """More, after those that there are; begins at once."""
        self._tasks.update(tasks)
        self._submit(tasks)

    def _submit(self, tasks: Mapping[int, Sequence[Task]]) -> None:
        try:
            for number, (key, mine) in enumerate(tasks.items(), start=1):
                self._futures[key] = [self._pool.submit(partial(self._run, task)) for task in mine]
                if number >= self._threads:
                    self._ready.set()
            if tasks:
                self._ready.set()
        except RuntimeError:
            # The refused task may be in the queue all the same: no thread may come to it beside the one who waits.
            self.stop()
            self._futures.clear()

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
        self._stopped = True
        self._ready.set()
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._pool.shutdown(wait=True, cancel_futures=True)
                while self._at_work:  # a thread that the pool lost, because an interrupt came as it was started
                    time.sleep(_POLL_S)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _run(self, task: Task) -> None:
        self._at_work.add(threading.get_ident())
        try:
            self._ready.wait()
            if not self._stopped:
                task()
        finally:
            self._at_work.discard(threading.get_ident())
