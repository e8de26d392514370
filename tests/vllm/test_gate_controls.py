"""Sleep without development mode: what the gate answers itself, with a token or on a listener of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from fake_vllm import TAGS, Client, FakeEngine, FakeVllm, until_idle
from gate_client import TOKEN, Serve, two_servers

from cumem_sleep import InvalidArgument
from cumem_sleep.settings import GateSettings
from cumem_sleep.vllm import SleepGate, admin_listener, siblings
from cumem_sleep.vllm.control_routes import CONTROLS
from cumem_sleep.vllm.routes import STATUS


@pytest.fixture(autouse=True)
def no_development_mode(gate_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE")

    async def reset(self: Any, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        self.calls.append(("reset_prefix_cache", reset_running_requests, reset_external))
        return True

    monkeypatch.setattr(FakeEngine, "reset_prefix_cache", reset, raising=False)


async def test_with_a_token_the_gate_answers_itself(serve: Serve) -> None:
    client = serve(FakeVllm(dev_mode=False), admin_token=TOKEN)
    slept = (await client.post("/sleep?level=2", key=TOKEN)).body
    assert slept == {"status": "sleeping", "level": 2, "weights": "dropped", "kv_cache": "cleared"}
    assert (await client.get("/is_sleeping")).body["is_sleeping"] is True
    assert (await client.ask()).code == 503
    assert (await client.post("/reload_weights", key=TOKEN)).code == 409
    woken = await client.post("/wake", b'{"tags": ["weights"]}', key=TOKEN)
    assert woken.body == {"status": "sleeping", "tags": ["weights"]}
    assert (await client.post("/reload_weights", key=TOKEN)).body == {"status": "weights reloaded"}
    assert (await client.post("/wake_up/", key=TOKEN)).body == {"status": "awake", "tags": None}
    assert (await client.ask()).body == {"text": "good"}
    assert (await client.post("/pause?mode=keep&clear_cache=0", key=TOKEN)).body == {"status": "paused"}
    assert (await client.post("/resume", key=TOKEN)).body == {"status": "resumed"}
    assert (await client.post("/reset_prefix_cache", b'{"reset_external": true}', key=TOKEN)).body == {"success": True}
    assert client.engine.calls[-1] == ("reset_prefix_cache", False, True)
    assert (await client.post("/reset_prefix_cache?all=1", key=TOKEN)).code == 400
    assert not [each for each in client.vllm.seen if each.split()[1] in CONTROLS]


async def test_an_error_of_the_engine_is_a_typed_answer(serve: Serve) -> None:
    client = serve(FakeVllm(dev_mode=False), admin_token=TOKEN)
    client.engine.fails["sleep"] = [RuntimeError("no host memory")]
    failed = await client.post("/sleep", key=TOKEN)
    assert (failed.code, failed.error["message"]) == (500, "/sleep failed: no host memory")
    assert (await client.post("/wake", key=TOKEN)).code == 200
    assert (await client.ask()).code == 200


@pytest.mark.parametrize("dev_mode", [False, True])
async def test_the_workers_status_is_for_whoever_may_change_the_sleep(
    serve: Serve, dev_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dev_mode:
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    client = serve(FakeVllm(dev_mode=dev_mode), admin_token=TOKEN)
    for method, path, key in (("GET", STATUS, ""), ("GET", f"{STATUS}/", "wrong"), ("GET", f"{STATUS}?x", "")):
        assert (await client.request(method, path, key=key)).code == 401
    assert (await client.request("POST", STATUS, key=TOKEN)).code in (404, 405)
    assert client.engine.calls == []
    for asleep in (False, True):
        status = (await client.request("GET", STATUS, key=TOKEN)).body
        workers = status["results"]
        assert (status["active"], status["why_not"]) == (True, "")
        assert [worker["rank"] for worker in workers] == [0, 1]
        assert (workers[0]["usage"]["weights"]["mapped_bytes"] == 0) == asleep
        assert (await client.post("/sleep", key=TOKEN)).code == 200
    client.engine.fails["cumem_sleep_status"] = [RuntimeError("no answer")]
    assert (await client.request("GET", STATUS, key=TOKEN)).code == 200, "the first answer may be lost"
    client.engine.fails["cumem_sleep_status"] = [RuntimeError("no answer")] * 2
    assert (await client.request("GET", STATUS, key=TOKEN)).code == 503
    client.engine.plugin = False
    for variable, value in (("VLLM_PLUGINS", "others"), ("CUMEM_SLEEP_DISABLE", "1")):
        monkeypatch.setenv(variable, value)
        status = (await client.request("GET", STATUS, key=TOKEN)).body
        assert status == {"results": [], "active": False, "why_not": f"{variable}={value}"}
        monkeypatch.delenv(variable)


async def test_without_a_token_and_development_mode_there_is_no_status(serve: Serve) -> None:
    client = serve(FakeVllm(dev_mode=False))
    assert (await client.get(STATUS)).code == 404
    assert client.engine.calls == []


# The listener


@asynccontextmanager
async def living(client: Client) -> AsyncIterator[list[dict[str, Any]]]:
    """A server's life; what it said of its start."""
    to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    to_server.put_nowait({"type": "lifespan.startup"})
    said: list[dict[str, Any]] = []
    ended, is_up = asyncio.Event(), asyncio.Event()

    async def lifespan(*_: Any) -> None:
        is_up.set()
        await ended.wait()

    async def send(message: Any) -> None:
        said.append(message)

    client.gate._app, vllm = lifespan, client.gate._app
    task = asyncio.ensure_future(client.gate({"type": "lifespan", "app": client.vllm}, to_server.get, send))
    await asyncio.wait({task, asyncio.ensure_future(is_up.wait())}, return_when=asyncio.FIRST_COMPLETED)
    client.gate._app = vllm
    try:
        yield said
    finally:
        ended.set()
        await task


