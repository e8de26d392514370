"""Level 3 through the gate: the workers' CUDA state leaves the GPU too, or the answer says why not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_vllm import Client
from gate_client import Serve, asleep

pytestmark = pytest.mark.usefixtures("gate_environment")

DEEPEN = b'{"method": "cumem_sleep_deepen"}'
FAILED = (
    "this process did not come back from a checkpoint that failed: CUDA reports its state as LOCKED: call wake_up again"
)


DEEP = {"status": "sleeping", "level": 3, "weights": "backed up", "kv_cache": "cleared"}


async def state(client: Client) -> tuple[Any, ...]:
    body = (await client.get("/health")).body
    return (body["asleep"], body["level"]) if body else (False, None)


def sleeps_of(client: Client) -> list[Any]:
    return [call for call in client.engine.calls if call[0] == "sleep"]


class TestSleep:
    @pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
    async def test_from_awake(self, serve: Serve, mode: str) -> None:
        client = serve()
        response = await client.post(f"/sleep?level=3&mode={mode}")
        assert (response.code, response.body) == (200, DEEP)
        assert sleeps_of(client) == [("sleep", 1, mode)], "vLLM knows no level 3"
        assert client.engine.checkpointed
        assert await state(client) == (True, 3)
        assert (await client.ask()).error["message"] == "the model is asleep (level 3): POST /wake_up"
        await client.post("/wake_up")
        assert await state(client) == (False, None)
        assert (await client.ask()).body == {"text": "good"}

    @pytest.mark.parametrize("level", [1, 2])
    async def test_goes_on_from_a_lesser_sleep(self, serve: Serve, level: int) -> None:
        client = await asleep(serve, level=level)
        calls = len(client.engine.calls)
        assert (await client.post("/sleep?level=3")).body == {**DEEP, **({"weights": "dropped"} if level == 2 else {})}
        between = client.engine.calls[calls:]
        assert not {"wake_up", "pause"} & {call if isinstance(call, str) else call[0] for call in between}
        assert len(sleeps_of(client)) == 1
        assert await state(client) == (True, 3)

    @pytest.mark.parametrize("level", [0, 1, 2, 3])
    async def test_stays_whatever_sleep_follows(self, serve: Serve, level: int) -> None:
        """VLLM would do nothing, but its pause before that calls workers."""
        client = await asleep(serve, level=3)
        client.engine.calls.clear()
        assert (await client.post(f"/sleep?level={level}")).body == DEEP
        assert sleeps_of(client) == []
        assert await state(client) == (True, 3)

    async def test_is_kept_from_while_only_the_kv_cache_sleeps(self, serve: Serve) -> None:
        client = serve()
        await client.post("/pause")
        await client.post("/release_kv_cache_memory")
        assert (await client.post("/sleep?level=3")).body["level"] == 3
        assert sleeps_of(client) == [("sleep", 1, "abort")], "the weights were awake"


class TestWake:
    @pytest.mark.parametrize("level", [1, 2])
    async def test_by_a_request(self, serve: Serve, level: int) -> None:
        client = await asleep(serve, level=level, on_request="wake")
        await client.post("/sleep?level=3")
        responses = await asyncio.gather(*(client.ask() for _ in range(5)))
        assert [each.body for each in responses] == [{"text": "good"}] * 5
        assert await state(client) == (False, None)

    @pytest.mark.parametrize("error", ["OutOfDeviceMemory: needed 1 GiB", "CheckpointFailed: call wake_up again"])
    async def test_that_fails_can_be_made_again(self, serve: Serve, error: str) -> None:
        client = await asleep(serve, level=3, on_request="wake", retry_after_s=30)
        client.engine.fails["wake_up"] = [RuntimeError(error)]
        assert error in (await client.ask()).error["message"]
        assert await state(client) == (True, 3)
        assert (await client.post("/wake_up")).code == 200
        assert (await client.ask()).body == {"text": "good"}


class TestRefused:
    async def test_says_why_and_stays_at_level_1(self, serve: Serve) -> None:
        client = serve()
        client.engine.why_not_deeper = "this process is one of 2 ranks"
        wanted = {**DEEP, "level": 1, "why_not_deeper": "this process is one of 2 ranks"}
        for _ in range(2):
            response = await client.post("/sleep?level=3")
            assert (response.code, response.body) == (200, wanted)
        assert await state(client) == (True, 1)
        await client.post("/wake_up")
        assert (await client.ask()).body == {"text": "good"}

    async def test_without_the_plugin(self, serve: Serve) -> None:
        client = serve()
        client.engine.plugin = False
        response = await client.post("/sleep?level=3")
        assert response.code == 200
        assert response.body["level"] == 1
        assert "not active" in response.body["why_not_deeper"]
        await client.post("/wake_up")
        assert (await client.ask()).body == {"text": "good"}

    async def test_a_checkpoint_that_cannot_be_taken_back(self, serve: Serve) -> None:
        client = serve()
        client.engine.why_not_deeper, client.engine.stuck = FAILED, True
        response = await client.post("/sleep?level=3")
        assert response.code == 500
        assert FAILED in response.error["message"]
        assert await state(client) == (True, 3)
        assert (await client.post("/wake_up")).code == 200
        assert await state(client) == (False, None)

    async def test_a_dead_engine(self, serve: Serve) -> None:
        client = serve()
        client.engine.fails["cumem_sleep_deepen"] = [RuntimeError("EngineCore encountered an issue")]
        response = await client.post("/sleep?level=3")
        assert response.code == 500
        assert "EngineCore encountered an issue" in response.error["message"]
        assert await state(client) == (True, 1)


class TestByItself:
    async def test_is_seen(self, serve: Serve) -> None:
        """CUMEM_SLEEP_DEEP_AFTER_S: the worker goes deeper, and nobody tells the gate."""
        client = await asleep(serve, on_request="wake")
        assert await state(client) == (True, 1)
        client.engine.checkpointed = True
        assert await state(client) == (True, 3)
        client.engine.checkpointed = False  # a call to a worker brought it back
        assert await state(client) == (True, 1)
        client.engine.checkpointed = True
        assert (await client.post("/sleep")).body == DEEP
        assert (await client.ask()).body == {"text": "good"}


class TestByAWorkerMethod:
    async def test_is_tracked(self, serve: Serve) -> None:
        client = serve()
        await client.post("/collective_rpc", DEEPEN)
        assert await state(client) == (False, None), "the worker refuses"
        await client.post("/sleep")
        assert (await client.post("/collective_rpc", DEEPEN)).code == 200
        assert client.gate.model.checkpointed
        assert await state(client) == (True, 3)
