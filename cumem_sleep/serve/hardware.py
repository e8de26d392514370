"""What the machine says of its memory. Asked without CUDA, whose context would take memory of the GPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from .. import host_facts

_ASK_WITHIN_S = 30.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        number: among those that this process may use, in the order of their addresses on the bus.
        uuid: by which the driver knows it.
    """

    number: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int


def gpus(visible: str | None) -> list[Gpu]:
    """All GPUs, or those that `CUDA_VISIBLE_DEVICES` names; none where nobody can say. Takes tenths of a second."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=index,uuid,name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_ASK_WITHIN_S).stdout
        found = [_gpu(line.split(", ")) for line in answer.splitlines()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    if not visible:
        return found
    named = [next((gpu for gpu in found if _is_named(gpu, name.strip())), None) for name in visible.split(",")]
    return [replace(gpu, number=number) for number, gpu in enumerate(named) if gpu is not None]


def free_bytes(uuids: Sequence[str]) -> list[int]:
    """Of each of these GPUs, now, by NVML, which is quick enough to be asked in every wake.

    Raises:
        OSError: nobody can say.
    """
    return _by_nvml(uuids, lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).free))


def held_bytes(uuids: Sequence[str], pids: Collection[int]) -> list[int]:
    """Of each of these GPUs, what these processes hold, likewise.

    Raises:
        OSError: nobody can say, or NVML knows none of them: in a container they may have other numbers.
    """
    found = _by_nvml(
        uuids,
        lambda nvml, gpu: [
            each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(gpu) if each.pid in pids
        ],
    )
    if not any(found) or any(None in each for each in found):
        raise OSError("NVML does not say what these processes hold")
    return [sum(each) for each in found]


def _by_nvml(uuids: Sequence[str], ask: Callable[[Any, Any], _Answer]) -> list[_Answer]:
    try:
        import pynvml
    except ImportError as error:
        raise OSError(f"NVML: {error}: pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
        return [ask(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error


def _is_named(gpu: Gpu, name: str) -> bool:
    return str(gpu.number) == name or (name.startswith("GPU-") and gpu.uuid.startswith(name))


def _gpu(words: Sequence[str]) -> Gpu:
    number, uuid, name, total, used = words
    return Gpu(int(number), uuid, name, int(total) << 20, int(used) << 20)


def host_available_bytes(root: Path = Path("/")) -> int | None:
    """What the host can still give, or what the container's limit leaves if that is less."""
    found = [host_facts.mem_available_bytes(root), host_facts.cgroup_available_bytes(root)]
    return min((each for each in found if each is not None), default=None)
