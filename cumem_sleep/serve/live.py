"""The status after every change, as server-sent events: made once, however many watch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from .fleet import TOLD_EVERY_S, Fleet
from .status import FleetStatus

KEEP_ALIVE_S = 15.0  # a proxy in between takes a stream without a word for dead


class LiveStatus:
    """What all who watch are sent.

    Attributes:
        watchers: how many there are.
    """

    def __init__(self, fleet: Fleet, view: Callable[[FleetStatus, bool], dict[str, Any]]) -> None:
        """Of a status and whether it is for an operator, `view` makes what is sent."""
        self._fleet = fleet
        self._view = view
        self._status: FleetStatus | None = None
        self._made_at = 0.0
        self._events: dict[bool, bytes] = {}
        self._news: asyncio.Future[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self.watchers = 0

    def come(self) -> None:
        """Somebody watches from now on, by `events`, until `go`."""
        self.watchers += 1
        if self._following is None:
            self._news = asyncio.get_running_loop().create_future()
            self._following = asyncio.create_task(self._follow())
            self._following.add_done_callback(self._end)
        elif self._status is not None and time.monotonic() - self._made_at > TOLD_EVERY_S:
            self._take(self._fleet.status())  # times in it count from now

    def go(self) -> None:
        """One of them watches no more."""
        self.watchers -= 1
        if self.watchers == 0 and self._following is not None:
            self._following.cancel()
            self._following = self._status = None

    async def events(self, is_operator: bool) -> AsyncIterator[bytes]:
        """The status now, and then as it changes; now and then a word without any. Ends with the fleet."""
        while self._following is not None and not self._following.done():
            news = self._news
            if self._status is not None:
                yield self._event(self._status, is_operator)
            while news is not None and not (await asyncio.wait((news,), timeout=KEEP_ALIVE_S))[0]:
                yield b": still here\n\n"

    def _event(self, status: FleetStatus, is_operator: bool) -> bytes:
        if is_operator not in self._events:
            self._events[is_operator] = b"data: " + json.dumps(self._view(status, is_operator)).encode() + b"\n\n"
        return self._events[is_operator]

    async def _follow(self) -> None:
        async for status in self._fleet.watch():
            self._take(status)
            self._tell()

    def _take(self, status: FleetStatus) -> None:
        self._status, self._made_at, self._events = status, time.monotonic(), {}

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.get_running_loop().create_future()
        if news is not None:
            news.set_result(None)

    def _end(self, task: asyncio.Task[None]) -> None:
        if task is self._following:
            self._tell()
