"""First sleeps with several builds of this layer, in turns: what host memory costs that a process has not used before.

    python benchmarks/first_sleeps.py --sites OLD NEW --out first_sleeps.json      # a minute on an H200

Each sleep is of a process of its own, which finds the layer in one of these folders (`pip install --target`), and has
PyTorch in use and the segments of a model. The host's memory was touched before, so that a virtual machine has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from record import GIB, answer_of, touch_host_memory, write

from cumem_sleep.tools.bench.workload import model_like

ONE_SLEEP = """
import json, sys, time
import torch
from cumem_sleep import CuMemAllocator, Settings
if sys.argv[2] == "cuda":
    torch.zeros(1, device="cuda")
allocator = CuMemAllocator(Settings(driver=sys.argv[2]))
for size in json.loads(sys.argv[1]):
    allocator.malloc(size, "weights")
start = time.perf_counter()
report = allocator.sleep(level=1)
seconds = time.perf_counter() - start
start = time.perf_counter()
allocator.wake_up()
woken = time.perf_counter() - start
print(json.dumps({"sleep": seconds, "wake": woken, "phases": dict(report.phases)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=16.0)
    parser.add_argument("--turns", type=int, default=6)
    arguments = parser.parse_args()
    driver = "sim" if os.environ.get("CUMEM_SLEEP_DRIVER") == "sim" else "cuda"
    sizes = model_like(int(arguments.gib * GIB))
    touch_host_memory(int(1.2 * arguments.gib * GIB))
    runs: dict[str, list[dict[str, Any]]] = {site.name: [] for site in arguments.sites}
    for turn in range(arguments.turns):
        for site in arguments.sites if turn % 2 == 0 else arguments.sites[::-1]:  # none is always the last
            runs[site.name].append(answer_of(site, ONE_SLEEP, json.dumps(sizes), driver, within_s=60))
    write(arguments.out, {"gib": arguments.gib, "segments": len(sizes), "runs": runs})
    for name, found in runs.items():
        for what, each in (("sleep", "sleep"), ("copy", "phases"), ("wake", "wake")):
            seconds = sorted(run[each] if what == each else run[each][what] for run in found)
            print(f"{name} {what:5}  median {statistics.median(seconds):.3f} s, {seconds[0]:.3f} to {seconds[-1]:.3f}")


if __name__ == "__main__":
    main()
