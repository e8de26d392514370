"""SGLang: its command, and its calls for releasing and resuming memory.

Source: SGLang 0.5.11, `srt/entrypoints/http_server.py` (the paths), `srt/managers/scheduler_update_weights_mixin.py`
(what they do), `srt/managers/scheduler.py: flush_cache_wrapped, is_fully_idle`, `srt/server_args.py` (the options).

- `/release_memory_occupation` and `/resume_memory_occupation` take `tags` (`kv_cache`, `weights`, `cuda_graph`; all
  without them), and answer 200 with `null`. A release while a request runs, and a second release or resume, end its
  scheduler, and with it the server. So requests are waited for, and no call is made again whose answer was lost.
- `/flush_cache?timeout=S` answers 200 when no request is in it any more, and 400 if that takes longer. A release ends
  no request.
- No path says what is released; what its processes hold, NVML does. Without `--enable-memory-saver` a release succeeds
  and releases nothing, and without `--enable-weights-cpu-backup` weights are lost. `/server_info` has both, and what
  each GPU holds.
- `/health` runs a request unless others run, so it must not be asked while weights are released.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx

from ..address import Address
from ..command import packages_beside, values
from ..events import Outcome
from ..status import Phase
from .engine import ASK_WITHIN_S, Engine, Facts, error_of, text_of

SAVES_MEMORY = ("--enable-memory-saver", "--enable-weights-cpu-backup")
_SHIM = Path("cumem_sleep/integrations/torch_memory_saver/shim")
_NEVER_REACHED_IT = (401, 403, 404, 405, 422)  # a key is wrong, or there is no such path or body


class SglangEngine(Engine):
    """A server of SGLang: what it is in, it does not say, so this front has to start it, and remembers or asks NVML."""

    NAME = "sglang"
    LEVELS = (1,)
    PROGRAM = "sglang serve"
    SERVING = ("sglang",)
    MODULE = "sglang.launch_server"
    OPEN: ClassVar[Mapping[str, str]] = {"--port": "{port}"}
    IN_SHELL = f"--port {{port}} {' '.join(SAVES_MEMORY)}"

    # Its command

    @classmethod
    def wrong_places(cls, command: Sequence[str]) -> Iterator[str]:
        """It has no Unix socket, either."""
        yield from super().wrong_places(command)
        if cls.is_started_by(cls.words(command)) and any("{socket}" in word for word in command):
            yield "sglang has no Unix socket: leave {socket} out"

    @classmethod
    def is_complete(cls, words: Sequence[str]) -> bool:
        """It listens at loopback unless it is told otherwise."""
        return bool(values(words, "--port")) and all(option in words for option in SAVES_MEMORY)

    @classmethod
    def completed(
        cls, words: Sequence[str], names: Sequence[str], address: Address, token: str | None, from_vault: bool = False
    ) -> list[str]:
        """With where it listens, its name (it has but one), and what lets it release memory and keep its weights."""
        if not cls.is_started_by(words):
            return list(words)
        wanted = {"--host": cls.listening_host(words), "--port": address.port, "--served-model-name": names[0]}
        return [*words, *cls._lacking(words, wanted), *(option for option in SAVES_MEMORY if option not in words)]

    @classmethod
    def environment(
        cls, command: Sequence[str], variables: Mapping[str, str], api_key: str | None, token: str | None
    ) -> dict[str, str]:
        """Where this layer is installed beside SGLang, it takes torch_memory_saver's place. Backups are kept."""
        own = {"TMS_RETAIN_CPU_BACKUP": "1", **variables}
        packages = packages_beside(command, variables, "sglang") if cls.is_started_by(command) else None
        if packages is not None:
            shim = packages / _SHIM  # an editable installation has its files elsewhere
            shim = shim if shim.is_dir() else Path(__file__).parents[3] / _SHIM
            others = [each for each in variables.get("PYTHONPATH", "").split(":") if each]
            own["PYTHONPATH"] = ":".join([str(shim), *others])
        return own

    # Its calls

    def __init__(self, address: Address, within_s: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__(address, within_s, transport)
        self._state: Phase | None = Phase.AWAKE
        self._turn = asyncio.Lock()  # a health check runs a request, which a release must not meet

    async def is_healthy(self) -> bool:
        """Whether it answers its health check; asleep it is not asked."""
        async with self._turn:
            return self._state is Phase.ASLEEP or await super().is_healthy()

    async def look(self) -> Outcome:
        """What it is in by the calls that were answered."""
        if self._state is None:
            return Outcome("the answer of a release or resume was lost")
        return Outcome(None, self._state, 1 if self._state is Phase.ASLEEP else None)

    def note(self, state: Phase) -> None:
        """Somebody else may have made such a call, or its answer was lost."""
        self._state = state

    async def sleep(self, level: int, from_level: int | None = None) -> Outcome:
        """Release all, when no request is in it any more."""
        async with self._turn:
            if self._state is Phase.ASLEEP:
                return Outcome(None, Phase.ASLEEP, 1)
            why = await self._why_not_released()
            if why:
                return Outcome(why, self._state)
            return await self._move("/release_memory_occupation", Phase.ASLEEP)

    async def wake(self, level: int) -> Outcome:
        """Resume all."""
        async with self._turn:
            if self._state is Phase.AWAKE:
                return Outcome(None, Phase.AWAKE)
            return await self._move("/resume_memory_occupation", Phase.AWAKE)

    async def facts(self) -> Facts:
        """What its GPUs hold. Who saves the memory, it does not say."""
        try:
            info = await self._info()
            usage = [state["memory_usage"] for state in info["internal_states"]]
            weights_gib = max(float(each["weight"]) for each in usage)
            all_gib = max(float(each["weight"]) + float(each["kvcache"]) for each in usage)
            gpus = int(info["tp_size"]) * int(info["pp_size"]) * (1 if info["enable_dp_attention"] else info["dp_size"])
            missing_gib = all_gib if self._state is Phase.ASLEEP else 0.0
            return Facts(host_bytes=_bytes(weights_gib) * int(gpus), wake_bytes=_bytes(missing_gib))
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError, OverflowError):
            return Facts()

    async def _info(self) -> Any:
        return (await self.ask("GET", "/server_info", ASK_WITHIN_S)).raise_for_status().json()

    async def _why_not_released(self) -> str:
        """Why a release would fail or lose something; "" if it would not."""
        try:
            info = await self._info()
            if not (info["enable_memory_saver"] and info["enable_weights_cpu_backup"]):
                return f"its server cannot release its memory and keep its weights: it needs {' '.join(SAVES_MEMORY)}"
            path = f"/flush_cache?timeout={0.9 * self._within_s:g}"
            answer = await self.ask("POST", path)
            return "" if answer.is_success else f"/flush_cache: {answer.status_code}: {error_of(answer)}"
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            return text_of(error)

    async def _move(self, path: str, to: Phase) -> Outcome:
        """A call that must not be made again; if it failed, nobody knows what is released."""
        before, self._state = self._state, None
        try:
            answer = await self.ask("POST", path, json={})
        except (httpx.HTTPError, OSError) as error:
            return Outcome(f"{path}: {text_of(error)}")
        if answer.is_success:
            self._state = to
            return Outcome(None, to, 1 if to is Phase.ASLEEP else None)
        if answer.status_code in _NEVER_REACHED_IT:
            self._state = before
        return Outcome(f"{path}: {answer.status_code}: {error_of(answer)}", self._state)


def _bytes(gib: float) -> int:
    """It says how much in GiB with two decimals. Raises: ValueError: less than nothing."""
    if gib < 0:
        raise ValueError(f"{gib} GiB")
    return math.ceil((gib + 0.01) * (1 << 30)) if gib else 0
