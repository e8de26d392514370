"""The scheduler, in a simulated world that goes wrong at random, and case by case."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from cumem_sleep.serve import policy
from cumem_sleep.serve.actions import (
    Action,
    GiveUpKept,
    Grant,
    Obeyed,
    Refuse,
    Removed,
    Revoke,
    Sleep,
    Start,
    Stop,
    Wake,
)
from cumem_sleep.serve.events import (
    Arrived,
    Configured,
    Died,
    Done,
    Found,
    FrontEvent,
    Gone,
    HasLayer,
    KeptBytes,
    LacksHostMemory,
    Ordered,
    Outcome,
    TimePassed,
)
from cumem_sleep.serve.model import KeptState
from cumem_sleep.serve.policy import STOP, Spec
from cumem_sleep.serve.scheduler import Scheduler
from cumem_sleep.serve.status import Phase

Change = Start | Wake | Sleep | Stop


@dataclass
class World:
    """Servers that do what the scheduler says, when they are told to or after a time; every action is checked."""

    specs: list[Spec]
    host_bytes: int = 1000
    now: float = 0.0
    changes: dict[str, Change] = field(default_factory=dict)
    truth: dict[str, Phase] = field(default_factory=dict)
    level: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    waiting: dict[int, tuple[str, float, float]] = field(default_factory=dict)
    running: dict[int, str] = field(default_factory=dict)
    revoked: set[int] = field(default_factory=set)
    refused: dict[int, Refuse] = field(default_factory=dict)
    granted_after: dict[int, float] = field(default_factory=dict)
    granted_of: dict[int, str] = field(default_factory=dict)
    obeyed: list[Obeyed] = field(default_factory=list)
    log: list[Action] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    giving_up: list[str] = field(default_factory=list)
    woken_by_others: set[str] = field(default_factory=set)
    number: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler((), 0)
        self.configure(*self.specs)

    def configure(self, *specs: Spec) -> list[Action]:
        self.specs = list(specs)
        for spec in specs:
            self.truth.setdefault(spec.name, Phase.STOPPED)
            self.host.setdefault(spec.name, 0)
        return self.send(Configured(specs, self.host_bytes))

    def spec(self, name: str) -> Spec:
        return self.scheduler.models[name].spec

    def phase(self, name: str) -> Phase:
        return self.scheduler.models[name].phase

    # Events

    def send(self, event: FrontEvent) -> list[Action]:
        actions = list(self.scheduler.handle(event, self.now))
        for action in actions:
            self.log.append(action)
            self.act(action)
        self.check()
        return actions

    def ask(self, model: str, wait_s: float = 1e6) -> int:
        self.number += 1
        self.waiting[self.number] = (model, self.now, self.now + wait_s)
        self.send(Arrived(self.number, model, self.now + wait_s))
        return self.number

    def end(self, request: int) -> list[Action]:
        self.waiting.pop(request, None)
        self.running.pop(request, None)
        self.revoked.discard(request)
        return self.send(Gone(request))

    def done(
        self, model: str, error: str | None = None, state: Phase | None = None, lacks: bool = False, stays: str = ""
    ) -> list[Action]:
        """The change of a model that is under way ends; after an error the server is in `state`.

        `stays`: why it sleeps at level 1 and not at 3.
        """
        change = self.changes.pop(model)
        if error is None:
            state = {Start: Phase.AWAKE, Wake: Phase.AWAKE, Sleep: Phase.ASLEEP, Stop: Phase.STOPPED}[type(change)]
        level = None
        if isinstance(change, Sleep):
            level = (1 if stays else change.level) if error is None else change.from_level
        elif isinstance(change, Wake):
            level = change.level
        if state is not None:
            self.truth[model] = state
        if state is Phase.ASLEEP:
            assert level is not None
            self.level[model] = level
            self.host[model] = self.spec(model).host_bytes_at(level)
        if state is Phase.STOPPED:
            self.host[model] = 0
        return self.send(Done(model, change.operation, Outcome(error, state, level, lacks, stays)))

    def has_layer(self, *models: str) -> None:
        for model in models:
            self.layered.add(model)
            self.send(HasLayer(model, True))

    def die(self, model: str) -> list[Action]:
        self.changes.pop(model, None)
        self.truth[model], self.host[model] = Phase.STOPPED, 0
        return self.send(Died(model, "it died"))

    def somebody_else(self, model: str, state: Phase, level: int = 2) -> list[Action]:
        """Puts a server to sleep, or wakes it; then it is asked."""
        self.truth[model] = state
        if state is Phase.ASLEEP:
            self.level[model], self.host[model] = level, self.spec(model).host_bytes_at(level)
        else:
            self.woken_by_others.add(model)
        return self.send(Found(model, state, level if state is Phase.ASLEEP else None))

    def keep(self, model: str, nbytes: int) -> list[Action]:
        """A sleeper's server says how much of its KV cache it keeps."""
        self.kept[model] = nbytes
        return self.send(KeptBytes(model, nbytes))

    def give_up(self, *, fails: bool = False) -> list[Action]:
        """The first server that was told to gives up what it keeps."""
        model = self.giving_up.pop(0)
        if not fails:
            self.kept[model] = 0
        return self.send(KeptBytes(model, self.kept.get(model, 0), was_told=True))

    def pass_time(self, seconds: float) -> None:
        """Time passes, and the scheduler is told when it wants to be."""
        until = self.now + seconds
        while (time := self.scheduler.next_time()) <= until:
            self.now = time
            self.send(TimePassed())
        self.now = until
        self.send(TimePassed())

    # Actions, as they come

    def act(self, action: Action) -> None:
        match action:
            case Grant(request):
                model, arrived, deadline = self.waiting.pop(request)
                assert self.truth[model] is Phase.AWAKE, f"{request} was granted on {model}, {self.truth[model]}"
                assert model not in self.changes, f"{request} was granted on {model}, which changes"
                assert self.now < deadline or self.now == arrived
                self.running[request] = self.granted_of[request] = model
                self.granted_after[request] = self.now - arrived
            case Refuse(request):
                model, _, deadline = self.waiting.pop(request)
                is_configured = any(each.name == model for each in self.specs)
                assert action.failed or self.now >= deadline or not is_configured, action
                self.refused[request] = action
                assert action.why
                assert action.retry_after_s > 0
            case Revoke(request):
                assert request in self.running
                self.revoked.add(request)
            case Obeyed():
                self.obeyed.append(action)
            case GiveUpKept(model):
                assert self.truth[model] is Phase.ASLEEP
                assert self.kept[model] > 0
                self.giving_up.append(model)
            case Removed(model):
                assert (
                    self.truth[model] is Phase.STOPPED
                    or not next(spec for spec in [*self.specs, *self.gone] if spec.name == model).owned
                )
            case _:
                self.begin(action)

    gone: list[Spec] = field(default_factory=list)
    layered: set[str] = field(default_factory=set)

    def begin(self, change: Change) -> None:
        assert change.model not in self.changes or isinstance(change, Stop), f"{change} while {self.changes}"
        wanted = {Start: Phase.STOPPED, Wake: Phase.ASLEEP}.get(type(change))
        if wanted is not None and self.spec(change.model).owned:
            assert self.truth[change.model] is wanted, f"{change} of {self.truth[change.model]}"
        if isinstance(change, Wake):
            assert change.level == self.level[change.model]
        if isinstance(change, Sleep) and change.from_level is None:
            mine = [request for request, model in self.running.items() if model == change.model]
            assert set(mine) <= self.revoked, f"{change} under {mine}"
        if isinstance(change, Sleep):
            self.host[change.model] += change.more_bytes
        self.changes[change.model] = change

    # What always holds

    def holds(self, model: str) -> bool:
        """Whether a model has memory of its GPUs, or takes or gives it now."""
        stops = isinstance(self.changes.get(model), Stop)
        if self.truth[model] is Phase.ASLEEP and (stops or self.sleeps_on(model)):
            return False
        return self.truth[model] is Phase.AWAKE or model in self.changes

    def sleeps_on(self, model: str) -> bool:
        """Whether it goes from level 1 to 3 without waking, which leaves it asleep in any case."""
        change = self.changes.get(model)
        deepens = isinstance(change, Sleep) and (change.from_level, change.level) == (1, 3)
        return deepens and model in self.layered

    def check(self) -> None:
        gpus = {gpu for spec in self.specs for gpu in spec.gpus}
        known = {name: model.spec for name, model in self.scheduler.models.items()}
        self.woken_by_others = {name for name in self.woken_by_others if name in known and self.holds(name)}
        for gpu in gpus:
            held = [name for name, spec in known.items() if gpu in spec.gpus and self.holds(name)]
            if not self.woken_by_others & set(held):
                assert sum(known[name].share for name in held) <= 1 + 1e-6, f"GPU {gpu} is overcommitted: {held}"
                assert self.scheduler.free_share(gpu) >= -1e-6
            elif self.scheduler.free_share(gpu) < -1e-6:
                on_it = [each for each in self.scheduler.models.values() if each.holds and gpu in each.spec.gpus]
                assert any(each.phase is not Phase.AWAKE for each in on_it), f"GPU {gpu}: {on_it} all stay"
        for gpu in gpus:
            starting = [
                name
                for name, change in self.changes.items()
                if gpu in known[name].gpus and not (isinstance(change, Stop) and len(self.changes) == 1)
            ]
            if any(isinstance(self.changes[name], Start) for name in starting):
                assert len(starting) == 1, f"GPU {gpu}: {starting} change while one of them starts"
        in_vault = {name for name, model in self.scheduler.models.items() if model.in_vault}
        host = {name: nbytes for name, nbytes in self.host.items() if name not in in_vault}
        assert sum(host.values()) <= self.host_bytes, f"host memory is overcommitted: {host}"
        models = self.scheduler.models.values()
        may_go = [each for each in models if each.use.kept_bytes]
        assert all(each.phase is Phase.ASLEEP and not each.in_vault for each in may_go)
        fits = self.scheduler.held_bytes() + self.scheduler.kept_bytes() <= self.host_bytes
        assert fits or not may_go, f"{may_go} keep what backups need"
        for name, model in self.scheduler.models.items():
            assert set(model.waiting) == {each for each, (of, _, _) in self.waiting.items() if of == name}
            assert model.running == {each for each, of in self.running.items() if of == name}
            assert model.holds or not self.holds(name), f"{name} is {model.phase}, truly {self.truth[name]}"
        assert all(deadline > self.now for _, _, deadline in self.waiting.values()), "a request is past its deadline"


