"""Every engine of a data-parallel deployment, asked by itself: vLLM's client passes on the first one's answer alone.

So one of them could serve while another is asleep, or half-way to it, and nobody would know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any


async def is_any_sleeping(engine: Any) -> bool:
    """Whether an engine says that it sleeps.

    Raises:
        Exception: the engine's own.
    """
    return any(map(says_sleeping, await _each(engine, engine.is_sleeping, "is_sleeping")))


def says_sleeping(answer: Any) -> bool:
    """What an engine's answer says. It may become an object (v#52864), which would always be true."""
    if isinstance(answer, Mapping):
        return bool(answer["is_sleeping"])
    return bool(getattr(answer, "is_sleeping", answer))


async def is_any_paused(engine: Any) -> bool:
    """Whether an engine says that its scheduler is paused. vLLM 0.33's client fails where engines differ.

    Raises:
        Exception: the engine's own.
    """
    return any(await _each(engine, engine.is_paused, "is_scheduler_paused"))


def sleeps_with_others(parallel: Any) -> bool:
    """Whether this server has only some of the engines that step together, and others of this deployment the rest."""
    has_others = any(getattr(parallel, f"data_parallel_{name}_lb", False) for name in ("external", "hybrid"))
    return has_others and getattr(parallel, "data_parallel_size", 1) > 1


async def call_workers(engine: Any, method: str) -> list[list[Any]]:
    """The answers of each engine's workers to a method of theirs.

    Raises:
        Exception: the engine's own.
    """

    async def of_one() -> Any:
        return await engine.collective_rpc(method)

    return [list(each) for each in await _each(engine, of_one, "collective_rpc", method, None, (), None)]


async def _each(engine: Any, of_one: Callable[[], Awaitable[Any]], utility: str, *arguments: Any) -> list[Any]:
    """The answers to a utility call of `EngineCore`, one of each engine that this client knows."""
    core = getattr(engine, "engine_core", None)
    engines = getattr(core, "core_engines", ())
    call: Any = getattr(core, "_call_utility_async", None)
    if len(engines) < 2 or call is None:
        return [await of_one()]
    return list(await asyncio.gather(*(call(utility, *arguments, engine=identity) for identity in engines)))
