"""`benchmarks/sglang_cycles.py` with an engine that is none: the calls that it gets, and what fails a way."""

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

BENCHMARK = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "sglang_cycles.py"
pytestmark = [pytest.mark.sim, pytest.mark.slow]

ENGINE = """
import json, os

class Engine:
    def __init__(self, **asked):
        self.asleep, self.weights, self.lost = set(), 0, 0
    def _note(self, *call):
        with open(os.environ["CALLS"], "a") as file:
            file.write(json.dumps(call) + "\\n")
    def generate(self, input_ids, **asked):
        assert not self.asleep
        tokens = [self.weights + self.lost, len(input_ids)]
        return {"output_ids": tokens, "meta_info": {"output_token_logprobs": [(-1.0, each) for each in tokens]}}
    def release_memory_occupation(self, tags):
        self._note("release", tags)
        self.asleep |= {*(tags or ["weights", "kv_cache"])}
    def resume_memory_occupation(self, tags):
        self._note("resume", tags)
        self.asleep -= {*(tags or ["weights", "kv_cache"])}
        self.lost += tags is None and "LOSES" in os.environ
    def update_weights_from_tensor(self, tensors):
        assert "weights" not in self.asleep
        self._note("write")
        self.weights = int(tensors[0][1].float().sum() * 1000)
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """With a package `sglang` in it, and a saver that nobody calls."""
    package = tmp_path / "sglang" / "site" / "sglang"
    for name, text in {
        "__init__": "__version__ = '0'",
        "srt/entrypoints/engine": ENGINE,
        "srt/managers/io_struct": "CheckWeightsReqInput = None",
        "srt/utils/torch_memory_saver_adapter": "class _TorchMemorySaverAdapterReal: pass",
    }.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def run(folder: pathlib.Path, *options: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, result, and what was said."""
    command = [sys.executable, str(BENCHMARK), f"--out={folder}/out.json", f"--sglang={folder}/sglang", "--shape=tiny"]
    package_root = str(pathlib.Path(cumem_sleep.__path__[0]).parent)
    process = subprocess.run(
        [*command, f"--work={folder}/work", "--cycles=2", *options],
        env={**os.environ, "PYTHONPATH": package_root, "CALLS": f"{folder}/calls", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = process.stdout + process.stderr
    return process.returncode, json.loads((folder / "out.json").read_text()), said


def test_a_way_makes_these_calls_and_compares_what_the_engine_says(
    folder: pathlib.Path, benchmark_module: Callable[[str], ModuleType]
) -> None:
    status, result, said = run(folder, "--ways=ours-torch")
    assert status == 0, said
    assert result["summary"]["ours-torch"]["cycles"] == 2
    assert [row["name"] for row in result["ways"]["ours-torch"]["rows"]] == [
        *("cycle 1", "cycle 2"),
        *("kv_cache, weights", "update"),
    ]
    weights, cache = ["weights"], ["kv_cache"]
    calls = [tuple(json.loads(line)) for line in (folder / "calls").read_text().splitlines()]
    assert calls == [
        *[("release", None), ("resume", None)] * 2,
        *[("release", cache), ("release", weights), ("resume", weights), ("resume", cache)],
        *[("write",), ("write",)],
        *[("release", None), ("resume", weights), ("write",), ("resume", cache)],
    ]
    machine = {"gpu": "A GPU", "driver": "580.1", "cores": 16, "torch": "2.11.0"}
    measured = {**result, "machine": machine}
    said, _, _, _, first, second = benchmark_module("measured.sglang").tables_of([measured, measured])
    assert "SGLang 0, Qwen3-" in said
    assert first == second, "of one machine they are in one table"
    assert first.startswith("| cumem-sleep, torch | 0.0")
    assert first.split(" | ")[4] == "2"


def test_a_way_after_which_the_engine_says_something_else_fails_alone(folder: pathlib.Path) -> None:
    status, result, _ = run(folder, "--ways=theirs", LOSES="1")
    assert (status, result["failures"]["theirs"][:34]) == (1, "other answers after cycle 1, cycle")


def test_a_way_that_is_none_is_refused(folder: pathlib.Path) -> None:
    (folder / "out.json").write_text("{}")
    for name in ("mine", "ours-fast", "theirs-vault"):
        status, _, said = run(folder, f"--ways=ours,{name}")
        assert status == 1
        assert f"no such way: {name}" in said