async def ask(address: str, raw: bytes) -> bytes:
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address[len("unix:") :])
    else:
        reader, writer = await asyncio.open_connection(*address.split(":"))
    with contextlib.suppress(ConnectionError):
        writer.write(raw)
        await writer.drain()
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            answer += part
    writer.close()
    return answer


def request(target: str, method: str = "POST", key: str = "", body: bytes = b"", more: str = "") -> bytes:
    token = f"Authorization: Bearer {key}\r\n" if key else ""
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {target} HTTP/1.1\r\nHost: x\r\n{token}{length}{more}\r\n".encode() + body


def code(answer: bytes) -> int:
    return int(answer.split()[1])


@pytest.fixture
def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def place(tmp_path: pathlib.Path) -> str:
    return f"unix:{tmp_path}/admin"


async def test_a_socket_of_this_user_alone_needs_no_token(serve: Serve, place: str) -> None:
    client = serve(FakeVllm(dev_mode=False), admin=place)
    async with living(client) as said:
        assert stat.S_IMODE(os.stat(place[5:]).st_mode) == 0o600
        answer = await ask(place, request("/sleep?level=1"))
        assert code(answer) == 200
        assert b'{"status": "sleeping", "level": 1, ' in answer
        assert (await client.ask()).code == 503
        assert b'{"is_sleeping": true' in await ask(place, request("/is_sleeping", "GET"))
        assert b'{"results": [{"rank": 0' in await ask(place, request(STATUS, "GET"))
        assert code(await ask(place, request("/wake", body=b'{"tags": ["all"]}'))) == 400
        assert code(await ask(place, request("/wake", more="Connection: keep-alive\r\n"))) == 200
        assert (await client.ask()).code == 200
    assert said == []
    assert not os.path.exists(place[5:])


