"""The doctor: every check on fake directories, environments and packages, and all of them together."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Mapping
from typing import Any
from unittest.mock import MagicMock

import pytest
from support import DRIVER, SIMULATED

from cumem_sleep import DriverError, InvalidState, OutOfDeviceMemory, _core, sim
from cumem_sleep.checkpoint import process
from cumem_sleep.core.driver import open_driver
from cumem_sleep.errors import format_bytes
from cumem_sleep.settings import VARIABLES
from cumem_sleep.tools import cli, doctor
from cumem_sleep.tools.doctor import CheckStatus, DoctorReport, gpus, host, level_3, packages, variables
from cumem_sleep.tools.doctor.examine import examine, good_for
from cumem_sleep.tools.machine import Machine, machine_facts
from cumem_sleep.vllm import seams

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

GPU = "0000:1B:00.0"


def machine(
    root: pathlib.Path,
    files: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    affinity: frozenset[int] = frozenset(range(16)),
) -> Machine:
    for path, text in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Machine(root, environment or {}, [str(root / "site")], affinity)


def package(name: str, version: str) -> dict[str, str]:
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return {f"site/{name.replace('-', '_')}-{version}.dist-info/METADATA": metadata}


def link(speed: str, most_speed: str, width: str, most_width: str) -> dict[str, str]:
    values = {
        "current_link_speed": speed,
        "max_link_speed": most_speed,
        "current_link_width": width,
        "max_link_width": most_width,
    }
    return {f"sys/bus/pci/devices/{GPU.lower()}/{name}": f"{value}\n" for name, value in values.items()}


# The link


@pytest.mark.parametrize(
    ("files", "status", "found", "advice"),
    [
        (link("32.0 GT/s PCIe", "32.0 GT/s PCIe", "16", "16"), CheckStatus.OK, "PCIe 5 x16", ""),
        (
            link("16.0 GT/s PCIe", "32.0 GT/s PCIe", "16", "16"),
            CheckStatus.WARN,
            "PCIe 4 x16 now, PCIe 5 x16",
            "idle GPUs",
        ),
        (
            link("32.0 GT/s PCIe", "32.0 GT/s PCIe", "8", "16"),
            CheckStatus.WARN,
            "PCIe 5 x8 now, PCIe 5 x16",
            "narrower",
        ),
        (link("Unknown", "Unknown", "16", "16"), CheckStatus.OK, "Unknown x16", ""),
    ],
)
def test_pcie_link(files: dict[str, str], status: CheckStatus, found: str, advice: str, tmp_path: pathlib.Path) -> None:
    check = gpus.pcie_link(machine(tmp_path, files), "link", GPU)
    assert check.status is status
    assert found in check.found
    assert advice in check.advice


# NUMA, cores


@pytest.mark.parametrize(
    ("nodes", "node", "affinity", "status", "found"),
    [
        (1, 0, {0, 1}, CheckStatus.OK, "node 0 of 1"),
        (2, 1, {0, 9}, CheckStatus.OK, "node 1 of 2"),
        (2, 1, {0, 1}, CheckStatus.WARN, "none of its cores"),
        (2, -1, {0}, CheckStatus.WARN, "node not known, the host has 2"),
        (1, -1, {0}, CheckStatus.OK, "node not known; the host has 1 node"),
        (0, -1, {0}, CheckStatus.OK, "the host has no nodes"),
    ],
)
def test_numa(
    nodes: int, node: int, affinity: set[int], status: CheckStatus, found: str, tmp_path: pathlib.Path
) -> None:
    files = {f"sys/devices/system/node/node{n}/cpulist": f"{n * 8}-{n * 8 + 7}\n" for n in range(nodes)}
    check = gpus.numa(machine(tmp_path, files, affinity=frozenset(affinity)), "NUMA", node)
    assert check.status is status
    assert found in check.found


# Memory


def test_memory_of_the_control_group(tmp_path: pathlib.Path) -> None:
    assert host.cgroup_memory(machine(tmp_path)).found == "no limit"
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{100 << 30}\n",
        "sys/fs/cgroup/memory.current": f"{30 << 30}\n",
    }
    check = host.cgroup_memory(machine(tmp_path, files))
    assert check.status is CheckStatus.OK
    assert check.found.startswith("70.00 GiB left of 100.00 GiB")
    check = host.cgroup_memory(machine(tmp_path, {"sys/fs/cgroup/memory.current": f"{99 << 30}\n"}))
    assert (check.status, check.found) == (CheckStatus.WARN, "1.00 GiB left of 100.00 GiB")


def test_available_memory(tmp_path: pathlib.Path) -> None:
    assert host.available_memory(machine(tmp_path)).status is CheckStatus.WARN
    files = {"proc/meminfo": f"MemTotal: {200 << 20} kB\nMemAvailable: {128 << 20} kB\n"}
    check = host.available_memory(machine(tmp_path, files))
    assert check.status is CheckStatus.OK
    assert check.found.startswith("128.00 GiB")
    release = {"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n"}
    check = host.available_memory(machine(tmp_path, {**files, **release}))
    assert check.status is CheckStatus.WARN
    assert "WSL pins only a part" in check.advice


@pytest.mark.parametrize(
    ("modes", "status"),
    [
        ("[always] madvise never", CheckStatus.OK),
        ("always [madvise] never", CheckStatus.OK),
        ("always madvise [never]", CheckStatus.WARN),
        ("", CheckStatus.WARN),
    ],
)
def test_huge_pages(modes: str, status: CheckStatus, tmp_path: pathlib.Path) -> None:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    assert host.huge_pages(machine(tmp_path, {path: modes})).status is status


SHMEM = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
FREE = "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"


@pytest.mark.parametrize(
    ("modes", "vault", "status"),
    [
        ("always within_size [advise] never deny force", "auto", CheckStatus.OK),
        ("always within_size advise [never] deny force", "auto", CheckStatus.WARN),
        ("always within_size advise [never] deny force", "off", CheckStatus.OK),
        ("", "off", CheckStatus.WARN),
    ],
)
def test_huge_pages_of_the_vault(modes: str, vault: str, status: CheckStatus, tmp_path: pathlib.Path) -> None:
    check = host.vault_pages(machine(tmp_path, {SHMEM: modes}, {"CUMEM_SLEEP_VAULT": vault}))
    assert check.status is status
    if "[never]" in modes:
        assert f"echo advise > /{SHMEM}" in check.found + check.advice


# Packages


def torch_files(version: str, cuda: str | None) -> dict[str, str]:
    text = f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
    return {**package("torch", version), "site/torch/version.py": text}


@pytest.mark.parametrize(
    ("files", "status", "found"),
    [
        ({}, CheckStatus.WARN, "not installed"),
        (torch_files("2.13.0", "13.0"), CheckStatus.OK, "2.13.0, built for CUDA 13.0"),
        (torch_files("2.8.0+cu128", "12.8"), CheckStatus.OK, "2.8.0+cu128, built for CUDA 12.8"),
        (torch_files("2.13.0+cpu", None), CheckStatus.WARN, "2.13.0+cpu, without CUDA"),
        (torch_files("2.7.1", "12.6"), CheckStatus.WARN, "2.7.1, built for CUDA 12.6"),
        (package("torch", "2.10.0"), CheckStatus.OK, "2.10.0"),
    ],
)
def test_torch(files: dict[str, str], status: CheckStatus, found: str, tmp_path: pathlib.Path) -> None:
    check = packages.torch(machine(tmp_path, files))
    assert (check.status, check.found) == (status, found)
    assert bool(check.advice) == (status is CheckStatus.WARN)


@pytest.mark.parametrize(
    ("environment", "installed", "status", "found"),
    [
        ({}, (), CheckStatus.OK, "off"),
        ({"CUMEM_SLEEP_COMPRESS": "auto"}, ("torch", "triton"), CheckStatus.OK, "auto"),
        ({"CUMEM_SLEEP_COMPRESS": "auto"}, ("torch", "pytorch-triton"), CheckStatus.OK, "auto"),
        ({"CUMEM_SLEEP_COMPRESS": "auto"}, ("torch",), CheckStatus.WARN, "Triton not installed"),
        ({"CUMEM_SLEEP_COMPRESS": "auto"}, (), CheckStatus.WARN, "PyTorch and Triton not installed"),
        ({"CUMEM_SLEEP_COMPRESS": "auto", "CUMEM_SLEEP_DRIVER": "sim"}, (), CheckStatus.OK, "simulated"),
    ],
)
def test_compression(
    environment: dict[str, str], installed: tuple[str, ...], status: CheckStatus, found: str, tmp_path: pathlib.Path
) -> None:
    files = {path: text for name in installed for path, text in package(name, "3.0").items()}
    check = packages.compression(machine(tmp_path, files, environment=environment))
    assert (check.status, bool(check.advice)) == (status, status is CheckStatus.WARN)
    assert found in check.found


@pytest.mark.parametrize(
    ("version", "environment", "status", "found"),
    [
        ("0.33.1", {"VLLM_PLUGINS": "other,cumem_sleep", "CUMEM_SLEEP_DISABLE": "0"}, CheckStatus.OK, "in this layer"),
        ("0.26.0", {"CUMEM_SLEEP_DISABLE": "1"}, CheckStatus.OK, "keeps its own sleep mode: CUMEM_SLEEP_DISABLE=1"),
        ("0.26.0", {"VLLM_PLUGINS": "other"}, CheckStatus.OK, "keeps its own sleep mode: VLLM_PLUGINS=other"),
        ("0.26.0", {"VLLM_PLUGINS": "cumem-sleep"}, CheckStatus.OK, "in this layer"),
        (
            "0.26.0",
            {"VLLM_PLUGINS": "other, cumem_sleep"},
            CheckStatus.WARN,
            "sleep mode: VLLM_PLUGINS=other, cumem_sleep",
        ),
        ("0.34.0", {}, CheckStatus.WARN, "known versions are 0.11 to 0.33"),
        (
            "0.34.0",
            {"CUMEM_SLEEP_VLLM_UNTESTED": "1"},
            CheckStatus.WARN,
            "with sleep mode in this layer if it fits: its",
        ),
        ("0.10.2", {}, CheckStatus.WARN, "known versions are 0.11 to 0.33"),
    ],
)
def test_vllm(
    version: str, environment: dict[str, str], status: CheckStatus, found: str, tmp_path: pathlib.Path
) -> None:
    check = packages.vllm(machine(tmp_path, package("vllm", version), environment))
    assert (check.status, bool(check.advice)) == (status, status is CheckStatus.WARN)
    assert check.found.startswith(version)
    assert found in check.found


def sources_of_vllm(minor: int) -> dict[str, str]:
    """What the seams of this version want, as the smallest sources that have them."""
    classes: dict[tuple[str, str], list[str]] = {}
    for seam in seams.SEAMS:
        if seam.since <= minor:
            owner, _, name = seam.name.rpartition(".")
            body = f"async def {name}(self, {', '.join(seam.parameters)}): ..."
            if not owner:
                body = "pass" if name[0].isupper() and name[1].islower() else f"{name} = None"
            classes.setdefault((seam.file, owner or name), []).append(body)
    files: dict[str, str] = {}
    for (file, owner), bodies in classes.items():
        text = f"class {owner}:\n" + "".join(f"    {body}\n" for body in bodies)
        if bodies == [f"{owner} = None"]:
            text = f"{bodies[0]}\n"
        files[f"site/vllm/{file}"] = files.get(f"site/vllm/{file}", "") + text
    return {**files, **package("vllm", f"0.{minor}.0")}


@pytest.mark.parametrize("minor", [11, 26, 33])
def test_vllms_seams_are_those_of_its_version(minor: int, tmp_path: pathlib.Path) -> None:
    check = packages.vllm_seams(machine(tmp_path, sources_of_vllm(minor)))
    known = sum(seam.since <= minor for seam in seams.SEAMS)
    assert (check.status, check.found, check.advice) == (CheckStatus.OK, f"{known} of {known} found", "")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "v1/engine/async_llm.py",
            "def sleep(self, level, mode)",
            "def sleep(self, level)",
            "changed: no parameter mode:",
        ),
        ("v1/engine/async_llm.py", "def sleep(self, level, mode)", "def sleep(self, level, **more)", ""),
        ("v1/engine/async_llm.py", "def abort(", "def abort_all(", "gone: v1/engine/async_llm.py: AsyncLLM.abort "),
        (
            "v1/worker/gpu_worker.py",
            "class Worker:",
            "class GpuWorker:",
            "gone: v1/worker/gpu_worker.py: Worker.sleep ",
        ),
        ("ray/ray_env.py", "DEFAULT_ENV_VAR_PREFIXES = None", "from .x import y as DEFAULT_ENV_VAR_PREFIXES", ""),
        ("ray/ray_env.py", "DEFAULT_ENV_VAR_PREFIXES = None", "DEFAULT_ENV_VAR_PREFIXES: set = {1}", ""),
        (
            "device_allocator/cumem.py",
            "pass",
            "def checkpoint_prepare(self): ...\n    def _own(self): ...\n    def sleep(self): ...",
            "new: device_allocator/cumem.py: CuMemAllocator.checkpoint_prepare",
        ),
    ],
)
def test_what_changed_in_vllm_is_named(file: str, old: str, new: str, said: str, tmp_path: pathlib.Path) -> None:
    files = sources_of_vllm(33)
    assert old in files[f"site/vllm/{file}"]
    files[f"site/vllm/{file}"] = files[f"site/vllm/{file}"].replace(old, new)
    check = packages.vllm_seams(machine(tmp_path, files))
    assert check.status is (CheckStatus.WARN if said else CheckStatus.OK)
    assert said in check.found
    assert "_own" not in check.found
    assert "CuMemAllocator.sleep" not in check.found
    assert bool(check.advice) == bool(said)


def test_a_file_of_vllm_that_is_gone_and_no_vllm(tmp_path: pathlib.Path) -> None:
    files = sources_of_vllm(33)
    del files["site/vllm/ray/ray_env.py"], files["site/vllm/device_allocator/cumem.py"]
    found = packages.vllm_seams(machine(tmp_path, files)).found
    assert "gone: ray/ray_env.py: DEFAULT_ENV_VAR_PREFIXES (variables for workers on Ray)" in found
    assert "gone: device_allocator/cumem.py: CuMemAllocator (replaced)" in found
    assert packages.vllm_seams(machine(tmp_path / "other")).status is CheckStatus.OK


# Settings


@pytest.mark.parametrize(
    ("environment", "status", "found", "advice"),
    [
        ({"HOME": "/"}, CheckStatus.OK, "all at their defaults", ""),
        ({"CUMEM_SLEEP_VERIFY": "off", "CUMEM_SLEEP_POISON": ""}, CheckStatus.OK, "CUMEM_SLEEP_VERIFY=off", ""),
        ({"CUMEM_SLEEP_DISABLE": "1"}, CheckStatus.OK, "CUMEM_SLEEP_DISABLE=1", ""),
        ({"CUMEM_SLEEP_DISABLE": "perhaps"}, CheckStatus.FAIL, "CUMEM_SLEEP_DISABLE='perhaps'", "correct the variable"),
        ({"CUMEM_SLEEP_ON_REQUEST": "wake"}, CheckStatus.OK, "CUMEM_SLEEP_ON_REQUEST=wake", ""),
        ({"CUMEM_SLEEP_ON_REQUEST": "nap"}, CheckStatus.FAIL, "CUMEM_SLEEP_ON_REQUEST='nap'", "correct the variable"),
        (
            {"CUMEM_SLEEP_VERIFI": "off"},
            CheckStatus.WARN,
            "nothing reads CUMEM_SLEEP_VERIFI",
            "may be CUMEM_SLEEP_VERIFY",
        ),
        ({"CUMEM_SLEEP_QQQQQQQQQQQQQQQQQQQQQ": "1"}, CheckStatus.WARN, "nothing reads", "unset CUMEM_SLEEP_QQ"),
        ({"CUMEM_SLEEP_VERIFY": "perhaps"}, CheckStatus.FAIL, "CUMEM_SLEEP_VERIFY='perhaps'", "correct the variable"),
    ],
)
def test_settings(
    environment: dict[str, str], status: CheckStatus, found: str, advice: str, tmp_path: pathlib.Path
) -> None:
    check = variables.settings(machine(tmp_path, environment=environment))
    assert check.status is status
    assert found in check.found
    assert advice in check.advice


@pytest.mark.parametrize("name", sorted(name for name in VARIABLES if "TOKEN" in name))
def test_tokens_are_not_shown(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Neither by the doctor, nor beside results, which people post."""
    text = "sesame"
    if name.endswith("_FILE"):
        (tmp_path / "token").write_text(text)
        text = str(tmp_path / "token")
    assert variables.settings(machine(tmp_path, environment={name: text})).found == f"{name}=…"
    monkeypatch.setenv(name, text)
    assert machine_facts("a GPU", []).environment[name] == "…"


