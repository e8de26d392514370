"""A decoder in plain PyTorch (`decoder.py`)."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import GIB


def table(result: dict[str, Any]) -> list[str]:
    """Identity of logits and addresses, and what stays on the GPU."""
    lines = [
        "**A Qwen3-8B-shaped decoder**, plain PyTorch, its decode step captured in a CUDA graph, weights loaded from"
        f" safetensors. {machine(result)}.",
        "",
        "| run | sleep s | wake s | logits | addresses | on the GPU asleep |",
        "|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        lines.append(
            f"| {run['run']} | {run['sleep']['seconds']:.3f} | {run['wake']['seconds']:.3f} |"
            f" {'bit-identical' if run['logits_bit_identical'] else 'DIFFER'} |"
            f" {'same' if run['addresses_identical'] else 'DIFFER'} | {run['gpu_bytes_asleep'] / GIB:.3f} GiB |"
        )
    items = result["runs"][0]["asleep_itemised"]
    lines += ["", "Asleep: " + "; ".join(f"{name} {nbytes / GIB:.3f} GiB" for name, nbytes in items.items()) + "."]
    return lines
