"""The driver and the GPUs: whether they are there, can sleep, and reach host memory quickly."""

from __future__ import annotations

import re

from ... import _core
from ...core.driver import open_driver
from ...errors import CumemSleepError, DriverError, OutOfDeviceMemory, counted, format_bytes
from ...settings import PREFIX, Settings
from ..layout import PAGE_BYTES
from ..machine import Machine
from .report import Check, CheckStatus

OLDEST_CUDA = "12.0"
"""As in csrc/driver.cpp, which refuses older drivers."""

_PCIE_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6, "128.0": 7}


def driver(machine: Machine) -> Check:
    """Whether there is a driver that is new enough, and which."""
    name = "driver"
    variable = f"{PREFIX}DRIVER"
    try:
        wanted = Settings.from_environment({variable: machine.environment.get(variable, "")}).driver
        open_driver(wanted)
    except DriverError as error:
        found = "libcuda.so.1 was not found" if error.call == "dlopen" else str(error)
        return Check(name, CheckStatus.FAIL, found, _driver_advice(machine, error))
    except CumemSleepError as error:
        return Check(name, CheckStatus.FAIL, str(error))
    version = _core.driver_version()
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if _core.driver_is_simulated():
        return Check(name, CheckStatus.OK, f"simulated: no GPU is used ({cuda} is imitated)")
    version_of_module = machine.nvidia_driver()
    kernel_module = f", NVIDIA driver {version_of_module}" if version_of_module else ""
    return Check(name, CheckStatus.OK, f"{cuda}{kernel_module}; {OLDEST_CUDA} or newer is needed")


