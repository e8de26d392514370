"""The fleet, over processes that are servers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from servers_of_tests import client_of, command, config, phases, running, until

from cumem_sleep.serve import fleet as fleets
from cumem_sleep.serve import hardware, policy, servers, units
from cumem_sleep.serve.engines.engine import Facts
from cumem_sleep.serve.engines.vllm import VllmEngine
from cumem_sleep.serve.events import Outcome
from cumem_sleep.serve.fleet import Fleet, ModelLease, NotInTime, OrderRefused, ServerFailed, UnknownModel
from cumem_sleep.serve.metrics import exposition
from cumem_sleep.serve.status import Phase, VaultStatus


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300))


async def ask(lease: ModelLease, model: str) -> str:
    """Which model answers."""
    transport = httpx.AsyncHTTPTransport(uds=lease.server.socket)
    async with httpx.AsyncClient(transport=transport, base_url=lease.server.base_url, timeout=60) as client:
        answer = await client.post("/v1/completions", json={"model": model, "prompt": "?"})
        answer.raise_for_status()
        text: str = answer.json()["choices"][0]["text"]
        return text


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def test_requests_wake_their_models_and_nothing_is_left_in_the_end(tmp_path: Path) -> None:
    pids: list[int | None] = []

    async with running(config(tmp_path, a={"aliases": ["gpt"]}, b={})) as fleet:
        status = await until(fleet, a=Phase.ASLEEP, b=Phase.ASLEEP)
        pids.extend(model.pid for model in status.models)
        assert [model.last_switch.kind for model in status.models if model.last_switch] == ["sleep", "sleep"]
        async with fleet.lease("gpt") as lease:
            assert "This is a," in await ask(lease, "a")
            assert phases(fleet.status()) == {"a": Phase.AWAKE, "b": Phase.ASLEEP}
            assert [holder.model for holder in fleet.status().gpus[0].holders] == ["a"]
        async with fleet.lease("b") as lease:
            assert "This is b," in await ask(lease, "b")
            assert phases(fleet.status()) == {"a": Phase.ASLEEP, "b": Phase.AWAKE}
        with pytest.raises(UnknownModel, match="there are a, b"):
            async with fleet.lease("c"):
                pass
        sockets = Path(str(lease.server.socket)).parent
        assert fleet.counters.requests == {("a", "granted"): 1, ("b", "granted"): 1}
        assert fleet.counters.waited_seconds["b", "wake"] > 0
        assert "simulated_server" in fleet.log_tail("a")[1]
    assert not sockets.exists()
    assert all(pid is not None and not lives(pid) for pid in pids)


async def test_simulated_answers_are_what_clients_of_openai_take(tmp_path: Path) -> None:
    async with running(config(tmp_path, a={})) as fleet, client_of(fleet) as client:
        asked = {"model": "a", "prompt": "?", "input": "?", "max_tokens": 3}
        whole = (await client.post("/v1/completions", json=asked)).json()
        assert whole["usage"]["completion_tokens"] == 3
        streamed = (await client.post("/v1/completions", json={**asked, "stream": True})).text
        *events, done = (line.removeprefix("data: ") for line in streamed.split("\n\n") if line)
        reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events]
        assert (reasons, done) == ([None, None, None, "stop"], "[DONE]")
        (vector,) = (await client.post("/v1/embeddings", json=asked)).json()["data"]
        assert vector["embedding"]


@pytest.mark.parametrize("key", [pytest.param(None, marks=pytest.mark.slow), "key"])
async def test_a_server_with_the_gate_sleeps_without_development_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """The gate is real, and vLLM is that of its tests."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib/python3.12/site-packages/cumem_sleep-0.1.0.dist-info").mkdir(parents=True)
    vllm = tmp_path / "bin" / "vllm"
    vllm.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parents[1]}/documented_programs.py vllm "$@"\n')
    vllm.chmod(0o755)
    monkeypatch.chdir(tmp_path)

    async def post_without_key(lease: ModelLease, path: str) -> None:
        transport = httpx.AsyncHTTPTransport(uds=lease.server.socket)
        async with httpx.AsyncClient(transport=transport, base_url=lease.server.base_url) as client:
            assert (await client.post(path)).status_code == 401
            assert (await client.post("/collective_rpc", json={"method": "sleep"})).status_code == 401
            headers = dict(lease.server.control)
            answer = await client.post("/collective_rpc", json={"method": "sleep"}, headers=headers)
            assert answer.status_code == 404

    one = {"command": f"{vllm} serve m", "levels": [1, 2, 3], **({"api_key": key} if key else {})}
    async with running(config(tmp_path, a=one)) as fleet:
        (model,) = (await until(fleet, a=Phase.ASLEEP)).models
        assert model.layer == "active"
        for level in (2, 3, 1, 3):
            async with fleet.lease("a") as lease:
                assert bool(lease.server.headers) == bool(key), "clients' requests come without the token"
                await post_without_key(lease, "/sleep")
            await fleet.sleep("a", level)
            (model,) = fleet.status().models
            assert (model.phase, model.level, model.error) == (Phase.ASLEEP, level, None)
        environ = Path(f"/proc/{model.pid}/environ").read_bytes()
        assert b"VLLM_SERVER_DEV_MODE" not in environ
        assert key is None or b"\0CUMEM_SLEEP_ADMIN_TOKEN=key\0" in environ


