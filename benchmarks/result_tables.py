"""Writes the tables of docs/, the README's figures and the plots from the raw results.

No figure is typed by hand.

python benchmarks/result_tables.py            # rewrites them; needs matplotlib
python benchmarks/result_tables.py --check    # fails if they are out of date
"""

from __future__ import annotations

import argparse
import hashlib
import json
import runpy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from level_3_table import rows as rows_of_level_3
from recording import CLEAN_SLEEP, DIRTY_SLEEP, FIRST_SLEEP, HOOK_SEGMENT_BYTES, HOOKS, LATE_WAKE, STEPS, WAKE

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "peers.svg"
SWITCHING = "switching.json"  # left out if there is none
SWITCHING_PLOT = ROOT / "docs" / "switching.svg"
HEADLINE_BEGIN = "<!-- headline: made by benchmarks/result_tables.py from benchmarks/results, do not edit -->"
HEADLINE_END = "<!-- /headline -->"
SCENARIOS_BEGIN = "<!-- scenarios: made by benchmarks/result_tables.py from benchmarks/results, do not edit -->"
SCENARIOS_END = "<!-- /scenarios -->"
BEGIN = "<!-- measured: made by benchmarks/result_tables.py from benchmarks/results, do not edit -->"
END = "<!-- /measured -->"
GIB = 1 << 30
MIB = 1 << 20
BOTH_HOOKS = tuple(f"malloc and free of a {nbytes // MIB} MiB segment" for nbytes in HOOK_SEGMENT_BYTES)
PLOTTED = (FIRST_SLEEP, CLEAN_SLEEP, DIRTY_SLEEP, WAKE, LATE_WAKE)
PALETTE = runpy.run_path(
    str(ROOT / "cumem_sleep" / "tools" / "bench" / "palette.py")
)  # the package may not be installed


def load(name: str) -> dict[str, Any]:
    path = RESULTS / name
    if not path.is_file():
        raise SystemExit(f"benchmarks/results/{name} is missing: benchmarks/on_gpu_host.sh makes it")
    result: dict[str, Any] = json.loads(path.read_text())
    if result["machine"].get("simulated"):
        raise SystemExit(f"benchmarks/results/{name} is of the simulated driver, whose times mean nothing")
    return result


def machine(result: dict[str, Any]) -> str:
    facts = result["machine"]
    in_older_results = facts.get("driver, pcie generation, width", "").split(",")[0]
    driver = facts.get("driver") or in_older_results or "not known"
    return f"{facts['gpu']}, driver {driver}, {facts['cores']} cores, PyTorch {facts['torch']}"


def beside(result: dict[str, Any]) -> str:
    """What the machine did besides, where the result says so."""
    return f" ({result['beside']})" if "beside" in result else ""


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


def bench_table(result: dict[str, Any], title: str) -> list[str]:
    """Each step's median and spread, compared with the link in the same run (`cumem-sleep bench --json`)."""
    link, workload, digest = result["link_gbps"], result["workload"], result["digest"]
    lines = [
        f"**{title}**: {workload['segments']} segments, {workload['weights_bytes'] / GIB:.2f} GiB of weights,"
        f" {workload['kv_cache_bytes'] / GIB:.2f} GiB of KV cache; random contents, checked after every wake."
        f" {machine(result)}. The link in the same run: {link['to_host']:.1f} GB/s to the host,"
        f" {link['to_device']:.1f} GB/s to the GPU.",
        "",
        "| step | seconds (median, range) | copied GB | GB/s | × time on the link |",
        "|---|---|---|---|---|",
    ]
    by_step: dict[str, list[dict[str, Any]]] = {}
    for row in result["steps"]:
        by_step.setdefault(row["step"], []).append(row)
    for step, rows in by_step.items():
        moved = statistics.median(row["bytes"] for row in rows)
        rates = [row["gbps"] for row in rows if row["gbps"]]
        ratios = [row["times_link"] for row in rows if row["times_link"]]
        lines.append(
            f"| {step} | {spread([row['seconds'] for row in rows])} | {moved / 1e9:.1f} |"
            f" {f'{statistics.median(rates):.1f}' if rates else '–'} |"
            f" {f'{statistics.median(ratios):.2f}' if ratios and moved > 1e9 else '–'} |"
        )
    remarks = [f"A digest of all weights takes {spread([1000 * s for s in digest['seconds']])} ms."]
    if ratios := [row["host_bytes_per_byte"] for row in result["steps"] if row.get("host_bytes_per_byte")]:
        remarks.append(f"Host memory per byte backed up: {max(ratios):.3f}.")
    if left := [row["left_on_gpu_bytes"] for row in result["steps"] if row.get("left_on_gpu_bytes")]:
        remarks.append(f"Left on the GPU asleep: {max(left) / GIB:.2f} GiB, the CUDA context included.")
    return [*lines, "", " ".join(remarks)]