def _driver_advice(machine: Machine, error: DriverError) -> str:
    if error.call == "dlopen":
        if (machine.root / "proc/driver/nvidia/version").exists():
            return (
                "the kernel has the NVIDIA driver, this container lacks its libraries: start it with --gpus all"
                " (and NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            )
        return f"install the NVIDIA driver (CUDA {OLDEST_CUDA} or newer), or try {PREFIX}DRIVER=sim, which needs no GPU"
    if "CUDA_VISIBLE_DEVICES" in machine.environment:
        return f"CUDA_VISIBLE_DEVICES is {machine.environment['CUDA_VISIBLE_DEVICES']!r}: does it hide every GPU?"
    return f"see what nvidia-smi says; the driver must support CUDA {OLDEST_CUDA} or newer"


def devices(checks: list[Check]) -> range:
    """All devices; if there are none, a check is appended that says why."""
    if not _core.driver_is_open():
        checks.append(Check("GPUs", CheckStatus.WARN, "could not be checked: no driver is open"))
        return range(0)
    try:
        count = _core.device_count()
    except CumemSleepError as error:
        checks.append(Check("GPUs", CheckStatus.FAIL, str(error)))
        return range(0)
    if count == 0:
        checks.append(Check("GPUs", CheckStatus.FAIL, "none", "does CUDA_VISIBLE_DEVICES hide them?"))
    return range(count)


def gpu_device(device: int) -> Check:
    """What GPU it is, and whether it supports virtual memory management."""
    name = f"GPU {device}"
    info = _core.device_info(device)
    found = (
        f"{info.name}, {format_bytes(info.total_bytes)}, compute capability"
        f" {info.capability_major}.{info.capability_minor}"
    )
    if not info.virtual_memory:
        return Check(name, CheckStatus.FAIL, f"{found}, no virtual memory management", "this GPU cannot sleep")
    found += ", virtual memory management"
    if " MIG " in info.name:
        return Check(
            name, CheckStatus.WARN, found, "an instance of a GPU (MIG) is untested: try cumem-sleep bench on it"
        )
    if info.integrated:
        advice = (
            "its memory is the host's, which is untested: level 1 frees the KV cache alone, level 2 the weights, too"
        )
        return Check(name, CheckStatus.WARN, found, advice)
    return Check(name, CheckStatus.OK, found)


def gpu_handles(device: int) -> Check:
    """Whether memory of this device can be shared by file descriptor or fabric, or reached by RDMA; tried out."""
    name = f"GPU {device} handles"
    try:
        _core.free(_core.Allocation(PAGE_BYTES, "doctor", device).handed_out)
    except OutOfDeviceMemory as error:
        advice = "free some of its memory, or put another process to sleep"
        return Check(name, CheckStatus.WARN, f"could not be checked, the GPU is full: {error}", advice)
    except DriverError as error:
        return Check(name, CheckStatus.FAIL, f"2 MiB could not be allocated: {error}", "see what nvidia-smi says")
    info = _core.device_info(device)
    granted = {"POSIX fd": info.posix_fd, "fabric": info.fabric, "GPUDirect RDMA": info.gpu_direct_rdma}
    found = "allocated and freed 2 MiB; " + ", ".join(
        f"{what}: {'yes' if has else 'no'}" for what, has in granted.items()
    )
    if not info.posix_fd:
        advice = "memory cannot be shared with other processes by file descriptor; sleep still works"
        return Check(name, CheckStatus.WARN, found, advice)
    return Check(name, CheckStatus.OK, found)


def gpu_link(machine: Machine, device: int) -> Check:
    """How fast the PCIe link runs, and how fast it could run."""
    name = f"GPU {device} PCIe"
    if _core.driver_is_simulated():
        return Check(name, CheckStatus.OK, "simulated: there is no link")
    return pcie_link(machine, name, _core.device_info(device).pci_bus_id)


def pcie_link(machine: Machine, name: str, pci_bus_id: str) -> Check:
    """As `gpu_link`, for any PCI device."""
    directory = f"sys/bus/pci/devices/{pci_bus_id.lower()}"
    speed, most_speed, width, most_width = (
        machine.read(f"{directory}/{which}_link_{what}") for what in ("speed", "width") for which in ("current", "max")
    )
    now, most = f"{_generation(speed)} x{width}", f"{_generation(most_speed)} x{most_width}"
    if now == most:
        return Check(name, CheckStatus.OK, now)
    found = f"{now} now, {most} at most"
    if _number(width) < _number(most_width):
        advice = "the link is narrower than the GPU allows: check how the card is seated, its slot and its riser"
        return Check(name, CheckStatus.WARN, found, f"{advice}; sleep and wake are slower in proportion")
    if _number(speed) < _number(most_speed):
        advice = "idle GPUs slow their link down: check again while it copies (run the demo meanwhile)"
        return Check(
            name, CheckStatus.WARN, found, f"{advice}; if it stays slow, check the slot and the firmware settings"
        )
    return Check(name, CheckStatus.OK, found)


def _generation(speed: str) -> str:
    generation = _PCIE_GENERATIONS.get(f"{_number(speed):.1f}")
    return f"PCIe {generation}" if generation else speed


def _number(text: str) -> float:
    found = re.match(r"\d+(?:\.\d+)?", text)
    return float(found[0]) if found else 0.0


def gpu_numa(machine: Machine, device: int) -> Check:
    """Which host memory and cores are close to the device."""
    return numa(machine, f"GPU {device} NUMA", _core.device_info(device).numa_node)


def numa(machine: Machine, name: str, node: int) -> Check:
    """As `gpu_numa`, for the number of a node (-1: not known)."""
    nodes = len(list((machine.root / "sys/devices/system/node").glob("node[0-9]*")))
    if node < 0:
        if nodes > 1:
            advice = "backups may be on the far, slower node: neither machine nor hypervisor reports the GPU's node"
            return Check(name, CheckStatus.WARN, f"node not known, the host has {nodes}", advice)
        return Check(
            name, CheckStatus.OK, f"node not known; the host has {counted(nodes, 'node') if nodes else 'no nodes'}"
        )
    found = f"node {node} of {nodes}"
    near = machine.cores_in(f"sys/devices/system/node/node{node}/cpulist")
    if nodes > 1 and not near & machine.affinity:
        advice = (
            f"let the process run on the cores of node {node} (numactl --cpunodebind={node}), to prefault pages there"
        )
        return Check(name, CheckStatus.WARN, f"{found}; this process may run on none of its cores", advice)
    return Check(name, CheckStatus.OK, found)
