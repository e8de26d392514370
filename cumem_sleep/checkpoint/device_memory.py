"""How much memory GPUs have free, asked without a CUDA context, which would take some of it."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _core, sim


def free_bytes(pid: int, uuids: Sequence[str]) -> dict[str, int]:
    """Of each of these GPUs.

    Args:
        pid: the process whose simulated GPUs are meant, where the driver is simulated.

    Raises:
        OSError: nothing on this host can tell.
    """
    if _core.driver_is_simulated():
        free = {}
        for uuid in uuids:
            used, total = sim.process_memory(pid, uuid)
            free[uuid] = total - used
        return free
    return _by_nvml(uuids)


def _by_nvml(uuids: Sequence[str]) -> dict[str, int]:
    if not uuids:
        return {}
    try:
        import pynvml
    except ImportError as error:
        raise OSError(f"NVML: {error}: pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
        return {uuid: pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).free for uuid in uuids}
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error