def samples(result: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Seconds by step and layer, of pytest-benchmark's JSON; and of both hooks together."""
    seconds: dict[tuple[str, str], list[float]] = {
        (info["step"], info["layer"]): benchmark["stats"]["data"]
        for benchmark in result["benchmarks"]
        if "step" in (info := benchmark["extra_info"])
    }
    for both, malloc, free in zip(BOTH_HOOKS, HOOKS[::2], HOOKS[1::2], strict=True):
        for layer in result["layers"]:
            if (free, layer) in seconds:
                rounds = zip(seconds[malloc, layer], seconds[free, layer], strict=True)
                seconds[both, layer] = [sum(pair) for pair in rounds]
    return seconds


def link_gbps(result: dict[str, Any], direction: str) -> str:
    for benchmark in result["benchmarks"]:
        if benchmark["name"] == f"test_link[{direction}]":
            return f"{benchmark['extra_info']['bytes'] / benchmark['stats']['median'] / 1e9:.1f} GB/s"
    return "not measured"


PEERS_BELOW = (
    "",
    f"![Seconds of sleep and wake by layer]({PLOT.name})",
    "",
    "Weights wake from level 2 with undefined bytes; torch_memory_saver fixes where memory is allocated whether its"
    " bytes are kept. What the layers do in these times differs: cumem-sleep also proves that the bytes are the same.",
)


def peers_table(result: dict[str, Any], title: str, below: Sequence[str] = ()) -> list[str]:
    """The same steps of every layer, each in processes of its own, one run."""
    workload, layers, seconds = result["workload"], result["layers"], samples(result)
    titles = [f"{layer['title']} {layer['version'] or ''}".strip() for layer in layers.values()]
    if not any((FIRST_SLEEP, name) in seconds for name in layers):
        raise SystemExit(f"benchmarks/results: {title}: no layer was measured")

    def row(head: str, cells: list[str]) -> str:
        return f"| {head} | {' | '.join(cells)} |"

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
        row("", titles),
        "|---" * (len(titles) + 1) + "|",
        *(row(step, [step_cell(step, name, 1) for name in layers]) for step in STEPS),
        *(row(f"{hook}, µs", [step_cell(hook, name, 1e6) for name in layers]) for hook in (*HOOKS, *BOTH_HOOKS)),
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


def digest_of(name: str) -> str:
    return "sha256:" + hashlib.sha256((RESULTS / name).read_bytes()).hexdigest()


def peers_digest() -> str:
    return digest_of("peers.json")


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


def draw_peers(result: dict[str, Any]) -> None:
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


SWITCH, FIRST_TOKEN, ANSWERED = "switch", "first token after it", "switch and answer"
SWITCHING_ROWS = {
    "old model: sleep or stop": "off_s",
    "new model: wake or start": "on_s",
    "new model: weights read again": "reload_s",
    SWITCH: "switch_s",
    FIRST_TOKEN: "first_token_s",
    "first token after a warm-up request": "warm_first_token_s",
    ANSWERED: "total_s",
}
SWITCHING_PLOTTED = (SWITCH, FIRST_TOKEN, ANSWERED)


def switching_ways(result: dict[str, Any], quantization: str | None) -> list[dict[str, Any]]:
    """Those that have a figure or an error, restarts first."""
    ways = [way for way in result["ways"].values() if way["quantization"] == quantization]
    return sorted(ways, key=lambda way: way["level"] is not None)


def switching_seconds(way: dict[str, Any], key: str) -> list[float]:
    """Of its switches; a restart that had to compile does not count."""
    switches = [switch for switch in way["switches"] if switch["compile_cache_warm"] is not False]
    return [switch[key] for switch in switches if switch[key] is not None]


def switching_table(result: dict[str, Any]) -> list[str]:
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
        f" {workload['gpu_memory_utilization']:.0%} of the GPU; A → B → A → …, after each switch an answer of"
        f" {workload['max_tokens']} tokens to {workload['prompt_tokens']}, all of one run's tokens the ones of"
        f" the start. {machine(result)}. Seconds, as an HTTP client sees them, median and range:",
        "",
        *_switching_rows(switching_ways(result, None)),
        "",
        f"![Seconds of a switch by way]({SWITCHING_PLOT.name})",
    ]
    if fp8 := switching_ways(result, "fp8"):
        lines += ["", "The same with weights quantised to FP8:", "", *_switching_rows(fp8)]
    remarks = _switching_remarks(result)
    return [*lines, "", " ".join(remarks)] if remarks else lines


def _switching_rows(ways: list[dict[str, Any]]) -> list[str]:
    def row(head: str, cells: list[str]) -> str:
        return f"| {head} | {' | '.join(cells)} |"

    def cell(way: dict[str, Any], key: str) -> str:
        if values := switching_seconds(way, key):
            return spread(values)
        return "–" if way["switches"] else "not measured"

    def faster(way: dict[str, Any], key: str) -> str:
        restarts = [value for other in ways if other["level"] is None for value in switching_seconds(other, key)]
        mine = switching_seconds(way, key)
        if way["level"] is None or not restarts or not mine:
            return "–"
        return digits(statistics.median(restarts) / statistics.median(mine)) + " ×"

    def first_sleep(way: dict[str, Any], model: str) -> str:
        sleeps = [sleep["seconds"] for sleep in way["first_sleeps"] if sleep["model"] == model]
        return spread(sleeps) if sleeps else "–"

    lines = [row("", [_title(way) for way in ways]), "|---" * (len(ways) + 1) + "|"]
    for model in ("A", "B"):
        lines.append(row(f"first sleep of {model}", [first_sleep(way, model) for way in ways]))
    for head, key in SWITCHING_ROWS.items():
        lines.append(row(head, [cell(way, key) for way in ways]))
        if head in (SWITCH, ANSWERED) and any(way["level"] is None for way in ways):
            lines.append(row(f"{head}, faster than restart", [faster(way, key) for way in ways]))
    return [*lines, row("switches", [str(len(switching_seconds(way, "switch_s"))) for way in ways])]


def _title(way: dict[str, Any]) -> str:
    return str(way["title"]) + (", page cache empty" if way["page_cache_dropped"] else "")


