"""What the layer logs.

An operation only records its messages; its caller logs them when the operation has ended. The caller may have a lock of
`logging`, because a signal handler or a finaliser may have interrupted a log call. If the operation's thread logged, it
would wait for that lock while the caller waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .. import _core

_Result = TypeVar("_Result")
_Note = tuple[int, str, tuple[object, ...]]

_logger = logging.getLogger("cumem_sleep")


class _Thread(threading.local):
    notes: Notes | None = None  # of the operation that this thread runs


_thread = _Thread()


def debug(message: str, *arguments: object) -> None:
    """Log the message, or record it if this thread runs an operation; so do the functions below."""
    _log(logging.DEBUG, message, *arguments)


def info(message: str, *arguments: object) -> None:
    """As `debug`."""
    _log(logging.INFO, message, *arguments)


def tells_info() -> bool:
    """Whether anybody sees what `info` logs."""
    return _logger.isEnabledFor(logging.INFO)


def warning(message: str, *arguments: object) -> None:
    """As `debug`."""
    _log(logging.WARNING, message, *arguments)


def error(message: str, *arguments: object) -> None:
    """As `debug`."""
    _log(logging.ERROR, message, *arguments)


class Notes:
    """The messages of one operation: recorded on the thread that is inside (`with notes:`), logged by the caller."""

    def __init__(self) -> None:
        self._recorded: list[_Note] = []
        self._before: Notes | None = None

    def __enter__(self) -> None:
        self._before, _thread.notes = _thread.notes, self

    def __exit__(self, *error: object) -> None:
        _thread.notes = self._before

    def record(self, level: int, message: str, arguments: tuple[object, ...]) -> None:
        """Keep this message."""
        self._recorded.append((level, message, arguments))

    def log(self) -> None:
        """Log what was recorded."""
        for level, message, arguments in self._recorded:
            _log(level, message, *arguments)
        self._recorded.clear()


def run(lock: _core.OperationLock, work: Callable[[], _Result]) -> _Result:
    """`lock.run(work)`; when it has ended, log what it recorded."""
    notes = Notes()

    def recorded() -> _Result:
        with notes:
            return work()

    try:
        return lock.run(recorded)
    finally:
        notes.log()


def _log(level: int, message: str, *arguments: object) -> None:
    if _thread.notes is None:
        _logger.log(level, message, *arguments)
    else:
        _thread.notes.record(level, message, arguments)
