"""Prometheus metrics of a fleet: what there is at this moment, and what was counted."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .fleet import Fleet
from .status import Counters, GpuStatus, ModelStatus, Phase, Status

PREFIX = "cumem_sleep:serve_"


def exposition(fleet: Fleet) -> tuple[bytes, str]:
    """The metrics as text, and its content type."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleet))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class FleetCollector(Collector):
    """Reads a fleet when it is asked."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> list[Metric]:
        """Nothing: registering it does not ask the fleet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        status = self._fleet.status()
        yield from _of_models(status.models)
        yield from _of_gpus(status.gpus)
        yield from _of_host(status)
        yield from _of_counters(self._fleet.counters)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _of_models(models: tuple[ModelStatus, ...]) -> Iterator[Metric]:
    state = _gauge("model_state", "1 for the state that a model is in, 0 for all others", "model", "state")
    level = _gauge("model_sleep_level", "the level at which a model sleeps, 0 if it does not", "model")
    waiting = _gauge("requests_waiting", "requests that wait for a model", "model")
    oldest = _gauge("oldest_wait_seconds", "how long the first of them has waited", "model")
    running = _gauge("requests_running", "requests that a model answers now", "model")
    held = _gauge("model_host_bytes", "host memory that a sleeping model holds, by the ledger", "model")
    restarts = _counter("restarts", "times that a model's server died and was started again", "model")
    for model in models:
        for phase in Phase:
            state.add_metric([model.name, phase.value], float(model.phase is phase))
        level.add_metric([model.name], model.level or 0)
        waiting.add_metric([model.name], model.waiting)
        oldest.add_metric([model.name], model.oldest_wait_s)
        running.add_metric([model.name], model.running)
        held.add_metric([model.name], model.host_bytes)
        restarts.add_metric([model.name], model.restarts)
    yield from (state, level, waiting, oldest, running, held, restarts)


def _of_gpus(gpus: tuple[GpuStatus, ...]) -> Iterator[Metric]:
    total = _gauge("gpu_total_bytes", "memory of a GPU", "gpu")
    used = _gauge("gpu_used_bytes", "memory of a GPU in use, by all processes", "gpu")
    share = _gauge("gpu_share", "how much of a GPU models hold that are not asleep, from 0 to 1", "gpu")
    for gpu in gpus:
        if gpu.total_bytes is not None:
            total.add_metric([str(gpu.gpu)], gpu.total_bytes)
        if gpu.used_bytes is not None:
            used.add_metric([str(gpu.gpu)], gpu.used_bytes)
        share.add_metric([str(gpu.gpu)], sum(holder.share for holder in gpu.holders))
    yield from (total, used, share)


def _of_host(status: Status) -> Iterator[Metric]:
    budget = _gauge("host_budget_bytes", "host memory that sleeping models may hold")
    held = _gauge("host_held_bytes", "host memory that sleeping models hold, by the ledger")
    available = _gauge("host_available_bytes", "host memory that the system can still give")
    budget.add_metric([], status.host.budget_bytes)
    held.add_metric([], status.host.held_bytes)
    if status.host.available_bytes is not None:
        available.add_metric([], status.host.available_bytes)
    yield from (budget, held, available)


def _of_counters(counters: Counters) -> Iterator[Metric]:
    switches = _counter("switches", "sleeps, wakes, starts and stops that ended", "model", "kind", "result")
    took = _counter("switch_seconds", "the time that they took", "model", "kind")
    waited = _counter("waited_seconds", "what requests waited, by cause", "model", "cause")
    requests = _counter("requests", "requests by what became of them", "model", "outcome")
    for switch, count in counters.switches.items():
        switches.add_metric(switch, count)
    for key, seconds in counters.switch_seconds.items():
        took.add_metric(key, seconds)
    for key, seconds in counters.waited_seconds.items():
        waited.add_metric(key, seconds)
    for key, count in counters.requests.items():
        requests.add_metric(key, count)
    yield from (switches, took, waited, requests)
