"""How much memory GPUs have free, asked without a CUDA context, which would take some of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .. import _core, sim


def free_bytes(pid: int, uuids: Sequence[str]) -> dict[str, int]:
    """Of each of these GPUs.

    Args:
        pid: the process whose simulated GPUs are meant, where the driver is simulated.

    Raises:
        OSError: nothing on this host can tell.
    """
    if _core.driver_is_simulated():
        memory = {uuid: sim.process_memory(pid, uuid) for uuid in uuids}
        return {uuid: total - used for uuid, (used, total) in memory.items()}
    return {uuid: _ask("nvmlDeviceGetMemoryInfo", uuid).free for uuid in uuids}


def used_bytes(pid: int, uuids: Sequence[str]) -> dict[str, int]:
    """By this process, on those of these GPUs for which that is counted.

    In a container with process numbers of its own it is not counted, because NVML uses those of the host; this number
    may even be another process's.
    """
    if _core.driver_is_simulated():
        return {uuid: sim.process_memory(pid, uuid)[0] for uuid in uuids}
    found = {}
    for uuid in uuids:
        with suppress(OSError):
            running = _ask("nvmlDeviceGetComputeRunningProcesses", uuid)
            if mine := [each.usedGpuMemory for each in running if each.pid == pid and each.usedGpuMemory]:
                found[uuid] = sum(mine)
    return found


def _ask(question: str, uuid: str) -> Any:
    """What NVML answers of a GPU.

    Raises:
        OSError: nothing, or it is not there.
    """
    try:
        import pynvml
    except ImportError as error:
        raise OSError(f"NVML: {error}: pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
        return getattr(pynvml, question)(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error
