"""What the machine says of its memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from cumem_sleep.serve import hardware
from cumem_sleep.serve.hardware import Gpu

GIB = 1 << 30
TWO = "0, GPU-aa, NVIDIA H200, 143771, 512\n1, GPU-bb, NVIDIA H200, 143771, 1024\n"


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `nvidia-smi` says is written there."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat {tmp_path}/says\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path / "says"


def test_gpus_are_numbered_as_they_are_visible(says: Path) -> None:
    says.write_text(TWO)
    first, second = hardware.gpus(None)
    assert first == Gpu(0, "GPU-aa", "NVIDIA H200", 143771 << 20, 512 << 20)
    assert second.used_bytes == 1 << 30
    assert [(gpu.number, gpu.uuid) for gpu in hardware.gpus("1")] == [(0, "GPU-bb")]
    assert [(gpu.number, gpu.uuid) for gpu in hardware.gpus("GPU-bb, 0")] == [(0, "GPU-bb"), (1, "GPU-aa")]
    assert [(gpu.number, gpu.uuid) for gpu in hardware.gpus("7,1")] == [(1, "GPU-bb")]


@pytest.mark.parametrize("text", ["no devices were found", "0, GPU-aa, H200, [N/A], [N/A]"])
def test_without_an_answer_there_are_none(says: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says.write_text(text)
    assert hardware.gpus(None) == []
    monkeypatch.setenv("PATH", "/nonexistent")
    assert hardware.gpus(None) == []


@pytest.mark.parametrize(
    ("processes", "held"),
    [
        ({"GPU-a": [(7, 5), (8, 2), (9, 90)], "GPU-b": [(7, 1)]}, [7, 1]),
        ({"GPU-a": [(7, 5)], "GPU-b": [(9, 90)]}, [5, 0]),
        ({"GPU-a": [(9, 90)], "GPU-b": []}, None),  # in a container they may have other numbers
        ({"GPU-a": [(7, None)], "GPU-b": [(8, 1)]}, None),
        ({}, None),
    ],
)
def test_what_processes_hold_is_what_nvml_says(
    monkeypatch: pytest.MonkeyPatch, processes: dict[str, list[tuple[int, int | None]]], held: list[int] | None
) -> None:
    def handle(uuid: str) -> str:
        if uuid not in processes:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def running(uuid: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in processes[uuid]]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", running)
    if held is not None:
        assert hardware.held_bytes(["GPU-a", "GPU-b"], {7, 8}) == held
        return
    with pytest.raises(OSError, match="NVML"):
        hardware.held_bytes(["GPU-a", "GPU-b"], {7, 8})


def test_a_containers_limit_counts_without_its_page_cache(tmp_path: Path) -> None:
    assert hardware.host_available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {64 << 20} kB\n")
    assert hardware.host_available_bytes(tmp_path) == 64 * GIB
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    assert hardware.host_available_bytes(tmp_path) == 64 * GIB
    (folder / "memory.max").write_text(f"{32 * GIB}\n")
    (folder / "memory.current").write_text(f"{10 * GIB}\n")
    (folder / "memory.stat").write_text(f"anon {4 * GIB}\ninactive_file {6 * GIB}\n")
    assert hardware.host_available_bytes(tmp_path) == 28 * GIB
