"""The list of environment variables: complete, and helpful where a name is misspelt."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from cumem_sleep import Settings
from cumem_sleep.core import misspelt
from cumem_sleep.settings import PREFIX, VARIABLES, GateSettings
from cumem_sleep.tools import cli, help_texts

ROOT = pathlib.Path(__file__).parent.parent
# Where variables are read, or written about. Tests and doctor misspell some on purpose.
READERS = (
    *(path for path in (ROOT / "cumem_sleep").rglob("*.py")),
    *(path for path in (ROOT / "csrc").rglob("*.cpp")),
    *(path for path in (ROOT / "benchmarks").glob("*.*") if path.suffix in (".py", ".sh")),
    ROOT / "setup.py",
    ROOT / ".ci" / "run",
    ROOT / "tests" / "conftest.py",
    ROOT / "README.md",
    *(ROOT / "docs").rglob("*.md"),
)


def test_every_variable_of_the_sources_is_known() -> None:
    named = {
        PREFIX + name
        for path in READERS
        for name in re.findall(rf'(?<![A-Z_]){PREFIX}([A-Z][A-Z_]*[A-Z])\b|PREFIX \+ "([A-Z_]+)"', path.read_text())
        for name in name
        if name
    }
    suite = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(rf"{PREFIX}TEST_[A-Z_]*[A-Z]\b", path.read_text())
    }
    fields = {PREFIX + field.name.upper() for each in (Settings, GateSettings) for field in dataclasses.fields(each)}
    assert named | suite | fields == VARIABLES.keys(), "each is described, and somebody reads it"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("CUMEM_SLEEP_VERIFI", "CUMEM_SLEEP_VERIFY"),
        ("CUMEM_SLEEP_HOST_BUDGET", "CUMEM_SLEEP_HOST_BUDGET_BYTES"),
        ("CUMEM_SLEEP_ADMINTOKEN", "CUMEM_SLEEP_ADMIN_TOKEN"),
        ("CUMEM_SLEEP_VLLM_UNTESTD", "CUMEM_SLEEP_VLLM_UNTESTED"),
        ("CUMEM_SLEEP_QQQ", ""),
    ],
)
def test_the_nearest_name_is_suggested(name: str, nearest: str) -> None:
    assert misspelt.misspelt({name: "1", "CUMEM_SLEEP_VERIFY": "off", "HOME": "/"}) == {name: nearest}


def test_help_lists_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "settings"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line in VARIABLES] == list(VARIABLES)


def test_the_page_is_made_from_the_table() -> None:
    """After a change: `python tools/generated_tables.py`."""
    pages = [(ROOT / name).read_text() for name in ("docs/settings.md", "CONTRIBUTING.md")]
    for heading, table in help_texts.settings_tables().items():
        (page,) = (page for page in pages if f"\n## {heading}\n" in page)
        assert f"{table}\n" in f"{page.partition(f'## {heading}')[2].partition('## ')[0]}\n\n"
