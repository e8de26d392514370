"""No request holds up other clients, whatever it asks for and whatever the vault holds."""

from __future__ import annotations

import gc
import os
import pathlib
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from processor import slowness
from running import SECONDS, eventually

from cumem_sleep import CuMemAllocator, OutOfHostMemory, _core, sim
from cumem_sleep.vault import protocol
from cumem_sleep.vault.address import VaultAddress
from cumem_sleep.vault.client import VaultBackup, VaultClient
from cumem_sleep.vault.pool import VaultHost
from cumem_sleep.vault.server import Vault, keep_pauses_short, visible_gpus
from cumem_sleep.vault.slabs import UNIT_BYTES

pytestmark = [pytest.mark.sim, pytest.mark.slow]

MANY = 3 * protocol.MAX_BACKUPS
MEMORY = 3 * MANY * UNIT_BYTES
HOLD_S = 0.1  # of the processor's time: others may have the processor meanwhile


class Watched(selectors.DefaultSelector):
    """Notes for how long the thread that it serves was at work between two looks at its clients."""

    longest_s = 0.0
    _looked = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._looked:
            Watched.longest_s = max(Watched.longest_s, time.thread_time() - self._looked)
        found = super().select(timeout)
        self._looked = time.thread_time()
        return found


class Many:
    """A vault in a thread of this process, and what clients do to it."""

    def __init__(self, socket: pathlib.Path) -> None:
        self.socket = socket
        self.client = self.connect()
        self.gpu = self.client.gpus[0]
        eventually(lambda: self.client.status()["pinned_bytes"] >= MEMORY, "all memory is there")

    def connect(self) -> VaultClient:
        return VaultClient(self.socket, "many", SECONDS)

    def reserve(self, count: int = 2 * MANY) -> list[VaultBackup]:
        return self.client.reserve(self.gpu, [UNIT_BYTES] * count)


@pytest.fixture
def many(folder: pathlib.Path, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Many]:
    allocator._operations.open()
    monkeypatch.setattr(selectors, "DefaultSelector", Watched)
    monkeypatch.setattr(_core.HostBlock, "prefault", lambda *_: None)
    address = VaultAddress(folder / "vault.sock")
    vault = Vault(address, MEMORY, visible_gpus(), VaultHost(1, print), 256 << 20)
    thread = threading.Thread(target=vault.run)
    before = gc.get_threshold(), sys.get_int_max_str_digits()
    keep_pauses_short()
    slow_before = slowness()
    thread.start()
    try:
        made = Many(folder / "vault.sock")
        Watched.longest_s = 0
        yield made
        made.client.close()
    finally:
        vault.stop(wait=False)
        thread.join(SECONDS)
        gc.set_threshold(*before[0])
        sys.set_int_max_str_digits(before[1])
        sim.reset()
    assert not thread.is_alive()
    limit_s = HOLD_S * max(slow_before, slowness())
    print(f"the longest hold: {Watched.longest_s * 1e3:.1f} ms, of {limit_s * 1e3:.1f}")
    assert Watched.longest_s < limit_s


class Between:
    """Calls something after each part of a reservation but the last."""

    def __init__(self, client: VaultClient, then: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.then, self.calls = client, then, 0
        self.ask = VaultClient._ask
        monkeypatch.setattr(VaultClient, "_ask", lambda client, verb, **facts: self.asked(client, verb, facts))

    def asked(self, client: VaultClient, verb: str, facts: dict[str, object]) -> dict[str, object]:
        answer = self.ask(client, verb, **facts)
        if client is self.client and facts.get("more_bytes"):
            self.calls += 1
            self.then()
        return answer


def test_others_get_nothing_of_what_is_reserved_in_parts(many: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    other = many.connect()

    def try_to_reserve() -> None:
        with pytest.raises(OutOfHostMemory):
            other.reserve(many.gpu, [UNIT_BYTES])

    between = Between(many.client, try_to_reserve, monkeypatch)
    other.reserve(many.gpu, [MANY * UNIT_BYTES])
    assert len(many.reserve(2 * MANY)) == 2 * MANY
    assert between.calls == 2 * MANY // protocol.MAX_BACKUPS - 1
    other.close()


def test_a_client_that_goes_in_the_middle_of_a_reservation_keeps_nothing(many: Many) -> None:
    gone = many.connect()
    gone._ask("reserve", gpu=many.gpu, sizes=[UNIT_BYTES], more_bytes=MEMORY - UNIT_BYTES, wait=True, expendable=False)
    with pytest.raises(OutOfHostMemory):
        many.reserve(1)
    gone.close()
    eventually(lambda: many.client.status()["left_bytes"] == MEMORY, "all is free")
    assert len(many.reserve(3 * MANY)) == 3 * MANY


def test_many_requests_that_come_at_once(many: Many) -> None:
    """Others are heard between them."""
    (backup,) = many.reserve(1)
    numbers = [backup.number] * protocol.MAX_BACKUPS
    for at in range(200):
        many.client._channel.send({"id": 10_000 + at, "do": "mark", "numbers": numbers, "needed": True})
    assert many.connect().status()["pid"] == os.getpid()
    many.client.status()


REQUESTS: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: b'{"id":1,"do":"release","slabs":[],"numbers":[' + b"1," * 1_000_000 + b"1]}",
    "lists": lambda: b'{"id":1,"do":"release","slabs":[],"numbers":[' + b"[]," * 650_000 + b"1]}",
    "fractions": lambda: b'{"id":1,"do":"release","slabs":[],"numbers":[' + b"1.5e-300," * 130_000 + b"1]}",
    "long numbers": lambda: b'{"id":1,"do":"release","slabs":[],"numbers":[' + (b"1" * 4000 + b",") * 500 + b"1]}",
    "strings": lambda: b'{"id":1,"do":"release","slabs":[],"numbers":[' + b'"a\\u0061",' * 130_000 + b"1]}",
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_a_request_near_the_limit(many: Many, request_: Callable[[], bytes]) -> None:
    text = request_()
    assert protocol.MAX_REQUEST_BYTES // 2 < len(text) <= protocol.MAX_REQUEST_BYTES
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(many.socket))
        hello = b'{"id":0,"do":"hello","name":"raw","identity":"raw"}'
        for said in (hello, text):
            connection.sendall(protocol._HEADER.pack(b"CMSV", protocol.VERSION, 0, len(said)) + said)
        content = b""
        while b'"cut"' not in content and b'"error"' not in content:
            chunk = connection.recv(1 << 16)
            assert chunk
            content += chunk


def test_descriptors_of_an_unfinished_message_are_bounded(many: Many) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(many.socket))
        null = os.open(os.devnull, os.O_RDONLY)
        with suppress(BrokenPipeError, ConnectionResetError):
            while True:
                socket.send_fds(connection, [b"C"], [null] * protocol.MAX_DESCRIPTORS)
                assert len(os.listdir("/proc/self/fd")) < before + 5 * protocol.MAX_DESCRIPTORS
        os.close(null)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "they are closed")
