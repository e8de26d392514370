"""The servers of all models, and what the scheduler wants of them: starts, wakes, sleeps and stops; their health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from . import actions, events, hardware, policy, servers
from .address import Address, from_url
from .config import Config, ModelConfig
from .engines.engine import ASK_EVERY_S, Engine, Facts
from .events import Outcome
from .lock import Lock
from .model import Model
from .policy import STOP
from .servers import OwnVault, Server, StartFailed, Surroundings
from .status import Counters, Phase, Switch
from .tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger("cumem_sleep.serve")

LOOK_AT_HEALTH_EVERY_S = 2.0  # of servers by URL; the end of a process is seen at once
UNHEALTHY_AFTER = 3  # looks in a row
LOOKED_AT_WITHIN_S = 2.0  # where a server is there, and takes no connection, the next try is the answer
NOBODY_ANSWERS_S = 5.0  # where no server by URL was ever found: then it is looked for again later
HOST_RESERVE_BYTES = 2 << 30  # of what the system can give: for everybody else
NOBODY_KNOWS_BYTES = 1 << 60  # what cannot be estimated is taken for more than any host has


@dataclass(eq=False)
class Unit:
    """What a model has beside what the scheduler knows.

    Attributes:
        server: its process; None if somebody else started it.
        engine: for its calls; None before it has an address.
        change: the start, sleep, wake or stop that is under way.
        vault: the vault that keeps its backups, as `servers.vault_of` has it; "" without one.
        pids: of its workers, by which that vault knows them.
        held_awake_bytes: of the GPU where it is most, what its processes were seen to hold while it was awake; 0 where
            NVML did not say.
        was_found: a server by URL has answered once.
        last_words: of a server that died or did not start, for operators alone; "" while all is well.
    """

    name: str
    server: Server | None
    address: Address | None = None
    engine: Engine | None = None
    change: asyncio.Task[None] | None = None
    last_switch: Switch | None = None
    layer: str | None = None
    vault: str = ""
    pids: tuple[int, ...] = ()
    restarts: int = 0
    held_awake_bytes: int = 0
    was_found: bool = False
    last_words: str = ""
    health: asyncio.Task[None] | None = None
    aliases: tuple[str, ...] = ()
    engine_name: str = ""
    names: tuple[str, ...] = ()


def with_details(error: str, unit: Unit) -> str:
    """What went wrong, for operators: clients need not know where logs are, and what is in them."""
    return f"{error}; {unit.last_words}" if unit.last_words else error


def _lacks_host_memory(action: actions.Sleep, needed: int) -> Outcome | None:
    """Looked up before the sleep: what the host can give now, whoever has taken the rest."""
    available = hardware.host_available_bytes()
    if not needed or available is None or needed + HOST_RESERVE_BYTES <= available:
        return None
    gib = 1 << 30
    why = f"level {action.level} needs {needed / gib:.1f} GiB more host memory; {available / gib:.1f} GiB are there"
    if action.from_level is not None:  # it sleeps, and is left so
        return Outcome(None, Phase.ASLEEP, action.from_level, lacks_host_memory=True, why_not_deeper=why)
    return Outcome(why, Phase.AWAKE, lacks_host_memory=True)


def spawn(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run something beside; `tasks` keeps it until it has ended."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def _until_ended(before: asyncio.Task[None]) -> None:
    """Who waits for a change and is cancelled has it cancelled, too, and waits on: two at once would mix."""
    is_cancelled = False
    while not before.done():
        try:
            await asyncio.wait({before})
        except asyncio.CancelledError:
            is_cancelled = True
            before.cancel()
    if is_cancelled:
        raise asyncio.CancelledError


class Units:
    """One for each model of a configuration, and for each that is being removed.

    Attributes:
        config: as it is now.
        gpus: by their numbers, as far as they were looked up.
    """

    def __init__(
        self,
        config: Config,
        models: Mapping[str, Model],
        counters: Counters,
        handle: Callable[[events.FrontEvent], None],
        *,
        simulated: bool,
        lock: Lock | None,
        tracing: Tracing | None,
    ) -> None:
        """
        Args:
            models: what the scheduler knows of each.
            handle: tells the scheduler.
            lock: that servers keep until they have ended.
        """
        self.config = config
        self.gpus: dict[int, hardware.Gpu] = {}
        self._models = models
        self._counters = counters
        self._handle = handle
        self._simulated = simulated
        self._tracing = tracing
        self._logs = config.logs or servers.default_logs()
        leaves = self._logs if simulated else lock.path if lock is not None else None
        self._around = Surroundings(leaves=leaves, lock=lock)
        self._vault: OwnVault | None = None
        self._vault_deaths, self._vault_started = 0, 0.0
        self._units: dict[str, Unit] = {}
        self._giving_up: set[asyncio.Task[None]] = set()
        self._pinning = asyncio.Lock()  # the system shows bit by bit what a sleep takes: another one waits for its end
        self._asking: set[asyncio.Task[None]] = set()

    def __getitem__(self, name: str) -> Unit:
        return self._units[name]

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units.values())

    def check_logs(self) -> None:
        """See that servers have somewhere to write: otherwise every start would fail, again and again.

        Raises:
            OSError: there are servers to start, and nothing can be written to the folder of their logs.
        """
        if self.config.vault is not None or any(model.owned for model in self.config.models.values()):
            servers.check_logs(self._logs)

    @property
    def variables(self) -> Mapping[str, str]:
        """What servers inherit."""
        return self._around.variables

    async def start_vault(self) -> None:
        """Start this front's own vault, before any server, if it is to have one.

        Raises:
            OSError: it does not start.
        """
        if self.config.vault is None:
            return
        self._around.secrets.update(self.config.secrets())
        vault = self._vault = OwnVault(self.config.vault, self._logs, servers.place_of_sockets(), self._around)
        self._around.more["CUMEM_SLEEP_VAULT"] = str(vault.socket)
        self._around.keeps_weights = self.config.vault.keep_weights is not None
        try:
            await self._start_vault(vault)
        except StartFailed as error:
            raise OSError(f"vault: {error}; {error.last_words}") from None

    async def _start_vault(self, vault: OwnVault) -> None:
        self._vault_started = time.monotonic()
        await vault.start(partial(self._vault_ended, vault))

    def _vault_ended(self, vault: OwnVault, how: str, last_words: str) -> None:
        """As of a server: it is started again after a pause, which grows while it does not last."""
        has_run_long = time.monotonic() - self._vault_started > policy.LONGEST_PAUSE_S
        self._vault_deaths = 1 if has_run_long else self._vault_deaths + 1
        logger.warning("the vault %s; %s", how, last_words)
        if self._vault is not None:
            spawn(self._asking, self._start_vault_again(vault))

    async def _start_vault_again(self, vault: OwnVault) -> None:
        await asyncio.sleep(policy.pause_s(self._vault_deaths))
        try:
            await self._start_vault(vault)
        except StartFailed as error:
            self._vault_ended(vault, f"does not start: {error}", error.last_words)

    def configure(self, config: Config) -> None:
        """Take a configuration: its models are there, beside those that are being removed."""
        self.config = config
        self._around.secrets.update(config.secrets())  # those that are gone may be in this process's environment still
        for name, model in config.models.items():
            if name not in self._units:
                self._units[name] = Unit(name, self._server_of(name, model))
            self._units[name].aliases = tuple(model.aliases)
            self._units[name].engine_name = model.kind.NAME

    def _server_of(self, name: str, model: ModelConfig) -> Server | None:
        return Server(name, model, self._logs, servers.place_of_sockets(), self._around) if model.owned else None

    def remove(self, name: str) -> Engine | None:
        """Its server has been stopped, or is somebody else's. Returns its connections, to be closed."""
        unit = self._units.pop(name)
        for task in (unit.change, unit.health):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        return unit.engine

    async def end(self) -> None:
        """End all servers that were started here, and return when nothing of them is left."""
        units = list(self)
        vault, self._vault = self._vault, None  # from now on it is not started again
        for unit in units:
            for task in (unit.change, unit.health):
                if task is not None:
                    task.cancel()
        for task in self._giving_up | self._asking:
            task.cancel()
        await asyncio.gather(*map(self._end, units))
        if vault is not None:
            await asyncio.gather(*self._asking, return_exceptions=True)  # one of these may be starting it
            await vault.stop()

    @staticmethod
    async def _end(unit: Unit) -> None:
        for task in (unit.change, unit.health):
            if task is not None:
                with suppress(asyncio.CancelledError):
                    await task
        if unit.server is not None:
            await unit.server.stop()
        if unit.engine is not None:
            await unit.engine.close()

    # Changes

    def begin(self, action: actions.Change, span: Span | None = None) -> None:
        """Do what the scheduler wants of a model; `events.Done` says what became of it.

        Args:
            span: of the request that it is for.
        """
        unit = self._units[action.model]
        if self._tracing is not None and (since := self._models[action.model].draining_since) is not None:
            self._tracing.span("drain", span, since, time.monotonic(), model=unit.name)
        before, unit.change = unit.change, asyncio.create_task(self._change(unit, action, unit.change, span))
        if before is not None and isinstance(action, actions.Stop):
            before.cancel()

    async def _change(
        self,
        unit: Unit,
        action: actions.Change,
        before: asyncio.Task[None] | None,
        span: Span | None,
    ) -> None:
        """Do what the scheduler wants of a model, when what it wanted before has ended; and say what became of it."""
        if before is not None:
            await _until_ended(before)
        started = time.monotonic()
        kind = type(action).__name__.lower()
        try:
            outcome = await self._do(unit, action)
        except StartFailed as error:
            outcome, unit.last_words = Outcome(str(error), Phase.STOPPED), error.last_words
        except Exception as error:  # or the model would be in this change for ever
            logger.exception("%s: %s", unit.name, kind)
            outcome, unit.last_words = Outcome(f"the front failed ({type(error).__name__})", None), str(error)
        seconds, level = time.monotonic() - started, outcome.level or getattr(action, "level", None)
        unit.last_switch = Switch(kind, level, seconds, time.time(), outcome.error)
        self._counters.switches[unit.name, kind, "failed" if outcome.error else "ok"] += 1
        total_s = self._counters.switch_seconds.get((unit.name, kind), 0.0)
        self._counters.switch_seconds[unit.name, kind] = total_s + seconds
        if outcome.why_not_deeper:
            logger.warning("%s: stays at level %s: %s", unit.name, outcome.level, outcome.why_not_deeper)
        if outcome.error:
            logger.warning(
                "%s: %s failed after %.3f s: %s", unit.name, kind, seconds, with_details(outcome.error, unit)
            )
        else:
            unit.last_words = ""
            logger.info("%s: %s in %.3f s", unit.name, kind, seconds)
        if self._tracing is not None:
            ended = started + seconds
            self._tracing.span(kind, span, started, ended, outcome.error, model=unit.name, level=level)
        self._handle(events.Done(unit.name, action.operation, outcome))
        if unit.engine is not None and unit.engine.has_layer and self._sleeps(unit):
            spawn(self._asking, self._ask_kept(unit, unit.engine))

    async def _do(self, unit: Unit, action: actions.Change) -> Outcome:
        if isinstance(action, actions.Start):
            return await self._start(unit)
        if isinstance(action, actions.Stop):
            if unit.server is not None:
                await asyncio.shield(unit.server.stop())
            return Outcome(None, Phase.STOPPED)
        if unit.engine is None:
            return Outcome("it has no server", Phase.STOPPED)
        if isinstance(action, actions.Wake):
            lacks = await self._lacks_gpu_memory(unit, unit.engine, action)
            outcome = lacks or await unit.engine.wake(action.level)
            return await self._found_out(unit, unit.engine, outcome, Phase.AWAKE)
        outcome = await self._sleep(unit, unit.engine, action)
        return await self._found_out(unit, unit.engine, outcome, Phase.ASLEEP)

    async def _sleep(self, unit: Unit, engine: Engine, action: actions.Sleep) -> Outcome:
        """Others give up kept KV cache before it is refused for want of host memory, by the front or by its server."""
        if action.more_bytes:
            await self._given_up()
        while True:
            needed = await self._needed_bytes(engine, action)
            async with self._pinning if needed else nullcontext():
                outcome = _lacks_host_memory(action, needed) or await engine.sleep(action.level, action.from_level)
            if outcome.lacks_host_memory and not self._giving_up:
                self._handle(events.LacksHostMemory(unit.name))
            if not outcome.lacks_host_memory or not await self._given_up():
                return outcome
            if outcome.state is Phase.AWAKE:  # it woke on its way to a deeper sleep
                action = replace(action, from_level=None)

    async def _lacks_gpu_memory(self, unit: Unit, engine: Engine, action: actions.Wake) -> Outcome | None:
        """Looked up before the wake: that others sleep is their word alone, and who else has memory nobody here knows.

        Where it cannot be looked up, the log says so.
        """
        if self._simulated:
            return None
        needed = await engine.wake_bytes()
        numbers = sorted(self._models[action.model].spec.gpus)
        try:
            if needed is None:
                raise OSError("its server does not say how much it needs")
            free = hardware.free_bytes(self._uuids(unit))
        except OSError as error:
            logger.info("%s: not verified before its wake that its GPUs have room: %s", unit.name, error)
            return None
        least, gpu = min(zip(free, numbers, strict=True))
        if needed <= least:
            return None
        gib = 1 << 30
        why = (
            f"GPU {gpu} has {least / gib:.1f} GiB free, and the wake needs {needed / gib:.1f}: somebody holds the rest"
        )
        return Outcome(why, Phase.ASLEEP, action.level)

    def _uuids(self, unit: Unit) -> list[str]:
        """Of its GPUs, in the order of their numbers.

        Raises:
            OSError: they are not known.
        """
        numbers = sorted(self._models[unit.name].spec.gpus)
        if not self.gpus.keys() >= {*numbers}:
            raise OSError("nvidia-smi does not know these GPUs")
        return [self.gpus[number].uuid for number in numbers]

    async def _needed_bytes(self, engine: Engine, action: actions.Sleep) -> int:
        """Of host memory, what a sleep takes from the system beside what is prepared while a model is awake."""
        if self._simulated or not action.more_bytes or self._models[action.model].in_vault:
            return 0  # in the vault, memory is pinned already, and it refuses what it has no room for
        facts = await engine.facts() if engine.has_layer else Facts()
        return max(0, action.more_bytes - facts.backed_up_bytes)

    # Kept KV cache

    def give_up_kept(self, action: actions.GiveUpKept) -> None:
        """Have a sleeper give up what it keeps; `events.KeptBytes` says what became of it."""
        unit = self._units[action.model]
        logger.info("%s: gives up the KV cache that it keeps: %s", unit.name, action.why)
        if unit.engine is not None:
            spawn(self._giving_up, self._give_up_kept(unit, unit.engine))

    async def _give_up_kept(self, unit: Unit, engine: Engine) -> None:
        with suppress(RuntimeError):  # its server was stopped meanwhile, and its connections are closed
            if why := await engine.give_up_kept():
                logger.warning("%s: did not give up the KV cache that it keeps: %s", unit.name, why)
        self._handle(events.KeptBytes(unit.name, engine.kept_bytes, was_told=True))

    async def _ask_kept(self, unit: Unit, engine: Engine) -> None:
        with suppress(RuntimeError):  # likewise
            await engine.facts()
        if engine.kept_bytes:
            logger.info("%s: keeps %.2f GiB of its KV cache", unit.name, engine.kept_bytes / (1 << 30))
        self._handle(events.KeptBytes(unit.name, engine.kept_bytes))

    async def _given_up(self) -> bool:
        """Whether kept KV cache was being given up. Returns when that has ended."""
        waited = bool(self._giving_up)
        while self._giving_up:
            await asyncio.wait(self._giving_up)
        return waited

    def _sleeps(self, unit: Unit) -> bool:
        state = self._models.get(unit.name)
        return state is not None and state.phase is Phase.ASLEEP

    # Starts

    async def _start(self, unit: Unit) -> Outcome:
        config = self.config.models.get(unit.name)
        if config is not None and config.owned != (unit.server is not None):
            await self._change_owner(unit, config)
        if unit.server is None:
            return await self._find(unit)
        if config is not None:
            unit.server.model = config
        if unit.engine is not None:
            await unit.engine.close()
        unit.address = await unit.server.start(partial(self._ended, unit))
        unit.engine = unit.server.model.connect(unit.address, unit.server.model.switch_timeout)
        await self._learn(unit)
        unit.held_awake_bytes = await self._held_bytes(unit) or 0
        if unit.engine.LEVELS:
            spawn(self._asking, self._keep_asking(unit, unit.engine))
        return Outcome(None, Phase.AWAKE)

    async def _change_owner(self, unit: Unit, config: ModelConfig) -> None:
        """It got a command in place of a URL, or a URL in place of a command. A server of ours has been stopped."""
        if unit.health is not None:
            unit.health.cancel()
        if unit.engine is not None:
            await unit.engine.close()
        unit.health = unit.engine = unit.address = None
        unit.was_found = False
        unit.server = self._server_of(unit.name, config)

    async def _find(self, unit: Unit) -> Outcome:
        """A server by URL is asked what it is in, until it says so; not for long where nobody was ever found.

        Models on its GPUs wait meanwhile, because a server that is silent, or starts again, may take their memory.
        """
        config = self.config.models[unit.name]
        address = from_url(config.url or "", config.api_key)
        if unit.engine is None or unit.engine.address != address:
            if unit.engine is not None:
                await unit.engine.close()
            unit.address, unit.engine = address, config.connect(address, config.switch_timeout)
        limit_s = min(config.start_timeout, config.switch_timeout)
        nobody_s = limit_s if unit.was_found else min(limit_s, NOBODY_ANSWERS_S)
        begin = heard_at = time.monotonic()
        while True:
            found = await self._asked(unit, unit.engine)
            if found.state in (Phase.AWAKE, Phase.ASLEEP):
                unit.was_found = True
                await self._learn(unit)
                self._watch_health(unit)
                return found
            if self.config.models.get(unit.name) != config:
                return Outcome("it is configured anew", found.state)
            now = time.monotonic()
            heard_at = heard_at if found.state is Phase.STOPPED else now
            if now - begin > limit_s or now - heard_at > nobody_s:
                return found
            await asyncio.sleep(ASK_EVERY_S)

    async def _learn(self, unit: Unit) -> None:
        """What the layer in a server says of its host memory, or else an estimate."""
        assert unit.engine is not None
        unit.names = await unit.engine.names()
        await unit.engine.learn_version()
        facts = await unit.engine.facts()
        if unit.pids != facts.pids:
            unit.held_awake_bytes = 0
        model = self.config.models.get(unit.name)
        unit.layer, unit.vault, unit.pids = facts.layer, facts.vault, facts.pids
        if facts.vault and model is not None and not model.owned:  # it could name any socket, for the front to ask
            unit.vault = servers.vault_of(model, self.variables) or "auto"
        if facts.layer == "":
            logger.info("%s: cumem-sleep is not active in its server", unit.name)
        host_bytes = None
        if model is not None and model.host_memory is None:
            host_bytes = facts.host_bytes if facts.host_bytes is not None else self._estimated_bytes(unit.name, model)
        self._handle(events.HasLayer(unit.name, unit.engine.has_layer, bool(facts.vault), host_bytes))

    def _estimated_bytes(self, name: str, model: ModelConfig) -> int:
        """What a model may hold of its GPUs' memory, where it does not say what it takes at level 1."""
        if self._simulated:
            return 0
        if any(gpu not in self.gpus for gpu in model.gpus):
            why = "nobody says how much host memory level 1 takes"
            logger.warning("%s: %s: without its host_memory it sleeps at level 2, or is stopped", name, why)
            return NOBODY_KNOWS_BYTES
        return int(sum(self.gpus[gpu].total_bytes for gpu in model.gpus) * model.share)

    def _ended(self, unit: Unit, how: str, last_words: str) -> None:
        self._died(unit, f"its server {how}", last_words)

    def _died(self, unit: Unit, error: str, last_words: str = "") -> None:
        unit.last_words = last_words
        logger.warning("%s: %s", unit.name, with_details(error, unit))
        unit.restarts += 1
        if unit.change is not None:
            unit.change.cancel()
        self._handle(events.Died(unit.name, error))

    # Health

    def suspect(self, name: str, address: Address, error: str) -> None:
        """A request found that the server at this address cannot be reached, or broke off: look at it now."""
        unit = self._units.get(name)
        if unit is None or unit.address != address:
            return
        logger.warning("%s: %s", name, error)
        if unit.server is not None and (unit.health is None or unit.health.done()):
            unit.health = asyncio.create_task(self._check_health(unit))
        elif unit.server is None and unit.health is not None:
            unit.health.cancel()
            self._watch_health(unit, failures=UNHEALTHY_AFTER - 1)

    async def until_looked_at(self, name: str) -> None:
        """Returns when it is known whether a suspect is there, or has been given up; soon in any case."""
        unit, ends_at = self._units.get(name), time.monotonic() + LOOKED_AT_WITHIN_S
        while unit is not None and unit.health is not None and not unit.health.done():
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.wait({unit.health}, timeout=left_s)  # another suspicion may begin a look anew

    async def _check_health(self, unit: Unit) -> None:
        """A process that lives, and does not serve: it is stopped, and the next request starts it afresh."""
        engine, state = unit.engine, self._models[unit.name]
        for _ in range(UNHEALTHY_AFTER):
            if engine is None or not state.is_up or await engine.is_healthy():
                return
            await asyncio.sleep(ASK_EVERY_S)
        if engine is unit.engine and state.is_up:
            logger.warning("%s: its server is not healthy, and is stopped", unit.name)
            self._handle(events.Ordered(unit.name, STOP))

    def _watch_health(self, unit: Unit, failures: int = 0) -> None:
        if unit.health is not None:
            unit.health.cancel()
        unit.health = asyncio.create_task(self._see_health(unit, failures))

    async def _see_health(self, unit: Unit, failures: int) -> None:
        """Of a server by URL: its process is not ours to watch."""
        while unit.engine is not None:
            found = await self._ask(unit, unit.engine)
            failures = failures + 1 if found is not None and found.state in (Phase.STOPPED, None) else 0
            if found is not None and failures >= UNHEALTHY_AFTER:
                unit.health = None
                return self._died(unit, found.error or "it cannot be reached")
            await asyncio.sleep(LOOK_AT_HEALTH_EVERY_S if not failures else ASK_EVERY_S)

    # What they are in: somebody else may put them to sleep, or wake them

    async def ask(self, name: str) -> None:
        """Have the scheduler know what a server is in now."""
        unit = self._units[name]
        if unit.engine is not None and unit.engine.LEVELS:
            with suppress(RuntimeError):  # it was stopped meanwhile, and its connections are closed
                await self._ask(unit, unit.engine)

    async def _keep_asking(self, unit: Unit, engine: Engine) -> None:
        """A server that was started here: its end is seen by others."""
        with suppress(RuntimeError):  # likewise
            while unit.engine is engine and self._units.get(unit.name) is unit:
                await asyncio.sleep(LOOK_AT_HEALTH_EVERY_S)
                await self._ask(unit, engine)

    async def _ask(self, unit: Unit, engine: Engine) -> Outcome | None:
        """Ask a server, and tell the scheduler. None: it is stopped, or changes, and that says what becomes of it."""
        change, state = unit.change, self._models[unit.name]
        if not (state.is_up or self._sleeps(unit)) or not (change is None or change.done()):
            return None
        found = await self._asked(unit, engine)
        if unit.change is not change or unit.engine is not engine:
            return None
        if found.state is (Phase.AWAKE if self._sleeps(unit) else Phase.ASLEEP):
            logger.warning("%s: is %s, and not by this front", unit.name, found.state.value)
            self._handle(events.Found(unit.name, found.state, found.level))
        if self._sleeps(unit) and state.kept_bytes != engine.kept_bytes:
            self._handle(events.KeptBytes(unit.name, engine.kept_bytes))
        return found

    async def _asked(self, unit: Unit, engine: Engine) -> Outcome:
        """What a server is in by its word, and asleep only where NVML agrees; by NVML alone, if it does not say so."""
        change = unit.change
        found = await engine.look()
        if engine.BY_URL and found.state is Phase.AWAKE:
            unit.held_awake_bytes = unit.held_awake_bytes or await self._held_bytes(unit) or 0
        if engine.BY_URL and (found.state is not Phase.ASLEEP or self._sleeps(unit)):
            return found
        has_released = await self._has_released(unit, engine)
        if has_released is None or unit.change is not change:
            return found
        if not engine.BY_URL:
            engine.note(Phase.ASLEEP if has_released else Phase.AWAKE)
            return await engine.look()
        return found if has_released else Outcome("it says that it sleeps, and its processes hold its GPUs' memory")

    async def _found_out(self, unit: Unit, engine: Engine, outcome: Outcome, wanted: Phase) -> Outcome:
        """A change whose answer was lost, or an error, may have been made: ask, before its state counts as unknown.

        Only what it was to become is certain then: if it has not, it may still.
        """
        if outcome.state is not None:
            return outcome
        found = await self._asked(unit, engine)
        if wanted is Phase.AWAKE:
            is_certain = not await engine.wake_bytes()
        else:
            is_certain = engine.has_layer or await self._has_released(unit, engine) is True
        if found.state is not wanted or not is_certain:
            return outcome
        logger.warning("%s: is %s all the same: %s", unit.name, wanted.value, outcome.error)
        return found

    async def _has_released(self, unit: Unit, engine: Engine) -> bool | None:
        """Whether its processes hold so much less of their GPUs' memory than while it was awake that it sleeps, by
        NVML; None where nobody can say.
        """
        held = await self._held_bytes(unit)
        if held is None or not unit.held_awake_bytes:
            return None
        return unit.held_awake_bytes - held > (await engine.wake_bytes() or unit.held_awake_bytes) / 2

    async def _held_bytes(self, unit: Unit) -> int | None:
        """What its processes hold of the GPU where it is most; None where nobody can say."""
        if self._simulated:
            return None
        with suppress(OSError):
            return max(await asyncio.to_thread(self._ask_held_bytes, unit, self._uuids(unit)))
        return None

    @staticmethod
    def _ask_held_bytes(unit: Unit, uuids: Sequence[str]) -> list[int]:
        return hardware.held_bytes(uuids, {*unit.pids, *(unit.server.pids() if unit.server is not None else ())})
