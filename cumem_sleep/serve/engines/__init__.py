"""The engines whose servers can stand behind the front, one a file: a new one is a line in `ENGINES`."""

from __future__ import annotations

from collections.abc import Mapping

from .engine import Engine
from .vllm import VllmEngine

ENGINES: Mapping[str, type[Engine]] = {"vllm": VllmEngine}
