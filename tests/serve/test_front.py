"""The front passes requests and answers on as they are, and answers itself where no server can."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from front_world import (
    NOT_NOW,
    OK,
    STREAM,
    Asked,
    a_world,
    ask,
    chunk,
    get,
    post,
    until,
)

from cumem_sleep.http.asgi import Inbox
from cumem_sleep.serve import exchange, front, upstream
from cumem_sleep.serve.fleet import Address, ServerFailed

# What passes


async def test_bytes_pass_untouched_both_ways() -> None:
    body = b' {"messages": [{"content": "\\u00e9 \\"model\\": {"}],\n\t"model"  : "two", "stream": false, "x": NaN}  '
    reply = bytes(range(256)) * 300

    async def serve(asked: Asked) -> None:
        head = f"HTTP/1.1 207 Whatever\r\nX-Odd: a, b\r\nset-cookie: a\r\nset-cookie: b\r\ncontent-length: {len(reply)}"
        await asked.send(head.encode() + b"\r\n\r\n" + reply)

    async with a_world() as world:
        server = await world.server("two", serve)
        request = post("/v1/chat/completions?a=1&b=%2F", body, "X-Trace: t", "Authorization: Bearer theirs")
        client = await world.client()
        await client.send(request)
        answer = await client.head()
        assert (answer.code, answer.headers["x-odd"]) == (207, "a, b")
        assert await client.reader.readexactly(len(reply)) == reply
        (asked,) = server.asked
        assert asked.line == "POST /v1/chat/completions?a=1&b=%2F HTTP/1.1"
        assert asked.body == body
        assert (asked.header("x-trace"), asked.header("authorization")) == ("t", "Bearer theirs")
        assert asked.header("host") == f"127.0.0.1:{server.port}"


async def test_a_stream_comes_piece_by_piece() -> None:
    """Each piece is asked for only when the one before has been seen: nothing waits for the next."""
    seen = asyncio.Event

    turn = seen()

    async def serve(asked: Asked) -> None:
        await asked.send(STREAM)
        for number in range(5):
            await asked.send(chunk(b"data: %d\n\n" % number))
            await turn.wait()
            turn.clear()
        await asked.send(chunk(b""))

    async with a_world() as world:
        await world.server("one", serve)
        client = await world.client()
        await client.send(ask(stream=True))
        assert (await client.head()).headers["content-type"] == "text/event-stream"
        for number in range(5):
            assert await client.chunk() == b"data: %d\n\n" % number
            turn.set()
        assert await client.chunk() == b""
        await until(lambda: not world.fleet.granted)


async def test_the_first_piece_of_a_stream_is_counted_and_no_other_answer() -> None:
    told = asyncio.Event()

    async def serve(asked: Asked) -> None:
        if "completions" not in asked.line:
            return await asked.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await asked.send(STREAM)
        for number in range(2):
            await told.wait()
            told.clear()
            await asked.send(chunk(b"data: %d\n\n" % number))
        await asked.send(chunk(b""))

    async with a_world() as world:
        await world.server("one", serve)
        counted = world.fleet.counters.first_token
        assert (await world.ask(post("/v1/embeddings", b'{"model": "one"}'))).code == 200
        client = await world.client()
        await client.send(ask(stream=True))
        await client.head()
        assert not counted
        for number in range(2):
            told.set()
            assert await client.chunk() == b"data: %d\n\n" % number
        assert sum(counted["one", "awake"].counts) == 1


async def test_connections_to_a_server_are_used_again_and_not_when_they_are_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "IDLE_S", 1e6)

    async with a_world() as world:
        server = await world.server("one")
        for _ in range(3):
            assert (await world.ask(ask())).code == 200
        assert server.connections == 1
        monkeypatch.setattr(upstream, "IDLE_S", -1.0)
        assert (await world.ask(ask())).code == 200
        assert server.connections == 2


async def test_a_body_in_chunks_and_an_answer_that_ends_with_its_connection() -> None:
    async def serve(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nto the end")
        asked.writer.close()

    async with a_world() as world:
        server = await world.server("one", serve)
        client = await world.client()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: front\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.send(head + chunk(b'{"model": "o'))
        await client.send(chunk(b'ne", "prompt": "'))
        await client.send(chunk(b'x"}') + chunk(b""))
        answer = await client.answer()
        assert (answer.code, answer.body, answer.whole) == (200, b"to the end", True)
        assert server.asked[0].body == b'{"model": "one", "prompt": "x"}'


# Which model


@pytest.mark.parametrize("more", [b"", b"x" * 200_000])
async def test_an_alias_becomes_the_name_that_the_server_knows(more: bytes) -> None:
    async with a_world(aliases={"gpt-4o": "two"}) as world:
        server = await world.server("two")
        body = b'{"model":"gpt-4o", "user": "gpt-4o", "prompt": "' + more + b'"}'
        assert (await world.ask(post("/v1/completions", body))).code == 200
        assert server.asked[0].body == body.replace(b'"model":"gpt-4o"', b'"model":"two"')


@pytest.mark.parametrize(
    ("served", "asked", "sent"),
    [
        (("two", "adapter"), "two", "two"),
        (("two", "adapter"), "adapter", "adapter"),
        (("two", "adapter"), "gpt-4o", "two"),
        (("Qwen/Qwen3-8B", "adapter"), "two", "Qwen/Qwen3-8B"),
        (("Qwen/Qwen3-8B", "adapter"), "adapter", "adapter"),
    ],
)
async def test_a_server_is_asked_by_a_name_that_it_knows(served: tuple[str, ...], asked: str, sent: str) -> None:
    async with a_world(aliases={"gpt-4o": "two", "adapter": "two"}) as world:
        server = await world.server("two")
        world.fleet.served = served
        assert (await world.ask(ask(asked))).code == 200
        assert json.loads(server.asked[0].body)["model"] == sent


async def test_a_form_names_its_model_before_or_after_the_file() -> None:
    field = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nalias\r\n'
    file = b'--B\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n' + bytes(300_000) + b"\r\n"

    async with a_world(aliases={"alias": "two"}) as world:
        server = await world.server("two")
        for body in (field + file + b"--B--\r\n", file + field + b"--B--\r\n"):
            request = post("/v1/audio/transcriptions", body, "Content-Type: multipart/form-data; boundary=B")
            assert (await world.ask(request)).code == 200
            assert server.asked[-1].body == body.replace(b"\r\nalias\r\n", b"\r\ntwo\r\n")


@pytest.mark.parametrize("path", ["/models/org/one/tokenize", "/models/org/one/v1/chat/completions"])
async def test_a_path_may_name_the_model_and_then_nothing_is_looked_for(path: str) -> None:
    async with a_world("org/one", "two") as world:
        server = await world.server("org/one")
        assert (await world.ask(post(path, b"no JSON"))).code == 200
        assert server.asked[0].line == f"POST {path.removeprefix('/models/org/one')} HTTP/1.1"
        assert server.asked[0].body == b"no JSON"
        assert (await world.ask(post("/models/other/tokenize", b"{}"))).code == 404


async def test_the_only_model_need_not_be_named() -> None:
    async with a_world("one") as world:
        server = await world.server("one")
        assert (await world.ask(post("/tokenize", b'{"prompt": "x"}'))).code == 200
        assert (await world.ask(get("/v1/responses/resp_1"))).code == 200
        assert (await world.ask(post("/v1/responses/resp_1/cancel", b""))).code == 200
        lines = [asked.line.split()[:2] for asked in server.asked]
        assert lines == [
            ["POST", "/tokenize"],
            ["GET", "/v1/responses/resp_1"],
            ["POST", "/v1/responses/resp_1/cancel"],
        ]
    async with a_world("one", "two") as world:
        answer = await world.ask(post("/tokenize", b'{"prompt": "x"}'))
        assert answer.code == 400
        assert "one, two" in answer.error["message"]


async def test_a_model_that_comes_too_late_in_the_body() -> None:
    async with a_world(max_head=1 << 20) as world:
        server = await world.server("one")
        late = b'{"prompt": "' + b"x" * (3 << 20) + b'", "model": "one"}'
        answer = await world.ask(post("/v1/completions", late))
        assert answer.code == 413
        assert "/models/NAME/v1/completions" in answer.error["message"]
        assert server.asked == []
        assert (await world.ask(post("/models/one/v1/completions", late))).code == 200
        early = b'{"model": "one", "prompt": "' + b"x" * (3 << 20) + b'"}'
        assert (await world.ask(post("/v1/completions", early))).code == 200
        assert [len(asked.body) for asked in server.asked] == [len(late), len(early)]


@pytest.mark.parametrize("is_awake", [True, False])
async def test_no_server_gets_all_of_a_long_body_that_names_its_model_again(is_awake: bool) -> None:
    async with a_world() as world:
        server = await world.server("one")
        if not is_awake:
            world.fleet.held = asyncio.Event()
        client = await world.client()
        body = b'{"model": "one", "prompt": "' + b"x" * (4 << 20) + b'", "model": "two"}'
        client.writer.write(post("/v1/completions", body))
        if world.fleet.held is not None:
            await until(lambda: world.fleet.waiting == 1)
            world.fleet.held.set()
        answer = await client.answer()
        assert (answer.code, "named again" in answer.error["message"]) == (400, True)
        await until(lambda: not world.fleet.granted)
        assert server.asked == [], "it would be here if all of it had been read"


@pytest.mark.parametrize("is_awake", [True, False])
async def test_a_body_that_comes_byte_by_byte_takes_no_more_memory_than_others(
    is_awake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece and message by itself would take a hundred times as much as it is counted for."""
    monkeypatch.setattr(exchange, "SETTLED_BYTES", 1 << 20 if is_awake else 20)
    inboxes: list[Inbox] = []
    pieces = 0

    def renamed(body: tuple[bytes, ...], span: tuple[int, int], by: bytes) -> tuple[bytes, ...]:
        nonlocal pieces
        pieces = len(body) + len(inboxes[0]._early)
        return rename(body, span, by)

    def inbox(*arguments: Any) -> Inbox:
        inboxes.append(Inbox(*arguments))
        return inboxes[-1]

    rename = exchange.renamed
    monkeypatch.setattr(exchange, "renamed", renamed)
    monkeypatch.setattr(front, "Inbox", inbox)

    async with a_world("one", aliases={"alias": "one"}) as world:
        server = await world.server("one")
        world.fleet.held = asyncio.Event()
        body = b'{"model": "alias", "prompt": "' + b"x" * 1000 + b'"}'
        client = await world.client()
        head, _, _ = post("/v1/completions", body).partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        for at in range(len(body)):
            await client.send(body[at : at + 1])
            for _ in range(5):
                await asyncio.sleep(0)
        await until(lambda: world.fleet.waiting == 1 and inboxes[0].complete)
        world.fleet.held.set()
        assert (await client.answer()).code == 200
        assert server.asked[0].body == body.replace(b"alias", b"one")
        assert 0 < pieces < 5


