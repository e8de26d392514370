"""The C++ sources depend on each other in one direction only: a unit, X.h with X.cpp, is below all that include it.

Headers alone would not show it: mostly it is a .cpp that includes what is above its unit.
"""

from __future__ import annotations

import graphlib
import pathlib
import re

import pytest

CSRC = pathlib.Path(__file__).parent.parent / "csrc"


def units(folder: pathlib.Path) -> dict[str, set[str]]:
    """What each unit of the folder includes of the others, in either of its files."""
    included: dict[str, set[str]] = {}
    for file in sorted([*folder.rglob("*.h"), *folder.rglob("*.cpp")]):
        unit = included.setdefault(file.relative_to(folder).with_suffix("").as_posix(), set())
        for name in re.findall(r'^\s*#\s*include\s*"(.+)"', file.read_text(), re.MULTILINE):
            header = (file.parent / name).resolve()
            assert header.is_file(), f"{file.name} includes {name}, which is not beside it"
            unit.add(header.relative_to(folder.resolve()).with_suffix("").as_posix())
    return {unit: names - {unit} for unit, names in included.items()}


def refuse_circles(folder: pathlib.Path) -> None:
    try:
        graphlib.TopologicalSorter(units(folder)).prepare()
    except graphlib.CycleError as error:
        # graphlib names first what is included, then what includes it
        circle = " -> ".join(reversed(error.args[1]))
        pytest.fail(f"units of {folder.name}/ (X.h with X.cpp) include each other in a circle: {circle}")


def test_no_units_include_each_other_in_a_circle() -> None:
    included = units(CSRC)
    assert {"vmm", "sim/vmm"} <= included.keys()
    assert "driver" in included["vmm"]
    refuse_circles(CSRC)
