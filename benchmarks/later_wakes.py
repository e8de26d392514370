"""Wakes a while after their sleeps, with and without the first allocation that a thread makes in between.

    python benchmarks/later_wakes.py --out benchmarks/results/later_wakes.json      # about a minute on an H100

One process sleeps and wakes through a vault that has all its memory, by turns with that thread and without it: with its
weights backed up (level 1), and with everything dropped (level 2). Then, without the thread and at level 2, it
allocates two pages itself before each wake: what the first one takes is what the wake would have waited for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from layers import SIMULATED
from one_client import main, parser_of

if TYPE_CHECKING:
    from cumem_sleep import CuMemAllocator

PAGE_BYTES = 2 << 20
PAUSES_S = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
NEVER = 1 << 60  # no sleep frees so much


def measure(allocator: CuMemAllocator, asked: argparse.Namespace) -> dict[str, Any]:
    ways = {"with the thread": 1 if SIMULATED else allocator.tuning.first_allocation_least_bytes, "without": NEVER}
    seconds: dict[str, list[float]] = {}
    for level in (1, 2):
        for turn in range(asked.turns):
            for way in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
                allocator.tuning.first_allocation_least_bytes = ways[way]
                allocator.sleep(level)
                time.sleep(asked.pause)
                seconds.setdefault(f"level {level}, {way}", []).append(allocator.wake_up().seconds)
    allocator.tuning.first_allocation_least_bytes = NEVER
    pages = [page_by_page(allocator, pause_s) for pause_s in PAUSES_S]
    return {"pause_s": asked.pause, "wake_s": seconds, "first allocations": pages}


def page_by_page(allocator: CuMemAllocator, pause_s: float) -> dict[str, float]:
    """What the first allocation of a page takes after this pause, what the second, and what the wake after them."""
    from cumem_sleep import _core

    def seconds() -> float:
        begin = time.perf_counter()
        with closing(_core.Scratch(0, PAGE_BYTES)):
            return time.perf_counter() - begin

    allocator.sleep(level=2)
    time.sleep(pause_s)
    first_s, second_s = seconds(), seconds()
    return {"pause_s": pause_s, "first_s": first_s, "second_s": second_s, "wake_s": allocator.wake_up().seconds}


def lines(found: dict[str, Any]) -> Iterator[str]:
    for what, each in found["wake_s"].items():
        yield f"{what}: median {statistics.median(each):.4f}, {min(each):.4f} to {max(each):.4f} s"
    for each in found["first allocations"]:
        yield (
            f"{each['pause_s']} s after a sleep: the first page {1000 * each['first_s']:.2f} ms, the second"
            f" {1000 * each['second_s']:.2f} ms, a wake after them {1000 * each['wake_s']:.1f} ms"
        )


if __name__ == "__main__":
    parser = parser_of(__doc__, kv_gib=32, turns=5, of_turns="wakes of each kind")
    parser.add_argument(
        "--pause", type=float, default=1.2, help="seconds between sleep and wake (default: %(default)s)"
    )
    main(parser, measure, lines)
