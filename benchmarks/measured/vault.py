"""The vault (`vault.py`)."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import GIB, header, low_to_high, row

WAYS = {
    "own": "own memory, its first use in that process",
    "vault": "the vault",
    "replica": "a replica, while the first one sleeps",
    "compressed": "the vault, compressed",
}
STEPS = {
    "first sleep": "to_host",
    "wake": "to_device",
    "wake, later": "to_device",
    "later sleep, everything changed": "to_host",
    "later sleep, nothing changed": None,
}


def link_rates(result: dict[str, Any]) -> dict[str, float]:
    """Bytes per second by direction, at best."""
    return {direction: result["link_bytes"] / min(seconds) for direction, seconds in result["link"].items()}


def gbps_of_links(result: dict[str, Any]) -> str:
    link = link_rates(result)
    return f"{link['to_host'] / 1e9:.1f} GB/s to the host, {link['to_device'] / 1e9:.1f} GB/s to the GPU"


def table(result: dict[str, Any]) -> list[str]:
    """Sleeps and wakes through the vault, and of own memory, beside the link."""
    workload = result["workload"]
    link = link_rates(result)
    found = {**result["ways"], "replica": result["ways"]["vault"]["replica"]}
    ways = {way: found[way] for way in WAYS if "error" not in found[way]}

    def cell(name: str, step: str, direction: str | None) -> str:
        way = ways[name]
        if not (seconds := [answer["seconds"] for answer in way.get(step, ())]):
            return "–"
        copies = step != "first sleep" or way[step][0]["layer"]["copied_bytes"] > 0
        if direction is None or not copies:
            return low_to_high(seconds)
        times = low_to_high([each * link[direction] / way["bytes"] for each in seconds], "{:.2f}".format)
        return f"{low_to_high(seconds)} ({times} ×)"

    lines = [
        f"{workload['segments']} segments, {workload['weights_bytes'] / GIB:.2f} GiB of bf16 weights,"
        f" {workload['kv_cache_bytes'] / GIB:.2f} GiB of KV cache, every byte checked after every wake."
        f" {machine(result)}. The link: {gbps_of_links(result)}. Seconds; in parentheses, times the uncompressed"
        " bytes on the link:",
        "",
        *header(WAYS[way] for way in ways),
    ]
    for step, direction in STEPS.items():
        lines.append(row(step, (cell(way, step, direction) for way in ways)))
    stored = [f"{way['first sleep'][0]['layer']['stored_bytes'] / GIB:.2f}" for way in ways.values()]
    lines.append(row("stored by the first sleep, GiB", stored))
    left = [f"{way['first sleep'][0]['left_on_gpu_bytes'] / GIB:.2f}" for way in ways.values()]
    return [*lines, row("in use on the whole GPU asleep, GiB", left)]
