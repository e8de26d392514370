"""An ingress over the fronts of several nodes, all of them in this process, over simulated servers. Without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from front_world import Asked as AtServer
from front_world import Server
from servers_of_tests import command, config

from cumem_sleep.serve import cluster as clusters
from cumem_sleep.serve.cluster import Cluster
from cumem_sleep.serve.config import Config
from cumem_sleep.serve.fleet import Address, Fleet
from cumem_sleep.serve.front import Front
from cumem_sleep.serve.listener import Listener
from cumem_sleep.serve.status import Phase
from cumem_sleep.tools import cli

SECRET = "only-between-ingress-and-fronts"
ADMIN = {"Authorization": "Bearer of-operators"}


@dataclass
class Node:
    """A front that can be ended and begun again."""

    config: Config
    fleet: Any = None
    front: Any = None
    listener: Any = None

    async def begin(self) -> None:
        self.fleet = Fleet(self.config, simulated=True)
        await self.fleet.start()
        self.front = Front(self.fleet)
        self.listener = Listener(self.front, "127.0.0.1", 0)
        await self.listener.start()

    async def end(self) -> None:
        await asyncio.gather(self.listener.stop(), self.fleet.stop())
        await self.front.close()

    async def where(self) -> Address:
        return Address(f"http://127.0.0.1:{self.listener.port}", None, (("Authorization", f"Bearer {SECRET}"),))

    async def until(self, model: str, phase: Phase) -> None:
        async for status in self.fleet.watch():
            if {each.name: each.phase for each in status.models}[model] is phase:
                return


@contextlib.asynccontextmanager
async def a_cluster(folder: Path, nodes: str = "ab", **models: dict[str, Any]) -> AsyncIterator[SimpleNamespace]:
    """With nodes a and b, a client of the ingress, and its cluster."""
    whole = config(folder, **models)
    front = replace(whole.front, api_keys=("of-clients",), admin_token="of-operators")
    of_node = replace(whole, front=replace(front, api_keys=("nobody-has-this",), admin_token=SECRET))
    found = {name: Node(replace(of_node, logs=folder / name)) for name in nodes}
    await asyncio.gather(*(node.begin() for node in found.values()))
    cluster = Cluster(replace(whole, front=front), {name: node.where for name, node in found.items()})
    await cluster.start()
    listener = Listener(cluster, "127.0.0.1", 0)
    await listener.start()
    url = f"http://127.0.0.1:{listener.port}"
    headers = {"Authorization": "Bearer of-clients"}
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:
        try:
            yield SimpleNamespace(**found, client=client, cluster=cluster, url=url)
        finally:
            await cluster.stop()
            await asyncio.gather(*(node.end() for node in found.values()))
            await listener.stop()


def ask(world: Any, model: str = "m", **more: Any) -> asyncio.Task[httpx.Response]:
    body = {"model": model, "messages": [], "max_tokens": 5, **more}
    return asyncio.create_task(world.client.post("/v1/chat/completions", json=body))


async def test_one_endpoint_with_its_own_keys(tmp_path: Path) -> None:
    async with a_cluster(tmp_path, m={"aliases": ["other"]}, x={}) as world:
        answer = await ask(world, "other")
        assert answer.status_code == 200
        assert answer.json()["model"] == "m"
        streamed = await ask(world, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await ask(world, "nobody")).status_code == 404
        models = (await world.client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in models] == ["m", "x"]
        for headers, port in (({"Authorization": ""}, world.url), ({}, f"http://127.0.0.1:{world.a.listener.port}")):
            assert (await world.client.get(f"{port}/v1/models", headers=headers)).status_code == 401
        said = (await world.client.get("/status")).json()
        assert [node["name"] for node in said["nodes"]] == ["a", "b"]
        assert SECRET not in str(said)
        assert not any("log" in model for node in said["nodes"] for model in node["status"]["models"])
        page = (await world.client.get("/metrics")).text
        assert 'cumem_sleep_serve_model_state{node="b",model="m",state="asleep"}' in page
        assert 'cumem_sleep_serve_node_up{node="a"} 1' in page
        assert page.count("# TYPE cumem_sleep_serve_requests_total") == 1


async def test_a_page_of_the_ingress_may_ask(tmp_path: Path) -> None:
    """Its nodes' fronts are other origins."""
    async with a_cluster(tmp_path, "a", m={}) as world:
        for headers in ({"Origin": world.url}, {"Origin": world.url, "Sec-Fetch-Site": "same-origin"}):
            answer = await world.client.post("/v1/completions", json={"model": "m", "prompt": ""}, headers=headers)
            assert answer.status_code == 200
        page = {"User-Agent": "Mozilla/5.0", "Referer": f"{world.url}/"}
        answer = await world.client.get("/models/m/v1/responses/none", headers=page)
        assert answer.status_code == 404, "the model's server says so"
        elsewhere = await world.client.post("/v1/completions", json={"model": "m"}, headers={"Origin": "http://else"})
        assert elsewhere.status_code == 403


