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

import numpy as np
import pytest
from processor import slowness
from running import SECONDS, Segment, eventually, seal, take_back
from support import PAGE
from test_failures import descriptors_left

from cumem_sleep import CuMemAllocator, InvalidArgument, OutOfHostMemory, _core, sim
from cumem_sleep.errors import VaultError
from cumem_sleep.vault import protocol
from cumem_sleep.vault.address import VaultAddress
from cumem_sleep.vault.client import Key, Sealed, VaultBackup, VaultClient
from cumem_sleep.vault.ledger import UNIT_BYTES
from cumem_sleep.vault.pool import VaultHost
from cumem_sleep.vault.server import Vault, keep_pauses_short, visible_gpus

pytestmark = [pytest.mark.sim, pytest.mark.slow]

MANY = 6400
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

    def fragments(self) -> list[VaultBackup]:
        """Every other one is free then."""
        backups = self.reserve()
        self.client.release(backups[::2])
        return backups[1::2]

    def seal(self, backups: list[VaultBackup], name: str = "") -> list[Key]:
        keys = [Key(name or str(at), UNIT_BYTES, "") for at in range(len(backups))]
        self.client.seal([Sealed(each, key, "note") for each, key in zip(backups, keys, strict=True)])
        return keys


@pytest.fixture
def many(folder: pathlib.Path, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Many]:
    allocator._operations.open()
    monkeypatch.setattr(selectors, "DefaultSelector", Watched)
    monkeypatch.setattr(_core.HostBlock, "prefault", lambda *_: None)
    address = VaultAddress(folder / "vault.sock")
    vault = Vault(address, MEMORY, visible_gpus(), VaultHost(lambda _: 1 << 40, 1, print), 256 << 20)
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


def test_fragments(many: Many) -> None:
    many.fragments()
    (large,) = many.client.reserve(many.gpu, [2 * MANY * UNIT_BYTES])
    assert len(large.extents) >= MANY
    many.client.release([large])
    assert len(many.reserve(MANY)) == MANY


def test_evictions(many: Many) -> None:
    many.client.mark(many.fragments(), needed=False)
    (large,) = many.client.reserve(many.gpu, [3 * MANY * UNIT_BYTES])
    assert sum(extent.nbytes for extent in large.extents) == MEMORY
    many.client.release([large])
    many.client.mark(many.reserve(3 * MANY), needed=False)
    many.client.reserve(many.gpu, [MEMORY])


def test_a_client_that_goes(many: Many) -> None:
    other = many.connect()
    other.reserve(many.gpu, [UNIT_BYTES] * (3 * MANY))
    other.close()
    eventually(lambda: not many.client.status()["clients"], "it is gone")
    eventually(lambda: many.client.status()["free_bytes"] == MEMORY, "all of it is free")


def test_equal_backups_of_one_client_and_of_others(many: Many) -> None:
    backups = many.reserve(MANY)
    keys = many.seal(backups, "equal")
    other = many.connect()
    assert None not in other.find(many.gpu, keys)
    assert many.client.owners(backups) in (None, [2] * MANY)
    many.client.release(backups)
    other.close()
    eventually(lambda: many.client.status()["free_bytes"] == MEMORY, "all of it is free")


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


