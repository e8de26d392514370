"""Several API servers of one vLLM."""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import AnotherClient, Client, FakeEngine, FakeVllm, SlowToAnswer, until_idle
from gate_client import Serve, two_awake

from cumem_sleep.vllm import siblings
from cumem_sleep.vllm.siblings import Busy, Siblings


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("plugin", [True, False])
async def test_an_answer_from_before_a_sleep_is_not_believed(serve: Serve, plugin: bool, own: bool) -> None:
    engine = SlowToAnswer()
    first, second = await two_awake(serve, engine, on_request="wait")
    engine.plugin = plugin
    old, new = engine.on_their_way = [asyncio.Event(), asyncio.Event()]
    early = await second.under_way("/v1/completions")
    del engine.on_their_way[:]
    assert (await (second if own else first).post("/sleep")).code == 200
    late = await second.under_way("/v1/completions")
    engine.on_their_way = [new]  # the next question takes long, too
    old.set()
    await until_idle()
    assert engine.queue == []
    new.set()
    await until_idle()
    assert not early.task.done()
    assert not late.task.done()
    assert (await first.post("/wake")).code == 200
    assert [(await each.response()).body for each in (early, late)] == [{"text": "good"}] * 2


async def test_nobody_listens_while_one_changes(gate_environment: None) -> None:
    servers = [Siblings() for _ in range(3)]
    listening = changing = heard = changed = 0
    chance = random.Random(1)

    async def listen(server: Siblings) -> None:
        nonlocal listening, heard
        for _ in range(300):
            if server.share():
                listening, heard = listening + 1, heard + 1
                server.read_shared()
                assert not changing
                await asyncio.sleep(chance.choice([0, 0, 0.001]))
                assert not changing
                listening -= 1
                server.unshare()
            await asyncio.sleep(chance.choice([0, 0.01]))

    async def change(server: Siblings) -> None:
        nonlocal changing, changed
        for _ in range(30):
            try:
                async with server.exclusive():
                    changing, changed = changing + 1, changed + 1
                    assert (changing, listening) == (1, 0)
                    assert server.read_shared() is None
                    await asyncio.sleep(chance.choice([0, 0.002]))
                    assert (changing, listening) == (1, 0)
                    changing -= 1
            except Busy:
                pass
            await asyncio.sleep(0)

    await asyncio.gather(*map(listen, servers * 2), *map(change, servers))
    assert heard > 100
    assert changed > 5


class FullSocket(FakeEngine):
    """It takes a while until a request is with the engine."""

    async def _add_request(self, request: object) -> None:
        await self._called("send")
        await super()._add_request(request)


async def test_a_sleep_does_not_overtake_a_request_of_another_server(serve: Serve) -> None:
    first, second = await two_awake(serve, FullSocket())
    first.engine.waits["send"] = asyncio.Event()
    requests = [second.begin("POST", "/v1/completions") for _ in range(2)]
    await until_idle()
    response = await first.post("/sleep?level=2")
    assert response.code == 409
    assert first.engine.count("sleep") == 0
    first.engine.waits["send"].set()
    assert [(await each.response()).body for each in requests] == [{"text": "good"}] * 2
    assert (await first.post("/sleep?level=2")).code == 200


async def test_a_sleep_waits_a_moment_for_a_request_that_is_being_sent(serve: Serve) -> None:
    first, second = await two_awake(serve, FullSocket())
    first.engine.waits["send"] = asyncio.Event()
    requests = [client.begin("POST", "/v1/completions") for client in (first, second)]
    await until_idle()
    sleep = await first.under_way("/sleep?level=2")
    first.engine.waits["send"].set()
    assert (await sleep.response()).code == 200
    assert {(await each.response()).code for each in requests} == {200}
    assert first.engine.queue == []


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/scale_elastic_ep"])
async def test_adapters_are_not_loaded_after_anothers_sleep(serve: Serve, path: str, level: int) -> None:
    first, second = await two_awake(serve)
    load = await second.under_way(path, slow=True)
    assert (await first.post(f"/sleep?level={level}")).code == 200
    load.go_on()
    assert (await load.response()).code == 503
    assert f"POST {path}" not in second.vllm.seen


