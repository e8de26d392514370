"""The scheduler, in a simulated world that goes wrong at random, and case by case."""

from __future__ import annotations

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
    asked: list[int] = field(default_factory=list)  # by a history
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


# Case by case: what happens, step by step, and what is to be seen between


def case(*specs: Spec, history: str) -> tuple[tuple[Spec, ...], str]:
    return specs, history


def half(name: str) -> Spec:
    return spec(name, share=0.5)


HISTORIES = {
    "room is made by the least recently used idle model": case(
        *map(half, "abc"),
        history="awake a, +1, awake b, +1, ask a, end #1, +1, ask c, b falling asleep, a awake, done b, c starting",
    ),
    "an idle model leaves before a busy one": case(
        *map(half, "abc"), history="awake a, ask a, +1, awake b, ask c, a awake, b falling asleep"
    ),
    "a busy model is drained, and its new requests come after those that waited": case(
        spec("a"),
        spec("b"),
        history="awake b a, ask a, ask b, ask a, a draining, #2 waits, #3 waits, end #1, done a, done b, #2 runs,"
        " b draining, end #2, done b, done a, #3 runs",
    ),
    "a drain ends when nobody wants the room any more": case(
        spec("a"), spec("b"), history="awake b a, ask a, ask b, ask a, end #2, a awake, #3 runs"
    ),
    "a drain is bounded": case(
        spec("a", drain_s=5.0),
        spec("b"),
        history="awake b a, ask a, ask b, +4.9, #1 runs, +0.2, #1 revoked, a draining, end #1, a falling asleep",
    ),
    "nobody is evicted within keep, and serves meanwhile": case(
        spec("a", keep_s=30.0),
        spec("b"),
        history="awake b a, ask b, +29.9, a awake, ask a, #2 runs, end #2, +0.2, a falling asleep",
    ),
    "a model with many GPUs is not passed by": case(
        *(spec("both", 0, 1), spec("a", 0), spec("b", 1, keep_s=10.0), spec("c", 0)),
        history="awake c both a b, ask both, ask c, c asleep, +10, a falling asleep, b falling asleep,"
        " done a, both asleep, done b, done both, #2 waits",
    ),
    "switches on different GPUs overlap": case(
        *(spec("a", 0), spec("b", 0), spec("c", 1), spec("d", 1)),
        history="awake b a d c, ask b, ask d, changes a c, done a, b waking, c falling asleep",
    ),
    "models in the vault leave host memory to the others, and it refuses them itself": case(
        *(spec(name, host_bytes=600) for name in "abcd"),
        history="vault a b c, awake a b c d, holds 0, ask a, d begins sleep 1, done d, holds 600, done a, end #1,"
        " ask b, lacks a, a begins sleep 2",
    ),
    "a sleep that lacks host memory goes deeper at once, and the next one tries again": case(
        spec("a"),
        spec("b"),
        history="awake b a, ask b, a begins sleep 1, lacks a, a begins sleep 2, done a, b waking, done b, end #1,"
        " awake a, ask b, a begins sleep 1",
    ),
    "a sleep that fails is tried again with pauses, and then deeper": case(
        spec("a", levels=(1, STOP)),
        spec("b"),
        history="awake b a, ask b, a begins sleep 1, fails a awake, changes, +1, a begins sleep 1, fails a awake,"
        " +1, changes, +1, a begins sleep 1, fails a awake, +4, a begins stop, done a, done b, #1 runs",
    ),
    "a wake that fails is tried again, and then its server starts afresh": case(
        spec("a"),
        spec("b"),
        history="awake a b, ask a, done b, a begins wake, fails a asleep, +1, a begins wake, fails a asleep, +2,"
        " a begins wake, fails a asleep, a begins stop, #1 waits, done a, +60, done a, #1 runs",
    ),
    "while one model pauses after a failure others get its GPU": case(
        *map(spec, "abc"), history="awake a c b, ask a, done b, fails a asleep, ask c, c waking"
    ),
    "nobody waits for a server that does not start": case(
        spec("a"),
        history="ask a, fails a stopped, +1, fails a stopped, #1 waits, +2, fails a stopped, #1 refused, ask a,"
        " #2 refused, +60, ask a, done a, #3 runs",
    ),
    "what nobody knows is made certain": case(
        spec("a"),
        spec("b", owned=False),
        history="awake b a, ask b, fails a unknown, a begins stop, b asleep, done a, fails b unknown, b begins start,"
        " a stopped",
    ),
    "at the start servers start one after the other, and sleep at once": case(
        *(spec("a", at_start="asleep"), spec("b", at_start="asleep"), spec("c", 1, at_start="awake")),
        history="changes a c, done a, a falling asleep, b stopped, done a, done b, done b, done c, a asleep, b asleep,"
        " c awake",
    ),
    "idle models go deeper and deeper": case(
        spec("a", idle=((60.0, 1), (600.0, 3), (7200.0, STOP))),
        history="awake a, +60, a begins sleep 1, done a, +540, a begins sleep 3, done a, +6600, a begins stop, done a,"
        " a stopped, next inf",
    ),
    "with the layer level 3 needs no GPU": case(
        spec("a", idle=((60.0, 1), (600.0, 3))),
        spec("b"),
        history="layer a, awake a b, +600, b awake, a begins sleep 3, free 0, done a, a asleep, a at 3",
    ),
    "a model that stays at level 1 is not asked again before it has woken": case(
        spec("a", idle=((60.0, 1), (600.0, 3), (7200.0, STOP))),
        history="layer a"
        + ", awake a, +60, done a, +540, stays a, +60, changes, a asleep, a at 1, order a 3, obeyed a 3 failed" * 2
        + ", +7200, a begins stop",
    ),
    "an operator puts a model to sleep, and stops it": case(
        spec("a"),
        history="awake a, ask a, order a 1, ask a, a draining, end #1, done a, obeyed a 1, done a, #2 runs, end #2,"
        " order a stop, done a, obeyed a stop, a stopped, order a 1, obeyed a 1",
    ),
    "an order that cannot be carried out is answered": case(
        *(spec("a"), spec("b"), spec("c", 1, owned=False)),
        history="awake a b c, ask b, order a 2, obeyed a 2 failed, order c stop, obeyed c stop failed, order c 1,"
        " fails c awake, obeyed c 1 failed",
    ),
    "an order to sleep deeper that fails is answered, and not tried again at once": case(
        spec("a"),
        history="awake a, order a 1, done a, obeyed a 1, order a 2, fails a asleep, obeyed a 2 failed, changes",
    ),
    "going deeper takes no host memory that is in use": case(
        spec("a", levels=(2,), host_bytes=600),
        spec("b", 1, host_bytes=600),
        history="awake a b, order a 2, done a, order b 1, done b, order a 3, changes, obeyed a 3 failed",
    ),
    "a model that nobody asks for and that does not start leaves others alone": case(
        spec("a", at_start="asleep"),
        spec("b"),
        history="fails a stopped, awake b, +60, ask b, end #1, +60, ask b, end #2, b awake, order b 1, done b, +60,"
        " fails a stopped, +60, fails a stopped, +600, changes, ask a, a begins start",
    ),
    "a model that somebody else wakes where there is room stays awake, and is idle from then on": case(
        spec("a", share=0.5, idle=((10.0, 1),)),
        half("b"),
        history="awake a b, +10, done a, +5, woken a, +9.9, a awake, b awake, +0.2, a falling asleep",
    ),
    "what cannot sleep stays once started, though its client has left": case(
        spec("a", levels=(STOP,)), history="ask a, +5, end #1, done a, a awake"
    ),
    "the least recently used sleeper gives up its KV cache first, and nobody sleeps deeper for it": case(
        *(spec(name, host_bytes=250) for name in "abcd"),
        history="awake b, +1, awake a, +1, awake c, +1, awake d, +1, keeps a 60, keeps b 100, keeps c 60, gave up,"
        " ask c, d begins sleep 1, gave up b a c, kept 0",
    ),
    "no more kept KV cache leaves than is needed, and nobody is told twice": case(
        *(spec(name, host_bytes=200) for name in "abcd"),
        history="awake a, +1, awake b, +1, awake c, +1, awake d, +1, keeps a 100, keeps b 100, keeps c 100, ask a,"
        " gave up b, +0, gave up b, refuses to give up, gave up b c, gives up, done d, short d, gave up b c, done a,"
        " kept 100",
    ),
    "kept KV cache in the vault takes nothing of the budget": case(
        spec("a", host_bytes=600),
        spec("b", host_bytes=600),
        history="vault a, awake a b, keeps a 5000, short b, gave up, kept 0, awake a, keeps b 100, short a, gave up",
    ),
}


