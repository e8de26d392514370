"""What a vault takes of a GPU, and what of that it could do without.

    python benchmarks/vault_gpu_memory.py --out benchmarks/results/vault_gpu_memory.json   # ~40 s on an H200

- `context`: a bare context, in processes of which each asks the driver, by its environment, to take less.
- `vault`: vaults of several sizes before they have a client; also of huge pages, where this process may change
  `shmem_enabled` (which it sets back), and of reserved ones, where it may reserve them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model_server import gpu_memory_in_use_bytes
from questions import main
from vault_process import GIB, Vault

SIMULATED = os.environ.get("CUMEM_SLEEP_DRIVER") == "sim"
UNIT = 32 << 20 if SIMULATED else GIB
SECONDS = 180.0
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"CUDA_MODULE_LOADING": "LAZY"},
    {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    {"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"},
    {"CUDA_SCALE_LAUNCH_QUEUES": "0.25x", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"},
)
BARE = """
from cumem_sleep import _core
from cumem_sleep.driver import open_driver
import sys
open_driver(sys.argv[1])
_core.memory_info(0)
print("there", flush=True)
sys.stdin.read()
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
RESERVED = Path("/proc/sys/vm/nr_hugepages")


def used_bytes() -> int:
    used = gpu_memory_in_use_bytes()
    if used is None and not SIMULATED:
        raise RuntimeError("nvidia-smi does not say what is in use on the GPU")
    return used or 0


def context() -> dict[str, Any]:
    answers = []
    for environment in ENVIRONMENTS:
        before = used_bytes()
        process = subprocess.Popen(
            [sys.executable, "-c", BARE, "sim" if SIMULATED else "cuda"],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            if process.stdout.readline() != "there\n":
                raise RuntimeError(f"a process with {environment} made no context")
            answers.append({"environment": environment, "bytes": used_bytes() - before})
            process.communicate("")
    return {"contexts": answers}


def vault() -> dict[str, Any]:
    sizes = [(units, "pages of 4 KiB") for units in (8, 32, 64)]
    answers = [one_vault(units, pages) for units, pages in sizes]
    with set_to(HUGE_PAGES, "advise") as is_set:
        answers.append(one_vault(32, "transparent huge pages") if is_set else not_measured(HUGE_PAGES))
    with set_to(RESERVED, str(32 * UNIT >> 21)) as is_set:
        reserved = ("--reserved-huge-pages",)
        answers.append(one_vault(32, "reserved huge pages", *reserved) if is_set else not_measured(RESERVED))
    return {"vaults": answers}


def one_vault(units: int, pages: str, *options: str) -> dict[str, Any]:
    before = used_bytes()
    with Vault(units * UNIT, *options) as made:
        seconds = made.wait_until_pinned()
        return {"memory_bytes": units * UNIT, "pages": pages, "pinned after s": seconds, "bytes": used_bytes() - before}


def not_measured(path: Path) -> dict[str, Any]:
    return {"not measured": f"{path} cannot be set here"}


@contextmanager
def set_to(path: Path, value: str) -> Iterator[bool]:
    """A setting of the system, and back; False: this process may not set it, or needs no pages for a simulation."""
    try:
        content = path.read_text()
        before = content.partition("[")[2].partition("]")[0] or content.strip()  # "always [never]" or a number
        if not SIMULATED:
            path.write_text(value)
    except OSError:
        before = ""
    if SIMULATED or not before:
        yield False
        return
    try:
        yield True
    finally:
        path.write_text(before)


if __name__ == "__main__":
    main(__doc__ or "", {"context": context, "vault": vault}, SECONDS)
