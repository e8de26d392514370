"""Where the gate alone listens, for calls that change the sleep: one request a connection, bounded in time and memory.

It parses with h11, which uvicorn has as well. Uvicorn's own parsing has no bounds, and its server takes the signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import stat
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from ..http.asgi import App, Message, Scope, refusal, status_of, within
from .parameters import MOST_BYTES

logger = logging.getLogger("cumem_sleep")

FROM_LISTENER = "cumem_sleep.admin"  # in a scope: it came here
MOST_CONNECTIONS = 64  # of which the request is not whole yet, and as many of which it is
MOMENT_S = 0.25  # for a request to come, however many others are awaited
MOST_HEAD_BYTES = 16 << 10
REQUEST_WITHIN_S = ANSWER_WITHIN_S = 10.0  # to come, and to be taken
UNIX = "unix:"


class _Refused(Exception):
    """A request is answered by the listener itself."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def bound(address: str) -> socket.socket:
    """A socket at `unix:PATH`, which this user alone can open, or at `HOST:PORT`.

    Raises:
        OSError: EADDRINUSE: somebody listens there; or it cannot be had.
    """
    if not address.startswith(UNIX):
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    path = address[len(UNIX) :]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # which its file will have
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            with contextlib.suppress(FileNotFoundError):
                _remove_left_over(path)
            listener.bind(path)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_left_over(path: str) -> None:
    """Remove the socket of a server that was killed, and nothing else that is there, or has come there by then."""
    found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.setblocking(False)  # the queue of one that stands still may be full
            answer = client.connect_ex(f"/proc/self/fd/{found}")
        if answer != errno.ECONNREFUSED or not stat.S_ISSOCK(os.fstat(found).st_mode):
            return
        aside = f"{path}.{secrets.token_hex(8)}"
        os.rename(path, aside)
        if not os.path.samestat(os.lstat(aside), os.fstat(found)):
            os.link(aside, path, follow_symlinks=False)
        os.unlink(aside)
    finally:
        os.close(found)


class AdminListener:
    """Serves an ASGI app on a bound socket. What it sends to it has `FROM_LISTENER` in its scope."""

    def __init__(self, serve: App, vllm: Any, address: str, listener: socket.socket) -> None:
        """`vllm`: the app whose state has the engine."""
        self._serve, self._vllm = serve, vllm
        self._socket = listener
        self._path = address[len(UNIX) :] if address.startswith(UNIX) else ""
        self._made = os.lstat(self._path) if self._path else None
        self._connections = 0
        self._coming: dict[asyncio.Future[Any], None] = {}  # requests, the oldest first
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to answer."""
        self._server = await asyncio.start_server(self._connected, sock=self._socket)

    def close(self) -> None:
        """Take no more requests. While it listens, nobody takes its socket to be left over."""
        with contextlib.suppress(OSError):
            if self._made is not None and os.path.samestat(os.lstat(self._path), self._made):
                os.unlink(self._path)
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import h11

        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
        self._connections += 1
        try:
            answer = await self._answer(connection, reader)
            headers = next(each["headers"] for each in answer if each["type"] == "http.response.start")
            body = b"".join(each.get("body", b"") for each in answer)
            code = status_of(answer)
            head = h11.Response(
                status_code=code,
                reason=HTTPStatus(code).phrase,
                headers=[*_without_length(headers), (b"content-length", b"%d" % len(body)), (b"connection", b"close")],
            )
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                writer.write(connection.send(event) or b"")
            await within(ANSWER_WITHIN_S, writer.drain())
        except (OSError, asyncio.TimeoutError, h11.LocalProtocolError):
            pass  # the client has left, or takes no answer
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, connection: Any, reader: asyncio.StreamReader) -> list[Message]:
        try:
            coming = asyncio.ensure_future(_request(connection, reader))
            self._coming[coming] = None
            if len(self._coming) > MOST_CONNECTIONS:
                asyncio.get_running_loop().call_later(MOMENT_S, self._refuse_oldest)
            try:
                head, body = await within(REQUEST_WITHIN_S, coming)
            except asyncio.CancelledError:
                if coming not in self._coming:
                    raise _too_many() from None
                raise
            finally:
                self._coming.pop(coming, None)
            if self._connections - len(self._coming) > MOST_CONNECTIONS:
                raise _too_many()
            return await self._called(_scope(head, self._vllm), body, reader)
        except _Refused as refused:
            return refusal(refused.code, str(refused))
        except asyncio.TimeoutError:
            return refusal(408, f"expected the whole request within {REQUEST_WITHIN_S:g} s")

    def _refuse_oldest(self) -> None:
        """Else whoever sends no whole request would keep others out, without the token."""
        if len(self._coming) > MOST_CONNECTIONS:
            oldest = next(iter(self._coming))
            del self._coming[oldest]
            oldest.cancel()

    async def _called(self, scope: Scope, body: bytes, reader: asyncio.StreamReader) -> list[Message]:
        left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        answer: list[Message] = []

        async def receive() -> Message:
            if left:
                return left.pop()
            try:
                while await reader.read(1 << 12):
                    pass  # nothing more is served here
            except OSError:
                pass
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            answer.append(message)

        try:
            await self._serve(scope, receive, send)
        except Exception as error:
            logger.exception("cumem-sleep gate: %s failed", scope["path"])
            return refusal(500, f"{scope['path']} failed: {error or type(error).__name__}")
        if not answer:
            raise ConnectionAbortedError("the client has left")
        return answer


def _too_many() -> _Refused:
    return _Refused(503, f"expected at most {MOST_CONNECTIONS} connections at once")


async def _request(connection: Any, reader: asyncio.StreamReader) -> tuple[Any, bytes]:
    import h11

    head, body = None, b""
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(1 << 12))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MOST_BYTES:
                    raise _Refused(413, f"expected a body of at most {MOST_BYTES >> 10} KiB")
            else:
                raise ConnectionAbortedError("the client has left")
    except h11.RemoteProtocolError as error:
        raise _Refused(error.error_status_hint, f"this is not HTTP as expected here: {error}") from None
    return head, body


def _scope(head: Any, vllm: Any) -> Scope:
    path, _, query = bytes(head.target).partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": head.method.decode(),
        "scheme": "http",
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(bytes(name), bytes(value)) for name, value in head.headers],
        "client": None,
        "server": None,
        "app": vllm,
        FROM_LISTENER: True,
    }


def _without_length(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [each for each in headers if each[0].lower() not in (b"content-length", b"connection")]
