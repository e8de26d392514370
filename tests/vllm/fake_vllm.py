"""A stand-in for `vllm serve`: an ASGI app and an engine client that behave, and crash, as vLLM's do."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from enum import Enum
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest

TAGS = frozenset(("weights", "kv_cache"))


class Crash(BaseException):
    """The GPU met unmapped memory. No handler may swallow it."""


class FakeEngine:
    """vLLM 0.33's engine client: its state, the calls it got, and what the next calls wait for or fail with."""

    plugin = True

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.asleep: set[str] = set()
        self.scheduler_paused = False
        self.weights = "good"
        self.backed_up = False
        self.forgets = {0, 1}  # the ranks that forget when they are told to
        self.forgot: set[int] = set()
        self.place = {"vault": "", "lost": ""}
        self.dead = False
        self.checkpointed = False
        self.why_not_deeper = ""
        self.leaves_out: list[str] = []  # what the next loads do not load, one each, as workers say it
        self.not_loaded = ""
        self.stuck = False  # half-way: the checkpoint that failed cannot be taken back
        self.fails: dict[str, list[BaseException]] = defaultdict(list)
        self.waits: dict[str, asyncio.Event] = {}
        self.entered: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.queue: list[str] = []  # requests that came while the scheduler was paused
        self.aborted: list[str] = []
        self.engine_core = SimpleNamespace(add_request_async=self._add_request)
        self.unfinished = 0  # requests that the frontend knows of
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self.unfinished)

    async def _called(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments) if arguments else name)
        if self.dead:
            raise RuntimeError("EngineCore encountered an issue")
        self.entered[name].set()
        if name in self.waits:
            await self.waits[name].wait()
        if self.fails[name]:
            raise self.fails[name].pop(0)

    def count(self, name: str) -> int:
        return sum(call == name or call[0] == name for call in self.calls)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.scheduler_paused = True
        await self._called("sleep", level, mode)
        if level > 0 and "weights" not in self.asleep:
            self._sleep(level)

    def _sleep(self, level: int) -> None:
        self.asleep = set(TAGS)
        self.backed_up, self.forgot = level == 1, set()
        if level != 1:
            self.weights, self.not_loaded = "garbage", "every weight"

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        await self._called("wake_up", tags)
        wanted = set(self.asleep if tags is None else tags) - {"scheduling"}
        if wanted <= self.asleep:
            self.asleep -= wanted
            self.checkpointed = self.checkpointed and not wanted
        if not self.asleep:
            self.scheduler_paused = False
        return not self.asleep

    async def release_kv_cache_memory(self) -> None:
        await self._called("release_kv_cache_memory")
        if not self.scheduler_paused:
            raise RuntimeError("requires a completed pause first")
        self.asleep.add("kv_cache")

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        await self._called("pause")
        self.scheduler_paused = True
        if mode == "abort":
            self.queue.clear()

    async def _add_request(self, request: Any) -> None:
        """What reaches the engine while its scheduler is paused is queued, and runs when that resumes."""
        if self.asleep:
            self.queue.append(request.request_id)

    async def abort(self, request_id: str, internal: bool = False) -> None:
        assert internal, "the id is the engine's own"
        self.aborted.append(request_id)

    async def resume_generation(self) -> None:
        await self._called("resume")
        self.scheduler_paused = False
        if self.asleep:
            raise Crash("scheduler resumed on unmapped memory")

    async def is_paused(self) -> bool:
        return self.scheduler_paused

    async def is_sleeping(self) -> bool:
        await self._called("is_sleeping")
        return self.scheduler_paused or bool(self.asleep)

    async def check_health(self) -> None:
        if self.dead:
            raise RuntimeError("EngineDeadError")

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        assert timeout is None, "vLLM's executors lose track of late answers"
        await self._called(method)
        if method == "cumem_sleep_status":
            if not self.plugin:
                raise RuntimeError(f"Call to collective_rpc method failed: Method {method!r} is not implemented.")
            return [self.status(0), self.status(1)]
        if method == "cumem_sleep_deepen":
            return [self._deepen(0), self._deepen(1)]
        if method == "cumem_sleep_forget":
            self._forget(*args)
        if method in ("reload_weights", "update_weights", "refit", "load_it"):  # the last two are a trainer's own
            self.write_weights()
        return [None]

    def _deepen(self, rank: int) -> dict[str, Any]:
        if not self.plugin:
            raise RuntimeError("Call to collective_rpc method failed: Method 'cumem_sleep_deepen' is not implemented.")
        why = self.why_not_deeper or ("" if self.asleep == TAGS else "something is awake")
        self.checkpointed = self.checkpointed or self.stuck or not why
        return {"rank": rank, "checkpointed": self.checkpointed, "why": why}

    def _forget(self, tags: Any = None) -> None:
        if not self.plugin:
            raise RuntimeError("Call to collective_rpc method failed: Method 'cumem_sleep_forget' is not implemented.")
        if "weights" in self.asleep and (tags is None or "weights" in tags):
            self.forgot |= self.forgets
            if self.forgot:
                self.weights, self.not_loaded = "garbage", "every weight"
        if self.forgets != {0, 1}:
            raise RuntimeError("RankFailed: forget: a rank failed")

    def write_weights(self) -> None:
        if "weights" in self.asleep:
            raise Crash("weights written while they sleep")
        self.not_loaded = self.leaves_out.pop(0) if self.leaves_out else ""
        self.weights = "garbage" if self.not_loaded else "good"

    def status(self, rank: int) -> dict[str, Any]:
        def usage(tag: str, nbytes: int, backed_up: int) -> dict[str, int]:
            asleep = tag in self.asleep
            return {
                "segments": 2,
                "bytes": nbytes,
                "mapped_bytes": 0 if asleep else nbytes,
                "host_bytes": backed_up,
                "vault_bytes": backed_up if self.place["vault"] else 0,
                "shared_bytes": backed_up // 3 if self.place["vault"] else 0,
                "kept_bytes": 0,
                "asleep_segments": 2 if asleep else 0,
                "backed_up_bytes": backed_up,
            }

        return {
            "rank": rank,
            "devices": [rank + 4],
            "simulated": True,
            "usage": {
                "weights": usage("weights", 600, 600 if self.backed_up and rank not in self.forgot else 0),
                "kv_cache": usage("kv_cache", 400, 0),
            },
            "place": self.place,
            "operations": {
                "sleep": {
                    "count": 3,
                    "failures": 1,
                    "seconds": 2.5,
                    "phases": {"copy": 2.0, "unmap": 0.5},
                    "bytes": {"freed": 1000, "copied": 600},
                }
            },
            "device_used_bytes": 50,
            "device_total_bytes": 2000,
            "checkpointed": self.checkpointed,
            "not_loaded": "" if "weights" in self.asleep else self.not_loaded,
        }

    async def generate(self) -> str:
        if self.dead:
            raise RuntimeError("EngineDeadError")
        if "tokenize" in self.waits:
            self.entered["tokenize"].set()
            await self.waits["tokenize"].wait()
        self.unfinished += 1
        try:
            await self.engine_core.add_request_async(SimpleNamespace(request_id=f"request-{len(self.calls)}"))
            if self.asleep:
                raise Crash("a request ran on unmapped memory")
            await self._called("generate")
        finally:
            self.unfinished -= 1
        if self.asleep:
            raise Crash("memory was pulled from under a request")
        return "queued" if self.scheduler_paused else self.weights


