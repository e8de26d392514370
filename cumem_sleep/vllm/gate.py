"""The HTTP gate: an ASGI middleware for `vllm serve` that answers for a sleeping model what would hang or crash.

vLLM adds it last, so it is the outermost middleware: before CORS and before the check of API keys.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from . import metrics
from .gate_settings import GateSettings
from .sleeping_model import Phase, SleepingModel

logger = logging.getLogger("cumem_sleep")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEALTH = ("/health", "/ping")
WAKES = ("/wake_up", "/wake")
WAKE_UP = {"path": "/wake_up", "raw_path": b"/wake_up"}  # for ASGI, as if no proxy had added a root path
CHANGES = ("/sleep", *WAKES, "/release_kv_cache_memory", "/reload_weights", "/resume")
# What touches weights crashes the GPU while they sleep.
TOUCHES = (
    *("/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update"),
    "/weight_checker",
)
TOUCHING_METHODS = ("reload_weights", "update_weights")
LOADS = ("/update_weights", "/finish_weight_update")
# Worker methods that only look, or prepare; any other may be a trainer's way to write weights.
LOADS_NOTHING = (
    *("get_", "is_", "has_", "list_", "check_", "compute_", "determine_", "supported_", "set_", "init_", "start_"),
    *("reset_", "save_", "profile", "execute_", "sleep", "wake_up", "discard", "cumem_sleep_"),
)
WEIGHTS_ASLEEP = "weights are asleep: POST /wake_up?tags=weights first"
GUARDED = {
    *CHANGES,
    *TOUCHES,
    *("/pause", "/collective_rpc", "/update_weight_version"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
}
# Every other POST is held to run the model, also those of a vLLM to come, except what is known not to touch it.
HARMLESS = {
    *("/abort_requests", "/tokenize", "/detokenize", "/start_profile", "/stop_profile", "/is_scaling_elastic_ep"),
    "/fault_tolerance/apply",
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/v1/messages/count_tokens"),
}

HEALTH_WITHIN_S = 1.0
POLL_S = 0.5  # the engine may die; with several API servers another one may wake the model
READ_AHEAD_BYTES = 16 << 20


class Refused(Exception):
    """A request is answered with 503.

    Attributes:
        retry_after_s: for the client.
        outcome: for the metrics.
    """

    def __init__(self, message: str, retry_after_s: float, outcome: str) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.outcome = outcome


class ClientGone(Exception):
    """The client left while its request was held."""


class Inbox:
    """A request's messages, read ahead while it is held: a client that leaves is noticed. Later they are replayed.

    Reading is never cancelled, since a server may lose the message that it was about to give: who stops waiting leaves
    the question to the next reader.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._early: deque[Message] = deque()
        self._asked: asyncio.Future[Message] | None = None

    async def __call__(self) -> Message:
        """The next message: ASGI's `receive`."""
        return self._early.popleft() if self._early else await self._read()

    async def body(self) -> bytes:
        """The whole body, which stays to be read."""
        body, more = b"", True
        while more:
            message = await self._read()
            self._early.append(message)
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return body

    async def until_gone(self) -> None:
        """Returns when the client is gone; for ever, if so much came that it would fill memory."""
        nbytes = 0
        while nbytes < READ_AHEAD_BYTES:
            message = await self._read()
            self._early.append(message)
            nbytes += len(message.get("body", b""))
            if message["type"].endswith(".disconnect"):
                return
        await asyncio.Event().wait()

    def close(self) -> None:
        """Nobody will read any more."""
        if self._asked is not None:
            self._asked.cancel()

    async def _read(self) -> Message:
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._receive())
        message = await asyncio.shield(self._asked)
        self._asked = None
        return message


