"""Sleep without development mode in the real server of this vLLM: see `served_controls`."""

from __future__ import annotations

import pathlib

import pytest
from environment import skip_unless_vllm, skip_vllm_before
from ready_process import ReadyProcess

skip_unless_vllm()
skip_vllm_before((0, 18))


@pytest.mark.timeout(900)
def test_it_sleeps_without_development_mode(ready_process: ReadyProcess, tmp_path: pathlib.Path) -> None:
    """With one API server and with two."""
    ready_process.check("served_controls.py", tmp_path / "log")
