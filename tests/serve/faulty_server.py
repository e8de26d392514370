"""A simulated server at which much goes wrong, at random: it dies, it is slow, sleeps and wakes fail, answers are lost.

What must never happen is written to the file that `--record` names: a request while it sleeps, a sleep under a request
whose client is still there, or more memory of a GPU than there is. The GPU is a folder with a file for each model that
is awake on it. The `user` of each request goes to the file that `--executed` names, by which the test sees whether a
request was run twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from cumem_sleep.http.asgi import Message, refusal, response
from cumem_sleep.serve.simulated_server import PARTS, SimulatedServer, _send_all, arguments, serve

NOTICED_WITHIN_S = 20.0  # that a client has left; on a busy machine this takes its time


def lives(pid: str) -> bool:
    """Whoever has died holds no memory."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class FaultyServer(SimulatedServer):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.gpus: list[Path] = options.gpus
        self.executed: Path = options.executed
        self.lasted = self.executed.with_name("lasted")  # seconds of requests
        self.under_way: set[str] = set()
        self.abandoned: set[str] = set()  # by their clients
        seed = hash((options.seed, options.names[0], os.getpid())) & 0xFFFFFFFF
        self.chance = random.Random(seed)
        self.faults: float = options.faults
        self.has_layer = seed % 3 > 0
        self.lost = False  # weights that were dropped and not loaded again
        self.half_woken = False  # a wake failed after it had mapped its memory
        self.take()

    def take(self) -> None:
        for gpu in self.gpus:
            for other in gpu.iterdir():
                if lives(other.read_text()):
                    self._record(f"{gpu.name} is held by {other.name}")
            (gpu / self.options.names[0]).write_text(str(os.getpid()))

    def give(self) -> None:
        for gpu in self.gpus:
            (gpu / self.options.names[0]).unlink(missing_ok=True)

    def happens(self, probability: float) -> bool:
        return self.chance.random() < probability * self.faults

    async def pause(self) -> None:
        slow = self.happens(0.1)
        await asyncio.sleep(self.chance.uniform(0.2, 0.5) if slow else self.chance.uniform(0.0, 0.02))

    async def _sleep(self, level: int) -> list[Message]:
        if met := frozenset(self.under_way):
            asyncio.get_running_loop().call_later(NOTICED_WITHIN_S, self.judge_sleep, met)
        if self.happens(0.01):
            os._exit(3)
        await self.pause()
        if self.asleep:
            return await super()._sleep(level)
        if self.happens(0.1):
            message = "not enough host memory" if self.happens(0.5) else "a sleep that was to fail"
            return refusal(500, message)
        self.lost = level == 2
        answer = await super()._sleep(level)
        self.give()
        return await self.perhaps_lost(answer)

    def judge_sleep(self, met: frozenset[str]) -> None:
        if stayed := met - self.abandoned:
            self._record(f"was put to sleep under the requests {sorted(stayed)}")

    async def _wake(self, tags: frozenset[str]) -> list[Message]:
        if self.happens(0.01):
            os._exit(3)
        await self.pause()
        if self.happens(0.1):
            return refusal(500, "a wake that was to fail")
        if "weights" in tags and "weights" in self.asleep and not self.half_woken:
            self.take()
            self.half_woken = self.has_layer and self.happens(0.4)
            if self.half_woken:  # its engine takes it to be asleep, and its workers know better
                return refusal(500, "a wake that was to fail after its memory was mapped")
        self.half_woken = False
        return await self.perhaps_lost(await super()._wake(tags))

    async def _answer(self, method: str, path: str, scope: Any) -> list[Message]:
        if path == "/cumem_sleep/status" and self.has_layer:
            nbytes = 10 << 30
            mapped_bytes = nbytes if self.half_woken or "weights" not in self.asleep else 0
            weights = {"bytes": nbytes, "mapped_bytes": mapped_bytes, "backed_up_bytes": 0}
            kept = -5 if self.happens(0.05) else "much" if self.happens(0.05) else self.kept_bytes
            kv_cache = {"bytes": nbytes, "mapped_bytes": 0, "backed_up_bytes": 0, "kept_bytes": kept}
            if self.happens(0.05):
                return response(200, {"results": [{"version": "simulated"}]})
            usage = {"weights": weights, "kv_cache": kv_cache}
            return response(200, {"results": [{"version": "simulated", "usage": usage}]})
        if path == "/reload_weights":
            self.lost = False
        return await super()._answer(method, path, scope)

    async def _reset(self) -> list[Message]:
        await self.pause()
        if self.happens(0.2):
            return refusal(500, "a reset that was to fail")
        return await self.perhaps_lost(await super()._reset())

    async def perhaps_lost(self, answer: list[Message]) -> list[Message]:
        """The connection may break off before the answer, although it was done."""
        broken: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]}
        return [broken] if self.happens(0.05) else answer

    async def _run_model(self, path: str, scope: Any, body: bytes, *others: Any) -> None:
        try:
            user = json.loads(body).get("user", "nobody")
        except (ValueError, RecursionError):
            return await _send_all(others[-1], refusal(400, "this is not JSON"))
        with self.executed.open("a") as file:
            file.write(f"{user}\n")
        if self.lost:
            self._record(f"{path}: weights are lost")
        if self.happens(0.0005):
            os._exit(4)
        if self.happens(0.005):
            asyncio.get_running_loop().call_later(self.chance.uniform(0.0, 0.01), os._exit, 4)
        await super()._run_model(path, scope, body, *others)

    async def _complete(self, path: str, asked: dict[str, Any], *others: Any) -> None:
        number, begun_s = str(asked.get("user")), time.monotonic()
        self.under_way.add(number)
        try:
            await super()._complete(path, asked, *others)
        except asyncio.CancelledError:
            self.abandoned.add(number)
            raise
        finally:
            self.under_way.discard(number)
            with self.lasted.open("a") as file:
                file.write(f"{time.monotonic() - begun_s}\n")


