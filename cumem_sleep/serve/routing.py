"""Which node a request goes to: a state machine over what nodes report. No I/O, no clock, no Ray.

Several ingresses decide apart, each with a `Router` of its own, from reports that are up to a second old. So a decision
is a proposal: the node's front has the last word. It takes the request, or turns it away before it has begun, and then
the next node is tried.

    router.handle(Reported("10.0.0.2", status), now=0.0)
    router.handle(Asked(1, "qwen-8b"), now=0.1)       # Forward("10.0.0.2", patience_s=None)
    router.handle(TurnedAway(1), now=0.2)             # the next one, or None: nobody can be asked now

- Where the model is awake, a request waits for nothing: it goes there. Of several such nodes as many are used as the
  load needs, in the order of `nodes`, so that the others fall asleep by `idle`; among these a conversation (`key`)
  stays where it was, and others go where the fewest requests are.
- A model is woken on one more node when each of those in use has `busy` requests, and it sleeps somewhere with its
  bytes in memory, where nobody busy would have to leave.
- Else it goes where it is to be had soonest: the rest of a wake or start, or a wake or start after those have left that
  are in its way, and after those that wait for the same GPUs. It follows others that wait for its model, if that costs
  less than a second.
- It waits there as long as that takes, and as long as the next best node would take on top: then its node turns it
  away, and it goes there. So a model whose queue has waited longer than its wake takes is woken on a second node.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from . import policy
from .events import Gone
from .policy import Spec, Use
from .status import FleetStatus, ModelStatus, Phase

WAKE_S, RELOAD_S, START_S, SLEEP_S = 0.5, 10.0, 60.0, 0.1  # until one was seen
ANSWER_S = 5.0  # what requests still run that would have to end first; no report says so
NOISE_S = 1.0  # less than that is noise, and the age of reports
MOST_TRIES = 3  # the last one has no other node to go to, and all the time that is left
BUSY = 256  # requests that a copy runs at once before another one is woken: vLLM's `max_num_seqs` by default


@dataclass(frozen=True)
class Reported:
    """What a node says of itself."""

    node: str
    status: FleetStatus


@dataclass(frozen=True)
class Silent:
    """A node does not answer: nothing is sent there before it reports again."""

    node: str


@dataclass(frozen=True)
class Asked:
    """A request, of which nothing was sent anywhere. `key`: of its conversation; "" for none."""

    request: int
    model: str
    key: str = ""


@dataclass(frozen=True)
class TurnedAway:
    """The node that a request was sent to did not begin it, and will not."""

    request: int


RouteEvent = Reported | Silent | Asked | TurnedAway | Gone


@dataclass(frozen=True)
class Forward:
    """Send the request there.

    Attributes:
        patience_s: after which its front is to turn it away; None if there is no other node to go to.
    """

    node: str
    patience_s: float | None = None


@dataclass
class _Routed:
    """A request that has not ended. `sent_at`: when it was sent where it is."""

    asked: Asked
    tried: list[str] = field(default_factory=list)
    sent: Forward | None = None
    sent_at: float = 0.0


@dataclass
class _Node:
    """A node that reports. `at`: when, by this router's clock. `waits_s`: for each model, once it was asked for."""

    status: FleetStatus
    models: Mapping[str, ModelStatus]
    at: float
    waits_s: dict[str, float] = field(default_factory=dict)


