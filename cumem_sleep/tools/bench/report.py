"""The report of the benchmark: every step and the medians, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import ROUNDED
from rich.table import Table

from ...errors import counted, format_bytes
from ...report import rate_gbps
from ..machine import MachineFacts
from ..simulated import SIMULATED_NOTE


@dataclass(frozen=True)
class LinkRates:
    """The rates of pinned copies of `bytes` in each direction: the ceiling."""

    to_host_gbps: float
    to_device_gbps: float
    bytes: int


@dataclass(frozen=True)
class BenchStep:
    """One measured call.

    Attributes:
        step: its name, the same in every round.
        seconds: wall-clock time of the whole call.
        bytes: copied to the host, or restored.
        link_gbps: rate of the link in that direction.
        phases: seconds by phase, as the layer reports them.
        verified_bytes: after a wake: weights whose digests were compared.
        host_bytes_per_byte: after a sleep with backups: host memory that the backups hold, per byte backed up.
        left_on_gpu_bytes: after a sleep: still in use on the whole device, by all processes, CUDA contexts included.
        checkpointed_bytes: after a sleep at level 3: of the CUDA state of this process that left the device.
    """

    step: str
    round: int
    seconds: float
    bytes: int
    link_gbps: float
    phases: Mapping[str, float] = field(default_factory=dict)
    verified_bytes: int | None = None
    host_bytes_per_byte: float | None = None
    left_on_gpu_bytes: int | None = None
    checkpointed_bytes: int | None = None

    @property
    def times_link(self) -> float | None:
        """The time of the call divided by that of the link alone; None if nothing was copied."""
        return self.seconds / (self.bytes / self.link_gbps / 1e9) if self.bytes else None

    def to_json(self) -> dict[str, Any]:
        """For `--json`, without fields that do not apply."""
        facts = {name: value for name, value in asdict(self).items() if value is not None and name != "link_gbps"}
        return {**facts, "gbps": rate_gbps(self.bytes, self.seconds), "times_link": self.times_link}


@dataclass(frozen=True)
class BenchReport:
    """The whole run.

    Attributes:
        workload: what the segments are modelled on.
        segments: how many segments the weights have.
        host_memory_touched_before: whether it was prefaulted before the measurement.
        compress: the setting of that name.
    """

    machine: MachineFacts
    workload: str
    segments: int
    weights_bytes: int
    kv_cache_bytes: int
    rounds: int
    host_memory_touched_before: bool
    compress: str
    link: LinkRates
    steps: tuple[BenchStep, ...] = ()

    error = None  # bytes that differ end the run, as any error of the layer

    @property
    def simulated(self) -> bool:
        """Whether it ran on the simulated driver, where times mean nothing."""
        return self.machine.simulated

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **({"note": SIMULATED_NOTE} if self.machine.simulated else {}),
            "machine": asdict(self.machine),
            "workload": {
                "name": self.workload,
                "segments": self.segments,
                "weights_bytes": self.weights_bytes,
                "kv_cache_bytes": self.kv_cache_bytes,
            },
            "rounds": self.rounds,
            "host_memory_touched_before": self.host_memory_touched_before,
            "compress": self.compress,
            "link_gbps": {"to_host": self.link.to_host_gbps, "to_device": self.link.to_device_gbps},
            "steps": [step.to_json() for step in self.steps],
        }

    def headline(self) -> str:
        """The machine, the workload, and the ceiling."""
        machine = self.machine
        versions = f"driver {machine.driver or 'not known'}, {counted(machine.cores, 'core')}, Python {machine.python}"
        touched = "prefaulted before, since virtual machines hand it out slowly at first"
        lines = [
            f"{machine.gpu}: {versions}",
            f"{self.workload}: {format_bytes(self.weights_bytes)} of weights in {counted(self.segments, 'segment')},"
            f" {format_bytes(self.kv_cache_bytes)} of KV cache; random contents",
            f"host memory: {touched if self.host_memory_touched_before else 'as it was'}",
            f"compression: {self.compress}"
            + ("; bytes and GB/s are those of the uncompressed weights" if self.compress != "off" else ""),
            f"link: {self.link.to_host_gbps:.1f} GB/s to the host, {self.link.to_device_gbps:.1f} GB/s to the GPU"
            f" (pinned copies of {format_bytes(self.link.bytes)}, in this run)",
        ]
        return "\n".join(("simulated: " if machine.simulated else "") + line for line in lines)

    def table(self) -> Table:
        """A row for each name of a step, with medians. What copies hardly anything is not compared with the link."""
        title = f"cumem-sleep bench, {counted(self.rounds, 'round')}"
        title += " (simulated driver)" if self.machine.simulated else ""
        table = Table(title=title, header_style="bold", box=ROUNDED)
        table.add_column("step", no_wrap=True)
        headings = ["seconds", "from–to", "copied GB", "GB/s", "× link", "host bytes per byte", "left on GPU"]
        for heading in [*headings, "checkpointed"] if self._is_deep else headings:
            table.add_column(heading, justify="right")
        for name in dict.fromkeys(step.step for step in self.steps):
            table.add_row(name, *self._row([step for step in self.steps if step.step == name]))
        return table

    def _row(self, steps: list[BenchStep]) -> list[str]:
        seconds = [step.seconds for step in steps]
        nbytes = statistics.median(step.bytes for step in steps)
        last = steps[-1]
        cells = [
            f"{statistics.median(seconds):.3f}",
            f"{min(seconds):.3f}–{max(seconds):.3f}" if len(steps) > 1 else "–",
            f"{nbytes / 1e9:.2f}",
            f"{statistics.median(rate_gbps(step.bytes, step.seconds) for step in steps):.1f}" if nbytes else "–",
            f"{statistics.median(step.times_link or 0 for step in steps):.2f}"
            if nbytes > self.weights_bytes // 10
            else "–",
            "–" if last.host_bytes_per_byte is None else f"{last.host_bytes_per_byte:.3f}",
            _size(last.left_on_gpu_bytes),
        ]
        return [*cells, _size(last.checkpointed_bytes)] if self._is_deep else cells

    def conclusion(self) -> str:
        """Whether the bytes came back, and how to read the table."""
        verified = [step.verified_bytes for step in self.steps if step.verified_bytes]
        deep = (
            "\nunpin, lock, checkpoint: parts of 'level 3 sleep'; restore, unlock: of 'level 3 wake';"
            "\ncheckpointed: what the CUDA state of this process took, and gave back."
        )
        return (
            f"After {counted(len(verified), 'wake')} the digests of the weights were the same as before"
            f" ({format_bytes(sum(verified))} in all).\n"
            "seconds: median; × link: relative to the time of the link alone for these bytes;\n"
            "left on GPU: in use on the whole device, by all processes, CUDA contexts included."
        ) + (deep if self._is_deep else "")

    @property
    def _is_deep(self) -> bool:
        return any(step.checkpointed_bytes is not None for step in self.steps)


def _size(nbytes: int | None) -> str:
    return "–" if nbytes is None else format_bytes(nbytes)
