"""`cumem-sleep bench`."""

from __future__ import annotations

import statistics
from typing import Any

from .results import machine
from .written import GIB, spread


def table(result: dict[str, Any], title: str) -> list[str]:
    """Each step's median and spread, compared with the link in the same run (`cumem-sleep bench --json`)."""
    link, workload, digest = result["link_gbps"], result["workload"], result["digest"]
    lines = [
        f"**{title}**: {workload['segments']} segments, {workload['weights_bytes'] / GIB:.2f} GiB of weights,"
        f" {workload['kv_cache_bytes'] / GIB:.2f} GiB of KV cache; random contents, checked after every wake."
        f" {machine(result)}. The link in the same run: {link['to_host']:.1f} GB/s to the host,"
        f" {link['to_device']:.1f} GB/s to the GPU.",
        "",
        "| step | seconds (median, range) | × time on the link |",
        "|---|---|---|",
    ]
    by_step: dict[str, list[dict[str, Any]]] = {}
    for row in result["steps"]:
        by_step.setdefault(row["step"], []).append(row)
    for step, rows in by_step.items():
        moved = statistics.median(row["bytes"] for row in rows)
        ratios = [row["times_link"] for row in rows if row["times_link"]]
        lines.append(
            f"| {step} | {spread([row['seconds'] for row in rows])} |"
            f" {f'{statistics.median(ratios):.2f}' if ratios and moved > 1e9 else '–'} |"
        )
    remarks = [f"A digest of all weights takes {spread([1000 * s for s in digest['seconds']])} ms."]
    if ratios := [row["host_bytes_per_byte"] for row in result["steps"] if row.get("host_bytes_per_byte")]:
        remarks.append(f"Host memory per byte backed up: {max(ratios):.3f}.")
    if left := [row["left_on_gpu_bytes"] for row in result["steps"] if row.get("left_on_gpu_bytes")]:
        remarks.append(f"Left on the GPU asleep: {max(left) / GIB:.2f} GiB, the CUDA context included.")
    return [*lines, "", " ".join(remarks)]
