"""What the HTTP gate knows about the model's sleep: a state machine. No I/O, no clock, no asyncio.

Events go in, decisions come out: what is to be done with a request, and which calls wake the model. The table of all
states and events is in `tests/vllm/state_table.py`; `SleepController` asks the engine and makes the calls.

    model.handle(events.slept, level=1)
    model.handle(events.answered, sleeps=True, workers=…)
    model.decide("wake")     # Decision.WAKE
    model.calls_to_wake()    # (Call.WAKE_REST,)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum, Flag
from typing import Any, Concatenate, ParamSpec

P = ParamSpec("P")

TAGS = frozenset(("weights", "kv_cache"))  # the tags that vLLM's executors put to sleep
NOTHING: frozenset[str] = frozenset()


class GatePhase(Enum):
    """Where the model is, as far as the gate knows."""

    UNKNOWN = "unknown"  # at the start, and after every change: ask the engine
    AWAKE = "awake"
    ASLEEP = "asleep"  # some memory is asleep; at level 0, only the scheduler is stopped
    CHANGING = "changing"  # a sleep, a wake or a reload is under way
    DISAGREEING = "disagreeing"  # the workers have mapped what the engine takes to be asleep, or the reverse


class Known(Enum):
    """Whether the other facts of a state hold now."""

    NO = "no"
    CHANGING = "changing"
    YES = "yes"


class Weights(Enum):
    """What the weights contain."""

    LOADED = "loaded"
    LOST = "lost"  # dropped at level 2 or forgotten, and not loaded since: answers would be plausible garbage
    STAGED = "staged"  # lost; somebody woke them and is loading them, and a request must not interfere
    FAILED = "failed"  # lost; loading them failed, and whoever tried has to try again


class Update(Enum):
    """Whether weights are being written in several calls."""

    NONE = "none"
    OPEN = "open"  # started, nothing written yet
    WRITTEN = "written"  # not finished
    DRAFT = "draft"  # of the draft model alone
    TORN = "torn"  # weights were dropped after it started: what was prepared or written is lost


class Stopped(Flag):
    """Who stopped the engine's scheduler."""

    NOBODY = 0
    SLEEP = 1  # a sleep at level 0, or one that failed afterwards: a wake resumes it
    PAUSE = 2  # POST /pause, and no request ends that


class RequestDecision(Enum):
    """What is to be done with a request."""

    PASS = "pass"
    REFUSE = "refuse"
    HOLD = "hold"
    WAKE = "wake"  # hold it, and wake the model


class EngineCall(Enum):
    """A call on the way from a sleep to a model that serves."""

    WAKE_WORKERS = "wake_up of all workers, past the engine"
    WAKE_WEIGHTS = "the engine's wake_up of the weights"
    RELOAD = "reload_weights"
    WAKE_REST = "the engine's wake_up of what is still asleep"
    RESUME = "the engine's wake_up of the scheduler alone"


@dataclass(frozen=True)
class State:
    """All that is known. What begins and ends each fact stands in `events`.

    Attributes:
        known: whether the rest holds now; it outlives a change.
        asleep: tags of memory that is asleep in any worker: their own word, or by history if they do not answer.
        mapped: tags that are mapped in any worker.
        engine: the tags that the engine takes to be asleep, where that may differ from `asleep`: after a failure.
        weights: see `Weights`.
        cause: why loading them failed.
        left_out: what the last load left out, as the workers say; "" if nothing, None if they do not say.
        update: see `Update`.
        stopped: see `Stopped`.
        kept: a sleep may have left requests in the engine, which run when its scheduler resumes: a wake has to be
            whole.
        checkpointed: the workers went on to level 3: their CUDA state is not on the GPU.
        doubted: anything may have changed since the engine was last asked, in its workers alone as well.
    """

    known: Known = Known.NO
    asleep: frozenset[str] = NOTHING
    mapped: frozenset[str] = NOTHING
    engine: frozenset[str] | None = None
    weights: Weights = Weights.LOADED
    cause: str = ""
    left_out: str | None = ""
    update: Update = Update.NONE
    stopped: Stopped = Stopped.NOBODY
    kept: bool = False
    checkpointed: bool = False
    doubted: bool = False

    @property
    def engine_asleep(self) -> frozenset[str]:
        """The tags that the engine takes to be asleep."""
        return self.asleep if self.engine is None else self.engine

    @property
    def disagrees(self) -> bool:
        """Whether the engine, or one worker, takes for asleep what another has mapped, or the reverse."""
        return bool(self.engine_asleep & self.mapped or self.asleep - self.engine_asleep)


