"""What a helper knows of a GPU's memory: by NVML, here a stub of it, and what a restore is taken to need."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cumem_sleep import _core
from cumem_sleep.checkpoint import device_memory
from cumem_sleep.checkpoint.helper import _CONTEXT_BYTES, _UNCOUNTED_BYTES, _needed_bytes

PID = 1234
MIB = 1 << 20
UNCOUNTED, CONTEXT = _UNCOUNTED_BYTES // MIB, _CONTEXT_BYTES // MIB


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A real driver's GPUs; `running` is what runs on each."""

    class NVMLError(Exception):
        pass

    stub = SimpleNamespace(
        NVMLError=NVMLError,
        running={"GPU-a": [], "GPU-b": []},
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(free=5 * MIB),
    )

    def running(uuid: str) -> list[SimpleNamespace]:
        found = stub.running[uuid]
        if isinstance(found, str):
            raise NVMLError(found)
        return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in found]

    stub.nvmlDeviceGetComputeRunningProcesses = running
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    monkeypatch.setattr(_core, "driver_is_simulated", lambda: False)
    return stub


def test_a_process_is_told_from_others(nvml: SimpleNamespace) -> None:
    nvml.running["GPU-a"] = [(1, 7 * MIB), (PID, 522 * MIB), (2, None)]
    nvml.running["GPU-b"] = [(1, 7 * MIB)]
    assert device_memory.used_bytes(PID, ["GPU-a", "GPU-b"]) == {"GPU-a": 522 * MIB}


@pytest.mark.parametrize("running", [[(PID, None)], "Not Supported", []])
def test_what_is_not_counted_is_left_out(nvml: SimpleNamespace, running: object) -> None:
    nvml.running = {"GPU-a": running, "GPU-b": [(PID, MIB)]}
    assert device_memory.used_bytes(PID, ["GPU-a", "GPU-b"]) == {"GPU-b": MIB}


def test_what_is_free_has_to_be_known(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_memory.free_bytes(PID, ["GPU-a"]) == {"GPU-a": 5 * MIB}

    def fails(_: str) -> object:
        raise nvml.NVMLError("Unknown Error")

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", fails)
    with pytest.raises(OSError, match="NVML: Unknown Error"):
        device_memory.free_bytes(PID, ["GPU-a"])


@pytest.mark.parametrize(
    ("grown", "counted", "in_use", "needed"),
    [
        (531, 522, True, 522 + UNCOUNTED),  # as measured: not all is counted as the process's own
        (40_000, 522, True, 40_004),  # another process gave memory back, or most of it is not counted
        (300, 522, True, 522 + UNCOUNTED),  # another process took some meanwhile
        (-40_000, 522, True, 522 + UNCOUNTED),
        (531, 0, True, CONTEXT),  # nobody counts, and perhaps another process took some
        (-40_000, 0, True, CONTEXT),
        (1_500, 0, True, 1_504),
        (-40_000, 0, False, -4),  # another process's business
        (0, 0, False, 4),
    ],
)
@pytest.mark.usefixtures("nvml")
def test_what_a_restore_is_taken_to_need_errs_on_the_high_side(
    grown: int, counted: int, in_use: bool, needed: int
) -> None:
    assert _needed_bytes(grown * MIB, counted * MIB, in_use) == needed * MIB
