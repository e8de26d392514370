"""Random traffic at a real vLLM server that sleeps by itself, and an oracle.

    python tests/vllm/idle_episodes.py --seconds 60             from a new seed
    python tests/vllm/idle_episodes.py --seed 1234 --servers 2  with two API servers
    python tests/vllm/idle_episodes.py --engines 2              with two engines that step together (data parallelism)

Nothing may touch sleeping memory or unloaded weights (`watched_worker`); whoever waits for an answer gets all of it;
the model sleeps soon after the last request, whoever asks about its health, and now and then in between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import random
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack

import raw_http
from gate_episodes import COMPLETIONS, Plan, Server, World
from raw_http import Request

from cumem_sleep.vllm import gate, metrics

IDLE_S, WITHIN_S = 1.0, 2.0
BOUND_S = 100.0
TOKENS = (1, 5, 60, 400)  # 3 ms each: the last take longer than the model is idle before it sleeps
PAUSES_S = (0.0, 0.2, 0.9, 1.1, 1.5, 3.0)
QUESTIONS = ("/health", "/ping", "/metrics", "/v1/models", "/is_sleeping", "/load")


class Traffic:
    def __init__(self, world: World, ports: list[int], chance: random.Random, until: float) -> None:
        self.world, self.ports, self.random, self.until = world, ports, chance, until
        self.found: list[str] = []
        self.counts: Counter[str] = Counter()
        self.ended = 0.0  # the last request

    async def client(self) -> None:
        choose = self.random
        while time.monotonic() < self.until:
            for _ in range(choose.choice([1, 1, 3])):
                await self.ask(choose.choice(self.ports), choose.choice(TOKENS), choose.random() < 0.5)
            await asyncio.sleep(choose.choice(PAUSES_S))

    async def ask(self, port: int, tokens: int, stream: bool) -> None:
        choose = self.random
        body = {"model": "model", "prompt": "hello world", "max_tokens": tokens, "stream": stream, "ignore_eos": True}
        request = Request("POST", COMPLETIONS, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if choose.random() < 0.2:
            request.pause_s = choose.uniform(0.1, 1.5)
        if choose.random() < 0.15:
            request.leave = choose.choice(raw_http.LEAVES)
        answer = await asyncio.wait_for(raw_http.send(port, request), BOUND_S)
        self.ended = time.monotonic()
        self.counts["left" if request.leave else str(answer.code)] += 1
        if not request.leave and (answer.code != 200 or answer.body.count(b"good") != tokens):
            self.found.append(f"{request} is answered {answer.code} {answer.body[-300:]!r}")

    async def probe(self) -> None:
        """What is no request."""
        while True:
            for path in QUESTIONS:
                answer = await raw_http.send(self.random.choice(self.ports), Request("GET", path))
                if answer.code != 200:
                    self.found.append(f"{path} is answered {answer.code} {answer.body[-300:]!r}")
            await asyncio.sleep(0.1)

    async def look(self) -> None:
        """How often it sleeps."""
        before = False
        while True:
            asleep = bool((await self.world.state())["asleep"])
            self.counts["sleeps"] += asleep and not before
            before = asleep
            await asyncio.sleep(0.05)

    async def check_that_it_sleeps(self) -> None:
        while not (await self.world.state())["asleep"]:
            await asyncio.sleep(0.02)
            if time.monotonic() > self.ended + BOUND_S:
                self.found.append(f"awake {BOUND_S} s after the last request")
                return
        self.counts["sleeps"] += 1
        is_in_time = time.monotonic() < self.ended + IDLE_S + WITHIN_S  # on a busy machine everything is late
        self.counts["slept in time" if is_in_time else "slept late"] += 1


async def episode(world: World, seed: int, servers: int, seconds: float) -> Traffic:
    chance = random.Random(seed)
    level = chance.choice([1, 2])
    os.environ.update(CUMEM_SLEEP_ON_REQUEST="wake", CUMEM_SLEEP_IDLE_S=str(IDLE_S), CUMEM_SLEEP_IDLE_LEVEL=str(level))
    plugin = chance.random() < 0.8
    plan = Plan(seed, policy="wake", token=False, key=False, plugin=plugin, servers=servers, root_path="")
    await world.reset(plan)
    async with AsyncExitStack() as stack:
        ports = []
        for number in range(servers):
            app = world.gated(plan, number, [], Counter())
            ports.append((await stack.enter_async_context(Server(app, lifespan="on"))).port)
        traffic = Traffic(world, ports, chance, time.monotonic() + seconds)
        beside = [asyncio.create_task(each) for each in (traffic.probe(), traffic.look())]
        await asyncio.gather(*(traffic.client() for _ in range(chance.choice([1, 2, 4]))))
        await traffic.check_that_it_sleeps()
        for port in ports:
            await traffic.ask(port, 3, False)
        await traffic.check_that_it_sleeps()
        for task in beside:
            task.cancel()
        for error in await asyncio.gather(*beside, return_exceptions=True):
            if isinstance(error, Exception):
                traffic.found.append(f"{error!r}")
    traffic.found += world.touches()
    return traffic


async def main(seed: int, servers: int, engines: int, seconds: float, each_s: float) -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        import watched_server

        folder = pathlib.Path(name)
        watched_server.prepare_process(folder)
        gate.HEALTH_WITHIN_S = metrics.ANSWER_WITHIN_S = 30.0  # a busy machine may need more than the second of a probe
        async with AsyncExitStack() as stack:
            world = await World.make(folder, stack, engines)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                traffic = await episode(world, seed, servers, each_s)
                lines = [f"  FOUND {each}" for each in traffic.found]
                print("\n".join([f"seed {seed}: {dict(sorted(traffic.counts.items()))}", *lines]), flush=True)
                bad += bool(traffic.found) or not traffic.counts["sleeps"]
                seed += 1
                world = await World.around(world.client, folder)  # at its end a server forgets its engine
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first episode's; default: by the clock")
    parser.add_argument("--servers", type=int, choices=(1, 2), default=1, help="API servers of one vLLM")
    parser.add_argument("--engines", type=int, default=1, help="data-parallel engines of that vLLM")
    parser.add_argument("--seconds", type=float, default=60.0, help="new episodes begin until then")
    parser.add_argument("--each", type=float, default=12.0, help="how long clients of one episode begin to ask")
    options = parser.parse_args()
    raise SystemExit(asyncio.run(main(options.seed, options.servers, options.engines, options.seconds, options.each)))