# What cannot be had


async def test_errors_of_the_fleet() -> None:
    async with a_world() as world:
        answer = await world.ask(ask("three"))
        assert (answer.code, answer.error["type"]) == (404, "NotFoundError")
        assert "one, two" in answer.error["message"]
        world.fleet.refusal = NOT_NOW
        answer = await world.ask(ask())
        assert (answer.code, answer.headers["retry-after"]) == (503, "7")
        assert answer.error["message"] == "all seats are taken"
        world.fleet.refusal = ServerFailed("it will not start", 0)
        answer = await world.ask(ask())
        assert (answer.code, answer.headers["retry-after"]) == (503, "1")


async def test_a_server_that_cannot_be_reached_is_asked_again_elsewhere() -> None:
    async with a_world() as world:
        server = await world.server("one")
        alive = world.fleet.servers["one"]
        dead = Address("http://127.0.0.1:1")
        world.fleet.servers["one"] = dead

        def report_failure(_: object, error: str) -> None:
            world.fleet.failures.append(error)
            world.fleet.servers["one"] = alive

        world.fleet.report_failure = report_failure  # type: ignore[method-assign,assignment]
        assert (await world.ask(ask())).code == 200
        assert len(world.fleet.failures) == 1
        assert len(server.asked) == 1
        world.fleet.report_failure = lambda *_: None  # type: ignore[method-assign]
        world.fleet.servers["one"] = dead
        answer = await world.ask(ask())
        assert (answer.code, answer.error["type"]) == (502, "BadGatewayError")


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nconte", b"nonsense\r\n\r\n"])
async def test_a_server_that_dies_before_it_answers(sent: bytes) -> None:
    """It got the request, so nobody else gets it: it may be what killed the server."""

    async def serve(asked: Asked) -> None:
        await asked.send(sent)
        asked.writer.close()

    async with a_world() as world:
        server = await world.server("one", serve)
        answer = await world.ask(ask())
        assert answer.code == 502
        assert len(server.asked) == len(world.fleet.failures) == 1


