"""One endpoint over many hosts, on Ray Serve.

    serve run cumem_sleep.serve.ray:app models=models.yaml

A deployment for each node keeps that node's front running: `cumem-sleep serve`, with its servers, vault, port and
folder. The ingress is `cluster`: it takes requests from Serve's proxy and sends them to the fronts over HTTP, with a
secret that each front makes at its start and tells through Ray alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve

from .address import Address
from .cluster import Cluster
from .config import load, parse
from .routing import placed

START_WITHIN_S = 60.0  # of a front, whose servers start later; a lock may be waited for
END_WITHIN_S = 40.0
HEALTHY_WITHIN_S = 2.0
MOST_MISSES = 10  # looks in a row at a front that stands still, before it is killed with all its servers
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy for the world knows none of the fronts
_END_WITH_PARENT = (  # a replica that is killed cannot end its front; reapers end the servers of one that is killed
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL);"
    "os.getppid() == int(sys.argv[2]) or sys.exit();"  # it was killed before that
    "os.execv(sys.executable, [sys.executable, '-m', 'cumem_sleep', 'serve', sys.argv[1]])"
)


class FrontProcess:
    """The front of one node, in a process of its own, which is started again whenever it ends or stands still."""

    def __init__(self, text: str, node: str, asleep: Collection[str]) -> None:
        """Starts it.

        Args:
            text: of models.yaml.
            node: the address where it listens.
            asleep: the models that are started with it.

        Raises:
            RuntimeError: it does not start; its last words are in the text.
        """
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
        self._node, self._folder = node, state / "cumem-sleep" / "ray" / node
        self._token = secrets.token_urlsafe(32)
        self._models = json.dumps(node_config(yaml.safe_load(text), node, asleep, self._token, self._folder))
        self._process: subprocess.Popen[str] | None = None
        self._port, self._misses = 0, 0
        self._lock = threading.Lock()
        self._start()

    @property
    def address(self) -> Address:
        """Where it listens, with its secret."""
        return Address(f"http://{self._node}:{self._port}", None, (("Authorization", f"Bearer {self._token}"),))

    def look(self) -> None:
        """Start it again if it has ended, or does not answer; to be called now and then.

        Raises:
            RuntimeError: it does not start.
        """
        with self._lock:
            assert self._process is not None
            if self._process.poll() is None:
                try:
                    with _OPENER.open(f"{self.address}/health", timeout=HEALTHY_WITHIN_S):
                        self._misses = 0
                        return
                except OSError as error:
                    self._misses += 1
                    if self._misses < MOST_MISSES:
                        return
                    print(f"the front of {self._node} stands still, and is killed: {error}", flush=True)
                self._process.kill()
            self._start()

    def end(self) -> None:
        """End it, and its servers."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / "models.yaml"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._models)
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or value}
        if not ray.get_gpu_ids():  # of a replica without GPUs Ray hides those that there are
            inherited.pop("CUDA_VISIBLE_DEVICES", None)
        command = [sys.executable, "-c", _END_WITH_PARENT, str(path), str(os.getpid())]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=inherited, text=True, errors="replace", **streams)
        self._misses, words = 0, []
        timer = threading.Timer(START_WITHIN_S, self._process.kill)
        timer.start()
        for line in self._process.stdout or ():
            print(line, end="", flush=True)
            words.append(line)
            if found := re.search(r"listens at http://\S+:(\d+)", line):
                self._port = int(found[1])
                timer.cancel()
                threading.Thread(target=self._pass_on, args=(self._process,), daemon=True).start()
                return
        timer.cancel()
        self._process.kill()
        raise RuntimeError(f"the front of {self._node} did not start: {''.join(words[-5:]).strip()}")

    def _pass_on(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            print(line, end="", flush=True)


def node_config(data: Any, node: str, asleep: Collection[str], token: str, folder: Path) -> dict[str, Any]:
    """models.yaml of one node's front: as it is, but for where and to whom the front answers, and what it starts."""
    front = {key: value for key, value in (data.get("front") or {}).items() if key not in ("port", "allowed_hosts")}
    front |= {"host": node, "port": 0, "api_keys": [secrets.token_urlsafe(32)], "admin_token": token}
    models = {
        name: {**model, **({} if name in asleep else {"at_start": "stopped"})} for name, model in data["models"].items()
    }
    return {**data, "front": front, "models": models, "logs": str(Path(data.get("logs") or folder / "logs") / node)}


@serve.deployment(
    max_ongoing_requests=1000, health_check_period_s=1, health_check_timeout_s=90, graceful_shutdown_timeout_s=60
)
class NodeFront:
    """Keeps the front of one node running."""

    def __init__(self, text: str, node: str, asleep: list[str]) -> None:
        self._front = FrontProcess(text, node, asleep)

    async def where(self) -> Address:
        """Where it listens, with its secret."""
        return self._front.address

    async def check_health(self) -> None:
        """Ray asks this, and starts another replica where it raises."""
        await asyncio.to_thread(self._front.look)

    def __del__(self) -> None:
        if hasattr(self, "_front"):
            self._front.end()


class _Entrance:
    """The ASGI app of this process's ingress, which has it when it has started."""

    app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


entrance = _Entrance()


@serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(lambda: entrance)
class Ingress:
    """Answers clients, and sends their requests on to the nodes."""

    async def __init__(self, text: str, nodes: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._cluster = Cluster(parse(text), {node: partial(_find, handle) for node, handle in nodes.items()})
        await self._cluster.start()
        entrance.app = self._cluster


async def _find(handle: Any) -> Address:
    address: Address = await handle.where.remote()
    return address


def app(arguments: dict[str, str]) -> Any:
    """The application, for `serve run` and for a Serve configuration.

    Args:
        arguments: `models`, the path of models.yaml; `ingresses`, how many there are (1).

    Raises:
        ConfigError: models.yaml is wrong. ValueError: an argument is.
    """
    if unknown := arguments.keys() - {"models", "ingresses"}:
        raise ValueError(f"{', '.join(sorted(unknown))}: expected models=PATH and ingresses=N")
    path = Path(arguments.get("models", "models.yaml"))
    config, text = load(path), path.read_text("utf-8")
    if not ray.is_initialized():  # `serve run` connects only when it has the application
        ray.init("auto", namespace="serve")
    nodes = {each["NodeManagerAddress"]: each["Resources"] for each in ray.nodes() if each["Alive"]}
    names = list(config.hosts) or sorted(node for node, has in nodes.items() if "GPU" in has) or sorted(nodes)
    specs = [model.spec(name) for name, model in config.models.items()]
    copies = {name: model.copies for name, model in config.models.items()}
    asleep = placed(specs, copies, names, config.host_memory)
    fronts = {}
    for node in names:
        options = {
            "num_cpus": 0,
            "num_gpus": nodes.get(node, {}).get("GPU", 0),  # nobody else gets them
            "resources": {f"node:{node}": 0.001},
        }
        deployment: Any = NodeFront.options(  # type: ignore[attr-defined]
            name=f"front-{node}", ray_actor_options=options
        )
        fronts[node] = deployment.bind(text, node, sorted(asleep[node]))
    return Ingress.options(  # type: ignore[attr-defined]
        num_replicas=int(arguments.get("ingresses", 1))
    ).bind(text, fronts)
