"""Several API servers of one vLLM: each learns what the others do to the model's sleep."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import json
import os
import pathlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

TRIES, BETWEEN_S = 20, 0.01  # a sibling that only reads has the lock for a moment


class Busy(Exception):
    """Another API server of this vLLM is changing the model's sleep, or is sending requests to the engine."""


class Siblings:
    """A file that API servers share: a lock, and the facts that they tell each other.

    They are children of one process, after which the file is named.
    """

    def __init__(self) -> None:
        self._file = -1
        self._has_turn = False
        self._listeners = 0

    @asynccontextmanager
    async def excluded(self) -> AsyncIterator[None]:
        """Exclusive lock: no sibling changes anything meanwhile, and no server listens.

        Raises:
            Busy: another server has the lock.
        """
        for _ in range(TRIES):
            if not self._listeners and self._lock(fcntl.LOCK_EX):
                break
            await asyncio.sleep(BETWEEN_S)
        else:
            raise Busy(
                "another API server of this vLLM is changing the model's sleep, or requests are on their way to the"
                " engine: try again when that is done"
            )
        self._has_turn = True
        try:
            yield
        finally:
            self._has_turn = False
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def tell(self, facts: dict[str, Any]) -> None:
        """Tell the siblings; only inside `excluded`."""
        content = json.dumps(facts).encode()
        os.pwrite(self._opened(), content, 0)
        os.ftruncate(self._file, len(content))

    def told(self) -> dict[str, Any]:
        """The last facts told, {} at the start; only inside `excluded` or `heard`."""
        content = os.pread(self._opened(), 1 << 16, 0)
        return dict(json.loads(content)) if content else {}

    def heard(self) -> dict[str, Any] | None:
        """The last facts told; None while a sibling, or this server, changes something."""
        if not self.listen():
            return None
        try:
            return self.told()
        finally:
            self.listen_no_more()

    def listen(self) -> bool:
        """Shared lock: nobody changes anything until `listen_no_more`. False if a server is changing something."""
        if self._has_turn or not (self._listeners or self._lock(fcntl.LOCK_SH)):
            return False  # a second lock on the same file would replace the first
        self._listeners += 1
        return True

    def listen_no_more(self) -> None:
        """Release the shared lock: what was heard may change now."""
        self._listeners -= 1
        if not self._listeners:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self, how: int) -> bool:
        try:
            fcntl.flock(self._opened(), how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _opened(self) -> int:
        if self._file < 0:
            path = os.path.join(tempfile.gettempdir(), f"cumem-sleep-{os.getuid()}-{_parent()}.lock")
            self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            atexit.register(_remove, path)  # all of them end together
        return self._file


def _parent() -> str:
    """A name for the process that started this one, which no later process can have."""
    number = os.getppid()
    fields = pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return f"{number}-{fields[19]}"  # the time of its start


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
