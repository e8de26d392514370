"""What the system says of the host's memory and cores, and of what this process may use of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_KERNEL_SHARE = 0.05  # at most: of 128 GiB an idle guest kernel kept 1.7 %
_CGROUP_V1_UNLIMITED = 1 << 60  # v1 writes "no limit" as a number near 2^63


def mem_available_bytes(root: Path = Path("/"), enough: int | None = None) -> int | None:
    """What can be taken without swapping: the kernel's own estimate, plus memory that it does not count yet.

    The latter takes some milliseconds to find out, so it is left out if the former is `enough`. Some virtual machines
    add memory as it is used, so `MemTotal` starts far below the real size. The kernel's online memory blocks give the
    real size; usually they exceed `MemTotal` by the few per cent that the kernel keeps for itself.
    """
    meminfo = _meminfo(root)
    available, total = meminfo.get("MemAvailable"), meminfo.get("MemTotal")
    if available is None or total is None or (enough is not None and available >= enough):
        return available
    uncounted = int(_online_bytes(root) * (1 - _KERNEL_SHARE)) - total
    return available + max(0, uncounted)


def mem_total_bytes(root: Path = Path("/")) -> int | None:
    """What the host has, with memory that the kernel does not count yet (see `mem_available_bytes`)."""
    total = _meminfo(root).get("MemTotal")
    return None if total is None else max(total, _online_bytes(root))


def cgroup_limit_bytes(root: Path = Path("/")) -> int | None:
    """The tightest memory limit of a control group (v1 or v2) above this process; None without one."""
    return min((limit for limit, _, _ in _cgroup_limits(root)), default=None)


def cgroup_available_bytes(root: Path = Path("/"), committed: Mapping[Path, int] | None = None) -> int | None:
    """What the tightest memory control group (v1 or v2) above this process leaves; None without a limit.

    As in the kernel's own `MemAvailable`, what it can drop without writing anything counts as available.

    Args:
        committed: bytes, by the group's folder, that do not; what is left may be below 0 then.
    """
    left = (
        max(0, limit - max(0, usage - _droppable_bytes(group))) - (committed or {}).get(group, 0)
        for limit, usage, group in _cgroup_limits(root)
        if usage is not None
    )
    return min(left, default=None)


def memory_groups(root: Path = Path("/")) -> list[Path]:
    """The folders of the memory control groups above this process, and one that all processes of this host share.

    In a container that is the outermost one that it sees.
    """
    mount = root / "sys/fs/cgroup"
    shared = mount if mount.is_dir() else root
    return [*dict.fromkeys((shared, *_cgroup_ancestry(root, ""), *_cgroup_ancestry(root, "memory")))]


def _droppable_bytes(group: Path) -> int:
    """Page cache that is clean, and reclaimable slab, of a memory control group and those below it.

    The lists of file pages hold no shmem, which could only be swapped.
    """
    stat = {name: int(number) for name, number in re.findall(r"^(\S+) (\d+)$", _text(group / "memory.stat"), re.M)}

    def counted(name: str) -> int:  # v1 has the sums under these names
        return stat.get(f"total_{name}", stat.get(name, 0))

    unwritten = counted("dirty") + counted("writeback") + counted("file_dirty") + counted("file_writeback")
    return max(0, counted("inactive_file") + counted("active_file") - unwritten) + counted("slab_reclaimable")


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use, given its CPU affinity and its control group's quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    for directory in _cgroup_ancestry(root, "cpu", ""):
        v1 = [_text(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if quota := re.match(r"\s*(\d+)\s+(\d*[1-9]\d*)\s*$", _text(directory / "cpu.max") or " ".join(v1)):
            cores = min(cores, -(-int(quota[1]) // int(quota[2])))
    return max(1, cores)


def prefault_threads(most: int) -> int:
    """Three quarters of the usable cores: with more, the thread that registers the touched pages would starve."""
    return min(most, max(1, usable_cores() * 3 // 4))


def nvidia_driver(root: Path = Path("/")) -> str | None:
    """The version of the NVIDIA kernel module; None if there is none."""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _text(root / "proc/driver/nvidia/version"))
    return found[1] if found else None


def is_wsl(root: Path = Path("/")) -> bool:
    """Whether this is Windows' subsystem for Linux."""
    return "microsoft" in _text(root / "proc/sys/kernel/osrelease").lower()


def _online_bytes(root: Path) -> int:
    blocks = root / "sys/devices/system/memory"
    size = _text(blocks / "block_size_bytes").strip()
    online = sum(_text(state).strip() == "online" for state in blocks.glob("memory[0-9]*/state"))
    return online * int(size, 16) if size else 0


def _meminfo(root: Path) -> dict[str, int]:
    lines = re.findall(r"^([^:\n]+):\s*(\d+)( kB)?$", _text(root / "proc/meminfo"), re.M)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in lines}


def _cgroup_limits(root: Path) -> list[tuple[int, int | None, Path]]:
    """Of the memory control groups above this process that have one: limit, usage and folder."""
    files = [(path, "memory.max", "memory.current") for path in _cgroup_ancestry(root, "")]
    # v1 can also limit memory and swap together, so what is swapped leaves less.
    for path in _cgroup_ancestry(root, "memory"):
        files += [(path, f"{kind}.limit_in_bytes", f"{kind}.usage_in_bytes") for kind in ("memory", "memory.memsw")]
    found = [(_number(path / limit), _number(path / usage), path) for path, limit, usage in files]
    return [(limit, usage, path) for limit, usage, path in found if limit is not None and limit < _CGROUP_V1_UNLIMITED]


def _cgroup_ancestry(root: Path, *wanted: str) -> list[Path]:
    """The directories of this process's group and of all above it, for these v1 controllers ("": v2, which has all)."""
    mount = root / "sys/fs/cgroup"
    found: list[Path] = []
    for controllers, path in re.findall(r"^\d+:([^:\n]*):(.*)$", _text(root / "proc/self/cgroup"), re.M):
        for controller in {*wanted} & {*controllers.split(",")}:
            base = mount / controller
            # Inside a container the path may lie outside of what is mounted: then the mount itself is the group.
            group = base / path.strip("/")
            while group != base and not group.is_dir():
                group = group.parent
            found += [group, *(parent for parent in group.parents if base in (parent, *parent.parents))]
    return found


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
