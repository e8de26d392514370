"""What the layer logs.

An operation only records its messages; its caller logs them when the operation has ended. The caller may have a lock of
`logging`, because a signal handler or a finaliser may have interrupted a log call. If the operation's thread logged, it
would wait for that lock while the caller waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .. import _core

_Result = TypeVar("_Result")

_logger = logging.getLogger("cumem_sleep")


class _Thread(threading.local):
    notes: Notes | None = None  # of the operation that this thread runs


_thread = _Thread()


def tells_info() -> bool:
    """Whether anybody sees what `info` logs."""
    return _logger.isEnabledFor(logging.INFO)


class Notes(list[tuple[int, str, tuple[object, ...]]]):
    """The messages of one operation: recorded on the thread that is inside (`with notes:`), logged by the caller."""

    _before: Notes | None = None

    def __enter__(self) -> None:
        self._before, _thread.notes = _thread.notes, self

    def __exit__(self, *error: object) -> None:
        _thread.notes = self._before

    def log(self) -> None:
        """Log what was recorded."""
        for level, message, arguments in self:
            _log(level, message, *arguments)
        self.clear()


def run(lock: _core.OperationLock, work: Callable[[], _Result], *, holding: bool = False) -> _Result:
    """`lock.run(work)`, `holding` the lock; when it has ended, log what it recorded."""
    notes = Notes()

    def recorded() -> _Result:
        with notes, lock.hold() if holding else nullcontext():
            return work()

    try:
        return lock.run(recorded)
    finally:
        notes.log()


def _log(level: int, message: str, *arguments: object) -> None:
    """Log the message, or record it if this thread runs an operation."""
    if _thread.notes is None:
        _logger.log(level, message, *arguments)
    else:
        _thread.notes.append((level, message, arguments))


debug, info = partial(_log, logging.DEBUG), partial(_log, logging.INFO)
warning, error = partial(_log, logging.WARNING), partial(_log, logging.ERROR)
