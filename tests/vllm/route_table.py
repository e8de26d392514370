"""Every route that `vllm serve` of the installed version can have, and docs/vllm-routes.md, which says what each is.

python tests/vllm/route_table.py        in an environment with vLLM: brings its routes up to date
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, get_args
from unittest.mock import MagicMock

Route = tuple[str, str]  # the template of its path, its method

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "vllm-routes.md"
VERSIONS = ("0.18", "0.26", "0.33")
POOLING = ("embed", "classify", "token_embed", "token_classify", "embed&token_classify", "plugin")
SCORES = ("bi-encoder", "cross-encoder", "late-interaction")
# Registered only where Cohere's SDK is installed.
COHERE = {("/cohere/v2/chat", "POST"), ("/cohere/v2/chat/render", "POST")}
GATES_OWN = {("/wake", "POST"), ("/reload_weights", "POST"), ("/cumem_sleep/status", "GET")}

HEAD = """\
# Every route of vLLM

This page says what [the gate](vllm.md#the-gate) does with each request.

- **guarded**: it needs `CUMEM_SLEEP_ADMIN_TOKEN`, if that is set, whether the model is awake or asleep.
- **held**: while the model cannot serve, `CUMEM_SLEEP_ON_REQUEST` decides: 503, wait, or wake. A guarded route never
  wakes it.
- **answered**: the gate answers, or learns from vLLM's answer what is asleep.
- **refused asleep**: 409 while weights sleep. It never runs during a sleep or a wake.
- **passes**: untouched.

Any other POST, PUT, PATCH, DELETE or websocket route is guarded and held, and wakes nothing. As it may change anything,
the gate then asks engine and workers what is asleep. Any other GET passes. `tests/vllm/route_table.py` writes this page
from the routes that vLLM 0.18, 0.26 and 0.33 register.

"""


def installed_version() -> str:
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def apps() -> Iterator[Any]:
    """Servers of all models and with all options: between them they register every route."""
    os.environ.update(VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    yield _app(["--enable-offline-docs", "--enable-tokenizer-info-endpoint"])
    yield _app([], tokens_only=True)
    for pooling in POOLING:
        yield _app([], pooling=pooling)
    for score in SCORES:
        yield _app([], score=score)


def _app(line: list[str], tokens_only: bool = False, pooling: str = "embed", score: str = "bi-encoder") -> Any:
    from vllm.config import ProfilerConfig
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.tasks import SupportedTask
    from watched_server import parsed

    args = parsed(line)
    args.tokens_only, args.enable_fault_tolerance = tokens_only, True
    args.profiler_config = ProfilerConfig(profiler="torch", torch_profiler_dir="/profiles")
    tasks = tuple(_names(SupportedTask))
    model = MagicMock(score_type=score)
    model.get_pooling_task.return_value = pooling
    try:
        return build_app(args, tasks, model)
    except TypeError:  # vLLM 0.18 asks for no model
        return build_app(args, tasks)


def _names(literal: Any) -> Iterator[str]:
    for each in get_args(literal):
        yield from [each] if isinstance(each, str) else _names(each)


def routes_of(app: Any) -> set[Route]:
    return set(_walk(app.routes))


def _walk(routes: Iterable[Any], before: str = "") -> Iterator[Route]:
    for route in routes:
        if hasattr(route, "effective_route_contexts"):  # FastAPI's included routers
            inside = [getattr(each, "starlette_route", None) or each for each in route.effective_route_contexts()]
            yield from _walk(inside, before)
        elif hasattr(route, "routes"):  # a mounted application
            yield before + route.path, "any"
            yield from _walk(route.routes or (), before + route.path)
        else:
            path = before + str(getattr(route, "path_format", None) or route.path)
            for method in getattr(route, "methods", None) or ("WEBSOCKET",):
                if method != "HEAD":  # goes with GET
                    yield path, method


def installed_routes() -> set[Route]:
    routes = GATES_OWN.union(*map(routes_of, apps()))
    return routes | COHERE if importlib.util.find_spec("vllm.entrypoints.cohere") else routes


def documented(text: str) -> dict[str, set[Route]]:
    """What a document says that each version has."""
    routes: dict[str, set[Route]] = {version: set() for version in VERSIONS}
    for _, versions, some in re.findall(r"^\| (.+) \| (.+) \| (`.+`) \|$", text, re.MULTILINE):
        for version in VERSIONS if versions == "all" else versions.split(", "):
            routes[version].update((path, method) for method, path in re.findall(r"`(\S+) (\S+)`", some))
    return routes


def document(routes: dict[str, set[Route]]) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for path, method in sorted(set().union(*routes.values())):
        versions = [version for version in VERSIONS if (path, method) in routes[version]]
        some = ", ".join(versions) if len(versions) < len(VERSIONS) else "all"
        rows.setdefault((treatment(path, method), some), []).append(f"`{method} {path}`")
    lines = [f"| {gate} | {some} | {', '.join(names)} |" for (gate, some), names in sorted(rows.items())]
    return HEAD + "\n".join(("| Gate | vLLM | Routes |", "|---|---|---|", *lines)) + "\n"


def treatment(path: str, method: str) -> str:
    """What the gate does with requests of this route, in the document's words."""
    from cumem_sleep.vllm.routes import RouteKind, kind_of

    words = {
        RouteKind.CHANGES: "guarded, answered",
        RouteKind.WRITES: "guarded, refused asleep",
        RouteKind.CALLS: "guarded, refused asleep unless harmless",
        RouteKind.ADAPTS: "guarded, held",
        RouteKind.ADMINISTERS: "guarded",
        RouteKind.RUNS: "held",
        RouteKind.HEALTH: "answered",
        RouteKind.ASKS: "answered",
        RouteKind.PASSES: "passes",
        RouteKind.UNKNOWN: "**not known**",
    }
    return words[kind_of(method, path)]


def main() -> None:
    from watched_server import prepare_process

    with tempfile.TemporaryDirectory() as folder:
        prepare_process(pathlib.Path(folder))
        routes = documented(DOCUMENT.read_text() if DOCUMENT.exists() else "")
        routes[installed_version()] = installed_routes()
        DOCUMENT.write_text(document(routes))


if __name__ == "__main__":
    sys.exit(main())
