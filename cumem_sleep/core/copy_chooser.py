"""Who copies the next batch: the copy engine's rate is watched, and the kernel takes over while it is slow.

A kernel that reads host memory itself reaches 51 GB/s where the engine reaches 55. But while the driver scrubs memory
that this or another process has just freed, it occupies the engine for host-to-device copies and leaves them 27 GB/s; a
kernel keeps 48 (measured on an H200: `wake_paths.json`). Ours is `csrc/copy_kernel.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from .tuning import Tuning

# As a share of the best rate seen; the engine has less than half of it while it also scrubs memory.
_ENGINE_IS_BUSY = 0.7


@dataclass(frozen=True)
class CopyChoice:
    """How to copy the next batch.

    Attributes:
        by_engine: by the copy engine; otherwise by the kernel.
        alone: with no other copy in flight, so that its time gives the rate.
        again: the one before was fast. If there is a choice, this one is larger: the first may have fallen between two
            pieces of memory that the engine scrubs.
    """

    by_engine: bool
    alone: bool
    again: bool = False


@dataclass
class BestRate:
    """The highest rate seen on a link, in bytes per second."""

    value: float = 0.0

    def see(self, nbytes: int, seconds: float) -> float:
        """Take this rate into account, and return it."""
        rate = nbytes / seconds
        self.value = max(self.value, rate)
        return rate


class _State(Enum):
    KERNEL_TIMED = auto()  # alone, where no rate was seen yet
    TRIAL = auto()  # the engine alone
    SECOND_TRIAL = auto()  # once more: to believe it wrongly costs as much as dozens of trials
    FILLING = auto()  # the engine, whose queue fills: these batches seem to take no time
    ENGINE = auto()  # the engine, timed
    KERNEL = auto()  # for a while


class CopyChooser:
    """Who copies the next batch of one link, the engine or the kernel: ask `next`, then `record` what it took.

    The engine is used until it proves slow compared with the best rate seen; then the kernel for a while, and then the
    engine is tried again. If no rate was seen yet, the kernel's rate comes first. A rate counts as the best only if
    nothing else was in flight: after a stall on our side, batches that finished meanwhile seem to take no time.

    Args:
        timed_bytes: how many bytes are timed together for the engine's rate.

    Attributes:
        best: of the link, from one operation to the next; None: there is no kernel (any more), so there is no choice.
        in_flight: how many batches are begun before the first one is waited for.
    """

    def __init__(self, best: BestRate | None, timed_bytes: int, in_flight: int, tuning: Tuning) -> None:
        self.best = best
        self._timed_bytes = timed_bytes
        self.in_flight = in_flight
        self._tuning = tuning
        self._left = 0  # batches, in states that last for a number of them
        self._bytes, self._seconds = 0, 0.0  # timed together
        self._least_rate = 0.0
        self.restart()

    def restart(self) -> None:
        """What was seen of the engine says nothing any more."""
        self._state = _State.TRIAL if self.best is None or self.best.value else _State.KERNEL_TIMED

    def next(self) -> CopyChoice:
        """How to copy the next batch."""
        if self.best is None:
            return CopyChoice(by_engine=True, alone=False)
        state = self._state
        return CopyChoice(
            by_engine=state not in (_State.KERNEL_TIMED, _State.KERNEL),
            alone=state in (_State.KERNEL_TIMED, _State.TRIAL, _State.SECOND_TRIAL),
            again=state is _State.SECOND_TRIAL,
        )

    def record(self, nbytes: int, seconds: float) -> None:
        """The batch that `next` was asked for has so many bytes; alone it took so long, and otherwise it took so long
        until another could begin.
        """
        if self.best is None:
            return
        if self._state is _State.KERNEL:
            self._left -= 1
            if not self._left:
                self._state = _State.TRIAL
        elif self._state is _State.FILLING:
            self._left -= 1
            if not self._left:
                self._state, self._bytes, self._seconds = _State.ENGINE, 0, 0.0
        elif self._state is _State.ENGINE:
            self._bytes, self._seconds = self._bytes + nbytes, self._seconds + seconds
            if max(self._bytes, self._timed_bytes) < self._least_rate * self._seconds:
                self._use_kernel()  # however fast the rest would be
            elif self._bytes >= self._timed_bytes:
                self._use_engine(self.best)
        elif nbytes >= self._tuning.least_timed_bytes:  # alone; a smaller one tells nothing
            is_fast = self.best.see(nbytes, seconds) >= _ENGINE_IS_BUSY * self.best.value
            if self._state is _State.KERNEL_TIMED:
                self._state = _State.TRIAL
            elif not is_fast:
                self._use_kernel()
            elif self._state is _State.TRIAL:
                self._state = _State.SECOND_TRIAL
            else:
                self._use_engine(self.best)

    def _use_engine(self, best: BestRate) -> None:
        self._state, self._left = _State.FILLING, self.in_flight
        self._least_rate = _ENGINE_IS_BUSY * best.value

    def _use_kernel(self) -> None:
        self._state, self._left = _State.KERNEL, self._tuning.batches_between_trials
