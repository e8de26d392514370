"""What vLLM does with sleep mode, scenario by scenario; `benchmarks/vllm_scenarios.py` runs them. One topic a file."""

from . import cycles, gate, layer, level_3, models, parallel, ranks, surviving, vault
from .registry import ALONE, LIMIT_S, LIMITS_S, OTHER_SHAPES, SCENARIOS, TWO_GPUS, NotHere, scenario

__all__ = [
    "ALONE",
    "LIMITS_S",
    "LIMIT_S",
    "OTHER_SHAPES",
    "SCENARIOS",
    "TWO_GPUS",
    "NotHere",
    "cycles",
    "gate",
    "layer",
    "level_3",
    "models",
    "parallel",
    "ranks",
    "scenario",
    "surviving",
    "vault",
]
