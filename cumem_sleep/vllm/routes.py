"""How the gate treats every route of `vllm serve`, and which route a request takes.

The gate asks the server's own router, so both always read a path in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..http.asgi import Scope
from ..http.model_paths import NEEDS_SERVER, RUNS_MODEL

LOOKS = ("GET", "HEAD", "OPTIONS")
MOST_KNOWN, LONGEST_KNOWN = 1024, 512  # paths, and the characters of each with its host: clients write them


class RouteKind(Enum):
    """How the gate classifies a request, which decides what happens to it while the model sleeps."""

    CHANGES = "changes the sleep"  # one at a time, tracked by the gate
    WRITES = "touches weights"  # not while they sleep, and never during a change
    CALLS = "calls a worker method"  # as WRITES, by the method's name
    ADAPTS = "changes adapters or scale"  # held as RUNS, and never during a change
    ADMINISTERS = "changes the server's state"  # passes
    RUNS = "runs the model"  # held, refused, or wakes the model
    HEALTH = "health"  # answered by the gate
    ASKS = "asks whether it sleeps"  # passes, unless that cannot be said
    PASSES = "touches neither memory nor the server's state"
    UNKNOWN = "not known"  # treated as ADMINISTERS and as RUNS, but wakes nothing
    NOTHING = "no route"  # vLLM answers 404 or 405


NEED_ADMIN_TOKEN = frozenset(
    (RouteKind.CHANGES, RouteKind.WRITES, RouteKind.CALLS, RouteKind.ADAPTS, RouteKind.ADMINISTERS, RouteKind.UNKNOWN)
)
# The gate's own routes.
WAKE, RELOAD = "/wake", "/reload_weights"
RESET = "/reset_prefix_cache"
STATUS = "/cumem_sleep/status"
OWN = frozenset((("POST", WAKE), ("POST", RELOAD), ("GET", STATUS)))

_POSTS = {
    RouteKind.CHANGES: ("/sleep", "/wake_up", WAKE, RELOAD, "/release_kv_cache_memory", "/pause", "/resume"),
    RouteKind.WRITES: (
        *("/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update"),
        "/weight_checker",
    ),
    RouteKind.CALLS: ("/collective_rpc",),
    RouteKind.ADAPTS: ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/scale_elastic_ep"),
    RouteKind.ADMINISTERS: (
        *("/abort_requests", "/inference/v1/abort_requests", "/fault_tolerance/apply"),
        *("/start_profile", "/stop_profile", RESET, "/reset_mm_cache", "/reset_encoder_cache"),
        *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/update_weight_version"),
    ),
    RouteKind.RUNS: RUNS_MODEL,
    RouteKind.HEALTH: ("/ping",),
    RouteKind.PASSES: (*NEEDS_SERVER, "/is_scaling_elastic_ep"),
}
_TABLE: dict[tuple[str, str], RouteKind] = {
    **{("POST", path): kind for kind, paths in _POSTS.items() for path in paths},
    ("DELETE", "/adapters/{adapter_name}"): RouteKind.ADAPTS,
    ("WEBSOCKET", "/v1/realtime"): RouteKind.RUNS,
    ("GET", "/server_info"): RouteKind.ADMINISTERS,  # it shows the environment
    ("GET", STATUS): RouteKind.ADMINISTERS,  # for whoever may change the sleep
    ("GET", "/health"): RouteKind.HEALTH,
    ("GET", "/ping"): RouteKind.HEALTH,
    ("GET", "/is_sleeping"): RouteKind.ASKS,
}
_MOUNTS = ("/metrics", "/static")  # apps that are read-only, whatever the method


@dataclass(frozen=True)
class Taken:
    """The route that a request takes.

    Attributes:
        template: the route's path, such as "/v1/responses/{response_id}"; "" if no route takes it.
        kind: how the gate classifies it.
        redirects: the server only redirects to the path with, or without, a final slash.
    """

    template: str
    kind: RouteKind
    redirects: bool = False


class Routes:
    """Finds the route that a request takes, and remembers what it found for the last paths.

    `own`: methods and paths that the gate serves where the server has no route.
    """

    def __init__(self, own: Collection[tuple[str, str]] = OWN) -> None:
        self._own = own
        self._known: dict[tuple[object, ...], Taken] = {}

    def take(self, app: Any, scope: Scope) -> Taken:
        """The route of `app` that takes a request, found as Starlette's router finds it."""
        host = [value for name, value in scope.get("headers", ()) if name == b"host"]
        routes = len(getattr(getattr(app, "router", None), "routes", ()))
        names = ("type", "method", "path", "root_path")
        key = (id(app), routes, *(scope.get(name) for name in names), *host)
        if sum(len(each) for each in key[2:] if each) > LONGEST_KNOWN:
            return _take(app, scope, self._own)
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = _take(app, scope, self._own)
        return self._known[key]


def kind_of(method: str, template: str) -> RouteKind:
    """The kind of a route. One that is not in the table may do anything, unless its method is read-only."""
    known = _TABLE.get(("GET" if method == "HEAD" else method, template))
    if known is not None and (method, known) != ("HEAD", RouteKind.HEALTH):
        return known
    looks = method in LOOKS or template.rstrip("/") in _MOUNTS
    return RouteKind.PASSES if looks else RouteKind.UNKNOWN


def route_path(scope: Scope) -> str:
    """The path within the server, as Starlette's `get_route_path` computes it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _find(routes: Iterable[Any], scope: Scope) -> tuple[str, bool] | None:
    """The template of the first route that takes a request, and whether it also takes the method."""
    partial = None
    for route in routes:
        match, child = route.matches(dict(scope))
        if match.value == 0:
            continue
        found = _inside(route, match.value == 2, scope, child)
        if match.value == 2:
            return found
        partial = partial or found
    return (partial[0], False) if partial else None


def _inside(route: Any, is_full: bool, scope: Scope, child: Scope) -> tuple[str, bool]:
    """The same within one matching route: FastAPI's included routers and Starlette's mounts contain other routes."""
    if hasattr(route, "effective_route_contexts"):
        found = _find(_contexts(route), scope)
    elif inner := getattr(route, "routes", None):
        found = _find(inner, {**scope, **child})
        if found is not None:
            found = (_template(route) + found[0], found[1])
    else:
        return _template(route), is_full
    return found or (_template(route), True)  # what takes it inside is unknown


def _contexts(route: Any) -> Iterator[Any]:
    for context in route.effective_route_contexts():
        yield getattr(context, "starlette_route", None) or context


def _template(route: Any) -> str:
    if hasattr(route, "routes"):  # a mount, whose format has a parameter for the rest
        return str(getattr(route, "path", ""))
    return str(getattr(route, "path_format", None) or getattr(route, "path", ""))


def _take(app: Any, scope: Scope, own: Collection[tuple[str, str]]) -> Taken:
    method = str(scope.get("method", "WEBSOCKET"))
    router = getattr(app, "router", None)
    if router is None:
        return Taken("", RouteKind.UNKNOWN)
    found = _find(router.routes, scope)
    if found is not None:
        return Taken(found[0], kind_of(method, found[0]) if found[1] else RouteKind.NOTHING)
    path = route_path(scope).rstrip("/")
    if (method, path) in own:
        return Taken(path, kind_of(method, path))
    if scope["type"] == "http" and getattr(router, "redirect_slashes", False):
        whole = str(scope["path"])
        found = _find(router.routes, {**scope, "path": whole.rstrip("/") if whole.endswith("/") else whole + "/"})
        if found is not None and found[1]:
            return Taken(found[0], kind_of(method, found[0]), redirects=True)
    return Taken("", RouteKind.NOTHING)
