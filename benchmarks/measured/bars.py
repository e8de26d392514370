"""The plots."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .results import ROOT, digest_of
from .written import digits

PALETTE = runpy.run_path(
    str(ROOT / "cumem_sleep" / "tools" / "bench" / "palette.py")
)  # the package may not be installed


@dataclass(frozen=True)
class Bars:
    """One colour of a plot: seconds by group; a group may be missing."""

    label: str
    seconds: dict[str, float]


def draw_bars(plot: Path, source: str, title: str, groups: Sequence[str], series: Sequence[Bars]) -> None:
    """A plot that is the same for the same result; it names the result that it was made from."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": source.removesuffix(".json"), "svg.fonttype": "none"})
    mpl.rcParams.update({"font.family": "sans-serif", "font.size": 10})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 1.2 + 0.2 * len(groups) * (len(series) + 1)), layout="constrained")
    height = 1 / (len(series) + 1)
    for number, one in enumerate(series):
        present = [(at, group) for at, group in enumerate(groups) if group in one.seconds]
        values = [one.seconds[group] for _, group in present]
        bars = axes.barh(
            [at + (number - (len(series) - 1) / 2) * height for at, _ in present],
            values,
            height,
            label=one.label,
            color=PALETTE["colour_of"](one.label),
        )
        axes.bar_label(bars, [f" {digits(value)} s" for value in values], fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_xlabel("seconds (logarithmic)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    plot.parent.mkdir(exist_ok=True)
    facts = {"Date": None, "Creator": None, "Description": f"made from {source} {digest_of(source)}"}
    figure.savefig(plot, metadata=facts, facecolor="white")
    pyplot.close(figure)
    # Matplotlib leaves spaces at ends of lines, which Git complains about.
    plot.write_text("\n".join(line.rstrip() for line in plot.read_text().splitlines()) + "\n")
