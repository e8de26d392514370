"""Workers and engine that disagree: a wake that fails after the memory is mapped, and sleeps that change nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from fake_vllm import TAGS, FakeEngine, FakeVllm
from gate_client import Serve, asleep

from cumem_sleep.vllm.sleeping_model import GatePhase

pytestmark = pytest.mark.usefixtures("gate_environment")


class HalfWokenEngine(FakeEngine):
    """vLLM's executor notes a wake when all of it is over: one that fails after the memory is mapped it does not note.

    Attributes:
        taken: the tags that the executor takes to be asleep; `asleep` is what sleeps in the workers.
        failures: how many of the next wakes fail at their end.
    """

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        self.taken: set[str] = set()
        self.failures = 0
        self.engines = [self]
        self.again = again
        if not again:
            self.release_kv_cache_memory: Any = None
            del self.release_kv_cache_memory

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.scheduler_paused = True
        await self._called("sleep", level, mode)
        if level > 0 and not ("weights" in self.taken if self.again else self.taken):
            self._sleep(level)
            self.taken = set(TAGS)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        await self._called("wake_up", tags)
        wanted = (set(self.taken) if tags is None else set(tags)) - {"scheduling"}
        if self.taken and wanted <= self.taken:
            self._wake_workers(wanted)
            self.taken -= wanted
        if not self.taken:
            self.scheduler_paused = False
        return not self.taken

    def _wake_workers(self, tags: set[str]) -> None:
        self.asleep -= tags
        if self.failures:
            self.failures -= 1
            raise RuntimeError("zero_() of the scales failed")

    async def is_sleeping(self) -> bool:
        await self._called("is_sleeping")
        return self.scheduler_paused or bool(self.taken)

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        answer = await super().collective_rpc(method, timeout, args, kwargs)
        if method == "sleep":
            self._sleep(**kwargs)
        elif method == "wake_up":
            self._wake_workers(set(TAGS))
        return answer


class LeavesTheRestAlone(HalfWokenEngine):
    """vLLM before 0.33: its executor's sleep does nothing while any tag sleeps."""

    def __getattribute__(self, name: str) -> Any:
        if name == "release_kv_cache_memory":
            raise AttributeError(name)
        return super().__getattribute__(name)


async def half_woken(serve: Serve, level: int = 1, tags: str = "", **settings: Any) -> Any:
    client = await asleep(serve, level, FakeVllm(HalfWokenEngine()), **settings)
    client.engine.failures = 1
    with pytest.raises(RuntimeError, match="zero_"):
        await client.post(f"/wake_up{tags}")
    return client


@pytest.mark.parametrize("tags", ["", "?tags=weights", "?tags=kv_cache"])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("policy", ["reject", "wait"])
async def test_a_half_woken_model_is_neither_asleep_nor_awake(serve: Serve, policy: str, level: int, tags: str) -> None:
    client = await half_woken(serve, level, tags, on_request=policy)
    response = await client.ask()
    assert response.code == 503, "vLLM would queue it, and nobody would ever resume"
    assert "takes kv_cache and weights to be asleep" in response.error["message"]
    health = await client.get("/health")
    assert health.code == 503
    assert health.body["status"] == "disagreeing"
    assert health.body["asleep"] is health.body["level"] is None
    assert (await client.get("/is_sleeping")).code == 503
    assert (await client.post("/resume")).code == 409
    assert (await client.post("/update_weights")).code == 409


class TwoEngines(HalfWokenEngine):
    """Data parallelism: calls go to both engines, and the answer is the first one's. The second one fails to wake."""

    def __init__(self) -> None:
        super().__init__()
        self.second = HalfWokenEngine()
        self.engines = [self, self.second]
        self.engine_core.core_engines = [b"first", b"second"]
        self.engine_core._call_utility_async = self._of_one

    async def _of_one(self, utility: str, *arguments: Any, engine: bytes) -> Any:
        one: Any = super() if engine == b"first" else self.second
        return await getattr(one, utility)(*arguments)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self.second.sleep(level, mode)
        await super().sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        await super().wake_up(tags)
        return await self.second.wake_up(tags)

    async def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        await self.second.collective_rpc(method, *args, **kwargs)
        return await super().collective_rpc(method, *args, **kwargs)


