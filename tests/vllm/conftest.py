"""The fixtures of the conformance tests."""

from environment import _stock, plugged, spawned, stock, vllm_version
from gate_client import gate_environment, policy, serve
from ready_process import ready_process
from real_worker import choose, models, worker

__all__ = [
    "_stock",
    "choose",
    "gate_environment",
    "models",
    "plugged",
    "policy",
    "ready_process",
    "serve",
    "spawned",
    "stock",
    "vllm_version",
    "worker",
]
