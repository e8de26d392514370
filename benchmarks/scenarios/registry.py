"""The scenarios by name, and how one says what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
SCENARIOS: dict[str, tuple[Callable[[Path], Facts], dict[str, str]]] = {}
ALONE: set[str] = set()  # those that take the whole GPU
OTHER_SHAPES: set[str] = set()  # larger models, left out unless named
TWO_GPUS: set[str] = set()  # left out unless named, or asked for by `--gpus 2`
LIMIT_S = 360
LIMITS_S: dict[str, float] = {}  # of those that take longer than most, whatever limit the others have


def scenario(
    *, alone: bool = False, other_shape: bool = False, gpus: int = 1, limit_s: float = 0, **environment: str
) -> Callable[[Callable[[Path], Facts]], Callable[[Path], Facts]]:
    """Registers a function under its name, to be run with these environment variables."""

    def register(function: Callable[[Path], Facts]) -> Callable[[Path], Facts]:
        SCENARIOS[function.__name__] = (function, environment)
        if alone:
            ALONE.add(function.__name__)
        if other_shape:
            OTHER_SHAPES.add(function.__name__)
        if gpus > 1:
            TWO_GPUS.add(function.__name__)
        if limit_s:
            LIMITS_S[function.__name__] = limit_s
        return function

    return register


def check(what: str, holds: object) -> None:
    if not holds:
        raise AssertionError(what)


@contextmanager
def timed(facts: Facts, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    facts.setdefault(name, []).append(round(time.perf_counter() - start, 4))
