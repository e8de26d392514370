"""A real `vllm serve` without anything of this package, behind a real `cumem-sleep serve`, beside another model.

Real are the front, and of vLLM the command line, the API server and the engine core in a process of its own. The worker
is `WatchedWorker`, which records whoever touches memory that sleeps, and weights that were dropped.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import watched_server
from environment import skip_unless_vllm

skip_unless_vllm()
if tuple(map(int, importlib.metadata.version("vllm").split(".")[:2])) < (0, 18):
    pytest.skip("`WatchedWorker` is for vLLM from 0.18 on", allow_module_level=True)
pytestmark = [pytest.mark.sim, pytest.mark.slow]

WITHIN_S = 240.0  # for what takes seconds
# The front gives it its settings, and it gets a machine with a simulated GPU.
PROGRAM = """\
#!{python} -P
import os, pathlib, sys
assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
sys.path.insert(0, {here!r})
import watched_server
platform = pathlib.Path({folder!r}, "platform")
platform.mkdir()
watched_server.prepare_process(platform)
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""


class Front:
    """`cumem-sleep serve` as a process, with two models on one GPU: a vLLM, and a simulated server with the layer."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.record = folder / "platform" / "touches.jsonl"
        self.asked_asleep = folder / "asked_asleep"
        self.file = folder / "models.yaml"
        self.model = watched_server.model_folder(folder / "model")
        self.program = folder / "vllm"
        here = str(pathlib.Path(__file__).parent)
        self.program.write_text(PROGRAM.format(python=sys.executable, here=here, folder=str(folder)))
        self.program.chmod(0o755)
        self.configure(level=1)
        with self.log.open("wb") as log:
            line = [sys.executable, "-P", "-m", "cumem_sleep", "serve", str(self.file)]
            self.process = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)

    def configure(self, level: int) -> None:
        """The depth at which both sleep when the other one is asked."""
        vllm = [str(self.program), "serve", str(self.model), *watched_server.options()]
        other = [sys.executable, "-m", "cumem_sleep.serve.simulated_server", "--uds", "{socket}"]
        other += ["--served-model-name", "other", "--weights-bytes", "1", "--record", str(self.asked_asleep)]
        common = {"levels": [level], "idle": "never", "host_memory": "1MiB", "wait": "4m"}
        # vLLM loads no plugin but the tests' own, by which it finds a platform.
        stock = {"command": vllm, "env": {"VLLM_PLUGINS": "simulated_cuda"}, **common}
        models = {"stock": stock, "other": {"command": other, **common}}
        self.file.with_suffix(".new").write_text(
            json.dumps({"front": {"port": 0}, "logs": str(self.folder / "logs"), "models": models})
        )
        os.replace(self.file.with_suffix(".new"), self.file)

    def reconfigure(self, level: int) -> None:
        self.configure(level)
        self.process.send_signal(signal.SIGHUP)
        self.until(lambda: "reload: stock was changed" in self.log.read_text())

    def said(self) -> str:
        logs = [self.log, *(self.folder / "logs").glob("*.log")]
        return "\n".join(f"{log}:\n{log.read_text()[-5000:]}" for log in logs)

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + WITHIN_S
        while not is_so():
            assert self.process.poll() is None, self.said()
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


@pytest.fixture
def front(tmp_path: pathlib.Path) -> Iterator[Front]:
    front = Front(tmp_path)
    yield front
    front.process.kill()  # its servers end with it
    front.process.wait()


def test_it_sleeps_and_wakes_for_requests_at_both_levels_of_vllm(front: Front) -> None:
    front.until(lambda: {model["phase"] for model in front.status().values()} == {"asleep"})
    for level in (1, 2):
        if level == 2:
            front.reconfigure(level)
        for _ in range(2):
            assert front.complete("stock").split() == ["good"] * 3, front.said()
            status = front.status()
            assert (status["stock"]["phase"], status["other"]["phase"]) == ("awake", "asleep"), front.said()
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
    assert not front.record.exists(), front.record.read_text()
    assert not front.asked_asleep.exists(), front.asked_asleep.read_text()
