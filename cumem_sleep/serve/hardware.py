"""What the machine says of its memory. Asked without CUDA, whose context would take memory of the GPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ASK_WITHIN_S = 30.0


@dataclass(frozen=True)
class Gpu:
    """One GPU, by its number in `nvidia-smi`."""

    number: int
    name: str
    total_bytes: int
    used_bytes: int


def gpus() -> list[Gpu]:
    """All GPUs; none where nobody can say. Takes some tenths of a second."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_ASK_WITHIN_S).stdout
        return [_gpu(line.split(", ")) for line in answer.splitlines()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _gpu(words: Sequence[str]) -> Gpu:
    number, name, total, used = words
    return Gpu(int(number), name, int(total) << 20, int(used) << 20)


def host_available_bytes(root: Path = Path("/")) -> int | None:
    """What the host can still give: the kernel's estimate, or what the container's limit leaves if that is less."""
    found = [_meminfo(root, "MemAvailable"), _cgroup_bytes(root)]
    return min((each for each in found if each is not None), default=None)


def _meminfo(root: Path, name: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return None


def _cgroup_bytes(root: Path) -> int | None:
    """What the container's limit leaves (cgroup v2); page cache can go, so it does not count."""
    folder = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(facts.get("inactive_file", "0"))
            return max(0, int(limit) - used)
    return None
