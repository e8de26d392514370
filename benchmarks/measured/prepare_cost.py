"""What `prepare()` costs a model that runs meanwhile."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import GIB


def table(result: dict[str, Any]) -> list[str]:
    """A step alone, and meanwhile."""
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
