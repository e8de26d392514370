"""Writes the tables of docs/, the README's figures and the plots from the raw results.

No figure is typed by hand.

python benchmarks/result_tables.py            # rewrites them; needs matplotlib
python benchmarks/result_tables.py --check    # fails if they are out of date
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from measured import (
    bench,
    compressed,
    decoder,
    host_memory,
    peers,
    results,
    scenarios,
    serve_models,
    switching,
    torch_memory_saver,
    vault,
    vllm_level_3,
    vllm_serve,
)
from measured.results import digest_of, is_there, load

HEADLINE_BEGIN = "<!-- headline: made by benchmarks/result_tables.py from benchmarks/results, do not edit -->"
HEADLINE_END = "<!-- /headline -->"
SCENARIOS_BEGIN = "<!-- scenarios: made by benchmarks/result_tables.py from benchmarks/results, do not edit -->"
SCENARIOS_END = "<!-- /scenarios -->"
BEGIN = "<!-- measured: made by benchmarks/result_tables.py from benchmarks/results, do not edit -->"
END = "<!-- /measured -->"


def _section(*paragraphs: Sequence[str]) -> str:
    """What stands between the marks of a page: tables and texts, with an empty line between two of them."""
    lines = [line for paragraph in paragraphs for line in ("", *paragraph)]
    return "\n".join([BEGIN, *lines, "", END])


def vault_section() -> str:
    return _section(
        vault.table(load("vault.json")),
        [vault.clients_together(load("vault.json"))],
        vault.gpu_memory_table(load("vault_gpu_memory.json")),
    )


def saver_section() -> str:
    return _section(*torch_memory_saver.tables(load("saver.json")))


def section() -> str:
    return _section(
        *([switching.table(load(switching.RESULT))] if is_there(switching.RESULT) else []),
        vllm_serve.table(load("vllm_serve.json")),
        peers.table(load("peers.json"), "Compared with its peers", peers.BELOW),
        peers.table(
            load("peers_vllm.json"), "Compared with vLLM's layer again, on another day and machine, with later code"
        ),
        bench.table(load("bench.json"), "A 32B model's memory"),
        bench.table(load("bench_small_segments.json"), "Small segments"),
        compressed.table(load("compressed.json")),
        compressed.codec_table(load("codec.json")),
        host_memory.table(load("host_memory.json")),
        host_memory.prepare_table(load("prepare_cost.json")),
        decoder.table(load("decoder.json")),
        bench.level_3_table(load("bench_level_3.json"), load("checkpoint_behaviour.json")),
        vllm_level_3.table(load("vllm_level_3_own.json"), load("vllm_level_3.json")),
        serve_models.table(load("serve_models.json")),
        [BELOW],
    )


BELOW = (
    "A first sleep allocates and pins host memory. The virtual machines of these runs get their RAM only when"
    " it is prefaulted and registered for the first time, so the first sleep in a machine is slower than those"
    " of later processes; `prepare()` takes all of this out of the sleep. A wake right after a sleep is a little"
    " slower because the driver scrubs the freed memory at that time. A free waits for running work on the"
    " GPU, which vLLM's does not. Pinned host memory costs 2 MiB of GPU memory per GiB. Raw results, with the"
    " commands that made them: `benchmarks/results/`."
)
SECTIONS = {"benchmarks.md": section, "vault.md": vault_section, "torch-memory-saver.md": saver_section}


def headline() -> str:
    found = ["", *switching.headline(load(switching.RESULT)), ""] if is_there(switching.RESULT) else []
    return "\n".join([HEADLINE_BEGIN, *found, HEADLINE_END])


def tried() -> str:
    """The list of what was tried with a real vLLM, between its marks."""
    result = json.loads((results.RESULTS / "vllm_scenarios.json").read_text())
    return "\n".join([SCENARIOS_BEGIN, "", *scenarios.table(result), "", SCENARIOS_END])


def replaced(text: str, begin: str, section: str, end: str) -> str:
    """The text with what lies between the two marks, and they themselves, replaced."""
    return text[: text.index(begin)] + section + text[text.index(end) + len(end) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is not up to date")
    check = parser.parse_args().check
    readme, page = results.ROOT / "README.md", results.ROOT / "docs" / "benchmarks.md"
    new = {readme: replaced(readme.read_text(), HEADLINE_BEGIN, headline(), HEADLINE_END)}
    for name, made in SECTIONS.items():
        new[results.ROOT / "docs" / name] = replaced((results.ROOT / "docs" / name).read_text(), BEGIN, made(), END)
    new[page] = replaced(new[page], SCENARIOS_BEGIN, tried(), SCENARIOS_END)
    plots = {"peers.json": (peers.PLOT, peers.draw)}
    if is_there(switching.RESULT):
        plots[switching.RESULT] = (switching.PLOT, switching.draw)
    if not check:
        for path, text in new.items():
            path.write_text(text)
        for name, (_, draw) in plots.items():
            draw(load(name))
        return
    run = "run benchmarks/result_tables.py"
    for path, text in new.items():
        if text != path.read_text():
            where = path.relative_to(results.ROOT)
            raise SystemExit(f"{where}: its figures are not those of benchmarks/results; {run}")
    for name, (plot, _) in plots.items():
        if not plot.is_file() or digest_of(name) not in plot.read_text():
            raise SystemExit(f"docs/{plot.name}: not made from benchmarks/results/{name}; {run}")


if __name__ == "__main__":
    main()
