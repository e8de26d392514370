"""What the gate says of the server's health."""

from __future__ import annotations

import asyncio

import pytest
from gate_client import POLICIES, Serve, asleep

pytestmark = pytest.mark.usefixtures("gate_environment")


@pytest.mark.parametrize(
    ("policy", "health", "code"),
    [("reject", "auto", 503), ("wait", "auto", 200), ("wake", "auto", 200)]
    + [(policy, "ok", 200) for policy in POLICIES]
    + [(policy, "unavailable", 503) for policy in POLICIES],
)
@pytest.mark.parametrize("target", [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/health/")])
async def test_health(serve: Serve, policy: str, health: str, code: int, target: tuple[str, str]) -> None:
    client = serve(on_request=policy, health=health)
    response = await client.request(*target)
    assert response.body is None or response.body == {"path": "/health/"}, "vLLM's own answer"
    for level in (0, 1, 2):
        await client.post(f"/sleep?level={level}")
        response = await client.request(*target)
        assert response.code == code
        tags = ["kv_cache", "weights"] if level else []
        assert response.body == {"status": "asleep", "asleep": True, "level": level, "tags": tags}
        assert response.headers.get("retry-after") == ("5" if code == 503 else None)
        await client.post("/wake_up")
    client.engine.dead = True
    response = await client.request("GET", "/health")
    assert (response.code, response.body) == (503, None), "vLLM's own answer"


async def test_health_of_a_dead_engine_that_slept(serve: Serve) -> None:
    client = await asleep(serve, health="ok")
    client.engine.dead = True
    response = await client.get("/health")
    assert (response.code, response.body) == (503, None)


@pytest.mark.parametrize(("health", "code"), [("auto", 503), ("ok", 200), ("unavailable", 503)])
@pytest.mark.parametrize("fails", [True, False])
async def test_health_where_the_engine_does_not_say_whether_it_still_sleeps(
    serve: Serve, policy: str, health: str, code: int, fails: bool
) -> None:
    """Its requests are refused then, so it is not healthy. vLLM 0.33 says nothing where several engines disagree."""
    client = await asleep(serve, on_request=policy, health=health)
    client.engine.fails["is_sleeping"] = [RuntimeError("Engines returned different is_sleeping results")] * 20
    if fails:
        await client.fails("wake_up", "in one of them", "/wake_up")
    else:
        await client.post("/wake_up")
    assert (await client.ask()).code == (503 if fails else 200)
    response = await client.get("/health")
    if fails:
        assert response.code == code
        assert response.body == {"status": "unknown", "asleep": None, "level": None, "tags": None}
    else:
        assert (response.code, response.body) == (200, None), "vLLM's own answer"
    client.engine.fails["is_sleeping"].clear()
    await client.post("/wake_up")
    assert (await client.ask()).body == {"text": "good"}
    assert (await client.get("/health")).body is None


@pytest.mark.parametrize(("health", "code"), [("auto", 503), ("ok", 200), ("unavailable", 503)])
async def test_health_without_weights(serve: Serve, health: str, code: int) -> None:
    client = await asleep(serve, level=2, on_request="wake", health=health)
    await client.post("/wake_up?tags=weights&tags=kv_cache")
    response = await client.get("/health")
    assert response.code == code
    assert response.body == {"status": "weights_missing", "asleep": False, "level": 2, "tags": []}


async def test_health_does_not_wait_for_a_sleep(serve: Serve) -> None:
    client = serve()
    await client.ask()
    client.engine.waits["sleep"] = asyncio.Event()
    sleep = await client.under_way("/sleep")
    response = await client.get("/health")
    assert response.code == 503
    assert response.body["status"] == "changing"
    client.engine.waits["sleep"].set()
    await sleep.response()


async def test_health_of_an_engine_that_does_not_answer_is_vllms(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cumem_sleep.vllm.gate.HEALTH_WITHIN_S", 0.01)
    client = serve()
    client.engine.waits["is_sleeping"] = asyncio.Event()
    response = await client.get("/health")
    assert (response.code, response.body) == (200, None)


async def test_health_says_that_wakes_fail(serve: Serve) -> None:
    client = serve(on_request="wake", retry_after_s=30)
    now = 0.0
    client.gate.controller.clock = lambda: now
    await client.post("/sleep")
    assert (await client.get("/health")).code == 200
    client.engine.fails["wake_up"] = [RuntimeError("OutOfDeviceMemory")]
    assert (await client.ask()).code == 503
    assert (await client.get("/health")).code == 503
    now += 31
    assert (await client.get("/health")).code == 200, "the next request tries again"
