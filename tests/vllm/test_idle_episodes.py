"""Random traffic at the real server of this vLLM, which sleeps by itself: see `idle_episodes`.

An episode each, of some 15 s. CUMEM_SLEEP_TEST_GATE_SECONDS says for how long new ones begin, and
CUMEM_SLEEP_TEST_GATE_SEED which is the first.
"""

from __future__ import annotations

import os
import pathlib

import pytest
from environment import skip_unless_vllm, skip_vllm_before
from ready_process import ReadyProcess

skip_unless_vllm()
skip_vllm_before((0, 18))
SECONDS = "1"  # one episode begins, and lasts longer


@pytest.mark.timeout(900)
# At level 1, 2 and 1.
@pytest.mark.parametrize(("servers", "engines", "seed"), [(1, 1, 303), (2, 1, 302), (2, 2, 304)])
def test_it_sleeps_in_time_and_under_no_request(
    ready_process: ReadyProcess, servers: int, engines: int, seed: int, tmp_path: pathlib.Path
) -> None:
    options = ["--servers", str(servers), "--engines", str(engines)]
    options += ["--seconds", os.environ.get("CUMEM_SLEEP_TEST_GATE_SECONDS", SECONDS)]
    options += ["--seed", os.environ.get("CUMEM_SLEEP_TEST_GATE_SEED", str(seed))]
    print(ready_process.check("idle_episodes.py", tmp_path / "log", *options))
