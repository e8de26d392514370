"""Several API servers of one vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_vllm import AnotherClient, Client, FakeEngine, FakeVllm, SlowToAnswer, until_idle
from gate_client import Serve, run


async def two_servers(serve: Serve, engine: FakeEngine | None = None, **settings: Any) -> tuple[Client, Client]:
    first = serve(FakeVllm(engine), **settings)
    second = serve(FakeVllm(AnotherClient(first.engine)), **settings)
    for client in (first, second):
        client.vllm.state.args.api_server_count = 2
        assert (await client.ask()).code == 200
    return first, second


@pytest.mark.parametrize("plugin", [True, False])
def test_an_answer_from_before_anothers_sleep_is_not_believed(serve: Serve, plugin: bool) -> None:
    async def scenario() -> None:
        engine = SlowToAnswer()
        first, second = await two_servers(serve, engine, on_request="wait")
        engine.plugin = plugin
        old, new = engine.on_their_way = [asyncio.Event(), asyncio.Event()]
        early = second.begin("POST", "/v1/completions")
        await until_idle()
        del engine.on_their_way[:]
        assert (await first.post("/sleep")).code == 200
        late = second.begin("POST", "/v1/completions")
        await until_idle()
        engine.on_their_way = [new]  # the next question takes long, too
        old.set()
        await until_idle()
        assert engine.queue == []
        new.set()
        await until_idle()
        assert not early.task.done()
        assert not late.task.done()
        assert (await first.post("/wake")).code == 200
        assert [(await each.response()).body for each in (early, late)] == [{"text": "good"}] * 2

    run(scenario())


class FullSocket(FakeEngine):
    """It takes a while until a request is with the engine."""

    async def _add_request(self, request: object) -> None:
        await self._called("send")
        await super()._add_request(request)


def test_a_sleep_does_not_overtake_a_request_of_another_server(serve: Serve) -> None:
    async def scenario() -> None:
        first, second = await two_servers(serve, FullSocket())
        first.engine.waits["send"] = asyncio.Event()
        requests = [second.begin("POST", "/v1/completions") for _ in range(2)]
        await until_idle()
        response = await first.post("/sleep?level=2")
        assert response.code == 409
        assert first.engine.count("sleep") == 0
        first.engine.waits["send"].set()
        assert [(await each.response()).body for each in requests] == [{"text": "good"}] * 2
        assert (await first.post("/sleep?level=2")).code == 200

    run(scenario())


def test_a_sleep_waits_a_moment_for_a_request_that_is_being_sent(serve: Serve) -> None:
    async def scenario() -> None:
        first, second = await two_servers(serve, FullSocket())
        first.engine.waits["send"] = asyncio.Event()
        requests = [client.begin("POST", "/v1/completions") for client in (first, second)]
        await until_idle()
        sleep = first.begin("POST", "/sleep?level=2")
        await until_idle()
        first.engine.waits["send"].set()
        assert (await sleep.response()).code == 200
        assert {(await each.response()).code for each in requests} == {200}
        assert first.engine.queue == []

    run(scenario())


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/scale_elastic_ep"])
def test_adapters_are_not_loaded_after_anothers_sleep(serve: Serve, path: str, level: int) -> None:
    async def scenario() -> None:
        first, second = await two_servers(serve)
        load = second.begin("POST", path, slow=True)
        await until_idle()
        assert (await first.post(f"/sleep?level={level}")).code == 200
        load.go_on()
        assert (await load.response()).code == 503
        assert f"POST {path}" not in second.vllm.seen

    run(scenario())


def test_a_request_waits_for_anothers_wake(serve: Serve) -> None:
    async def scenario() -> None:
        first, second = await two_servers(serve, on_request="wake")
        await first.post("/sleep?level=2")
        await second.get("/health")  # it knows of the sleep
        first.engine.waits["reload_weights"] = asyncio.Event()
        requests = [first.begin("POST", "/v1/completions")]
        await first.engine.entered["reload_weights"].wait()
        requests.append(second.begin("POST", "/v1/completions"))
        await asyncio.wait({requests[1].task}, timeout=0.5)  # longer than it tries to get its turn
        first.engine.waits["reload_weights"].set()
        assert [(await each.response()).body for each in requests] == [{"text": "good"}] * 2
        assert first.engine.count("reload_weights") == 1

    run(scenario())


def test_requests_to_two_servers_at_once_load_the_weights_once(serve: Serve) -> None:
    async def scenario() -> None:
        first, second = await two_servers(serve, on_request="wake")
        await first.post("/sleep?level=2")
        requests = [client.begin("POST", "/v1/completions") for client in (first, second) * 5]
        assert [(await each.response()).body for each in requests] == [{"text": "good"}] * 10
        assert first.engine.count("reload_weights") == 1

    run(scenario())


def test_a_write_is_not_misled_by_an_answer_from_before_anothers_wake(serve: Serve) -> None:
    """Without the plugin, where such an answer means that all memory sleeps."""

    class Slow(SlowToAnswer):
        async def is_paused(self) -> bool:
            return False

    async def scenario() -> None:
        engine = Slow()
        engine.plugin = False
        first, second = await two_servers(serve, engine)
        assert (await first.post("/sleep?level=2")).code == 200
        engine.on_their_way = [old := asyncio.Event()]
        look = second.begin("POST", "/v1/completions")
        await until_idle()
        assert (await first.post("/wake")).code == 200
        second.engine.waits["reload_weights"] = asyncio.Event()
        load = second.begin("POST", "/collective_rpc", b'{"method": "reload_weights"}')
        await engine.entered["reload_weights"].wait()
        old.set()
        await until_idle()
        second.engine.waits["reload_weights"].set()
        assert (await load.response()).code == 200
        await look.response()
        assert [(await client.ask()).body for client in (first, second)] == [{"text": "good"}] * 2

    run(scenario())