async def test_a_request_waits_for_anothers_wake(serve: Serve) -> None:
    first, second = await two_awake(serve, on_request="wake")
    await first.post("/sleep?level=2")
    await second.get("/health")  # it knows of the sleep
    first.engine.waits["reload_weights"] = asyncio.Event()
    requests = [first.begin("POST", "/v1/completions")]
    await first.engine.entered["reload_weights"].wait()
    requests.append(second.begin("POST", "/v1/completions"))
    await asyncio.wait({requests[1].task}, timeout=0.5)  # longer than it tries to get its turn
    first.engine.waits["reload_weights"].set()
    assert [(await each.response()).body for each in requests] == [{"text": "good"}] * 2
    assert first.engine.count("reload_weights") == 1


async def test_a_write_is_not_misled_by_an_answer_from_before_anothers_wake(serve: Serve) -> None:
    """Without the plugin, where such an answer means that all memory sleeps."""

    class Slow(SlowToAnswer):
        async def is_paused(self) -> bool:
            return False

    engine = Slow()
    engine.plugin = False
    first, second = await two_awake(serve, engine)
    assert (await first.post("/sleep?level=2")).code == 200
    engine.on_their_way = [old := asyncio.Event()]
    look = await second.under_way("/v1/completions")
    assert (await first.post("/wake")).code == 200
    second.engine.waits["reload_weights"] = asyncio.Event()
    load = second.begin("POST", "/collective_rpc", b'{"method": "reload_weights"}')
    await engine.entered["reload_weights"].wait()
    old.set()
    await until_idle()
    second.engine.waits["reload_weights"].set()
    assert (await load.response()).code == 200
    await look.response()
    assert [(await client.ask()).body for client in (first, second)] == [{"text": "good"}] * 2


@pytest.mark.parametrize("where", ["arguments", "configuration"])
async def test_with_several_servers_each_request_asks(serve: Serve, where: str) -> None:
    client = serve()
    if where == "arguments":
        client.vllm.state.args.api_server_count = 2
    else:
        parallel = SimpleNamespace(_api_process_count=2)
        client.vllm.state.vllm_config = SimpleNamespace(parallel_config=parallel)
        del client.vllm.state.args  # vLLM 0.11 has none
    for _ in range(2):
        assert (await client.ask()).code == 200
    await client.engine.sleep(1)  # by another server
    assert (await client.ask()).code == 503
    assert (await client.get("/health")).code == 503
    await client.engine.wake_up()
    assert (await client.ask()).code == 200
    await client.engine.pause_generation()
    assert (await client.ask()).body == {"text": "queued"}


