"""The command line: what it prints, its exit codes, and the demo, whose comparison is put to the test."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import MIB, SIMULATED, Memory, write_safetensors

import cumem_sleep
from cumem_sleep import BackupMismatch, CuMemAllocator, DriverError, InvalidState, _core
from cumem_sleep.core import misspelt
from cumem_sleep.tools import cli, demo, layout, simulated
from cumem_sleep.tools.options import parser

KV = ["--kv", "4MiB"]


@pytest.fixture(autouse=True)
def _small_pieces(nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  (patches go before)
    """So that small tensors are cut into several, as large ones are."""
    monkeypatch.setattr(layout, "PIECE_BYTES", MIB)


# A model


def model_parts() -> tuple[dict[str, Any], bytes]:
    """A header and its data: several dtypes, a tensor without bytes, one with an odd size, one beyond a piece."""
    wanted = [
        ("norm", "BF16", [1000], 2),
        ("embed", "BF16", [1024, 700], 2),
        ("fp8", "F8_E4M3", [3, 5, 7], 1),
        ("nothing", "F32", [0, 8], 4),
        ("half", "F16", [128, 128], 2),
        ("scalar", "F32", [], 4),
        ("complex", "C64", [9], 8),
    ]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape, itemsize in wanted:
        end = position + math.prod(shape) * itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    return header, np.random.default_rng(1).bytes(position)


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_safetensors(tmp_path / "model.safetensors", *model_parts())


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = cli.main([*arguments, "--json"])
    output = capsys.readouterr()
    return code, json.loads(output.out)


@pytest.mark.slow
def test_every_command_and_every_error_begins_alike(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"version": cumem_sleep.__version__, "ok": True, "simulated": SIMULATED, "error": None}
    small = ["--weights", "4MiB", "--segment-size", "2MiB", "--kv", "2MiB", "--pause", "0", "--rounds", "1"]
    for command in (["demo", str(model), *KV], ["doctor"], ["bench", *small]):
        code, report = run_json(capsys, *command)
        assert (code, list(report)[:5]) == (0, ["command", *common])
        assert {name: report[name] for name in ("command", *common)} == {"command": command[0], **common}
    code, report = run_json(capsys, "demo", "/nonexistent")
    assert (code, report) == (
        2,
        {**common, "command": "demo", "ok": False, "error": "/nonexistent: cannot be read: No such file or directory"},
    )
    monkeypatch.setenv("CUMEM_SLEEP_VERIFY", "perhaps")
    code, report = run_json(capsys, "doctor")
    assert (code, report["ok"], report["error"]) == (1, False, "failed: settings")


# Usage


def test_the_folder_of_a_shim_is_printed_and_holds_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["shim", "torch_memory_saver"]) == 0
    folder = pathlib.Path(capsys.readouterr().out.rstrip("\n"))
    assert (folder / "torch_memory_saver" / "__init__.py").is_file()
    code, found = run_json(capsys, "shim", "torch_memory_saver")
    assert (code, found["ok"], found["folder"]) == (0, True, str(folder))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    said = capsys.readouterr().out.strip()
    assert said.startswith(f"cumem-sleep {cumem_sleep.__version__} (")
    assert re.search(r"\((a checkout|commit [0-9a-f]{40}(-dirty)?); (GCC|Clang) \d.*, CUDA 1\d\.\d\)$", said)


@pytest.mark.parametrize(
    "arguments",
    [["demo", "--kv", "much"], ["demo", "--kv", "0"], ["demo", "--rounds", "0"], ["demo", "--nonsense"], ["no-such"]],
)
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "command", "error"),
    [
        (["demo", "--kv", "0"], "demo", "argument --kv: '0': expected at least one byte"),
        (["vault", "status", "--nonsense"], None, "unrecognized arguments: --nonsense"),
        (["no-such"], None, "argument COMMAND: invalid choice: 'no-such'"),
    ],
)
def test_bad_usage_as_json(
    arguments: list[str], command: str | None, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*arguments, "--json"])
    assert exit_.value.code == 2
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["command", "version", "ok", "simulated", "error"]
    assert (found["command"], found["ok"]) == (command, False)
    assert found["error"].startswith(error)


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["help"], 0)])
def test_the_help_is_short_and_names_every_command(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended: object = cli.main(arguments)
    except SystemExit as exit_:
        ended = exit_.code
    assert ended == code
    output = capsys.readouterr()
    text, other = (output.out, output.err) if code == 0 else (output.err, output.out)
    assert other == ""
    assert len(text.splitlines()) <= 27, "little more than a terminal shows"
    assert max(map(len, text.splitlines())) <= 100
    (commands,) = (action.choices for action in parser("")._actions if action.choices)
    assert [command for command in commands if not re.search(rf"\b{command}\b", text)] == []
    codes = {str(value) for name, value in vars(cli).items() if name.startswith("EXIT_")}
    assert codes == set(re.findall(r"\b\d+\b", text.partition("exit codes:")[2].partition("\n\n")[0]))


def as_module(*arguments: str, stdout: Any = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUMEM_SLEEP_")}
    kept["PYTHONPATH"] = str(pathlib.Path(cumem_sleep.__path__[0]).parent)
    return subprocess.run(
        [sys.executable, "-m", "cumem_sleep", *arguments],
        cwd=pathlib.Path(__file__).parent,  # not the checkout, whose package may not be built
        env={**kept, **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.sim
@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_reader_that_has_seen_enough(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert cli.main(arguments) == 141
    assert capfd.readouterr().err == ""


def test_closed_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["doctor"]) == 2
    assert "standard output is closed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["demo", ""], ["vault", "--socket", ""]])
def test_no_name_is_not_the_current_folder(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "'': expected the name of a file or folder" in capsys.readouterr().err


# The demo


def test_demo_of_a_file(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys, "demo", str(model), *KV)
    assert (code, report["ok"], report["simulated"]) == (0, True, SIMULATED)
    _, data = model_parts()
    assert (report["tensors"], report["weights_bytes"]) == (7, len(data))
    assert {"BF16", "F8_E4M3", "F16", "F32"} < set(report["dtypes"])
    steps = {step["name"]: step for step in report["steps"]}
    assert list(steps) == [
        "load weights",
        "sleep level 1",
        "wake",
        "sleep level 1 again",
        "wake weights only",
        "wake kv_cache",
        "sleep level 2",
        "wake, weights blank",
        "reload weights",
    ]
    weights, everything = steps["wake weights only"]["layer_bytes"], steps["wake"]["layer_bytes"]
    assert everything == weights + 4 * MIB
    for name in ("sleep level 1", "sleep level 1 again", "sleep level 2"):
        assert steps[name]["layer_bytes"] == 0
    assert steps["sleep level 1"]["moved_bytes"] == steps["sleep level 1"]["host_bytes"] == weights
    assert (steps["sleep level 1 again"]["moved_bytes"], steps["sleep level 1 again"]["gbps"]) == (0, None)
    assert steps["sleep level 2"]["host_bytes"] == 0
    for name in ("load weights", "wake", "wake weights only", "wake kv_cache", "reload weights"):
        assert steps[name]["verified_bytes"] == len(data)
    assert all((step["device_used_bytes"] is None) == SIMULATED for step in report["steps"])
    assert ("note" in report) == SIMULATED


def test_demo_table(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", str(model), *KV, "--rounds", "2"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "model.safetensors: 7 tensors" in output.out
    assert output.out.count("reload weights") == 2
    assert "no address changed" in output.out
    if SIMULATED:
        assert "cumem-sleep demo (simulated driver)" in output.out
        assert simulated.SIMULATED_NOTE in output.out


def test_demo_without_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = demo.synthetic_source(layers=2, hidden=128, vocabulary=256)
    again = demo.synthetic_source(layers=2, hidden=128, vocabulary=256)
    assert all(np.array_equal(one.data, other.data) for one, other in zip(small.tensors, again.tensors, strict=True))
    monkeypatch.setattr(demo, "synthetic_source", lambda: small)
    code, report = run_json(capsys, "demo", *KV)
    assert (code, report["tensors"], report["dtypes"]) == (0, 20, ["BF16"])


def test_demo_without_retained_backups(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_RETAIN_BACKUPS", "0")
    code, report = run_json(capsys, "demo", str(model), *KV)
    assert code == 0
    assert report["steps"][3]["moved_bytes"] > 0  # copied again, as asked for


@pytest.mark.parametrize("last", [False, True])
def test_one_wrong_byte_is_1(
    last: bool, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged after the layer's own digests were taken: only the demo's comparison can see it."""
    wake_up = CuMemAllocator.wake_up
    memory = Memory()

    def damaging(self: CuMemAllocator, tags: Any = None) -> Any:
        report = wake_up(self, tags)
        _, data = model_parts()
        if last:  # the last tensor that has bytes; each begins at a multiple of 512
            sizes = [entry["data_offsets"] for name, entry in model_parts()[0].items() if name != "__metadata__"]
            offset = sum(-(-(end - begin) // 512) * 512 for begin, end in sizes[:-1]) + sizes[-1][1] - sizes[-1][0] - 1
        else:
            offset = 0
        wrong = data[-1 if last else 0] ^ 0x10
        address = next(segment.address for segment in _core.segments() if segment.tag == "weights")
        memory.write(address + offset, bytes([wrong]))
        return report

    monkeypatch.setattr(CuMemAllocator, "wake_up", damaging)
    code, report = run_json(capsys, "demo", str(model), *KV)
    memory.close()
    assert (code, report["ok"]) == (1, False)
    assert report["steps"][-1]["name"] == "wake"  # what follows is not tried
    name, index = ("complex", 71) if last else ("norm", 0)
    assert f"byte {index} of {name} is" in report["steps"][-1]["result"]


@pytest.mark.parametrize(
    ("error", "code"), [(BackupMismatch("segment weights", "0", "1"), 1), (InvalidState("not\nnow"), 2)]
)
def test_errors_of_the_layer_are_one_line(
    error: Exception, code: int, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(CuMemAllocator, "wake_up", refuse)
    assert cli.main(["demo", str(model), *KV]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("cumem-sleep [simulated]: " if SIMULATED else "cumem-sleep: ")


def test_interrupt_is_130(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CuMemAllocator, "sleep", interrupt)
    assert cli.main(["demo", str(model), *KV]) == 130
    assert "interrupted" in capsys.readouterr().err
    code, report = run_json(capsys, "demo", str(model), *KV)
    assert (code, report["command"], report["ok"], report["error"]) == (130, "demo", False, "interrupted")


@pytest.mark.parametrize("what", ["the work", "JSON"])
def test_full_disk_as_json(
    what: str, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, "_write_no_more", lambda: None)
    monkeypatch.setattr(*((CuMemAllocator, "sleep") if what == "the work" else (json, "dumps")), full)
    assert cli.main(["demo", str(model), *KV, "--json"]) == 2
    output = capsys.readouterr()
    assert "No space left on device" in output.err
    if what == "the work":
        assert json.loads(output.out)["error"] == "[Errno 28] No space left on device"
    else:
        assert output.out == ""


def test_a_misspelt_variable_is_named_by_a_command_without_an_allocator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(misspelt, "_warned_of", set())
    monkeypatch.setenv("CUMEM_SLEEP_VERIFI", "1")
    assert cli.main(["shim", "torch_memory_saver"]) == 0
    assert "did you mean CUMEM_SLEEP_VERIFY?" in caplog.text


@pytest.mark.sim
@pytest.mark.parametrize("imported", ["argparse", "numpy"])
def test_interrupt_while_modules_are_imported(imported: str, tmp_path: pathlib.Path) -> None:
    """Half a second in which no line of the command has run yet."""
    (tmp_path / f"{imported}.py").write_text("raise KeyboardInterrupt")
    package = pathlib.Path(cumem_sleep.__path__[0]).parent
    command = "import sys; from cumem_sleep.__main__ import main; sys.exit(main())"  # as the installed script
    for start in (["-c", command], ["-m", "cumem_sleep"]):
        process = subprocess.run(
            [sys.executable, *start, "doctor"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(package)])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (process.returncode, process.stderr) == (130, "cumem-sleep: interrupted\n")


def test_no_such_device(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", str(model), "--device", "77"]) == 2
    assert "--device 77" in capsys.readouterr().err


def test_bad_setting(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_VERIFY", "perhaps")
    assert cli.main(["demo", str(model)]) == 2
    assert "CUMEM_SLEEP_VERIFY='perhaps'" in capsys.readouterr().err


# Which driver


def libcuda_is_installed() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.skipif(libcuda_is_installed(), reason="this machine has a CUDA driver")
def test_without_a_driver_it_says_so_and_simulates(model: pathlib.Path) -> None:
    process = as_module("demo", str(model), *KV, "--json")
    assert process.returncode == 0
    assert json.loads(process.stdout)["simulated"] is True
    assert process.stderr.count("\n") == 1
    assert "no GPU driver was found: running on the simulated driver" in process.stderr


@pytest.mark.sim
@pytest.mark.parametrize(
    ("error", "simulates"),
    [("CUDA_ERROR_NO_DEVICE", True), ("CUDA_ERROR_STUB_LIBRARY", True), ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", False)],
)
def test_only_a_missing_gpu_is_simulated(error: str, simulates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    open_driver: Callable[[str], None] = _core.open_driver

    def no_libcuda(path: str) -> None:
        if path == "libcuda.so.1":
            raise DriverError("cuInit", error)
        open_driver(path)

    monkeypatch.setattr(_core, "open_driver", no_libcuda)
    if simulates:
        allocator, reason = simulated.open_allocator({})
        assert allocator.settings.driver == "sim"
        assert error in reason
    else:
        with pytest.raises(DriverError, match=error):
            simulated.open_allocator({})


@pytest.mark.sim
def test_simulated_device_is_made_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def configure(device_bytes: int) -> None:
        sizes.append(device_bytes)

    monkeypatch.setattr(simulated.sim, "configure", configure)
    monkeypatch.setattr(simulated.host_facts, "mem_available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(simulated.host_facts, "cgroup_available_bytes", lambda **_: None)
    weights = [layout.SegmentLayout(nbytes=3 << 30)]
    simulated.make_room({}, weights, 4 * MIB)
    simulated.make_room({}, [], 4 * MIB)
    simulated.make_room({"CUMEM_SLEEP_SIM_DEVICE_BYTES": "1"}, weights, 4 * MIB)  # the user's own wish stands
    assert sizes == [(3 << 30) + 4 * MIB, 1 << 30]
    monkeypatch.setattr(simulated.host_facts, "cgroup_available_bytes", lambda **_: 5 << 30)
    with pytest.raises(InvalidState, match=r"needed 6.25 GiB, available 5.00 GiB \(limit: cgroup\)"):
        simulated.make_room({}, weights, 4 * MIB)
