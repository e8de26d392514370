"""An HTTP/1.1 client on a bare socket: it sends what no library would, slowly, and leaves when it likes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

AT_ONCE, AFTER_HEAD, AFTER_HALF, AFTER_BODY, AFTER_FIRST_BYTES = "at once", "head", "half", "body", "first bytes"
LEAVES = (AT_ONCE, AFTER_HEAD, AFTER_HALF, AFTER_BODY, AFTER_FIRST_BYTES)


@dataclass
class Request:
    """What is sent; waits are in seconds."""

    method: str
    target: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    pause_s: float = 0.0  # in the middle of the body
    leave: str = ""  # after which part the client closes the connection
    host: str = "127.0.0.1"

    def head(self) -> bytes:
        headers = {"Host": self.host, "Connection": "close", **self.headers}
        if self.body or self.method != "GET":
            headers["Content-Length"] = str(len(self.body))
        lines = [f"{self.method} {self.target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def __str__(self) -> str:
        more = [f"pause {self.pause_s:.3f}"] * bool(self.pause_s) + [f"leaves: {self.leave}"] * bool(self.leave)
        return " ".join([self.method, repr(self.target), self.body[:70].decode(), *more])


@dataclass
class Answer:
    """What came back; code 0: the client left, or the connection was closed without an answer."""

    code: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def send(port: int, request: Request) -> Answer:
    """Send one request over a connection of its own, and read to its end."""
    if request.leave == AT_ONCE:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return Answer(0, {}, b"")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        half = len(request.body) // 2
        for part, name in (
            (request.head(), AFTER_HEAD),
            (request.body[:half], AFTER_HALF),
            (request.body[half:], AFTER_BODY),
        ):
            writer.write(part)
            await writer.drain()
            if request.leave == name:
                return Answer(0, {}, b"")
            if request.pause_s and name == AFTER_HALF:
                await asyncio.sleep(request.pause_s)
        while part := await reader.read(1 << 16):
            received += part
            if request.leave == AFTER_FIRST_BYTES:
                return Answer(0, {}, b"")
    except ConnectionError:
        pass  # what was answered before counts
    finally:
        writer.close()
    return parse(received)


async def websocket(port: int, path: str, headers: dict[str, str], wait_s: float) -> int:
    """Ask for a websocket, stay connected a while; returns the status of the answer (101: accepted, 0: none)."""
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(Request("GET", path, headers={**headers, **upgrade, **key}).head())
        line = await asyncio.wait_for(reader.readline(), wait_s)
        return int(line.split()[1]) if line else 0
    except (ConnectionError, asyncio.TimeoutError):
        return 0
    finally:
        writer.close()


async def pipelined(port: int, requests: list[Request]) -> bytes:
    """All in one write; returns what came until the server closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        *first, last = requests
        for each in first:
            each.headers = {**each.headers, "Connection": "keep-alive"}
        writer.write(b"".join(each.head() + each.body for each in [*first, last]))
        return await reader.read(-1)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def parse(received: bytes) -> Answer:
    head, _, body = received.partition(b"\r\n\r\n")
    if not head:
        return Answer(0, {}, b"")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    return Answer(int(first.split()[1]), headers, body)


def _joined(chunked: bytes) -> bytes:
    body = b""
    while chunked:
        size, _, chunked = chunked.partition(b"\r\n")
        nbytes = int(size, 16) if size else 0
        body, chunked = body + chunked[:nbytes], chunked[nbytes + 2 :]
        if nbytes == 0:
            break
    return body
