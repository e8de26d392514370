"""`benchmarks/serve_models.py` over simulated servers: real processes and real HTTP, and a front as users start it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from support import two_free_ports

import cumem_sleep

for package in ("uvicorn", "httptools", "httpx", "pydantic", "yaml", "prometheus_client", "uvloop"):
    pytest.importorskip(package)

BENCHMARK = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "serve_models.py"
SERVER = f"{sys.executable} -m cumem_sleep.serve.simulated_server --wake-seconds 0.05 --sleep-seconds 0.02"

pytestmark = [pytest.mark.sim, pytest.mark.slow]


def run(folder: pathlib.Path, server: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), "--out", str(folder / "out.json"), "--work", str(folder / "work")]
    command += ["--requests", "8", "--load", "12", "--clients", "4", "--overhead", "8", "--server-command", server]
    command += ["--port", str(two_free_ports())]
    package_root = pathlib.Path(cumem_sleep.__path__[0]).parent
    return subprocess.run(
        command,
        env={**os.environ, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": str(package_root)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_every_phase_is_measured(tmp_path: pathlib.Path) -> None:
    process = run(tmp_path, SERVER)
    assert process.returncode == 0, process.stdout + process.stderr
    facts = json.loads((tmp_path / "out.json").read_text())
    assert facts["failed"] == {}
    assert facts["answers"] == {"answers that are known": 18}
    one = facts["one after the other"]
    assert one["requests"] == 8 == len(one["switches"]) + one["first token, awake"]["count"]
    assert all(len(switch["own"]) == 2 for switch in one["switches"])
    assert facts["many at once"]["whole answers"]["count"] == 12
    assert facts["many at once"]["errors"] == {}
    for way in ("directly", "through the front"):
        assert facts["overhead"]["4 at once"]["first token"][way]["count"] == 8
    assert facts["restart"]["first token of a model that is started"] > 0
    assert facts["the front ended in order"]


def test_a_model_that_does_not_start_loses_nothing_of_the_others(tmp_path: pathlib.Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(
        "import sys\n"
        "from cumem_sleep.serve import simulated_server as server\n"
        "if 'fp8' in sys.argv:\n"
        "    sys.exit('no such kernel')\n"
        "raise SystemExit(server.main())\n"
    )
    process = run(tmp_path, f"{sys.executable} {server}")
    assert process.returncode == 1
    facts = json.loads((tmp_path / "out.json").read_text())
    assert list(facts["failed"]) == ["start of fp8"]
    assert "no such kernel" in facts["failed"]["start of fp8"]
    assert facts["answers"] == {"answers that are known": 12}
    assert facts["many at once"]["whole answers"]["count"] == 12
    assert facts["the front ended in order"]


def test_what_is_lost_is_said_and_the_other_phases_are_done(tmp_path: pathlib.Path) -> None:
    """A server whose answers change: tokens differ, and nothing is taken for measured."""
    server = tmp_path / "server.py"
    server.write_text(
        "import time\n"
        "from cumem_sleep.serve import simulated_server as server\n"
        "born = time.monotonic()\n"
        "words = server.SimulatedServer._words\n"
        "async def changed(self, asked, length):\n"
        "    self.told = getattr(self, 'told', 0) + 1\n"
        "    async for word in words(self, asked, length):\n"
        "        yield word if self.told < 7 else 'x'\n"
        "server.SimulatedServer._words = changed\n"
        "raise SystemExit(server.main())\n"
    )
    process = run(tmp_path, f"{sys.executable} {server}")
    assert process.returncode == 1
    facts = json.loads((tmp_path / "out.json").read_text())
    assert "one after the other" in facts["failed"]
    assert "and not" in facts["failed"]["one after the other"]
    assert facts["many at once"]["whole answers"]["count"] == 12
    assert facts["the front ended in order"]
