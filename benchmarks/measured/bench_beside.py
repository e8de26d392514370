"""`cumem-sleep bench` of two builds in turns (the part `beside` of `on_gpu_host.sh`)."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import median
from typing import Any

from . import results
from .results import machine

RESULT = "bench_beside.json"
BASE = "base, commit "


def table() -> list[str]:
    """The last pair of builds: seconds of every step."""
    runs: dict[str, list[dict[str, Any]]] = json.loads((results.RESULTS / RESULT).read_text())["runs"]
    base = [name for name in runs if name.startswith(BASE)][-1]
    earlier, later = base.removeprefix(BASE).split(", beside ")
    both = [_seconds(runs[base]), _seconds(runs[f"commit {later}"])]
    one = runs[base][0]
    lines = [
        f"**`cumem-sleep bench`** of {one['workload']['weights_bytes'] >> 30} GiB of weights and"
        f" {one['workload']['kv_cache_bytes'] >> 30} GiB of KV cache, two builds in turns, {len(runs[base])} runs of"
        f" each. {machine(one)}. Seconds, median and range:",
        "",
        f"| step | {earlier} | {later} |",
        "|---|---|---|",
    ]
    lines += [f"| {step} | {' | '.join(_cell(seconds[step]) for seconds in both)} |" for step in both[0]]
    releases = [[one for run in runs[name] for one in _releases(run)] for name in (base, f"commit {later}")]
    shown = " and ".join(f"{1000 * median(each):.0f} ms ({_range(each, 1000, 0)})" for each in releases)
    return [*lines, "", f"In each sleep, releasing memory took the driver {shown}. Raw: `{RESULT}`."]


def _seconds(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for step in run["steps"]:
            found[step["step"]].append(step["seconds"])
    return found


def _releases(run: dict[str, Any]) -> list[float]:
    return [step["phases"]["release"] for step in run["steps"] if "release" in step.get("phases", {})]


def _cell(seconds: list[float]) -> str:
    return f"{median(seconds):.3f} ({_range(seconds)})"


def _range(values: list[float], times: int = 1, digits: int = 3) -> str:
    return f"{times * min(values):.{digits}f}–{times * max(values):.{digits}f}"
