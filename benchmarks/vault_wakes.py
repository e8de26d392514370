"""Wakes through the vault right after their sleeps, by how many bytes their digests are begun for at a time.

    python benchmarks/vault_wakes.py --out benchmarks/results/vault_wakes.json      # about a minute on an H100

One process sleeps and wakes through a vault that has all its memory, by turns with each number of bytes. Nothing
changes in between, so a sleep copies nothing. Every wake is verified by the layer.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from one_client import main, parser_of
from record import GIB

if TYPE_CHECKING:
    from cumem_sleep import CuMemAllocator

TOGETHER_BYTES = (1, 2 * GIB, 8 * GIB)  # 1: as soon as a batch of copies has arrived
FOUND = "wake_s by digest_together_bytes"


def measure(allocator: CuMemAllocator, asked: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {str(nbytes): [] for nbytes in TOGETHER_BYTES}
    for turn in range(asked.turns):
        for nbytes in TOGETHER_BYTES if turn % 2 == 0 else TOGETHER_BYTES[::-1]:
            allocator.tuning.digest_together_bytes = nbytes
            allocator.sleep()
            seconds[str(nbytes)].append(allocator.wake_up().seconds)
    return {FOUND: seconds}


def lines(found: dict[str, Any]) -> Iterator[str]:
    for nbytes, each in found[FOUND].items():
        yield (
            f"{int(nbytes) / GIB:4.1f} GiB: median {statistics.median(each):.4f}, {min(each):.4f} to {max(each):.4f} s"
        )


if __name__ == "__main__":
    main(parser_of(__doc__, kv_gib=27, turns=8, of_turns="wakes with each number of bytes"), measure, lines)
