"""What is in flight between host memory and one device, in one direction; own copies and a vault's alike."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from .. import _core
from ..core import log
from ..core.copy_chooser import BestRate, CopyChooser
from ..core.extents import Lane
from ..core.tuning import Tuning

_STALE_S = 0.05  # without copies: by then the driver may have begun to scrub, or ended

InFlight = TypeVar("InFlight")


class CopyTotals(NamedTuple):
    """Bytes, and for how long copies of them were in flight."""

    nbytes: int = 0
    seconds: float = 0.0

    @property
    def gbps(self) -> float | None:
        """10⁹ bytes per second; None where nothing was copied."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else None

    def plus(self, nbytes: int, seconds: float) -> CopyTotals:
        """These and more."""
        return CopyTotals(self.nbytes + nbytes, self.seconds + seconds)

    def since(self, before: CopyTotals) -> CopyTotals:
        """Without those before."""
        return self.plus(-before.nbytes, -before.seconds)


class Copier(Generic[InFlight]):
    """Keeps the copies of one link in flight, and times them batch by batch, so that its chooser chooses who makes
    them.

    Before each copy call `go_on`, for the size of the batch, and then `ready`; after it add to `in_flight`, and call
    `begun`.

    Args:
        finish: waits for the oldest of what is in flight, and calls `count` before anybody hears of it.

    Attributes:
        in_flight: what may not have ended yet, the oldest first.
        copied: since it was made.
        until: when something was in flight last.
        batch_bytes: begun of the batch.
        choice: how the batch is copied.
    """

    def __init__(self, chooser: CopyChooser, tuning: Tuning, finish: Callable[[InFlight], None]) -> None:
        self.in_flight: deque[InFlight] = deque()
        self.copied = CopyTotals()
        self.until = -math.inf
        self._chooser = chooser
        self._tuning = tuning
        self._finish = finish
        self.choice = chooser.next()
        self.batch_bytes, self._began_s = 0, 0.0

    @property
    def most_bytes(self) -> int:
        """Of the batch: while the engine is slow, a trial of it takes longer than a copy by the kernel."""
        if not self.choice.by_engine or self.choice.again:
            return self._tuning.batch_bytes
        return self._tuning.trial_bytes if self.choice.alone else self._tuning.engine_batch_bytes

    def go_on(self) -> None:
        """Start another batch, if this one is full, or is so old that its choice may be wrong by now."""
        if not self.in_flight and time.monotonic() - self.until > _STALE_S:
            self._chooser.restart()
            self.start_batch()
        elif self.batch_bytes >= self.most_bytes:
            self.end_batch()

    def ready(self) -> bool:
        """A copy of the batch is about to begin, and all that has to precede it is done: its time counts from here.

        Returns:
            Whether a kernel is to make it.
        """
        if self.choice.alone and not self.batch_bytes:
            self.wait()
            self._began_s = self.copied.seconds
        self.count()
        return not self.choice.by_engine

    def begun(self, nbytes: int, *, kernel_failed: bool) -> None:
        """So much more of the batch is in flight."""
        self.batch_bytes += nbytes
        if kernel_failed:
            self._chooser.best = None
            self.choice = self._chooser.next()

    def start_batch(self) -> None:
        """What was begun before counts for no rate."""
        self.choice = self._chooser.next()
        self.batch_bytes, self._began_s = 0, self.copied.seconds

    def end_batch(self) -> None:
        """Wait until another one can begin, and tell the chooser how long this one took."""
        self.wait(0 if self.choice.alone else self._chooser.in_flight - 1)
        self.count()
        self._chooser.record(self.batch_bytes, max(self.copied.seconds - self._began_s, 1e-9))
        self.start_batch()

    def wait(self, in_flight: int = 0) -> None:
        """Wait until no more than this many are in flight."""
        while len(self.in_flight) > in_flight:
            self._finish(self.in_flight.popleft())

    def count(self, nbytes: int = 0) -> None:
        """So many bytes more are copied. Time counts while anything is in flight."""
        now = time.monotonic()
        if nbytes or self.in_flight:
            self.copied = self.copied.plus(nbytes, now - self.until)
        self.until = now


def load_kernel(device: int) -> bool:
    """Make the context, if there is none yet, and load the kernel there; returns whether it can be used.

    Not if kernels cannot access pinned memory by its host address.
    """
    try:
        _core.memory_info(device)
        if not _core.device_info(device).host_pointers:
            return False
        _core.load_copy_kernel(device)
    except Exception as error:  # whatever it is, the engine copies
        log.warning("copies go by the copy engine alone, because the copy kernel failed: %s", error)
        return False
    return True


class CopyChoosers:
    """The chooser of each operation on each device.

    Attributes:
        best_rates: the highest rate seen on the link to each device on which the kernel runs.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.best_rates: dict[int, BestRate] = {}

    def warm_up(self, device: int) -> None:
        """Load the kernel on `device`; without this only the copy engine is used there."""
        if load_kernel(device):
            self.best_rates.setdefault(device, BestRate())

    def of(self, device: int, lanes: Sequence[Lane], total_bytes: int, timed_bytes: int) -> CopyChooser:
        """For copies to `device` on these lanes; where `total_bytes` are few, the engine makes all of them.

        Args:
            timed_bytes: as for `CopyChooser`.
        """
        is_worth_it = total_bytes >= self._tuning.worth_choosing_bytes and all(lane.kernels_reach for lane in lanes)
        return CopyChooser(self.best_rates.get(device) if is_worth_it else None, timed_bytes, len(lanes), self._tuning)
