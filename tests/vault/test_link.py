"""Copies of several clients over one link: they take turns, and what fails is one request's alone."""

from __future__ import annotations

import pathlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from running import Segment, eventually, from_slabs, lone_link, table, take_back
from support import PAGE, Memory, run_script

from cumem_sleep import CuMemAllocator, DriverError, VaultError, _core, sim
from cumem_sleep.store import copier
from cumem_sleep.vault import link
from cumem_sleep.vault.address import VaultAddress
from cumem_sleep.vault.client import VaultClient
from cumem_sleep.vault.jobs import BorrowedMemory, Job, LinkPiece
from cumem_sleep.vault.link import VaultLink
from cumem_sleep.vault.pool import VaultHost
from cumem_sleep.vault.server import Vault, visible_gpus

pytestmark = pytest.mark.sim


class Streams:
    """Stands in for the driver: copies end when the test says so."""

    device = 0

    def __init__(self) -> None:
        self.started: list[int] = []
        self.may_end = threading.Semaphore(0)

    def __call__(self, _device: int) -> Streams:
        return self

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def to_host(self, _block: object, _offset: int, address: int, _nbytes: int) -> None:
        self.started.append(address)

    def synchronize(self) -> None:
        assert self.may_end.acquire(timeout=30)


class BorrowedStub(BorrowedMemory):
    def __init__(self, address: int = 0) -> None:
        super().__init__(-1, 0, 1 << 20)
        self._address = address

    def address(self) -> int:
        return self._address


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(_core, "CopyStream", made)
    return made


@pytest.fixture
def out(streams: Streams) -> Iterator[VaultLink]:
    made = lone_link(0, to_host=True)
    yield made
    for _ in range(100):
        streams.may_end.release()
    made.stop()


class CopyingClient:
    """Asks for copies; each is named by its number."""

    def __init__(self, out: VaultLink, hundreds: int) -> None:
        self.out, self.first = out, 100 * hundreds
        self.ended: list[Exception | None] = []

    def copy(self, pieces: int) -> None:
        block = SimpleNamespace(pinned=True)
        names = [LinkPiece(block, 0, self.first + number, 1) for number in range(pieces)]  # type: ignore[arg-type]
        self.out.submit(Job(self, BorrowedStub(), deque(names), self.ended.append))


def test_clients_take_turns_piece_by_piece(out: VaultLink, streams: Streams) -> None:
    greedy, modest, late = (CopyingClient(out, number) for number in (1, 2, 3))
    greedy.copy(8)
    eventually(lambda: len(streams.started) == 4, "as many as may be in flight")
    modest.copy(2)
    late.copy(1)
    for _ in range(11):
        streams.may_end.release()
    eventually(lambda: greedy.ended == modest.ended == late.ended == [None], "all has been copied")
    assert streams.started[:4] == [100, 101, 102, 103]
    assert set(streams.started[4:7]) >= {200, 300}
    assert [name for name in streams.started if name < 200] == list(range(100, 108)), "a client's own are in order"
    assert out.copied.nbytes == 11


def test_what_is_in_flight_ends_before_a_cancelled_job_does(out: VaultLink, streams: Streams) -> None:
    gone, stays = CopyingClient(out, 1), CopyingClient(out, 2)
    gone.copy(8)
    stays.copy(1)
    eventually(lambda: len(streams.started) == 4, "as many as may be in flight")
    out.cancel(gone)
    assert gone.ended == []
    for _ in range(10):
        streams.may_end.release()
    eventually(lambda: bool(gone.ended and stays.ended), "both ended")
    assert isinstance(gone.ended[0], VaultError)
    assert stays.ended == [None]
    assert len([name for name in streams.started if name < 200]) <= 4


def test_a_link_that_is_stopped_ends_every_job(out: VaultLink, streams: Streams) -> None:
    clients = [CopyingClient(out, number) for number in range(3)]
    for each in clients:
        each.copy(8)
    for _ in range(10):
        streams.may_end.release()
    out.stop()
    assert all(len(each.ended) == 1 for each in clients)


