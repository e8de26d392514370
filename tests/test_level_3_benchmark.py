"""`benchmarks/vllm_level_3.py` over servers that do right and that do wrong: every check of it can fail."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from support import two_free_ports

import cumem_sleep

TESTS = pathlib.Path(__file__).resolve().parent
BENCHMARKS = TESTS.parent / "benchmarks"
MIB = 1 << 20
SEGMENTS, CONTEXT, LEFT = 40 * MIB, 32 * MIB, 4 * MIB  # of a server; at level 3

pytestmark = pytest.mark.sim


def run(
    folder: pathlib.Path, ways: str, *options: str, broken: dict[str, int] | None = None, **environment: str
) -> tuple[int, dict[str, Any], str]:
    """Exit status, the ways of the result, and what was printed."""
    command = [sys.executable, str(BENCHMARKS / "vllm_level_3.py"), "--out", str(folder / "out.json")]
    command += ["--ways", ways, "--shape", "tiny", "--second", "tiny", "--work", str(folder / "work"), "--cycles", "4"]
    command += ["--later-cycles", "2", "--switches", "1", "--port", str(two_free_ports()), "--deadline", "450"]
    command += ["--vault-options=--slab-size 16MiB", "--server-command"]
    command += [f"{sys.executable} {TESTS / 'fake_level_3_server.py'}", *options]
    process = subprocess.run(
        command,
        env={
            **os.environ,
            "CUMEM_SLEEP_DRIVER": "sim",
            "CUMEM_SLEEP_SIM_CONTEXT_BYTES": str(CONTEXT),
            "FAKE_BROKEN": json.dumps(broken or {}),
            "PYTHONPATH": str(pathlib.Path(cumem_sleep.__path__[0]).parent),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    said = process.stdout + process.stderr
    assert (folder / "out.json").exists(), said
    return process.returncode, json.loads((folder / "out.json").read_text())["ways"], said


def missed_in(said: str) -> list[str]:
    """But for what is timed: how long that takes on a busy machine says nothing."""
    missed = [line.strip().split("  ")[0] for line in said.splitlines() if line.endswith("MISSED")]
    timed = {"checkpoint", "restore", "first token of a request that wakes", "slowest answer at level 3"}
    return [what for what in missed if what not in timed]


@pytest.mark.slow
def test_cycles_and_two_models(tmp_path: pathlib.Path) -> None:
    status, ways, said = run(tmp_path, "vault_compressed,two,own")
    assert status == 0, said
    assert list(ways) == ["vault_compressed", "own"], "two is done by the server of the way before it"
    first, own = ways["vault_compressed"], ways["own"]
    assert [cycle["by"] for cycle in first["cycles"]] == ["call", "request", "call", "call"]
    for cycle in [*first["cycles"], *own["cycles"]]:
        assert cycle["sleep_phases"].keys() >= {"lock", "checkpoint"}
        assert cycle["wake_phases"].keys() >= {"restore", "unlock"}
    for cycle in own["cycles"]:
        assert cycle["asleep"]["gpu_free_bytes"] - cycle["awake"]["gpu_free_bytes"] == CONTEXT + SEGMENTS - LEFT
    assert len(own["cycles"]) == 2
    steps = first["cycles"][2]
    assert steps["asleep"]["gpu_free_bytes"] - steps["gpu_free_at_level_1_bytes"] == CONTEXT - LEFT
    assert steps["pinned_bytes"] == 0
    assert [cycle for cycle in first["cycles"] if "pinned_bytes" in cycle] == [steps]
    for way in (first, own):
        assert way["end"]["gpu_at_level_3_bytes"] == LEFT
        assert way["gpu_left_bytes"] == 0
    assert [(switch["from"], switch["to"]) for switch in first["two"]["switches"]] == [
        ("vault_compressed_tiny_1", "vault_compressed_tiny_0"),
        ("vault_compressed_tiny_0", "vault_compressed_tiny_1"),
    ]
    assert first["vault"]["pinned_bytes"] == first["vault"]["memory_bytes"]
    assert first["gpu_of_the_vault_bytes"] == CONTEXT
    assert missed_in(said) == ["share of the GPU of each"]


@pytest.mark.slow
def test_other_tokens_are_found_and_the_later_steps_are_done(tmp_path: pathlib.Path) -> None:
    status, ways, said = run(tmp_path, "own", broken={"forgets_at_sleep": 2, "leaves_helper": 1})
    assert status == 1
    failed = ways["own"]["failed"]
    assert list(failed) == ["cycles", "end"]
    assert "answers with other tokens" in failed["cycles"]
    assert "left its helper" in failed["end"]
    assert "awake" not in ways["own"]["cycles"][1]
    assert ways["own"]["end"]["gpu_at_level_3_bytes"] == LEFT
    assert "FAILED cycles: Failed: own_tiny_0 answers with other tokens" in said


@pytest.mark.slow
def test_a_server_that_leaks_lies_and_does_not_end(tmp_path: pathlib.Path) -> None:
    broken = {
        "captures_again": 1,
        "leaks_gpu": 4 * MIB,
        "leaks_host": 64 * MIB,
        "says_level_1": 1,
        "ignores_sigterm": 1,
    }
    status, ways, said = run(tmp_path, "own", "--stop-limit", "2", broken=broken)
    assert status == 1
    failed = ways["own"]["failed"]
    assert list(failed) == ["answers_s", "end"]
    assert all(path in failed["answers_s"] for path in ("/health: ", "/metrics: "))
    assert "/is_sleeping: " not in failed["answers_s"]
    assert "had to be killed" in failed["end"]
    assert len(ways["own"]["cycles"]) == 4
    assert missed_in(said) == [
        "graphs and code made again",
        "GPU memory in use awake grew by",
        "worker's host memory asleep grew by",
        "worker's host memory awake grew by",
    ]


@pytest.mark.slow
def test_a_server_that_only_says_that_it_sleeps(tmp_path: pathlib.Path) -> None:
    status, ways, _ = run(tmp_path, "own", broken={"pretends": 1})
    assert status == 1
    assert "made no checkpoint" in ways["own"]["failed"]["cycles"]


@pytest.mark.slow
def test_a_server_that_says_nothing_of_a_restore_and_stays_at_level_1(tmp_path: pathlib.Path) -> None:
    status, ways, _ = run(tmp_path, "own", broken={"stays_from_sleep": 2, "wake": 1})
    assert status == 1
    failed = ways["own"]["failed"]
    assert list(failed) == ["cycles", "end"]
    assert "came back without a restore" in failed["cycles"]
    assert "stayed at level 1: someone calls CUDA" in failed["end"]
    assert len(ways["own"]["cycles"]) == 1, "what was measured before stays"


@pytest.mark.slow
def test_a_server_that_dies_or_does_not_start_is_said(tmp_path: pathlib.Path) -> None:
    """The first one dies on its way; of two others, the second one does not start, or the first."""
    broken = {"dies_at_sleep": 1}
    status, ways, said = run(tmp_path, "own", broken=broken)
    assert status == 1
    assert "last words" in ways["own"]["failed"]["cycles"]
    assert ways["own"]["gpu_left_bytes"] == 0
    broken = {"does_not_start": 1}
    status, ways, said = run(tmp_path, "vault,two", broken=broken, FAKE_BROKEN_SERVER="_1")
    assert status == 1
    assert list(ways) == ["own", "vault"], "what an earlier run has found stays"
    assert list(ways["vault"]["failed"]) == ["two"], said
    assert "no such kernel" in ways["vault"]["failed"]["two"]
    assert len(ways["vault"]["cycles"]) == 4
    status, ways, said = run(tmp_path, "vault,two", broken=broken, FAKE_BROKEN_SERVER="_0")
    assert status == 1
    assert list(ways["vault"]["failed"]) == ["first"]
    assert "two" not in ways["vault"]


# Without servers


@pytest.fixture
def level_3(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("vllm_level_3")


@pytest.fixture
def table_module(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("level_3_table")


def facts_of(*, cycles: int = 20, **changes: Any) -> dict[str, Any]:
    """Of a way that keeps its targets, but for `changes`: of the last cycle, of its memory, or of the way."""

    def memory() -> dict[str, Any]:
        host = {"anonymous": 1 << 30, "shared": 0}
        return {"gpu_free_bytes": 1 << 30, "worker": dict(host), "others": dict(host), "vault": dict(host)}

    called, asked = (
        {"by": "call", "wake_s": 1.5, "first_token_s": 0.03},
        {"by": "request", "wake_and_first_token_s": 2.0},
    )
    done: list[dict[str, Any]] = [
        {
            **{"sleep_s": 1.0, "level_1_s": 0.1, "checkpoint_s": 0.8, "restore_s": 0.4, "back_from_level_1_s": 0.8},
            **(asked if number % 3 == 1 else called),
            **{"asleep": memory(), "awake": memory()},
        }
        for number in range(cycles)
    ]
    facts: dict[str, Any] = {
        **{"through_the_vault": True, "compressed": True, "first": {"start_s": 60, "first_token_s": 0.03}},
        **{"cycles_wanted": 20, "cycles": done, "answers_s": {"/health": 0.01}, "gpu_left_bytes": 0, "built_again": 0},
        **{"end": {"gpu_at_level_3_bytes": 4 * MIB, "sigterm_s": 3.0}, "gpu_of_the_vault_bytes": 500 * MIB},
        "two": {
            "switches": [
                {"to": name, "gpu_share": 0.972, "seconds": 3.0, "wake_and_first_token_s": 2.0} for name in "abab"
            ]
        },
    }
    done[2] |= {"gpu_free_at_level_1_bytes": 0, "pinned_bytes": 0}  # 1 GiB less than at level 3
    for name, value in changes.items():
        if name in ("gpu_free_at_level_1_bytes", "pinned_bytes"):
            done[2][name] = value
        elif name in done[-1]:
            for cycle in done:
                cycle[name] = value
        elif name in ("asleep_gpu", "awake_gpu"):
            done[-1][name.split("_")[0]]["gpu_free_bytes"] -= value
        elif name in ("worker", "others", "vault"):
            done[-1]["asleep" if name == "vault" else "awake"][name]["anonymous"] += value
        elif name == "share":
            facts["two"]["switches"][1]["gpu_share"] = value
        elif name == "left":
            facts["end"]["gpu_at_level_3_bytes"] = value
        else:
            facts[name] = value
    return facts


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, ""),
        ({"cycles": 19}, "cycles with the same tokens"),
        ({"checkpoint_s": 0.91}, "checkpoint"),
        ({"restore_s": 0.51}, "restore"),
        ({"gpu_free_at_level_1_bytes": -400 * MIB}, "kept on the GPU at level 1"),
        ({"pinned_bytes": 1}, "pinned by the server itself"),
        ({"wake_and_first_token_s": 2.21}, "first token of a request that wakes"),
        ({"asleep_gpu": 3 * MIB}, "GPU memory in use asleep grew by"),
        ({"awake_gpu": 3 * MIB}, "GPU memory in use awake grew by"),
        ({"worker": 65 * MIB}, "worker's host memory awake grew by"),
        ({"others": 65 * MIB}, "other processes' host memory grew by"),
        ({"vault": 65 * MIB}, "the vault's host memory grew by"),
        ({"built_again": 1}, "graphs and code made again"),
        ({"answers_s": {"/health": 0.01, "/metrics": 1.1}}, "slowest answer at level 3"),
        ({"share": 0.96}, "share of the GPU of each"),
        ({"two": {"switches": []}}, "switches of two, the same tokens"),
        ({"left": 5 * MIB}, "left on the GPU at level 3"),
        ({"gpu_left_bytes": 4 * MIB}, "left on the GPU after all"),
        ({"gpu_of_the_vault_bytes": 700 * MIB}, "the vault's own GPU memory"),
    ],
)
def test_the_table_says_what_was_missed(table_module: ModuleType, changes: dict[str, Any], missed: str) -> None:
    rows = table_module.rows(facts_of(**changes), {"switches": 2})
    assert [row.what for row in rows if row.kept is False] == [missed][: bool(missed)]
    if not changes:
        assert sum(row.kept is True for row in rows) == 19


def test_targets_are_those_of_the_way(table_module: ModuleType) -> None:
    """Without the vault 2.4 and 1.9 s; a wake by request has a target only where backups are compressed."""
    for in_vault, seconds, kept in ((False, 2.39, True), (False, 2.41, False), (True, 2.3, False)):
        facts = facts_of(checkpoint_s=seconds, through_the_vault=in_vault, compressed=False)
        rows = {row.what: row for row in table_module.rows(facts, {"switches": 2})}
        assert rows["checkpoint"].kept is kept
        assert rows["first token of a request that wakes"].kept is None


def test_what_was_not_measured_is_not_kept(table_module: ModuleType) -> None:
    facts: dict[str, Any] = {"through_the_vault": False, "compressed": False, "cycles_wanted": 20}
    facts["failed"] = {"first": "ServerFailed: it did not start\n   | more"}
    lines = table_module.table({"ways": {"own": facts}, "arguments": {"switches": 2}})
    assert not any(line.endswith("ok") for line in lines)
    assert lines[-1] == "    FAILED first: ServerFailed: it did not start"
    assert sum("not measured" in line for line in lines) > 10


def test_later_cycles_make_way_for_the_steps_after_them(level_3: ModuleType) -> None:
    from types import SimpleNamespace as Stub

    sleeper = Stub(
        built=lambda: 3,
        answers_awake=dict,
        answers=dict,
        memory=dict,
        sleep=dict,
        rest=dict,
        wake=lambda by_request: {"request": by_request},
    )
    bench = Stub(left_s=lambda: 30.0, save=lambda: None, say=print)
    facts: dict[str, Any] = {"failed": {}, "first": {"built": 2}}
    level_3.cycles(bench, sleeper, facts, 20, 31.0)
    assert len(facts["cycles"]) == level_3.FEWEST_CYCLES
    assert "6 of 20 cycles" in facts["cut"]
    level_3.cycles(bench, sleeper, facts := {"failed": {}, "first": {"built": 2}}, 20, 29.0)
    assert len(facts["cycles"]) == 20
    assert [cycle["request"] for cycle in facts["cycles"]].count(True) == 7
    assert "cut" not in facts


def test_two_belongs_to_the_way_before_it(level_3: ModuleType) -> None:
    chained = level_3.chained
    assert chained(["vault", "two", "own"]) == [("vault", True), ("own", False)]
    assert chained(["vault"]) == [("vault", False)]


def test_what_nvml_says(level_3: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that NVML's own module has; without a GPU it cannot be asked more."""
    from types import SimpleNamespace as Stub

    import pynvml

    memory, processes = Stub(total=100, free=30), [Stub(pid=7, usedGpuMemory=60), Stub(pid=8, usedGpuMemory=None)]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: ("index", index))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: ("uuid", uuid))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", str)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda _: memory)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: processes)
    for visible, name in (("", "('index', 0)"), ("3,1", "('index', 3)"), ("GPU-12", "('uuid', 'GPU-12')")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        gpu = level_3.Gpu()
        assert (gpu.name, gpu.total_bytes, gpu.free_bytes()) == (name, 100, 30)
    assert gpu.by_process() == {"7": 60, "8": None}

    def refuse(_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert gpu.by_process() == {}