async def test_a_request_is_counted_by_what_it_found(tmp_path: Path) -> None:
    async with running(config(tmp_path, a={"at_start": "stopped"})) as fleet:
        async with fleet.lease("a"), fleet.lease("a"):
            pass
        await fleet.sleep("a")
        async with fleet.lease("a") as lease:
            assert lease.found == "asleep"
        counted = {found: sum(seconds.counts) for (_, found), seconds in fleet.counters.actuation.items()}
        assert counted == {"stopped": 1, "awake": 1, "asleep": 1}
        switches = fleet.counters.switch_seconds
        for found, kind in (("stopped", "start"), ("asleep", "wake")):
            assert fleet.counters.actuation["a", found].total_s >= switches["a", kind]
        assert 'cumem_sleep_serve_actuation_seconds_count{model="a",found="asleep"} 1' in exposition(fleet)


@pytest.mark.slow
async def test_a_server_that_does_not_start_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.01)
    bad = f"{command('bad')} --token-seconds much"

    async with running(
        config(tmp_path, bad={"command": bad}, gone={"command": "no-such-program {port}", "gpus": [1]})
    ) as fleet:
        with pytest.raises(ServerFailed, match=r"its server ended with status 2 before it was ready$") as failed:
            await fleet.wake("bad")
        assert re.search(r"its log \(.*\) ends with: .* invalid float value: 'much'", failed.value.details)
        with pytest.raises(ServerFailed) as failed:
            await fleet.wake("gone")
        assert "no-such-program: No such file" in failed.value.details
        assert "no-such-program: No such file" in str(fleet.status().models[1].last_words)


