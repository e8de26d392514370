"""Where figures were measured: without this they say nothing."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ... import __version__, _core
from ...backups import limits as host_limits
from ..doctor.examine import Machine

_VARIABLES = ("CUMEM_SLEEP_", "PYTORCH_")


@dataclass(frozen=True)
class MachineFacts:
    """The machine, the versions in use, and the command. None: not installed, or not known.

    Attributes:
        cuda_driver_api: as CUDA numbers it: 13000 is 13.0.
        cores: that this process may use.
        environment: what steers the layer and PyTorch.
    """

    gpu: str
    driver: str | None
    cuda_driver_api: int
    cores: int
    host_memory_bytes: int | None
    transparent_hugepage: str | None
    kernel: str
    python: str
    torch: str | None
    triton: str | None
    cumem_sleep: str
    simulated: bool
    environment: Mapping[str, str]
    command: str


def machine_facts(device: int, command: Sequence[str]) -> MachineFacts:
    """Of this machine, this device and this process."""
    machine = Machine()
    simulated = _core.driver_is_simulated()
    imported = getattr(sys.modules.get("torch"), "__version__", None)  # tells the build: 2.11.0+cu130
    return MachineFacts(
        gpu=_core.device_info(device).name,
        driver="simulated" if simulated else _nvidia_driver(machine),
        cuda_driver_api=_core.driver_version(),
        cores=host_limits.usable_cores(),
        host_memory_bytes=_host_memory_bytes(machine),
        transparent_hugepage=_read(machine, "sys/kernel/mm/transparent_hugepage/enabled") or None,
        kernel=platform.release(),
        python=platform.python_version(),
        torch=str(imported) if imported else machine.version_of("torch"),
        triton=machine.version_of("triton", "pytorch-triton"),
        cumem_sleep=__version__,
        simulated=simulated,
        environment={k: v for k, v in sorted(machine.environment.items()) if k.startswith(_VARIABLES)},
        command=shlex.join(command),
    )


def _nvidia_driver(machine: Machine) -> str | None:
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _read(machine, "proc/driver/nvidia/version"))
    return found[1] if found else None


def _host_memory_bytes(machine: Machine) -> int | None:
    found = re.search(r"^MemTotal:\s*(\d+) kB", _read(machine, "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _read(machine: Machine, path: str) -> str:
    try:
        return machine.read(path)
    except OSError:
        return ""
