"""Wakes a while after their sleeps, with and without the first allocation that a thread makes in between.

    python benchmarks/later_wakes.py --out benchmarks/results/later_wakes.json      # about a minute on an H100

One process sleeps and wakes through a vault that has all its memory, by turns with that thread and without it: with its
weights backed up (level 1), and with everything dropped (level 2). Before each wake it asks the driver for a page
itself where `first_allocations` says so: what that takes is what a wake would wait for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from layers import SIMULATED
from record import GIB, machine, machine_without_gpu
from vault_process import Vault

PAGE_BYTES = 2 << 20
PAUSES_S = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
NEVER = 1 << 60  # no sleep frees so much


def first_allocations() -> list[dict[str, float]]:
    """After each pause: what the first allocation of a page takes, what the second, and what the wake after them."""
    from cumem_sleep import CuMemAllocator, _core

    allocator = CuMemAllocator.get_instance()

    def seconds() -> float:
        begin = time.perf_counter()
        with closing(_core.Scratch(0, PAGE_BYTES)):
            return time.perf_counter() - begin

    found = []
    for pause_s in PAUSES_S:
        allocator.sleep(level=2)
        time.sleep(pause_s)
        first_s, second_s = seconds(), seconds()
        wake_s = allocator.wake_up().seconds
        found.append({"pause_s": pause_s, "first_s": first_s, "second_s": second_s, "wake_s": wake_s})
    return found


def measure(weights_bytes: int, kv_bytes: int, turns: int, pause_s: float) -> dict[str, Any]:
    from cumem_sleep import CuMemAllocator
    from cumem_sleep.tools.bench.workload import kv_segments, model_like

    allocator = CuMemAllocator.get_instance()
    if not SIMULATED:
        import torch

        with allocator.use_memory_pool("warm"):  # compiles the kernels, and times both ways
            torch.ones(1, device="cuda")
    for nbytes in model_like(weights_bytes):
        allocator.malloc(nbytes, "weights")
    for nbytes in kv_segments(kv_bytes):
        allocator.malloc(nbytes, "kv_cache")
    allocator.sleep()
    allocator.wake_up()
    usual = CuMemAllocator.tuning.first_allocation_least_bytes
    ways = {"with the thread": 1 if SIMULATED else usual, "without": NEVER}
    seconds: dict[str, list[float]] = {}
    for level in (1, 2):
        for turn in range(turns):
            for way in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
                CuMemAllocator.tuning.first_allocation_least_bytes = ways[way]
                allocator.sleep(level)
                time.sleep(pause_s)
                seconds.setdefault(f"level {level}, {way}", []).append(allocator.wake_up().seconds)
    CuMemAllocator.tuning.first_allocation_least_bytes = NEVER
    return {"wake_s": seconds, "first allocations": first_allocations()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the raw result goes (JSON)")
    parser.add_argument("--weights-gib", type=float, default=30.5, help="(default: %(default)s)")
    parser.add_argument("--kv-gib", type=float, default=32, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="wakes of each kind (default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=1.2, help="seconds between sleep and wake (default: %(default)s)"
    )
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    weights_bytes, kv_bytes = int(arguments.weights_gib * GIB), int(arguments.kv_gib * GIB)
    if arguments.client:
        print(json.dumps(measure(weights_bytes, kv_bytes, arguments.turns, arguments.pause)))
        return
    if arguments.out is None:
        parser.error("--out is missing")
    with Vault(int(1.08 * weights_bytes)) as vault:
        vault.wait_until_pinned()
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--client"],
            env={**os.environ, "CUMEM_SLEEP_VAULT": vault.socket, "CUMEM_SLEEP_COMPRESS": "off"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    facts: dict[str, Any] = machine_without_gpu(simulated=True) if SIMULATED else machine()
    asked = {"weights_bytes": weights_bytes, "kv_cache_bytes": kv_bytes, "pause_s": arguments.pause}
    arguments.out.write_text(json.dumps({"machine": facts, **asked, **found}, indent=2) + "\n")
    for what, each in found["wake_s"].items():
        print(f"{what}: median {statistics.median(each):.4f}, {min(each):.4f} to {max(each):.4f} s")
    for each in found["first allocations"]:
        print(
            f"{each['pause_s']} s after a sleep: the first page {1000 * each['first_s']:.2f} ms, the second"
            f" {1000 * each['second_s']:.2f} ms, a wake after them {1000 * each['wake_s']:.1f} ms"
        )


if __name__ == "__main__":
    main()
