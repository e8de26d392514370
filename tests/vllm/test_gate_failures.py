"""Sleeps, wakes and engines that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_vllm import TAGS, Crash, FakeEngine, FakeVllm
from gate_client import Serve, asleep

from cumem_sleep.vllm.sleeping_model import GatePhase

pytestmark = pytest.mark.usefixtures("gate_environment")


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_that_failed_after_the_scheduler_stopped_is_level_0(serve: Serve, level: int) -> None:
    client = serve()
    await client.fails("sleep", "OutOfHostMemory", f"/sleep?level={level}")
    response = await client.ask()
    assert response.code == 503, "vLLM would queue it, and nobody would ever resume"
    assert "level 0" in response.error["message"]
    await client.post("/wake_up")
    assert (await client.ask()).body == {"text": "good"}


class TornEngine(FakeEngine):
    """The sleep fails in the second worker, after the first one slept, which the executor does not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.first_sleeps = self.lost = False

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        assert not self.first_sleeps, "level 2 reads buffers"
        self.scheduler_paused = True
        self.first_sleeps, self.lost = True, level == 2
        self.weights = "garbage" if self.lost else self.weights
        raise RuntimeError("OutOfHostMemory")

    def status(self, rank: int) -> dict[str, Any]:
        self.asleep, self.backed_up = set(TAGS) if self.first_sleeps and rank == 0 else set(), not self.lost
        try:
            return super().status(rank)
        finally:
            self.asleep = set()

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        await super().wake_up(tags)
        if self.first_sleeps and not self.scheduler_paused:
            raise Crash("scheduler resumed on unmapped memory")
        return True

    async def collective_rpc(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        answer = await super().collective_rpc(method, *arguments, **keywords)
        if method == "wake_up":
            self.first_sleeps = False
        return answer

    async def generate(self) -> str:
        if self.first_sleeps:
            raise Crash("a request ran on unmapped memory")
        return await super().generate()


@pytest.mark.parametrize("mends", [True, False])
@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_that_failed_in_one_of_two_workers(serve: Serve, policy: str, level: int, mends: bool) -> None:
    client = serve(FakeVllm(TornEngine()), on_request=policy)
    if not mends:
        client.engine.fails["wake_up"] = [RuntimeError("OutOfDeviceMemory")]
    with pytest.raises(RuntimeError, match="OutOfHostMemory"):
        await client.post(f"/sleep?level={level}")
    if policy != "wake":
        health = await client.get("/health")
        assert mends or (health.code, health.body["status"]) == (503, "disagreeing")
        await client.post("/wake_up")
        if level == 2:
            await client.post("/reload_weights")
    assert (await client.ask()).body == {"text": "good"}


async def test_a_sleep_that_failed_during_a_pause_leaves_the_pause(serve: Serve, policy: str) -> None:
    client = serve(on_request=policy)
    await client.post("/pause")
    await client.fails("sleep", "OutOfHostMemory", "/sleep")
    assert (await client.ask()).body == {"text": "queued"}
    assert client.engine.count("wake_up") == 0


async def test_after_a_failed_wake_the_engine_is_asked(serve: Serve) -> None:
    client = await asleep(serve)
    await client.fails("wake_up", "no memory", "/wake_up")
    assert (await client.ask()).code == 503
    await client.engine.wake_up()  # unseen, but after a failure nothing is taken for granted
    await client.fails("wake_up", "no memory", "/wake_up")
    assert (await client.ask()).code == 200


async def test_an_engine_that_does_not_say_what_it_does_is_asked_by_the_next_request(serve: Serve) -> None:
    client = serve()
    await client.ask()
    client.engine.fails["is_sleeping"] = [RuntimeError("busy")]
    assert (await client.post("/sleep")).code == 200
    assert client.gate.model.phase is GatePhase.UNKNOWN
    assert (await client.ask()).code == 503


async def test_an_engine_that_does_not_answer_is_vllms_to_tell(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cumem_sleep.vllm.sleep_controller.ASK_WITHIN_S", 0.01)
    client = serve()
    client.engine.waits["is_sleeping"] = asyncio.Event()
    assert (await client.ask()).code == 200


async def test_an_answer_to_another_question_opens_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a call that failed in one worker, vLLM's executor is late by one answer in the others."""
    client = serve()
    status = client.engine.status
    monkeypatch.setattr(client.engine, "status", lambda rank: status(rank) if rank == 0 else None)
    await client.post("/sleep")
    assert (await client.ask()).code == 503
    await client.post("/wake_up")
    assert (await client.ask()).body == {"text": "good"}


async def test_an_engine_that_dies_while_a_request_is_held_answers_for_itself(serve: Serve) -> None:
    client = await asleep(serve, on_request="wait")
    request = await client.under_way("/v1/completions")
    client.engine.dead = True
    with pytest.raises(RuntimeError, match="encountered an issue"):
        await client.post("/wake_up")
    with pytest.raises(RuntimeError, match="EngineDeadError"):
        await request.response()


@pytest.mark.parametrize("policy", ["wait", "wake"])
async def test_an_engine_that_ends_while_the_model_sleeps_lets_its_requests_go(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """At SIGTERM vLLM ends its engine, and then waits for all requests."""
    monkeypatch.setattr("cumem_sleep.vllm.gate.POLL_S", 0.01)
    client = serve(on_request=policy)
    client.engine.waits["wake_up"] = asyncio.Event()
    await client.post("/sleep")
    request = await client.under_way("/v1/completions")
    client.engine.dead = True
    with pytest.raises(RuntimeError, match="EngineDeadError"):
        await asyncio.wait_for(request.task, 120)
