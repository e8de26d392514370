"""ASGI helpers of the gate and the front: canonical paths, reading a request's messages ahead, waiting, and answers."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

READ_AHEAD_BYTES = 16 << 20
MERGED_BYTES = 64 << 10  # messages of fewer are merged: one of a single byte takes hundreds
DRAIN_BYTES = 64 << 20
DRAIN_WITHIN_S = 5.0
LOST = "cumem_sleep.lost"  # in a scope: what `lost` returns


class ClientGone(Exception):
    """The client left while its request was held."""


class TooMuchHeld(Exception):
    """The bodies of held requests have more bytes than allowed."""


@dataclass
class HeldRequests:
    """How much the held requests take.

    Attributes:
        most_bytes: the most bytes that are allowed.
        requests: how many are held.
        nbytes: bytes of their bodies read ahead.
    """

    most_bytes: int
    requests: int = 0
    nbytes: int = 0


class Inbox:
    """A request's messages, read ahead while it is held, so that a client that leaves is noticed; replayed later.

    Reading is never cancelled, since a server may lose the message that it was about to deliver: a reader that stops
    waiting leaves the pending read to the next reader.

    Attributes:
        kept_bytes: of what was read, those that its reader still keeps, and has counted by `keep`.
    """

    def __init__(self, receive: Receive, held: HeldRequests) -> None:
        self._receive = receive
        self._held = held
        self._early: deque[Message] = deque()
        self._asked: asyncio.Future[Message] | None = None
        self._nbytes = self.kept_bytes = 0
        self._news = asyncio.Event()
        self.complete = self.gone = False

    async def __call__(self) -> Message:
        """The next message: ASGI's `receive`."""
        if not self._early:
            return await self._read()
        message = self._early.popleft()
        self._count(-len(message.get("body", b"")))
        return message

    async def body(self, most_bytes: int) -> bytes | None:
        """The whole body, which can still be read afterwards; None if it has more than `most_bytes`.

        Raises:
            ClientGone: the client left before sending all of it.
        """
        while not self.complete:
            if self._nbytes > most_bytes:
                return None
            await self._read_ahead()
            if self.gone:
                raise ClientGone
        return b"".join(message.get("body", b"") for message in self._early) if self._nbytes <= most_bytes else None

    async def until_gone_or_too_much(self) -> None:
        """Returns when the client is gone.

        Raises:
            TooMuchHeld: its body exceeded the limit.
        """
        while not self.gone:
            if self._held.nbytes > self._held.most_bytes:
                self._forget()  # at once, or others would be refused for what this one holds
                raise TooMuchHeld
            if self._nbytes >= READ_AHEAD_BYTES:
                await asyncio.Event().wait()
            await self._read_ahead()

    async def until_gone(self) -> None:
        """Returns when the client is gone; never, if the client sent more than may be held."""
        while not self.gone:
            if self._nbytes >= READ_AHEAD_BYTES:
                await asyncio.Event().wait()
            await self._read_ahead()

    async def until_complete(self) -> None:
        """Returns when `until_gone_or_too_much` has read the whole body ahead, or will read no more of it."""
        while not self.complete and self._nbytes < READ_AHEAD_BYTES:
            self._news.clear()
            await self._news.wait()

    async def drain(self) -> None:
        """Read what the client still sends, up to a limit: a client that writes all of it first sees its answer."""
        self._forget()
        reading = asyncio.ensure_future(self._discard())
        await asyncio.wait({reading}, timeout=DRAIN_WITHIN_S)
        reading.cancel()

    def keep(self, nbytes: int) -> None:
        """Count more bytes that the reader keeps."""
        self.kept_bytes += nbytes
        self._held.nbytes += nbytes

    def release(self) -> None:
        """The reader keeps none of them any more."""
        self.keep(-self.kept_bytes)

    def close(self) -> None:
        """Stop reading: nobody needs more messages."""
        self._count(-self._nbytes)
        if self._asked is not None:
            self._asked.cancel()

    async def _discard(self) -> None:
        nbytes = 0
        while not (self.complete or self.gone) and nbytes < DRAIN_BYTES:
            nbytes += len((await self._read()).get("body", b""))

    async def _read_ahead(self) -> None:
        message = await self._read()
        last = self._early[-1] if self._early else {}
        if last.get("type") == message["type"] == "http.request" and len(last.get("body", b"")) < MERGED_BYTES:
            last["body"] = last.get("body", b"") + message.get("body", b"")
            last["more_body"] = message.get("more_body", False)
        else:
            self._early.append(message)
        self._count(len(message.get("body", b"")))
        self._news.set()

    async def _read(self) -> Message:
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._receive())
        message = await asyncio.shield(self._asked)
        self._asked = None
        if message["type"] == "http.request":
            self.complete = not message.get("more_body", False)
        elif message["type"].endswith(".disconnect"):
            self.gone = True
        return message

    def _forget(self) -> None:
        self._early.clear()
        self._count(-self._nbytes)
        self.release()

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._held.nbytes += nbytes


