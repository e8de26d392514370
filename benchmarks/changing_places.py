"""Two processes change places on a GPU on which one fits: one after the other, and with the wake beside the sleep.

    python benchmarks/changing_places.py --out changing_places.json          # a minute on an H200

Each has weights and a KV cache, together 90 % of the GPU, in a process of its own (`worker.py`). In turns they change
places in two ways: the wake begins when the other one sleeps; or both begin at once, and the wake takes memory as it
comes (`expect_memory`). What counts is the time until the one that wakes is awake. After every wake every byte of its
weights is checked, outside of the measured time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from layers import SIMULATED
from recording import GIB, MIB, Process

WITHIN_S = 10.0
WAYS = ("one after the other", "at once")


class Wrong(Exception):
    """Bytes differ after a wake."""


def change_places(leaves: Process, comes: Process, at_once: bool) -> dict[str, Any]:
    """The seconds until one is awake, and until both have answered; what the layer says of both."""
    begin = time.perf_counter()
    leaves.begin("sleep", level=1)
    if not at_once:
        slept = leaves.answer("sleep")
    comes.begin("wake", within_s=WITHIN_S if at_once else 0.0)
    woken = comes.answer("wake")
    awake_s = time.perf_counter() - begin
    if at_once:
        slept = leaves.answer("sleep")
    both_s = time.perf_counter() - begin
    if differing := comes.ask("check")["differing_tensors"]:
        raise Wrong(f"bytes differ after a wake, in tensors {differing}")
    return {"awake_s": awake_s, "both_s": both_s, "sleep": slept, "wake": woken}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    ends_at = time.monotonic() + arguments.deadline
    weights_bytes = int(arguments.weights_gib * GIB)
    sizes = [arguments.segment_bytes] * (weights_bytes // arguments.segment_bytes)
    kv_bytes = int(arguments.kv_gib * GIB)
    results: dict[str, Any] = {"weights_bytes": sum(sizes), "kv_bytes": kv_bytes, "segments": len(sizes)}
    changes: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with Process("cumem-sleep", ends_at) as first, Process("cumem-sleep", ends_at) as second:
        results["machine"] = first.ask("machine")
        first.ask("touch_host_memory", nbytes=int(2.2 * weights_bytes))
        for seed, process in enumerate((first, second)):
            process.ask("load", sizes=sizes, kv_bytes=kv_bytes, seed=seed)
            process.ask("sleep", level=1)
        first.ask("wake")
        awake, asleep = first, second
        for turn in range(2 * arguments.rounds):
            way = WAYS[(turn + turn // 2) % 2]  # each way in both directions, and after itself and the other
            changes[way].append(change_places(awake, asleep, way == "at once"))
            awake, asleep = asleep, awake
            time.sleep(arguments.pause)
    return {**results, "changes": changes}


def table(results: dict[str, Any]) -> list[str]:
    lines = []
    for way, changes in results["changes"].items():
        for what, seconds in (
            ("until it is awake", [change["awake_s"] for change in changes]),
            ("  its wake", [change["wake"]["seconds"] for change in changes]),
            ("  the other's sleep", [change["sleep"]["seconds"] for change in changes]),
        ):
            spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
            lines.append(f"{way:20} {what:20} median {statistics.median(seconds):.3f} s, {spread}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--weights-gib", type=float, default=16.0)
    parser.add_argument("--kv-gib", type=float, default=108.0)
    parser.add_argument("--segment-bytes", type=int, default=128 * MIB)
    parser.add_argument("--rounds", type=int, default=6, help="changes in each way (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds after each change (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=150.0)
    arguments = parser.parse_args()
    results = run(arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"simulated": SIMULATED, **results}, indent=2) + "\n")
    print(*table(results), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