async def test_a_model_named_by_the_path(tmp_path: Path) -> None:
    async with a_cluster(tmp_path, **{"m": {"aliases": ["other"]}, "of/x": {}}) as world:
        for name, model in (("m", "m"), ("other", "m"), ("of/x", "of/x")):
            answer = await world.client.post(f"/models/{name}/v1/completions", json={"prompt": ""})
            assert (answer.status_code, answer.json().get("model")) == (200, model)


async def test_what_cannot_be_sent_again_waits_at_its_node(tmp_path: Path) -> None:
    """Of a model named by the path the body passes through."""
    async with a_cluster(tmp_path, m={"command": command("m", "--wake-seconds=3")}) as world:
        await asyncio.gather(world.a.until("m", Phase.ASLEEP), world.b.until("m", Phase.ASLEEP))
        await asyncio.sleep(0.7)
        answer = await world.client.post("/models/m/v1/completions", json={"prompt": ""})
        assert answer.status_code == 200


async def test_a_drained_node_answers_what_runs_and_turns_away_what_waits(tmp_path: Path) -> None:
    slow = {"command": command("m", "--token-seconds=0.3", "--wake-seconds=0.1"), "at_start": "stopped"}
    async with a_cluster(
        tmp_path, m=slow, x={"at_start": "stopped", "command": command("x", "--start-seconds=30")}
    ) as world:
        running = ask(world)
        await world.a.until("m", Phase.AWAKE)
        while not world.a.fleet.status().models[0].running:
            await asyncio.sleep(0.02)
        said = await world.client.post("/admin/drain", json={"node": "a"}, headers=ADMIN)
        assert said.json()["draining"] is True
        other = await ask(world)
        assert (other.status_code, running.done()) == (200, True)
        assert (await running).status_code == 200
        assert world.b.fleet.counters.requests["m", "granted"] == 1
        await world.client.post("/admin/drain", json={"node": "a", "on": False}, headers=ADMIN)
        assert not world.a.fleet.status().draining
        for body, code in (({"node": "c"}, 404), ({}, 400), ({"node": "a", "on": 1}, 400)):
            assert (await world.client.post("/admin/drain", json=body, headers=ADMIN)).status_code == code
        assert (await world.client.post("/admin/drain", json={"node": "a"})).status_code == 401


async def test_what_waits_on_a_drained_node_goes_to_the_other_one(tmp_path: Path) -> None:
    slow = {"command": command("m", "--start-seconds=2"), "at_start": "stopped"}
    async with a_cluster(tmp_path, m=slow) as world:
        waits = ask(world)
        await world.a.until("m", Phase.STARTING)
        world.a.fleet.drain(True)
        assert (await waits).status_code == 200
        assert world.b.fleet.counters.requests["m", "granted"] == 1


async def test_a_node_that_dies_loses_what_ran_there_and_comes_back(tmp_path: Path) -> None:
    slow = {"command": command("m", "--token-seconds=0.5")}
    async with a_cluster(tmp_path, m=slow, x={"gpus": [1]}) as world:
        await asyncio.gather(world.a.until("m", Phase.ASLEEP), world.b.until("m", Phase.ASLEEP))
        await asyncio.sleep(0.7)
        lost = ask(world)
        await world.a.until("m", Phase.AWAKE)
        while not world.a.fleet.status().models[0].running:
            await asyncio.sleep(0.02)
        for connection in list(world.a.listener._server.server_state.connections):
            connection.transport.abort()  # as when its process is killed
        world.a.listener._socket.close()
        await world.a.end()
        assert (await lost).status_code == 502
        assert (await ask(world, max_tokens=1)).status_code == 200
        assert world.b.fleet.counters.requests["m", "granted"] == 1, "sent once, and not again elsewhere"
        assert 'serve_node_up{node="a"} 0' in (await world.client.get("/metrics")).text
        await world.a.begin()
        await world.a.until("x", Phase.ASLEEP)
        while "a" not in world.cluster.addresses:
            await asyncio.sleep(0.05)


async def test_requests_on_a_node_that_stands_still_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("REPORT_WITHIN_S", 0.3), ("LOST_AFTER_S", 1.0)):
        monkeypatch.setattr(clusters, name, seconds)

    async def never(asked: AtServer) -> None:
        await asked.gone()

    still = Server(never)
    listening = await asyncio.start_server(still.serve, "127.0.0.1", 0)
    async with a_cluster(tmp_path, "a", m={}) as world:
        real, url = await world.a.where(), f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        await world.a.until("m", Phase.ASLEEP)
        await asyncio.sleep(0.7)
        world.cluster.addresses["a"] = replace(real, base_url=url)
        await world.a.listener.stop()
        call = asyncio.create_task(world.client.post("/admin/sleep", json={"model": "m"}, headers=ADMIN))
        answer = await ask(world)
        assert answer.status_code == 502
        assert "has not answered" in answer.json()["error"]["message"]
        assert (await call).status_code == 503
    listening.close()


