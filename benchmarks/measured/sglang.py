"""Releases and resumes of SGLang's engine (`sglang_cycles.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .results import is_there, load, machine
from .written import MIB, digits, header, row

RESULTS = (
    "sglang_cycles.json",
    "sglang_cycles_special.json",
    "sglang_cycles_graphs.json",
    "sglang_cycles_tensor_parallel.json",
)
WHOSE = {"ours": "cumem-sleep", "theirs": "torch_memory_saver"}
INTRODUCTION = (
    "Seconds, medians of the later cycles; weights backed up; the same tokens, log probabilities and weights after each"
    " cycle."
)
COLUMNS = ("first release", "later ones", "resume", "cycles", "GPU memory grew", "host memory grew")


def tables() -> list[str]:
    """Of the results that are there."""
    return tables_of(map(load, filter(is_there, RESULTS)))


def tables_of(results: Iterable[dict[str, Any]]) -> list[str]:
    """Those of the same model, machine and number of GPUs in one."""
    by_head: dict[str, list[str]] = {}
    for result in results:
        by_head.setdefault(_head(result), []).extend(_rows(result))
    found = [[f"{head}:", "", *header(COLUMNS), *rows] for head, rows in by_head.items()]
    lines = [line for number, table in enumerate(found) for line in [*([""] if number else []), *table]]
    return [f"{INTRODUCTION} {lines[0]}", *lines[1:]] if lines else []


def _head(result: dict[str, Any]) -> str:
    version = next(facts["sglang"] for facts in result["ways"].values() if "sglang" in facts)
    gpus = f"{result['tensor_parallel']} × " if result["tensor_parallel"] > 1 else ""
    return f"SGLang {version}, Qwen3-{result['shape']}'s shape, {gpus}{machine(result)}"


def _rows(result: dict[str, Any]) -> list[str]:
    """Of the ways that did not fail."""
    summary, failures = result["summary"], result["failures"]
    ways = {way: found for way, found in summary.items() if found.get("cycles") and way not in failures}
    return [row(_name(way), _cells(found)) for way, found in ways.items()]


def _name(way: str) -> str:
    whose, *special = way.split("-")
    return ", ".join((WHOSE[whose], *special))


def _cells(found: dict[str, Any]) -> list[str]:
    seconds = (found[name] for name in ("first_release_s", "release_s", "resume_s"))
    grew = (
        "–" if found[name] is None else f"{found[name] / MIB:.0f} MiB" for name in ("grew_gpu_bytes", "grew_host_bytes")
    )
    return [*map(digits, seconds), str(found["cycles"]), *grew]
