"""vLLM takes the documented commands: see `documented_commands`."""

from __future__ import annotations

import pathlib

import pytest
from environment import skip_unless_vllm
from ready_process import ReadyProcess

skip_unless_vllm()


@pytest.mark.timeout(900)
def test_as_documented(ready_process: ReadyProcess, tmp_path: pathlib.Path) -> None:
    said = ready_process.check("documented_commands.py", tmp_path / "log", str(tmp_path))
    assert said.splitlines()[-1].endswith(" commands")
