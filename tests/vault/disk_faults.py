"""A disk that fails when it is told to, also in the middle of a vault that runs.

`DiskFaults` is the side of the test; `install` that of the process whose requests fail: those of `os.pwritev` and
`os.preadv`, which only files that are spilled to use.
"""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
import time
from collections.abc import Callable, Sequence

KINDS = ("", "EIO", "ENOSPC", "short", "torn")
_WAYS = ("write", "read")
_Call = Callable[[int, Sequence[memoryview], int], int]


class DiskFaults:
    """What is to happen to the next requests, in a page that both processes map."""

    def __init__(self, path: pathlib.Path) -> None:
        path.touch()
        os.truncate(path, mmap.PAGESIZE)
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def set(self, way: str, kind: str, count: int = 1) -> None:
        """So many requests of that way go wrong."""
        at = 4 * _WAYS.index(way)
        self._page[at : at + 2] = bytes((KINDS.index(kind), count))

    def throttle(self, way: str, mib_per_s: int) -> None:
        """Each request of that way takes as long as if there was none beside it; 0: as long as it takes."""
        at = 4 * _WAYS.index(way) + 2
        self._page[at : at + 2] = mib_per_s.to_bytes(2, "little")

    def clear(self) -> None:
        """The disk is well again."""
        for way in _WAYS:
            self.set(way, "", 0)

    def take(self, way: str) -> tuple[str, int]:
        """What is to happen to this request, and its rate."""
        at = 4 * _WAYS.index(way)
        kind, count = self._page[at], self._page[at + 1]
        rate = int.from_bytes(self._page[at + 2 : at + 4], "little")
        if not count:
            return "", rate
        self._page[at + 1] = count - 1
        return KINDS[kind], rate


def install(path: pathlib.Path) -> None:
    """In this process, and those that it forks."""
    faults = DiskFaults(path)

    def failing(way: str, call: _Call) -> _Call:
        def do(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            kind, rate = faults.take(way)
            nbytes = sum(map(len, buffers))
            if rate:
                time.sleep(nbytes / rate / (1 << 20))
            if kind in ("EIO", "ENOSPC"):
                raise OSError(getattr(errno, kind), kind)
            done = call(descriptor, buffers, offset)
            if kind == "torn" and way == "read":
                buffers[0][:4096] = bytes(byte ^ 0xFF for byte in buffers[0][:4096])
            return done // 2 if kind == "short" else done

        return do

    os.pwritev = failing("write", os.pwritev)  # type: ignore[assignment]
    os.preadv = failing("read", os.preadv)  # type: ignore[assignment]