class SleepGate:
    """`vllm serve … --middleware cumem_sleep.vllm.SleepGate`; settings: see `GateSettings`.

    Raises:
        InvalidArgument: a variable of the environment has a bad value.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._settings = settings = GateSettings.from_environment()
        self._status = metrics.WorkerStatus()
        self._outcomes: Counter[str] = Counter()
        self._running, self._idle = 0, asyncio.Event()
        self._dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE", "0").strip() not in ("", "0")
        self.model = SleepingModel(settings, self._status)
        self._is_scraped = metrics.register(self._status, self._outcomes)
        hold = "" if settings.on_request == "reject" else f" (at most {settings.request_deadline_s:g} s)"
        logger.info(
            "cumem-sleep gate: requests to a sleeping model: %s%s; /health then: %d; admin token: %s; /sleep and its"
            " kin: %s",
            settings.on_request,
            hold,
            self._health_code(),
            "needed" if settings.admin_token else "none",
            "open (VLLM_SERVER_DEV_MODE)" if self._dev_mode else "closed (VLLM_SERVER_DEV_MODE=1 opens them)",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Decide about one request: ASGI."""
        engine = getattr(scope["app"].state, "engine_client", None) if "app" in scope else None
        if scope["type"] not in ("http", "websocket") or engine is None:  # a server that only renders has no engine
            return await self._app(scope, receive, send)
        if self.model.engine is not engine:
            self.model.engine, self.model.several_servers = engine, _several_servers(scope["app"].state)
        path, method = _path(scope), scope.get("method", "WEBSOCKET")
        if method == "POST" and path in GUARDED:
            return await self._control(path, scope, receive, send)
        if method in ("GET", "POST") and path in HEALTH:
            return await self._health(scope, receive, send)
        if method == "GET" and path == "/metrics" and self._is_scraped and self.model.phase is not Phase.CHANGING:
            await self._status.fresh(engine)
        if method in ("POST", "WEBSOCKET") and not _is_harmless(path):
            return await self._infer(path, scope, receive, send)
        await self._app(scope, receive, send)

    # Requests that run the model

    async def _infer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        inbox = Inbox(receive)
        try:
            await self._infer_from(path, scope, inbox, send)
        finally:
            inbox.close()

    async def _infer_from(self, path: str, scope: Scope, inbox: Inbox, send: Send) -> None:
        model, outcome = self.model, ""
        try:
            await model.look()
            while not model.serves and (_has_api_key(scope) or not path.startswith("/v1")):  # else vLLM answers 401
                outcome = await self._hold(scope, inbox)  # a sleep may begin again before it returns
        except ClientGone:
            return
        except Refused as refused:
            self._outcomes[refused.outcome] += 1
            await _refuse(scope, inbox, send, refused)
            return
        except Exception as error:  # vLLM says best what is wrong with its engine
            logger.debug("the engine does not say whether it sleeps: %s", error)
        if outcome:
            self._outcomes[outcome] += 1
        self._running += 1
        try:
            await self._app(scope, inbox, send)
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    async def _hold(self, scope: Scope, inbox: Inbox) -> str:
        """Returns what became of the request, as soon as the model serves.

        Raises:
            Refused: by the policy, at the deadline, or because waking failed.
            ClientGone: nobody waits for the answer.
            Exception: of the engine, which is dead.
        """
        model, settings, policy = self.model, self._settings, self._settings.on_request
        deadline = model.clock() + settings.request_deadline_s
        gone = asyncio.ensure_future(inbox.until_gone())
        try:
            while not model.serves:
                left_s = deadline - model.clock()
                if policy == "reject" or not _has_api_key(scope):  # nobody unknown wakes it, or takes up memory
                    raise Refused(model.why_not(), settings.retry_after_s, "rejected")
                if policy == "wake":
                    self._raise_failure()
                if left_s <= 0:
                    raise Refused(model.why_not(), settings.retry_after_s, "timed_out")
                wakes = policy == "wake" and model.may_be_woken
                step: Awaitable[Any] = asyncio.shield(model.wake()) if wakes else model.changed.wait()
                await _first(step, gone, min(left_s, POLL_S))
                if gone.done():
                    raise ClientGone
                await model.engine.check_health()  # a server that is being shut down waits for those it holds
                await model.look()
        finally:
            gone.cancel()
            await asyncio.wait({gone})  # two readers of one request would steal each other's messages
        return "woke" if policy == "wake" else "waited"

    def _raise_failure(self) -> None:
        if self.model.failure is not None:
            cause, until = self.model.failure
            if (left_s := until - self.model.clock()) > 0:
                raise Refused(f"the model is asleep, and waking it failed: {cause}", left_s, "rejected")

    # What changes the model's sleep

    async def _control(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        token, model = self._settings.admin_token, self.model
        if token and not any(secrets.compare_digest(given, token.encode()) for given in _bearer(scope)):
            return await _reply(send, 401, _error(401, "an admin token is needed"), {"WWW-Authenticate": "Bearer"})
        if not self._dev_mode:  # vLLM has none of these paths then
            return await self._app(scope, receive, send)
        if path in CHANGES or path in TOUCHES or path == "/collective_rpc":
            await model.changes_end()
            try:
                await model.look()
            except Exception as error:
                logger.debug("the engine does not say whether it sleeps: %s", error)
        if path in CHANGES:
            answer = await self._change(path, scope, receive)
        elif path in TOUCHES and "weights" in model.asleep:
            answer = _conflict(WEIGHTS_ASLEEP)
        else:
            inbox = Inbox(receive)
            method = await _rpc_method(inbox) if path == "/collective_rpc" else ""
            if method in TOUCHING_METHODS and "weights" in model.asleep:
                answer = _conflict(WEIGHTS_ASLEEP)
            else:
                answer = await _answer(self._app, scope, inbox)
            loads = method and not method.startswith(LOADS_NOTHING)
            if _status(answer) < 300 and (path in LOADS or loads):
                model.loaded()
            elif _status(answer) < 300 and path == "/pause":
                model.paused = True
        for message in answer:
            await send(message)

    async def _change(self, path: str, scope: Scope, receive: Receive) -> list[Message]:
        """One of CHANGES. Its answer is sent when the state is known: the next request may follow at once."""
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        model = self.model
        async with model.change(disturbs=path not in (*WAKES, "/resume")):
            if path == "/reload_weights":
                return await self._reload()
            if path == "/resume" and model.asleep:
                return _conflict("memory is asleep: POST /wake_up instead, which resumes, too")
            if path == "/sleep" and not model.has_sleep_modes:  # vLLM pulls the memory from under running requests
                while self._running:
                    self._idle.clear()
                    await self._idle.wait()
            await model.mend()
            code = 500
            try:
                answer = await _answer(self._app, {**scope, **WAKE_UP} if path in WAKES else scope, receive)
                code = _status(answer)
            finally:
                if path == "/sleep" and code >= 500:
                    await model.slept_badly()
            if code < 300:
                if path == "/sleep":
                    model.slept(int(float(query.get("level", ["1"])[-1])))  # vLLM 0.33 takes "1.0", too
                elif path in WAKES:
                    model.woke(query.get("tags", ()))
                elif path == "/release_kv_cache_memory":
                    model.released()
            return answer

    async def _reload(self) -> list[Message]:
        if "weights" in self.model.asleep:
            return _conflict(WEIGHTS_ASLEEP)
        try:
            await self.model.engine.collective_rpc("reload_weights")
        except Exception as error:
            return _response(500, _error(500, f"reload_weights failed: {error}"))
        self.model.loaded()
        return _response(200, {"status": "weights reloaded"})

    # Health

    def _health_code(self) -> int:
        setting = self._settings.health
        serves = self._settings.on_request != "reject" if setting == "auto" else setting == "ok"
        return 200 if serves else 503

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self.model
        try:
            await asyncio.wait_for(model.look(), HEALTH_WITHIN_S)
            await model.engine.check_health()
        except Exception as error:
            logger.debug("health is vLLM's to tell: %s", error)
            return await self._app(scope, receive, send)
        if model.serves:
            return await self._app(scope, receive, send)
        awake = model.phase is Phase.AWAKE  # without its weights: no request will be served
        code = 503 if awake and self._settings.health == "auto" else self._health_code()
        level = 2 if model.weights_lost else model.level
        body = {"status": "weights_missing" if awake else model.phase.value, "asleep": not awake, "level": level}
        await _reply(send, code, body, {"Retry-After": str(self._settings.retry_after_s)} if code == 503 else {})


# ASGI


def _path(scope: Scope) -> str:
    """The path within the server, without the root path of a proxy and without slashes at its end."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    if root and path.startswith(root + "/"):
        path = path[len(root) :]
    return path.rstrip("/") or "/"


def _is_harmless(path: str) -> bool:
    """Whether a POST to it does not run the model: tokenizing, and what operators need while it sleeps."""
    cancels = path.startswith("/v1/responses/") and path.endswith("/cancel")
    return path in HARMLESS or cancels or path.endswith(("/render", "/derender"))


def _several_servers(state: Any) -> bool:
    """Whether other processes serve the same engine, through which a sleep may pass unseen."""
    parallel = getattr(getattr(state, "vllm_config", None), "parallel_config", None)
    counts = (
        getattr(parallel, "_api_process_count", None),
        getattr(getattr(state, "args", None), "api_server_count", None),
    )
    return any(isinstance(count, int) and count > 1 for count in counts)


def _bearer(scope: Scope) -> list[bytes]:
    """The tokens that a request bears: one, or none."""
    values = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
    parts = [value.partition(b" ") for value in values[:1]]
    return [token for scheme, _, token in parts if scheme.lower() == b"bearer"]


def _has_api_key(scope: Scope) -> bool:
    """Whether a request may use the model: it bears one of the keys that vLLM was given, or there are none."""
    app = scope["app"]
    keys = [
        key for each in getattr(app, "user_middleware", ()) for key in getattr(each, "kwargs", {}).get("tokens", ())
    ]
    given = getattr(getattr(app.state, "args", None), "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    keys = keys or [key for key in given if key]
    return not keys or any(secrets.compare_digest(token, key.encode()) for token in _bearer(scope) for key in keys)


async def _rpc_method(inbox: Inbox) -> str:
    """What a POST /collective_rpc calls, "" where vLLM will find fault with it."""
    try:
        return str(json.loads(await inbox.body())["method"])
    except (ValueError, TypeError, KeyError):
        return ""


async def _first(step: Awaitable[Any], gone: asyncio.Future[None], timeout_s: float) -> None:
    """Until either is done, or the time is over."""
    future = asyncio.ensure_future(step)
    try:
        await asyncio.wait({future, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        future.cancel()


async def _answer(app: App, scope: Scope, receive: Receive) -> list[Message]:
    """The app's whole answer, not yet sent."""
    messages: list[Message] = []

    async def keep(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, keep)
    return messages


def _status(answer: list[Message]) -> int:
    return next((int(message["status"]) for message in answer if message["type"] == "http.response.start"), 500)


def _error(code: int, message: str) -> dict[str, Any]:
    """OpenAI's shape, with vLLM's names for the types."""
    types = {401: "AuthenticationError", 409: "ConflictError", 500: "InternalServerError"}
    kind = types.get(code, "ServiceUnavailableError")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _conflict(message: str) -> list[Message]:
    return _response(409, _error(409, message))


def _response(code: int, body: dict[str, Any], headers: MutableMapping[str, str] | None = None) -> list[Message]:
    content = json.dumps(body).encode()
    lines = {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
    raw = [(name.lower().encode(), value.encode()) for name, value in lines.items()]
    return [
        {"type": "http.response.start", "status": code, "headers": raw},
        {"type": "http.response.body", "body": content},
    ]


async def _reply(send: Send, code: int, body: dict[str, Any], headers: MutableMapping[str, str]) -> None:
    for message in _response(code, body, headers):
        await send(message)


async def _refuse(scope: Scope, inbox: Inbox, send: Send, refused: Refused) -> None:
    if scope["type"] == "http":
        headers = {"Retry-After": str(math.ceil(refused.retry_after_s))}
        return await _reply(send, 503, _error(503, str(refused)), headers)
    await inbox()  # websocket.connect
    await send({"type": "websocket.accept"})  # a close before it would reach the client as a bare 403
    await send({"type": "websocket.close", "code": 1013, "reason": str(refused)[:120]})
