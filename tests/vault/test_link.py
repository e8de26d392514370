"""Copies of several clients over one link: they take turns, and what fails is one request's alone."""

from __future__ import annotations

import pathlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from running import Segment, eventually, from_slabs, lone_link, take_back
from support import PAGE, Memory, run_script

from cumem_sleep import CuMemAllocator, DriverError, VaultError, VaultLost, _core, sim
from cumem_sleep.vault import link
from cumem_sleep.vault.address import VaultAddress
from cumem_sleep.vault.client import Range, VaultClient
from cumem_sleep.vault.jobs import BorrowedMemory, Job, LinkPiece
from cumem_sleep.vault.link import VaultLink
from cumem_sleep.vault.pool import VaultHost
from cumem_sleep.vault.server import Vault, visible_gpus
from cumem_sleep.vault.service import Service

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
        names = [LinkPiece(None, 0, self.first + number, 1) for number in range(pieces)]  # type: ignore[arg-type]
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


def test_a_rate_is_of_the_copies_since_the_last_pause(
    monkeypatch: pytest.MonkeyPatch, out: VaultLink, streams: Streams
) -> None:
    now = [100.0]

    def copy_for_half_a_second() -> None:
        now[0] += 0.5

    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(streams, "synchronize", copy_for_half_a_second)
    out._counted_until = now[0]
    client = CopyingClient(out, 1)
    for pause_s, pieces, last in ((0, 3, (3, 1.5)), (0.9, 1, (4, 2.0)), (5, 2, (2, 1.0))):
        eventually(lambda: bool(out._changed._waiters), "the link has nothing to do")  # type: ignore[attr-defined]
        now[0] += pause_s
        client.copy(pieces)
        eventually(lambda: bool(client.ended), "all has been copied")
        client.ended.clear()
        assert out.last == last
    assert out.copied == (6, 3.0)
    assert out.copied.gbps == 2e-9


def test_nobody_starves_however_others_ask(out: VaultLink, streams: Streams) -> None:
    one_copy, many_copies, one_by_one = (CopyingClient(out, number) for number in (1, 2, 3))
    one_copy.copy(60)
    for _ in range(60):
        many_copies.copy(1)
    turns = iter(range(9))

    def again(_: Exception | None) -> None:
        """As soon as its copy has ended."""
        if next(turns, None) is not None:
            piece = LinkPiece(None, 0, 300, 1)  # type: ignore[arg-type]
            out.submit(Job(one_by_one, BorrowedStub(), deque([piece]), again))

    again(None)
    for _ in range(130):
        streams.may_end.release()
    eventually(lambda: len(streams.started) == 129, "all has been copied")
    whose = [name // 100 for name in streams.started]
    together = [client for client in whose[4:] if client != 3][:100]
    assert all({*pair} == {1, 2} for pair in zip(together[::2], together[1::2], strict=True)), "in turn"
    places = [place for place, client in enumerate(whose) if client == 3]
    # A piece ends when the three behind it have begun; then the two others come first.
    assert all(later - earlier <= 6 for earlier, later in pairwise(places))


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
    client.wait([client.write(lent, [Range(backup, 0, 0, 4 * PAGE)])])
    take_back(client, [lent])
    assert sim.stats().calls["cuMemcpyDtoHAsync"] == calls + 8
    client.close()


def test_two_clients_that_sleep_at_once_have_equal_turns(
    monkeypatch: pytest.MonkeyPatch, here: Callable[[], VaultClient], folder: pathlib.Path
) -> None:
    from cumem_sleep.vault import service

    here().close()
    monkeypatch.setattr(service, "PIECE_BYTES", PAGE // 4)
    turns: list[str] = []
    both_have_asked = threading.Event()
    start = VaultLink._start

    def watched(link: VaultLink, job: Job, piece: LinkPiece, stack: ExitStack) -> _core.CopyStream | None:
        turns.append(str(job.client))
        assert both_have_asked.wait(30)
        return start(link, job, piece, stack)

    monkeypatch.setattr(VaultLink, "_start", watched)
    copies = []
    for name in ("early", "late"):
        client = VaultClient(folder / "vault.sock", name)
        mine = Segment(client, CuMemAllocator.get_instance().malloc(4 * PAGE, "weights"), 4 * PAGE)
        (backup,) = client.reserve(mine.gpu, [4 * PAGE])
        lent, offset = mine.lend()
        copies.append((client, lent, client.write(lent, [Range(backup, 0, offset, 4 * PAGE)])))
        client.status()  # requests are taken in order: the vault has the copy by now
        eventually(lambda: bool(turns), "the link has begun with the first")
    both_have_asked.set()
    for client, lent, request in copies:
        client.wait([request])
        take_back(client, [lent])
        client.close()
    early = ["early" in turn for turn in turns]
    assert early.count(True) == early.count(False) == 16
    assert early[2:30] == [False, True] * 14, "in turn, from the moment at which both have asked"


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
        self.most_in_flight = 0

    def to_device(self, _address: int, _block: object, offset: int, nbytes: int) -> None:
        self.ways.append("engine" if nbytes > 16 << 20 else "trial")
        self.spans.append((offset, nbytes))
        self._enqueued.append(self.engine_s * nbytes / (64 << 20))

    def to_device_by_kernel(self, _address: int, _block: object, offset: int, nbytes: int, _blocks: int) -> None:
        self.ways.append("kernel")
        self.spans.append((offset, nbytes))
        self._enqueued.append(self.kernel_s * nbytes / (64 << 20))

    def synchronize(self) -> None:
        self.most_in_flight = max(self.most_in_flight, len(self._enqueued))
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
    monkeypatch.setattr(_core, "device_info", lambda _: SimpleNamespace(host_pointers=True))
    monkeypatch.setattr(_core, "load_copy_kernel", lambda _: None)
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: made.now))
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
    assert ways.count("trial") == 5, "it is tried again and again"
    assert "engine" not in ways, "a trial of a slow engine is short"


