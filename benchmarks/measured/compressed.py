"""Compressed backups (`compressed.py`)."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import GIB, digits

STEPS = ("first sleep", "dirty sleep", "clean sleep", "wake at once", "wake later")


def table(result: dict[str, Any]) -> list[str]:
    """Raw and compressed backups of the same model, in seconds and beside the link."""
    results = [one for one in result["results"] if "error" not in one]
    gib = results[0]["bytes"] / GIB
    lines = [
        f"**Compressed backups** (`CUMEM_SLEEP_COMPRESS=auto`) and raw ones: a 32B model's memory, {gib:.2f} GiB of"
        " weights, 54.63 GiB of KV cache, one process for each line, every byte checked after every wake."
        f" {machine(results[0])}. In parentheses: how many times faster than the uncompressed weights on the link"
        f" ({results[0]['link_gbps']['to_host']:.1f} and {results[0]['link_gbps']['to_device']:.1f} GB/s). Seconds,"
        " medians:",
        "",
        f"| weights | compress | stored | {' | '.join(STEPS)} |",
        f"|---|---|---{'|---' * len(STEPS)}|",
    ]
    for one in results:
        summary = one["summary"]
        cells = [
            digits(summary[step]["seconds"])
            + (f" ({summary[step]['times_link']:.2f} ×)" if step not in ("first sleep", "clean sleep") else "")
            for step in STEPS
        ]
        stored = f"{summary['first sleep']['stored']:.3f}"
        lines.append(f"| {one['content']} | {one['compress']} | {stored} | {' | '.join(cells)} |")
    by_way = {(one["content"], one["compress"]): one["summary"]["dirty sleep"] for one in results}
    backing_up = by_way["bf16 normal", "auto"]
    return [
        *lines,
        "",
        f"Of the compressed dirty sleep of bf16, {digits(backing_up['backing_up_s'])} s"
        f" ({backing_up['backing_up_times_link']:.2f} ×) pass until everything is backed up; in the rest the driver"
        " releases device memory. The checkpoint is all-MiniLM-L6-v2, repeated.",
    ]
