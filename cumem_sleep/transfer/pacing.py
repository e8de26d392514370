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
    """

    by_engine: bool
    alone: bool


@dataclass
class BestRate:
    """The highest rate seen on a link, in bytes per second."""

    value: float = 0.0

    def see(self, nbytes: int, seconds: float) -> float:
        """Take this rate into account, and return it."""
        rate = nbytes / seconds
        self.value = max(self.value, rate)
        return rate


Choices = Generator[Choice, tuple[int, float], None]


def choices(best: BestRate, timed_bytes: int, tuning: Tuning) -> Choices:
    """Yields how to copy the next batch; send it the bytes and seconds of the batch before.

    The engine is used until it proves slow compared with the best rate seen; then the kernel for a while, and then the
    engine is tried again. If no rate was seen yet, the kernel's rate comes first. A rate counts as the best only if
    nothing else was in flight: after a stall on our side, batches that finished meanwhile seem to take no time.

    Args:
        timed_bytes: how many bytes are timed together for the engine's rate.
    """
    least_bytes = tuning.least_timed_bytes
    if not best.value:
        yield from _rate_alone(best, least_bytes, by_engine=False)
    while True:
        if (yield from _rate_alone(best, least_bytes, by_engine=True)) >= _ENGINE_IS_BUSY * best.value:
            while (yield from _engine_for_a_while(timed_bytes, _ENGINE_IS_BUSY * best.value, tuning.batches_in_flight)):
                pass
        for _ in range(tuning.batches_between_trials):
            yield Choice(by_engine=False, alone=False)


def _rate_alone(best: BestRate, least_bytes: int, *, by_engine: bool) -> Generator[Choice, tuple[int, float], float]:
    """The rate of the next batch that is large enough to time."""
    while True:
        nbytes, seconds = yield Choice(by_engine, alone=True)
        if nbytes >= least_bytes:
            return best.see(nbytes, seconds)


def _engine_for_a_while(
    timed_bytes: int, least_rate: float, in_flight: int
) -> Generator[Choice, tuple[int, float], bool]:
    """Whether this many bytes reach the rate, not counting the first batches, which still fill the queue."""
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
