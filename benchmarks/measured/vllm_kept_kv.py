"""A long prefix's first token after a sleep."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import GIB, digits


def table(result: dict[str, Any]) -> list[str]:
    """Awake, and after a sleep of each kind."""
    rows = {(row["layer"], row["keeps"]): row for row in result["summary"]}
    kept, cleared, theirs = rows["cumem-sleep", True], rows["cumem-sleep", False], rows["vLLM", False]
    if not kept["same_tokens"] or kept["cached_tokens"] + 16 < result["tokens"] or result["dtype"] != "auto":
        raise SystemExit("vllm_kept_kv.json: the prefix was not found after the wake")
    after = {
        "a sleep that keeps the cache": kept,
        "a sleep that clears it": cleared,
        "vLLM's own sleep mode, which clears it": theirs,
    }
    return [
        f"**The first token of a prefix of {result['tokens']:,} tokens**, {result['runs'][0]['prefix_bytes'] / GIB:.1f}"
        f" GiB of KV cache, Qwen3-{result['shape']}'s shape, vLLM {result['machine']['vllm']} without CUDA graphs."
        f" {machine(result)}. Seconds:",
        "",
        "| | wake | first token | together |",
        "|---|---|---|---|",
        f"| awake, not cached | – | {digits(kept['computed_s'])} | – |",
        f"| awake, cached | – | {digits(kept['warm_s'])} | – |",
        *(
            f"| after {name} | {digits(row['wake_s'])} | {digits(row['first_token_s'])} |"
            f" {digits(row['wake_s'] + row['first_token_s'])} |"
            for name, row in after.items()
        ),
    ]
