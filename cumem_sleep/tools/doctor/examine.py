"""`cumem-sleep doctor`: is this machine ready for sleep mode, is it fast, and what to do where it is not.

Every check is a small function that looks at a `Machine` (a root directory, an environment, where packages are
installed) and answers with a `Check`. A check that cannot be made says why; none ends the examination.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.table import Table
from rich.text import Text

from ... import __version__, _core, variables
from ...allocator import open_driver
from ...backups import limits as host_limits
from ...errors import CumemSleepError, DriverError, OutOfDeviceMemory, format_bytes
from ...settings import PREFIX, Settings, parse_bool
from ...vllm import compatibility, plugin
from ...vllm.gate_settings import GateSettings

SIMULATED_NOTE = "Simulated driver: no GPU was looked at, and times measured with it mean nothing."

_LITTLE_HOST_BYTES = 4 << 30
_TRIAL_BYTES = 2 << 20
_FAST_CORES = 8
_OLDEST_TORCH = (2, 8)
_POOLS_IGNORE_EXPANDABLE_SEGMENTS = (2, 11)

_PCIE_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6, "128.0": 7}

_CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ADMIN_TOKEN = PREFIX + "ADMIN_TOKEN"
_CUPY_DISTRIBUTIONS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-nightly")


class Status(str, Enum):
    """What a check came to. `warn` costs speed or a feature; with `fail` the layer cannot work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """What one check found, and what to do if that is not as it should be."""

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Machine:
    """What is examined: by default the one that this process runs on.

    Attributes:
        root: where `/proc` and `/sys` are.
        environment: the variables that the layer would see.
        package_paths: where installed packages are looked for; None is `sys.path`.
        affinity: the cores that this process may run on.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    package_paths: Sequence[str] | None = None
    affinity: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))

    def read(self, path: str) -> str:
        """A file below the root, stripped; raises OSError."""
        return (self.root / path).read_text().strip()

    def version_of(self, *distributions: str) -> str | None:
        """The version of the first of these distributions that is installed. Imports nothing."""
        found = self.distribution(*distributions)
        return None if found is None else found.version

    def distribution(self, *names: str) -> metadata.Distribution | None:
        """The first of these distributions that is installed."""
        paths = list(sys.path if self.package_paths is None else self.package_paths)
        for name in names:
            for found in metadata.distributions(name=name, path=paths):
                return found
        return None


@dataclass(frozen=True)
class DoctorReport:
    """All checks, in order."""

    simulated: bool
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return self.error is None

    @property
    def error(self) -> str | None:
        """Which checks failed."""
        failed = [check.name for check in self.checks if check.status is Status.FAIL]
        return f"failed: {', '.join(failed)}" if failed else None

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **({"note": SIMULATED_NOTE} if self.simulated else {}),
            "checks": [{**asdict(check), "status": check.status.value} for check in self.checks],
        }

    def table(self) -> Table:
        """A row for each check."""
        title = f"cumem-sleep {__version__} doctor" + (" (simulated driver)" if self.simulated else "")
        table = Table(title=title, header_style="bold", box=ROUNDED)
        table.add_column("check", no_wrap=True)
        table.add_column("status", no_wrap=True)
        table.add_column("found, and what to do", ratio=1)
        styles = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
        for check in self.checks:
            style = styles[check.status]
            text = Text(check.found)
            if check.advice:
                text.append(f"\n→ {check.advice}", style=style)
            table.add_row(Text(check.name), Text(check.status.value, style=style), text)
        return table

    def conclusion(self) -> str:
        """One line."""
        counts = {status: sum(check.status is status for check in self.checks) for status in Status}
        return f"{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed"


def examine(machine: Machine, progress: Callable[[str], None] = lambda name: None) -> DoctorReport:
    """Make all checks. Opens the driver that the environment asks for; takes 2 MiB of each device for a moment."""
    checks: list[Check] = []

    def make(name: str, *looks: Callable[[], Check]) -> None:
        progress(name)
        for look in looks:
            checks.append(_guarded(name, look))

    make("settings", lambda: settings(machine))
    make("driver", lambda: driver(machine))
    for device in _devices(checks):
        gpu = f"GPU {device}"
        make(gpu, lambda: gpu_device(device))  # noqa: B023  (called at once)
        make(f"{gpu} handles", lambda: gpu_handles(device))  # noqa: B023
        make(f"{gpu} PCIe", lambda: gpu_link(machine, device))  # noqa: B023
        make(f"{gpu} NUMA", lambda: gpu_numa(machine, device))  # noqa: B023
    for name, look in _HOST_CHECKS.items():
        make(name, lambda: look(machine))  # noqa: B023
    return DoctorReport(_core.driver_is_simulated(), tuple(checks))


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Check(name, Status.WARN, f"could not be checked: {where}{error.strerror or error}")
    except Exception as error:  # whatever one check meets, the others go on
        return Check(name, Status.WARN, f"could not be checked: {type(error).__name__}: {error}")


# The driver and the GPUs


def driver(machine: Machine) -> Check:
    """Is there a driver, which one, and is it new enough."""
    name = "driver"
    variable = f"{PREFIX}DRIVER"
    try:
        wanted = Settings.from_environment({variable: machine.environment.get(variable, "")}).driver
        open_driver(wanted)
    except DriverError as error:
        found = "libcuda.so.1 was not found" if error.call == "dlopen" else str(error)
        return Check(name, Status.FAIL, found, _driver_advice(machine, error))
    except CumemSleepError as error:
        return Check(name, Status.FAIL, str(error))
    version = _core.driver_version()
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if _core.driver_is_simulated():
        return Check(name, Status.OK, f"simulated: no GPU is used ({cuda} is imitated)")
    return Check(name, Status.OK, f"{cuda}{_kernel_driver(machine)}; 12.0 or newer is needed")


def _driver_advice(machine: Machine, error: DriverError) -> str:
    if error.call == "dlopen":
        if (machine.root / "proc/driver/nvidia/version").exists():
            return (
                "the kernel has the NVIDIA driver, this container lacks its libraries: start it with --gpus all"
                " (and NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            )
        return f"install the NVIDIA driver (CUDA 12.0 or newer), or try {PREFIX}DRIVER=sim, which needs no GPU"
    if "CUDA_VISIBLE_DEVICES" in machine.environment:
        return f"CUDA_VISIBLE_DEVICES is {machine.environment['CUDA_VISIBLE_DEVICES']!r}: does it hide every GPU?"
    return "see what nvidia-smi says; the driver must support CUDA 12.0 or newer"


def _kernel_driver(machine: Machine) -> str:
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", machine.read("proc/driver/nvidia/version"))
    except OSError:
        found = None
    return f", NVIDIA driver {found[1]}" if found else ""


def _devices(checks: list[Check]) -> range:
    """Every device, or none and a check that says why."""
    if not _core.driver_is_open():
        checks.append(Check("GPUs", Status.WARN, "could not be checked: no driver is open"))
        return range(0)
    try:
        count = _core.device_count()
    except CumemSleepError as error:
        checks.append(Check("GPUs", Status.FAIL, str(error)))
        return range(0)
    if count == 0:
        checks.append(Check("GPUs", Status.FAIL, "none", "is CUDA_VISIBLE_DEVICES set so that it hides them?"))
    return range(count)


def gpu_device(device: int) -> Check:
    """What it is, and whether it has virtual memory management."""
    name = f"GPU {device}"
    info = _core.device_info(device)
    found = (
        f"{info.name}, {format_bytes(info.total_bytes)}, compute capability"
        f" {info.capability_major}.{info.capability_minor}"
    )
    if not info.virtual_memory:
        return Check(name, Status.FAIL, f"{found}, no virtual memory management", "this GPU cannot sleep")
    return Check(name, Status.OK, f"{found}, virtual memory management")


def gpu_handles(device: int) -> Check:
    """What memory of this device can be: shared by file descriptor or fabric, reached by RDMA. Found by trying."""
    name = f"GPU {device} handles"
    try:
        _core.free(_core.Allocation(_TRIAL_BYTES, "doctor", device).handed_out)
    except OutOfDeviceMemory as error:
        advice = "free some of its memory, or let another process sleep"
        return Check(name, Status.WARN, f"could not be checked, the GPU is full: {error}", advice)
    except DriverError as error:
        return Check(name, Status.FAIL, f"2 MiB could not be allocated: {error}", "see what nvidia-smi says")
    info = _core.device_info(device)
    granted = {"POSIX fd": info.posix_fd, "fabric": info.fabric, "GPUDirect RDMA": info.gpu_direct_rdma}
    found = "allocated and freed 2 MiB; " + ", ".join(
        f"{what}: {'yes' if has else 'no'}" for what, has in granted.items()
    )
    if not info.posix_fd:
        advice = "memory cannot be shared with other processes by file descriptor; sleeping works all the same"
        return Check(name, Status.WARN, found, advice)
    return Check(name, Status.OK, found)


def gpu_link(machine: Machine, device: int) -> Check:
    """How fast the PCIe link runs, and how fast it could."""
    name = f"GPU {device} PCIe"
    if _core.driver_is_simulated():
        return Check(name, Status.OK, "simulated: there is no link")
    return pcie_link(machine, name, _core.device_info(device).pci_bus_id)


def pcie_link(machine: Machine, name: str, pci_bus_id: str) -> Check:
    """As `gpu_link`, for any PCI device."""
    directory = f"sys/bus/pci/devices/{pci_bus_id.lower()}"
    speed, most_speed, width, most_width = (
        machine.read(f"{directory}/{which}_link_{what}") for what in ("speed", "width") for which in ("current", "max")
    )
    now, most = f"{_generation(speed)} x{width}", f"{_generation(most_speed)} x{most_width}"
    if now == most:
        return Check(name, Status.OK, now)
    found = f"{now} now, {most} at most"
    if _number(width) < _number(most_width):
        advice = "the link is narrower than the GPU allows: see how it is seated, its slot and its riser"
        return Check(name, Status.WARN, found, f"{advice}; sleep and wake are slower by as much")
    if _number(speed) < _number(most_speed):
        advice = "idle GPUs slow their link down: look again while one copies (nvidia-smi -q -d PERFORMANCE, or a demo)"
        return Check(name, Status.WARN, found, f"{advice}; if it stays, see the slot and the firmware's settings")
    return Check(name, Status.OK, found)


def _generation(speed: str) -> str:
    generation = _PCIE_GENERATIONS.get(f"{_number(speed):.1f}")
    return f"PCIe {generation}" if generation else speed


def _number(text: str) -> float:
    found = re.match(r"\d+(?:\.\d+)?", text)
    return float(found[0]) if found else 0.0


def gpu_numa(machine: Machine, device: int) -> Check:
    """Which host memory and cores are near to the device."""
    return numa(machine, f"GPU {device} NUMA", _core.device_info(device).numa_node)


def numa(machine: Machine, name: str, node: int) -> Check:
    """As `gpu_numa`, for a node's number (-1: not known)."""
    nodes = len(list((machine.root / "sys/devices/system/node").glob("node[0-9]*")))
    if node < 0:
        if nodes > 1:
            advice = "backups may lie on the far node, which is slower: the machine, or its hypervisor, does not tell"
            return Check(name, Status.WARN, f"node not known, the host has {nodes}", advice)
        return Check(name, Status.OK, f"node not known; the host has {nodes or 'no'} node{'' if nodes == 1 else 's'}")
    found = f"node {node} of {nodes}"
    near = _core_list(machine.read(f"sys/devices/system/node/node{node}/cpulist"))
    if nodes > 1 and not near & machine.affinity:
        advice = (
            f"let the process run on the cores of node {node} (numactl --cpunodebind={node}): pages are touched there"
        )
        return Check(name, Status.WARN, f"{found}; this process may use none of its cores", advice)
    return Check(name, Status.OK, found)