class AnotherClient:
    """A second API server's client of an engine."""

    generate = FakeEngine.generate

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.engine_core = SimpleNamespace(add_request_async=engine._add_request)
        self.unfinished = 0
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self.unfinished)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class SlowToAnswer(FakeEngine):
    """Some answers to whether it sleeps are on their way for long."""

    def __init__(self) -> None:
        super().__init__()
        self.on_their_way: list[asyncio.Event] = []

    async def is_sleeping(self) -> bool:
        answer = await super().is_sleeping()
        if self.on_their_way:
            await self.on_their_way.pop(0).wait()
        return answer


class Match(Enum):
    """Starlette's."""

    NONE = 0
    PARTIAL = 1
    FULL = 2


class FakeRoute:
    """Starlette's route, with the expression by which a path that ends in a newline matches."""

    def __init__(self, methods: str, path: str) -> None:
        self.methods = set(methods.split())
        self.path = self.path_format = path
        self._regex = re.compile("^" + re.sub(r"{\w+}", "[^/]+", path) + "$")

    def matches(self, scope: Any) -> tuple[Match, dict[str, Any]]:
        if not self._regex.match(route_path(scope)):
            return Match.NONE, {}
        return Match.FULL if scope.get("method", "WEBSOCKET") in self.methods else Match.PARTIAL, {}


