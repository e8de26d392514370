"""`pytest benchmarks`, as CONTRIBUTING shows it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

import cumem_sleep

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.sim
@pytest.mark.slow
def test_bandwidth_is_measured_and_said_to_be_simulated(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("pytest_benchmark")
    process = subprocess.run(
        [sys.executable, "-m", "pytest", str(ROOT / "benchmarks"), "-p", "no:cacheprovider", "--benchmark-json=a.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(cumem_sleep.__path__[0]).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("GB/s on the simulated driver, whose times mean nothing") == 3
    assert "vllm is not installed" in process.stdout or "vllm needs a GPU" in process.stdout
    measured = {each["name"]: each for each in json.loads((tmp_path / "a.json").read_text())["benchmarks"]}
    steps = ("first_sleep", "sleep_of_changed_weights", "wake")
    assert measured.keys() == {f"test_{step}[cumem-sleep]" for step in steps}
    for each in measured.values():
        assert each["extra_info"]["gbps"] > 0
        assert "on the simulated driver" in each["group"]
