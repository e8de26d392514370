#!/usr/bin/env python3
"""Pause and resume by torch_memory_saver's calls: seconds, host memory and memory left, of whichever package is found.

    python benchmarks/torch_memory_saver_calls.py --gib 30 > theirs.json
    PYTHONPATH=$(cumem-sleep shim torch_memory_saver) python benchmarks/torch_memory_saver_calls.py --gib 30 > ours.json

Needs a GPU, PyTorch, and as much host memory as is backed up. Run both on one machine, one after the other; `--retain`
leaves backups in host memory. Segments have the sizes of a 32B model's in vLLM, scaled. Every byte is compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from cumem_sleep.tools.bench.workload import model_like

SCRUBBED_S = 3.0  # the driver has scrubbed freed memory by then


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


class Model:
    """Tensors in a region that is backed up; each knows its own sum."""

    def __init__(self, torch: Any, saver: Any, segments: list[int]) -> None:
        self._torch = torch
        with saver.region(tag="weights", enable_cpu_backup=True):
            self.tensors = [torch.randint(-(2**62), 2**62, (n // 8,), device="cuda") for n in segments]
        self._copies = [tensor.cpu() for tensor in self.tensors]

    def change(self) -> None:
        for tensor in [*self.tensors, *self._copies]:
            tensor.add_(1)

    def check(self) -> None:
        for tensor, copy in zip(self.tensors, self._copies, strict=True):
            assert self._torch.equal(tensor.cpu(), copy), "bytes differ"


def timed(torch: Any, call: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call("weights")
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=30, help="bytes that are backed up (default: 30)")
    parser.add_argument("--retain", action="store_true", help="retain_cpu_backup")
    options = parser.parse_args()
    try:
        import torch
        import torch_memory_saver as package
    except ImportError as error:
        print(f"{Path(__file__).name} needs PyTorch and torch_memory_saver: {error}", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print(f"{Path(__file__).name} needs a GPU", file=sys.stderr)
        return 1
    saver = package.torch_memory_saver
    saver.hook_mode = "torch"
    saver.retain_cpu_backup = options.retain
    model = Model(torch, saver, list(model_like(options.gib << 30)))
    steps: list[dict[str, float | int | str]] = []
    before = resident_bytes()
    for step, wait_s in (("first", 0.0), ("unchanged", 0.0), ("changed", SCRUBBED_S), ("unchanged", SCRUBBED_S)):
        if step == "changed":
            model.change()
        pause_s = timed(torch, saver.pause)
        left = torch.cuda.device_memory_used()
        paused = resident_bytes()
        time.sleep(wait_s)
        resume_s = timed(torch, saver.resume)
        steps.append(
            {
                "pause": step,
                "pause_s": pause_s,
                "resume_after_s": wait_s,
                "resume_s": resume_s,
                "host_bytes_paused": paused - before,
                "host_bytes_resumed": resident_bytes() - before,
                "left_bytes": left,
            }
        )
        model.check()
    print(json.dumps({"package": package.__file__, "retain": options.retain, "gib": options.gib, "steps": steps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
