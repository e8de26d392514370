"""Who spills is attacked: what came late, who takes no messages, what nobody may lose, and what comes back."""

from __future__ import annotations

import mmap
import os
import pathlib

import pytest
from running import RunningVault
from test_spill import SpillingSleeper, sleepers, spill, spilling

from cumem_sleep.vault import moves
from cumem_sleep.vault.files import SpillFiles, SpillFolder
from cumem_sleep.vault.ledger import FILES, SlabRange

__all__ = ["sleepers", "spill", "spilling"]
pytestmark = [pytest.mark.sim]


def take_all(vault: RunningVault, gpu: str) -> None:
    """Of its memory, for a moment: all that sleeps has to go to files."""
    other = vault.client("takes all")
    other.reserve(gpu, [vault.status()["memory_bytes"]])
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
            take_all(spilling, first.gpu)
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


def test_who_takes_no_messages_keeps_nobody_from_spilling(spilling: RunningVault, sleepers: list[SpillingSleeper]) -> None:
    first, second, third = sleepers[:3]
    first.sleep()
    for number in range(1000):  # whose answers are more than its socket takes
        first.client._channel.send({"id": (1 << 40) + number, "do": "status"})
    second.sleep()
    third.sleep()
    third.wake()
    second.wake()
