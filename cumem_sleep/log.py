"""What the layer logs.

An operation only notes what it has to say, and its caller logs it: the caller may hold a lock of `logging`, since a
signal handler or a finaliser runs in the middle of whatever it interrupts, and waits for the thread of the operation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from . import _core

_Result = TypeVar("_Result")
_Note = tuple[int, str, tuple[object, ...]]

_logger = logging.getLogger("cumem_sleep")


class _Thread(threading.local):
    notes: list[_Note] | None = None  # of the operation that this thread runs


_thread = _Thread()


def debug(message: str, *arguments: object) -> None:
    """Log it, or note it if this thread runs an operation; as the others do."""
    _log(logging.DEBUG, message, *arguments)


def info(message: str, *arguments: object) -> None:
    """As `debug`."""
    _log(logging.INFO, message, *arguments)


def warning(message: str, *arguments: object) -> None:
    """As `debug`."""
    _log(logging.WARNING, message, *arguments)


def error(message: str, *arguments: object) -> None:
    """As `debug`."""
    _log(logging.ERROR, message, *arguments)


def run(lock: _core.OperationLock, work: Callable[[], _Result]) -> _Result:
    """`lock.run(work)`, and log what it has noted when it has ended."""
    notes: list[_Note] = []
    try:
        return lock.run(partial(_noting, notes, work))
    finally:
        for level, message, arguments in notes:
            _log(level, message, *arguments)


def _log(level: int, message: str, *arguments: object) -> None:
    if _thread.notes is None:
        _logger.log(level, message, *arguments)
    else:
        _thread.notes.append((level, message, arguments))


def _noting(notes: list[_Note], work: Callable[[], _Result]) -> _Result:
    before, _thread.notes = _thread.notes, notes
    try:
        return work()
    finally:
        _thread.notes = before
