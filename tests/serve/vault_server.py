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
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import Memory

from cumem_sleep import CuMemAllocator, CumemSleepError
from cumem_sleep.http.asgi import Message, Scope, refusal, response
from cumem_sleep.serve.simulated_server import SimulatedServer, SimulatedServerOptions


class VaultServer(SimulatedServer):
    """Servers of one seed have the same weights."""

    def __init__(self, options: SimulatedServerOptions, seed: int) -> None:
        super().__init__(options)
        self.allocator = CuMemAllocator.get_instance()
        address = self.allocator.malloc(options.weights_bytes, "weights", 0)
        memory = Memory()
        memory.write(address, np.random.default_rng(seed).bytes(options.weights_bytes))
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    parser.add_argument("--served-model-name", nargs="+", required=True)
    parser.add_argument("--weights-bytes", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    asked = parser.parse_args()
    options = SimulatedServerOptions(tuple(asked.served_model_name), weights_bytes=asked.weights_bytes)
    uvicorn.run(VaultServer(options, asked.seed), uds=asked.uds, ws="none", lifespan="off", log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
