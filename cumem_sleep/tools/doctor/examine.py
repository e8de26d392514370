"""Runs every check. A check that cannot be made says why, and the others still run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ... import _core
from ...errors import format_bytes
from ..machine import Machine
from . import gpus, host, level_3, packages, variables, vault
from .report import Check, CheckStatus, DoctorReport

_HOST_CHECKS: Mapping[str, Callable[[Machine], Check]] = {
    "MemAvailable": host.available_memory,
    "cgroup memory": host.cgroup_memory,
    "huge pages": host.huge_pages,
    "vault's huge pages": host.vault_pages,
    "cores": host.cores,
    "PyTorch": packages.torch,
    "compression": packages.compression,
    "vLLM": packages.vllm,
    "vLLM's seams": packages.vllm_seams,
}


def examine(machine: Machine, progress: Callable[[str], None] = lambda _name: None) -> DoctorReport:
    """Run all checks. Opens the driver that the environment names; briefly allocates 2 MiB on each device."""
    checks: list[Check] = []

    def make(name: str, look: Callable[..., Check], *arguments: object) -> None:
        progress(name)
        checks.append(guarded(name, partial(look, *arguments)))

    make("settings", variables.settings, machine)
    make("driver", gpus.driver, machine)
    devices = gpus.devices(checks)
    for device in devices:
        gpu = f"GPU {device}"
        make(gpu, gpus.gpu_device, device)
        make(f"{gpu} handles", gpus.gpu_handles, device)
        make(f"{gpu} PCIe", gpus.gpu_link, machine, device)
        make(f"{gpu} NUMA", gpus.gpu_numa, machine, device)
    if devices:
        make("level 3", level_3.calls)
        if _core.can_checkpoint():
            make("level 3 helper", level_3.helper)
            make("level 3 memory", level_3.free_memory, devices)
    make("vault", vault.vault, machine, devices)
    for name, look in _HOST_CHECKS.items():
        make(name, look, machine)
    simulated = _core.driver_is_simulated()
    return DoctorReport(simulated, tuple(checks), good_for(machine, simulated, checks))


def good_for(machine: Machine, simulated: bool, checks: Sequence[Check]) -> str:
    """What can be done here, in a line."""
    failed = any(check.status is CheckStatus.FAIL for check in checks)
    if failed or simulated:
        what = "demo, bench and serve --demo, which need no GPU"
        return f"{what}; for more, mend what failed" if failed else f"{what}, and any test on the simulated driver"
    deepest = all(check.status is CheckStatus.OK for check in checks if check.name.startswith("level 3"))
    room = host.backup_room_bytes(machine)
    weights = "" if room is None else f"; level 1 of models with up to {format_bytes(room)} of weights in all"
    return f"sleep at levels 1 to {3 if deepest else 2}{weights}"


def guarded(name: str, look: Callable[[], Check]) -> Check:
    """The result of the check, or why it could not be made."""
    try:
        return look()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Check(name, CheckStatus.WARN, f"could not be checked: {where}{error.strerror or error}")
    except Exception as error:  # the other checks still run
        return Check(name, CheckStatus.WARN, f"could not be checked: {type(error).__name__}: {error}")
