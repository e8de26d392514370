"""Servers that answer anything at all: the client hears of it, nothing hangs, and no lease is left."""

from __future__ import annotations

import asyncio
import random

import pytest
from front_world import WITHIN_S, Asked, a_world, ask, until

PIECES = (
    *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 None\r\n", b"HTTP/1.0 200 OK\r\n"),
    *(b"HTTP/1.1 304 Not Modified\r\n", b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n"),
    *(b"content-length: 5\r\n", b"content-length: 500000\r\n", b"content-length: 0\r\n", b"content-length: -1\r\n"),
    *(b"transfer-encoding: chunked\r\n", b"connection: close\r\n", b"content-type: text/event-stream\r\n"),
    *(
        b"\r\n",
        b"\r\n",
        b"5\r\nhello\r\n",
        b"hello",
        b"0\r\n\r\n",
        b"x" * 70_000,
        b"\x00",
        b"\xff\xfe",
        b"fffffffff\r\n",
    ),
    *(b"X-Odd: \x01\r\n", b"X: " + b"y" * 90_000 + b"\r\n", b"data: {}\n\n"),
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_a_server_answers(seed: int) -> None:
    chance = random.Random(seed)
    sound = 0

    def answer() -> list[bytes]:
        if chance.random() < 0.3:
            first = [b"HTTP/1.1 200 OK\r\n", chance.choice(PIECES[6:13]), b"\r\n"]
        else:
            first = [chance.choice(PIECES) for _ in range(chance.randrange(4))]
        return [*first, *(chance.choice(PIECES) for _ in range(chance.randrange(5)))]

    async def serve(asked: Asked) -> None:
        for piece in answer():
            asked.writer.write(piece)
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        if chance.random() < 0.5:
            asked.writer.close()
        else:
            await asyncio.wait_for(asked.gone(), 0.05)

    async def quietly(asked: Asked) -> None:
        try:
            await serve(asked)
        except (ConnectionError, RuntimeError, asyncio.TimeoutError):  # uvloop: the connection is closed
            asked.writer.transport.abort()

    async with a_world("one") as world:
        await world.server("one", quietly)
        for _ in range(150):
            client = await world.client()
            await client.send(ask(stream=True))
            try:
                found = await asyncio.wait_for(client.answer(), WITHIN_S)
            except (asyncio.IncompleteReadError, ConnectionError):
                continue  # broken off before its head was sent
            finally:
                client.close()
            sound += found.whole and found.code == 200
            assert found.code in (200, 204, 304, 502), found
        await until(lambda: not world.fleet.granted)
        await world.server("one")
        assert (await world.ask(ask())).code == 200
    assert sound, "some of them are answers"
