"""docs/support.md claims no more than there is evidence for, which `tools/support_matrix.py` looks up."""

from __future__ import annotations

import importlib
import pathlib
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "support.md").read_text()


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.delitem(sys.modules, "support_matrix", raising=False)
    return importlib.import_module("support_matrix")


def test_the_page_is_made_from_the_evidence(matrix: Any) -> None:
    """After a change: `python tools/generated_tables.py`."""
    for heading, table in matrix.tables().items():
        assert f"\n{table}\n" in PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0] + "\n"