def spec(name: str, *gpus: int, **others: object) -> Spec:
    return Spec(name, frozenset(gpus or (0,)), **{"at_start": "stopped", **others})  # type: ignore[arg-type]


def awake(world: World, *models: str) -> None:
    """One after the other: the last ones are awake."""
    for model in models:
        request = world.ask(model)
        while request in world.waiting:
            for name in list(world.changes):
                world.done(name)
        world.end(request)


# Case by case


def test_room_is_made_by_the_least_recently_used_idle_model() -> None:
    world = World([spec(name, share=0.5) for name in "abc"])
    awake(world, "a")
    world.now = 1.0
    awake(world, "b")
    world.now = 2.0
    world.end(world.ask("a"))  # b is now the one that was used least recently
    world.now = 3.0
    world.ask("c")
    assert world.phase("b") is Phase.FALLING_ASLEEP
    assert world.phase("a") is Phase.AWAKE
    world.done("b")
    assert world.phase("c") is Phase.STARTING


def test_an_idle_model_leaves_before_a_busy_one() -> None:
    world = World([spec(name, share=0.5) for name in "abc"])
    awake(world, "a")
    world.ask("a")
    world.now = 1.0
    awake(world, "b")
    world.ask("c")
    assert (world.phase("a"), world.phase("b")) == (Phase.AWAKE, Phase.FALLING_ASLEEP)


