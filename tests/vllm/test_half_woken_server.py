"""A wake that fails after the memory is mapped, in the real server of this vLLM: see `half_woken_server`."""

from __future__ import annotations

import importlib.metadata
import pathlib

import pytest
from environment import skip_unless_vllm
from ready_process import ReadyProcess

skip_unless_vllm()


@pytest.mark.timeout(900)
def test_a_half_woken_model_is_neither_asleep_nor_awake_until_it_is_mended(
    ready_process: ReadyProcess, tmp_path: pathlib.Path
) -> None:
    if tuple(map(int, importlib.metadata.version("vllm").split(".")[:2])) < (0, 18):
        pytest.skip("the worker needs sleep modes, which vLLM has from 0.18 on")
    log = tmp_path / "half_woken.txt"
    program = ready_process.run(pathlib.Path(__file__).with_name("half_woken_server.py"), log=log)
    try:
        code = program.wait(800)
    finally:
        program.end()
    assert code == 0, log.read_text()[-8_000:]
