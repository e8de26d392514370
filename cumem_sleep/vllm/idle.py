"""Sleep when nobody has asked for a while. Each API server watches, and what any of them has to do prevents it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ..http.asgi import within
from ..settings import GateSettings
from . import data_parallel
from .admission import Admission
from .siblings import Busy
from .sleep_controller import ASK_WITHIN_S, SleepController
from .sleeping_model import GatePhase

logger = logging.getLogger("cumem_sleep")

LOOK_EVERY_S = 0.25
AGAIN_AFTER_S = 60.0  # after a sleep that failed


class IdleSleep:
    """Puts a model to sleep that has had no request for `GateSettings.idle_s`; does nothing where that is None."""

    def __init__(self, settings: GateSettings, controller: SleepController, admission: Admission) -> None:
        self._settings, self._controller, self._admission = settings, controller, admission
        self._requests = 0  # in progress: held here, or being answered
        self._until = 0.0  # the model stays awake, as far as this server knows
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch, once."""
        if self._settings.idle_s is not None and self._watch is None:
            self._postpone(self._settings.idle_s)
            self._watch = asyncio.create_task(self._look_always(self._settings.idle_s))

    def stop(self) -> None:
        """The server ends."""
        if self._watch is not None:
            self._watch.cancel()

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request for the model, from when it comes until it is answered."""
        self._requests += 1
        try:
            self._tell()
            yield
        finally:
            self._requests -= 1
            self._postpone(self._settings.idle_s or 0)

    def _postpone(self, seconds: float) -> None:
        self._until = max(self._until, self._controller.clock() + seconds)

    def _has_requests(self) -> bool:
        return self._requests > 0 or self._admission.unfinished > 0

    def _tell(self) -> None:
        """Tell the other API servers."""
        if self._settings.idle_s is not None and self._controller.several_servers:
            self._controller.siblings.postpone(self._until)
            self._controller.siblings.show_requests(self._has_requests())

    def _is_kept_awake(self) -> bool:
        """Whether any API server has requests, had some not long ago, or has woken the model since."""
        awake_s = max(self._settings.idle_s or 0.0, self._settings.idle_awake_s)
        until = max(self._until, self._controller.whole_since + awake_s)
        if self._controller.several_servers:
            until = max(until, self._controller.siblings.awake_until)
            if self._controller.siblings.others_have_requests():
                return True
        return self._has_requests() or self._controller.clock() < until

    async def _look_always(self, idle_s: float) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._look(idle_s)
            except Busy:
                pass  # another API server changes something
            except Exception as error:
                logger.warning("cumem-sleep gate: the model did not fall asleep by itself: %s", error)
                self._postpone(AGAIN_AFTER_S)

    async def _look(self, idle_s: float) -> None:
        model = self._controller.model
        if self._has_requests():
            self._postpone(idle_s)
        self._tell()
        if self._is_kept_awake() or not (model.serves or model.phase is GatePhase.UNKNOWN):
            return
        await self._controller.look()
        if not model.serves or self._is_kept_awake():
            return
        if why := await self._sleep():
            if model.may_be_woken:  # its scheduler has stopped
                await self._controller.wake()
            raise RuntimeError(why)

    async def _sleep(self) -> str:
        """Why it failed, in words, or ""."""
        controller, level = self._controller, self._settings.idle_level
        async with controller.change():  # nothing is let through to the engine meanwhile, by no API server
            if self._is_kept_awake() or not controller.model.may_rest or not await self._admission.empties(0):
                return ""
            if await within(ASK_WITHIN_S, data_parallel.is_any_sleeping(controller.engine)):
                return ""  # somebody has paused it
            try:
                await controller.pause_apart(level)
                await controller.engine.sleep(level)
                why = await controller.slept(level, kept=False)
            except Exception as error:
                await controller.sleep_failed()
                why = str(error) or type(error).__name__
        if not why:
            logger.info("cumem-sleep gate: asleep at level %d, since nobody asked", level)
        return why