async def test_changes_of_one_model_never_run_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is looked for elsewhere, is to be started here, and then to be started anew, before that look has ended."""
    here, there = {"at_start": "awake"}, {"url": "http://127.0.0.1:1", "at_start": "awake"}

    async with running(config(tmp_path, a=there)) as fleet:
        for model in (here, {**here, "share": 0.5}):
            await asyncio.sleep(0.1)
            await fleet.reload(config(tmp_path, a=model))
        await until(fleet, a=Phase.AWAKE)
    assert "the front failed" not in caplog.text


def test_a_start_that_is_cancelled_at_any_moment_leaves_no_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        model = config(tmp_path, a={}).models["a"]
        for rounds in range(8):
            server = servers.Server("a", model, tmp_path / "logs", tmp_path)
            starting = asyncio.create_task(server.start(lambda *_: None))
            for _ in range(rounds):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait({starting})
            below = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            left = [pid for pid in below if str(tmp_path) in Path("/proc", pid, "cmdline").read_text()]
            assert left == [], rounds

    uvloop.run(scenario())


def test_what_the_front_asks_a_server_all_the_time_hides_nothing_in_its_log(tmp_path: Path) -> None:
    server = servers.Server("a", config(tmp_path, a={}).models["a"], tmp_path, tmp_path)
    asked = ['INFO:  - "GET /is_sleeping HTTP/1.1" 200 OK', 'INFO:  - "GET /cumem_sleep/status HTTP/1.1" 200 OK'] * 20
    lines = ["it begins", *asked, 'INFO:  - "POST /sleep HTTP/1.1" 200 OK', "CUDA error", *asked]
    server.log.write_text("\n".join(lines))
    assert server.tail(2) == ['INFO:  - "POST /sleep HTTP/1.1" 200 OK', "CUDA error"]
    assert server._last_words() == f"its log ({server.log}) ends with: CUDA error"


async def test_who_watches_hears_of_a_front_without_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "SAME_AGAIN_S", 0.01)

    async with running(config(tmp_path, a={"at_start": "stopped"})) as fleet:
        watching = fleet.watch()
        seen = [phases(await watching.__anext__()) for _ in range(3)]
        assert seen == [{"a": Phase.STOPPED}] * 3


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda at: at.symlink_to(at.with_name("precious"))])
def test_a_log_that_is_no_plain_file_is_not_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    make(tmp_path / "one.log")
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
        with pytest.raises(OSError, match=r"plain file|symbolic link|Is a directory|No such device"):
            servers.open_log(tmp_path / "one.log", flags)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.slow
async def test_a_server_that_lives_and_does_not_serve_is_started_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_healthy(_: VllmEngine) -> bool:
        return False

    async with running(config(tmp_path, a={})) as fleet:
        async with fleet.lease("a") as lease:
            pid = fleet.status().models[0].pid
            with monkeypatch.context() as patch:
                patch.setattr(VllmEngine, "is_healthy", is_healthy)
                fleet.report_failure(lease, "it broke off")
                await until(fleet, a=Phase.DRAINING)
        async with fleet.lease("a") as lease:
            assert "This is a," in await ask(lease, "a")
        assert fleet.status().models[0].pid not in (None, pid)


@pytest.mark.slow
async def test_a_server_by_url_is_found_as_it_is_and_never_stopped(tmp_path: Path) -> None:
    async with running(config(tmp_path, a={"at_start": "awake"})) as theirs:
        await theirs.wake("a")
        url = theirs.status().models[0].url
        async with running(config(tmp_path, a={"url": url}, b={"at_start": "stopped"})) as fleet:
            await until(fleet, a=Phase.AWAKE)
            await fleet.wake("b")
            assert phases(fleet.status())["a"] is Phase.ASLEEP
            async with fleet.lease("a") as lease:
                assert "This is a," in await ask(lease, "a")
            with pytest.raises(OrderRefused, match="somebody else"):
                await fleet.stop_model("a")
        async with theirs.lease("a") as lease:
            assert "This is a," in await ask(lease, "a")


@pytest.mark.parametrize("named", [None, "off", "/mine/vault.sock"])
async def test_the_front_asks_no_vault_that_a_server_by_url_names(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could be any socket: the user's own is asked, or what the front's own variable names."""

    async def facts(engine: VllmEngine) -> Facts:
        engine.has_layer = True
        return Facts("0.1.0", 1, vault="/of/another/service.sock", mapped_bytes=0, pids=(1,))

    asked = asyncio.Queue[str]()
    monkeypatch.setattr(fleets, "LOOK_AT_MACHINE_EVERY_S", 0.01)

    def look(sockets: Collection[str]) -> VaultStatus:
        for each in sockets:
            loop.call_soon_threadsafe(asked.put_nowait, each)
        return VaultStatus(2, 0, 1, 1, 1, spilled_by_pid={1: 1})

    def read_ahead(socket: str, pids: Collection[int]) -> None:
        assert pids == (1,)
        loop.call_soon_threadsafe(read.set_result, socket)

    loop, read = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    async with running(config(tmp_path, a={})) as theirs:
        await until(theirs, a=Phase.ASLEEP)
        monkeypatch.setattr(VllmEngine, "facts", facts)
        if named is not None:
            monkeypatch.setenv("CUMEM_SLEEP_VAULT", named)
        by_url = config(tmp_path, a={"url": theirs.status().models[0].url})
        async with running(by_url, look_at_vaults=look, read_ahead=read_ahead) as fleet:
            await until(fleet, a=Phase.ASLEEP)
            socket = named if named == "/mine/vault.sock" else "auto"
            while not fleet.status().models[0].files_bytes:
                assert await asked.get() == socket
            await fleet.wake("a")
            assert await read == socket


