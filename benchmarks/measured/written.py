"""How figures and rows of a table are written."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

GIB = 1 << 30
MIB = 1 << 20


def digits(value: float) -> str:
    """Three significant digits, and never more than three decimals."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def spread(values: list[float]) -> str:
    """The median, and the range where there is one."""
    low, middle, high = (digits(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}–{high})" if len(values) > 1 else middle


def low_to_high(values: Sequence[float], written: Callable[[float], str] = digits) -> str:
    """The range, of so few values that a median would hide what it is."""
    low, high = written(min(values)), written(max(values))
    return low if low == high else f"{low}–{high}"


def row(head: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join((head, *cells))} |"


def header(titles: Iterable[str]) -> list[str]:
    """Of a table whose rows have heads."""
    columns = list(titles)
    return [row("", columns), "|---" * (len(columns) + 1) + "|"]
