"""`benchmarks/trl_colocated.py` with a TRL that only makes the calls: levels, phases, and ways that fail."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import cumem_sleep

pytest.importorskip("torch")

TESTS = pathlib.Path(__file__).resolve().parent
BENCHMARK = TESTS.parent / "benchmarks" / "trl_colocated.py"
WAYS = {"ours-2": 2, "own-2": 2, "ours-1": 1, "own-1": 1}
pytestmark = [pytest.mark.sim, pytest.mark.slow]


def run(folder: pathlib.Path, *options: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, result, and what was said."""
    (folder / "sitecustomize.py").write_text("import fake_trl; fake_trl.install()\n")
    path = [str(folder), str(TESTS), str(pathlib.Path(cumem_sleep.__path__[0]).parent)]
    sizes = ["--steps=12", "--layers=1", "--width=128"]
    process = subprocess.run(
        [sys.executable, str(BENCHMARK), *sizes, f"--out={folder}/out.json", f"--work={folder}/work", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "FAKE_TRL_CALLS": f"{folder}/calls", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = process.stdout + process.stderr
    assert (folder / "out.json").exists(), said
    return process.returncode, json.loads((folder / "out.json").read_text()), said


def test_each_way_runs_at_its_level_and_every_second_belongs_to_a_phase(
    tmp_path: pathlib.Path, benchmark_module: Callable[[str], ModuleType]
) -> None:
    status, result, said = run(tmp_path)
    assert status == 0, said
    assert list(result["summary"]) == list(WAYS)
    for found in result["summary"].values():
        assert found["steps"] == 12
        assert found["reward_last"] > found["reward_first"]
        assert found["generate_s"] >= 0.002
        assert found["update_s"] >= 0.001
        assert found["asleep_bytes"] == 2
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    of_step = [("wake", "weights"), ("wake", "kv_cache")]
    for way, level in WAYS.items():
        made = [tuple(call) for whose, _, *call in calls if whose == way]
        assert made == [("sleep", level), *[*of_step, ("sleep", level)] * 12]
        assert {disabled for whose, disabled, *_ in calls if whose == way} == {"1" if "own" in way else None}
    machine = {"gpu": "A GPU", "driver": "580.1", "cores": 16, "torch": "2.11.0", "vllm": "0.26.0"}
    lines = benchmark_module("measured.trl").table({**result, "machine": machine})
    assert lines[2] == "|  | cumem-sleep, level 2 | vLLM, level 2 | cumem-sleep, level 1 | vLLM, level 1 |"
    assert [line.count("|") for line in lines[3:]] == [6] * 8


def test_a_way_that_fails_or_does_not_learn_loses_nothing_of_the_others(tmp_path: pathlib.Path) -> None:
    status, result, said = run(tmp_path, "--ways=own-2,ours-1,own-1", FAKE_TRL_STAYS="own-2", FAKE_TRL_FAILS="ours-1")
    assert status == 1
    assert set(result["failures"]) == {"own-2", "ours-1"}
    assert "did not learn" in result["failures"]["own-2"]
    assert result["summary"]["ours-1"] == {"steps": 4}
    assert "the engine is gone" in said
    assert result["summary"]["own-1"]["steps"] == 12


def test_a_way_for_which_no_time_is_left_is_not_begun(tmp_path: pathlib.Path) -> None:
    status, result, _ = run(tmp_path, "--deadline=14", "--ways=ours-2")
    assert status == 1
    assert "'ready'" in result["failures"]["ours-2"] or "'start'" in result["failures"]["ours-2"]