@pytest.mark.slow
async def test_a_server_by_url_that_is_not_there_holds_up_its_neighbours_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is silent, or was there before and starts again, may take the GPU's memory."""
    monkeypatch.setattr(units, "NOBODY_ANSWERS_S", 0.3)

    patient = {"start_timeout": "1h", "switch_timeout": "1h"}
    nobody = {"url": f"unix:{tmp_path / 'nobody.sock'}", **patient}
    async with running(config(tmp_path, a=nobody, b={"at_start": "stopped"})) as fleet:
        asked = asyncio.create_task(fleet.wake("a"))
        await fleet.wake("b")
        with pytest.raises(ServerFailed, match="no server answers there"):
            await asked


@pytest.mark.slow
async def test_a_server_by_url_that_starts_again_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be taking the GPU's memory before it listens."""
    monkeypatch.setattr(units, "NOBODY_ANSWERS_S", 0.0)

    async with running(config(tmp_path, a={"at_start": "awake"})) as theirs:
        await theirs.wake("a")
        url = theirs.status().models[0].url
        async with running(config(tmp_path, a={"url": url}, b={"at_start": "stopped"})) as fleet:
            await until(fleet, a=Phase.AWAKE)
            await theirs.stop_model("a")
            await until(fleet, a=Phase.STARTING)  # after three looks in vain
            asked = asyncio.create_task(fleet.wake("b"))
            await asyncio.sleep(1.0)
            assert not asked.done()
            await theirs.wake("a")
            await asked
            assert phases(fleet.status()) == {"a": Phase.ASLEEP, "b": Phase.AWAKE}


@pytest.mark.parametrize("is_asked", [True, False])
async def test_gpu_memory_is_looked_up_before_a_wake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_asked: bool
) -> None:
    """Others may say that they sleep, and have their memory mapped: after a wake that failed half-way."""
    free = 30 << 30

    def free_bytes(uuids: Sequence[str]) -> list[int]:
        if not is_asked:
            raise OSError("NVML: No module named 'pynvml'")
        assert uuids == ["GPU-a"]
        return [free]

    monkeypatch.setattr(hardware, "gpus", lambda _: [hardware.Gpu(0, "GPU-a", "H200", 80 << 30, 0)])
    monkeypatch.setattr(hardware, "free_bytes", free_bytes, raising=False)

    caplog.set_level("INFO", "cumem_sleep.serve")

    with_layer = command("a", f"--weights-bytes {60 << 30}")
    async with running(config(tmp_path, a={"command": with_layer, "wait": 1.0})) as fleet:
        await until(fleet, a=Phase.ASLEEP)
        if is_asked:
            with pytest.raises(NotInTime):
                await fleet.wake("a")
            (model,) = fleet.status().models
            assert model.phase is Phase.ASLEEP
            assert model.error is not None
            assert "GPU 0 has 30.0 GiB free, and the wake needs 60.0" in model.error
            free = 60 << 30
        for _ in range(60):  # of a second each, which a busy machine may need for less
            with suppress(NotInTime):
                await fleet.wake("a")
                break
    assert any("not verified before its wake" in text for text in caplog.messages) == (not is_asked)


PREPARED = command("a", f"--weights-bytes {60 << 30} --prepared-bytes {60 << 30}")


