"""A simulated server with the real layer in it, on the simulated driver: its backups lie in a vault, if it is told so.

It answers as vLLM does with the plugin and without the gate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import Memory

from cumem_sleep import CuMemAllocator, CumemSleepError
from cumem_sleep.http.asgi import Message, Scope, refusal, response
from cumem_sleep.serve.simulated_server import SimulatedServer, arguments, serve


class VaultServer(SimulatedServer):
    """Servers of one seed have the same weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.allocator = CuMemAllocator.get_instance()
        address = self.allocator.malloc(options.weights_bytes, "weights", 0)
        memory = Memory()
        memory.write(address, np.random.default_rng(options.seed).bytes(options.weights_bytes))
        memory.close()

    async def _answer(self, method: str, path: str, scope: Scope) -> list[Message]:
        if (method, path) == ("GET", "/cumem_sleep/status"):
            usage = {tag: asdict(usage) for tag, usage in self.allocator.usage().items()}
            worker: dict[str, Any] = {
                "pid": os.getpid(),
                "usage": usage,
                "place": asdict(self.allocator.backup_place()),
            }
            return response(200, {"results": [worker]})
        return await super()._answer(method, path, scope)

    async def _sleep(self, level: int) -> list[Message]:
        try:
            await asyncio.to_thread(self.allocator.sleep, level)
        except CumemSleepError as error:
            return refusal(500, f"Call to sleep method failed: {error}")
        return await super()._sleep(level)

    async def _wake(self, tags: frozenset[str]) -> list[Message]:
        await asyncio.to_thread(self.allocator.wake_up, list(tags))
        return await super()._wake(tags)


if __name__ == "__main__":
    parser = arguments()
    parser.add_argument("--seed", type=int, required=True)
    serve(VaultServer(parser.parse_args()))
