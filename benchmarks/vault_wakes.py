"""Wakes through the vault right after their sleeps, by how many bytes their digests are begun for at a time.

    python benchmarks/vault_wakes.py --out benchmarks/results/vault_wakes.json      # about a minute on an H100

One process sleeps and wakes through a vault that has all its memory, by turns with each number of bytes. Nothing
changes in between, so a sleep copies nothing. Every wake is verified by the layer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from layers import SIMULATED
from record import GIB, machine, machine_without_gpu
from vault_process import Vault

TOGETHER_BYTES = (1, 2 * GIB, 8 * GIB)  # 1: as soon as a batch of copies has arrived


def wakes(weights_bytes: int, kv_bytes: int, turns: int) -> dict[str, list[float]]:
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
    seconds: dict[str, list[float]] = {str(nbytes): [] for nbytes in TOGETHER_BYTES}
    for turn in range(turns):
        for nbytes in TOGETHER_BYTES if turn % 2 == 0 else TOGETHER_BYTES[::-1]:
            CuMemAllocator.tuning.digest_together_bytes = nbytes
            allocator.sleep()
            seconds[str(nbytes)].append(allocator.wake_up().seconds)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the raw result goes (JSON)")
    parser.add_argument("--weights-gib", type=float, default=30.5, help="(default: %(default)s)")
    parser.add_argument("--kv-gib", type=float, default=27, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="wakes with each number of bytes (default: %(default)s)")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    weights_bytes, kv_bytes = int(arguments.weights_gib * GIB), int(arguments.kv_gib * GIB)
    if arguments.client:
        print(json.dumps(wakes(weights_bytes, kv_bytes, arguments.turns)))
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
    seconds = json.loads(done.stdout.splitlines()[-1])
    facts: dict[str, Any] = machine_without_gpu(simulated=True) if SIMULATED else machine()
    asked = {"weights_bytes": weights_bytes, "kv_cache_bytes": kv_bytes}
    result = {"machine": facts, **asked, "wake_s by digest_together_bytes": seconds}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for nbytes, each in seconds.items():
        print(
            f"{int(nbytes) / GIB:4.1f} GiB: median {statistics.median(each):.4f}, {min(each):.4f} to {max(each):.4f} s"
        )


if __name__ == "__main__":
    main()
