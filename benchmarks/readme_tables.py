"""Writes the README's "Measured" section and its plot from the raw results, so that no figure is typed by hand.

python benchmarks/readme_tables.py            # rewrites README.md and docs/peers.svg; needs matplotlib
python benchmarks/readme_tables.py --check    # fails if they say something else
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

from recording import CLEAN_SLEEP, DIRTY_SLEEP, FIRST_SLEEP, HOOK_SEGMENT_BYTES, HOOKS, LATE_WAKE, STEPS, WAKE

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "peers.svg"
BEGIN = "<!-- measured: made by benchmarks/readme_tables.py from benchmarks/results, do not edit -->"
END = "<!-- /measured -->"
GIB = 1 << 30
MIB = 1 << 20
BOTH_HOOKS = tuple(f"malloc and free of a {nbytes // MIB} MiB segment" for nbytes in HOOK_SEGMENT_BYTES)
PLOTTED = (FIRST_SLEEP, CLEAN_SLEEP, DIRTY_SLEEP, WAKE, LATE_WAKE)
# Okabe and Ito's, which the colour-blind tell apart.
COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#009E73")


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
    driver = facts.get("driver") or facts["driver, pcie generation, width"].split(",")[0]
    return f"{facts['gpu']}, driver {driver}, {facts['cores']} cores, PyTorch {facts['torch']}"


def digits(value: float) -> str:
    """Three significant digits, and never more than three decimals."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def spread(values: list[float]) -> str:
    """The median, and the range where there is one."""
    low, middle, high = (digits(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}–{high})" if len(values) > 1 else middle


def bench_table(result: dict[str, Any], title: str) -> list[str]:
    """Each step's median and spread, beside the link measured in the same run (`cumem-sleep bench --json`)."""
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


def peers_table(result: dict[str, Any]) -> list[str]:
    """The same steps of every layer, each in processes of its own, one run."""
    workload, layers, seconds = result["workload"], result["layers"], samples(result)
    titles = [f"{layer['title']} {layer['version'] or ''}".strip() for layer in layers.values()]
    if not any((FIRST_SLEEP, name) in seconds for name in layers):
        raise SystemExit("benchmarks/results/peers.json: no layer was measured")

    def row(head: str, cells: list[str]) -> str:
        return f"| {head} | {' | '.join(cells)} |"

    def step_cell(step: str, name: str, scale: float) -> str:
        if (step, name) in seconds:
            return spread([scale * value for value in seconds[step, name]])
        return "not measured" if layers[name]["not_installed"] or layers[name]["error"] else "–"

    def fact_cell(values: list[int], per: int) -> str:
        return digits(statistics.median(values) / per) if values else "not measured"

    lines = [
        f"**Beside its peers**, the same tensors: {workload['segments']} segments,"
        f" {workload['weights_bytes'] / GIB:.2f} GiB of weights, {workload['kv_cache_bytes'] / GIB:.2f} GiB of KV"
        " cache. Each layer in processes of its own, one after the other, in one run; every byte checked after every"
        " wake."
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
        "",
        f"![Seconds of sleep and wake by layer](docs/{PLOT.name})",
        "",
        "Weights wake from level 2 with undefined bytes; torch_memory_saver fixes where memory is allocated whether its"
        " bytes are kept. What the layers do in these times differs: cumem-sleep also proves that the bytes are the"
        " same.",
    ]
    for layer in layers.values():
        if layer["not_installed"]:
            lines += ["", f"{layer['title']} was not measured: {layer['not_installed']}."]
        elif layer["error"]:
            lines += ["", f"{layer['title']} failed: {layer['error'].splitlines()[0]}."]
    return lines


def peers_digest() -> str:
    return "sha256:" + hashlib.sha256((RESULTS / "peers.json").read_bytes()).hexdigest()


def draw_peers(result: dict[str, Any]) -> None:
    """docs/peers.svg, the same bytes for the same result; it names the result that it was made from."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "peers", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10})
    from matplotlib import pyplot

    seconds = samples(result)
    layers = [(name, layer) for name, layer in result["layers"].items() if (FIRST_SLEEP, name) in seconds]
    figure, axes = pyplot.subplots(figsize=(8.5, 1.2 + 0.2 * len(PLOTTED) * (len(layers) + 1)), layout="constrained")
    height = 1 / (len(layers) + 1)
    for number, (name, layer) in enumerate(layers):
        steps = [(at, step) for at, step in enumerate(PLOTTED) if (step, name) in seconds]
        medians = [statistics.median(seconds[step, name]) for _, step in steps]
        bars = axes.barh(
            [at + (number - (len(layers) - 1) / 2) * height for at, _ in steps],
            medians,
            height,
            label=layer["title"].replace("`", ""),
            color=COLOURS[number % len(COLOURS)],
        )
        axes.bar_label(bars, [f" {digits(value)} s" for value in medians], fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)
    axes.set_yticks(range(len(PLOTTED)), PLOTTED)
    axes.invert_yaxis()
    axes.set_xlabel("seconds (logarithmic)")
    axes.spines[["top", "right"]].set_visible(False)
    workload = result["workload"]
    axes.set_title(
        f"{workload['weights_bytes'] / GIB:.0f} GiB of weights, {workload['kv_cache_bytes'] / GIB:.0f} GiB of KV cache,"
        f" {result['machine']['gpu']}",
        fontsize=10,
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    PLOT.parent.mkdir(exist_ok=True)
    facts = {"Date": None, "Creator": None, "Description": f"made from peers.json {peers_digest()}"}
    figure.savefig(PLOT, metadata=facts, facecolor="white")
    pyplot.close(figure)
    # Matplotlib leaves spaces at ends of lines, which Git complains about.
    PLOT.write_text("\n".join(line.rstrip() for line in PLOT.read_text().splitlines()) + "\n")


def prepare_table(result: dict[str, Any]) -> list[str]:
    """What a model that runs meanwhile pays."""
    lines = [
        "**prepare() beside a running model**: a decode step in a CUDA graph that reads"
        f" {result['weights_bytes'] / GIB:.0f} GiB of weights, its token copied to the host each time."
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


def section() -> str:
    lines = [
        BEGIN,
        "",
        *peers_table(load("peers.json")),
        "",
        *bench_table(load("bench.json"), "A 32B model's memory"),
        "",
        *bench_table(load("bench_small_segments.json"), "Small segments"),
        "",
        *prepare_table(load("prepare_cost.json")),
        "",
        *decoder_table(load("decoder.json")),
        "",
        "A first sleep takes and pins host memory. The virtual machines of these runs get their RAM only as"
        " it is used, and lose it soon when it is free, so the first one in a process is slower than `sleep"
        " without backups`, which is the same work in memory that the machine still has; `prepare()` takes all"
        " of it out of the sleep. A wake right after a sleep is a little slower because the driver wipes the"
        " freed memory at that time. A free waits for the work that runs on the GPU, as vLLM's does not. Pinned"
        " host memory costs 2 MiB of GPU memory per GiB. Raw results, with the commands that made them:"
        " `benchmarks/results/`.",
        "",
        END,
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is not up to date")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = old[: old.index(BEGIN)] + section() + old[old.index(END) + len(END) :]
    if not check:
        readme.write_text(new)
        draw_peers(load("peers.json"))
        return
    run = "run benchmarks/readme_tables.py"
    if new != old:
        raise SystemExit(f"README.md: its figures are not those of benchmarks/results; {run}")
    if not PLOT.is_file() or peers_digest() not in PLOT.read_text():
        raise SystemExit(f"docs/{PLOT.name}: not made from benchmarks/results/peers.json; {run}")


if __name__ == "__main__":
    main()