def test_after_a_pause_the_engine_is_tried_anew(engine: TimedStreams, into: VaultLink) -> None:
    """A wake right after a sleep does not wait until the engine has shown that it has become slow."""
    engine.copy(into, 100)
    engine.engine_s = 0.0022
    engine.now += 0.1
    assert engine.copy(into, 40) == ["trial"] + ["kernel"] * 40
    engine.engine_s = 0.001
    engine.now += 0.1
    assert engine.copy(into, 40) == ["trial"] + ["engine"] * 40


@pytest.mark.parametrize("engine_s", [0.001, 0.0022])
def test_the_rest_of_a_piece_that_was_tried_follows_it(engine: TimedStreams, into: VaultLink, engine_s: float) -> None:
    """Even if it was the last of its job, or the only one."""
    engine.copy(into, 10)
    engine.engine_s = engine_s
    for pieces in (1, 2):
        engine.now += 0.1
        engine.spans.clear()
        ways = engine.copy(into, pieces)
        assert ways[0] == "trial"
        assert engine.spans == [(0, 16 << 20), (16 << 20, 48 << 20), (0, 64 << 20)][: pieces + 1]


def test_a_job_that_is_cancelled_in_a_trial_ends_once(engine: TimedStreams, into: VaultLink) -> None:
    engine.copy(into, 10)
    engine.now += 0.1
    ended: list[Exception | None] = []
    synchronize = engine.synchronize

    def cancelled() -> None:
        into.cancel("client")
        synchronize()

    engine.synchronize = cancelled  # type: ignore[method-assign]
    block = SimpleNamespace(address=1 << 20, pinned=True)
    todo = deque([LinkPiece(block, 0, 0, 64 << 20)] * 3)  # type: ignore[arg-type]
    into.submit(Job("client", BorrowedStub(), todo, ended.append))
    eventually(lambda: bool(ended), "it has ended")
    assert [str(error) for error in ended] == ["the client has gone"]
    engine.synchronize = synchronize  # type: ignore[method-assign]
    assert engine.copy(into, 1), "the link goes on"


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_piece_that_is_about_to_be_copied_is_not_if_its_job_is_cancelled(
    engine: TimedStreams, into: VaultLink, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It is the last of its job, which nobody finds among those that wait."""
    engine.copy(into, 10)
    engine.now += 0.1
    engine.spans.clear()
    choose = VaultLink._choose

    def gone(link: VaultLink, in_flight: deque[Any]) -> None:
        if how == "cancel":
            link.cancel("client")
        else:
            threading.Thread(target=link.stop).start()
            eventually(lambda: all(job.error for job in link.turns._jobs), "it is told to stop")
        choose(link, in_flight)

    monkeypatch.setattr(VaultLink, "_choose", gone)
    ended: list[Exception | None] = []
    block = SimpleNamespace(address=1 << 20, pinned=True)
    into.submit(Job("client", BorrowedStub(), deque([LinkPiece(block, 0, 0, 64 << 20)]), ended.append))  # type: ignore[arg-type]
    eventually(lambda: bool(ended), "it has ended")
    assert [str(error) for error in ended] == ["the client has gone" if how == "cancel" else "the vault ends"]
    assert engine.spans == []


def test_small_pieces_are_timed_together(engine: TimedStreams, into: VaultLink) -> None:
    """One of 2 MiB alone says little, and alone they would all be slow."""
    assert engine.copy(into, 32 * 20, 2 << 20) == ["kernel"] * 32 + ["trial"] * 32 * 19
    assert engine.most_in_flight == 4
    engine.engine_s *= 2.2
    engine.now += 0.1
    assert engine.copy(into, 32 * 20, 2 << 20) == ["trial"] * 8 + ["kernel"] * (32 * 20 - 8)


def test_an_engine_that_becomes_slow_is_noticed_between_pieces(engine: TimedStreams, into: VaultLink) -> None:
    engine.copy(into, 10)
    engine.engine_s = 0.0022
    assert "kernel" in engine.copy(into, 60)


@pytest.mark.parametrize("reason", ["no host pointers", "not loaded", "not launched"])
def test_without_a_kernel_the_engine_copies_all(
    engine: TimedStreams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    def refuses(*_: object) -> None:
        raise DriverError("cuModuleLoadData", "CUDA_ERROR_INVALID_PTX")

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


@pytest.mark.parametrize("at", range(1, 7))
def test_a_client_that_goes_is_told_of_its_copy_once(engine: TimedStreams, into: VaultLink, at: int) -> None:
    """At whichever piece it is cancelled, also at those that are timed alone."""
    ended: list[Exception | None] = []
    to_device, synchronize = engine.to_device, engine.synchronize
    seen = []

    def counted(*_: object) -> None:
        seen.append(1)
        if len(seen) == at:
            into.cancel("client")

    def by_engine(*arguments: Any) -> None:
        counted()
        to_device(*arguments)

    def by_kernel(*_: object) -> None:
        counted()
        engine._enqueued.append(engine.kernel_s)

    engine.to_device, engine.to_device_by_kernel = by_engine, by_kernel  # type: ignore[method-assign]
    block = SimpleNamespace(address=1 << 20, pinned=True)
    todo = deque(LinkPiece(block, 0, 0, 64 << 20) for _ in range(12))  # type: ignore[arg-type]
    into.submit(Job("client", BorrowedStub(), todo, ended.append))
    eventually(lambda: bool(ended), "it is told")
    engine.to_device, engine.synchronize = to_device, synchronize  # type: ignore[method-assign]
    assert engine.copy(into, 3)  # the link goes on, and has said what it had to say
    assert [type(error) for error in ended] == [VaultError]


@pytest.mark.parametrize("fault", ["not aligned", "not registered"])
def test_what_a_kernel_does_not_reach_goes_by_the_engine(engine: TimedStreams, into: VaultLink, fault: str) -> None:
    """A vault that takes over memory goes on where it cannot be registered."""
    ended: list[Exception | None] = []
    block = SimpleNamespace(address=(1 << 20) + 8 * (fault == "not aligned"), pinned=fault == "not aligned")
    into.submit(Job("client", BorrowedStub(), deque([LinkPiece(block, 0, 0, 64)] * 9), ended.append))  # type: ignore[arg-type]
    eventually(lambda: ended == [None], "all has been copied")
    assert engine.ways == ["trial"] * 9, "as the engine copies what is small"


# A driver that fails


@pytest.fixture
def here(folder: pathlib.Path, allocator: CuMemAllocator) -> Iterator[Callable[[], VaultClient]]:
    """Connects to a vault in a thread of this process, whose driver can be made to fail."""
    allocator._operations.open()
    vault = Vault(
        VaultAddress(folder / "vault.sock"), 16 * PAGE, visible_gpus(), VaultHost(lambda _: 1 << 40, 1, print), 4 * PAGE
    )
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


@pytest.mark.parametrize("asks", [False, True])
def test_a_client_goes_on_when_all_that_it_lent_is_returned(
    here: Callable[[], VaultClient], allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """Until then its memory would not be free, whoever has released it."""
    client = here()
    mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
    (backup,) = client.reserve(mine.gpu, [PAGE])
    lent, offset = mine.lend()
    client.wait([client.write(lent, [Range(backup, 0, offset, PAGE)])])
    closes, may_close = threading.Event(), threading.Event()
    close = BorrowedMemory.close

    def slowly(memory: BorrowedMemory) -> None:
        closes.set()
        assert may_close.wait(30)
        close(memory)

    monkeypatch.setattr(BorrowedMemory, "close", slowly)
    if asks:
        client.begin_to_take_back([lent])
        assert closes.wait(30)
    client._lost = VaultLost("it was silent", may_go_on=True)
    after = VaultClient(client.path, succeeds=client)
    gone: list[object] = []
    thread = threading.Thread(target=lambda: gone.append(after.succeed(client, [backup])))
    thread.start()
    assert closes.wait(30)
    thread.join(0.5)
    assert thread.is_alive()
    may_close.set()
    thread.join(30)
    assert gone == [[]]
    mine.client = after
    mine.read(backup)
    after.close()


def test_a_piece_of_which_a_part_is_in_flight_is_waited_for(
    here: Callable[[], VaultClient], allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is unmapped next."""
    nbytes = 18 * (1 << 20)  # two launches
    block = _core.HostBlock(nbytes, -1)
    block.pin(0)
    closed = []
    close = _core.CopyStream.__exit__

    def closes(stream: _core.CopyStream, *arguments: object) -> None:
        close(stream, *arguments)
        closed.append(stream)

    here().close()
    address = allocator.malloc(nbytes, "weights")
    monkeypatch.setattr(_core.CopyStream, "__exit__", closes)
    ended: list[tuple[Exception | None, int]] = []
    into = lone_link(0, to_host=False)
    sim.fail("cuLaunchKernel", after=1)
    sim.fail("cuMemcpyHtoDAsync")
    pieces = deque([LinkPiece(block, 0, 0, nbytes)])
    into.submit(Job("client", BorrowedStub(address), pieces, lambda error: ended.append((error, len(closed)))))
    eventually(lambda: bool(ended), "it is told")
    sim.reset()
    ((error, closed_before),) = ended
    assert isinstance(error, DriverError)
    assert closed_before == 1, "the stream of the first launch was closed, which waits"
    into.stop()
    block.close()
    allocator.free(address)


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
        client.wait([client.write(lent, mine.ranges(backup, offset))])
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
        host = VaultHost(lambda _: 1 << 40, 1, print)
        vault = Vault(VaultAddress(pathlib.Path(SOCKET)), 4 * PAGE, visible_gpus(), host)
        thread = threading.Thread(target=vault.run)
        thread.start()
        client = VaultClient(pathlib.Path(SOCKET))
        mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
        (backup,) = client.reserve(mine.gpu, [PAGE])
        sim.fail("cuStreamSynchronize", error="CUDA_ERROR_INVALID_VALUE")
        lent, offset = mine.lend()
        with raises(DriverError, "cuStreamSynchronize"):
            client.wait([client.write(lent, mine.ranges(backup, offset))])
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
        host = VaultHost(lambda _: 1 << 40, 1, lines.append)
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
            client.wait([client.write(lent, [Range(backup, 0, 0, PAGE)])])
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
    host = VaultHost(lambda _: 1 << 40, 1, lines.append, try_again_s=0.0)
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


def test_memory_that_the_driver_does_not_take_back_is_offered_again(
    here: Callable[[], VaultClient], allocator: CuMemAllocator
) -> None:
    client = here()
    mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
    (backup,) = client.reserve(mine.gpu, [PAGE])
    before = sim.stats().mapped_bytes
    sim.fail("cuMemUnmap", times=10**6)
    mine.write(backup)
    assert sim.stats().mapped_bytes == before + PAGE
    sim.reset()
    eventually(lambda: sim.stats().mapped_bytes == before, "it is given back")
    client.close()


def test_a_link_whose_thread_does_not_start_keeps_nothing(
    here: Callable[[], VaultClient], allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, other = here(), here()
    mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
    (backup,) = client.reserve(mine.gpu, [PAGE])

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Service, "_link", refuse)
        with pytest.raises(VaultLost, match="the vault has failed at its request"):
            mine.write(backup)
    client.close()
    eventually(lambda: other.status()["free_bytes"] == 16 * PAGE, "nothing is kept")
    other.close()


def test_a_mistake_of_the_vault_costs_one_client(
    here: Callable[[], VaultClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cumem_sleep.vault import service

    victim, other = here(), here()
    broken = {**service._REQUESTS, "status": lambda *_: 1 // 0}
    monkeypatch.setattr(service, "_REQUESTS", broken)
    with pytest.raises(VaultLost, match="the vault has failed at its request"):
        victim.status()
    assert other.reserve(other.gpus[0], [PAGE])[0].nbytes == PAGE
    other.close()
