"""What the `/metrics` of a vLLM with the gate says."""

from __future__ import annotations

from collections import Counter
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from cumem_sleep.vllm.metrics import Collector, WorkerStatus


def an_engine() -> CollectorRegistry:
    """The metrics of an engine of two ranks that sleeps."""

    def usage(nbytes: int, backed_up: int) -> dict[str, int]:
        sizes = dict.fromkeys(("host_bytes", "vault_bytes", "shared_bytes", "backed_up_bytes"), backed_up)
        counts = {"segments": 2, "asleep_segments": 2, "bytes": nbytes, "mapped_bytes": 0, "kept_bytes": 0}
        return {**sizes, **counts}

    totals = {"count": 3, "failures": 0, "seconds": 2.5, "phases": {"copy": 2.0}, "bytes": {"copied": 600}}
    ranks: list[Any] = [
        {
            "rank": rank,
            "devices": [rank],
            "simulated": True,
            "usage": {"weights": usage(600, 600), "kv_cache": usage(400, 0)},
            "place": {"vault": "/run/vault.sock", "lost": ""},
            "operations": {"sleep": totals, "wake": totals},
            "device_used_bytes": 50,
            "device_total_bytes": 2000,
            "checkpointed": False,
        }
        for rank in range(2)
    ]
    status = WorkerStatus()
    status.ranks = ranks
    registry = CollectorRegistry()
    registry.register(Collector(status, Counter(woke=2)))
    labels = ["model_name", "engine", "sleep_state"]  # of vLLM itself: `vllm/v1/metrics/loggers.py`
    Gauge("vllm:engine_sleep_state", "Its own word.", labels, registry=registry).labels("m", "0", "awake").set(0)
    return registry
