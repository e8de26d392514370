"""Every Prometheus metric: name, type, labels, text. The exporters and docs/metrics.md are made from this one table."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

PREFIX = "cumem_sleep_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds: from a model that is awake, over a wake, to the start of a large one."""

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without the prefix, and without the `_total` of a counter.
        text: its help, which is the docs' too.
    """

    name: str
    type: Kind
    labels: tuple[str, ...]
    text: str

    @property
    def full_name(self) -> str:
        """As a sample is called; those of a histogram with `_bucket`, `_sum` or `_count` behind it."""
        return PREFIX + self.name + ("_total" if self.type == "counter" else "")


@dataclass
class Histogram:
    """Seconds that something took, counted by `BUCKETS_S`.

    Attributes:
        counts: in each bucket, and of all that took longer.
        total_s: of all.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one more."""
        self.counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, int]]:
        """By their upper bounds, how many took no longer."""
        return list(zip((*map(str, BUCKETS_S), "+Inf"), accumulate(self.counts), strict=True))


def _table(*rows: tuple[str, str, Kind, str]) -> Mapping[str, Metric]:
    return {name: Metric(name, kind, tuple(labels.split()), text) for name, labels, kind, text in rows}


# On vLLM's `/metrics`.
ENGINE = _table(
    ("active", "", "gauge", "1 if vLLM's memory comes from this layer, 0 if vLLM keeps its own sleep mode."),
    ("info", "rank devices simulated", "gauge", "1 for each worker."),
    ("sleep_level", "rank", "gauge", "How deep the worker sleeps: 0 (its weights are awake) to 3."),
    ("device_used_bytes", "rank", "gauge", "Device memory in use, by all processes; at level 3 as it was before."),
    ("device_total_bytes", "rank", "gauge", "Device memory."),
    ("vault_up", "rank", "gauge", "With a vault: 1 while it can be asked, 0 once it is lost."),
    ("memory_bytes", "rank tag state", "gauge", "Segments' bytes: `mapped` (with device memory) or `asleep`."),
    ("host_bytes", "rank tag", "gauge", "Host memory that backups take, in the worker or in a vault."),
    ("vault_bytes", "rank tag", "gauge", "Of these, in the vault."),
    ("shared_bytes", "rank tag", "gauge", "Of these, shared with other processes, each of which counts them."),
    ("kept_bytes", "rank tag", "gauge", "Of `host_bytes`, what is kept of dropped memory."),
    ("backed_up_bytes", "rank tag", "gauge", "Segments' bytes with a complete backup, awake or asleep."),
    ("segments", "rank tag", "gauge", "Segments."),
    ("operations", "rank operation result", "counter", "Sleeps, wakes and discards that ended `ok` or `failed`."),
    ("operation_seconds", "rank operation", "counter", "The time they took."),
    ("operation_phase_seconds", "rank operation phase", "counter", "The time they took, by phase."),
    ("operation_bytes", "rank operation kind", "counter", "Bytes by what was done: `copied`, `clean`, `restored`, …"),
    (
        *("gate_requests", "outcome", "counter"),
        "Requests that met a sleeping model: `rejected`, `waited`, `woke`, `timed_out`.",
    ),
)

# On the `/metrics` of `cumem-sleep serve`.
FRONT = _table(
    ("serve_model_state", "model state", "gauge", "1 for the state that the model is in, 0 for all others."),
    (
        "serve_model_engine",
        "model engine",
        "gauge",
        "1 for the model's engine; `command` stops to sleep.",
    ),
    ("serve_model_sleep_level", "model", "gauge", "The level at which the model sleeps, 0 if it does not."),
    ("serve_requests_waiting", "model", "gauge", "Requests that wait for the model."),
    ("serve_oldest_wait_seconds", "model", "gauge", "How long the first of them has waited."),
    ("serve_requests_running", "model", "gauge", "Requests that the model answers now."),
    ("serve_model_host_bytes", "model", "gauge", "Host memory that the sleeping model holds, by the front's ledger."),
    ("serve_model_kept_bytes", "model", "gauge", "Beside that, for kept KV cache."),
    ("serve_model_files_bytes", "model", "gauge", "Of what it holds, what the vault has in files only."),
    ("serve_engine_up", "model", "gauge", "On `/models/metrics`: 1 if its server's metrics are there, 0 if not."),
    (
        "serve_node_up",
        "node",
        "gauge",
        "Over several nodes: 1 if the node's metrics are there, 0 if not.",
    ),
    ("serve_restarts", "model", "counter", "Times that the model's server died and was started again."),
    ("serve_gpu_total_bytes", "gpu", "gauge", "Memory of the GPU."),
    ("serve_gpu_used_bytes", "gpu", "gauge", "Memory of the GPU in use, by all processes."),
    ("serve_gpu_share", "gpu", "gauge", "How much of the GPU models hold that are not asleep, from 0 to 1."),
    ("serve_host_budget_bytes", "", "gauge", "Host memory that sleeping models may hold, outside of a vault."),
    ("serve_host_held_bytes", "", "gauge", "Host memory that sleeping models hold, by the front's ledger."),
    ("serve_host_kept_bytes", "", "gauge", "Beside that, for kept KV cache."),
    ("serve_host_available_bytes", "", "gauge", "Host memory that the system can still give."),
    (
        *("serve_switches", "model kind result", "counter"),
        "Sleeps, wakes, starts and stops that ended `ok` or `failed`.",
    ),
    ("serve_switch_seconds", "model kind", "counter", "The time they took."),
    (
        *("serve_waited_seconds", "model cause", "counter"),
        "What requests waited, however that ended: for a `start`, a `wake`, `room`, their `turn`, after a `failure`, …",
    ),
    (
        *("serve_requests", "model outcome", "counter"),
        "Requests by what became of them: `granted`, `not_in_time`, `failed`, `cancelled`.",
    ),
    (
        *("serve_actuation_seconds", "model found", "histogram"),
        "From a request to its model awake, by what it found: `awake`, `asleep` or `stopped`.",
    ),
    (
        *("serve_first_token_seconds", "model found", "histogram"),
        "From a request to the first piece of a streamed answer, likewise.",
    ),
)

# On the `/metrics` of `cumem-sleep vault --metrics`. What follows `vault_`, `vault_gpu_` or `vault_client_` is the
# vault's own name for it in its status.
VAULT = _table(
    ("vault_memory_bytes", "", "gauge", "What the vault may hold."),
    ("vault_pinned_bytes", "", "gauge", "What it has taken and pinned."),
    ("vault_free_bytes", "", "gauge", "Pinned, and no backup in it."),
    ("vault_left_bytes", "", "gauge", "Room for further backups: free, evictable, or yet to be pinned."),
    ("vault_asleep_bytes", "", "gauge", "Backups of segments that sleep."),
    ("vault_awake_bytes", "", "gauge", "Retained backups of segments that are awake, and kept ranges."),
    ("vault_shared_bytes", "", "gauge", "Backups that several processes share."),
    ("vault_saved_bytes", "", "gauge", "What sharing saves."),
    ("vault_spilled_bytes", "", "gauge", "Backups that are in files only."),
    ("vault_files_free_bytes", "", "gauge", "What may still be spilled."),
    ("vault_files_written_bytes", "", "counter", "Spilled to files."),
    ("vault_files_read_bytes", "", "counter", "Read from files."),
    ("vault_waiting", "", "gauge", "Requests that wait for memory that is still being pinned, or spilled."),
    ("vault_evicted_bytes", "", "counter", "Retained backups and kept ranges that were evicted."),
    ("vault_refused", "", "counter", "Requests that were refused."),
    ("vault_cut_off", "", "counter", "Clients that were cut off."),
    ("vault_clients", "", "gauge", "Clients that are connected."),
)
VAULT_GPU = _table(
    ("vault_gpu_asleep_bytes", "gpu", "gauge", "Backups of segments of this GPU that sleep."),
    ("vault_gpu_awake_bytes", "gpu", "gauge", "Retained backups of segments of this GPU that are awake."),
    ("vault_gpu_shared_bytes", "gpu", "gauge", "How much of both several processes share."),
    ("vault_gpu_copied_out_bytes", "gpu", "counter", "Copied from the GPU."),
    ("vault_gpu_copied_in_bytes", "gpu", "counter", "Copied to the GPU."),
    ("vault_gpu_relayed_out_bytes", "gpu", "counter", "Copied from other GPUs over this one's link."),
    ("vault_gpu_relayed_in_bytes", "gpu", "counter", "Copied to other GPUs over this one's link."),
    ("vault_gpu_busy_out_s", "gpu", "counter", "Seconds in which copies from the GPU were in flight."),
    ("vault_gpu_busy_in_s", "gpu", "counter", "Seconds in which copies to the GPU were in flight."),
    ("vault_gpu_last_out_gbps", "gpu", "gauge", "Rate of the last copies from the GPU, in 10⁹ bytes per second."),
    ("vault_gpu_last_in_gbps", "gpu", "gauge", "Rate of the last copies to the GPU, in 10⁹ bytes per second."),
)
VAULT_CLIENT = _table(
    ("vault_client_asleep_bytes", "pid name", "gauge", "Backups of the client's segments that sleep."),
    ("vault_client_awake_bytes", "pid name", "gauge", "Retained backups of the client's segments that are awake."),
    ("vault_client_shared_bytes", "pid name", "gauge", "How much of both others have, too."),
    ("vault_client_spilled_bytes", "pid name", "gauge", "How much of both is in files only."),
)


class Samples:
    """The values of metrics at one moment.

    Args:
        table: the metrics that there may be.
    """

    def __init__(self, table: Mapping[str, Metric]) -> None:
        self._table = table
        self._values: dict[str, list[tuple[Sequence[str], float | Histogram]]] = {}

    def add(self, name: str, value: float | Histogram, /, **labels: str) -> None:
        """One sample of a metric in the table, with exactly its labels."""
        metric = self._table[name]
        assert labels.keys() == set(metric.labels), f"labels of {name}"
        self._values.setdefault(name, []).append(([labels[label] for label in metric.labels], value))

    def families(self) -> Iterator[Any]:
        """For prometheus_client, which vLLM's `/metrics` is made by."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        for name, samples in self._values.items():
            metric = self._table[name]
            family = kinds[metric.type](PREFIX + name, metric.text, labels=metric.labels)
            for labels, value in samples:
                if isinstance(value, Histogram):
                    family.add_metric(labels, value.buckets(), value.total_s)
                else:
                    family.add_metric(labels, value)
            yield family

    def text(self) -> str:
        """In the text format, as `CONTENT_TYPE` says."""
        lines = []
        for name, samples in self._values.items():
            metric = self._table[name]
            full = metric.full_name
            lines += [f"# HELP {full} {metric.text}", f"# TYPE {full} {metric.type}"]
            for labels, value in samples:
                said = [f'{label}="{escaped(each)}"' for label, each in zip(metric.labels, labels, strict=True)]
                if isinstance(value, Histogram):
                    for bound, count in value.buckets():
                        lines.append(_line(f"{full}_bucket", [*said, f'le="{bound}"'], count))
                    lines.append(_line(f"{full}_count", said, sum(value.counts)))
                    lines.append(_line(f"{full}_sum", said, value.total_s))
                else:
                    lines.append(_line(full, said, value))
        return "\n".join(lines) + "\n"


def _line(name: str, labels: Sequence[str], value: float) -> str:
    return f"{name}{{{','.join(labels)}}} {value}" if labels else f"{name} {value}"


def escaped(value: str) -> str:
    """A label's value as it stands between quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def tables() -> dict[str, str]:
    """The tables of docs/metrics.md, by the heading above each."""
    sections = {"An engine": ENGINE, "The front": FRONT, "The vault": {**VAULT, **VAULT_GPU, **VAULT_CLIENT}}
    return {
        heading: "| metric | |\n|---|---|\n"
        + "".join(f"| `{metric.full_name}{_braced(metric.labels)}` | {metric.text} |\n" for metric in table.values())
        for heading, table in sections.items()
    }


def _braced(labels: Sequence[str]) -> str:
    return f"{{{','.join(labels)}}}" if labels else ""
