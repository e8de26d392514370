"""The gate's own calls, what is gated, and what passes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from fake_vllm import FakeEngine, FakeVllm
from gate_client import Serve, asleep, run

from cumem_sleep.vllm.sleeping_model import GatePhase

pytestmark = pytest.mark.usefixtures("gate_environment")


# /wake, /reload_weights, writes


@pytest.mark.parametrize("path", ["/wake", "/wake/", "/wake_up"])
async def test_wake_is_wake_up(serve: Serve, path: str) -> None:
    client = await asleep(serve)
    response = await client.post(f"{path}?tags=weights")
    assert response.body == {"status": "/wake_up"}, "vLLM's own answer"
    assert ("wake_up", ["weights"]) in client.engine.calls
    await client.post(f"{path}?tags=kv_cache", root_path="/proxy", path=f"/proxy{path}")
    assert (await client.ask()).code == 200


WRITES = (
    "/reload_weights",
    "/weight_checker",
    "/update_weights",
    "/start_weight_update",
    "/finish_weight_update",
    "/collective_rpc",
)


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize("level", [1, 2])
async def test_weights_are_not_written_while_they_sleep(serve: Serve, path: str, level: int) -> None:
    client = serve()
    client.engine.waits["sleep"] = asyncio.Event()
    sleep = await client.under_way(f"/sleep?level={level}")
    body = b'{"method": "reload_weights"}' if path == "/collective_rpc" else b""
    early = await client.under_way(path, body)
    client.engine.waits["sleep"].set()
    await sleep.response()
    await client.post("/wake_up?tags=kv_cache")
    for response in (await early.response(), await client.post(path, body)):
        assert response.code == 409
        assert "POST /wake_up?tags=weights first" in response.error["message"]
    await client.post("/wake_up?tags=weights")
    assert (await client.post(path, body)).code == 200
    assert client.vllm.bodies[-1] == body or path == "/reload_weights"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"method": "reload_weights"}'])
async def test_collective_rpc_passes_whole(serve: Serve, body: bytes) -> None:
    client = serve()
    with contextlib.suppress(ValueError, KeyError, TypeError):  # vLLM's to answer
        await client.post("/collective_rpc", body)
    assert client.vllm.bodies == [body]


def test_nothing_is_open_without_dev_mode(serve: Serve, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    async def scenario() -> None:
        client = serve(FakeVllm(dev_mode=False), on_request=policy)
        for path in ("/sleep", "/wake_up", "/wake", "/reload_weights", "/resume", "/collective_rpc", "/pause"):
            response = await client.post(path)
            assert response.code == 404
            detail = response.body["detail"]
            assert detail.startswith("Not Found")
            assert ("CUMEM_SLEEP_ADMIN_TOKEN" in detail) is (path != "/collective_rpc")
        assert client.engine.calls == []
        assert (await client.ask()).code == 200

    monkeypatch.delenv("VLLM_SERVER_DEV_MODE")
    run(scenario())
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    run(scenario())


# What is gated


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/completions", "/score", "/some_future_path", "/v1/load_lora_adapter"),
        *("/invocations", "/generate", "/inference/v1/generate", "/v2/embed", "/v1/messages"),
        "/scale_elastic_ep",
    ],
)
async def test_posts_are_gated(serve: Serve, path: str) -> None:
    client = await asleep(serve)
    assert (await client.post(path)).code == 503
    assert (await client.post(path, root_path="/proxy", path=f"/proxy{path}")).code == 503


@pytest.mark.parametrize(
    "target",
    [
        *("GET /v1/models", "GET /version", "GET /metrics", "GET /load", "GET /is_sleeping", "HEAD /health"),
        *("OPTIONS /v1/completions", "OPTIONS /sleep", "POST /tokenize", "POST /v1/chat/completions/render"),
        *("GET /sleep", "POST /v1/messages/count_tokens", "POST /fault_tolerance/apply"),
        *("POST /reset_prefix_cache", "POST /abort_requests", "POST /v1/responses/resp_1/cancel"),
        "POST /init_weight_transfer_engine",
    ],
)
async def test_what_does_not_run_the_model_passes(serve: Serve, target: str, policy: str) -> None:
    method, path = target.split()
    client = await asleep(serve, on_request=policy)
    client.engine.plugin = False
    await asyncio.gather(client.begin(method, path).task, return_exceptions=True)
    await asyncio.gather(client.begin(method, path, path=f"/p{path}", root_path="/p").task, return_exceptions=True)
    assert client.vllm.seen[-2:] == [f"{method} {path}"] * 2
    assert client.engine.asleep


@pytest.mark.parametrize("root", ["/proxy", "/proxy/"])
@pytest.mark.parametrize("strips", [True, False])
async def test_root_paths_and_slashes(serve: Serve, root: str, strips: bool) -> None:
    client = serve()

    async def post(path: str) -> int:
        whole = path if strips else f"/proxy{path}"
        return (await client.post(path, root_path=root, path=whole)).code

    if root.endswith("/") and not strips:  # Starlette's router finds nothing then
        assert [await post(path) for path in ("/sleep", "/v1/completions", "/wake")] == [404] * 3
        return
    assert await post("/sleep") == 200
    assert client.gate.model.phase is GatePhase.ASLEEP
    assert await post("/v1/completions") == 503
    assert await post("/resume") == 409
    assert await post("/resume/") == 307
    assert await post("/wake") == 200
    assert client.vllm.seen[-1] == "POST /wake_up"
    assert await post("/v1/completions") == 200


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize(
    ("target", "kept", "weights", "cache"),
    [
        ("/sleep", 0, "backed up", "cleared"),
        ("/sleep", 7, "backed up", "kept"),
        ("/sleep?level=2", 0, "dropped", "cleared"),
        ("/sleep?level=0", 0, "awake", "awake"),
    ],
)
async def test_a_sleep_says_what_became_of_the_memory(
    serve: Serve, target: str, kept: int, weights: str, cache: str, plugin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, status = serve(), FakeEngine.status

    def keeps(engine: FakeEngine, rank: int) -> dict[str, Any]:
        said = status(engine, rank)
        said["usage"]["kv_cache"]["kept_bytes"] = kept if engine.asleep else 0
        return said

    monkeypatch.setattr(FakeEngine, "status", keeps)
    client.engine.plugin = plugin
    said = (await client.post(target)).body
    assert (said["weights"], said["kv_cache"]) == (weights, cache if plugin else cache.replace("kept", "cleared"))
