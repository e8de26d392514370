"""Pauses of the scheduler, which are no sleeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gate_client import Serve

pytestmark = pytest.mark.usefixtures("gate_environment")


@pytest.mark.parametrize("plugin", [True, False])
async def test_a_pause_is_no_sleep(serve: Serve, policy: str, plugin: bool) -> None:
    client = serve(on_request=policy)
    client.engine.plugin = plugin
    await client.engine.pause_generation()  # before the gate's first request, so it has to ask
    assert (await client.ask()).body == {"text": "queued"}
    assert client.engine.count("wake_up") == 0


@pytest.mark.parametrize("plugin", [True, False])
async def test_a_request_does_not_end_a_pause(serve: Serve, plugin: bool) -> None:
    client = serve(on_request="wake", request_deadline_s=0.01)
    client.engine.plugin = plugin
    await client.post("/pause")
    assert (await client.ask()).body == {"text": "queued"}
    assert (await client.post("/release_kv_cache_memory")).code == 200
    assert (await client.ask()).code == 503
    assert client.engine.count("wake_up") == 0
    assert client.engine.scheduler_paused
    await client.post("/wake_up?tags=kv_cache")
    assert (await client.ask()).body == {"text": "good"}
    await client.post("/sleep")
    client.gate._settings = replace(client.gate._settings, request_deadline_s=60.0)  # this one is to be in time
    assert (await client.ask()).body == {"text": "good"}, "the pause is over"


async def test_resume(serve: Serve, policy: str) -> None:
    client = serve(on_request=policy, request_deadline_s=0)
    for change in ("/sleep?level=1", "/wake_up?tags=weights"):
        await client.post(change)
        response = await client.post("/resume")
        assert response.code == 409
        assert "POST /wake_up" in response.error["message"]
    assert client.engine.count("resume") == 0
    await client.post("/wake_up")
    await client.post("/sleep?level=0")
    assert (await client.post("/resume")).code == 200
    assert (await client.ask()).body == {"text": "good"}
    await client.post("/pause")
    assert (await client.post("/resume")).code == 200
    assert (await client.ask()).body == {"text": "good"}
