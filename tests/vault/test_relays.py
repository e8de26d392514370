"""Links of other GPUs help a copy: the bytes are right whoever carries them, and a relay that fails costs nothing."""

from __future__ import annotations

import operator
import os
import pathlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
from running import Segment, eventually, take_back
from support import PAGE, Memory

from cumem_sleep import CuMemAllocator, DriverError, _core, sim
from cumem_sleep.store import copier
from cumem_sleep.vault import jobs, link, relay, service
from cumem_sleep.vault.address import VaultAddress
from cumem_sleep.vault.client import VaultClient
from cumem_sleep.vault.jobs import BorrowedMemory, Job, LinkPiece
from cumem_sleep.vault.link import LinkGroup, VaultLink
from cumem_sleep.vault.pool import VaultHost
from cumem_sleep.vault.relay import Relay, Relaying
from cumem_sleep.vault.server import Vault, visible_gpus

pytestmark = [pytest.mark.sim, pytest.mark.slow]

PAGES = 16  # of the memory that is copied
TOTAL = PAGES * PAGE


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of half a page, each worth it."""
    for module in (jobs, relay):
        monkeypatch.setattr(module, "RELAYED_BYTES", PAGE // 2)
    monkeypatch.setattr(relay, "_LEFT_BYTES", 0)
    monkeypatch.setattr(relay, "_MOST_TRIALS", 0)
    monkeypatch.setattr(link, "WORTH_RELAYING_BYTES", PAGE)
    monkeypatch.setattr(link, "QUIET_S", 0.0)
    monkeypatch.setattr(service, "PIECE_BYTES", PAGE)


class Host:
    """A vault in a thread of this process, on three GPUs whose links help each other."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / "vault.sock"
        gpus = visible_gpus()
        host = VaultHost(1, print)
        self.vault = Vault(VaultAddress(self.path), 8 * TOTAL, gpus, host, TOTAL, gpus, gpus)
        self.thread = threading.Thread(target=self.vault.run)
        self.thread.start()
        first = self.client()
        eventually(lambda: first.status()["pinned_bytes"] == 8 * TOTAL, "all memory is there")
        first.close()

    def client(self) -> VaultClient:
        return VaultClient(self.path)

    def links(self, to_host: bool) -> list[VaultLink]:
        return self.vault._service._groups[to_host].links

    def relayed_bytes(self, to_host: bool) -> list[int]:
        return [each.relayed.nbytes for each in sorted(self.links(to_host), key=lambda each: each.device)]

    def relays(self, to_host: bool) -> list[Relay]:
        return [each._relay for each in self.links(to_host)]


