"""The process that one layer lives in: reads commands from standard input, one JSON object a line, and answers alike.

Started by `recording.py`. Seconds are measured here, around the call alone, with the GPU idle before and after.
Contents are random and never written twice; checksums share no code with any layer.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from layers import LAYERS, SIMULATED, Bare, Layer, NotInstalled

GIB = 1 << 30
WORDS_AT_ONCE = 1 << 27


class TorchMemory:
    """Device memory as PyTorch's tensors."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.init()
        self.seed(int.from_bytes(os.urandom(8), "little") >> 1)

    def seed(self, seed: int) -> None:
        self._torch.cuda.manual_seed_all(seed)

    def allocate(self, nbytes: int) -> Any:
        return self._torch.empty(nbytes // 2, dtype=self._torch.bfloat16, device="cuda")

    def fill(self, tensor: Any) -> None:
        tensor.normal_()

    def checksum(self, tensor: Any) -> int:
        """Sensitive to every bit and to the place of every word."""
        total = 0
        for number, part in enumerate(tensor.view(self._torch.int64).split(WORDS_AT_ONCE)):
            places = self._torch.arange(1, 2 * part.numel(), 2, device="cuda")
            total = (total * 31 + number + int((part * places).sum().item())) & (2**64 - 1)
        return total

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def trim(self) -> None:
        """Give back what checksums took, so that every layer finds the same room."""
        self.synchronize()
        self._torch.cuda.empty_cache()

    def used_bytes(self) -> int:
        free, total = self._torch.cuda.mem_get_info()
        return int(total - free)

    def link_seconds(self, nbytes: int, rounds: int) -> dict[str, list[float]]:
        """Pinned copies each way: the ceiling."""
        device = self._torch.empty(nbytes, dtype=self._torch.uint8, device="cuda").random_()
        host = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        seconds: dict[str, list[float]] = {}
        for name, target, source in (("to_host", host, device), ("to_device", device, host)):
            copies = [self._timed_copy(target, source) for _ in range(rounds + 1)]
            seconds[name] = copies[1:]  # the first one warms up
        return seconds

    def _timed_copy(self, target: Any, source: Any) -> float:
        self.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        self.synchronize()
        return time.perf_counter() - start


class SimulatedMemory:
    """Memory of the simulated driver, which the host reaches at its device address."""

    def __init__(self) -> None:
        import numpy as np

        from cumem_sleep import CuMemAllocator

        self._np = np
        self._allocator = CuMemAllocator.get_instance()
        self.seed(None)

    def seed(self, seed: int | None) -> None:
        self._random = self._np.random.default_rng(seed)

    def allocate(self, nbytes: int) -> Any:
        address = self._allocator.malloc(nbytes)  # under the pool's tag
        return self._np.ctypeslib.as_array((ctypes.c_uint64 * (nbytes // 8)).from_address(address))

    def fill(self, words: Any) -> None:
        words[:] = self._random.integers(0, 2**64, words.size, dtype=self._np.uint64)

    def checksum(self, words: Any) -> int:
        places = self._np.arange(1, 2 * words.size, 2, dtype=self._np.uint64)
        return int((words * places).sum(dtype=self._np.uint64))

    def synchronize(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def used_bytes(self) -> int:
        from cumem_sleep import sim

        return sim.stats().mapped_bytes

    def link_seconds(self, nbytes: int, rounds: int) -> dict[str, list[float]]:
        source = self._np.zeros(nbytes, self._np.uint8)
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            source.copy()
            seconds.append(time.perf_counter() - start)
        return {"to_host": seconds, "to_device": seconds}


class Worker:
    """Carries out the commands; each public method is one, its result the answer."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._memory: TorchMemory | SimulatedMemory = SimulatedMemory() if SIMULATED else TorchMemory()
        self._weights: list[Any] = []
        self._cache: Any = None
        self._expected: list[int] = []

    def load(self, sizes: list[int], kv_bytes: int, seed: int | None = None) -> dict[str, Any]:
        """Processes that load with one seed have the same weights."""
        if seed is not None:
            self._memory.seed(seed)
        with self._layer.pool("weights"):
            self._weights = [self._memory.allocate(nbytes) for nbytes in sizes]
        with self._layer.pool("kv_cache"):
            self._cache = self._memory.allocate(kv_bytes)
        return self.change()

    def change(self) -> dict[str, Any]:
        """New random bytes in every weight."""
        for tensor in self._weights:
            self._memory.fill(tensor)
        self._expected = self._checksums()
        return {}

    def sleep(self, level: int) -> dict[str, Any]:
        available_before = _available_bytes()
        seconds = self._timed(lambda: self._layer.sleep(level))
        return {
            "seconds": seconds,
            "host_bytes": available_before - _available_bytes(),
            "left_on_gpu_bytes": self._memory.used_bytes(),
            "layer": self._layer.facts(),
        }

    def wake(self) -> dict[str, Any]:
        available_before = _available_bytes()
        seconds = self._timed(self._layer.wake)
        return {
            "seconds": seconds,
            "host_bytes": available_before - _available_bytes(),
            "layer": self._layer.facts(),
        }

    def check(self) -> dict[str, Any]:
        """Every weight, against its checksum before the sleep."""
        differ = [i for i, (a, b) in enumerate(zip(self._checksums(), self._expected, strict=True)) if a != b]
        return {"checked_tensors": len(self._weights), "differing_tensors": differ}

    def link(self, nbytes: int, rounds: int) -> dict[str, Any]:
        return self._memory.link_seconds(nbytes, rounds)

    def _timed(self, call: Callable[[], object]) -> float:
        self._memory.synchronize()
        start = time.perf_counter()
        call()
        self._memory.synchronize()
        return time.perf_counter() - start

    def _checksums(self) -> list[int]:
        sums = [self._memory.checksum(tensor) for tensor in self._weights]
        self._memory.trim()
        return sums


COMMANDS = ("load", "change", "sleep", "wake", "check", "link")


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _answers() -> IO[str]:
    """What was standard output; what the libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> None:
    answers = _answers()

    def answer(**content: object) -> None:
        print(json.dumps(content), file=answers, flush=True)

    name = sys.argv[1]
    try:
        layer = LAYERS[name]() if name in LAYERS else Bare()
        worker = Worker(layer)
    except NotInstalled as error:
        answer(not_installed=str(error))
        return
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        return
    answer(version=layer.version())
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        assert command in COMMANDS, command
        try:
            answer(**getattr(worker, command)(**request))
        except Exception as error:
            answer(error=f"{command}: {type(error).__name__}: {error}", traceback=traceback.format_exc())
    answers.flush()
    os._exit(0)  # without the layers' destructors, which are not what is compared


if __name__ == "__main__":
    main()