class FaultySglangServer(FaultyServer):
    """Its calls and its answers are those of SGLang 0.5.11; what ends its scheduler there ends it here."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.has_layer = False

    async def _answer(self, method: str, path: str, scope: Any) -> list[Message]:
        if path == "/health":
            return self.refused("a health check") if self.asleep else response(200, {})
        if path == "/server_info":
            usage = {"memory_usage": {"weight": 9.99, "kvcache": 20.0}}
            saves = {"enable_memory_saver": True, "enable_weights_cpu_backup": True, "enable_dp_attention": False}
            return response(200, {**saves, "tp_size": 1, "pp_size": 1, "dp_size": 1, "internal_states": [usage]})
        if path == "/flush_cache":
            until = time.monotonic() + float(parse_qs(scope["query_string"].decode())["timeout"][0])
            while self.running and time.monotonic() < until:
                await asyncio.sleep(0.005)
            return refusal(400, "Timed out waiting for idle state.") if self.running else response(200, {})
        if path == "/release_memory_occupation":
            met = self.asleep or self.running
            return self.refused("a release") if met else await self._sleep(1)
        if path == "/resume_memory_occupation":
            return await self._wake(PARTS) if self.asleep else self.refused("a resume")
        return await super()._answer(method, path, scope) if path == "/v1/models" else refusal(404, "Not Found")

    def refused(self, what: str) -> list[Message]:
        self._record(f"{what} while {self.running} requests ran, and {sorted(self.asleep)} were released")
        os._exit(7)


class FaultyPlainServer(FaultyServer):
    """It has no sleep mode."""

    async def _answer(self, method: str, path: str, scope: Any) -> list[Message]:
        if path == "/ready":
            return await super()._answer(method, "/health", scope)
        if path != "/v1/models":
            self._record(f"was asked {path}")
            return refusal(404, "Not Found")
        return await super()._answer(method, path, scope)


SERVERS = {"vllm": FaultyServer, "sglang": FaultySglangServer, "command": FaultyPlainServer}


if __name__ == "__main__":
    parser = arguments()
    parser.set_defaults(token_s=0.001, keep_bytes=6 << 30)
    parser.add_argument("--engine", choices=SERVERS, default="vllm")
    parser.add_argument("--gpus", nargs="+", type=Path, required=True)
    parser.add_argument("--executed", type=Path, required=True)
    parser.add_argument("--faults", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    asked = parser.parse_args()
    for gpu in asked.gpus:  # whoever held it under this name has ended
        (gpu / asked.names[0]).unlink(missing_ok=True)
    app = SERVERS[asked.engine](asked)
    if app.happens(0.1):
        sys.exit(5)
    serve(app)
    app.give()
