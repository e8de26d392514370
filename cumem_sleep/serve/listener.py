"""The port on which the front answers: uvicorn, told to leave alone what it would add of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import select
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..http.asgi import LOST, App

MOST_HEAD_BYTES = 64 << 10  # of a request's first lines, and of what comes at once between pieces of its body, or after
MOST_HEADERS = 256
PIECE_BYTES = 4 << 10  # that are parsed before it is seen what they were
PIECES_AT_ONCE = 8  # before others have their turn: these may be 5,000 chunks
LATE_BYTES, LATE_S = 64 << 20, 5.0  # of a body, read when its answer is complete: who only sends hears no answer
LOOK_FOR_CLIENTS_EVERY_S = 1.0
MOST_SILENT_LOOKS = 60  # at a client that owes the rest of a request; for its first lines, in all
BACKLOG = 2048
GRACE_S = 5
MOST_FILES = 1 << 16  # two for each request that is answered: the client's connection and the server's
OWN_FILES = 128  # that clients leave: without them healthy servers could not be asked, and would be taken for dead
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"


class _Flow(FlowControl):
    """Nothing is read of a client while what was read of it is not parsed."""

    is_behind = False

    def resume_reading(self) -> None:
        """Read on, unless that would be too early."""
        if not self.is_behind:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """Uvicorn's, with bounds on all that it parses: it has none, and would collect it without end.

    A request that comes before the answer to the one before is not parsed but for its beginning. After a refusal
    nothing is.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._unparsed = bytearray()
        self._other_bytes = 0  # than those of bodies, since the last of these or the end of a head
        self._in_head = True
        self._parses_framing = False  # of a request whose head was parsed already
        self._is_refused = False
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._late_bytes: int | None = None  # that may still come of a request that is answered
        self._next_turn: asyncio.Handle | None = None
        self._silent_looks = 0  # since what was awaited of the client came: seconds, but none while the loop is held up

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = _Flow(transport)  # type: ignore[arg-type]
        if len(self.connections) > (most := most_clients()):
            self._refuse_the_rest()
            why = b"%d clients are connected already, the most that may be" % most
            self.transport.write(_TOO_MANY % (len(why), why))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left: all its requests end, and not only the last one, as uvicorn has it."""
        super().connection_lost(exc)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._refuse_the_rest()
        self._lost.set_result(None)

    def look_for_client(self) -> None:
        """Notice that the client has left, although nothing is read of it, or says nothing although it should."""
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self._silent_looks = 0
            look = select.poll()
            look.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
            if look.poll(0):
                self.transport.abort()
        elif not self._owes_answer():
            self._silent_looks += 1
            if self._silent_looks > MOST_SILENT_LOOKS:
                self.transport.abort()  # or whoever opens many connections would have all that there can be

    def _owes_answer(self) -> bool:
        return any(cycle.response_started or not cycle.more_body for cycle in self._unanswered)

    # What is parsed

    def data_received(self, data: bytes) -> None:
        """Read more."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._unparsed += data
        if self._next_turn is None:
            self._parse()

    def _parse(self) -> None:
        self._next_turn = None
        for _ in range(PIECES_AT_ONCE):
            if not self._unparsed or len(self._unanswered) > 1 or self.transport.is_closing():
                break
            piece = bytes(self._unparsed[:PIECE_BYTES])
            del self._unparsed[:PIECE_BYTES]
            self._parse_piece(piece)
        self.flow.is_behind = bool(self._unparsed)  # type: ignore[attr-defined]
        if self._unparsed:
            self.flow.pause_reading()
            if len(self._unanswered) <= 1:
                self._next_turn = self.loop.call_soon(self._parse)
        elif self.cycle is None or self.cycle.response_complete or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def _parse_piece(self, piece: bytes) -> None:
        self._other_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:  # to nothing that is served here: it is a request like others
            self._unparsed[:0] = piece[upgrade.args[0] :]
            if framing := self._framing():
                self._parse_body(framing)
        except httptools.HttpParserError:
            return self.send_400_response("this is not HTTP, or has too many headers")
        if self._other_bytes > MOST_HEAD_BYTES:
            return self.send_400_response("the request line and headers, or what is between chunks, are too long")
        if self._late_bytes is not None:
            self._late_bytes -= len(piece)
            if self._late_bytes < 0:
                self.transport.close()

    def _framing(self) -> list[tuple[bytes, bytes]]:
        """What says that a request has a body, and where it ends."""
        return [each for each in self.headers if each[0] in (b"content-length", b"transfer-encoding")]

    def _parse_body(self, framing: list[tuple[bytes, bytes]]) -> None:
        """Have what follows parsed as a body: to the parser a request for an upgrade has none."""
        self.parser = httptools.HttpRequestParser(self)
        self._parses_framing = True
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in framing)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
        self._parses_framing = False

    def send_400_response(self, msg: str) -> None:
        """Refuse what comes. Answers that are owed for what came before are still given, if it was complete."""
        self._refuse_the_rest()
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            super().send_400_response(msg)
        elif not cycle.more_body:
            cycle.keep_alive = False
        elif cycle.response_started or len(self._unanswered) > 1:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _refuse_the_rest(self) -> None:
        self._is_refused = True
        self._unparsed.clear()
        if self._next_turn is not None:
            self._next_turn.cancel()

    # What the parser finds

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._parses_framing:
            return
        self._in_head = True
        self._silent_looks = 0
        super().on_message_begin()
        self.scope[LOST] = self._lost  # type: ignore[literal-required]

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Fields after a chunked body look the same here: they are dropped, as nobody asks for them."""
        if self._in_head:
            super().on_header(name, value)
            if len(self.headers) > MOST_HEADERS:
                raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        """A request's first lines are read. The target's own host counts, if it has one (RFC 9112, 3.2.2)."""
        self._in_head, self._other_bytes, self._silent_looks = False, 0, 0
        if self._parses_framing:
            return
        if not self.url.startswith((b"/", b"*")):
            self.headers[:] = [each for each in self.headers if each[0] != b"host"]
            self.headers.append((b"host", urlsplit(self.url).netloc))
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self._other_bytes = self._silent_looks = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is read."""
        self._other_bytes = 0
        if self.parser.should_upgrade() and self._framing():
            return  # it comes after this
        self.cycle.more_body = False  # also if it is answered already
        super().on_message_complete()
        if self._late_bytes is not None:
            self.transport.close()

    def on_response_complete(self) -> None:
        """A request is answered. If not all of it has come, it is the last one, and no more is read than is polite."""
        cycle = self._unanswered.popleft()
        self._silent_looks = 0
        super().on_response_complete()
        if cycle.more_body and not self.transport.is_closing():
            self._late_bytes = LATE_BYTES
            self._unset_keepalive_if_required()
            self.loop.call_later(LATE_S, self.transport.close)
        if self._unparsed and self._next_turn is None:
            self._next_turn = self.loop.call_soon(self._parse)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the command's."""
        yield


