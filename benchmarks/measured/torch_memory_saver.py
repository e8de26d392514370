"""The same calls by torch_memory_saver and by this layer (`torch_memory_saver_beside.py`)."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import GIB, header, low_to_high, row


def table(result: dict[str, Any]) -> list[str]:
    """The same calls with either package, and how many times as fast ours is with the same setting; the first size."""
    size, ways = next(iter(result["results"].items()))
    titles = [way.replace("theirs", "torch_memory_saver").replace("ours", "this layer") for way in ways]
    version = ways["theirs"]["version"]

    def seconds(way: str, step: str) -> list[float]:
        return [answer["seconds"] for answer in ways[way]["steps"][step]]

    def cell(way: str, step: str) -> str:
        mine = seconds(way, step)
        peer = "theirs, retained" if "retained" in way else "theirs"
        return low_to_high(mine) + ("" if way == peer else f" ({min(seconds(peer, step)) / min(mine):.2f} ×)")

    def gib(key: str) -> list[str]:
        return [f"{facts['steps']['first pause'][0][key] / GIB:.2f}" for facts in ways.values()]

    lines = [
        f"{size} of weights with a backup and a KV cache without one, torch_memory_saver {version}, hook mode `torch`,"
        " each way a process of its own that had touched the host memory before (or the vault had), every byte checked"
        f" after every resume. {machine(result)}. Seconds; in parentheses, how many times as fast as torch_memory_saver"
        " with the same setting, by the faster of two:",
        "",
        *header(titles),
    ]
    for step in ways["theirs"]["steps"]:
        lines.append(row(step, (cell(way, step) for way in ways)))
    lines.append(row("host memory that the first pause took, GiB", gib("host_bytes")))
    return [*lines, row("in use on the whole GPU when paused, GiB", gib("left_on_gpu_bytes"))]
