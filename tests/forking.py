"""Processes for tests' scripts, forked from one that has imported what all of them need.

That takes longer than most of them run. The one that forks has opened no driver and has no threads.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import TextIO

import cumem_sleep

# From Python 3.12 on a fork beside threads is warned of; what becomes of it is what some tests look at.
QUIET = ("-W", "ignore:This process:DeprecationWarning")
FOLDER = pathlib.Path(__file__).parent  # not the checkout, whose package may not be built
PATH = os.pathsep.join([str(pathlib.Path(cumem_sleep.__path__[0]).parent), str(FOLDER)])


class Forked:
    """A script in a process of its own, which has the descriptors in `sys.argv`."""

    def __init__(self, script: str, environment: Mapping[str, str], descriptors: Sequence[int] = ()) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115  (`wait` closes them)
            own = (theirs.fileno(), *(file.fileno() for file in self._files))
            socket.send_fds(_server(), [b"fork"], [*own, *descriptors])
        self._answers = self._connection.makefile("rb")
        with self._connection.makefile("wb") as request:
            pickle.dump((script, dict(environment)), request)
        self.pid = int(self._answers.readline())
        self._ended: subprocess.CompletedProcess[str] | None = None

    def kill(self) -> None:
        """With SIGKILL, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """What became of it, and what it has printed. It is killed if that takes longer."""
        if self._ended is None:
            self._connection.settimeout(timeout_s)
            try:
                status = os.waitstatus_to_exitcode(int(self._answers.readline()))
            except BaseException:
                self.kill()
                raise
            finally:
                output, errors = map(_content, self._files)
                self._answers.close()
                self._connection.close()
            self._ended = subprocess.CompletedProcess("a script", status, output, errors)
        return self._ended


def _content(file: TextIO) -> str:
    with file:
        file.seek(0)
        return file.read()


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": PATH}
    # In a session of its own: Ctrl-C is for this process, which then kills what it waits for.
    command = [sys.executable, *QUIET, __file__]
    with theirs:
        process = subprocess.Popen(command, stdin=theirs, cwd=FOLDER, env=environment, start_new_session=True)

    def end() -> None:
        ours.send(b"end")
        process.wait()

    atexit.register(end)
    return ours


# What follows runs in the process that forks, and in those that it forks.


def _script() -> str:
    """Returns in the process of each script: what it is to run."""
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    children = 0
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 8, 16)
        while children and os.waitpid(-1, os.WNOHANG if descriptors else 0)[0]:
            children -= 1
        if not descriptors:
            os._exit(0)
        if os.fork() == 0:
            break
        children += 1
        for each in descriptors:
            os.close(each)
    requests.close()
    child = os.fork()
    connection, *outputs = descriptors[:3]
    if child:
        for each in descriptors[1:]:
            os.close(each)
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            os.write(connection, b"%d\n" % child)
            os.write(connection, b"%d\n" % os.waitpid(child, 0)[1])
        os._exit(0)
    with os.fdopen(connection, "rb") as file:
        script, environment = pickle.load(file)
    for number, each in enumerate(outputs, 1):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["-c", *map(str, descriptors[3:])]
    return str(script)


if __name__ == "__main__":
    import support

    support.random_bytes(0, support.np.random.default_rng(0))  # makes what it cuts from
    gc.freeze()
    exec(compile(_script(), "<string>", "exec"))
