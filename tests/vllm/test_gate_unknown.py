"""Routes and worker methods that the gate does not know, and that change the model's sleep, as vllm-omni's do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_vllm import AnotherClient, Client, FakeEngine, FakeRoute, FakeVllm, until_idle
from gate_client import Serve, asleep

pytestmark = pytest.mark.usefixtures("gate_environment")
SLEEP = "/v1/omni/sleep"


class Engine(FakeEngine):
    """Only its workers know of some sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.unaware = False
        self.late: asyncio.Event | None = None  # what the answers now on their way wait for

    async def is_sleeping(self) -> bool:
        answer = await super().is_sleeping() and not self.unaware
        if self.late is not None:
            await self.late.wait()
        return answer

    async def put_to_sleep(self, past_engine: bool) -> None:
        if past_engine:
            self.unaware = True
            self._sleep(1)
        else:
            await self.sleep(1)

    async def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        if method == "trainers_sleep":
            await self.put_to_sleep(past_engine=True)
        if method == "wake_up":
            self.asleep.clear()
        return await super().collective_rpc(method, *args, **kwargs)


class Omni(FakeVllm):
    """Has a route that nobody knows."""

    def __init__(self, past_engine: bool = False, engine: Any = None) -> None:
        super().__init__(engine or Engine())
        self.past_engine = past_engine
        self.router.routes.append(FakeRoute("POST", SLEEP))

    async def _route(self, scope: Any, path: str, body: bytes) -> tuple[int, Any]:
        if path != SLEEP:
            return await super()._route(scope, path, body)
        if "begin" in self.engine.waits:
            await self.engine._called("begin")
        await self.engine.put_to_sleep(self.past_engine)
        if "answer" in self.engine.waits:
            await self.engine._called("answer")
        return 200, {"status": "sleeping"}


@pytest.fixture(params=[False, True], ids=["by the engine", "past the engine"])
def past_engine(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def awake(client: Client) -> Client:
    assert (await client.ask()).body == {"text": "good"}
    return client


async def test_after_an_unknown_route_the_next_request_finds_out_what_sleeps(
    serve: Serve, policy: str, past_engine: bool
) -> None:
    client = await awake(serve(Omni(past_engine), on_request=policy, request_deadline_s=0.2))
    assert (await client.post(SLEEP)).code == 200
    answer = await client.ask()
    assert (answer.code, client.engine.count("wake_up") > 0) == ((200, True) if policy == "wake" else (503, False))


async def test_after_its_answer_nothing_passes_though_the_server_is_not_done_with_it(
    serve: Serve, past_engine: bool
) -> None:
    """As with background tasks of a route. Another request has asked before the sleep, and hears of it late."""
    vllm = Omni(past_engine)
    client, engine = await awake(serve(vllm)), vllm.engine
    answered, may_end = asyncio.Event(), asyncio.Event()

    async def serve_slowly(scope: Any, receive: Any, send: Any) -> None:
        await vllm(scope, receive, send)
        if scope["path"] == SLEEP:
            answered.set()
            await may_end.wait()

    client.gate._app = serve_slowly
    engine.waits["begin"] = asyncio.Event()
    unknown = client.begin("POST", SLEEP)
    await engine.entered["begin"].wait()
    engine.late = asyncio.Event()
    early = await client.under_way("/v1/completions")
    late, engine.late = engine.late, None
    engine.waits["begin"].set()
    await answered.wait()
    request = await client.under_way("/v1/completions")
    late.set()
    assert [(await each.response()).code for each in (early, request)] == [503, 503]
    may_end.set()
    assert (await unknown.response()).code == 200


@pytest.mark.parametrize("early", [True, False])
async def test_during_an_unknown_call_each_request_asks(serve: Serve, past_engine: bool, early: bool) -> None:
    client = await awake(serve(Omni(past_engine)))
    engine = client.engine
    engine.waits["answer"] = engine.waits["tokenize"] = asyncio.Event()
    request = client.begin("POST", "/v1/completions") if early else None  # it passes, and is not in the engine yet
    await until_idle()
    unknown = client.begin("POST", SLEEP)
    await engine.entered["answer"].wait()
    if request is None:
        assert (await client.ask()).code == 503
    del engine.waits["answer"]
    engine.waits["tokenize"].set()
    assert (await unknown.response()).code == 200
    assert request is None or (await request.response()).code == 503


@pytest.mark.parametrize("plugin", [True, False])
async def test_an_answer_from_before_the_call_is_not_believed(serve: Serve, plugin: bool) -> None:
    client = serve(Omni())
    engine = client.engine
    engine.plugin, engine.late = plugin, asyncio.Event()
    request = await client.under_way("/v1/completions")
    late, engine.late = engine.late, None
    client.gate.controller.doubt()
    engine._sleep(1)
    late.set()
    assert (await request.response()).error["message"] == "the model is asleep (level 1): POST /wake_up"


async def test_an_unknown_worker_method_is_doubted_as_well(serve: Serve) -> None:
    client = await awake(serve(Omni()))
    for method, code in (("echo", 200), ("trainers_sleep", 503)):
        assert (await client.post("/collective_rpc", f'{{"method": "{method}"}}'.encode())).code == 200
        assert (await client.ask()).code == code


async def test_other_api_servers_hear_of_it(serve: Serve, past_engine: bool) -> None:
    first = serve(Omni(past_engine))
    second = serve(FakeVllm(AnotherClient(first.engine)))
    for client in (first, second):
        client.vllm.state.args.api_server_count = 2
        await awake(client)
    assert (await first.post(SLEEP)).code == 200
    for client in (second, first):
        assert (await client.ask()).code == 503
    first.engine.unaware = False
    await first.post("/wake_up")
    asked = first.engine.count("cumem_sleep_status")
    for client in (second, first):
        for _ in range(3):
            assert (await client.ask()).code == 200
    assert first.engine.count("cumem_sleep_status") <= asked + 2, "it is asked once"


async def test_a_model_that_still_serves_is_asked_once(serve: Serve) -> None:
    client = await awake(serve())
    asked = client.engine.count("is_sleeping")
    assert (await client.post("/some_future_path")).code == 200
    for _ in range(3):
        await awake(client)
    assert client.engine.count("is_sleeping") - asked <= 3  # by its own request, before the engine, and afterwards


async def test_what_sleeps_is_said_by_tag(serve: Serve) -> None:
    client = await asleep(serve)
    assert (await client.get("/is_sleeping")).body == {"is_sleeping": True, "tags": ["kv_cache", "weights"]}
    for woken, left in (("weights", "kv_cache"), ("kv_cache", "weights")):
        await client.post("/wake_up")
        await client.post("/sleep")
        await client.post(f"/wake_up?tags={woken}")
        assert (await client.get("/is_sleeping")).body["tags"] == [left]
        said = (await client.get("/health")).body
        assert said == {"status": "asleep", "asleep": True, "level": 1, "tags": [left]}
        message = (await client.ask()).error["message"]
        assert message == f"the model is asleep (level 1, {left} alone): POST /wake_up"
    await client.post("/wake_up")
    assert "tags" not in (await client.get("/is_sleeping")).body
    assert (await client.ask()).code == 200
