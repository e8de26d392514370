"""What was tried with a real vLLM (`vllm_scenarios.py`)."""

from __future__ import annotations

from typing import Any


def table(result: dict[str, Any]) -> list[str]:
    """What was tried with a real vLLM, and how it ended."""
    outcomes = result["scenarios"]
    versions = ", ".join(sorted({outcome["machine"]["vllm"] for outcome in outcomes.values()}))
    gpus = " and ".join(sorted({outcome["machine"]["gpu"] for outcome in outcomes.values()}))
    lines = [
        f"Run with vLLM {versions} on {gpus} (`benchmarks/vllm_scenarios.py`):",
        "",
        "| scenario | |",
        "|---|---|",
    ]
    for name, outcome in outcomes.items():
        failed = "" if outcome["passed"] else " **Failed.**"
        lines.append(f"| {name.replace('_', ' ')} | {' '.join(outcome['says'].split())}{failed} |")
    return lines
