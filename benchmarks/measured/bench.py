"""`cumem-sleep bench`."""

from __future__ import annotations

import statistics
from typing import Any

from .results import machine
from .written import GIB, MIB, low_to_high, spread


def table(result: dict[str, Any], title: str) -> list[str]:
    """Each step's median and spread, compared with the link in the same run (`cumem-sleep bench --json`)."""
    link, workload, digest = result["link_gbps"], result["workload"], result["digest"]
    lines = [
        f"**{title}**: {workload['segments']} segments, {workload['weights_bytes'] / GIB:.2f} GiB of weights,"
        f" {workload['kv_cache_bytes'] / GIB:.2f} GiB of KV cache; random contents, checked after every wake."
        f" {machine(result)}. The link in the same run: {link['to_host']:.1f} GB/s to the host,"
        f" {link['to_device']:.1f} GB/s to the GPU.",
        "",
        "| step | seconds (median, range) | copied GB | GB/s | × time on the link |",
        "|---|---|---|---|---|",
    ]
    by_step: dict[str, list[dict[str, Any]]] = {}
    for row in result["steps"]:
        by_step.setdefault(row["step"], []).append(row)
    for step, rows in by_step.items():
        moved = statistics.median(row["bytes"] for row in rows)
        rates = [row["gbps"] for row in rows if row["gbps"]]
        ratios = [row["times_link"] for row in rows if row["times_link"]]
        lines.append(
            f"| {step} | {spread([row['seconds'] for row in rows])} | {moved / 1e9:.1f} |"
            f" {f'{statistics.median(rates):.1f}' if rates else '–'} |"
            f" {f'{statistics.median(ratios):.2f}' if ratios and moved > 1e9 else '–'} |"
        )
    remarks = [f"A digest of all weights takes {spread([1000 * s for s in digest['seconds']])} ms."]
    if ratios := [row["host_bytes_per_byte"] for row in result["steps"] if row.get("host_bytes_per_byte")]:
        remarks.append(f"Host memory per byte backed up: {max(ratios):.3f}.")
    if left := [row["left_on_gpu_bytes"] for row in result["steps"] if row.get("left_on_gpu_bytes")]:
        remarks.append(f"Left on the GPU asleep: {max(left) / GIB:.2f} GiB, the CUDA context included.")
    return [*lines, "", " ".join(remarks)]


LEVEL_3_PARTS = ("unpin", "checkpoint", "restore")
LEVEL_3_STEPS = ("level 1 sleep", "level 3 sleep", *LEVEL_3_PARTS[:2], "level 1 wake", "level 3 wake", LEVEL_3_PARTS[2])


def level_3_table(result: dict[str, Any], behaviour: dict[str, Any]) -> list[str]:
    """What leaving and restoring the CUDA state adds (`cumem-sleep bench --level 3`), and many of them in a row."""
    workload = result["workload"]
    lines = [
        f"**Level 3**: {workload['segments']} segments, {workload['weights_bytes'] / GIB:.0f} GiB of weights, which the"
        f" process itself pins in host memory, {workload['kv_cache_bytes'] / GIB:.0f} GiB of KV cache, every byte"
        f" checked after every wake. {machine(result)}. Seconds, median and range:",
        "",
        "| step | seconds | in use on the GPU then, MiB |",
        "|---|---|---|",
    ]
    for step in LEVEL_3_STEPS:
        rows = [row for row in result["steps"] if row["step"] == step]
        left = {row["left_on_gpu_bytes"] for row in rows if "left_on_gpu_bytes" in row}
        part = "of it: " if step in LEVEL_3_PARTS else ""
        cell = low_to_high([each / MIB for each in left]) if left else ""
        lines.append(f"| {part}{step} | {spread([row['seconds'] for row in rows])} | {cell} |")
    rounds = behaviour["twenty_times"]["rounds"]
    same = len({(each["gpu_free_mib"], each["host_mib"]) for each in rounds}) == 1
    checkpoint, restore = (spread([each[step] for each in rounds]) for step in ("checkpoint", "restore"))
    return [
        *lines,
        "",
        f"A process with 1 GiB of weights, {len(rounds)} times in a row: checkpoint {checkpoint} s, restore {restore}"
        f" s; free memory of the GPU and host memory of the process {'the same after each' if same else 'DIFFER'}.",
    ]
