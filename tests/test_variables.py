"""The list of environment variables: complete, and helpful where a name is misspelt."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from cumem_sleep import Settings
from cumem_sleep.core import misspelt
from cumem_sleep.settings import PREFIX, VARIABLES, GateSettings
from cumem_sleep.tools import cli

ROOT = pathlib.Path(__file__).parent.parent
# Where variables are read. Tests and doctor misspell some on purpose.
SOURCES = [
    *ROOT.glob("cumem_sleep/**/*.py"),
    *ROOT.glob("csrc/**/*.cpp"),
    *ROOT.glob("benchmarks/*.*"),
    *(ROOT / name for name in ("setup.py", ".ci/run", "tests/conftest.py")),
]


def test_every_variable_of_the_sources_is_known() -> None:
    read = rf'(?<![A-Z_]){PREFIX}([A-Z][A-Z_]*[A-Z])\b|PREFIX \+ "([A-Z_]+)"'
    named = {one or other for path in SOURCES for one, other in re.findall(read, path.read_text())}
    for path in ROOT.glob("tests/**/*.py"):
        named |= set(re.findall(rf"{PREFIX}(TEST_[A-Z_]*[A-Z])\b", path.read_text()))
    named |= {field.name.upper() for each in (Settings, GateSettings) for field in dataclasses.fields(each)}
    assert {PREFIX + name for name in named} == VARIABLES.keys() | of_contributors(), "each is described, and is read"


def of_contributors() -> set[str]:
    """Those of builds and tests, as CONTRIBUTING's table has them."""
    return set(re.findall(rf"^\| `({PREFIX}\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M))


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


def test_nothing_is_said_of_those_of_builds_and_tests() -> None:
    assert of_contributors()
    assert misspelt.misspelt(dict.fromkeys(of_contributors(), "1")) == {}


def test_help_lists_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "settings"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line in VARIABLES] == list(VARIABLES)
