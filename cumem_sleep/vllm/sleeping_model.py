"""What the HTTP gate knows about the model's sleep, and how a request wakes the model."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext
from enum import Enum
from typing import Any

from ..asgi import ClientGone
from . import metrics
from .gate_settings import GateSettings
from .siblings import Busy, Siblings
from .worker_methods import DEEPEN, Effect

logger = logging.getLogger("cumem_sleep")

TAGS = frozenset(("weights", "kv_cache"))  # the tags that vLLM's executors put to sleep
ASK_WITHIN_S = 10.0


class Phase(Enum):
    """Where the model is, as far as the gate knows."""

    UNKNOWN = "unknown"  # at the start, and after every change: ask the engine
    AWAKE = "awake"
    ASLEEP = "asleep"  # some memory is asleep; at level 0, only the scheduler is stopped
    CHANGING = "changing"  # a sleep, a wake or a reload is under way


class Update(Enum):
    """Whether weights are being written in several calls."""

    NONE = "none"
    OPEN = "open"  # started, nothing written yet
    WRITTEN = "written"  # not finished
    TORN = "torn"  # weights were dropped after it started: what was prepared or written is lost


class SleepingModel:
    """What is known about the model's sleep. Everything that changes it goes through `change`, one at a time.

    What begins and ends each fact, and what it means for a request:

    asleep        a sleep above level 0, or of the KV cache  a wake                 it may wake the model
    level == 0    a sleep at level 0, or one that failed     a wake                 the same
    weights_lost  a sleep at level 2                         weights are loaded     the same, and they are loaded
    staged        a wake of weights that were dropped        they are, or a sleep   it wakes nothing
    paused        POST /pause                                the engine is awake    it wakes nothing
    kept          a sleep with requests in the engine        the engine is awake    none; a wake has to be whole
    update        a call that begins to write weights        one that finishes      none; if torn, they stay lost
    torn          a sleep that failed in some workers        `mend`                 before a wake, those are woken
    failure       waking on request failed                   its time, or a wake    it is refused

    `serves`, `lacks_memory` and `may_be_woken` are derived from these.

    Attributes:
        engine: vLLM's engine client.
        phase: see `Phase`. The facts below outlive an unknown phase.
        level: the level of the sleep; None while awake. At level 3, that from which it went there.
        checkpointed: it went on to level 3: the workers' CUDA state is not on the GPU.
        asleep: the tags of memory that is asleep.
        weights_lost: weights were dropped (level 2) and not reloaded, so answers would be plausible garbage.
        not_loaded: which of them the last load left out, as the workers say; "" if none.
        paused: somebody called POST /pause, and a request must not resume the engine.
        staged: somebody else woke dropped weights and is loading them, and a request must not interfere.
        update: see `Update`.
        kept: a sleep may have left requests in the engine, which run when its scheduler resumes.
        torn: a sleep failed in some workers but not in others, which are still asleep; vLLM takes all of them to be
            awake.
        failure: why waking on request failed, and until when no request tries again (a time of `clock`).
        changed: set and replaced whenever this state changes.
        several_servers: other processes serve the same engine, so a sleep may pass unseen.
    """

    def __init__(self, settings: GateSettings, status: metrics.WorkerStatus) -> None:
        self.engine: Any = None
        self.phase = Phase.UNKNOWN
        self.level: int | None = None
        self.asleep: set[str] = set()
        self.weights_lost = self.paused = self.staged = self.kept = self.torn = self.checkpointed = False
        self.not_loaded = ""
        self.failure: tuple[str, float] | None = None
        self.changed = asyncio.Event()
        self.several_servers = False
        self.clock = time.monotonic
        self.update = Update.NONE
        self._settings = settings
        self._status = status
        self._lock = asyncio.Lock()
        self._changing = False
        self._siblings = Siblings()
        self._question: asyncio.Task[bool] | None = None
        self._seen = -1  # the number of changes by all API servers when this one last looked
        self._changes = 0  # begun or ended; an answer to a question asked before the last of them is outdated
        self._waking: asyncio.Task[None] | None = None

    @property
    def serves(self) -> bool:
        """Whether requests may run."""
        return self.phase is Phase.AWAKE and not self.weights_lost

    @property
    def lacks_memory(self) -> bool:
        """Whether memory is asleep or weights were not reloaded, as far as is known."""
        return bool(self.asleep) or self.weights_lost

    @property
    def depth(self) -> int | None:
        """The level that it sleeps at, or whose lost weights keep it from serving; None if it is awake."""
        return 3 if self.checkpointed else 2 if self.weights_lost else self.level

    @property
    def may_be_woken(self) -> bool:
        """Whether the model is asleep in a way that a request may end."""
        return (self.level == 0 or self.lacks_memory) and not self.paused and not self.staged

    @property
    def has_sleep_modes(self) -> bool:
        """Whether vLLM stops its scheduler before it sleeps, and does no more than that at level 0 (0.18; not 0.14).

        Without modes, it releases memory under running requests, and level 0 drops everything, as level 2 does.
        """
        return "mode" in inspect.signature(self.engine.sleep).parameters

    def why_not(self) -> str:
        """Why requests cannot run now, in a sentence for the client."""
        if self.phase is Phase.CHANGING:
            return "the model is falling asleep or waking up"
        if self.phase is Phase.AWAKE and self.not_loaded:
            return left_out(self.not_loaded)
        if self.phase is Phase.AWAKE:
            return "weights were dropped at level 2 and not reloaded: POST /reload_weights"
        return f"the model is asleep (level {3 if self.checkpointed else self.level}): POST /wake_up"

    # What the engine says

    async def look(self) -> None:
        """Find out the phase. For a model known to be awake that costs nothing, unless there are other API servers.

        Raises:
            Exception: the engine's own, if it cannot serve.
        """
        if self.several_servers:
            return await self._look_beside_siblings()
        while self.phase is Phase.UNKNOWN:  # one question for all callers
            if self._question is None or self._question.done():
                self._question = asyncio.create_task(self._ask())
                self._question.add_done_callback(_retrieve)
            await asyncio.shield(self._question)

    def keep_still(self) -> bool:
        """Keep other API servers from changing anything until `let_go`.

        False if another server is making a change, or has made one since the last look.
        """
        if not self.several_servers:
            return True
        if not self._siblings.share():
            return False
        if self._still_holds(self._seen):
            return True
        self._siblings.unshare()
        return False

    def let_go(self) -> None:
        """Undo `keep_still`."""
        if self.several_servers:
            self._siblings.unshare()

    async def _look_beside_siblings(self) -> None:
        while not self._changing:
            heard = self._siblings.read_shared()
            if heard is None:
                return self._enter(Phase.CHANGING)
            self._adopt(heard)
            seen = int(heard.get("changes", 0))
            if await self._ask(seen):
                self._seen = seen
                return

    def _still_holds(self, seen: int) -> bool:
        """Whether API servers have changed nothing since their number of changes was `seen`."""
        heard = self._siblings.read_shared()
        return heard is not None and int(heard.get("changes", 0)) == seen

    def _facts(self) -> dict[str, Any]:
        """What the other API servers must know and the engine cannot tell them."""
        names = ("level", "weights_lost", "not_loaded", "paused", "staged", "kept", "torn", "checkpointed")
        facts = {name: getattr(self, name) for name in names}
        return {**facts, "asleep": sorted(self.asleep), "update": self.update.value}

    def _adopt(self, facts: dict[str, Any]) -> None:
        for name, value in facts.items():
            if name == "asleep":
                self.asleep = set(value)
            elif name == "update":
                self.update = Update(value)
            elif name != "changes":
                setattr(self, name, value)

    async def _ask(self, seen: int | None = None) -> bool:
        """Ask the engine; False if the answer is outdated, because something changed meanwhile."""
        changes = self._changes
        sleeping = bool(await asyncio.wait_for(self.engine.is_sleeping(), ASK_WITHIN_S)) or self.torn
        ranks = await self._status.fresh(self.engine) if sleeping else None
        # vLLM from 0.18 on also says that it sleeps while its scheduler is only paused. The workers know the
        # difference.
        is_paused = getattr(self.engine, "is_paused", None) if sleeping and ranks is None else None
        paused = bool(is_paused and await asyncio.wait_for(is_paused(), ASK_WITHIN_S))
        if changes != self._changes or not (seen is None or self._still_holds(seen)):
            return False
        if sleeping:
            self._learn_asleep(ranks, paused)
        else:
            self._learn_awake()
        return True

    def _learn_awake(self) -> None:
        self.level, self.asleep, self.failure = None, set(), None
        self.paused = self.kept = self.checkpointed = False
        self._enter(Phase.AWAKE)

    def _learn_asleep(self, ranks: list[metrics.RankStatus] | None, scheduler_paused: bool) -> None:
        if ranks is not None:
            self.asleep, lost = metrics.asleep_and_lost(ranks)
            if lost:
                self._lose_weights()
            self.learn_depth(ranks)
        elif not self.asleep and self.level != 0 and not scheduler_paused:
            self.asleep = set(TAGS)  # vLLM means memory but does not say which
        if self.asleep:
            self.level = self.level or (2 if self.weights_lost else 1)
        # Otherwise somebody has paused it, unless it is a sleep at level 0: vLLM itself queues or rejects requests
        # then.
        self._enter(Phase.ASLEEP if self.asleep or self.level == 0 else Phase.AWAKE)

    def learn_depth(self, ranks: Iterable[metrics.RankStatus]) -> None:
        """Note whether workers are at level 3, where they go, and from where they come, by themselves as well."""
        self.checkpointed = any(rank["checkpointed"] for rank in ranks)

    async def look_how_deep(self) -> None:
        """For a model known to be asleep, which is not asked otherwise: find out whether it is at level 3 now."""
        changes = self._changes
        if self.asleep and (ranks := await self._status.fresh(self.engine)) and changes == self._changes:
            self.learn_depth(ranks)

    async def look_what_is_loaded(self) -> None:
        """After a load, before it is noted: what the workers say that it left out."""
        if self.weights_lost and "weights" not in self.asleep:
            # Twice: the first answer may be lost, as in `note_failed_sleep`.
            ranks = await self._status.now(self.engine) or await self._status.now(self.engine) or ()
            self.not_loaded = metrics.not_loaded(ranks)

    def _enter(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    # Calls that pass through the gate

    @asynccontextmanager
    async def alone(self, gone: asyncio.Future[None] | None = None) -> AsyncIterator[None]:
        """Exclude all other changes of the sleep and writes of weights, here and in other API servers.

        Raises:
            ClientGone: `gone` was done before its turn came.
            Busy: another API server is changing something.
        """
        turn = asyncio.ensure_future(self._lock.acquire())
        try:
            either: set[asyncio.Future[Any]] = {turn, gone} if gone else {turn}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if gone is not None and gone.done():
                raise ClientGone
            self._changes += 1
            async with self._without_siblings() if self.several_servers else nullcontext():
                yield
        finally:
            self._changes += 1
            turn.cancel()
            if turn.done() and not turn.cancelled():
                self._lock.release()

    @asynccontextmanager
    async def _without_siblings(self) -> AsyncIterator[None]:
        async with self._siblings.exclusive():
            told = self._siblings.read()
            self._adopt(told)
            try:
                yield
            finally:
                self._siblings.write({**self._facts(), "changes": told.get("changes", 0) + 1})

    @asynccontextmanager
    async def change(self, disturbs: bool = True, gone: asyncio.Future[None] | None = None) -> AsyncIterator[None]:
        """One sleep, wake, reload or resume; others wait. Afterwards, even after a failure, the engine is asked.

        With `disturbs=False` a model that serves keeps serving: waking what is awake changes nothing.

        Raises:
            ClientGone: `gone` was done before its turn came.
            Busy: another API server is changing something.
        """
        async with self.alone(gone):
            await self.look_alone()
            self._changes += 1
            self._changing = True
            if disturbs or not self.serves:
                self._enter(Phase.CHANGING)
            try:
                yield
            finally:
                self._changes += 1
                self._enter(Phase.UNKNOWN)
                await self.look_alone()
                self._changing = False
                if self.phase is Phase.AWAKE:  # if it was asleep, the engine was asked just now
                    self._status.ask(self.engine)

    async def look_alone(self) -> None:
        """`look`, for use inside `alone`, where `look` would mistake this server for a sibling. It never raises."""
        try:
            if self.several_servers:
                await self._ask()
            else:
                await self.look()
        except Exception as error:
            logger.debug("the engine does not say whether it sleeps: %s", error)

    async def flush(self) -> None:
        """Abort what is in the engine, so that nothing runs when its scheduler resumes; it stays paused."""
        await self.engine.pause_generation(mode="abort", clear_cache=False)

    async def deepen(self) -> str:
        """Go on from a sleep to level 3; returns what failed, in words, or "".

        Afterwards `checkpointed` says what is so: a checkpoint may fail, and not be taken back either.

        Raises:
            Exception: the engine's own.
        """
        try:
            answers = await self.engine.collective_rpc(DEEPEN)
        except Exception as error:
            if "not implemented" in str(error):  # vLLM's words for a method that its workers do not have
                return "cumem-sleep is not active in vLLM's workers"
            raise
        self.checkpointed = any(answer["checkpointed"] for answer in answers)
        return next((str(answer["why"]) for answer in answers if answer["why"]), "")

    def note_sleep(self, level: int) -> None:
        """A sleep succeeded."""
        if level == 0 and not self.has_sleep_modes:
            level = 2
        sleeps_again = hasattr(self.engine, "release_kv_cache_memory") and "weights" not in self.asleep
        if self.asleep and not sleeps_again:
            return  # vLLM leaves sleeping memory alone; since 0.33 not if only the KV cache sleeps
        self.level = level
        if level > 0:
            self.asleep = set(TAGS)
            self.staged = False
            if level >= 2:
                self._lose_weights()

    def _lose_weights(self) -> None:
        self.weights_lost, self.not_loaded = True, ""
        if self.update is not Update.NONE:
            self.update = Update.TORN

    async def note_failed_sleep(self) -> None:
        """A sleep failed. It may have stopped the scheduler before, which amounts to level 0."""
        if not self.paused:
            self.level = self.level or 0
        if not self.asleep:
            # Ask twice: the first answer may be lost, because vLLM's executors leave answers after the failure unread.
            ranks = await self._status.fresh(self.engine) or await self._status.fresh(self.engine) or []
            asleep, lost = metrics.asleep_and_lost(ranks)
            self.torn = bool(asleep)
            if lost:
                self._lose_weights()
            try:
                await self.mend()
            except Exception as error:
                logger.warning("cumem-sleep gate: a sleep failed in some workers, and others cannot wake: %s", error)

    async def mend(self) -> None:
        """Wake the workers that vLLM does not know to be asleep: its next wake would run the model on their unmapped
        memory.

        Raises:
            Exception: they cannot wake; the next sleep or wake tries again first.
        """
        if self.torn:
            await self.engine.collective_rpc("wake_up")
            self.asleep, self.torn, self.level = set(), False, None if self.paused else 0

    def note_wake(self, tags: Iterable[str]) -> None:
        """These tags were woken (none: all). vLLM ignores calls that name a tag that is awake."""
        wanted = (set(tags) - {"scheduling"}) if tags else set(self.asleep)
        if wanted <= self.asleep:
            self.asleep -= wanted
        self.staged = self.weights_lost and "weights" not in self.asleep

    def note_release(self) -> None:
        """Only the KV cache was dropped."""
        self.asleep.add("kv_cache")

    def note_write(self, effect: Effect) -> None:
        """A call may have written weights."""
        if effect is Effect.STARTS:
            self.update = Update.OPEN
        elif effect is Effect.LOADS or (effect is Effect.UPDATES and self.update is Update.NONE):
            self.note_loaded()
        elif effect is Effect.UPDATES and self.update is Update.OPEN:
            self.update = Update.WRITTEN
        elif effect is Effect.FINISHES:
            whole, self.update = self.update in (Update.NONE, Update.WRITTEN), Update.NONE
            if whole:
                self.note_loaded()

    def note_loaded(self) -> None:
        """All weights were written, unless the workers say otherwise."""
        if "weights" not in self.asleep and not self.not_loaded:
            self.weights_lost = self.staged = False
            self._tell()

    # Waking on request

    def wake(self) -> asyncio.Task[None]:
        """Wake the model: one task for all requests, which outlives each of them. It never raises: see `failure`."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())
        return self._waking

    async def _wake(self) -> None:
        cause = "it is still asleep, or asleep again"
        try:
            async with self.change(disturbs=False):
                if not self.may_be_woken:
                    return
                level = 3 if self.checkpointed else self.level
                start, what = (
                    time.perf_counter(),
                    f"level {level}{', weights loaded' if self.weights_lost else ''}",
                )
                await self.mend()
                if self.several_servers and self.asleep:
                    await self.flush()  # a sibling may have let a request through
                await self._wake_in_order()
        except Busy:
            return  # a sibling may be waking it: waiting requests try again
        except Exception as error:
            cause = " ".join(str(error).split()) or type(error).__name__
        if self.serves:
            logger.info("cumem-sleep gate: woke on request in %.3f s (%s)", time.perf_counter() - start, what)
        else:
            self.failure = cause, self.clock() + self._settings.retry_after_s
            logger.warning("cumem-sleep gate: waking on request failed: %s", cause)

    async def _wake_in_order(self) -> None:
        """In vLLM's documented order for level 2: weights, reload, KV cache. The prefix cache is empty by then."""
        if self.weights_lost:
            if "weights" in self.asleep:
                await self.engine.wake_up(["weights"])
                self.asleep.discard("weights")
            await self.engine.collective_rpc("reload_weights")
            await self.look_what_is_loaded()
            if self.not_loaded:
                raise RuntimeError(left_out(self.not_loaded))
            self.note_loaded()
        if self.asleep:
            rest = self.asleep & TAGS
            await self.engine.wake_up(sorted(rest) if rest < TAGS and rest else None)
            self.asleep = set()
        elif self.level == 0:
            await self.engine.wake_up(["scheduling"])


def left_out(names: str) -> str:
    """What to do about weights that a load left out."""
    return (
        f"not all weights that level 2 dropped were loaded again, {names} among them: load these as well, or sleep at"
        " level 1; vLLM 0.33 also keeps a draft model with --sleep-preserve-parameter-names 'draft.*'"
    )


def _retrieve(question: asyncio.Task[bool]) -> None:
    """Retrieve the exception, in case nobody waited for the question."""
    if not question.cancelled():
        question.exception()
