"""The fixtures of the conformance tests."""

from environment import _stock, plugged, spawned, stock, vllm_version

__all__ = ["_stock", "plugged", "spawned", "stock", "vllm_version"]
