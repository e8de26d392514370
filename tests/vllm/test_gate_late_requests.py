"""Requests that passed while the model was awake, and reach the engine later."""

from __future__ import annotations

import asyncio

import pytest
from fake_vllm import Client, FakeEngine, FakeVllm, Held, SlowToAnswer, until_idle
from gate_client import Serve, outcomes

WAYS = ("tokenize", "body", "websocket")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """What keeps a request from the engine."""
    return str(request.param)


async def begin(client: Client, way: str) -> Held:
    """A request that passed the gate, and is on its way to the engine."""
    await client.get("/health")  # the gate knows that the model is awake
    client.engine.waits["tokenize"] = asyncio.Event()
    if way == "websocket":
        request = client.begin("", "/v1/realtime", type="websocket")
    else:
        request = await client.under_way("/v1/completions", slow=way == "body")
    assert not request.task.done()
    return request


async def arrive(client: Client, request: Held) -> None:
    request.go_on()
    client.engine.waits["tokenize"].set()
    await until_idle()


def is_refused(request: Held) -> bool:
    if request.sent[0]["type"] == "websocket.accept":
        return request.sent[1:] != [{"type": "websocket.send", "text": "good"}]
    return int(request.sent[0]["status"]) == 503


@pytest.mark.parametrize("level", [1, 2])
async def test_one_that_arrives_asleep_never_reaches_the_engine(
    serve: Serve, policy: str, way: str, level: int
) -> None:
    client = serve(on_request=policy)
    request = await begin(client, way)
    assert (await client.post(f"/sleep?level={level}")).code == 200
    await arrive(client, request)
    assert client.engine.queue == [], "vLLM would run it as soon as its scheduler resumes"
    if policy == "reject":
        await request.response()
        assert is_refused(request)
        assert client.engine.count("generate") == 0
        assert client.engine.aborted, "vLLM's frontend would keep it for ever"
        return
    if policy == "wait":
        assert not request.task.done()
        await client.post("/wake_up")
        await until_idle()
        assert request.task.done() == (level == 1)
        if level == 2:
            await client.post("/reload_weights")
    await request.response()
    assert not is_refused(request)
    assert client.engine.weights == "good"


@pytest.mark.parametrize("order", [("/wake",), ("/wake?tags=kv_cache", "/wake?tags=weights")])
async def test_one_that_arrives_before_weights_are_loaded_does_not_run_on_them(
    serve: Serve, policy: str, way: str, order: tuple[str, ...]
) -> None:
    client = serve(on_request=policy)
    request = await begin(client, way)
    await client.post("/sleep?level=2")
    for call in order:
        assert (await client.post(call)).code == 200
    await arrive(client, request)
    assert client.engine.count("generate") == 0 or client.engine.weights == "good"
    await client.post("/reload_weights")
    await request.response()
    assert is_refused(request) == (policy == "reject")


@pytest.mark.parametrize("policy", ["wait", "wake"])
async def test_no_more_are_held_than_allowed(serve: Serve, policy: str) -> None:
    """Together with those that arrive asleep."""
    client = serve(on_request=policy, max_held_requests=3)
    late, tokenized = [], []
    for _ in range(4):
        late.append(await begin(client, "tokenize"))
        tokenized.append(client.engine.waits["tokenize"])
    await client.post("/sleep")
    client.engine.waits["wake_up"] = asyncio.Event()
    early = await client.under_way("/v1/completions")
    for each in tokenized:
        each.set()
        await until_idle()
    assert [request.task.done() for request in late] == [False, False, True, True]
    for request in late[2:]:
        assert "too many requests are already held" in (await request.response()).error["message"]
    client.engine.waits["wake_up"].set()
    await client.post("/wake")
    assert [(await each.response()).code for each in (early, *late[:2])] == [200] * 3
    assert client.gate._held.requests == 0


async def test_a_refused_one_is_answered_like_any_other(serve: Serve) -> None:
    client = serve(retry_after_s=7)
    request = await begin(client, "tokenize")
    await client.post("/sleep?level=2")
    await arrive(client, request)
    response = await request.response()
    assert response.code == 503
    assert response.headers["retry-after"] == "7"
    assert "asleep (level 2)" in response.error["message"]
    assert outcomes(client) == {"rejected": 1}


async def test_one_without_a_key_is_not_held_at_the_engine(serve: Serve) -> None:
    """Where vLLM wants no key, as for /score."""
    client = serve(FakeVllm(api_keys=("key",)), on_request="wake")
    client.engine.waits["tokenize"] = asyncio.Event()
    request = await client.under_way("/score")
    await client.post("/sleep")
    await arrive(client, request)
    assert (await request.response()).code == 503
    assert client.engine.asleep


