"""The port on which the front answers: uvicorn, told to leave alone what it would add of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..asgi import App

MOST_HEAD_BYTES = 64 << 10  # of a request's first lines
BACKLOG = 2048
GRACE_S = 5
MOST_FILES = 1 << 16  # two for each request that is answered: the client's connection and the server's


class HttpProtocol(HttpToolsProtocol):
    """Uvicorn's, with a bound on a request's first lines: it has none, and would collect them without end."""

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)  # type: ignore[arg-type]
        self._head_bytes = 0
        self._in_head = True

    def data_received(self, data: bytes) -> None:
        """Read more of a request."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("the request line and headers are too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Fields after a chunked body look the same here: they are dropped, as nobody asks for them."""
        if self._in_head:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its first lines are read."""
        self._in_head = False
        super().on_headers_complete()


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

    async def start(self) -> None:
        """Begin to answer."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Take no more requests, let those that run end for a moment, then end them."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._socket.close()


def allow_many_connections() -> None:
    """Raise this process's limit of open files: it is often 1024, for the sake of programs that call `select`."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if few != resource.RLIM_INFINITY and few < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _is_news(record: logging.LogRecord) -> bool:
    """Answers that are broken off on purpose are none, nor are clients that ask for websockets."""
    quiet = ("ASGI callable returned without", "Unsupported upgrade request", "No supported WebSocket library")
    return not record.getMessage().startswith(quiet)