def test_a_busy_model_is_drained_and_its_new_requests_come_after_those_that_waited() -> None:
    world = World([spec("a"), spec("b")])
    awake(world, "b", "a")
    running = world.ask("a")
    waits = world.ask("b")
    late = world.ask("a")
    assert world.phase("a") is Phase.DRAINING
    assert {waits, late} == set(world.waiting)
    world.end(running)
    world.done("a")
    world.done("b")
    assert waits in world.running
    assert world.phase("b") is Phase.DRAINING  # for the late one
    world.end(waits)
    world.done("b")
    world.done("a")
    assert late in world.running


def test_a_drain_ends_when_nobody_wants_the_room_any_more() -> None:
    world = World([spec("a"), spec("b")])
    awake(world, "b", "a")
    world.ask("a")
    waits, late = world.ask("b"), world.ask("a")
    world.end(waits)
    assert world.phase("a") is Phase.AWAKE
    assert late in world.running


def test_a_drain_is_bounded() -> None:
    world = World([spec("a", drain_s=5.0), spec("b")])
    awake(world, "b", "a")
    running = world.ask("a")
    world.ask("b")
    world.pass_time(4.9)
    assert not world.revoked
    world.pass_time(0.2)
    assert world.revoked == {running}
    assert world.phase("a") is Phase.DRAINING
    world.end(running)
    assert world.phase("a") is Phase.FALLING_ASLEEP


def test_nobody_is_pushed_out_within_keep() -> None:
    world = World([spec("a", keep_s=30.0), spec("b")])
    awake(world, "b", "a")
    world.ask("b")
    world.pass_time(29.9)
    assert world.phase("a") is Phase.AWAKE
    assert world.ask("a") in world.running  # it serves meanwhile
    world.end(world.number)
    world.pass_time(0.2)
    assert world.phase("a") is Phase.FALLING_ASLEEP


def test_a_model_with_many_gpus_is_not_passed_by() -> None:
    world = World([spec("both", 0, 1), spec("a", 0), spec("b", 1, keep_s=10.0), spec("c", 0)])
    awake(world, "c", "both", "a", "b")
    world.ask("both")  # has to wait for b's keep
    late = world.ask("c")
    assert world.phase("c") is Phase.ASLEEP, "it came later, and must not take GPU 0"
    world.pass_time(10.0)
    assert {world.phase("a"), world.phase("b")} == {Phase.FALLING_ASLEEP}, "both at the same time"
    world.done("a")
    assert world.phase("both") is Phase.ASLEEP, "b still holds its GPU"
    world.done("b")
    world.done("both")
    assert late in world.waiting


def test_switches_on_different_gpus_overlap() -> None:
    world = World([spec("a", 0), spec("b", 0), spec("c", 1), spec("d", 1)])
    awake(world, "b", "a", "d", "c")
    world.ask("b")
    world.ask("d")
    assert set(world.changes) == {"a", "c"}
    world.done("a")
    assert {world.phase("b"), world.phase("c")} == {Phase.WAKING, Phase.FALLING_ASLEEP}


def test_a_model_without_a_level_that_fits_the_host_sleeps_deeper_or_stops() -> None:
    world = World([spec("a", host_bytes=600), spec("b", host_bytes=600), spec("c", levels=(1, STOP), host_bytes=600)])
    awake(world, "a", "b", "c", "a")
    asleep = [(each.model, each.level) for each in world.log if isinstance(each, Sleep)]
    assert asleep == [("a", 1), ("b", 2)]
    assert [each.model for each in world.log if isinstance(each, Stop)] == ["c"]


