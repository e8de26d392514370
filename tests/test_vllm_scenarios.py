"""What `benchmarks/vllm_scenarios.py` leaves behind when it is ended: nothing, or a vLLM would go on using the GPU."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"

# A scenario that starts a server in a session of its own, as they do.
SCRIPT = """
import pathlib, subprocess, sys, time, types

sys.path.insert(0, {benchmarks!r})
import checkpoints, record, vllm_scenarios

checkpoints.write_checkpoint = lambda *_: None
record.machine = dict
vllm_scenarios.version = lambda _: "none"
vllm_scenarios.LIMIT_S = {limit_s}
vllm_scenarios.__file__ = __file__
vllm_scenarios.SCENARIOS.clear()

class Popen(subprocess.Popen):
    "A scenario, whose time begins when it does: on a busy machine it is long in coming."

    def wait(self, timeout=None):
        while timeout and self.poll() is None and not pid.exists():
            time.sleep(0.01)
        return super().wait(timeout)

pid = pathlib.Path({pid!r})
vllm_scenarios.subprocess = types.SimpleNamespace(**{{**vars(subprocess), "Popen": Popen}})

@vllm_scenarios.scenario(alone={alone})
def serves(folder):
    server = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pid.with_suffix(".new").write_text(str(server.pid))
    pid.with_suffix(".new").rename(pid)
    time.sleep(600)

if __name__ == "__main__":
    vllm_scenarios.main()
"""


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_a_scenario_that_takes_longer_has_a_limit_of_its_own(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for module, name, value in (
        ("checkpoints", "write_checkpoint", lambda *_: None),
        ("record", "machine", dict),
        ("model_server", "exit_on_sigterm", lambda: None),
        ("vllm_scenarios", "version", lambda _: "none"),
    ):
        monkeypatch.setattr(benchmark_module(module), name, value)
    scenarios = benchmark_module("vllm_scenarios")
    limits: dict[str, float] = {}

    def run(name: str, _work: pathlib.Path, _logs: pathlib.Path, limit_s: float) -> dict[str, object]:
        limits[name] = limit_s
        return {"passed": True}

    monkeypatch.setattr(scenarios, "run_in_process", run)
    names = ["pipeline_parallel_2", "expert_parallel_2", "ranks_agree"]
    command = ["x", "--out", str(tmp_path / "out.json"), "--work", str(tmp_path), "--limit", "150"]
    monkeypatch.setattr(sys, "argv", [*command, "--only", ",".join(names)])
    with pytest.raises(SystemExit, match="False"):
        scenarios.main()
    assert limits == {"pipeline_parallel_2": 150, "expert_parallel_2": 240, "ranks_agree": 240}


@pytest.mark.slow
@pytest.mark.parametrize(("alone", "limit_s"), [(True, 100), (False, 100), (False, 1)])
def test_nothing_is_left(tmp_path: pathlib.Path, alone: bool, limit_s: int) -> None:
    script, pid_file = tmp_path / "scenarios.py", tmp_path / "pid"
    script.write_text(SCRIPT.format(benchmarks=str(BENCHMARKS), limit_s=limit_s, alone=alone, pid=str(pid_file)))
    command = [sys.executable, str(script), "--out", str(tmp_path / "out.json"), "--work", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    server = 0
    try:
        ends_at = time.monotonic() + 200
        while not pid_file.is_file() and time.monotonic() < ends_at:
            time.sleep(0.05)
        server = int(pid_file.read_text())
        if limit_s > 1:
            process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=200)
        assert process.returncode == (1 if limit_s == 1 else 143)
        assert limit_s > 1 or "no result in time" in said
        while lives(server) and time.monotonic() < ends_at:
            time.sleep(0.05)
        assert not lives(server)
    finally:
        process.kill()
        if server and lives(server):
            os.kill(server, signal.SIGKILL)
