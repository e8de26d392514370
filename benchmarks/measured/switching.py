"""Two models that take turns on a GPU (`switching.py`)."""

from __future__ import annotations

import statistics
from typing import Any

from .bars import Bars, draw_bars
from .results import ROOT, machine
from .written import GIB, digits, header, row, spread

RESULT = "switching.json"  # left out if there is none
PLOT = ROOT / "docs" / "switching.svg"
SWITCH, FIRST_TOKEN, ANSWERED = "switch", "first token after it", "switch and answer"
ROWS = {
    "old model: sleep or stop": "off_s",
    "new model: wake or start": "on_s",
    "new model: weights read again": "reload_s",
    SWITCH: "switch_s",
    FIRST_TOKEN: "first_token_s",
    ANSWERED: "total_s",
}
PLOTTED = (SWITCH, FIRST_TOKEN, ANSWERED)


def ways_of(result: dict[str, Any], quantization: str | None) -> list[dict[str, Any]]:
    """Those that have a figure or an error, restarts first."""
    ways = [way for way in result["ways"].values() if way["quantization"] == quantization]
    return sorted(ways, key=lambda way: way["level"] is not None)


def seconds_of(way: dict[str, Any], key: str) -> list[float]:
    """Of its switches; a restart that had to compile does not count."""
    switches = [switch for switch in way["switches"] if switch["compile_cache_warm"] is not False]
    return [switch[key] for switch in switches if switch[key] is not None]


def table(result: dict[str, Any]) -> list[str]:
    """Each way's median and range; FP8 in a table of its own."""
    workload = result["workload"]
    models = [
        f"{name} = {model['shape']}, {model['weights_bytes'] / GIB:.1f} GiB"
        for name, model in workload["models"].items()
    ]
    version = f"vLLM {result['machine']['vllm']}"
    loaded = "dummy weights" if workload["load_format"] == "dummy" else "weights from safetensors files"
    lines = [
        f"**Two models on one GPU, switched**: {' and '.join(models)} in bf16, {loaded}, {version}, each server with"
        f" {workload['gpu_memory_utilization']:.0%} of the GPU. After each switch the model answers a prompt of"
        f" {workload['prompt_tokens']} tokens with {workload['max_tokens']}, always the same ones. {machine(result)}."
        " Seconds, as an HTTP client sees them, median and range:",
        "",
        *_rows(ways_of(result, None)),
        "",
        f"![Seconds per switch, by method]({PLOT.name})",
    ]
    if fp8 := ways_of(result, "fp8"):
        taken = " and ".join(f"{_cell(way, SWITCH)} with {title_of(way)}" for way in fp8)
        lines += ["", f"A switch between the same models in FP8: {taken}."]
    remarks = _remarks(result)
    return [*lines, "", " ".join(remarks)] if remarks else lines


def headline(result: dict[str, Any]) -> list[str]:
    """What a switch takes, for the README: medians of the same ways as in the table."""
    seconds = {
        title_of(way): digits(statistics.median(values))
        for way in ways_of(result, None)
        if (values := seconds_of(way, ROWS[SWITCH]))
    }
    models = " and ".join(str(model["shape"]) for model in result["workload"]["models"].values())
    return [
        f"Two vLLM servers, {models}, share one {result['machine']['gpu']}. Seconds of a switch from one to the"
        " other ([medians](docs/benchmarks.md)):",
        "",
        f"| {' | '.join(seconds)} |",
        "|---" * len(seconds) + "|",
        f"| {' | '.join(seconds.values())} |",
    ]


def _cell(way: dict[str, Any], head: str) -> str:
    if values := seconds_of(way, ROWS[head]):
        return spread(values)
    return "–" if way["switches"] else "not measured"


def _rows(ways: list[dict[str, Any]]) -> list[str]:
    def faster(way: dict[str, Any]) -> str:
        key = ROWS[SWITCH]
        restarts = [value for other in ways if other["level"] is None for value in seconds_of(other, key)]
        mine = seconds_of(way, key)
        if way["level"] is None or not restarts or not mine:
            return "–"
        return digits(statistics.median(restarts) / statistics.median(mine)) + " ×"

    def first_sleep(way: dict[str, Any], model: str) -> str:
        sleeps = [sleep["seconds"] for sleep in way["first_sleeps"] if sleep["model"] == model]
        return spread(sleeps) if sleeps else "–"

    lines = header(map(title_of, ways))
    for model in ("A", "B"):
        lines.append(row(f"first sleep of {model}", [first_sleep(way, model) for way in ways]))
    for head in ROWS:
        if head != ANSWERED:  # which the plot shows
            lines.append(row(head, [_cell(way, head) for way in ways]))
        if head == SWITCH and any(way["level"] is None for way in ways):
            lines.append(row(f"{head}, faster than restart", [faster(way) for way in ways]))
    return [*lines, row("switches", [str(len(seconds_of(way, "switch_s"))) for way in ways])]


def title_of(way: dict[str, Any]) -> str:
    return str(way["title"])


def _remarks(result: dict[str, Any]) -> list[str]:
    ways = result["ways"].values()
    cached = [switch["checkpoint_cached"] for way in ways for switch in way["switches"]]
    remarks = []
    if fractions := [fraction for fraction in cached if fraction is not None]:
        held = " to ".join(dict.fromkeys(f"{fraction:.0%}" for fraction in (min(fractions), max(fractions))))
        remarks.append(
            f"Checkpoints lay on the disk; the page cache held {held} of what a restart or reload read. Restarts had a"
            " warm compile cache."
        )
    if prepared := [_named(way) for way in ways if way["prepared_s"]]:
        remarks.append(f"First sleeps were prepared (`CUMEM_SLEEP_PREPARE=1`): {'; '.join(prepared)}.")
    runs = {way["machine"].get("command") for way in ways}
    if len(runs) > 1:
        remarks.append(f"Measured in {len(runs)} runs, on machines with such a GPU.")
    for way in ways:
        if way["error"]:
            remarks.append(f"{_named(way)} failed: {way['error'].splitlines()[0]}.")
    return remarks


def _named(way: dict[str, Any]) -> str:
    return f"{title_of(way)} ({way['quantization'] or 'bf16'})"


def draw(result: dict[str, Any]) -> None:
    """docs/switching.svg."""
    series = [
        Bars(
            title_of(way),
            {group: statistics.median(values) for group in PLOTTED if (values := seconds_of(way, ROWS[group]))},
        )
        for way in ways_of(result, None)
    ]
    models = " and ".join(str(model["shape"]) for model in result["workload"]["models"].values())
    title = f"{models}, one {result['machine']['gpu']}"
    draw_bars(PLOT, RESULT, title, PLOTTED, series)