@pytest.mark.parametrize(
    ("model", "available_gib", "level"),
    [
        ({"host_memory": "30GiB"}, 20, 2),
        ({"host_memory": "10GiB"}, 20, 1),
        ({"host_memory": None}, 200, 2),  # nobody says it: neither the layer in its server nor `nvidia-smi`
        ({"host_memory": None, "command": PREPARED}, 40, 1),  # its backups have their memory already
    ],
)
async def test_host_memory_is_looked_up_before_a_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], available_gib: int, level: int
) -> None:
    """Whatever the budget allows."""
    monkeypatch.setattr(hardware, "host_available_bytes", lambda: available_gib << 30)
    monkeypatch.setattr(hardware, "gpus", lambda _: [])

    async with running(config(tmp_path, a=model)) as fleet:
        status = await until(fleet, a=Phase.ASLEEP)
        assert status.models[0].level == level
        assert ("a", "sleep", "failed") not in fleet.counters.switches or available_gib == 20
        if level == 2:
            with pytest.raises(OrderRefused):
                await fleet.sleep("a", 3)
            assert (fleet.status().models[0].phase, fleet.status().models[0].level) == (Phase.ASLEEP, 2)
            assert fleet.status().host.held_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(("available", "levels"), [(100 << 30, [1, 2]), (130 << 30, [1, 1])])
async def test_sleeps_that_overlap_do_not_count_on_the_same_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, levels: list[int]
) -> None:
    pinned, sleep = 0, VllmEngine.sleep

    async def pins(engine: VllmEngine, level: int, from_level: int | None = None) -> Outcome:
        nonlocal pinned
        half = (30 << 30) * (level == 1)
        pinned += half
        outcome = await sleep(engine, level, from_level)
        pinned += half
        return outcome

    monkeypatch.setattr(VllmEngine, "sleep", pins)
    monkeypatch.setattr(hardware, "host_available_bytes", lambda: available - pinned)

    common = {"host_memory": "60GiB", "at_start": "awake"}
    models = {
        name: {**common, "command": command(name, "--sleep-seconds 0.5"), "gpus": [gpu]}
        for gpu, name in enumerate(("a", "b"))
    }
    async with running(replace(config(tmp_path, **models), host_memory=200 << 30)) as fleet:
        await asyncio.gather(*map(fleet.wake, models))
        await asyncio.gather(*map(fleet.sleep, models))
        assert sorted(model.level or 0 for model in fleet.status().models) == levels


GIB = 1 << 30


def keeper(name: str, *options: str) -> dict[str, Any]:
    """A model of 10 GiB, which keeps 4 GiB of KV cache."""
    words = command(name, f"--weights-bytes {10 * GIB} --keep-bytes {4 * GIB}", *options)
    return {"command": words, "host_memory": None, "at_start": "stopped", "levels": [1, 2, "stop"]}


async def kept(fleet: Fleet, **wanted: int) -> None:
    """Wait until models keep so many GiB."""
    async for status in fleet.watch():
        if {model.name: model.kept_bytes for model in status.models} == {name: wanted[name] * GIB for name in wanted}:
            return


async def wake_in_turns(fleet: Fleet, *models: str) -> None:
    """Each in place of the one before it, of which it is known what that keeps."""
    for number, model in enumerate(models):
        await fleet.wake(model)
        if number:
            while not fleet.status().models[[*fleet.config.models].index(models[number - 1])].kept_bytes:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "a reset fails"])
