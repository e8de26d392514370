"""The front: one OpenAI-compatible port before all models. An ASGI app that finds out who asks for what.

What a model's server answers, `exchange` passes on; what the front answers itself is in `answers` and `page`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ..http.asgi import (
    ClientGone,
    HeldRequests,
    Inbox,
    Message,
    Receive,
    Scope,
    Send,
    bearer,
    deliver,
    not_canonical,
    refusal,
    refuse_websocket,
)
from . import page
from .access import Access, Need, PathMeaning, comes_from_elsewhere, place_of, query_is_plain
from .answers import Answers
from .exchange import Exchange, Ways
from .fleet import Fleet
from .upstream import IDLE_S, Connections

_REALTIME = "/v1/realtime"


class Front:
    """All that clients and people see of a fleet: ASGI."""

    def __init__(self, fleet: Fleet, exchange: type[Exchange] = Exchange, answers: type[Answers] = Answers) -> None:
        """`exchange`, `answers`: those of an ingress are their own."""
        settings = fleet.config.front
        self._access = Access(settings)
        held = HeldRequests(settings.max_held)
        self._ways = Ways(fleet, self._access, held, Connections(), settings.max_head)
        self._exchange, self._answers = exchange, answers(fleet, self._access)
        self._sweeper: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: ASGI."""
        if scope["type"] not in ("http", "websocket"):
            return
        inbox = Inbox(receive, self._ways.held)
        try:
            if scope["type"] == "websocket":
                return await refuse_websocket(inbox, send, 1008, "websockets are not served here")
            place, answer = self._look(scope)
            if place is None:
                return await deliver(scope, inbox, send, answer)
            await self._answer(place, scope, inbox, send)
        except ClientGone:
            pass
        finally:
            inbox.close()

    async def close(self) -> None:
        """Let go of the servers."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        self._ways.connections.close_idle(0)

    def _look(self, scope: Scope) -> tuple[PathMeaning | None, list[Message]]:
        """What is asked for, or why it is not had."""
        if fault := not_canonical(scope):
            return None, refusal(400, f"the path {fault}")
        if not query_is_plain(scope):
            return None, refusal(400, "the query has characters that must be percent-encoded")
        if (host_fault := self._access.host_fault(scope)) is not None:
            return None, refusal(*host_fault)
        place = place_of(str(scope["path"]))
        need = Need.KEY if place is None else place.need
        is_link = need is Need.NOTHING and scope["method"] in ("GET", "HEAD")
        if not is_link and comes_from_elsewhere(scope, place):
            return None, refusal(403, "this comes from a page of another origin")
        if need is Need.ADMIN and not self._access.has_admin:
            return None, refusal(403, "there is no admin token: set `admin_token` in models.yaml to use this")
        may = {Need.ADMIN: self._access.is_admin, Need.KEY: self._access.has_key}.get(need)
        if may is not None and not may(scope):
            why = f"the token is wrong: it is not {need.value}" if bearer(scope) else f"{need.value} is needed"
            return None, refusal(401, why, {"WWW-Authenticate": "Bearer"})
        if place is None:
            return None, refusal(404, f"there is no path {str(scope['path'])[:200]!r} here")
        if scope["method"] not in place.methods:
            allowed = ", ".join(place.methods)
            return None, refusal(405, f"method {scope['method']!r}: this path expects {allowed}", {"Allow": allowed})
        if place.name == _REALTIME:
            return None, refusal(501, "websockets are not served here: ask the model's own server")
        return place, []

    async def _answer(self, place: PathMeaning, scope: Scope, inbox: Inbox, send: Send) -> None:
        if not place.name:
            if self._sweeper is None:
                self._sweeper = asyncio.create_task(self._sweep())
            await self._exchange(self._ways, place, scope, inbox, send).run()
        elif place.need is Need.NOTHING and place.name != "/health":
            await deliver(scope, inbox, send, page.file(place.name, scope))
        else:
            await self._answers.answer(place, scope, inbox, send)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S)
            self._ways.connections.close_idle()
