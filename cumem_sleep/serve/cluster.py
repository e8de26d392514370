"""An ingress over the fronts of many nodes: what `Front` asks of a fleet, answered by theirs. Knows no Ray.

    cluster = Cluster(config, {"10.0.0.2": find})      # `find` says where that node's front listens now
    await cluster.start()
    await cluster(scope, receive, send)                # ASGI: the front's own paths, keys and answers

A request goes where `routing` says, and waits there: the node's front has the last word. What it turns away before any
server has seen it goes elsewhere. What may have begun is sent once; if its node is lost, it gets a 502.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from ..http.asgi import LOST, Inbox, Message, Receive, Scope, Send, header, refusal, response, text_response, within
from ..metrics import CONTENT_TYPE
from .access import MODELS, PathMeaning
from .address import Address
from .answers import MOST_CALL_BYTES, Answers
from .config import Config
from .events import Gone
from .exchange import BEGUN, PATIENCE, Exchange
from .fleet import Fleet, ModelLease, NotInTime, OrderRefused, ServeError, UnknownModel
from .front import Front
from .routing import Asked, Forward, Reported, RouteEvent, Router, Silent, TurnedAway
from .server_metrics import joined
from .status import Counters, FleetStatus, HostStatus, ModelStatus, Phase
from .tracing import Tracing
from .units import spawn
from .upstream import BrokenOff, Connection, Connections, Unreachable, request_head

REPORT_EVERY_S = 0.5
REPORT_WITHIN_S = 2.0  # a node that takes longer gets no more requests
FIND_WITHIN_S = 5.0
LOST_AFTER_S = 10.0  # of silence, requests on a node are given up: it may stand still for ever
PAGE_WITHIN_S = 8.0  # Prometheus itself waits for 10 s, and a node for 5 s
ASK_WITHIN_S = 1800.0  # an operator's call: a model may have to be started
SESSION = b"x-session-id"
PREFIX_BYTES = 512  # of a body, by which conversations that begin alike are taken for one, without a session
_FIRST = [Phase.AWAKE, Phase.WAKING, Phase.DRAINING, Phase.STARTING, Phase.FALLING_ASLEEP, Phase.ASLEEP, Phase.STOPPING]

logger = logging.getLogger("cumem_sleep.serve")

Find = Callable[[], Awaitable[Address]]
"""Where a node's front listens now, with its secret. It may take any time, and fail with any exception."""


class _NotBegun(Exception):
    """A node's front has turned the request away: no server has seen it."""

    def __init__(self, answer: list[Message]) -> None:
        super().__init__()
        self.answer = answer


@dataclass(frozen=True)
class NodeStatus:
    """One node. `status`: what it said last; None while it does not answer."""

    name: str
    status: FleetStatus | None


@dataclass(frozen=True)
class ClusterStatus(FleetStatus):
    """All nodes, with each model once: where it is awake, or else where it is nearest to that."""

    nodes: tuple[NodeStatus, ...] = ()


