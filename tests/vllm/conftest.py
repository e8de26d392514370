"""The fixtures of the conformance tests."""

from environment import _stock, plugged, spawned, stock, vllm_version
from gate_client import gate_environment, policy, serve
from real_worker import choose, worker

__all__ = [
    "_stock",
    "choose",
    "gate_environment",
    "plugged",
    "policy",
    "serve",
    "spawned",
    "stock",
    "vllm_version",
    "worker",
]