@pytest.mark.parametrize("engine", [HalfWokenEngine, partial(LeavesTheRestAlone, again=False), TwoEngines])
@pytest.mark.parametrize("first", ["", "weights", "kv_cache"])
@pytest.mark.parametrize("repair", ["/wake_up", "/sleep", "/sleep?level=2", "/sleep?level=3", "request"])
@pytest.mark.parametrize("level", [1, 2])
async def test_a_repair_brings_engine_and_workers_together(
    serve: Serve, engine: Any, first: str, repair: str, level: int
) -> None:
    """Where one tag was woken before, the engine takes the other alone to be asleep, and may leave both alone."""
    client = await asleep(serve, level, FakeVllm(engine()), on_request="wake" if repair == "request" else "reject")
    engines = client.engine.engines
    if first:
        await client.post(f"/wake_up?tags={first}")
    engines[-1].failures = 1
    if level == 2 and first != "weights" and repair == "request":  # it would load them, and answers by itself
        assert "zero_" in (await client.post("/wake_up")).error["message"]
    else:
        with pytest.raises(RuntimeError, match="zero_"):
            await client.post("/wake_up")
    assert (await client.get("/health")).body["status"] == "disagreeing"
    if repair == "request":
        is_others = level == 2 and first == "weights"  # somebody is loading them
        assert (await client.ask()).code == (503 if is_others else 200)
    else:
        assert (await client.ask()).code == 503
        assert (await client.post(repair)).code == 200
    if repair.startswith("/sleep"):
        assert all(each.asleep == each.taken == TAGS for each in engines)
        health = await client.get("/health")
        assert (health.body["status"], health.body["asleep"]) == ("asleep", True)
    assert (await client.post("/wake_up")).code == 200
    if level == 2 and repair != "request":
        assert (await client.ask()).code == 503
    await client.post("/reload_weights")
    assert (await client.ask()).body == {"text": "good"}
    assert (await client.get("/health")).code == 200
    assert not any(each.asleep | each.taken for each in engines)


async def test_a_sleep_that_cannot_repair_says_so(serve: Serve) -> None:
    client = await asleep(serve, vllm=FakeVllm(LeavesTheRestAlone(again=False)))
    await client.post("/wake_up?tags=weights")
    client.engine.failures = 2
    with pytest.raises(RuntimeError, match="zero_"):
        await client.post("/wake_up?tags=kv_cache")
    response = await client.post("/sleep")
    assert response.code == 503
    assert "zero_() of the scales failed" in response.error["message"]
    assert not client.engine.asleep
    assert (await client.get("/health")).body["status"] == "disagreeing"
    assert (await client.post("/sleep")).code == 200
    assert client.engine.asleep == TAGS


async def test_a_sleep_that_repairs_loses_nothing_that_vllm_saved(serve: Serve) -> None:
    """At level 2 a worker saves buffers at a sleep, and restores them in the wake, which has failed."""
    client = await half_woken(serve, level=2)
    response = await client.post("/sleep?level=2")
    assert (response.code, response.body.get("level", 2)) == (200, 2)
    assert client.engine.backed_up


async def test_a_sleep_after_a_failed_wake_does_not_claim_to_sleep_where_workers_do_not(serve: Serve) -> None:
    client = await half_woken(serve)
    await client.fails("sleep", "OutOfHostMemory", "/sleep")
    assert not client.engine.asleep
    assert (await client.get("/health")).code == 503
    assert (await client.ask()).code == 503


async def test_waking_on_request_that_fails_half_way_is_tried_again_and_refused_meanwhile(serve: Serve) -> None:
    client = serve(FakeVllm(HalfWokenEngine()), on_request="wake", retry_after_s=30)
    now = 0.0
    client.gate.controller.clock = lambda: now
    await client.post("/sleep")
    client.engine.failures = 2
    for _ in range(2):
        response = await client.ask()
        assert response.code == 503
        assert "zero_() of the scales failed" in response.error["message"]
        assert "is asleep" not in response.error["message"]
    assert client.engine.count("wake_up") == 1
    assert (await client.get("/health")).code == 503
    now += 31
    assert (await client.ask()).code == 503
    now += 31
    assert (await client.ask()).body == {"text": "good"}


