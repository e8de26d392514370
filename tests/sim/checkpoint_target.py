"""A process that other processes lock, checkpoint and restore; it does what it is told in lines of Python."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sim_driver import CALLS, MIB, PAGE, Address, Driver, HostFunction, Int, read, write

import cumem_sleep
from cumem_sleep import sim


class Worker:
    """Runs in the target: the driver, work in the background, and a stream that can be kept busy."""

    def __init__(self) -> None:
        self.driver = Driver(sim.library_path())
        self._results: queue.Queue[object] = queue.Queue()
        self._running, self._may_end = threading.Event(), threading.Event()
        self._function = HostFunction(self._keep_busy)
        self._callers: list[threading.Thread] = []

    def begin(self, call: str, *arguments: object) -> None:
        """Make a driver call on another thread."""

        def work() -> None:
            self._results.put((call, self.driver.error_name(self.driver.calls[call](*arguments))))

        threading.Thread(target=work, daemon=True).start()

    def begin_with_zeros(self, call: str) -> None:
        kinds = CALLS[call][1]
        self.begin(call, *(HostFunction() if kind is HostFunction else kind(0) for kind in kinds))

    def result(self) -> object:
        """Of the call that ended first."""
        return self._results.get(timeout=30)

    def has_result(self) -> bool:
        return not self._results.empty()

    def begin_when_locked(self, call: str, *arguments: object) -> None:
        """Make a call on another thread as soon as calls have to wait, or wait for one that does."""
        threading.Thread(target=self._wait_for_lock, args=(call, *arguments), daemon=True).start()

    def die_when_locked(self, call: str, *arguments: object) -> None:
        self.begin_when_locked(call, *arguments)
        self._on_block(lambda: os.kill(os.getpid(), signal.SIGKILL))

    def keep_calling(self, threads: int) -> None:
        """Make calls on so many threads, until `stop_calling`."""
        self._may_end.clear()
        self._callers = [threading.Thread(target=self._call, daemon=True) for _ in range(threads)]
        for thread in self._callers:
            thread.start()

    def stop_calling(self) -> list[object]:
        """What went wrong."""
        self._may_end.set()
        for thread in self._callers:
            thread.join(30)
        return [self._results.get() for _ in range(self._results.qsize())]

    def _call(self) -> None:
        try:
            self.driver.enter()
            stream = self.driver.stream()
            while not self._may_end.is_set():
                address = self.driver.allocate()
                assert not self.driver.calls["cuMemsetD8Async"](address, 1, PAGE, stream)
                assert not self.driver.calls["cuStreamSynchronize"](stream)
                self.driver.free(address)
        except BaseException as error:
            self._results.put(repr(error))

    def _wait_for_lock(self, call: str, *arguments: object) -> None:
        """Calls end at once until one is held up."""
        before = sim.stats().blocked_calls
        while sim.stats().blocked_calls == before:
            code = self.driver.calls[call](*arguments)
        self._results.put((call, self.driver.error_name(code)))

    def _on_block(self, act: Callable[[], object]) -> None:
        before = sim.stats().blocked_calls

        def work() -> None:
            wait_until(lambda: sim.stats().blocked_calls > before)
            act()

        threading.Thread(target=work, daemon=True).start()

    def keep_busy(self) -> None:
        """Enqueue work that does not end before `end_work`."""
        self.driver.ok("cuLaunchHostFunc", None, self._function, None)
        assert self._running.wait(30)

    def end_work(self) -> None:
        self._may_end.set()

    def _keep_busy(self, _: int) -> None:
        self._running.set()
        self._may_end.wait(60)


class Target:
    """The test's side. `ask` evaluates an expression in the process, with `worker`, `driver` and `sim` to hand."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def ask(self, expression: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the target ended at {expression}"
        return ast.literal_eval(answer)

    def wait_for_blocked(self, calls: int) -> None:
        wait_until(lambda: self.ask("sim.stats().blocked_calls") >= calls)

    def calls_made(self) -> int:
        """Without those that never wait, which a thread in the middle of an answer may make."""
        calls: dict[str, int] = self.ask("dict(sim.stats().calls)")
        return sum(calls.values()) - calls["cuGetErrorName"]

    def kill(self, reap: bool = True) -> None:
        self._process.send_signal(signal.SIGKILL)
        if reap:
            self._process.wait(30)
        else:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.001)


@contextlib.contextmanager
def process_that_answers(command: list[str], **environment: object) -> Iterator[Target]:
    folders = [pathlib.Path(__file__).parent, pathlib.Path(cumem_sleep.__path__[0]).parent]
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folders[0],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "CUMEM_SLEEP_SIM_DEVICE_BYTES": str(64 * MIB),
            **{f"CUMEM_SLEEP_SIM_{name}": str(value) for name, value in environment.items()},
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Target(process)
    finally:
        process.kill()
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def answer(**names: object) -> None:
    known = {
        "ctypes": ctypes,
        "sim": sim,
        "os": os,
        "signal": signal,
        "Int": Int,
        "Address": Address,
        "HostFunction": HostFunction,
        "PAGE": PAGE,
    }
    for line in sys.stdin:
        print(repr(eval(line, {**known, "read": read, "write": write, **names})), flush=True)


if __name__ == "__main__":
    worker = Worker()
    answer(worker=worker, driver=worker.driver)
