"""Every layer with the same tensors (`peers.py`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from recording import CLEAN_SLEEP, DIRTY_SLEEP, FIRST_SLEEP, HOOK_SEGMENT_BYTES, HOOKS, LATE_WAKE, STEPS, WAKE

from .bars import Bars, draw_bars
from .results import ROOT, machine
from .written import GIB, MIB, digits, header, row, spread

PLOT = ROOT / "docs" / "peers.svg"
BOTH_HOOKS = tuple(f"malloc and free of a {nbytes // MIB} MiB segment" for nbytes in HOOK_SEGMENT_BYTES)
PLOTTED = (FIRST_SLEEP, CLEAN_SLEEP, DIRTY_SLEEP, WAKE, LATE_WAKE)
BELOW = (
    "",
    f"![Seconds of sleep and wake by layer]({PLOT.name})",
    "",
    "Weights wake from level 2 with undefined bytes; torch_memory_saver has no levels. In these times cumem-sleep also"
    " proves that the bytes are the same; the others do not.",
)


def samples(result: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Seconds by step and layer; and of both hooks together."""
    seconds: dict[tuple[str, str], list[float]] = {
        (step, layer): values
        for layer, facts in result["layers"].items()
        for step, values in facts.get("seconds", {}).items()
    }
    for benchmark in result.get("benchmarks", ()):  # of pytest-benchmark, which wrote the results until 5735fe0
        if "step" in (info := benchmark["extra_info"]):
            seconds[info["step"], info["layer"]] = benchmark["stats"]["data"]
    for both, malloc, free in zip(BOTH_HOOKS, HOOKS[::2], HOOKS[1::2], strict=True):
        for layer in result["layers"]:
            if (free, layer) in seconds:
                rounds = zip(seconds[malloc, layer], seconds[free, layer], strict=True)
                seconds[both, layer] = [sum(pair) for pair in rounds]
    return seconds


def link_gbps(result: dict[str, Any], direction: str) -> str:
    seconds = result.get("link", {}).get(direction) or [
        benchmark["stats"]["median"]
        for benchmark in result.get("benchmarks", ())
        if benchmark["name"] == f"test_link[{direction}]"
    ]
    if not seconds:
        return "not measured"
    return f"{result['workload']['link_bytes'] / statistics.median(seconds) / 1e9:.1f} GB/s"


def table(result: dict[str, Any], title: str, below: Sequence[str] = ()) -> list[str]:
    """The same steps of every layer, each in processes of its own, one run."""
    workload, layers, seconds = result["workload"], result["layers"], samples(result)
    titles = [f"{layer['title']} {layer['version'] or ''}".strip() for layer in layers.values()]
    if not any((FIRST_SLEEP, name) in seconds for name in layers):
        raise SystemExit(f"benchmarks/results: {title}: no layer was measured")

    def step_cell(step: str, name: str, scale: float) -> str:
        if (step, name) in seconds:
            return spread([scale * value for value in seconds[step, name]])
        return "not measured" if layers[name]["not_installed"] or layers[name]["error"] else "–"

    def fact_cell(values: list[int], per: int) -> str:
        return digits(statistics.median(values) / per) if values else "not measured"

    lines = [
        f"**{title}**, the same tensors: {workload['segments']} segments,"
        f" {workload['weights_bytes'] / GIB:.2f} GiB of weights, {workload['kv_cache_bytes'] / GIB:.2f} GiB of KV"
        " cache. Each layer ran in its own processes, one after the other, in one run; every byte was checked after"
        " every wake."
        f" {machine(result)}. The link: {link_gbps(result, 'to_host')} to the host,"
        f" {link_gbps(result, 'to_device')} to the GPU. Seconds, median and range:",
        "",
        *header(titles),
        *(row(step, [step_cell(step, name, 1) for name in layers]) for step in STEPS),
        row(f"{BOTH_HOOKS[-1]}, µs", [step_cell(BOTH_HOOKS[-1], name, 1e6) for name in layers]),
        row(
            "host memory per byte of weights",
            [fact_cell(layer["host_bytes"], workload["weights_bytes"]) for layer in layers.values()],
        ),
        row("left on the GPU asleep, GiB", [fact_cell(layer["left_on_gpu_bytes"], GIB) for layer in layers.values()]),
        *below,
    ]
    for layer in layers.values():
        if layer["not_installed"]:
            lines += ["", f"{layer['title']} was not measured: {layer['not_installed']}."]
        elif layer["error"]:
            lines += ["", f"{layer['title']} failed: {layer['error'].splitlines()[0]}."]
    return lines


def draw(result: dict[str, Any]) -> None:
    """docs/peers.svg."""
    seconds, workload = samples(result), result["workload"]
    series = [
        Bars(
            layer["title"].replace("`", ""),
            {step: statistics.median(seconds[step, name]) for step in PLOTTED if (step, name) in seconds},
        )
        for name, layer in result["layers"].items()
        if (FIRST_SLEEP, name) in seconds
    ]
    title = (
        f"{workload['weights_bytes'] / GIB:.0f} GiB of weights, {workload['kv_cache_bytes'] / GIB:.0f} GiB of KV cache,"
        f" {result['machine']['gpu']}"
    )
    draw_bars(PLOT, "peers.json", title, PLOTTED, series)
