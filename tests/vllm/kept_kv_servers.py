"""Random requests, sleeps and updates at two API servers over engine cores that keep their KV cache over sleeps.

    python tests/vllm/kept_kv_servers.py --seed 7 --rounds 100
    python tests/vllm/kept_kv_servers.py --engines 2       data-parallel ones: all of them sleep, each keeps its own

All is as `vllm serve --api-server-count 2` starts it, each server in a process of its own, but for the worker, which
looks at every place of the KV cache that is read (`RecordingHashingWorker`). A round ends with a sleep of a known kind,
after which a prompt is found in the prefix cache, or is not. Who answers is up to the kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import os
import pathlib
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import raw_http
from raw_http import Request

from cumem_sleep import host_facts

PROMPT = list(range(7, 107))  # six blocks of 16 and a part of one
BUDGET = 20 * (2 * 32 << 10)  # blocks of both layers; the others are evicted
MODES = ("abort", "wait", "keep")
KINDS = ("kept", "not wanted", "kept", "updated", "level 2")  # of the sleeps that end rounds, in turn
STARTS_WITHIN_S = 300.0
BOUND_S = 100.0


class Named:
    """Middleware: an answer says whose it is."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-process", str(os.getpid()).encode())]
            await send(message)

        await self.app(scope, receive, named)


class KeptTraffic:
    def __init__(self, port: int, seed: int, engines: int) -> None:
        self.port, self.chance, self.engines = port, random.Random(seed), engines
        self.processes: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._prefixes = [self._tokens(200) for _ in range(3)]

    def _tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(7, 107) for _ in range(count)]

    async def _send(self, method: str, target: str, body: Any, **headers: str) -> raw_http.Answer:
        content = json.dumps(body).encode() if body else b""
        request = Request(method, target, content, {"Content-Type": "application/json", **headers})
        answer = await asyncio.wait_for(raw_http.send(self.port, request), BOUND_S)
        self.processes.add(answer.headers.get("x-process", ""))
        return answer

    async def control(self, target: str, **body: Any) -> None:
        """A call of the operator, once no other server is at one."""
        while True:
            answer = await self._send("POST", target, body)
            if answer.code == 409 and b"another API server" in answer.body:
                self.counts["another server's turn"] += 1
                await asyncio.sleep(0.01)
                continue
            if answer.code == 409 and b"requests were kept" in answer.body:
                target = "/wake_up"
                continue
            assert answer.code == 200, (target, answer)
            return

    async def complete(self, prompt: list[int], most: int, engine: int | None = None) -> Any:
        body = {"model": "model", "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
        chosen = {} if engine is None else {"X-data-parallel-rank": str(engine)}
        answer = await self._send("POST", "/v1/completions", body, **chosen)
        assert answer.code == 200, answer
        return answer.json

    async def round(self, kind: str) -> None:
        await asyncio.gather(*(self._client() for _ in range(3)), self._operator())
        await self.control("/reset_prefix_cache?reset_running_requests=true")  # whatever was written before
        await self._check_a_sleep(kind)

    async def _client(self) -> None:
        choose = self.chance
        for _ in range(choose.randrange(1, 5)):
            prompt = choose.choice(self._prefixes)[: choose.randrange(1, 200)] + self._tokens(choose.randrange(1, 40))
            await self.complete(prompt, choose.randrange(1, 40))
            await asyncio.sleep(choose.uniform(0, 0.05))

    async def _operator(self) -> None:
        choose = self.chance
        for _ in range(choose.randrange(1, 4)):
            await asyncio.sleep(choose.uniform(0, 0.1))
            if choose.random() < 0.2:
                await self.control("/wake_up")
                await self.control("/collective_rpc", method="change_weights")
            await self.control(f"/sleep?level=1&mode={choose.choice(MODES)}&keep_kv={choose.choice('0111')}")
            if choose.random() < 0.5:  # else by the next request
                await asyncio.sleep(choose.uniform(0, 0.1))
                for tags in choose.choice([[""], ["?tags=weights", "?tags=kv_cache"]]):
                    await self.control("/wake_up" + tags)
        await asyncio.sleep(choose.uniform(0, 0.2))
        await self.control("/wake_up")  # if it kept all requests, none will come

    async def _check_a_sleep(self, kind: str) -> None:
        engines = range(self.engines)
        before = [await self.complete(PROMPT, 3, engine) for engine in engines]
        if kind == "updated":
            await self.control("/collective_rpc", method="change_weights")
        level, mode = (2, "abort") if kind == "level 2" else (1, self.chance.choice(MODES))
        await self.control(f"/sleep?level={level}&mode={mode}&keep_kv={int(kind != 'not wanted')}")
        if kind == "level 2":
            await self.control("/wake_up?tags=weights")
            await self.control("/reload_weights")
            await self.control("/wake_up")
        after = [await self.complete(PROMPT, 3, engine) for engine in engines]
        found = [(each["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0 for each in after]
        assert found == [96 if kind == "kept" else 0] * self.engines, (kind, mode, found)
        assert [each["choices"][0]["text"] for each in after] == [each["choices"][0]["text"] for each in before], kind
        self.counts[kind] += 1


async def attend(server: Any, port: int, seed: int, rounds: int, engines: int) -> None:
    """All rounds, once the server answers."""
    traffic, end = KeptTraffic(port, seed, engines), time.monotonic() + STARTS_WITHIN_S
    while True:
        assert server.is_alive()
        assert time.monotonic() < end
        try:
            if (await traffic._send("GET", "/health", {})).code == 200:
                break
        except OSError:
            await asyncio.sleep(0.05)
    for number in range(rounds):
        try:
            await traffic.round(KINDS[number % len(KINDS)])
        except Exception:
            print(f"seed {seed}, round {number}", flush=True)
            raise
    while len(traffic.processes) < 2:
        await traffic.complete(PROMPT, 1)
    print(dict(sorted(traffic.counts.items())), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engines", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        import watched_server

        folder = pathlib.Path(name)
        watched_server.prepare_process(folder)
        # Forks look there, too. On a busy disk little of this machine's memory is free at times, and nothing is kept.
        host_facts.mem_available_bytes = lambda *_, **__: 1 << 40
        host_facts.cgroup_available_bytes = lambda *_, **__: None
        os.environ.update(CUMEM_SLEEP_KEEP_KV_BYTES=str(BUDGET), CUMEM_SLEEP_ON_REQUEST="wake")
        line = ["--model", str(watched_server.model_folder(folder)), "--served-model-name", "model"]
        line += watched_server.options("recording_hashing_worker.RecordingHashingWorker")
        line += ["--enable-sleep-mode", "--block-size", "16", "--num-gpu-blocks-override", "61"]
        line += ["--api-server-count", "2", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        line += ["--data-parallel-size", str(options.engines)]
        line += ["--middleware", "cumem_sleep.vllm.SleepGate", "--middleware", "kept_kv_servers.Named"]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        line += ["--host", "127.0.0.1", "--port", str(port)]
        fork = multiprocessing.get_context("fork")
        importlib.import_module("vllm.v1.utils")
        multiprocessing.get_context = lambda _=None: fork  # type: ignore[assignment]  # importing takes ten seconds
        from vllm.entrypoints.cli.serve import run_multi_api_server

        server = fork.Process(target=run_multi_api_server, args=(watched_server.parsed(line),))
        server.start()
        try:
            asyncio.run(attend(server, port, options.seed, options.rounds, options.engines))
        finally:
            server.terminate()
            server.join(60)
        touches = folder / "touches.jsonl"
        assert not touches.exists(), touches.read_text()


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    main()