@pytest.fixture
def host(folder: pathlib.Path, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    sim.configure(devices=3)
    allocator._operations.open()
    running = Host(folder)
    monkeypatch.setattr(threading, "excepthook", running.vault.thread_failed)  # or a test would hang, not fail
    yield running
    running.vault.stop(wait=False)
    running.thread.join(30)
    assert not running.thread.is_alive()
    sim.reset()
    sim.configure(devices=1)


class Holding:
    """The link of GPU 0 copies nothing until the test says so: what is copied before that, others carry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_over: Callable[[], bool] = lambda: True
        begin = VaultLink._begin

        def held(mine: VaultLink) -> None:
            if mine.device == 0:
                eventually(self.is_over, "others carry enough")
            begin(mine)

        monkeypatch.setattr(VaultLink, "_begin", held)


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Holding:
    return Holding(monkeypatch)


def copies(client: VaultClient, allocator: CuMemAllocator, memory: Memory) -> None:
    """Out and in again."""
    mine = Segment(client, allocator.malloc(TOTAL, "weights"), TOTAL)
    content = memory.fill_random(mine.address, TOTAL)
    backup = mine.back_up()
    memory.fill_random(mine.address, TOTAL)
    mine.read(backup)
    assert memory.read(mine.address, TOTAL) == content
    client.release([backup])
    allocator.free(mine.address)


def test_the_bytes_are_right_whoever_carries_them(
    host: Host, holding: Holding, allocator: CuMemAllocator, memory: Memory
) -> None:
    client = host.client()
    mine = Segment(client, allocator.malloc(TOTAL, "weights"), TOTAL)
    content = memory.fill_random(mine.address, TOTAL)
    holding.is_over = lambda: all(host.relayed_bytes(to_host=True)[1:])
    backup = mine.back_up()
    memory.fill_random(mine.address, TOTAL)
    holding.is_over = lambda: all(host.relayed_bytes(to_host=False)[1:])
    lent, offset = mine.lend()
    relays = client.wait([mine.begin(backup, lent, offset, to_host=False)])
    take_back(client, [lent])
    assert memory.read(mine.address, TOTAL) == content
    assert relays == {_core.device_info(device).uuid for device in (1, 2)}
    for direction in ("out", "in"):
        facts = client.status()["gpus"]
        relayed = [gpu[f"relayed_{direction}_bytes"] for gpu in facts]
        assert relayed[0] == 0
        assert min(relayed[1:]) > 0
        assert facts[0][f"copied_{direction}_bytes"] + sum(relayed) == TOTAL
        assert [gpu[f"copied_{direction}_bytes"] for gpu in facts[1:]] == [0, 0]
    client.close()


def test_staging_memory_is_given_back(
    host: Host, holding: Holding, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "STAGING_S", 0.1)
    client = host.client()
    before = sim.stats().mapped_bytes
    holding.is_over = lambda: all(host.relayed_bytes(to_host=True)[1:])
    copies(client, allocator, memory)
    eventually(
        lambda: (
            sim.stats().mapped_bytes == before
            and not any(each.is_open for to_host in (True, False) for each in host.relays(to_host))
        ),
        "nothing is left",
    )
    relayed = host.relayed_bytes(to_host=True)
    holding.is_over = lambda: all(map(operator.gt, host.relayed_bytes(to_host=True)[1:], relayed[1:]))
    copies(client, allocator, memory)  # and taken again
    client.close()


def test_a_gpu_whose_memory_is_full_relays_nothing(
    host: Host,
    allocator: CuMemAllocator,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(relay, "_LEFT_BYTES", 1 << 60)
    client = host.client()
    for _ in range(3):
        copies(client, allocator, memory)
    assert [*host.relayed_bytes(to_host=True), *host.relayed_bytes(to_host=False)] == [0] * 6
    said = [record.message for record in caplog.records if "too little memory left" in record.message]
    assert len(said) == len(set(said)) <= 4
    client.close()


def test_peers_that_cannot_access_it_relay_nothing(
    host: Host,
    allocator: CuMemAllocator,
    memory: Memory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(_device: int, _nbytes: int, peers: list[int]) -> _core.Scratch:
        assert peers
        raise DriverError("cuMemSetAccess", "CUDA_ERROR_INVALID_DEVICE")

    monkeypatch.setattr(_core, "Scratch", refuses)
    client = host.client()
    for _ in range(2):
        copies(client, allocator, memory)
    assert sum(host.relayed_bytes(to_host=True)) + sum(host.relayed_bytes(to_host=False)) == 0
    said = [record.message for record in caplog.records if "relays nothing" in record.message]
    assert 0 < len(said) == len(set(said)) <= 4
    client.close()


@pytest.mark.parametrize(
    "call",
    [
        "cuMemCreate",
        "cuEventCreate",
        "cuStreamWaitEvent",
        "cuMemcpyDtoDAsync",
        "cuMemcpyHtoDAsync",
        "cuStreamSynchronize",
    ],
)
def test_a_relay_that_fails_leaves_its_pieces_to_others(
    host: Host,
    holding: Holding,
    allocator: CuMemAllocator,
    memory: Memory,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    client = host.client()
    mine = Segment(client, allocator.malloc(TOTAL, "weights"), TOTAL)
    content = memory.fill_random(mine.address, TOTAL)
    backup = mine.back_up()
    memory.fill_random(mine.address, TOTAL)
    memory.close()
    resting = [each for each in host.relays(to_host=False) if each.device]
    holding.is_over = lambda: any(each.refusal(0) for each in resting)
    sim.fail(call, error="CUDA_ERROR_INVALID_VALUE")
    mine.read(backup)
    assert memory.read(mine.address, TOTAL) == content
    holding.is_over = lambda: True
    mine.read(backup)
    assert memory.read(mine.address, TOTAL) == content
    assert sum("relays nothing to GPU 0" in record.message for record in caplog.records) == 1
    client.close()


CALLS = [
    "cuMemImportFromShareableHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemGetInfo",
    "cuStreamCreate",
    "cuEventCreate",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoDAsync",
    "cuStreamSynchronize",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
]


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_at_every_driver_call_that_fails_bytes_are_right_or_the_request_fails(
    host: Host, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(link, "STAGING_S", 0.01)
    client = host.client()
    mine = Segment(client, allocator.malloc(TOTAL, "weights"), TOTAL)
    content = memory.fill_random(mine.address, TOTAL)
    held = sim.stats().mapped_bytes
    for after in range(6):
        for to_host in (True, False):
            for each in host.links(to_host):
                each._relay._paused.clear()
                each._relay._failure = ""
                each._relay._trials.clear()
        sim.fail(call, after=after, error="CUDA_ERROR_INVALID_VALUE")
        (backup,) = client.reserve(mine.gpu, [TOTAL])
        lent, offset = mine.lend()
        for to_host in (True, False):
            with suppress(DriverError):
                client.wait([mine.begin(backup, lent, offset, to_host=to_host)])
        take_back(client, [lent])
        sim.reset()
        memory.write(mine.address, content)
        mine.write(backup)
        memory.fill_random(mine.address, TOTAL)
        mine.read(backup)
        assert memory.read(mine.address, TOTAL) == content
        client.release([backup])
    eventually(lambda: sim.stats().mapped_bytes == held, "nothing is left")
    client.close()


@pytest.mark.slow
def test_clients_of_several_gpus_that_come_and_go(host: Host, allocator: CuMemAllocator) -> None:
    """Each link is helped and helps; clients end in the middle of copies."""
    begun = time.monotonic()
    failures: list[BaseException] = []

    def is_over() -> bool:
        seconds = time.monotonic() - begun
        return seconds > 60 or (seconds > 10 and min(host.relayed_bytes(to_host=True)) > 0)

    def run(device: int) -> None:
        chance, memory = random.Random(device), Memory()
        try:
            address = allocator.malloc(TOTAL, "weights", device)
            while not is_over() and not failures:
                client = host.client()
                mine = Segment(client, address, TOTAL, device)
                for _ in range(chance.randrange(1, 4)):
                    content = memory.fill_random(address, TOTAL, device)
                    backup = mine.back_up()
                    memory.fill_random(address, TOTAL, device)
                    mine.read(backup)
                    assert memory.read(address, TOTAL, device) == content
                    client.release([backup])
                if chance.random() < 0.5:  # its copies are under way
                    (backup,) = client.reserve(mine.gpu, [TOTAL])
                    lent, offset = mine.lend()
                    mine.begin(backup, lent, offset, to_host=True)
                    client._channel.close()
                client.close()
            memory.close()
            allocator.free(address)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(device,)) for device in (0, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert min(host.relayed_bytes(to_host=True)) > 0
    client = host.client()
    eventually(lambda: not client.status()["awake_bytes"] and not client.status()["clients"], "nothing is left")
    client.close()


# With a driver whose copies the test ends


class Carrying:
    """Stands in for the driver: copies take as long as the test says, by way of a clock that nothing else moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.link_s, self.peer_s = 0.0003, 0.00004  # for each piece
        self.may_end = threading.Event()
        self.may_end.set()
        self.carried: list[tuple[int, str]] = []
        self.late_s: deque[float] = deque()  # by which the first copies between GPUs take longer
        self.nbytes: list[int] = []  # of each copy to the host

    def stream(self, device: int) -> CarryingStream:
        return CarryingStream(self, device)


class CarryingStream:
    def __init__(self, driver: Carrying, device: int) -> None:
        self._driver, self.device = driver, device
        self._seconds = 0.0

    def __enter__(self) -> CarryingStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def to_host(self, _block: object, _offset: int, _address: int, nbytes: int) -> None:
        self._driver.carried.append((self.device, "link"))
        self._driver.nbytes.append(nbytes)
        self._seconds += self._driver.link_s

    def within_devices(self, *_: object) -> None:
        self._driver.carried.append((self.device, "peer"))
        self._seconds += self._driver.peer_s + (self._driver.late_s.popleft() if self._driver.late_s else 0.0)

    def follow(self, other: CarryingStream) -> None:
        self._seconds, other._seconds = self._seconds + other._seconds, 0.0

    def synchronize(self) -> None:
        assert self._driver.may_end.wait(30)
        self._driver.now, self._seconds = self._driver.now + self._seconds, 0.0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Carrying:
    made = Carrying()
    clock = SimpleNamespace(monotonic=lambda: made.now, perf_counter=lambda: made.now)
    monkeypatch.setattr(_core, "CopyStream", made.stream)
    monkeypatch.setattr(_core, "memory_info", lambda _: (1 << 40, 1 << 40))
    monkeypatch.setattr(_core, "Scratch", lambda *_: SimpleNamespace(address=0, close=lambda: None))
    monkeypatch.setattr(_core, "can_access_peer", lambda *_: True)
    for module in (link, copier, relay):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(relay, "_LEAST_TIMED_BYTES", 1)
    monkeypatch.setattr(relay, "_MOST_TRIALS", 3)
    return made


class Reached(BorrowedMemory):
    def __init__(self) -> None:
        super().__init__(-1, 0, TOTAL)

    def address(self) -> int:
        return 0


@pytest.fixture
def group() -> Iterator[LinkGroup]:
    made = LinkGroup(True, Relaying([0, 1]).refusal)
    yield made
    for each in made.links:
        each.stop()


@pytest.fixture
def may_copy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, the link of GPU 0 copies nothing."""
    may_copy, begin = threading.Event(), VaultLink._begin

    def held(mine: VaultLink) -> None:
        assert mine.device or may_copy.wait(30)
        begin(mine)

    monkeypatch.setattr(VaultLink, "_begin", held)
    return may_copy


def ask(mine: VaultLink, pieces: int, nbytes: int = PAGE // 2) -> list[Exception | None]:
    ended: list[Exception | None] = []
    block = SimpleNamespace(pinned=True)
    todo = deque(LinkPiece(block, 0, 0, nbytes) for _ in range(pieces))  # type: ignore[arg-type]
    mine.submit(Job("client", Reached(), todo, ended.append))
    return ended


def test_a_relay_is_judged_by_its_rate(
    driver: Carrying, group: LinkGroup, may_copy: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """As slow as without NVLink it rests a while, which is said once."""
    driver.peer_s = 0.0002
    home, helper = VaultLink(0, group), VaultLink(1, group)
    for carried in (3, 6):
        may_copy.clear()
        asked = ask(home, 40)
        eventually(lambda: bool(helper._relay.refusal(0)), "it was judged")
        may_copy.set()
        eventually(lambda ended=asked: ended == [None], "all is copied")  # type: ignore[misc]
        assert [way for way in driver.carried if way != (0, "link")] == [(0, "peer"), (1, "link")] * carried
        driver.now += relay._AGAIN_S + 1
    assert sum("copies between them are slow" in record.message for record in caplog.records) == 1
    driver.peer_s = 0.00004
    may_copy.clear()
    ended = ask(home, 40)
    eventually(lambda: home.queue.waiting_bytes < PAGE, "it carries all that is worth it")
    may_copy.set()
    eventually(lambda: ended == [None], "all is copied")


def test_a_link_helps_nobody_while_its_own_gpu_needs_it(
    driver: Carrying, group: LinkGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "QUIET_S", 0.005)
    home, helper = VaultLink(0, group), VaultLink(1, group)
    driver.may_end.clear()
    of_home, of_helper = ask(home, 40), ask(helper, 40)
    eventually(lambda: len(driver.carried) == 8, "both have as much in flight as may be")
    driver.may_end.set()
    eventually(lambda: of_home == of_helper == [None], "all is copied")
    assert (0, "peer") not in driver.carried[: 8 + 36]
    assert helper.copied.nbytes == 40 * (PAGE // 2)


def test_memory_stays_mapped_while_another_gpu_may_still_copy_from_it(host: Host, allocator: CuMemAllocator) -> None:
    """Its stream could not be waited for."""
    client = host.client()
    mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
    descriptor, _, nbytes = _core.export_memory(mine.address)
    memory = _core.ImportedMemory(descriptor, 0, nbytes)
    os.close(descriptor)
    staging = _core.Scratch(1, PAGE, [0])
    stream = _core.CopyStream(0)
    stream.within_devices(memory.address, staging.address, PAGE)
    for call in ("cuStreamSynchronize", "cuMemAlloc", "cuCtxSynchronize"):
        sim.fail(call, error="CUDA_ERROR_UNKNOWN", times=1_000_000)
    with stream:
        pass
    mapped = sim.stats().mapped_bytes
    staging.close()
    assert sim.stats().mapped_bytes == mapped
    sim.reset()
    memory.close()
    _core.reclaim()
    assert sim.stats().mapped_bytes == mapped - 2 * PAGE
    client.close()