async def test_a_client_that_leaves_while_its_request_waits_before_the_engine(serve: Serve) -> None:
    client = serve(on_request="wait")
    request = await begin(client, "tokenize")
    await client.post("/sleep")
    await arrive(client, request)
    request.task.cancel()  # as vLLM does
    await asyncio.gather(request.task, return_exceptions=True)
    await until_idle()
    assert client.engine.aborted
    assert client.gate._held.requests == 0


async def test_a_sleep_comes_after_what_is_being_sent_to_the_engine(serve: Serve) -> None:
    class Slow(FakeEngine):
        """Its socket is full."""

        async def _add_request(self, request: object) -> None:
            await self._called("send")
            await super()._add_request(request)

    client = serve(FakeVllm(Slow()))
    client.engine.waits["send"] = asyncio.Event()
    request = await client.under_way("/v1/completions")
    sleep = await client.under_way("/sleep")
    assert client.engine.count("sleep") == 0
    client.engine.waits["send"].set()
    assert (await sleep.response()).code == 200
    assert (await request.response()).code == 200
    assert client.engine.queue == []


async def test_a_sleep_does_not_wait_for_ever_for_what_is_being_sent(serve: Serve) -> None:
    client = serve(request_deadline_s=0.05)
    stuck = asyncio.Event()

    async def send(request: object) -> None:
        await stuck.wait()

    client.engine.engine_core.add_request_async = send
    request = await client.under_way("/v1/completions")
    assert (await client.post("/sleep")).code == 503
    assert client.engine.count("sleep") == 0
    stuck.set()
    assert (await request.response()).body == {"text": "good"}


# An engine that does not say whether it sleeps, or late


@pytest.mark.parametrize(
    "order", [("/wake?tags=weights&tags=kv_cache",), ("/wake?tags=weights",), ("/wake?tags=kv_cache",)]
)
@pytest.mark.parametrize("arrives", ["early", "late"])
@pytest.mark.parametrize("silent", [True, False])
async def test_what_slept_serves_nobody_while_the_engine_does_not_say(
    serve: Serve, policy: str, order: tuple[str, ...], arrives: str, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve(on_request=policy, request_deadline_s=0.05)
    request = await begin(client, "tokenize") if arrives == "early" else None
    await client.post("/sleep?level=2")
    monkeypatch.setattr("cumem_sleep.vllm.sleep_controller.ASK_WITHIN_S", 0.01)
    if silent:
        client.engine.waits["is_sleeping"] = asyncio.Event()
    client.engine.fails["is_sleeping"] = [RuntimeError("not now")] * 100
    for call in order:
        assert (await client.post(call)).code == 200
    if request is None:
        request = client.begin("POST", "/v1/completions")
    else:
        await arrive(client, request)
    assert (await request.response()).code == 503
    assert client.engine.queue == []
    assert client.engine.count("generate") == 0


async def test_a_pause_is_not_forgotten_by_an_answer_from_before(serve: Serve) -> None:
    client = serve(FakeVllm(engine := SlowToAnswer()), on_request="wake", request_deadline_s=0.01)
    engine.on_their_way = [old := asyncio.Event()]
    request = await client.under_way("/v1/completions")
    assert (await client.post("/pause")).code == 200
    old.set()
    await request.response()
    assert (await client.post("/sleep")).code == 200
    assert (await client.ask()).code == 503
    assert engine.count("wake_up") == 0, "no request ends a pause"


# Kept requests


async def test_requests_cannot_be_kept_over_level_2(serve: Serve) -> None:
    client = serve()
    response = await client.post("/sleep?level=2&mode=keep")
    assert response.code == 409
    assert "kept" in response.error["message"]
    assert client.engine.asleep == set()
    assert (await client.ask()).body == {"text": "good"}


@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_kept_requests_are_woken_with_all_memory(serve: Serve, mode: str) -> None:
    client = serve()
    client.engine.waits["generate"] = asyncio.Event()
    request = await client.under_way("/v1/completions")
    assert (await client.post(f"/sleep?mode={mode}")).code == 200
    for tags in ("tags=weights", "tags=kv_cache", "tags=kv_cache&tags=scheduling"):
        response = await client.post(f"/wake?{tags}")
        assert response.code == 409, "vLLM 0.18 would run it without the other tag"
        assert "without tags" in response.error["message"]
    assert (await client.post("/wake")).code == 200
    client.engine.waits["generate"].set()
    assert (await request.response()).body == {"text": "good"}
    await client.post("/sleep?mode=keep")
    assert (await client.post("/wake?tags=weights")).code == 200, "nothing was kept this time"


async def test_what_waited_behind_the_running_ones_is_aborted_by_a_level_2_sleep(serve: Serve) -> None:
    """With mode=wait vLLM waits for those that run, and leaves the others queued."""
    client = serve()
    client.engine.queue = ["behind-1", "behind-2"]
    await client.post("/sleep?level=2&mode=wait")
    assert client.engine.queue == []
    assert client.engine.asleep
