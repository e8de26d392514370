"""What happens to a model that can sleep: each event makes a state of `SleepingModel` the next one.

None of them knows the time or the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .sleeping_model import NOTHING, TAGS, Known, SleepingModel, State, Stopped, Update, Weights
from .worker_methods import Effect


@dataclass(frozen=True)
class Workers:
    """What all workers say of their memory.

    Attributes:
        asleep: tags of which something is asleep in any worker.
        mapped: tags of which everything is mapped in any worker. A tag in both is asleep in some workers only.
        lost: weights are asleep without a backup.
        checkpointed: a worker is at level 3.
    """

    asleep: frozenset[str] = NOTHING
    mapped: frozenset[str] = NOTHING
    lost: bool = False
    checkpointed: bool = False


# Changes


def began(state: State, disturbs: bool = True) -> State:
    """A change begins. One that does not disturb changes nothing for a model that serves."""
    return replace(state, known=Known.CHANGING) if disturbs or not SleepingModel(state).serves else state


def ended(state: State) -> State:
    """The change is over, or failed: what is so now has to be asked."""
    return replace(state, known=Known.NO)


def doubted(state: State) -> State:
    """Something was called of which the gate does not know what it does: the workers have to be asked as well."""
    return replace(state, known=Known.NO if state.known is Known.YES else state.known, doubted=True)


# What engine and workers say


def answered(state: State, sleeps: bool, workers: Workers | None = None, scheduler_paused: bool = False) -> State:
    """The engine said whether it sleeps, and the workers what is mapped, if they were asked and answered.

    `scheduler_paused`: the engine's scheduler is known to be paused, which it calls sleeping as well.
    """
    known = replace(state, known=Known.YES, doubted=False)
    if sleeps:
        if workers is not None:
            return workers_said(known, workers)
        is_unseen = not (state.asleep or state.engine or Stopped.SLEEP in state.stopped or scheduler_paused)
        # vLLM means memory but does not say which.
        return replace(known, asleep=TAGS, mapped=NOTHING) if is_unseen else known
    awake = replace(known, stopped=Stopped.NOBODY, kept=False)
    if workers is not None:  # memory that others tag and put to sleep is theirs
        return workers_said(replace(awake, engine=NOTHING), replace(workers, asleep=workers.asleep & TAGS))
    if state.asleep - state.engine_asleep:  # the workers do not say that this is over
        return replace(awake, engine=NOTHING)
    return replace(awake, asleep=NOTHING, mapped=NOTHING, engine=None, checkpointed=False)


def workers_said(state: State, workers: Workers) -> State:
    """What is mapped comes from the workers. What the engine took to be asleep before, it still does."""
    engine = state.asleep if state.engine is None and state.asleep & workers.mapped else state.engine
    state = replace(
        _lost(state) if workers.lost else state,
        asleep=workers.asleep,
        mapped=workers.mapped,
        engine=engine,
        checkpointed=workers.checkpointed,
    )
    return _agreed(state)


def deepened(state: State, checkpointed: bool) -> State:
    """A worker is at level 3, or none is any more."""
    return replace(state, checkpointed=checkpointed)


# Sleeps and wakes


def slept(state: State, level: int, kept: bool = False, again: bool = True, tags: frozenset[str] = TAGS) -> State:
    """The engine's sleep succeeded; that of memory which sleeps already does nothing.

    Args:
        level: 0 to 2.
        kept: requests may have been left in the engine.
        again: the engine also sleeps when only the KV cache does, from vLLM 0.33 on.
        tags: what it put to sleep.
    """
    state = replace(state, kept=kept)
    if state.engine_asleep and not (again and "weights" not in state.engine_asleep):
        return state
    if level == 0:
        return replace(state, stopped=state.stopped | Stopped.SLEEP)
    weights = Weights.LOADED if state.weights is Weights.LOADED else Weights.LOST
    tags |= state.asleep
    asleep = replace(state, asleep=tags, mapped=state.mapped - tags, engine=None, weights=weights, cause="")
    return _lost(asleep) if level == 2 and "weights" in tags else asleep


def sleep_failed(state: State) -> State:
    """The engine takes what was awake to be awake, though its scheduler may have stopped and workers may sleep."""
    return replace(_stopped_by_sleep(state), engine=state.engine_asleep)


def woken(state: State, tags: frozenset[str] = NOTHING, loads_next: bool = False) -> State:
    """The engine's wake of these tags (none: all) succeeded; it ignores a call that names a tag that is awake.

    `loads_next`: the gate woke them for a request, and loads weights that were dropped by itself.
    """
    wanted = tags - {"scheduling"} if tags else state.engine_asleep
    if wanted <= state.engine_asleep:
        engine = None if state.engine is None else state.engine - wanted
        state = replace(state, asleep=state.asleep - wanted, mapped=state.mapped | wanted, engine=engine)
    if state.weights is Weights.LOST and "weights" not in state.asleep and not loads_next:
        return replace(state, weights=Weights.STAGED)
    return state


def wake_failed(state: State, tags: frozenset[str] = NOTHING) -> State:
    """The engine takes these tags (none: all) to be asleep still. The workers may have mapped them: nobody is told that
    they sleep before the workers say so.
    """
    tried = (tags or state.engine_asleep) & state.engine_asleep
    return replace(state, engine=state.engine_asleep, asleep=state.asleep - tried, mapped=state.mapped | tried)


def released(state: State) -> State:
    """The KV cache alone was dropped."""
    return replace(state, asleep=state.asleep | {"kv_cache"}, mapped=state.mapped - {"kv_cache"})


def forgot(state: State) -> State:
    """Workers may have forgotten the backups of weights that sleep, and do not say."""
    return _lost(state) if "weights" in state.asleep else state


def paused(state: State) -> State:
    """Somebody paused the scheduler."""
    return replace(state, stopped=state.stopped | Stopped.PAUSE)


def workers_woken(state: State) -> State:
    """All workers were woken past the engine."""
    mapped = state.mapped | state.asleep
    return _agreed(replace(_stopped_by_sleep(state), asleep=NOTHING, mapped=mapped, engine=state.engine_asleep))


def workers_put_to_sleep(state: State) -> State:
    """All workers were put to sleep past the engine."""
    return _agreed(replace(state, asleep=TAGS, mapped=NOTHING, engine=state.engine_asleep))


# Weights


def wrote(state: State, effect: Effect) -> State:
    """A call that may write weights succeeded."""
    update = state.update
    if effect is Effect.STARTS:
        return replace(state, update=Update.OPEN)
    if effect is Effect.STARTS_DRAFT:
        return replace(state, update=Update.DRAFT)
    if effect is Effect.LOADS or (effect is Effect.UPDATES and update is Update.NONE):
        return _loaded(state)
    if effect is Effect.UPDATES and update is Update.OPEN:
        return replace(state, update=Update.WRITTEN)
    if effect is Effect.FINISHES:
        finished = replace(state, update=Update.NONE)
        # Whether a draft model was the last of all weights to be loaded, the workers alone can say.
        is_last = update is Update.DRAFT and state.left_out is not None
        return _loaded(finished) if is_last or update in (Update.NONE, Update.WRITTEN) else finished
    return state


def left_out(state: State, names: str | None) -> State:
    """What the workers say that a load, which has not been noted yet, left out of the weights; "" if nothing, None if
    they do not say.
    """
    return replace(state, left_out=names)


def load_failed(state: State, why: str) -> State:
    """A call that was to load weights failed."""
    if state.weights is Weights.LOADED or "weights" in state.asleep:
        return state
    return replace(state, weights=Weights.FAILED, cause=why)


def _agreed(state: State) -> State:
    """The state, without the engine's own view where the workers' is the same."""
    return state if state.disagrees else replace(state, engine=None)


def _stopped_by_sleep(state: State) -> State:
    """The engine's scheduler may have stopped, and not by a pause."""
    by_sleep = Stopped.NOBODY if Stopped.PAUSE in state.stopped else Stopped.SLEEP
    return replace(state, stopped=state.stopped | by_sleep)


def _lost(state: State) -> State:
    update = Update.NONE if state.update is Update.NONE else Update.TORN
    return replace(state, weights=Weights.LOST, update=update, cause="", left_out="")


def _loaded(state: State) -> State:
    """All weights were written, unless the workers say otherwise."""
    is_whole = "weights" not in state.asleep and not state.left_out
    return replace(state, weights=Weights.LOADED, cause="") if is_whole else state
