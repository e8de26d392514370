"""Where a step of TRL's trainer goes, with vLLM in the same process (`trl_colocated.py`)."""

from __future__ import annotations

from typing import Any

from .results import machine
from .written import digits, header, row

RESULT = "trl_colocated.json"
WAYS = {
    "ours-2": "cumem-sleep, level 2",
    "own-2": "vLLM, level 2",
    "ours-1": "cumem-sleep, level 1",
    "own-1": "vLLM, level 1",
}
PHASES = {
    "sleep": "sleep",
    "wake_weights": "wake of the weights",
    "update": "update",
    "wake_kv_cache": "wake of the KV cache",
    "generate": "generation",
    "rest": "training, and the rest",
}


def table(result: dict[str, Any]) -> list[str]:
    """Medians of its phases, and the reward at both ends."""
    found = {way: result["summary"][way] for way in WAYS if way in result["summary"].keys() - result["failures"].keys()}
    versions = next(facts["versions"] for facts in result["ways"].values() if "versions" in facts)
    named = ", ".join(f"{name} {versions[name]}" for name in ("trl", "transformers", "accelerate"))
    rewards = (f"{digits(each['reward_first'])} → {digits(each['reward_last'])}" for each in found.values())
    steps = next(iter(found.values()))["steps"]
    return [
        f"GRPO with vLLM {result['machine']['vllm']} in the trainer's process, {steps} steps, {result['layers']} layers"
        f" of width {result['width']}; {named}. {machine(result)}. Median seconds of a step:",
        "",
        *header(WAYS[way] for way in found),
        *(row(said, (digits(each[f"{phase}_s"]) for each in found.values())) for phase, said in PHASES.items()),
        row("mean reward, first five steps → last five", rewards),
    ]
