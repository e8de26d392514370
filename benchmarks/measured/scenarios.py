"""What was tried with a real vLLM (`vllm_scenarios.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """What was tried with a real vLLM, and how it ended. A scenario of several versions is one row."""
    outcomes = [named for result in results for named in result["scenarios"].items()]
    gpus = " and ".join(sorted({outcome["machine"]["gpu"] for _, outcome in outcomes}))
    lines = [
        f"Run on {gpus} (`benchmarks/vllm_scenarios.py`):",
        "",
        "| scenario | vLLM | |",
        "|---|---|---|",
    ]
    for name in dict.fromkeys(name for name, _ in outcomes):
        its = [outcome for other, outcome in outcomes if other == name]
        versions = ", ".join(sorted(outcome["machine"]["vllm"] for outcome in its))
        failed = "" if all(outcome["passed"] for outcome in its) else " **Failed.**"
        lines.append(f"| {name.replace('_', ' ')} | {versions} | {' '.join(its[0]['says'].split())}{failed} |")
    return lines
