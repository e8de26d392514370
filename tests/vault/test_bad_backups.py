"""A stored byte changes: whoever finds that out tells the vault, and nobody else gets that backup."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest
from running import RunningVault, eventually
from support import PAGE
from test_recovery import fall_silent, once_it_goes_on, speak, tier_of
from test_sleeping import leave
from test_spill import spill
from test_spill_attacks import take_memory
from test_workers import PAGES, StartWorker, WorkerProcess, start_worker

from cumem_sleep import CuMemAllocator, VaultLost
from cumem_sleep.vault.client import VaultBackup

__all__ = ["spill", "start_worker"]
pytestmark = [pytest.mark.sim, pytest.mark.slow]

StartVault = Callable[..., RunningVault]
WEIGHTS = PAGES * PAGE


def damage(vault: RunningVault, worker: WorkerProcess) -> None:
    """Flip a bit of the backup of its weights, by a descriptor of the vault's."""
    device, inode, offset = worker.call("place")
    for path in pathlib.Path(f"/proc/{vault.process.pid}/fd").iterdir():
        facts = path.stat()
        if (facts.st_dev, facts.st_ino) == (device, inode):
            break
    descriptor = os.open(path, os.O_RDWR)
    (byte,) = os.pread(descriptor, 1, offset)
    os.pwrite(descriptor, bytes([byte ^ 4]), offset)
    os.close(descriptor)


def sleeps_and_wakes(worker: WorkerProcess) -> tuple[int, int]:
    """What it copied, and what it found in the vault."""
    report = worker.call("fall_asleep")
    worker.call("wake_up")
    assert worker.call("is_right")
    return report["copied_bytes"], report["found_bytes"]


@pytest.mark.parametrize("where", ["memory", "files"])
def test_it_is_shared_no_more(
    start_vault: StartVault, spill: pathlib.Path, start_worker: StartWorker, where: str
) -> None:
    options = ("--spill", str(spill), "--spill-size", "256MiB") if where == "files" else ()
    vault = start_vault("72MiB", "--slab-size", "16MiB", *options)
    vault.wait_until_ready()
    owner, other, retains, replica = (start_worker() for _ in range(4))
    for each in (owner, other, retains):
        each.call("fall_asleep")
    retains.call("wake_up")
    if where == "files":
        take_memory(vault)
    assert (vault.status()["spilled_bytes"] > 0) is (where == "files")
    damage(vault, owner)
    assert "BackupMismatch" in owner.fail("wake_up")
    assert sleeps_and_wakes(replica) == (WEIGHTS, 0)
    assert sleeps_and_wakes(retains) == (0, WEIGHTS), "its own is gone, and what the replica has is good"
    assert "BackupMismatch" in other.fail("wake_up"), "it has it still"
    owner.close()
    eventually(lambda: len(vault.status()["clients"]) == 3, "it has gone")
    assert sleeps_and_wakes(start_worker()) == (0, WEIGHTS), "as it does after a restart"
    damage(vault, other)
    other.call("wake_up")
    assert other.call("is_right")
    status = vault.status()
    assert (status["asleep_bytes"], status["awake_bytes"]) == (0, WEIGHTS), "who has woken from it keeps it no more"


def test_a_silent_vault_hears_of_it_when_it_goes_on(
    vault: RunningVault, make_allocator: Callable[..., CuMemAllocator]
) -> None:
    allocator = make_allocator(vault=str(vault.socket))
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    fall_silent(vault, allocator)
    with pytest.raises(VaultLost):
        allocator.wake_up()
    (backup,) = allocator._store.catalogue
    (extent,) = backup.extents
    assert isinstance(extent, VaultBackup)
    tier_of(allocator).mark_corrupt([backup.extents])
    speak(vault, allocator)
    once_it_goes_on(tier_of(allocator).client)
    other = vault.client("other")
    assert extent.sealed is not None
    assert other.find(other.gpus[0], [extent.sealed]) == [None]
    other.close()
    allocator.wake_up()
    leave()