# The host


def memlock(machine: Machine) -> Check:
    """For information: the NVIDIA driver pins memory without asking it."""
    limit = host_limits.memlock_limit_bytes()
    found = "unlimited" if limit is None else format_bytes(limit)
    return Check("memlock limit", Status.OK, f"{found} (the NVIDIA driver does not enforce it: measured, 580)")


def cgroup_memory(machine: Machine) -> Check:
    """What the tightest control group leaves for backups."""
    name = "cgroup memory"
    left = host_limits.cgroup_available_bytes(machine.root)
    if left is None:
        return Check(name, Status.OK, "no limit")
    limit = host_limits.cgroup_limit_bytes(machine.root) or left
    return _host_memory(name, left, f"{format_bytes(left)} left of {format_bytes(limit)}")


def available_memory(machine: Machine) -> Check:
    """What the kernel says can be taken without swapping."""
    name = "MemAvailable"
    available = host_limits.mem_available_bytes(machine.root)
    if available is None:
        return Check(name, Status.WARN, f"could not be checked: {machine.root / 'proc/meminfo'} does not tell")
    return _host_memory(name, available, format_bytes(available))


def _host_memory(name: str, available_bytes: int, found: str) -> Check:
    if available_bytes < _LITTLE_HOST_BYTES:
        advice = "level 1 keeps the weights in host memory: make room for them, or sleep at level 2"
        return Check(name, Status.WARN, found, advice)
    return Check(name, Status.OK, f"{found} for backups of weights (level 1)")