def route_path(scope: Any) -> str:
    """Starlette's `get_route_path`."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root) and path[len(root) :].startswith("/") else path


RUNS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/score", "/invocations", "/inference/v1/generate"),
    "/generate",
    *("/v2/embed", "/some_future_path", "/v1/load_lora_adapter", "/scale_elastic_ep", "/v1/responses"),
)
OTHERS = (
    *("/tokenize", "/v1/chat/completions/render", "/v1/messages/count_tokens", "/fault_tolerance/apply", "/ping"),
    *("/v1/responses/{response_id}/cancel", "/adapters", "/start_profile"),
)
DEV = (
    *("/sleep", "/wake_up", "/release_kv_cache_memory", "/pause", "/resume", "/collective_rpc", "/update_weights"),
    *("/finish_weight_update", "/start_weight_update", "/start_draft_weight_update", "/weight_checker"),
    *("/reset_prefix_cache", "/abort_requests", "/init_weight_transfer_engine", "/update_weight_version"),
)
LOOKS = ("/health", "/ping", "/v1/models", "/version", "/metrics", "/load", "/is_sleeping", "/server_info")


class FakeVllm:
    """What is below the gate: routes of `vllm serve`, in dev mode or not."""

    def __init__(self, engine: Any = None, dev_mode: bool = True, api_keys: tuple[str, ...] = ()) -> None:
        self.engine: Any = engine or FakeEngine()
        self.dev_mode = dev_mode
        self.api_keys = api_keys
        self.seen: list[str] = []
        self.bodies: list[bytes] = []
        self.state = SimpleNamespace(engine_client=self.engine, args=SimpleNamespace(api_key=None, api_server_count=1))
        posts = (*RUNS, *OTHERS, *(DEV if dev_mode else ()))
        routes = [FakeRoute("POST", path) for path in posts] + [FakeRoute("GET HEAD", path) for path in LOOKS]
        routes += [FakeRoute("WEBSOCKET", "/v1/realtime"), FakeRoute("DELETE", "/adapters/{adapter_name}")]
        self.router = SimpleNamespace(routes=routes, redirect_slashes=True)
        self.user_middleware = [SimpleNamespace(kwargs={"tokens": list(api_keys)})] if api_keys else []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self.seen.append("lifespan")
            return
        path = route_path(scope)
        self.seen.append(f"{scope.get('method', 'WEBSOCKET')} {path}")
        if scope["type"] == "websocket":
            assert (await receive())["type"] == "websocket.connect"
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "text": await self.engine.generate()})
            return
        body, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        code, content = await self._route(scope, path, body)
        await send({"type": "http.response.start", "status": code, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})

    def _matches(self, scope: Any) -> set[Match]:
        return {each.matches(scope)[0] for each in self.router.routes}

    async def _route(self, scope: Any, path: str, body: bytes) -> tuple[int, Any]:
        headers = dict(scope["headers"])
        query = parse_qs(scope["query_string"].decode(), keep_blank_values=True)
        given = headers.get(b"authorization", b"").decode().removeprefix("Bearer ")
        if self.api_keys and path.startswith("/v1") and given not in self.api_keys:
            return 401, {"error": "Unauthorized"}
        route = f"{scope['method']} {path}"
        if route in ("GET /health", "GET /ping", "POST /ping"):
            return (503 if self.engine.dead else 200), None
        matches = self._matches(scope)
        if matches == {Match.NONE}:
            redirects = path != "/" and self._matches({**scope, "path": scope["path"].rstrip("/")}) != {Match.NONE}
            return (307, {"path": path}) if redirects else (404, {"detail": "Not Found"})
        if Match.FULL not in matches and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            return 405, {"detail": "Method Not Allowed"}
        if any(each.path in OTHERS and each.matches(scope)[0] is Match.FULL for each in self.router.routes):
            return 200, {"path": path}
        if route.startswith("POST /v1/") or route in ("POST /score", "POST /some_future_path"):
            return 200, {"text": await self.engine.generate()}
        if scope["method"] in ("GET", "HEAD", "OPTIONS", "DELETE") or path == "/scale_elastic_ep":
            return 200, {"path": path}
        return await self._dev_route(path, query, body) if self.dev_mode else (404, {"detail": "Not Found"})

    async def _dev_route(self, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        engine = self.engine
        if path == "/sleep":
            level = query.get("level", ["1"])[0]
            if level not in ("0", "1", "2"):
                return 422, {"detail": "level"}
            await engine.sleep(int(level), query.get("mode", ["abort"])[0])
        elif path == "/wake_up":
            await engine.wake_up(query.get("tags"))
        elif path == "/release_kv_cache_memory":
            await engine.release_kv_cache_memory()
        elif path == "/pause":
            await engine.pause_generation()
        elif path == "/resume":
            await engine.resume_generation()
        elif path == "/collective_rpc":
            await engine.collective_rpc(json.loads(body)["method"])
        elif path in ("/update_weights", "/finish_weight_update"):
            engine.write_weights()
        elif path not in (
            "/start_weight_update",
            "/start_draft_weight_update",
            "/weight_checker",
            "/reset_prefix_cache",
            "/abort_requests",
            "/init_weight_transfer_engine",
        ):
            return 404, {"detail": "Not Found"}
        return 200, {"status": path}


class Response:
    """What came back."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages

    @property
    def code(self) -> int:
        return int(next(each["status"] for each in self.messages if each["type"] == "http.response.start"))

    @property
    def headers(self) -> dict[str, str]:
        start = next(each for each in self.messages if each["type"] == "http.response.start")
        return {name.decode(): value.decode() for name, value in start["headers"]}

    @property
    def body(self) -> Any:
        return json.loads(b"".join(each.get("body", b"") for each in self.messages))

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error, its shape checked."""
        error: dict[str, Any] = self.body["error"]
        assert set(self.body) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.code
        assert self.headers["content-type"] == "application/json"
        return error


class Client:
    """Sends requests to a gate in front of a fake vLLM."""

    def __init__(self, gate: Any, vllm: FakeVllm) -> None:
        self.gate = gate
        self.vllm = vllm
        self.engine = vllm.engine

    def begin(
        self, method: str, target: str, body: bytes = b"{}", key: str = "", slow: bool = False, **scope: Any
    ) -> Held:
        """A `slow` one sends half of its body, and the rest when it is told to `go_on`."""
        path, _, query = target.partition("?")
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope = {
            **{"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers},
            **{"app": self.vllm, "root_path": ""},
            **scope,
        }
        if scope["type"] == "websocket":
            del scope["method"]
        return Held(self.gate, scope, body, slow)

    async def request(self, method: str, target: str, body: bytes = b"{}", key: str = "", **scope: Any) -> Response:
        return await self.begin(method, target, body, key, **scope).response()

    async def post(self, target: str, body: bytes = b"{}", key: str = "", **scope: Any) -> Response:
        return await self.request("POST", target, body, key, **scope)

    async def start(self) -> list[dict[str, Any]]:
        """A server's start; what the gate says of it, if it fails."""
        said: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            said.append(message)

        await self.gate({"type": "lifespan", "app": self.vllm}, receive, send)
        return said

    async def under_way(self, target: str, body: bytes = b"{}", key: str = "", **more: Any) -> Held:
        """A POST that has come as far as it comes by itself."""
        held = self.begin("POST", target, body, key, **more)
        await until_idle()
        return held

    async def fails(self, call: str, why: str, target: str) -> None:
        """A POST during which the engine's next such call fails, and with it vLLM's route."""
        self.engine.fails[call] = [RuntimeError(why)]
        with pytest.raises(RuntimeError, match=why):
            await self.post(target)

    async def get(self, target: str, **scope: Any) -> Response:
        return await self.request("GET", target, **scope)

    async def ask(self, key: str = "") -> Response:
        """An inference request."""
        return await self.post("/v1/completions", key=key)


