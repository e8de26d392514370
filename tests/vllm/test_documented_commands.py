"""vLLM takes the documented commands: see `documented_commands`."""

from __future__ import annotations

import pathlib

import pytest
from environment import skip_unless_vllm
from ready_process import ReadyProcess

skip_unless_vllm()


@pytest.mark.timeout(900)
def test_as_documented(ready_process: ReadyProcess, tmp_path: pathlib.Path) -> None:
    program = pathlib.Path(__file__).with_name("documented_commands.py")
    log = tmp_path / "log"
    commands = ready_process.run(program, str(tmp_path), log=log)
    try:
        code = commands.wait(550)
    finally:
        commands.end()
    said = log.read_text()
    assert code == 0, said[-8000:]
    assert said.splitlines()[-1].endswith(" commands")