async def test_without_the_plugin_a_failed_wake_leaves_it_unknown_what_is_mapped(serve: Serve) -> None:
    client = serve(FakeVllm(HalfWokenEngine()))
    client.engine.plugin = False
    await client.post("/sleep")
    client.engine.failures = 1
    with pytest.raises(RuntimeError, match="zero_"):
        await client.post("/wake_up")
    assert (await client.get("/health")).body["status"] == "disagreeing"
    assert (await client.post("/sleep")).code == 503, "workers of vLLM's own layer cannot sleep twice"
    assert client.engine.calls.count("sleep") == 0
    assert (await client.post("/wake_up")).code == 200
    assert (await client.ask()).body == {"text": "good"}


async def test_health_finds_out_that_a_wake_which_failed_has_mapped_nothing(serve: Serve) -> None:
    """Workers may not answer at once, and until they do nobody says that they sleep."""
    client = await asleep(serve)
    client.engine.fails["wake_up"] = [RuntimeError("OutOfDeviceMemory")]
    client.engine.fails["cumem_sleep_status"] = [RuntimeError("an answer to another question")] * 4
    with pytest.raises(RuntimeError, match="OutOfDeviceMemory"):
        await client.post("/wake_up")
    assert client.gate.model.phase is GatePhase.DISAGREEING
    assert (await client.get("/health")).body == {
        "status": "asleep",
        "asleep": True,
        "level": 1,
        "tags": ["kv_cache", "weights"],
    }


async def test_health_asks_the_workers_of_a_model_that_is_said_to_sleep(serve: Serve) -> None:
    client = await asleep(serve, vllm=FakeVllm(HalfWokenEngine()), on_request="wait")
    client.engine.asleep.clear()  # somebody woke the workers past the engine and the gate
    health = await client.get("/health")
    assert (health.code, health.body["status"]) == (503, "disagreeing")
    assert (await client.post("/wake_up")).code == 200
    assert (await client.ask()).body == {"text": "good"}


class OneSleepsOn(HalfWokenEngine):
    """One of two workers sleeps on after a wake that succeeded, as far as the engine knows."""

    def __init__(self) -> None:
        super().__init__()
        self.left: set[str] = set()
        self.leaves: set[str] = set()

    def _wake_workers(self, tags: set[str]) -> None:
        self.left, self.leaves = self.leaves & tags, set()
        super()._wake_workers(tags)

    def status(self, rank: int) -> dict[str, Any]:
        asleep, self.asleep = self.asleep, self.asleep | self.left if rank == 1 else self.asleep
        try:
            return super().status(rank)
        finally:
            self.asleep = asleep


@pytest.mark.parametrize("left", [{"weights"}, {"kv_cache"}, set(TAGS)])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("lost", [False, True])
async def test_a_worker_that_sleeps_on_after_a_wake_is_found(
    serve: Serve, policy: str, left: set[str], level: int, lost: bool
) -> None:
    """Also where vLLM's executor takes its failure for the answer to the next call."""
    is_mended = policy == "wake" and (level == 1 or "weights" in left)
    deadline_s = 60 if is_mended else 0.1
    client = await asleep(serve, level, FakeVllm(OneSleepsOn()), on_request=policy, request_deadline_s=deadline_s)
    client.engine.leaves = left
    client.engine.fails["cumem_sleep_status"] = [RuntimeError("Worker failed with error")] * lost
    assert (await client.post("/wake_up?tags=weights&tags=kv_cache")).code == 200
    assert client.engine.left == left
    if is_mended:
        assert (await client.ask()).body == {"text": "good"}
        assert not client.engine.left
    else:
        assert (await client.ask()).code == 503
        assert (await client.get("/health")).body["status"] == "disagreeing"
        assert (await client.get("/is_sleeping")).code == 503
    assert (await client.post("/wake_up")).code == 200
    await client.post("/reload_weights")
    assert (await client.ask()).body == {"text": "good"}


# What a sleep says that changed nothing


