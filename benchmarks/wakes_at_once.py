"""Wakes with several builds of this layer, right after their sleeps and a while later, with a vault and without.

    python benchmarks/wakes_at_once.py --sites OLD NEW --out wakes_at_once.json      # two minutes on an H200

Each build (a folder, `pip install --target`) runs in a process of its own: with its own host memory, and through a
vault that has all of its memory; each also with compressed backups. Weights are random and in bfloat16. Nothing changes
in between, so a sleep copies nothing, and every wake is verified by the layer.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from record import GIB, answer_of, touch_host_memory, write
from vault_process import Vault

WAKES = """
import json, sys, time
from cumem_sleep import CuMemAllocator, Settings
from cumem_sleep.tools.bench.workload import kv_segments, model_like

driver, vault, compress, weights, kv_cache, at_once, later, pause_s = sys.argv[1:]
allocator = CuMemAllocator(Settings(driver=driver, vault=vault, compress=compress))
kept = []
if driver == "cuda":
    import torch

    with allocator.use_memory_pool("weights"):
        for nbytes in model_like(int(weights)):
            kept.append(torch.empty(nbytes // 2, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02))
    torch.cuda.synchronize()
else:
    for nbytes in model_like(int(weights)):
        allocator.malloc(nbytes, "weights")
for nbytes in kv_segments(int(kv_cache)):
    allocator.malloc(nbytes, "kv_cache")
found = {"first sleep": [allocator.sleep().seconds], "first wake": [allocator.wake_up().seconds]}
for what, count, wait_s in (("at once", int(at_once), 0.0), ("later", int(later), float(pause_s))):
    for _ in range(count):
        allocator.sleep()
        time.sleep(wait_s)
        found.setdefault(what, []).append(allocator.wake_up().seconds)
print(json.dumps(found))
"""

# Of each: whether through the vault, and whether compressed.
TIERS = {
    "own": ("off", "off"),
    "own, compressed": ("off", "auto"),
    "vault": ("on", "off"),
    "compressed": ("on", "auto"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiers", default=";".join(TIERS), help="separated by semicolons (default: %(default)s)")
    parser.add_argument("--weights-gib", type=float, default=61, help="(default: %(default)s)")
    parser.add_argument("--kv-gib", type=float, default=54.6, help="(default: %(default)s)")
    parser.add_argument("--own-gib", type=float, help="of the weights, where a process pins them itself")
    parser.add_argument("--at-once", type=int, default=5, help="wakes right after their sleeps (default: %(default)s)")
    parser.add_argument("--later", type=int, default=2, help="wakes a while later (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=1.2, help="seconds; that while (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=1)
    arguments = parser.parse_args()
    driver = "sim" if os.environ.get("CUMEM_SLEEP_DRIVER") == "sim" else "cuda"
    all_bytes = int((arguments.weights_gib + arguments.kv_gib) * GIB)
    runs: dict[str, dict[str, list[dict[str, list[float]]]]] = {}

    def run(tier: str, socket: str) -> None:
        vault, compress = TIERS[tier]
        nbytes = int(((vault == "off" and arguments.own_gib) or arguments.weights_gib) * GIB)
        asked = [socket if vault == "on" else "off", compress, nbytes, all_bytes - nbytes]
        asked += [arguments.at_once, arguments.later, arguments.pause]
        for turn in range(arguments.turns):
            for site in arguments.sites if turn % 2 == 0 else arguments.sites[::-1]:  # none is always the last
                taken = answer_of(site, WAKES, driver, *map(str, asked), within_s=120)
                runs.setdefault(tier, {}).setdefault(site.name, []).append(taken)
        for name, turns in runs[tier].items():
            for what in turns[0]:
                each = [seconds for turn in turns for seconds in turn[what]]
                print(
                    f"{tier:10} {name:16} {what:12} median {statistics.median(each):.4f},"
                    f" {min(each):.4f} to {max(each):.4f} s",
                    flush=True,
                )

    tiers = arguments.tiers.split(";")
    if own := [tier for tier in tiers if TIERS[tier][0] == "off"]:
        touch_host_memory(int(1.1 * (arguments.own_gib or arguments.weights_gib) * GIB))
        for tier in own:
            run(tier, "")
    if through_vault := [tier for tier in tiers if tier not in own]:
        with Vault(int(1.08 * arguments.weights_gib * GIB)) as vault:
            vault.wait_until_pinned()
            for tier in through_vault:
                run(tier, vault.socket)
    sizes: dict[str, Any] = {"weights_gib": arguments.weights_gib, "kv_gib": arguments.kv_gib}
    write(arguments.out, {**sizes, "own_gib": arguments.own_gib, "pause_s": arguments.pause, "runs": runs})


if __name__ == "__main__":
    main()
