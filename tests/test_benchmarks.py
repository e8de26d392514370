"""`pytest benchmarks`, as CONTRIBUTING shows it, and the paper on many hosts, whose scheduler is that of `serve`."""

from __future__ import annotations

import importlib
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


def test_on_paper_a_request_waits_for_drain_sleep_and_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    paper = importlib.import_module("many_hosts")
    requests = [(0.0, "m0", 1.0), (0.5, "m1", 1.0)]
    assert paper.waits(requests, [0, 1], "sleep") == pytest.approx([0.352, 0.352])
    assert paper.waits(requests, [0, 0], "sleep") == pytest.approx([0.352, 0.852 + 0.063 + 0.352])
    assert paper.waits(requests, [0, 0], "restart") == pytest.approx([0.0, 0.5 + 24.2])


def test_upstreams_tests_are_counted_from_what_pytest_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    upstream = importlib.import_module("upstream_tests")

    def event(test: str, when: str, outcome: str, why: str = "") -> dict[str, object]:
        return {"test": test, "when": when, "outcome": outcome, "seconds": 1.0, "why": why}

    events = [
        {"collected": ["passes", "fails", "setup", "skipped", "late"]},
        *(event("passes", when, "passed") for when in ("setup", "call", "teardown")),
        *(
            event("fails", "setup", "passed"),
            event("fails", "call", "failed", "x"),
            event("fails", "teardown", "failed", "y"),
        ),
        event("setup", "setup", "failed", "no server"),
        event("setup", "teardown", "passed"),
        event("skipped", "setup", "skipped", "one GPU"),
        event("late", "setup", "passed"),
    ]
    found = upstream.outcomes(events, "no time was left")
    assert {test: (run["outcome"], run["seconds"], run["why"]) for test, run in found.items()} == {
        "passes": ("passed", 3.0, ""),
        "fails": ("failed", 3.0, "x"),
        "setup": ("failed", 2.0, "no server"),
        "skipped": ("skipped", 1.0, "one GPU"),
        "late": ("not run", 1.0, "no time was left"),
    }
    assert upstream.outcomes([], "no time was left") == {}


def test_servers_of_upstreams_tests_use_the_backend_and_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    upstream = importlib.import_module("upstream_tests")
    monkeypatch.setattr(upstream, "SETTINGS", {"backend": "cumem_sleep", "gate": True, "more": ["--seed", "1"]})
    more = ["--sleep-mode-backend", "cumem_sleep", "--middleware", "cumem_sleep.vllm.SleepGate", "--seed", "1"]
    main = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    assert upstream.served(["vllm", "serve", "m"]) == [*main, "serve", "m", *more]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
    assert upstream.served(server) == [*server, *more]
    for other in (["nvidia-smi"], "vllm serve m", [sys.executable, "-c", "import vllm"]):
        assert upstream.served(other) == other
    monkeypatch.setattr(upstream, "SETTINGS", {"more": []})
    assert upstream.served(server) == server


def test_what_a_process_has_started_is_killed_whatever_session_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    ending = importlib.import_module("ending")
    shell = "sleep 600 & sh -c 'setsid sleep 600 & echo $!; wait' & wait"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        ending.kill_descendants(process.pid)
        assert process.stdout.read() == ""  # each of them held it
        assert process.wait(60) == 0  # it was not killed itself
