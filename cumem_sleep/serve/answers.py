"""What the front answers itself: the models, the fleet's state, an operator's calls, metrics."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from ..http.asgi import Inbox, Message, Scope, Send, deliver, lost, refusal, response, text_response
from ..metrics import CONTENT_TYPE
from .access import Access, PathMeaning
from .fleet import Fleet, NotInTime, OrderRefused, UnknownModel
from .metrics import exposition
from .server_metrics import of_all_servers
from .status import FleetStatus, ModelStatus
from .units import spawn

MOST_CALL_BYTES = 64 << 10
MOST_WATCHERS = 16  # the status is made for each of them
MOST_LOG_LINES = 1000
_FOR_OPERATORS = ("url", "log", "pid", "last_words")


class Answers:
    """Answers for the front itself."""

    def __init__(self, fleet: Fleet, access: Access) -> None:
        self._fleet = fleet
        self._access = access
        self._watchers = 0
        self._scrape = asyncio.Lock()  # each asks all servers: one after the other
        self._calls: set[asyncio.Task[None]] = set()
        self._given: dict[str, Callable[[PathMeaning, Scope, Inbox], Awaitable[list[Message]]]] = {
            "/health": self._health,
            "/version": self._version,
            "/v1/models": self._models,
            "/v1/models/NAME": self._model,
            "/models/NAME/v1/models": self._models,
            "/status": self._status,
            "/metrics": self._metrics,
            "/models/NAME/metrics": self._metrics_of_server,
            "/models/metrics": self._metrics_of_servers,
            "/admin/log": self._log,
            "/admin/drain": self._drain,
            **dict.fromkeys(("/admin/sleep", "/admin/wake", "/admin/stop"), self._call),
        }

    async def answer(self, place: PathMeaning, scope: Scope, inbox: Inbox, send: Send) -> None:
        """Answer one request."""
        if place.name == "/status/live":
            return await self._send_live(scope, inbox, send)
        try:
            answer = await self._given[place.name](place, scope, inbox)
        except UnknownModel as unknown:
            answer = refusal(404, str(unknown))
        except OrderRefused as refused:
            answer = refusal(409, str(refused))
        except NotInTime as late:
            why = f"{late}; {late.details}" if late.details and self._access.is_admin(scope) else str(late)
            answer = refusal(503, why, {"Retry-After": str(max(1, math.ceil(late.retry_after_s)))})
        await deliver(scope, inbox, send, answer)

    # Looks

    async def _health(self, _place: PathMeaning, _scope: Scope, _inbox: Inbox) -> list[Message]:
        return response(200, {"status": "ok"})

    async def _version(self, _place: PathMeaning, _scope: Scope, _inbox: Inbox) -> list[Message]:
        return response(200, {"version": self._fleet.status().version})

    async def _models(self, place: PathMeaning, _scope: Scope, _inbox: Inbox) -> list[Message]:
        name = None if place.model is None else self._fleet.resolve(place.model)
        cards = [_card(model) for model in self._fleet.status().models if name in (None, model.name)]
        return response(200, {"object": "list", "data": cards})

    async def _model(self, place: PathMeaning, _scope: Scope, _inbox: Inbox) -> list[Message]:
        name = self._fleet.resolve(str(place.model))
        return response(200, next(_card(model) for model in self._fleet.status().models if model.name == name))

    async def _status(self, _place: PathMeaning, scope: Scope, _inbox: Inbox) -> list[Message]:
        return response(200, self._view(self._fleet.status(), self._access.is_admin(scope)))

    async def _metrics(self, _place: PathMeaning, _scope: Scope, _inbox: Inbox) -> list[Message]:
        return text_response(exposition(self._fleet), CONTENT_TYPE)

    async def _metrics_of_server(self, place: PathMeaning, _scope: Scope, _inbox: Inbox) -> list[Message]:
        page = await self._fleet.metrics_of(str(place.model))
        return text_response(page, CONTENT_TYPE)  # whatever its server says: none that a browser would run

    async def _metrics_of_servers(self, _place: PathMeaning, _scope: Scope, _inbox: Inbox) -> list[Message]:
        async with self._scrape:
            return text_response(await of_all_servers(self._fleet), CONTENT_TYPE)

    def _view(self, status: FleetStatus, is_operator: bool) -> dict[str, Any]:
        """The status, without what only an operator has to know."""
        view = status.to_json()
        view["operator"] = is_operator
        view["operators"] = self._access.has_admin
        return view if is_operator else self._for_clients(view)

    def _for_clients(self, view: dict[str, Any]) -> dict[str, Any]:
        for model in view["models"]:
            for name in _FOR_OPERATORS:
                model.pop(name)
        return view

    async def _send_live(self, scope: Scope, inbox: Inbox, send: Send) -> None:
        """The status now and after every change, as server-sent events, until the client leaves or the fleet ends."""
        if self._watchers >= MOST_WATCHERS:
            answer = refusal(503, f"{MOST_WATCHERS} clients watch already", {"Retry-After": "10"})
            return await deliver(scope, inbox, send, answer)
        self._watchers += 1
        tasks = (asyncio.ensure_future(self._send_events(scope, send)), asyncio.ensure_future(inbox.until_gone()))
        try:
            await asyncio.wait((*tasks, lost(scope)), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._watchers -= 1
        if not tasks[0].cancelled():
            tasks[0].result()

    async def _send_events(self, scope: Scope, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for status in self._fleet.watch():
            event = b"data: " + json.dumps(self._view(status, self._access.is_admin(scope))).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    # An operator's calls

    async def _log(self, _place: PathMeaning, scope: Scope, _inbox: Inbox) -> list[Message]:
        query = parse_qs(bytes(scope.get("query_string", b"")).decode("latin-1"))
        model, lines = query.get("model", [""])[-1], query.get("lines", ["100"])[-1]
        if not model or not (lines.isdecimal() and len(lines) < 10 and 1 <= int(lines) <= MOST_LOG_LINES):
            return refusal(400, f"expected ?model=NAME&lines=N, with N from 1 to {MOST_LOG_LINES}")
        return response(200, {"model": model, "lines": self._fleet.log_tail(model, int(lines))})

    async def _drain(self, _place: PathMeaning, _scope: Scope, inbox: Inbox) -> list[Message]:
        call = _object_in(await inbox.body(MOST_CALL_BYTES), {"on"})
        if call is None or type(call.get("on", True)) is not bool:
            return refusal(400, 'expected a body such as {"on": true}')
        self._fleet.drain(call.get("on", True))
        return response(200, self._fleet.status().to_json())

    async def _call(self, place: PathMeaning, _scope: Scope, inbox: Inbox) -> list[Message]:
        call = _call_in(await inbox.body(MOST_CALL_BYTES))
        if call is None:
            return refusal(
                400, 'expected a body such as {"model": "NAME"}; /admin/sleep also accepts "level": 1, 2 or 3'
            )
        model, level = call
        begun = {
            "/admin/sleep": lambda: self._fleet.sleep(model, level),
            "/admin/wake": lambda: self._fleet.wake(model),
            "/admin/stop": lambda: self._fleet.stop_model(model),
        }[place.name]()
        task = spawn(self._calls, begun)  # takes effect, whether the client stays or not
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there to hear it
        await asyncio.shield(task)
        name = self._fleet.resolve(model)
        return response(200, next(each for each in self._fleet.status().to_json()["models"] if each["name"] == name))


def _object_in(body: bytes | None, keys: set[str]) -> dict[str, Any] | None:
    """A JSON object with no other keys; None if it is none, or too long."""
    try:
        call = json.loads(body or b"")
    except (ValueError, RecursionError):
        return None
    return call if isinstance(call, dict) and call.keys() <= keys else None


def _call_in(body: bytes | None) -> tuple[str, int | None] | None:
    """The model and the level that a call names; None if it is none."""
    call = _object_in(body, {"model", "level"})
    if call is None or not isinstance(call.get("model"), str):
        return None
    level = call.get("level")
    if level is not None and (type(level) is not int or level not in (1, 2, 3)):  # 1.0 would reach the server so
        return None
    return call["model"], level


def _card(model: ModelStatus) -> dict[str, Any]:
    """A model as /v1/models lists it: OpenAI's fields, and its state."""
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "cumem-sleep",
        "aliases": model.aliases,
        "state": model.phase.value,
        "level": model.level,
        "waiting": model.waiting,
        "running": model.running,
        "error": model.error,
    }
