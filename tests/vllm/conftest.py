"""The fixtures of the conformance tests."""

from environment import _stock, plugged, spawned, stock, vllm_version
from gate_client import gate_environment, policy, serve

__all__ = ["_stock", "gate_environment", "plugged", "policy", "serve", "spawned", "stock", "vllm_version"]