def test_large_copies_go_in_pieces(monkeypatch: pytest.MonkeyPatch, here: Callable[[], VaultClient]) -> None:
    from cumem_sleep.vault import service

    monkeypatch.setattr(service, "PIECE_BYTES", PAGE // 2)
    client = here()
    mine = Segment(client, CuMemAllocator.get_instance().malloc(4 * PAGE, "weights"), 4 * PAGE)
    calls = sim.stats().calls["cuMemcpyDtoHAsync"]
    backup = client.reserve(mine.gpu, [4 * PAGE])[0]
    lent, _ = mine.lend()
    client.wait([client.copy(lent, backup, table((0, 0, 4 * PAGE)), to_host=True)])
    take_back(client, [lent])
    assert sim.stats().calls["cuMemcpyDtoHAsync"] == calls + 8
    client.close()


# By the copy engine, or by a kernel


class TimedStreams(Streams):
    """Whose copies take a time that the test says for 64 MiB, on a clock that nothing else moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.engine_s, self.kernel_s = 0.001, 0.0011
        self.ways: list[str] = []
        self.spans: list[tuple[int, int]] = []  # (offset in the block, bytes)
        self._enqueued: deque[float] = deque()
        self.before_trials: list[int] = []  # in flight

    def to_device(self, _address: int, _block: object, offset: int, nbytes: int) -> None:
        self.ways.append("engine" if nbytes > 16 << 20 else "trial")
        if self.ways[-1] == "trial":
            self.before_trials.append(len(self._enqueued))
        self.spans.append((offset, nbytes))
        self._enqueued.append(self.engine_s * nbytes / (64 << 20))

    def to_device_by_kernel(self, _address: int, _block: object, offset: int, nbytes: int, _blocks: int) -> None:
        self.ways.append("kernel")
        self.spans.append((offset, nbytes))
        self._enqueued.append(self.kernel_s * nbytes / (64 << 20))

    def synchronize(self) -> None:
        self.now += self._enqueued.popleft()

    def copy(self, into: VaultLink, pieces: int, nbytes: int = 64 << 20) -> list[str]:
        """The ways that they took."""
        self.ways.clear()
        ended: list[Exception | None] = []
        block = SimpleNamespace(address=1 << 20, pinned=True)
        todo = deque(LinkPiece(block, 0, 0, nbytes) for _ in range(pieces))  # type: ignore[arg-type]
        into.submit(Job("client", BorrowedStub(), todo, ended.append))
        eventually(lambda: bool(ended), "all has been copied")
        assert ended == [None]
        return list(self.ways)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TimedStreams:
    made = TimedStreams()
    monkeypatch.setattr(_core, "CopyStream", made)
    monkeypatch.setattr(_core, "memory_info", lambda _: (0, 0))
    monkeypatch.setattr(_core, "device_info", lambda _: SimpleNamespace(host_pointers=True))
    monkeypatch.setattr(_core, "load_copy_kernel", lambda _: None)
    for module in (link, copier):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def into(engine: TimedStreams) -> Iterator[VaultLink]:
    made = lone_link(0, to_host=False)
    yield made
    made.stop()


def test_the_engine_copies_while_it_is_fast(engine: TimedStreams, into: VaultLink) -> None:
    assert engine.copy(into, 200) == ["kernel", "trial"] + ["engine"] * 199, "both were timed alone"


def test_a_kernel_copies_while_the_engine_is_slow(engine: TimedStreams, into: VaultLink) -> None:
    engine.engine_s = 0.0022
    ways = engine.copy(into, 200)
    assert ways[:2] == ["kernel", "trial"]
    assert engine.before_trials == [0] * 5, "it is tried again and again, alone"
    assert "engine" not in ways, "a trial of a slow engine is short"


def refuses(*_: object) -> None:
    raise DriverError("cuModuleLoadData", "CUDA_ERROR_INVALID_PTX")


@pytest.mark.parametrize("reason", ["no host pointers", "not loaded", "not launched"])
def test_without_a_kernel_the_engine_copies_all(
    engine: TimedStreams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    if reason == "no host pointers":
        monkeypatch.setattr(_core, "device_info", lambda _: SimpleNamespace(host_pointers=False))
    elif reason == "not loaded":
        monkeypatch.setattr(_core, "load_copy_kernel", refuses)
    else:
        monkeypatch.setattr(engine, "to_device_by_kernel", refuses)
    into = lone_link(0, to_host=False)
    assert engine.copy(into, 20) + engine.copy(into, 20) == ["engine"] * 40
    into.stop()
    warnings = [record for record in caplog.records if "copy kernel failed" in record.message]
    assert len(warnings) == (reason != "no host pointers")


def test_a_kernel_that_has_failed_is_asked_again_after_a_pause(
    engine: TimedStreams, into: VaultLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine, "to_device_by_kernel", refuses)
        assert engine.copy(into, 20) == ["engine"] * 20
    assert engine.copy(into, 20) == ["engine"] * 20
    engine.now += 2
    assert engine.copy(into, 20) == ["kernel", "trial"] + ["engine"] * 19


def test_time_counts_while_something_is_in_flight(engine: TimedStreams, into: VaultLink) -> None:
    engine.copy(into, 10)
    engine.now += 100
    engine.copy(into, 5)
    assert (into.copied.nbytes, into.last.nbytes) == (15 * (64 << 20), 5 * (64 << 20))
    assert into.copied.seconds == pytest.approx(15 * engine.engine_s, rel=0.2)
    assert into.last.seconds == pytest.approx(5 * engine.engine_s, rel=0.2)


def test_what_a_kernel_does_not_reach_goes_by_the_engine(engine: TimedStreams, into: VaultLink) -> None:
    ended: list[Exception | None] = []
    block = SimpleNamespace(pinned=True)
    into.submit(Job("client", BorrowedStub(), deque([LinkPiece(block, 8, 0, 64)] * 9), ended.append))  # type: ignore[arg-type]
    eventually(lambda: ended == [None], "all has been copied")
    assert engine.ways == ["trial"] * 9, "as the engine copies what is small"


# A driver that fails


@pytest.fixture
def here(folder: pathlib.Path, allocator: CuMemAllocator) -> Iterator[Callable[[], VaultClient]]:
    """Connects to a vault in a thread of this process, whose driver can be made to fail."""
    allocator._operations.open()
    vault = Vault(VaultAddress(folder / "vault.sock"), 16 * PAGE, visible_gpus(), VaultHost(1, print), 4 * PAGE)
    thread = threading.Thread(target=vault.run)
    thread.start()
    first = VaultClient(folder / "vault.sock")
    eventually(lambda: first.status()["pinned_bytes"] == 16 * PAGE, "all memory is there")
    first.close()
    yield lambda: VaultClient(folder / "vault.sock")
    vault.stop(wait=False)
    thread.join(30)
    assert not thread.is_alive()
    vault.stop(wait=False)  # as a second signal does, when all is over
    sim.reset()


CALLS = [
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemcpyDtoHAsync",
    "cuStreamSynchronize",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_fails_one_request(
    here: Callable[[], VaultClient], allocator: CuMemAllocator, memory: Memory, call: str
) -> None:
    client = here()
    mine = Segment(client, allocator.malloc(2 * PAGE, "weights"), 2 * PAGE)
    content = memory.fill_random(mine.address, 2 * PAGE)
    (backup,) = client.reserve(mine.gpu, [2 * PAGE])
    mine.write(backup)  # its streams are there
    memory.close()
    before = sim.stats()
    lent, offset = mine.lend()
    sim.fail(call, error="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(DriverError, match=call):
        client.wait([mine.begin(backup, lent, offset, to_host=True)])
    take_back(client, [lent])
    after = sim.stats()
    assert (after.mapped_bytes, after.reserved_bytes) == (before.mapped_bytes, before.reserved_bytes)
    mine.write(backup)
    assert from_slabs(client, backup) == content
    client.close()


def test_memory_stays_until_its_copies_have_ended_even_if_the_wait_for_them_fails(folder: pathlib.Path) -> None:
    script = """
        import pathlib, sys, threading
        sys.path.insert(0, FOLDER)
        from running import *
        from cumem_sleep.vault.address import VaultAddress
        from cumem_sleep.vault.server import *
        allocator = fresh_allocator()
        allocator._operations.open()
        host = VaultHost(1, print)
        vault = Vault(VaultAddress(pathlib.Path(SOCKET)), 4 * PAGE, visible_gpus(), host)
        thread = threading.Thread(target=vault.run)
        thread.start()
        client = VaultClient(pathlib.Path(SOCKET))
        mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
        (backup,) = client.reserve(mine.gpu, [PAGE])
        sim.fail("cuStreamSynchronize", error="CUDA_ERROR_INVALID_VALUE")
        lent, offset = mine.lend()
        with raises(DriverError, "cuStreamSynchronize"):
            client.wait([mine.begin(backup, lent, offset, to_host=True)])
        take_back(client, [lent])  # unmapped under a copy, it would break the GPU's context
        mine.write(backup)
        client.close()
        vault.stop(wait=False)
        thread.join(30)
        """
    script = script.replace("FOLDER", repr(str(pathlib.Path(__file__).parent)))
    script = script.replace("SOCKET", repr(str(folder / "vault.sock")))
    process = run_script(script, CUMEM_SLEEP_SIM_COPY_DELAY_US="200000")
    assert process.returncode == 0, process.stderr


@pytest.mark.slow
def test_a_gpu_that_is_lost_ends_the_vault_for_the_next_one(folder: pathlib.Path) -> None:
    script = """
        import pathlib, sys, threading
        sys.path.insert(0, FOLDER)
        from running import *
        from cumem_sleep.vault.address import VaultAddress
        from cumem_sleep.vault.server import *
        allocator, memory, lines, failures = fresh_allocator(), Memory(), [], []
        allocator._operations.open()
        path = pathlib.Path.cwd() / "vault.sock"
        host = VaultHost(1, lines.append)
        vault = Vault(VaultAddress(pathlib.Path(SOCKET)), 4 * PAGE, visible_gpus(), host)

        def run():
            with raises(VaultError, "GPU-", "CUDA_ERROR_ECC_UNCORRECTABLE"):
                vault.run()
            failures.append("lost")

        thread = threading.Thread(target=run)
        thread.start()
        client = VaultClient(pathlib.Path(SOCKET))
        mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
        content = memory.fill_random(mine.address, PAGE)
        backup = mine.back_up()
        lent, _ = mine.lend()
        sim.fail("cuMemcpyDtoHAsync", error="CUDA_ERROR_ECC_UNCORRECTABLE")
        sim.fail("cuMemGetInfo", error="CUDA_ERROR_ECC_UNCORRECTABLE")
        with raises(DriverError, "ECC"):
            client.wait([client.copy(lent, backup, table((0, 0, PAGE)), to_host=True)])
        thread.join(30)
        assert failures == ["lost"], failures
        assert client.lost is not None
        assert from_slabs(client, backup) == content
        """
    script = script.replace("FOLDER", repr(str(pathlib.Path(__file__).parent)))
    process = run_script(script.replace("SOCKET", repr(str(folder / "vault.sock"))))
    assert process.returncode == 0, process.stderr


def test_memory_that_cannot_be_registered_is_said_and_tried_again(
    folder: pathlib.Path, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cumem_sleep.vault import protocol

    allocator._operations.open()
    lines: list[str] = []
    monkeypatch.setattr(protocol, "BUSY_INTERVAL_S", 0.02)
    sim.fail("cuMemHostRegister", after=1)
    host = VaultHost(1, lines.append, try_again_s=0.0)
    vault = Vault(VaultAddress(folder / "vault.sock"), 4 * PAGE, visible_gpus(), host, PAGE)
    thread = threading.Thread(target=vault.run)
    thread.start()
    client = VaultClient(folder / "vault.sock")
    eventually(lambda: client.status()["pinned_bytes"] == 4 * PAGE, "all memory is there in the end")
    assert any("cannot take more now" in line and "cuMemHostRegister" in line for line in lines)
    assert client.status()["short"] == ""
    vault.stop(wait=False)
    thread.join(30)
    assert client.lost is not None
