"""Idle sleep: a model that nobody asks falls asleep by itself, and never under a request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import Client, FakeVllm, until_idle
from gate_client import Serve, two_servers

from cumem_sleep import InvalidArgument
from cumem_sleep.settings import GateSettings
from cumem_sleep.vllm import idle
from cumem_sleep.vllm.sleeping_model import GatePhase

pytestmark = pytest.mark.usefixtures("gate_environment", "often")

IDLE = {"on_request": "wake", "idle_s": 10}
LOOKS = 5  # of the watch, in which it does what it will


class Clock:
    """The time of all gates of a test."""

    def __init__(self, *clients: Client) -> None:
        self.now = 1000.0
        for client in clients:
            client.gate.controller.clock = lambda: self.now

    async def go_on(self, seconds: float) -> None:
        for passed in (0.0, seconds):
            self.now += passed
            for _ in range(LOOKS):
                await asyncio.sleep(idle.LOOK_EVERY_S)
                await until_idle()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "LOOK_EVERY_S", 0.002)


def sleeps(client: Client) -> list[Any]:
    return [call for call in client.engine.calls if call[0] == "sleep"]


async def test_it_sleeps_after_the_time_and_a_request_wakes_it(serve: Serve) -> None:
    client = serve(**IDLE)
    clock = Clock(client)
    for level in range(2):
        assert (await client.ask()).code == 200
        await clock.go_on(9.9)
        assert len(sleeps(client)) == level
        await clock.go_on(0.2)
        assert sleeps(client) == [("sleep", 1, "abort")] * (level + 1)
        assert client.gate.model.phase is GatePhase.ASLEEP
    await clock.go_on(1000)
    assert len(sleeps(client)) == 2


async def test_at_level_2_the_request_that_wakes_it_finds_its_weights(serve: Serve) -> None:
    client = serve(**IDLE, idle_level=2)
    clock = Clock(client)
    await client.ask()
    await clock.go_on(11)
    assert client.engine.weights == "garbage"
    assert (await client.ask()).body == {"text": "good"}


async def test_never_under_a_request_that_runs_or_waits(serve: Serve) -> None:
    client = serve(**IDLE)
    clock = Clock(client)
    client.engine.waits["generate"] = asyncio.Event()
    running = client.begin("POST", "/v1/completions")
    await client.engine.entered["generate"].wait()
    await clock.go_on(1000)
    assert sleeps(client) == []
    client.engine.waits["generate"].set()
    assert (await running.response()).code == 200
    await clock.go_on(9)
    slow = client.begin("POST", "/v1/completions", slow=True)  # its body is on its way
    await clock.go_on(1000)
    assert sleeps(client) == []
    slow.go_on()
    assert (await slow.response()).code == 200
    await clock.go_on(9)
    assert sleeps(client) == []
    await clock.go_on(2)
    assert len(sleeps(client)) == 1


async def test_what_goes_on_in_vllm_after_its_answer_counts(serve: Serve) -> None:
    client = serve(**IDLE)
    left = 1
    client.engine.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: left)
    clock = Clock(client)
    await client.ask()
    await clock.go_on(1000)
    assert sleeps(client) == []
    left = 0
    await clock.go_on(0)
    await clock.go_on(9)
    assert sleeps(client) == []
    await clock.go_on(2)
    assert len(sleeps(client)) == 1


async def test_questions_and_requests_that_vllm_will_refuse_keep_nobody_awake(serve: Serve) -> None:
    client = serve(FakeVllm(api_keys=("key",)), **IDLE)
    clock = Clock(client)
    await client.ask("key")
    for _ in range(4):
        await clock.go_on(2)
        for path in ("/health", "/ping", "/metrics", "/v1/models", "/is_sleeping", "/load"):
            await client.get(path)
        assert (await client.ask("wrong")).code == 401
    await clock.go_on(2.1)
    assert len(sleeps(client)) == 1


async def test_a_woken_model_stays_awake_for_a_while(serve: Serve) -> None:
    client = serve(**IDLE, idle_awake_s=30)
    clock = Clock(client)
    await client.ask()
    await clock.go_on(0)
    await clock.go_on(31)
    assert len(sleeps(client)) == 1
    assert (await client.post("/wake")).code == 200
    await clock.go_on(0)
    await clock.go_on(29)
    assert len(sleeps(client)) == 1
    await clock.go_on(2)
    assert len(sleeps(client)) == 2


@pytest.mark.parametrize("fails", ["", "look"])
@pytest.mark.parametrize("by", ["/pause", "somebody else", "/start_weight_update", "/sleep?level=0", "/sleep?level=2"])
async def test_what_somebody_has_begun_is_left_alone(serve: Serve, by: str, fails: str) -> None:
    client = serve(**IDLE)
    clock = Clock(client)
    await client.ask()
    if by == "somebody else":
        client.engine.scheduler_paused = True
    else:
        assert (await client.post(by)).code == 200
    before = len(sleeps(client))
    if by == "/sleep?level=2":
        await client.post("/wake?tags=weights")  # and loads them
    woken = client.engine.count("wake_up")
    if fails:
        client.engine.fails["is_sleeping"] = [RuntimeError("no answer")] * 3
    await clock.go_on(1000)
    assert len(sleeps(client)) == before
    assert client.engine.count("wake_up") == woken


@pytest.mark.parametrize("on_request", ["wake", "wait"])
async def test_a_sleep_that_fails_leaves_a_model_that_serves(serve: Serve, on_request: str) -> None:
    client = serve(on_request=on_request, idle_s=10)
    clock = Clock(client)
    client.engine.fails["sleep"] = [RuntimeError("no host memory")]
    await client.ask()
    await clock.go_on(11)
    assert len(sleeps(client)) == 1
    assert (await client.ask()).code == 200
    await clock.go_on(11)
    assert len(sleeps(client)) == 1, "it is not tried again at once"
    await clock.go_on(50)
    assert len(sleeps(client)) == 2


async def test_a_request_that_comes_as_it_falls_asleep_is_answered(serve: Serve) -> None:
    client = serve(**IDLE)
    clock = Clock(client)
    client.engine.waits["sleep"] = asyncio.Event()
    await client.ask()
    await clock.go_on(11)
    request = await client.under_way("/v1/completions")
    client.engine.waits["sleep"].set()
    assert (await request.response()).body == {"text": "good"}


async def test_a_request_that_comes_before_the_sleep_has_its_turn_prevents_it(serve: Serve) -> None:
    client = serve(**IDLE)
    clock = Clock(client)
    await client.ask()
    client.engine.waits["refit"] = asyncio.Event()
    write = client.begin("POST", "/collective_rpc", b'{"method": "refit"}')
    await client.engine.entered["refit"].wait()
    await clock.go_on(11)
    client.engine.waits["generate"] = asyncio.Event()
    client.engine.entered["generate"].clear()
    request = client.begin("POST", "/v1/completions")
    await client.engine.entered["generate"].wait()
    client.engine.waits["refit"].set()
    assert (await write.response()).code == 200
    await clock.go_on(0)
    assert sleeps(client) == []
    client.engine.waits["generate"].set()
    assert (await request.response()).body == {"text": "good"}


async def test_several_api_servers_agree(serve: Serve) -> None:
    clients = two_servers(serve, **IDLE)
    clock, (first, second) = Clock(*clients), clients
    for _ in range(2):
        for client in clients:
            assert (await client.ask()).code == 200
        before = len(sleeps(first))
        await clock.go_on(9)
        first.engine.waits["generate"] = asyncio.Event()
        first.engine.entered["generate"].clear()
        running = second.begin("POST", "/v1/completions")
        await first.engine.entered["generate"].wait()
        await clock.go_on(1000)
        assert len(sleeps(first)) == before, "another server has a request"
        first.engine.waits.pop("generate").set()
        assert (await running.response()).code == 200
        await clock.go_on(9)
        assert len(sleeps(first)) == before, "another server had a request not long ago"
        await clock.go_on(2)
        assert len(sleeps(first)) == before + 1
        await clock.go_on(1000)
        assert len(sleeps(first)) == before + 1
    for client in clients:
        assert (await client.ask()).body == {"text": "good"}


async def test_a_server_that_is_too_busy_to_look_is_not_taken_for_idle(serve: Serve) -> None:
    first, second = two_servers(serve, **IDLE)
    clock = Clock(first, second)
    assert (await first.ask()).code == (await second.ask()).code == 200
    await clock.go_on(0)
    second.gate._idle.stop()
    first.engine.waits["generate"] = asyncio.Event()
    first.engine.entered["generate"].clear()
    running = second.begin("POST", "/v1/completions")
    await first.engine.entered["generate"].wait()
    await clock.go_on(1000)
    assert sleeps(first) == []
    first.engine.waits["generate"].set()
    assert (await running.response()).code == 200


async def test_without_the_setting_nothing_watches(serve: Serve) -> None:
    client = serve(on_request="wake")
    clock = Clock(client)
    await client.ask()
    await clock.go_on(1e6)
    assert sleeps(client) == []
    assert client.gate._idle._watch is None


def test_a_model_that_would_refuse_requests_does_not_sleep_by_itself() -> None:
    with pytest.raises(InvalidArgument, match=r"CUMEM_SLEEP_IDLE_S=60: .* CUMEM_SLEEP_ON_REQUEST=wake, or wait"):
        GateSettings.from_environment({"CUMEM_SLEEP_IDLE_S": "60"})
    assert GateSettings.from_environment({"CUMEM_SLEEP_IDLE_S": "60", "CUMEM_SLEEP_ON_REQUEST": "wait"}).idle_s == 60


@pytest.mark.parametrize("has", ["external", "hybrid", "internal", "no sleep mode"])
async def test_a_server_that_cannot_sleep_alone_does_not_begin(serve: Serve, has: str) -> None:
    client = serve(**IDLE)
    parallel = SimpleNamespace(data_parallel_size=2, **{f"data_parallel_{has}_lb": True})
    model = SimpleNamespace(enable_sleep_mode=has != "no sleep mode")
    client.engine.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=model)
    said = await client.start()
    if has == "internal":
        assert (said, client.vllm.seen) == ([], ["lifespan"])
    else:
        assert (said[0]["type"], client.vllm.seen) == ("lifespan.startup.failed", [])
        assert "CUMEM_SLEEP_IDLE_S" in said[0]["message"]
