"""The benchmark of small sleeps and wakes on the simulated driver: what it asks of a build, and what it says."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

import cumem_sleep

BENCHMARK = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "small_calls.py"

pytestmark = pytest.mark.sim


@pytest.mark.slow
def test_every_call_is_measured_with_each_build(tmp_path: pathlib.Path) -> None:
    package_root = pathlib.Path(cumem_sleep.__path__[0]).parent
    sites = [tmp_path / name for name in ("old", "new")]
    for site in sites:
        site.symlink_to(package_root)
    out = tmp_path / "small_calls.json"
    small = ["--segments=2", "--segment-mib=2", "--calls=3", "--pause=0", "--turns=2"]
    process = subprocess.run(
        [sys.executable, str(BENCHMARK), "--sites", *map(str, sites), "--out", str(out), *small],
        cwd=tmp_path,
        env={**os.environ, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": str(package_root)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(out.read_text())
    assert result["machine"] == {"simulated": True}
    assert {name: len(turns) for name, turns in result["runs"].items()} == {"old": 2, "new": 2}
    kinds = result["runs"]["new"][1]["kinds"]
    assert {kind: len(found["wake"]["calls"]) for kind, found in kinds.items()} == {
        "dropped": 3,
        "unchanged": 3,
        "changed": 3,
    }
    copies = {kind: found["sleep"]["driver calls"].get("cuMemcpyDtoHAsync", 0) for kind, found in kinds.items()}
    assert copies == {"dropped": 0, "unchanged": 2, "changed": 6}, "two for each digest, two for the copies"
    assert ["copy" in found["sleep"]["calls"][-1]["phases"] for found in kinds.values()] == [False, False, True]
    lines = process.stdout.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("new")] == [
        ["new", kind, operation] for kind in kinds for operation in ("sleep", "wake")
    ]


def test_the_phases_are_all_that_the_caller_waited(benchmark_module: Callable[[str], ModuleType]) -> None:
    calls = [
        {"waited": 1.0, "seconds": 0.75, "phases": {"quiesce": 0.25, "copy": 0.25}},
        {"waited": 2.0, "seconds": 1.75, "phases": {"quiesce": 0.5}},
    ]
    assert benchmark_module("small_calls").medians(calls) == {
        "quiesce": 0.375,
        "copy": 0.125,
        "other": 0.75,
        "outside": 0.25,
        "all": 1.5,
    }