def _switching_remarks(result: dict[str, Any]) -> list[str]:
    ways = result["ways"].values()
    cached = [s["checkpoint_cached"] for way in ways if not way["page_cache_dropped"] for s in way["switches"]]
    remarks = []
    if fractions := [fraction for fraction in cached if fraction is not None]:
        where = "a RAM disk" if (result["checkpoints"] or {}).get("in_memory") else "the disk"
        held = " to ".join(dict.fromkeys(f"{fraction:.0%}" for fraction in (min(fractions), max(fractions))))
        remarks.append(
            f"Checkpoints lay on {where}; the page cache held {held} of what a restart or reload read. Restarts had a"
            " warm compile cache."
        )
    if prepared := [_named(way) for way in ways if way["prepared_s"]]:
        remarks.append(f"First sleeps were prepared (`CUMEM_SLEEP_PREPARE=1`): {'; '.join(prepared)}.")
    runs: dict[str | None, list[str]] = {}
    for way in ways:
        runs.setdefault(way["machine"].get("command"), []).append(_named(way))
    if len(runs) > 1:
        apart = " | ".join("; ".join(names) for names in runs.values())
        remarks.append(f"Measured in {len(runs)} runs, on machines with such a GPU: {apart}.")
    for way in ways:
        if way["error"]:
            remarks.append(f"{_named(way)} failed: {way['error'].splitlines()[0]}.")
    return remarks


def _named(way: dict[str, Any]) -> str:
    return f"{_title(way)} ({way['quantization'] or 'bf16'})"


def draw_switching(result: dict[str, Any]) -> None:
    """docs/switching.svg."""
    series = [
        Bars(
            _title(way),
            {
                group: statistics.median(values)
                for group in SWITCHING_PLOTTED
                if (values := switching_seconds(way, SWITCHING_ROWS[group]))
            },
        )
        for way in switching_ways(result, None)
    ]
    models = " and ".join(str(model["shape"]) for model in result["workload"]["models"].values())
    title = f"{models}, one {result['machine']['gpu']}"
    draw_bars(SWITCHING_PLOT, SWITCHING, title, SWITCHING_PLOTTED, series)


SERVE_ROWS = {
    "first sleep": "first_sleep_s",
    "later sleeps": "later_sleeps_s",
    "wake right after a sleep": "wakes_s",
    "wake 3 s later": "wake_after_3_s",
    "first token after a wake": "first_token_s",
}
SERVE_TITLES = {
    "cold": "cumem-sleep, cold",
    "touched": "cumem-sleep, host memory used before",
    "prepared": "cumem-sleep, `CUMEM_SLEEP_PREPARE=1`",
    "compressed": "the same, `CUMEM_SLEEP_COMPRESS=auto`",
    "vault": "cumem-sleep, the vault",
    "vault_compressed": "the same, `CUMEM_SLEEP_COMPRESS=auto`",
    "vllm": "vLLM's own",
}


