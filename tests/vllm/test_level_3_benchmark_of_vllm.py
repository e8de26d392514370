"""`benchmarks/vllm_level_3.py` with a real `vllm serve`, on the simulated driver: its requests are those vLLM answers.

A wrong path, a wrong field or a wrong name of a metric would show on a GPU only after a minute of its time.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import pytest
from environment import skip_unless_vllm
from support import two_free_ports
from test_level_3_benchmark import missed_in

skip_unless_vllm()
if not importlib.metadata.version("vllm").startswith("0.26."):
    pytest.skip("the benchmark is for the vLLM that GPUs have seen, 0.26", allow_module_level=True)
pytestmark = [pytest.mark.sim, pytest.mark.slow]

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20


def test_every_step_is_answered(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(HERE.parents[1] / "benchmarks" / "vllm_level_3.py")]
    command += ["--out", str(tmp_path / "out.json"), "--work", str(tmp_path / "work"), "--shape", "tiny"]
    command += ["--deadline", "850", "--ways", "vault_compressed", "--cycles", "3", "--port", str(two_free_ports())]
    command += ["--stop-limit", "180", "--vault-options=--slab-size 16MiB"]
    command += ["--server-command", f"{sys.executable} {HERE / 'benchmarked_server.py'}"]
    environment = {"CUMEM_SLEEP_DRIVER": "sim", "CUMEM_SLEEP_SIM_CONTEXT_BYTES": str(32 * MIB)}
    process = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    way = json.loads((tmp_path / "out.json").read_text())["ways"]["vault_compressed"]
    assert way["failed"] == {}
    assert [cycle["by"] for cycle in way["cycles"]] == ["call", "request", "call"]
    for cycle in way["cycles"]:
        assert cycle["sleep_phases"].keys() >= {"lock", "checkpoint"}
        assert cycle["wake_phases"].keys() >= {"restore", "unlock"}
    assert set(way["first"]["tokens"]) == {3}, "the model said good"
    assert way["answers_s"].keys() == way["answers_awake_s"].keys()
    assert way["end"]["gpu_at_level_3_bytes"] == 4 * MIB
    assert way["gpu_left_bytes"] == 0
    assert missed_in(process.stdout) == []