@pytest.mark.parametrize(
    ("first", "second", "level"),
    [(1, 2, 1), (2, 1, 2), (1, 0, 1), (2, 0, 2), (1, 1, 1), (2, 2, 2), (0, 1, 1), (0, 2, 2)],
)
@pytest.mark.parametrize("plugin", [True, False])
async def test_a_second_sleep_states_the_level_that_is(
    serve: Serve, first: int, second: int, level: int, plugin: bool
) -> None:
    client = serve()
    client.engine.plugin = plugin
    await client.post(f"/sleep?level={first}")
    response = await client.post(f"/sleep?level={second}")
    assert response.code == 200
    if second != level:
        assert (response.body["status"], response.body["level"]) == ("sleeping", level)
        assert ("why_not_deeper" in response.body) == (second > level)
    assert (await client.get("/health")).body["level"] == level


@pytest.mark.parametrize("plugin", [True, False])
async def test_a_sleep_that_leaves_weights_mapped_is_no_sleep(serve: Serve, plugin: bool) -> None:
    client = serve(FakeVllm(LeavesTheRestAlone(again=False)))
    client.engine.plugin = plugin
    await client.post("/sleep")
    await client.post("/wake_up?tags=weights")
    response = await client.post("/sleep?level=2")
    assert client.engine.asleep == {"kv_cache"}
    assert response.code == 409
    assert "leaves weights mapped" in response.error["message"]
    await client.post("/wake_up")
    assert (await client.ask()).body == {"text": "good"}


# Loads that fail, or are of a part


@pytest.mark.parametrize("policy", ["wait", "wake"])
@pytest.mark.parametrize("plugin", [True, False])
async def test_a_draft_model_alone_is_not_all_weights(serve: Serve, policy: str, plugin: bool) -> None:
    client = serve(on_request=policy, request_deadline_s=0.1)
    client.engine.plugin = plugin
    await client.post("/sleep?level=2")
    await client.post("/wake_up?tags=weights&tags=kv_cache")
    client.engine.leaves_out = ["model.weight"] * 2
    for path in ("/start_draft_weight_update", "/update_weights", "/finish_weight_update"):
        await client.post(path)
    response = await client.ask()
    assert response.code == 503
    assert ("model.weight" if plugin else "POST /reload_weights") in response.error["message"]
    assert (await client.post("/reload_weights")).code == 200
    assert (await client.ask()).body == {"text": "good"}


@pytest.mark.parametrize("policy", ["wait", "wake"])
@pytest.mark.parametrize(
    ("load", "body"),
    [("/reload_weights", b""), ("/collective_rpc", b'{"method": "reload_weights"}'), ("/update_weights", b"")],
)
@pytest.mark.parametrize("wakes", [("/wake_up?tags=weights&tags=kv_cache",), ("/wake_up?tags=weights",)])
async def test_after_a_load_by_hand_that_failed_requests_hear_why(
    serve: Serve, policy: str, load: str, body: bytes, wakes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await asleep(serve, level=2, on_request=policy, request_deadline_s=600)
    for wake in wakes:
        await client.post(wake)
    held = client.begin("POST", "/v1/completions")

    def fail() -> None:
        raise RuntimeError("no such file")

    monkeypatch.setattr(client.engine, "write_weights", fail)
    if load == "/reload_weights":
        assert (await client.post(load, body)).code == 500
    else:
        with pytest.raises(RuntimeError, match="no such file"):
            await client.post(load, body)
    for response in (await held.response(), await client.ask()):
        assert response.code == 503
        assert "no such file" in response.error["message"]
    assert (await client.get("/health")).code == 503
    monkeypatch.undo()
    assert (await client.post(load, body)).code == 200
    await client.post("/wake_up")
    assert (await client.ask()).body == {"text": "good"}


async def test_engines_that_differ_in_whether_they_are_paused_are_asked_one_by_one(serve: Serve) -> None:
    """VLLM 0.33's client fails then."""

    async def call(utility: str, engine: int) -> bool:
        return {"is_sleeping": True, "is_scheduler_paused": engine == 1}[utility]

    async def is_paused() -> bool:
        raise RuntimeError("engines differ")

    client = serve()
    client.vllm.state.args.api_server_count = 2  # each request asks
    vars(client.engine).update(plugin=False, is_paused=is_paused)
    vars(client.engine.engine_core).update(core_engines=[0, 1], _call_utility_async=call)
    await client.engine.pause_generation()
    assert (await client.ask()).body == {"text": "queued"}
    assert client.gate.model.phase is not GatePhase.UNKNOWN