@pytest.mark.parametrize("case", HISTORIES.values(), ids=HISTORIES)
def test_history(case: tuple[tuple[Spec, ...], str]) -> None:
    specs, history = case
    world = World(list(specs))
    for step in history.split(", "):
        if not happens(world, step):
            see(world, step)


DEPTHS = {"1": 1, "2": 2, "3": 3, "stop": STOP}
STATES = {"awake": Phase.AWAKE, "asleep": Phase.ASLEEP, "stopped": Phase.STOPPED, "unknown": None}


def happens(world: World, step: str) -> bool:
    """Whether a step is one that happens. `#2`: the second request."""
    match step.split():
        case ["awake", *models]:
            awake(world, *models)
        case ["layer", model]:
            world.has_layer(model)
        case ["vault", *models]:
            for model in models:
                world.send(HasLayer(model, True, in_vault=True))
        case ["ask", model]:
            world.asked.append(world.ask(model))
        case ["end", request]:
            world.end(world.asked[int(request[1:]) - 1])
        case ["done", model]:
            world.done(model)
        case ["stays", model]:
            world.done(model, stays="it is one of 2 ranks")
        case ["fails", model, state]:
            world.done(model, "it failed", STATES[state])
            assert world.scheduler.models[model].error == "it failed"
        case ["lacks", model]:
            world.done(model, "no host memory", Phase.AWAKE, lacks=True)
        case ["short", model]:
            world.send(LacksHostMemory(model))
        case ["keeps", model, nbytes]:
            world.keep(model, int(nbytes))
        case ["gives", "up"]:
            world.give_up()
        case ["refuses", "to", "give", "up"]:
            world.give_up(fails=True)
        case ["order", model, wanted]:
            world.send(Ordered(model, DEPTHS[wanted]))
        case ["woken", model]:
            world.somebody_else(model, Phase.AWAKE)
        case [seconds] if seconds.startswith("+"):
            world.pass_time(float(seconds))
        case _:
            return False
    return True


