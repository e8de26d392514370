"""Random episodes of two operators, several clients and intruders at the gate of a real vLLM server, and an oracle.

    python tests/vllm/gate_episodes.py --seconds 60            as many episodes as fit, from a new seed
    python tests/vllm/gate_episodes.py --seed 1234 --times 20  one episode again: the same plan, timing as it comes
    python tests/vllm/gate_episodes.py --servers 2             with two API servers

An episode may not touch sleeping memory or unloaded weights (`watched_worker`), let anybody without the token act,
leave a request without an answer, leave the gate and the engine of two minds, or leave handlers and tasks behind; and
the model serves after a wake and a reload.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import raw_http
from raw_http import Answer, Request

TOKEN, KEY = "token-of-the-operator", "key-of-the-clients"
POLICIES = ("reject", "wait", "wake")
DEADLINE_S = 1.0  # of held requests
BOUND_S = 60.0  # nothing may hang once the model serves again; on a busy machine much takes long
COMPLETIONS = "/v1/completions"
# What none may reach without the token, by the module of vLLM that serves it: all that changes state but inference.
TOKEN_MODULES = (
    *("sleep", "rlhf", "rpc", "cache", "server_info", "profile", "elastic_ep", "fault_tolerance", "lora", "rl.online"),
)
HARMLESS_PATHS = ("/is_scaling_elastic_ep",)
QUESTIONS = (
    "/is_sleeping",
    "/is_paused",
    "/get_world_size",
    "/weight_info",
    "/load",
    "/health",
    "/fault_tolerance/status",
)


@dataclass
class Step:
    """After a while, one request."""

    after_s: float
    request: Request
    how: str = "http"  # or websocket, pipelined
    server: int = 0

    def __str__(self) -> str:
        return f"+{self.after_s:.3f} {self.request}{'' if self.how == 'http' else ' ' + self.how} @{self.server}"


@dataclass
class Plan:
    """All of an episode that chance decides."""

    seed: int
    policy: str
    token: bool
    key: bool
    plugin: bool  # whether workers say what sleeps
    servers: int
    root_path: str
    draft: bool = False  # whether a model drafts for it, which `reload_weights` does not load
    gate: bool = True
    failing: list[bool] = field(default_factory=list)  # which wakes of workers fail after their memory is mapped
    operators: list[list[Step]] = field(default_factory=list)
    clients: list[list[Step]] = field(default_factory=list)

    def __str__(self) -> str:
        facts = f"{self.policy=} {self.token=} {self.key=} {self.plugin=} {self.servers=} {self.root_path=}"
        facts += f" {self.draft=} {self.failing=}"
        lines = [f"seed {self.seed}: {facts.replace('self.', '')}"]
        for name, people in (("operator", self.operators), ("client", self.clients)):
            lines += [f"  {name}: {step}" for steps in people for step in steps]
        return "\n".join(lines)


class Chance:
    """Makes plans. `paths` are the routes of the installed version."""

    def __init__(self, seed: int, servers: int, paths: set[str]) -> None:
        self.random = random.Random(seed)
        self.seed, self.servers, self.paths = seed, servers, paths

    def plan(self) -> Plan:
        choose = self.random
        plan = Plan(
            self.seed,
            policy=choose.choice(POLICIES),
            token=choose.random() < 0.5,
            key=choose.random() < 0.3,
            plugin=choose.random() < 0.7,
            servers=self.servers,
            root_path=choose.choice(["", "", "", "/api", "/api/", "/"]),
        )
        plan.draft = plan.plugin and choose.random() < 0.5  # else nobody can tell whether it is loaded
        plan.operators = [self._operator(plan) for _ in range(2)]
        plan.clients = [self._client(plan) for _ in range(5)]
        if plan.token:
            plan.clients.append([self._intrusion(plan) for _ in range(8)])
        if choose.random() < 0.5:
            plan.failing = [choose.random() < 0.4 for _ in range(8)]
        return plan

    def _operator(self, plan: Plan) -> list[Step]:
        steps: list[Step] = []
        while len(steps) < 6:
            for method, target, body in self._operation():
                if target.partition("?")[0] in {*self.paths, "/wake", "/reload_weights"}:
                    steps.append(self._admin(plan, method, target, body))
        return steps

    def _operation(self) -> list[tuple[str, str, bytes]]:
        choose = self.random

        def post(target: str, body: Any = None) -> tuple[str, str, bytes]:
            return "POST", target, b"" if body is None else json.dumps(body).encode()

        def sleep() -> list[tuple[str, str, bytes]]:
            level = choose.choice([*"0112222", *choose.choices(["-1", "3", "1.0", "deep", ""], k=1)])
            return [post(f"/sleep?level={level}&mode={choose.choice(['abort', 'wait', 'keep'])}")]

        def wake() -> list[tuple[str, str, bytes]]:
            tags = choose.choice(["", "", "", "tags=weights", "tags=kv_cache", "tags=weights&tags=kv_cache"])
            restore = choose.choice(["", "", "", "restore=0"])
            query = "&".join(filter(None, (tags, restore)))
            return [post(choose.choice(["/wake_up", "/wake"]) + (query and f"?{query}"))]

        def staged_wake() -> list[tuple[str, str, bytes]]:
            return [post("/wake_up?tags=weights"), *load(), post("/wake_up?tags=kv_cache")]

        def load() -> list[tuple[str, str, bytes]]:
            return choose.choice([reload, update, update, update_draft, receive])()

        def reload() -> list[tuple[str, str, bytes]]:
            return [choose.choice([post("/reload_weights"), rpc("reload_weights")])]

        def update() -> list[tuple[str, str, bytes]]:
            chunk = post("/update_weights", {"update_info": {}})
            by_rpc = rpc("update_weights", kwargs={"update_info": {}})
            if "/start_weight_update" not in self.paths:  # vLLM 0.18
                return [choose.choice([chunk, by_rpc])]
            chunks = [choose.choice([chunk, chunk, by_rpc]) for _ in range(2)]
            return [post("/start_weight_update"), *chunks, post("/finish_weight_update", {})]

        def update_draft() -> list[tuple[str, str, bytes]]:
            chunk = post("/update_weights", {"update_info": {}})
            return [post("/start_draft_weight_update"), chunk, post("/finish_weight_update", {})]

        def receive() -> list[tuple[str, str, bytes]]:
            return [rpc("receive_weights")]

        def rpc(method: str, **more: Any) -> tuple[str, str, bytes]:
            return post("/collective_rpc", {"method": method, **more})

        def any_rpc() -> list[tuple[str, str, bytes]]:
            simple = (
                *(
                    "echo",
                    "watched_state",
                    "wake_up",
                    "compute_weight_checksums",
                    "execute_dummy_batch",
                    "receive_weights",
                ),
                *("start_weight_update", "finish_weight_update", "cumem_sleep_forget"),
            )
            more: dict[str, Any] = {
                "sleep": {"kwargs": {"level": choose.choice([1, 2])}},
                "save_sharded_state": {"kwargs": {"path": "/nowhere"}},
                "update_weights": {"kwargs": {"update_info": {}}},
            }
            method = choose.choice([*simple, *more])
            return [rpc(method, **more.get(method, {}))]

        def pause() -> list[tuple[str, str, bytes]]:
            return [post(f"/pause?mode={choose.choice(['abort', 'wait', 'keep'])}"), post("/resume")]

        def other() -> list[tuple[str, str, bytes]]:
            paths = ["/release_kv_cache_memory", "/resume", "/reset_prefix_cache?reset_running_requests=true"]
            return [post(choose.choice([*paths, "/reset_mm_cache"])), post("/abort_requests", {})][
                : choose.randint(1, 2)
            ]

        kinds = [sleep] * 5 + [wake] * 4 + [staged_wake] * 2 + [load] * 2 + [any_rpc] * 2 + [pause, other]
        return choose.choice(kinds)()

    def _admin(self, plan: Plan, method: str, target: str, body: bytes) -> Step:
        choose = self.random
        headers = {"Authorization": f"Bearer {TOKEN}"} if plan.token else {}
        if body:
            headers["Content-Type"] = "application/json"
        if not plan.token and choose.random() < 0.1:
            target = self._odd(target)
        pause_s = choose.uniform(0.01, 0.3) if body and choose.random() < 0.3 else 0.0
        leave = choose.choice(raw_http.LEAVES) if choose.random() < 0.08 else ""
        request = Request(method, target, body, headers, pause_s, leave)
        return Step(choose.choice([0.0, 0.0, choose.uniform(0, 0.25)]), request, server=choose.randrange(plan.servers))

    def _odd(self, target: str) -> str:
        """Another way to write a target, which a router may take for the same."""
        path, mark, query = target.partition("?")
        odd = self.random.choice(
            [path + "%0A", path + "%0D%0A", path + "/", "/" + path, "/%2F" + path[1:], path + ";x", path + "%3F",
             f"/%{ord(path[1]):02x}{path[2:]}", f"/%{ord(path[1]):02x}{path[2:]}%0A", "http://127.0.0.1" + path,
             "http://127.0.0.1" + path + "%0A", "/." + path, "/x/.." + path, path + "%00", path + "%20", path.upper(),
             "/api" + path, "/api/" + path]
        )  # fmt: skip
        return odd + mark + query

    def _intrusion(self, plan: Plan) -> Step:
        choose = self.random
        target = choose.choice(
            ["/sleep?level=2", "/sleep", "/wake_up", "/pause", "/resume", "/reload_weights", "/collective_rpc",
             "/abort_requests", "/update_weights", "/reset_prefix_cache?reset_running_requests=true", "/start_profile",
             "/scale_elastic_ep", "/release_kv_cache_memory", "/finish_weight_update", "/v1/load_lora_adapter"]
        )  # fmt: skip
        if choose.random() < 0.7:
            target = self._odd(target)
        method = choose.choice(["POST"] * 6 + ["GET", "PUT", "PATCH", "DELETE", "post", "HEAD", "OPTIONS"])
        headers = {"Content-Type": "application/json"}
        if choose.random() < 0.5:
            headers["Authorization"] = choose.choice(
                ["Bearer wrong", f"Basic {TOKEN}", f"Bearer {KEY}", TOKEN, f"Bearer  {TOKEN}x"]
            )
        body = choose.choice(
            [b"", b"{}", b'{"method": "sleep"}', b'{"update_info": {}}', b'{"lora_name": "x", "lora_path": "/x"}']
        )
        return Step(
            choose.uniform(0, 0.15), Request(method, target, body, headers), server=choose.randrange(plan.servers)
        )

    def _client(self, plan: Plan) -> list[Step]:
        return [self._inference(plan) for _ in range(4)]

    def _inference(self, plan: Plan) -> Step:
        choose = self.random
        stream = choose.random() < 0.5
        body: dict[str, Any] = {"model": "model", "max_tokens": choose.choice([1, 5, 20, 80]), "stream": stream}
        body |= {"ignore_eos": True, "prompt": "hello world " * choose.randint(1, 8)}
        target, content = COMPLETIONS, json.dumps(body).encode()
        if choose.random() < 0.15:
            del body["prompt"]
            target, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "hello"}]
            content = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if plan.key and choose.random() < 0.8:
            headers["Authorization"] = f"Bearer {KEY if choose.random() < 0.9 else 'wrong'}"
        request = Request("POST", target, content, headers)
        how, kind = "http", choose.random()
        if kind < 0.25:
            request.pause_s = choose.uniform(0.02, 0.5)
        elif kind < 0.4:
            request.leave = choose.choice(raw_http.LEAVES)
        elif kind < 0.45:
            request.body = content[:-3]
        elif kind < 0.5:
            request.host = "x/?"
        elif kind < 0.55:
            request.target = self._odd(target)
        elif kind < 0.6:
            how, request.target = "websocket", choose.choice(["/v1/realtime", "/sleep", "/v1/realtime?model=model"])
        elif kind < 0.65:
            how = "pipelined"
        elif kind < 0.68:
            request.body = json.dumps({**body, "user": "x" * (2 << 20)}).encode()
        elif kind < 0.75:
            others = ["/v1/models", "/metrics", "/nowhere", "/tokenize", "/health", "/version", "/v1/completions/x"]
            request = Request(choose.choice(["GET", "POST", "PUT"]), choose.choice(others), b"{}", headers)
        return Step(choose.choice([0.0, choose.uniform(0, 0.3)]), request, how, choose.randrange(plan.servers))


# The server


class Watch:
    """Middleware: how many requests are within; below the gate also, whether one without the token got through."""

    def __init__(self, app: Any, found: list[str], counts: Counter[str], name: str, token: str = "") -> None:
        self.app, self.found, self.counts, self.name, self.token = app, found, counts, name, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        codes: list[int] = []

        async def noting(message: Any) -> None:
            codes.extend([message["status"]] if message["type"] == "http.response.start" else [])
            await send(message)

        self.counts[self.name] += 1
        try:
            await self.app(scope, receive, noting)
        finally:
            self.counts[self.name] -= 1
            self._check(scope, codes)

    def _check(self, scope: Any, codes: list[int]) -> None:
        module = getattr(scope.get("endpoint"), "__module__", "")
        if not self.token or not any(f".{name}." in module + "." for name in TOKEN_MODULES):
            return
        if codes == [405]:  # matched by its path alone: nothing ran
            return
        path = getattr(scope.get("route"), "path", scope["path"])
        if path in HARMLESS_PATHS or (path in QUESTIONS and scope.get("method") in ("GET", "HEAD")):
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if given != [b"Bearer " + self.token.encode()]:
            raw = scope.get("raw_path", b"")
            self.found.append(f"without the token {scope.get('method')} {raw!r} reached vLLM's {path} ({module})")


class World:
    """One vLLM for all episodes: its engine, and an app for each kind of server."""

    def __init__(self, client: Any, apps: dict[tuple[bool, int], Any], record: pathlib.Path) -> None:
        self.client, self.apps, self.record = client, apps, record
        self._base = {id(app): list(app.user_middleware) for app in apps.values()}
        self.paths = {getattr(route, "path", "") for route in _routes(apps[False, 0].routes)}

    @classmethod
    async def make(cls, folder: pathlib.Path, stack: AsyncExitStack, engines: int = 1) -> World:
        """`engines`: if several, they are data-parallel, and step together, as those of a Mixture of Experts do."""
        import watched_server

        model = folder / "model"
        model.mkdir()
        watched_server.model_folder(model, experts=2 if engines > 1 else 0)
        args = watched_server.arguments(model, "--data-parallel-size", str(engines))
        client = await stack.enter_async_context(watched_server.engine(args))
        return await cls.around(client, folder)

    @classmethod
    async def around(cls, client: Any, folder: pathlib.Path) -> World:
        import watched_server

        apps = {}
        for key in (False, True):
            for number in range(2):
                args = watched_server.arguments(folder / "model", *["--api-key", KEY] * key)
                apps[key, number] = await watched_server.make_app(args, watched_server.sibling(client))
        return cls(client, apps, folder / "touches.jsonl")

    def gated(self, plan: Plan, number: int, found: list[str], counts: Counter[str]) -> Any:
        """The app with a new gate before it, as vLLM puts it there: outermost."""
        from starlette.middleware import Middleware

        from cumem_sleep.vllm import SleepGate

        app = self.apps[plan.key, number]
        app.middleware_stack = None
        outer = Middleware(Watch, found=found, counts=counts, name="outside of the gate")
        inner = Middleware(Watch, found=found, counts=counts, name="in vLLM", token=TOKEN if plan.token else "")
        gate = [Middleware(SleepGate)] * plan.gate
        app.user_middleware = [outer, *gate, inner, *self._base[id(app)]]
        app.root_path = plan.root_path
        app.state.args.api_server_count = plan.servers
        vars(app.state.engine_client.engine_core).pop("add_request_async", None)  # the last gate may have stood there
        return app

    async def reset(self, plan: Plan) -> None:
        await self.mend()
        await self.client.wake_up(None)
        await self.client.resume_generation()
        await self.client.collective_rpc("watched_reset", args=(plan.plugin, plan.draft))
        await self.client.collective_rpc("watched_break", args=(plan.failing,))
        self.record.write_text("")
        tempfile.tempdir = tempfile.mkdtemp(dir=self.record.parent)  # where API servers share what they know

    async def mend(self) -> None:
        """No wake fails any more."""
        await self.client.collective_rpc("watched_break", args=([],))

    def touches(self) -> list[str]:
        lines = [json.loads(line) for line in self.record.read_text().splitlines()]
        return [f"{each['touch']}: {', '.join(each['faults'])}" for each in lines]

    async def state(self) -> dict[str, Any]:
        """With several engines, that of the one of which least sleeps."""
        from cumem_sleep.vllm import data_parallel

        states = [
            state for states in await data_parallel.call_workers(self.client, "watched_state") for state in states
        ]
        state = min(states, key=lambda each: len(each["asleep"]))
        return {**state, "paused": await self.client.is_sleeping() and not state["asleep"]}


def _routes(routes: Any) -> Any:
    for route in routes:
        yield route
        yield from _routes(getattr(getattr(route, "original_router", None), "routes", ()))


class Server:
    """Uvicorn on a loopback socket, as vLLM runs it."""

    def __init__(self, app: Any, lifespan: str = "off") -> None:
        import socket

        import uvicorn

        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            app, lifespan=lifespan, log_level="critical", access_log=False, timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)

    async def __aenter__(self) -> Server:
        self._task = asyncio.create_task(self._server._serve([self._socket]))
        while not self._server.started:
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.should_exit = True
        await self._task
        self._socket.close()


# An episode


class Episode:
    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.found: list[str] = []
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.codes: Counter[str] = Counter()
        self.ports: list[int] = []
        self._start = time.monotonic()

    async def run(self) -> list[str]:
        plan, world = self.plan, self.world
        os.environ.update(
            CUMEM_SLEEP_ON_REQUEST=plan.policy,
            CUMEM_SLEEP_REQUEST_DEADLINE_S=str(DEADLINE_S),
            CUMEM_SLEEP_RETRY_AFTER_S="1",
            CUMEM_SLEEP_LOADING_METHODS="receive_weights",
        )
        os.environ.pop("CUMEM_SLEEP_ADMIN_TOKEN", None)
        if plan.token:
            os.environ["CUMEM_SLEEP_ADMIN_TOKEN"] = TOKEN
        await world.reset(plan)
        before = asyncio.all_tasks()
        async with AsyncExitStack() as stack:
            for number in range(plan.servers):
                app = world.gated(plan, number, self.found, self.counts)
                self.ports.append((await stack.enter_async_context(Server(app))).port)
            await self._act()
        await self._check_left(before)
        self.found += [f"{count} x {touch}" for touch, count in Counter(world.touches()).items()]
        return self.found

    async def _act(self) -> None:
        clients = [asyncio.create_task(self._person("client", steps)) for steps in self.plan.clients]
        operators = [asyncio.create_task(self._person("operator", steps)) for steps in self.plan.operators]
        await self._answered("operators", operators)
        await asyncio.wait(clients, timeout=DEADLINE_S + 1)
        if all(each.done() for each in clients):
            await self._quiet()
            await self._check_agreement()
            if self.plan.policy == "wake" and self.plan.gate:
                await self.world.mend()
                await self._check_junk()
        await self.world.mend()
        await self._wake_and_load()
        await self._answered("clients", clients)

    async def _person(self, who: str, steps: list[Step]) -> None:
        for step in steps:
            await asyncio.sleep(step.after_s)
            start, code = time.monotonic() - self._start, "nothing"
            try:
                code = await self._take(who, step)
            finally:
                now = time.monotonic() - self._start
                self.log.append(f"{start:6.3f} to {now:6.3f} {who} {step.how} {step.request} -> {code}")
                self.codes[f"{who} {code}"] += 1

    async def _take(self, who: str, step: Step) -> str:
        port, request = self.ports[step.server], step.request
        if step.how == "websocket":
            return str(await raw_http.websocket(port, request.target, request.headers, DEADLINE_S + 0.5))
        if step.how == "pipelined":
            received = await raw_http.pipelined(port, [request, Request("GET", "/version")])
            self._check_text(request, received)
            return str(received.count(b"HTTP/1.1 "))
        answer = await raw_http.send(port, request)
        if who == "client" and answer.code == 200:
            self._check_text(request, answer.body)
        is_read = request.target == COMPLETIONS and (
            not self.plan.key or KEY in request.headers.get("Authorization", "")
        )
        if answer.code == 0 and is_read and not request.leave:  # else vLLM may answer before it has read all
            self.found.append(f"the connection was closed without an answer: {request}")
        return str(answer.code)

    def _check_text(self, request: Request, body: bytes) -> None:
        if b" bad" in body:
            self.found.append(f"answered with what ran on memory that was not there: {request}")

    async def _answered(self, who: str, tasks: list[asyncio.Task[None]]) -> None:
        _, hanging = await asyncio.wait(tasks, timeout=BOUND_S)
        for task in hanging:
            task.cancel()
            self.found.append(f"{who}: no answer within {BOUND_S:g} s")
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    async def _ask(self, server: int) -> Answer:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        body = json.dumps({"model": "model", "prompt": "hello", "max_tokens": 2, "ignore_eos": True}).encode()
        try:
            request = Request("POST", COMPLETIONS, body, headers)
            return await asyncio.wait_for(raw_http.send(self.ports[server], request), BOUND_S)
        except asyncio.TimeoutError:
            return Answer(0, {}, b"")

    async def _quiet(self) -> None:
        """What clients that left have begun is over: a sleep may be among it."""
        until = time.monotonic() + BOUND_S
        while self.counts["outside of the gate"] and time.monotonic() < until:
            await asyncio.sleep(0.005)

    async def _check_agreement(self) -> None:
        """The gate serves if and only if the engine can."""
        for server in range(self.plan.servers):
            state = await self.world.state()
            if state["asleep"] != state["engine_asleep"]:
                await self._check_disagreement(server, state)
                continue
            if state["paused"]:
                return  # a request would be queued, or the gate hold it
            sleeps = bool(state["asleep"] or state["lost"])
            code = (await self._ask(server)).code
            self.codes[f"asked {'asleep' if sleeps else 'awake'} {code}"] += 1
            expected = (200,) if not sleeps else (503,) if self.plan.policy != "wake" else (200, 503)
            if code not in expected:
                self.found.append(f"with the engine at {state} the gate answered {code}")

    async def _check_disagreement(self, server: int, state: dict[str, Any]) -> None:
        """Workers and engine of two minds: nothing says that the model sleeps or serves, but a request may mend it."""
        for path in ("/is_sleeping", "/health", COMPLETIONS):
            if path == COMPLETIONS:
                code = (await self._ask(server)).code
            else:
                code = (await raw_http.send(self.ports[server], Request("GET", path))).code
            self.codes[f"disagreeing {path} {code}"] += 1
            is_mended = path == COMPLETIONS and code == 200 and self.plan.policy == "wake"
            if code != 503 and not is_mended:
                self.found.append(f"with the engine at {state} the gate answered {path} with {code}")

    async def _check_junk(self) -> None:
        """What vLLM answers without the model does not wake it."""
        await self._quiet()
        await raw_http.send(
            self.ports[0], Request("POST", "/sleep?level=1", headers={"Authorization": f"Bearer {TOKEN}"})
        )
        before = await self.world.state()
        json_type, key = {"Content-Type": "application/json"}, {"Authorization": f"Bearer {KEY}"}
        good = b'{"model": "model", "prompt": "hello", "max_tokens": 1}'
        junk = [
            *(
                Request("POST", path, b"{}", {**json_type, **key})
                for path in ("/nowhere", "/v1/models", "/metrics", "/tokenize")
            ),
            Request("POST", COMPLETIONS + "/", good, {**json_type, **key}),
            *([Request("POST", COMPLETIONS, good, json_type), Request("POST", COMPLETIONS, good)] * self.plan.key),
            Request("GET", COMPLETIONS, headers=key),
        ]
        for request in junk:
            answer = await asyncio.wait_for(raw_http.send(self.ports[0], request), BOUND_S)
            if before["asleep"] and not (await self.world.state())["asleep"]:
                self.found.append(f"woken by {request}, answered {answer.code}")
                return

    async def _wake_and_load(self) -> None:
        codes = {}
        for server in range(self.plan.servers):
            load = '{"method": "receive_weights"}'  # the draft model, too
            for path, body in (("/wake_up", ""), ("/resume", ""), ("/reload_weights", ""), ("/collective_rpc", load)):
                if path == "/collective_rpc" and not self.plan.draft:
                    continue
                try:
                    codes[path] = await asyncio.wait_for(self._changed(server, path, body.encode()), BOUND_S)
                except asyncio.TimeoutError:
                    codes[path] = 0
            answer = await self._ask(server)
            if answer.code != 200 or b" good" not in answer.body:
                state = await self.world.state()
                self.found.append(
                    f"after wake and reload {codes} it answers {answer.code} {answer.body[:200]!r}; {state}"
                )

    async def _changed(self, server: int, path: str, body: bytes) -> int:
        """The answer to a call, once no other server is at one."""
        while True:
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            answer = await raw_http.send(self.ports[server], Request("POST", path, body, headers))
            if answer.code != 409 or b"another API server" not in answer.body:
                return answer.code

    async def _check_left(self, before: set[asyncio.Task[Any]]) -> None:
        until = time.monotonic() + BOUND_S
        while (
            left := {each for each in asyncio.all_tasks() - before if _is_of_gate(each)}
        ) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self.found += [f"left behind: {each.get_coro()}" for each in left]
        self.found += [f"left {name}: {count} handlers" for name, count in self.counts.items() if count]


def _is_of_gate(task: asyncio.Task[Any]) -> bool:
    """Not one of vLLM's own, such as a tokenizer's, which it starts with the first request and keeps."""
    file = getattr(getattr(task.get_coro(), "cr_code", None), "co_filename", "")
    return "cumem_sleep" in file or "/vllm/" not in file


async def run(seeds: Callable[[], int | None], servers: int, report: Callable[[str], None]) -> int:
    """Episodes until there are no more seeds; returns how many found something."""
    bad = number = 0
    codes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        import watched_server

        watched_server.prepare_process(pathlib.Path(name))
        os.environ["WATCHED_WORKER_REFUSES_NOTHING"] = "1"
        async with AsyncExitStack() as stack:
            world = await World.make(pathlib.Path(name), stack)
            while (seed := seeds()) is not None:
                number += 1
                plan = Chance(seed, servers, world.paths).plan()
                episode = Episode(world, plan)
                if found := await episode.run():
                    bad += 1
                    events = "\n".join(f"    {line}" for line in sorted(episode.log))
                    report(f"seed {seed}:\n" + "\n".join(f"  FOUND {each}" for each in found) + f"\n{plan}\n{events}\n")
                codes += episode.codes
            if not bad and servers == 1 and not await _sees(world):
                report("the oracle is blind: it finds nothing without the gate, either")
                bad = 1
    report(f"{number} episodes, {bad} with findings; {dict(sorted(codes.items()))}")
    return bad


async def _sees(world: World) -> bool:
    for seed in range(20):
        plan = Chance(seed, 1, world.paths).plan()
        plan.gate = False
        await Episode(world, plan).run()
        if world.touches():
            return True
    return False


def main(report: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="the first episode's; default: by the clock")
    parser.add_argument("--times", type=int, help="this seed so many times, and no other")
    parser.add_argument("--servers", type=int, choices=(1, 2), default=1, help="API servers of one vLLM")
    parser.add_argument("--seconds", type=float, default=60.0, help="new episodes begin until then")
    options = parser.parse_args()
    first = int(time.time()) if options.seed is None else options.seed
    taken: list[int] = []
    started: list[float] = []

    def seeds() -> int | None:
        started.append(time.monotonic())
        if options.times is not None:
            taken.append(first)
            return first if len(taken) <= options.times else None
        taken.append(first + len(taken))
        return taken[-1] if started[-1] - started[0] < options.seconds else None

    return 1 if asyncio.run(run(seeds, options.servers, report)) else 0


if __name__ == "__main__":
    sys.exit(main(lambda text: print(text, flush=True)))
