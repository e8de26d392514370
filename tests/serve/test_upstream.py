"""A connection to a server, event by event."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import uvloop

from cumem_sleep.serve.address import Address
from cumem_sleep.serve.upstream import MOST_HEAD_BYTES, BrokenOff, Connection, Connections, Unreachable


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
async def test_a_request_on_a_connection_that_the_server_has_just_closed(reused: bool) -> None:
    connection, transport = connected()
    connection.reused = reused
    end(connection, transport)
    assert not connection.is_open
    with pytest.raises(Unreachable):
        connection.send((b"head", b"body"), more=True)
    assert transport.written == b""
    assert not connection.may_be_reused()


@pytest.mark.parametrize("last", [None, b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n"])
@pytest.mark.parametrize("loop", [asyncio, uvloop])
def test_the_end_of_an_idle_connection_is_noticed_before_the_loop_tells_of_it(
    last: bytes | None, loop: ModuleType, tmp_path: Path
) -> None:
    """Nothing is awaited between the server's last words and the next request, which may have headers of its own;
    `last` is None without any.
    """

    async def scenario() -> None:
        server = Address("http://model", str(tmp_path / "socket"))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "socket"))
            listening.listen()
            connections = Connections()
            connection = await connections.take(server)
            its_end, _ = listening.accept()
            connection.send((b"head", b""), more=False)
            its_end.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await connection.head()
            assert await connection.read() == b"ok"
            connections.give_back(server, connection)
            if last is not None:
                its_end.send(last)
                its_end.shutdown(socket.SHUT_RDWR)
            assert connection.is_open
            taken = await connections.take(replace(server, headers=(("x-cumem-sleep-patience", "1.5"),)))
            assert (taken is connection) == (last is None)
            taken.close()
            its_end.close()

    loop.run(scenario())


async def test_a_connection_that_is_closed_in_the_middle_of_a_body() -> None:
    connection, transport = connected()
    connection.send((b"head", b"body"), more=True)
    reading = asyncio.create_task(connection.head())
    await asyncio.sleep(0)
    end(connection, transport)
    await connection.write(b"more", more=True)
    connection.connection_lost(None)
    with pytest.raises(BrokenOff):
        await reading
    assert transport.written == b"headbody"


@pytest.mark.parametrize("line", [b"x: " + b"a" * 997 + b"\r\n", b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n"])
async def test_a_head_without_end_is_refused(line: bytes) -> None:
    connection, _ = connected()
    connection.send((b"head", b""), more=False)
    if not line.startswith(b"HTTP"):
        connection.data_received(b"HTTP/1.1 200 OK\r\n")
    for _ in range(MOST_HEAD_BYTES // len(line) + 1):
        connection.data_received(line)
    with pytest.raises(BrokenOff, match="more than 262144 bytes"):
        await connection.head()
    assert not connection.is_open


async def test_headers_after_a_body_are_not_kept() -> None:
    connection, _ = connected()
    connection.send((b"head", b""), more=False)
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n")
    await connection.head()
    connection.data_received(b"late: header\r\n\r\n")
    assert await connection.read() == b"ok"
    assert connection.headers == [(b"transfer-encoding", b"chunked")]
    assert connection.may_be_reused()


async def test_an_answer_before_the_end_of_the_request_is_whole_and_its_connection_not_used_again() -> None:
    connection, _ = connected()
    connection.send((b"head", b"body"), more=True)
    connection.data_received(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno")
    await connection.head()
    assert (connection.status, await connection.read(), connection.is_read) == (413, b"no", True)
    assert not connection.may_be_reused()


async def test_what_comes_unasked_ends_a_connection() -> None:
    connection, transport = connected()
    connection.send((b"head", b""), more=False)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    assert connection.may_be_reused()
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    assert not connection.may_be_reused()
    assert transport.closed
