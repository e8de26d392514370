"""`benchmarks/vllm_kept_kv.py` with a vLLM that only keeps account: what it measures, and what it takes for wrong."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

import cumem_sleep

TESTS = pathlib.Path(__file__).resolve().parent
BENCHMARK = TESTS.parent / "benchmarks" / "vllm_kept_kv.py"
WAYS = ("cumem-sleep", "cumem-sleep, not set", "vLLM")
pytestmark = [pytest.mark.sim, pytest.mark.slow]


def run(folder: pathlib.Path, *options: str, wrong: str = "") -> tuple[int, dict[str, Any], str]:
    """Exit status, result, and what was said."""
    shutil.copy(TESTS / "fake_vllm_engine.py", folder / "vllm.py")
    (folder / "vllm-0.0.dist-info").mkdir()
    (folder / "vllm-0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0\n")
    path = [str(folder), str(pathlib.Path(cumem_sleep.__path__[0]).parent)]
    sizes = ["--shape=tiny", "--tokens=1000", "--tensor-parallel=2", "--rounds=2"]
    process = subprocess.run(
        [sys.executable, str(BENCHMARK), *sizes, f"--out={folder}/out.json", *options],
        env={
            **os.environ,
            "CUMEM_SLEEP_DRIVER": "sim",
            "PYTHONPATH": os.pathsep.join(path),
            "FAKE_VLLM_WRONG": wrong,
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = process.stdout + process.stderr
    assert (folder / "out.json").exists(), said
    return process.returncode, json.loads((folder / "out.json").read_text()), said


def test_every_way_is_measured(tmp_path: pathlib.Path) -> None:
    status, result, said = run(tmp_path, "--off-rounds=2")
    assert status == 0, said
    kept, cleared, unset, theirs = result["summary"]
    assert [row["way"] for row in result["summary"]] == [WAYS[0], *WAYS]
    assert [row["keeps"] for row in result["summary"]] == [True, False, False, False]
    assert kept["cached_tokens"] == 992
    assert {row["cached_tokens"] for row in (cleared, unset, theirs)} == {0}
    assert all(row["same_tokens"] and row["host_bytes_awake_grew_by"] is not None for row in result["summary"])
    ours = result["runs"][0]
    assert all(row["kept_bytes"] == [ours["prefix_bytes"] // 2] * 2 for row in ours["rows"])
    assert [run["control"]["same_tokens"] for run in result["runs"]] == [False] * 3
    assert ours["woken_by_tags"]["cached_tokens"] == 992
    assert ours["weights_written_unseen"]["cached_tokens"] == ours["weights_changed"]["cached_tokens"] == 0
    assert not any("errors" in run for run in result["runs"])


@pytest.mark.parametrize(
    ("wrong", "errors"),
    [
        ("exchanged", ["round 0, keeps=True", "round 1, keeps=True"]),
        ("deaf", ["control"]),
        ("no digests", ["weights_written_unseen", "weights_changed"]),
    ],
)
def test_what_is_wrong_is_found(tmp_path: pathlib.Path, wrong: str, errors: list[str]) -> None:
    status, result, said = run(tmp_path, "--own-rounds=0", wrong=wrong)
    assert status == 1, said
    (ours,) = result["runs"]
    assert ours["errors"] == errors
    assert len(ours["rows"]) == 4