# The driver


def failing(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "files", "environment", "advice"),
    [
        (DriverError("dlopen", "CUDA_ERROR_NO_DRIVER"), {}, {}, "install the NVIDIA driver"),
        (
            DriverError("dlopen", "CUDA_ERROR_NO_DRIVER"),
            {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX  580.159  x"},
            {},
            "--gpus all",
        ),
        (DriverError("cuInit", "CUDA_ERROR_NO_DEVICE"), {}, {"CUDA_VISIBLE_DEVICES": ""}, "does it hide every GPU?"),
        (DriverError("cuInit", "CUDA_ERROR_UNKNOWN"), {}, {}, "nvidia-smi"),
    ],
)
def test_no_driver(
    error: DriverError,
    files: dict[str, str],
    environment: dict[str, str],
    advice: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "open_driver", failing(error))
    check = gpus.driver(machine(tmp_path, files, environment))
    assert check.status is CheckStatus.FAIL
    assert advice in check.advice


def examined(**environment: str) -> DoctorReport:
    return examine(Machine(environment={"CUMEM_SLEEP_DRIVER": DRIVER, **environment}))


@pytest.mark.parametrize(
    ("simulated", "driver", "level_3", "says"),
    [
        (
            False,
            CheckStatus.OK,
            CheckStatus.OK,
            "sleep at levels 1 to 3; level 1 of models with up to 70.00 GiB of we",
        ),
        (False, CheckStatus.WARN, CheckStatus.WARN, "sleep at levels 1 to 2; level 1 of models with up to 70.00 GiB"),
        (False, CheckStatus.FAIL, CheckStatus.OK, "demo, bench and serve --demo, which need no GPU; for more, mend wh"),
        (True, CheckStatus.OK, CheckStatus.OK, "demo, bench and serve --demo, which need no GPU, and any test on the"),
    ],
)
def test_it_says_what_the_machine_is_good_for(
    simulated: bool, driver: CheckStatus, level_3: CheckStatus, says: str, tmp_path: pathlib.Path
) -> None:
    files = {
        "proc/meminfo": f"MemTotal: {200 << 20} kB\nMemAvailable: {128 << 20} kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{100 << 30}\n",
        "sys/fs/cgroup/memory.current": f"{30 << 30}\n",
    }
    checks = (doctor.Check("driver", driver, ""), doctor.Check("level 3 helper", level_3, ""))
    said = good_for(machine(tmp_path, files), simulated, checks)
    assert said.startswith(says)
    report = DoctorReport(simulated, checks, said)
    assert report.conclusion().splitlines()[1:] == [f"Good for: {said}."]
    assert report.to_json()["good_for"] == said