@pytest.mark.parametrize("policy", ["wait", "wake"])
async def test_with_several_servers_a_held_request_notices_what_another_does(
    serve: Serve, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cumem_sleep.vllm.gate.POLL_S", 0.01)
    client = serve(on_request=policy)
    another = serve(FakeVllm(AnotherClient(client.engine)))
    client.vllm.state.args.api_server_count = another.vllm.state.args.api_server_count = 4
    await client.engine.sleep(2)
    request = client.begin("POST", "/v1/completions")
    if policy == "wait":
        await until_idle()
        for call in ("/wake?tags=weights", "/update_weights", "/wake?tags=kv_cache"):
            assert (await another.post(call)).code == 200
    assert (await request.response()).body == {"text": "good"}


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_with_several_servers_a_request_wakes_those_that_another_kept(serve: Serve, mode: str) -> None:
    """What a sibling let through in a sleep that keeps none never runs."""
    first, second = await two_awake(serve, on_request="wake")
    assert (await first.post(f"/sleep?mode={mode}")).code == 200
    first.engine.queue = ["one of the first server's"]
    assert (await second.ask()).body == {"text": "good"}
    assert len(first.engine.queue) == (mode == "keep")


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize("order", [("/wake",), ("/wake?tags=kv_cache", "/wake?tags=weights")])
async def test_weights_that_one_server_dropped_are_served_by_none(
    serve: Serve, plugin: bool, order: tuple[str, ...]
) -> None:
    first, second = await two_awake(serve)
    first.engine.plugin = plugin
    await first.post("/sleep?level=2")
    for call in order:
        assert (await second.post(call)).code == 200
    assert [(await client.ask()).code for client in (first, second)] == [503, 503]
    assert (await first.post("/reload_weights")).code == 200
    assert [(await client.ask()).body for client in (first, second)] == [{"text": "good"}] * 2


@pytest.mark.parametrize("plugin", [True, False])
async def test_requests_that_one_server_kept_are_not_run_early_by_another(serve: Serve, plugin: bool) -> None:
    first, second = await two_awake(serve)
    first.engine.plugin = plugin
    first.engine.waits["generate"] = asyncio.Event()
    request = await first.under_way("/v1/completions")
    await first.post("/sleep?mode=keep")
    for call in ("/resume", "/wake?tags=weights"):
        assert (await second.post(call)).code == 409
    assert (await second.post("/wake")).code == 200
    first.engine.waits["generate"].set()
    assert (await request.response()).body == {"text": "good"}
    assert (await second.post("/sleep")).code == 200
    assert (await first.post("/wake?tags=weights")).code == 200


@pytest.mark.parametrize("call", ["/wake", "/resume", "/sleep", "/pause", "/update_weights", "/reload_weights"])
async def test_what_another_server_does_meanwhile_is_not_disturbed(serve: Serve, call: str) -> None:
    first, second = await two_awake(serve)
    first.engine.waits["sleep"] = asyncio.Event()
    sleep = await first.under_way("/sleep?mode=wait")
    assert (await first.ask()).code == 503, "nor does the server that sleeps lose its turn by this"
    response = await second.post(call)
    assert response.code == 409
    assert "another API server" in response.error["message"]
    assert first.engine.scheduler_paused
    assert (await second.ask()).code == 503, "nor is it given requests"
    first.engine.waits["sleep"].set()
    assert (await sleep.response()).code == 200
    assert (await second.post("/wake")).code == 200
    assert [(await client.ask()).body for client in (first, second)] == [{"text": "good"}] * 2


async def test_a_request_that_another_server_let_through_is_not_run_after_a_sleep(serve: Serve) -> None:
    first, second = await two_awake(serve)
    second.engine.waits["tokenize"] = asyncio.Event()
    late = await second.under_way("/v1/completions")
    await first.post("/sleep")
    second.engine.waits["tokenize"].set()
    assert (await late.response()).code == 503
    assert second.engine.queue == []


async def test_what_a_sibling_left_in_the_engine_is_aborted_before_a_wake(serve: Serve) -> None:
    first, second = await two_awake(serve)
    await first.post("/sleep?level=2")
    first.engine.queue = ["let-through"]
    assert (await second.post("/wake")).code == 200
    assert first.engine.queue == []


# The files that they share


def folder() -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir()) / f"cumem-sleep-{os.geteuid()}"


def of_another_user(path: pathlib.Path) -> None:
    path.mkdir()
    os.chown(path, 1234, 1234)


