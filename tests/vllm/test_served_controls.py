"""Sleep without development mode in the real server of this vLLM: see `served_controls`."""

from __future__ import annotations

import importlib.metadata
import pathlib

import pytest
from environment import skip_unless_vllm
from ready_process import ReadyProcess

skip_unless_vllm()


@pytest.mark.timeout(900)
def test_it_sleeps_without_development_mode(ready_process: ReadyProcess, tmp_path: pathlib.Path) -> None:
    """With one API server and with two."""
    if tuple(map(int, importlib.metadata.version("vllm").split(".")[:2])) < (0, 18):
        pytest.skip("`WatchedWorker` is for vLLM from 0.18 on")
    program, log = pathlib.Path(__file__).with_name("served_controls.py"), tmp_path / "log.txt"
    served = ready_process.run(program, log=log)
    try:
        assert served.wait(880) == 0, log.read_text()[-8_000:]
    finally:
        served.end()
