"""One GPU's sleeps and wakes over several links (`vault_links.py`)."""

from __future__ import annotations

import statistics
from typing import Any

from .results import machine
from .written import GIB, header, row, spread

STEPS = {
    "wake": "wake, later",
    "first sleep": "first sleep",
    "later sleep, everything changed": "later sleep, everything changed",
}


def _numbers(result: dict[str, Any]) -> list[str]:
    return sorted(result["ceilings"], key=int)


def _ceiling_s(result: dict[str, Any], number: str, step: str) -> float:
    """What the uncompressed bytes take over so many links, with nothing else around."""
    gbps: float = statistics.median(result["ceilings"][number]["in" if "wake" in step else "out"])
    nbytes: int = result["ways"][number]["plain"]["steps"]["bytes"]
    return nbytes / gbps / 1e9


def _seconds(result: dict[str, Any], number: str, way: str, step: str) -> list[float]:
    return [answer["seconds"] for answer in result["ways"][number][way]["steps"][step]]


def _links(number: str) -> str:
    return f"{number} link{'' if number == '1' else 's'}"


def table(result: dict[str, Any]) -> list[str]:
    """Seconds by links, and how many times the ceiling they are."""
    numbers = _numbers(result)
    nbytes = result["ways"][numbers[0]]["plain"]["steps"]["bytes"]
    rates = (
        f"{_links(number)} {statistics.median(gbps['in']):.0f} in and {statistics.median(gbps['out']):.0f} out"
        for number, gbps in ((number, result["ceilings"][number]) for number in numbers)
    )
    lines = [
        f"{nbytes / GIB:.2f} GiB of bf16 weights on one GPU of several, every byte checked after every wake."
        f" {result['machine']['gpus']} × {machine(result)}. The ceiling, copies without a vault in the same run, in"
        f" GB/s: {', '.join(rates)}. Seconds; in parentheses, times the uncompressed bytes over the ceiling:",
        "",
        *header(_links(number) for number in numbers),
    ]
    for way, said in (("plain", ""), ("compressed", ", compressed")):
        for name, step in STEPS.items():
            found = {number: _seconds(result, number, way, step) for number in numbers}
            cells = (
                f"{spread(some)} ({statistics.median(some) / _ceiling_s(result, number, step):.2f} ×)"
                for number, some in found.items()
            )
            lines.append(row(name + said, cells))
    return lines
