"""Who spills is attacked: what came late, who takes no messages, what nobody may lose, and what comes back."""

from __future__ import annotations

import mmap
import os
import pathlib

import pytest
from running import RunningVault
from test_failures import descriptors_left
from test_spill import Sleeper, sleepers, spill, spilling

from cumem_sleep.vault import moves
from cumem_sleep.vault.files import SpillFiles, SpillFolder
from cumem_sleep.vault.ledger import FILES, SlabRange

__all__ = ["sleepers", "spill", "spilling"]
pytestmark = [pytest.mark.sim]


def take_memory(vault: RunningVault, nbytes: int = 0) -> None:
    """For a moment, so that what sleeps has to go to files; all of it by default."""
    other = vault.client("takes memory")
    status = vault.status()
    other.reserve(status["gpus"][0]["uuid"], [nbytes or status["memory_bytes"]])
    other.close()


def test_who_hears_of_a_file_has_it_at_once(
    spilling: RunningVault, sleepers: list[Sleeper], monkeypatch: pytest.MonkeyPatch
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


def test_who_takes_no_messages_keeps_nobody_from_spilling(spilling: RunningVault, sleepers: list[Sleeper]) -> None:
    first, second, third = sleepers[:3]
    first.sleep()
    for number in range(1000):  # whose answers are more than its socket takes
        first.client._channel.send({"id": (1 << 40) + number, "do": "status"})
    second.sleep()
    third.sleep()
    third.wake()
    second.wake()


def test_a_descriptor_that_could_not_be_taken_twice_is_sent_again(
    spilling: RunningVault, sleepers: list[Sleeper]
) -> None:
    first = sleepers[0]
    first.sleep()
    take_memory(spilling)
    with descriptors_left(os.getpid(), 0):
        first.client.hear()
    first.client._closed_slabs += first.client.slabs.close_unused()
    with descriptors_left(os.getpid(), 0):
        first.client.release([])
    first.client.release([])
    spilling.kill()
    first.read_itself()
