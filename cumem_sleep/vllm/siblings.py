"""Several API servers of one vLLM: what one of them does to the model's sleep is known to the others."""

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

TRIES, BETWEEN_S = 20, 0.01  # a sibling that only looks has the lock for a moment


class Busy(Exception):
    """Another API server of this vLLM is changing the model's sleep, or is sending requests to the engine."""


class Siblings:
    """A file that API servers share, as a lock, and for what they know.

    They are children of one process, which gives the file its name.
    """

    def __init__(self) -> None:
        self._file = -1
        self._has_turn = False
        self._listeners = 0

    @asynccontextmanager
    async def excluded(self) -> AsyncIterator[None]:
        """No sibling changes anything meanwhile, and no server listens.

        Raises:
            Busy: one does.
        """
        for _ in range(TRIES):
            if not self._listeners and self._lock(fcntl.LOCK_EX):
                break
            await asyncio.sleep(BETWEEN_S)
        else:
            raise Busy(
                "another API server of this vLLM is changing the model's sleep, or requests are on their way to the"
                " engine: ask again when that is done"
            )
        self._has_turn = True
        try:
            yield
        finally:
            self._has_turn = False
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def tell(self, facts: dict[str, Any]) -> None:
        """Tell them; only while they are excluded."""
        content = json.dumps(facts).encode()
        os.pwrite(self._opened(), content, 0)
        os.ftruncate(self._file, len(content))

    def told(self) -> dict[str, Any]:
        """What was told last, {} at the start; only while they are excluded, or heard."""
        content = os.pread(self._opened(), 1 << 16, 0)
        return dict(json.loads(content)) if content else {}

    def heard(self) -> dict[str, Any] | None:
        """What was told last; None while one of them, or this one, changes something."""
        if not self.listen():
            return None
        try:
            return self.told()
        finally:
            self.listen_no_more()

    def listen(self) -> bool:
        """From now on nobody changes anything, until `listen_no_more`; False if somebody does."""
        if self._has_turn or not (self._listeners or self._lock(fcntl.LOCK_SH)):
            return False  # a second lock of the same file would undo the first
        self._listeners += 1
        return True

    def listen_no_more(self) -> None:
        """What was heard may change."""
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
    """The process that started this one, by a name that no later process can have."""
    number = os.getppid()
    fields = pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return f"{number}-{fields[19]}"  # the time of its start


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
