"""Random episodes at the gate of the real server of this vLLM: see `gate_episodes`.

CUMEM_SLEEP_TEST_GATE_SECONDS says for how long new episodes begin, and CUMEM_SLEEP_TEST_GATE_SEED which is the first.
"""

from __future__ import annotations

import os
import pathlib

import pytest
from environment import skip_unless_vllm, skip_vllm_before
from ready_process import ReadyProcess

skip_unless_vllm()
skip_vllm_before((0, 18))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("servers", [1, 2])
def test_nothing_runs_on_memory_that_is_not_there(
    ready_process: ReadyProcess, servers: int, tmp_path: pathlib.Path
) -> None:
    options = ["--servers", str(servers), "--seconds", os.environ.get("CUMEM_SLEEP_TEST_GATE_SECONDS", "10")]
    options += ["--seed", os.environ.get("CUMEM_SLEEP_TEST_GATE_SEED", "300")]
    print(ready_process.check("gate_episodes.py", tmp_path / "log", *options))
