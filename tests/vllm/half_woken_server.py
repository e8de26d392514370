"""A real vLLM server whose workers fail in a wake after their memory is mapped: what the gate says, and what mends it.

Prints a line for each thing that is wrong; its exit status says whether there was any.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pathlib
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import raw_http
from gate_episodes import BOUND_S, COMPLETIONS, POLICIES, Plan, Server, World
from raw_http import Answer, Request

FIRSTS = ("", "weights", "kv_cache")  # the tag that was woken before, if any
REPAIRS = ("/wake_up", "/sleep", "/sleep?level=2", "a request")
BODY = json.dumps({"model": "model", "prompt": "hello", "max_tokens": 2, "ignore_eos": True}).encode()


class HalfWoken:
    def __init__(self, world: World, policy: str, level: int, first: str, repair: str) -> None:
        self.world, self.policy, self.level, self.first, self.repair = world, policy, level, first, repair
        self.found: list[str] = []
        self.port = 0

    async def run(self) -> list[str]:
        plan = Plan(0, self.policy, False, False, True, 1, "", failing=[False] * bool(self.first) + [True])
        os.environ.update(CUMEM_SLEEP_ON_REQUEST=self.policy, CUMEM_SLEEP_REQUEST_DEADLINE_S="30")
        await self.world.reset(plan)
        async with AsyncExitStack() as stack:
            app = self.world.gated(plan, 0, self.found, Counter())
            self.port = (await stack.enter_async_context(Server(app))).port
            await self._episode()
        case = f"{self.policy}, level {self.level}, {self.first or 'nothing'} woken before, {self.repair}"
        return [f"{case}: {each}" for each in self.found]

    async def _episode(self) -> None:
        await self._expect("POST", f"/sleep?level={self.level}", 200)
        if self.first:
            await self._expect("POST", f"/wake_up?tags={self.first}", 200)
        await self._expect("POST", "/wake_up", 500)
        state = await self.world.state()
        if state["asleep"] or not state["engine_asleep"]:
            self.found.append(f"workers and engine do not disagree: {state}")
        await self._expect("GET", "/is_sleeping", 503)
        health = await self._expect("GET", "/health", 503)
        if json.loads(health.body)["status"] != "disagreeing":
            self.found.append(f"/health says {health.body!r}")
        if self.repair == "a request":
            is_others = self.level == 2 and self.first == "weights"  # somebody is loading them
            await self._expect("POST", COMPLETIONS, 200 if self.policy == "wake" and not is_others else 503)
            await self._expect("POST", "/wake_up", 200)
        else:
            if self.policy != "wake":
                await self._expect("POST", COMPLETIONS, 503)
            await self._expect("POST", self.repair, 200)
        state = await self.world.state()
        if state["asleep"] != state["engine_asleep"]:
            self.found.append(f"after {self.repair} they still disagree: {state}")
        if self.repair.startswith("/sleep"):
            if not state["asleep"]:
                self.found.append(f"after {self.repair} nothing sleeps")
            await self._expect("POST", "/wake_up", 200)
        await self._expect("POST", "/reload_weights", 200)
        answer = await self._expect("POST", COMPLETIONS, 200)
        if b" good" not in answer.body:
            self.found.append(f"it answers {answer.body!r}")
        self.found += self.world.touches()

    async def _expect(self, method: str, target: str, code: int) -> Answer:
        headers = {"Content-Type": "application/json"} if target == COMPLETIONS else {}
        request = Request(method, target, BODY if target == COMPLETIONS else b"", headers)
        try:
            answer = await asyncio.wait_for(raw_http.send(self.port, request), BOUND_S)
        except asyncio.TimeoutError:
            answer = Answer(0, {}, b"no answer")
        if answer.code != code:
            self.found.append(f"{method} {target}: {answer.code} {answer.body[:300]!r} instead of {code}")
        return answer


async def main() -> int:
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        import watched_server

        watched_server.prepare_process(pathlib.Path(name))
        async with AsyncExitStack() as stack:
            world = await World.make(pathlib.Path(name), stack)
            for case in itertools.product(POLICIES, (1, 2), FIRSTS, REPAIRS):
                found += await HalfWoken(world, *case).run()
    print("\n".join(found), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
