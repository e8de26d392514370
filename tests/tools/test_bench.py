"""`cumem-sleep bench`: what it reports, what it notices, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MIB, SIMULATED, quick_sums

from cumem_sleep import CuMemAllocator, InvalidArgument, InvalidState, Settings, SleepReport, _core, sim
from cumem_sleep.checkpoint.process import THIS_PROCESS
from cumem_sleep.digest import digester as digest
from cumem_sleep.operations.prepare import Preparation
from cumem_sleep.tools import cli
from cumem_sleep.tools.bench import Room, link, memory, plan, workload
from cumem_sleep.tools.bench.report import BenchStep
from cumem_sleep.tools.layout import PAGE_BYTES as PAGE
from cumem_sleep.tools.simulated import SIMULATED_NOTE

GIB = 1 << 30

SMALL = ["--weights", "32MiB", "--segment-size", "4MiB", "--kv", "8MiB", "--pause", "0", "--rounds", "1"]
ROUND = [
    *("clean sleep", "wake", "dirty sleep", "wake, 0 s later", "one segment changed", "wake, weights"),
    *("wake, kv_cache", "sleep without backups", "wake, weights, 0 s later", "wake, kv_cache", "level 2 sleep"),
    *("level 2 wake", "prepare", "prepared sleep", "wake"),
]
DEEP_ROUND = [
    *("level 1 sleep", "level 1 wake", "level 3 sleep", "unpin", "lock", "checkpoint"),
    *("level 3 wake", "restore", "unlock"),
]


@pytest.fixture(autouse=True)
def _quick(nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  (patches go before)
    monkeypatch.setattr(link, "_SIMULATED_BYTES", 4 * MIB)
    monkeypatch.setattr(memory, "_RANDOM_BYTES", 4 * MIB)
    monkeypatch.setattr(memory, "_MOST_BYTES", 2 * MIB)
    monkeypatch.setattr(digest, "sums_of", quick_sums)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = cli.main(["bench", *SMALL, *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a run that ends before anything is measured."""
    assert cli.main(["bench", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert _core.segments() == []
    return output.err


# What it reports


@pytest.mark.slow
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys)
    assert code == 0
    assert set(found) - {"note"} == {
        "machine", "workload", "rounds", "host_memory_touched_before", "compress", "link_gbps", "steps",
        "command", "version", "ok", "simulated", "error",
    }  # fmt: skip
    assert found["machine"]["simulated"] is ("note" in found) is SIMULATED
    assert found["machine"]["command"].startswith("cumem-sleep bench --weights 32MiB")
    assert found["machine"]["environment"]["CUMEM_SLEEP_DRIVER"] == ("sim" if SIMULATED else "cuda")
    assert found["workload"] == {
        "name": "equal segments of 4.00 MiB", "segments": 8, "weights_bytes": 32 * MIB, "kv_cache_bytes": 8 * MIB,
    }  # fmt: skip
    assert (found["rounds"], found["host_memory_touched_before"]) == (1, not SIMULATED)
    assert [step["step"] for step in found["steps"]] == ["first sleep", "wake", *ROUND]
    for step in found["steps"]:
        check_step(step)


def check_step(step: dict[str, Any]) -> None:
    """What each kind of step has, and how many bytes each moves."""
    name, weights_bytes = step["step"], 32 * MIB
    kind = "prepare" if name == "prepare" else "wake" if "wake" in name else "sleep"
    common = {"step", "round", "seconds", "bytes", "gbps", "phases"}
    optional = {
        "prepare": set(),
        "wake": {"verified_bytes"},
        "sleep": {"left_on_gpu_bytes"} | (set() if name == "level 2 sleep" else {"host_bytes_per_byte"}),
    }
    assert set(step) - {"times_link"} == common | optional[kind], name
    nothing = ("clean sleep", "prepared sleep", "wake, kv_cache", "level 2 sleep", "level 2 wake")
    moved = 4 * MIB if name == "one segment changed" else 0 if name in nothing else weights_bytes
    assert step["bytes"] == moved, name
    assert (step["times_link"] is None) == (moved == 0)
    if kind == "wake":
        assert step["verified_bytes"] == moved
    assert step.get("host_bytes_per_byte", 1.0) == 1.0
    if SIMULATED and kind == "sleep":
        assert step["left_on_gpu_bytes"] == 0


@pytest.mark.slow
@pytest.mark.sim
def test_table_says_simulated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And which sizes it has chosen."""
    monkeypatch.setattr(workload, "_SIMULATED_WEIGHTS_BYTES", 86 * MIB)
    monkeypatch.setattr(workload, "_SIMULATED_KV_BYTES", 8 * MIB)
    assert cli.main(["bench", "--pause", "0", "--rounds", "1"]) == 0
    output = capsys.readouterr()
    assert output.err.startswith("simulated: 100% of a small simulated model: device 0 has room for ")
    assert "Qwen3-32B-like: 86.00 MiB of weights in 14 segments, 8.00 MiB of KV cache" in output.out
    assert "cumem-sleep bench, 1 round (simulated driver)" in output.out
    assert output.out.endswith(SIMULATED_NOTE + "\n")
    rows = [line.split("│")[1].strip() for line in output.out.splitlines() if line.startswith("│")]
    assert rows == ["step", *dict.fromkeys(["first sleep", "wake", *ROUND])]


def test_a_ratio_is_to_the_time_of_the_link() -> None:
    assert BenchStep("wake", 1, 0.2, 10**9, 10.0).times_link == 2.0
    assert BenchStep("clean sleep", 1, 0.1, 0, 10.0).times_link is None


# Level 3


@pytest.mark.slow
@pytest.mark.sim
def test_level_3_next_to_level_1() -> None:
    """In a process of its own, whose context takes memory."""
    environment = {**os.environ, "CUMEM_SLEEP_SIM_CONTEXT_BYTES": str(60 * MIB)}
    command = [sys.executable, "-m", "cumem_sleep", "bench", *SMALL, "--level", "3", "--rounds", "2", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=500)
    steps = json.loads(done.stdout)["steps"]
    names = ["first sleep", "wake", "first level 3 sleep", "wake", *DEEP_ROUND, *DEEP_ROUND]
    assert [step["step"] for step in steps] == names
    for step in steps:
        if "sleep" in step["step"]:
            level = 3 if "3" in step["step"] else 1
            assert step["left_on_gpu_bytes"] == {1: 60 * MIB, 3: 4 * MIB}[level]
            assert step.get("checkpointed_bytes") == (56 * MIB if level == 3 else None)
    for whole, parts in (("level 3 sleep", ("unpin", "lock", "checkpoint")), ("level 3 wake", ("restore", "unlock"))):
        for number in (1, 2):
            found = {step["step"]: step for step in steps if step["round"] == number}
            assert [found[part]["seconds"] for part in parts] == [found[whole]["phases"][part] for part in parts]


@pytest.mark.sim
@pytest.mark.parametrize("is_tried", [False, True])
def test_level_3_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_tried: bool
) -> None:
    """It is said before anything is measured, if that can be known."""
    if is_tried:
        monkeypatch.setenv("CUMEM_SLEEP_SIM_FAIL", "cuCheckpointProcessCheckpoint:0:CUDA_ERROR_NOT_SUPPORTED:1")
        said = "'first level 3 sleep' stayed at level 1: cuCheckpointProcessCheckpoint failed with"
    else:
        monkeypatch.setattr(_core, "can_checkpoint", lambda: False)
        monkeypatch.setattr(CuMemAllocator, "malloc", None)
        said = "level 3: not possible: the driver (CUDA 13.0) lacks the checkpoint calls"
    THIS_PROCESS._end_helper()  # the next one has it in its environment
    assert said in refused(capsys, *SMALL, "--level", "3")
    THIS_PROCESS._end_helper()


# What it notices, and refuses


def test_one_wrong_byte_is_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sleep = CuMemAllocator.sleep

    def damaging(self: CuMemAllocator, level: int) -> SleepReport:
        done = sleep(self, level)
        np.frombuffer(memoryview(list(self._store.catalogue)[2].extents[0]), np.uint8)[1234] ^= 1
        return done

    monkeypatch.setattr(CuMemAllocator, "sleep", damaging)
    code, found = run_json(capsys)
    assert (code, found["ok"]) == (1, False)
    assert "the backup, in host memory or a vault's file, or a copy is damaged" in found["error"]


@pytest.mark.parametrize(
    "arguments",
    [["--weights", "much"], ["--kv", "0"], ["--rounds", "0"], ["--pause", "-1"], ["--pause", "nan"], ["--level", "2"]],
)
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", *arguments])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "usage:" in message
    assert arguments[-1] in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "4MiB"], "--weights 4.00 MiB: a model takes at least 86.00 MiB"),
        (["--segment-size", "3MiB"], "--segment-size 3145728: expected a multiple of 2.00 MiB"),
        (["--weights", "32MiB", "--kv", "2MiB", "--segment-size", "64MiB"], "larger than the weights (32.00 MiB)"),
        (["--weights", "900TiB", "--kv", "2MiB"], "of 900.00 TiB and 2.00 MiB do not fit: device 0 has room for"),
        (["--weights", "96MiB", "--kv", "900TiB"], "choose smaller --weights and --kv"),
        (["--device", "77"], "--device 77: there are"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *arguments)


@pytest.mark.sim
def test_memory_in_use_is_refused(capsys: pytest.CaptureFixture[str], make_allocator: Any) -> None:
    allocator = make_allocator()
    address = allocator.malloc(PAGE)
    assert cli.main(["bench", *SMALL]) == 2
    assert "already has a CuMemAllocator with memory handed out" in capsys.readouterr().err
    allocator.free(address)


# Which segments


def h200(**changes: Any) -> Room:
    facts = {"device": 0, "device_bytes": 138 * GIB, "host_bytes": 120 * GIB, "host_limit": "cgroup"}
    return Room(**{**facts, "simulated": False, **changes})


def test_segments_of_a_32b_model() -> None:
    found = plan(None, None, None, h200())
    assert len(found.weights) == 258
    assert [size // MIB for size in found.weights[:5]] == [1484, 100, 80, 500, 250]
    assert found.weights[-1] == found.weights[0]
    assert sum(found.weights) == workload.MODEL_WEIGHTS_BYTES == 62488 * MIB
    assert (len(found.kv_cache), round(sum(found.kv_cache) / GIB, 2)) == (64, 54.63)
    assert found.why.startswith("100% of a Qwen3-32B beside vLLM on an H200: device 0")


_SIZES = st.integers(0, 200 * GIB)


@given(_SIZES, _SIZES, st.booleans(), st.none() | st.integers(1, 99 * GIB), st.none() | st.integers(1, GIB))
@settings(max_examples=100, deadline=None)
def test_what_is_planned_fits(device: int, host: int, simulated: bool, weights: int | None, kv: int | None) -> None:
    room = h200(device_bytes=device, host_bytes=host, simulated=simulated)
    try:
        found = plan(weights, kv, None, room)
    except InvalidArgument:
        return
    weights_bytes, kv_bytes = sum(found.weights), sum(found.kv_cache)
    assert weights_bytes + kv_bytes + (0 if simulated else weights_bytes // 512) <= device + PAGE
    assert weights_bytes + (weights_bytes + kv_bytes if simulated else 0) <= host + PAGE
    assert all(size >= PAGE and size % PAGE == 0 for size in (*found.weights, *found.kv_cache))
    assert weights is None or weights - PAGE < weights_bytes <= weights
    assert kv is None or kv <= kv_bytes < kv + PAGE


@given(st.integers(86 * MIB, 130 * GIB))
@settings(max_examples=100, deadline=None)
def test_scaled_models_keep_their_proportions(nbytes: int) -> None:
    sizes = workload.model_like(nbytes)
    assert sum(sizes) == nbytes // PAGE * PAGE
    assert min(sizes) >= PAGE
    layers, rest = divmod(len(sizes) - 2, 4)
    assert rest == 0
    assert layers == 64 or nbytes < 2 * GIB
    for part, share in enumerate((100, 80, 500, 250), start=1):
        scale = sum(sizes) / workload.MODEL_WEIGHTS_BYTES * 64 / layers
        assert abs(sizes[part] - share * MIB * scale) <= PAGE


# What it leaves behind


def held() -> tuple[int, int]:
    """Segments, and pinned host memory of the simulated driver."""
    return len(_core.segments()), sim.stats().registered_bytes if SIMULATED else 0


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize(
    ("owner", "name", "call", "options"),
    [
        (CuMemAllocator, "malloc", 3, []),
        (CuMemAllocator, "sleep", 3, []),
        (CuMemAllocator, "wake_up", 2, []),
        (CuMemAllocator, "wake_up", 4, ["--level", "3"]),  # from level 3
        (Preparation, "wait", 1, []),
        (memory.BenchMemory, "fill", 2, []),
    ],
)
def test_interrupted_run_frees_everything(
    owner: type, name: str, call: int, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    real = getattr(owner, name)
    calls = 0
    before = held()

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, interrupted)
    assert cli.main(["bench", *SMALL, *options]) == 130
    assert calls >= call
    assert "interrupted" in capsys.readouterr().err
    assert not _core.driver_calls_suspended()
    assert held() == before


@pytest.mark.slow
@pytest.mark.sim
def test_failed_preparation_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prepare = CuMemAllocator.prepare

    def failing(self: CuMemAllocator) -> Preparation:
        preparation = prepare(self)
        preparation.wait()
        preparation.error = InvalidState("the preparation failed")
        return preparation

    monkeypatch.setattr(CuMemAllocator, "prepare", failing)
    assert cli.main(["bench", *SMALL]) == 2
    assert "the preparation failed" in capsys.readouterr().err
    assert _core.segments() == []


# Host memory and the link


def test_link_is_measured_with_what_is_free() -> None:
    sizes = {room: link.link_bytes(h200(device_bytes=room * GIB)) / GIB for room in (138, 32, 8, 2)}
    assert sizes == {138: 8, 32: 8, 8: 2, 2: 0.5}
    assert link.link_bytes(h200(host_bytes=4 * GIB)) == GIB


def test_room_is_what_the_tightest_limit_leaves(make_allocator: Callable[..., CuMemAllocator]) -> None:
    make_allocator()._operations.open()
    room = Room.now(0, Settings(host_budget_bytes=3 * MIB))
    assert (room.host_bytes, room.host_limit) == (3 * MIB, "budget")