async def test_kept_kv_cache_leaves_before_a_model_sleeps_deeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Of 36 GiB, backups of three take 30: one can keep its KV cache beside them."""
    give_up, sleep, calls = VllmEngine.give_up_kept, VllmEngine.sleep, list[str]()

    async def slowly(engine: VllmEngine) -> str:
        await asyncio.sleep(0.1)
        why = await give_up(engine)
        calls.append("gave up")
        return why

    async def noted(engine: VllmEngine, level: int, from_level: int | None = None) -> Outcome:
        calls.append("sleep")
        return await sleep(engine, level, from_level)

    monkeypatch.setattr(hardware, "host_available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(VllmEngine, "give_up_kept", slowly)
    monkeypatch.setattr(VllmEngine, "sleep", noted)

    caplog.set_level("INFO", "cumem_sleep.serve")

    models = {"a": keeper("a", *(["--fail-resets 1"] if fails else [])), **{name: keeper(name) for name in "bcd"}}
    whole = replace(config(tmp_path, **models), host_memory=36 * GIB)
    async with running(whole) as fleet:
        await wake_in_turns(fleet, "a", "b", "c")
        status = fleet.status()
        assert (status.host.held_bytes, status.host.kept_bytes) == (20 * GIB, 8 * GIB)
        assert f'cumem_sleep_serve_model_kept_bytes{{model="b"}} {4 * GIB}' in exposition(fleet)
        assert f"cumem_sleep_serve_host_kept_bytes {8 * GIB}" in exposition(fleet)
        assert "b: keeps 4.00 GiB of its KV cache" in caplog.messages
        calls.clear()
        await fleet.wake("d")
        assert calls[: 3 if fails else 2] == ["gave up"] * (2 if fails else 1) + ["sleep"]
        at_last = {"a": 4, "b": 0, "c": 0, "d": 0} if fails else {"a": 0, "b": 0, "c": 4, "d": 0}
        await kept(fleet, **at_last)
        assert {model.name: model.level for model in fleet.status().models} == {"a": 1, "b": 1, "c": 1, "d": None}
        await fleet.wake("a")
        assert [model.level for model in fleet.status().models] == [None, 1, 1, 2], "four have no room"
        await kept(fleet, **{**at_last, "a": 0})
    given_up = [text for text in caplog.messages if "gives up the KV cache" in text]
    assert [text.partition(":")[0] for text in given_up] == (["a", "b", "c"] if fails else ["a", "b"])
    assert given_up[0] == "a: gives up the KV cache that it keeps: sleepers hold all of `host_memory`"
    assert any("a: did not give up the KV cache that it keeps: Failed" in text for text in caplog.messages) == fails


@pytest.mark.parametrize("refuses", ["the front", pytest.param("its server", marks=pytest.mark.slow)])
async def test_kept_kv_cache_leaves_before_the_host_lacks_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    """Whoever finds out, the front or the layer in the server."""
    fleets: list[Fleet] = []
    sleep = VllmEngine.sleep

    def available() -> int:
        states = fleets[0]._scheduler.models.values() if fleets else ()
        slept = sum(10 * GIB for state in states if state.phase is Phase.ASLEEP)
        return 47 * GIB - slept - sum(state.kept_bytes for state in states)

    async def refuse(engine: VllmEngine, level: int, from_level: int | None = None) -> Outcome:
        if level == 1 and available() < 12 * GIB:
            return Outcome("/sleep: 500: not enough host memory", Phase.AWAKE, lacks_host_memory=True)
        return await sleep(engine, level, from_level)

    monkeypatch.setattr(hardware, "host_available_bytes", available if refuses == "the front" else lambda: 1 << 40)
    if refuses == "its server":
        monkeypatch.setattr(VllmEngine, "sleep", refuse)

    caplog.set_level("INFO", "cumem_sleep.serve")

    models = {name: keeper(name) for name in "abcd"}
    async with running(config(tmp_path, **models)) as fleet:
        fleets.append(fleet)
        await wake_in_turns(fleet, "a", "b", "c", "d", "a")
        await kept(fleet, a=0, b=0, c=0, d=4)
        assert {model.name: model.level for model in fleet.status().models} == {"a": None, "b": 1, "c": 1, "d": 1}
        assert not any(result == "failed" for _, _, result in fleet.counters.switches)
    given_up = [text for text in caplog.messages if "gives up the KV cache" in text]
    why = "gives up the KV cache that it keeps: d lacks host memory to fall asleep"
    assert given_up == [f"b: {why}", f"c: {why}"]


HEALTHY = """
import http.server, socket, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"is_sleeping": false, "data": []}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET

Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "is_open"), [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("::ffff:127.0.0.1", False)]
)
async def test_a_server_that_the_network_reaches_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, is_open: bool
) -> None:
    """Its development paths need no key."""
    if ":" in where and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.01)
    script = tmp_path / "server.py"
    script.write_text(HEALTHY)

    async with running(config(tmp_path, a={"command": f"{sys.executable} {script} {where} {{port}}"})) as fleet:
        if not is_open:
            return await fleet.wake("a")
        with pytest.raises(ServerFailed, match="listens where other machines may reach it") as failed:
            await fleet.wake("a")
        assert f"it listens at {where}, port " in failed.value.details


