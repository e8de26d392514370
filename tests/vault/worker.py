"""One process of a model server, a rank or a replica, which does what its standard input says: a call a line, in JSON.

It allocates as vLLM's worker does, and sleeps and is asked as vLLM does it, through the plugin's methods.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
from support import PAGE, Memory, bf16_weights

from cumem_sleep import CuMemAllocator, CumemSleepError, _core, sim
from cumem_sleep.vllm import plugin


class VaultWorker:
    """Stands for vLLM's `WorkerWrapperBase`, in which the plugin puts its methods, and for the worker in it."""

    def __init__(self, rank: int, device: int, seed: int, pages: int) -> None:
        self.worker, self.rank = self, rank
        self.report: Any = None
        self._allocator = CuMemAllocator.get_instance()
        self._memory = Memory()
        self._device = device
        self._weights = self._allocator.malloc(pages * PAGE, "weights", device)
        # As of a tensor of vLLM: what is of none is backed up.
        storage = SimpleNamespace(data_ptr=lambda: kv_cache, nbytes=lambda: PAGE)
        kv_cache = self._allocator.malloc(PAGE, "kv_cache", device)
        self.model_runner = SimpleNamespace(kv_caches=[SimpleNamespace(untyped_storage=lambda: storage)])
        self._load(seed, pages)

    def _load(self, seed: int, pages: int) -> None:
        self._content = bf16_weights(pages * PAGE, np.random.default_rng(seed))
        self._memory.write(self._weights, self._content, self._device)
        self._memory.close()
        self._pinned_bytes = sim.stats().registered_bytes

    def compile_or_warm_up_model(self) -> None:
        """The part of vLLM; the plugin begins to prepare after it."""

    def sleep(self, level: int = 1) -> None:
        """The part of vLLM: it calls the allocator."""
        self.report = self._allocator.sleep(level)

    # What the test calls

    def warm_up(self) -> None:
        plugin.compile_or_warm_up_model(self)
        if self._allocator._preparation is not None:
            assert self._allocator._preparation.wait(60)
            assert self._allocator._preparation.error is None

    def fall_asleep(self) -> Any:
        plugin.sleep(self)
        return {**asdict(self.report), "line": str(self.report)}

    def wake_up(self) -> Any:
        return asdict(self._allocator.wake_up())

    def status(self) -> Any:
        return {**plugin.cumem_sleep_status(self), "gpu": _core.device_info(self._device).uuid}

    def load(self, seed: int) -> None:
        """Other weights: as a trainer writes them."""
        self._load(seed, len(self._content) // PAGE)

    def place(self) -> tuple[int, int, int]:
        """Where the backup of the weights begins: the device and inode of the slab or file, and the offset there."""
        (segment,) = (each for each in _core.segments() if each.address == self._weights)
        tier = self._allocator._store.memory.tier
        tier.hear()  # type: ignore[attr-defined]
        extent: Any = self._allocator._store.catalogue.get_or_raise(segment).extents[0]
        slab, offset, _ = extent.extents[0]
        facts = os.fstat(extent.descriptor(slab))
        return facts.st_dev, facts.st_ino, offset

    def is_right(self) -> bool:
        content = self._memory.read(self._weights, len(self._content), self._device)
        self._memory.close()
        return content == self._content

    def pinned_bytes(self) -> int:
        """By this process, for backups."""
        return sim.stats().registered_bytes - self._pinned_bytes


def main() -> None:
    rank, device, seed, pages = map(int, sys.argv[1:])
    worker = VaultWorker(rank, device, seed, pages)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer: Any = {"answer": getattr(worker, name)(*arguments)}
        except CumemSleepError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
