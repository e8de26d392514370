"""`vllm serve` at level 3 (`vllm_level_3.py`)."""

from __future__ import annotations

from statistics import median
from typing import Any

from .results import machine
from .written import GIB, MIB, header, row

Facts = dict[str, Any]


def _of(values: list[float], unit: str = "s", scale: float = 1.0) -> str:
    middle, most = median(values) / scale, max(values) / scale
    return f"{middle:.3f} {unit}" + (f" (≤ {most:.3f})" if len(values) > 1 else "")


def _rows(facts: Facts) -> dict[str, str]:
    """Of one way; medians are of the cycles after the first."""
    done = [cycle for cycle in facts["cycles"] if "awake" in cycle]
    later, at_level_3 = done[1:], facts["end"]["gpu_at_level_3_bytes"]
    asked = [cycle for cycle in later if cycle["by"] == "request"]
    in_steps = [cycle for cycle in later if "gpu_free_at_level_1_bytes" in cycle]
    kept = [c["asleep"]["gpu_free_bytes"] - c["gpu_free_at_level_1_bytes"] + at_level_3 for c in in_steps]
    used = [-cycle["asleep"]["gpu_free_bytes"] for cycle in done]
    of_the_vault = facts.get("gpu_of_the_vault_bytes")
    return {
        "cycles with the same tokens": str(len(done)),
        "first sleep": _of([done[0]["sleep_s"]]),
        "checkpoint": _of([cycle["checkpoint_s"] for cycle in later]),
        "restore": _of([cycle["restore_s"] for cycle in later]),
        "rest of the wake": _of([cycle["back_from_level_1_s"] for cycle in later]),
        "first token of a request that wakes": _of([cycle["wake_and_first_token_s"] for cycle in asked]),
        "kept on the GPU at level 1": _of(kept, "GiB", GIB),
        "left on the GPU at level 3": _of([at_level_3], "MiB", MIB),
        "the vault's own GPU memory": "–" if of_the_vault is None else _of([of_the_vault], "GiB", GIB),
        # From the second cycle on, which is the first that has all it needs.
        "GPU memory in use asleep grew by": f"{(max(used[2:]) - used[1]) / MIB:+.1f} MiB, {len(used)} cycles",
    }


def table(own: Facts, vault: Facts) -> list[str]:
    """A column for each place of the backups; then two models in turns."""
    ways = {"own memory": (own, "own"), "the vault, compressed": (vault, "vault_compressed")}
    measured = [_rows(run["ways"][way]) for run, way in ways.values()]
    said, two = vault["arguments"], vault["ways"]["vault_compressed"]["two"]["switches"]
    shares = [f"{run['arguments']['gpu_memory_utilization']:.2f}" for run, _ in ways.values()]
    return [
        f"**`vllm serve` at level 3**, a Qwen3-{said['shape']}-shaped model, vLLM {vault['machine']['vllm']} with its"
        f" default CUDA graphs, `{said['server_options']}`."
        f" {'; '.join(dict.fromkeys((machine(own), machine(vault))))}. Medians (and the most) after the first cycle:",
        "",
        *header(ways),
        row("`--gpu-memory-utilization`", shares),
        *(row(head, (way[head] for way in measured)) for head in measured[0]),
        "",
        f"Two models in turns through that vault, {said['shape']} and {said['second']}: each had at least"
        f" {min(switch['gpu_share'] for switch in two):.3f} of the GPU while awake, and the same tokens after"
        f" {len(two)} of {2 * said['switches']} switches. To the last token a switch took"
        f" {_of([switch['seconds'] for switch in two])}; the first token of the request that wakes"
        f" {_of([switch['wake_and_first_token_s'] for switch in two])}.",
    ]
