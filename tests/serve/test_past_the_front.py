"""Somebody else puts servers to sleep and wakes them, and answers are lost: the front asks, and so does NVML."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers_of_tests import FAULTY, client_of, command, config, phases, running, until

from cumem_sleep.serve import hardware, units
from cumem_sleep.serve.config import Config
from cumem_sleep.serve.engines.engine import Engine
from cumem_sleep.serve.engines.sglang import SglangEngine
from cumem_sleep.serve.engines.vllm import VllmEngine
from cumem_sleep.serve.events import Outcome
from cumem_sleep.serve.fleet import Fleet, OrderRefused
from cumem_sleep.serve.status import Phase

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LOOK_AT_HEALTH_EVERY_S", 0.05)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def call(fleet: Fleet, model: str, path: str) -> Any:
    """Straight to its server, past the front."""
    url = next(each.url for each in fleet.status().models if each.name == model)
    transport = httpx.AsyncHTTPTransport(uds=str(url).removeprefix("unix:"))
    async with httpx.AsyncClient(transport=transport, base_url="http://m", timeout=60) as client:
        method = "GET" if path == "/is_sleeping" else "POST"
        return (await client.request(method, path)).raise_for_status().json()


def by_nvml(monkeypatch: pytest.MonkeyPatch, held: Callable[[], int | None]) -> None:
    """One GPU, of which a model's processes hold so much."""

    def held_bytes(uuids: Sequence[str], pids: Collection[int]) -> list[int]:
        assert list(uuids) == ["GPU-a"]
        assert pids
        if (found := held()) is None:
            raise OSError("NVML does not say what these processes hold")
        return [found]

    monkeypatch.setattr(hardware, "gpus", lambda _: [hardware.Gpu(0, "GPU-a", "H200", 80 * GIB, 0)])
    monkeypatch.setattr(hardware, "free_bytes", lambda _: [80 * GIB])
    monkeypatch.setattr(hardware, "held_bytes", held_bytes)


