"""One endpoint on real Ray Serve: several nodes on this machine, each with an address of loopback, simulated models."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

NODES = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]  # the first has Ray's head, which no test kills
MODELS = [f"m{number}" for number in range(9)]
PORT, CLIENTS, SECONDS, PAUSE_S = 18123, 300, 60.0, 12.0
ADMIN = {"Authorization": "Bearer of-operators"}
WORDS = ["This", "is", ""]  # the last event has no word, but says that it is the last


def ray_node(node: str) -> dict[str, Any]:
    """With given ports, below those that the kernel gives: else raylets wait 15 s for agents to say theirs, and die."""
    first = 21000 + 10 * int(node.rpartition(".")[2])
    names = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port", "metrics_export_port")
    ports = {name: first + number for number, name in enumerate(names)}
    return {"num_cpus": 2, "node_ip_address": node, "object_store_memory": 80 << 20, **ports}


def add_node(cluster: Any, options: dict[str, Any], tries: int = 3) -> Any:
    """A raylet dies if its agents' imports take more than 15 s, as they may from a disk; the next time they do not."""
    for left in reversed(range(tries)):
        try:
            return cluster.add_node(**options)
        except Exception as error:
            print(f"{options['node_ip_address']}: {error}")
            if not left:
                raise
    raise AssertionError


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A cluster of three nodes with the application."""
    folder = tmp_path_factory.mktemp("ray")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0", "XDG_STATE_HOME": str(folder)}
    os.environ.update(quiet)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from cumem_sleep.serve.ray import app

    server = f"{sys.executable} -m cumem_sleep.serve.simulated_server --uds {{socket}} --token-seconds=0.05"
    server += f" --wake-seconds=0.2 --sleep-seconds=0.05 --record={folder / 'asleep.txt'} --served-model-name"
    given = {"engine": "vllm", "share": 0.5, "host_memory": "1GiB", "idle": {1: "20s"}, "drain": "5s", "wait": "120s"}
    models = {name: {**given, "command": f"{server} {name}"} for name in MODELS}
    front = {"api_keys": ["of-clients"], "admin_token": "of-operators"}
    path = folder / "models.yaml"
    path.write_text(json.dumps({"models": models, "front": front, "host_memory": "100GiB", "hosts": NODES}))
    cluster = Cluster()
    try:
        head = {**ray_node(NODES[0]), "include_dashboard": False, "no_monitor": True}
        nodes = {node: add_node(cluster, head if node == NODES[0] else ray_node(node)) for node in NODES}
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, _node_ip_address=NODES[0], log_to_driver=False)
        # On each node its own would take some of the clients, and be lost with it.
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(app({"models": str(path), "ingresses": "2"}))
        yield SimpleNamespace(folder=folder, cluster=cluster, nodes=nodes, ray=ray)
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def fronts() -> dict[str, int]:
    """The process of each node's front."""
    found = {}
    for each in Path("/proc").iterdir():
        try:
            words = (each / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if words[1:4] == ["-m", "cumem_sleep", "serve"]:
            found[Path(words[4]).parent.name] = int(each.name)
    return found


class Clients:
    """Many clients that ask one after another until they are told to end; what each request got is kept."""

    def __init__(self) -> None:
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{PORT}",
            headers={"Authorization": "Bearer of-clients"},
            timeout=150,
            limits=httpx.Limits(max_connections=None),
        )
        self.begun = time.monotonic()
        self.got: list[tuple[float, float, str, str]] = []  # when it came and ended, its model, what it got

    async def status(self) -> dict[str, dict[str, Any] | None]:
        said = (await self.http.get("/status", headers=ADMIN)).json()
        return {node["name"]: node["status"] for node in said["nodes"]}

    async def until(self, what: str, holds: Any, within_s: float = 60.0) -> None:
        ends_at = time.monotonic() + within_s
        while True:
            try:
                if holds(await self.status()):
                    return
            except (httpx.HTTPError, ValueError, KeyError):  # the ingress that was asked has just died
                pass
            assert time.monotonic() < ends_at, what
            await asyncio.sleep(0.3)

    async def ask(self, model: str) -> None:
        body = {"model": model, "messages": [], "max_tokens": 2, "stream": True}
        at = time.monotonic()
        try:
            answer = await self.http.post("/v1/chat/completions", json=body)
            what = str(answer.status_code)
            if answer.status_code != 200:
                what += " " + answer.text.partition("the node ")[2].partition(" ")[0]
                print(f"{at - self.begun:.1f} to {time.monotonic() - self.begun:.1f} s: {what} {answer.text[:160]}")
            if answer.status_code == 200:
                events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
                said = [
                    (each["model"], each["choices"][0]["delta"]["content"].strip())
                    for each in events
                    if "model" in each
                ]
                broke_off = any("error" in each for each in events)
                what = "broken off" if broke_off else "200" if said == [(model, word) for word in WORDS] else "wrong"
        except httpx.HTTPError as error:
            what = type(error).__name__
        self.got.append((at, time.monotonic(), model, what))

    async def come(self, number: int, pause_s: float, ends_at: float) -> None:
        turn = number
        await asyncio.sleep(pause_s * number / CLIENTS)
        while time.monotonic() < ends_at:
            await self.ask(MODELS[(number + turn * (number % 8 + 1)) % len(MODELS)])
            turn += 1
            await asyncio.sleep(pause_s)

    def outcomes(self, since: float = 0.0) -> Counter[str]:
        return Counter(what for at, _, _, what in self.got if at >= since)

    def unexplained(
        self, nodes: dict[str, tuple[float, float]], ingresses: list[tuple[float, float]]
    ) -> list[tuple[float, float, str, str]]:
        """What got no answer, and was in flight neither on a node that was lost, nor in an ingress that was.

        Each with when it stopped answering, and until when that may not have been known.
        """
        found = []
        for at, end, model, what in self.got:
            code, _, node = what.partition(" ")
            times = [nodes[node]] if node in nodes else [*nodes.values()] if what == "broken off" else []
            in_node = code in ("502", "broken") and any(at < known and end > since for since, known in times)
            cut_off = code not in ("502", "503", "wrong")
            in_ingress = cut_off and any(at < known and since < end < known for since, known in ingresses)
            if what != "200" and not in_node and not in_ingress:
                found.append((at, end, model, what))
        return found

    def away_s(self, since: float, until: float) -> dict[str, float]:
        """The longest time in which each model answered nobody."""
        longest = {}
        for model in MODELS:
            ends = sorted(
                end for at, end, of, what in self.got if of == model and what == "200" and since <= end <= until
            )
            longest[model] = max((b - a for a, b in zip([since, *ends], [*ends, until], strict=True)), default=0.0)
        return longest


