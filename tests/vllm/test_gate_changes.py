"""Requests and calls while the model falls asleep or wakes up."""

from __future__ import annotations

import asyncio

import pytest
from fake_vllm import until_idle
from gate_client import Serve, asleep

pytestmark = pytest.mark.usefixtures("gate_environment")


async def test_requests_during_a_sleep(serve: Serve, policy: str) -> None:
    client = serve(on_request=policy)
    await client.ask()
    client.engine.waits["sleep"] = asyncio.Event()
    sleep = await client.under_way("/sleep")
    assert sleep.sent == []
    request = await client.under_way("/v1/completions")
    assert request.task.done() == (policy == "reject")
    assert client.engine.count("wake_up") == 0
    client.engine.waits["sleep"].set()
    assert (await sleep.response()).code == 200
    if policy == "wait":
        await client.post("/wake_up")
    response = await request.response()
    assert response.code == (503 if policy == "reject" else 200)
    assert client.engine.count("wake_up") == (0 if policy == "reject" else 1)


async def test_requests_during_a_wake(serve: Serve, policy: str) -> None:
    client = await asleep(serve, on_request=policy)
    client.engine.waits["wake_up"] = asyncio.Event()
    wake = await client.under_way("/wake_up")
    request = await client.under_way("/v1/completions")
    assert request.task.done() == (policy == "reject")
    assert (await client.get("/health")).body["status"] == "changing"
    client.engine.waits["wake_up"].set()
    await wake.response()
    assert (await request.response()).code == (503 if policy == "reject" else 200)
    assert client.engine.count("wake_up") == 1


async def test_the_answer_to_a_change_comes_when_the_next_request_may(serve: Serve) -> None:
    client = await asleep(serve)
    client.engine.waits["is_sleeping"] = asyncio.Event()
    wake = await client.under_way("/wake_up")
    assert client.engine.count("wake_up") == 1
    assert wake.sent == []
    client.engine.waits["is_sleeping"].set()
    await wake.response()
    assert (await client.ask()).code == 200


async def test_changes_pass_one_after_the_other_and_asking_twice_is_harmless(serve: Serve) -> None:
    client = serve()
    client.engine.waits["sleep"] = asyncio.Event()
    first, second = client.begin("POST", "/sleep"), client.begin("POST", "/sleep")
    wake = await client.under_way("/wake_up")
    assert (client.engine.count("sleep"), client.engine.count("wake_up")) == (1, 0)
    client.engine.waits["sleep"].set()
    assert [(await each.response()).code for each in (first, second, wake)] == [200] * 3
    assert (client.engine.count("sleep"), client.engine.count("wake_up")) == (2, 1)
    assert (await client.post("/wake_up")).code == 200
    assert (await client.ask()).code == 200


async def test_waking_what_is_awake_disturbs_nobody(serve: Serve) -> None:
    client = serve()
    await client.ask()
    client.engine.waits["wake_up"] = asyncio.Event()
    wake = await client.under_way("/wake_up")
    assert (await client.ask()).code == 200
    client.engine.waits["wake_up"].set()
    await wake.response()


async def test_a_sleep_between_the_wake_and_the_request_holds_the_request_again(serve: Serve) -> None:
    client = await asleep(serve, on_request="wait")
    request = await client.under_way("/v1/completions")
    client.engine.waits["is_sleeping"] = asyncio.Event()
    wake, sleep = await client.under_way("/wake_up"), client.begin("POST", "/sleep")
    client.engine.waits["is_sleeping"].set()
    await wake.response()
    await sleep.response()
    await until_idle()
    assert client.engine.asleep
    assert not request.task.done()
    await client.post("/wake_up")
    assert (await request.response()).body == {"text": "good"}
