"""Backups in the vault: every byte, whoever shares it, with real processes, on the simulated driver and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from running import MIB, RunningVault, Segment, eventually, from_slabs, seal, table, take_back, taken
from support import PAGE, Memory

from cumem_sleep import CuMemAllocator, DriverError, InvalidArgument, InvalidState, _core
from cumem_sleep.vault.client import VaultBackup, VaultClient
from cumem_sleep.vault.ledger import Key


@pytest.fixture
def segment(client: VaultClient, allocator: CuMemAllocator) -> Callable[[int], Segment]:
    """Makes segments of so many bytes."""
    return lambda nbytes: Segment(client, allocator.malloc(nbytes, "weights"), nbytes)


MakeSegment = Callable[[int], Segment]


@pytest.mark.parametrize("nbytes", [1, PAGE, 5 * PAGE - 1, 15 * PAGE])
def test_what_is_written_is_read_again(segment: MakeSegment, memory: Memory, nbytes: int) -> None:
    mine = segment(nbytes)
    content = memory.fill_random(mine.address, nbytes)
    backup = mine.back_up()
    memory.fill_random(mine.address, nbytes)
    mine.read(backup)
    assert memory.read(mine.address, nbytes) == content
    assert from_slabs(mine.client, backup) == content


def test_a_backup_in_pieces_between_others_is_exact(segment: MakeSegment, memory: Memory, client: VaultClient) -> None:
    small = segment(PAGE)
    backups = [small.back_up() for _ in range(32)]
    client.release(backups[::2])
    large = segment(10 * PAGE)
    content = memory.fill_random(large.address, large.nbytes)
    backup = large.back_up()
    assert len(backup.extents) > 1
    memory.fill_random(large.address, large.nbytes)
    large.read(backup)
    assert memory.read(large.address, large.nbytes) == content


@pytest.mark.sim  # elsewhere others take memory, too
def test_no_process_keeps_anothers_memory(
    segment: MakeSegment, allocator: CuMemAllocator, memory: Memory, vault: RunningVault
) -> None:
    memory.close()
    before = _core.memory_info(0)[0]
    mine = segment(8 * PAGE)
    mine.back_up()
    assert all(each["lent_bytes"] == 0 for each in vault.status()["clients"])
    allocator.free(mine.address)
    assert _core.memory_info(0)[0] == before


def test_slabs_are_read_only(segment: MakeSegment, client: VaultClient) -> None:
    backup = segment(PAGE).back_up()
    descriptor, nbytes = client.slabs.by_number[backup.extents[0].slab]
    with pytest.raises(InvalidState, match="read-only"):
        _core.HostBlock.mapped(descriptor, nbytes, True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")


def test_slabs_without_backups_are_closed(segment: MakeSegment, client: VaultClient) -> None:
    first, second = segment(PAGE).back_up(), segment(PAGE).back_up()
    assert len(client.slabs.by_number) == 1
    client.release([first])
    assert len(client.slabs.by_number) == 1
    client.release([second])
    assert len(client.slabs.by_number) == 0
    segment(PAGE).back_up()
    assert len(client.slabs.by_number) == 1


# Sharing


def test_equal_bytes_are_kept_once(segment: MakeSegment, memory: Memory, vault: RunningVault) -> None:
    mine = segment(3 * PAGE)
    content = memory.fill_random(mine.address, mine.nbytes)
    backup = mine.back_up()
    key = seal(mine.client, backup, "aa")
    other = Segment(vault.client("replica"), segment(3 * PAGE).address, mine.nbytes)
    copied = vault.status()["gpus"][0]["copied_out_bytes"]
    (found, missing) = other.client.find(mine.gpu, [key, Key("bb", 3 * PAGE, "")])
    assert missing is None
    assert found is not None
    assert found.extents == backup.extents
    status = vault.status()
    assert (status["asleep_bytes"], status["saved_bytes"]) == (3 * PAGE, 3 * PAGE)
    assert status["gpus"][0]["copied_out_bytes"] == copied
    mine.client.release([backup])
    other.read(found)
    assert memory.read(other.address, mine.nbytes) == content
    assert from_slabs(other.client, found) == content
    other.client.close()


def test_a_sealed_backup_is_not_written(segment: MakeSegment, memory: Memory) -> None:
    mine = segment(PAGE)
    content = memory.fill_random(mine.address, PAGE)
    backup = mine.back_up()
    seal(mine.client, backup, "aa")
    memory.fill_random(mine.address, PAGE)
    with pytest.raises(InvalidState, match="sealed"):
        mine.write(backup)
    assert from_slabs(mine.client, backup) == content


def test_what_a_client_holds_goes_back_with_its_connection(segment: MakeSegment, vault: RunningVault) -> None:
    other = Segment(vault.client("other"), segment(PAGE).address, PAGE)
    other.back_up()
    assert vault.status()["asleep_bytes"] == PAGE
    other.client.close()
    eventually(lambda: vault.status()["asleep_bytes"] == 0, "its backup is gone")


def test_status_says_who_holds_what(segment: MakeSegment, vault: RunningVault) -> None:
    mine = segment(4 * PAGE)
    copied = vault.status()["gpus"][0]["copied_out_bytes"]
    backups = [mine.back_up(1), mine.back_up()]
    mine.client.mark(backups[:1], needed=False)
    status = vault.status()
    (shown,) = status["clients"]
    assert (shown["pid"], shown["name"]) == (os.getpid(), "test")
    for facts in (status, status["gpus"][0], shown):
        assert (facts["asleep_bytes"], facts["awake_bytes"]) == (4 * PAGE, taken([1]))
    assert status["gpus"][0]["uuid"] == mine.gpu
    assert status["gpus"][0]["copied_out_bytes"] == copied + 4 * PAGE + 1
    assert status["gpus"][0]["out_gbps"] > 0
    assert status["free_bytes"] == 64 * MIB - 4 * PAGE - taken([1])


# What does not fit


def test_ranges_beyond_are_refused(segment: MakeSegment, client: VaultClient) -> None:
    mine = segment(PAGE)
    backup, larger = client.reserve(mine.gpu, [PAGE, 2 * PAGE])
    lent, _ = mine.lend()
    for copied, bad in ((backup, (0, 1, PAGE)), (larger, (0, 0, PAGE + 1)), (larger, (PAGE, 0, 1))):
        with pytest.raises(InvalidArgument, match="beyond"):
            client.wait([client.copy(lent, copied, table(bad), to_host=True)])
    client.wait([client.copy(lent, larger, table((0, PAGE, PAGE)), to_host=True)])
    take_back(client, [lent])


def test_memory_that_is_smaller_than_said_is_refused(segment: MakeSegment, client: VaultClient) -> None:
    mine = segment(PAGE)
    (backup,) = client.reserve(mine.gpu, [2 * PAGE])
    descriptor, _, _ = _core.export_memory(mine.address)
    lent = client.lend(mine.gpu, descriptor, 2 * PAGE)
    with pytest.raises((DriverError, InvalidState)):
        client.wait([client.copy(lent, backup, table((0, 0, 2 * PAGE)), to_host=True)])
    take_back(client, [lent])
    mine.write(client.reserve(mine.gpu, [PAGE])[0])


def test_a_descriptor_of_something_else_is_refused(segment: MakeSegment, client: VaultClient) -> None:
    mine = segment(PAGE)
    (backup,) = client.reserve(mine.gpu, [PAGE])
    lent = client.lend(mine.gpu, os.open(os.devnull, os.O_RDWR), PAGE)
    with pytest.raises((DriverError, InvalidState)):
        client.wait([client.copy(lent, backup, table((0, 0, PAGE)), to_host=True)])
    take_back(client, [lent])
    mine.write(backup)


def test_anothers_backup_cannot_be_read_or_given_back(
    segment: MakeSegment, memory: Memory, vault: RunningVault
) -> None:
    mine = segment(PAGE)
    content = memory.fill_random(mine.address, PAGE)
    backup = mine.back_up()
    other = Segment(vault.client("other"), mine.address, PAGE)
    stolen = VaultBackup(backup.number, backup.bytes, backup.slabs)
    for steal in (other.read, other.write):
        with pytest.raises(InvalidState, match="not held"):
            steal(stolen)
    other.client.release([stolen])
    assert other.client.mark([stolen], needed=False) == [stolen]
    memory.fill_random(mine.address, PAGE)
    mine.read(backup)
    assert memory.read(mine.address, PAGE) == content
    other.client.close()


def test_a_gpu_that_the_vault_does_not_serve_is_named(client: VaultClient) -> None:
    with pytest.raises(RuntimeError, match=rf"does not serve 'GPU-1', only {client.gpus[0]}"):
        client.reserve("GPU-1", [1])
