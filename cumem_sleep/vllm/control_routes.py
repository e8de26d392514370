"""vLLM's calls for sleep, pause and prefix cache, as the gate answers them itself: without development mode, vLLM has
none of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from ..http.asgi import Message, Receive, Scope, Send, refusal, response
from .data_parallel import says_sleeping
from .parameters import ROUTES_NAMES
from .routes import RELOAD, RESET, STATUS, WAKE, route_path

Query = dict[str, list[str]]

# By path, the method. `SleepGate` itself turns a wake into /wake_up, reloads weights, and says what the workers say.
CONTROLS = {
    **dict.fromkeys(("/sleep", "/wake_up", WAKE, RELOAD, RESET, "/pause", "/resume"), "POST"),
    **dict.fromkeys(("/is_sleeping", STATUS), "GET"),
}


async def answer(scope: Scope, _: Receive, send: Send) -> None:
    """One call, whose parameters were read already (`parameters.read`): ASGI."""
    path = route_path(scope).rstrip("/")
    query = parse_qs(scope.get("query_string", b"").decode())
    for message in await _answer(scope["app"].state.engine_client, path, query):
        await send(message)


async def _answer(engine: Any, path: str, query: Query) -> list[Message]:
    try:
        return response(200, await _CALLS[path](engine, query))
    except Exception as error:
        return refusal(500, f"{path} failed: {error or type(error).__name__}")


async def _sleep(engine: Any, query: Query) -> dict[str, Any]:
    level = int(query.pop("level")[0])
    await engine.sleep(level, **_keywords(engine.sleep, query))
    return {"status": "sleeping", "level": level}


async def _wake_up(engine: Any, query: Query) -> dict[str, Any]:
    is_awake = await engine.wake_up(**_keywords(engine.wake_up, query))  # before 0.33 it does not say
    sleeps = says_sleeping(await engine.is_sleeping()) if is_awake is None else not is_awake
    return {"status": "sleeping" if sleeps else "awake", "tags": query.get("tags")}


async def _pause(engine: Any, query: Query) -> dict[str, Any]:
    await engine.pause_generation(**_keywords(engine.pause_generation, query))
    return {"status": "paused"}


async def _resume(engine: Any, _: Query) -> dict[str, Any]:
    await engine.resume_generation()
    return {"status": "resumed"}


async def _reset_prefix_cache(engine: Any, query: Query) -> dict[str, Any]:
    success = await engine.reset_prefix_cache(**_keywords(engine.reset_prefix_cache, query))
    return {"success": success is not False}  # older versions do not say


async def _is_sleeping(engine: Any, _: Query) -> dict[str, Any]:
    return {"is_sleeping": says_sleeping(await engine.is_sleeping())}


def _keywords(call: Callable[..., Any], query: Query) -> dict[str, Any]:
    """The parameters that this vLLM's call has."""
    booleans = {"true": True, "false": False}
    given = {name: query.get(ROUTES_NAMES.get(name, name)) for name in inspect.signature(call).parameters}
    return {
        name: values if name == "tags" else booleans.get(values[0], values[0])
        for name, values in given.items()
        if values
    }


_CALLS: dict[str, Callable[[Any, Query], Awaitable[dict[str, Any]]]] = {
    "/sleep": _sleep,
    "/wake_up": _wake_up,
    "/pause": _pause,
    "/resume": _resume,
    RESET: _reset_prefix_cache,
    "/is_sleeping": _is_sleeping,
}
