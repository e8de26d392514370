"""A front on a real port, before a fleet that does as it is told and servers that write bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import uvloop

from cumem_sleep.serve.fleet import Address, ModelLease, NotInTime, UnknownModel
from cumem_sleep.serve.front import Front
from cumem_sleep.serve.listener import Listener
from cumem_sleep.serve.status import Counters, FleetStatus, GpuStatus, Holder, HostStatus, ModelStatus, Phase, Switch

WITHIN_S = 120.0
ASLEEP = ModelStatus(
    name="one",
    aliases=(),
    gpus=(0,),
    share=0.9,
    phase=Phase.ASLEEP,
    level=1,
    phase_since=1.0,
    waiting=0,
    oldest_wait_s=0.0,
    running=0,
    last_switch=Switch("sleep", 1, 0.25, 1.0),
    host_bytes=1 << 30,
    error=None,
    last_words="its log (/secret/folder/one.log) ends with: a key",
    retry_in_s=None,
    url="http://127.0.0.1:1",
    log="/secret/folder/one.log",
    pid=4711,
    restarts=0,
    layer="0.1.0",
)


class StubFleet:
    """Grants a lease at once, unless `held`; `granted` are those that have not ended."""

    def __init__(self, *names: str, aliases: dict[str, str] | None = None, **settings: Any) -> None:
        front = {"host": "127.0.0.1", "allowed_hosts": ["front"], "api_keys": [], "admin_token": None}
        front |= {"max_head": 64 << 20, "max_held": 1 << 30, **settings}
        self.config: Any = SimpleNamespace(front=SimpleNamespace(**front), models=dict.fromkeys(names))
        self.aliases = aliases or {}
        self.servers: dict[str, Address] = {}
        self.served: tuple[str, ...] = ()
        self.counters = Counters()
        self.tracing: Any = None
        self.held: asyncio.Event | None = None
        self.refusal: Exception | None = None
        self.granted: list[ModelLease] = []
        self.waiting = 0
        self.failures: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.changed = asyncio.Event()
        self.ended = False
        self.phase = Phase.ASLEEP

    def resolve(self, model: str) -> str:
        model = self.aliases.get(model, model)
        if model not in self.config.models:
            raise UnknownModel(f"the model {model!r} does not exist")
        return model

    @contextlib.asynccontextmanager
    async def lease(self, model: str, *_: Any) -> AsyncIterator[ModelLease]:
        name = self.resolve(model)
        if self.refusal is not None:
            raise self.refusal
        if self.held is not None:
            self.waiting += 1
            try:
                await self.held.wait()
            finally:
                self.waiting -= 1
        lease = ModelLease(name, self.servers[name], names=self.served)
        self.granted.append(lease)
        try:
            yield lease
        finally:
            self.granted.remove(lease)

    async def metrics_of(self, model: str) -> str:
        return f"own{{name={json.dumps(self.resolve(model))}}} 1\n"

    def report_failure(self, lease: ModelLease, error: str) -> None:
        self.failures.append(f"{lease.model}: {error}")

    async def until_looked_at(self, model: str) -> None:
        self.resolve(model)

    def status(self) -> FleetStatus:
        models = tuple(replace(ASLEEP, name=name, phase=self.phase) for name in self.config.models)
        gpu = GpuStatus(0, "H200", 100, 40, (Holder("one", 0.9, Phase.AWAKE),))
        return FleetStatus(2.0, "0.1.0", True, (gpu,), models, HostStatus(10, 5, None))

    async def watch(self) -> AsyncIterator[FleetStatus]:
        while not self.ended:
            self.changed.clear()
            yield self.status()
            await self.changed.wait()

    async def sleep(self, model: str, level: int | None = None) -> None:
        self._called("sleep", model, level)

    async def wake(self, model: str) -> None:
        self._called("wake", model)

    async def stop_model(self, model: str) -> None:
        self._called("stop", model)

    def log_tail(self, model: str, lines: int = 100) -> list[str]:
        return [f"{self.resolve(model)} {lines}"]

    def _called(self, *call: Any) -> None:
        self.resolve(call[1])
        self.calls.append(call)
        if self.refusal is not None:
            raise self.refusal


# Servers


@dataclass
class Asked:
    """A request as it reached a server: its bytes."""

    head: str
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def line(self) -> str:
        return self.head.partition("\r\n")[0]

    def header(self, name: str) -> str | None:
        for line in self.head.split("\r\n")[1:]:
            key, _, value = line.partition(": ")
            if key.lower() == name:
                return value
        return None

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Until the front has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass


OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


Handler = Callable[[Asked], Awaitable[None]]


@dataclass
class Server:
    """A server that reads requests and leaves the answers to a handler, which may close the connection."""

    handler: Handler
    reads_body: bool = True
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                asked = Asked(head, b"", reader, writer)
                if self.reads_body:
                    asked.body = await _body(asked)
                self.asked.append(asked)
                await self.handler(asked)
        writer.close()


async def _body(asked: Asked) -> bytes:
    if asked.header("transfer-encoding") == "chunked":
        body = b""
        while size := int(await asked.reader.readline(), 16):
            body += await asked.reader.readexactly(size)
            await asked.reader.readexactly(2)
        await asked.reader.readexactly(2)
        return body
    return await asked.reader.readexactly(int(asked.header("content-length") or 0))


async def answer_ok(asked: Asked) -> None:
    await asked.send(OK)


# Clients


@dataclass
class Answer:
    code: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


@dataclass
class Client:
    """One connection to the front."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        return Answer(int(head[0].split()[1]), headers, b"")

    async def chunk(self) -> bytes:
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def answer(self) -> Answer:
        answer = await self.head()
        try:
            if answer.headers.get("transfer-encoding") == "chunked":
                pieces = []
                try:
                    while data := await self.chunk():
                        pieces.append(data)
                finally:
                    answer.body = b"".join(pieces)
            else:
                answer.body = await self.reader.readexactly(int(answer.headers.get("content-length", 0)))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            answer.whole = False
        return answer

    def close(self) -> None:
        self.writer.transport.abort()


