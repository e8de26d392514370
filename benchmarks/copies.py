"""Sleep and wake of the segments of a 32B model (61 GiB of weights, 54 GiB of KV cache) against the link, in one run.

    python benchmarks/copies.py --out result.json

Contents are random and checked after every wake by checksums that share nothing with the layer's own digests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from record import GIB, resident_bytes, touch_host_memory, write

from cumem_sleep import CuMemAllocator, SleepReport, WakeReport

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 5120, 64, 64, 8, 128, 25600, 151936
KV_GIB = 54.63


def shapes() -> list[tuple[int, int]]:
    """Weights as vLLM fuses them, bf16."""
    layer = [
        ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        (HIDDEN, HEADS * HEAD_DIM),
        (2 * INTERMEDIATE, HIDDEN),
        (HIDDEN, INTERMEDIATE),
    ]
    return [(VOCABULARY, HIDDEN), *(layer * LAYERS), (VOCABULARY, HIDDEN)]


def checksum(tensors: list[torch.Tensor]) -> list[int]:
    """Per tensor, sensitive to every bit and to the place of every word."""
    sums = []
    for tensor in tensors:
        words = tensor.view(torch.int64).flatten()
        total = 0
        for number, part in enumerate(words.split(1 << 27)):
            places = torch.arange(1, 2 * part.numel(), 2, device="cuda")
            total = (total * 31 + number + int((part * places).sum().item())) & (2**64 - 1)
        sums.append(total)
    return sums


def link_gbps(rounds: int = 3) -> dict[str, float]:
    """Pinned copies of 8 GiB each way: the ceiling."""
    device = torch.empty(8 * GIB, dtype=torch.uint8, device="cuda").random_()
    host = torch.empty(8 * GIB, dtype=torch.uint8, pin_memory=True)
    rates: dict[str, float] = {}
    for name, target, source in (("to_host", host, device), ("to_device", device, host)):
        seconds = []
        for _ in range(rounds + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        rates[name] = device.numel() / statistics.median(seconds[1:]) / 1e9
    del device, host
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    return rates


def facts(report: SleepReport | WakeReport, ceiling_gbps: float) -> dict[str, Any]:
    """The report, and its rate against the link."""
    moved = report.copied_bytes if isinstance(report, SleepReport) else report.restored_bytes
    row = {key: value for key, value in vars(report).items() if key not in ("note", "simulated")}
    row["gbps"] = moved / report.seconds / 1e9
    row["seconds_at_link"] = moved / ceiling_gbps / 1e9
    row["times_link"] = report.seconds / row["seconds_at_link"] if moved else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each kind of sleep and wake")
    arguments = parser.parse_args()

    touch_host_memory(72 * GIB)
    link = link_gbps()
    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        weights = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes()]
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.empty(int(KV_GIB * GIB), dtype=torch.uint8, device="cuda")
    usage = allocator.usage()
    rows: list[dict[str, Any]] = []

    def sleep(kind: str, level: int = 1) -> None:
        torch.cuda.synchronize()
        host_before = resident_bytes()
        report = allocator.sleep(level)
        free, total = torch.cuda.mem_get_info()
        held = sum(tag.host_bytes for tag in allocator.usage().values())
        backed_up = report.copied_bytes + report.clean_bytes
        rows.append(
            {
                "step": kind,
                **facts(report, link["to_host"]),
                "left_on_gpu_bytes": total - free,
                "host_bytes_per_byte": held / backed_up if backed_up else None,
                "resident_growth_bytes": resident_bytes() - host_before,
            }
        )

    def wake(kind: str, expected: list[int] | None, tags: list[str] | None = None) -> None:
        report = allocator.wake_up(tags)
        rows.append({"step": kind, **facts(report, link["to_device"])})
        if expected is not None:
            assert checksum(weights) == expected, f"{kind}: bytes differ"

    expected = checksum(weights)
    sleep("first sleep")
    wake("wake", expected)
    for _ in range(arguments.rounds):
        sleep("sleep, nothing changed")
        wake("wake", expected)
        for tensor in weights:
            tensor.add_(torch.randn(tensor.shape[1], dtype=tensor.dtype, device="cuda"))
        expected = checksum(weights)
        sleep("sleep, everything changed")
        time.sleep(3)  # the driver has scrubbed the freed memory by then
        wake("wake, 3 s later", expected)
        weights[7][0, 0] += 1
        expected = checksum(weights)
        sleep("sleep, one tensor changed")
        wake("wake, weights only", expected, ["weights"])
        wake("wake, KV cache", None, ["kv_cache"])
        sleep("sleep, level 2", level=2)
        wake("wake, level 2", None)
        for tensor in weights:
            tensor.normal_()
        expected = checksum(weights)
        sleep("sleep, backups anew")  # level 2 gave the host memory back
        wake("wake", expected)
    write(
        arguments.out,
        {
            "link_gbps": link,
            "weights": {"segments": usage["weights"].segments, "bytes": usage["weights"].bytes},
            "kv_cache_bytes": usage["kv_cache"].bytes,
            "bytes_checked_after_every_wake": True,
            "steps": rows,
        },
    )
    print(json.dumps(link))
    print(f"{'step':28} {'s':>7} {'GB/s':>6} {'×link':>6}  phases")
    for row in rows:
        phases = " ".join(f"{name} {seconds:.3f}" for name, seconds in row["phases"].items())
        ratio = f"{row['times_link']:.3f}" if row["times_link"] else "–"
        print(f"{row['step']:28} {row['seconds']:7.3f} {row['gbps']:6.1f} {ratio:>6}  {phases}")
    del cache


if __name__ == "__main__":
    main()