async def test_in_development_mode_it_is_the_only_way_as_well(
    serve: Serve, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    client = serve(admin=place, admin_token=TOKEN)
    async with living(client):
        assert (await client.post("/sleep", key=TOKEN)).code == 404
        assert code(await ask(place, request("/sleep"))) == 401
        assert code(await ask(place, request("/sleep", key=TOKEN))) == 200
        assert client.vllm.seen == ["POST /sleep"], "vLLM's own answer"
        assert code(await ask(place, request("/collective_rpc", key=TOKEN, body=b'{"method": "x"}'))) == 404
        assert (await client.post("/collective_rpc", b'{"method": "check_health"}', key=TOKEN)).code == 200


CHUNKED = "Transfer-Encoding: chunked\r\n"
BAD = {
    "another path": (request("/v1/completions", body=b"{}"), 404),
    "another method": (request("/sleep", "GET"), 404),
    "a path of two readings": (request("//sleep"), 400),
    "a target with a host": (request("http://x/sleep"), 400),
    "no HTTP": (b"\x16\x03\x01\x00\r\n\r\n", 400),
    "a long head": (request("/sleep", more=f"X: {'x' * 70_000}\r\n"), 431),
    "many headers": (request("/sleep", more="X: y\r\n" * 9_000), 431),
    "a long body": (request("/sleep", body=b"x" * 70_000), 413),
    "long chunks": (
        request("/sleep", more=CHUNKED) + b"8000\r\n" + b"x" * 0x8000 + b"\r\n",
        0,
    ),
    "two lengths": (request("/sleep", more="Content-Length: 1\r\nContent-Length: 2\r\n"), 400),
    "a bad level": (request("/sleep?level=9"), 400),
    "no JSON": (request("/sleep", body=b"{"), 400),
    "a websocket": (request("/sleep", "GET", more="Upgrade: websocket\r\nConnection: Upgrade\r\n"), 404),
    "half a body": (request("/sleep", more="Content-Length: 9\r\n") + b"{", 408),
    "half a head": (b"POST /sleep HTTP/1.1\r\nHost: x\r\n", 408),
    "silence": (b"", 408),
}


@pytest.mark.parametrize("what", BAD)
async def test_what_it_refuses_is_answered_in_time_and_changes_nothing(
    serve: Serve, place: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, expected = BAD[what]
    monkeypatch.setattr(admin_listener, "REQUEST_WITHIN_S", 0.3)
    client = serve(FakeVllm(dev_mode=False), admin=place)
    async with living(client):
        answer = await ask(place, raw)
        assert code(answer) == (expected or 408), answer
        assert b"application/json" in answer
        assert client.engine.asleep == set()
        assert client.vllm.seen == []
        assert code(await ask(place, request("/sleep"))) == 200


async def test_a_client_that_sends_for_ever_is_not_read_for_ever(serve: Serve, place: str) -> None:
    client = serve(FakeVllm(dev_mode=False), admin=place)
    async with living(client):
        _, writer = await asyncio.open_unix_connection(place[5:])
        writer.write(request("/sleep", more=CHUNKED))
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                writer.write(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
                await writer.drain()
                sent += 0x1000
        assert sent < 4 << 20, "what lies in buffers"
        writer.close()
        assert code(await ask(place, request("/sleep"))) == 200


@pytest.mark.parametrize("sent", [b"", b"POST /sleep HTTP/1.1\r\nHost: x\r\n"])
async def test_who_sends_no_whole_request_keeps_nobody_out(serve: Serve, free_port: str, sent: bytes) -> None:
    client = serve(FakeVllm(dev_mode=False), admin=free_port, admin_token=TOKEN)
    async with living(client):
        silent = []
        for number in range(3 * admin_listener.MOST_CONNECTIONS):
            silent.append(await asyncio.open_connection(*free_port.split(":")))
            silent[-1][1].write(sent)
            if number % 16 == 0:
                assert code(await ask(free_port, request("/is_sleeping", "GET", key=TOKEN))) == 200
        assert code(await silent[0][0].read()) == 503, "the one that has been there longest"
        for _, writer in silent:
            writer.close()


async def test_beyond_a_number_of_calls_it_says_so(serve: Serve, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_listener, "MOST_CONNECTIONS", 3)
    client = serve(FakeVllm(dev_mode=False), admin=place)
    client.engine.waits["sleep"] = asyncio.Event()
    async with living(client):
        calls = [asyncio.ensure_future(ask(place, request("/sleep"))) for _ in range(3)]
        await client.engine.entered["sleep"].wait()
        await until_idle()
        assert code(await ask(place, request("/sleep"))) == 503
        client.engine.waits["sleep"].set()
        assert [code(await call) for call in calls] == [200] * 3


async def test_a_client_that_leaves_before_its_turn_changes_nothing(serve: Serve, place: str) -> None:
    client = serve(FakeVllm(dev_mode=False), admin=place)
    client.engine.waits["sleep"] = asyncio.Event()
    async with living(client):
        first = asyncio.ensure_future(ask(place, request("/sleep")))
        await client.engine.entered["sleep"].wait()
        _, writer = await asyncio.open_unix_connection(place[5:])
        writer.write(request("/wake"))
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
        client.engine.waits["sleep"].set()
        assert code(await first) == 200
        assert client.engine.count("wake_up") == 0


async def test_the_socket_of_a_killed_server_is_replaced_and_that_of_a_living_one_is_not(
    serve: Serve, place: str
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(place[5:])
    client = serve(FakeVllm(dev_mode=False), admin=place)
    async with living(client):
        assert code(await ask(place, request("/sleep"))) == 200
        other = Client(SleepGate(FakeVllm(dev_mode=False)), client.vllm)
        async with living(other) as said:
            assert said[0]["type"] == "lifespan.startup.failed"
            assert f"cannot listen at {place} (CUMEM_SLEEP_ADMIN)" in said[0]["message"]
        assert code(await ask(place, request("/wake"))) == 200


def listening(at: pathlib.Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(at))
    listener.listen(0)
    return listener


TAKERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "a file": lambda path: path.write_text("mine"),
    "a folder": lambda path: path.mkdir(),
    "a fifo": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a socket": listening,
    "a link to a socket": lambda path: (listening(path.with_name("other")), path.symlink_to("other")),
}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("what", [*TAKERS, "a port"])
async def test_a_server_does_not_start_where_somebody_else_is_at_its_address(
    serve: Serve, place: str, free_port: str, what: str, servers: int
) -> None:
    path = pathlib.Path(place[5:])
    taken: Any = TAKERS[what](path) if what in TAKERS else socket.create_server(("127.0.0.1", int(free_port[10:])))
    before = os.lstat(path) if what in TAKERS else None
    vllm = FakeVllm(dev_mode=False)
    vllm.state.args.api_server_count = servers
    async with living(serve(vllm, admin=place if what in TAKERS else free_port, admin_token=TOKEN)) as said:
        assert said[0]["type"] == "lifespan.startup.failed"
        assert "(CUMEM_SLEEP_ADMIN): Address already in use" in said[0]["message"]
    assert before is None or os.path.samestat(os.lstat(path), before)
    del taken


async def test_a_second_vllm_is_no_sibling(serve: Serve, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(name: str, stack: AsyncExitStack) -> tuple[list[Client], list[dict[str, Any]]]:
        monkeypatch.setattr(siblings, "_parent", lambda: name)
        clients = two_servers(serve, dev_mode=False, admin=place)
        return clients, [each for client in clients for each in await stack.enter_async_context(living(client))]

    async with AsyncExitStack() as stack:
        clients, said = await begin("first", stack)
        assert said == []
        others, said = await begin("second", stack)
        assert [each["type"] for each in said] == ["lifespan.startup.failed"]
        assert code(await ask(place, request("/sleep"))) == 200
        assert [client.engine.asleep == TAGS for client in (clients[0], others[0])] == [True, False]


def test_a_holder_that_stands_still_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    path, failed = tmp_path / "admin", threading.Event()

    def start() -> None:
        with pytest.raises(OSError, match="Address already in use"):
            admin_listener.bound(f"unix:{path}")
        failed.set()

    with listening(path), contextlib.ExitStack() as stack:
        for _ in range(8):  # more than its queue has room for
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(path))
        threading.Thread(target=start, daemon=True).start()
        assert failed.wait(60)


async def test_a_servers_end_leaves_the_socket_of_the_next_one(serve: Serve, place: str) -> None:
    first, second = (serve(FakeVllm(dev_mode=False), admin=place) for _ in range(2))
    async with AsyncExitStack() as stack:
        async with living(first):
            os.unlink(place[5:])
            assert await stack.enter_async_context(living(second)) == []
        assert code(await ask(place, request("/sleep"))) == 200
        assert second.engine.asleep == TAGS


def test_a_socket_that_has_come_in_place_of_a_dead_one_is_not_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, living_one, rename = tmp_path / "admin", [], os.rename
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    def late(source: str, to: str) -> None:
        path.unlink()
        living_one.append(listening(path))
        rename(source, to)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(OSError, match="Address already in use"):
        admin_listener.bound(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert os.listdir(tmp_path) == ["admin"]
    living_one[0].close()


async def test_a_websocket_gets_what_any_request_gets_at_the_public_port(serve: Serve, place: str) -> None:
    client = serve(FakeVllm(dev_mode=False), admin=place)
    can_answer = {"extensions": {"websocket.http.response": {}}}
    for path in ("/sleep", "/wake/"):
        request = client.begin("GET", path, type="websocket", **can_answer)
        await request.task
        assert [each["type"] for each in request.sent] == [
            "websocket.http.response.start",
            "websocket.http.response.body",
        ]
        assert request.sent[0]["status"] == 404
        request = client.begin("GET", path, type="websocket")
        await request.task
        assert [each["type"] for each in request.sent] == ["websocket.close"], "which a server answers with 403"


async def test_of_several_api_servers_one_listens_for_all(serve: Serve, free_port: str) -> None:
    address, clients = free_port, two_servers(serve, dev_mode=False, admin=free_port, admin_token=TOKEN)
    async with living(clients[0]) as first, living(clients[1]) as second:
        assert first == second == []
        assert code(await ask(address, request("/sleep"))) == 401
        for _ in range(2):
            assert code(await ask(address, request("/sleep?level=2", key=TOKEN))) == 200
            assert [(await client.ask()).code for client in clients] == [503, 503]
            for path in ("/wake?tags=weights", "/reload_weights", "/wake"):
                assert code(await ask(address, request(path, key=TOKEN))) == 200
            assert [(await client.ask()).code for client in clients] == [200, 200]


@pytest.mark.parametrize(
    "address",
    [
        "9001",
        "localhost:9001",
        "127.0.0.1:0",
        "127.0.0.1:70000",
        "unix:admin",
        "unix:/" + "x" * 107,
        "::1:9001",
        "/run",
    ],
)
def test_an_address_is_a_path_or_a_number_and_a_port(address: str) -> None:
    with pytest.raises(InvalidArgument, match="CUMEM_SLEEP_ADMIN="):
        GateSettings.from_environment({"CUMEM_SLEEP_ADMIN": address, "CUMEM_SLEEP_ADMIN_TOKEN": TOKEN})


@pytest.mark.parametrize("address", ["127.0.0.1:9001", "[::1]:9001", "unix:/" + "x" * 106])
def test_a_port_needs_the_token(address: str) -> None:
    environment = {"CUMEM_SLEEP_ADMIN": address}
    assert GateSettings.from_environment({**environment, "CUMEM_SLEEP_ADMIN_TOKEN": TOKEN}).admin == address
    if not address.startswith("unix:"):
        with pytest.raises(InvalidArgument, match="CUMEM_SLEEP_ADMIN_TOKEN, too"):
            GateSettings.from_environment(environment)