@pytest.mark.slow
async def test_a_command_takes_the_place_of_a_url_and_the_other_way_round(tmp_path: Path) -> None:
    address = tmp_path / "a.sock"
    theirs = await asyncio.create_subprocess_exec(*command("a").replace("{socket}", str(address)).split())
    by_url, by_command = {"url": f"unix:{address}"}, dict[str, str]()
    try:
        async with running(config(tmp_path, a=by_url)) as fleet:
            for model in (by_url, by_command, by_url, by_command):
                await fleet.reload(config(tmp_path, a=model))
                is_changed = False
                while not is_changed:
                    async with fleet.lease("a") as lease:
                        assert "This is a," in await ask(lease, "a")
                        is_changed = (lease.server.socket == str(address)) == (model is by_url)
                assert (fleet.status().models[0].pid is None) == (model is by_url)
        assert theirs.returncode is None, "it was not ours to stop"
    finally:
        theirs.terminate()
        await theirs.wait()


@pytest.mark.slow
async def test_the_end_of_a_fleet_ends_those_that_wait_and_those_that_run(tmp_path: Path) -> None:
    fleet = Fleet(config(tmp_path, a={"at_start": "awake"}, b={"keep": "1h"}, c={"at_start": "awake", "gpus": [1]}))
    await fleet.start()
    async with fleet.lease("a") as lease, fleet.lease("c"):
        waits = asyncio.create_task(fleet.wake("b"))
        ordered = asyncio.create_task(fleet.sleep("c"))
        await until(fleet, c=Phase.DRAINING)
        ending = asyncio.create_task(fleet.stop())
        assert await lease.revoked == "this front is shutting down"
    await ending
    for each in (waits, ordered):
        with pytest.raises(NotInTime, match="shutting down"):
            await each
    with pytest.raises(NotInTime, match="shutting down"):
        await fleet.wake("a")


async def test_a_server_that_woke_on_its_way_to_a_deeper_sleep_is_not_taken_for_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, target, available = VllmEngine.sleep, list[VllmEngine](), [100 * GIB]

    async def refuse(engine: VllmEngine, level: int, from_level: int | None = None) -> Outcome:
        if engine in target and from_level == 2 and available[0] > GIB:
            assert (await engine.wake(2)).error is None
            available[0] = GIB  # somebody else took the rest meanwhile
            return Outcome("/sleep: 500: not enough host memory", Phase.AWAKE, lacks_host_memory=True)
        return await sleep(engine, level, from_level)

    monkeypatch.setattr(VllmEngine, "sleep", refuse)
    monkeypatch.setattr(hardware, "host_available_bytes", lambda: available[0])

    models = {"a": keeper("a"), "b": {**keeper("b"), "levels": [2, "stop"]}}
    whole = replace(config(tmp_path, **models), host_memory=100 * GIB)
    async with running(whole) as fleet:
        await wake_in_turns(fleet, "a", "b")
        await fleet.sleep("b", 2)
        engine = fleet._units["b"].engine
        assert isinstance(engine, VllmEngine)
        target.append(engine)
        deeper = asyncio.create_task(fleet.sleep("b", 3))
        ends = time.monotonic() + 120
        while available != [GIB]:
            assert time.monotonic() < ends, "it was never refused"
            await asyncio.sleep(0.02)
        await asyncio.wait([deeper], timeout=8)
        deeper.cancel()
        await asyncio.wait([deeper])
        (status,) = (each for each in fleet.status().models if each.name == "b")
        assert available == [GIB]
        assert (await engine.look()).state is not Phase.AWAKE or status.phase is not Phase.ASLEEP