class Held:
    """A request under way."""

    def __init__(self, gate: Any, scope: Any, body: bytes, slow: bool = False) -> None:
        self._rest = {"type": "http.request", "body": body[len(body) // 2 :], "more_body": False}
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.cancelled_after_answers: list[bool] = []  # for each read that was cancelled: was there an answer by then?
        if scope["type"] == "websocket":
            self._incoming.put_nowait({"type": "websocket.connect"})
        else:
            half = len(body) // 2
            self._incoming.put_nowait({"type": "http.request", "body": body[:half], "more_body": True})
            if not slow:
                self.go_on()
        self._kind, self._received = scope["type"], False
        self.task = asyncio.ensure_future(gate(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        try:
            message = await self._incoming.get()
        except asyncio.CancelledError:
            self.cancelled_after_answers.append(bool(self.sent))
            raise
        self._received = True
        return message

    async def _send(self, message: Any) -> None:
        assert self._kind == "http" or self._received, "a websocket is connected before anything is sent"
        self.sent.append(message)

    def go_on(self) -> None:
        """The rest of the body comes."""
        self._incoming.put_nowait(self._rest)

    def leave(self) -> None:
        """The client disconnects."""
        self._incoming.put_nowait({"type": f"{self._kind}.disconnect"})

    async def response(self) -> Response:
        await asyncio.wait_for(self.task, 120)
        return Response(self.sent)


async def until_idle() -> None:
    """Lets every task run until it waits for something that does not come by itself."""
    for _ in range(100):
        await asyncio.sleep(0)
