"""Wakes from level 2 with several builds of this layer, in turns: what they wait for beside the mapping.

    python benchmarks/level_2_wakes.py --sites OLD NEW --out level_2_wakes.json      # about a minute on an H200

Each turn is a process of its own, which finds the layer in one of these folders (`pip install --target`). A sleep at
level 2 drops the backups of the weights, and a thread gives their host memory back: the wake follows at once, or when
that is done. Noted are when the wake had the lock, and every block that was given back meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from record import GIB, answer_of, touch_host_memory, write

WAKES = """
import json, sys, time
import torch
from cumem_sleep import CuMemAllocator, Settings, _core

driver, weights, kv_cache, wakes, segment_bytes = sys.argv[1], *map(int, sys.argv[2:])
begin, noted = 0.0, []

def note(kind, method):
    call = getattr(kind, method)
    def timed(*arguments, **options):
        start = time.perf_counter()
        result = call(*arguments, **options)
        if begin and options.get("wait", True):  # the thread that gives back takes the lock only if it is free
            noted.append((method, start - begin, time.perf_counter() - begin))
        return result
    setattr(kind, method, timed)

note(_core.OperationLock, "hold")
note(_core.HostBlock, "close")
if driver == "cuda":
    torch.zeros(1, device="cuda")
allocator = CuMemAllocator(Settings(driver=driver))
for tag, count in (("weights", weights), ("kv_cache", kv_cache)):
    for _ in range(count):
        allocator.malloc(segment_bytes, tag)
found = []
for number in range(2 * wakes):
    allocator.release_backups()
    allocator.sleep(level=1)
    allocator.wake_up()
    allocator.sleep(level=2)
    if at_once := number % 2 == 0:
        allocator.usage()  # as `bench` does
    else:
        time.sleep(1.0)
    del noted[:]
    begin = time.perf_counter()
    report = allocator.wake_up()
    seconds, begin = time.perf_counter() - begin, 0.0
    had_lock = min((end for what, _, end in noted if what == "hold"), default=None)
    closed = [(start, end) for what, start, end in noted if what == "close" and start < seconds]
    measured = {"at_once": at_once, "seconds": seconds, "map": report.phases["map"]}
    found.append({**measured, "had_lock": had_lock, "closed": closed})
print(json.dumps(found))
"""


def row(name: str, what: str, seconds: list[float]) -> str:
    ordered = sorted(1e3 * each for each in seconds)
    return f"{name:12} {what:24} median {statistics.median(ordered):5.1f} ms, {ordered[0]:.1f} to {ordered[-1]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=int, default=32, help="segments (default: %(default)s)")
    parser.add_argument("--kv-cache", type=int, default=24, help="segments (default: %(default)s)")
    parser.add_argument("--segment-bytes", type=int, default=GIB // 2)
    parser.add_argument("--wakes", type=int, default=4, help="of each kind in a turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=1)
    arguments = parser.parse_args()
    driver = "sim" if os.environ.get("CUMEM_SLEEP_DRIVER") == "sim" else "cuda"
    touch_host_memory(int(1.2 * arguments.weights * arguments.segment_bytes))
    counts = [arguments.weights, arguments.kv_cache, arguments.wakes, arguments.segment_bytes]
    runs: dict[str, list[list[dict[str, Any]]]] = {site.name: [] for site in arguments.sites}
    for turn in range(arguments.turns):
        for site in arguments.sites if turn % 2 == 0 else arguments.sites[::-1]:  # none is always the last
            runs[site.name].append(answer_of(site, WAKES, driver, *map(str, counts), within_s=90))
    asked = {"weights": arguments.weights, "kv_cache": arguments.kv_cache, "segment_bytes": arguments.segment_bytes}
    write(arguments.out, {**asked, "runs": runs})
    for name, turns in runs.items():
        for kind, at_once in (("at once", True), ("later", False)):
            wakes = [wake for found in turns for wake in found if wake["at_once"] is at_once]
            print(row(name, f"wake, {kind}", [wake["seconds"] for wake in wakes]))
            print(row(name, "  outside of the mapping", [wake["seconds"] - wake["map"] for wake in wakes]))
            print(f"{name:12}   blocks given back meanwhile: {sum(len(wake['closed']) for wake in wakes)}")


if __name__ == "__main__":
    main()
