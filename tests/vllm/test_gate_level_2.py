"""Wakes by tags, and weights that were dropped."""

from __future__ import annotations

import json

import pytest
from fake_vllm import until_idle
from gate_client import Serve, asleep

pytestmark = pytest.mark.usefixtures("gate_environment")


@pytest.mark.parametrize("plugin", [True, False])
async def test_a_request_wakes_the_rest_after_a_partial_wake(serve: Serve, plugin: bool) -> None:
    client = serve(on_request="wake")
    client.engine.plugin = plugin
    await client.post("/sleep")
    await client.post("/wake_up?tags=kv_cache&tags=scheduling")
    await client.post("/wake_up?tags=kv_cache&tags=weights")  # vLLM ignores it: kv_cache is awake
    assert client.engine.asleep == {"weights"}
    assert (await client.ask()).body == {"text": "good"}
    assert ("wake_up", ["weights"]) in client.engine.calls


LOADS = ("/reload_weights", "/update_weights", "/finish_weight_update", "/collective_rpc")


def body_of(load: str) -> bytes:
    return b'{"method": "reload_weights"}' if load == "/collective_rpc" else b""


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("plugin", [True, False])
async def test_weights_lost_at_level_2_are_not_served_until_they_are_loaded(
    serve: Serve, load: str, plugin: bool
) -> None:
    client = serve()
    client.engine.plugin = plugin
    await client.post("/sleep?level=2")
    await client.post("/wake_up")
    response = await client.ask()
    assert response.code == 503
    assert "not reloaded: POST /reload_weights" in response.error["message"]
    if plugin:
        await client.post("/collective_rpc", body=b'{"method": "cumem_sleep_status"}')
    await client.post("/sleep?level=1")
    await client.post("/wake_up")
    assert (await client.ask()).code == 503, "garbage was backed up and restored"
    assert (await client.post(load, body_of(load))).code == 200
    assert (await client.ask()).body == {"text": "good"}


@pytest.mark.parametrize("policy", ["wait", "wake"])
@pytest.mark.parametrize("load", LOADS)
async def test_requests_between_the_steps_of_a_level_2_wake_are_held(serve: Serve, policy: str, load: str) -> None:
    client = await asleep(serve, level=2, on_request=policy)
    await client.post("/wake_up?tags=weights")
    request = await client.under_way("/v1/completions")
    assert client.engine.count("reload_weights") == 0, "somebody else is loading them"
    assert client.gate.controller._waking is None, "nor does it try again and again"
    await client.post("/wake_up?tags=kv_cache")
    await until_idle()
    assert not request.task.done()
    assert (await client.post(load, body_of(load))).code == 200
    assert (await request.response()).body == {"text": "good"}


@pytest.mark.parametrize(
    ("method", "loads"),
    [("get_rank", False), ("init_transfer", False), ("echo", False), ("refit", True), ("load_it", True)],
)
async def test_worker_methods_load_only_if_they_are_known_to(serve: Serve, method: str, loads: bool) -> None:
    client = await asleep(serve, level=2, loading_methods="refit,load_it")
    await client.post("/wake_up")
    assert (await client.post("/collective_rpc", body=json.dumps({"method": method}).encode())).code == 200
    assert (await client.ask()).code == (200 if loads else 503)


@pytest.mark.parametrize("load", LOADS)
async def test_a_load_that_leaves_a_draft_out_does_not_open_the_gate(serve: Serve, load: str) -> None:
    client = serve()
    client.engine.leaves_out = ["draft.fc", "draft.fc"]
    await client.post("/sleep?level=2")
    await client.post("/wake_up")
    for _ in range(2):
        answer = await client.post(load, body_of(load))
        if load == "/reload_weights":
            assert answer.code == 500
            assert "draft.fc" in answer.error["message"]
        refused = await client.ask()
        assert refused.code == 503
        assert "draft.fc among them" in refused.error["message"]
    assert (await client.get("/health")).code == 503
    assert (await client.post(load, body_of(load))).code == 200
    assert (await client.ask()).body == {"text": "good"}


@pytest.mark.parametrize("policy", ["reject", "wait", "wake"])
async def test_a_draft_that_is_loaded_by_an_update_of_its_own_opens_the_gate(serve: Serve, policy: str) -> None:
    client = serve(on_request=policy)
    client.engine.leaves_out = ["draft.fc"]
    await client.post("/sleep?level=2")
    await client.post("/wake_up?tags=weights&tags=kv_cache")
    assert (await client.post("/reload_weights")).code == 500
    await client.post("/start_draft_weight_update")
    await client.post("/update_weights")
    await client.post("/finish_weight_update")
    assert (await client.ask()).body == {"text": "good"}


async def test_a_wake_on_request_that_leaves_a_draft_out_is_a_failed_one(serve: Serve) -> None:
    client = serve(on_request="wake")
    client.engine.leaves_out = ["draft.fc"]
    await client.post("/sleep?level=2")
    refused = await client.ask()
    assert refused.code == 503
    assert "draft.fc among them" in refused.error["message"]
    assert client.engine.count("generate") == 0
    client.gate.controller.failure = None  # its time has passed
    assert (await client.ask()).body == {"text": "good"}, "the next one loads all"
