"""A real vLLM server without development mode, whose gate answers the calls for sleep: a program that checks it.

    python tests/vllm/served_controls.py        with one API server, then with two, and one listener for both

Only the worker is not vLLM's: `watched_worker` records each touch of memory that sleeps.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import tempfile
from contextlib import AsyncExitStack
from typing import Any

import raw_http
from gate_episodes import COMPLETIONS, Server, World
from raw_http import Request

TOKEN = "token-of-the-operator"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")
CONTROLS = (
    "/sleep",
    "/wake",
    "/wake_up",
    "/is_sleeping",
    "/reload_weights",
    "/reset_prefix_cache",
    "/pause",
    "/resume",
    "/cumem_sleep/status",
)
OTHERS = (
    *("/collective_rpc", "/update_weights", "/start_weight_update", "/finish_weight_update", "/abort_requests"),
    *("/start_draft_weight_update", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
    *("/release_kv_cache_memory", "/update_weight_version", "/weight_checker", "/weight_info", "/get_world_size"),
    *("/server_info", "/reset_mm_cache", "/reset_encoder_cache", "/is_paused", "/start_profile", "/stop_profile"),
    *("/sleep/", "/wake_up/", "/fault_tolerance/apply", "/inference/v1/abort_requests"),
)
GOOD = json.dumps({"model": "model", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}).encode()
JSON = {"Content-Type": "application/json"}


class Checked:
    """The servers of one vLLM, and what is asked of them."""

    def __init__(self, world: World, ports: list[int], admin: str) -> None:
        self.world, self.ports, self.admin = world, ports, admin

    async def complete(self, port: int) -> raw_http.Answer:
        return await raw_http.send(port, Request("POST", COMPLETIONS, GOOD, JSON))

    async def control(self, target: str, body: Any = None, method: str = "POST", token: str = TOKEN) -> raw_http.Answer:
        """A call where these are served: on the listener if there is one, else on the first port."""
        content = b"" if body is None else json.dumps(body).encode()
        request = Request(method, target, content, {"Authorization": f"Bearer {token}"} if token else {})
        if not self.admin:
            return await raw_http.send(self.ports[0], request)
        reader, writer = await asyncio.open_unix_connection(self.admin)
        writer.write(request.head() + content)
        try:
            return raw_http.parse(await reader.read(-1))
        finally:
            writer.close()

    async def asleep(self) -> set[str]:
        return set((await self.world.state())["asleep"])


async def check_that_the_port_gives_nothing(checked: Checked) -> None:
    """30 paths by 10 methods, without the token, and with it where there is a listener."""
    assert len({*CONTROLS, *OTHERS}) >= 30
    before = await checked.world.state()
    for path in (*CONTROLS, *OTHERS):
        for method in METHODS:
            for token in ({}, {"Authorization": f"Bearer {TOKEN}"})[: 2 if checked.admin else 1]:
                answer = await raw_http.send(checked.ports[-1], Request(method, path, b"{}", {**JSON, **token}))
                is_question = path == "/is_sleeping" and method == "GET" and not checked.admin
                assert answer.code in ((200,) if is_question else (400, 401, 403, 404, 405)), (method, path, answer)
                if checked.admin and path in CONTROLS and method not in ("CONNECT", "BREW"):  # uvicorn takes neither
                    assert answer.code == 404, (method, path, answer)
    assert await checked.world.state() == before
    assert (await checked.complete(checked.ports[0])).code == 200


async def check_that_the_listener_gives_nothing_else(checked: Checked) -> None:
    """What the gate refuses: the same paths by the same methods, but for the controls by theirs."""
    if not checked.admin:
        return
    before = await checked.world.state()
    for path in (*CONTROLS, *OTHERS, COMPLETIONS, "/health"):
        for method in METHODS:
            if path.rstrip("/") not in CONTROLS or method not in ("GET", "POST"):
                assert (await checked.control(path, {}, method)).code == 404, (method, path)
            for token in ("", "wrong"):
                answer = await checked.control(path, {}, method, token)
                is_question = (method, path) == ("GET", "/is_sleeping")
                assert answer.code in ((200,) if is_question else (401, 404)), (method, path, answer)
    assert await checked.world.state() == before


async def check_as_the_front_does(checked: Checked) -> None:
    """`serve` has the token as its key, and no way but that of the gate."""
    from cumem_sleep.serve.address import Address
    from cumem_sleep.serve.engines.vllm import VllmEngine
    from cumem_sleep.serve.events import Outcome
    from cumem_sleep.serve.status import Phase

    at = (f"http://127.0.0.1:{checked.ports[0]}",) if not checked.admin else ("http://model", checked.admin)
    engine = VllmEngine(Address(*at, control=(("Authorization", f"Bearer {TOKEN}"),)), 60.0)
    try:
        awake = await engine.facts()
        assert (engine.has_gate, awake.layer, awake.wake_bytes) == (True, "active", 0), awake
        assert awake.mapped_bytes
        for level in (1, 2):
            assert await engine.sleep(level) == Outcome(None, Phase.ASLEEP, level)
            assert (await engine.look()).state is Phase.ASLEEP
            assert (await engine.facts()).mapped_bytes == 0
            assert await engine.give_up_kept() == ""
            assert await checked.asleep() == {"weights", "kv_cache"}
            assert await engine.wake(level) == Outcome(None, Phase.AWAKE)
            assert await engine.look() == Outcome(None, Phase.AWAKE)
        assert (await engine.facts()).mapped_bytes == awake.mapped_bytes
        for port in checked.ports:
            assert b"good good good" in (await checked.complete(port)).body
    finally:
        await engine.close()


async def check_sleeps(checked: Checked) -> None:
    assert (await checked.control("/reset_prefix_cache?reset_external=true")).code == 200
    for level in (1, 2, 0):
        slept = await checked.control("/sleep", {"level": level})
        weights = ("awake", "backed up", "dropped")[level]
        became = {"weights": weights, "kv_cache": "cleared" if level else "awake"}
        assert (slept.code, slept.json) == (200, {"status": "sleeping", "level": level, **became}), slept
        status = (await checked.control("/cumem_sleep/status", method="GET")).json
        assert (status["active"], status["why_not"]) == (True, "")
        assert (await checked.asleep() == {"weights", "kv_cache"}) is (level > 0)
        assert (await checked.control("/is_sleeping", method="GET")).json["is_sleeping"] is True
        for port in checked.ports:
            assert (await checked.complete(port)).code == 503
        assert (await checked.control("/resume")).code == (409 if level else 200)
        if level == 2:
            assert (await checked.control("/reload_weights")).code == 409
            woken = await checked.control("/wake?tags=weights")
            assert woken.json == {"status": "sleeping", "tags": ["weights"]}
            assert (await checked.control("/reload_weights")).code == 200
        assert (await checked.control("/wake_up")).json == {"status": "awake", "tags": None}
        for port in checked.ports:
            answer = await checked.complete(port)
            assert answer.code == 200, answer
            assert b"good good good" in answer.body, answer


async def check_that_a_wake_loads(checked: Checked) -> None:
    """As programs call it that know no more than `/sleep` and `/wake_up`, where a request would load weights, too."""
    for _ in range(2):
        for target in ("/sleep?level=0&mode=wait", "/sleep?level=2"):
            assert (await checked.control(target)).code == 200
        assert (await checked.control("/wake_up")).json == {"status": "awake", "tags": None}
        for port in checked.ports:
            assert (await raw_http.send(port, Request("GET", "/health"))).code == 200
            assert b"good good good" in (await checked.complete(port)).body
    assert (await checked.control("/pause?mode=keep&clear_cache=false")).code == 200
    assert (await checked.control("/resume")).code == 200


CHECKS = {
    "reject": (
        *(check_that_the_port_gives_nothing, check_that_the_listener_gives_nothing_else),
        *(check_as_the_front_does, check_sleeps),
    ),
    "wake": (check_that_a_wake_loads,),
}


async def check(world: World, servers: int, folder: pathlib.Path) -> None:
    import gate_episodes

    for admin, policy in ((str(folder / "admin"), "reject"), ("", "reject"), ("", "wake")):
        os.environ.update(CUMEM_SLEEP_ADMIN_TOKEN=TOKEN, CUMEM_SLEEP_ADMIN=admin and f"unix:{admin}")
        os.environ["CUMEM_SLEEP_ON_REQUEST"] = policy
        plan = gate_episodes.Plan(0, policy=policy, token=True, key=False, plugin=True, servers=servers, root_path="")
        world = await World.around(world.client, folder)  # at its end a server forgets its engine
        await world.reset(plan)
        found: list[str] = []
        async with AsyncExitStack() as stack:
            ports = []
            for number in range(servers):
                app = world.gated(plan, number, found, gate_episodes.Counter())
                ports.append((await stack.enter_async_context(Server(app, lifespan="on"))).port)
            checked = Checked(world, ports, admin)
            for each in CHECKS[policy]:
                await each(checked)
                print(f"{each.__name__}, {servers} servers, {'with' if admin else 'without'} a listener", flush=True)
        assert not found, found
        assert not world.touches(), world.touches()
        assert not admin or not os.path.exists(admin)


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        import watched_server

        watched_server.prepare_process(pathlib.Path(name))
        os.environ["VLLM_SERVER_DEV_MODE"] = "0"
        async with AsyncExitStack() as stack:
            world = await World.make(pathlib.Path(name), stack)
            for servers in (1, 2):
                await check(world, servers, pathlib.Path(name))


if __name__ == "__main__":
    asyncio.run(main())
