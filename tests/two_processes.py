"""A second process, and messages with file descriptors between it and the test."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from forking import Forked
from support import HANGS_S

from cumem_sleep import _core, sim

_PREAMBLE = """
import sys
from cumem_sleep import *
from cumem_sleep import _core, sim
from support import *
from two_processes import Link, open_driver
link = Link.of_parent()
"""


def open_driver() -> None:
    """The one of the suite, in a process that has no allocator."""
    simulated = os.environ["CUMEM_SLEEP_DRIVER"] == "sim"
    _core.open_driver(str(sim.library_path()) if simulated else "libcuda.so.1")


class Link:
    """One end of a connection; a message is a value and file descriptors."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def of_parent(cls) -> Link:
        return cls(socket.socket(fileno=int(sys.argv[1])))

    def send(self, value: object = None, *descriptors: int) -> None:
        socket.send_fds(self._end, [pickle.dumps(value)], descriptors)

    def receive(self) -> Any:
        """The value alone if no descriptors came with it, else (value, descriptor, ...)."""
        content, descriptors, _, _ = socket.recv_fds(self._end, 1 << 16, 16)
        assert content, "the other process ended"
        value = pickle.loads(content)
        return (value, *descriptors) if descriptors else value


@contextlib.contextmanager
def other_process(script: str, **environment: str) -> Iterator[tuple[Link, Forked]]:
    """Runs `script`, which has a `link` to here; it must end well by itself, unless the test killed it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(HANGS_S)
    with ours:
        with theirs:
            process = Forked(_PREAMBLE + textwrap.dedent(script), {**os.environ, **environment}, [theirs.fileno()])
        try:
            yield Link(ours), process
        except BaseException as error:
            process.kill()
            error.add_note(process.wait(HANGS_S).stderr) if sys.version_info >= (3, 11) else None
            raise
        ended = process.wait(HANGS_S)
    assert (ended.returncode, ended.stderr) in [(0, ""), (-9, "")], ended.stderr