async def test_an_ingress_that_stood_still_itself_gives_no_request_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("REPORT_EVERY_S", 0.0), ("REPORT_WITHIN_S", 0.2), ("LOST_AFTER_S", 1.0)):
        monkeypatch.setattr(clusters, name, seconds)
    async with a_cluster(tmp_path, "a", m={"command": command("m", "--token-seconds=0.5")}) as world:
        await world.a.until("m", Phase.ASLEEP)
        answer = ask(world)
        await world.a.until("m", Phase.AWAKE)
        while not world.a.fleet.status().models[0].running:
            await asyncio.sleep(0.02)
        missed = []
        real = world.cluster.tell
        monkeypatch.setattr(world.cluster, "tell", lambda event: (missed.append(event), real(event))[1])
        time.sleep(1.5)  # neither the ingress runs nor, here, the node
        assert (await answer).status_code == 200
        assert clusters.Silent("a") in missed, "a look was too late, or nothing was tried"


@pytest.mark.parametrize(("server_says", "sent"), [(b"x-cumem-sleep-begun: no\r\n", 1), (b"", 1)])
async def test_what_a_server_refuses_is_sent_once_whatever_it_says(
    tmp_path: Path, server_says: bytes, sent: int
) -> None:
    async def refuse(asked: AtServer) -> None:
        is_model = asked.line.startswith("POST /v1")
        body = b'{"is_sleeping": false, "data": []}'
        status = b"503 Service Unavailable" if is_model else b"200 OK"
        await asked.send(b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, server_says, len(body), body))

    server = Server(refuse)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with a_cluster(tmp_path, m={"url": url, "levels": [1]}) as world:
        assert (await ask(world)).status_code == 503
        assert sum(asked.line.startswith("POST /v1") for asked in server.asked) == sent
    listening.close()


async def test_what_an_operator_calls_is_so_when_it_is_answered(tmp_path: Path) -> None:
    async with a_cluster(tmp_path, m={}) as world:
        await asyncio.gather(world.a.until("m", Phase.ASLEEP), world.b.until("m", Phase.ASLEEP))
        await asyncio.sleep(0.7)
        for call, phase in (("wake", "awake"), ("sleep", "asleep"), ("stop", "stopped")) * 2:
            said = await world.client.post(f"/admin/{call}", json={"model": "m"}, headers=ADMIN)
            assert (said.status_code, said.json()["phase"]) == (200, phase)
            assert world.a.fleet.status().models[0].phase.value == phase


async def test_a_model_that_sleeps_everywhere_may_sleep_deeper(tmp_path: Path) -> None:
    async with a_cluster(tmp_path, m={"levels": [1, 2]}) as world:
        await asyncio.gather(world.a.until("m", Phase.ASLEEP), world.b.until("m", Phase.ASLEEP))
        await asyncio.sleep(0.7)
        said = await world.client.post("/admin/sleep", json={"model": "m", "level": 2}, headers=ADMIN)
        assert (said.status_code, said.json()["level"]) == (200, 2)
        assert [node.fleet.status().models[0].level for node in (world.a, world.b)] == [2, 2]


@pytest.mark.parametrize("patience", ["soon", "-1", "1e9", "1" * 20])
async def test_patience_that_is_no_time_is_refused(tmp_path: Path, patience: str) -> None:
    async with a_cluster(tmp_path, "a", m={"at_start": "stopped"}) as world:
        headers = {"Authorization": f"Bearer {SECRET}", "x-cumem-sleep-patience": patience}
        url = (await world.a.where()).base_url
        answer = await world.client.post(f"{url}/v1/completions", json={"model": "m"}, headers=headers)
        assert answer.status_code == 400
        assert "patience" in answer.json()["error"]["message"]


async def test_commands_for_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_SERVE_TOKEN", "of-operators")
    async with a_cluster(tmp_path, m={}, x={}) as world:
        await asyncio.gather(*(node.until(name, Phase.ASLEEP) for node in (world.a, world.b) for name in "mx"))

        async def command_line(*words: str) -> tuple[int, str]:
            code = await asyncio.to_thread(cli.main, [*words, "--url", world.url])
            return code, "".join(capsys.readouterr())

        assert (await command_line("wake", "m"))[0] == 0
        assert world.a.fleet.status().models[0].phase is Phase.AWAKE
        assert (await command_line("drain", "b"))[0] == 0
        code, said = await command_line("status", "--cluster")
        assert code == 0
        rows = [" ".join(line.split()) for line in said.splitlines()]
        assert any(row.startswith("a up m") for row in rows), said
        assert any(row.startswith("b draining") for row in rows), said
        assert sum(row.startswith("a: m ") for row in rows) == 1, said
        assert (await command_line("drain", "b", "--undo"))[0] == 0
        assert not world.b.fleet.status().draining
        assert (await command_line("sleep", "m"))[0] == 0
        assert world.a.fleet.status().models[0].phase is Phase.ASLEEP
        code, said = await command_line("drain", "c")
        assert code == 2
        assert "there is no node 'c': there are a, b" in said
