"""The port of the front."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
import textwrap

import pytest
from front_world import STREAM, Asked, a_world, ask, chunk, get, post, until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cumem_sleep.serve import listener
from cumem_sleep.serve.listener import Listener


def test_it_takes_more_connections_than_a_shell_allows() -> None:
    """In a process of its own, which cannot raise the limit any more after this."""
    program = """
        import resource
        from cumem_sleep.serve.listener import MOST_FILES, allow_many_connections
        few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
        allow_many_connections()
        wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, most)
        allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, most)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


@pytest.mark.parametrize(("files", "clients"), [(1024, 448), (64, 1), (resource.RLIM_INFINITY, 32_704)])
def test_clients_leave_files_for_servers(files: int, clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert listener.most_clients() == clients


async def test_a_client_too_many_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all files taken by clients, servers could not be asked for their health, and were stopped."""
    monkeypatch.setattr(listener, "most_clients", lambda: 2)

    async with a_world("one") as world:
        await world.server("one")
        first, second = [await world.client() for _ in range(2)]
        for client in (first, second):
            await client.send(get("/health"))
            assert (await client.answer()).code == 200
        third = await world.client()
        answer = await third.answer()
        assert (answer.code, answer.headers["retry-after"]) == (503, "1")
        assert answer.body == b"2 clients are connected already, the most that may be"
        assert await third.reader.read() == b""
        await first.send(get("/health"))
        assert (await first.answer()).code == 200
        first.close()
        code = 503
        while code != 200:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # refused as well
                code = (await world.ask(ask())).code


async def test_a_port_that_somebody_has_is_an_error_at_once() -> None:
    async with a_world("one") as world:
        with pytest.raises(OSError, match="in use"):
            Listener(world.front, "127.0.0.1", world.port)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: front\r\nTransfer-Encoding: chunked\r\n\r\n"
WITHOUT_END = {
    "headers": (b"GET /health HTTP/1.1\r\nHost: front\r\n", b"x-more: 1\r\n"),
    "a header": (b"GET /health HTTP/1.1\r\nHost: front\r\nX: ", b"x"),
    "a header's name": (b"GET /health HTTP/1.1\r\nHost: front\r\n", b"x"),
    "a target": (b"GET /", b"x"),
    "empty lines": (b"", b"\r\n"),
    "fields after a body": (POST + b"2\r\n{}\r\n0\r\n", b"x-late: 1\r\n"),
    "a field after a body": (POST + b"2\r\n{}\r\n0\r\nX: ", b"x"),
    "a chunk's extension": (POST + b"2;x=", b"x"),
    "a chunk's size": (POST, b"0"),
}


@pytest.mark.parametrize("kind", WITHOUT_END)
async def test_what_has_no_end_is_cut_off_before_and_after_a_refusal(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends it needs no key."""
    begin, unit = WITHOUT_END[kind]

    monkeypatch.setattr(listener, "LATE_S", 1000.0)  # which would end it otherwise

    async with a_world("one", api_keys=["key"]) as world:
        client = await world.client()
        await client.send(begin)
        client.writer.write(unit * ((4 << 20) // len(unit)))
        with contextlib.suppress(ConnectionError):  # it sent more than was read
            await asyncio.wait_for(client.reader.read(), 60.0)


OWED = {
    "a first line": b"",
    "an empty line": b"\r\n",
    "the end of the head": b"GET /health HTTP/1.1\r\nHost: fr",
    "the body": POST,
    "the rest of the body": POST + b"2\r\n{}\r\n",
    "the end of the next head": b"GET /health HTTP/1.1\r\nHost: front\r\n\r\nGET",
    "the next first line": b"GET /health HTTP/1.1\r\nHost: front\r\n\r\n\r\n",
}


@pytest.mark.parametrize("owed", OWED)
async def test_a_client_that_owes_something_and_is_silent_is_let_go(owed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no more than a connection, but these are counted."""
    monkeypatch.setattr(listener, "MOST_SILENT_LOOKS", 5)
    monkeypatch.setattr(listener, "LOOK_FOR_CLIENTS_EVERY_S", 0.1)

    async with a_world("one") as world:
        client = await world.client()
        await client.send(OWED[owed])
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(client.reader.read(), 60.0)


@pytest.mark.slow
async def test_a_client_that_waits_or_is_slow_is_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MOST_SILENT_LOOKS", 5)
    monkeypatch.setattr(listener, "LOOK_FOR_CLIENTS_EVERY_S", 0.1)

    async def answer(asked: Asked) -> None:
        await asked.send(STREAM)
        await asyncio.sleep(1.5)
        await asked.send(chunk(b"data: 1\n\n") + chunk(b""))

    async with a_world("one") as world:
        await world.server("one", answer)
        world.fleet.held = asyncio.Event()
        client = await world.client()
        await client.send(POST)
        for piece in (b'{"model": ', b'"one", ', b'"prompt": ""}'):
            await asyncio.sleep(0.3)
            await client.send(chunk(piece))
        await client.send(chunk(b""))
        long = await world.client()
        await long.send(POST + chunk(b'{"model": "one", "prompt": "'))
        for _ in range(40):  # more than is read ahead
            long.writer.write(chunk(b"x" * (1 << 20)))
        await asyncio.sleep(1.5)
        world.fleet.held.set()
        await long.send(chunk(b'"}') + chunk(b""))
        assert (await client.answer()).body == b"data: 1\n\n"
        assert (await long.answer()).body == b"data: 1\n\n"


@pytest.mark.parametrize("nbytes", [60_000, 70_000, 200_000])
async def test_first_lines_are_bounded_however_many_come_at_once(nbytes: int) -> None:
    async with a_world("one") as world:
        answer = await world.ask(get("/health", "X: " + "x" * nbytes))
        assert answer.code == (200 if nbytes < 1 << 16 else 400)
        assert (await world.ask(get("/health", *(f"X-{number}: 1" for number in range(200))))).code == 200
        assert (await world.ask(get("/health", *(f"X-{number}: 1" for number in range(300))))).code == 400


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_after_a_refusal_little_more_is_read(is_chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cumem_sleep.http.asgi.DRAIN_BYTES", 1 << 20)
    monkeypatch.setattr(listener, "LATE_BYTES", 1 << 20)

    async with a_world("one", api_keys=["key"]) as world:
        client = await world.client()
        piece = bytes(1 << 20)
        if is_chunked:
            await client.send(POST)
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        else:
            await client.send(POST.replace(b"Transfer-Encoding: chunked", b"Content-Length: 9999999999"))
        assert (await client.head()).code == 401
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 256:
                await client.send(piece)
                sent += 1
        assert sent < 64, "what the system holds aside"


async def test_a_client_that_sends_all_of_its_body_first_hears_the_refusal() -> None:
    async with a_world("one", api_keys=["key"]) as world:
        for lines in ((), ("Connection: close",)):
            answer = await world.ask(post("/v1/completions", bytes(8 << 20), *lines))
            assert answer.code == 401


async def test_requests_that_come_before_the_answer_wait_unparsed_and_are_answered_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 2000
    parsed = 0
    complete = HttpToolsProtocol.on_headers_complete

    def on_headers_complete(self: HttpToolsProtocol) -> None:
        nonlocal parsed
        parsed += 1
        complete(self)

    monkeypatch.setattr(HttpToolsProtocol, "on_headers_complete", on_headers_complete)

    async with a_world("one") as world:
        await world.server("one")
        world.fleet.held = asyncio.Event()
        client = await world.client()
        client.writer.write(ask() + get("/version") * count + ask())
        await until(lambda: world.fleet.waiting == 1)
        await asyncio.sleep(0.1)
        assert parsed < 200
        world.fleet.held.set()
        answers = [await client.answer() for _ in range(count + 2)]
        assert {answer.code for answer in answers} == {200}
        assert answers[0].body == answers[-1].body == b"{}"
        assert all("version" in answer.json for answer in answers[1:-1])


@pytest.mark.parametrize(
    "noise", [b"no HTTP\r\n\r\n", b"GET /" + b"x" * 100_000, b"GET / HTTP/1.1\r\nHost : x\r\n\r\n"]
)
async def test_noise_after_a_request_does_not_touch_its_answer(noise: bytes) -> None:
    async with a_world("one") as world:
        turn = asyncio.Event()

        async def serve(asked: Asked) -> None:
            await asked.send(STREAM + chunk(b"data: 1\n\n"))
            await turn.wait()
            await asked.send(chunk(b"data: 2\n\n") + chunk(b""))

        await world.server("one", serve)
        client = await world.client()
        await client.send(ask(stream=True))
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"
        await client.send(noise)
        await asyncio.sleep(0.1)
        turn.set()
        assert await client.chunk() == b"data: 2\n\n"
        assert await client.chunk() == b""
        assert await client.reader.read() == b""


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "anything"])
async def test_a_request_that_would_rather_speak_something_else_is_answered_all_the_same(protocol: str) -> None:
    async with a_world("one") as world:
        server = await world.server("one")
        client = await world.client()
        body = b'{"model": "one"}'
        lines = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAMAAABkAAQAAP__")
        in_chunks = POST[:-2] + "\r\n".join((*lines, "", "")).encode() + chunk(body) + chunk(b"")
        for request in (post("/v1/completions", body, *lines), in_chunks, get("/health", *lines), ask()):
            await client.send(request)
            assert (await client.answer()).code == 200
        assert [asked.body for asked in server.asked[:2]] == [body, body]
        assert server.asked[0].header("upgrade") is None


async def test_it_ends_with_requests_that_run_and_pages_that_watch() -> None:
    """The end of the fleet ends them, as it ends its leases; nobody is waited for in vain."""
    async with a_world("one") as world:
        world.fleet.held = asyncio.Event()
        waiting, watching = await world.client(), await world.client()
        await waiting.send(ask())
        await watching.send(get("/status/live"))
        await watching.head()
        await until(lambda: world.fleet.waiting == 1)
        world.fleet.ended = True
        world.fleet.changed.set()
        while await watching.chunk():
            pass
        waiting.close()
