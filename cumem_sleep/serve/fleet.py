"""Joins the scheduler, the servers and the clock: what the HTTP front asks for a model, and what it shows.

    fleet = Fleet(config)
    await fleet.start()
    async with fleet.lease("qwen-8b") as lease:    # wakes the model, makes room, waits
        ...                                        # send the request to lease.server
    await fleet.stop()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from .config import Config
from .status import Counters, Status


class ServeError(Exception):
    """Base of what the fleet raises. Its text is for the client."""


class UnknownModel(ServeError):
    """No model has this name or alias (404)."""


class NotInTime(ServeError):
    """The model could not be had in time, or will not (503).

    Attributes:
        retry_after_s: when it is worth trying again.
    """

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class ServerFailed(NotInTime):
    """Its server cannot be started or woken, again and again (503)."""


class Refused(ServeError):
    """An operator's call cannot be done now (409)."""


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Attributes:
        base_url: such as `http://127.0.0.1:8101`, without a slash at the end; with a Unix socket `http://model`.
        socket: path of the Unix socket; None for TCP.
        headers: to send along, such as the server's own API key.
    """

    base_url: str
    socket: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(eq=False)
class Lease:
    """A request's right to use a model, which stays awake as long as it lasts.

    Attributes:
        model: its name.
        server: where to send the request.
        waited_s: until it was granted.
        revoked: set with the reason when the request has to end now: it ran longer than the drain allows, an operator
            forced a sleep, or the server died. The front ends the request upstream, and the answer with an error.
    """

    model: str
    server: Address
    waited_s: float = 0.0
    revoked: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Fleet:
    """All models of one configuration."""

    def __init__(self, config: Config, *, simulated: bool = False) -> None:
        self.config = config
        self.counters = Counters()
        self.simulated = simulated

    async def start(self) -> None:
        """Begin: returns at once; servers start one after the other in the background."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End all leases, then all servers that this fleet started, and return when nothing of them is left."""
        raise NotImplementedError

    def resolve(self, model: str) -> str:
        """The name of a model by its name or alias.

        Raises:
            UnknownModel: there is none.
        """
        raise NotImplementedError

    def lease(self, model: str) -> AbstractAsyncContextManager[Lease]:
        """Wait until a model (name or alias) is awake, and keep it so. Cancelling it withdraws the request.

        Raises, on entering:
            UnknownModel: nobody has this name.
            NotInTime: not within the model's `wait`, or too many wait already.
            ServerFailed: starting or waking it fails again and again.
        """
        raise NotImplementedError

    def report_failure(self, lease: Lease, error: str) -> None:
        """The front could not reach the server of a lease, or it broke off: its health is looked at, at once."""
        raise NotImplementedError

    def status(self) -> Status:
        """Everything at this moment."""
        raise NotImplementedError

    def watch(self) -> AsyncIterator[Status]:
        """The status now, and after every change (changes that come close together are one). Ends with the fleet."""
        raise NotImplementedError

    async def sleep(self, model: str, level: int | None = None) -> None:
        """Put a model to sleep, drained first; returns when it sleeps.

        Raises:
            UnknownModel, Refused, NotInTime.
        """
        raise NotImplementedError

    async def wake(self, model: str) -> None:
        """Wake or start a model, as a request would; returns when it is awake.

        Raises:
            UnknownModel, NotInTime, ServerFailed.
        """
        raise NotImplementedError

    async def stop_model(self, model: str) -> None:
        """Stop a model's server; the next request starts it again.

        Raises:
            UnknownModel, Refused: somebody else started it; NotInTime.
        """
        raise NotImplementedError

    async def reload(self, config: Config) -> list[str]:
        """Take a new configuration; returns what was changed, and what only a restart changes, in sentences."""
        raise NotImplementedError

    def log_tail(self, model: str, lines: int = 100) -> list[str]:
        """The end of its server's log; empty if somebody else started it.

        Raises:
            UnknownModel.
        """
        raise NotImplementedError
