"""What every result carries: the machine, the versions, and the command that made it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cumem_sleep.tools.bench.host_memory import touch_host_memory

__all__ = ["GIB", "command", "machine", "machine_apart", "machine_without_gpu", "touch_host_memory"]

GIB = 1 << 30


def command() -> list[str]:
    """The command that runs, without the folders of absolute paths, which say nothing elsewhere."""

    def short(argument: str) -> str:
        option, equals, value = argument.partition("=")
        if value.startswith("/"):
            return f"{option}{equals}{Path(value).name}"
        return Path(argument).name if argument.startswith("/") else argument

    return ["python", Path(sys.argv[0]).name, *map(short, sys.argv[1:])]


def machine() -> dict[str, Any]:
    """What `cumem-sleep bench` says of the machine, all GPUs and their link, and the commit."""
    if os.environ.get("CUMEM_SLEEP_DRIVER") == "sim":
        return {"simulated": True}
    import torch

    from cumem_sleep.tools.machine import machine_facts

    gpu = torch.cuda.get_device_properties(0)
    link = subprocess.run(
        ["nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {
        **asdict(machine_facts(gpu.name, command())),
        "gpus": torch.cuda.device_count(),
        "gpu_memory_bytes": gpu.total_memory,
        "pcie generation, width": link.strip(),
        "commit": os.environ.get("COMMIT"),  # a copy of the tree does not know it
    }


def machine_apart(*packages: str) -> dict[str, Any]:
    """The same, and versions, by a process that ends at once: its CUDA context would take memory of the GPU."""
    program = (
        "import importlib.metadata, json, sys; sys.argv = sys.argv[1:]; import record;"
        f"versions = {{name: importlib.metadata.version(name) for name in {packages}}};"
        "print(json.dumps({**record.machine(), **versions}))"
    )
    folder = str(Path(__file__).parent)
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-c", program, *sys.argv],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,  # in the checkout Python would take the package's sources for the package
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"this machine cannot run it: {process.stderr.strip().splitlines()[-1]}")
    facts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return facts


def machine_without_gpu(*, simulated: bool = False) -> dict[str, Any]:
    """The same of a machine whose GPU, if it has one, takes no part.

    Args:
        simulated: processes that this one starts use the simulated driver.
    """
    from cumem_sleep.tools.machine import machine_facts

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        **asdict(machine_facts("none", command())),
        "simulated": simulated,
        "cpu": next((line.partition(":")[2].strip() for line in lines if "model name" in line), "unknown"),
        "commit": os.environ.get("COMMIT") or commit,
    }
