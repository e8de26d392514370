"""The gate's model by its states and events, and docs/vllm-states.md, which says what a request meets in each state.

python tests/vllm/state_table.py        writes the document from the states below
python tests/vllm/state_table.py --now  prints what the model does now, in the form of that table
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from functools import partial

from cumem_sleep.vllm import events
from cumem_sleep.vllm.events import Workers
from cumem_sleep.vllm.sleeping_model import TAGS, Known, SleepingModel, State, Stopped, Weights
from cumem_sleep.vllm.worker_methods import Effect

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "vllm-states.md"
POLICIES = ("reject", "wait", "wake")
WEIGHTS, KV_CACHE, NOTHING = frozenset({"weights"}), frozenset({"kv_cache"}), frozenset[str]()


def _is(asleep: frozenset[str] = NOTHING, **facts: object) -> State:
    return State(**{"known": Known.YES, "asleep": asleep, "mapped": TAGS - asleep, **facts})  # type: ignore[arg-type]


# By the name that the table uses: what it means, and an example.
STATES: dict[str, tuple[str, State]] = {
    "unknown": ("at the start, after a change: the engine is to be asked", _is(known=Known.NO)),
    "changing": ("a sleep, a wake or a reload is under way", _is(known=Known.CHANGING)),
    "awake": ("requests run", _is()),
    "level 0": ("the scheduler is stopped, by a sleep", _is(stopped=Stopped.SLEEP)),
    "paused": ("the scheduler is stopped, by `POST /pause`; vLLM queues or refuses", _is(stopped=Stopped.PAUSE)),
    "level 1": ("weights are backed up", _is(TAGS)),
    "level 2": ("weights were dropped", _is(TAGS, weights=Weights.LOST)),
    "level 3": ("the CUDA state has left the GPU", _is(TAGS, checkpointed=True)),
    "no KV": ("the KV cache sleeps, the weights are there", _is(KV_CACHE)),
    "KV only": ("the weights sleep, the KV cache is there", _is(WEIGHTS)),
    "missing": ("weights were dropped, and nobody is loading them", _is(weights=Weights.LOST)),
    "loading": ("somebody woke dropped weights, to load them", _is(weights=Weights.STAGED)),
    "unloaded": ("that load failed", _is(weights=Weights.FAILED, cause="no such file")),
    "half awake": ("workers have mapped what the engine takes to be asleep", _is(engine=TAGS)),
    "half asleep": (
        "workers sleep that the engine takes to be awake",
        _is(TAGS, engine=NOTHING, stopped=Stopped.SLEEP),
    ),
}

_ASLEEP, _MAPPED = Workers(asleep=TAGS), Workers(mapped=TAGS)
_DROPPED = Workers(asleep=TAGS, lost=True)

EVENTS: dict[str, Callable[[State], State]] = {
    "a change begins": events.began,
    "a wake begins": partial(events.began, disturbs=False),
    "it ends": events.ended,
    "something that the gate does not know was called": events.doubted,
    "engine: awake": partial(events.answered, sleeps=False),
    "engine: awake; workers: mapped": partial(events.answered, sleeps=False, workers=_MAPPED),
    "engine: awake; workers: asleep": partial(events.answered, sleeps=False, workers=_ASLEEP),
    "engine: sleeps": partial(events.answered, sleeps=True),
    "engine: sleeps, as its scheduler is paused": partial(events.answered, sleeps=True, scheduler_paused=True),
    "engine: sleeps; workers: mapped": partial(events.answered, sleeps=True, workers=_MAPPED),
    "engine: sleeps; workers: asleep": partial(events.answered, sleeps=True, workers=_ASLEEP),
    "engine: sleeps; workers: dropped": partial(events.answered, sleeps=True, workers=_DROPPED),
    "workers: mapped": partial(events.workers_said, workers=_MAPPED),
    "workers: asleep": partial(events.workers_said, workers=_ASLEEP),
    "slept, level 0": partial(events.slept, level=0),
    "slept, level 1": partial(events.slept, level=1),
    "slept, level 2": partial(events.slept, level=2),
    "slept, level 2, before vLLM 0.33": partial(events.slept, level=2, again=False),
    "a sleep failed": events.sleep_failed,
    "woken": events.woken,
    "weights woken": partial(events.woken, tags=WEIGHTS),
    "weights woken, for a request": partial(events.woken, tags=WEIGHTS, loads_next=True),
    "KV cache woken": partial(events.woken, tags=KV_CACHE),
    "a wake failed": events.wake_failed,
    "KV cache released": events.released,
    "backups may be forgotten": events.forgot,
    "paused": events.paused,
    "workers woken past the engine": events.workers_woken,
    "workers put to sleep past the engine": events.workers_put_to_sleep,
    "gone to level 3": partial(events.deepened, checkpointed=True),
    "come from level 3": partial(events.deepened, checkpointed=False),
    "weights loaded": partial(events.wrote, effect=Effect.LOADS),
    "an update started": partial(events.wrote, effect=Effect.STARTS),
    "an update written or finished": partial(events.wrote, effect=Effect.FINISHES),
    "a load left some out": partial(events.left_out, names="draft"),
    "a load failed": partial(events.load_failed, why="no such file"),
}

# What comes of each event in each state, in the order of `STATES`; "." where it stays.
TABLE = """\
a change begins | changing | . | changing | changing | changing | changing | changing | changing | changing | changing | changing | changing | changing | changing | changing
a wake begins | changing | . | . | changing | . | changing | changing | changing | changing | changing | changing | changing | changing | changing | changing
it ends | . | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown
something that the gate does not know was called | . | . | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown | unknown
engine: awake | awake | awake | . | awake | awake | awake | missing | awake | awake | awake | . | . | . | awake | .
engine: awake; workers: mapped | awake | awake | . | awake | awake | awake | missing | awake | awake | awake | . | . | . | awake | awake
engine: awake; workers: asleep | half asleep | half asleep | half asleep | half asleep | half asleep | half asleep | half asleep | half asleep | half asleep | half asleep | half asleep | half asleep | half asleep | half asleep | .
engine: sleeps | level 1 | level 1 | level 1 | . | level 1 | . | . | . | . | . | level 2 | level 2 | level 2 | . | .
engine: sleeps, as its scheduler is paused | awake | awake | . | . | . | . | . | . | . | . | . | . | . | . | .
engine: sleeps; workers: mapped | awake | awake | . | . | . | half awake | half awake | half awake | half awake | half awake | . | . | . | . | level 0
engine: sleeps; workers: asleep | level 1 | level 1 | level 1 | level 1 | level 1 | . | . | level 1 | level 1 | level 1 | level 2 | level 2 | level 2 | level 1 | .
engine: sleeps; workers: dropped | level 2 | level 2 | level 2 | level 2 | level 2 | level 2 | . | level 2 | level 2 | level 2 | level 2 | level 2 | level 2 | level 2 | .
workers: mapped | . | . | . | . | . | half awake | half awake | half awake | half awake | half awake | . | . | . | . | level 0
workers: asleep | . | . | level 1 | level 1 | level 1 | . | . | level 1 | level 1 | level 1 | level 2 | level 2 | level 2 | level 1 | .
slept, level 0 | . | . | level 0 | . | level 0 | . | . | . | . | . | . | . | . | . | .
slept, level 1 | . | . | level 1 | level 1 | level 1 | . | . | . | level 1 | . | level 2 | level 2 | level 2 | . | level 1
slept, level 2 | . | . | level 2 | level 2 | level 2 | . | . | . | level 2 | . | level 2 | level 2 | level 2 | . | level 2
slept, level 2, before vLLM 0.33 | . | . | level 2 | level 2 | level 2 | . | . | . | . | . | level 2 | level 2 | level 2 | . | level 2
a sleep failed | . | . | level 0 | . | . | . | . | . | . | . | . | . | . | . | .
woken | . | . | . | . | . | awake | loading | . | awake | awake | loading | . | . | awake | .
weights woken | . | . | . | . | . | no KV | loading | . | . | awake | loading | . | . | . | .
weights woken, for a request | . | . | . | . | . | no KV | missing | . | . | awake | . | . | . | . | .
KV cache woken | . | . | . | . | . | KV only | . | . | awake | . | loading | . | . | . | .
a wake failed | . | . | . | . | . | half awake | half awake | half awake | half awake | half awake | . | . | . | . | .
KV cache released | . | . | no KV | no KV | no KV | . | . | . | . | level 1 | . | . | . | . | .
backups may be forgotten | . | . | . | . | . | level 2 | . | . | . | level 2 | . | . | . | . | .
paused | . | . | paused | . | . | . | . | . | . | . | . | . | . | . | .
workers woken past the engine | . | . | level 0 | . | . | half awake | half awake | half awake | half awake | half awake | . | . | . | . | level 0
workers put to sleep past the engine | . | . | half asleep | half asleep | half asleep | . | . | . | half asleep | half asleep | half asleep | half asleep | half asleep | level 1 | .
gone to level 3 | . | . | level 3 | level 3 | level 3 | level 3 | level 3 | . | level 3 | level 3 | level 3 | level 3 | level 3 | . | .
come from level 3 | . | . | . | . | . | . | . | level 1 | . | . | . | . | . | . | .
weights loaded | . | . | . | . | . | . | . | . | . | . | awake | awake | awake | . | .
an update started | . | . | . | . | . | . | . | . | . | . | . | . | . | . | .
an update written or finished | . | . | . | . | . | . | . | . | . | . | awake | awake | awake | . | .
a load left some out | . | . | . | . | . | . | . | . | . | . | . | . | . | . | .
a load failed | . | . | . | . | . | . | . | . | . | . | unloaded | unloaded | . | . | .
"""  # noqa: E501


def name_of(state: State) -> str:
    """The name of a state in the table."""
    if state.known is not Known.YES:
        return "unknown" if state.known is Known.NO else "changing"
    if state.disagrees:
        return "half asleep" if state.asleep - state.engine_asleep else "half awake"
    if state.checkpointed:
        return "level 3"
    if state.weights is not Weights.LOADED:
        names = {Weights.LOST: "missing", Weights.STAGED: "loading", Weights.FAILED: "unloaded"}
        return "level 2" if "weights" in state.asleep else names[state.weights]
    if state.asleep:
        return {TAGS: "level 1", KV_CACHE: "no KV", WEIGHTS: "KV only"}[state.asleep & TAGS]
    if Stopped.SLEEP in state.stopped:
        return "level 0"
    return "paused" if Stopped.PAUSE in state.stopped else "awake"


def after(state: str, event: str) -> str:
    """The name of the state that the model is in after an event."""
    model = SleepingModel(STATES[state][1])
    model.handle(EVENTS[event])
    return name_of(model.state)


def expected() -> dict[tuple[str, str], str]:
    """By state and event: what the table says."""
    found = {}
    for line in TABLE.splitlines():
        event, *cells = [cell.strip() for cell in line.split("|")]
        for state, cell in zip(STATES, cells, strict=True):
            found[state, event] = state if cell == "." else cell
    return found


def now() -> str:
    """What the model does now, in the form of `TABLE`."""
    lines = []
    for event in EVENTS:
        cells = [after(state, event) for state in STATES]
        lines.append(
            " | ".join([event, *("." if cell == state else cell for state, cell in zip(STATES, cells, strict=True))])
        )
    return "\n".join(lines) + "\n"


HEAD = """\
# The gate's states

What a request meets in each state of [the gate's](vllm.md#the-gate) model, by `CUMEM_SLEEP_ON_REQUEST`. What leads to
which state is in `tests/vllm/state_table.py`, which also writes this page.

- **pass**: vLLM gets it. **refuse**: it gets 503 at once. **hold**: it waits, at most `CUMEM_SLEEP_REQUEST_DEADLINE_S`.
  **wake**: it waits, and the model is woken.
- **Half awake** and **half asleep** are what a failed wake or sleep leaves. `/health` and `/is_sleeping` answer
  503, and writes of weights 409. `/wake_up`, `/sleep` or a request that wakes brings engine and workers together.

"""


def document() -> str:
    """The whole page."""
    lines = ["| state | | " + " | ".join(f"`{policy}`" for policy in POLICIES) + " |", "|---|---|" + "---|" * 3]
    for name, (meaning, state) in STATES.items():
        decided = [SleepingModel(state).decide(policy).value for policy in POLICIES]
        if name == "unknown":
            decided = ["(ask)"] * 3
        lines.append(f"| **{name}** | {meaning} | " + " | ".join(decided) + " |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--now"]:
        print(now(), end="")
    else:
        DOCUMENT.write_text(document())
