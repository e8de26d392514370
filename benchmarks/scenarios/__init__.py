"""What vLLM does with sleep mode, scenario by scenario; `benchmarks/vllm_scenarios.py` runs them. One topic a file."""

from . import level_3, parallel, ranks, surviving, vault
from .registry import ALONE, LIMIT_S, LIMITS_S, OTHER_SHAPES, SCENARIOS, TWO_GPUS

__all__ = ["ALONE", "LIMITS_S", "LIMIT_S", "OTHER_SHAPES", "SCENARIOS", "TWO_GPUS"]
__all__ += ["level_3", "parallel", "ranks", "surviving", "vault"]