def test_models_in_the_vault_leave_host_memory_to_the_others() -> None:
    """And the vault is the one that refuses them."""
    world = World([spec(name, host_bytes=600) for name in "abcd"])
    for name in "abc":
        world.send(HasLayer(name, True, in_vault=True))
    awake(world, "a", "b", "c", "d")
    assert world.scheduler.held_bytes() == 0
    request = world.ask("a")
    assert world.changes["d"].level == 1  # type: ignore[union-attr]
    world.done("d")
    assert world.scheduler.held_bytes() == 600
    world.done("a")
    world.end(request)
    world.ask("b")
    world.done("a", "the vault has no host memory", Phase.AWAKE, lacks=True)
    assert world.changes["a"].level == 2  # type: ignore[union-attr]


def awake_in_turns(world: World, *models: str) -> None:
    for model in models:
        awake(world, model)
        world.pass_time(1.0)


def gives_up(world: World) -> list[str]:
    return [each.model for each in world.log if isinstance(each, GiveUpKept)]


def test_the_least_recently_used_sleeper_gives_up_its_kv_cache_first() -> None:
    world = World([spec(name, host_bytes=250) for name in "abcd"])
    awake_in_turns(world, "b", "a", "c", "d")
    for name, nbytes in (("a", 60), ("b", 100), ("c", 60)):
        world.keep(name, nbytes)
    assert gives_up(world) == []
    world.ask("c")
    sleep = world.changes["d"]
    assert isinstance(sleep, Sleep)
    assert sleep.level == 1, "kept KV cache never costs a model its sleep"
    assert gives_up(world) == ["b", "a", "c"]
    assert world.scheduler.kept_bytes() == 0
    assert [world.give_up() for _ in "bac"] == [[], [], []]


def test_no_more_kept_kv_cache_leaves_than_is_needed() -> None:
    world = World([spec(name, host_bytes=200) for name in "abcd"])
    awake_in_turns(world, "a", "b", "c", "d")
    for name in "abc":
        world.keep(name, 100)
    world.ask("a")
    assert gives_up(world) == ["b"], "somebody waits for a"
    world.send(TimePassed())
    assert gives_up(world) == ["b"], "it is under way"
    world.give_up(fails=True)
    assert gives_up(world) == ["b", "c"], "what fails is counted as not given up"
    assert (world.scheduler.models["b"].kept_bytes, world.scheduler.models["b"].kept) == (100, KeptState.STAYS)
    world.give_up()
    world.done("d")
    world.send(LacksHostMemory("d"))
    assert gives_up(world) == ["b", "c"], "nobody is told twice, and a wakes"
    world.done("a")
    assert world.scheduler.kept_bytes() == 100
    assert world.scheduler.models["a"].kept_bytes == 0, "it is on the GPU again"


def test_kept_kv_cache_in_the_vault_takes_nothing_of_the_budget() -> None:
    world = World([spec("a", host_bytes=600), spec("b", host_bytes=600)])
    world.send(HasLayer("a", True, in_vault=True))
    awake(world, "a", "b")
    world.keep("a", 5000)
    world.send(LacksHostMemory("b"))
    assert (gives_up(world), world.scheduler.kept_bytes()) == ([], 0)
    assert world.scheduler.models["a"].kept_bytes == 5000
    awake(world, "a")
    world.keep("b", 100)
    world.send(LacksHostMemory("a"))
    assert gives_up(world) == [], "that would give the vault nothing"


def test_a_sleep_that_lacks_host_memory_goes_deeper_at_once() -> None:
    world = World([spec("a"), spec("b")])
    awake(world, "b", "a")
    world.ask("b")
    world.done("a", "no host memory", Phase.AWAKE, lacks=True)
    assert world.changes["a"].level == 2  # type: ignore[union-attr]
    world.done("a")
    assert world.phase("b") is Phase.WAKING
    world.done("b")
    world.end(world.number)
    awake(world, "a", "b")
    assert [each.level for each in world.log if isinstance(each, Sleep) and each.model == "a"] == [1, 2, 1]


def test_a_sleep_that_fails_is_tried_again_with_pauses_and_then_deeper() -> None:
    world = World([spec("a", levels=(1, STOP)), spec("b")])
    awake(world, "b", "a")
    world.ask("b")
    for number in range(policy.ATTEMPTS):
        assert isinstance(world.changes["a"], Sleep)
        world.done("a", "it failed", Phase.AWAKE)
        assert "a" not in world.changes
        assert world.scheduler.models["a"].error == "it failed"
        world.pass_time(policy.pause_s(number + 1))
    assert isinstance(world.changes["a"], Stop)
    world.done("a")
    world.done("b")
    assert world.running


def test_a_wake_that_fails_is_tried_again_and_then_its_server_starts_afresh() -> None:
    world = World([spec("a"), spec("b")])
    awake(world, "a", "b")
    waits = world.ask("a")
    world.done("b")
    for number in range(policy.ATTEMPTS):
        assert isinstance(world.changes["a"], Wake)
        world.done("a", "it failed", Phase.ASLEEP)
        if number < policy.ATTEMPTS - 1:
            world.pass_time(policy.pause_s(number + 1))
    assert isinstance(world.changes["a"], Stop)
    assert world.refused == {}
    world.done("a")
    world.pass_time(policy.LONGEST_PAUSE_S)
    world.done("a")
    assert waits in world.running


