"""Host memory of a first sleep (`host_memory.py`), and what preparing it costs a model that runs."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import GIB, digits


def table(result: dict[str, Any]) -> list[str]:
    """What a first sleep waits for, one step after the other."""
    lines = [
        f"**Host memory**: {result['bytes'] / GIB:.0f} GiB, prefaulted (by many threads), then registered (by one),"
        f" then copied to. {machine(result)}. Seconds:",
        "",
        "| in this virtual machine | prefault | register | copy | give back |",
        "|---|---|---|---|---|",
    ]
    for row in (result["rows"][0], result["rows"][-1]):  # host memory that nobody has used yet, and that somebody has
        cells = [digits(row[key]) for key in ("touch_s", "register_s", "copy_s", "give_back_s")]
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return lines


def prepare_table(result: dict[str, Any]) -> list[str]:
    """What a model that runs meanwhile pays."""
    lines = [
        "**prepare() while a model runs**: a decode step in a CUDA graph that reads"
        f" {result['weights_bytes'] / GIB:.0f} GiB of weights, and copies its token to the host each time."
        f" {machine(result)}.",
        "",
        "| limit GB/s | reached GB/s | step alone ms (mean, p99) | step meanwhile ms (mean, p99) | slower by |",
        "|---|---|---|---|---|",
    ]
    for row in result["rates"]:
        alone, meanwhile = row["alone"], row["meanwhile"]
        lines.append(
            f"| {row['rate_limit_gbps'] or 'none'} | {row['prepare_gbps']:.1f} | {alone['mean_ms']:.2f},"
            f" {alone['p99_ms']:.2f} | {meanwhile['mean_ms']:.2f}, {meanwhile['p99_ms']:.2f} |"
            f" {row['slowdown']:.1%} |"
        )
    return lines