@pytest.mark.parametrize("by_url", [False, True], ids=["its own server", "by URL"])
def test_a_model_that_somebody_else_puts_to_sleep_is_woken_by_the_next_request(tmp_path: Path, by_url: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.wake("a")
        await call(fleet, "a", "/sleep?level=1")
        await until(fleet, a=Phase.ASLEEP)
        async with client_of(fleet) as client:
            answer = await client.post("/v1/completions", json={"model": "a", "prompt": "?"})
        assert answer.status_code == 200
        assert await call(fleet, "a", "/is_sleeping") == {"is_sleeping": False}

    async def whole() -> None:
        async with running(config(tmp_path, a={"at_start": "awake"})) as theirs:
            if not by_url:
                return await scenario(theirs)
            url = (await until(theirs, a=Phase.AWAKE)).models[0].url
            async with running(config(tmp_path, a={"url": url})) as fleet:
                await scenario(fleet)

    run(whole())


async def test_an_operators_call_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LOOK_AT_HEALTH_EVERY_S", 1e6)

    async with running(config(tmp_path, a={"at_start": "awake"})) as fleet:
        await fleet.wake("a")
        await call(fleet, "a", "/sleep?level=1")
        await fleet.wake("a")
        assert await call(fleet, "a", "/is_sleeping") == {"is_sleeping": False}
        await fleet.sleep("a")
        await call(fleet, "a", "/wake_up")
        await fleet.sleep("a")
        assert await call(fleet, "a", "/is_sleeping") == {"is_sleeping": True}
        await fleet.stop_model("a")
        await fleet.sleep("a")  # nobody is there to be asked


async def test_of_two_models_that_are_awake_on_one_gpu_one_is_put_to_sleep_again(tmp_path: Path) -> None:
    async with running(config(tmp_path, a={"keep": "1h"}, b={"keep": "1h"})) as fleet:
        await until(fleet, a=Phase.ASLEEP, b=Phase.ASLEEP)
        async with fleet.lease("a"):
            await call(fleet, "b", "/wake_up")
            while not (await call(fleet, "b", "/is_sleeping"))["is_sleeping"]:
                await asyncio.sleep(0.05)
            await until(fleet, a=Phase.AWAKE, b=Phase.ASLEEP)


async def test_a_server_that_says_that_it_sleeps_is_believed_when_nvml_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, looks = 60 * GIB, asyncio.Event()
    look = VllmEngine.look

    async def noted(engine: VllmEngine) -> Outcome:
        outcome = await look(engine)
        if outcome.state is Phase.ASLEEP:
            looks.set()
        return outcome

    by_nvml(monkeypatch, lambda: held)
    monkeypatch.setattr(VllmEngine, "look", noted)

    with_layer = command("a", f"--weights-bytes {50 * GIB}")
    async with running(config(tmp_path, a={"command": with_layer, "at_start": "awake"})) as fleet:
        await until(fleet, a=Phase.AWAKE)
        await call(fleet, "a", "/sleep?level=1")
        for _ in range(5):
            looks.clear()
            await looks.wait()
        assert phases(fleet.status()) == {"a": Phase.AWAKE}
        held = 3 * GIB
        await until(fleet, a=Phase.ASLEEP)


async def test_what_a_server_said_before_a_change_says_nothing_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, late, fleets = VllmEngine.look, asyncio.Event(), list[Fleet]()

    async def slowly(engine: VllmEngine) -> Outcome:
        outcome = await look(engine)
        if fleets:
            await fleets.pop().sleep("a")
            assert outcome.state is Phase.AWAKE
            asyncio.get_running_loop().call_soon(late.set)
        return outcome

    monkeypatch.setattr(VllmEngine, "look", slowly)

    async with running(config(tmp_path, a={"at_start": "awake"})) as fleet:
        await until(fleet, a=Phase.AWAKE)
        fleets.append(fleet)
        await late.wait()
        assert phases(fleet.status()) == {"a": Phase.ASLEEP}


# Lost answers


def sglang(folder: Path) -> Config:
    (folder / "gpu").mkdir(exist_ok=True)
    words = (
        f"{FAULTY} --engine sglang --uds {{socket}} --served-model-name a --gpus {folder / 'gpu'} --faults 0 --seed 1"
    )
    words += f" --record {folder / 'record'} --executed {folder / 'executed'}"
    return config(folder, a={"engine": "sglang", "command": words, "at_start": "awake"})


def held_by_sglang(folder: Path) -> Callable[[], int]:
    """Its server has a file in the GPU's folder while it holds its memory."""
    return lambda: 30 * GIB if (folder / "gpu" / "a").exists() else GIB


def lose(monkeypatch: pytest.MonkeyPatch, kind: type[Engine], *paths: str) -> None:
    """What these calls do is done, and their answers are lost."""
    ask = kind.ask

    async def lost(engine: Engine, method: str, path: str, *others: Any, **asked: Any) -> httpx.Response:
        answer = await ask(engine, method, path, *others, **asked)
        if path in paths:
            raise httpx.ReadTimeout("no whole answer")
        return answer

    monkeypatch.setattr(kind, "ask", lost)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_change_whose_answer_is_lost_restarts_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    backed_up = f"--weights-bytes {50 * GIB} --prepared-bytes {50 * GIB}"
    with_layer = {"command": command("a", backed_up), "at_start": "awake"}
    one = sglang(tmp_path) if kind == "sglang" else config(tmp_path, a=with_layer)
    by_nvml(monkeypatch, held_by_sglang(tmp_path) if kind == "sglang" else lambda: None)
    lose(monkeypatch, VllmEngine, "/sleep", "/wake_up")
    lose(monkeypatch, SglangEngine, "/release_memory_occupation", "/resume_memory_occupation")

    async with running(one) as fleet:
        pid = (await until(fleet, a=Phase.AWAKE)).models[0].pid
        for _ in range(2):
            await fleet.sleep("a", 1)
            (model,) = fleet.status().models
            assert (model.phase, model.error, model.pid) == (Phase.ASLEEP, None, pid)
            async with client_of(fleet) as client:
                answer = await client.post("/v1/completions", json={"model": "a", "prompt": "?"})
            assert answer.status_code == 200
        assert fleet.counters.switches == {("a", each, "ok"): 2 for each in ("sleep", "wake")} | {
            ("a", "start", "ok"): 1
        }
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_that_nobody_can_be_asked_about_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Neither the layer in it, nor NVML: it says that it sleeps before all of its memory is released."""
    one = sglang(tmp_path) if kind == "sglang" else config(tmp_path, a={"at_start": "awake"})
    by_nvml(monkeypatch, lambda: None)
    lose(monkeypatch, VllmEngine, "/sleep")
    lose(monkeypatch, SglangEngine, "/release_memory_occupation")

    async with running(one) as fleet:
        await until(fleet, a=Phase.AWAKE)
        with pytest.raises(OrderRefused, match="no whole answer"):
            await fleet.sleep("a", 1)
        await until(fleet, a=Phase.STOPPED)


async def test_what_nvml_knows_of_a_server_that_says_nothing_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request would end the scheduler of an SGLang whose memory somebody else has released."""
    by_nvml(monkeypatch, held_by_sglang(tmp_path))

    async with running(sglang(tmp_path)) as fleet:
        pid = (await until(fleet, a=Phase.AWAKE)).models[0].pid
        await call(fleet, "a", "/release_memory_occupation")
        await until(fleet, a=Phase.ASLEEP)
        await fleet.wake("a")
        await fleet.sleep("a")
        await call(fleet, "a", "/resume_memory_occupation")
        (model,) = (await until(fleet, a=Phase.AWAKE)).models
        assert model.pid == pid
    assert not (tmp_path / "record").exists()
