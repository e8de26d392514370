"""What `prepare()` costs a model that runs meanwhile: a decode step in a CUDA graph, bound by memory.

    python benchmarks/prepare_cost.py --out result.json

Each step replays the graph, copies a token to pinned host memory and waits for it, as a model server does. Afterwards
the model sleeps, and the bytes are checked after the wake by a checksum that shares nothing with the layer's digests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import GIB, touch_host_memory, write

from cumem_sleep import CuMemAllocator, Settings

SIDE, LAYERS = 8192, 240  # 30 GiB of bf16
RATES_GBPS = (2.5, 5.0, 0.0)  # 0: as fast as it goes
IDLE_S = 1.5


def decode_graph(weights: list[torch.Tensor], token: torch.Tensor) -> torch.cuda.CUDAGraph:
    start = torch.randn(1, SIDE, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        y = start
        for weight in weights:
            y = torch.nn.functional.normalize(torch.mm(y, weight))
        token.copy_(y[0, : token.numel()].float())

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def step_ms(graph: torch.cuda.CUDAGraph, token: torch.Tensor, goes_on: Callable[[], bool]) -> list[float]:
    host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
    times = []
    while goes_on():
        start = time.perf_counter()
        graph.replay()
        host.copy_(token, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def summary(times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    return {
        "steps": len(times),
        "mean_ms": statistics.mean(times),
        "median_ms": statistics.median(times),
        "p99_ms": ordered[int(len(ordered) * 0.99)],
        "max_ms": ordered[-1],
    }


def checksums(tensors: list[torch.Tensor]) -> list[int]:
    places = torch.arange(1, 2 * tensors[0].numel() // 4 + 1, 2, device="cuda")
    return [int((tensor.view(torch.int64).flatten() * places).sum().item()) for tensor in tensors]


def for_s(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    out = parser.parse_args().out
    touch_host_memory(64 * GIB)
    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        weights = [torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    token = torch.zeros(256, device="cuda")
    graph = decode_graph(weights, token)
    expected = checksums(weights)
    step_ms(graph, token, for_s(1.0))
    rows: list[dict[str, Any]] = []
    for rate in RATES_GBPS:
        allocator.settings = dataclasses.replace(Settings(), prepare_bytes_per_second=int(rate * 1e9))
        idle = step_ms(graph, token, for_s(IDLE_S))
        start = time.perf_counter()
        preparation = allocator.prepare()
        busy = step_ms(graph, token, lambda preparation=preparation: preparation.running)
        seconds = time.perf_counter() - start
        assert preparation.error is None, preparation.error
        slept = allocator.sleep()
        assert slept.copied_bytes == 0, slept
        allocator.wake_up()
        assert checksums(weights) == expected, "bytes differ"
        allocator.release_backups()
        rows.append(
            {
                "rate_limit_gbps": rate or None,
                "prepare_s": seconds,
                "prepare_gbps": preparation.wanted_bytes / seconds / 1e9,
                "alone": summary(idle),
                "meanwhile": summary(busy),
                "slowdown": statistics.mean(busy) / statistics.mean(idle) - 1,
                "prepared_sleep_s": slept.seconds,
            }
        )
        print(json.dumps(rows[-1]))
    write(out, {"weights_bytes": preparation.wanted_bytes, "segments": LAYERS, "bytes_checked": True, "rates": rows})


if __name__ == "__main__":
    main()
