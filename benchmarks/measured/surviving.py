"""What survived a sleep of vLLM: bytes compared at both levels, and what the loads of quantised checkpoints left."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from .results import RESULTS

_FILES = {"0.26.0": "surviving_vllm_0.26.json", "0.33.0": "surviving_vllm_0.33.json"}
_SHAPES = {
    "survives_dense": "dense, with CUDA graphs",
    "survives_lora": "an adapter loaded",
    "survives_draft_model": "a draft model",
    "survives_ngram": "n-grams as drafts",
    "survives_hybrid": "a hybrid (Falcon H1)",
    "survives_tensor_parallel": "tensor parallel, two GPUs",
}
_QUANTISED = {
    "survives_fp8_static": "FP8, static scales",
    "survives_gptq": "GPTQ, 4 bits",
    "survives_compressed_tensors_kv_scales": "compressed-tensors FP8, scales of the KV cache",
}


def tables() -> list[str]:
    """The blocks that differ, and how level 2 ended for quantised checkpoints."""
    found = {version: _scenarios(name) for version, name in _FILES.items()}
    levels = [f"{version}, level {level}" for version in found for level in (1, 2)]
    loads = [f"{version}, `{way}`" for version in found for way in _WAYS]
    return [
        "Blocks of memory in use whose bytes differ after the wake (at level 2: after a load), of those compared:",
        "",
        f"| vLLM | {' | '.join(levels)} |",
        "|---|" + "---|" * len(levels),
        *(
            f"| {says} | {' | '.join(_differ(f.get(name), n) for f in found.values() for n in (1, 2))} |"
            for name, says in _SHAPES.items()
        ),
        "",
        "Quantised checkpoints, after level 2. None answered with other tokens unnoticed:",
        "",
        f"| vLLM | {' | '.join(loads)} |",
        "|---|" + "---|" * len(loads),
        *(
            f"| {says} | {' | '.join(_ended(f[name], way) for f in found.values() for way in _WAYS)} |"
            for name, says in _QUANTISED.items()
        ),
    ]


_WAYS = ("reload_weights", "load_weights in place")


def _scenarios(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())["scenarios"]
    return found


def _differ(outcome: dict[str, Any] | None, level: int) -> str:
    if outcome is None:
        return "not run"
    blocks = sum(rank["blocks"] for rank in outcome[f"level {level} compared"])
    return f"{len(outcome[f'level {level} differ'])} of {blocks}"


def _ended(outcome: dict[str, Any], way: str) -> str:
    said: str = outcome.get(way, "not tried")
    return "an error of vLLM's" if said.startswith("vLLM refuses") else said


def cost() -> list[str]:
    """What it costs level 1 of a 32B model to say what may be dropped."""
    measured = _scenarios("surviving_cost.json")["what_surviving_costs_32b"]
    sleeps, wakes = (
        " and ".join(f"{median(measured[f'{way}: {call} s']):.3f} s {said}" for way, said in _SAID)
        for call in ("sleep", "wake")
    )
    says = f"With Qwen3-32B's shape an unchanged sleep takes {sleeps}, a wake {wakes}"
    return [f"{says} a declaration of what may be dropped (medians of five in turn, vLLM 0.33, one H200)."]


_SAID = (("declared", "with"), ("not declared", "without"))