def up(status: dict[str, Any]) -> bool:
    phases = [model["phase"] for each in status.values() if each for model in each["models"]]
    return all(status.values()) and len(phases) == 27 and "starting" not in phases


def test_the_application_is_made_before_serve_run_connects(world: SimpleNamespace) -> None:
    program = "import sys; from cumem_sleep.serve.ray import app; app({'models': sys.argv[1]})"
    variables = {**os.environ, "RAY_ADDRESS": world.cluster.address}
    command = [sys.executable, "-c", program, str(world.folder / "models.yaml")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_three_nodes_nine_models_three_hundred_clients_and_what_goes_wrong(world: SimpleNamespace) -> None:
    """None lost, none wrong; then a node is drained, one stands still, an ingress and a node are killed."""
    asyncio.run(history(world))


async def history(world: SimpleNamespace) -> None:
    clients = Clients()
    await clients.until("all models have started", up)
    ends_at = time.monotonic() + SECONDS
    await asyncio.gather(*(clients.come(number, PAUSE_S, ends_at) for number in range(CLIENTS)))
    calm = clients.outcomes()
    print(f"in a calm minute: {dict(calm)}")
    assert set(calm) == {"200"}
    assert calm["200"] > 2 * CLIENTS
    await troubles(world, clients)
    await clients.http.aclose()


async def troubles(world: SimpleNamespace, clients: Clients) -> None:
    since = time.monotonic()
    some = [asyncio.create_task(clients.come(number, PAUSE_S, since + 60)) for number in range(100)]
    drained = await clients.http.post("/admin/drain", json={"node": NODES[1]}, headers=ADMIN)
    assert drained.json()["draining"] is True
    await clients.until("nothing runs there", lambda s: not any(m["running"] for m in s[NODES[1]]["models"]), 30)
    await clients.http.post("/admin/drain", json={"node": NODES[1], "on": False}, headers=ADMIN)
    assert set(clients.outcomes(since)) <= {"200"}, "a drained node loses nothing"

    os.kill(fronts()[NODES[1]], signal.SIGSTOP)
    stopped_at, stopped = time.monotonic(), fronts()[NODES[1]]
    await clients.until("it is noticed", lambda s: s[NODES[1]] is None, 20)
    print(f"stood still, noticed after {time.monotonic() - stopped_at:.1f} s")
    await clients.until(
        "another one is there", lambda s: s[NODES[1]] and fronts().get(NODES[1], stopped) != stopped, 90
    )
    print(f"there again after {time.monotonic() - stopped_at:.1f} s")

    killed_at = time.monotonic()
    ingresses = [pid for pid, words in replicas() if "Ingress" in words]
    assert len(ingresses) == 2
    os.kill(ingresses[0], signal.SIGKILL)
    await asyncio.sleep(3)
    removed_at = time.monotonic()
    front = fronts()[NODES[2]]
    world.cluster.remove_node(world.nodes[NODES[2]], allow_graceful=False)
    await clients.until("its front has ended with it", lambda _: fronts().get(NODES[2]) != front, 30)
    ended_at = time.monotonic()
    await clients.until("the node is gone", lambda s: s[NODES[2]] is None, 30)
    world.cluster.add_node(wait=False, **ray_node(NODES[2]))
    await asyncio.gather(*some)
    await clients.until("the node is back", lambda s: s[NODES[2]] is not None, 90)
    got, now = clients.outcomes(since), time.monotonic()
    print(f"with all that: {dict(got)}; node back after {now - removed_at:.0f} s")
    print(f"longest without an answer: { ({m: round(s, 1) for m, s in clients.away_s(since, since + 60).items()}) }")
    removed = removed_at, ended_at + 5  # an ingress may have been there, too
    lost = {NODES[1]: (stopped_at, stopped_at + 5), NODES[2]: removed}
    assert not clients.unexplained(lost, [(killed_at, killed_at + 5), removed])
    assert not {"wrong"} & set(got)
    at = time.monotonic()  # that the models of the lost node are to be had
    await asyncio.gather(*map(clients.ask, MODELS))
    assert set(clients.outcomes(at)) == {"200"}
    assert not (world.folder / "asleep.txt").exists(), "a request reached a server that slept"


def replicas() -> list[tuple[int, str]]:
    found = []
    for each in Path("/proc").iterdir():
        try:
            words = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if words.startswith("ray::ServeReplica"):
            found.append((int(each.name), words))
    return found


def test_a_proxy_for_the_world_is_not_asked_for_a_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would know nothing of the front, which would be killed with all its servers."""
    from cumem_sleep.serve.ray import MOST_MISSES, FrontProcess

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    front = FrontProcess(json.dumps({"models": {"m": {"url": "http://127.0.0.1:9"}}}), NODES[0], [])
    try:
        where = front.address
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        for _ in range(MOST_MISSES):
            front.look()
        assert front.address == where
    finally:
        front.end()


ENDS_AT_ONCE = """
import json, os, ray, signal, subprocess
from cumem_sleep.serve.ray import FrontProcess

begin = subprocess.Popen

def begin_and_end(*words, **how):
    print(begin(*words, **how).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen, ray.get_gpu_ids = begin_and_end, list  # which would begin a Ray
FrontProcess(json.dumps({"models": {"m": {"url": "http://127.0.0.1:9"}}}), "127.0.0.2", [])
"""


def test_a_replica_that_is_killed_as_it_begins_its_front_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    replica = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], check=False, stdout=subprocess.PIPE, text=True)
    front = int(replica.stdout)
    assert replica.returncode == -signal.SIGKILL
    ends_at = time.monotonic() + 10.0
    try:
        while (stat := Path(f"/proc/{front}/stat")).exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < ends_at, "the front goes on"
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.kill(front, signal.SIGKILL)
