"""Requests to a model that is awake or sleeps: rejected, held, or waking it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from fake_vllm import until_idle
from gate_client import Serve, asleep, outcomes

from cumem_sleep.vllm.sleeping_model import GatePhase

pytestmark = pytest.mark.usefixtures("gate_environment")


# Awake


async def test_an_awake_server_is_asked_once(serve: Serve, policy: str) -> None:
    client = serve(on_request=policy)
    for _ in range(3):
        assert (await client.ask()).body == {"text": "good"}
    assert client.engine.calls == ["is_sleeping", "generate", "generate", "generate"]
    assert client.vllm.bodies == [b"{}"] * 3
    assert outcomes(client) == {}


async def test_lifespan_and_servers_without_an_engine_pass(serve: Serve) -> None:
    client = serve()
    await client.gate({"type": "lifespan"}, None, None)
    client.vllm.state.engine_client = None
    assert (await client.ask()).code == 200
    assert (await client.post("/sleep")).code == 200
    assert client.engine.count("is_sleeping") == 0
    assert client.vllm.seen == ["lifespan", "POST /v1/completions", "POST /sleep"]


async def test_a_dead_engine_answers_for_itself(serve: Serve, policy: str) -> None:
    client = serve(on_request=policy)
    client.engine.dead = True
    with pytest.raises(RuntimeError, match="EngineDeadError"):
        await client.ask()
    health = await client.get("/health")
    assert (health.code, health.body) == (503, None)


# Asleep


async def test_reject(serve: Serve) -> None:
    client = serve(retry_after_s=7)
    assert (await client.post("/sleep?level=1")).code == 200
    response = await client.ask()
    assert response.code == 503
    assert response.headers["retry-after"] == "7"
    assert response.error["type"] == "ServiceUnavailableError"
    assert "asleep (level 1)" in response.error["message"]
    assert outcomes(client) == {"rejected": 1}
    await client.post("/wake_up")
    assert (await client.ask()).body == {"text": "good"}


async def test_wait_until_awake(serve: Serve) -> None:
    client = await asleep(serve, on_request="wait")
    held = [client.begin("POST", "/v1/completions", body=b'{"n": 12345}') for _ in range(3)]
    await until_idle()
    assert not any(each.task.done() for each in held)
    assert client.engine.count("wake_up") == 0
    await client.post("/wake_up")
    assert [(await each.response()).body for each in held] == [{"text": "good"}] * 3
    assert client.vllm.bodies[-3:] == [b'{"n": 12345}'] * 3
    assert outcomes(client) == {"waited": 3}


@pytest.mark.parametrize("deadline_s", [0, 0.01])
async def test_wait_has_a_deadline(serve: Serve, deadline_s: float) -> None:
    client = await asleep(serve, on_request="wait", request_deadline_s=deadline_s)
    response = await client.ask()
    assert response.code == 503
    assert response.headers["retry-after"] == "5"
    assert "asleep" in response.error["message"]
    assert outcomes(client) == {"timed_out": 1}


async def test_wake_has_a_deadline_and_the_wake_goes_on(serve: Serve) -> None:
    client = await asleep(serve, on_request="wake", request_deadline_s=0.01)
    client.engine.waits["wake_up"] = asyncio.Event()
    assert (await client.ask()).code == 503
    assert outcomes(client) == {"timed_out": 1}
    client.engine.waits["wake_up"].set()
    await until_idle()
    assert (await client.ask()).body == {"text": "good"}
    assert client.engine.count("wake_up") == 1


async def test_wake_once_for_all(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cumem_sleep")
    client = await asleep(serve, on_request="wake")
    client.engine.waits["wake_up"] = asyncio.Event()
    held = [client.begin("POST", "/v1/completions") for _ in range(5)]
    await until_idle()
    assert client.engine.calls[-1] == ("wake_up", None)
    assert not any(each.task.done() for each in held)
    client.engine.waits["wake_up"].set()
    assert [(await each.response()).body for each in held] == [{"text": "good"}] * 5
    assert client.engine.count("wake_up") == 1
    assert outcomes(client) == {"woke": 5}
    assert sum("woke on request in" in record.message for record in caplog.records) == 1
    assert len(caplog.records) == 2  # that, and the gate's first


async def test_wake_from_level_0(serve: Serve) -> None:
    client = await asleep(serve, level=0, on_request="wake")
    assert client.gate.model.phase is GatePhase.ASLEEP
    assert (await client.ask()).body == {"text": "good"}
    assert ("wake_up", ["scheduling"]) in client.engine.calls


@pytest.mark.parametrize("seen", [True, False])
async def test_wake_from_level_2_loads_the_weights(serve: Serve, seen: bool) -> None:
    client = serve(on_request="wake")
    await (client.post("/sleep?level=2") if seen else client.engine.sleep(2))
    before = len(client.engine.calls)
    assert (await client.ask()).body == {"text": "good"}
    calls = [call for call in client.engine.calls[before:] if call not in ("is_sleeping", "cumem_sleep_status")]
    assert calls == [("wake_up", ["weights"]), "reload_weights", ("wake_up", ["kv_cache"]), "generate"]


async def test_a_failed_wake_fails_all_who_waited_and_is_tried_again_later(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(on_request="wake", retry_after_s=30)
    now = 1000.0
    client.gate.controller.clock = lambda: now
    await client.post("/sleep")
    client.engine.fails["wake_up"] = [RuntimeError("OutOfDeviceMemory: needed 61 GiB")]
    client.engine.waits["wake_up"] = asyncio.Event()
    held = [client.begin("POST", "/v1/completions") for _ in range(3)]
    await until_idle()
    client.engine.waits["wake_up"].set()
    for each in held:
        response = await each.response()
        assert response.code == 503
        assert "waking it failed: OutOfDeviceMemory: needed 61 GiB" in response.error["message"]
        assert response.headers["retry-after"] == "30"
    now += 28.5
    response = await client.ask()
    assert response.headers["retry-after"] == "2"
    assert "needed 61 GiB" in response.error["message"]
    assert client.engine.count("wake_up") == 1
    now += 1.5
    assert (await client.ask()).body == {"text": "good"}
    assert client.engine.count("wake_up") == 2
    assert outcomes(client) == {"rejected": 4, "woke": 1}
    assert sum("waking on request failed" in record.message for record in caplog.records) == 1
    await client.post("/sleep")
    client.engine.fails["wake_up"] = [RuntimeError("again")]
    assert (await client.ask()).code == 503
    await client.post("/wake_up")
    await client.post("/sleep")
    assert (await client.ask()).code == 200, "an old failure says nothing about the next sleep"


async def test_a_failed_reload_is_tried_again_where_it_stopped(serve: Serve) -> None:
    client = serve(on_request="wake", retry_after_s=1)
    now = 0.0
    client.gate.controller.clock = lambda: now
    await client.post("/sleep?level=2")
    client.engine.fails["reload_weights"] = [RuntimeError("no such file")]
    assert "no such file" in (await client.ask()).error["message"]
    now += 2
    before = len(client.engine.calls)
    assert (await client.ask()).body == {"text": "good"}
    calls = [call for call in client.engine.calls[before:] if call not in ("is_sleeping", "cumem_sleep_status")]
    assert calls == ["reload_weights", ("wake_up", ["kv_cache"]), "generate"]


async def test_a_wake_after_which_it_still_sleeps_is_a_failure(serve: Serve) -> None:
    client = await asleep(serve, on_request="wake")

    async def does_nothing(tags: Any) -> None:
        client.engine.calls.append("nothing")

    client.engine.wake_up = does_nothing  # type: ignore[method-assign, assignment]
    assert "still asleep" in (await client.ask()).error["message"]
    assert client.engine.calls.count("nothing") == 1


async def test_reading_ahead_is_never_cancelled_before_the_request_ends(serve: Serve) -> None:
    """A server may lose the message that it was about to give when its `receive` is cancelled."""
    client = await asleep(serve, on_request="wake")
    held = client.begin("POST", "/v1/completions")
    assert (await held.response()).body == {"text": "good"}
    assert False not in held.cancelled_after_answers


@pytest.mark.parametrize("policy", ["wait", "wake"])
async def test_a_client_that_leaves_is_let_go_of(serve: Serve, policy: str) -> None:
    client = await asleep(serve, on_request=policy)
    client.engine.waits["wake_up"] = asyncio.Event()
    leaves, stays = await client.under_way("/v1/completions"), client.begin("POST", "/v1/completions")
    leaves.leave()
    await leaves.response()
    assert leaves.sent == []
    assert not stays.task.done()
    client.engine.waits["wake_up"].set()
    if policy == "wait":
        await client.post("/wake_up")
    assert (await stays.response()).body == {"text": "good"}
    assert client.engine.count("wake_up") == 1
    assert client.engine.count("generate") == 1


async def test_a_held_body_is_not_read_ahead_without_limit(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cumem_sleep.http.asgi.READ_AHEAD_BYTES", 32)
    client = await asleep(serve, on_request="wait")
    held = await client.under_way("/v1/completions", body=b"x" * 64)
    assert held._incoming.qsize() == 1, "half of it stays where it is"
    await client.post("/wake_up")
    assert (await held.response()).code == 200
    assert client.vllm.bodies[-1] == b"x" * 64


# Websockets


async def test_a_websocket_to_a_sleeping_server_is_closed(serve: Serve) -> None:
    client = await asleep(serve)
    socket = client.begin("", "/v1/realtime", type="websocket")
    await socket.response()
    assert [message["type"] for message in socket.sent] == ["websocket.accept", "websocket.close"]
    assert socket.sent[-1]["code"] == 1013
    assert "asleep" in socket.sent[-1]["reason"]
    assert outcomes(client) == {"rejected": 1}


@pytest.mark.parametrize("policy", ["wait", "wake"])
async def test_a_websocket_is_held(serve: Serve, policy: str) -> None:
    client = await asleep(serve, on_request=policy)
    client.engine.waits["wake_up"] = asyncio.Event()
    socket, leaves = (client.begin("", "/v1/realtime", type="websocket") for _ in range(2))
    await until_idle()
    assert socket.sent == []
    leaves.leave()
    await leaves.response()
    assert leaves.sent == []
    client.engine.waits["wake_up"].set()
    if policy == "wait":
        await client.post("/wake_up")
    await socket.response()
    assert socket.sent == [{"type": "websocket.accept"}, {"type": "websocket.send", "text": "good"}]
