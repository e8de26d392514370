"""The figure: seconds of each step, and where the link alone would be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ...errors import InvalidArgument, InvalidState, counted, format_bytes
from . import palette
from .report import BenchReport

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Make sure that `draw` can write there, before time is spent on measuring.

    Raises:
        InvalidArgument: the format is not supported, there is no such folder, or the file cannot be written.
        InvalidState: matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InvalidArgument(f"--plot {path}: the name must end in {', '.join(_SUFFIXES)}")
    try:
        if not path.absolute().parent.is_dir():
            raise InvalidArgument(f"--plot {path}: there is no folder {path.parent}")
        is_new = not path.exists()
        with path.open("ab"):  # permissions alone are not conclusive
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise InvalidArgument(f"--plot {path}: cannot be written: {error.strerror or error}") from None
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidState(f"--plot {path}: matplotlib is not installed: pip install matplotlib")


def draw(report: BenchReport, path: Path) -> None:
    """Write the figure: horizontal bars for the medians, whiskers from minimum to maximum, marks for the link.

    Raises:
        InvalidState: the file cannot be written.
    """
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    rows = [row for row in report.summaries() if row.name != "prepare"]  # nobody waits for it
    places = range(len(rows))
    figure = Figure(figsize=(9, 1.6 + 0.38 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(places, [row.seconds for row in rows], color=palette.OURS, height=0.6, label="median")
    axes.errorbar(
        [row.seconds for row in rows],
        places,
        xerr=[
            [row.seconds - row.least_seconds for row in rows],
            [row.most_seconds - row.seconds for row in rows],
        ],
        fmt="none",
        ecolor="black",
        capsize=3,
        label="least to most",
    )
    link = [(row.link_seconds, place) for place, row in enumerate(rows) if row.link_seconds is not None]
    axes.vlines(
        [seconds for seconds, _ in link],
        [place - 0.4 for _, place in link],
        [place + 0.4 for _, place in link],
        color=palette.LINK,
        linewidth=2.5,
        label="the link alone",
    )
    for place, row in enumerate(rows):
        axes.annotate(
            f"{row.seconds:.3f} s", (row.most_seconds, place), (6, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(places, [row.name for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds" + (" (simulated: they mean nothing)" if report.machine.simulated else ""))
    axes.set_title(_title(report), fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidState(f"--plot {path}: cannot be written: {error.strerror or error}") from None


def _title(report: BenchReport) -> str:
    where = "the simulated driver" if report.machine.simulated else report.machine.gpu
    return (
        f"Sleep and wake on {where}: {format_bytes(report.weights_bytes)} of weights"
        f" in {counted(report.segments, 'segment')},\n"
        f"{format_bytes(report.kv_cache_bytes)} of KV cache; {report.rounds_text()},"
        f" link {report.link.to_host_gbps:.1f} GB/s to the host, {report.link.to_device_gbps:.1f} GB/s to the GPU"
    )
