"""Random episodes at the gate of the real server of this vLLM: see `gate_episodes`.

CUMEM_SLEEP_TEST_GATE_SECONDS says for how long new episodes begin, and CUMEM_SLEEP_TEST_GATE_SEED which is the first.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import subprocess

import pytest
from environment import skip_unless_vllm
from ready_process import ReadyProcess

skip_unless_vllm()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("servers", [1, 2])
def test_nothing_runs_on_memory_that_is_not_there(
    ready_process: ReadyProcess, servers: int, tmp_path: pathlib.Path
) -> None:
    if tuple(map(int, importlib.metadata.version("vllm").split(".")[:2])) < (0, 18):
        pytest.skip("the episodes need sleep modes, which vLLM has from 0.18 on")
    program = pathlib.Path(__file__).with_name("gate_episodes.py")
    options = ["--servers", str(servers), "--seconds", os.environ.get("CUMEM_SLEEP_TEST_GATE_SECONDS", "10")]
    options += ["--seed", os.environ.get("CUMEM_SLEEP_TEST_GATE_SEED", "300")]
    log = tmp_path / "episodes.txt"
    episodes = ready_process.run(program, *options, log=log)
    try:
        code = episodes.wait(880)
    except subprocess.TimeoutExpired:
        code = -1
    episodes.end()
    assert code == 0, log.read_text()[-8_000:]
    print(log.read_text())
