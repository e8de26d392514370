"""The HTTP gate: an ASGI middleware for `vllm serve` that answers requests which would hang or crash a sleeping model.

vLLM adds it last, so it is the outermost middleware: before CORS and before the check of API keys.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

from ..core.misspelt import warn_of_misspelt
from ..errors import InvalidArgument, InvalidState
from ..http.asgi import (
    App,
    ClientGone,
    HeldRequests,
    Inbox,
    Message,
    Receive,
    Scope,
    Send,
    TooMuchHeld,
    answer_websocket,
    bearer,
    deliver,
    has_bearer_token,
    json_object,
    not_canonical,
    refusal,
    refuse_websocket,
    response,
    status_of,
    whole_answer,
    within,
)
from ..settings import GateSettings
from . import control_routes, data_parallel, events, metrics, parameters, worker_methods
from .admin_listener import FROM_LISTENER, AdminListener, bound
from .admission import LEASE, Admission, RequestLease
from .control_routes import CONTROLS
from .idle import IdleSleep
from .routes import NEED_ADMIN_TOKEN, OWN, RELOAD, RESET, STATUS, WAKE, RouteKind, Routes, Taken, kind_of, route_path
from .siblings import BETWEEN_S, Busy, SiblingsUnknown
from .sleep_controller import SleepController
from .sleeping_model import TAGS, GatePhase, RequestDecision, Weights, why_left_out
from .worker_methods import KEEP_KV, Effect

logger = logging.getLogger("cumem_sleep")

WAKES = ("/wake_up", WAKE)
WAKE_UP = {"path": "/wake_up", "raw_path": b"/wake_up", "root_path": ""}  # for ASGI: vLLM's own path
WRITING_ROUTES = {
    "/start_weight_update": Effect.STARTS,
    "/start_draft_weight_update": Effect.STARTS_DRAFT,
    "/update_weights": Effect.UPDATES,
    "/finish_weight_update": Effect.FINISHES,
    "/weight_checker": Effect.WRITES,
}
_CALLS = {  # their parameters differ by version
    **dict.fromkeys(("/wake_up", WAKE), "wake_up"),
    **{"/sleep": "sleep", "/pause": "pause_generation", RESET: "reset_prefix_cache"},
}
WEIGHTS_ASLEEP = "weights are asleep: POST /wake_up?tags=weights first"
_OPENS = "CUMEM_SLEEP_ADMIN_TOKEN or CUMEM_SLEEP_ADMIN opens them"
_CALLERS = "see docs/vllm.md, Callers that send no token"
_CLOSED = (
    "Not Found: the server needs CUMEM_SLEEP_ADMIN_TOKEN or CUMEM_SLEEP_ADMIN, or VLLM_SERVER_DEV_MODE=1 behind a"
    f" firewall: {_CALLERS}"
)
_ELSEWHERE = f"Not Found: served only at the address that CUMEM_SLEEP_ADMIN has: {_CALLERS}"
KEYED = ("/v1", "/v2", "/inference", "/cohere")  # where any version of vLLM wants an API key

HEALTH_WITHIN_S = 1.0
POLL_S = 0.5  # the engine may die; another API server may wake the model
MOST_WRITTEN_BYTES = 256 << 20  # the body of a call that writes weights, which is read before its turn comes


class GateRefused(Exception):
    """A request is answered with 503.

    Attributes:
        retry_after_s: for the client.
        outcome: for the metrics.
    """

    def __init__(self, message: str, retry_after_s: float, outcome: str) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.outcome = outcome

    def answer(self) -> list[Message]:
        """The complete answer."""
        return refusal(503, str(self), {"Retry-After": str(math.ceil(self.retry_after_s))})


class SleepGate:
    """`vllm serve … --middleware cumem_sleep.vllm.SleepGate`; settings: see `GateSettings`.

    Raises:
        InvalidArgument: an environment variable has a bad value.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._settings = settings = GateSettings.from_environment()
        warn_of_misspelt()
        self._status = metrics.WorkerStatus()
        self._outcomes: Counter[str] = Counter()
        self._held = HeldRequests(settings.max_held_bytes)
        self._watch: asyncio.Task[None] | None = None
        dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE", "0").strip() not in ("", "0")
        self._has_controls = not dev_mode and bool(settings.admin_token or settings.admin)  # vLLM itself has none
        self._is_open = dev_mode or self._has_controls
        self._controls: App = control_routes.answer if self._has_controls else app
        self.controller = SleepController(settings, self._status)
        self.model = self.controller.model
        self._admission = Admission(self._admit)
        self._idle = IdleSleep(settings, self.controller, self._admission)
        self._routes = Routes({(method, path) for path, method in CONTROLS.items()} if self._has_controls else OWN)
        self._is_scraped = metrics.register(self._status, self._outcomes)
        hold = "" if settings.on_request == "reject" else f" (at most {settings.request_deadline_s:g} s)"
        logger.info(
            "cumem-sleep gate: requests to a sleeping model: %s%s; /health then: %d; admin token: %s; /sleep and"
            " similar paths: %s",
            settings.on_request,
            hold,
            self._health_code(),
            "needed" if settings.admin_token else "none",
            f"at {settings.admin}" if settings.admin else "open" if self._is_open else f"closed ({_OPENS})",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Decide about one request: ASGI."""
        if scope["type"] == "lifespan":
            return await self._live(scope, receive, send)
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        engine = self._attach(scope)
        inbox = Inbox(receive, self._held)
        try:
            await self._decide(scope, engine, inbox, send)
        except ClientGone:
            pass
        except SiblingsUnknown as unknown:
            await self._answer(scope, inbox, send, self._rejected(str(unknown)).answer(), str(unknown))
        finally:
            inbox.close()

    def _attach(self, scope: Scope) -> Any:
        """The engine that answers, which the gate gets to know by its first request."""
        state: Any = getattr(scope.get("app"), "state", None)
        engine = getattr(state, "engine_client", None)
        if self.controller.engine is not engine and engine is not None:
            self._admission.attach(engine)
            self.controller.engine, self.controller.several_servers = engine, _several_servers(state)
            self._idle.start()
        return engine

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The server's life. An error would pass for "no lifespan" here, and the server begin all the same."""
        listener = None
        try:
            config = getattr(self._attach(scope), "vllm_config", None)
            if self.controller.several_servers:
                self.controller.siblings.open()
            if self._settings.idle_s is not None:
                _check_that_it_may_sleep(config)
            if self._settings.admin is not None:
                listener = await self._listener(self._settings.admin, scope)
        except (InvalidArgument, InvalidState, OSError, SiblingsUnknown) as error:
            await receive()
            return await send({"type": "lifespan.startup.failed", "message": str(error)})
        try:
            await self._app(scope, receive, send)
        finally:
            self._idle.stop()
            if listener is not None:
                listener.close()

    async def _listener(self, address: str, scope: Scope) -> AdminListener | None:
        """Of several API servers the first one listens, for all of them.

        Raises:
            OSError: it cannot.
        """
        if self.controller.several_servers and not self.controller.siblings.become_listener():
            logger.info("cumem-sleep gate: another API server of this vLLM listens at %s", address)
            return None
        try:
            socket = bound(address)
        except OSError as error:
            raise OSError(f"cannot listen at {address} (CUMEM_SLEEP_ADMIN): {error.strerror or error}") from None
        listener = AdminListener(self, scope.get("app"), address, socket)
        await listener.start()
        return listener

    def _is_elsewhere(self, scope: Scope, taken: Taken, engine: Any) -> bool:
        """Whether a request is none for where it came to: calls for sleep come to the listener alone, if there is one,
        and nothing else does.
        """
        if self._settings.admin is None:
            return False
        if not scope.get(FROM_LISTENER):
            return route_path(scope).rstrip("/") in CONTROLS
        return engine is None or taken.kind is RouteKind.NOTHING or taken.template not in CONTROLS

    async def _decide(self, scope: Scope, engine: Any, inbox: Inbox, send: Send) -> None:
        if fault := not_canonical(scope):
            return await self._answer(scope, inbox, send, refusal(400, f"the path {fault}"), fault)
        taken = self._routes.take(scope.get("app"), scope)
        if self._is_elsewhere(scope, taken, engine):
            why = "Not Found" if scope.get(FROM_LISTENER) else _ELSEWHERE
            return await self._answer(scope, inbox, send, response(404, {"detail": why}), "Not Found")
        token = self._settings.admin_token
        if token and self._needs_admin_token(scope, taken):
            if not has_bearer_token(scope, [token]):
                unknown = "; the gate does not know this route" if taken.kind is RouteKind.UNKNOWN else ""
                wrong = "the token is wrong: it is not the admin token"
                needed = f"an admin token is needed, as Authorization: Bearer <CUMEM_SLEEP_ADMIN_TOKEN>: {_CALLERS}"
                wanted = f"{wrong if bearer(scope) else needed}{unknown}"
                answer = refusal(401, wanted, {"WWW-Authenticate": "Bearer"})
                return await self._answer(scope, inbox, send, answer, wanted)
            scope = _with_api_key(scope)
        if engine is None:  # of a render-only server, or of a vLLM that keeps it elsewhere: nothing is known of a sleep
            return await self._app(scope, inbox, send)
        if taken.kind is RouteKind.HEALTH:
            return await self._health(scope, inbox, send)
        if taken.kind is RouteKind.ASKS:
            return await self._is_sleeping(scope, inbox, send)
        if taken.kind in (RouteKind.RUNS, RouteKind.ADAPTS, RouteKind.UNKNOWN):
            if taken.redirects:  # which needs no memory
                return await self._pass(scope, inbox, send)
            if _lacks_api_key(scope):  # vLLM will refuse it
                return await self._run_model(taken, scope, inbox, send)
            with self._idle.request():
                return await self._run_model(taken, scope, inbox, send)
        is_control = taken.kind in (RouteKind.CHANGES, RouteKind.WRITES, RouteKind.CALLS)
        is_control = is_control or (self._has_controls and taken.template == RESET)
        if is_control and self._is_open and not taken.redirects:
            return await deliver(scope, inbox, send, await self._control(taken, scope, inbox))
        if taken.template == STATUS and self._is_open:
            return await deliver(scope, inbox, send, await self._workers_status())
        if taken.template.startswith("/metrics") and self._is_scraped and self.model.phase is not GatePhase.CHANGING:
            await self._status.fresh(self.controller.engine)
        if not self._is_open and scope["type"] == "http" and route_path(scope).rstrip("/") in CONTROLS:
            answer = await whole_answer(self._app, scope, inbox)
            closed = response(404, {"detail": _CLOSED})
            return await deliver(scope, inbox, send, closed if status_of(answer) == 404 else answer)
        await self._app(scope, inbox, send)

    def _needs_admin_token(self, scope: Scope, taken: Taken) -> bool:
        if taken.kind is not RouteKind.NOTHING:
            return taken.kind in NEED_ADMIN_TOKEN
        method = str(scope.get("method", "WEBSOCKET"))  # the same answer whether dev mode is on or off
        kind = kind_of(method, route_path(scope).rstrip("/"))
        return method == "POST" and kind in NEED_ADMIN_TOKEN - {RouteKind.UNKNOWN}

    async def _answer(self, scope: Scope, inbox: Inbox, send: Send, answer: list[Message], reason: str) -> None:
        if scope["type"] == "http":
            await deliver(scope, inbox, send, answer)
        elif status_of(answer) == 404:
            await answer_websocket(scope, inbox, send, answer)
        else:
            await refuse_websocket(inbox, send, 1013 if status_of(answer) == 503 else 1008, reason)

    # Requests that run the model

    async def _run_model(self, taken: Taken, scope: Scope, inbox: Inbox, send: Send) -> None:
        model, outcome = self.model, ""
        try:
            await self._look()
            while not model.serves:
                if _lacks_api_key(scope):
                    return await self._answer(scope, inbox, send, _unauthorized(), "Unauthorized")
                outcome = await self._hold(taken, scope, inbox)  # another sleep may begin before it returns
        except GateRefused as refused:
            self._outcomes[refused.outcome] += 1
            return await self._answer(scope, inbox, send, refused.answer(), str(refused))
        except ClientGone:
            raise
        except Exception as error:  # vLLM itself reports best what is wrong with its engine
            logger.debug("the engine does not say whether it sleeps: %s", error)
        if outcome:
            self._outcomes[outcome] += 1
        if taken.kind is RouteKind.ADAPTS:
            if _lacks_api_key(scope):  # before its body is read
                return await self._answer(scope, inbox, send, _unauthorized(), "Unauthorized")
            return await self._adapt(taken, scope, inbox, send)
        if taken.kind is RouteKind.UNKNOWN:  # which may put the model to sleep, or wake it
            async with self.controller.unknown_call():
                return await self._pass(scope, inbox, send)
        await self._pass(scope, inbox, send)

    async def _hold(self, taken: Taken, scope: Scope, inbox: Inbox) -> str:
        """Returns the outcome of the request as soon as the model serves. One whose body never comes wakes nothing.

        Raises:
            GateRefused: the policy says so, the deadline passed, too much is held, or waking failed.
            ClientGone: nobody waits for the answer.
            Exception: the engine's own, if it is dead.
        """
        settings, policy = self._settings, self._settings.on_request
        if policy == "reject" or not _has_api_key(
            scope
        ):  # without a key, a request neither wakes the model nor takes memory
            raise self._rejected(self.model.why_not())
        deadline = self.controller.clock() + settings.request_deadline_s
        gone = asyncio.ensure_future(inbox.until_gone_or_too_much())
        state: Any = getattr(scope.get("app"), "state", None)
        load = taken.kind is RouteKind.RUNS and getattr(state, "enable_server_load_tracking", False)
        if load:  # vLLM's `/load` counts what has reached its handlers
            state.server_load_metrics += 1
        self._held.requests += 1
        try:
            self._raise_overload(self._held.requests > settings.max_held_requests)
            wakes = policy == "wake" and taken.kind is RouteKind.RUNS
            if wakes and scope["type"] == "http":
                await self._wait(asyncio.ensure_future(inbox.until_complete()), gone, deadline)
            await self._until_serves(deadline, gone, wakes)
        finally:
            self._held.requests -= 1
            if load:
                state.server_load_metrics -= 1
            gone.cancel()
            await asyncio.wait({gone})  # two readers of one request would steal each other's messages
        return "woke" if policy == "wake" else "waited"

    async def _until_serves(self, deadline: float, gone: asyncio.Future[None] | None, wakes: bool) -> None:
        """Wait until the model serves, or wake it. Raises as `_hold`."""
        controller = self.controller
        while (decision := self.model.decide("wake" if wakes else "wait")) is not RequestDecision.PASS:
            if wakes:
                self._raise_failure()
            if decision is RequestDecision.REFUSE:
                raise self._rejected(self.model.why_not())
            if decision is RequestDecision.WAKE:
                step: Awaitable[Any] = asyncio.shield(controller.wake())
            else:
                step = controller.changed.wait()
            await self._wait(asyncio.ensure_future(step), gone, deadline)

    async def _wait(self, step: asyncio.Future[Any], gone: asyncio.Future[None] | None, deadline: float) -> None:
        """Wait until `step` is done. One task watches the engine for all waiting requests."""
        left_s = deadline - self.controller.clock()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_engine())
        try:
            if left_s > 0:
                waiting = {step, self._watch, *([gone] if gone else [])}
                await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            step.cancel()
        if gone is not None and gone.done():
            self._raise_overload(isinstance(gone.exception(), TooMuchHeld))
            raise ClientGone
        if self._watch.done() and not self._watch.cancelled() and (error := self._watch.exception()) is not None:
            raise error
        if deadline - self.controller.clock() <= 0 and not self.model.serves:
            raise GateRefused(self.model.why_not(), self._settings.retry_after_s, "timed_out")

    async def _watch_engine(self) -> None:
        """Raises the engine's error: a server that is being shut down waits for the requests that it holds."""
        while self._held.requests:
            await asyncio.sleep(POLL_S)
            await self.controller.engine.check_health()
            await self._look()

    async def _look(self) -> None:
        """`SleepController.look`. If the engine does not answer, a model that slept or lost its weights is assumed to
        still.

        Raises:
            GateRefused: it did, and the engine does not answer; or it is not known what other API servers do.
            Exception: the engine's own, if it cannot serve.
        """
        try:
            await self.controller.look()
        except SiblingsUnknown as unknown:
            raise self._rejected(str(unknown)) from unknown
        except Exception as error:
            if not self.model.lacks_memory or await self._engine_is_dead():
                raise
            logger.debug("the engine does not say whether it sleeps: %s", error)
            message = "the engine does not say whether it still sleeps"
            raise self._rejected(message) from error

    def _rejected(self, message: str) -> GateRefused:
        return GateRefused(message, self._settings.retry_after_s, "rejected")

    async def _engine_is_dead(self) -> bool:
        try:
            await self.controller.engine.check_health()
        except Exception:
            return True
        return False

    def _raise_overload(self, is_too_much: bool) -> None:
        if is_too_much:
            message = f"{self.model.why_not()}; too many requests are already held"
            raise self._rejected(message)

    def _raise_failure(self) -> None:
        if (failure := self._failure()) is not None:
            cause, left_s = failure
            why = "the model is asleep" if self.model.asleep else self.model.why_not()
            raise GateRefused(f"{why}, and waking it failed: {cause}", left_s, "rejected")

    def _failure(self) -> tuple[str, float] | None:
        """Why waking on request failed, and how long until the next attempt."""
        if self.controller.failure is not None:
            cause, until = self.controller.failure
            if (left_s := until - self.controller.clock()) > 0:
                return cause, left_s
        return None

    # Requests that pass

    async def _pass(self, scope: Scope, inbox: Inbox, send: Send) -> None:
        """Let vLLM answer. A request that does not reach the engine in time is treated as if it had just arrived."""
        lease, started = RequestLease(_has_api_key(scope)), False

        async def send_if_admitted(message: Message) -> None:
            nonlocal started
            if lease.refusal is None or started:
                started = True
                await send(message)

        LEASE.set(lease)
        try:
            await self._app(scope, inbox, send_if_admitted)
        except Exception:
            if lease.refusal is None or (started and scope["type"] == "http"):
                raise
            if started:
                await send({"type": "websocket.close", "code": 1013, "reason": str(lease.refusal)[:120]})
        if isinstance(lease.refusal, GateRefused) and not started:
            self._outcomes[lease.refusal.outcome] += 1
            await self._answer(scope, inbox, send, lease.refusal.answer(), str(lease.refusal))

    async def _admit(self, lease: RequestLease) -> Callable[[], None]:
        """Returns when a request may go to the engine: the model serves, and will until the returned function is
        called.

        Raises:
            GateRefused: as if the request had just arrived.
        """
        model, controller = self.model, self.controller
        deadline = controller.clock() + self._settings.request_deadline_s
        try:
            if controller.unknown_calls:
                await self._look()
            while not (model.serves and controller.keep_still()):
                await self._look()
                if not model.serves:
                    await self._hold_before_engine(lease, deadline)
                elif controller.keep_still():
                    break
                else:
                    await asyncio.sleep(
                        BETWEEN_S
                    )  # a sibling is changing something, or this server wakes what is awake
            return controller.let_go
        except GateRefused:
            raise
        except SiblingsUnknown as unknown:
            raise self._rejected(str(unknown)) from unknown
        except Exception as error:
            logger.debug("the engine does not say whether it sleeps: %s", error)
            return lambda: None

    async def _hold_before_engine(self, lease: RequestLease, deadline: float) -> None:
        settings = self._settings
        if settings.on_request == "reject" or not lease.may_wait:
            raise self._rejected(self.model.why_not())
        self._held.requests += 1
        try:
            self._raise_overload(self._held.requests > settings.max_held_requests)
            await self._until_serves(deadline, None, wakes=settings.on_request == "wake")
        finally:
            self._held.requests -= 1

    # Calls that change the model's sleep, or its weights

    async def _control(self, taken: Taken, scope: Scope, inbox: Inbox) -> list[Message]:
        """The answer is returned only when the new state is known, because the next request may follow at once."""
        gone = None
        try:
            if taken.kind in (RouteKind.WRITES, RouteKind.CALLS):
                return await self._write(taken, scope, inbox)
            body = await inbox.body(parameters.MOST_BYTES)
            if body is None:
                return refusal(413, f"expected a body of at most {parameters.MOST_BYTES >> 10} KiB")
            call = getattr(self.controller.engine, _CALLS.get(taken.template, ""), None)
            its = {} if call is None else inspect.signature(call).parameters
            query = parameters.read(taken.template, scope.get("query_string", b""), body, its)
            scope = {**scope, "query_string": urlencode(query, doseq=True).encode()}  # vLLM reads no body
            gone = asyncio.ensure_future(inbox.until_gone())
            if taken.template == RESET:
                return await _called(self._controls, scope, inbox, gone)
            if taken.template == "/pause":
                return await self._pause(scope, inbox, gone)
            if taken.template == "/sleep":
                return await self._sleep(scope, query, inbox, gone)
            return await self._change(taken.template, scope, query, inbox, gone)
        except parameters.BadParameter as bad:
            return refusal(400, str(bad))
        except Busy as busy:
            return _conflict(str(busy))
        finally:
            if gone is not None:
                gone.cancel()

    async def _pause(self, scope: Scope, inbox: Inbox, gone: asyncio.Future[None]) -> list[Message]:
        async with self.controller.alone(gone):
            answer = await _called(self._controls, scope, inbox, gone)
            if status_of(answer) < 300:
                self.controller.handle(events.paused)
            return answer

    async def _sleep(
        self, scope: Scope, query: dict[str, parameters.ParameterValues], inbox: Inbox, gone: asyncio.Future[None]
    ) -> list[Message]:
        model, controller = self.model, self.controller
        asked, (mode,) = int(query.get("level", ("1",))[0]), query.get("mode", ("abort",))
        is_deep = asked == 3
        level = 1 if is_deep else asked  # vLLM itself knows no other
        passed = {name: values for name, values in query.items() if name not in ("level", "mode", "keep_kv")}
        passed |= {"level": (str(level),)} | ({} if controller.pauses_apart else {"mode": (mode,)})
        scope = {**scope, "query_string": urlencode(passed, doseq=True).encode()}
        if level == 2 and mode == "keep":
            return _conflict("requests cannot be kept over a level-2 sleep: they would run before weights are loaded")
        async with controller.change(gone=gone):
            await controller.look_how_deep()
            if model.checkpointed or (is_deep and model.asleep >= TAGS and not model.state.disagrees):
                return await self._deepen(is_deep)
            if not await self._admission.empties(self._settings.request_deadline_s):
                late = {"Retry-After": str(self._settings.retry_after_s)}
                return refusal(503, "requests are still on their way to the engine, so nothing has changed", late)
            await controller.mend()
            try:
                await controller.complete_wake()
            except Exception as error:
                return refusal(503, f"{model.why_disagrees or 'nothing has changed'}: {error}")
            if query.get("keep_kv") == ("false",):
                try:
                    await controller.engine.collective_rpc(KEEP_KV, args=(False,))
                except Exception as error:
                    return refusal(500, f"keep_kv=false cannot be passed on, so nothing has changed: {error}")
            code = 500
            try:
                await controller.pause_apart(level, mode)
                answer = await _called(self._controls, scope, inbox, gone)
                code = status_of(answer)
            finally:
                if code >= 500:
                    await controller.sleep_failed()
            if code >= 300:
                return answer
            if mode == "wait" and level == 2:  # vLLM waited for those that ran
                await controller.flush()
            # Requests left in the engine run when the scheduler resumes: at the first tag (0.18), or the last.
            kept = mode == "keep" or (mode == "wait" and level < 2)
            if why := await controller.slept(level, kept, frozenset(query.get("tags", ()))):
                return refusal(503 if model.state.disagrees else 409, why)
            return await self._deepen() if is_deep else self._stated(level, answer)

    def _stated(self, wanted: int, answer: list[Message]) -> list[Message]:
        """VLLM's answer to a sleep, with the level that is, and what became of the memory."""
        level = self.model.level
        if level is None:
            return answer
        said = {**json_object(answer), "status": "sleeping", "level": level, **self._became()}
        if level < wanted:
            said["why_not_deeper"] = "memory that sleeps already is left as it is: POST /wake_up first"
        return response(200, said)

    async def _deepen(self, is_wanted: bool = True) -> list[Message]:
        """Go on to level 3, or answer for a model that is there already: it stays there, whatever is wanted."""
        model, why = self.model, ""
        if is_wanted:
            try:
                why = await self.controller.deepen()
            except Exception as error:
                return refusal(500, f"the model sleeps at level {model.level}, and level 3 failed: {error}")
        if why and model.checkpointed:
            return refusal(500, f"the model sleeps, and POST /wake_up may wake it: {why}")
        said = {"status": "sleeping", "level": model.level, **self._became()}
        return response(200, {**said, "why_not_deeper": why} if why else said)

    async def _change(
        self,
        path: str,
        scope: Scope,
        query: dict[str, parameters.ParameterValues],
        inbox: Inbox,
        gone: asyncio.Future[None],
    ) -> list[Message]:
        """A wake, a resume, a reload, or the release of the KV cache."""
        model, controller = self.model, self.controller
        async with controller.change(disturbs=path not in (*WAKES, "/resume"), gone=gone):
            if path == RELOAD:
                return await self._reload()
            if path == "/resume" and (model.asleep or model.state.disagrees):
                return _conflict("memory is asleep: POST /wake_up instead, which also resumes")
            await controller.mend()
            if path in WAKES:
                return await self._wake(query, {**scope, **WAKE_UP}, inbox, gone)
            answer = await _called(self._controls, scope, inbox, gone)
            if status_of(answer) < 300 and path == "/release_kv_cache_memory":
                controller.handle(events.released)
            return answer

    async def _wake(
        self, query: dict[str, parameters.ParameterValues], scope: Scope, inbox: Inbox, gone: asyncio.Future[None]
    ) -> list[Message]:
        model, controller, tags = self.model, self.controller, frozenset(query.get("tags", ()))
        if self._wakes_kept_requests_early(tags):
            return _conflict("requests were kept: POST /wake_up without tags, which wakes everything for them")
        forgotten = (tags or TAGS) & model.asleep if query.get("restore") == ("false",) else frozenset[str]()
        if forgotten and (conflict := self._conflict_of_forgetting()) is not None:
            return conflict
        loads = self._settings.on_request == "wake" and model.state.weights is Weights.LOST
        if loads and not (tags or forgotten):  # as a request would
            try:
                await controller.wake_whole()
            except Exception as error:
                return refusal(500, f"/wake_up failed: {error or type(error).__name__}")
            return response(200, {"status": "awake", "tags": None})
        if controller.several_servers and model.asleep and not model.state.kept:
            await controller.flush()
        if forgotten and (why := await controller.forget(forgotten)):
            return refusal(500, f"the backups cannot be forgotten, so nothing was woken: {why}")
        code = 500
        try:
            answer = await _called(self._controls, scope, inbox, gone)
            code = status_of(answer)
        finally:
            if code >= 500:
                await controller.wake_failed(tags)
        if code < 300:
            controller.handle(events.woken, tags)
            await controller.resume_apart()
        return answer

    def _wakes_kept_requests_early(self, tags: frozenset[str]) -> bool:
        asleep = self.model.state.engine_asleep
        partial = bool(tags and asleep) and not asleep <= tags
        return partial and self._has_kept_requests()

    def _has_kept_requests(self) -> bool:
        return self.model.state.kept and (self.controller.several_servers or self._admission.let_in > 0)

    def _conflict_of_forgetting(self) -> list[Message] | None:
        if not self._has_kept_requests():
            return None
        return _conflict("requests were kept: without backups they would run before weights are loaded")

    async def _reload(self) -> list[Message]:
        if (conflict := self._conflict_of(Effect.LOADS)) is not None:
            return conflict
        try:
            await self.controller.engine.collective_rpc("reload_weights")
        except Exception as error:
            why = f"reload_weights failed: {error}"
        else:
            await self.controller.look_what_is_loaded()
            why = why_left_out(self.model.state.left_out)
        if why:
            self.controller.handle(events.load_failed, why)
            return refusal(500, why)
        self.controller.handle(events.wrote, Effect.LOADS)
        return response(200, {"status": "weights reloaded"})

    async def _write(self, taken: Taken, scope: Scope, inbox: Inbox) -> list[Message]:
        """A call that may touch weights, or that goes to level 3.

        Its body is read before its turn, so that a slow body delays nobody.
        """
        body = await inbox.body(MOST_WRITTEN_BYTES)
        if body is None:
            return refusal(413, f"expected a body of at most {MOST_WRITTEN_BYTES >> 20} MiB")
        if taken.kind is RouteKind.CALLS:
            effect = worker_methods.effect_of(worker_methods.method_of(body), self._settings.loading_methods)
        else:
            effect = WRITING_ROUTES[taken.template]
        if effect is Effect.HARMLESS:
            return await whole_answer(self._app, scope, inbox)
        if effect is Effect.CHANGES_SLEEP:
            return _conflict("only vLLM may change the workers' sleep: POST /sleep or /wake_up instead")
        gone = asyncio.ensure_future(inbox.until_gone())
        try:
            if effect in (Effect.DEEPENS, Effect.FORGETS):
                async with self.controller.change(disturbs=False, gone=gone):
                    if effect is Effect.FORGETS and (conflict := self._conflict_of_forgetting()) is not None:
                        return conflict
                    try:
                        return await _called(self._app, scope, inbox, gone)
                    finally:
                        if effect is Effect.FORGETS:  # if it failed, some workers may have forgotten
                            await self.controller.look_what_is_forgotten()
            async with self.controller.alone(gone):
                await self.controller.look_alone()
                if (conflict := self._conflict_of(effect)) is not None:
                    return conflict
                try:
                    return await self._called_to_write(effect, scope, inbox, gone)
                finally:
                    if effect is Effect.WRITES and taken.kind is RouteKind.CALLS:
                        self.controller.doubt()
        finally:
            gone.cancel()

    async def _called_to_write(
        self, effect: Effect, scope: Scope, inbox: Inbox, gone: asyncio.Future[None]
    ) -> list[Message]:
        why = f"{route_path(scope)} failed"
        try:
            answer = await _called(self._app, scope, inbox, gone)
            if status_of(answer) < 300:
                if effect in worker_methods.MAY_LOAD_ALL:
                    await self.controller.look_what_is_loaded()
                self.controller.handle(events.wrote, effect)
                why = ""
            return answer
        except Exception as error:
            why += f": {error}"
            raise
        finally:
            if why and effect in worker_methods.MAY_LOAD_ALL:  # else nobody takes the weights to be loaded
                self.controller.handle(events.load_failed, why)

    def _conflict_of(self, effect: Effect) -> list[Message] | None:
        model = self.model
        if "weights" in model.asleep:
            return _conflict(WEIGHTS_ASLEEP)
        if model.state.disagrees:
            return _conflict(model.why_disagrees)
        if effect is Effect.RUNS and model.lacks_memory:
            return _conflict(model.why_not())
        return None

    async def _adapt(self, taken: Taken, scope: Scope, inbox: Inbox, send: Send) -> None:
        """A call that changes the model while it serves, and must not run during a sleep that began meanwhile."""
        model, answer = self.model, None
        body = await inbox.body(MOST_WRITTEN_BYTES)
        if body is None:
            answer = refusal(413, f"expected a body of at most {MOST_WRITTEN_BYTES >> 20} MiB")
            return await deliver(scope, inbox, send, answer)
        gone = asyncio.ensure_future(inbox.until_gone())
        try:
            async with self.controller.alone(gone):
                await self.controller.look_alone()
                if model.serves or (model.phase is GatePhase.UNKNOWN and not model.lacks_memory):
                    answer = await _called(self._app, scope, inbox, gone)
        except Busy as busy:
            answer = _conflict(str(busy))
        finally:
            gone.cancel()
            await asyncio.wait({gone})  # two readers of one request would steal each other's messages
        if answer is None:
            return await self._run_model(taken, scope, inbox, send)  # as if it had just arrived
        await deliver(scope, inbox, send, answer)

    # Health

    async def _is_sleeping(self, scope: Scope, inbox: Inbox, send: Send) -> None:
        """VLLM answers what its engine takes to be so: nothing, while its workers disagree."""
        try:
            await within(HEALTH_WITHIN_S, self.controller.look())
        except SiblingsUnknown:
            raise
        except Exception as error:
            logger.debug("vLLM itself says whether it sleeps: %s", error)
        if self.model.phase is GatePhase.DISAGREEING:
            headers = {"Retry-After": str(self._settings.retry_after_s)}
            return await deliver(scope, inbox, send, refusal(503, self.model.why_disagrees, headers))
        answer = await whole_answer(self._controls, scope, inbox)
        if self.model.phase is GatePhase.ASLEEP and status_of(answer) == 200:
            answer = response(200, {"is_sleeping": True, "tags": sorted(self.model.asleep)})
        await deliver(scope, inbox, send, answer)

    async def _workers_status(self) -> list[Message]:
        """What each worker says of the layer in it; nobody says anything without the layer. Asked twice: see
        `SleepController.ask_workers`.
        """
        status, engine = self._status, self.controller.engine
        ranks = await status.now(engine) or await status.now(engine)
        if ranks is None and status.exists:
            return refusal(503, "the workers do not say what is in their memory")
        return response(200, {"results": ranks or [], "active": status.active, "why_not": self._why_not_active()})

    def _why_not_active(self) -> str:
        if self._status.active:
            return ""
        from . import plugin  # which needs vLLM

        return plugin.why_not_active()

    def _became(self) -> dict[str, str]:
        """What a sleep has made of the weights and of the KV cache, as far as the workers said after it."""
        state = self.model.state
        is_kept = any(rank["usage"].get("kv_cache", {}).get("kept_bytes") for rank in self._status.latest())
        weights = "backed up" if state.weights is Weights.LOADED else "dropped"
        return {
            "weights": weights if "weights" in state.asleep else "awake",
            "kv_cache": ("kept" if is_kept else "cleared") if "kv_cache" in state.asleep else "awake",
        }

    def _health_code(self) -> int:
        setting = self._settings.health
        serves = self._settings.on_request != "reject" if setting == "auto" else setting == "ok"
        return 200 if serves else 503

    async def _health(self, scope: Scope, inbox: Inbox, send: Send) -> None:
        model, controller, is_said = self.model, self.controller, True
        try:
            await within(HEALTH_WITHIN_S, controller.look())
            await controller.engine.check_health()
            await controller.look_how_deep()
        except SiblingsUnknown:
            raise
        except Exception as error:
            if not model.lacks_memory or await self._engine_is_dead():
                logger.debug("vLLM itself answers for its health: %s", error)
                return await self._app(scope, inbox, send)
            is_said = False
        if model.serves:
            return await self._app(scope, inbox, send)
        awake = model.phase is GatePhase.AWAKE  # without its weights: no request will be served
        disagrees = model.phase is GatePhase.DISAGREEING
        is_said = is_said and not disagrees  # else neither asleep nor awake
        policy = self._settings.on_request
        hopeless = awake or not is_said or model.decide(policy) is RequestDecision.REFUSE
        hopeless = hopeless or (policy == "wake" and self._failure() is not None)
        code = 503 if hopeless and self._settings.health == "auto" else self._health_code()
        tags = sorted(model.asleep)
        body: dict[str, Any] = {"status": model.phase.value, "asleep": True, "level": model.level, "tags": tags}
        if awake:
            body |= {"status": "weights_missing", "asleep": False}
        if not is_said:
            body |= {"asleep": None, "level": None, "tags": None}
        if disagrees:
            body["why"] = model.why_disagrees
        headers = {"Retry-After": str(self._settings.retry_after_s)} if code == 503 else {}
        await deliver(scope, inbox, send, response(code, body, headers))


