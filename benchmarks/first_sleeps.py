"""First sleeps with two builds of this layer, in turns: what host memory costs that a process has not used before.

    python benchmarks/first_sleeps.py --sites OLD NEW --out first_sleeps.json      # a minute on an H200

Each sleep is of a process of its own, which finds the layer in the folder OLD or NEW (`pip install --target`). The
host's memory was touched before, so that a virtual machine has it.
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

from record import GIB, touch_host_memory, write

SEGMENT_BYTES = 256 << 20
ONE_SLEEP = f"""
import json, sys, time
from cumem_sleep import CuMemAllocator, Settings
allocator = CuMemAllocator(Settings(driver=sys.argv[2]))
for _ in range(int(sys.argv[1]) // {SEGMENT_BYTES}):
    allocator.malloc({SEGMENT_BYTES}, "weights")
start = time.perf_counter()
report = allocator.sleep(level=1)
seconds = time.perf_counter() - start
start = time.perf_counter()
allocator.wake_up()
woken = time.perf_counter() - start
print(json.dumps({{"sleep": seconds, "wake": woken, "phases": dict(report.phases)}}))
"""


def one(site: Path, nbytes: int, driver: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", ONE_SLEEP, str(nbytes), driver],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{site}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", nargs=2, type=Path, required=True, metavar=("OLD", "NEW"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    arguments = parser.parse_args()
    driver = "sim" if os.environ.get("CUMEM_SLEEP_DRIVER") == "sim" else "cuda"
    touch_host_memory(int(1.2 * arguments.gib * GIB))
    runs: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
    for turn in range(arguments.turns):
        order = list(zip(runs, arguments.sites, strict=True))
        for name, site in order if turn % 2 == 0 else order[::-1]:  # neither is always the second
            runs[name].append(one(site, arguments.gib * GIB, driver))
    write(arguments.out, {"gib": arguments.gib, "runs": runs})
    for name, found in runs.items():
        for what in ("sleep", "wake"):
            seconds = sorted(run[what] for run in found)
            print(f"{name} {what:5}  median {statistics.median(seconds):.3f} s, {seconds[0]:.3f} to {seconds[-1]:.3f}")


if __name__ == "__main__":
    main()
