"""Writes the tables of docs/settings.md from the table of settings.

python tools/settings_page.py            # after a change to cumem_sleep/settings.py
python tools/settings_page.py --check    # is the page up to date?
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cumem_sleep.tools.help_texts import settings_tables

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"


def with_tables(page: str) -> str:
    """The page, with the table of each section as it should be."""
    for heading, table in settings_tables().items():
        page, found = re.subn(
            rf"(?s)(^## {heading}\n.*?)^\|.*?\|\n(?=\n|\Z)", lambda m, t=table: m[1] + t, page, flags=re.M
        )
        if found != 1:
            raise SystemExit(f"{PAGE.name}: no section {heading!r} with a table")
    return page


if __name__ == "__main__":
    before = PAGE.read_text()
    after = with_tables(before)
    if sys.argv[1:] == ["--check"]:
        sys.exit(f"{PAGE} is not up to date: run {Path(__file__).name}" if after != before else 0)
    PAGE.write_text(after)
