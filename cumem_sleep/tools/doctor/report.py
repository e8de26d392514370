"""The result of a check, and the report of all checks, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from rich.box import ROUNDED
from rich.table import Table
from rich.text import Text

from ... import __version__
from ..console import one_line

SIMULATED_NOTE = "Simulated driver: no GPU was looked at, and times measured with it mean nothing."


class CheckStatus(str, Enum):
    """The result of a check. `warn`: less speed or a missing feature; `fail`: the layer cannot work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """What a check found, and what to do about it."""

    name: str
    status: CheckStatus
    found: str
    advice: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """All checks, in order.

    Attributes:
        good_for: what can be done on this machine.
    """

    simulated: bool
    checks: tuple[Check, ...]
    good_for: str

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return self.error is None

    @property
    def error(self) -> str | None:
        """Which checks failed."""
        failed = [check.name for check in self.checks if check.status is CheckStatus.FAIL]
        return f"failed: {', '.join(failed)}" if failed else None

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **({"note": SIMULATED_NOTE} if self.simulated else {}),
            "good_for": self.good_for,
            "checks": [{**asdict(check), "status": check.status.value} for check in self.checks],
        }

    def table(self) -> Table:
        """A row for each check."""
        title = f"cumem-sleep {__version__} doctor" + (" (simulated driver)" if self.simulated else "")
        table = Table(title=title, header_style="bold", box=ROUNDED)
        table.add_column("check", no_wrap=True)
        table.add_column("status", no_wrap=True)
        table.add_column("found, and what to do", ratio=1)
        styles = {CheckStatus.OK: "green", CheckStatus.WARN: "yellow", CheckStatus.FAIL: "bold red"}
        for check in self.checks:
            style = styles[check.status]
            text = Text(one_line(check.found))
            if check.advice:
                text.append(f"\n→ {one_line(check.advice)}", style=style)
            table.add_row(Text(check.name), Text(check.status.value, style=style), text)
        return table

    def conclusion(self) -> str:
        """How many checks had which result, and what this machine is good for: two lines."""
        ok, warn, fail = (sum(check.status is status for check in self.checks) for status in CheckStatus)
        return f"{ok} ok, {warn} to look at, {fail} failed\nGood for: {self.good_for}."