TAKEN: dict[str, Callable[[pathlib.Path], Any]] = {
    "a folder that others may change": lambda path: (path.mkdir(), path.chmod(0o777)),
    "a folder of another user": of_another_user,
    "a link": lambda path: (path.with_name("theirs").mkdir(mode=0o700), path.symlink_to("theirs")),
    "a file": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("what", TAKEN)
async def test_in_a_folder_that_is_not_theirs_alone_servers_share_nothing(serve: Serve, what: str) -> None:
    if what == "a folder of another user" and os.geteuid() != 0:
        pytest.skip("needs root, to make it")
    TAKEN[what](folder())
    client = serve()
    client.vllm.state.args.api_server_count = 2
    (said,) = await client.start()
    assert said["type"] == "lifespan.startup.failed"
    assert str(folder()) in said["message"]
    await no_server_passes_anything(client)


async def no_server_passes_anything(client: Client) -> None:
    calls = ("/v1/completions", "/sleep", "/wake", "/reload_weights", "/v1/load_lora_adapter", "/update_weights")
    for call in calls:
        answer = await client.post(call)
        assert answer.code == 503
        assert "what the API servers of this vLLM tell each other cannot be had" in answer.error["message"]
        assert "retry-after" in answer.headers
    for path in ("/health", "/is_sleeping"):
        assert (await client.get(path)).code == 503
    assert client.vllm.seen == []
    assert {"sleep", "generate"}.isdisjoint(client.engine.calls)


@pytest.mark.parametrize("call", ["pread", "fcntl"])
async def test_a_look_that_fails_lets_nothing_pass(serve: Serve, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await two_awake(serve)
    first.engine.waits["tokenize"] = asyncio.Event()
    late = second.begin("POST", "/v1/completions")
    await first.engine.entered["tokenize"].wait()

    def fail(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr(siblings.os if call == "pread" else siblings.fcntl, call, fail)
        first.engine.waits["tokenize"].set()
        assert (await late.response()).code == 503, "nor what is on its way to the engine"
        del first.engine.waits["tokenize"], first.vllm.seen[:], first.engine.calls[:]
        await no_server_passes_anything(first)
    assert (await first.ask()).body == {"text": "good"}


async def test_what_could_not_be_told_lets_nothing_pass_elsewhere(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await two_awake(serve)
    pwrite = os.pwrite
    for call in ("/sleep", "/wake"):
        assert (await first.post(call)).code == 200
    with monkeypatch.context() as context:  # a full disk
        context.setattr(siblings.os, "pwrite", lambda file, content, at: pwrite(file, content[:8], at))
        assert (await first.post("/sleep?level=2")).code == 503
    await first.engine.wake_up()  # what is lost nobody can know
    for client in (first, second):
        assert (await client.ask()).code == 503


async def test_only_this_user_can_open_what_servers_share(serve: Serve) -> None:
    await two_awake(serve, idle_s=60, on_request="wait")
    assert stat.S_IMODE(folder().stat().st_mode) == 0o700
    (shared,) = folder().iterdir()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o600


SERVER = """
import sys
from cumem_sleep.vllm.siblings import Siblings
Siblings().open()
print("open", flush=True)
sys.stdin.read()
"""


def test_files_go_with_the_last_server_that_uses_them(gate_environment: None) -> None:
    def begin() -> subprocess.Popen[str]:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = subprocess.Popen([sys.executable, "-c", SERVER], **pipes, env={**os.environ, "TMPDIR": str(place)})
        assert server.stdout is not None
        assert server.stdout.readline() == "open\n"
        return server

    def end(server: subprocess.Popen[str], *, killed: bool) -> None:
        if killed:
            server.send_signal(signal.SIGKILL)
        server.communicate()

    place = pathlib.Path(tempfile.gettempdir())
    place.joinpath(folder().name).mkdir(mode=0o700)
    folder().joinpath("vault.sock").write_text("")
    servers = [begin() for _ in range(3)]
    names = sorted(os.listdir(folder()))
    assert len(names) == 2, "one for all, and the vault's"
    end(servers[0], killed=True)
    end(servers[1], killed=False)
    assert sorted(os.listdir(folder())) == names
    end(servers[2], killed=True)
    assert sorted(os.listdir(folder())) == names
    Siblings().open()  # the next server, of another vLLM
    left = sorted(os.listdir(folder()))
    assert len(left) == 2
    assert names[0] not in left
    end(begin(), killed=False)
    assert sorted(os.listdir(folder())) == left