class SleepingModel:
    """See the module. Everything that changes `state` is an event, and every answer is derived from it."""

    def __init__(self, state: State = State()) -> None:
        self.state = state

    def handle(self, event: Callable[Concatenate[State, P], State], *args: P.args, **kwargs: P.kwargs) -> None:
        """Take note of an event: one of `events`, and its arguments."""
        self.state = event(self.state, *args, **kwargs)

    # What is so

    @property
    def phase(self) -> GatePhase:
        """See `GatePhase`."""
        state = self.state
        if state.known is not Known.YES:
            return GatePhase.CHANGING if state.known is Known.CHANGING else GatePhase.UNKNOWN
        if state.disagrees:
            return GatePhase.DISAGREEING
        return GatePhase.ASLEEP if state.asleep or Stopped.SLEEP in state.stopped else GatePhase.AWAKE

    @property
    def asleep(self) -> frozenset[str]:
        """The tags of memory that is asleep."""
        return self.state.asleep

    @property
    def checkpointed(self) -> bool:
        """Whether workers are at level 3."""
        return self.state.checkpointed

    @property
    def serves(self) -> bool:
        """Whether requests may run."""
        return self.phase is GatePhase.AWAKE and self.state.weights is Weights.LOADED

    @property
    def may_rest(self) -> bool:
        """Whether nobody has stopped the scheduler, or is writing weights, and all memory and weights are there."""
        state = self.state
        return not (self.lacks_memory or state.disagrees or state.stopped) and state.update is Update.NONE

    @property
    def lacks_memory(self) -> bool:
        """Whether memory may be asleep or weights were not reloaded, as far as is known."""
        return bool(self.asleep or self.state.engine_asleep) or self.state.weights is not Weights.LOADED

    @property
    def level(self) -> int | None:
        """The level that it sleeps at, or whose lost weights keep it from serving; None if it is awake."""
        state = self.state
        if state.checkpointed:
            return 3
        if state.weights is not Weights.LOADED:
            return 2
        return 1 if state.asleep else 0 if Stopped.SLEEP in state.stopped else None

    @property
    def may_be_woken(self) -> bool:
        """Whether the model is asleep in a way that a request may end."""
        state = self.state
        is_others = Stopped.PAUSE in state.stopped or state.weights in (Weights.STAGED, Weights.FAILED)
        return (Stopped.SLEEP in state.stopped or self.lacks_memory) and not is_others

    def why_not(self) -> str:
        """Why requests cannot run now, in a sentence for the client."""
        state = self.state
        if self.phase is GatePhase.CHANGING:
            return "the model is falling asleep or waking up"
        if self.phase is GatePhase.DISAGREEING:
            return self.why_disagrees
        if state.weights is Weights.FAILED:
            return f"weights were dropped, and loading them failed: {state.cause}: POST /reload_weights"
        if self.phase is GatePhase.AWAKE and state.left_out:
            return why_left_out(state.left_out)
        if self.phase is GatePhase.AWAKE:
            return "weights were dropped and not reloaded: POST /reload_weights"
        alone = f", {_listed(state.asleep)} alone" if NOTHING < state.asleep & TAGS < TAGS else ""
        return f"the model is asleep (level {self.level}{alone}): POST /wake_up"

    @property
    def is_doubtful(self) -> bool:
        """Whether the workers have to be asked even if the engine says that it is awake."""
        return self.state.engine is not None or self.state.disagrees

    @property
    def why_disagrees(self) -> str:
        """What the engine and its workers disagree about, in a sentence; "" if they do not."""
        if not self.state.disagrees:
            return ""
        taken, asleep, mapped = map(_listed, (self.state.engine_asleep, self.state.asleep, self.state.mapped))
        return (
            f"a sleep or wake failed half-way: vLLM's engine takes {taken} to be asleep, and in its workers {asleep}"
            f" sleeps and {mapped} is mapped: POST /wake_up or /sleep brings them together"
        )

    # What is to be done

    def decide(self, policy: str) -> RequestDecision:
        """About a request, by a policy of `GateSettings.on_request`."""
        if self.serves:
            return RequestDecision.PASS
        if policy == "reject":
            return RequestDecision.REFUSE
        if self.phase is GatePhase.CHANGING:
            return RequestDecision.HOLD
        if policy == "wake" and self.may_be_woken:
            return RequestDecision.WAKE
        # Nobody is known to be at work on what failed, so a request is not kept waiting for that.
        has_failed = self.phase is GatePhase.DISAGREEING or self.state.weights is Weights.FAILED
        return RequestDecision.REFUSE if has_failed else RequestDecision.HOLD

    def calls_to_wake(self) -> tuple[EngineCall, ...]:
        """What makes it serve again, in vLLM's documented order for level 2: weights, reload, KV cache."""
        state, calls = self.state, []
        if self.workers_sleep_unknown:
            calls.append(EngineCall.WAKE_WORKERS)
        if state.weights is not Weights.LOADED:
            calls += [EngineCall.WAKE_WEIGHTS] * ("weights" in state.engine_asleep) + [EngineCall.RELOAD]
        if state.engine_asleep:
            calls.append(EngineCall.WAKE_REST)
        elif self.workers_sleep_unknown or Stopped.SLEEP in state.stopped:
            calls.append(EngineCall.RESUME)
        return tuple(calls)

    @property
    def tags_to_wake(self) -> list[str] | None:
        """The tags of `EngineCall.WAKE_REST`; None for all, which also wakes what only the engine knows of."""
        rest = self.state.engine_asleep & TAGS
        return sorted(rest) if rest < TAGS and rest and self.state.mapped else None

    @property
    def workers_sleep_unknown(self) -> bool:
        """Whether workers sleep that the engine takes to be awake: its next wake would run them unmapped."""
        return bool(self.state.asleep - self.state.engine_asleep)

    # What several API servers of one engine tell each other, which the engine cannot tell them

    def facts(self) -> dict[str, Any]:
        """The state, for JSON; what is known now each server finds out by itself."""
        facts = asdict(self.state)
        del facts["known"], facts["doubted"]
        for name, value in facts.items():
            facts[name] = sorted(value) if isinstance(value, frozenset) else getattr(value, "value", value)
        return facts

    def adopt(self, facts: dict[str, Any]) -> None:
        """Take over another server's facts. Where they are new, the engine is to be asked."""
        if facts and facts != self.facts():
            self.state = State(
                known=Known.NO if self.state.known is Known.YES else self.state.known,
                asleep=frozenset(facts["asleep"]),
                mapped=frozenset(facts["mapped"]),
                engine=None if facts["engine"] is None else frozenset(facts["engine"]),
                weights=Weights(facts["weights"]),
                cause=facts["cause"],
                left_out=facts["left_out"],
                update=Update(facts["update"]),
                stopped=Stopped(facts["stopped"]),
                kept=facts["kept"],
                checkpointed=facts["checkpointed"],
                doubted=self.state.doubted,
            )


def why_left_out(names: str | None) -> str:
    """What to do about weights that a load left out; "" if it left out none."""
    if not names:
        return ""
    return (
        f"not all weights that were dropped were loaded again, {names} among them: load these as well, or sleep at"
        " level 1; vLLM 0.33 also keeps a draft model with --sleep-preserve-parameter-names 'draft.*'"
    )


def _listed(tags: frozenset[str]) -> str:
    return " and ".join(sorted(tags)) or "nothing"
