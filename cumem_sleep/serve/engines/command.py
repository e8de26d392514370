"""Any server that speaks OpenAI's paths and has no sleep mode: it is stopped instead, and started again.

llama.cpp, Ollama, Triton and TensorRT-LLM have such servers.
"""

from __future__ import annotations

from ..events import Outcome
from ..status import Phase
from .engine import Engine, Facts

_NO_SLEEP_MODE = "its server has no sleep mode"


class CommandEngine(Engine):
    """It is awake as long as its process lives."""

    NAME = "command"
    LEVELS = ()

    async def look(self) -> Outcome:
        """Awake if it is healthy."""
        return Outcome(None, Phase.AWAKE) if await self.is_healthy() else Outcome("its health check fails")

    async def sleep(self, level: int, from_level: int | None = None) -> Outcome:
        """Not supported."""
        return Outcome(_NO_SLEEP_MODE, Phase.AWAKE)

    async def wake(self, level: int) -> Outcome:
        """Awake while it is healthy."""
        return await self.look()

    async def facts(self) -> Facts:
        """It holds nothing on the host for a sleep."""
        return Facts(host_bytes=0)
