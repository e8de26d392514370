"""Which route the next batch takes: the copy engine's rate is watched, and the kernel takes over while it is slow."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from ..tuning import Tuning

# As a share of the best rate seen; the engine has less than half of it while it also scrubs memory.
_ENGINE_IS_BUSY = 0.7


@dataclass(frozen=True)
class Choice:
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


# Yields how to copy a batch, and is sent the bytes and seconds that it took. Where one ends, what it found out is its
# value, for the one that it is a part of.
Choices = Generator[Choice, tuple[int, float], None]
_Trial = Generator[Choice, tuple[int, float], bool]


def choices(best: BestRate, timed_bytes: int, in_flight: int, tuning: Tuning) -> Choices:
    """Yields how to copy the next batch; send it the bytes and seconds of the batch before.

    The engine is used until it proves slow compared with the best rate seen; then the kernel for a while, and then the
    engine is tried again. If no rate was seen yet, the kernel's rate comes first. A rate counts as the best only if
    nothing else was in flight: after a stall on our side, batches that finished meanwhile seem to take no time.

    Args:
        timed_bytes: how many bytes are timed together for the engine's rate.
        in_flight: how many batches are begun before the first one is waited for.
    """
    if not best.value:
        yield from _one_alone(best, tuning.least_timed_bytes, by_engine=False)
    while True:
        is_engine_fast = yield from _engine_tried(best, tuning.least_timed_bytes)
        while is_engine_fast:
            is_engine_fast = yield from _engine_for_a_while(best, timed_bytes, in_flight)
        for _ in range(tuning.batches_between_trials):
            yield Choice(by_engine=False, alone=False)


def _engine_tried(best: BestRate, least_bytes: int) -> _Trial:
    """Whether it was fast twice. To believe it wrongly costs as much as dozens of trials."""
    if not (yield from _one_alone(best, least_bytes, by_engine=True)):
        return False
    return (yield from _one_alone(best, least_bytes, by_engine=True, again=True))


def _one_alone(best: BestRate, least_bytes: int, *, by_engine: bool, again: bool = False) -> _Trial:
    """Until a batch was large enough to time. Whether that was fast; its rate may be the best."""
    while True:
        nbytes, seconds = yield Choice(by_engine, alone=True, again=again)
        if nbytes >= least_bytes:
            return best.see(nbytes, seconds) >= _ENGINE_IS_BUSY * best.value


def _engine_for_a_while(best: BestRate, timed_bytes: int, in_flight: int) -> _Trial:
    """Until so many bytes are timed. Whether they were fast, not counting the first batches, which fill the queue."""
    least_rate = _ENGINE_IS_BUSY * best.value
    for _ in range(in_flight):
        yield Choice(by_engine=True, alone=False)
    nbytes, seconds = 0, 0.0
    while nbytes < timed_bytes:
        batch_bytes, batch_s = yield Choice(by_engine=True, alone=False)
        nbytes, seconds = nbytes + batch_bytes, seconds + batch_s
        if max(nbytes, timed_bytes) < least_rate * seconds:
            return False  # however fast the rest is
    return True


def engine_alone() -> Choices:
    """The engine for every batch: there is no choice."""
    while True:
        yield Choice(by_engine=True, alone=False)
