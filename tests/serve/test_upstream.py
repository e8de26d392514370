"""A connection to a server, event by event."""

from __future__ import annotations

import asyncio

import pytest
from front_world import run

from cumem_sleep.serve.upstream import BrokenOff, Connection


class Transport:
    """As uvloop's: it cannot be written to from the moment on that it is closed, and says so later."""

    def __init__(self) -> None:
        self.closed = False
        self.written = b""

    def write(self, data: bytes) -> None:
        if self.closed:
            raise RuntimeError("unable to perform operation on a closed transport; the handler is closed")
        self.written += data

    def writelines(self, pieces: tuple[bytes, ...]) -> None:
        self.write(b"".join(pieces))

    def abort(self) -> None:
        self.closed = True

    def resume_reading(self) -> None:
        pass

    pause_reading = resume_reading


def connected() -> tuple[Connection, Transport]:
    connection, transport = Connection(), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def end(connection: Connection, transport: Transport) -> None:
    """The server closes; `connection_lost` has not been called yet."""
    connection.eof_received()
    transport.closed = True


@pytest.mark.parametrize("reused", [False, True])
def test_a_request_on_a_connection_that_the_server_has_just_closed(reused: bool) -> None:
    async def scenario() -> None:
        connection, transport = connected()
        connection.reused = reused
        end(connection, transport)
        assert not connection.is_open
        connection.send(b"head", b"body", more=True)
        await connection.write(b"more", more=False)
        with pytest.raises(BrokenOff) as broken:
            await connection.head()
        assert broken.value.was_idle == reused
        assert not connection.may_be_reused()

    run(scenario)


def test_a_connection_that_is_closed_in_the_middle_of_a_body() -> None:
    async def scenario() -> None:
        connection, transport = connected()
        connection.send(b"head", b"body", more=True)
        reading = asyncio.create_task(connection.head())
        await asyncio.sleep(0)
        end(connection, transport)
        await connection.write(b"more", more=True)
        connection.connection_lost(None)
        with pytest.raises(BrokenOff):
            await reading
        assert transport.written == b"headbody"

    run(scenario)


def test_an_answer_before_the_end_of_the_request_is_whole_and_its_connection_not_used_again() -> None:
    async def scenario() -> None:
        connection, _ = connected()
        connection.send(b"head", b"body", more=True)
        connection.data_received(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno")
        await connection.head()
        assert (connection.status, await connection.read(), connection.is_read) == (413, b"no", True)
        assert not connection.may_be_reused()

    run(scenario)


def test_what_comes_unasked_ends_a_connection() -> None:
    async def scenario() -> None:
        connection, transport = connected()
        connection.send(b"head", b"", more=False)
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        assert connection.may_be_reused()
        connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
        assert not connection.may_be_reused()
        assert transport.closed

    run(scenario)


def test_of_two_answers_to_one_request_one_counts() -> None:
    async def scenario() -> None:
        connection, _ = connected()
        connection.send(b"head", b"", more=False)
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        connection.data_received(answer + answer)
        await connection.head()
        assert await connection.read() == b"ok"
        assert not connection.may_be_reused()

    run(scenario)
