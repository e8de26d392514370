"""Who frees the host memory of freed segments, and when.

The backup of a segment that was freed is of no use, and whoever has the allocator's lock forgets it. But a free does
not wait for that lock: it may come at any time, on any thread, from PyTorch's hook. So there are three places, all of
them here, and together they miss nothing:

- An operation forgets what nobody needs, freed segments among it, when it ends, and what was freed when it begins
  (`for_operation`).
- After a free, and between the steps of background work, the lock is taken if it is free (`if_free`). If it is not,
  whoever has it is left to it.
- Whoever has released the lock, or did not get it, looks whether a segment was freed too late for that (`_look_again`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .. import _core
from .catalogue import Catalogue


class PruningLock:
    """The allocator's lock, for operations and for whatever else changes backups: taking it prunes them."""

    def __init__(self, lock: _core.OperationLock, catalogue: Catalogue) -> None:
        self._lock = lock
        self._catalogue = catalogue

    @contextmanager
    def for_operation(self, come_back: Callable[[], None] | None) -> Iterator[None]:
        """Wait for the lock, and have it for an operation.

        Args:
            come_back: called first if the process sleeps at level 3; None: it stays there, where nothing can be freed.

        Raises:
            InvalidState: it would wait forever.
        """
        try:
            with self._lock.hold():
                if _core.driver_calls_suspended():
                    if come_back is None:
                        yield
                        return
                    come_back()
                with _core.CurrentContext(), self._forgetting():
                    yield
        finally:
            self._look_again()

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        _core.reclaim()
        if _core.has_freed():  # what else nobody needs went when the operation before ended
            self._catalogue.prune()
        try:
            yield
        finally:
            if not _core.driver_calls_suspended():
                self._catalogue.prune()

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Take the lock if it is free, and yield whether it was."""
        with self._lock.hold(wait=False) as is_taken:
            yield is_taken
            if is_taken:
                self._catalogue.prune_freed()
        self._look_again()

    def after_a_free(self) -> None:
        """What was freed goes now, or when the operation that has the lock ends."""
        with self.if_free() as is_taken:
            if is_taken:
                _core.reclaim()

    def _look_again(self) -> None:
        while _core.has_freed():
            with self._lock.hold(wait=False) as is_taken:
                if not is_taken:
                    return  # whoever has it looks again in turn
                self._catalogue.prune_freed()
