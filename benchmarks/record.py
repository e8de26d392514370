"""What every result carries: the machine, the versions, and the command that made it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from cumem_sleep.tools.bench.host_memory import touch_host_memory

__all__ = ["GIB", "machine", "touch_host_memory", "write"]

GIB = 1 << 30


def machine() -> dict[str, Any]:
    """Facts of this machine and the versions in use."""
    import torch

    from cumem_sleep import _core
    from cumem_sleep.backups import limits as host_limits

    device = torch.cuda.get_device_properties(0)
    query = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "gpu": device.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_gib": round(device.total_memory / GIB, 1),
        "driver, pcie generation, width": smi.strip(),
        "cuda_driver_api": _core.driver_version() if _core.driver_is_open() else None,
        "cores": host_limits.usable_cores(),
        "host_memory": meminfo["MemTotal"].strip(),
        "transparent_hugepage": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "cumem_sleep": importlib.metadata.version("cumem-sleep"),
        "commit": os.environ.get("COMMIT"),  # a copy of the tree does not know it
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("CUMEM_SLEEP_", "PYTORCH_"))},
        "command": " ".join(["python", *(argument.removeprefix(f"{Path(argument).parent}/") for argument in sys.argv)]),
    }


def write(path: Path, results: dict[str, Any]) -> None:
    """The raw result file: facts first, then what was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n")
    print(f"wrote {path.name}", file=sys.stderr)