def huge_pages(machine: Machine) -> Check:
    """May host memory come in huge pages."""
    name = "huge pages"
    modes = machine.read("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", modes)
    if chosen is None:
        return Check(name, Status.WARN, f"could not be checked: the kernel says {modes!r}")
    if chosen[1] == "never":
        advice = "the first sleep is several times slower: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Check(name, Status.WARN, "transparent huge pages: never", advice)
    return Check(name, Status.OK, f"transparent huge pages: {chosen[1]}")


def cores(machine: Machine) -> Check:
    """Enough threads to touch new host memory ahead of the copies."""
    usable = host_limits.usable_cores(machine.root)
    if usable >= _FAST_CORES:
        return Check("cores", Status.OK, f"{usable} usable")
    advice = (
        f"{_FAST_CORES} or more make the first sleep fast (measured on an H200 host: 39.5 GiB/s with 8 threads,"
        " 26 with 4, 15 with 2); later sleeps do not need them"
    )
    return Check("cores", Status.WARN, f"{usable} usable", advice)


def affinity(machine: Machine) -> Check:
    """Which cores this process may run on."""
    online = _core_list(machine.read("sys/devices/system/cpu/online"))
    mine = machine.affinity
    if mine >= online:
        return Check("CPU affinity", Status.OK, f"all {len(online)} cores")
    return Check("CPU affinity", Status.OK, f"{len(mine)} of {len(online)} cores: {_as_core_list(mine)}")


