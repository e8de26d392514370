"""What holds for every engine: over servers that are processes, and over servers that answer nonsense.

A new engine is one more name in `ENGINES`, and a server of its kind in `faulty_server.SERVERS`.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
import signal
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from faulty_server import SERVERS, lives
from servers_of_tests import FAULTY, client_of, config, running, until

from cumem_sleep.serve import hardware, policy
from cumem_sleep.serve.address import Address
from cumem_sleep.serve.config import Config
from cumem_sleep.serve.engines import ENGINES, engine, sglang, vllm
from cumem_sleep.serve.engines.engine import Engine, Facts
from cumem_sleep.serve.events import Outcome
from cumem_sleep.serve.fleet import Fleet, ModelLease, OrderRefused, ServerFailed
from cumem_sleep.serve.servers import Server
from cumem_sleep.serve.status import ModelStatus, Phase

pytestmark = pytest.mark.parametrize("kind", ENGINES)
GIB = 1 << 30


def test_each_has_a_server_of_its_kind(kind: str) -> None:
    assert kind in SERVERS


# As processes


def models(folder: Path, kind: str, *options: str, **more: Any) -> Config:
    """One model of this engine; what must not happen is written to `record`."""
    (folder / "gpu").mkdir(exist_ok=True)
    command = f"{FAULTY} --engine {kind} --uds {{socket}} --served-model-name a --gpus {folder / 'gpu'}"
    command += f" --faults 0 --seed 1 --record {folder / 'record'} --executed {folder / 'executed'} {' '.join(options)}"
    says = "10GiB" if kind == "vllm" else None  # this one may have no layer in it, which would say so
    health = {"health": "/ready"} if kind == "command" else {}
    return config(folder, a={"engine": kind, "command": command, "host_memory": says, **health, **more})


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300))


@pytest.fixture(autouse=True)
def _nothing_must_not_happen(tmp_path: Path) -> Iterator[None]:
    yield
    assert not (tmp_path / "record").exists(), (tmp_path / "record").read_text()


async def ask(lease: ModelLease, words: int = 3) -> str:
    transport = httpx.AsyncHTTPTransport(uds=lease.server.socket)
    async with httpx.AsyncClient(transport=transport, base_url=lease.server.base_url, timeout=60) as client:
        answer = await client.post("/v1/completions", json={"model": "a", "prompt": "?", "max_tokens": words})
        return str(answer.raise_for_status().json()["choices"][0]["text"])


def only(fleet: Fleet) -> ModelStatus:
    (model,) = fleet.status().models
    return model


async def test_it_starts_answers_sleeps_and_answers_again(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory is counted while it sleeps, and a GPU has nobody on it who rests."""
    monkeypatch.setattr(hardware, "host_available_bytes", lambda: 100 * GIB)
    rests = Phase.ASLEEP if ENGINES[kind].LEVELS else Phase.STOPPED

    async with running(models(tmp_path, kind)) as fleet:
        await until(fleet, a=rests)
        pids = set()
        for _ in range(2):
            async with fleet.lease("a") as lease:
                assert (await ask(lease)).startswith("This is a,")
                assert [holder.model for holder in fleet.status().gpus[0].holders] == ["a"]
                pids.add(only(fleet).pid)
            await fleet.sleep("a")
            model = only(fleet)
            assert (model.phase, model.engine, model.error) == (rests, kind, None)
            assert model.level == (1 if rests is Phase.ASLEEP else None)
            assert fleet.status().gpus[0].holders == ()
            assert not [each for each in (tmp_path / "gpu").iterdir() if lives(each.read_text())]
            assert model.host_bytes == (10 * GIB if rests is Phase.ASLEEP else 0)
        assert len(pids) == (1 if rests is Phase.ASLEEP else 2)
        await fleet.sleep("a")  # once more is harmless
        await fleet.stop_model("a")
        assert (only(fleet).phase, only(fleet).host_bytes) == (Phase.STOPPED, 0)
        others = {1, 2, 3} - {*ENGINES[kind].LEVELS}
        for level in others:
            with pytest.raises(OrderRefused, match=f"level {level}: a has "):
                await fleet.sleep("a", level)


