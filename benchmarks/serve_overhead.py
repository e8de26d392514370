"""What the front of `cumem-sleep serve` costs: the same server asked directly, and through it.

    python benchmarks/serve_overhead.py            # writes benchmarks/results/serve_overhead.json

Client, front and server are a process each, on one machine. The server is made for this: it streams tokens at fixed
times, so what differs is the way. Rounds alternate between both ways. Then so many requests are held that the model is
asked to wake and does not, and the front's memory is read. It needs the extra `serve`, and no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from ending import end
from record import machine_without_gpu

RESULT = Path(__file__).parent / "results" / "serve_overhead.json"
FIRST_TOKEN_S, TOKEN_S, TOKENS = 0.2, 0.02, 40
CHOICE = {"index": 0, "delta": {"content": " token"}}
EVENT = b"data: " + json.dumps({"choices": [CHOICE], "model": "m"}).encode() + b"\n\n"
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "x" * 2000}]}).encode()


# The server


class Server(asyncio.Protocol):
    """Streams an answer to every request; it sleeps when it is told to, and wakes when `slow` lets it."""

    asleep = False
    slow_wake_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.loop = asyncio.get_running_loop()
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if not end or len(body) < length:
            return
        self.data = body[length:]
        line = head.split(b"\r\n", 1)[0]
        if b" /v1/chat" in line:
            first_at = self.loop.time() + FIRST_TOKEN_S
            self.loop.call_at(first_at, self.stream, 0, first_at)
        else:
            self.loop.create_task(self.answer(line))

    def stream(self, number: int, first_at: float) -> None:
        """Each piece has its time, so none is late because one before it was."""
        if self.transport.is_closing():
            return
        self.transport.write(HEAD + CHUNK if number == 0 else CHUNK if number < TOKENS else b"0\r\n\r\n")
        if number < TOKENS:
            self.loop.call_at(first_at + (number + 1) * TOKEN_S, self.stream, number + 1, first_at)

    async def answer(self, line: bytes) -> None:
        if b" /sleep" in line:
            Server.asleep = True
        if b" /wake_up" in line:
            await asyncio.sleep(Server.slow_wake_s)
            Server.asleep = False
        content = json.dumps({"is_sleeping": Server.asleep, "data": [{"id": "m"}], "version": "0"}).encode()
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))


async def serve(port: int, slow_wake_s: float) -> None:
    Server.slow_wake_s = slow_wake_s
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


# The client


@dataclass
class Times:
    """Seconds of each request."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """Asks again as soon as its answer is whole."""

    def __init__(self, times: Times, until: float) -> None:
        self.times, self.until = times, until
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.ask()

    def ask(self) -> None:
        self.asked_at, self.has_first, self.tail = time.perf_counter(), False, b""
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        self.transport.write(head + str(len(BODY)).encode() + b"\r\n\r\n" + BODY)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.has_first and b"data: " in data:
            self.has_first = True
            self.times.first.append(now - self.asked_at)
        self.tail = (self.tail + data)[-7:]
        if self.tail.endswith(b"\r\n0\r\n\r\n"):
            self.times.whole.append(now - self.asked_at)
            if now < self.until:
                self.ask()
            else:
                self.transport.close()
                self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("an answer is not whole"))


async def load(port: int, in_flight: int, seconds: float) -> Times:
    """So many requests in flight, for so long; those that begin together are spread over a second."""
    times, loop = Times(), asyncio.get_running_loop()
    until = time.perf_counter() + seconds

    async def one() -> None:
        await asyncio.sleep(random.random())
        _, client = await loop.create_connection(lambda: Client(times, until), "127.0.0.1", port)
        await client.done

    await asyncio.gather(*(one() for _ in range(in_flight)))
    return times


async def hold(port: int, count: int) -> list[asyncio.StreamWriter]:
    writers = []
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + BODY)
        writers.append(writer)
    return writers


# What is measured


def summary(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=1000)
    return {"count": len(seconds), "median_ms": cuts[499] * 1e3, "p99_ms": cuts[989] * 1e3, "p999_ms": cuts[998] * 1e3}


def difference(through: dict[str, float], direct: dict[str, float]) -> dict[str, float]:
    return {key: through[key] - direct[key] for key in ("median_ms", "p99_ms")}


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) << 10


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        end(process, 20)


async def until_ready(port: int, path: bytes) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if answer.startswith(b"HTTP/1.1 200"):
                return
        await asyncio.sleep(0.1)
    raise SystemExit(f"nobody answers on port {port}")


@contextlib.contextmanager
def both(asked: argparse.Namespace, slow_wake_s: float) -> Iterator[tuple[int, int, subprocess.Popen[bytes]]]:
    """A server and a front before it; their ports."""
    server_port, front_port = asked.port, asked.port + 1
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "models.yaml")
        config.write_text(
            f"front: {{port: {front_port}, max_waiting: 100000, allowed_hosts: ['*']}}\nhost_memory: 1GiB\n"
            f"models:\n  m: {{url: 'http://127.0.0.1:{server_port}', gpus: [0]}}\n"
        )
        with (
            running(sys.executable, __file__, "--serve", str(server_port), "--slow-wake", str(slow_wake_s)),
            running(sys.executable, "-m", "cumem_sleep", "serve", str(config)) as front,
        ):
            asyncio.run(until_ready(front_port, b"/v1/models"))
            yield server_port, front_port, front


def measure_overhead(asked: argparse.Namespace) -> dict[str, Any]:
    direct, through = Times(), Times()
    with both(asked, 0.0) as (server_port, front_port, front):
        for port in (server_port, front_port):
            uvloop.run(load(port, asked.in_flight, 2.0))
        cpu_s = 0.0
        for number in range(asked.rounds):
            print(f"round {number + 1} of {asked.rounds}", file=sys.stderr)
            for port, times in ((server_port, direct), (front_port, through)):
                before = cpu_seconds(front.pid)
                new = uvloop.run(load(port, asked.in_flight, asked.seconds))
                times.first += new.first
                times.whole += new.whole
                cpu_s += cpu_seconds(front.pid) - before
    pieces = len(through.whole) * (TOKENS + 1)
    ways = {"direct": direct, "through the front": through}
    first = {way: summary(times.first) for way, times in ways.items()}
    whole = {way: summary(times.whole) for way, times in ways.items()}
    return {
        "requests in flight": asked.in_flight,
        "pieces of an answer": TOKENS + 1,
        "first streamed token": {**first, "more": difference(first["through the front"], first["direct"])},
        "whole answer": {**whole, "more": difference(whole["through the front"], whole["direct"])},
        "cpu of the front": {"us_per_request": cpu_s / len(through.whole) * 1e6, "us_per_piece": cpu_s / pieces * 1e6},
    }


def measure_memory(asked: argparse.Namespace) -> dict[str, Any]:
    with both(asked, 600.0) as (_, front_port, front):
        return asyncio.run(_measure_memory(asked, front_port, front.pid))


async def _measure_memory(asked: argparse.Namespace, port: int, pid: int) -> dict[str, Any]:
    await asyncio.sleep(1)
    before = resident_bytes(pid)
    writers = await hold(port, asked.held)
    await asyncio.sleep(5)
    after = resident_bytes(pid)
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(3)
    return {
        "held requests": asked.held,
        "bytes of a body": len(BODY),
        "resident_bytes": {"before": before, "held": after, "gone": resident_bytes(pid)},
        "more_bytes": after - before,
    }


def machine() -> dict[str, Any]:
    return {
        **machine_without_gpu(),
        **{name: version(name) for name in ("uvicorn", "uvloop", "httptools")},
        "load average before": os.getloadavg(),
        "others on this machine": os.environ.get("OTHERS"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=200)
    parser.add_argument("--held", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--port", type=int, default=18400)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--slow-wake", type=float, default=0.0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(asked.serve, asked.slow_wake))
        return 0
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    facts = machine()
    results = {"machine": facts, "overhead": measure_overhead(asked), "memory": measure_memory(asked)}
    asked.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
