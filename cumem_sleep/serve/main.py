"""Runs a front over a configuration until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..http.asgi import within
from . import tracing
from .config import Config, ConfigError
from .fleet import Fleet, LookAtVaults, ReadAhead
from .front import Front
from .listener import Listener, allow_many_connections
from .lock import Lock

LOOK_AT_FILE_EVERY_S = 2.0

logger = logging.getLogger("cumem_sleep.serve")

Say = Callable[[str], None]
Load = Callable[[Path], Config]


async def serve(
    config: Config,
    path: Path | None,
    load: Load,
    say: Say,
    started: Callable[[int], None],
    look_at_vaults: LookAtVaults,
    read_ahead: ReadAhead,
    simulated: bool,
    lock: Lock | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. SIGHUP, or a change of the file, reloads what can be.

    Args:
        path: of the file that `config` was read from; None if it was not.
        load: reads that file again, with the options of the command line; raises `ConfigError`.
        say: for a line to people.
        started: called with the port, when requests are taken.
        look_at_vaults: asks those that keep the backups of models.
        read_ahead: has one of them read what it has in files.
        lock: of the file, which servers keep until they have ended.

    Raises:
        OSError: the port cannot be had, nothing can be written to the folder of the logs, or the vault does not start.
    """
    allow_many_connections()
    traces = tracing.from_environment(os.environ)
    fleet = Fleet(
        config,
        simulated=simulated,
        look_at_vaults=look_at_vaults,
        read_ahead=read_ahead,
        lock=lock,
        tracing=traces,
    )
    front = Front(fleet)
    listener = Listener(front, config.front.host, config.front.port)
    ended = asyncio.Event()
    reloader = _Reloader(fleet, path, load, say)
    handlers = {signal.SIGTERM: ended.set, signal.SIGINT: ended.set, signal.SIGHUP: reloader.wanted.set}
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        await fleet.start()
        await listener.start()
        _collect_seldom()
        watching = asyncio.create_task(reloader.run())
        try:
            started(listener.port)
            await ended.wait()
            say("shuts down: requests first, then servers")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        await asyncio.gather(listener.stop(), fleet.stop())
        await front.close()
        if traces is not None:
            await asyncio.to_thread(traces.end)
        for number in handlers:
            loop.remove_signal_handler(number)  # uvloop would leave them to a process that lives on


def _collect_seldom() -> None:
    """A collection of everything stops all streams for 10 ms and more: it leaves out what stays, and comes seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class _Reloader:
    """Takes a new configuration when it is told to, or when the file has changed.

    Attributes:
        wanted: set to have the file read now.
    """

    def __init__(self, fleet: Fleet, path: Path | None, load: Load, say: Say) -> None:
        self._fleet = fleet
        self._path = path
        self._load = load
        self._say = say
        self._seen = self._stamp()
        self.wanted = asyncio.Event()

    async def run(self) -> None:
        """Watch the file, until cancelled."""
        while self._path is not None:
            with suppress(asyncio.TimeoutError):
                await within(LOOK_AT_FILE_EVERY_S, self.wanted.wait())
            stamp = self._stamp()
            if self.wanted.is_set() or stamp not in (self._seen, None):
                self.wanted.clear()
                self._seen = stamp
                try:
                    await self._reload(self._path)
                except Exception:  # the next change of the file may be taken
                    logger.exception("the configuration was not reloaded")

    async def _reload(self, path: Path) -> None:
        try:
            config = await asyncio.to_thread(self._load, path)  # of a long file this takes seconds
        except ConfigError as error:
            self._say(f"the configuration stays as it is: {error}")
            return
        for line in await self._fleet.reload(config) or ["nothing in the configuration has changed"]:
            self._say(f"reload: {line}")

    def _stamp(self) -> tuple[int, int] | None:
        """By which a change of the file is seen; None while there is none, as in the middle of an editor's saving."""
        with suppress(OSError, AttributeError):
            found = self._path.stat()  # type: ignore[union-attr]
            return found.st_mtime_ns, found.st_ino
        return None
