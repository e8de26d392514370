"""The demo's report: its steps, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.box import ROUNDED
from rich.table import Table
from rich.text import Text

from ...errors import counted, format_bytes
from ...report import rate_gbps
from ..simulated import SIMULATED_NOTE


@dataclass(frozen=True)
class DemoStep:
    """One row of the table.

    Attributes:
        layer_bytes: device memory of the layer's segments after the step.
        device_used_bytes: in use on the whole device, by all processes, after the step; None on the simulated driver.
        host_bytes: host memory that the layer's backups hold after the step.
        moved_bytes: copied between host and device during the step.
        seconds: duration of the step, without the demo's own comparison.
        verified_bytes: compared with the source after the step.
        result: what was found.
        ok: whether it is correct.
    """

    round: int
    name: str
    layer_bytes: int
    device_used_bytes: int | None
    host_bytes: int
    moved_bytes: int
    seconds: float
    verified_bytes: int
    result: str
    ok: bool

    @property
    def gbps(self) -> float | None:
        """The rate of the whole step; None if nothing was moved."""
        return rate_gbps(self.moved_bytes, self.seconds) if self.moved_bytes else None


@dataclass(frozen=True)
class DemoReport:
    """What the demo did and found."""

    simulated: bool
    device: int
    device_name: str
    source: str
    tensors: int
    dtypes: list[str]
    weights_bytes: int
    weights_segments: int
    kv_cache_bytes: int
    steps: tuple[DemoStep, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every step was correct."""
        return self.error is None

    @property
    def error(self) -> str | None:
        """The step that was not, and what it found."""
        failed = next((step for step in self.steps if not step.ok), None)
        return None if failed is None else f"'{failed.name}': {failed.result}"

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        facts = asdict(self)
        facts["steps"] = [{**asdict(step), "gbps": step.gbps} for step in self.steps]
        return {**({"note": SIMULATED_NOTE} if self.simulated else {}), **facts}

    def headline(self) -> str:
        """The weights, the KV cache and the device, in two lines."""
        return (
            f"{self.source}: {counted(self.tensors, 'tensor')},"
            f" {format_bytes(self.weights_bytes)} of {', '.join(self.dtypes)}"
            f" in {counted(self.weights_segments, 'segment')}\n"
            f"kv_cache: {format_bytes(self.kv_cache_bytes)}; device {self.device}: {self.device_name}"
        )

    def table(self) -> Table:
        """A row for each step."""
        table = Table(
            title="cumem-sleep demo" + (" (simulated driver)" if self.simulated else ""),
            header_style="bold",
            box=ROUNDED,
        )
        table.add_column("step", no_wrap=True)
        table.add_column("layer on GPU", justify="right")
        if not self.simulated:
            table.add_column("GPU in use", justify="right")
        for heading in ("host backups", "seconds", "GB/s"):
            table.add_column(heading, justify="right")
        table.add_column("verified", ratio=1)
        last_round = 1
        for step in self.steps:
            if step.round != last_round:
                table.add_section()
                last_round = step.round
            device = [] if self.simulated else [format_bytes(step.device_used_bytes or 0)]
            style = "" if step.ok else "bold red"
            table.add_row(
                step.name,
                format_bytes(step.layer_bytes),
                *device,
                format_bytes(step.host_bytes),
                f"{step.seconds:.3f}",
                "–" if step.gbps is None else f"{step.gbps:.1f}",
                Text.assemble(("✓ ", "green") if step.ok else ("✗ ", style), (step.result, style)),
            )
        return table

    def conclusion(self) -> str:
        """One line: whether all bytes came back."""
        if self.error is not None:
            return f"FAILED at {self.error}"
        compared = [step for step in self.steps if step.verified_bytes]
        return (
            f"Every byte of the weights equalled its source in {counted(len(compared), 'comparison')}"
            f" ({format_bytes(sum(step.verified_bytes for step in compared))} in all); no address changed."
        )
