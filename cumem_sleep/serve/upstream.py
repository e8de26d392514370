"""HTTP/1.1 to the servers behind the front: bytes pass as they come, neither collected nor looked at.

A general client spends several times as long on each piece of a stream, and streams come in many small pieces.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import cast
from urllib.parse import urlsplit

import httptools

from ..http.asgi import within
from .fleet import Address

Headers = list[tuple[bytes, bytes]]

CONNECT_WITHIN_S = 5.0
IDLE_S = 2.0  # a server closes idle connections itself, uvicorn after 5 s: a request must not meet that
MOST_IDLE = 256  # connections to one server
MOST_HEAD_BYTES = 256 << 10  # of an answer, with the 1xx answers before it
AHEAD_BYTES = 256 << 10  # of an answer: more is not read while the client takes no more
OF_ONE_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)


class Unreachable(Exception):
    """There is no connection to the server, so nothing was sent."""


class BrokenOff(Exception):
    """The server ended a connection before its answer ended, or answered what is not HTTP.

    It may have run the request all the same, and to the end: no sign of it comes before the answer does.
    """


class Connection(asyncio.Protocol):
    """One connection, and one exchange on it at a time.

    Attributes:
        status, headers: of the answer, once `head` returned.
        reused: it had served before.
        idle_since: `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.reused = False
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._error: Exception | None = None
        self._closed = False
        self._at_eof = False  # uvloop refuses writes from here on, before it says that the connection is lost
        self._is_paused = False
        self._writable: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._head_bytes = 0
        self._has_head = self._complete = self._sent = False
        self._keeps = False
        self._news: asyncio.Future[None] | None = None

    # The exchange

    @property
    def is_open(self) -> bool:
        """Whether another exchange may begin on it."""
        return not (self._closed or self._at_eof) and self._error is None

    def is_silent(self) -> bool:
        """Whether it is open, and nothing has come that was not read: while it is idle, that would be its end.

        The system is asked, since the loop learns of an end only in its next round.
        """
        if self._transport is None or not self.is_open or self._transport.is_closing():
            return False
        look = select.poll()  # `recv` is not to be had of uvloop's sockets
        look.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not look.poll(0)

    @property
    def is_read(self) -> bool:
        """Whether all of the answer was read."""
        return self._complete and not self._pieces

    def send(self, pieces: Iterable[bytes], *, more: bool) -> None:
        """Send a request's head and what is there of its body.

        Raises:
            Unreachable: the connection is closed.
        """
        if self.reused:
            self._begin()
        assert self._transport is not None
        if not self.is_open:
            raise Unreachable("the server closed the connection")
        self._transport.writelines([piece for piece in pieces if piece])
        self._sent = not more

    async def write(self, data: bytes, *, more: bool) -> None:
        """Send more of the body, once the server takes it."""
        assert self._transport is not None
        if not self.is_open:
            return  # who reads the answer learns why
        if data:
            self._transport.write(data)
        self._sent = not more
        if self._writable is not None:
            await asyncio.shield(self._writable)

    async def head(self) -> None:
        """Wait for the answer's status and headers.

        Raises:
            BrokenOff: there will be none.
        """
        while not self._has_head:
            await self._wait()

    async def read(self) -> bytes:
        """The next piece of the answer's body, as soon as there is one; empty at its end.

        Raises:
            BrokenOff: it ends too early.
        """
        while not self._pieces:
            if self._complete:
                return b""
            await self._wait()
        pieces, self._pieces, self._nbytes = self._pieces, [], 0
        if self._is_paused and self._transport is not None and self.is_open:
            self._transport.resume_reading()
            self._is_paused = False
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def may_be_reused(self) -> bool:
        """Whether request and answer are both at their end, and the server keeps the connection."""
        return self.is_open and self._sent and self._complete and self._keeps

    def close(self) -> None:
        """End it, and with it the request: the server notices."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise BrokenOff("the connection is closed")
        self._news = self._loop.create_future()
        await self._news

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _fail(self, why: str) -> None:
        if self._error is None and not self._complete:
            self._error = BrokenOff(why)
        self._tell()

    # asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none, but has its methods
        if self._closed:  # nobody waits for it any more
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read more of the answer."""
        if self._complete:  # nobody asked for more
            return self.close()
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("the server changed to another protocol")
            self.close()
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not HTTP ({error})")
            self.close()
        if not self._has_head and self._head_bytes > MOST_HEAD_BYTES:
            self._fail(f"the head of the server's answer has more than {MOST_HEAD_BYTES} bytes")
            self.close()
        if self._nbytes > AHEAD_BYTES and not self._is_paused and self._transport is not None and not self._closed:
            self._transport.pause_reading()
            self._is_paused = True
        self._tell()

    def eof_received(self) -> None:
        """The answer may end with the connection."""
        self._at_eof = True
        if self._has_head and not self._is_framed():
            self._complete = True

    def connection_lost(self, error: Exception | None) -> None:
        """No more will come."""
        self._closed = True
        self._fail("the server closed the connection" + (f" ({error})" if error else ""))
        self.resume_writing()

    def pause_writing(self) -> None:
        """The server takes no more for now."""
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """It takes more."""
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    # httptools' parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; what follows a body, as after its last chunk, is not passed on."""
        if not self._has_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The headers are read, perhaps of a 1xx answer."""
        if self._complete:  # an answer that nobody asked for
            self._keeps = False
            return
        self.status = self._parser.get_status_code()
        if not 100 <= self.status < 600:
            self._fail(f"the server's answer has the status {self.status}")
            raise ValueError  # or what follows would be taken for the answer
        self._has_head = self.status >= 200

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self._complete:
            self._pieces.append(body)
            self._nbytes += len(body)

    def on_message_complete(self) -> None:
        """The answer is read, or one before it."""
        if self._complete:
            return
        if self._has_head:
            self._complete, self._keeps = True, self._parser.should_keep_alive()
        else:  # 1xx: the answer follows
            self.headers = []

    def _is_framed(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)


class Connections:
    """Connections to all servers; those that are idle are kept for a moment."""

    def __init__(self) -> None:
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)  # by place: each request has its headers

    async def take(self, server: Address) -> Connection:
        """A connection to a server. What is sent over it at once meets no end that the server has already made.

        Raises:
            Unreachable.
        """
        idle = self._idle.get(str(server), [])
        while idle:
            connection = idle.pop()
            if connection.is_silent() and time.monotonic() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        connection = Connection()
        is_made = False
        try:
            await within(CONNECT_WITHIN_S, _connect(server, connection))
            is_made = True
            return connection
        except (OSError, asyncio.TimeoutError) as error:
            # Not the error's own text, which may name the address: clients read this.
            number = getattr(error, "errno", None)
            why = os.strerror(number) if number else f"no connection within {CONNECT_WITHIN_S:g} s"
            raise Unreachable(why) from error
        finally:
            if not is_made:
                connection.close()

    def give_back(self, server: Address, connection: Connection) -> None:
        """Keep a connection for the next request, or close it if its exchange did not end."""
        idle = self._idle[str(server)]
        if not connection.may_be_reused() or len(idle) >= MOST_IDLE:
            return connection.close()
        connection.reused, connection.idle_since = True, time.monotonic()
        idle.append(connection)

    def close_idle(self, than_s: float = IDLE_S) -> None:
        """Close what has been idle for longer; to be called now and then."""
        since = time.monotonic() - than_s
        for place, idle in list(self._idle.items()):
            for connection in idle:
                if connection.idle_since <= since:
                    connection.close()
            self._idle[place] = [connection for connection in idle if connection.is_open]
            if not self._idle[place]:
                del self._idle[place]


async def _connect(server: Address, connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    if server.socket is not None:
        await loop.create_unix_connection(lambda: connection, server.socket)
    else:
        url = urlsplit(server.base_url)
        secure = url.scheme == "https"
        port = url.port or (443 if secure else 80)
        await loop.create_connection(lambda: connection, url.hostname or "", port, ssl=True if secure else None)


def request_head(server: Address, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A request's first lines: headers as they came, and the server's own instead of those of the same name."""
    url = urlsplit(server.base_url)
    own = [(name.lower().encode(), value.encode()) for name, value in server.headers]
    replaced = {b"host", *(name for name, _ in own)}
    lines = [method.encode() + b" " + url.path.encode() + target + b" HTTP/1.1", b"host: " + url.netloc.encode()]
    lines += [name + b": " + value for name, value in (*(each for each in headers if each[0] not in replaced), *own)]
    return b"\r\n".join((*lines, b"", b""))


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that are not of one connection alone."""
    kept = [each for each in headers if each[0] not in OF_ONE_CONNECTION]
    if len(kept) == len(named := list(headers)):
        return kept
    named_too = {
        token.strip().lower() for name, value in named if name == b"connection" for token in value.split(b",")
    } - {b"content-length", b"content-type"}
    return [each for each in kept if each[0] not in named_too]