def post(path: str, body: bytes, *lines: str) -> bytes:
    """A request's bytes."""
    types = (
        () if any(line.lower().startswith("content-type") for line in lines) else ("Content-Type: application/json",)
    )
    head = (f"POST {path} HTTP/1.1", "Host: front", f"Content-Length: {len(body)}", *types, *lines)
    return "\r\n".join((*head, "", "")).encode("latin-1") + body


def get(path: str, *lines: str, method: str = "GET") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: front", *lines, "", "")).encode("latin-1")


def ask(model: str = "one", **more: Any) -> bytes:
    """A chat completion's bytes."""
    return post("/v1/chat/completions", json.dumps({"model": model, **more}).encode())


@dataclass
class World:
    """A front with its fleet; everything ends with the block."""

    fleet: StubFleet
    front: Front
    port: int
    clients: list[Client] = field(default_factory=list)
    closing: list[Any] = field(default_factory=list)

    async def client(self, limit: int = 1 << 20) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=limit))
        self.clients.append(client)
        return client

    async def ask(self, request: bytes) -> Answer:
        client = await self.client()
        await client.send(request)
        return await client.answer()

    async def server(self, model: str, handler: Handler = answer_ok, **options: Any) -> Server:
        server = Server(handler, **options)
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=1 << 20)
        server.port = listening.sockets[0].getsockname()[1]
        self.fleet.servers[model] = Address(f"http://127.0.0.1:{server.port}")
        self.closing.append(listening)
        return server


async def until(condition: Callable[[], bool]) -> None:
    """Until something holds that only polling shows."""
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def a_world(*names: str, **options: Any) -> AsyncIterator[World]:
    fleet = StubFleet(*(names or ("one", "two")), **options)
    front = Front(fleet)  # type: ignore[arg-type]
    listener = Listener(front, "127.0.0.1", 0)
    await listener.start()
    world = World(fleet, front, listener.port)
    try:
        yield world
    finally:
        for client in world.clients:
            client.close()
        for listening in world.closing:
            listening.close()
        fleet.ended = True
        fleet.changed.set()
        await front.close()
        await listener.stop()
    assert fleet.granted == [], "a lease outlived its request"
    assert front._ways.held.nbytes == 0


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, WITHIN_S * 2)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in left if "serve" not in repr(task.get_coro())], left

    uvloop.run(bounded())


NOT_NOW = NotInTime("all seats are taken", 6.5)