def _check_that_it_may_sleep(config: Any) -> None:
    """Raises InvalidArgument if a vLLM of this configuration cannot sleep by itself."""
    if data_parallel.sleeps_with_others(getattr(config, "parallel_config", None)):
        raise InvalidArgument(
            "CUMEM_SLEEP_IDLE_S: expected none where other servers have some of the engines that step together"
        )
    if not getattr(getattr(config, "model_config", None), "enable_sleep_mode", True):
        raise InvalidArgument("CUMEM_SLEEP_IDLE_S: expected --enable-sleep-mode, too")


def _several_servers(state: Any) -> bool:
    """Whether other processes serve the same engine, so that a sleep may pass through them unseen."""
    parallel = getattr(getattr(state, "vllm_config", None), "parallel_config", None)
    counts = (
        getattr(parallel, "_api_process_count", None),
        getattr(getattr(state, "args", None), "api_server_count", None),
    )
    return any(isinstance(count, int) and count > 1 for count in counts)


def _api_keys(scope: Scope) -> list[str]:
    """The keys that vLLM was given, if any."""
    app: Any = scope.get("app")
    keys = [
        key for each in getattr(app, "user_middleware", ()) for key in getattr(each, "kwargs", {}).get("tokens", ())
    ]
    args = getattr(getattr(app, "state", None), "args", None)
    given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return keys or [key for key in given if key]


