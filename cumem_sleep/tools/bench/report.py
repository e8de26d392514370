"""The report of the benchmark: every step and the medians, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeVar

from rich.box import ROUNDED
from rich.table import Table

from ...errors import counted, format_bytes
from ...report import rate_gbps
from ..machine import MachineFacts
from ..simulated import SIMULATED_NOTE

_DEEP_NOTE = (
    "\nunpin, lock, checkpoint: parts of 'level 3 sleep'; restore, unlock: of 'level 3 wake';"
    "\ncheckpointed: what the CUDA state of this process took, and gave back."
)

_Number = TypeVar("_Number", int, float)


class StepKind(Enum):
    """What a step does, which decides the direction of its copies."""

    SLEEP = "sleep"
    WAKE = "wake"
    PREPARE = "prepare"


@dataclass(frozen=True)
class LinkRates:
    """The rates of pinned copies of `bytes` in each direction: the ceiling."""

    to_host_gbps: float
    to_device_gbps: float
    bytes: int

    def gbps(self, kind: StepKind) -> float:
        """The rate in the direction of such a step."""
        return self.to_device_gbps if kind is StepKind.WAKE else self.to_host_gbps


@dataclass(frozen=True)
class DigestSpeed:
    """How long digests of all weights took, several times."""

    bytes: int
    seconds: tuple[float, ...]

    @property
    def gbps(self) -> float:
        """The rate of the median."""
        return rate_gbps(self.bytes, statistics.median(self.seconds))


@dataclass(frozen=True)
class BenchStep:
    """One measured call.

    Attributes:
        name: the same in every round.
        seconds: wall-clock time of the whole call.
        bytes: copied to the host, or restored.
        link_gbps: rate of the link in that direction.
        phases: seconds by phase, as the layer reports them.
        verified_bytes: after a wake: weights that were checked, by the benchmark's own checksums.
        host_bytes_per_byte: after a sleep with backups: host memory that the backups hold, per byte backed up.
        left_on_gpu_bytes: after a sleep: still in use on the whole device, by all processes, CUDA contexts included.
        checkpointed_bytes: after a sleep at level 3: of the CUDA state of this process that left the device.
    """

    name: str
    kind: StepKind
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
    def gbps(self) -> float:
        """The rate of the whole call; 0 if nothing was copied."""
        return rate_gbps(self.bytes, self.seconds)

    @property
    def times_link(self) -> float | None:
        """The time of the call divided by that of the link alone; None if nothing was copied."""
        return self.seconds / (self.bytes / self.link_gbps / 1e9) if self.bytes else None

    def to_json(self) -> dict[str, Any]:
        """For `--json`, without fields that do not apply."""
        optional = {
            "verified_bytes": self.verified_bytes,
            "host_bytes_per_byte": self.host_bytes_per_byte,
            "left_on_gpu_bytes": self.left_on_gpu_bytes,
            "checkpointed_bytes": self.checkpointed_bytes,
        }
        return {
            "step": self.name,
            "round": self.round,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "gbps": self.gbps,
            "times_link": self.times_link,
            "phases": dict(self.phases),
            **{name: value for name, value in optional.items() if value is not None},
        }


@dataclass(frozen=True)
class Summary:
    """All steps with one name: medians, and the range of the seconds.

    Attributes:
        link_seconds: the time that the link alone would take for the median bytes; None if nothing was copied.
        host_bytes_per_byte, left_on_gpu_bytes, checkpointed_bytes: the maximum; None: not of such steps.
    """

    name: str
    count: int
    seconds: float
    least_seconds: float
    most_seconds: float
    bytes: int
    gbps: float
    times_link: float | None
    link_seconds: float | None
    host_bytes_per_byte: float | None
    left_on_gpu_bytes: int | None
    checkpointed_bytes: int | None

    @classmethod
    def of(cls, steps: list[BenchStep]) -> Summary:
        """The summary of steps with the same name; there must be at least one."""
        seconds = [step.seconds for step in steps]
        nbytes = int(statistics.median(step.bytes for step in steps))
        ratios = [step.times_link for step in steps if step.times_link is not None]
        return cls(
            name=steps[0].name,
            count=len(steps),
            seconds=statistics.median(seconds),
            least_seconds=min(seconds),
            most_seconds=max(seconds),
            bytes=nbytes,
            gbps=statistics.median(step.gbps for step in steps),
            times_link=statistics.median(ratios) if ratios else None,
            link_seconds=nbytes / steps[0].link_gbps / 1e9 if nbytes else None,
            host_bytes_per_byte=_most(step.host_bytes_per_byte for step in steps),
            left_on_gpu_bytes=_most(step.left_on_gpu_bytes for step in steps),
            checkpointed_bytes=_most(step.checkpointed_bytes for step in steps),
        )


@dataclass(frozen=True)
class BenchReport:
    """The whole run.

    Attributes:
        workload: what the segments are modelled on.
        segments: how many segments the weights have.
        host_memory_touched_before: whether it was prefaulted before the measurement.
        compress: the setting of that name.
        digest: None if the run ended early.
        wrong: which bytes differed after which wake, where the run then ended; "" if none did.
    """

    machine: MachineFacts
    workload: str
    segments: int
    weights_bytes: int
    kv_cache_bytes: int
    rounds: int
    host_memory_touched_before: bool
    link: LinkRates
    steps: tuple[BenchStep, ...]
    compress: str = "off"
    digest: DigestSpeed | None = None
    wrong: str = ""

    @property
    def ok(self) -> bool:
        """Whether all bytes came back."""
        return not self.wrong

    @property
    def error(self) -> str | None:
        """Which bytes differed."""
        return self.wrong or None

    @property
    def simulated(self) -> bool:
        """Whether it ran on the simulated driver, where times mean nothing."""
        return self.machine.simulated

    def summaries(self) -> list[Summary]:
        """One for each name, in the order of their first step."""
        by_name: dict[str, list[BenchStep]] = {}
        for step in self.steps:
            by_name.setdefault(step.name, []).append(step)
        return [Summary.of(steps) for steps in by_name.values()]

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        digest = self.digest and {
            "bytes": self.digest.bytes,
            "seconds": list(self.digest.seconds),
            "gbps": self.digest.gbps,
        }
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
            "digest": digest,
            "steps": [step.to_json() for step in self.steps],
            "bytes_checked": self.ok,
            "wrong": self.wrong,
        }

    def rounds_text(self) -> str:
        """As in `3 rounds`."""
        return counted(self.rounds, "round")

    def headline(self) -> str:
        """The machine, the workload, and the ceiling."""
        machine = self.machine
        versions = [
            f"driver {machine.driver or 'not known'}",
            f"{counted(machine.cores, 'core')}",
            f"Python {machine.python}",
        ]
        versions += [f"{name} {version}" for name, version in (("PyTorch", machine.torch),) if version]
        touched = "prefaulted before, since virtual machines hand it out slowly at first"
        lines = [
            f"{machine.gpu}: {', '.join(versions)}",
            f"{self.workload}: {format_bytes(self.weights_bytes)} of weights in {counted(self.segments, 'segment')},"
            f" {format_bytes(self.kv_cache_bytes)} of KV cache; random contents",
            f"host memory: {touched if self.host_memory_touched_before else 'as it was'}",
            f"compression: {self.compress}"
            + ("; bytes and GB/s are those of the uncompressed weights" if self.compress != "off" else ""),
            f"link: {self.link.to_host_gbps:.1f} GB/s to the host, {self.link.to_device_gbps:.1f} GB/s to the GPU"
            f" (pinned copies of {format_bytes(self.link.bytes)}, in this run)",
        ]
        if self.digest is not None:
            median = statistics.median(self.digest.seconds)
            lines.append(f"digest of all weights: {median:.4f} s, {self.digest.gbps:.1f} GB/s")
        return "\n".join(("simulated: " if machine.simulated else "") + line for line in lines)

    def table(self) -> Table:
        """A row for each step. A step that copies hardly anything is not compared with the link."""
        title = f"cumem-sleep bench, {self.rounds_text()}"
        table = Table(
            title=title + (" (simulated driver)" if self.machine.simulated else ""), header_style="bold", box=ROUNDED
        )
        table.add_column("step", no_wrap=True)
        headings = ["seconds", "from–to", "copied GB", "GB/s", "× link", "host bytes per byte", "left on GPU"]
        headings += ["checkpointed"] if self._is_deep else []
        for heading in headings:
            table.add_column(heading, justify="right")
        for each in self.summaries():
            table.add_row(
                each.name,
                f"{each.seconds:.3f}",
                f"{each.least_seconds:.3f}–{each.most_seconds:.3f}" if each.count > 1 else "–",
                f"{each.bytes / 1e9:.2f}",
                f"{each.gbps:.1f}" if each.bytes else "–",
                f"{each.times_link:.2f}" if each.times_link and each.bytes >= self.weights_bytes // 10 else "–",
                "–" if each.host_bytes_per_byte is None else f"{each.host_bytes_per_byte:.3f}",
                _size(each.left_on_gpu_bytes),
                *([_size(each.checkpointed_bytes)] if self._is_deep else []),
            )
        return table

    def conclusion(self) -> str:
        """Whether the bytes came back, and how to read the table."""
        if self.wrong:
            return f"FAILED: {self.wrong}"
        checked = [step.verified_bytes for step in self.steps if step.verified_bytes]
        return (
            f"After each of {counted(len(checked), 'wake')} every byte of the weights was the same as before"
            f" ({format_bytes(sum(checked))} compared in all).\n"
            "seconds: median; × link: relative to the time of the link alone for these bytes;\n"
            "left on GPU: in use on the whole device, by all processes, CUDA contexts included."
            + (_DEEP_NOTE if self._is_deep else "")
        )

    @property
    def _is_deep(self) -> bool:
        return any(step.checkpointed_bytes is not None for step in self.steps)


def _most(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)


def _size(nbytes: int | None) -> str:
    return "–" if nbytes is None else format_bytes(nbytes)
