"""Every call that workers of a real vLLM refuse asleep, of a server without a gate; a program."""

from __future__ import annotations

import asyncio
import json
import pathlib
import tempfile
from collections import Counter
from contextlib import AsyncExitStack

import raw_http
from gate_episodes import COMPLETIONS, Plan, Server, World
from raw_http import Request

from cumem_sleep.vllm.worker_methods import CALLS_BY_ENGINE, TOUCHES_WEIGHTS

REFUSED = sorted((TOUCHES_WEIGHTS | CALLS_BY_ENGINE) - {"execute_dummy_batch"})

JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"model": "model", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}).encode()
ARGUMENTS = {"execute_model": [None], "sample_tokens": [None], "save_sharded_state": ["/nowhere"]}


async def check(world: World) -> None:
    plan = Plan(0, policy="reject", token=False, key=False, plugin=True, servers=1, root_path="", gate=False)
    await world.reset(plan)
    async with Server(world.gated(plan, 0, [], Counter())) as server:
        for level in (1, 2):
            await world.client.sleep(level)
            for name in REFUSED:
                first = "wake_up(tags=['weights']) comes first" if name in TOUCHES_WEIGHTS else "wake_up() comes first"
                call = world.client.collective_rpc(name, args=tuple(ARGUMENTS.get(name, ())))
                (said,) = await asyncio.gather(call, return_exceptions=True)
                assert isinstance(said, Exception), (name, said)
                assert first in str(said), (name, said)
                body = json.dumps({"method": name, "args": ARGUMENTS.get(name, [])}).encode()
                answer = await raw_http.send(server.port, Request("POST", "/collective_rpc", body, JSON))
                assert answer.code == 500, (name, answer)
                print(f"level {level}: {name}: {answer.code} {answer.body[:200]!r}", flush=True)
            for path in ("/update_weights", "/start_weight_update", "/finish_weight_update"):
                if path in world.paths and (path == "/update_weights" or "/start_weight_update" in world.paths):
                    request = Request("POST", path, b'{"update_info": {}}', JSON)
                    answer = await raw_http.send(server.port, request)
                    assert answer.code == 500, (path, answer)
            await world.client.wake_up(["weights"] if level == 2 else None)
            if level == 2:
                await world.client.collective_rpc("reload_weights")
                await world.client.wake_up(["kv_cache"])
            answer = await raw_http.send(server.port, Request("POST", COMPLETIONS, GOOD, JSON))
            assert answer.code == 200, answer
            assert b"good good good" in answer.body, answer
    assert not world.touches(), world.touches()


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        import watched_server

        watched_server.prepare_process(pathlib.Path(name))
        async with AsyncExitStack() as stack:
            await check(await World.make(pathlib.Path(name), stack))


if __name__ == "__main__":
    asyncio.run(main())
