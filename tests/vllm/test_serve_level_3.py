"""A real `vllm serve` at level 3: it answers, wakes for a request, and ends on SIGTERM within its usual time.

Real are the API server with the gate, the engine core in a process of its own, and its executor. The worker is
`DeepWorker`, on the simulated driver.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from environment import skip_unless_vllm
from ready_process import ReadyProcess
from support import two_free_ports

skip_unless_vllm()
if tuple(map(int, importlib.metadata.version("vllm").split(".")[:2])) < (0, 18):
    pytest.skip("`WatchedWorker` is for vLLM from 0.18 on", allow_module_level=True)
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
line = ["--worker-cls", "deep_worker_process.DeepWorker", "--middleware", "cumem_sleep.vllm.SleepGate"]
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

    def engine_core(self) -> int:
        """The number of its process."""
        found = re.search(r"\(EngineCore\w* pid=(\d+)\)", self.log.read_text())
        assert found, self.said()
        return int(found[1])

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
    assert server.ask("/sleep?level=3", {}) == (200, {"status": "sleeping", "level": 3}), server.said()


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


def test_an_engine_core_ends_in_order(server: Server) -> None:
    assert "bad" not in complete(server)
    deepen(server)
    end_engine_core(server)
    ends(server)
    assert '{"said": "shut down"}' in server.record.read_text(), "its worker called the driver"


def test_an_engine_core_ends_where_it_cannot_come_back(server: Server) -> None:
    """Another model has the memory."""
    assert "bad" not in complete(server)
    assert server.ask("/collective_rpc", {"method": "fill_gpu"})[0] == 200
    deepen(server)
    code, answer = server.ask("/wake_up", {})
    assert code == 500, answer
    assert server.get("/health")[1] == DEEP
    end_engine_core(server)
    ends(server)
    assert not server.record.exists()
    assert "its CUDA state did not come back" in server.log.read_text()


def end_engine_core(server: Server) -> None:
    """It ends by itself: the API server, which newer versions let kill it at once, is stopped meanwhile.

    All of its threads have to be gone. While some are left, vLLM finds it alive and kills it; where another thread of
    the API server takes its exit status meanwhile, that fails, and the API server stays (vLLM 0.26 with psutil 7.2).
    """
    process = server.engine_core()
    wait_until_idle(process)
    server.process.send_signal(signal.SIGSTOP)
    os.kill(process, signal.SIGTERM)
    end = time.monotonic() + ENDS_WITHIN_S
    while not is_dead(process):
        assert time.monotonic() < end, server.said()
        time.sleep(0.05)
    server.process.send_signal(signal.SIGCONT)


def is_dead(process: int) -> bool:
    """Nobody has taken its exit status. Its main thread can be a zombie while others are still there."""
    main_thread_ended = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return main_thread_ended and os.listdir(f"/proc/{process}/task") == [str(process)]


def wait_until_idle(process: int) -> None:
    """Its main thread waits for the next order.

    A signal that comes while it is about to wait, and lets go of Python's lock, is handled after that wait only: with
    two busy cores, one of twenty.
    """
    status = pathlib.Path(f"/proc/{process}/status")
    end = time.monotonic() + ENDS_WITHIN_S
    before = None
    while (now := _rest(status.read_text())) is None or now != before:
        assert time.monotonic() < end, "the engine core is never idle"
        before = now
        time.sleep(0.3)


def _rest(status: str) -> str | None:
    """How often a main thread has been switched, while it sleeps: the same again if it has slept ever since."""
    return status.partition("voluntary_ctxt_switches")[2] if "\nState:\tS" in status else None


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