def _has_api_key(scope: Scope) -> bool:
    """Whether a request may use the model: it has one of vLLM's keys, or vLLM has none."""
    keys = _api_keys(scope)
    return not keys or has_bearer_token(scope, keys)


def _lacks_api_key(scope: Scope) -> bool:
    """Whether vLLM refuses the request for want of a key; its own check can be bypassed."""
    return not _has_api_key(scope) and route_path(scope).startswith(KEYED)


def _unauthorized() -> list[Message]:
    """As vLLM says it."""
    return response(401, {"error": "Unauthorized"})


def _with_api_key(scope: Scope) -> Scope:
    """A copy of a request with the admin token that has one of vLLM's own keys instead, where vLLM wants one."""
    if not _lacks_api_key(scope):
        return scope
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"authorization"]
    return {**scope, "headers": [*headers, (b"authorization", b"Bearer " + _api_keys(scope)[0].encode())]}


async def _called(app: App, scope: Scope, inbox: Inbox, gone: asyncio.Future[None]) -> list[Message]:
    """The app's complete answer to a call whose turn has come: it takes effect even if the client has left."""
    gone.cancel()
    await asyncio.wait({gone})  # two readers of one request would steal each other's messages
    return await whole_answer(app, scope, inbox)


def _conflict(message: str) -> list[Message]:
    return refusal(409, message)