def test_while_one_model_pauses_after_a_failure_others_get_its_gpu() -> None:
    world = World([spec("a"), spec("b"), spec("c")])
    awake(world, "a", "c", "b")
    world.ask("a")
    world.done("b")
    world.done("a", "it failed", Phase.ASLEEP)
    world.ask("c")
    assert world.phase("c") is Phase.WAKING


def test_nobody_waits_for_a_server_that_does_not_start() -> None:
    world = World([spec("a")])
    waits = world.ask("a")
    for number in range(policy.ATTEMPTS):
        world.done("a", "no such file", Phase.STOPPED)
        assert (waits in world.refused) == (number == policy.ATTEMPTS - 1)
        if number < policy.ATTEMPTS - 1:
            world.pass_time(policy.pause_s(number + 1))
    assert world.refused[waits] == Refuse(waits, "no such file", world.refused[waits].retry_after_s, failed=True)
    late = world.ask("a")
    assert late in world.refused
    world.pass_time(policy.LONGEST_PAUSE_S)
    later = world.ask("a")
    world.done("a")
    assert later in world.running


def test_what_nobody_knows_is_made_certain() -> None:
    world = World([spec("a"), spec("b", owned=False)])
    awake(world, "b", "a")
    world.ask("b")
    world.done("a", "no answer", None)
    assert isinstance(world.changes["a"], Stop)
    assert world.phase("b") is Phase.ASLEEP, "a may hold its GPU still"
    world.done("a")
    world.done("b", "no answer", None)
    assert isinstance(world.changes["b"], Start), "somebody else's server is asked again"
    assert world.phase("a") is Phase.STOPPED


def test_a_server_that_starts_and_dies_again_and_again_is_started_less_and_less_often() -> None:
    world = World([spec("a", at_start="awake")])
    pauses = []
    for _ in range(8):
        world.done("a")
        world.die("a")
        died = world.now
        while not world.changes:
            world.now = world.scheduler.next_time()
            world.send(TimePassed())
        pauses.append(world.now - died)
    assert pauses == [policy.pause_s(number) for number in range(1, 9)]
    assert pauses[-1] == policy.LONGEST_PAUSE_S


def test_at_the_start_servers_start_one_after_the_other_and_sleep_at_once() -> None:
    world = World([spec("a", at_start="asleep"), spec("b", at_start="asleep"), spec("c", 1, at_start="awake")])
    assert set(world.changes) == {"a", "c"}
    world.done("a")
    assert world.phase("a") is Phase.FALLING_ASLEEP
    assert world.phase("b") is Phase.STOPPED
    world.done("a")
    world.done("b")
    world.done("b")
    world.done("c")
    assert [world.phase(name) for name in "abc"] == [Phase.ASLEEP, Phase.ASLEEP, Phase.AWAKE]


def test_idle_models_go_deeper_and_deeper() -> None:
    world = World([spec("a", idle=((60.0, 1), (600.0, 3), (7200.0, STOP)))])
    awake(world, "a")
    world.pass_time(60.0)
    assert world.changes["a"] == Sleep("a", world.changes["a"].operation, 1)
    world.done("a")
    world.pass_time(540.0)
    assert world.changes["a"] == Sleep("a", world.changes["a"].operation, 3, 0, 1)
    world.done("a")
    world.pass_time(6600.0)
    assert isinstance(world.changes["a"], Stop)
    world.done("a")
    assert world.phase("a") is Phase.STOPPED
    assert world.scheduler.next_time() == math.inf


def test_with_the_layer_level_3_needs_no_gpu() -> None:
    world = World([spec("a", idle=((60.0, 1), (600.0, 3))), spec("b")])
    world.has_layer("a")
    awake(world, "a", "b")
    world.pass_time(600.0)
    assert world.phase("b") is Phase.AWAKE
    assert world.changes["a"] == Sleep("a", world.changes["a"].operation, 3, 0, 1)
    assert world.scheduler.free_share(0) == 0.0, "it holds none of it"
    world.done("a")
    assert (world.phase("a"), world.level["a"]) == (Phase.ASLEEP, 3)


def test_a_model_that_stays_at_level_1_is_not_asked_again_before_it_has_woken() -> None:
    world = World([spec("a", idle=((60.0, 1), (600.0, 3), (7200.0, STOP)))])
    world.has_layer("a")
    for _ in range(2):
        awake(world, "a")
        world.pass_time(60.0)
        world.done("a")
        world.pass_time(540.0)
        world.done("a", stays="it is one of 2 ranks")
        world.pass_time(60.0)
        assert not world.changes
        assert (world.phase("a"), world.level["a"]) == (Phase.ASLEEP, 1)
        world.send(Ordered("a", 3))
        assert world.obeyed[-1].error == "it is one of 2 ranks"
    world.pass_time(7200.0)
    assert isinstance(world.changes["a"], Stop)


