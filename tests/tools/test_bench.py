"""`cumem-sleep bench`: what it reports, what it notices, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MIB, SIMULATED, Memory, quick_sums, write_safetensors

from cumem_sleep import CuMemAllocator, InvalidArgument, InvalidState, Settings, SleepReport, WakeReport, _core, sim
from cumem_sleep.checkpoint.process import THIS_PROCESS
from cumem_sleep.digest import device as digest
from cumem_sleep.tools import bench, cli
from cumem_sleep.tools.bench import link, memory, palette, plot, report, workload
from cumem_sleep.tools.bench.host_memory import touch_host_memory
from cumem_sleep.tools.bench.report import BenchStep, StepKind
from cumem_sleep.tools.layout import PAGE_BYTES as PAGE
from cumem_sleep.tools.simulated import SIMULATED_NOTE

GIB = 1 << 30

SMALL = ["--weights", "32MiB", "--segment-size", "4MiB", "--kv", "8MiB", "--pause", "0", "--rounds", "1"]
ROUND = [
    "clean sleep",
    "wake",
    "dirty sleep",
    "wake, 0 s later",
    "one segment changed",
    "wake, weights",
    "wake, kv_cache",
    "sleep without backups",
    "wake, weights, 0 s later",
    "wake, kv_cache",
    "level 2 sleep",
    "level 2 wake",
    "prepare",
    "prepared sleep",
    "wake",
]


class FakePreparation:
    """What `prepare` returns: ended from the start."""

    def __init__(self) -> None:
        self.running = False
        self.error: Exception | None = None
        self.stopped = False

    def wait(self, _timeout: float | None = None) -> bool:
        return True

    def stop(self) -> None:
        self.stopped = True


def backed_up_at_once(allocator: CuMemAllocator) -> FakePreparation:
    allocator.sleep()
    allocator.wake_up()
    return FakePreparation()


DEEP_ROUND = [
    *("level 1 sleep", "level 1 wake", "level 3 sleep", "unpin", "lock", "checkpoint"),
    *("level 3 wake", "restore", "unlock"),
]


@pytest.fixture(autouse=True)
def _quick(nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  (patches go before)
    monkeypatch.setattr(workload.SIMULATED, "link_bytes", 4 * MIB)
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


def write_model(path: pathlib.Path, sizes: dict[str, int]) -> pathlib.Path:
    """A safetensors file of bytes, sparse: a reader that looked at the data would see zeros."""
    header, position = {}, 0
    for name, nbytes in sizes.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [position, position + nbytes]}
        position += nbytes
    write_safetensors(path, header, b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + position)
    return path


# What it reports


@pytest.mark.slow
def test_compressed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_COMPRESS", "auto")
    # The simulated driver writes to all memory that it gives, and the usual slots are of much.
    monkeypatch.setattr(CuMemAllocator.tuning, "most_slots", CuMemAllocator.tuning.slots)
    monkeypatch.setattr(CuMemAllocator.tuning, "slot_bytes", (4 * MIB,))
    code, found = run_json(capsys, "--no-touch-host-memory")
    assert (code, found["compress"]) == (0, "auto")
    ratios = [step["host_bytes_per_byte"] for step in found["steps"] if "host_bytes_per_byte" in step]
    assert ratios
    assert all(0.6 < ratio < 0.7 for ratio in ratios)


@pytest.mark.slow
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "--no-touch-host-memory")
    assert code == 0
    assert set(found) - {"note"} == {
        "machine", "workload", "rounds", "host_memory_touched_before", "compress", "link_gbps", "digest", "steps",
        "bytes_checked", "wrong", "command", "version", "ok", "simulated", "error",
    }  # fmt: skip
    assert set(found["machine"]) == {
        "gpu", "driver", "cuda_driver_api", "cores", "host_memory_bytes", "transparent_hugepage", "kernel", "python",
        "torch", "triton", "cumem_sleep", "simulated", "environment", "command",
    }  # fmt: skip
    assert found["machine"]["simulated"] is ("note" in found) is SIMULATED
    assert found["machine"]["command"].startswith("cumem-sleep bench --weights 32MiB")
    assert found["machine"]["environment"]["CUMEM_SLEEP_DRIVER"] == ("sim" if SIMULATED else "cuda")
    assert found["workload"] == {
        "name": "equal segments of 4.00 MiB", "segments": 8, "weights_bytes": 32 * MIB, "kv_cache_bytes": 8 * MIB,
    }  # fmt: skip
    assert (found["rounds"], found["bytes_checked"], found["host_memory_touched_before"]) == (1, True, False)
    assert set(found["link_gbps"]) == {"to_host", "to_device"}
    assert found["digest"]["bytes"] == 32 * MIB
    assert len(found["digest"]["seconds"]) == 3
    assert [step["step"] for step in found["steps"]] == ["first sleep", "wake", *ROUND]
    for step in found["steps"]:
        check_step(step)


def check_step(step: dict[str, Any]) -> None:
    """What each kind of step has, and how many bytes each moves."""
    name, weights_bytes = step["step"], 32 * MIB
    kind = "prepare" if name == "prepare" else "wake" if "wake" in name else "sleep"
    common = {"step", "round", "seconds", "bytes", "gbps", "times_link", "phases"}
    optional = {
        "prepare": set(),
        "wake": {"verified_bytes"},
        "sleep": {"left_on_gpu_bytes"} | (set() if name == "level 2 sleep" else {"host_bytes_per_byte"}),
    }
    assert set(step) == common | optional[kind], name
    nothing = ("clean sleep", "prepared sleep", "wake, kv_cache", "level 2 sleep", "level 2 wake")
    if name == "one segment changed":
        assert 0 < step["bytes"] < weights_bytes
    else:
        assert step["bytes"] == (0 if name in nothing else weights_bytes), name
    assert (step["times_link"] is None) == (step["bytes"] == 0)
    if kind == "wake":
        assert step["verified_bytes"] == (0 if name == "level 2 wake" else weights_bytes), name
    if "host_bytes_per_byte" in step:
        assert step["host_bytes_per_byte"] == 1.0
    if SIMULATED and kind == "sleep":
        assert step["left_on_gpu_bytes"] == 0


@pytest.mark.slow
@pytest.mark.sim
def test_table_says_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *SMALL, "--rounds", "2"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    lines = output.out.splitlines()
    table = [number for number, line in enumerate(lines) if line.startswith(("╭", "╰"))]
    assert all(line.startswith("simulated: ") for line in lines[: table[0] - 1])
    assert "cumem-sleep bench, 2 rounds (simulated driver)" in output.out
    assert "every byte of the weights was the same as before" in output.out
    assert output.out.endswith(SIMULATED_NOTE + "\n")
    for name in ("first sleep", *ROUND):
        assert f"│ {name} " in output.out


@pytest.mark.slow
@pytest.mark.sim
def test_chosen_sizes_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(workload.SIMULATED, "weights_bytes", 86 * MIB)
    monkeypatch.setattr(workload.SIMULATED, "kv_bytes", 8 * MIB)
    assert cli.main(["bench", "--pause", "0", "--rounds", "1", "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.startswith("simulated: the sizes of a small simulated model, which fit: device 0 has room for ")
    found = json.loads(output.out)["workload"]
    assert found == {
        "name": "Qwen3-32B-like", "segments": 14, "weights_bytes": 86 * MIB, "kv_cache_bytes": 8 * MIB,
    }  # fmt: skip


@pytest.mark.slow
def test_model(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = tmp_path / "model"
    shards.mkdir()
    write_model(shards / "a.safetensors", {"embed": 12 * MIB, "norm": 512})
    write_model(shards / "b.safetensors", {"bias": 1024, "head": 11 * MIB})
    (shards / "config.json").write_text("{}")
    few = ["--kv", "2MiB", "--pause", "0", "--rounds", "1", "--json"]
    assert cli.main(["bench", "--model", str(shards), *few]) == 0
    found = json.loads(capsys.readouterr().out)["workload"]
    assert found == {"name": "model", "segments": 3, "weights_bytes": 26 * MIB, "kv_cache_bytes": 2 * MIB}
    assert cli.main(["bench", "--model", str(shards / "a.safetensors"), *few]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["name"] == "a.safetensors"


@pytest.mark.slow
def test_equal_segments(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "--segment-size", "2MiB")
    assert (code, found["workload"]["segments"]) == (0, 16)


def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", "--help"])
    assert exit_.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_summary_of_several_rounds() -> None:
    steps = [BenchStep("wake", StepKind.WAKE, n, seconds, 10**9, 10.0) for n, seconds in ((1, 0.2), (2, 0.4), (3, 0.1))]
    found = report.Summary.of(steps)
    assert (found.seconds, found.least_seconds, found.most_seconds, found.count) == (0.2, 0.1, 0.4, 3)
    assert (found.gbps, found.times_link, found.link_seconds) == (5.0, 2.0, 0.1)
    nothing = report.Summary.of([BenchStep("clean sleep", StepKind.SLEEP, 1, 0.1, 0, 10.0)])
    assert (nothing.gbps, nothing.times_link, nothing.link_seconds) == (0.0, None, None)


def test_ratios_are_to_the_link_of_that_direction() -> None:
    link_ = report.LinkRates(to_host_gbps=50.0, to_device_gbps=25.0, bytes=1)
    assert [link_.gbps(kind) for kind in (StepKind.SLEEP, StepKind.PREPARE, StepKind.WAKE)] == [50.0, 50.0, 25.0]


# Level 3


@pytest.mark.slow
@pytest.mark.sim
def test_level_3_next_to_level_1(tmp_path: pathlib.Path) -> None:
    """In a process of its own, whose context takes memory."""
    plot_path = tmp_path / "deep.png"
    environment = {**os.environ, "CUMEM_SLEEP_SIM_CONTEXT_BYTES": str(60 * MIB)}
    command = [sys.executable, "-m", "cumem_sleep", "bench", *SMALL, "--level", "3", "--rounds", "2", "--json"]
    done = subprocess.run(
        [*command, "--plot", str(plot_path)], env=environment, capture_output=True, text=True, check=True, timeout=500
    )
    found = json.loads(done.stdout)
    assert (found["bytes_checked"], found["simulated"], found["note"]) == (True, True, SIMULATED_NOTE)
    names = ["first sleep", "wake", "first level 3 sleep", "wake", *DEEP_ROUND, *DEEP_ROUND]
    assert [step["step"] for step in found["steps"]] == names
    left_bytes = {1: 60 * MIB, 3: 4 * MIB}
    for step in found["steps"]:
        name = step["step"]
        if "wake" in name:
            assert step["verified_bytes"] == 32 * MIB
        if "sleep" in name:
            level = 3 if "3" in name else 1
            assert step["left_on_gpu_bytes"] == left_bytes[level]
            assert step.get("checkpointed_bytes") == (56 * MIB if level == 3 else None)
    for whole, parts in (("level 3 sleep", ("unpin", "lock", "checkpoint")), ("level 3 wake", ("restore", "unlock"))):
        for number in (1, 2):
            steps = {step["step"]: step for step in found["steps"] if step["round"] == number}
            assert [steps[part]["seconds"] for part in parts] == [steps[whole]["phases"][part] for part in parts]
            assert steps[whole]["seconds"] > sum(steps[part]["seconds"] for part in parts)
    assert plot_path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
@pytest.mark.sim
def test_table_of_level_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *SMALL, "--level", "3"]) == 0
    output = capsys.readouterr().out
    for name in ("first sleep", "first level 3 sleep", *DEEP_ROUND):
        assert f"│ {name} " in output
    assert "│ checkpointed │" in output
    assert "lock, checkpoint: parts of 'level 3 sleep'" in output
    assert output.endswith(SIMULATED_NOTE + "\n")


@pytest.mark.sim
def test_level_3_where_it_is_not_possible(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said before anything is measured."""
    monkeypatch.setattr(_core, "can_checkpoint", lambda: False)
    monkeypatch.setattr(CuMemAllocator, "malloc", None)
    message = refused(capsys, *SMALL, "--level", "3")
    assert "level 3: not possible: the driver (CUDA 13.0) lacks the checkpoint calls" in message


