"""Writes of weights, and worker methods: serialised with sleeps, and known by what they do."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext

import pytest
from fake_vllm import Client, FakeEngine, FakeVllm, until_idle
from gate_client import Serve, asleep

from cumem_sleep.vllm.sleeping_model import GatePhase
from cumem_sleep.vllm.worker_methods import Effect, effect_of, method_of

WRITES = ("/update_weights", "/finish_weight_update", "/start_weight_update", "/weight_checker", "/collective_rpc")


def call(method: str) -> bytes:
    return json.dumps({"method": method}).encode()


async def rpc(client: Client, method: str) -> int:
    return (await client.post("/collective_rpc", call(method))).code


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize("when", ["during", "after"])
async def test_a_body_that_comes_late_writes_nothing(serve: Serve, path: str, when: str) -> None:
    client = serve()
    await client.ask()
    write = await client.under_way(path, call("reload_weights"), slow=True)
    if when == "during":
        client.engine.waits["sleep"] = asyncio.Event()
    sleep = await client.under_way("/sleep")
    write.go_on()
    await until_idle()
    if when == "during":
        assert not write.task.done()
        client.engine.waits["sleep"].set()
    assert (await sleep.response()).code == 200, "a body that never comes holds nobody up"
    assert (await write.response()).code == 409
    assert client.engine.count("reload_weights") == 0


async def test_a_sleep_waits_for_a_write(serve: Serve) -> None:
    client = serve()
    client.engine.waits["reload_weights"] = asyncio.Event()
    write = await client.under_way("/collective_rpc", call("reload_weights"))
    sleep = await client.under_way("/sleep")
    assert client.engine.count("sleep") == 0
    assert (await client.ask()).code == 200, "requests go on meanwhile"
    client.engine.waits["reload_weights"].set()
    assert [(await each.response()).code for each in (write, sleep)] == [200, 200]


@pytest.mark.parametrize("method", ["execute_dummy_batch", "elastic_ep_execute", "save_sharded_state"])
async def test_what_runs_the_model_wants_all_of_it(serve: Serve, method: str) -> None:
    client = await asleep(serve, level=2)
    await client.post("/wake?tags=weights")
    assert await rpc(client, method) == 409
    await client.post("/wake?tags=kv_cache")
    assert await rpc(client, method) == 409, "weights are not loaded"
    await client.post("/reload_weights")
    assert await rpc(client, method) == 200


@pytest.mark.parametrize("method", ["sleep", "wake_up", "discard", "execute_method"])
@pytest.mark.parametrize("asleep", [True, False])
async def test_nobody_changes_the_workers_sleep_behind_vllm(serve: Serve, method: str, asleep: bool) -> None:
    client = serve(loading_methods="sleep,discard")
    if asleep:
        await client.post("/sleep")
    response = await client.post("/collective_rpc", call(method))
    assert response.code == 409
    assert "POST /sleep" in response.error["message"]
    assert "POST /collective_rpc" not in client.vllm.seen


@pytest.mark.parametrize("method", ["cumem_sleep_status", "check_health", "list_loras"])
async def test_what_touches_no_weights_is_answered_asleep(serve: Serve, method: str) -> None:
    client = await asleep(serve)
    client.engine.waits["wake_up"] = asyncio.Event()
    wake = await client.under_way("/wake")
    assert await rpc(client, method) == 200, "not even a wake holds it up"
    client.engine.waits["wake_up"].set()
    await wake.response()


@pytest.mark.parametrize("by_rpc", [True, False])
async def test_parts_of_an_update_count_when_it_is_finished(serve: Serve, by_rpc: bool) -> None:
    client = serve()

    async def step(name: str) -> None:
        code = await rpc(client, name) if by_rpc else (await client.post(f"/{name}")).code
        assert code == 200

    await client.post("/sleep?level=2")
    await client.post("/wake")
    await step("start_weight_update")
    for _ in range(3):
        await step("update_weights")
        assert (await client.ask()).code == 503
    await step("finish_weight_update")
    client.engine.weights = "good"  # the stand-in's worker does not know parts
    assert (await client.ask()).code == 200


async def test_an_update_in_which_nothing_was_written_loads_nothing(serve: Serve) -> None:
    client = serve()
    await client.post("/start_weight_update")
    await client.post("/sleep?level=2")
    await client.post("/wake")
    assert (await client.post("/finish_weight_update")).code == 200
    assert (await client.ask()).code == 503
    for path in ("/start_weight_update", "/finish_weight_update"):
        assert (await client.post(path)).code == 200
    assert (await client.ask()).code == 503


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("fails", [True, False])
async def test_an_update_that_a_level_2_sleep_tore_loads_nothing(serve: Serve, written: bool, fails: bool) -> None:
    class Engine(FakeEngine):
        """Its sleep may fail after it dropped the weights."""

        def _sleep(self, level: int) -> None:
            super()._sleep(level)
            if fails:
                raise RuntimeError("out of memory")

    client = serve(FakeVllm(Engine()))
    await client.post("/start_weight_update")
    if written:
        await client.post("/update_weights")
    with pytest.raises(RuntimeError) if fails else nullcontext():
        await client.post("/sleep?level=2")
    await client.post("/wake")
    assert (await client.post("/update_weights")).code == 200
    assert (await client.post("/finish_weight_update")).code == 200
    assert (await client.ask()).code == 503, "what was prepared or written before the sleep is gone"
    for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
        assert (await client.post(path)).code == 200
    assert (await client.ask()).body == {"text": "good"}


@pytest.mark.parametrize("path", ["/sleep", "/wake", "/reload_weights", "/resume", "/pause", *WRITES])
async def test_a_call_whose_client_left_before_its_turn_takes_no_effect(serve: Serve, path: str) -> None:
    client = await asleep(serve)
    client.engine.waits["wake_up"] = asyncio.Event()
    wake = await client.under_way("/wake")
    calls = [client.begin("POST", path, call("reload_weights")) for _ in range(20)]
    await until_idle()
    for each in calls:
        each.leave()
    await until_idle()
    assert all(each.task.done() for each in calls), "no handler is left"
    seen = len(client.vllm.seen)
    client.engine.waits["wake_up"].set()
    assert (await wake.response()).code == 200
    assert len(client.vllm.seen) == seen
    assert client.gate.model.phase is GatePhase.AWAKE


async def test_an_update_whose_body_is_too_large_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cumem_sleep.vllm.gate.MOST_WRITTEN_BYTES", 64)
    client = serve()
    assert (await client.post("/update_weights", b"x" * 65)).code == 413
    assert client.vllm.seen == []
    assert (await client.post("/update_weights", b"x" * 64)).code == 200


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/scale_elastic_ep"])
async def test_adapters_are_not_loaded_beside_a_sleep(serve: Serve, path: str, policy: str) -> None:
    client = serve(on_request=policy)
    await client.ask()
    client.engine.waits["sleep"] = asyncio.Event()
    load = await client.under_way(path, slow=True)
    sleep = await client.under_way("/sleep")
    load.go_on()
    await until_idle()
    client.engine.waits["sleep"].set()
    await sleep.response()
    await until_idle()
    assert f"POST {path}" not in client.vllm.seen
    if policy != "reject":
        assert not load.task.done(), "it is held, as one that comes now"
        assert client.engine.asleep, "it wakes nothing"
        await client.post("/wake")
    assert (await load.response()).code == (503 if policy == "reject" else 200)
    assert (f"POST {path}" in client.vllm.seen) == (policy != "reject")
    assert client.gate._held.requests == client.gate._held.nbytes == 0


@pytest.mark.parametrize(
    ("body", "method"),
    [(b'{"method": "sleep"}', "sleep"), (b"", ""), (b"[]", ""), (b'{"method": ["sleep"]}', ""), (b"[" * 10**5, "")],
)
def test_the_method_of_a_body(body: bytes, method: str) -> None:
    assert method_of(body) == method


def test_what_methods_do() -> None:
    assert effect_of("echo") is Effect.WRITES
    assert effect_of("refit", ("refit",)) is Effect.LOADS
    assert effect_of("sleep", ("sleep",)) is Effect.CHANGES_SLEEP
    assert effect_of("get_model") is Effect.WRITES