def test_an_operator_puts_a_model_to_sleep_and_stops_it() -> None:
    world = World([spec("a")])
    awake(world, "a")
    request = world.ask("a")
    world.send(Ordered("a", 1))
    late = world.ask("a")
    assert world.phase("a") is Phase.DRAINING
    world.end(request)
    world.done("a")
    assert world.obeyed == [Obeyed("a", 1)]
    world.done("a")
    assert late in world.running, "a request wakes it again"
    world.end(late)
    world.send(Ordered("a", STOP))
    world.done("a")
    assert world.obeyed[1:] == [Obeyed("a", STOP)]
    assert world.phase("a") is Phase.STOPPED
    world.send(Ordered("a", 1))
    assert world.obeyed[2:] == [Obeyed("a", 1)]


def test_an_order_that_cannot_be_carried_out_is_answered() -> None:
    world = World([spec("a"), spec("b"), spec("c", 1, owned=False)])
    awake(world, "a", "b", "c")
    world.ask("b")
    world.send(Ordered("a", 2))
    world.send(Ordered("c", STOP))
    assert [(each.model, bool(each.error)) for each in world.obeyed] == [("a", True), ("c", True)]
    world.send(Ordered("c", 1))
    world.done("c", "it failed", Phase.AWAKE)
    assert world.obeyed[-1] == Obeyed("c", 1, "it failed")


@pytest.mark.parametrize("change", ["removed", "another key"])
def test_somebody_elses_server_sleeps_before_it_is_dropped(change: str) -> None:
    """Whoever gets its GPU next would meet it there."""
    u = spec("u", owned=False, keep_s=600.0)
    world = World([u, spec("b")])
    awake(world, "u")
    waits = world.ask("b")
    world.gone = [u]
    world.configure(*([] if change == "removed" else [replace(u, identity="new")]), spec("b"))
    assert isinstance(world.changes["u"], Sleep)
    assert "b" not in world.changes
    world.done("u")
    assert isinstance(world.changes["b"], Start), "at once, without another event"
    world.done("b")
    assert waits in world.running
    assert ("u" in world.scheduler.models) == (change != "removed")


def test_a_model_that_nobody_asks_for_and_that_does_not_start_leaves_others_alone() -> None:
    world = World([spec("a", at_start="asleep"), spec("b", keep_s=0.0)])
    world.done("a", "it hangs", Phase.STOPPED)
    awake(world, "b")
    for _ in range(20):
        world.pass_time(policy.LONGEST_PAUSE_S)
        world.end(world.ask("b"))
    assert world.phase("b") is Phase.AWAKE, "it was not pushed out for the next attempt"
    world.send(Ordered("b", 1))
    world.done("b")
    for _ in range(policy.ATTEMPTS):
        world.pass_time(policy.LONGEST_PAUSE_S)
        if "a" in world.changes:
            world.done("a", "it hangs", Phase.STOPPED)
    world.pass_time(10 * policy.LONGEST_PAUSE_S)
    assert "a" not in world.changes, "it is not tried for ever"
    world.ask("a")
    assert isinstance(world.changes["a"], Start)


def test_a_new_configuration_stops_what_is_gone_and_restarts_what_is_different() -> None:
    world = World([spec("a"), spec("b", 1, identity="old"), spec("c", 2, keep_s=1.0)])
    awake(world, "a", "b", "c")
    running = world.ask("b")
    world.gone = [spec("a")]
    world.configure(spec("b", 1, identity="new"), spec("c", 2, keep_s=9.0), spec("d", 3, at_start="awake"))
    assert isinstance(world.changes["a"], Stop)
    assert isinstance(world.changes["d"], Start)
    assert world.phase("b") is Phase.DRAINING
    assert world.spec("c").keep_s == 9.0
    assert "c" not in world.changes
    world.done("a")
    assert "a" not in world.scheduler.models
    late = world.ask("b")
    world.end(running)
    world.done("b")
    assert isinstance(world.changes["b"], Start)
    world.done("b")
    assert late in world.running
    assert world.spec("b").identity == "new"


def test_what_requests_wait_for_is_known() -> None:
    world = World([spec("a"), spec("b")])
    awake(world, "b", "a")
    running = world.ask("a")
    model = world.scheduler.models["b"]
    before = world.scheduler.waited_s(model, world.now)
    world.ask("b")
    world.now = 3.0
    world.end(running)
    world.now = 4.0
    world.done("a")
    world.now = 6.0
    world.done("b")
    after = world.scheduler.waited_s(model, world.now)
    waited = {cause: after[cause] - before.get(cause, 0.0) for cause in after}
    assert {cause: seconds for cause, seconds in waited.items() if seconds} == {"room": 4.0, "wake": 2.0}


def test_an_order_to_sleep_deeper_that_fails_is_answered_and_not_tried_again_at_once() -> None:
    world = World([spec("a")])
    awake(world, "a")
    for depth in (1, 2):
        world.send(Ordered("a", depth))
        world.done("a", *([] if depth == 1 else ["it failed", Phase.ASLEEP]))
    assert world.obeyed == [Obeyed("a", 1), Obeyed("a", 2, "it failed")]
    assert world.changes == {}


