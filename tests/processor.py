"""How fast this processor is, for tests that bound its time."""

import time

_NOMINAL_S = 0.03  # of the processor's time, for which it counts to a million where the bounds were chosen


def slowness() -> float:
    """By which to multiply a bound: 1 on a processor as fast as that one, or faster, and more on a slower one.

    A processor that others use as well is slower, too, so the greatest of three counts.
    """
    return max(1.0, *(_counting_s() / _NOMINAL_S for _ in range(3)))


def is_within(seconds: float, bound_s: float) -> bool:
    """Whether some work took no longer than that, on a processor as fast as that one."""
    return seconds < bound_s or seconds < bound_s * slowness()


def _counting_s() -> float:
    begin, number = time.thread_time(), 0
    while number < 1_000_000:
        number += 1
    return time.thread_time() - begin