async def test_a_request_that_runs_is_waited_for_and_one_that_runs_too_long_is_ended(tmp_path: Path, kind: str) -> None:
    async with running(models(tmp_path, kind, "--token-seconds 0.05")) as fleet:
        async with fleet.lease("a") as lease:
            ordered = asyncio.create_task(fleet.sleep("a"))
            await until(fleet, a=Phase.DRAINING)
            assert len((await ask(lease, 12)).split()) == 12
            assert not ordered.done()
        await ordered
    async with running(models(tmp_path, kind, "--token-seconds 0.05", drain=0.2)) as fleet:
        async with fleet.lease("a") as lease:
            ordered = asyncio.create_task(fleet.sleep("a"))
            asking = asyncio.create_task(ask(lease, 100_000))
            assert "GPU is needed" in await lease.revoked
            asking.cancel()
            await asyncio.wait({asking})
        await ordered
        assert only(fleet).phase in (Phase.ASLEEP, Phase.STOPPED)


async def test_one_that_is_killed_ends_its_requests_and_comes_back(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.01)

    async with running(models(tmp_path, kind)) as fleet:
        async with fleet.lease("a") as lease:
            pid = only(fleet).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert "killed by SIGKILL" in await lease.revoked
        async with fleet.lease("a") as lease:
            assert (await ask(lease)).startswith("This is a,")
            new = only(fleet).pid
        assert new not in (pid, None)
    assert not lives(str(new))


