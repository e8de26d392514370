"""Backups that are forgotten, because new weights follow: `POST /wake_up?restore=0`."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from fake_vllm import until_idle
from gate_client import Serve, asleep

pytestmark = pytest.mark.usefixtures("gate_environment")

FORGET = json.dumps({"method": "cumem_sleep_forget"}).encode()


@pytest.mark.parametrize("path", ["/wake_up?restore=0", "/wake?restore=false", "/wake_up"])
@pytest.mark.parametrize("level", [1, 3])
async def test_weights_that_were_forgotten_are_not_served_until_they_are_loaded(
    serve: Serve, path: str, level: int
) -> None:
    client = await asleep(serve, level=level)
    answer = await client.post(path, b"{}" if "?" in path else b'{"restore": 0}'.replace(b"0", b"false"))
    assert answer.code == 200
    assert [call for call in client.engine.calls if call[0] == "wake_up"] == [("wake_up", None)]
    refused = await client.ask()
    assert refused.code == 503
    assert "not reloaded: POST /reload_weights" in refused.error["message"]
    health = await client.get("/health")
    assert (health.code, health.body["status"], health.body["level"]) == (503, "weights_missing", 2)
    client.engine.fails["reload_weights"] = [RuntimeError("no such file")]
    assert (await client.post("/reload_weights")).code == 500
    assert (await client.ask()).code == 503, "a load that failed leaves them lost"
    assert (await client.post("/reload_weights")).code == 200
    assert (await client.ask()).body == {"text": "good"}


async def test_it_is_never_done_by_itself(serve: Serve) -> None:
    client = serve(on_request="wake")
    for target in ("/wake_up", "/wake?restore=1", "/wake_up?tags=weights&tags=kv_cache&restore=true", ""):
        await client.post("/sleep")
        if target:
            assert (await client.post(target)).code == 200
        assert (await client.ask()).body == {"text": "good"}
    assert not client.engine.count("cumem_sleep_forget")


@pytest.mark.parametrize("tags", ["tags=weights", "tags=kv_cache", "tags=scheduling"])
async def test_other_tags_are_restored(serve: Serve, tags: str) -> None:
    client = await asleep(serve, on_request="wake")
    assert (await client.post(f"/wake_up?{tags}&restore=0")).code == 200
    assert client.engine.count("cumem_sleep_forget") == ("scheduling" not in tags)
    is_lost = "weights" in tags
    assert bool(client.engine.forgot) == is_lost
    if is_lost:
        await client.post("/reload_weights")
    assert (await client.ask()).body == {"text": "good"}
    assert client.engine.count("reload_weights") == is_lost


async def test_what_is_awake_has_nothing_to_forget(serve: Serve) -> None:
    client = serve()
    assert (await client.post("/wake_up?restore=0")).code == 200
    await client.post("/sleep")
    await client.post("/wake_up?tags=weights")
    await client.post("/wake_up?tags=kv_cache&restore=0")
    assert (await client.ask()).body == {"text": "good"}


@pytest.mark.parametrize("ranks", [set(), {1}])
async def test_a_rank_that_cannot_forget_keeps_it_asleep_and_what_another_forgot_is_lost(
    serve: Serve, ranks: set[int]
) -> None:
    client = serve()
    client.engine.forgets = ranks
    await client.post("/sleep")
    answer = await client.post("/wake_up?restore=0")
    assert answer.code == 500
    assert "nothing was woken: RankFailed" in answer.error["message"]
    assert not client.engine.count("wake_up")
    health = await client.get("/health")
    assert (health.body["status"], health.body["level"]) == ("asleep", 2 if ranks else 1)
    assert (await client.post("/wake_up")).code == 200
    assert (await client.ask()).code == (503 if ranks else 200)
    await client.post("/reload_weights")
    assert (await client.ask()).body == {"text": "good"}


@pytest.mark.parametrize("by", ["the route", "a call", "a call that failed"])
async def test_workers_that_do_not_say_what_they_forgot_have_forgotten(serve: Serve, by: str) -> None:
    client = await asleep(serve)
    client.engine.fails["cumem_sleep_status"] = [RuntimeError("lost")] * 20
    if by == "the route":
        await client.post("/wake_up?restore=0")
    elif by == "a call":
        assert (await client.post("/collective_rpc", FORGET)).code == 200
    else:
        client.engine.forgets = {1}
        with pytest.raises(RuntimeError, match="RankFailed"):
            await client.post("/collective_rpc", FORGET)
    await client.post("/wake_up")
    client.engine.fails.clear()
    assert (await client.ask()).code == 503
    await client.post("/reload_weights")
    assert (await client.ask()).body == {"text": "good"}


@pytest.mark.parametrize("by_route", [True, False])
async def test_without_the_plugin_it_is_refused(serve: Serve, by_route: bool) -> None:
    client = serve()
    client.engine.plugin = False
    await client.post("/sleep")
    if by_route:
        answer = await client.post("/wake_up?restore=0")
        assert answer.code == 500
        assert "not active in vLLM's workers" in answer.error["message"]
    else:
        with pytest.raises(RuntimeError, match="not implemented"):
            await client.post("/collective_rpc", FORGET)
    await client.post("/wake_up")
    assert (await client.ask()).body == {"text": "good"}


async def test_a_wake_that_fails_leaves_them_lost(serve: Serve) -> None:
    client = await asleep(serve)
    await client.fails("wake_up", "no memory", "/wake_up?restore=0")
    assert (await client.get("/health")).body["level"] == 2
    assert (await client.post("/wake_up")).code == 200
    assert (await client.ask()).code == 503


async def test_a_request_after_a_forget_loads_the_weights(serve: Serve) -> None:
    client = await asleep(serve, on_request="wake")
    assert (await client.post("/collective_rpc", FORGET)).code == 200
    assert (await client.get("/health")).body["level"] == 2
    assert (await client.ask()).body == {"text": "good"}
    assert client.engine.count("reload_weights") == 1


@pytest.mark.parametrize("target", ["/wake_up?restore=0", "/collective_rpc"])
async def test_requests_that_were_kept_do_not_run_without_weights(serve: Serve, target: str) -> None:
    client = serve(on_request="wait")
    client.engine.waits["generate"] = asyncio.Event()
    request = await client.under_way("/v1/completions")
    slept = await client.under_way("/sleep?mode=keep")
    assert (await slept.response()).code == 200
    answer = await client.post(target, FORGET if target == "/collective_rpc" else b"{}")
    assert answer.code == 409
    assert "requests were kept" in answer.error["message"]
    assert not client.engine.forgot
    await client.post("/wake_up")
    client.engine.waits["generate"].set()
    assert (await request.response()).body == {"text": "good"}


@pytest.mark.parametrize("target", ["/wake_up?restore=0", "/wake_up?tags=weights"])
async def test_a_kept_request_may_have_been_answered_already(serve: Serve, target: str) -> None:
    """As vLLM answers `/v1/responses` with `background`. One that waits before the engine is none of them."""
    left = 1
    client = serve(on_request="wait")
    client.engine.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: left)
    await client.post("/sleep?mode=keep")
    answer = await client.post(target)
    assert answer.code == 409
    assert "requests were kept" in answer.error["message"]
    late = asyncio.create_task(client.engine.engine_core.add_request_async(SimpleNamespace(request_id="1")))
    await until_idle()
    left = 2
    assert (await client.post(target)).code == 409
    left = 1
    assert (await client.post(target)).code == 200
    late.cancel()
    await asyncio.wait({late})
