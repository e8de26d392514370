"""Work that threads do ahead of the one who waits for it."""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue

Task = Callable[[], None]

_POLL_S = 0.001
_START_S = 1.0  # for a thread that exists to begin; one that takes longer is not waited for


class _Step:
    """One task, run by a thread, and what became of it."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._running = _thread.allocate_lock()
        self._running.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._task()
        except BaseException as error:
            self._error = error
        finally:
            self._running.release()

    def wait(self) -> None:
        """Return when it has run, or raise what it raised."""
        self._running.acquire()
        if self._error is not None:
            raise self._error


class Ahead:
    """Threads that run tasks in order, each task under the key of what it is for; a context around their use.

    The first tasks begin when all threads have, or as many as there are tasks. Beside tasks that touch pages the start
    of a thread takes long, because each change of the address space has to wait for them.

    Where no thread can be started (at interpreter exit, or a limit), the one who waits does the work; then a task may
    run a second time, after the first.

    An interrupt may come at any line of the one who waits. So that it leaves no lock taken, which threads would wait
    for for ever, nothing of `threading` or `concurrent.futures` is used, whose locks are taken by Python's own code.
    """

    def __init__(self, threads: int, tasks: Mapping[int, Sequence[Task]]) -> None:
        self._tasks = dict(tasks)
        self._steps: dict[int, list[_Step]] = {}
        self._queue: SimpleQueue[_Step | None] = SimpleQueue()
        self._begun: SimpleQueue[None] = SimpleQueue()
        self._threads = threads
        self._started = 0
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
        if self._stopped or not self._have_threads(map(len, tasks.values())):
            return
        for key, mine in tasks.items():
            steps = self._steps[key] = [_Step(task) for task in mine]
            for step in steps:
                self._queue.put(step)

    def _have_threads(self, counts: Iterable[int]) -> bool:
        """Start as many as these tasks keep at work; false if that cannot be: then none is left."""
        wanted = min(self._threads, self._started + sum(counts))
        new = range(self._started, wanted)
        try:
            for _ in new:
                self._started += 1
                _thread.start_new_thread(self._work, ())
        except RuntimeError:
            self.stop()
            self._steps.clear()
            return False
        try:
            for _ in new:
                self._begun.get(timeout=_START_S)
        except Empty:  # a busy machine
            pass
        return True

    def wait(self, key: int) -> None:
        """Return when the tasks of `key` have run, raise what one of them raised. Waiting again does nothing."""
        tasks = self._tasks.pop(key, ())
        steps = self._steps.pop(key, None)
        if steps is None or self._stopped:
            for task in tasks:
                task()
        else:
            for step in steps:
                step.wait()

    def stop(self) -> None:
        """Wait for what runs, drop what has not begun. An interrupt is raised after that; stop again as you like."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._stopped = True
                for _ in range(self._started):
                    self._queue.put(None)
                while self._at_work:
                    time.sleep(_POLL_S)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _work(self) -> None:
        """What a thread does."""
        mine = _thread.get_ident()
        self._at_work.add(mine)  # before it looks whether it is to stop
        try:
            self._begun.put(None)
            while not self._stopped and (step := self._queue.get()) is not None:
                if not self._stopped:
                    step.run()
        finally:
            self._at_work.discard(mine)