def _core_list(text: str) -> frozenset[int]:
    """`0-3,8` as the kernel writes it."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _as_core_list(numbers: frozenset[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


# Packages and settings


def torch(machine: Machine) -> Check:
    """PyTorch: there, new enough, built for CUDA. It is not imported."""
    name = "PyTorch"
    found = machine.distribution("torch")
    if found is None:
        advice = "pip install torch: without it, only malloc and CuPy use this layer, and digests take the CPU"
        return Check(name, Status.WARN, "not installed", advice)
    cuda = _torch_cuda(found)
    text = found.version if cuda is None else f"{found.version}, {f'built for CUDA {cuda}' if cuda else 'without CUDA'}"
    if cuda == "":
        return Check(name, Status.WARN, text, "install a build of PyTorch for CUDA (pytorch.org/get-started)")
    if _version(found.version) < _OLDEST_TORCH:
        return Check(name, Status.WARN, text, "2.8 or newer is wanted: pip install --upgrade torch")
    return Check(name, Status.OK, text)


def _torch_cuda(torch_distribution: metadata.Distribution) -> str | None:
    """The CUDA version that PyTorch was built for; "" if for none, None if it does not tell."""
    try:
        text = Path(str(torch_distribution.locate_file("torch/version.py"))).read_text()
    except OSError:
        text = ""
    built_for = re.search(r"^cuda\b[^=\n]*=\s*(None|['\"]([\d.]+)['\"])", text, re.MULTILINE)
    if built_for:
        return built_for[2] or ""
    return "" if "+cpu" in torch_distribution.version else None


def triton(machine: Machine) -> Check:
    """Triton, which the kernels are written in."""
    version = machine.version_of(*_TRITON_DISTRIBUTIONS)
    if version is None:
        advice = "pip install triton: without it digests are computed on the CPU, at about 1 GB/s"
        return Check("Triton", Status.WARN, "not installed", advice)
    return Check("Triton", Status.OK, version)


def compression(machine: Machine) -> Check:
    """Whether backups are to be compressed, and whether that can be."""
    name = "compression"
    variable = f"{PREFIX}COMPRESS"
    settings = Settings.from_environment(machine.environment)
    if settings.compress == "off":
        return Check(name, Status.OK, f"off ({variable}=auto makes backups of bf16 weights about a third smaller)")
    if settings.driver == "sim":
        return Check(name, Status.OK, "auto, simulated: by the reference on the CPU")
    missing = [
        package
        for package, names in (("PyTorch", ("torch",)), ("Triton", _TRITON_DISTRIBUTIONS))
        if machine.version_of(*names) is None
    ]
    if missing:
        found = f"auto, but {' and '.join(missing)} not installed: backups are stored uncompressed"
        return Check(name, Status.WARN, found, f"pip install torch triton, or unset {variable}")
    if (found_torch := machine.distribution("torch")) is not None and _torch_cuda(found_torch) == "":
        found = f"auto, but PyTorch {found_torch.version} is built without CUDA: backups are stored uncompressed"
        return Check(name, Status.WARN, found, f"install a build of PyTorch for CUDA, or unset {variable}")
    return Check(name, Status.OK, "auto: bf16 weights take about 0.67 of their bytes, fp8 ones 0.83")


def vllm(machine: Machine) -> Check:
    """The server that this layer plugs into: a version that the plugin serves, and the plugin not switched off."""
    name = "vLLM"
    version = machine.version_of("vllm")
    if version is None:
        return Check(name, Status.OK, "not installed (optional)")
    own = f"{version}, which keeps its own sleep mode"
    misfit = compatibility.version_misfit(version)
    if misfit and not _is_on(machine, compatibility.UNTESTED):
        return Check(
            name, Status.WARN, f"{own}: {misfit}", f"install a known version, or try with {compatibility.UNTESTED}=1"
        )
    if _is_on(machine, plugin.DISABLE):
        return Check(name, Status.OK, f"{own}: {plugin.DISABLE}={machine.environment[plugin.DISABLE]}")
    plugins = machine.environment.get("VLLM_PLUGINS")
    if plugins is not None and not set(plugin.ENTRY_POINTS) & set(plugins.split(",")):
        found = f"{own}: VLLM_PLUGINS={plugins}"
        if plugin.NAME in re.sub(r"[-.\s]+", "_", plugins.strip().lower()):
            return Check(
                name, Status.WARN, found, f"vLLM compares letter by letter: write {plugin.NAME}, without spaces"
            )
        return Check(name, Status.OK, found)
    if misfit:
        return Check(name, Status.WARN, f"{version}, with sleep mode in this layer if it fits: {misfit}", "test it")
    return Check(name, Status.OK, f"{version}, with sleep mode in this layer")


def _is_on(machine: Machine, variable: str) -> bool:
    """A bad value is the check of the settings' to tell."""
    try:
        return parse_bool(variable, machine.environment.get(variable, "").strip() or "0")
    except CumemSleepError:
        return False


