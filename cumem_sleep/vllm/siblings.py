"""Several API servers of one vLLM: each learns what the others do to the model's sleep.

Only the server that makes a change knows which tags sleep, and whether weights are lost. It writes that to a file,
which it locks during the change; the lock of a server that dies goes with it. Requests go to the engine under
the same lock, shared, if nothing has changed since this server last looked.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import json
import os
import pathlib
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import IntEnum
from typing import Any

TRIES, BETWEEN_S = 20, 0.01  # a sibling that only reads has the lock for a moment
_FLOCK = "hhqqi4x"  # struct flock
_NAME = "api-servers-"
_UNTIL_BYTES = 8  # at the beginning of the file: a time; the facts are behind it
_FACTS_BYTES = 16 << 10  # which the file has from the start, so that a full disk keeps no server from telling


class Busy(Exception):
    """Another API server of this vLLM is changing the model's sleep, or is sending requests to the engine."""


class SiblingsUnknown(Exception):
    """What the other API servers of this vLLM do cannot be known: nothing may pass as if they did nothing."""


class _Lock(IntEnum):
    """What a lock means: the byte of the file that has it."""

    CHANGE = 0  # shared: requests are on their way to the engine, or the facts are read
    IN_USE = 1  # by a server that lives
    REQUESTS = 2  # a server has some
    LISTENER = 3  # the server that listens for calls that change the sleep


class Siblings:
    """A file that API servers share, in a folder of this user alone: its content, facts for each other, and its locks.

    A server that changes the model's sleep has the lock exclusively, and writes the facts. A server whose requests are
    on their way to the engine, or that reads the facts, shares it. Nobody waits for a shared lock. Locks belong to an
    open file description (fcntl(2)): a server that dies gives them back. Every method raises `SiblingsUnknown` where
    the file cannot be had, read or written.
    """

    def __init__(self) -> None:
        self._opened = -1
        self._is_exclusive = False
        self._sharers = 0  # in this server, which has one lock for all of them

    def open(self) -> int:
        """The descriptor of the file, which this server has from now on."""
        if self._opened < 0:
            with _known():
                self._opened = _open(f"{_NAME}{_parent()}")
        return self._opened

    def _lock(self, what: _Lock, kind: int) -> bool:
        """Have a lock instead of the one that was had (`fcntl.F_RDLCK`, `F_WRLCK`), or none (`F_UNLCK`). False if
        another server's prevents it.
        """
        with _known():
            return _lock(self.open(), what, kind)

    def become_listener(self) -> bool:
        """Whether this server is the one that listens for all of them: the first that asked."""
        return self._lock(_Lock.LISTENER, fcntl.F_WRLCK)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Exclusive lock: no other server has any, and this one shares none.

        Raises:
            Busy: another server has the lock.
        """
        for _ in range(TRIES):
            if not self._sharers and self._lock(_Lock.CHANGE, fcntl.F_WRLCK):
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
            self._lock(_Lock.CHANGE, fcntl.F_UNLCK)

    def withdraw(self) -> None:
        """From now on nobody can read the facts, until others are written; only inside `exclusive`."""
        with _known():
            os.pwrite(self.open(), b"?", _UNTIL_BYTES)

    def write(self, facts: dict[str, Any]) -> None:
        """Replace the facts, which were withdrawn; only inside `exclusive`."""
        content = json.dumps(facts).encode().ljust(_FACTS_BYTES, b"\0")
        with _known():
            if os.pwrite(self.open(), content[1:], _UNTIL_BYTES + 1) < len(content) - 1:
                raise OSError("not all of it could be written")
            os.ftruncate(self.open(), _UNTIL_BYTES + len(content))
            os.pwrite(self.open(), content[:1], _UNTIL_BYTES)

    def read(self) -> dict[str, Any]:
        """The facts, {} at the start; only with a lock, shared or exclusive."""
        with _known():
            content = os.pread(self.open(), os.fstat(self.open()).st_size, _UNTIL_BYTES).rstrip(b"\0")
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
        if self._is_exclusive or not (self._sharers or self._lock(_Lock.CHANGE, fcntl.F_RDLCK)):
            return False  # a second lock on the same byte would replace the first
        self._sharers += 1
        return True

    def unshare(self) -> None:
        """Release the shared lock: what was read may change now."""
        self._sharers -= 1
        if not self._sharers:
            self._lock(_Lock.CHANGE, fcntl.F_UNLCK)

    # Whether any of them has requests, and until when the model stays awake

    def show_requests(self, has_some: bool) -> None:
        """Let the others see whether this server has requests."""
        self._lock(_Lock.REQUESTS, fcntl.F_RDLCK if has_some else fcntl.F_UNLCK)

    def others_have_requests(self) -> bool:
        """Whether another server has some."""
        with _known():
            found = fcntl.fcntl(self.open(), fcntl.F_OFD_GETLK, _flock(_Lock.REQUESTS, fcntl.F_WRLCK))
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    @property
    def awake_until(self) -> float:
        """By `time.monotonic`, which is the same in all processes of a host."""
        with _known():
            return float(struct.unpack("d", os.pread(self.open(), _UNTIL_BYTES, 0))[0])

    def postpone(self, until: float) -> None:
        """Keep the model awake at least until then."""
        if until > self.awake_until:
            with _known():
                os.pwrite(self.open(), struct.pack("d", until), 0)


@contextmanager
def _known() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        what = "what the API servers of this vLLM tell each other"
        raise SiblingsUnknown(f"{what} cannot be had: {error}") from error


def _lock(descriptor: int, what: _Lock, kind: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(what, kind))
    except BlockingIOError:
        return False
    return True


def _flock(what: _Lock, kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, what, 1, 0)


def _open(name: str) -> int:
    """The file of this name, in use from now on. Files that no server uses any more are removed."""
    with _folder() as folder:
        _remove_left_over(folder)
        while True:
            flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                if _lock(descriptor, _Lock.IN_USE, fcntl.F_RDLCK) and os.fstat(descriptor).st_nlink:
                    os.posix_fallocate(descriptor, 0, _UNTIL_BYTES + _FACTS_BYTES)
                    atexit.register(_close, descriptor)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # another server has just removed it


def _close(descriptor: int) -> None:
    """At the end of this server; the last one removes the file."""
    os.close(descriptor)
    with suppress(OSError), _folder() as folder:
        _remove_left_over(folder)


def _remove_left_over(folder: int) -> None:
    for name in os.listdir(folder):
        if not name.startswith(_NAME):
            continue  # the vault's socket may be here
        with suppress(FileNotFoundError):
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:  # with the lock nobody begins to use it, nor removes it and makes another of the same name
                if _lock(descriptor, _Lock.IN_USE, fcntl.F_WRLCK) and os.fstat(descriptor).st_nlink:
                    os.unlink(name, dir_fd=folder)
            finally:
                os.close(descriptor)


@contextmanager
def _folder() -> Iterator[int]:
    """A descriptor of the folder where this user's API servers share files.

    Raises:
        OSError: somebody else can change what is in it, or it cannot be had.
    """
    path = os.path.join(tempfile.gettempdir(), f"cumem-sleep-{os.geteuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise PermissionError(f"expected {path} to be a folder that this user alone can change: set TMPDIR")
        yield descriptor
    finally:
        os.close(descriptor)


def _parent() -> str:
    """A name for the process that started this one, which no other process has, earlier, later or elsewhere."""
    number, namespace = os.getppid(), os.stat("/proc/self/ns/pid").st_ino
    fields = pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return f"{namespace}-{number}-{fields[19]}"  # the time of its start
