"""Writes the tables of settings and metrics into the docs from the package's, and docs/support.md's from evidence.

python tools/generated_tables.py            # after a change to settings, keys, metrics or tools/support_matrix.py
python tools/generated_tables.py --check    # are the pages up to date?
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import support_matrix

from cumem_sleep import metrics
from cumem_sleep.serve.config import KEYS
from cumem_sleep.tools.help_texts import settings_tables

ROOT = Path(__file__).parent.parent


def pages() -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Each page, and its tables by their headings."""
    yield ROOT / "docs" / "settings.md", settings_tables()
    headings = ("Keys", "Of the front:", "Of its vault:", "Of a model:")
    yield ROOT / "docs" / "several-models.md", dict(zip(headings, map(keys_table, KEYS.values()), strict=True))
    yield ROOT / "docs" / "metrics.md", metrics.tables()
    yield ROOT / "docs" / "support.md", support_matrix.tables()


def keys_table(section: type[Any]) -> str:
    """The keys of a part of models.yaml."""
    rows = (f"| `{row.name}` | {row.metadata['said']} | {row.metadata['text']} |\n" for row in fields(section))
    return "| key | default | |\n|---|---|---|\n" + "".join(rows)


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page, with the table of each section as it should be."""
    for heading, table in tables.items():
        page, found = re.subn(
            rf"(?s)(^(?:## )?{heading}\n.*?)^\|.*?\|\n(?=\n|\Z)", lambda m, t=table: m[1] + t, page, flags=re.M
        )
        if found != 1:
            raise SystemExit(f"no section {heading!r} with a table")
    return page


if __name__ == "__main__":
    for page, tables in pages():
        before = page.read_text()
        after = with_tables(before, tables)
        if sys.argv[1:] != ["--check"]:
            page.write_text(after)
        elif after != before:
            sys.exit(f"{page.relative_to(ROOT)} is not up to date: run {Path(__file__).name}")