class Listener:
    """Serves an app on a host and port.

    Attributes:
        port: the one that it has, where any was asked for.
    """

    def __init__(self, app: App, host: str, port: int) -> None:
        """Takes the port.

        Raises:
            OSError: somebody else has it, or it cannot be had.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            is_port = error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM)
            why = os.strerror(error.errno) if is_port and error.errno else error.strerror
            other = "port with --port" if is_port else "address with --host"
            raise OSError(f"cannot listen at {host}, port {port} ({why}): name another {other}") from None
        self.port: int = self._socket.getsockname()[1]
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
            backlog=BACKLOG,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to answer."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        self._looking = asyncio.create_task(self._look_for_clients())
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Take no more requests, let those that run end for a moment, then end them."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        if self._looking is not None:
            self._looking.cancel()
        self._socket.close()

    async def _look_for_clients(self) -> None:
        """A client that leaves is seen where it is read of. Of others the system is asked."""
        while True:
            await asyncio.sleep(LOOK_FOR_CLIENTS_EVERY_S)
            for connection in list(self._server.server_state.connections):
                if isinstance(connection, HttpProtocol):
                    connection.look_for_client()


def allow_many_connections() -> None:
    """Raise this process's limit of open files: it is often 1024, for the sake of programs that call `select`."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if few != resource.RLIM_INFINITY and few < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def most_clients() -> int:
    """How many may be connected at a time."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, ((MOST_FILES if files == resource.RLIM_INFINITY else files) - OWN_FILES) // 2)


def _is_news(record: logging.LogRecord) -> bool:
    """Answers that are broken off on purpose are none."""
    return not record.getMessage().startswith("ASGI callable returned without")
