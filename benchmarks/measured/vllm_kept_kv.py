"""A long prefix's first token after a sleep."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import GIB, digits

WAYS = {
    "a sleep that keeps the cache": ("cumem-sleep", True),
    "a sleep that clears it": ("cumem-sleep", False),
    "the same, without the setting": ("cumem-sleep, not set", False),
    "vLLM's own sleep mode, which clears it": ("vLLM", False),
}


def table(result: dict[str, Any]) -> list[str]:
    """Awake, and after a sleep of each kind."""
    rows = {(row["way"], row["keeps"]): row for row in result["summary"]}
    kept, cleared = rows["cumem-sleep", True], rows["cumem-sleep", False]
    if not kept["same_tokens"] or kept["cached_tokens"] + 16 < result["tokens"] or result["dtype"] != "auto":
        raise SystemExit("vllm_kept_kv.json: the prefix was not found after the wake")
    after = {name: rows[way] for name, way in WAYS.items() if way in rows}
    link = result["runs"][0]["link_s"]
    found_s = kept["wake_s"] + kept["first_token_s"] - cleared["wake_s"] - kept["warm_s"]
    return [
        f"**The first token of a prefix of {result['tokens']:,} tokens**, {result['runs'][0]['prefix_bytes'] / GIB:.1f}"
        f" GiB of KV cache, Qwen3-{result['shape']}'s shape, vLLM {result['machine']['vllm']} without CUDA graphs."
        f" {machine(result)}; 8B engines on a second one meanwhile. Seconds, memory pinned:",
        "",
        "| | sleep | wake | first token | wake and first token |",
        "|---|---|---|---|---|",
        f"| awake, not cached | – | – | {digits(kept['computed_s'])} | – |",
        f"| awake, cached | – | – | {digits(kept['warm_s'])} | – |",
        *(
            f"| after {name} | {_sleep(row)} | {digits(row['wake_s'])} | {digits(row['first_token_s'])} |"
            f" {digits(row['wake_s'] + row['first_token_s'])} |"
            for name, row in after.items()
        ),
        "",
        f"Keeping takes the sleep {digits(kept['sleep_s'] - cleared['sleep_s'])} s (the link alone"
        f" {digits(link['to_host'])}), and the wake and first token {digits(found_s)} s ({digits(link['to_device'])}).",
    ]


def _sleep(row: dict[str, Any]) -> str:
    """Its seconds. The first one of an engine pins memory."""
    return digits(row["sleep_s"]) + (" (its first)" if row["rounds"] == 1 else "")