def see(world: World, step: str) -> None:
    """What is to be seen."""
    scheduler = world.scheduler
    match step.split():
        case ["gave", "up", *models]:
            assert [each.model for each in world.log if isinstance(each, GiveUpKept)] == models, step
        case ["obeyed", model, wanted, *failed]:
            last = world.obeyed[-1]
            assert (last.model, last.depth, bool(last.error)) == (model, DEPTHS[wanted], bool(failed)), (step, last)
        case ["changes", *models]:
            assert {*world.changes} == {*models}, (step, world.changes)
        case [model, "begins", kind, *level]:
            change = world.changes[model]
            assert type(change).__name__.lower() == kind, (step, change)
            assert not level or getattr(change, "level", None) == int(level[0]), (step, change)
        case [model, "at", level]:
            assert world.level[model] == int(level), step
        case ["holds", nbytes]:
            assert scheduler.held_bytes() == int(nbytes), step
        case ["kept", nbytes]:
            assert scheduler.kept_bytes() == int(nbytes), step
        case ["free", share]:
            assert scheduler.free_share(0) == float(share), step
        case ["next", time]:
            assert scheduler.next_time() == float(time), step
        case [request, state] if request.startswith("#"):
            found = {"runs": world.running, "waits": world.waiting, "revoked": world.revoked, "refused": world.refused}
            assert world.asked[int(request[1:]) - 1] in found[state], step
        case [model, *phase]:
            assert world.phase(model).value == " ".join(phase), (step, world.phase(model))


def test_a_model_without_a_level_that_fits_the_host_sleeps_deeper_or_stops() -> None:
    world = World([spec("a", host_bytes=600), spec("b", host_bytes=600), spec("c", levels=(1, STOP), host_bytes=600)])
    awake(world, "a", "b", "c", "a")
    asleep = [(each.model, each.level) for each in world.log if isinstance(each, Sleep)]
    assert asleep == [("a", 1), ("b", 2)]
    assert [each.model for each in world.log if isinstance(each, Stop)] == ["c"]


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


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_and_kept_kv_cache_costs_nobody_anything(seed: int) -> None:
    """Whatever sleepers keep, and give up or not, all else is decided as if they kept nothing."""
    without, keeps = run(seed, 300, scale=0), run(seed, 300)
    assert [each for each in keeps.log if not isinstance(each, GiveUpKept)] == without.log


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 38))
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
