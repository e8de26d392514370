"""Sleeps and wakes of a 32B model's memory, with backups as they are and compressed, in one run on one GPU.

    python benchmarks/compressed.py --out compressed.json --checkpoint model.safetensors

Each kind of content and each way has a process of its own. All weights are written anew before a sleep that is to copy
them; a checkpoint's, which are repeated until the memory is full, times 1 + 0.01 of a normal value, as if trained on.
Every wake is checked by checksums that share no code with the layer. Wakes are right after their sleep, or some seconds
later: the driver scrubs freed memory at first, and what copies then has less of the link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import GIB, machine, touch_host_memory
from worker import TorchMemory

WAYS = ("off", "auto")  # of CUMEM_SLEEP_COMPRESS
NORMAL = "bf16 normal"
CONTENTS = (NORMAL, "e4m3 normal")
STANDARD_DEVIATION = 0.02
CHANGE = 0.01
PAUSE_S = 2.5
LINK_BYTES = 2 << 30
PART_VALUES = 1 << 28

FIRST, DIRTY, CLEAN, AT_ONCE, LATER = "first sleep", "dirty sleep", "clean sleep", "wake at once", "wake later"
SLEEPS = (FIRST, DIRTY, CLEAN)


class Filler:
    """Writes new content to tensors of bf16."""

    def __init__(self, content: str) -> None:
        import torch

        self._torch = torch
        self._content = content
        torch.cuda.manual_seed_all(int.from_bytes(os.urandom(8), "little") >> 1)
        self._file = self._of_file(Path(content)) if content not in CONTENTS else None

    def fill(self, tensors: Sequence[Any]) -> None:
        for number, tensor in enumerate(tensors):
            if self._file is not None:
                self._repeat(tensor, number * 1_000_003)
            elif self._content == NORMAL:
                tensor.normal_(std=STANDARD_DEVIATION)
            else:
                for part in tensor.view(self._torch.uint8).split(PART_VALUES):
                    values = self._torch.randn(part.numel(), dtype=self._torch.bfloat16, device="cuda")
                    part.copy_(values.to(self._torch.float8_e4m3fn).view(self._torch.uint8))

    def _of_file(self, path: Path) -> Any:
        """All tensors of the file as bf16, one after another."""
        from safetensors import safe_open

        with safe_open(path, "pt", device="cpu") as file:
            tensors = [file.get_tensor(name).reshape(-1) for name in file.keys()]  # noqa: SIM118
        floats = [tensor.to("cuda", self._torch.bfloat16) for tensor in tensors if tensor.is_floating_point()]
        return self._torch.cat(floats)

    def _repeat(self, tensor: Any, start: int) -> None:
        """The file's values from `start` on, again and again, each a little different."""
        filled = 0
        while filled < tensor.numel():
            first = (start + filled) % self._file.numel()
            part = self._file[first : first + tensor.numel() - filled]
            change = self._torch.randn(part.numel(), device="cuda").mul_(CHANGE).add_(1)
            tensor[filled : filled + part.numel()] = part * change
            filled += part.numel()


@dataclass
class Work:
    """One process: the steps with one content in one way."""

    content: str
    rounds: int
    weights_bytes: int
    kv_bytes: int

    def run(self) -> dict[str, Any]:
        from cumem_sleep import CuMemAllocator
        from cumem_sleep.tools.bench.link import measure_link
        from cumem_sleep.tools.bench.workload import kv_segments, model_like

        self.allocator = CuMemAllocator.get_instance()
        self.memory = TorchMemory()
        link = measure_link(self.allocator, 0, LINK_BYTES)
        with self.allocator.use_memory_pool("weights"):
            self.weights = [self.memory.allocate(nbytes) for nbytes in model_like(self.weights_bytes)]
        with self.allocator.use_memory_pool("kv_cache"):
            self.cache = [self.memory.allocate(nbytes) for nbytes in kv_segments(self.kv_bytes)]
        self.filler = Filler(self.content)
        self.steps: list[dict[str, Any]] = []
        self.bytes = sum(tensor.nbytes for tensor in self.weights)
        self.change()
        self.sleep(FIRST)
        self.wake(AT_ONCE)
        for _ in range(self.rounds):
            self.change()
            self.sleep(DIRTY)
            self.wake(AT_ONCE)
            self.change()
            self.sleep(DIRTY)
            time.sleep(PAUSE_S)
            self.wake(LATER)
            self.sleep(CLEAN)
            time.sleep(PAUSE_S)
            self.wake(LATER)
        return {
            "machine": machine(),
            "bytes": self.bytes,
            "segments": len(self.weights),
            "link_gbps": {"to_host": link.to_host_gbps, "to_device": link.to_device_gbps},
            "steps": self.steps,
        }

    def change(self) -> None:
        self.filler.fill(self.weights)
        self.expected = self.checksums()

    def sleep(self, name: str) -> None:
        self.step(name, self.allocator.sleep)

    def wake(self, name: str) -> None:
        self.step(name, self.allocator.wake_up)
        if self.checksums() != self.expected:
            raise AssertionError(f"after {name!r} the bytes are not what they were")

    def checksums(self) -> list[int]:
        return [self.memory.checksum(tensor) for tensor in self.weights]

    def step(self, name: str, call: Callable[[], Any]) -> None:
        self.memory.trim()
        start = time.perf_counter()
        report = call()
        seconds = time.perf_counter() - start
        step = {"name": name, "seconds": seconds, "stored_bytes": report.stored_bytes, "phases": report.phases}
        self.steps.append(step)
        print(f"{name}: {seconds:.3f} s", file=sys.stderr, flush=True)


