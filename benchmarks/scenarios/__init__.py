"""What vLLM does with sleep mode, scenario by scenario; `benchmarks/vllm_scenarios.py` runs them. One topic a file."""

from . import cycles, gate, layer, models
from .registry import ALONE, LIMIT_S, OTHER_SHAPES, SCENARIOS, scenario

__all__ = ["ALONE", "LIMIT_S", "OTHER_SHAPES", "SCENARIOS", "cycles", "gate", "layer", "models", "scenario"]
