"""Sleeps and wakes whose backups lie in files (`vault_spill.py`)."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import GIB, digits, header, row, spread

RESULT = "vault_spill.json"
COLUMNS = {"memory": "a vault without files", "files": "with files", "compressed": "with files, compressed"}
STEPS = (
    "first sleep",
    "wake from memory",
    "first sleep that waits for the disk",
    "wake from files",
    "wake from memory, beside files",
)


def table(result: dict[str, Any]) -> list[str]:
    """Seconds, the disk's rates beside them, and what others take for the same bytes."""
    ways, nbytes = result["ways"], result["bytes"]
    rates = {name: max(each[name] for each in result["ceilings"]) for name in result["ceilings"][0]}

    def cell(way: str, step: str) -> str:
        if (seconds := ways[way].get(step)) is None:
            return "–"
        if step != "wake from files":
            return spread(seconds)
        return f"{spread(seconds)} ({read_bytes(way) / min(seconds) / 1e9 / rates['read']:.2f} ×)"

    def read_bytes(way: str) -> float:
        """In each wake from files."""
        return float(ways[way]["vault"]["files_read_bytes"] / len(ways[way]["wake from files"]))

    lines = [
        f"{nbytes / GIB:.1f} GiB of bf16 weights, every byte checked after every wake. {machine(result)}. The disk"
        f" ({result['filesystem']}) reads {digits(rates['read'])} GB/s, writes {digits(rates['written'])}, and"
        f" {digits(rates['written and synced'])} where each 256 MiB are synced. Seconds; in parentheses, bytes read a"
        f" second over the disk's rate:",
        "",
        *header(COLUMNS.values()),
        *(row(step, (cell(way, step) for way in COLUMNS)) for step in STEPS),
    ]
    others = []
    if "reload" in ways.get("reload", {}):
        others.append(f"vLLM's loader reads them from that disk in {digits(ways['reload']['reload'][0])} s")
    if "resume from disk" in (theirs := ways.get("saver", {})):
        pause, resume = digits(min(theirs["pause to disk"])), digits(min(theirs["resume from disk"]))
        others.append(f"torch_memory_saver pauses to it in {pause} s and resumes in {resume}")
    said = [f"The same bytes: {'; '.join(others)}."] if others else []
    if "wake from files" in ways.get("compressed", {}):
        said.append(f"Compressed, a wake read {read_bytes('compressed') / GIB:.1f} GiB; the rest was still in memory.")
    return [*lines, *(["", " ".join(said)] if said else [])]