def cupy(machine: Machine) -> Check:
    """CuPy, whose arrays can sleep too."""
    version = machine.version_of(*_CUPY_DISTRIBUTIONS)
    return Check("CuPy", Status.OK, "not installed (optional)" if version is None else version)


def expandable_segments(machine: Machine) -> Check:
    """Whether PyTorch is told to use expandable segments, and what becomes of that."""
    name = "PyTorch allocator"
    told = {name: machine.environment[name] for name in _CONF_VARIABLES if machine.environment.get(name)}
    if not told:
        return Check(name, Status.OK, "default configuration")
    found = ", ".join(f"{variable}={text}" for variable, text in told.items())
    if not any(re.search(r"expandable_segments\s*:\s*true", text, re.IGNORECASE) for text in told.values()):
        return Check(name, Status.OK, found)
    version = machine.version_of("torch")
    if version is not None and _version(version) >= _POOLS_IGNORE_EXPANDABLE_SEGMENTS:
        return Check(name, Status.OK, f"{found}; memory that can sleep does not use them")
    return Check(name, Status.OK, f"{found}; switched off for as long as a pool of this layer is entered")


def settings(machine: Machine) -> Check:
    """Which settings are in force, and variables that look like settings and are none."""
    name = "settings"
    given = {variable: text for variable, text in machine.environment.items() if variable.startswith(PREFIX)}
    documented = [PREFIX + setting.name.upper() for setting in (*fields(Settings), *fields(GateSettings))]
    shown = {**given, **({_ADMIN_TOKEN: "…"} if given.get(_ADMIN_TOKEN) else {})}
    in_force = [
        f"{variable}={text}" for variable, text in sorted(shown.items()) if variable in documented and text.strip()
    ]
    in_force += [f"{variable}={given[variable]}" for variable in variables.OTHERS if variable in given]
    found = ", ".join(in_force) or "all at their defaults"
    try:
        Settings.from_environment(given)
        GateSettings.from_environment(given)
        plugin.check_variables(given)
    except CumemSleepError as error:
        return Check(name, Status.FAIL, str(error), "correct the variable, or unset it")
    if misspelt := variables.misspelt(given):
        advice = "; ".join(
            f"misspelt? {variable} may be {nearest}" if nearest else f"unset {variable}"
            for variable, nearest in misspelt.items()
        )
        return Check(name, Status.WARN, f"{found}; nothing reads {', '.join(misspelt)}", advice)
    return Check(name, Status.OK, found)


def _version(text: str) -> tuple[int, ...]:
    """Major and minor; "2.11.0a0+git" is (2, 11)."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


_HOST_CHECKS: Mapping[str, Callable[[Machine], Check]] = {
    "MemAvailable": available_memory,
    "cgroup memory": cgroup_memory,
    "memlock limit": memlock,
    "huge pages": huge_pages,
    "cores": cores,
    "CPU affinity": affinity,
    "PyTorch": torch,
    "PyTorch allocator": expandable_segments,
    "Triton": triton,
    "compression": compression,
    "vLLM": vllm,
    "CuPy": cupy,
}
