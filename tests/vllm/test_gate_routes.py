"""Which request is what: the gate goes by the route that the server's own router takes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from fake_vllm import FakeEngine, FakeVllm
from gate_client import TOKEN, Serve, asleep

from cumem_sleep.vllm import SleepGate
from cumem_sleep.vllm.routes import NEED_ADMIN_TOKEN, RouteKind, Routes
from cumem_sleep.vllm.sleeping_model import GatePhase

pytestmark = pytest.mark.usefixtures("gate_environment")

ODD = ("{}\n", "/{}", "{}\r", "{}\x00", "/.{}", "{}\u2028", "\\{}", "http://host{}", "/x/..{}", "{}\x7f", " {}")


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/wake", "/v1/completions", "/health", "/no/such/path"])
async def test_a_path_that_can_be_read_in_two_ways_is_refused(serve: Serve, odd: str, path: str) -> None:
    client = serve(admin_token=TOKEN)
    for method in ("POST", "GET", "DELETE"):
        response = await client.request(method, "", path=odd.format(path), key=TOKEN)
        assert response.code in (400, 404)
        assert response.code == 400 or odd == " {}", "a space is only a letter"
    assert client.engine.calls == []


@pytest.mark.parametrize("raw", [b"/%2Fsleep", b"/v1%2fcompletions", b"/%5csleep"])
async def test_encoded_slashes_are_refused(serve: Serve, raw: bytes) -> None:
    client = serve()
    response = await client.post("", path="/sleep", raw_path=raw)
    assert response.code == 400
    assert "slash" in response.error["message"]
    assert client.engine.calls == []


async def test_an_odd_path_of_a_websocket_is_refused(serve: Serve) -> None:
    client = serve()
    socket = client.begin("", "", type="websocket", path="/v1/realtime\n")
    await socket.response()
    assert socket.sent[-1]["code"] == 1008
    assert client.engine.calls == []


# A real router


@pytest.fixture
def server() -> Any:
    """FastAPI with vLLM's routes, each of which records that it was reached."""
    fastapi = pytest.importorskip("fastapi", reason="needs FastAPI (in vLLM's environments)")
    app = fastapi.FastAPI()
    app.state.engine_client, app.state.reached = FakeEngine(), []
    included, mounted = fastapi.APIRouter(), fastapi.FastAPI()

    def reached(path: str) -> Any:
        async def endpoint() -> dict[str, str]:
            app.state.reached.append(path)
            return {"reached": path}

        return endpoint

    for path in ("/sleep", "/wake_up", "/collective_rpc", "/abort_requests", "/adapters"):
        included.post(path)(reached(path))
    included.delete("/adapters/{adapter_name}")(reached("DELETE"))
    included.put("/plugins_own")(reached("PUT"))
    app.include_router(included)
    app.get("/server_info")(reached("/server_info"))
    app.post("/v1/completions")(reached("/v1/completions"))
    app.post("/v1/responses/{response_id}/cancel")(reached("cancel"))
    mounted.post("/sleep")(reached("mounted"))
    mounted.get("/look")(reached("look"))
    app.mount("/mounted", mounted)
    app.add_middleware(SleepGate)
    return app