class Cluster:
    """All nodes, as an ingress sees them.

    Attributes:
        addresses: of the fronts of those that answer.
        leases: that are out, by node.
        news: set, and made anew, after each report.
    """

    def __init__(self, config: Config, nodes: Mapping[str, Find]) -> None:
        self.config = config
        self.counters = Counters()
        self.tracing: Tracing | None = None
        self.connections = Connections()
        self._names, self._find = config.names(), nodes
        self.specs = {name: model.spec(name) for name, model in config.models.items()}
        self._router = Router(self.specs.values(), nodes, config.busy)
        self.addresses: dict[str, Address] = {}
        self.leases: dict[str, set[ModelLease]] = {node: set() for node in nodes}
        self._requests = itertools.count(1)
        self.news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._front = Front(cast(Fleet, self), ClusterExchange, ClusterAnswers)  # of a fleet it asks what is here

    async def start(self) -> None:
        """Begin to ask the nodes."""
        for node, find in self._find.items():
            spawn(self._tasks, self._watch(node, find))

    async def stop(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.connections.close_idle(0)
        await self._front.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: ASGI, for any server."""
        scope.setdefault(LOST, asyncio.get_running_loop().create_future())  # others say so by `receive` alone
        await self._front(scope, receive, send)

    # What the nodes say

    async def _watch(self, node: str, find: Find) -> None:
        silent_s, last = 0.0, time.monotonic()
        while True:
            try:
                if node not in self.addresses:
                    self.addresses[node] = await within(FIND_WITHIN_S, find())
                await self._look_at(node)
                silent_s = 0.0
            except Exception as error:  # whatever it is, the node cannot be used, and is asked again
                if node in self._router.reports():
                    logger.warning("the node %s does not answer: %s: %s", node, type(error).__name__, error)
                self.addresses.pop(node, None)
                self.tell(Silent(node))
                silent_s += min(time.monotonic() - last, LOST_AFTER_S / 2)  # this process itself may have stood still
                if silent_s > LOST_AFTER_S:
                    for lease in self.leases[node]:
                        if not lease.revoked.done():
                            lease.revoked.set_result(f"the node {node} has not answered for {LOST_AFTER_S:g} s")
            last = time.monotonic()
            await asyncio.sleep(REPORT_EVERY_S)

    async def _look_at(self, node: str) -> None:
        _, body = await self.ask(node, "GET", "/status", within_s=REPORT_WITHIN_S)
        self.tell(Reported(node, FleetStatus.from_json(json.loads(body))))

    def tell(self, event: RouteEvent) -> Forward | None:
        """Have the router decide."""
        found = self._router.handle(event, time.monotonic())
        if isinstance(event, Reported | Silent):
            news, self.news = self.news, asyncio.Event()
            news.set()
        return found

    async def ask(
        self, node: str, method: str, path: str, body: bytes = b"", within_s: float = ASK_WITHIN_S
    ) -> tuple[int, bytes]:
        """What a node's front answers: status and body.

        Raises:
            Unreachable, BrokenOff, asyncio.TimeoutError.
        """
        if (address := self.addresses.get(node)) is None:
            raise Unreachable(f"the node {node} does not answer")
        connection = await self.connections.take(address)
        try:
            length = [(b"content-length", str(len(body)).encode())] if method == "POST" else []
            connection.send((request_head(address, method, path.encode(), length), body), more=False)
            return await within(within_s, _whole(connection))
        finally:
            self.connections.give_back(address, connection)

    # Requests

    def resolve(self, model: str) -> str:
        """The name of a model by its name or alias.

        Raises:
            UnknownModel.
        """
        if model not in self._names:
            raise UnknownModel(f"there is no model {model!r}: there are {', '.join(self.config.models)}")
        return self._names[model]

    @contextmanager
    def request(self, model: str, asked_as: str, key: str) -> Iterator[RoutedRequest]:
        """One request, from its coming to its end."""
        number = next(self._requests)
        try:
            yield RoutedRequest(self, number, Asked(number, model, key), asked_as)
        finally:
            self.tell(Gone(number))

    # What there is to see

    def status(self) -> ClusterStatus:
        """Everything that the nodes have said last."""
        said = self._router.reports()
        nodes = tuple(NodeStatus(node, said.get(node)) for node in self._find)
        statuses = list(said.values())
        models = tuple(self._model(name, statuses) for name in self.config.models)
        gpus = tuple(replace(gpu, name=f"{node}: {gpu.name}") for node, status in said.items() for gpu in status.gpus)
        hosts = [status.host for status in statuses]
        available = sum(host.available_bytes or 0 for host in hosts)
        budget, held, kept = (
            sum(getattr(host, f"{what}_bytes") for host in hosts) for what in ("budget", "held", "kept")
        )
        simulated = any(status.simulated for status in statuses)
        host = HostStatus(budget, held, available or None, kept_bytes=kept)
        version = ", ".join(sorted({status.version for status in statuses}))
        return ClusterStatus(time.time(), version, simulated, gpus, models, host, nodes=nodes)

    def _model(self, name: str, statuses: Collection[FleetStatus]) -> ModelStatus:
        copies = [model for status in statuses for model in status.models if model.name == name]
        if not copies:
            spec, now, why = self.specs[name], time.time(), "no node answers that has it"
            aliases = self.config.models[name].aliases
            rest = (0, 0.0, 0, None, 0, why, None, None, None, None, None, 0, None)
            return ModelStatus(name, aliases, tuple(spec.gpus), spec.share, Phase.STOPPED, None, now, *rest)
        best = min(copies, key=lambda model: _FIRST.index(model.phase) if model.phase in _FIRST else len(_FIRST))
        return replace(
            best,
            waiting=sum(model.waiting for model in copies),
            oldest_wait_s=max(model.oldest_wait_s for model in copies),
            running=sum(model.running for model in copies),
            host_bytes=sum(model.host_bytes for model in copies),
        )

    async def watch(self) -> AsyncIterator[ClusterStatus]:
        """The status now, and after each report."""
        while True:
            news = self.news
            yield self.status()
            await asyncio.sleep(REPORT_EVERY_S)
            await news.wait()

    def log_tail(self, model: str, lines: int = 100) -> list[str]:  # noqa: ARG002  (as of a fleet)
        """Where its servers' logs are.

        Raises:
            UnknownModel.
        """
        name = self.resolve(model)
        found = ((node, each) for node, status in self._router.reports().items() for each in status.models)
        return [f"{node}: {each.log}" for node, each in found if each.name == name and each.log]

    # What an operator does

    async def sleep(self, model: str, level: int | None = None) -> None:
        """Put a model to sleep on all nodes. Raises as `Fleet.sleep`."""
        await self._order(model, "/admin/sleep", {} if level is None else {"level": level})

    async def stop_model(self, model: str) -> None:
        """Stop a model's servers on all nodes. Raises as `Fleet.stop_model`."""
        await self._order(model, "/admin/stop", {})

    async def wake(self, model: str) -> None:
        """Wake or start a model where a request would go. Raises as `Fleet.wake`."""
        name = self.resolve(model)
        with self.request(name, name, "") as request:
            node = (await request.where()).node
        await self._told([node], "/admin/wake", {"model": name})

    async def _order(self, model: str, path: str, more: dict[str, Any]) -> None:
        """What there is nothing to do for, a node knows better than its report."""
        name, said = self.resolve(model), self._router.reports().items()
        have_it = [node for node, status in said if any(each.name == name for each in status.models)]
        await self._told(have_it, path, {"model": name, **more})

    async def _told(self, nodes: list[str], path: str, call: dict[str, Any]) -> None:
        content = json.dumps(call).encode()
        for node, (code, body) in zip(
            nodes, await asyncio.gather(*(self.call(node, path, content) for node in nodes)), strict=True
        ):
            if code != 200:
                why = f"{node}: {_message(body)}"
                raise OrderRefused(why) if code == 409 else NotInTime(why, 10.0)

    async def call(self, node: str, path: str, content: bytes) -> tuple[int, bytes]:
        """An operator's call of one node.

        Raises:
            NotInTime: it does not answer, or falls silent.
        """
        asked = asyncio.ensure_future(self.ask(node, "POST", path, content))
        lease = ModelLease("", Address(""))  # of no model: to hear that the node is silent
        self.leases[node].add(lease)
        try:
            await asyncio.wait((asked, lease.revoked), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise NotInTime(lease.revoked.result(), 10.0)
            answer = asked.result()
        except (Unreachable, BrokenOff, asyncio.TimeoutError) as error:
            raise NotInTime(f"the node {node} does not answer: {error}", 10.0) from None
        finally:
            asked.cancel()
            self.leases[node].discard(lease)
        with suppress(Exception):  # the next report says it
            await self._look_at(node)
        return answer

    async def metrics_of(self, model: str) -> str:
        """The metrics that its servers have themselves, on all nodes. Raises as `Fleet.metrics_of`."""
        return await self.page(f"/models/{self.resolve(model)}/metrics")

    async def page(self, path: str) -> str:
        """What the nodes have there for Prometheus, as one page: each names itself in a label."""

        async def of(node: str) -> str | ServeError:
            try:
                code, body = await self.ask(node, "GET", path, within_s=PAGE_WITHIN_S)
            except (Unreachable, BrokenOff, asyncio.TimeoutError) as error:
                return ServeError(f"it does not answer: {error}")
            return body.decode(errors="replace") if code == 200 else ServeError(_message(body))

        pages = dict(zip(self._find, await asyncio.gather(*map(of, self._find)), strict=True))
        return await asyncio.to_thread(joined, pages, "node", "serve_node_up")


@dataclass
class RoutedRequest:
    """One request of which an ingress decides where it goes. `asked_as`: the name in it, perhaps an alias."""

    cluster: Cluster
    number: int
    asked: Asked
    asked_as: str

    def __post_init__(self) -> None:
        self._ends_at = time.monotonic() + self.cluster.specs[self.asked.model].wait_s

    async def where(self) -> Forward:
        """The node to send it to first; waits while none answers.

        Raises:
            NotInTime: none did in time.
        """
        while (found := self.cluster.tell(self.asked)) is None:
            left_s = self._ends_at - time.monotonic()
            if left_s <= 0:
                raise NotInTime("no node answers that has the model", 5.0)
            with suppress(asyncio.TimeoutError):
                await within(left_s, self.cluster.news.wait())
        return found

    def elsewhere(self, lost: str = "") -> Forward | None:
        """The next node, after one that did not begin it (`lost`: nor answers); None if no other would."""
        if lost:
            self.cluster.tell(Silent(lost))
        return self.cluster.tell(TurnedAway(self.number))

    @contextmanager
    def lease(self, forward: Forward) -> Iterator[ModelLease]:
        """To send it there. It is revoked if the node falls silent.

        Raises:
            Unreachable: the node has gone in between.
        """
        address = self.cluster.addresses.get(forward.node)
        if address is None:
            raise Unreachable(f"the node {forward.node} does not answer")
        patience_s = max(0.0, min(forward.patience_s or math.inf, self._ends_at - time.monotonic()))
        # Pages are of the ingress' origin, which has looked at that, and never of the node's.
        more = ((PATIENCE.decode(), f"{patience_s:.3f}"), ("Sec-Fetch-Site", "none"))
        headers = (*address.headers, *more)
        now = time.monotonic()
        lease = ModelLease(self.asked.model, replace(address, headers=headers), now, now, names=(self.asked_as,))
        self.cluster.leases[forward.node].add(lease)
        try:
            yield lease
        finally:
            self.cluster.leases[forward.node].discard(lease)


class ClusterExchange(Exchange):
    """One request on its way to a node's front."""

    async def _answer(self, name: str) -> list[Message] | None:
        cluster = cast(Cluster, self._ways.fleet)
        self._code_if_revoked = 502
        try:
            model = cluster.resolve(name)
        except UnknownModel:
            return self._unknown(name)
        if self._place.model is not None:  # the node has more models than this one, and the body may name none
            self._place = replace(self._place, target=f"{MODELS}{model}{self._place.target}")
        with cluster.request(model, name, self._key()) as request:
            try:
                forward: Forward | None = await request.where()
            except NotInTime as late:
                return refusal(503, str(late), {"Retry-After": str(math.ceil(late.retry_after_s))})
            answer: list[Message] = []
            while forward is not None:
                node, lost = forward.node, ""
                if not self._has_all:  # what the node turned away could not be sent anew
                    forward = Forward(node)
                try:
                    with request.lease(forward) as lease:
                        await self._ask(lease)
                        return None
                except _NotBegun as turned_away:
                    answer = turned_away.answer
                except Unreachable as unreachable:
                    answer, lost = refusal(502, f"the node {node} cannot be reached: {unreachable}"), node
                except BrokenOff as broken:
                    return await self._end_early(502, f"the node {node} broke off: {broken}")
                forward = request.elsewhere(lost)
        return answer

    async def _look_at_head(self, connection: Connection) -> None:
        headers = dict(connection.headers)
        if headers.get(BEGUN) == b"no" and self._has_all:
            code, body = await _whole(connection)
            after = headers.get(b"retry-after", b"1").decode("latin-1")
            raise _NotBegun(refusal(code, _message(body), {"Retry-After": after}))

    def _key(self) -> str:
        """By which a conversation stays where its KV cache is: its session, or how its body begins."""
        if session := header(self._scope, SESSION):
            return session
        first = b"".join(self._pieces[:1])[:PREFIX_BYTES]
        return first.decode("latin-1") if len(first) == PREFIX_BYTES else ""


class ClusterAnswers(Answers):
    """What an ingress answers itself."""

    async def _metrics(self, place: PathMeaning, _scope: Scope, _inbox: Inbox) -> list[Message]:
        return text_response(await self._cluster.page(place.name), CONTENT_TYPE)

    async def _metrics_of_servers(self, place: PathMeaning, scope: Scope, inbox: Inbox) -> list[Message]:
        return await self._metrics(place, scope, inbox)

    async def _drain(self, _place: PathMeaning, _scope: Scope, inbox: Inbox) -> list[Message]:
        try:
            call = json.loads(await inbox.body(MOST_CALL_BYTES) or b"")
            node, on = str(call["node"]), call.get("on", True)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return refusal(400, 'expected a body such as {"node": "10.0.0.2", "on": true}')
        if node not in self._cluster.leases:
            return refusal(404, f"there is no node {node[:200]!r}: there are {', '.join(self._cluster.leases)}")
        code, body = await self._cluster.call(node, "/admin/drain", json.dumps({"on": on}).encode())
        return response(code, json.loads(body)) if code == 200 else refusal(code, f"{node}: {_message(body)}")

    def _view(self, status: FleetStatus, is_operator: bool) -> dict[str, Any]:
        view = super()._view(status, is_operator)
        for node in view["nodes"] if not is_operator else ():
            node["status"] = node["status"] and self._for_clients(node["status"])
        return view

    @property
    def _cluster(self) -> Cluster:
        return cast(Cluster, self._fleet)


async def _whole(connection: Connection) -> tuple[int, bytes]:
    await connection.head()
    pieces: list[bytes] = []
    while not connection.is_read:
        pieces.append(await connection.read())
    return connection.status, b"".join(pieces)


def _message(body: bytes) -> str:
    """Of an error as a front says it."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return "it answered what no front does"
