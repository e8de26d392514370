"""A real `vllm serve` at level 3: it answers, wakes for a request, and ends on SIGTERM within its usual time.

Real are the API server with the gate, the engine core in a process of its own, and its executor. The worker is
`CheckpointedWorker`, on the simulated driver.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from environment import skip_unless_vllm, skip_vllm_before
from ready_process import ReadyProcess
from support import two_free_ports

skip_unless_vllm()
skip_vllm_before((0, 18))
pytestmark = [pytest.mark.sim, pytest.mark.slow]

STARTS_WITHIN_S = 600.0
ENDS_WITHIN_S = 180.0  # it takes a few seconds; a call into the driver at level 3 would take for ever
ANSWERS_WITHIN_S = 180.0
DEEP = {"status": "asleep", "asleep": True, "level": 3, "tags": ["kv_cache", "weights"]}
PROGRAM = """
import pathlib, sys
import watched_server
folder = pathlib.Path(sys.argv[1])
watched_server.prepare_process(folder / "platform")
from vllm.entrypoints.openai import api_server
import uvloop
line = ["--worker-cls", "checkpointed_worker.CheckpointedWorker", "--middleware", "cumem_sleep.vllm.SleepGate"]
args = watched_server.arguments(watched_server.model_folder(folder / "model"), *line, "--port", sys.argv[2])
uvloop.run(api_server.run_server(args))
"""


class Server:
    """The server's process, and how to ask it."""

    def __init__(self, ready_process: ReadyProcess, folder: pathlib.Path, **environment: str) -> None:
        for name in ("platform", "model"):
            (folder / name).mkdir()
        self.port = two_free_ports()
        self.record = folder / "platform" / "touches.jsonl"
        self.log = folder / "log"
        self.log.touch()
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self.process = ready_process.run(
            program, str(folder), str(self.port), log=self.log, VLLM_LOGGING_LEVEL="INFO", **environment
        )
        end = time.monotonic() + STARTS_WITHIN_S
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                assert self.process.poll() is None, self.said()
                assert time.monotonic() < end, self.said()
                time.sleep(0.2)

    def said(self) -> str:
        return self.log.read_text()[-6000:]

    def threads(self) -> list[str]:
        """What the kernel says of each thread of the API server: its name, its state, and where it waits."""
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task")
        told = []
        for task in tasks.iterdir() if tasks.exists() else ():
            name, _, rest = (task / "status").read_text().partition("\n")
            told.append(f"{name.split()[-1]} {rest.partition('State:')[2].split()[0]} {(task / 'wchan').read_text()}")
        return told

    def get(self, path: str) -> Any:
        return self.ask(path, None)

    def ask(self, path: str, body: Any) -> Any:
        """The answer's code and body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWERS_WITHIN_S) as answer:
                code, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            code, content = error.code, error.read()
        try:
            return code, json.loads(content)
        except ValueError:
            return code, content.decode()

    def is_gone(self) -> bool:
        """Nothing is left of it and of its children."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def end(self) -> None:
        self.process.end()


@pytest.fixture
def server(ready_process: ReadyProcess, tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    settings = {"CUMEM_SLEEP_ON_REQUEST": "wake", "CUMEM_SLEEP_HEALTH": "ok", **getattr(request, "param", {})}
    server = Server(ready_process, tmp_path, **settings, CUMEM_SLEEP_SIM_CONTEXT_BYTES=str(32 << 20))
    yield server
    server.end()


def deepen(server: Server) -> None:
    became = {"weights": "backed up", "kv_cache": "cleared"}
    assert server.ask("/sleep?level=3", {}) == (200, {"status": "sleeping", "level": 3, **became}), server.said()


def complete(server: Server) -> str:
    code, body = server.ask("/v1/completions", {"model": "model", "prompt": "hello", "max_tokens": 3})
    assert code == 200, body
    return str(body["choices"][0]["text"])


def test_answers_wakes_and_ends(server: Server) -> None:
    assert "bad" not in complete(server)
    deepen(server)
    assert server.get("/health") == (200, DEEP)
    assert server.get("/is_sleeping") == (200, {"is_sleeping": True, "tags": ["kv_cache", "weights"]})
    assert server.get("/v1/models")[0] == 200
    assert 'cumem_sleep_sleep_level{rank="0"} 3.0' in server.get("/metrics")[1]
    deepen(server)  # it is there
    assert "good" in complete(server), "the request woke it"
    assert server.get("/health")[1] == ""
    deepen(server)
    assert server.ask("/wake_up", {})[0] == 200
    assert server.ask("/sleep?level=1", {})[0] == 200
    deepen(server)  # without waking
    code, answer = server.ask("/collective_rpc", {"method": "list_loras"})  # it calls the driver
    assert code == 200, answer
    assert server.get("/health")[1]["level"] == 1, "which it was brought back for"
    deepen(server)
    assert server.ask("/pause", {})[0] == 200  # vLLM clears the caches of its workers
    assert server.ask("/wake_up", {})[0] == 200
    assert server.ask("/resume", {})[0] == 200
    assert "good" in complete(server)
    deepen(server)
    server.process.send_signal(signal.SIGTERM)
    ends(server)


@pytest.mark.parametrize(
    "server",
    [{"CUMEM_SLEEP_IDLE_S": "1", "CUMEM_SLEEP_IDLE_LEVEL": level, "CUMEM_SLEEP_DEEP_AFTER_S": "1"} for level in "12"],
    indirect=True,
    ids=["level 1", "level 2"],
)
def test_nobody_asks_so_it_sleeps_and_later_goes_to_level_3(server: Server) -> None:
    for _ in range(2):
        assert "good" in complete(server)
        end = time.monotonic() + ANSWERS_WITHIN_S
        while server.get("/health")[1] != DEEP:
            assert time.monotonic() < end, server.said()
            time.sleep(0.1)
        assert server.get("/is_sleeping") == (200, {"is_sleeping": True, "tags": ["kv_cache", "weights"]})
    assert '"touch"' not in (server.record.read_text() if server.record.exists() else "")


def ends(server: Server) -> None:
    """With all of its processes."""
    end = time.monotonic() + ENDS_WITHIN_S
    while server.process.poll() is None:
        assert time.monotonic() < end, f"{server.threads()}\n{server.said()}"
        time.sleep(0.05)
    end = time.monotonic() + ENDS_WITHIN_S
    while not server.is_gone():
        assert time.monotonic() < end, server.said()
        time.sleep(0.05)
