"""Several API servers of one vLLM: what changes the sleep in one of them is seen by the others."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TRIES, BETWEEN_S = 20, 0.01  # a sibling that only looks has the lock for a moment


class Busy(Exception):
    """Another API server of this vLLM is changing the model's sleep."""


class Siblings:
    """A lock that API servers share. They are children of one process, whose number names its file."""

    def __init__(self) -> None:
        self._file = -1

    @asynccontextmanager
    async def excluded(self) -> AsyncIterator[None]:
        """No sibling changes anything meanwhile.

        Raises:
            Busy: one does.
        """
        for _ in range(TRIES):
            if self._lock(fcntl.LOCK_EX):
                break
            await asyncio.sleep(BETWEEN_S)
        else:
            raise Busy("another API server of this vLLM is changing the model's sleep: ask again when it is done")
        try:
            yield
        finally:
            os.pwrite(self._file, (self.changes() + 1).to_bytes(8, "little"), 0)
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def changes(self) -> int:
        """How often one of them, or this one, changed something."""
        return int.from_bytes(os.pread(self._opened(), 8, 0), "little")

    def are_busy(self) -> bool:
        """Whether one of them changes the sleep now."""
        if not self._lock(fcntl.LOCK_SH):
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def _lock(self, how: int) -> bool:
        try:
            fcntl.flock(self._opened(), how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _opened(self) -> int:
        if self._file < 0:
            path = os.path.join(tempfile.gettempdir(), f"cumem-sleep-{os.getuid()}-{os.getppid()}.lock")
            self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        return self._file
