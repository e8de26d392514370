"""`benchmarks/serve_models.py` over simulated servers: real processes and real HTTP, and a front as users start it."""

from __future__ import annotations

import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support import two_free_ports

import cumem_sleep

for package in ("uvicorn", "httptools", "httpx", "pydantic", "yaml", "uvloop"):
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
    assert one["requests"] == 8
    awake = one["first tokens of a model that is awake"]
    assert sum(map(len, awake.values())) == 18 + 8 - len(one["switches"])
    assert min(map(len, awake.values())) >= 6, "every model has its own to be compared with"
    assert all(len(switch["own"]) == 2 for switch in one["switches"])
    assert one["compared"] == len(one["switches"])
    medians = {model: statistics.median(seconds) for model, seconds in awake.items()}
    for switch in one["switches"]:
        assert switch["awake_first_token_s"] == medians[switch["new"]]
        limit_s = 1.05 * sum(switch["own"].values()) + 0.02 + medians[switch["new"]]
        assert switch["limit_s"] == pytest.approx(limit_s)
    within = [switch for switch in one["switches"] if switch["first_token_s"] <= switch["limit_s"]]
    assert one["within the limit"] == len(within)
    assert "awake, in this run" in one["limit"]
    assert facts["many at once"]["whole answers"]["count"] == 12
    assert facts["many at once"]["errors"] == {}
    for way in ("directly", "through the front"):
        assert facts["overhead"]["4 at once"]["first token"][way]["count"] == 8
    assert facts["restarts"]["left out"] == {}
    started = [(switch["old"], switch["new"]) for switch in facts["restarts"]["switches"]]
    assert started == [("small", "large"), ("large", "fp8"), ("fp8", "small")]
    assert all(switch["first_token_s"] > switch["stop_s"] > 0 for switch in facts["restarts"]["switches"])
    phases = {name: model["phase"] for name, model in facts["models at the end"].items()}
    assert phases == {"large": "stopped", "fp8": "stopped", "small": "awake"}, "each ran alone"
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
    assert [switch["new"] for switch in facts["restarts"]["switches"]] == ["large", "small"]
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


# Without servers


@pytest.fixture
def serve_models(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("serve_models")


def test_a_switch_is_compared_with_the_same_models_own_first_token(serve_models: ModuleType) -> None:
    switch = {"old": "small", "new": "fp8", "first_token_s": 0.55, "own": {"small": 0.1, "fp8": 0.3}}
    found = serve_models.compared(switch, [0.09, 0.4, 0.11])
    assert found == {
        **switch,
        "awake_first_token_s": 0.11,
        "limit_s": pytest.approx(1.05 * 0.4 + 0.02 + 0.11),
        "more_s": pytest.approx(0.04),
    }
    nothing = serve_models.compared(switch, None)
    assert (nothing["awake_first_token_s"], nothing["limit_s"], nothing["more_s"]) == (None, None, None)


class Servers:
    """Three models of which one may run at a time; starts take as long as they are said to, on a clock of their own."""

    def __init__(self, serve_models: ModuleType, monkeypatch: pytest.MonkeyPatch, left_s: float) -> None:
        self.models = ["large", "fp8", "small"]
        self.start_s = {"large": 50.0, "fp8": 60.0, "small": 30.0}
        self.facts: dict[str, Any] = {"failed": {}}
        self.deadline = SimpleNamespace(left=lambda: left_s)
        self.running = set(self.models)
        self.fails = ""
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr(serve_models, "time", clock)

    def awake(self) -> str:
        return "small"

    def stop(self, model: str) -> None:
        self.running.discard(model)
        self.now += 2.0

    def ask(self, model: str, _number: int, _limit_s: float) -> SimpleNamespace:
        assert not self.running, "each runs alone"
        self.running.add(model)
        self.now += self.start_s[model]
        if model == self.fails:
            raise RuntimeError("no luck")
        return SimpleNamespace(first_token_s=self.start_s[model])


def test_restarts_that_do_not_fit_are_named(serve_models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = serve_models.restarts(Servers(serve_models, monkeypatch, left_s=500.0), 100.0)
    assert facts["switches"] == [
        {"old": "small", "new": "large", "stop_s": 2.0, "first_token_s": 52.0},
        {"old": "large", "new": "small", "stop_s": 2.0, "first_token_s": 32.0},
    ]
    assert facts["left out"] == {"fp8": "44 s were left, and its first start took 60 s"}
    lines = serve_models.table({"restarts": facts, "failed": {}})
    assert "NOT RESTARTED fp8: 44 s were left, and its first start took 60 s" in lines
    none = serve_models.restarts(Servers(serve_models, monkeypatch, left_s=-1.0), 100.0)
    assert (none["switches"], len(none["left out"])) == ([], 3)


def test_a_restart_that_fails_loses_none_of_the_others(
    serve_models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers(serve_models, monkeypatch, left_s=500.0)
    servers.fails = "fp8"
    facts = serve_models.restarts(servers, 500.0)
    assert [(switch["old"], switch["new"]) for switch in facts["switches"]] == [("small", "large"), ("fp8", "small")]
    assert servers.facts["failed"] == {"restart of fp8": "RuntimeError: no luck"}


def test_what_a_phase_has_said_stays_as_later_ones_ask_more(benchmark_module: Callable[[str], ModuleType]) -> None:
    serve_models = benchmark_module("serve_models")
    awake_s: dict[str, list[float]] = {}
    bench = SimpleNamespace(
        models=["small"],
        chance=random.Random(0),
        awake=lambda: "small",
        awake_s=awake_s,
        ask_awake=lambda model, _: awake_s.setdefault(model, []).append(0.1),
    )
    first, second = (serve_models.one_after_the_other(bench, count) for count in (2, 3))
    name = "first tokens of a model that is awake"
    assert [len(facts[name]["small"]) for facts in (first, second)] == [2, 5]
