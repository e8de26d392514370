"""Who spills is attacked: what came late, who takes no messages, what nobody may lose, and what comes back."""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from disk_faults import DiskFaults
from running import RunningVault
from support import Memory
from test_clients import FullKernel
from test_failures import descriptors_left
from test_recovery import StoppedVault
from test_sleeping import leave
from test_spill import SIZE, SpillingSleeper, sleepers, spill, spilling
from test_storm import Vaults

from cumem_sleep import CuMemAllocator
from cumem_sleep.errors import VaultError, VaultLost, VaultUnavailable
from cumem_sleep.vault import memory as memory_module
from cumem_sleep.vault import moves
from cumem_sleep.vault import spill as spill_module
from cumem_sleep.vault.client import VaultClient
from cumem_sleep.vault.files import SpillError, SpillFiles, SpillFolder
from cumem_sleep.vault.ledger import FILES, UNIT_BYTES, Entry, Key, Ledger, SlabRange
from cumem_sleep.vault.service import Service
from cumem_sleep.vault.session import Session
from cumem_sleep.vault.spill import RingReader, Spiller, _Batch, _write

__all__ = ["sleepers", "spill", "spilling"]
pytestmark = [pytest.mark.sim, pytest.mark.slow]


def take_memory(vault: RunningVault, nbytes: int = 0) -> None:
    """For a moment, so that what sleeps has to go to files; all of it by default."""
    other = vault.client("takes memory")
    status = vault.status()
    other.reserve(status["gpus"][0]["uuid"], [nbytes or status["memory_bytes"]])
    other.close()