def test_a_model_that_somebody_else_wakes_where_there_is_room_stays_awake_and_is_idle_from_then_on() -> None:
    world = World([spec("a", share=0.5, idle=((10.0, 1),)), spec("b", share=0.5)])
    awake(world, "a", "b")
    world.pass_time(10.0)
    world.done("a")
    world.pass_time(5.0)
    world.somebody_else("a", Phase.AWAKE)
    world.pass_time(9.9)
    assert (world.phase("a"), world.phase("b")) == (Phase.AWAKE, Phase.AWAKE)
    world.pass_time(0.2)
    assert world.phase("a") is Phase.FALLING_ASLEEP


# At random


def random_specs(chance: random.Random) -> list[Spec]:
    def one(number: int) -> Spec:
        gpus = chance.choice(([0], [1], [0, 1], [0], [1]))
        return spec(
            f"model-{number}",
            *gpus,
            share=chance.choice((1.0, 1.0, 0.5, 0.3)),
            keep_s=chance.choice((0.0, 0.0, 2.0)),
            drain_s=chance.choice((0.5, 3.0)),
            idle=chance.choice(((), ((1.0, 1),), ((0.5, 1), (2.0, 2), (5.0, STOP)), ((0.5, 1), (1.5, 3)))),
            levels=chance.choice(((1, 2, STOP), (2,), (1, STOP), (1, 3, 2))),
            at_start=chance.choice(("stopped", "asleep", "awake")),
            host_bytes=chance.choice((0, 300, 600)),
            identity=chance.random(),
        )

    return [one(number) for number in range(chance.randint(1, 10))]


@dataclass
class Traffic:
    """Random events in a world; in the end everything is let settle."""

    chance: random.Random
    world: World
    faults: float

    def step(self) -> None:
        kinds = {
            self.ask: 35.0,
            self.end: 25.0,
            self.withdraw: 3.0,
            self.finish: 22.0,
            self.kill: 0.5 * self.faults,
            self.meddle: 0.5 * self.faults,
            self.order: 1.0,
            self.reconfigure: 0.5 * self.faults,
            self.pass_time: 10.0,
        }
        self.chance.choices(list(kinds), list(kinds.values()))[0]()
        for request in list(self.world.revoked):
            if self.chance.random() < 0.5:
                self.world.end(request)

    def ask(self) -> None:
        self.world.ask(self.chance.choice(self.world.specs).name, self.chance.choice((1e6, 1e6, 5.0, 0.0)))

    def end(self) -> None:
        if self.world.running:
            self.world.end(self.chance.choice(list(self.world.running)))

    def withdraw(self) -> None:
        if self.world.waiting:
            self.world.end(self.chance.choice(list(self.world.waiting)))

    def order(self) -> None:
        self.world.send(Ordered(self.chance.choice(self.world.specs).name, self.chance.choice((1, 2, 3, STOP))))

    def pass_time(self) -> None:
        self.world.pass_time(self.chance.expovariate(2.0))

    def finish(self) -> None:
        world, chance = self.world, self.chance
        if not world.changes:
            return
        model = chance.choice(list(world.changes))
        change = world.changes[model]
        if isinstance(change, Stop) or chance.random() > self.faults * 0.3 or world.sleeps_on(model):
            stays = getattr(change, "level", 0) == 3 and isinstance(change, Sleep) and chance.random() < self.faults
            world.done(model, stays="it stays" * stays)
            return
        states: dict[type[Change], list[Phase | None]] = {
            Start: [Phase.STOPPED],
            Wake: [Phase.ASLEEP, None],
            Sleep: [Phase.AWAKE, None] if getattr(change, "from_level", None) is None else [Phase.ASLEEP, Phase.AWAKE],
        }
        state = chance.choice(states[type(change)])
        world.done(model, "it failed", state, lacks=chance.random() < 0.5)

    def kill(self) -> None:
        alive = [
            name
            for name, phase in self.world.truth.items()
            if phase is not Phase.STOPPED
            and name in self.world.scheduler.models
            and not isinstance(self.world.changes.get(name), Stop)
        ]
        if alive:
            self.world.die(self.chance.choice(alive))

    def meddle(self) -> None:
        """Somebody else puts a server to sleep, or wakes it."""
        others = {name: phase for name, phase in self.world.truth.items() if name not in self.world.changes}
        changed = {Phase.AWAKE: Phase.ASLEEP, Phase.ASLEEP: Phase.AWAKE}
        known = [name for name, phase in others.items() if phase in changed and name in self.world.scheduler.models]
        if known:
            name = self.chance.choice(known)
            self.world.somebody_else(name, changed[others[name]])

    def reconfigure(self) -> None:
        """One model is different now."""
        world, chance = self.world, self.chance
        new = random_specs(chance)
        specs = {each.name: each for each in world.specs}
        changed = chance.choice(new)
        if changed.name in specs:
            specs[changed.name] = changed
            world.configure(*specs.values())

    def settle(self) -> None:
        """Nothing fails any more: every request gets its answer, within the bound that the policy states."""
        world = self.world
        last = world.now
        turn_s = max(each.keep_s + each.drain_s for each in world.specs) + policy.REVOKED_WITHIN_S
        bound_s = 2 * policy.LONGEST_PAUSE_S + (len(world.specs) + 1) * (turn_s + policy.LONGEST_PAUSE_S)
        while world.waiting or world.running or world.changes:
            for request in list(world.running):
                world.end(request)
            for model in list(world.changes):
                world.done(model)
            if not world.changes and not world.running and world.waiting:
                world.pass_time(max(0.01, min(world.scheduler.next_time() - world.now, 1.0)))
            assert world.now < last + bound_s, f"{world.waiting} wait still"