def test_a_reservation_whose_memory_others_need_meanwhile_is_given_back(
    many: Many, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = many.connect()
    retained = other.reserve(many.gpu, [UNIT_BYTES] * MANY)
    other.mark(retained, needed=False)
    gone: list[VaultBackup] = []
    between = Between(many.client, lambda: gone.extend(other.mark(retained, needed=True)), monkeypatch)
    with pytest.raises(OutOfHostMemory):
        many.reserve(3 * MANY)
    assert between.calls
    assert len(gone) <= protocol.MAX_BACKUPS
    status = many.client.status()
    assert status["asleep_bytes"] == (MANY - len(gone)) * UNIT_BYTES
    assert status["left_bytes"] == MEMORY - status["asleep_bytes"]
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


def test_looks_and_marks(many: Many) -> None:
    backups = many.fragments()
    keys = many.seal(backups)
    many.client.find(many.gpu, keys)
    for needed in (False, True):
        assert many.client.mark(backups, needed) == []
    many.client.owners(backups)
    for _ in range(20):
        many.client.status()


def test_a_client_that_goes_on_over_a_new_connection(many: Many) -> None:
    backups = many.fragments()
    after = VaultClient(many.socket, "after", SECONDS, succeeds=many.client)
    assert after.succeed(many.client, backups) == []
    many.client = after


def test_refusals(many: Many) -> None:
    many.fragments()
    for _ in range(20):
        with pytest.raises(MemoryError):
            many.client.reserve(many.gpu, [MEMORY])


def test_a_copy_of_fragments(many: Many, allocator: CuMemAllocator) -> None:
    many.fragments()
    nbytes = MANY * UNIT_BYTES // PAGE * PAGE
    sim.configure(device_bytes=2 * nbytes)
    mine = Segment(many.client, allocator.malloc(nbytes, "weights"), nbytes)
    backup = mine.back_up()
    seal(many.client, backup, "x")
    mine.read(backup)


def test_tables(many: Many, allocator: CuMemAllocator) -> None:
    many.fragments()
    nbytes = MANY * UNIT_BYTES // PAGE * PAGE
    sim.configure(device_bytes=2 * nbytes)
    mine = Segment(many.client, allocator.malloc(nbytes, "kv_cache"), nbytes)
    backups = many.client.reserve_now(many.gpu, [nbytes], expendable=True)
    assert backups is not None
    lent, at = mine.lend()
    rows = np.arange(protocol.MAX_ROWS) * 4096
    ranges = np.column_stack((at + np.random.default_rng(1).permutation(rows), rows + 32, np.full(len(rows), 4000)))
    for to_host in (True, False):
        many.client.wait([many.client.copy_table(lent, backups[0], ranges, to_host=to_host)])
    take_back(many.client, [lent])
    many.client.release(backups)


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


def test_a_request_with_too_many_values_is_not_sent(many: Many) -> None:
    with pytest.raises(InvalidArgument, match="values: ask for less at once"):
        many.client._ask("release", numbers=[1] * (1 << 17), slabs=[])
    assert many.client.status()


def test_an_answer_that_would_be_too_long_is_an_error(many: Many) -> None:
    (backup,) = many.client.reserve(many.gpu, [64 << 20])
    key = Key("x", 64 << 20, "")
    many.client.seal([Sealed(backup, key, "n" * 65536)])
    with pytest.raises(InvalidArgument, match="ask for less at once"):
        many.client.find(many.gpu, [key] * 500)
    many.client.release([backup])
    eventually(lambda: many.client.status()["free_bytes"] == MEMORY, "what was found is given back")


def test_what_earlier_parts_found_is_given_back_when_a_later_one_fails(many: Many) -> None:
    small, large = many.client.reserve(many.gpu, [UNIT_BYTES, 64 << 20])
    keys = [Key("small", UNIT_BYTES, ""), Key("large", 64 << 20, "")]
    many.client.seal([Sealed(small, keys[0]), Sealed(large, keys[1], "n" * 65536)])
    with pytest.raises(InvalidArgument, match="ask for less at once"):
        many.client.find(many.gpu, [keys[0]] * protocol.MAX_BACKUPS + [keys[1]] * 500)
    many.client.release([small, large])
    assert many.client.status()["free_bytes"] == MEMORY


def test_nothing_is_set_aside_for_a_reservation_that_cannot_be_answered(many: Many) -> None:
    with descriptors_left(os.getpid(), 0), pytest.raises(VaultError, match="the vault can open no more files"):
        many.reserve(3 * MANY)
    assert many.client.status()["left_bytes"] == MEMORY
    other = many.connect()
    other.reserve(many.gpu, [MEMORY])
    other.close()


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