@pytest.mark.sim
def test_level_3_that_is_refused_when_it_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_SIM_FAIL", "cuCheckpointProcessCheckpoint:0:CUDA_ERROR_NOT_SUPPORTED:1")
    THIS_PROCESS._end_helper()  # the next one has it in its environment
    message = refused(capsys, *SMALL, "--level", "3")
    THIS_PROCESS._end_helper()
    assert "'first level 3 sleep' stayed at level 1: cuCheckpointProcessCheckpoint failed with" in message


def test_other_levels_are_not_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", "--level", "2"])
    assert exit_.value.code == 2
    assert "--level" in capsys.readouterr().err


# What it notices


@pytest.mark.slow
@pytest.mark.parametrize(("index", "last"), [(0, False), (3, True), (5, True)])
def test_one_wrong_byte_is_1(
    index: int, last: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged after the layer's own digests were compared: only the benchmark's checksums can see it."""
    wake_up = CuMemAllocator.wake_up
    content = Memory()
    damaged: list[int] = []

    def damaging(self: CuMemAllocator, tags: Any = None) -> WakeReport:
        done = wake_up(self, tags)
        segment = sorted((s for s in _core.segments() if s.tag == "weights"), key=lambda s: s.id)[index]
        place = segment.address + (segment.bytes - 1 if last else 0)
        content.write(place, bytes([content.read(place, 1)[0] ^ 0x80]))
        damaged.append(segment.address)
        return done

    monkeypatch.setattr(CuMemAllocator, "wake_up", damaging)
    code, found = run_json(capsys)
    content.close()
    assert (code, found["bytes_checked"], found["digest"]) == (1, False, None)
    assert [step["step"] for step in found["steps"]] == ["first sleep", "wake"]  # what follows is not tried
    assert f"after 'wake' in round 1: weights segment {index} at 0x{damaged[0]:x}" in found["wrong"]


@pytest.mark.parametrize("verify", ["off", "wake"])
def test_damaged_backup_is_1(verify: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether the layer trusts its copies or not."""
    sleep = CuMemAllocator.sleep

    def damaging(self: CuMemAllocator, level: Any = None) -> SleepReport:
        done = sleep(self, level)
        backup = list(self._store.catalogue)[2]
        np.frombuffer(memoryview(backup.extents[0]), np.uint8)[1234] ^= 1
        return done

    monkeypatch.setenv("CUMEM_SLEEP_VERIFY", verify)
    monkeypatch.setattr(CuMemAllocator, "sleep", damaging)
    assert cli.main(["bench", *SMALL]) == 1
    output = capsys.readouterr()
    if verify == "off":
        assert "FAILED: after 'wake' in round 1: weights segment 2 at 0x" in output.out
    else:
        assert "the backup, in host memory or a vault's file, or a copy is damaged" in output.err


@pytest.mark.sim
def test_checksums_of_pytorch_and_numpy_agree(make_allocator: Callable[..., CuMemAllocator]) -> None:
    """The path of a GPU, on the CPU: what is not a device's own is the same."""
    torch = pytest.importorskip("torch")
    allocator = make_allocator()
    on_torch = memory.TorchMemory(allocator, torch, torch.device("cpu"))
    regions = on_torch.allocate([10 * MIB, 34 * MIB], "weights")
    on_torch.fill(regions)
    sums = on_torch.checksums(regions)
    with_numpy = memory.SimulatedMemory(allocator, 0)
    assert with_numpy.checksums(regions) == sums
    on_torch.fill(regions[:1])
    again = on_torch.checksums(regions)
    assert again[0] != sums[0]
    assert again[1] == sums[1]
    on_torch.close()


@pytest.mark.sim
def test_checksums_tell_places_and_bits_apart(make_allocator: Callable[..., CuMemAllocator]) -> None:
    device = memory.SimulatedMemory(make_allocator(), 0)
    regions = device.allocate([2 * MIB, 34 * MIB], "weights")
    device.fill(regions)
    before = device.checksums(regions)
    words = next(iter(memory._parts(regions[0])))
    words[[3, 4]] = words[[4, 3]]
    swapped = device.checksums(regions)
    words[-1] ^= np.uint64(1 << 63)
    flipped = device.checksums(regions)
    assert len({before[0], swapped[0], flipped[0]}) == 3
    assert before[1] == swapped[1] == flipped[1]
    device.close()


@pytest.mark.sim
def test_memory_that_is_not_the_layers_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = np.zeros(64 * MIB, np.uint8)

    def elsewhere(_: memory.SimulatedMemory, sizes: Any, tag: str) -> tuple[memory.Region, ...]:
        return tuple(memory.Region(tag, index, own.ctypes.data, nbytes) for index, nbytes in enumerate(sizes))

    monkeypatch.setattr(memory.SimulatedMemory, "allocate", elsewhere)
    assert "is not a segment of the layer" in refused(capsys, *SMALL)


# What it refuses


@pytest.mark.parametrize(
    "arguments",
    [["--weights", "much"], ["--kv", "0"], ["--rounds", "0"], ["--pause", "-1"], ["--pause", "nan"], ["--model"]],
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
        (["--weights", "900TiB"], "weights of 900.00 TiB and --kv 2.00 MiB do not fit: device 0 has room for"),
        (["--weights", "96MiB", "--kv", "900TiB"], "with these weights"),
        (["--device", "77"], "--device 77: there are"),
        (["--model", "/nonexistent"], "/nonexistent: cannot be read"),
        (["--model", "x", "--weights", "1GiB"], "--weights 1.00 GiB beside --model"),
        (["--model", "x", "--segment-size", "2MiB"], "--segment-size 2.00 MiB beside --model"),
        (["--plot", "figure.txt"], "--plot figure.txt: the name must end in .png"),
        (["--plot", "/nonexistent/figure.png"], "there is no folder /nonexistent"),
        (["--plot", "/proc/figure.png"], "--plot /proc/figure.png: cannot be written: "),
        (["--plot", f"{'x' * 300}/y.png"], "x/y.png: cannot be written: File name too long"),
        (["--model", "x" * 300], "x: File name too long"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *arguments)


def test_folder_without_a_model(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no *.safetensors in this folder" in refused(capsys, "--model", str(tmp_path))


@pytest.mark.sim
def test_sizes_that_do_not_fit_name_what_would(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_SIM_DEVICE_BYTES", str(64 * MIB))
    sim.configure(device_bytes=64 * MIB)
    message = refused(capsys, "--weights", "100MiB", "--kv", "20MiB")
    assert "what would fit: --weights 44.00 MiB with this --kv" in message
    message = refused(capsys, "--weights", "40MiB", "--kv", "30MiB", "--segment-size", "2MiB")
    assert "--weights 34.00 MiB with this --kv, or --kv 24.00 MiB with these weights" in message


@pytest.mark.sim
def test_memory_in_use_is_refused(capsys: pytest.CaptureFixture[str], make_allocator: Any) -> None:
    allocator = make_allocator()
    address = allocator.malloc(PAGE)
    assert cli.main(["bench", *SMALL]) == 2
    assert "already has a CuMemAllocator with memory handed out" in capsys.readouterr().err
    allocator.free(address)


# Which segments


def h200(**changes: Any) -> workload.Room:
    facts = {"device": 0, "device_bytes": 138 * GIB, "host_bytes": 120 * GIB, "host_limit": "cgroup"}
    return workload.Room(**{**facts, "simulated": False, **changes})


def test_segments_of_a_32b_model() -> None:
    found = bench.plan(bench.Request(), h200())
    assert len(found.weights) == 258
    assert [size // MIB for size in found.weights[:5]] == [1484, 100, 80, 500, 250]
    assert found.weights[-1] == found.weights[0]
    assert found.weights_bytes == workload.MODEL_WEIGHTS_BYTES == 62488 * MIB
    assert len(found.kv_cache) == 64
    assert round(found.kv_bytes / GIB, 2) == 54.63
    assert "a Qwen3-32B beside vLLM on an H200, which fit" in found.why


def test_what_fits_is_chosen() -> None:
    little_host = bench.plan(bench.Request(), h200(host_bytes=20 * GIB))
    assert little_host.weights_bytes == 20 * GIB
    assert round(little_host.kv_bytes / GIB, 2) == 54.63
    small_gpu = bench.plan(bench.Request(), h200(device_bytes=22 * GIB))
    assert 11 * GIB < small_gpu.weights_bytes < 12 * GIB
    assert small_gpu.weights_bytes + small_gpu.kv_bytes <= 22 * GIB
    assert "what fits of" in small_gpu.why
    only_kv = bench.plan(bench.Request(kv_bytes=100 * GIB), h200())
    assert (only_kv.kv_bytes, 37 * GIB < only_kv.weights_bytes < 38 * GIB) == (100 * GIB, True)
    only_weights = bench.plan(bench.Request(weights_bytes=100 * GIB), h200())
    assert (only_weights.weights_bytes, 37 * GIB < only_weights.kv_bytes < 38 * GIB) == (100 * GIB, True)
    for nothing in (0, 50 * MIB):
        with pytest.raises(InvalidState, match="no room for a model"):
            bench.plan(bench.Request(), h200(host_bytes=nothing))


_ROOMS = st.integers(0, 200 * GIB)


@given(_ROOMS, st.none() | _ROOMS, st.booleans(), st.none() | st.integers(1, 99 * GIB), st.none() | st.integers(1, GIB))
@settings(max_examples=200, deadline=None)
def test_what_is_planned_fits(
    device: int, host: int | None, simulated: bool, weights: int | None, kv: int | None
) -> None:
    room = h200(device_bytes=device, host_bytes=host, simulated=simulated)
    try:
        found = bench.plan(bench.Request(weights, kv), room)
    except (InvalidArgument, InvalidState):
        return
    pinned = 0 if simulated else found.weights_bytes // 512
    assert found.weights_bytes + found.kv_bytes + pinned <= device
    if host is not None:
        on_host = found.weights_bytes + (found.weights_bytes + found.kv_bytes if simulated else 0)
        assert on_host <= host
    assert all(size >= PAGE and size % PAGE == 0 for size in (*found.weights, *found.kv_cache))
    assert weights is None or weights - PAGE < found.weights_bytes <= weights
    assert kv is None or kv <= found.kv_bytes < kv + PAGE


@given(st.integers(workload.LEAST_MODEL_BYTES, 130 * GIB))
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


# The figure


@pytest.mark.slow
def test_plot(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sleep.png"
    code, _ = run_json(capsys, "--plot", str(path))
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_plot_has_the_colours_of_the_others(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sleep.svg"
    assert run_json(capsys, "--plot", str(path))[0] == 0
    figure = path.read_text()
    assert f"fill: {palette.OURS.lower()}" in figure
    assert f"stroke: {palette.LINK.lower()}" in figure


def test_plot_over_a_folder(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sleep.png").mkdir()
    message = refused(capsys, *SMALL, "--plot", str(tmp_path / "sleep.png"))
    assert "sleep.png: cannot be written: Is a directory" in message


@pytest.mark.slow
def test_a_plot_that_fails_loses_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise InvalidState("no room for it")

    monkeypatch.setattr(bench, "draw", fail)
    assert cli.main(["bench", *SMALL, "--json", "--plot", str(tmp_path / "sleep.png")]) == 2
    output = capsys.readouterr()
    assert json.loads(output.out)["bytes_checked"]
    assert "no room for it" in output.err


def test_plot_without_matplotlib(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said before anything runs."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        plot.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    message = refused(capsys, *SMALL, "--plot", str(tmp_path / "sleep.png"))
    assert "matplotlib is not installed: pip install matplotlib" in message
    assert CuMemAllocator.instance is None


# What it leaves behind


def held() -> tuple[int, int]:
    """Segments, and pinned host memory of the simulated driver."""
    return len(_core.segments()), sim.stats().registered_bytes if SIMULATED else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (CuMemAllocator, "malloc", 3),
        (CuMemAllocator, "sleep", 1),
        (CuMemAllocator, "sleep", 3),
        (CuMemAllocator, "wake_up", 2),
        (CuMemAllocator, "release_backups", 1),
        (CuMemAllocator, "prepare", 1),
        (memory.SimulatedMemory, "fill", 2),
        (memory.SimulatedMemory, "checksums", 3),
        (FakePreparation, "wait", 1),
    ],
)
@pytest.mark.sim
def test_interrupted_run_frees_everything(
    owner: type, name: str, call: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = getattr(owner, name)
    calls = 0
    before = held()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(CuMemAllocator, "prepare", backed_up_at_once, raising=False)
    monkeypatch.setattr(owner, name, interrupted)
    assert cli.main(["bench", *SMALL]) == 130
    assert calls >= call
    assert "interrupted" in capsys.readouterr().err
    assert held() == before


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("call", [2, 4])
def test_interrupted_at_level_3_it_comes_back_and_frees_everything(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the benchmark's memory is freed: on a GPU PyTorch does that, whose calls would wait for ever."""
    wake_up, close = CuMemAllocator.wake_up, memory.SimulatedMemory.close
    calls, suspended = list[bool](), list[bool]()
    before = held()

    def interrupted(self: CuMemAllocator, tags: Any = None) -> WakeReport:
        calls.append(self.checkpoint is not None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return wake_up(self, tags)

    def noted(self: memory.SimulatedMemory) -> None:
        suspended.append(_core.driver_calls_suspended())
        close(self)

    monkeypatch.setattr(CuMemAllocator, "wake_up", interrupted)
    monkeypatch.setattr(memory.SimulatedMemory, "close", noted)
    assert cli.main(["bench", *SMALL, "--level", "3"]) == 130
    assert (len(calls), calls[-1]) == (call, True)
    assert suspended == [False]
    assert held() == before


@pytest.mark.slow
@pytest.mark.sim
def test_failed_preparation_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(_: CuMemAllocator) -> FakePreparation:
        preparation = FakePreparation()
        preparation.error = InvalidState("the preparation failed")
        return preparation

    monkeypatch.setattr(CuMemAllocator, "prepare", failing, raising=False)
    assert cli.main(["bench", *SMALL]) == 2
    assert "the preparation failed" in capsys.readouterr().err
    assert _core.segments() == []


@pytest.mark.slow
@pytest.mark.sim
def test_interrupted_preparation_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakePreparation] = []

    class Waiting(FakePreparation):
        def wait(self, _timeout: float | None = None) -> bool:
            made.append(self)
            if len(made) > 1:
                raise KeyboardInterrupt
            return False

    monkeypatch.setattr(CuMemAllocator, "prepare", lambda _: Waiting(), raising=False)
    assert cli.main(["bench", *SMALL]) == 130
    assert made[0].stopped


# Host memory and the link


@pytest.mark.slow
def test_host_memory_is_touched_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "--touch-host-memory")
    assert (code, found["host_memory_touched_before"]) == (0, True)


def test_touching_goes_over_all_of_it() -> None:
    done: list[int] = []
    touch_host_memory(131 * MIB, progress=done.append)
    assert done[-1] == 131 * MIB
    assert done == sorted(done)


def test_link_is_measured_with_what_is_free() -> None:
    sizes = {room: link.link_bytes(h200(device_bytes=room * GIB)) / GIB for room in (138, 32, 31, 8, 2)}
    assert sizes == {138: 8, 32: 8, 31: 4, 8: 2, 2: 0.5}
    assert link.link_bytes(h200(host_bytes=5 * GIB)) == GIB


def test_room_is_what_the_tightest_limit_leaves(make_allocator: Callable[..., CuMemAllocator]) -> None:
    make_allocator()._operations.open()
    room = workload.Room.now(0, Settings(host_budget_bytes=3 * MIB))
    assert (room.host_bytes, room.host_limit) == (3 * MIB, "budget")