class Router:
    """See the module."""

    def __init__(self, specs: Iterable[Spec], nodes: Iterable[str], busy: int = BUSY) -> None:
        """`nodes`: all there may be, in an order that all ingresses share."""
        self._specs = {spec.name: spec for spec in specs}
        self._order = {node: number for number, node in enumerate(nodes)}
        self._busy = busy
        self._nodes: dict[str, _Node] = {}
        self._routed: dict[int, _Routed] = {}
        self._took: dict[tuple[str, str], tuple[float, float]] = {}  # by model and kind: when it last was, and took
        self._sent: dict[tuple[str, str], set[int]] = {}  # requests that are out, by node and model

    def handle(self, event: RouteEvent, now: float) -> Forward | None:
        """Where a request goes next; None if nobody can be asked now, or the event is about no request.

        After `TurnedAway` None means that this is the last word: no other node would take it.
        """
        match event:
            case Reported(node, status):
                self._reported(node, status, now)
            case Silent(node):
                self._nodes.pop(node, None)
            case Gone(request):
                if (ended := self._routed.get(request)) is not None:
                    self._take_back(request, ended)
                    del self._routed[request]
            case Asked(request):
                routed = self._routed.setdefault(request, _Routed(event))
                return self._route(request, routed, now)
            case TurnedAway(request):
                routed = self._routed[request]
                self._take_back(request, routed)
                return self._route(request, routed, now)
        return None

    def reports(self) -> dict[str, FleetStatus]:
        """What the nodes that answer have said last, in their order."""
        return {node: self._nodes[node].status for node in self._order if node in self._nodes}

    # What nodes say

    def _reported(self, node: str, status: FleetStatus, now: float) -> None:
        self._order.setdefault(node, len(self._order))
        self._nodes[node] = _Node(status, {model.name: model for model in status.models}, now)
        for model in status.models:
            if (last := model.last_switch) is not None and last.error is None:
                key = model.name, last.kind
                self._took[key] = max(self._took.get(key, (0.0, 0.0)), (last.ended_at, last.seconds))

    def _take_back(self, request: int, routed: _Routed) -> None:
        if routed.sent is not None:
            self._sent[routed.sent.node, routed.asked.model].discard(request)

    def _load(self, node: str, model: str) -> int:
        """Requests for a model that are on a node: those in its report, and what this ingress has sent since."""
        seen = self._nodes[node]
        said = seen.models[model]
        out = self._sent.get((node, model), ())
        return said.running + said.waiting + sum(self._routed[each].sent_at >= seen.at for each in out)

    # Where a request goes

    def _route(self, request: int, routed: _Routed, now: float) -> Forward | None:
        if routed.sent is not None:
            routed.tried.append(routed.sent.node)
        chosen = self._choose(routed)
        if chosen is not None:
            routed.sent, routed.sent_at = chosen, now
            self._sent.setdefault((chosen.node, routed.asked.model), set()).add(request)
        return chosen

    def _choose(self, routed: _Routed) -> Forward | None:
        model, tries = routed.asked.model, len(routed.tried)
        there = [node for node in self._order if self._may_take(node, model)]
        nodes = [node for node in there if node not in routed.tried]
        if not nodes and routed.sent is not None and routed.sent.patience_s is not None:
            nodes = there  # none had it in time: to the best one, with all the time that is left
        if tries >= MOST_TRIES or not nodes:
            return None
        waits_s = {node: self._expected_s(node, model) for node in nodes}
        node = self._where_awake(routed.asked, nodes) or min(
            nodes, key=lambda node: waits_s[node] - (NOISE_S if self._comes(node, model) else 0.0)
        )
        here_s, other_s = waits_s.pop(node), min(waits_s.values(), default=math.inf)
        if tries + 1 == MOST_TRIES or math.isinf(other_s):
            return Forward(node)
        return Forward(node, max(NOISE_S, here_s + other_s))

    def _where_awake(self, asked: Asked, nodes: list[str]) -> str | None:
        """Where the model is awake, or is to be woken beside that; None if it is awake nowhere."""
        awake = [node for node in nodes if self._nodes[node].models[asked.model].phase is Phase.AWAKE]
        loads = {node: self._load(node, asked.model) for node in awake}
        if awake and min(loads.values()) >= self._busy and (more := self._one_more(asked.model, nodes, awake)):
            return more
        used = awake[: 1 + sum(loads.values()) // self._busy]
        if asked.key:
            used = [node for node in used if loads[node] < self._busy] or used
            return max(used, key=lambda node: _rank(asked.key, node), default=None)
        return min(used, key=lambda node: loads[node], default=None)

    def _may_take(self, node: str, model: str) -> bool:
        seen = self._nodes.get(node)
        return seen is not None and model in seen.models and not seen.status.draining

    def _comes(self, node: str, model: str) -> bool:
        """Whether a model that is not awake there is waited for already, so that it will be."""
        leaves = self._nodes[node].models[model].phase in (Phase.DRAINING, Phase.FALLING_ASLEEP)
        return not leaves and self._load(node, model) > 0

    def _one_more(self, model: str, nodes: list[str], awake: list[str]) -> str | None:
        """Where a model is woken beside the nodes where it is awake; None if it is on its way somewhere, or nowhere."""
        others = [node for node in nodes if node not in awake]
        if any(self._nodes[node].models[model].phase is Phase.WAKING or self._load(node, model) for node in others):
            return None
        asleep = [node for node in others if self._nodes[node].models[model].phase is Phase.ASLEEP]
        best = min(asleep, key=lambda node: self._expected_s(node, model), default=None)
        if best is None or self._in_the_way_s(best, model) > 1.0:
            return None
        return best

    def _expected_s(self, node: str, model: str) -> float:
        """The same once for each report, however many ask."""
        known = self._nodes[node].waits_s
        if model not in known:
            known[model] = self._wait_s(node, model)
        return known[model]

    def _wait_s(self, node: str, model: str) -> float:
        """What a request for a model that is not awake there is expected to wait."""
        status, said = self._nodes[node].status, self._nodes[node].models[model]
        since_s = max(0.0, status.at - said.phase_since)
        wake_s, start_s = self._took_s(model, "wake", WAKE_S), self._took_s(model, "start", START_S)
        match said.phase:
            case Phase.AWAKE:
                return 0.0
            case Phase.WAKING:
                return max(0.0, wake_s - since_s)
            case Phase.STARTING:
                return max(0.0, start_s - since_s)
            case Phase.STOPPED | Phase.STOPPING:
                own_s = start_s
            case _:
                own_s = RELOAD_S if said.level == 2 else wake_s + (said.files_s or 0.0)
        return own_s + self._in_the_way_s(node, model) + (said.retry_in_s or 0.0)

    def _in_the_way_s(self, node: str, model: str) -> float:
        """For how long those hold its GPUs that would have to leave, and those that wait for them already."""
        status, wanted = self._nodes[node].status, self._specs[model]
        of = {each.name: each for each in status.models if each.name != model and wanted.gpus & {*each.gpus}}
        free = dict.fromkeys(wanted.gpus, 1.0)
        uses, wait_s = [], 0.0
        for each in of.values():
            holds = each.phase not in (Phase.STOPPED, Phase.ASLEEP)
            for gpu in wanted.gpus & {*each.gpus} if holds else ():
                free[gpu] -= each.share
            spec = Spec(each.name, frozenset(each.gpus), each.share)
            uses += [Use(spec, not each.running, each.phase_since, each.phase_since)] if holds else []
            if each.waiting and each.phase is not Phase.AWAKE:
                wait_s += SLEEP_S + self._took_s(each.name, "wake", WAKE_S) + self._keep_s(each.name)
        for name in policy.models_to_evict(wanted, free, uses) or ():
            each = of[name]
            since_s = status.at - each.phase_since
            drain_s = min(ANSWER_S, self._specs[name].drain_s) if each.running and name in self._specs else 0.0
            wait_s += SLEEP_S + max(0.0, self._keep_s(name) - since_s) + drain_s
        return wait_s

    def _took_s(self, model: str, kind: str, without: float) -> float:
        return self._took.get((model, kind), (0.0, without))[1]

    def _keep_s(self, model: str) -> float:
        return self._specs[model].keep_s if model in self._specs else 0.0


def _rank(key: str, node: str) -> bytes:
    """By which all ingresses send a conversation to the same one of some nodes, and few move when these change."""
    return hashlib.blake2b(f"{node} {key}".encode(), digest_size=8).digest()


def placed(
    specs: Iterable[Spec], copies: Mapping[str, int], nodes: list[str], host_bytes: int | None
) -> dict[str, set[str]]:
    """The models that each node has asleep from the start; the others are stopped there.

    Each copy goes where the models placed so far need the least of GPUs, the largest first, where its backup fits. Of
    models that are alike, and listed with the most popular first, this is the paper's to and fro.

    Args:
        copies: on how many nodes, by model; 1 without.
        host_bytes: for sleepers, on each node; None if nobody knows.
    """
    found: dict[str, set[str]] = {node: set() for node in nodes}
    load, held = dict.fromkeys(nodes, 0.0), dict.fromkeys(nodes, 0)
    for spec in sorted(specs, key=lambda spec: -spec.share * len(spec.gpus)):
        for _ in range(copies.get(spec.name, 1)):
            fits = [
                node
                for node in nodes
                if spec.name not in found[node] and (host_bytes is None or held[node] + spec.host_bytes <= host_bytes)
            ]
            if not fits:
                break
            node = min(fits, key=lambda node: (round(load[node], 6), held[node], nodes.index(node)))
            found[node].add(spec.name)
            load[node] += spec.share * len(spec.gpus)
            held[node] += spec.host_bytes
    return found