def in_process(options: argparse.Namespace, content: str, way: str) -> dict[str, Any]:
    """What `Work` finds out, or how it failed: which is a result too, and keeps nothing else from being measured."""
    command = [sys.executable, __file__, "--only", content, *forwarded(options)]
    print(f"== {content}, compress={way}", file=sys.stderr, flush=True)
    process = subprocess.run(
        command, env={**os.environ, "CUMEM_SLEEP_COMPRESS": way}, stdout=subprocess.PIPE, text=True, check=False
    )
    if process.returncode:
        return {"error": f"ended with {process.returncode}"}
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def forwarded(options: argparse.Namespace) -> list[str]:
    sizes = {"--rounds": options.rounds, "--weights-mib": options.weights_mib, "--kv-gib": options.kv_gib}
    return [str(word) for pair in sizes.items() for word in pair]


def summary(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By step: the median of its seconds, and how much faster than the link that is.

    Of a sleep also without `release`, which gives device memory back when all is backed up.
    """
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(step["name"] for step in result["steps"]):
        steps = [step for step in result["steps"] if step["name"] == name]
        direction = "to_host" if name in SLEEPS else "to_device"
        at_link_s = result["bytes"] / 1e9 / result["link_gbps"][direction]
        median = statistics.median(step["seconds"] for step in steps)
        row = {"seconds": round(median, 4), "times_link": round(at_link_s / median, 3)}
        if name in SLEEPS:
            backing_up = statistics.median(step["seconds"] - step["phases"].get("release", 0) for step in steps)
            row |= {"backing_up_s": round(backing_up, 4), "backing_up_times_link": round(at_link_s / backing_up, 3)}
        stored = [step["stored_bytes"] for step in steps if step["stored_bytes"]]
        if stored:
            row["stored"] = round(statistics.median(stored) / result["bytes"], 4)
        found[name] = row
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each step, content and way."""
    lines = [f"{'':<30}{'compress':<10}{'step':<14}{'s':>8}{'× link':>8}{'  without release':>17}{'stored':>8}"]
    for result in results:
        place = f"{result['content'][:28]:<30}{result['compress']:<10}"
        if "error" in result:
            lines.append(place + result["error"])
            continue
        for name, row in result["summary"].items():
            backing_up = row.get("backing_up_times_link", "")
            lines.append(
                f"{place}{name:<14}{row['seconds']:>8.3f}{row['times_link']:>8.2f}{backing_up:>17}"
                f"{row.get('stored', ''):>8}"
            )
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--rounds", type=int, default=3, help="of each content and way (default: %(default)s)")
    parser.add_argument("--weights-mib", type=int, default=62488, help="default: %(default)s, as Qwen3-32B has")
    parser.add_argument("--kv-gib", type=float, default=54.63, help="default: %(default)s")
    parser.add_argument(
        "--checkpoint", type=Path, action="append", default=[], help="a safetensors file, taken as bf16"
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the process for this content
    options = parser.parse_args(arguments)
    if options.out is None and options.only is None:
        parser.error("--out is missing")
    if options.rounds <= 0:
        parser.error(f"--rounds {options.rounds}: at least 1")
    for path in options.checkpoint:
        if not path.is_file():
            parser.error(f"--checkpoint {path} is not a file")
    return options


def main() -> None:
    options = parse()
    if options.only is not None:
        work = Work(options.only, options.rounds, options.weights_mib << 20, int(options.kv_gib * GIB))
        print(json.dumps(work.run()))
        return
    touch_host_memory((options.weights_mib << 20) * 5 // 4)
    results: list[dict[str, Any]] = []
    for content in (*CONTENTS, *map(str, options.checkpoint)):
        for way in WAYS if content == NORMAL else WAYS[1:]:
            result = in_process(options, content, way)
            if "error" not in result:
                result["summary"] = summary(result)
            results.append({"content": Path(content).name, "compress": way, **result})
            options.out.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    print(table(results))
    if any("error" in result for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
