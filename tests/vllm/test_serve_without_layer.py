"""A real vLLM without the layer of this package, behind a real `cumem-sleep serve`, beside another model. It has the
gate, or nothing of this package and development mode.

Real are the front, and of vLLM the API server, with the arguments that the front gives to `vllm serve`, and the engine
core in a process of its own. The worker is `WatchedWorker`, which records whoever touches memory that sleeps, and
weights that were dropped.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import watched_server
from environment import skip_unless_vllm, skip_vllm_before
from ready_process import Program, ReadyProcess

from cumem_sleep.serve import servers
from cumem_sleep.serve.address import from_url
from cumem_sleep.serve.config import ModelConfig

skip_unless_vllm()
skip_vllm_before((0, 18))
pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(600)]

WITHIN_S = 240.0  # for what takes seconds
PROGRAM = """
import sys
import watched_server
from vllm.entrypoints.openai import api_server
import uvloop
args = watched_server.parsed(sys.argv[1:])
args.model = args.model_tag
uvloop.run(api_server.run_server(args))
"""


def start_vllm(
    ready_process: ReadyProcess, folder: pathlib.Path, url: str, token: str | None, *options: str, **environment: str
) -> Program:
    """As the front starts a server, but for the program; of all plugins it loads those of the tests alone."""
    model = watched_server.model_folder(folder / "model")
    command = ["vllm", "serve", str(model), *(options or watched_server.options())]
    config = ModelConfig(command=command, env={"VLLM_PLUGINS": "simulated_cuda"})  # type: ignore[arg-type]
    words = servers.command_line("stock", config, from_url(url, token), token)
    assert ("--middleware" in words) == (token is not None)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    controls = "VLLM_SERVER_DEV_MODE" if token is None else "CUMEM_SLEEP_ADMIN_TOKEN"
    ours = {name: servers.environment(config, {}, token=token)[name] for name in (controls, "VLLM_PLUGINS")}
    record = str(folder / "touches.jsonl")
    log = folder / "vllm.log"
    log.touch()
    more = {"WATCHED_WORKER_RECORD": record, "VLLM_LOGGING_LEVEL": "INFO", **ours, **environment}
    return ready_process.run(program, *words[2:], log=log, **more)


class Front:
    """`cumem-sleep serve` as a process, with two models on one GPU: that vLLM, and a simulated server."""

    def __init__(
        self, ready_process: ReadyProcess, folder: pathlib.Path, token: str | None, *options: str, **environment: str
    ) -> None:
        """`options` and `environment`: of vLLM's server."""
        self.folder, self.token = folder, token
        self.log = folder / "log"
        self.asked_asleep = folder / "asked_asleep"
        self.touches = folder / "touches.jsonl"
        self.file = folder / "models.yaml"
        self.vllm_url = f"unix:{folder}/vllm.sock"
        self.vllm = start_vllm(ready_process, folder, self.vllm_url, token, *options, **environment)
        self.until_vllm_listens()  # else the front soon looks for it later, and calls that a start that failed
        self.configure(level=1)
        with self.log.open("wb") as log:
            line = [sys.executable, "-P", "-m", "cumem_sleep", "serve", str(self.file)]
            self.process = subprocess.Popen(line, stdout=log, stderr=log)

    def until_vllm_listens(self) -> None:
        end = time.monotonic() + WITHIN_S
        while True:
            with socket.socket(socket.AF_UNIX) as client:
                if client.connect_ex(str(self.folder / "vllm.sock")) == 0:
                    return
            assert self.vllm.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    def configure(self, level: int, host_memory: str = "1GiB") -> None:
        """The depth at which both sleep when the other one is asked, and what sleepers may hold of the host."""
        other = [sys.executable, "-m", "cumem_sleep.serve.simulated_server", "--uds", "{socket}"]
        other += ["--served-model-name", "other", "--weights-bytes", "1", "--record", str(self.asked_asleep)]
        common = {"levels": [level], "idle": "never", "host_memory": "1MiB", "wait": WITHIN_S}
        stock = {"url": self.vllm_url, "start_timeout": WITHIN_S, "switch_timeout": WITHIN_S, **common}
        stock |= {} if self.token is None else {"api_key": self.token}
        models = {"stock": stock, "other": {"command": other, "at_start": "stopped", **common}}
        front = {"front": {"port": 0}, "logs": str(self.folder / "logs"), "host_memory": host_memory}
        self.file.with_suffix(".new").write_text(json.dumps({**front, "models": models}))
        os.replace(self.file.with_suffix(".new"), self.file)

    def reconfigure(self, level: int) -> None:
        self.configure(level)
        self.process.send_signal(signal.SIGHUP)
        self.until(lambda: "reload: stock was changed" in self.log.read_text())

    def lack_host_memory(self, level: int) -> None:
        """There is room for what the two models back up, and for nothing else."""
        self.configure(level, "2MiB")
        self.process.send_signal(signal.SIGHUP)

    def said(self) -> str:
        logs = [self.log, self.folder / "vllm.log", *(self.folder / "logs").glob("*.log")]
        return "\n".join(f"{log}:\n{log.read_text()[-5000:]}" for log in logs)

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + WITHIN_S
        while not is_so():
            assert self.process.poll() is None, self.said()
            assert self.vllm.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    @property
    def url(self) -> str:
        self.until(lambda: "listens at " in self.log.read_text())
        return self.log.read_text().partition("listens at ")[2].partition(";")[0]

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            return json.load(answer)

    def complete(self, model: str) -> str:
        answer = self.ask("/v1/completions", {"model": model, "prompt": "hello", "max_tokens": 3})
        return str(answer["choices"][0]["text"])

    def status(self) -> dict[str, Any]:
        return {model["name"]: model for model in self.ask("/status")["models"]}

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WITHIN_S) == 0, self.said()


@pytest.fixture(params=[None, "token"], ids=["development mode", "gate"])
def front(request: pytest.FixtureRequest, ready_process: ReadyProcess, tmp_path: pathlib.Path) -> Iterator[Front]:
    front = Front(ready_process, tmp_path, request.param)
    yield front
    front.process.kill()  # its servers end with it
    front.process.wait()
    front.vllm.end()


def test_it_sleeps_and_wakes_for_requests_at_both_levels_of_vllm(front: Front) -> None:
    front.until(lambda: front.status()["stock"]["phase"] == "awake")
    for level in (1, 2):
        if level == 2:
            front.reconfigure(level)
        for _ in range(2):
            assert front.complete("stock").split() == ["good"] * 3, front.said()
            status = front.status()
            assert (status["stock"]["phase"], status["other"]["phase"] == "awake") == ("awake", False), front.said()
            assert "This is other," in front.complete("other")
            stock = front.status()["stock"]
            assert (stock["phase"], stock["level"], stock["error"]) == ("asleep", level, None), front.said()
    assert (stock["restarts"], stock["layer"]) == (0, "")
    assert "stock: cumem-sleep is not active in its server" in front.log.read_text()
    table = subprocess.run(
        [sys.executable, "-P", "-m", "cumem_sleep", "status", "--url", front.url],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "without cumem-sleep in it" in table
    front.end()
    assert " failed " not in front.log.read_text()
    assert not front.touches.exists(), front.touches.read_text()
    assert not front.asked_asleep.exists(), front.asked_asleep.read_text()