T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What `work` returns, or its end. `asyncio.wait_for` loses a cancellation that comes as `work` ends, before 3.12.

    Raises:
        asyncio.TimeoutError: it took longer.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there to hear it
    try:
        if not (await asyncio.wait((task,), timeout=seconds))[0]:
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


# Paths, tokens and headers


def lost(scope: Scope) -> asyncio.Future[None]:
    """Done when a request's connection is lost, which `receive` says only to those who read. The front's listener's."""
    future: asyncio.Future[None] = scope[LOST]
    return future


def not_canonical(scope: Scope) -> str:
    """What is wrong with the path of a request, "" if it can only be read in one way."""
    path, raw = str(scope["path"]), bytes(scope.get("raw_path") or b"").lower()
    wrong = {
        "does not begin with a slash": not path.startswith("/"),
        "has an empty segment": "//" in path,
        "has an encoded slash or a backslash": "\\" in path or b"%2f" in raw or b"%5c" in raw,
        "has unprintable characters": not path.isprintable() or "\ufffd" in path,
        "has a segment of dots": any(segment in (".", "..") for segment in path.split("/")),
    }
    return next((what for what, is_so in wrong.items() if is_so), "")


def bearer(scope: Scope) -> list[bytes]:
    """The request's bearer tokens: one or none."""
    scheme, _, token = header(scope, b"authorization").partition(" ")
    return [token.encode("latin-1")] if scheme.lower() == "bearer" else []


def has_bearer_token(scope: Scope, keys: list[str]) -> bool:
    """Whether the request has one of the keys as its bearer token."""
    return any(secrets.compare_digest(token, key.encode()) for token in bearer(scope) for key in keys)


def header(scope: Scope, name: bytes) -> str:
    """A header's first value, "" if there is none."""
    return next((value.decode("latin-1") for key, value in scope.get("headers", ()) if key.lower() == name), "")


# Answers

_TYPES = {
    **{400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 405: "MethodNotAllowedError"},
    **{409: "ConflictError", 413: "BadRequestError", 415: "BadRequestError", 500: "InternalServerError"},
    **{501: "NotImplementedError", 502: "BadGatewayError"},
}


def status_of(answer: list[Message]) -> int:
    """The status of a complete answer."""
    return next((int(message["status"]) for message in answer if message["type"] == "http.response.start"), 500)


def error(code: int, message: str) -> dict[str, Any]:
    """An error in OpenAI's format, with vLLM's names for the types."""
    kind = _TYPES.get(code, "ServiceUnavailableError")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def response(code: int, body: dict[str, Any], headers: MutableMapping[str, str] | None = None) -> list[Message]:
    """A complete JSON answer."""
    return _complete(code, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})


def text_response(text: str, content_type: str) -> list[Message]:
    """A complete answer of text."""
    return _complete(200, text, {"Content-Type": content_type})


def _complete(code: int, text: str, headers: Mapping[str, str]) -> list[Message]:
    content = text.encode()
    lines = {"Content-Length": str(len(content)), **headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in lines.items()]
    return [
        {"type": "http.response.start", "status": code, "headers": raw},
        {"type": "http.response.body", "body": content},
    ]


def refusal(code: int, message: str, headers: MutableMapping[str, str] | None = None) -> list[Message]:
    """A complete answer with an error."""
    return response(code, error(code, message), headers)


def json_object(answer: list[Message]) -> dict[str, Any]:
    """The object that a complete answer is; empty if it is none."""
    try:
        found = json.loads(b"".join(message.get("body", b"") for message in answer))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def deliver(scope: Scope, inbox: Inbox, send: Send, answer: list[Message]) -> None:
    """Send an answer even if the body was not read; without this a server would reset the connection."""
    if not (header(scope, b"content-length").strip("0 ") or header(scope, b"transfer-encoding")):
        for message in answer:
            await send(message)
        return
    for message in answer:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)
    await inbox.drain()
    await send({"type": "http.response.body", "body": b""})


async def whole_answer(app: App, scope: Scope, receive: Receive) -> list[Message]:
    """The app's complete answer, not yet sent."""
    messages: list[Message] = []

    async def keep(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, keep)
    return messages


async def answer_websocket(scope: Scope, inbox: Inbox, send: Send, answer: list[Message]) -> None:
    """Answer a websocket's request as another, where the server can; with 403 otherwise."""
    await inbox()  # websocket.connect
    if "websocket.http.response" not in scope.get("extensions", {}):
        return await send({"type": "websocket.close"})
    for message in answer:
        await send({**message, "type": f"websocket.{message['type']}"})


async def refuse_websocket(inbox: Inbox, send: Send, code: int, reason: str) -> None:
    """Close a websocket before its session begins."""
    await inbox()  # websocket.connect
    await send({"type": "websocket.accept"})  # without this, a close would reach the client as a bare 403
    await send({"type": "websocket.close", "code": code, "reason": reason[:120]})