def run(seed: int, steps: int, scale: int = 1) -> World:
    """`scale`: of what sleepers keep of their KV cache; 0: nothing."""
    keeps = random.Random(seed)
    chance = random.Random(seed)
    world = World(random_specs(chance))
    world.has_layer(*(each.name for each in world.specs if chance.random() < 0.5))
    traffic = Traffic(chance, world, faults=chance.choice((0.0, 0.3, 1.0)))
    for _ in range(steps):
        traffic.step()
        keep_at_random(world, keeps, scale)
    traffic.settle()
    asked, answered = world.number, len(world.granted_after) + len(world.refused)
    assert answered <= asked
    return world


def keep_at_random(world: World, chance: random.Random, scale: int) -> None:
    if chance.random() < 0.5:
        fails = chance.random() < 0.2
        if world.giving_up:
            world.give_up(fails=fails)
        else:
            world.send(TimePassed())
    models = [name for name in world.scheduler.models if world.phase(name) is Phase.ASLEEP]
    if models and chance.random() < 0.5:
        world.keep(chance.choice(models), scale * chance.choice((0, 50, 200, 400, 5000)))


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic(seed: int) -> None:
    run(seed, 300)


@pytest.mark.parametrize("seed", range(15))
def test_kept_kv_cache_costs_nobody_anything(seed: int) -> None:
    """Whatever sleepers keep, and give up or not, all else is decided as if they kept nothing."""
    without, keeps = run(seed, 300, scale=0), run(seed, 300)
    assert [each for each in keeps.log if not isinstance(each, GiveUpKept)] == without.log


def test_going_deeper_takes_no_host_memory_that_is_in_use() -> None:
    world = World([spec("a", levels=(2,), host_bytes=600), spec("b", 1, host_bytes=600)])
    awake(world, "a", "b")
    for model, depth in (("a", 2), ("b", 1)):
        world.send(Ordered(model, depth))
        world.done(model)
    world.send(Ordered("a", 3))
    assert not world.changes
    assert "host's memory" in str(world.obeyed[-1].error)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30, 60))
def test_much_random_traffic(seed: int) -> None:
    run(seed, 3000)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_under_constant_load_for_all_models_everybody_gets_turns(seed: int) -> None:
    """Each model always has requests; a request waits for at most one turn of each other model."""
    chance = random.Random(seed)
    specs = [spec(f"m{number}", *chance.choice(([0], [1], [0, 1])), keep_s=1.0, drain_s=1.0) for number in range(10)]
    world = World(specs)
    switch_s = 0.5
    while world.now < 300:
        for each in specs:
            model = world.scheduler.models[each.name]
            if len(model.waiting) + len(model.running) < 3:
                world.ask(each.name)
        for request in list(world.running):
            if chance.random() < 0.5:
                world.end(request)
        for request in list(world.revoked):
            world.end(request)
        world.pass_time(switch_s)
        for name in list(world.changes):
            world.done(name)
    turn_s = 1.0 + 1.0 + 4 * switch_s
    assert max(world.granted_after.values()) <= len(specs) * turn_s
    assert min(Counter(world.granted_of.values())[each.name] for each in specs) >= 300 / (len(specs) * turn_s)


def test_what_cannot_sleep_stays_once_started_though_its_client_has_left() -> None:
    """Its start is not thrown away: the next client would wait for another one."""
    world = World([replace(spec("a"), levels=(STOP,))])
    request = world.ask("a")
    world.pass_time(5)
    world.end(request)
    world.done("a")
    assert world.phase("a") is Phase.AWAKE


def test_what_an_earlier_sleep_kept_says_nothing_of_this_one() -> None:
    world = World([spec("a", host_bytes=600), spec("b", host_bytes=300)])
    awake(world, "a", "b")
    world.keep("a", 401)
    assert world.giving_up == ["a"]
    awake(world, "a", "b")
    world.send(KeptBytes("a", 401, was_told=True))
    assert world.scheduler.models["a"].kept is not KeptState.STAYS


def test_what_a_server_was_found_in_counts_no_more_when_it_has_been_dropped() -> None:
    """It was looked for while its URL changed and another model took the GPU: both would have been awake there."""
    starts = {"one": "awake", "two": "stopped"}
    elsewhere = [replace(spec("a", owned=False), identity=url, at_start=at) for url, at in starts.items()]
    other = replace(spec("b"), at_start="awake")
    scheduler = Scheduler((), 0)
    (looks,) = scheduler.handle(Configured((elsewhere[0],), 1000), 0.0)
    assert isinstance(looks, Start)
    scheduler.handle(Configured((other, elsewhere[1]), 1000), 1.0)
    scheduler.handle(Done("a", looks.operation), 2.0)
    holders = [name for name, model in scheduler.models.items() if model.holds]
    assert len(holders) == 1, holders
