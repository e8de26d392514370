"""The gate's model: every event in every state, as the table says that docs/vllm-states.md shows."""

from __future__ import annotations

import dataclasses
import inspect
import json
from functools import partial

import pytest
import state_table
from state_table import EVENTS, STATES

from cumem_sleep.vllm import events
from cumem_sleep.vllm.sleeping_model import EngineCall, GatePhase, RequestDecision, SleepingModel


@pytest.mark.parametrize("state", STATES)
def test_what_becomes_of_it(state: str) -> None:
    expected = {event: after for (of, event), after in state_table.expected().items() if of == state}
    assert {event: state_table.after(state, event) for event in EVENTS} == expected


def test_the_table_has_every_event_and_each_state_is_told_from_the_others() -> None:
    assert set(state_table.expected()) == {(state, event) for state in STATES for event in EVENTS}
    theirs = {each for each in vars(events).values() if getattr(each, "__module__", "") == events.__name__}
    functions = {each for each in theirs if inspect.isfunction(each) and not each.__name__.startswith("_")}
    assert {getattr(event, "func", event) for event in EVENTS.values()} == functions
    assert [state_table.name_of(state) for _, state in STATES.values()] == list(STATES)


def test_the_document_shows_the_table() -> None:
    assert state_table.DOCUMENT.read_text() == state_table.document(), "python tests/vllm/state_table.py"


@pytest.mark.parametrize("policy", state_table.POLICIES)
@pytest.mark.parametrize("state", STATES)
def test_requests_run_only_where_all_memory_is_there_and_the_weights_are_loaded(state: str, policy: str) -> None:
    model = SleepingModel(STATES[state][1])
    passes = model.decide(policy) is RequestDecision.PASS
    assert passes == model.serves == (state in ("awake", "paused"))
    assert policy == "wake" or model.decide(policy) is not RequestDecision.WAKE
    if model.phase is GatePhase.DISAGREEING:
        assert model.decide(policy) is (RequestDecision.WAKE if policy == "wake" else RequestDecision.REFUSE)


CALLS = {
    "level 0": (EngineCall.RESUME,),
    "level 1": (EngineCall.WAKE_REST,),
    "level 2": (EngineCall.WAKE_WEIGHTS, EngineCall.RELOAD, EngineCall.WAKE_REST),
    "level 3": (EngineCall.WAKE_REST,),
    "no KV": (EngineCall.WAKE_REST,),
    "KV only": (EngineCall.WAKE_REST,),
    "missing": (EngineCall.RELOAD,),
    "half awake": (EngineCall.WAKE_REST,),
    "half asleep": (EngineCall.WAKE_WORKERS, EngineCall.RESUME),
}
DONE = {
    EngineCall.WAKE_WORKERS: [events.workers_woken],
    EngineCall.WAKE_WEIGHTS: [partial(events.woken, tags=state_table.WEIGHTS, loads_next=True)],
    EngineCall.RELOAD: [state_table.EVENTS["weights loaded"]],
    EngineCall.WAKE_REST: [partial(events.woken, loads_next=True)],
    EngineCall.RESUME: [],
}


@pytest.mark.parametrize("state", STATES)
def test_the_calls_of_a_wake_end_in_a_model_that_serves(state: str) -> None:
    model = SleepingModel(STATES[state][1])
    if model.decide("wake") is not RequestDecision.WAKE:
        assert state not in CALLS
        return
    assert model.calls_to_wake() == CALLS[state]
    for call in model.calls_to_wake():
        for event in DONE[call]:
            model.handle(event)
    model.handle(EVENTS["engine: awake"])
    assert model.serves


@pytest.mark.parametrize("state", STATES)
def test_other_servers_get_the_whole_state(state: str) -> None:
    known = STATES[state][1]
    told = json.loads(json.dumps(SleepingModel(known).facts()))
    other = SleepingModel(dataclasses.replace(known, kept=not known.kept))
    other.adopt(told)
    assert dataclasses.replace(other.state, known=known.known) == known
    assert other.phase in (GatePhase.UNKNOWN, GatePhase.CHANGING), "it has to ask"
    same = SleepingModel(known)
    for facts in (told, {}):
        same.adopt(facts)
        assert same.state == known
