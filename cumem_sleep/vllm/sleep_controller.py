"""Keeps the gate's model true: asks the engine and its workers, makes the calls of a wake, and one change at a time."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Concatenate

from ..http.asgi import ClientGone, within
from ..settings import GateSettings
from . import data_parallel, events, metrics
from .siblings import Busy, Siblings
from .sleeping_model import (
    NOTHING,
    TAGS,
    EngineCall,
    GatePhase,
    P,
    SleepingModel,
    State,
    Stopped,
    Weights,
    why_left_out,
)
from .worker_methods import DEEPEN, FORGET, Effect

logger = logging.getLogger("cumem_sleep")

ASK_WITHIN_S = 10.0
_NOT_ACTIVE = "cumem-sleep is not active in vLLM's workers"


class SleepController:
    """Everything that changes the model's sleep goes through `change`, one at a time.

    Attributes:
        engine: vLLM's engine client.
        model: what is known, as a state machine.
        failure: why waking on request failed, and until when no request tries again (a time of `clock`).
        changed: set and replaced whenever the model's state changes.
        several_servers: other processes serve the same engine, so a sleep may pass unseen.
        siblings: these, if there are any; all that looks at them raises `SiblingsUnknown`.
        whole_since: when a change, by any API server, last woke the model or gave it its weights (a time of `clock`).
    """

    def __init__(self, settings: GateSettings, status: metrics.WorkerStatus) -> None:
        self.engine: Any = None
        self.model = SleepingModel()
        self.failure: tuple[str, float] | None = None
        self.changed = asyncio.Event()
        self.several_servers = False
        self.clock = time.monotonic
        self.whole_since = 0.0
        self._settings = settings
        self._status = status
        self._lock = asyncio.Lock()
        self._changing = False
        self._is_over = False  # of a change under way: its calls have been made, and the engine has been asked
        self.siblings = Siblings()
        self._question: asyncio.Task[bool] | None = None
        self._seen = -1  # the number of changes by all API servers when this one last looked
        self._changes = 0  # begun or ended; an answer to a question asked before the last of them is outdated
        self.unknown_calls = 0  # under way
        self._doubts = 0  # how often API servers had to doubt what they knew
        self._waking: asyncio.Task[None] | None = None

    @property
    def sleeps_again(self) -> bool:
        """Whether the engine also sleeps while only its KV cache does (0.33)."""
        return hasattr(self.engine, "release_kv_cache_memory")

    @property
    def pauses_apart(self) -> bool:
        """Whether the engine's sleep and wake no longer stop and resume its scheduler (v#53082)."""
        return "mode" not in inspect.signature(self.engine.sleep).parameters

    async def pause_apart(self, level: int, mode: str = "abort") -> None:
        """Before a sleep, stop the scheduler where the sleep does not."""
        if self.pauses_apart:
            await self.engine.pause_generation(mode=mode, clear_cache=level > 0)

    async def resume_apart(self) -> None:
        """After a wake, resume the scheduler where the wake does not."""
        if self.pauses_apart and not (self.model.state.engine_asleep or Stopped.PAUSE in self.model.state.stopped):
            await self.engine.resume_generation()

    def handle(self, event: Callable[Concatenate[State, P], State], *args: P.args, **kwargs: P.kwargs) -> None:
        """Tell the model, and those who wait for it."""
        before = self.model.state
        self.model.handle(event, *args, **kwargs)
        self._tell_of_change(before)

    def _adopt(self, told: dict[str, Any]) -> None:
        before = self.model.state
        self.whole_since = max(self.whole_since, told.get("whole_since", 0.0))
        self.model.adopt(told.get("facts", {}))
        if self._doubts != (doubts := told.get("doubts", 0)):
            self._doubts = doubts
            self.model.handle(events.doubted)
        self._tell_of_change(before)

    def _tell_of_change(self, before: State) -> None:
        if self.model.state != before:
            self.changed.set()
            self.changed = asyncio.Event()

    # What the engine says

    async def look(self) -> None:
        """Find out the phase. For a model known to be awake that costs nothing, unless there are other API servers.

        Raises:
            Exception: the engine's own, if it cannot serve.
        """
        if self.unknown_calls:
            self.handle(events.doubted)
        if self.several_servers:
            return await self._look_beside_siblings()
        while self.model.phase is GatePhase.UNKNOWN:  # one question for all callers
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
        if not self.siblings.share():
            return False
        is_still = False
        try:
            is_still = self._still_holds(self._seen)
        finally:
            if not is_still:
                self.siblings.unshare()
        return is_still

    def let_go(self) -> None:
        """Undo `keep_still`."""
        if self.several_servers:
            self.siblings.unshare()

    async def _look_beside_siblings(self) -> None:
        while not self._changing:
            heard = self.siblings.read_shared()
            if heard is None:
                return self.handle(events.began)
            self._adopt(heard)
            seen = int(heard.get("changes", 0))
            if await self._ask(seen):
                self._seen = seen
                return

    def _still_holds(self, seen: int) -> bool:
        """Whether API servers have changed nothing since their number of changes was `seen`."""
        heard = self.siblings.read_shared()
        return heard is not None and int(heard.get("changes", 0)) == seen

    async def _ask(self, seen: int | None = None) -> bool:
        """Ask the engine; False if the answer is outdated, because something changed meanwhile."""
        changes = self._changes
        sleeps = await within(ASK_WITHIN_S, data_parallel.is_any_sleeping(self.engine))
        ranks = None
        # Whatever the engine says: a worker may not have done what it was told, or what the engine was not told of.
        if self._changing or self.model.state.doubted:
            ranks = await self._ask_ranks()
        elif sleeps or self.model.is_doubtful:
            ranks = await self._status.fresh(self.engine)
        # vLLM also says that it sleeps while its scheduler is only paused. The workers know the difference.
        paused = sleeps and ranks is None and await within(ASK_WITHIN_S, data_parallel.is_any_paused(self.engine))
        if changes != self._changes or not (seen is None or self._still_holds(seen)):
            return False
        self.handle(events.answered, sleeps, None if ranks is None else metrics.states_of(ranks), paused)
        if self.model.phase is GatePhase.AWAKE:
            self.failure = None
        return True

    async def _ask_ranks(self) -> list[metrics.RankStatus] | None:
        """What the workers say now. They are asked twice: the first answer may be lost, because vLLM's executors leave
        answers after a failure unread, and take them for those to the next call.
        """
        ranks = await self._status.fresh(self.engine, anew=True)
        return ranks or await self._status.fresh(self.engine, anew=True)

    async def ask_workers(self) -> bool:
        """Find out what is mapped, where the engine's word is not enough; False if they do not answer."""
        ranks = await self._ask_ranks()
        if ranks:
            self.handle(events.workers_said, metrics.states_of(ranks))
        return bool(ranks)

    async def look_how_deep(self) -> None:
        """For a model that is not known to be awake, and not asked otherwise: find out what its workers say now.

        They go to level 3, and come from there, by themselves as well.
        """
        changes = self._changes
        if not (self.model.asleep or self.model.is_doubtful):
            return
        if (ranks := await self._status.fresh(self.engine)) and changes == self._changes:
            self.handle(events.workers_said, metrics.states_of(ranks))

    async def look_what_is_loaded(self) -> None:
        """After a load, before it is noted: what the workers say that it left out. Asked twice, as in `ask_workers`."""
        if self.model.state.weights is not Weights.LOADED and "weights" not in self.model.asleep:
            ranks = await self._status.now(self.engine) or await self._status.now(self.engine)
            self.handle(events.left_out, metrics.not_loaded(ranks) if ranks else None)

    # Calls that pass through the gate

    def doubt(self) -> None:
        """Something was called of which the gate does not know what it does: what was known, or is being asked, is
        outdated.
        """
        self._changes += 1
        self._doubts += 1
        self.handle(events.doubted)

    @asynccontextmanager
    async def unknown_call(self) -> AsyncIterator[None]:
        """A call of which the gate does not know what it does: each look asks meanwhile, and the next one after it."""
        self.unknown_calls += 1
        try:
            yield
        finally:
            self.unknown_calls -= 1
            self.doubt()
            while self.several_servers:
                try:
                    async with self.alone():
                        self.doubt()  # the siblings, too
                    break
                except Busy:
                    continue

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
                was_whole = self.model.may_rest
                try:
                    yield
                finally:
                    if self.model.may_rest and not was_whole:
                        self.whole_since = self.clock()
        finally:
            self._changes += 1
            turn.cancel()
            if turn.done() and not turn.cancelled():
                self._lock.release()

    @asynccontextmanager
    async def _without_siblings(self) -> AsyncIterator[None]:
        async with self.siblings.exclusive():
            told = self.siblings.read()
            self._adopt(told)
            self.siblings.withdraw()
            try:
                yield
            finally:
                facts = {"facts": self.model.facts(), "whole_since": self.whole_since}
                self.siblings.write({**facts, "changes": told.get("changes", 0) + 1, "doubts": self._doubts})

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
            self._changing, self._is_over = True, False
            self.handle(events.began, disturbs)
            try:
                yield
            finally:
                self._changes += 1
                if not self._is_over:
                    await self._end()
                self._changing = False

    async def _end(self) -> None:
        """The calls of a change have been made."""
        self.handle(events.ended)
        await self.look_alone()
        self._is_over = True

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
            if _is_unknown(error):
                return _NOT_ACTIVE
            raise
        self.handle(events.deepened, any(answer["checkpointed"] for answer in answers))
        return next((str(answer["why"]) for answer in answers if answer["why"]), "")

    async def forget(self, tags: frozenset[str]) -> str:
        """Have the workers forget the backups of these tags, which sleep; returns what failed, in words, or ""."""
        why = ""
        try:
            await self.engine.collective_rpc(FORGET, args=(sorted(tags),))
        except Exception as error:
            if _is_unknown(error):
                return _NOT_ACTIVE
            why = str(error) or type(error).__name__
        await self.look_what_is_forgotten()
        return why

    async def look_what_is_forgotten(self) -> None:
        """Find out, after workers may have forgotten backups: what one of them has forgotten is lost."""
        if not await self.ask_workers() and self._status.exists:
            self.handle(events.forgot)

    async def slept(self, level: int, kept: bool, tags: frozenset[str] = NOTHING) -> str:
        """The engine's sleep of these tags (none: all) succeeded: why the memory does not sleep all the same, in words,
        or "".

        What the engine took to be asleep already it has left alone. Where that is mapped, after a wake that failed,
        the workers are told. They keep a backup of all, as at level 1: what vLLM saved at level 2 it may not have
        restored yet, and a second sleep at that level would replace it.

        Raises:
            Exception: the engine's own; the workers cannot sleep.
        """
        wanted = (tags or TAGS) & TAGS
        self.handle(events.slept, level, kept, again=self.sleeps_again, tags=wanted)
        await self._end()
        if level > 0 and self.model.state.disagrees and await self.ask_workers() and self.model.state.disagrees:
            await self.engine.collective_rpc("sleep", kwargs={"level": 1})
            self.handle(events.workers_put_to_sleep)
            await self._end()
        if self.model.state.disagrees:
            return self.model.why_disagrees
        if level > 0 and (mapped := sorted(wanted & self.model.state.mapped)):
            return f"the engine sleeps already, and leaves {' and '.join(mapped)} mapped: POST /wake_up first"
        return ""

    async def complete_wake(self) -> None:
        """Before a sleep, complete a wake that failed half-way, where the engine takes some tags alone to be asleep.

        It would leave all of them alone, and never hear that its workers sleep: nothing else can tell it.

        Raises:
            Exception: the engine's own; the wake failed again.
        """
        taken = self.model.state.engine_asleep
        leaves_all = "weights" in taken or (taken and not self.sleeps_again)
        if self.model.state.disagrees and leaves_all and taken < TAGS:
            await self._make(EngineCall.WAKE_REST)

    async def sleep_failed(self) -> None:
        """A sleep failed. It may have stopped the scheduler before, which amounts to level 0."""
        self.handle(events.sleep_failed)
        await self.ask_workers()
        try:
            await self.mend()
        except Exception as error:
            logger.warning("cumem-sleep gate: a sleep failed in some workers, and others cannot wake: %s", error)

    async def wake_failed(self, tags: frozenset[str] = frozenset()) -> None:
        """A wake of these tags failed, perhaps after the memory was mapped."""
        self.handle(events.wake_failed, tags)
        await self.ask_workers()

    async def mend(self) -> None:
        """Wake the workers that vLLM does not know to be asleep: its next wake would run the model on their unmapped
        memory.

        Raises:
            Exception: they cannot wake; the next sleep or wake tries again first.
        """
        if self.model.workers_sleep_unknown:
            await self.engine.collective_rpc("wake_up")
            self.handle(events.workers_woken)

    # Waking on request

    def wake(self) -> asyncio.Task[None]:
        """Wake the model: one task for all requests, which outlives each of them. It never raises: see `failure`."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())
        return self._waking

    async def _wake(self) -> None:
        model, cause = self.model, "it is still asleep, or asleep again"
        try:
            async with self.change(disturbs=False):
                if not model.may_be_woken:
                    return
                calls = model.calls_to_wake()
                what = f"level {model.level}{', weights loaded' if EngineCall.RELOAD in calls else ''}"
                start = time.perf_counter()
                await self.wake_whole()
        except Busy:
            return  # a sibling may be waking it: waiting requests try again
        except Exception as error:
            cause = " ".join(str(error).split()) or type(error).__name__
        if model.serves:
            logger.info("cumem-sleep gate: woke on request in %.3f s (%s)", time.perf_counter() - start, what)
        else:
            self.failure = cause, self.clock() + self._settings.retry_after_s
            logger.warning("cumem-sleep gate: waking on request failed: %s", cause)

    async def wake_whole(self) -> None:
        """Wake all, and load weights that were dropped.

        Raises:
            Exception: the engine's own, or what the load left out.
        """
        calls = self.model.calls_to_wake()
        if self.several_servers and self.model.asleep and not self.model.state.kept:
            await self.flush()  # a sibling may have let a request through
        for call in calls:
            await self._make(call)

    async def _make(self, call: EngineCall) -> None:
        if call is EngineCall.WAKE_WORKERS:
            await self.mend()
        elif call is EngineCall.RELOAD:
            await self.engine.collective_rpc("reload_weights")
            await self.look_what_is_loaded()
            if why := why_left_out(self.model.state.left_out):
                raise RuntimeError(why)
            self.handle(events.wrote, Effect.LOADS)
        elif call is EngineCall.RESUME:
            await self.engine.wake_up(["scheduling"])
            await self.resume_apart()
        else:
            tags = ["weights"] if call is EngineCall.WAKE_WEIGHTS else self.model.tags_to_wake
            try:
                await self.engine.wake_up(tags)
            except Exception:
                await self.wake_failed(frozenset(tags or ()))
                raise
            self.handle(events.woken, frozenset(tags or ()), loads_next=True)
            await self.resume_apart()


def _is_unknown(error: Exception) -> bool:
    """Whether the workers do not have the method, in vLLM's words."""
    return "not implemented" in str(error)


def _retrieve(question: asyncio.Task[bool]) -> None:
    """Retrieve the exception, in case nobody waited for the question."""
    if not question.cancelled():
        question.exception()