def test_who_hears_of_a_file_has_it_at_once(
    spilling: RunningVault, sleepers: list[SpillingSleeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vault moves it while its owner looks."""
    first = sleepers[0]
    first.sleep()
    real, reads = moves.MoveReader.read, []

    def late(reader: moves.MoveReader) -> list[moves.Move]:
        if not reads:
            reads.append(reader)
            take_memory(spilling)
        return real(reader)

    monkeypatch.setattr(moves.MoveReader, "read", late)
    first.client.hear()
    assert first.backup is not None
    places = {extent.slab for extent in first.backup.extents}
    assert min(places) > 1 << 40, "it has heard of the move"
    assert places <= first.client.slabs.by_number.keys()


def test_what_is_free_in_files_takes_no_space_while_owners_have_them_open(spill: pathlib.Path) -> None:
    made = SpillFiles(SpillFolder(spill), 1 << 20)
    extents = [SlabRange(FILES, 0, 1 << 20)]
    made.take(extents)
    ((file, offset, nbytes),) = made.parts(extents)
    file.allocate(offset, nbytes)
    file.write(memoryview(mmap.mmap(-1, nbytes)), offset)
    owners = os.dup(file.read_only)
    made.freed(extents)
    made.close()
    assert os.fstat(owners).st_blocks == 0
    os.close(owners)


def test_who_takes_no_messages_keeps_nobody_from_spilling(
    spilling: RunningVault, sleepers: list[SpillingSleeper]
) -> None:
    first, second, third = sleepers[:3]
    first.sleep()
    for number in range(1000):  # whose answers are more than its socket takes
        first.client._channel.send({"id": (1 << 40) + number, "do": "status"})
    second.sleep()
    third.sleep()
    third.wake()
    second.wake()


def spill_unheard(vault: RunningVault, owner: SpillingSleeper) -> None:
    """Its owner has no descriptors left when it hears of its files."""
    owner.sleep()
    take_memory(vault)
    with descriptors_left(os.getpid(), 0):
        owner.client.hear()


def test_a_descriptor_that_could_not_be_taken_twice_is_sent_again(
    spilling: RunningVault, sleepers: list[SpillingSleeper]
) -> None:
    first = sleepers[0]
    spill_unheard(spilling, first)
    first.client._closed_slabs += first.client.slabs.close_unused()
    with descriptors_left(os.getpid(), 0):
        first.client.release([])
    first.client.release([])
    spilling.kill()
    first.read_itself()


@pytest.mark.parametrize("is_replaced", [False, True], ids=["no other vault", "another vault"])
def test_a_look_without_descriptors_left_loses_no_file(
    spilling: RunningVault,
    make_allocator: Callable[..., CuMemAllocator],
    memory: Memory,
    start_vault: Callable[..., RunningVault],
    is_replaced: bool,
) -> None:
    """The kernel drops what cannot be opened, and the vault has given the memory away: it waits in the socket."""
    allocator = make_allocator(vault=str(spilling.socket))
    addresses = {tag: allocator.malloc(SIZE, tag) for tag in ("weights", "kv_cache")}
    contents = {tag: memory.fill_random(address, SIZE) for tag, address in addresses.items()}
    allocator.sleep(list(addresses))
    take_memory(spilling, SIZE)
    with descriptors_left(os.getpid(), 0):
        said = allocator.usage()
    assert min(usage.host_bytes for usage in said.values()) == 0, "it knows that one is in files"
    spilling.kill()
    with descriptors_left(os.getpid(), 0):
        assert allocator.usage() == said
    if is_replaced:
        start_vault("72MiB", "--slab-size", "16MiB").wait_until_ready()
    allocator.wake_up()
    for tag, address in addresses.items():
        assert memory.read(address, SIZE) == contents[tag]
        allocator.free(address)
    leave()


def test_who_needs_the_memory_of_what_is_being_read_ahead_waits_for_it(
    folder: pathlib.Path, spill: pathlib.Path, allocator: CuMemAllocator, memory: Memory
) -> None:
    faults = DiskFaults(folder / "disk")
    options = ("--spill", str(spill), "--spill-size", "256MiB")
    vault = Vaults(folder, "72MiB", "16MiB", *options, FAULTS_OF_THE_DISK=str(folder / "disk"))
    sleeper = SpillingSleeper(vault, allocator, memory, "model")
    sleeper.sleep()
    nbytes = vault.status()["memory_bytes"]
    other = vault.client("other")
    other.release(other.reserve(sleeper.gpu, [nbytes]))
    faults.throttle("read", 16)
    assert sleeper.client.read_ahead() >= SIZE
    other.release(other.reserve(sleeper.gpu, [nbytes]))
    sleeper.wake()
    sleeper.close()
    other.close()
    vault.close()


def no_ring() -> memory_module.Slab:
    block = SimpleNamespace(bytes=2 << 20)
    return cast(Any, SimpleNamespace(block=block, let_go=lambda: None))


class LargeModel:
    """Whose backups are all in files, but for as many as there is memory for. Only the spiller is real."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger = Ledger(lambda _: None, 16 * UNIT_BYTES)
        self.ledger.add_slab(1, 2 * UNIT_BYTES)
        slab = SimpleNamespace(block=bytearray(2 * UNIT_BYTES))
        facts = {"ledger": self.ledger, "slabs": {1: slab}, "is_stopped": False, "bytes_to_come": int}
        pool = cast(Any, SimpleNamespace(**facts))
        self.files = SpillFiles(SpillFolder(folder), 16 * UNIT_BYTES)
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.spiller = Spiller(pool, self.files, 0, no_ring(), self._posted.put, bool, print, lambda: None)
        monkeypatch.setattr(spill_module, "_read_ahead", lambda requests, _: self.reads.append(len(requests)))
        self.reads: list[int] = []
        self.entries = [self.spilled(name) for name in "abcd"]

    def spilled(self, name: str) -> Entry:
        """The ones before it may go from memory for it."""
        (hold,) = self.ledger.reserve("model", "GPU", [UNIT_BYTES])
        self.ledger.seal("model", hold.number, Key(name, UNIT_BYTES, ""))
        self.ledger.begin_spill(hold.entry)
        self.files.take(hold.entry.spilled)
        self.ledger.end_spill(hold.entry, is_written=True)
        return hold.entry

    def read_ahead(self, entries: Iterable[Entry]) -> int:
        nbytes = self.spiller.read_ahead(entries)
        self.wait()
        return nbytes

    def wait(self) -> None:
        while self.spiller._ahead_bytes or self.spiller.writing_bytes:
            self._posted.get()()

    def close(self) -> None:
        self.spiller.close()


@pytest.fixture
def large(spill: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LargeModel]:
    made = LargeModel(spill, monkeypatch)
    yield made
    made.close()


def test_a_model_larger_than_the_memory_is_read_ahead_as_far_as_it_fits(large: LargeModel) -> None:
    first, second, *others = large.entries
    assert [bool(entry.extents) for entry in large.entries] == [False, False, True, True]
    assert large.read_ahead(large.entries) == 2 * UNIT_BYTES
    assert large.reads == [], "what it has in memory it needs as much"
    large.ledger.release("model", [hold.number for entry in others for hold in entry.holds])
    more = [large.spilled(name) for name in "ef"]  # somebody else's
    assert not first.extents
    assert not second.extents
    large.read_ahead([first, second, *others])
    assert large.reads == [1, 1]
    assert [bool(entry.extents) for entry in (first, second, *more)] == [True, True, False, False]


def test_who_needs_the_memory_of_what_is_read_ahead_does_not_wait_for_other_reads(
    large: LargeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may go on and on."""
    stands_back: list[Callable[[], bool]] = []
    monkeypatch.setattr(spill_module, "_read_ahead", lambda _, is_reading: stands_back.append(is_reading))
    monkeypatch.setattr(RingReader, "is_reading", True)
    large.ledger.release("model", [hold.number for entry in large.entries[2:] for hold in entry.holds])
    large.read_ahead(large.entries[:1])
    assert stands_back[0]()
    large.spiller.make_room(UNIT_BYTES)
    assert not stands_back[0]()


def test_what_several_hold_is_read_ahead_and_counted_once(large: LargeModel) -> None:
    assert large.read_ahead(large.entries[:1] * 3) == UNIT_BYTES
    assert large.reads == [1]


def test_the_last_failure_is_said_with_its_time_until_something_is_spilled(
    large: LargeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator sees whether it is of now or of last week."""

    def fail(*_: object) -> None:
        raise VaultError("the disk is full")

    large.ledger.release("model", [hold.number for entry in large.entries for hold in entry.holds])
    (hold,) = large.ledger.reserve("model", "GPU", [UNIT_BYTES])
    large.ledger.seal("model", hold.number, Key("new", UNIT_BYTES, ""))
    with monkeypatch.context() as failing:
        failing.setattr(spill_module, "_write", fail)
        assert large.spiller.make_room(UNIT_BYTES)
        large.wait()
    at = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}"
    assert re.fullmatch(rf"the disk is full \(at {at}\)", large.spiller.failure)
    assert large.spiller.failure in large.spiller.room_in_words()
    monkeypatch.setattr(spill_module, "_write", print)
    large.spiller._try_again = 0.0
    assert large.spiller.make_room(UNIT_BYTES)
    large.wait()
    assert large.spiller.failure == ""


def test_when_no_thread_can_be_started_those_who_spill_have_theirs(
    spill: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what has begun never ends, and its memory never comes back."""
    pool, made = cast(Any, SimpleNamespace(ledger=Ledger(lambda _: None))), SpillFiles(SpillFolder(spill), 1 << 20)
    spiller = Spiller(pool, made, 0, no_ring(), print, bool, print, print)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert made.worker.submit(int).result() == 0
    assert spiller._ahead.submit(int).result() == 0
    spiller.close()


def test_what_the_disk_refuses_after_the_page_cache_took_it_is_not_written(
    spill: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests are not direct: read again, it would be other bytes, and no error."""
    made = SpillFiles(SpillFolder(spill), 1 << 20)
    extents = [SlabRange(FILES, 0, 1 << 20)]
    made.take(extents)
    parts = list(made.parts(extents))
    requests = [(file, offset, memoryview(mmap.mmap(-1, nbytes))) for file, offset, nbytes in parts]

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(SpillError, match="syncing"):
        _write(_Batch([], is_awaited=True), parts, requests, bool)
    made.close()


def test_bytes_that_come_in_several_parts_are_all_read(
    spilling: RunningVault,
    make_allocator: Callable[..., CuMemAllocator],
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel gives 2 GiB at once, and files have larger extents; a disk may fail, too."""
    allocator = make_allocator(vault=str(spilling.socket))
    address = allocator.malloc(SIZE, "weights")
    content = memory.fill_random(address, SIZE)
    allocator.sleep()
    take_memory(spilling)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, offset: real(descriptor, min(nbytes, 1 << 20), offset))
    assert allocator.read_backup(address, SIZE).tobytes() == content

    def fail(*_: int) -> bytes:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as failing:
        failing.setattr(os, "pread", fail)
        with pytest.raises(VaultError, match="injected"):
            allocator.read_backup(address, SIZE)
    allocator.wake_up()
    allocator.free(address)
    leave()


def test_a_descriptor_that_the_kernel_does_not_send_is_not_known_to_its_owner() -> None:
    """So many may be on their way to those who sleep, and so read nothing. The socket may be full when it is said."""
    vault, client = socket.socketpair()
    session = Session(vault, 0, 0.0, print)
    kernel = FullKernel(vault)
    session.channel._socket = kernel  # type: ignore[assignment]
    send = partial(Service._send_descriptor, cast(Any, None), session, client.fileno(), {"slab": 1 << 40, "bytes": 1})
    with pytest.raises(VaultError, match="open no more files"):
        send()
    assert not session.known_slabs
    for send_rest in (session.flush, lambda: session.send({"busy": True})):
        kernel.is_full = True
        send()
        kernel.is_full = False
        send_rest()
        assert not session.known_slabs
    session.close()
    client.close()


def test_a_small_range_of_many_fragments_in_files_is_found_without_a_look_at_all() -> None:
    """A request has thousands of ranges, and everybody waits while the vault looks."""
    looked_at: list[SlabRange] = []

    class Files:
        def parts(self, extents: Iterable[SlabRange]) -> list[tuple[str, int, int]]:
            looked_at.extend(extents)
            return [("file", start, nbytes) for _, start, nbytes in looked_at]

    entry = Entry(8 * UNIT_BYTES, 8 * UNIT_BYTES)
    entry.spilled = [SlabRange(FILES, 2 * at * UNIT_BYTES, UNIT_BYTES) for at in range(8)]
    assert Files().parts(entry.in_files.ranges(6 * UNIT_BYTES - 1, 3)) == [
        ("file", 11 * UNIT_BYTES - 1, 1),
        ("file", 12 * UNIT_BYTES, 2),
    ]
    assert len(looked_at) == 2


def test_what_the_vault_could_not_send_anew_is_asked_for_with_the_next_release(
    spilling: RunningVault, sleepers: list[SpillingSleeper]
) -> None:
    """A release does not fail for that."""
    first = sleepers[0]
    spill_unheard(spilling, first)
    with descriptors_left(spilling.process.pid, 0):
        first.client.release([])
    first.client.release([])
    spilling.kill()
    first.read_itself()


@pytest.mark.parametrize("left", [0, 1])
def test_who_cannot_learn_of_moves_does_not_connect(spilling: RunningVault, left: int) -> None:
    """It would look for its backups where they are no more."""
    with descriptors_left(os.getpid(), left), pytest.raises(VaultUnavailable, match="can open no more files"):
        spilling.client()
    spilling.client().close()


def test_what_came_over_the_connection_before_is_had_if_it_could_not_be_taken_over(
    spilling: RunningVault, sleepers: list[SpillingSleeper]
) -> None:
    """The vault stopped, went on and moved a backup, stopped again, and is killed then."""
    first = sleepers[0]
    first.sleep()
    assert first.backup is not None
    before = first.client
    with StoppedVault(spilling, before), pytest.raises(VaultLost):
        before.status()
    take_memory(spilling)
    first.client = VaultClient(spilling.socket, succeeds=before)
    with StoppedVault(spilling, first.client):
        with pytest.raises(VaultLost):
            first.client.succeed(before, [first.backup])
        spilling.kill()
    assert first.client.lost is not None
    first.read_itself()