def test_devices_are_tried() -> None:
    report = examined()
    checks = {check.name: check for check in report.checks}
    assert report.simulated is SIMULATED
    assert checks["GPU 0"].status is CheckStatus.OK
    assert "allocated and freed 2 MiB; POSIX fd: " in checks["GPU 0 handles"].found
    assert {"driver", "GPU 0 PCIe", "GPU 0 NUMA", "MemAvailable", "huge pages", "PyTorch"} < set(checks)
    assert not _core.segments()


@pytest.mark.parametrize(
    ("error", "status", "found"),
    [
        (OutOfDeviceMemory(2 << 20, 0, 0), CheckStatus.WARN, "the GPU is full"),
        (DriverError("cuMemMap", "CUDA_ERROR_UNKNOWN"), CheckStatus.FAIL, "2 MiB could not be allocated"),
    ],
)
def test_device_that_refuses(
    error: DriverError, status: CheckStatus, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "Allocation", failing(error))
    check = gpus.gpu_handles(0)
    assert check.status is status
    assert found in check.found


# Level 3


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """All processes that are started."""
    open_driver(DRIVER)
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(process.subprocess, "Popen", Noted)
    return started


@pytest.mark.parametrize(
    ("version", "found", "advice"),
    [
        (12040, "CUDA 12.8 is needed, the driver has CUDA 12.4", "update the NVIDIA driver to 570 or newer"),
        (12080, "the driver (CUDA 12.8) lacks the checkpoint calls", "another, older driver"),
    ],
)
def test_level_3_needs_a_new_driver(
    version: int, found: str, advice: str, helpers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "driver_version", lambda: version)
    monkeypatch.setattr(_core, "can_checkpoint", lambda: False)
    checks = {check.name: check for check in examined().checks if check.name.startswith("level 3")}
    assert list(checks) == ["level 3"]
    assert checks["level 3"].status is CheckStatus.WARN
    assert checks["level 3"].found == f"not possible: {found}"
    assert advice in checks["level 3"].advice
    assert helpers == []
    with pytest.raises(InvalidState, match=r"^level 3: not possible: .*: "):
        level_3.refuse_unless_possible(0)