def serve_table(result: dict[str, Any]) -> list[str]:
    """What a client of `vllm serve` waits for."""
    ways = {way: facts for way, facts in result["ways"].items() if "error" not in facts}
    names = [way for way in SERVE_TITLES if way in ways]
    usage = next(facts["status"]["usage"] for facts in ways.values() if "status" in facts)
    cores = sorted({facts["machine"]["cores"] for facts in ways.values()})
    served = {"machine": {**result["machine"], "cores": " or ".join(map(str, cores))}}
    sizes = " and ".join(f"{usage[tag]['bytes'] / GIB:.1f} GiB of {tag}" for tag in ("weights", "kv_cache"))
    lines = [
        f"**`vllm serve`, a Qwen3-{result['shape']}-shaped model**, level 1: {sizes}, vLLM {result['machine']['vllm']},"
        f" torch.compile and CUDA graphs on, the same tokens after every wake. {machine(served)}. Seconds, as an HTTP"
        " client sees them, median and range:",
        "",
        f"|  | {' | '.join(SERVE_TITLES[name] for name in names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for head, key in SERVE_ROWS.items():
        cells = [ways[name][key] for name in names]
        lines.append(f"| {head} | {' | '.join(spread(c if isinstance(c, list) else [c]) for c in cells)} |")
    left = [f"{ways[name]['gpu_bytes_asleep'][-1] / GIB:.2f}" for name in names]
    lines.append(f"| left on the GPU asleep, GiB | {' | '.join(left)} |")
    if "compressed" in names:
        lines += [
            "",
            "Compressed weights were normally distributed.",
        ]
    return lines


def scenarios_table(result: dict[str, Any]) -> list[str]:
    """What was tried with a real vLLM, and how it ended."""
    outcomes = result["scenarios"]
    versions = ", ".join(sorted({outcome["machine"]["vllm"] for outcome in outcomes.values()}))
    gpus = ", ".join(sorted({outcome["machine"]["gpu"] for outcome in outcomes.values()}))
    lines = [
        f"Run with vLLM {versions} on an {gpus} (`benchmarks/vllm_scenarios.py`):",
        "",
        "| scenario | |",
        "|---|---|",
    ]
    for name, outcome in outcomes.items():
        failed = f" **Failed**: {outcome['why']}." if "why" in outcome else " **Failed.**"
        not_run = f" **Not run**: {outcome['not_run']}." if "not_run" in outcome else failed
        ended = "" if outcome["passed"] else not_run
        lines.append(f"| {name.replace('_', ' ')} | {outcome['says']}{ended} |")
    return lines


def prepare_table(result: dict[str, Any]) -> list[str]:
    """What a model that runs meanwhile pays."""
    lines = [
        "**prepare() while a model runs**: a decode step in a CUDA graph that reads"
        f" {result['weights_bytes'] / GIB:.0f} GiB of weights, and copies its token to the host each time."
        f" {machine(result)}.",
        "",
        "| limit GB/s | reached GB/s | step alone ms (mean, p99) | step meanwhile ms (mean, p99) | slower by |",
        "|---|---|---|---|---|",
    ]
    for row in result["rates"]:
        alone, meanwhile = row["alone"], row["meanwhile"]
        lines.append(
            f"| {row['rate_limit_gbps'] or 'none'} | {row['prepare_gbps']:.1f} | {alone['mean_ms']:.2f},"
            f" {alone['p99_ms']:.2f} | {meanwhile['mean_ms']:.2f}, {meanwhile['p99_ms']:.2f} |"
            f" {row['slowdown']:.1%} |"
        )
    return lines


def decoder_table(result: dict[str, Any]) -> list[str]:
    """Identity of logits and addresses, and what stays on the GPU."""
    lines = [
        "**A Qwen3-8B-shaped decoder**, plain PyTorch, its decode step captured in a CUDA graph, weights loaded from"
        f" safetensors. {machine(result)}.",
        "",
        "| run | sleep s | wake s | logits | addresses | on the GPU asleep |",
        "|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        lines.append(
            f"| {run['run']} | {run['sleep']['seconds']:.3f} | {run['wake']['seconds']:.3f} |"
            f" {'bit-identical' if run['logits_bit_identical'] else 'DIFFER'} |"
            f" {'same' if run['addresses_identical'] else 'DIFFER'} | {run['gpu_bytes_asleep'] / GIB:.3f} GiB |"
        )
    items = result["runs"][0]["asleep_itemised"]
    lines += ["", "Asleep: " + "; ".join(f"{name} {nbytes / GIB:.3f} GiB" for name, nbytes in items.items()) + "."]
    return lines


COMPRESSED_STEPS = ("first sleep", "dirty sleep", "clean sleep", "wake at once", "wake later")


def compressed_table(result: dict[str, Any]) -> list[str]:
    """Raw and compressed backups of the same model, in seconds and beside the link."""
    results = [one for one in result["results"] if "error" not in one]
    gib = results[0]["bytes"] / GIB
    lines = [
        f"**Compressed backups** (`CUMEM_SLEEP_COMPRESS=auto`) and raw ones: a 32B model's memory, {gib:.2f} GiB of"
        " weights, 54.63 GiB of KV cache, one process for each line, every byte checked after every wake."
        f" {machine(results[0])}. In parentheses: how many times faster than the uncompressed weights on the link"
        f" ({results[0]['link_gbps']['to_host']:.1f} and {results[0]['link_gbps']['to_device']:.1f} GB/s). Seconds,"
        " medians:",
        "",
        f"| weights | compress | stored | {' | '.join(COMPRESSED_STEPS)} |",
        f"|---|---|---{'|---' * len(COMPRESSED_STEPS)}|",
    ]
    for one in results:
        summary = one["summary"]
        cells = [
            digits(summary[step]["seconds"])
            + (f" ({summary[step]['times_link']:.2f} ×)" if step not in ("first sleep", "clean sleep") else "")
            for step in COMPRESSED_STEPS
        ]
        stored = f"{summary['first sleep']['stored']:.3f}"
        lines.append(f"| {one['content']} | {one['compress']} | {stored} | {' | '.join(cells)} |")
    by_way = {(one["content"], one["compress"]): one["summary"]["dirty sleep"] for one in results}
    backing_up = by_way["bf16 normal", "auto"]
    return [
        *lines,
        "",
        f"Of the compressed dirty sleep of bf16, {digits(backing_up['backing_up_s'])} s"
        f" ({backing_up['backing_up_times_link']:.2f} ×) pass until everything is backed up; in the rest the driver"
        " releases device memory. Wakes follow right after their sleep, or some seconds later. The checkpoint is"
        " all-MiniLM-L6-v2, repeated; before a dirty sleep each of its values was changed by about 1 %.",
    ]


def host_memory_table(result: dict[str, Any]) -> list[str]:
    """What a first sleep waits for, one step after the other."""
    lines = [
        f"**Host memory**: {result['bytes'] / GIB:.0f} GiB, prefaulted (by many threads), then registered (by one),"
        f" then copied to. A first sleep does these steps in parallel. {machine(result)}. Seconds:",
        "",
        "| in this virtual machine | prefault | register | copy | give back |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [digits(row[key]) for key in ("touch_s", "register_s", "copy_s", "give_back_s")]
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return lines


def side_by_side(result: dict[str, Any]) -> str:
    """The same steps side by side, and first sleeps."""
    seconds: dict[str, list[float]] = {}
    for row in result["side_by_side"]:
        seconds.setdefault(row["what"], []).append(row["seconds"])
    both = ", ".join(f"{what} {spread(values)} s" for what, values in seconds.items())
    first = result["rows"][0]
    return (
        f"The same steps in parallel, in fresh processes in turn, where memory had been used before: {both}, each of"
        f" {result['bytes'] / GIB:.0f} GiB (median and range; one after the other, these steps took"
        f" {digits(first['touch_s'])}, {digits(first['register_s'])} and {digits(first['copy_s'])} s)."
        f" {machine(result)}."
    )


def codec_table(result: dict[str, Any]) -> list[str]:
    """The codec's kernels alone beside nvCOMP's."""
    lines = [
        f"**The codec alone**, and nvCOMP's ANS ({_version(result['nvcomp']['version'])}) in comparison: stored bytes"
        f" per byte, and GB/s of raw bytes, kernels only. {machine(result)}.",
        "",
        "| content | codec | ratio | count | encode | decode |",
        "|---|---|---|---|---|---|",
    ]
    for content, one in result["codec"].items():
        named = {"cumem-sleep": one}
        for chunk in ("256 KiB", "1024 KiB"):
            named[f"nvCOMP, chunks of {chunk}"] = result["nvcomp"][f"{content}, {chunk}"]
        for codec, row in named.items():
            rates = [
                f"{row[key]['median']:.0f}" if key in row else "–"
                for key in ("count_gbps", "encode_gbps", "decode_gbps")
            ]
            lines.append(f"| {content} | {codec} | {row['ratio']:.3f} | {' | '.join(rates)} |")
    return lines


def _version(number: int) -> str:
    return f"{number // 1000}.{number // 100 % 10}"


VAULT_WAYS = {
    "own": "own memory, its first use on that machine",
    "vault": "the vault",
    "replica": "a replica, while the first one sleeps",
    "compressed": "the vault, compressed",
}
VAULT_STEPS = {
    "first sleep": "to_host",
    "wake": "to_device",
    "wake, later": "to_device",
    "later sleep, everything changed": "to_host",
    "later sleep, nothing changed": None,
}
VAULT_BYTES = {
    "copied by the first sleep, GiB": "copied_bytes",
    "found in the vault, GiB": "found_bytes",
    "stored by the first sleep, GiB": "stored_bytes",
    "pinned by the process itself, GiB": "pinned_by_itself_bytes",
}


def link_rates(result: dict[str, Any]) -> dict[str, float]:
    """Bytes per second by direction, at best."""
    return {direction: result["link_bytes"] / min(seconds) for direction, seconds in result["link"].items()}


def gbps_of_links(result: dict[str, Any]) -> str:
    link = link_rates(result)
    return f"{link['to_host'] / 1e9:.1f} GB/s to the host, {link['to_device'] / 1e9:.1f} GB/s to the GPU"


def vault_table(result: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Sleeps and wakes through the vault, and of own memory in another run, beside the link of their run."""
    workload = result["workload"]
    found = {**result["ways"], "replica": result["ways"]["vault"]["replica"], "own": own["ways"]["own"]}
    ways = {way: found[way] for way in VAULT_WAYS if "error" not in found[way]}

    def cell(name: str, step: str, direction: str | None) -> str:
        way = ways[name]
        if not (seconds := [answer["seconds"] for answer in way.get(step, ())]):
            return "–"
        copies = step != "first sleep" or way[step][0]["layer"]["copied_bytes"] > 0
        if direction is None or not copies:
            return low_to_high(seconds)
        link = link_rates(own if name == "own" else result)
        times = low_to_high([each * link[direction] / way["bytes"] for each in seconds], "{:.2f}".format)
        return f"{low_to_high(seconds)} ({times} ×)"

    def busy(way: dict[str, Any]) -> str:
        return digits(way["first sleep"][0]["link"]["busy_s"]) if "link" in way["first sleep"][0] else "–"

    lines = [
        f"{workload['segments']} segments, {workload['weights_bytes'] / GIB:.2f} GiB of bf16 weights,"
        f" {workload['kv_cache_bytes'] / GIB:.2f} GiB of KV cache, every byte checked after every wake."
        f" {machine(result)}. The link: {gbps_of_links(result)}. The first column was measured earlier{beside(own)},"
        f" with a link of {gbps_of_links(own)}. Seconds; in parentheses, how many times as long as the uncompressed"
        " bytes take on the link:",
        "",
        f"|  | {' | '.join(VAULT_WAYS[way] for way in ways)} |",
        "|---" * (len(ways) + 1) + "|",
    ]
    for step, direction in VAULT_STEPS.items():
        lines.append(f"| {step} | {' | '.join(cell(way, step, direction) for way in ways)} |")
    lines.append(f"| in the first sleep the vault's link was busy for | {' | '.join(map(busy, ways.values()))} |")
    layers = [way["first sleep"][0]["layer"] for way in ways.values()]
    for head, key in VAULT_BYTES.items():
        lines.append(f"| {head} | {' | '.join(f'{layer[key] / GIB:.2f}' for layer in layers)} |")
    left = [f"{way['first sleep'][0]['left_on_gpu_bytes'] / GIB:.2f}" for way in ways.values()]
    return [*lines, f"| in use on the whole GPU asleep, GiB | {' | '.join(left)} |"]


def clients_together(result: dict[str, Any]) -> str:
    """Two clients at once, and the same two in turn."""
    link, together = link_rates(result), result["ways"]["together"]
    clients = together["the clients"]

    def taken(step: str, direction: str) -> str:
        seconds = [answer["seconds"] for answer in together[step]]
        times = low_to_high([each * link[direction] / together["bytes"] for each in seconds], "{:.2f}".format)
        return f"{low_to_high(seconds)} s ({times} ×)"

    taken_at_once = [*together["sleep at once"], *together["wake at once"]]
    slower = max(max(pair["each"]) / min(pair["each"]) for pair in taken_at_once)
    return (
        f"{len(clients)} clients on one GPU, of {clients[0]['bytes'] / GIB:.2f} GiB of weights each, slept for the"
        " first time at the same moment, and woke at the same moment: both were asleep after"
        f" {taken('first sleep', 'to_host')}, and awake again after {taken('wake', 'to_device')}. Then every weight"
        " changed before each sleep: both were"
        f" asleep after {taken('sleep at once', 'to_host')} at once, after {taken('sleeps in turn', 'to_host')} one"
        f" after the other; and awake again after {taken('wake at once', 'to_device')} and"
        f" {taken('wakes in turn', 'to_device')}. So at once both took {together['at once / in turn']['sleep']:.2f}"
        f" times as long to sleep as in turn, and {together['at once / in turn']['wake']:.2f} times to wake; no client"
        f" took longer than {slower:.2f} times what the other took meanwhile."
    )


def vault_gpu_memory_table(result: dict[str, Any]) -> list[str]:
    """What a vault without a client takes of a GPU, by its size and its pages."""
    contexts = [each["bytes"] / MIB for each in result["context"]["contexts"]]
    vaults = [vault for vault in result["vault"]["vaults"] if "not measured" not in vault]
    return [
        f"What a vault takes of a GPU before it has a client. {machine(result)}. A bare context takes"
        f" {low_to_high(contexts)} MiB there.",
        "",
        "| memory of the vault, GiB | in | pinned after, s | GPU memory, MiB |",
        "|---|---|---|---|",
        *(
            f"| {vault['memory_bytes'] / GIB:g} | {vault['pages']} | {digits(vault['pinned after s'])} |"
            f" {vault['bytes'] / MIB:.0f} |"
            for vault in vaults
        ),
    ]


def saver_table(result: dict[str, Any]) -> list[str]:
    """The same calls with either package, and how many times as fast ours is with the same setting."""
    ((size, ways),) = result["results"].items()
    titles = [way.replace("theirs", "torch_memory_saver").replace("ours", "this layer") for way in ways]
    version = ways["theirs"]["version"]

    def seconds(way: str, step: str) -> list[float]:
        return [answer["seconds"] for answer in ways[way]["steps"][step]]

    def cell(way: str, step: str) -> str:
        mine = seconds(way, step)
        peer = "theirs, retained" if "retained" in way else "theirs"
        return low_to_high(mine) + ("" if way == peer else f" ({min(seconds(peer, step)) / min(mine):.2f} ×)")

    def gib(key: str) -> list[str]:
        return [f"{facts['steps']['first pause'][0][key] / GIB:.2f}" for facts in ways.values()]

    lines = [
        f"{size} of weights with a backup and a KV cache without one, torch_memory_saver {version}, hook mode `torch`,"
        " each way a process of its own that had touched the host memory before, every byte checked after every"
        f" resume. {machine(result)}. Seconds; in parentheses, how many times as fast as torch_memory_saver with the"
        " same setting, by the faster of two:",
        "",
        f"|  | {' | '.join(titles)} |",
        "|---" * (len(ways) + 1) + "|",
    ]
    for step in ways["theirs"]["steps"]:
        lines.append(f"| {step} | {' | '.join(cell(way, step) for way in ways)} |")
    lines.append(f"| host memory that the first pause took, GiB | {' | '.join(gib('host_bytes'))} |")
    return [*lines, f"| in use on the whole GPU when paused, GiB | {' | '.join(gib('left_on_gpu_bytes'))} |"]


LEVEL_3_STEPS = ("level 1 sleep", "level 3 sleep", "checkpoint", "level 1 wake", "level 3 wake", "restore")


def level_3_table(result: dict[str, Any], behaviour: dict[str, Any]) -> list[str]:
    """What leaving and restoring the CUDA state adds (`cumem-sleep bench --level 3`), and many of them in a row."""
    workload = result["workload"]
    lines = [
        f"**Level 3**: {workload['segments']} segments, {workload['weights_bytes'] / GIB:.0f} GiB of weights, which the"
        f" process itself has pinned in host memory, {workload['kv_cache_bytes'] / GIB:.0f} GiB of KV cache, every byte"
        f" checked after every wake. {machine(result)}. Seconds, median and range:",
        "",
        "| step | seconds | in use on the GPU then, MiB |",
        "|---|---|---|",
    ]
    for step in LEVEL_3_STEPS:
        rows = [row for row in result["steps"] if row["step"] == step]
        left = {row["left_on_gpu_bytes"] for row in rows if "left_on_gpu_bytes" in row}
        part = "of it: " if step in ("checkpoint", "restore") else ""
        cell = low_to_high([each / MIB for each in left]) if left else ""
        lines.append(f"| {part}{step} | {spread([row['seconds'] for row in rows])} | {cell} |")
    rounds = behaviour["twenty_times"]["rounds"]
    same = len({(each["gpu_free_mib"], each["host_mib"]) for each in rounds}) == 1
    checkpoint, restore = (spread([each[step] for each in rounds]) for step in ("checkpoint", "restore"))
    return [
        *lines,
        "",
        f"A process with 1 GiB of weights, {len(rounds)} times in a row: checkpoint {checkpoint} s, restore {restore}"
        f" s; free memory of the GPU and host memory of the process {'the same after each' if same else 'DIFFER'}.",
    ]


VLLM_LEVEL_3_ROWS = (  # as level_3_table.py calls them
    "cycles with the same tokens",
    "graphs and code made again",
    "first sleep",
    "level 1 of later sleeps",
    "the first checkpoint",
    "checkpoint",
    "restore",
    "rest of the wake",
    "POST /wake_up",
    "first token of a request that wakes",
    "first token after POST /wake_up",
    "slowest answer at level 3",
    "kept on the GPU at level 1",
    "left on the GPU at level 3",
    "the vault's own GPU memory",
    "pinned by the server itself",
    "GPU memory in use asleep grew by",
    "GPU memory in use awake grew by",
    "worker's host memory asleep grew by",
    "worker's host memory awake grew by",
)


def vllm_level_3_table(
    result: dict[str, Any], default_seqs: dict[str, Any], own: dict[str, Any], two: dict[str, Any]
) -> list[str]:
    """`vllm serve` at level 3, a column for each place of its backups; then two models in turns."""

    def measured(run: dict[str, Any], way: str = "vault_compressed") -> dict[str, str]:
        return {row.what: row.measured for row in rows_of_level_3(run["ways"][way], run["arguments"])}

    def in_turns(run: dict[str, Any]) -> str:
        both, wanted = measured(run), 2 * run["arguments"]["switches"]
        failed = run["ways"]["vault_compressed"]["failed"]
        early = f" (then: {failed['two'].splitlines()[0]})" if "two" in failed else ""
        return (
            f"each had at least {both['share of the GPU of each']} of the GPU while awake, and the same tokens after"
            f" {both['switches of two, the same tokens']} of {wanted} switches{early}. To the last token a switch took"
            f" {both['switch, to the last token']}; the first token of the request that wakes"
            f" {both['first token of the switch']}."
        )

    said = result["arguments"]
    options = f"`{said['server_options']}`"
    ways = {
        "own memory": measured(own, "own"),
        "the vault": measured(own, "vault"),
        "the vault, compressed": measured(default_seqs),
        f"the vault, compressed, {options}": measured(result),
    }
    before = measured(two)
    return [
        f"**`vllm serve` at level 3**, a Qwen3-{said['shape']}-shaped model with"
        f" {said['gpu_memory_utilization']:.0%} of the GPU, vLLM {result['machine']['vllm']} with its default CUDA"
        f" graphs. {machine(result)}{beside(result)}. The other columns were measured earlier, with vLLM's default"
        f" number of sequences: the first two{beside(own)}, and the third{beside(default_seqs)}. Medians of the cycles"
        " after the first:",
        "",
        f"|  | {' | '.join(ways)} |",
        "|---" * (len(ways) + 1) + "|",
        *(f"| {row} | {' | '.join(way.get(row, '–') for way in ways.values())} |" for row in VLLM_LEVEL_3_ROWS),
        "",
        f"Two models in turns at level 3 through one vault, compressed, {said['shape']} and {said['second']}, with"
        f" {options}, in the run of the last column: {in_turns(result)}",
        "",
        f"The same earlier, with vLLM's default number of sequences{beside(two)}: {in_turns(two)} Before the switches,"
        f" {before['cycles with the same tokens']} cycles of the first model alone: checkpoint {before['checkpoint']},"
        f" restore {before['restore']}, first token of a request that wakes"
        f" {before['first token of a request that wakes']}.",
    ]


def serve_models_table(result: dict[str, Any]) -> list[str]:
    """Three vLLM servers behind `cumem-sleep serve`: what a client waits for, by model."""
    one, overhead = result["one after the other"], result["overhead"]
    awake, switches = one["first token, awake"], one["switches"]
    titles = [" ".join((shape, *options[1:])) for shape, *options in result["models"].values()]
    command = result["machine"]["command"]
    graphs = "with CUDA graphs" if "--graphs" in command else "without CUDA graphs"
    given = [f", `{option.partition('=')[2]}`" for option in command.split() if option.startswith("--server-options=")]

    def cell(name: str, end: str, seconds: Callable[[dict[str, Any]], float]) -> str:
        return spread([seconds(switch) for switch in switches if switch[end] == name])

    def compared(how: str, what: str) -> str:
        front, direct = (1000 * overhead[how][what][way]["median_s"] for way in ("through the front", "directly"))
        return f"{what} {digits(front)} ms, and {digits(direct)} directly"

    lines = [
        f"**`cumem-sleep serve`**: {len(titles)} models with dummy weights on one GPU, level 1, vLLM"
        f" {result['machine']['vllm']} {graphs}{''.join(given)}; {one['requests']} requests to models at random, one"
        f" after the other. {machine(result)}{beside(result)}. Seconds, median and range:",
        "",
        f"|  | {' | '.join(titles)} |",
        "|---" * (len(titles) + 1) + "|",
    ]
    for head, end, seconds in (
        ("first token after a switch to it", "new", lambda switch: switch["first_token_s"]),
        ("its wake in such a switch", "new", lambda switch: switch["own"][switch["new"]]),
        ("its sleep in a switch to another", "old", lambda switch: switch["own"][switch["old"]]),
    ):
        lines.append(f"| {head} | {' | '.join(cell(name, end, seconds) for name in result['models'])} |")
    counts = [str(sum(switch["new"] == name for switch in switches)) for name in result["models"]]
    many, restarted = result["many at once"], result["restart"]["first token of a model that is started"]
    return [
        *lines,
        f"| switches to it | {' | '.join(counts)} |",
        "",
        f"A model that was awake sent its first token after {digits(awake['median_s'])} s ({awake['count']} times). Of"
        f" {len(switches)} first tokens after a switch {one['within the target']} took no longer than that, 1.05 times"
        f" sleep and wake, and 20 ms. Then {many['clients']} clients at once, {many['requests']} requests:"
        f" {digits(many['seconds'])} s, {sum(many['errors'].values())} errors. Through the front, medians: one at a"
        f" time {compared('one at a time', 'first token')}, {compared('one at a time', 'whole answer')}; 16 at once"
        f" {compared('16 at once', 'first token')}, {compared('16 at once', 'whole answer')}. A restart of the last"
        f" model instead of a switch to it: {digits(restarted)} s to its first token."
        + "".join(f" Failed: {phase}: {why.splitlines()[0]}." for phase, why in result["failed"].items()),
    ]


def _between_marks(lines: Sequence[str]) -> str:
    return "\n".join([BEGIN, "", *lines, "", END])


def vault_section() -> str:
    alone = load("vault_alone.json")
    return _between_marks(
        [
            *vault_table(alone, load("vault.json")),
            "",
            clients_together(alone),
            "",
            *vault_gpu_memory_table(load("vault_gpu_memory.json")),
        ]
    )


def saver_section() -> str:
    return _between_marks(saver_table(load("saver_30.json")))


def section() -> str:
    switching = [*switching_table(load(SWITCHING)), ""] if (RESULTS / SWITCHING).is_file() else []
    lines = [
        *switching,
        *serve_table(load("vllm_serve.json")),
        "",
        *peers_table(load("peers.json"), "Compared with its peers", PEERS_BELOW),
        "",
        *peers_table(
            load("peers_vllm.json"), "Compared with vLLM's layer again, on another day and machine, with later code"
        ),
        "",
        *bench_table(load("bench.json"), "A 32B model's memory"),
        "",
        *bench_table(load("bench_small_segments.json"), "Small segments"),
        "",
        *compressed_table(load("compressed.json")),
        "",
        *codec_table(load("codec.json")),
        "",
        *host_memory_table(load("host_memory.json")),
        "",
        side_by_side(load("host_memory_used_before.json")),
        "",
        *prepare_table(load("prepare_cost.json")),
        "",
        *decoder_table(load("decoder.json")),
        "",
        *level_3_table(load("bench_level_3.json"), load("checkpoint_behaviour.json")),
        "",
        *vllm_level_3_table(*(load(f"vllm_level_3{which}.json") for which in ("", "_default_seqs", "_own", "_two"))),
        "",
        *serve_models_table(load("serve_models.json")),
        "",
        "A first sleep allocates and pins host memory. The virtual machines of these runs get their RAM only when"
        " it is prefaulted and registered for the first time, so the first sleep in a machine is slower than those"
        " of later processes; `prepare()` takes all of this out of the sleep. A wake right after a sleep is a little"
        " slower because the driver scrubs the freed memory at that time. A free waits for running work on the"
        " GPU, which vLLM's does not. Pinned host memory costs 2 MiB of GPU memory per GiB. Raw results, with the"
        " commands that made them: `benchmarks/results/`.",
    ]
    return _between_marks(lines)


SECTIONS = {"benchmarks.md": section, "vault.md": vault_section, "torch-memory-saver.md": saver_section}


def headline() -> str:
    """What a switch takes, for the README: medians of the same ways as in the table."""
    lines = [HEADLINE_BEGIN]
    if (RESULTS / SWITCHING).is_file():
        result = load(SWITCHING)
        seconds = {
            _title(way): digits(statistics.median(values))
            for way in switching_ways(result, None)
            if (values := switching_seconds(way, SWITCHING_ROWS[SWITCH]))
        }
        models = " and ".join(str(model["shape"]) for model in result["workload"]["models"].values())
        lines += [
            "",
            f"Two vLLM servers, {models}, share one {result['machine']['gpu']}. Seconds of a switch from one to the"
            " other ([medians](docs/benchmarks.md)):",
            "",
            f"| {' | '.join(seconds)} |",
            "|---" * len(seconds) + "|",
            f"| {' | '.join(seconds.values())} |",
            "",
        ]
    return "\n".join([*lines, HEADLINE_END])


def scenarios() -> str:
    """The list of what was tried with a real vLLM, between its marks."""
    result = json.loads((RESULTS / "vllm_scenarios.json").read_text())
    return "\n".join([SCENARIOS_BEGIN, "", *scenarios_table(result), "", SCENARIOS_END])


def replaced(text: str, begin: str, section: str, end: str) -> str:
    """The text with what lies between the two marks, and they themselves, replaced."""
    return text[: text.index(begin)] + section + text[text.index(end) + len(end) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is not up to date")
    check = parser.parse_args().check
    readme, page = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
    new = {readme: replaced(readme.read_text(), HEADLINE_BEGIN, headline(), HEADLINE_END)}
    for name, made in SECTIONS.items():
        new[ROOT / "docs" / name] = replaced((ROOT / "docs" / name).read_text(), BEGIN, made(), END)
    new[page] = replaced(new[page], SCENARIOS_BEGIN, scenarios(), SCENARIOS_END)
    plots = {"peers.json": (PLOT, draw_peers)}
    if (RESULTS / SWITCHING).is_file():
        plots[SWITCHING] = (SWITCHING_PLOT, draw_switching)
    if not check:
        for path, text in new.items():
            path.write_text(text)
        for name, (_, draw) in plots.items():
            draw(load(name))
        return
    run = "run benchmarks/result_tables.py"
    for path, text in new.items():
        if text != path.read_text():
            where = path.relative_to(ROOT)
            raise SystemExit(f"{where}: its figures are not those of benchmarks/results; {run}")
    for name, (plot, _) in plots.items():
        if not plot.is_file() or digest_of(name) not in plot.read_text():
            raise SystemExit(f"docs/{plot.name}: not made from benchmarks/results/{name}; {run}")


if __name__ == "__main__":
    main()
