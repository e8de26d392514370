"""The engines whose servers can stand behind the front, one a file: a new one is one more in `ENGINES`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .command import CommandEngine
from .engine import Engine
from .sglang import SglangEngine
from .vllm import VllmEngine

ENGINES: Mapping[str, type[Engine]] = {each.NAME: each for each in (VllmEngine, SglangEngine, CommandEngine)}


def started_by(command: Sequence[str]) -> type[Engine] | None:
    """The engine whose server a command starts, perhaps within a shell; None if nobody knows it."""
    return next((each for each in ENGINES.values() if each.is_started_by(each.words(command))), None)