async def reach(app: Any, method: str, path: str, key: str = "", body: bytes = b'{"method": "x"}', **scope: Any) -> int:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {
        **{"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers, "root_path": ""},
        **{"scheme": "http", "server": ("host", 80), "http_version": "1.1", **scope},
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


def variants(path: str) -> list[str]:
    """Other ways to write a path, some of which a router takes for it."""
    others = [odd.format(path) for odd in ODD] + [path + "/", path + "//", path.upper(), path + "?", path + ";x=1"]
    return [path, *others, f"/api{path}", f"/api/{path}", f"/api{path}\n", f"/mounted{path}", f"/mounted/{path}"]


@pytest.mark.parametrize("root", ["", "/api", "/api/", "/"])
@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/collective_rpc", "/abort_requests", "/adapters", "/wake"])
async def test_no_way_to_write_a_path_reaches_it_without_the_token(
    server: Any, root: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_ADMIN_TOKEN", TOKEN)
    server.root_path = root
    for variant in variants(path):
        await reach(server, "POST", variant)
        assert server.state.reached == server.state.engine_client.calls == [], variant
    assert await reach(server, "DELETE", f"{root.rstrip('/') * (root == '/api')}/adapters/x") == 401
    assert await reach(server, "PUT", "/plugins_own") == 401, "a route that is not known may do anything"
    assert await reach(server, "POST", "/mounted/sleep") == 401
    assert await reach(server, "GET", "/server_info") == 401
    assert server.state.reached == []


@pytest.mark.parametrize(
    ("method", "path", "template", "kind", "redirects"),
    [
        ("POST", "/sleep", "/sleep", RouteKind.CHANGES, False),
        ("POST", "/sleep/", "/sleep", RouteKind.CHANGES, True),
        ("GET", "/sleep", "/sleep", RouteKind.NOTHING, False),
        ("POST", "/v1/responses/r-1/cancel", "/v1/responses/{response_id}/cancel", RouteKind.PASSES, False),
        ("POST", "/v1/responses/r/1/cancel", "", RouteKind.NOTHING, False),
        ("PUT", "/plugins_own", "/plugins_own", RouteKind.UNKNOWN, False),
        ("POST", "/mounted/sleep", "/mounted/sleep", RouteKind.UNKNOWN, False),
        ("GET", "/mounted/look", "/mounted/look", RouteKind.PASSES, False),
        ("POST", "/nothing", "", RouteKind.NOTHING, False),
    ],
)
def test_the_route_that_starlette_takes(
    server: Any, method: str, path: str, template: str, kind: RouteKind, redirects: bool
) -> None:
    taken = Routes().take(server, {"type": "http", "method": method, "path": path, "headers": []})
    assert (taken.template, taken.kind, taken.redirects) == (template, kind, redirects)


def test_a_server_without_a_router_that_can_be_read_is_closed() -> None:
    assert Routes().take(object(), {"type": "http", "method": "POST", "path": "/sleep"}).kind is RouteKind.UNKNOWN
    assert RouteKind.UNKNOWN in NEED_ADMIN_TOKEN


# What wakes


@pytest.mark.parametrize("policy", ["wait", "wake"])
@pytest.mark.parametrize(
    "target",
    [
        *("POST /nonsense", "POST /v1/models", "POST /metrics", "PUT /v1/completions", "DELETE /v1/completions"),
        *("POST /v1", "PATCH /nonsense", "POST /v1/nothing"),
    ],
)
async def test_what_no_route_takes_wakes_nothing_and_is_not_held(serve: Serve, target: str, policy: str) -> None:
    method, path = target.split()
    client = await asleep(serve, on_request=policy)
    assert (await client.request(method, path)).code in (404, 405)
    assert client.engine.asleep
    assert client.engine.count("wake_up") == 0


async def test_what_is_not_known_to_run_the_model_is_held_but_wakes_nothing(serve: Serve) -> None:
    client = await asleep(serve, on_request="wake")
    request = await client.under_way("/some_future_path")
    assert not request.task.done()
    assert client.engine.asleep
    await client.post("/wake_up")
    assert (await request.response()).code == 200


@pytest.mark.parametrize("path", ["/v1/completions/", "/some_future_path/", "/v1/load_lora_adapter/", "/score/"])
async def test_a_redirect_needs_no_memory(serve: Serve, policy: str, path: str) -> None:
    client = await asleep(serve, on_request=policy)
    assert (await client.post(path)).code == 307
    assert client.engine.asleep
    assert client.engine.count("wake_up") == 0


async def test_a_body_that_never_comes_wakes_nothing(serve: Serve) -> None:
    client = await asleep(serve, on_request="wake", request_deadline_s=0.05)
    assert (await client.begin("POST", "/v1/completions", slow=True).response()).code == 503
    assert client.engine.asleep


@pytest.mark.parametrize("path", ["/v1/completions", "/v2/embed", "/inference/v1/generate"])
async def test_without_a_key_the_gate_itself_answers_401_while_asleep(serve: Serve, path: str, policy: str) -> None:
    """VLLM's own check can be misled, by a Host header before vLLM 0.26."""

    class Misled(FakeVllm):
        async def _route(self, scope: Any, path: str, body: bytes) -> tuple[int, Any]:
            self.api_keys = ()
            return await super()._route(scope, path, body)

    client = await asleep(serve, 1, Misled(api_keys=("key",)), on_request=policy)
    for key in ("", "other"):
        assert (await client.post(path, key=key)).code == 401
    assert client.engine.count("generate") == 0
    assert client.gate.model.phase is GatePhase.ASLEEP


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/sleep"])
@pytest.mark.parametrize("asleep", [True, False])
async def test_the_admin_token_is_enough_where_vllm_wants_a_key(serve: Serve, path: str, asleep: bool) -> None:
    """There is only one header for both."""
    client = serve(FakeVllm(api_keys=("key", "other-key")), admin_token="token", on_request="wait")
    if asleep:
        await client.post("/sleep", key="token")
    for key in ("", "key", "other-key", "wrong"):
        assert (await client.post(path, key=key)).code == 401
    request = client.begin("POST", path, key="token")
    await client.post("/wake", key="token")
    assert (await request.response()).code == 200
    assert (await client.post("/v1/completions", key="token")).code == 401, "it is no key for the model"


@pytest.mark.slow
async def test_what_clients_write_is_not_kept_for_good(serve: Serve) -> None:
    def request(number: int, where: str, nbytes: int) -> dict[str, Any]:
        text = f"{number}-{'x' * nbytes}"
        headers = [(b"host", text.encode())] if where == "host" else []
        names = {name: f"/{text}" for name in ("path", "root_path", "method") if name == where}
        return {"type": "http", "method": "POST", "path": "/sleep", "headers": headers, **names}

    routes, vllm = Routes(), serve().vllm
    routes.take(vllm, request(0, "host", 0))
    tracemalloc.start()
    try:
        for where in ("host", "path", "root_path", "method"):
            for number in range(3000):
                routes.take(vllm, request(number, where, 400))
            for number in range(60):
                routes.take(vllm, request(number, where, 1 << 20))
            assert tracemalloc.get_traced_memory()[0] < 4 << 20, where
        assert routes.take(vllm, request(0, "host", 1 << 20)).kind is RouteKind.CHANGES
    finally:
        tracemalloc.stop()
