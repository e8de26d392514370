"""The vault: whether it is wanted, whether it answers, and whether it serves the GPUs of this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import __version__, _core
from ...errors import VaultError, counted, format_bytes
from ...settings import PREFIX, Settings
from ...vault import protocol
from ...vault.client import VaultClient
from ..machine import Machine
from .report import Check, CheckStatus

_VARIABLE = PREFIX + "VAULT"


def vault(machine: Machine, devices: Sequence[int]) -> Check:
    """Looks where processes with these variables would; it asks the vault, and changes nothing there."""
    name = "vault"
    wanted = Settings.from_environment({_VARIABLE: machine.environment.get(_VARIABLE, "")}).vault
    is_used = wanted != "off"
    path = protocol.default_socket() if wanted in ("off", "auto") else Path(wanted)
    try:
        client = VaultClient(path, "doctor")
        try:
            facts = client.status()
        finally:
            client.close()
    except VaultError as error:
        return _no_vault(name, wanted, str(error))
    found = f"pid {facts['pid']} at {path}: {format_bytes(facts['left_bytes'])} left of"
    found += f" {format_bytes(facts['memory_bytes'])}, {counted(len(facts['clients']), 'client')}"
    if not is_used:
        return Check(name, CheckStatus.OK, f"not used ({_VARIABLE} is off), but one answers: {found}")
    here = [_core.device_info(device).uuid for device in devices]
    served = [gpu["uuid"] for gpu in facts["gpus"]]
    if wanted != "auto" and here and not {*here} & {*served}:
        advice = "give the vault the GPUs that this process uses (--gpus); until then every sleep at level 1 is refused"
        return Check(name, CheckStatus.FAIL, f"{found}; it serves none of the GPUs here: {', '.join(served)}", advice)
    found += "".join(_links(facts["gpus"]))
    troubles = dict(_troubles(facts, dict(zip(devices, here, strict=True)), served, machine.little_bytes))
    if troubles:
        return Check(name, CheckStatus.WARN, "; ".join([found, *troubles]), "; ".join(troubles.values()))
    return Check(name, CheckStatus.OK, found)


def _links(gpus: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Whose links help which GPU, and why others do not."""
    ordinals = {gpu["uuid"]: gpu.get("ordinal") for gpu in gpus}
    for gpu in gpus:
        helpers = gpu.get("helpers", {})  # an older vault has none
        helping = [f"{ordinals[uuid]}" for uuid, refused in helpers.items() if not refused]
        refusals = [f"not of GPU {ordinals[uuid]}: {refused}" for uuid, refused in helpers.items() if refused]
        if helpers:
            named = f"by links of GPU {' and '.join(helping)}" if helping else "by no other link"
            yield f"; GPU {gpu['ordinal']} is helped {'; '.join([named, *refusals])}"


def _no_vault(name: str, wanted: str, why: str) -> Check:
    if wanted == "off":
        return Check(name, CheckStatus.OK, f"not used ({_VARIABLE} is off)")
    if wanted == "auto":
        advice = "backups lie in memory of each process instead: start the vault before those that are to use it"
        return Check(name, CheckStatus.WARN, why, advice)
    return Check(name, CheckStatus.FAIL, why, "until a vault answers there, every sleep at level 1 is refused")


def _troubles(
    facts: Mapping[str, Any], here: Mapping[int, str], served: Sequence[str], little_bytes: int
) -> Iterator[tuple[str, str]]:
    """What is wrong, with what to do about it."""
    for device, uuid in here.items():
        if uuid not in served:
            advice = "memory of that GPU cannot sleep at level 1: see the vault's --gpus"
            yield f"it does not serve GPU {device}", advice
    if facts["version"] != __version__:
        advice = "install the same version on both sides, and restart the vault"
        yield f"it is cumem-sleep {facts['version']}, and this is {__version__}", advice
    if facts["short"]:
        advice = "free host memory, or give the vault a smaller --memory"
        yield f"it cannot take more memory now: {facts['short']}", advice
    if facts["left_bytes"] < little_bytes:
        yield "it has little left", "give the vault more --memory, or see who holds it: cumem-sleep vault status"
