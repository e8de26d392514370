"""`benchmarks/serve_kept_kv.py` over simulated servers: real processes and real HTTP, and a front as users start it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

import cumem_sleep

for package in ("uvicorn", "httptools", "httpx", "pydantic", "yaml", "uvloop"):
    pytest.importorskip(package)

BENCHMARK = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "serve_kept_kv.py"
SERVER = f"{sys.executable} -m cumem_sleep.serve.simulated_server --weights-bytes 1000 --keep-bytes 500"

pytestmark = [pytest.mark.sim, pytest.mark.slow]


def run(folder: pathlib.Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, str(BENCHMARK), "--out", str(folder / "out.json"), "--work", str(folder / "work")]
    process = subprocess.run(
        [*command, *options],
        env={
            **os.environ,
            "CUMEM_SLEEP_DRIVER": "sim",
            "PYTHONPATH": str(pathlib.Path(cumem_sleep.__path__[0]).parent),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


def test_both_ways_have_the_same_turns_and_each_is_a_switch(tmp_path: pathlib.Path) -> None:
    code, said = run(tmp_path, "--turns", "3", "--first", "40", "--grow", "10", "--server-command", SERVER)
    assert code == 0, said
    facts = json.loads((tmp_path / "out.json").read_text())
    assert facts["failed"] == {}
    turns = {
        way: [(row["turn"], row["model"], row["prompt_tokens"]) for row in facts["rows"] if row["way"] == way]
        for way in ("kept", "cleared")
    }
    assert (
        turns["kept"]
        == turns["cleared"]
        == [(turn, model, 40 + 10 * turn) for turn in range(3) for model in ("a", "b")]
    )
    for row in facts["rows"]:
        assert row["first_token_s"] >= row["sleep_s"] + row["wake_s"] > 0
        assert row["kept_bytes_of_the_other"] in (0, 500), "it may not have been asked yet"
    assert any(row["kept_bytes_of_the_other"] for row in facts["rows"])
    assert [(row["way"], row["turns"]) for row in facts["summary"]] == [("kept", 4), ("cleared", 4)]
    assert all(way["ended_in_order"] for way in facts["ways"].values())
    environment = [
        json.loads((tmp_path / "work" / f"{way}.yaml").read_text())["models"]["a"]["env"]["CUMEM_SLEEP_KEEP_KV_BYTES"]
        for way in ("kept", "cleared")
    ]
    assert environment == [str(facts["keep_bytes"]), "0"]


def test_a_way_that_fails_is_named(tmp_path: pathlib.Path) -> None:
    code, said = run(tmp_path, "--turns", "2", "--server-command", f"{sys.executable} -c exit(3)")
    assert code == 1
    assert "FAILED kept: Failed: its server ended with status 3" in said
    assert json.loads((tmp_path / "out.json").read_text())["failed"].keys() == {"kept", "cleared"}
