"""Which processes that share a NCCL communicator come back from level 3."""

from __future__ import annotations

from typing import Any

from .results import machine

_REFUSALS = {"CUDA_ERROR_NOT_SUPPORTED": "not supported", "CUDA_ERROR_INVALID_VALUE": "invalid value"}


def table(result: dict[str, Any]) -> list[str]:
    """A row for each way to move bytes, a column for what was done to the communicator before."""
    first = [case for case in result["cases"] if case["asked"] == 1]
    treatments = list(dict.fromkeys(case["treatment"] for case in first))
    nccl = next(case["nccl"] for case in first if "nccl" in case)
    lines = [
        f"Two processes, a GPU each, that reduce 64 MiB in a CUDA graph: NCCL"
        f" {nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}. {machine(result)}. One"
        " after the other, or both at each step, gave the same. A restore that is refused loses the process.",
        "",
        f"| NCCL moves bytes by | communicator {' | '.join(treatments)} |",
        f"|---|{'---|' * len(treatments)}",
    ]
    for transport in result["transports"]:
        cells = []
        for treatment in treatments:
            cases = [case for case in first if (case["transport"], case["treatment"]) == (transport, treatment)]
            outcomes = {_outcome(case) for case in cases}
            cells.append(", ".join(sorted(outcomes)))
        lines.append(f"| {transport} | {' | '.join(cells)} |")
    return lines


def _outcome(case: dict[str, Any]) -> str:
    if failed := case.get("failed"):
        step = failed.partition(",")[0]
        return f"**{step} refused**: {next(words for error, words in _REFUSALS.items() if error in failed)}"
    return "works"
