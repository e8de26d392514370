"""The examples: each runs to its end, or says in one line what it needs."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
from support import DRIVER, SIMULATED

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
# What runs on a GPU alone.
NEEDS = {"cuda_graph.py": "torch", "cupy_arrays.py": "cupy", "kept_conversation.py": "vllm"}


def is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # the suite's own folder `vllm` is found, too


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(name: str) -> None:
    process = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env={**os.environ, "CUMEM_SLEEP_DRIVER": DRIVER},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    needed = NEEDS.get(name)
    if needed is not None and (SIMULATED or not is_installed(needed)):
        assert process.returncode == 1
        assert process.stdout == ""
        (line,) = process.stderr.splitlines()
        assert line.startswith(f"{name} needs ")
        return
    assert process.returncode == 0, process.stdout + process.stderr
    if needed == "vllm":  # which logs where it likes; without a GPU: `tests/vllm/test_kept_kv.py`
        return
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    assert [line for line in lines if "sleep: freed" in line]
    assert [line for line in lines if "wake: mapped" in line]
    assert ("[simulated]" in process.stdout) == SIMULATED
