"""Where requests go: random histories over nodes that die, stand still, fill up and are drained, and case by case."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cumem_sleep.serve import actions, events
from cumem_sleep.serve.policy import STOP, Spec
from cumem_sleep.serve.routing import MOST_TRIES, Asked, Forward, Reported, Router, Silent, TurnedAway, placed
from cumem_sleep.serve.scheduler import Scheduler
from cumem_sleep.serve.status import FleetStatus, HostStatus, ModelStatus, Phase, Switch

TAKES_S = {actions.Wake: 0.4, actions.Sleep: 0.1, actions.Start: 8.0, actions.Stop: 0.2}
KINDS = {actions.Wake: "wake", actions.Sleep: "sleep", actions.Start: "start", actions.Stop: "stop"}
SILENT_S, LOST_S = 2.0, 10.0  # as an ingress has them


@dataclass
class Request:
    """`excuses`: why nodes did not take it."""

    model: str
    ingress: int
    at: float
    answer_s: float
    node: str = ""
    outcome: str = ""
    sends: int = 0
    granted_at: float = 0.0
    excuses: set[str] = field(default_factory=set)


@dataclass
class Node:
    """A front: the real scheduler, in simulated time. `life`: of a process; what it has begun ends with it."""

    name: str
    scheduler: Scheduler
    life: int = 0
    is_up: bool = True
    still_until: float = 0.0
    heard: dict[int, float] = field(default_factory=dict)  # by each ingress
    draining: bool = False
    most: int = 1000
    switches: dict[str, Switch] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)


class World:
    """Nodes and ingresses with messages between them that take time; every action is checked."""

    def __init__(self, specs: list[Spec], nodes: int, ingresses: int, seed: Any = 0, busy: int = 8) -> None:
        self.specs, self.chance, self.now = specs, random.Random(seed), 0.0
        self.requests: dict[int, Request] = {}
        self.begun: Counter[int] = Counter()
        self.wakes: Counter[tuple[str, str]] = Counter()
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        names = [f"n{number}" for number in range(nodes)]
        self.placed = placed(
            specs, {spec.name: 1 + (number % 3 == 0) for number, spec in enumerate(specs)}, names, None
        )
        self.nodes = {name: Node(name, Scheduler((), 0)) for name in names}
        self.routers = [Router(specs, names, busy) for _ in range(ingresses)]
        self.held: list[list[int]] = [[] for _ in range(ingresses)]
        for node in self.nodes.values():
            self.boot(node)
            for ingress in range(ingresses):
                self.later(self.chance.random() * 0.5, lambda node=node, ingress=ingress: self.report(node, ingress))

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (self.now + seconds, next(self._number), do))

    def run(self, until: float) -> None:
        while self._coming and self._coming[0][0] <= until:
            timers = [(node.scheduler.next_time(), node) for node in self.nodes.values() if self.moves(node)]
            at, node = min(timers, key=lambda each: each[0], default=(1e9, None))
            if node is not None and at < self._coming[0][0]:
                self.now = at
                self.tell(node, events.TimePassed())
            else:
                self.now, _, do = heapq.heappop(self._coming)
                do()
        self.now = until

    def moves(self, node: Node) -> bool:
        return node.is_up and node.still_until <= self.now

    # Nodes

    def boot(self, node: Node) -> None:
        node.life, node.is_up, node.draining = node.life + 1, True, False
        node.scheduler = Scheduler((), 0, self.now)
        specs = [
            spec if spec.name in self.placed[node.name] else replace(spec, at_start="stopped") for spec in self.specs
        ]
        self.tell(node, events.Configured(tuple(specs), 1 << 40))

    def die(self, node: Node) -> None:
        node.is_up, node.life, node.still_until = False, node.life + 1, 0.0
        for request in list(node.here):
            self.end(request, "502")

    def in_life(self, node: Node, life: int, do: Callable[[], None]) -> None:
        """When the node moves, if it is still the same process."""
        if node.life == life and node.is_up:
            self.later(node.still_until - self.now, lambda: self.in_life(node, life, do)) if not self.moves(
                node
            ) else do()

    def tell(self, node: Node, event: events.FrontEvent) -> None:
        for action in node.scheduler.handle(event, self.now):
            match action:
                case actions.Grant(request):
                    self.begun[request] += 1
                    self.requests[request].granted_at = self.now
                    assert self.begun[request] == 1, f"{request} was begun twice"
                    assert request in node.here
                    life, answer_s = node.life, self.requests[request].answer_s
                    self.later(answer_s, lambda r=request, at=life: self.in_life(node, at, lambda: self.end(r, "200")))
                case actions.Refuse(request):
                    self.turn_away(node, request, "not in time")
                case actions.Revoke(request):
                    self.end(request, "revoked")
                case actions.Wake() | actions.Sleep() | actions.Start() | actions.Stop():
                    seconds = TAKES_S[type(action)] * (0.8 + 0.4 * self.chance.random())
                    self.wakes[node.name, action.model] += isinstance(action, actions.Wake)
                    done = events.Done(
                        action.model, action.operation, events.Outcome(level=getattr(action, "level", None))
                    )
                    last = Switch(KINDS[type(action)], None, seconds, self.now + seconds)
                    life = node.life
                    self.later(
                        seconds, lambda d=done, s=last, at=life: self.in_life(node, at, lambda: self.done(node, d, s))
                    )
        for gpu in {gpu for spec in self.specs for gpu in spec.gpus}:
            assert node.scheduler.free_share(gpu) > -1e-6, "more is awake than there is room for"

    def done(self, node: Node, done: events.Done, switch: Switch) -> None:
        node.switches[done.model] = switch
        self.tell(node, done)

    def drain(self, node: Node, on: bool) -> None:
        node.draining = on
        for model in node.scheduler.models.values() if on else ():
            for request in list(model.waiting):
                self.tell(node, events.Gone(request))
                self.turn_away(node, request, "drain")

    def turn_away(self, node: Node, request: int, why: str) -> None:
        node.here.discard(request)
        self.requests[request].excuses.add(why)
        assert not self.begun[request]
        self.later(0.005, lambda: self.send(request, TurnedAway(request)))

    def status(self, node: Node) -> FleetStatus:
        models = tuple(
            ModelStatus(
                *(name, (), tuple(m.spec.gpus), m.spec.share, m.phase, m.level if m.phase is Phase.ASLEEP else None),
                *(m.phase_since, len(m.waiting), self.now - m.oldest if m.waiting else 0.0, len(m.running)),
                *(node.switches.get(name), 0, None, None, None, None, None, None, 0, None),
            )
            for name, m in node.scheduler.models.items()
        )
        return FleetStatus(self.now, "", True, (), models, HostStatus(0, 0, None), node.draining)

    # Ingresses

    def report(self, node: Node, ingress: int) -> None:
        router = self.routers[ingress]
        if self.moves(node):
            node.heard[ingress] = self.now
            router.handle(Reported(node.name, self.status(node)), self.now)
            waiting, self.held[ingress] = self.held[ingress], []
            for request in waiting:
                self.send(request, None)
        elif not node.is_up or self.now - node.heard.get(ingress, 0.0) > SILENT_S:
            router.handle(Silent(node.name), self.now)
            if node.is_up and self.now - node.heard.get(ingress, 0.0) > LOST_S:
                for request in [each for each in node.here if self.requests[each].ingress == ingress]:
                    self.end(request, "502")
        self.later(0.5 + 0.1 * self.chance.random(), lambda: self.report(node, ingress))

    def ask(self, model: str, ingress: int = 0, answer_s: float = 1.0, key: str = "") -> int:
        number = len(self.requests)
        self.requests[number] = Request(model, ingress, self.now, answer_s)
        self.send(number, Asked(number, model, key))
        return number

    def send(self, number: int, event: Asked | TurnedAway | None) -> None:
        request = self.requests[number]
        if request.outcome:
            return
        router = self.routers[request.ingress]
        forward = router.handle(event or Asked(number, request.model), self.now)
        left_s = request.at + self.wait_s(request) - self.now
        if forward is None and (isinstance(event, TurnedAway) or left_s <= 0):
            return self.end(number, "503")
        if forward is None:
            request.excuses.add("nobody")
            return self.held[request.ingress].append(number)
        request.sends += 1
        node = self.nodes[forward.node]
        return self.later(0.005 * self.chance.random(), lambda: self.arrive(node, number, forward, left_s))

    def arrive(self, node: Node, number: int, forward: Forward, left_s: float) -> None:
        if not node.is_up:  # nobody listens there: nothing was sent
            self.requests[number].excuses.add("dead")
            self.routers[self.requests[number].ingress].handle(Silent(node.name), self.now)
            return self.send(number, TurnedAway(number))
        node.here.add(number)
        self.requests[number].node = node.name
        life = node.life
        return self.in_life(node, life, lambda: self.take(node, number, min(forward.patience_s or left_s, left_s)))

    def take(self, node: Node, number: int, within_s: float) -> None:
        if number not in node.here:
            return  # it was given up meanwhile
        if node.draining or len(node.here) > node.most:
            return self.turn_away(node, number, "drain" if node.draining else "full")
        self.tell(node, events.Arrived(number, self.requests[number].model, self.now + within_s))

    def end(self, number: int, outcome: str) -> None:
        request = self.requests[number]
        if request.outcome:
            return
        request.outcome = outcome
        node = self.nodes.get(request.node)
        if node is not None and number in node.here:
            node.here.discard(number)
            if node.is_up:
                self.tell(node, events.Gone(number))
        self.routers[request.ingress].handle(events.Gone(number), self.now)

    def wait_s(self, request: Request) -> float:
        return next(spec.wait_s for spec in self.specs if spec.name == request.model)

    def awake(self, model: str) -> list[str]:
        return [name for name, node in self.nodes.items() if node.scheduler.models[model].phase is Phase.AWAKE]


def specs_of(*names: str, share: float = 0.9, **more: Any) -> list[Spec]:
    given = {"idle": ((20.0, 1),), "wait_s": 60.0, "drain_s": 15.0, "levels": (1, STOP), **more}
    return [Spec(name, frozenset((0,)), share=share, **given) for name in names]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_random_histories(seed: int) -> None:
    """Each request is begun at most once and ends once; a 502 needs a node that was lost, a 503 a reason."""
    chance = random.Random(f"history {seed}")
    names = [f"m{number}" for number in range(9)]
    specs = [replace(spec, share=chance.choice((0.2, 0.3, 0.5))) for spec in specs_of(*names)]
    world = World(specs, nodes=chance.choice((3, 4, 5)), ingresses=chance.choice((1, 2, 3)), seed=seed)
    world.run(100.0)
    lost: set[str] = set()
    at = 100.0
    while at < 400.0:
        at += chance.expovariate(3.0)
        world.run(at)
        model = names[min(8, int(chance.expovariate(0.5)))]
        world.ask(
            model, chance.randrange(len(world.routers)), chance.lognormvariate(-1, 1), chance.choice(("", "a", "b"))
        )
        node, event = world.nodes[chance.choice(list(world.nodes))], chance.random()
        if event < 0.003 and node.is_up:
            lost.add(node.name)
            world.die(node)
        elif event < 0.006 and world.moves(node):
            node.still_until = at + chance.choice((1.0, 4.0, 15.0))
            lost |= {node.name} if node.still_until > at + LOST_S - 1 else set()
        elif event < 0.01:
            world.drain(node, not node.draining) if world.moves(node) else None
        elif event < 0.015:
            node.most = chance.choice((4, 1000, 1000))
        elif event < 0.3 and not node.is_up:
            world.boot(node)
    for node in world.nodes.values():
        node.most = 1000
        world.boot(node) if not node.is_up else world.drain(node, False)
    world.run(600.0)
    outcomes = Counter(request.outcome for request in world.requests.values())
    assert set(outcomes) <= {"200", "502", "503", "revoked"}, outcomes
    assert outcomes["200"] > 0.9 * outcomes.total(), outcomes
    for number, request in world.requests.items():
        assert request.sends <= MOST_TRIES
        assert request.outcome != "200" or world.begun[number] == 1
        assert request.outcome != "502" or request.node in lost
        assert request.outcome != "503" or (request.excuses and not world.begun[number]), request
    assert not any(router._routed or any(router._sent.values()) for router in world.routers)
    assert not any(world.awake(name) for name in names), "with nobody asking, all sleep"


class Twice(World):
    """Notes since when models are up on more nodes than one, and for how long others were."""

    def __init__(self, specs: list[Spec], ingresses: int, seed: int) -> None:
        self.since: dict[str, float] = {}
        self.seconds: list[float] = []
        super().__init__(specs, 3, ingresses, seed, busy=1000)

    def tell(self, node: Node, event: events.FrontEvent) -> None:
        super().tell(node, event)
        for model in node.scheduler.models:
            each = [other.scheduler.models.get(model) for other in self.nodes.values()]
            if sum(copy is not None and copy.phase in (Phase.AWAKE, Phase.WAKING) for copy in each) > 1:
                self.since.setdefault(model, self.now)
            elif model in self.since:
                self.seconds.append(self.now - self.since.pop(model))


@pytest.mark.parametrize("ingresses", [1, 2])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_model_is_seldom_woken_twice_and_not_for_long(seed: int, ingresses: int) -> None:
    """Two requests for a sleeping model within half a second, at ingresses that do not talk. A second copy gets no more
    requests, and falls asleep by `idle`.
    """
    chance = random.Random(f"pairs {seed}")
    names = [f"m{number}" for number in range(6)]
    specs = [replace(spec, share=chance.choice((0.3, 0.5, 0.9))) for spec in specs_of(*names)]
    world = Twice(specs, ingresses, seed)
    for node in world.nodes.values():
        world.placed[node.name] = set(names)
        world.boot(node)
    world.run(100.0)
    at, pairs = 100.0, []
    while at < 400.0:
        at += chance.expovariate(1.0)
        world.run(at)
        model = chance.choice(names)
        is_asleep = all(node.scheduler.models[model].phase is Phase.ASLEEP for node in world.nodes.values())
        first = world.ask(model, 0, chance.lognormvariate(-1, 1))
        at += 0.5 * chance.random()
        world.run(at)
        second = world.ask(model, ingresses - 1, chance.lognormvariate(-1, 1))
        pairs += [(first, second)] if is_asleep else []
    world.run(500.0)
    apart = sum(world.requests[first].node != world.requests[second].node for first, second in pairs)
    assert apart <= 0.1 * len(pairs)
    assert max(world.seconds, default=0.0) < 20 + 10, "longer than `idle` and an answer"
    assert not world.since


def report(**phases: Any) -> FleetStatus:
    """Of a node with models of 0.9 of one GPU: their phase, and what else is to be said of them."""
    models = []
    for name, said in phases.items():
        phase, more = said if isinstance(said, tuple) else (said, {})
        rest = (
            1 if phase is Phase.ASLEEP else None,
            0.0,
            0,
            0.0,
            0,
            None,
            0,
            None,
            None,
            None,
            None,
            None,
            None,
            0,
            None,
        )
        models.append(replace(ModelStatus(name, (), (0,), 0.9, phase, *rest), **more))
    return FleetStatus(100.0, "", True, (), tuple(models), HostStatus(0, 0, None))


AWAKE, ASLEEP, STOPPED = Phase.AWAKE, Phase.ASLEEP, Phase.STOPPED
BUSY, WAITED = (AWAKE, {"running": 8}), (ASLEEP, {"waiting": 1})
LEAVES = (Phase.FALLING_ASLEEP, {"waiting": 1})


@pytest.mark.parametrize(
    ("a", "b", "goes"),
    [
        pytest.param(report(m=ASLEEP), report(m=AWAKE), "b", id="where it is awake"),
        pytest.param(report(m=STOPPED), report(m=ASLEEP), "b", id="asleep before stopped"),
        pytest.param(report(m=(ASLEEP, {"level": 2})), report(m=ASLEEP), "b", id="with its bytes in memory"),
        pytest.param(report(m=(ASLEEP, {"files_s": 3.0})), report(m=ASLEEP), "b", id="not in files"),
        pytest.param(report(m=ASLEEP, x=(AWAKE, {"running": 1})), report(m=ASLEEP), "b", id="nobody busy has to leave"),
        pytest.param(report(m=ASLEEP, x=AWAKE), report(m=ASLEEP), "b", id="nor anybody idle"),
        pytest.param(report(m=ASLEEP, x=AWAKE), report(m=STOPPED), "a", id="but rather that than a start"),
        pytest.param(report(m=ASLEEP), report(m=(Phase.WAKING, {"phase_since": 99.9})), "b", id="on its way"),
        pytest.param(report(m=ASLEEP, x=(ASLEEP, {"waiting": 1})), report(m=ASLEEP), "b", id="nobody waits before it"),
        pytest.param(report(m=WAITED, x=AWAKE), report(m=ASLEEP), "a", id="rather where others wait for it already"),
        pytest.param(report(m=WAITED, x=BUSY), report(m=ASLEEP), "b", id="but not if that takes seconds more"),
        pytest.param(report(m=LEAVES, x=AWAKE), report(m=ASLEEP), "b", id="nor where it is leaving"),
        pytest.param(replace(report(m=AWAKE), draining=True), report(m=STOPPED), "b", id="not where it is drained"),
        pytest.param(report(x=AWAKE), report(m=STOPPED), "b", id="not where it is not known"),
        pytest.param(report(m=AWAKE), report(m=AWAKE), "a", id="one copy is enough"),
        pytest.param(report(m=BUSY), report(m=AWAKE), "b", id="a second one for more"),
        pytest.param(report(m=BUSY), report(m=ASLEEP), "b", id="a hot one is woken once more"),
        pytest.param(report(m=BUSY), report(m=ASLEEP, x=(AWAKE, {"running": 1})), "a", id="if nobody busy must leave"),
        pytest.param(report(m=BUSY), report(m=STOPPED), "a", id="and nothing is started for that"),
        pytest.param(report(m=BUSY), report(m=(ASLEEP, {"waiting": 1})), "a", id="nor woken twice"),
    ],
)
def test_a_request_goes(a: FleetStatus, b: FleetStatus, goes: str) -> None:
    router = Router(specs_of("m", "x"), ["a", "b"], busy=8)
    router.handle(Reported("a", a), 0.0)
    router.handle(Reported("b", b), 0.0)
    assert router.handle(Asked(1, "m"), 0.1).node == goes


def test_routers_that_heard_the_same_in_any_order_decide_the_same() -> None:
    """What a switch takes says the newest one of them all, and not the node that was heard last."""
    a = report(m=(ASLEEP, {"level": 2, "last_switch": Switch("wake", 1, 12.0, 50.0)}))
    b = report(m=(ASLEEP, {"last_switch": Switch("wake", 1, 0.4, 90.0)}))
    for order in (("a", a), ("b", b)), (("b", b), ("a", a)):
        router = Router(specs_of("m"), ["a", "b"])
        for node, said in order:
            router.handle(Reported(node, said), 0.0)
        assert router.handle(Asked(1, "m"), 0.1).node == "b"


def test_a_second_request_follows_the_first_one_to_where_its_model_will_be() -> None:
    router = Router(specs_of("m", "x"), ["a", "b"])
    for node in "ab":
        router.handle(Reported(node, report(m=ASLEEP, x=AWAKE)), 0.0)
    assert router.handle(Asked(1, "m"), 0.1).node == "a"
    router.handle(Reported("b", report(m=ASLEEP, x=ASLEEP)), 0.1)  # a tenth of a second better now
    assert router.handle(Asked(2, "m"), 0.2).node == "a"
    assert router.handle(Asked(3, "x"), 0.2).node == "a"


def test_a_node_that_is_silent_gets_nothing_and_a_request_waits_for_any_other() -> None:
    router = Router(specs_of("m"), ["a", "b"])
    assert router.handle(Asked(1, "m"), 0.0) is None
    router.handle(Reported("a", report(m=AWAKE)), 0.1)
    assert router.handle(Asked(1, "m"), 0.1) == Forward("a")
    router.handle(Silent("a"), 0.2)
    assert router.handle(Asked(2, "m"), 0.3) is None
    assert router.handle(TurnedAway(1), 0.3) is None


def test_a_conversation_stays_and_moves_only_if_its_node_goes() -> None:
    routers = [Router(specs_of("m"), ["a", "b", "c"], busy=1) for _ in range(2)]
    for router in routers:
        for node in "abc":
            router.handle(Reported(node, report(m=(AWAKE, {"running": 1}))), 0.0)
    ids = itertools.count()
    first = {key: routers[0].handle(Asked(next(ids), "m", key), 0.0).node for key in map(str, range(40))}
    assert {*first.values()} == {*"abc"}
    assert first == {key: routers[1].handle(Asked(next(ids), "m", key), 0.0).node for key in first}
    routers[1].handle(Silent("b"), 0.1)
    moved = {key: routers[1].handle(Asked(next(ids), "m", key), 0.1).node for key in first}
    assert {key for key in first if moved[key] != first[key]} == {key for key in first if first[key] == "b"}


def test_who_turned_it_away_is_not_asked_again_and_no_more_than_three_are() -> None:
    router = Router(specs_of("m"), "abcde")
    for node in "abcde":
        router.handle(Reported(node, report(m=ASLEEP)), 0.0)
    asked = [router.handle(Asked(1, "m"), 0.1), *(router.handle(TurnedAway(1), 0.2) for _ in range(3))]
    assert [forward and forward.node for forward in asked] == ["a", "b", "c", None]
    assert [forward.patience_s is None for forward in asked[:3]] == [False, False, True], (
        "nobody is left after the last"
    )


def test_what_was_sent_counts_until_the_node_reports_it() -> None:
    router = Router(specs_of("m"), "ab", busy=2)
    for node in "ab":
        router.handle(Reported(node, report(m=AWAKE)), 0.0)
    assert [router.handle(Asked(number, "m"), 0.1).node for number in (1, 2, 3)] == ["a", "a", "b"]
    for node, running in (("a", 2), ("b", 1)):
        router.handle(Reported(node, report(m=(AWAKE, {"running": running}))), 0.2)
    assert [router.handle(Asked(number, "m"), 0.3).node for number in (4, 5)] == ["b", "a"]


def test_what_waits_longer_than_a_wake_elsewhere_goes_there() -> None:
    """The node of m is taken by x for 12 s: a request waits there for no longer than another node needs to wake m."""
    world = World(specs_of("x", "m", keep_s=0.0), nodes=2, ingresses=1)
    world.placed = {"n0": {"x", "m"}, "n1": {"m"}}
    for node in world.nodes.values():
        world.boot(node)
    world.run(30.0)
    world.nodes["n1"].draining = True
    world.run(32.0)
    world.ask("x", answer_s=12.0)
    world.run(33.0)
    asked = world.ask("m")
    world.run(33.2)
    assert world.requests[asked].node == "n0"
    world.run(33.4)
    world.nodes["n1"].draining = False
    world.run(60.0)
    assert world.requests[asked].outcome == "200"


@pytest.mark.parametrize(
    ("shares", "copies", "host", "expected"),
    [
        ([1, 1, 1, 1], {}, None, ["m0 m2", "m1 m3"]),
        ([0.2, 0.2, 0.9, 0.5], {}, None, ["m2", "m0 m1 m3"]),
        ([1, 0.5], {"m1": 2}, None, ["m0 m1", "m1"]),
        ([1, 1, 1], {"m0": 5}, None, ["m0 m1", "m0 m2"]),
        ([1, 1, 1, 1], {}, 10, ["m0", "m1"]),
    ],
)
def test_models_are_dealt_out(
    shares: list[float], copies: dict[str, int], host: int | None, expected: list[str]
) -> None:
    specs = [Spec(f"m{number}", frozenset((0,)), share, host_bytes=8) for number, share in enumerate(shares)]
    found = placed(specs, copies, ["a", "b"], host)
    assert [" ".join(sorted(models)) for models in found.values()] == expected