@pytest.mark.parametrize("status", [0, 99, 600, 999])
async def test_a_status_that_does_not_exist_is_no_answer(status: int) -> None:
    """Nor is what comes behind it, which nobody asked for."""

    async def serve(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 %03d X\r\ncontent-length: 0\r\n\r\n" % status + OK)

    async with a_world() as world:
        await world.server("one", serve)
        answer = await world.ask(ask())
        assert (answer.code, answer.error["type"]) == (502, "BadGatewayError")
        assert f"the server's answer has the status {status}" in answer.error["message"]


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_may_name_a_length(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 %d X\r\ncontent-length: 7\r\netag: a\r\n\r\n" % status)

    async with a_world() as world:
        server = await world.server("one", serve)
        client = await world.client()
        for _ in range(2):  # on one connection
            await client.send(ask())
            answer = await client.answer()
            assert (answer.code, answer.headers.get("content-length"), answer.headers["etag"]) == (
                status,
                None,
                "a",
            )
        assert server.connections == 1
    assert caplog.text == ""


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_server_that_dies_while_it_answers(is_stream: bool) -> None:
    async def serve(asked: Asked) -> None:
        if is_stream:
            await asked.send(STREAM + chunk(b"data: {}\n\n"))
        else:
            await asked.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        asked.writer.close()

    async with a_world() as world:
        server = await world.server("one", serve)
        answer = await world.ask(ask(stream=is_stream))
        assert answer.code == 200
        assert not answer.whole, "nobody may take it for the whole answer"
        if is_stream:
            event = answer.body.split(b"\n\n")[-2]
            assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 502
        assert len(server.asked) == len(world.fleet.failures) == 1


# What ends early


@pytest.mark.parametrize("when", ["held", "asked", "streamed"])
async def test_a_client_that_goes_away_ends_its_request(when: str) -> None:
    noticed = asyncio.Event()

    async def serve(asked: Asked) -> None:
        if when == "streamed":
            await asked.send(STREAM + chunk(b"data: 1\n\n"))
        await asked.gone()
        noticed.set()

    async with a_world() as world:
        server = await world.server("one", serve)
        if when == "held":
            world.fleet.held = asyncio.Event()
        client = await world.client()
        await client.send(ask(stream=True))
        if when == "held":
            await until(lambda: world.fleet.waiting == 1)
        elif when == "asked":
            await until(lambda: len(server.asked) == 1)
        else:
            await client.head()
        client.close()
        if when == "held":
            await until(lambda: world.fleet.waiting == 0)
            assert server.asked == []
        else:
            await noticed.wait()
        await until(lambda: not world.fleet.granted)
        assert world.fleet.failures == []


@pytest.mark.parametrize("how", ["closes", "aborts", "half-closes", "asked for more", "sent noise"])
async def test_clients_that_leave_at_once_end_their_requests(how: str) -> None:
    """Also while the connection to the server is being made: a cancellation that comes then must not be lost."""
    async with a_world("one") as world:

        async def serve(asked: Asked) -> None:
            await asked.gone()

        server = await world.server("one", serve)
        for _ in range(20):
            client = await world.client()
            more = {"asked for more": ask() * 2, "sent noise": b"\x00" * 100_000}.get(how, b"")
            client.writer.write(ask(stream=True) + more)
            if how == "half-closes":
                client.writer.write_eof()
            elif how == "closes":
                client.writer.close()
            else:
                await until(lambda: len(world.fleet.granted) > 0)
                client.close()
            await until(lambda: not world.fleet.granted)
        await until(lambda: all(asked.writer.is_closing() for asked in server.asked))
        assert world.fleet.failures == []


async def test_a_client_that_leaves_behind_more_than_is_read_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is read of it, its end is behind what it has sent. The system knows of it."""
    monkeypatch.setattr("cumem_sleep.http.asgi.READ_AHEAD_BYTES", 1 << 20)
    monkeypatch.setattr(exchange, "SETTLED_BYTES", 1 << 16)

    async with a_world("one") as world:
        world.fleet.held = asyncio.Event()
        client = await world.client()
        body = b'{"model": "one", "prompt": "' + b"x" * (3 << 19) + b'"}'
        await client.send(post("/v1/completions", body))
        await until(lambda: world.fleet.waiting == 1)
        client.writer.close()
        await until(lambda: world.fleet.waiting == 0)


@pytest.mark.parametrize("dies", [False, True])
async def test_a_lease_that_is_revoked_before_anything_was_sent_is_taken_anew(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, revoked = upstream._connect, list[bool]()

    async def revoke_meanwhile(*arguments: Any) -> None:
        if not revoked:
            revoked.append(True)
            world.fleet.granted[0].revoked.set_result("its server was killed by SIGKILL")
            await asyncio.sleep(0.01)
            if dies:
                raise ConnectionRefusedError
        await connect(*arguments)

    monkeypatch.setattr(upstream, "_connect", revoke_meanwhile)
    async with a_world() as world:
        server = await world.server("one")
        assert (await world.ask(ask())).code == 200
        assert (len(server.asked), world.fleet.failures) == (1, []), "nobody is suspected"


@pytest.mark.parametrize("when", ["asked", "streamed", "stuck"])
async def test_a_lease_that_is_revoked_ends_the_request_at_both_ends(when: str) -> None:
    noticed = asyncio.Event()

    async def serve(asked: Asked) -> None:
        if when != "asked":
            await asked.send(STREAM + chunk(b"data: 1\n\n"))
        if when == "stuck":
            asked.writer.write(chunk(bytes(64 << 20)))
        await asked.gone()
        noticed.set()

    async with a_world() as world:
        server = await world.server("one", serve)
        client = await world.client(limit=1 << 16)
        await client.send(ask(stream=True))
        await until(lambda: len(server.asked) == 1)
        if when != "asked":
            await client.head()
            assert (await client.chunk()).startswith(b"data: 1\n\n")
        if when == "stuck":
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(0.1)
        (lease,) = world.fleet.granted
        lease.revoked.set_result("the model is put to sleep")
        await until(lambda: not world.fleet.granted)
        await noticed.wait()
        if when == "asked":
            answer = await client.answer()
            assert (answer.code, answer.error["message"]) == (503, "the model is put to sleep")
        elif when == "streamed":
            event = (await client.chunk()).strip()
            assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "the model is put to sleep"
            assert await client.reader.read() == b"", "the stream's end is not claimed"


@pytest.mark.parametrize("more", [-40, 0, 1, 1000, 70_000])
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_body_that_ends_where_its_model_is_settled_is_passed_on_whole(is_chunked: bool, more: int) -> None:
    async with a_world("one") as world:
        server = await world.server("one")
        body = b'{"model": "one", "prompt": "' + b"x" * (exchange.SETTLED_BYTES + more) + b'"}'
        request = post("/v1/completions", body)
        if is_chunked:
            lines = b"POST /v1/completions HTTP/1.1\r\nHost: front\r\nTransfer-Encoding: chunked\r\n\r\n"
            request = lines + chunk(body) + b"0\r\n\r\n"
        answer = await asyncio.wait_for(world.ask(request), 60)
        assert answer.code == 200
        assert server.asked[0].body == body


@pytest.mark.parametrize(("nbytes", "fit"), [(3 << 20, 6), (11 << 17, 14), (9 << 17, 17)])
async def test_of_many_long_bodies_as_many_are_held_as_may_be(nbytes: int, fit: int) -> None:
    """The first MiB, in which a model is looked for, is held elsewhere than the rest."""
    async with a_world(max_held=20 << 20) as world:
        server = await world.server("one")
        world.fleet.held = asyncio.Event()
        body = b'{"model": "one", "prompt": "' + b"x" * nbytes + b'"}'
        asking = [asyncio.create_task(world.ask(post("/v1/completions", body))) for _ in range(2 * fit)]
        await until(lambda: sum(task.done() for task in asking) >= fit)
        await until(lambda: world.front._ways.held.nbytes % len(body) == 0)
        assert world.front._ways.held.nbytes == fit * len(body)
        world.fleet.held.set()
        codes = sorted(answer.code for answer in await asyncio.gather(*asking))
        assert codes == [200] * fit + [503] * fit
        assert len(server.asked) == fit


async def test_a_slow_client_slows_its_server_down() -> None:
    """The front holds a bounded part of an answer that nobody takes."""
    written = 0

    async def serve(asked: Asked) -> None:
        nonlocal written
        await asked.send(STREAM)
        for _ in range(256):
            await asked.send(chunk(bytes(1 << 18)))
            written += 1 << 18
        await asked.send(chunk(b""))

    async with a_world() as world:
        await world.server("one", serve)
        client = await world.client(limit=1 << 16)
        await client.send(ask(stream=True))
        await until(lambda: written > 0)
        last = -1
        while written != last:
            last = written
            await asyncio.sleep(0.3)
        assert 0 < written < 32 << 20
        answer = await client.answer()
        assert len(answer.body) == 256 << 18


@pytest.mark.slow
async def test_a_slow_server_slows_its_client_down() -> None:
    async with a_world() as world:
        read = asyncio.Event()

        async def serve(asked: Asked) -> None:
            await read.wait()
            left = int(asked.header("content-length") or 0)
            while left:
                left -= len(await asked.reader.read(min(left, 1 << 20)))
            await asked.send(OK)

        await world.server("one", serve, reads_body=False)
        client = await world.client()
        size = 128 << 20
        await client.send(
            post("/v1/completions", b"", f"Content-Length: {size}").replace(b"Content-Length: 0\r\n", b"")
        )
        sent = b'{"model": "one", "prompt": "'
        await client.send(sent)
        taken, piece = len(sent), bytes(1 << 18)
        while taken < size:
            client.writer.write(piece[: size - taken])
            taken += min(len(piece), size - taken)
            try:
                await asyncio.wait_for(client.writer.drain(), 0.5)
            except asyncio.TimeoutError:
                break
        assert taken < 64 << 20
        read.set()
        client.writer.write(bytes(size - taken))
        assert (await client.answer()).code == 200
