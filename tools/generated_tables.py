"""Writes the tables of docs/settings.md and docs/metrics.md from the package's, and docs/support.md's from evidence.

python tools/generated_tables.py            # after a change to settings.py, metrics.py or tools/support_matrix.py
python tools/generated_tables.py --check    # are the pages up to date?
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import support_matrix

from cumem_sleep import metrics
from cumem_sleep.tools.help_texts import settings_tables

DOCS = Path(__file__).parent.parent / "docs"


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page, with the table of each section as it should be."""
    for heading, table in tables.items():
        page, found = re.subn(
            rf"(?s)(^## {heading}\n.*?)^\|.*?\|\n(?=\n|\Z)", lambda m, t=table: m[1] + t, page, flags=re.M
        )
        if found != 1:
            raise SystemExit(f"no section {heading!r} with a table")
    return page


if __name__ == "__main__":
    for name, tables in (
        ("settings.md", settings_tables()),
        ("metrics.md", metrics.tables()),
        ("support.md", support_matrix.tables()),
    ):
        before = (DOCS / name).read_text()
        after = with_tables(before, tables)
        if sys.argv[1:] != ["--check"]:
            (DOCS / name).write_text(after)
        elif after != before:
            sys.exit(f"docs/{name} is not up to date: run {Path(__file__).name}")
