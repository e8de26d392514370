"""A process that has imported vLLM's API server, which takes ten seconds, and forks for each program that needs it.

As a program: reads an order a line, says the number of the process that begins, and its exit status once it has ended.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

ENDS_WITHIN_S = 180.0
CHECKED_WITHIN_S = 880.0


class ReadyProcess:
    def __init__(self, folder: pathlib.Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(folder)],
            env={**os.environ, "PYTHONPATH": _python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    def run(self, program: pathlib.Path, *arguments: str, log: pathlib.Path, **environment: str) -> Program:
        """Begins a Python program in a fork; its output goes to `log`. The next begins after it has ended."""
        assert self._process.stdin is not None
        order = _Order([str(program), *arguments], environment, str(log))
        self._process.stdin.write(json.dumps(vars(order)).encode() + b"\n")
        return Program(self, int(self.said().removeprefix(b"began ")))

    def check(self, program: str, log: pathlib.Path, *arguments: str, code: int = 0, **environment: str) -> str:
        """What a program of this folder, or one with its whole path, says, which ends so, and in time."""
        running = self.run(pathlib.Path(__file__).parent / program, *arguments, log=log, **environment)
        try:
            ended = running.wait(CHECKED_WITHIN_S)
        except subprocess.TimeoutExpired:
            ended = -1
        finally:
            running.end()
        said = log.read_text()
        assert ended == code, said[-8_000:]
        return said

    def said(self, within_s: float | None = None) -> bytes:
        """The next line, or nothing."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            return b""
        line = self._process.stdout.readline()
        assert line, "the process that imports vLLM ended"
        return bytes(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(ENDS_WITHIN_S)


class Program:
    """A fork, the leader of a process group, with the methods of `subprocess.Popen`."""

    def __init__(self, parent: ReadyProcess, pid: int) -> None:
        self._parent, self.pid = parent, pid
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def _look(self, within_s: float | None) -> int | None:
        if self._status is None and (line := self._parent.said(within_s)):
            self._status = int(line.removeprefix(b"ended "))
        return self._status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """With all processes of its group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or has no group of its own yet
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        self.wait(ENDS_WITHIN_S)


@pytest.fixture(scope="session")
def ready_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadyProcess]:
    process = ReadyProcess(tmp_path_factory.mktemp("ready_process"))
    yield process
    process.end()


def _python_path() -> str:
    here = str(pathlib.Path(__file__).parent)
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass
class _Order:
    arguments: list[str]
    environment: dict[str, str]
    log: str


def _serve() -> _Order | None:
    """Returns in each fork with what to run, and without at the end of the orders."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return _Order(**json.loads(line))
        print("began", child, flush=True)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _become(order: _Order) -> None:
    os.setsid()
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, order.log, os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update(order.environment)
    _set_level(os.environ["VLLM_LOGGING_LEVEL"])
    sys.argv = order.arguments


def _set_level(level: str) -> None:
    """VLLM reads it when it is imported."""
    vllm: Any = logging.getLogger("vllm")
    for each in (vllm, *vllm.handlers):
        each.setLevel(level)


def main() -> None:
    from watched_server import prepare_process

    prepare_process(pathlib.Path(sys.argv[1]))
    importlib.import_module("vllm.entrypoints.openai.api_server")
    order = _serve()
    if order is not None:
        _become(order)
        runpy.run_path(order.arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
