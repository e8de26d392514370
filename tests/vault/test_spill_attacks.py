"""Who spills is attacked: what came late, who takes no messages, what nobody may lose, and what comes back."""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
from collections.abc import Callable

import pytest
from disk_faults import DiskFaults
from running import RunningVault, eventually
from support import Memory
from test_failures import descriptors_left
from test_sleeping import leave
from test_spill import SIZE, SpillingSleeper, sleepers, spill, spilling
from test_storm import Vaults

from cumem_sleep import CuMemAllocator
from cumem_sleep.errors import VaultUnavailable
from cumem_sleep.vault import moves
from cumem_sleep.vault.files import SpillError, SpillFile
from cumem_sleep.vault.ledger import FILES
from cumem_sleep.vault.slabs import SlabRange
from cumem_sleep.vault.spill import _Batch, _write

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
    first.client.slabs.hear()
    assert first.backup is not None
    places = {extent.slab for extent in first.backup.extents}
    assert places == {FILES}, "it has heard of the move"
    assert places <= first.client.slabs.by_number.keys()


def test_what_is_free_in_files_takes_no_space_while_owners_have_them_open(spill: pathlib.Path) -> None:
    file = SpillFile(spill, 1 << 20)
    file.allocate(0, 1 << 20)
    file.write(memoryview(mmap.mmap(-1, 1 << 20)), 0)
    owners = os.dup(file.read_only)
    file.freed([SlabRange(FILES, 0, 1 << 20)])
    file.close()
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


def test_what_the_disk_refuses_after_the_page_cache_took_it_is_not_written(
    spill: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests are not direct: read again, it would be other bytes, and no error."""
    file, part = SpillFile(spill, 1 << 20), SlabRange(FILES, 0, 1 << 20)
    requests = [(part.offset, memoryview(mmap.mmap(-1, part.nbytes)))]

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(SpillError, match="syncing"):
        _write(file, _Batch([], is_awaited=True), [part], requests, bool)
    file.close()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_who_cannot_learn_of_moves_does_not_connect(spilling: RunningVault, left: int) -> None:
    """It would look for its backups where they are no more."""
    with descriptors_left(os.getpid(), left), pytest.raises(VaultUnavailable, match="can open no more files"):
        spilling.client()
    spilling.client().close()


def test_a_vault_without_descriptors_left_for_who_connects_keeps_none(spilling: RunningVault) -> None:
    looks = spilling.client()
    pid = looks.status()["pid"]

    def opened() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    eventually(lambda: not looks.status()["clients"], "nobody else is connected")
    before = opened()
    for left in (3, 4):  # the connection, a pidfd, the log of moves and its reader come before the file
        with descriptors_left(pid, left), pytest.raises(VaultUnavailable, match="the vault can open no more files"):
            spilling.client()
        eventually(lambda: opened() == before, "all are closed")
    looks.close()
