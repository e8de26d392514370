"""A model server in a process of its own, and the client that measures it over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
POLL_S = 0.05
STOP_S = 30.0  # what a server that is told to stop has, before it is killed
TAIL_LINES = 40

Facts = dict[str, Any]


def exit_on_sigterm() -> None:
    """So that what was started is ended. `timeout` sends the signal twice: the second must not cut that short."""

    def leave(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


class ServerFailed(Exception):
    """The server ended, refused or did not answer; its last words are in the message."""


class OutOfTime(Exception):
    """The whole run has no time left."""


class Deadline:
    """When everything ends; every wait asks for its seconds here."""

    def __init__(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds; negative when it has passed."""
        return self._ends_at - time.monotonic()

    def limit(self, seconds: float) -> float:
        """So many seconds, or what is left."""
        left = self.left()
        if left <= 0:
            raise OutOfTime("no time left")
        return min(seconds, left)

    def keep(self, seconds: float) -> None:
        """At least so many are left from now on, for what has to be done at any rate."""
        self._ends_at = max(self._ends_at, time.monotonic() + seconds)


@dataclass(frozen=True)
class Answer:
    """What one streamed request brought.

    Attributes:
        tokens: their ids, or text where a server has none.
        first_token_s: from sending the request to its first token.
        seconds: to its last.
    """

    tokens: list[Any]
    first_token_s: float
    seconds: float


class Server:
    """From `start()`, which returns when it is ready to answer, until `stop()`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str],
        log: Path,
        deadline: Deadline,
    ) -> None:
        """`environment` adds to that of this process."""
        self.name = name
        self.log = log
        self._command = [*command, "--served-model-name", name, "--host", HOST, "--port", str(port)]
        self._port = port
        self._environment = dict(environment)
        self._deadline = deadline
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, limit_s: float) -> float:
        """Returns the seconds until the server says that it is healthy."""
        ends_at = time.monotonic() + self._deadline.limit(limit_s)
        start = time.perf_counter()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Started in the checkout, Python would take the package's sources for the package.
                env={**os.environ, "PYTHONSAFEPATH": "1", **self._environment},
                start_new_session=True,  # its own process group: what it starts ends with it
            )
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise self.failure(f"ended with status {self._process.returncode} before it was ready")
            if time.monotonic() > ends_at:
                self._deadline.limit(1.0)
                raise self.failure(f"not ready within {limit_s:.0f} s")
            time.sleep(POLL_S)
        return time.perf_counter() - start

    def ask_to_stop(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def stop(self, limit_s: float = STOP_S) -> float:
        """Ends all its processes; returns the seconds that it took. Does nothing the second time.

        Args:
            limit_s: what they have for that, before they are killed.
        """
        start = time.perf_counter()
        self.ask_to_stop()
        process, self._process = self._process, None
        if process is None:
            return 0.0
        ends_at = time.monotonic() + limit_s
        while time.monotonic() < ends_at and (process.poll() is None or _alive(process.pid)):
            time.sleep(POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return time.perf_counter() - start

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float = 180.0) -> float:
        """Returns the seconds until it was answered with success."""
        return self.ask("POST", path, body, limit_s=limit_s)[0]

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float = 60.0
    ) -> tuple[float, str]:
        """The seconds until it was answered with success, and what it said."""
        start = time.perf_counter()
        with self._request(method, path, body, limit_s) as response:
            content = response.read().decode()
        return time.perf_counter() - start, content

    def call_worker(self, method: str) -> Any:
        """What one of the methods of vLLM's (first) worker returns."""
        with self._request("POST", "/collective_rpc", {"method": method}, 60.0) as response:
            return json.load(response)["results"][0]

    def complete(self, prompt: Sequence[int], tokens: int, *, limit_s: float = 120.0) -> Answer:
        """Greedy tokens, streamed one by one."""
        begin = time.perf_counter()
        with self._request("POST", "/v1/completions", completion(self.name, prompt, tokens), limit_s) as response:
            try:
                return read_completion(response, tokens, begin)
            except ValueError as error:
                raise self.failure(f"/v1/completions: {error}") from error

    def processes(self) -> list[int]:
        """The numbers of all processes that it has started and that still live."""
        return [] if self._process is None else _alive(self._process.pid)

    def failure(self, what: str) -> ServerFailed:
        return ServerFailed(f"server {self.name}: {what}" + "".join(f"\n    | {line}" for line in self.tail()))

    def tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The end of its log."""
        return self.log.read_text(errors="replace").splitlines()[-lines:]

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        """A response that says success, on a connection of its own."""
        connection = http.client.HTTPConnection(HOST, self._port, timeout=self._deadline.limit(limit_s))
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"} if content else {})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise self.failure(f"{path}: {response.status} {response.read(2000).decode(errors='replace')}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            self._deadline.limit(1.0)
            raise self.failure(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=self._deadline.limit(5.0))
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _alive(group: int) -> list[int]:
    """The processes of a process group that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def completion(model: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """The request for so many greedy tokens, streamed with their ids."""
    asked = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**asked, "stream": True, "return_token_ids": True}


def read_completion(response: http.client.HTTPResponse, tokens: int, begin: float) -> Answer:
    """What a stream of server-sent events brings, up to `[DONE]`.

    Args:
        response: that says success.
        tokens: how many were asked for.
        begin: `time.perf_counter` when the request was sent.

    Raises:
        ValueError: it brings an error, breaks, or has another number of tokens.
    """
    received: list[Any] = []
    first_token_s = 0.0
    ended = False
    for line in response:
        kind, _, content = line.decode().strip().partition(": ")
        if kind != "data":
            continue
        if ended := content == "[DONE]":
            break
        event = json.loads(content)
        if "error" in event:
            raise ValueError(event["error"])
        for choice in event["choices"]:
            received += choice.get("token_ids") or ([choice["text"]] if choice.get("text") else [])
        first_token_s = first_token_s or (time.perf_counter() - begin if received else 0.0)
    if not ended or len(received) != tokens:
        how = "ended" if ended else "broke"
        raise ValueError(f"{len(received)} tokens instead of {tokens}, the stream {how}")
    return Answer(received, first_token_s, time.perf_counter() - begin)


def gpu_memory_in_use_bytes(gpu: int = 0) -> int | None:
    """Of this one of the visible GPUs, by all processes; `None` where there is no tool to ask."""
    if shutil.which("nvidia-smi") is None:
        return None
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    device = visible[gpu] if visible else str(gpu)
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={device}"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        return int(answer.stdout) << 20
    except (subprocess.SubprocessError, ValueError):
        return None


def host_memory_in_use_bytes() -> int:
    """Of the whole machine."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(count) for name, count, *_ in lines}
    return (kib["MemTotal:"] - kib["MemAvailable:"]) << 10