@pytest.mark.parametrize(
    ("name", "integrated", "advice"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", False, "an instance of a GPU (MIG)"),
        ("NVIDIA GB10", True, "its memory is the host's"),
    ],
)
def test_a_gpu_of_which_little_is_known(
    name: str, integrated: bool, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = MagicMock(total_bytes=1 << 30, virtual_memory=True, integrated=integrated)
    info.name = name
    monkeypatch.setattr(gpus._core, "device_info", lambda _: info)
    check = gpus.gpu_device(0)
    assert check.status is CheckStatus.WARN
    assert advice in check.advice


def test_level_3_is_not_tried_with_a_driver_that_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    open_driver("sim" if SIMULATED else "auto")
    monkeypatch.setattr(process.host_facts, "nvidia_driver", lambda *_: "610.57.04")
    if SIMULATED:
        assert level_3.calls().status is CheckStatus.OK, "it is not that driver"
    monkeypatch.setattr(_core, "driver_is_simulated", lambda: False)
    with pytest.raises(InvalidState, match=r"^level 3: not possible: with NVIDIA driver 610.57.04, .* SIGSEGV"):
        level_3.refuse_unless_possible(0)


@pytest.mark.sim
def test_level_3_is_possible_on_the_simulated_driver(helpers: list[subprocess.Popen[bytes]]) -> None:
    checks = [check for check in examined().checks if check.name.startswith("level 3")]
    assert [(check.name, check.status) for check in checks] == [
        ("level 3", CheckStatus.OK),
        ("level 3 helper", CheckStatus.OK),
        ("level 3 memory", CheckStatus.OK),
    ]
    used, total = sim.process_memory(os.getpid(), _core.device_info(0).uuid)  # of whichever simulated driver came first
    assert checks[2].found == f"the simulated driver says what is free: GPU 0: {format_bytes(total - used)}"
    assert [each.returncode for each in helpers] == [-9]  # it has been ended
    level_3.refuse_unless_possible(0)


def test_a_helper_that_cannot_use_the_driver(
    helpers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "driver_path", lambda: "/nowhere/libcuda.so.1")
    check = level_3.helper()
    assert check.status is CheckStatus.WARN
    assert check.found.startswith("the helper process cannot use the driver: dlopen failed")
    assert all(each.returncode is not None for each in helpers)


@pytest.mark.sim
def test_a_helper_that_may_not_ask_about_this_process(
    helpers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_SIM_FAIL", "cuCheckpointProcessGetState:0:CUDA_ERROR_NOT_PERMITTED:9")
    check = level_3.helper()
    assert check.status is CheckStatus.WARN
    assert "cuCheckpointProcessGetState failed with CUDA_ERROR_NOT_PERMITTED" in check.found
    assert "the same user" in check.advice
    assert len(helpers) == 1
    with pytest.raises(InvalidState, match="NOT_PERMITTED"):
        level_3.refuse_unless_possible(0)


# All together


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor"])
    output = capsys.readouterr()
    assert code == 0
    assert output.err == ""
    assert "driver" in output.out
    assert " ok, " in output.out
    if SIMULATED:
        assert "doctor (simulated driver)" in output.out
        assert doctor.SIMULATED_NOTE in output.out


def test_failed_check_is_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_VERIFY", "perhaps")
    assert cli.main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "fail" in output
    assert "correct the variable" in output
