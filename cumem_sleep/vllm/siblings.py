"""Several API servers of one vLLM: each learns what the others do to the model's sleep.

Only the server that makes a change knows which tags sleep, and whether weights are lost. It writes that to a file,
which it locks during the change; the lock of a server that dies goes with it. Requests go to the engine under
the same lock, shared, if nothing has changed since this server last looked.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import json
import os
import pathlib
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

TRIES, BETWEEN_S = 20, 0.01  # a sibling that only reads has the lock for a moment
_FLOCK = "hhqqi4x"  # struct flock


class Busy(Exception):
    """Another API server of this vLLM is changing the model's sleep, or is sending requests to the engine."""


class Siblings:
    """A file that API servers share: its content, facts for each other, and its lock (flock), shared or exclusive.

    A server that changes the model's sleep has the lock exclusively, and writes the facts. A server whose requests are
    on their way to the engine, or that reads the facts, shares it. Nobody waits for a shared lock.
    """

    def __init__(self) -> None:
        self._file = -1
        self._is_exclusive = False
        self._sharers = 0  # in this server, which has one lock for all of them

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Exclusive lock: no other server has any, and this one shares none.

        Raises:
            Busy: another server has the lock.
        """
        for _ in range(TRIES):
            if not self._sharers and self._lock(fcntl.LOCK_EX):
                break
            await asyncio.sleep(BETWEEN_S)
        else:
            raise Busy(
                "another API server of this vLLM is changing the model's sleep, or requests are on their way to the"
                " engine: try again when that is done"
            )
        self._is_exclusive = True
        try:
            yield
        finally:
            self._is_exclusive = False
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def write(self, facts: dict[str, Any]) -> None:
        """Replace the facts; only inside `exclusive`."""
        content = json.dumps(facts).encode()
        os.pwrite(self._opened(), content, 0)
        os.ftruncate(self._file, len(content))

    def read(self) -> dict[str, Any]:
        """The facts, {} at the start; only with a lock, shared or exclusive."""
        content = os.pread(self._opened(), 1 << 16, 0)
        return dict(json.loads(content)) if content else {}

    def read_shared(self) -> dict[str, Any] | None:
        """The facts; None while a sibling, or this server, changes something."""
        if not self.share():
            return None
        try:
            return self.read()
        finally:
            self.unshare()

    def share(self) -> bool:
        """Shared lock: nobody changes anything until `unshare`. False if a server is changing something."""
        if self._is_exclusive or not (self._sharers or self._lock(fcntl.LOCK_SH)):
            return False  # a second lock on the same file would replace the first
        self._sharers += 1
        return True

    def unshare(self) -> None:
        """Release the shared lock: what was read may change now."""
        self._sharers -= 1
        if not self._sharers:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self, how: int) -> bool:
        try:
            fcntl.flock(self._opened(), how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _opened(self) -> int:
        if self._file < 0:
            self._file = _shared_file("lock")
        return self._file


class Resting:
    """A file by which API servers know whether any of them has requests, and until when the model stays awake.

    Who has requests has a lock on it, of an open file description (fcntl(2)), which others see without taking one.
    """

    def __init__(self) -> None:
        self._file = -1

    def lock(self, has_requests: bool) -> None:
        """Let the others see whether this server has requests."""
        fcntl.fcntl(self._opened(), fcntl.F_OFD_SETLK, _ofd(fcntl.F_RDLCK if has_requests else fcntl.F_UNLCK))

    def others_have_requests(self) -> bool:
        """Whether another server has locked the file."""
        found = fcntl.fcntl(self._opened(), fcntl.F_OFD_GETLK, _ofd(fcntl.F_WRLCK))
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    @property
    def until(self) -> float:
        """By `time.monotonic`, which is the same in all processes of a host."""
        content = os.pread(self._opened(), 8, 0)
        return float(struct.unpack("d", content)[0]) if content else 0.0

    def postpone(self, until: float) -> None:
        """Keep the model awake at least until then."""
        if until > self.until:
            os.pwrite(self._opened(), struct.pack("d", until), 0)

    def _opened(self) -> int:
        if self._file < 0:
            self._file = _shared_file("rest")
        return self._file


def _ofd(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


def _shared_file(suffix: str) -> int:
    """A file of the API servers of one vLLM, open: they are children of one process, after which it is named."""
    path = os.path.join(tempfile.gettempdir(), f"cumem-sleep-{os.getuid()}-{_parent()}.{suffix}")
    atexit.register(_remove, path)  # all of them end together
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _parent() -> str:
    """A name for the process that started this one, which no later process can have."""
    number = os.getppid()
    fields = pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return f"{number}-{fields[19]}"  # the time of its start


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
