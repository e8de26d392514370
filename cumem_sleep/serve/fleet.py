"""Joins the scheduler, the servers and the clock: what the HTTP front asks for a model, and what it shows.

fleet = Fleet(config)
await fleet.start()
async with fleet.lease("qwen-8b") as lease:    # wakes the model, makes room, waits
    ...                                        # send the request to lease.server
await fleet.stop()
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ..http.asgi import within
from . import actions, events, hardware, servers
from .address import Address
from .config import Config
from .engines.engine import Failed
from .lock import Lock
from .model import Model
from .policy import STOP, Spec
from .scheduler import Scheduler
from .status import FOUND, Counters, FleetStatus, GpuStatus, Holder, HostStatus, ModelStatus, Phase, VaultStatus
from .tracing import Tracing
from .units import HOST_RESERVE_BYTES, Unit, Units, spawn

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["Address", "Fleet", "ModelLease", "NotInTime", "OrderRefused", "ServeError", "ServerFailed", "UnknownModel"]

logger = logging.getLogger("cumem_sleep.serve")

TOLD_EVERY_S = 0.25  # those who watch hear of changes at most so often
METRICS_AGAIN_S = 15.0
SAME_AGAIN_S = 15.0  # a proxy in between takes a stream without a word for dead
LOOK_AT_MACHINE_EVERY_S = 5.0
LEASES_END_WITHIN_S = 5.0
SIMULATED_GPU_BYTES = 80 << 30


LookAtVaults = Callable[[Collection[str]], VaultStatus | None]
"""Asks the vaults at these sockets (`auto` is the user's own); None if none answers. It may take seconds."""
ReadAhead = Callable[[str, Collection[int]], None]
"""Has the vault at this socket read what these processes have in files. It may take seconds."""


class ServeError(Exception):
    """Base of what the fleet raises. Its text is for the client."""


class UnknownModel(ServeError):
    """No model has this name or alias (404)."""


class NotInTime(ServeError):
    """The model could not be had in time, or will not (503).

    Attributes:
        retry_after_s: when it is worth trying again.
        details: the last words of a server that failed, for operators alone.
    """

    def __init__(self, why: str, retry_after_s: float, details: str = "") -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s
        self.details = details


class ServerFailed(NotInTime):
    """Its server cannot be started or woken, again and again (503)."""


class OrderRefused(ServeError):
    """An operator's call cannot be done now (409)."""


@dataclass(eq=False)
class ModelLease:
    """A request's right to use a model, which stays awake as long as it lasts.

    Attributes:
        model: its name.
        server: where to send the request.
        arrived, granted: when it was asked for and given, by the monotonic clock.
        found: what the request found the model in, as in `status.FOUND`.
        revoked: set with the reason when the request has to end now: it ran longer than the drain allows, an operator
            forced a sleep, or the server died. The front ends the request upstream, and the answer with an error.
        names: that the server knows its model by; empty if it does not say.
    """

    model: str
    server: Address
    arrived: float = 0.0
    granted: float = 0.0
    found: str = "awake"
    names: tuple[str, ...] = ()
    revoked: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(eq=False)
class _Waiting:
    """A request that is not granted yet.

    Attributes:
        arrived, found: as in its lease.
        waited_s: what requests of its model had waited by then, by cause.
        span: of the request, if there is one.
    """

    granted: asyncio.Future[ModelLease]
    state: Model
    arrived: float
    found: str
    waited_s: dict[str, float]
    span: Span | None


class Fleet:
    """All models of one configuration."""

    def __init__(
        self,
        config: Config,
        *,
        simulated: bool = False,
        look_at_vaults: LookAtVaults = lambda _sockets: None,
        read_ahead: ReadAhead = lambda _socket, _pids: None,
        lock: Lock | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`lock`: is held until the last server has ended, even if this process is killed."""
        self.config = config
        self.counters = Counters()
        self.simulated = simulated
        self.tracing = tracing
        self._version = metadata.version("cumem-sleep")
        self._look_at_vaults, self._read_ahead = look_at_vaults, read_ahead
        self._vault: VaultStatus | None = None
        self._found_host_bytes = 0
        self._names = config.names()
        self._scheduler = Scheduler((), 0)
        told = (self._scheduler.models, self.counters, self._handle)
        self._units = Units(config, *told, simulated=simulated, lock=lock, tracing=tracing)
        self._requests = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._leases: dict[int, ModelLease] = {}
        self._orders: dict[tuple[str, int], list[asyncio.Future[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._closed = self._draining = False

    # Life

    async def start(self) -> None:
        """Begin: returns at once; servers start one after the other in the background.

        Raises:
            OSError: nothing can be written to the folder of the logs, or its own vault does not start.
        """
        self._units.check_logs()
        await self._units.start_vault()
        await self._look_at_gpus()
        self._found_host_bytes = await self._find_host_bytes()
        self._units.configure(self.config)
        self._handle(events.Configured(self._specs(), self._budget()))
        spawn(self._tasks, self._watch_machine())

    async def stop(self) -> None:
        """End all leases, then all servers that this fleet started, and return when nothing of them is left."""
        if self._closed:
            return
        self._closed = True
        for waiting in list(self._waiting.values()):
            _fail(waiting.granted, NotInTime("this front is shutting down", 10.0))
        for obeyed in itertools.chain.from_iterable(self._orders.values()):
            _fail(obeyed, NotInTime("this front is shutting down", 10.0))
        for lease in list(self._leases.values()):
            _resolve(lease.revoked, "this front is shutting down")
        ends_at = time.monotonic() + LEASES_END_WITHIN_S
        while self._leases and time.monotonic() < ends_at:
            await asyncio.sleep(0.01)
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await self._units.end()
        self._tell()

    async def reload(self, config: Config) -> list[str]:
        """Take a new configuration; returns what was changed, and what only a restart changes, in sentences."""
        says = []
        old = self.config
        if (old.front, old.vault, old.logs) != (config.front, config.vault, config.logs):
            says.append("front, vault and logs are read at the start alone: restart to change them")
            config = replace(config, front=old.front, vault=old.vault, logs=old.logs)
        for name in config.models.keys() - old.models.keys():
            says.append(f"{name} was added")
        for name in old.models.keys() - config.models.keys():
            says.append(f"{name} is removed when its requests have ended")
        for name in sorted(config.models.keys() & old.models.keys()):
            if old.models[name] != config.models[name]:
                restarts = old.models[name].spec(name).identity != config.models[name].spec(name).identity
                says.append(f"{name} was changed" + (": its server restarts when its requests have ended" * restarts))
        self.config, self._names = config, config.names()
        self._units.configure(config)
        self._handle(events.Configured(self._specs(), self._budget()))
        return says

    # Requests

    def resolve(self, model: str) -> str:
        """The name of a model by its name or alias.

        Raises:
            UnknownModel: there is none.
        """
        name = self._names.get(model)
        if name is None:
            raise UnknownModel(f"there is no model {model!r}: there are {', '.join(self.config.models)}")
        return name

    @asynccontextmanager
    async def lease(
        self, model: str, span: Span | None = None, patience_s: float = math.inf
    ) -> AsyncIterator[ModelLease]:
        """Wait until a model (name or alias) is awake, and keep it so. Cancelling it withdraws the request.

        Args:
            span: of the request, in which it waits.
            patience_s: how long it waits, if that is less than the model's `wait`.

        Raises, on entering:
            UnknownModel: nobody has this name.
            NotInTime: not within the model's `wait`, or too many wait already.
            ServerFailed: starting or waking it fails again and again.
        """
        name = self.resolve(model)
        if self._closed:
            raise NotInTime("this front is shutting down", 10.0)
        if self._draining:
            raise NotInTime("this front is being drained", 10.0)
        if len(self._waiting) >= self.config.front.max_waiting:
            self.counters.requests[name, "not_in_time"] += 1
            raise NotInTime("too many requests are already waiting", 5.0)
        request, now = next(self._requests), time.monotonic()
        state = self._scheduler.models[name]
        granted: asyncio.Future[ModelLease] = asyncio.get_running_loop().create_future()
        waited_s = self._scheduler.waited_s(state, now)
        self._waiting[request] = _Waiting(granted, state, now, FOUND[state.phase], waited_s, span)
        try:
            try:
                if len(state.waiting) == 0 and state.phase is Phase.ASLEEP:
                    spawn(self._tasks, self._ask_to_read_ahead(self._units[name]))
                self._handle(events.Arrived(request, name, now + min(patience_s, state.spec.wait_s)))
                lease = await granted
            except ServeError as error:
                self.counters.requests[name, "failed" if isinstance(error, ServerFailed) else "not_in_time"] += 1
                raise
            except asyncio.CancelledError:
                self.counters.requests[name, "cancelled"] += 1
                raise
            finally:
                self._count_wait(name, self._waiting.pop(request))
            self.counters.requests[name, "granted"] += 1
            yield lease
        finally:
            self._leases.pop(request, None)
            self._handle(events.Gone(request))

    def report_failure(self, lease: ModelLease, error: str) -> None:
        """The front could not reach the server of a lease, or it broke off: its health is looked at, at once."""
        if not self._closed:
            self._units.suspect(lease.model, lease.server, error)

    async def until_looked_at(self, model: str) -> None:
        """Returns when that is done, or soon. With a lease nobody should wait for it: a dead server's are revoked.

        Raises:
            UnknownModel.
        """
        await self._units.until_looked_at(self.resolve(model))

    async def metrics_of(self, model: str) -> str:
        """The metrics that its server has itself. One that does not run is not started for them.

        Raises:
            UnknownModel, ServerFailed: it has none now.
        """
        name = self.resolve(model)
        phase, engine = self._scheduler.models[name].phase, self._units[name].engine
        if engine is None or phase in (Phase.STOPPED, Phase.STARTING, Phase.STOPPING):
            raise ServerFailed(f"{name} is {phase.value}: its server has no metrics now", METRICS_AGAIN_S)
        try:
            return await engine.metrics()
        except (Failed, RuntimeError) as error:  # RuntimeError: it was stopped meanwhile
            raise ServerFailed(f"the metrics of {name}'s server: {error}", METRICS_AGAIN_S) from None

    # What an operator does

    async def sleep(self, model: str, level: int | None = None) -> None:
        """Put a model to sleep, drained first; returns when it sleeps.

        Raises:
            UnknownModel, OrderRefused, NotInTime.
        """
        name = self.resolve(model)
        spec, has = self._scheduler.models[name].spec, self.config.models[name].kind.LEVELS
        default = min((each for each in spec.levels if each != STOP), default=next(iter(has), STOP))
        wanted = level if level is not None else default
        if type(wanted) is not int or wanted not in (*has, default):
            raise OrderRefused(f"level {level}: {name} has {', '.join(map(str, has)) or 'no sleep mode, only stop'}")
        await self._order(name, wanted)

    async def wake(self, model: str) -> None:
        """Wake or start a model, as a request would; returns when it is awake.

        Raises:
            UnknownModel, NotInTime, ServerFailed.
        """
        await self._units.ask(self.resolve(model))
        async with self.lease(model):
            pass

    async def stop_model(self, model: str) -> None:
        """Stop a model's server; the next request starts it again.

        Raises:
            UnknownModel, OrderRefused: somebody else started it; NotInTime.
        """
        await self._order(self.resolve(model), STOP)

    def drain(self, on: bool) -> None:
        """Take no requests, and turn those away that wait, until told otherwise. Those that run end by themselves."""
        self._draining = on
        for waiting in list(self._waiting.values()) if on else ():
            _fail(waiting.granted, NotInTime("this front is being drained", 10.0))
        self._tell()

    async def _order(self, name: str, depth: int) -> None:
        await self._units.ask(name)
        state = self._scheduler.models[name]
        within_s = state.spec.drain_s + 3 * self.config.models[name].switch_timeout
        obeyed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._orders.setdefault((name, depth), []).append(obeyed)
        self._handle(events.Ordered(name, depth))
        try:
            await within(within_s, obeyed)
        except asyncio.TimeoutError:
            raise NotInTime(
                f"{name} is still {state.phase.value}; the request will be carried out when it can", 10.0
            ) from None

    # What there is to see

    def status(self) -> FleetStatus:
        """Everything at this moment."""
        now, wall = time.monotonic(), time.time()
        models = tuple(self._model_status(unit, now, wall) for unit in self._units if self._knows(unit))
        numbers = sorted({gpu for model in models for gpu in model.gpus})
        held, kept = self._scheduler.held_bytes(), self._scheduler.kept_bytes()
        host = HostStatus(self._scheduler.host_bytes, held, hardware.host_available_bytes(), self._vault, kept)
        gpus = tuple(self._gpu_status(number) for number in numbers)
        return FleetStatus(wall, self._version, self.simulated, gpus, models, host, self._draining)

    async def watch(self) -> AsyncIterator[FleetStatus]:
        """The status now, after every change (those that come close together are one), and now and then without any.

        Ends with the fleet.
        """
        while True:
            news = self._news
            yield self.status()
            if self._closed:
                return
            await asyncio.sleep(TOLD_EVERY_S)
            with suppress(asyncio.TimeoutError):
                await within(SAME_AGAIN_S, news.wait())

    def log_tail(self, model: str, lines: int = 100) -> list[str]:
        """The end of its server's log; empty if somebody else started it.

        Raises:
            UnknownModel.
        """
        server = self._units[self.resolve(model)].server
        return server.tail(lines) if server is not None else []

    def _knows(self, unit: Unit) -> bool:
        return unit.name in self._scheduler.models

    def _model_status(self, unit: Unit, now: float, wall: float) -> ModelStatus:
        state, vault = self._scheduler.models[unit.name], self._vault
        files_bytes = 0
        if vault is not None and state.phase is Phase.ASLEEP:
            files_bytes = sum(vault.spilled_by_pid.get(pid, 0) for pid in unit.pids)
        files_gbps = vault.files_gbps if vault is not None else None
        return ModelStatus(
            name=unit.name,
            aliases=unit.aliases,
            gpus=tuple(sorted(state.spec.gpus)),
            share=state.spec.share,
            phase=state.phase,
            level=state.level if state.phase is Phase.ASLEEP else None,
            phase_since=wall - (now - state.phase_since),
            waiting=len(state.waiting),
            oldest_wait_s=max(0.0, now - state.oldest) if state.waiting else 0.0,
            running=len(state.running),
            last_switch=unit.last_switch,
            host_bytes=state.held_bytes,
            error=state.error,
            last_words=unit.last_words or None,
            retry_in_s=state.retry_at - now if state.retry_at > now else None,
            url=str(unit.address) if unit.address is not None else None,
            log=str(unit.server.log) if unit.server is not None else None,
            pid=unit.server.pid if unit.server is not None else None,
            restarts=unit.restarts,
            layer=unit.layer,
            in_vault=state.in_vault,
            kept_bytes=state.kept_bytes,
            files_bytes=files_bytes,
            files_s=files_bytes / files_gbps / 1e9 if files_bytes and files_gbps else None,
            engine=unit.engine_name,
        )

    def _gpu_status(self, number: int) -> GpuStatus:
        models = self._scheduler.models.values()
        holding = [model for model in models if number in model.spec.gpus and model.holds]
        holders = tuple(Holder(model.spec.name, model.spec.share, model.phase) for model in holding)
        gpu = self._units.gpus.get(number)
        if gpu is not None:
            return GpuStatus(number, gpu.name, gpu.total_bytes, gpu.used_bytes, holders)
        if self.simulated:
            used = int(sum(holder.share for holder in holders) * SIMULATED_GPU_BYTES)
            return GpuStatus(number, "simulated GPU", SIMULATED_GPU_BYTES, used, holders)
        return GpuStatus(number, "GPU", None, None, holders)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # Events and actions

    def _handle(self, event: events.FrontEvent) -> None:
        if self._closed:
            return
        for action in self._scheduler.handle(event, time.monotonic()):
            self._act(action)
        self._set_timer()
        self._tell()

    def _act(self, action: actions.Action) -> None:
        match action:
            case actions.Grant():
                self._grant(action.request)
            case actions.Refuse():
                kind = ServerFailed if action.failed else NotInTime
                waiting = self._waiting[action.request]
                details = self._units[waiting.state.spec.name].last_words
                _fail(waiting.granted, kind(action.why, action.retry_after_s, details))
            case actions.Revoke():
                if action.request in self._leases:
                    _resolve(self._leases[action.request].revoked, action.why)
            case actions.Obeyed():
                for future in self._orders.pop((action.model, action.depth), ()):
                    _fail(future, OrderRefused(action.error)) if action.error else _resolve(future, None)
            case actions.GiveUpKept():
                self._units.give_up_kept(action)
            case actions.Removed():
                if (engine := self._units.remove(action.model)) is not None:
                    spawn(self._tasks, engine.close())
            case _:
                self._units.begin(action, self._span_behind(action))

    def _span_behind(self, action: actions.Change) -> Span | None:
        """Of the request that a change is for: the one that has waited longest for this model, or for its GPUs."""
        if self.tracing is None:
            return None
        state, makes_room = self._scheduler.models[action.model], isinstance(action, actions.Sleep | actions.Stop)
        waited = [
            model
            for model in self._scheduler.models.values()
            if model.waiting and (model is state or (makes_room and model.spec.gpus & state.spec.gpus))
        ]
        oldest = min(waited, key=lambda model: model.queue_position, default=None)
        return None if oldest is None else self._waiting[next(iter(oldest.waiting))].span

    def _grant(self, request: int) -> None:
        waiting = self._waiting[request]
        name = waiting.state.spec.name
        unit = self._units[name]
        assert unit.address is not None, "a model that is awake has an address"
        now = time.monotonic()
        self.counters.actuation[name, waiting.found].observe(now - waiting.arrived)
        lease = ModelLease(name, unit.address, waiting.arrived, now, waiting.found, unit.names)
        self._leases[request] = lease
        _resolve(waiting.granted, lease)

    def _count_wait(self, name: str, waiting: _Waiting) -> None:
        """However it ended: those that were refused or left have waited, too."""
        now = time.monotonic()
        if self.tracing is not None:
            self.tracing.span("queue", waiting.span, waiting.arrived, now, model=name, found=waiting.found)
        for cause, seconds in self._scheduler.waited_s(waiting.state, now).items():
            more_s = seconds - waiting.waited_s.get(cause, 0.0)
            if more_s > 0:
                key = (name, cause)
                self.counters.waited_seconds[key] = self.counters.waited_seconds.get(key, 0.0) + more_s

    def _set_timer(self) -> None:
        at = self._scheduler.next_time()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, at
        if at < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - time.monotonic()), self._time_passed)

    def _time_passed(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._handle(events.TimePassed())

    # Facts

    def _specs(self) -> tuple[Spec, ...]:
        return tuple(model.spec(name) for name, model in self.config.models.items())

    def _budget(self) -> int:
        """What sleepers may hold, those in the vault aside."""
        return self.config.host_memory if self.config.host_memory is not None else self._found_host_bytes

    async def _find_host_bytes(self) -> int:
        """What the host can give to sleepers. Found before servers start: later, backups have a part of it already.

        What the vault has taken is missing there. What it has yet to take will be.
        """
        inherited = self._units.variables
        vault = await self._ask_vaults({servers.vault_of(model, inherited) for model in self.config.models.values()})
        available = hardware.host_available_bytes()
        if available is None or self.simulated:
            return 1 << 50
        return max(0, available - HOST_RESERVE_BYTES - (vault.to_come_bytes if vault is not None else 0))

    async def _ask_vaults(self, sockets: set[str]) -> VaultStatus | None:
        named = sockets - {""}
        return await asyncio.to_thread(self._look_at_vaults, named) if named else None

    async def _ask_to_read_ahead(self, unit: Unit) -> None:
        """Others have to leave its GPUs first: the disk can be at work meanwhile."""
        if self._vault is not None and any(pid in self._vault.spilled_by_pid for pid in unit.pids):
            await asyncio.to_thread(self._read_ahead, unit.vault, unit.pids)

    async def _look_at_gpus(self) -> None:
        if not self.simulated:
            found = await asyncio.to_thread(hardware.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
            self._units.gpus = {gpu.number: gpu for gpu in found}

    async def _watch_machine(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AT_MACHINE_EVERY_S)
            before = self._vault
            self._vault = await self._ask_vaults({unit.vault for unit in self._units})
            if self._units.gpus:
                await self._look_at_gpus()
            if self._units.gpus or self._vault != before:
                self._tell()


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
