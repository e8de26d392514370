"""One request on its way to a model's server, and the answer on its way back.

Three things can end it: its end, a client that leaves, and a lease that is revoked. Each of them ends the request at
the server, and gives the lease back at once, however slowly the client takes what it was sent.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..http.asgi import (
    MERGED_BYTES,
    ClientGone,
    HeldRequests,
    Inbox,
    Message,
    Scope,
    Send,
    TooMuchHeld,
    deliver,
    error,
    header,
    lost,
    refusal,
    within,
)
from .access import Access, PathMeaning
from .body import BadBody, ModelFinder, finder_for, renamed
from .fleet import Fleet, ModelLease, NotInTime, UnknownModel
from .upstream import BrokenOff, Connection, Connections, Headers, Unreachable, passed_on, request_head

if TYPE_CHECKING:
    from opentelemetry.trace import Span

MOST_TRIES = 3  # of a request of which nothing was sent
SETTLED_BYTES = 1 << 20  # of a body: once these are read its model counts, and must not be named anew
LAST_WORDS_WITHIN_S = 1.0
TOO_MUCH = "waiting requests already hold too many bytes: try again later"
_LONGEST_NAME = 200  # that is repeated in an error
BEGUN = b"x-cumem-sleep-begun"  # `no` on an error of the front: no server has seen the request, send it elsewhere
PATIENCE = b"x-cumem-sleep-patience"  # of a request: after how many seconds to turn it away, if its model is not awake
_NOT_BEGUN = {BEGUN.decode(): "no"}
_NOT_FOR_SERVERS = (b"expect", b"content-length", PATIENCE)
_WITHOUT_BODY = (204, 304)


class RequestRefused(Exception):
    """The front answers with an error itself."""

    def __init__(self, code: int, why: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(why)
        self.answer = refusal(code, why, headers)


@dataclass
class Ways:
    """What all exchanges share.

    Attributes:
        most_head_bytes: of a body, read until it has named its model.
    """

    fleet: Fleet
    access: Access
    held: HeldRequests
    connections: Connections
    most_head_bytes: int


class Exchange:
    """One request for a model."""

    def __init__(self, ways: Ways, place: PathMeaning, scope: Scope, inbox: Inbox, send: Send) -> None:
        self._ways = ways
        self._place = place
        self._scope = scope
        self._inbox = inbox
        self._send = send
        self._finder: ModelFinder | None = None
        self._pieces: list[bytes] = []  # of the body, read to find its model
        self._has_all = False  # of the body, in these
        self._connected: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._answering: asyncio.Task[list[Message] | None] | None = None
        self._revoked, self._code_if_revoked = "", 503
        self._started = False  # the answer
        self._takes_events = False
        self._span: Span | None = None

    async def run(self) -> None:
        """Answer it.

        Raises:
            ClientGone.
        """
        try:
            name = await self._model()
            if (tracing := self._ways.fleet.tracing) is not None:
                self._span = tracing.request(name[:_LONGEST_NAME], self._scope["headers"])
            answer = await self._until_it_ends(name)
        except RequestRefused as refused:
            answer = refused.answer
        except TooMuchHeld:
            answer = refusal(503, TOO_MUCH, {"Retry-After": "1"})
        finally:
            self._release()
            if self._span is not None:
                self._span.end()
        if answer is not None:
            await deliver(self._scope, self._inbox, self._send, answer)

    # Which model

    async def _model(self) -> str:
        """The model that the request names, or the only one.

        Raises:
            RequestRefused, ClientGone.
        """
        if self._place.has_body:
            try:
                name = await self._name_in_body(finder_for(header(self._scope, b"content-type")))
            except BadBody as bad:
                raise RequestRefused(400, str(bad)) from None
        else:
            name = self._place.model
        names = list(self._ways.fleet.config.models)
        if name is None and len(names) != 1:
            path = f"/models/NAME{self._place.target}"
            raise RequestRefused(400, f"`model` is missing: name one of {', '.join(names)}, or ask {path}")
        return names[0] if name is None else name

    async def _name_in_body(self, finder: ModelFinder) -> str | None:
        """The last model that the body names; of a long body, which is passed on while it comes, the only one."""
        held = self._ways.held
        self._finder = finder
        while not (finder.ended or self._inbox.complete):
            message = await self._inbox()
            if self._inbox.gone:
                raise ClientGone
            body = message.get("body", b"")
            if self._pieces and len(self._pieces[-1]) < MERGED_BYTES:
                self._pieces[-1] += body
            else:
                self._pieces.append(body)
            self._inbox.keep(len(body))
            finder.look(body)
            if finder.name is not None and self._inbox.kept_bytes >= SETTLED_BYTES and not self._inbox.complete:
                return finder.name
            if finder.name is None and self._inbox.kept_bytes > self._ways.most_head_bytes:
                raise RequestRefused(413, self._too_late(f"more than {self._ways.most_head_bytes} bytes"))
            if held.nbytes > held.most_bytes:
                self._release()  # at once, or others would be refused for what this one holds
                raise TooMuchHeld
        self._has_all = self._inbox.complete
        if not self._inbox.kept_bytes:
            raise BadBody("the body is empty")
        finder.finish()
        return finder.name

    def _too_late(self, what: str) -> str:
        path = f"/models/NAME{self._place.target}"
        return f"`model` comes after {what}: put it first, or ask {path}, where the body may have any size"

    # What ends it

    async def _until_it_ends(self, name: str) -> list[Message] | None:
        """Have it answered by a server; returns an error that is still to be sent.

        Raises:
            TooMuchHeld, ClientGone.
        """
        self._answering = asyncio.ensure_future(self._answer(name))
        tasks = (self._answering, asyncio.ensure_future(self._follow_client()))
        try:
            await asyncio.wait((*tasks, lost(self._scope)), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # two readers of one request would steal each other's messages
        failure = None if tasks[1].cancelled() else tasks[1].exception()
        if not tasks[0].cancelled():
            return tasks[0].result()
        if self._revoked:
            return await self._end_early(self._code_if_revoked, self._revoked)
        if isinstance(failure, BadBody):
            return await self._end_early(400, str(failure))
        raise failure or ClientGone

    def _revoke(self, revoked: asyncio.Future[str]) -> None:
        self._revoked = revoked.result()
        if self._answering is not None:
            self._answering.cancel()

    async def _end_early(self, code: int, why: str) -> list[Message] | None:
        """An error instead of the rest of the answer; what has begun and can bear no error is broken off."""
        if not self._started:
            return refusal(code, why, {"Retry-After": "1"} if code == 503 else None)
        if self._takes_events:
            event = b"\n\ndata: " + json.dumps(error(code, why)).encode() + b"\n\n"
            with suppress(asyncio.TimeoutError):  # the client takes no more
                last_words = self._send({"type": "http.response.body", "body": event, "more_body": True})
                await within(LAST_WORDS_WITHIN_S, last_words)
        return None

    # The way to the server

    async def _follow_client(self) -> None:
        """Read what the client sends: ahead while the request waits, then for the server. Ends when it is gone.

        Raises:
            TooMuchHeld, BadBody.
        """
        if not self._has_all:
            ahead = asyncio.ensure_future(self._inbox.until_gone_or_too_much())
            try:
                await asyncio.wait((ahead, self._connected), return_when=asyncio.FIRST_COMPLETED)
                if ahead.done():
                    return ahead.result()
            finally:
                ahead.cancel()
                await asyncio.wait((ahead,))
            await self._send_rest(self._connected.result())
        await self._inbox.until_gone()
        return None

    async def _send_rest(self, connection: Connection) -> None:
        finder, more = self._finder, True
        named = 0 if finder is None else finder.named
        while more:
            message = await self._inbox()
            if self._inbox.gone and message["type"] != "http.request":
                return
            more, body = bool(message.get("more_body", False)), message.get("body", b"")
            if finder is not None and not finder.ended:
                finder.look(body)
                if finder.named > named:  # the server would take that one: it must not get the whole body
                    raise BadBody(f"`model` is named again after {SETTLED_BYTES} bytes")
            await connection.write(b"".join(self._framed((body,), more=more)), more=more)

    async def _answer(self, name: str) -> list[Message] | None:
        """Lease the model and send the request there; returns an error that is still to be sent."""
        fleet, why = self._ways.fleet, ""
        try:
            patience_s = self._patience_s()
            for number in range(MOST_TRIES):
                if number:  # a dead server is awake until that is found out, and a moment later there is a new one
                    await fleet.until_looked_at(name)
                async with fleet.lease(name, self._span, patience_s) as lease:
                    try:
                        await self._ask(lease)
                        return None
                    except Unreachable as unreachable:
                        why = f"the model's server cannot be reached: {unreachable}"
                        if not lease.revoked.done():
                            fleet.report_failure(lease, why)
                    except BrokenOff as broken:
                        why = f"the model's server broke off: {broken}"
                        fleet.report_failure(lease, why)
                        return await self._end_early(502, why)
        except UnknownModel:
            return self._unknown(name)
        except NotInTime as late:
            return refusal(503, str(late), {"Retry-After": str(max(1, math.ceil(late.retry_after_s))), **_NOT_BEGUN})
        return refusal(502, why, _NOT_BEGUN)

    def _unknown(self, name: str) -> list[Message]:
        names = ", ".join(self._ways.fleet.config.models)
        return refusal(404, f"the model {name[:_LONGEST_NAME]!r} does not exist; there are: {names}")

    def _patience_s(self) -> float:
        text = header(self._scope, PATIENCE)
        if not text:
            return math.inf
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
            raise RequestRefused(400, f"{PATIENCE.decode()} {text[:50]!r}: expected seconds, such as 1.5")
        return float(text)

    async def _ask(self, lease: ModelLease) -> None:
        """Send it to the server of a lease, and pass the answer on.

        Raises:
            Unreachable: also where the lease was revoked before there was a connection; BrokenOff.
        """
        head, body = self._request(lease)
        connections = self._ways.connections
        connection = await connections.take(lease.server)
        try:
            if lease.revoked.done():  # its server has died, say, and nothing was sent
                raise Unreachable(lease.revoked.result())
            lease.revoked.add_done_callback(self._revoke)
            connection.send((head, *self._framed(body, more=not self._has_all)), more=not self._has_all)
            if not self._has_all:
                self._connected.set_result(connection)
            await connection.head()
            await self._look_at_head(connection)
            self._release()
            await self._pass_answer(connection, lease)
        finally:
            lease.revoked.remove_done_callback(self._revoke)
            connections.give_back(lease.server, connection)

    async def _look_at_head(self, connection: Connection) -> None:
        """Of an answer, before anything of it is passed on."""

    def _request(self, lease: ModelLease) -> tuple[bytes, tuple[bytes, ...]]:
        """The request's head and what was read of its body, with the name that the server knows its model by."""
        finder, headers = self._finder, passed_on(self._scope["headers"])
        body, delta = tuple(self._pieces), 0
        if finder is not None and finder.name is not None:
            name = _name_for(finder.name, lease)
            if name != finder.name:
                body = renamed(body, finder.span, finder.written(name))
                delta = sum(map(len, body)) - self._inbox.kept_bytes
        length = header(self._scope, b"content-length")
        dropped = (
            *_NOT_FOR_SERVERS,
            *((b"authorization", b"x-api-key") if self._ways.access.is_ours(self._scope) else ()),
        )
        kept = [each for each in headers if each[0] not in dropped]
        if self._span is not None and (tracing := self._ways.fleet.tracing) is not None:
            continued = tracing.headers(self._span)
            kept = [*(each for each in kept if each[0] not in dict(continued)), *continued]
        if self._is_chunked():
            kept.append((b"transfer-encoding", b"chunked"))
        elif length:
            kept.append((b"content-length", str(int(length) + delta).encode()))
        target, query = self._place.target.encode(), bytes(self._scope.get("query_string", b""))
        target += b"?" + query if query else b""
        return request_head(lease.server, str(self._scope["method"]), target, kept), body

    def _is_chunked(self) -> bool:
        return bool(header(self._scope, b"transfer-encoding"))

    def _framed(self, pieces: tuple[bytes, ...], *, more: bool) -> tuple[bytes, ...]:
        """A part of the body as it goes over the wire. Nothing is copied: that of a long body would stop the loop."""
        if not self._is_chunked():
            return pieces
        if nbytes := sum(map(len, pieces)):
            pieces = (b"%x\r\n" % nbytes, *pieces, b"\r\n")
        return pieces if more else (*pieces, b"0\r\n\r\n")

    # The way back

    async def _pass_answer(self, connection: Connection, lease: ModelLease) -> None:
        """Send on what the server answers, piece by piece, as fast as the client takes it. Raises: BrokenOff."""
        headers: Headers = [each for each in passed_on(connection.headers) if each[0] != BEGUN]  # no server says so
        if connection.status in _WITHOUT_BODY:  # a length, which a 304 may name, would be waited for
            headers = [each for each in headers if each[0] != b"content-length"]
        known = dict(headers)
        is_plain = not known.keys() & {b"content-length", b"content-encoding"}
        self._takes_events = is_plain and known.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        self._started = True
        if self._span is not None:
            self._span.set_attribute("http.response.status_code", connection.status)
        await self._send({"type": "http.response.start", "status": connection.status, "headers": headers})
        more, is_first = True, self._takes_events and connection.status == 200
        while more:
            piece = await connection.read()
            more = not connection.is_read
            if is_first and piece:
                is_first = False
                self._note_first_token(lease)
            await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    def _note_first_token(self, lease: ModelLease) -> None:
        fleet, now = self._ways.fleet, time.monotonic()
        fleet.counters.first_token[lease.model, lease.found].observe(now - lease.arrived)
        if fleet.tracing is not None:
            fleet.tracing.span("first token", self._span, lease.granted, now)

    def _release(self) -> None:
        """The body is no longer held."""
        self._inbox.release()
        self._pieces = []


def _name_for(asked: str, lease: ModelLease) -> str:
    """The name in a request by which its server knows the model; an alias may be an adapter of its own there."""
    if asked in lease.names:
        return asked
    return lease.model if lease.model in lease.names or not lease.names else lease.names[0]