async def test_a_request_that_finds_nobody_listening_waits_for_the_next_server(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the moments before a death is noticed, or where a server takes no new connections, nothing was sent."""
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.01)
    see_it_end = Server._see_it_end

    async def see_it_late(*arguments: Any) -> None:
        await asyncio.sleep(0.5)
        await see_it_end(*arguments)

    monkeypatch.setattr(Server, "_see_it_end", see_it_late)

    async with running(models(tmp_path, kind, at_start="awake")) as fleet:
        model = (await until(fleet, a=Phase.AWAKE)).models[0]
        assert model.pid is not None
        if kind == "sglang":  # all this is before an engine's own part: one of them takes no connections
            os.unlink(str(model.url).removeprefix("unix:"))
        else:
            os.kill(model.pid, signal.SIGKILL)
            while lives(str(model.pid)):
                await asyncio.sleep(0.01)
        async with client_of(fleet) as client:
            asking = [client.post("/v1/completions", json={"model": "a", "max_tokens": 3}) for _ in range(3)]
            answers = await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        assert only(fleet).pid not in (model.pid, None)


async def test_one_that_is_never_ready_is_stopped_in_time(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.01)
    silent = "python3 -c 'import time; time.sleep(999)' {socket}"

    hangs = {"engine": kind, "command": silent, "start_timeout": 0.2, "at_start": "stopped"}
    async with running(config(tmp_path, a=hangs)) as fleet:
        with pytest.raises(ServerFailed, match=r"not ready within 0\.2 s"):
            await fleet.wake("a")
        assert only(fleet).pid is None


# Nonsense

Nonsense = Callable[[], httpx.Response]


async def _bit_by_bit() -> AsyncIterator[bytes]:
    while True:
        yield b" "
        await asyncio.sleep(0.01)


async def _much() -> AsyncIterator[bytes]:
    while True:
        yield b" " * (1 << 20)


REFUSES: dict[str, Nonsense] = {
    "an error": lambda: httpx.Response(500, text="it failed"),
    "an endless body, bit by bit": lambda: httpx.Response(200, content=_bit_by_bit()),
    "an endless body, at once": lambda: httpx.Response(200, content=_much()),
    "a body that is no gzip": lambda: httpx.Response(200, headers={"content-encoding": "gzip"}, content=b"not gzip"),
}
WRONG: dict[str, Nonsense] = {
    "no JSON": lambda: httpx.Response(200, text="yes"),
    "half of it": lambda: httpx.Response(200, text='{"is_sleeping": tr'),
    "a list": lambda: httpx.Response(200, json=[]),
    "null": lambda: httpx.Response(200, json=None),
    "of wrong types": lambda: httpx.Response(200, json={"is_sleeping": None, "data": 3, "results": 3, "version": []}),
    "less than nothing": lambda: httpx.Response(
        200,
        text='{"tp_size": 1, "pp_size": 1, "dp_size": 1, "enable_dp_attention": 0,'
        ' "internal_states": [{"memory_usage": {"weight": -9.0, "kvcache": 1.0}}]}',
    ),
    "infinite": lambda: httpx.Response(
        200,
        text='{"tp_size": 1, "pp_size": 1, "dp_size": 1, "enable_dp_attention": 0,'
        ' "internal_states": [{"memory_usage": {"weight": Infinity, "kvcache": NaN}}]}',
    ),
}


def connected(kind: str, answer: Callable[[httpx.Request], httpx.Response], within_s: float = 60.0) -> Engine:
    return ENGINES[kind](Address("http://m"), within_s, httpx.MockTransport(answer))


@pytest.fixture
def within_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """What all answers have: little where one never ends."""
    seconds = 0.5 if "an endless body, bit by bit" in request.node.callspec.params.values() else 60.0
    for module in (engine, vllm, sglang):
        monkeypatch.setattr(module, "ASK_WITHIN_S", seconds)
    monkeypatch.setattr(vllm, "ASK_EVERY_S", 0.0)
    return seconds


@pytest.mark.parametrize("nonsense", [*REFUSES, *WRONG])
async def test_a_server_that_answers_nonsense_is_believed_nothing(kind: str, nonsense: str, within_s: float) -> None:
    answers = REFUSES | WRONG

    one = connected(kind, lambda _: answers[nonsense](), within_s)
    assert await one.is_healthy() is (nonsense in WRONG)
    assert await one.names() == ()
    await one.learn_version()
    facts = await one.facts()
    assert facts.wake_bytes is await one.wake_bytes() is None
    assert facts.host_bytes == (0 if kind == "command" else None)
    assert (await one.look()).state is not Phase.ASLEEP or nonsense == "of wrong types"
    if nonsense in REFUSES:
        slept = await one.sleep(1)
        assert slept.error
        assert slept.state is not Phase.ASLEEP
        assert (await one.look()).state is not Phase.ASLEEP
    await one.close()


def _of_zeros() -> httpx.Response:
    return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=_Stream(ZEROS))


ZEROS = gzip.compress(bytes(64 << 20))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


@pytest.mark.parametrize("much", [REFUSES["an endless body, at once"], _of_zeros])
def test_an_answer_without_end_leaves_nothing_behind(kind: str, much: Nonsense) -> None:
    """Health is asked twenty times a second, and the front collects what errors hold once in minutes."""

    async def scenario() -> None:
        one = connected(kind, lambda _: much())
        for _ in range(8):
            assert not await one.is_healthy()
        await one.close()

    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert now < engine.MOST_ANSWER_BYTES
    assert peak < 3 * engine.MOST_ANSWER_BYTES


@pytest.mark.parametrize("refusal", REFUSES)
async def test_what_fails_to_sleep_or_to_wake_is_not_said_to_have_done_it(
    kind: str, refusal: str, within_s: float
) -> None:
    """And of what went wrong half-way nobody says that it is as before, but where that is certain."""
    moves = ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation")
    saves = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    fails = True

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path in moves and fails:
            return REFUSES[refusal]()
        return httpx.Response(200, json=saves)

    one = connected(kind, answer, within_s)
    slept = await one.sleep(1)
    assert slept.error
    assert slept.state is (None if ENGINES[kind].LEVELS else Phase.AWAKE)
    await one.close()
    one, fails = connected(kind, answer, within_s), False
    if ENGINES[kind].LEVELS:
        assert await one.sleep(1) == Outcome(None, Phase.ASLEEP, 1)
        fails = True
        woken = await one.wake(1)
        assert woken.error
        assert woken.state is None
    await one.close()


@pytest.mark.usefixtures("within_s")
async def test_a_server_that_is_not_there_is_not_asleep(kind: str) -> None:
    def nobody(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody")

    one = connected(kind, nobody)
    assert not await one.is_healthy()
    assert (await one.look()).state is not Phase.ASLEEP
    slept = await one.sleep(1)
    assert slept.error
    assert slept.state is not Phase.ASLEEP
    assert await one.facts() == Facts(host_bytes=0 if kind == "command" else None)
    await one.close()
