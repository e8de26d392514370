"""The host: memory for backups, and cores to prefault it."""

from __future__ import annotations

import re

from ... import host_facts
from ...errors import format_bytes
from ..machine import Machine
from .report import Check, CheckStatus

_LITTLE_HOST_BYTES = 4 << 30
_FAST_CORES = 8


def cgroup_memory(machine: Machine) -> Check:
    """What the tightest control group leaves for backups."""
    name = "cgroup memory"
    left = host_facts.cgroup_available_bytes(machine.root)
    if left is None:
        return Check(name, CheckStatus.OK, "no limit")
    limit = host_facts.cgroup_limit_bytes(machine.root) or left
    return _host_memory(name, left, f"{format_bytes(left)} left of {format_bytes(limit)}")


def available_memory(machine: Machine) -> Check:
    """What can be allocated without swapping, by the kernel's own estimate."""
    name = "MemAvailable"
    available = host_facts.mem_available_bytes(machine.root)
    if available is None:
        return Check(name, CheckStatus.WARN, f"could not be checked: {machine.root / 'proc/meminfo'} does not say")
    check = _host_memory(name, available, format_bytes(available))
    if not host_facts.is_wsl(machine.root):
        return check
    advice = "WSL pins only a part of it (CUDA on WSL User Guide, limitations): use smaller models, or level 2"
    return Check(name, CheckStatus.WARN, check.found, advice)


def backup_room_bytes(machine: Machine) -> int | None:
    """What backups may take by both; None if neither is known."""
    both = host_facts.mem_available_bytes(machine.root), host_facts.cgroup_available_bytes(machine.root)
    return min((each for each in both if each is not None), default=None)


def _host_memory(name: str, available_bytes: int, found: str) -> Check:
    if available_bytes < _LITTLE_HOST_BYTES:
        advice = "level 1 keeps the weights in host memory: free some, or sleep at level 2"
        return Check(name, CheckStatus.WARN, found, advice)
    return Check(name, CheckStatus.OK, f"{found} for backups of weights (level 1)")


def huge_pages(machine: Machine) -> Check:
    """Whether the kernel may back host memory with huge pages."""
    name = "huge pages"
    modes = machine.transparent_hugepage()
    chosen = re.search(r"\[(\w+)\]", modes)
    if chosen is None:
        return Check(name, CheckStatus.WARN, f"could not be checked: the kernel says {modes!r}")
    if chosen[1] == "never":
        advice = "the first sleep is several times slower: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Check(name, CheckStatus.WARN, "transparent huge pages: never", advice)
    return Check(name, CheckStatus.OK, f"transparent huge pages: {chosen[1]}")


def vault_pages(machine: Machine) -> Check:
    """Whether the vault's memory, which is shared, may have huge pages; it matters to those who use it."""
    name = "vault's huge pages"
    modes = machine.read("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = re.search(r"\[(\w+)\]", modes)
    if chosen is None:
        return Check(name, CheckStatus.WARN, f"could not be checked: the kernel says {modes!r}")
    found = f"shared memory: {chosen[1]}"
    if reserved := machine.free_huge_pages_bytes():
        found += f"; {format_bytes(reserved)} reserved and free (cumem-sleep vault --reserved-huge-pages)"
    if chosen[1] not in ("never", "deny"):
        return Check(name, CheckStatus.OK, found)
    advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    if machine.environment.get("CUMEM_SLEEP_VAULT", "off") == "off":
        return Check(name, CheckStatus.OK, f"{found}; to run a vault: {advice}")
    return Check(name, CheckStatus.WARN, found, f"the vault takes and pins its memory more slowly: {advice}")


def cores(machine: Machine) -> Check:
    """Whether there are enough cores to prefault new host memory ahead of the copies."""
    usable = host_facts.usable_cores(machine.root)
    if usable >= _FAST_CORES:
        return Check("cores", CheckStatus.OK, f"{usable} usable")
    advice = (
        f"{_FAST_CORES} or more make the first sleep fast (measured on an H200 host: 39.5 GiB/s with 8 threads,"
        " 26 with 4, 15 with 2); later sleeps do not need them"
    )
    return Check("cores", CheckStatus.WARN, f"{usable} usable", advice)
