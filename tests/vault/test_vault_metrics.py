"""The vault's metrics over HTTP: what Prometheus reads, and what other readers can do to them."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Callable, Iterator

import pytest
from running import SECONDS, RunningVault, Segment, eventually
from support import PAGE

from cumem_sleep import CuMemAllocator, OutOfHostMemory, VaultError, VaultUnavailable
from cumem_sleep.tools import vault_metrics
from cumem_sleep.tools.vault_metrics import CONTENT_TYPE, MetricsServer
from cumem_sleep.vault.client import VaultClient

pytestmark = pytest.mark.sim


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer("127.0.0.1", 0, lambda: "metric 1\n") as serving:
        yield serving


def ask(server: MetricsServer, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(server.server_address[:2], timeout=30)


def say(server: MetricsServer, request: bytes) -> bytes:
    with connect(server) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


class TestAnswers:
    def test_the_metrics(self, server: MetricsServer) -> None:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", server.url)
        assert ask(server) == ask(server, "/metrics?name=x") == (200, "metric 1\n")
        assert f"Content-Type: {CONTENT_TYPE}".encode() in say(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")

    @pytest.mark.parametrize(
        ("path", "method", "code"), [("/", "GET", 404), ("/metrics/x", "GET", 404), ("/metrics", "POST", 501)]
    )
    def test_everything_else_is_refused(self, server: MetricsServer, path: str, method: str, code: int) -> None:
        assert ask(server, path, method)[0] == code
        assert ask(server)[0] == 200

    @pytest.mark.parametrize(
        ("request_", "said"),
        [
            (b"\x16\x03\x01\x02\x00 who speaks TLS\r\n\r\n", b"Bad "),
            (b"GET /metrics HTTP/9.9\r\n\r\n", b"Invalid HTTP version (9.9)"),
            (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"HTTP/1.0 414 "),
            (b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"HTTP/1.0 431 "),
        ],
    )
    def test_nonsense_is_refused(self, server: MetricsServer, request_: bytes, said: bytes) -> None:
        answer = say(server, request_)
        assert answer.startswith(said)
        assert b"metric 1" not in answer
        assert ask(server)[0] == 200

    def test_an_answer_serves_all_who_ask_while_it_is_fresh(self) -> None:
        numbers = map(str, range(9))
        with MetricsServer("127.0.0.1", 0, lambda: next(numbers), fresh_s=SECONDS) as server:
            assert [ask(server) for _ in range(3)] == [(200, "0")] * 3
        with MetricsServer("127.0.0.1", 0, lambda: next(numbers), fresh_s=0) as server:
            assert [ask(server) for _ in range(3)] == [(200, "1"), (200, "2"), (200, "3")]

    def test_a_vault_that_does_not_answer_is_503(self) -> None:
        def none() -> str:
            raise VaultUnavailable("no vault answers there")

        with MetricsServer("127.0.0.1", 0, none) as server:
            assert ask(server) == (503, "no vault answers there\n")


class TestReadersThatMeanNoGood:
    def test_more_than_a_few_at_once_are_turned_away(self, server: MetricsServer) -> None:
        silent = [connect(server) for _ in range(vault_metrics._MOST_AT_ONCE)]
        eventually(lambda: server._places._value == 0, "all places are taken")
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            ask(server)
        for each in silent:
            each.close()
        eventually(lambda: server._places._value > 0, "there is room again")
        assert ask(server)[0] == 200

    def test_a_request_that_never_ends_is_not_waited_for(self) -> None:
        with MetricsServer("127.0.0.1", 0, str, deadline_s=0.2) as server:
            with connect(server) as slow:
                slow.sendall(b"GET /metrics HTTP/1.1\r\n")
                assert slow.recv(100) == b"", "the server has ended it"
            eventually(lambda: server._places._value == vault_metrics._MOST_AT_ONCE, "its place is free again")


class TestAddresses:
    def test_a_port_that_is_taken(self, server: MetricsServer) -> None:
        port = server.server_address[1]
        with pytest.raises(VaultError, match=rf"metrics at 127\.0\.0\.1:{port}: Address already in use; name another"):
            MetricsServer("127.0.0.1", port, str)


@pytest.mark.slow
class TestOfTheCommand:
    def test_what_prometheus_reads_is_what_the_vault_says(
        self, start_vault: Callable[..., RunningVault], allocator: CuMemAllocator
    ) -> None:
        parser = pytest.importorskip("prometheus_client.parser")
        vault = start_vault("64MiB", "--slab-size", "16MiB", "--metrics", "0")
        vault.wait_until_ready()
        client = vault.client('a "name"')
        mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
        mine.read(mine.back_up())
        client.mark([mine.back_up()], needed=False)
        with pytest.raises(OutOfHostMemory):
            client.reserve(mine.gpu, [64 * PAGE])
        client.reserve(mine.gpu, [31 * PAGE])
        connection = http.client.HTTPConnection(port_of(vault))
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found = {
            (sample.name.removeprefix("cumem_sleep_vault_"), *sample.labels.values()): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
        }
        status = vault.status()
        (gpu,), (me,) = status["gpus"], status["clients"]
        for name in ("memory", "pinned", "free", "left", "asleep", "awake", "shared", "saved"):
            assert found[f"{name}_bytes",] == status[f"{name}_bytes"]
        assert found["asleep_bytes",] == 32 * PAGE
        assert found["left_bytes",] == 0
        assert found["evicted_bytes_total",] == PAGE
        assert found["refused_total",] == found["clients",] == 1
        assert found["gpu_copied_out_bytes_total", gpu["uuid"]] == 2 * PAGE
        assert found["gpu_last_in_gbps", gpu["uuid"]] == gpu["last_in_gbps"] > 0
        assert found["client_asleep_bytes", str(me["pid"]), 'a "name"'] == 32 * PAGE
        client.close()

    def test_a_port_that_is_taken_ends_it_before_it_takes_anything(
        self, server: MetricsServer, start_vault: Callable[..., RunningVault]
    ) -> None:
        vault = start_vault("64MiB", "--metrics", str(server.server_address[1]))
        assert vault.end() == 2
        assert vault.said("Address already in use")
        assert not vault.socket.exists()
        with pytest.raises(VaultUnavailable):
            VaultClient(vault.socket)


def port_of(vault: RunningVault) -> str:
    eventually(lambda: vault.said("metrics at"), "it says where its metrics are")
    (line,) = (line for line in vault.lines if "metrics at" in line)
    found = re.search(r"http://(127\.0\.0\.1:\d+)/metrics", line)
    assert found is not None
    return found[1]
