"""Every route that `vllm serve` of the installed version can have, and docs/vllm-routes.md, which says what each is.

    python tests/vllm/route_table.py        in an environment with vLLM: bring its column up to date
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, get_args
from unittest.mock import MagicMock

Route = tuple[str, str]  # the template of its path, its method

POOLING = ("embed", "classify", "token_embed", "token_classify", "embed&token_classify", "plugin")
SCORES = ("bi-encoder", "cross-encoder", "late-interaction")


def installed_routes() -> set[Route]:
    """The routes of all models and options together: each registers its own, and the rest is the same."""
    os.environ.update(VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    routes: set[Route] = set()
    for tokens_only in (False, True):
        for pooling, score in ((pooling, score) for pooling in POOLING for score in SCORES):
            routes |= set(_walk(_app(tokens_only, pooling, score).routes))
    return routes


def _app(tokens_only: bool, pooling: str, score: str) -> Any:
    from vllm.config import ProfilerConfig
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.tasks import SupportedTask
    from watched_server import parsed

    args = parsed(["--enable-offline-docs", "--enable-tokenizer-info-endpoint"])
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


def _walk(routes: Iterable[Any], before: str = "") -> Iterator[Route]:
    for route in routes:
        if hasattr(route, "effective_route_contexts"):  # FastAPI's included routers
            inside = [getattr(each, "starlette_route", None) or each for each in route.effective_route_contexts()]
            yield from _walk(inside, before)
        elif hasattr(route, "routes"):  # a mount
            yield before + route.path, "*"
            yield from _walk(route.routes or (), before + route.path)
        else:
            path = before + str(getattr(route, "path_format", None) or route.path)
            for method in getattr(route, "methods", None) or ("WEBSOCKET",):
                yield path, method
