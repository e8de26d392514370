"""What the front answers itself: models, status, an operator's calls, metrics."""

from __future__ import annotations

import asyncio
import json

import pytest
from front_world import NOT_NOW, World, a_world, get, post, until
from prometheus_client.parser import text_string_to_metric_families

from cumem_sleep.serve import answers
from cumem_sleep.serve.fleet import OrderRefused, ServerFailed
from cumem_sleep.serve.status import Phase

TOKEN = "Authorization: Bearer token"


def call(name: str, body: object) -> bytes:
    return post(f"/admin/{name}", body if isinstance(body, bytes) else json.dumps(body).encode(), TOKEN)


async def test_models_are_listed_with_their_state() -> None:
    async with a_world("org/one", "two", aliases={"gpt": "two"}) as world:
        answer = await world.ask(get("/v1/models"))
        assert answer.json["object"] == "list"
        assert [card["id"] for card in answer.json["data"]] == ["org/one", "two"]
        one = await world.ask(get("/v1/models/org/one"))
        assert one.json.items() >= {"id": "org/one", "object": "model", "state": "asleep", "level": 1}.items()
        assert (await world.ask(get("/v1/models/gpt"))).json["id"] == "two"
        missing = await world.ask(get("/v1/models/three"))
        assert (missing.code, missing.error["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize("name", ["org/one", "gpt"])
async def test_below_a_models_path_that_model_is_listed(name: str) -> None:
    async with a_world("org/one", "two", aliases={"gpt": "org/one"}) as world:
        answer = await world.ask(get(f"/models/{name}/v1/models"))
        assert answer.json["object"] == "list"
        assert [card["id"] for card in answer.json["data"]] == ["org/one"]
        assert (await world.ask(get("/models/three/v1/models"))).code == 404
        assert (await world.ask(post(f"/models/{name}/v1/models", b"{}"))).code == 405


async def test_an_operators_calls() -> None:
    async with a_world("one", admin_token="token") as world:
        for name, body, wanted in (
            ("sleep", {"model": "one", "level": 2}, ("sleep", "one", 2)),
            ("wake", {"model": "one"}, ("wake", "one")),
            ("stop", {"model": "one"}, ("stop", "one")),
        ):
            answer = await world.ask(call(name, body))
            assert answer.code == 200
            assert answer.json["name"] == "one"
            assert world.fleet.calls[-1] == wanted
        assert (await world.ask(get("/admin/log?model=one&lines=7", TOKEN))).json["lines"] == ["one 7"]


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"one"', b"[" * 50_000, {"model": 1}, {"level": 1}, {"model": "one", "level": 4}),
        *({"model": "one", "level": True}, {"model": "one", "level": 1.0}, {"model": "one", "force": 1}, b"x" * 70_000),
    ],
)
async def test_a_call_that_is_nonsense_has_no_effect(body: object) -> None:
    async with a_world("one", admin_token="token") as world:
        assert (await world.ask(call("sleep", body))).code == 400
        for query in ("", "?model=one&lines=0", "?model=one&lines=" + "1" * 5000, "?model=one&lines=x", "?lines=5"):
            assert (await world.ask(get(f"/admin/log{query}", TOKEN))).code == 400
        assert world.fleet.calls == []


@pytest.mark.parametrize(
    ("error", "code"), [(OrderRefused("no"), 409), (NOT_NOW, 503), (ServerFailed("it will not start", 3), 503)]
)
async def test_what_a_call_cannot_do_is_said(error: Exception, code: int) -> None:
    async with a_world("one", admin_token="token") as world:
        world.fleet.refusal = error
        answer = await world.ask(call("wake", {"model": "one"}))
        assert (answer.code, answer.error["message"]) == (code, str(error))
        assert ("retry-after" in answer.headers) == (code == 503)
        assert (await world.ask(call("wake", {"model": "three"}))).code == 404


async def test_a_call_takes_effect_though_its_client_leaves() -> None:
    async with a_world("one", admin_token="token") as world:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def stop_model(model: str) -> None:
            begun.set()
            await may_end.wait()
            world.fleet.calls.append(("stopped", model))

        world.fleet.stop_model = stop_model  # type: ignore[method-assign]
        client = await world.client()
        await client.send(call("stop", {"model": "one"}))
        await begun.wait()
        client.close()
        await asyncio.sleep(0.05)
        may_end.set()
        await until(lambda: world.fleet.calls == [("stopped", "one")])


async def events(world: World, count: int) -> list[dict[str, object]]:
    client = await world.client()
    await client.send(get("/status/live"))
    assert (await client.head()).headers["content-type"] == "text/event-stream"
    text, found = b"", []
    while len(found) < count:
        text += await client.chunk()
        *whole, text = text.split(b"\n\n")
        found += [json.loads(event[6:]) for event in whole if event.startswith(b"data: ")]
        world.fleet.phase = Phase.AWAKE
        world.fleet.changed.set()
    client.close()
    return found


async def test_the_status_comes_live_and_its_watchers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_WATCHERS", 1)

    async with a_world("one") as world:
        for _ in range(3):  # each of them leaves
            found = await events(world, 2)
            assert found[-1]["models"][0]["phase"] == "awake"  # type: ignore[index]
            await until(lambda: world.front._answers._watchers == 0)
        client = await world.client()
        await client.send(get("/status/live"))
        await client.head()
        assert (await world.ask(get("/status/live"))).code == 503
        world.fleet.ended = True
        world.fleet.changed.set()
        while await client.chunk():
            pass


async def test_metrics() -> None:
    async with a_world("one", 'two"\n') as world:
        world.fleet.counters.switches["one", "wake", "ok"] = 3
        world.fleet.counters.waited_seconds["one", "room"] = 1.5
        answer = await world.ask(get("/metrics"))
        assert answer.headers["content-type"].startswith("text/plain")
        samples = {
            (sample.name.removeprefix("cumem_sleep_serve_"), *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.body.decode())
            for sample in family.samples
        }
        assert samples["model_state", "asleep", "one"] == samples["model_state", "asleep", 'two"\n'] == 1
        assert samples["model_state", "awake", "one"] == 0
        assert samples["switches_total", "ok", "one", "wake"] == 3
        assert samples["switches_total", "failed", "one", "wake"] == samples["requests_total", "failed", "one"] == 0
        assert samples["waited_seconds_total", "one", "room"] == 1.5
        assert samples["gpu_used_bytes", "0"] == 40
        assert samples["host_held_bytes",] == 5
        assert ("host_available_bytes",) not in samples, "the system does not say"
