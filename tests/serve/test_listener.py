"""The port of the front."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import textwrap

import pytest
from front_world import a_world, ask, get, run, until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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


def test_a_port_that_somebody_has_is_an_error_at_once() -> None:
    async def scenario() -> None:
        async with a_world("one") as world:
            with pytest.raises(OSError, match="in use"):
                Listener(world.front, "127.0.0.1", world.port)

    run(scenario)


def test_fields_after_a_chunked_body_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be kept without end, and taken for headers."""
    kept: list[bytes] = []
    keep = HttpToolsProtocol.on_header

    def on_header(self: HttpToolsProtocol, name: bytes, value: bytes) -> None:
        kept.append(name)
        keep(self, name, value)

    monkeypatch.setattr(HttpToolsProtocol, "on_header", on_header)

    async def scenario() -> None:
        async with a_world("one", "two") as world:
            client = await world.client()
            await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            await client.send(b"2\r\n{}\r\n0\r\nx-late: 1\r\nx-later: 1\r\n\r\n")
            assert (await client.answer()).code == 400, "it names no model"

    run(scenario)
    assert kept == [b"Host", b"Transfer-Encoding"]


def test_it_ends_with_requests_that_run_and_pages_that_watch() -> None:
    """The end of the fleet ends them, as it ends its leases; nobody is waited for in vain."""

    async def scenario() -> None:
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

    run(scenario)


@pytest.mark.slow
def test_many_requests_wait_at_a_time() -> None:
    count = min(600, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 100)

    async def scenario() -> None:
        async with a_world("one") as world:
            server = await world.server("one")
            world.fleet.held = asyncio.Event()
            clients = [await world.client() for _ in range(count)]
            for client in clients:
                await client.send(ask())
            await until(lambda: world.fleet.waiting == count)
            for client in clients[::2]:
                client.close()
            await until(lambda: world.fleet.waiting == count // 2)
            world.fleet.held.set()
            answers = await asyncio.gather(*(client.answer() for client in clients[1::2]))
            assert {answer.code for answer in answers} == {200}
            assert len(server.asked) == count // 2

    run(scenario)
