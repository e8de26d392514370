"""Writes the README's "Measured" section from the raw results, so that no figure is typed by hand.

python benchmarks/readme_tables.py            # rewrites README.md
python benchmarks/readme_tables.py --check    # fails if README.md says something else
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- measured: made by benchmarks/readme_tables.py from benchmarks/results, do not edit -->"
END = "<!-- /measured -->"
GIB = 1 << 30


def machine(result: dict[str, Any]) -> str:
    facts = result["machine"]
    driver = facts["driver, pcie generation, width"].split(",")[0]
    return f"{facts['gpu']}, driver {driver}, {facts['cores']} cores, PyTorch {facts['torch']}"


def copies_table(result: dict[str, Any]) -> list[str]:
    """Each step's median and spread, beside the link measured in the same run."""
    link, weights = result["link_gbps"], result["weights"]
    lines = [
        f"**A 32B model's memory**: {weights['segments']} segments, {weights['bytes'] / GIB:.2f} GiB of weights,"
        f" {result['kv_cache_bytes'] / GIB:.2f} GiB of KV cache; random contents, checked after every wake."
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
        seconds = [row["seconds"] for row in rows]
        moved = statistics.median(row.get("copied_bytes", row.get("restored_bytes", 0)) for row in rows)
        rates = [row["gbps"] for row in rows if row["gbps"]]
        ratios = [row["times_link"] for row in rows if row["times_link"]]
        spread = f" ({min(seconds):.3f}–{max(seconds):.3f})" if len(seconds) > 1 else ""
        lines.append(
            f"| {step} | {statistics.median(seconds):.3f}{spread} | {moved / 1e9:.1f} |"
            f" {f'{statistics.median(rates):.1f}' if rates else '–'} |"
            f" {f'{statistics.median(ratios):.2f}' if ratios and moved > 10e9 else '–'} |"
        )
    asleep = [row for row in result["steps"] if "left_on_gpu_bytes" in row]
    ratios = [row["host_bytes_per_byte"] for row in asleep if row["host_bytes_per_byte"]]
    lines += [
        "",
        f"Host memory per byte backed up: {max(ratios):.3f}. Left on the GPU asleep:"
        f" {max(row['left_on_gpu_bytes'] for row in asleep) / GIB:.2f} GiB, the CUDA context included.",
    ]
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
    decoder = json.loads((RESULTS / "decoder.json").read_text())
    copies = json.loads((RESULTS / "copies.json").read_text())
    lines = [
        BEGIN,
        "",
        *decoder_table(decoder),
        "",
        *copies_table(copies),
        "",
        "A wake right after a sleep is slower because the driver wipes the freed memory at that time. A first sleep"
        " includes taking and pinning host memory, and compiling the digest kernel once. Pinned host memory costs 2 MiB"
        " of GPU memory per GiB. Raw results, with the commands that made them: `benchmarks/results/`.",
        "",
        END,
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if README.md is not up to date")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = old[: old.index(BEGIN)] + section() + old[old.index(END) + len(END) :]
    if check and new != old:
        raise SystemExit("README.md: its figures are not those of benchmarks/results; run benchmarks/readme_tables.py")
    readme.write_text(new)


if __name__ == "__main__":
    main()
