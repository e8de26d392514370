"""Writes the tables of docs/, the README's figures and the plots from the raw results.

No figure is typed by hand.

python benchmarks/result_tables.py            # rewrites them; needs matplotlib
python benchmarks/result_tables.py --check    # fails if they are out of date
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence

from measured import (
    compressed,
    links,
    peers,
    prepare_cost,
    results,
    scenarios,
    serve_models,
    sglang,
    spill,
    surviving,
    switching,
    trl,
    vault,
    vllm_kept_kv,
    vllm_level_3,
    vllm_serve,
)
from measured.results import digest_of, load


def of_the_vault() -> list[str]:
    """Its steps, and two clients at once."""
    result = load("vault.json")
    return [*vault.table(result), "", vault.clients_together(result)]


def of_vllm() -> list[str]:
    """What was tried with it: runs on several machines, each with a record of its own."""
    return scenarios.table(json.loads((results.RESULTS / "vllm_scenarios.json").read_text()))


# The blocks of each page, by the name in their marks.
BLOCKS: dict[str, dict[str, Callable[[], Sequence[str]]]] = {
    "README.md": {"headline": lambda: switching.headline(load(switching.RESULT))},
    "docs/benchmarks.md": {
        "switching": lambda: switching.table(load(switching.RESULT)),
        "serve": lambda: vllm_serve.table(load("vllm_serve.json")),
        "peers": lambda: peers.table(load("peers.json"), "Compared with its peers", peers.BELOW),
        "compressed": lambda: compressed.table(load("compressed.json")),
        "prepare": lambda: prepare_cost.table(load("prepare_cost.json")),
        "vLLM at level 3": lambda: vllm_level_3.table(load("vllm_level_3_own.json"), load("vllm_level_3.json")),
        "models": lambda: serve_models.table(load("serve_models.json")),
        "TRL": lambda: trl.table(load(trl.RESULT)),
    },
    "docs/vllm.md": {
        "surviving": lambda: [*surviving.tables(), "", *surviving.cost()],
        "kept KV cache": lambda: vllm_kept_kv.table(load("vllm_kept_kv.json")),
    },
    "docs/vllm-scenarios.md": {"scenarios": of_vllm},
    "docs/vault.md": {
        "links": lambda: links.table(load(links.RESULT)),
        "models over links": lambda: serve_models.over_links(load(serve_models.OVER_LINKS)),
        "files": lambda: spill.table(load(spill.RESULT)),
        "vault": of_the_vault,
    },
    "docs/torch-memory-saver.md": {
        "SGLang": sglang.tables,
    },
}


def marks(name: str) -> tuple[str, str]:
    """What stands in a page before a block, and after it."""
    return f"<!-- {name}: made by benchmarks/result_tables.py -->", f"<!-- /{name} -->"


def with_blocks(text: str, blocks: dict[str, Callable[[], Sequence[str]]]) -> str:
    """The page with each of its blocks made anew."""
    for name, made in blocks.items():
        begin, end = marks(name)
        block = "\n".join([begin, "", *map(wrapped, made()), "", end])
        text = text[: text.index(begin)] + block + text[text.index(end) + len(end) :]
    return text


def wrapped(line: str) -> str:
    """A paragraph in lines of 120 characters; anything else as it is."""
    is_prose = line[:1] not in ("|", "!", "<", "-", "")
    return textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False) if is_prose else line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is not up to date")
    check = parser.parse_args().check
    new = {results.ROOT / page: with_blocks((results.ROOT / page).read_text(), made) for page, made in BLOCKS.items()}
    plots = {
        "peers.json": (peers.PLOT, peers.draw),
        links.RESULT: (links.PLOT, links.draw),
        switching.RESULT: (switching.PLOT, switching.draw),
    }
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
