"""Writes the tables of docs/ and the README's figures from the raw results.

No figure is typed by hand.

python benchmarks/result_tables.py            # rewrites them
python benchmarks/result_tables.py --check    # fails if they are out of date
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence

from measured import (
    checkpoint_ranks,
    links,
    results,
    scenarios,
    serve_models,
    sglang,
    surviving,
    vault,
    vllm_kept_kv,
    vllm_level_3,
    vllm_serve,
)
from measured.results import load


def of_vllm() -> list[str]:
    """What was tried with it: runs on several machines, each with a record of its own."""
    files = ("vllm_scenarios.json", "vllm_scenarios_0.33.json")
    return scenarios.table([json.loads((results.RESULTS / file).read_text()) for file in files])


# The blocks of each page, by the name in their marks.
BLOCKS: dict[str, dict[str, Callable[[], Sequence[str]]]] = {
    "README.md": {"headline": lambda: serve_models.headline(load("serve_models.json"))},
    "docs/benchmarks.md": {
        "serve": lambda: vllm_serve.table(load("vllm_serve.json")),
        "vault": lambda: vault.table(load("vault.json")),
        "links": lambda: links.table(load("vault_links.json")),
        "ranks at level 3": lambda: checkpoint_ranks.table(load("checkpoint_ranks.json")),
        "vLLM at level 3": lambda: vllm_level_3.table(load("vllm_level_3_own.json"), load("vllm_level_3.json")),
        "models": lambda: serve_models.table(load("serve_models.json")),
        "SGLang": lambda: sglang.table(load("sglang_cycles.json")),
    },
    "docs/vllm.md": {
        "surviving": lambda: [*surviving.tables(), "", *surviving.cost()],
        "kept KV cache": lambda: vllm_kept_kv.table(load("vllm_kept_kv.json")),
    },
    "docs/vllm-scenarios.md": {"scenarios": of_vllm},
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
    if not check:
        for path, text in new.items():
            path.write_text(text)
        return
    run = "run benchmarks/result_tables.py"
    for path, text in new.items():
        if text != path.read_text():
            where = path.relative_to(results.ROOT)
            raise SystemExit(f"{where}: its figures are not those of benchmarks/results; {run}")


if __name__ == "__main__":
    main()
