"""The list of environment variables: complete, and helpful where a name is misspelt."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from cumem_sleep import Settings, variables
from cumem_sleep.settings import PREFIX
from cumem_sleep.tools import cli
from cumem_sleep.vllm.gate_settings import GateSettings

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTED = (Settings, GateSettings)
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
    assert named | suite <= variables.KNOWN
    assert set(variables.OTHERS) <= named | suite  # the others are fields of settings


@pytest.mark.parametrize("settings", DOCUMENTED)
def test_every_field_is_known_and_described(settings: type) -> None:
    described = variables.described(settings)
    assert list(described) == [PREFIX + field.name.upper() for field in dataclasses.fields(settings)]
    assert set(described) <= variables.KNOWN
    assert all(len(text) > 20 for text in described.values())


def test_nothing_is_known_that_nobody_reads() -> None:
    read = {name for settings in DOCUMENTED for name in variables.described(settings)} | set(variables.OTHERS)
    assert read == variables.KNOWN


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
    assert variables.misspelt({name: "1", "CUMEM_SLEEP_VERIFY": "off", "HOME": "/"}) == {name: nearest}


def test_help_lists_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line in variables.KNOWN] == [
        *variables.described(Settings),
        *variables.described(GateSettings),
        *(name for name in variables.OTHERS if "_TEST_" not in name),
    ]
    assert "start `CuMemAllocator.prepare` automatically whenever a memory pool is left (default: 0)" in lines
