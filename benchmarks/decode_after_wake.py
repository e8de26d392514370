"""Does a decode loop notice, right after a wake, what this layer still does in the background?

    python benchmarks/decode_after_wake.py --out decode_after_wake.json        # half a minute on an H200

An 8B-shaped decoder in a CUDA graph makes one token after another, each of which the host waits for: for two seconds
without a sleep, and for two seconds right after each wake, with backups that are retained, and with backups whose host
memory is released after the wake. Noted are the quantiles of the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decoder import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, POSITIONS, VOCABULARY, Decoder, layer_shapes
from record import GIB, touch_host_memory, write

from cumem_sleep import CuMemAllocator, Settings

WATCHED_S = 2.0
ROUNDS = 3


def random_weights() -> dict[str, torch.Tensor]:
    shapes = {f"{layer}.{name}": shape for layer in range(LAYERS) for name, shape in layer_shapes().items()}
    shapes |= {"embed": (VOCABULARY, HIDDEN), "norm": (HIDDEN,), "head": (VOCABULARY, HIDDEN)}
    return {name: torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02 for name, shape in shapes.items()}


def steps(decoder: Decoder, graph: torch.cuda.CUDAGraph) -> list[float]:
    """The seconds of each step, for `WATCHED_S` seconds."""
    taken: list[float] = []
    end = time.perf_counter() + WATCHED_S
    position, before = 0, time.perf_counter()
    while before < end:
        decoder.position.fill_(position % POSITIONS)
        graph.replay()
        decoder.token.copy_(decoder.logits.argmax(-1))
        decoder.token.item()
        now = time.perf_counter()
        taken.append(now - before)
        position, before = position + 1, now
    return taken


def quantiles(taken: list[float]) -> dict[str, float]:
    ordered = sorted(taken)
    return {
        "steps": len(taken),
        "p50_s": statistics.median(taken),
        "p99_s": ordered[int(len(ordered) * 0.99)],
        "most_s": ordered[-1],
    }


def one(retained: bool, tuning: dict[str, float]) -> dict[str, Any]:
    CuMemAllocator.tuning = replace(CuMemAllocator.tuning, **tuning)
    allocator = CuMemAllocator(Settings(retain_backups=retained))
    with allocator.use_memory_pool("weights"):
        weights = random_weights()
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.zeros(LAYERS, 2, KV_HEADS, POSITIONS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    decoder = Decoder(weights, cache)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        decoder.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool):
        decoder.step()
    steps(decoder, graph)
    rows = [{"after": "no sleep", **quantiles(steps(decoder, graph))}]
    for _ in range(ROUNDS):
        slept = allocator.sleep(1)
        torch.cuda.synchronize()
        time.sleep(1)
        woken = allocator.wake_up()
        rows.append(
            {"after": "a wake", "sleep_s": slept.seconds, "wake_s": woken.seconds, **quantiles(steps(decoder, graph))}
        )
    rows.append({"after": "no sleep", **quantiles(steps(decoder, graph))})
    return {"retained": retained, "tuning": tuning, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--tuning", type=json.loads, action="append", default=[], help="other tunings to try, as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(**json.loads(arguments.one))))
        return
    touch_host_memory(24 * GIB)
    runs = []
    for retained, tuning in [(True, {}), *((False, tuning) for tuning in [{}, *arguments.tuning])]:
        given = json.dumps({"retained": retained, "tuning": tuning})
        command = [sys.executable, __file__, "--out", str(arguments.out), "--one", given]
        runs.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print("retained" if retained else "released", tuning)
        for row in runs[-1]["rows"]:
            shown = {name: round(value * 1000, 2) for name, value in row.items() if name.endswith("_s")}
            print("   ", row["after"], row["steps"], "steps, ms:", shown, flush=True)
    write(arguments.out, {"watched_s": WATCHED_S, "runs": runs})


if __name__ == "__main__":
    main()
