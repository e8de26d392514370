"""Sleeps and wakes through the vault while something fails in this process: driver calls, descriptors, the GPUs."""

from __future__ import annotations

import os
import pathlib
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from running import RunningVault, eventually
from support import AWAKE, PAGE, Memory, assert_clean_exit, bf16_weights, run_script
from test_sleeping import MakeAllocator, check, fill, leave, through
from world import Phase, World, check_every_call, phases

from cumem_sleep import CumemSleepError, OutOfHostMemory, _core, sim
from cumem_sleep.vault.slabs import UNIT_BYTES

__all__ = ["through"]  # a fixture

pytestmark = [pytest.mark.sim, pytest.mark.slow]


class VaultWorld(World):
    """Whose backups the vault keeps: nothing of them is pinned here."""

    def unaccounted_bytes(self) -> int:
        return sim.stats().registered_bytes

    def forget_devices(self) -> None:
        super().forget_devices()
        self.allocator._store.memory.tier._gpus.clear()  # type: ignore[attr-defined]


THROUGH_IT = ("first sleep", "sleep of changed", "sleep of parts", "wake of all", "wake of parts", "release backups")


@pytest.mark.parametrize("phase", phases(*THROUGH_IT), ids=str)
def test_every_driver_call_may_fail_once(vault: RunningVault, phase: Phase) -> None:
    world = VaultWorld(vault=str(vault.socket))
    world.allocator._store.memory.tier.client()  # type: ignore[attr-defined]  # whose calls are not the phase's
    try:
        check_every_call(world, phase, "CUDA_ERROR_UNKNOWN", False)
        world.wake()
        eventually(lambda: lent_bytes(vault) == 0, "the vault has none of its memory")
    finally:
        sim.reset()
        leave()


def lent_bytes(vault: RunningVault) -> int:
    return sum(client["lent_bytes"] for client in vault.status()["clients"])


# Open files


@contextmanager
def descriptors_left(pid: int, count: int) -> Iterator[None]:
    """So many more files may this process open."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    folder = f"/proc/{pid}/fd"
    occupied = {int(each) for each in os.listdir(folder) if os.path.lexists(f"{folder}/{each}")}  # not the list's own
    free = sorted(set(range(max(occupied) + count + 2)) - occupied)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[count], limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


SHORT = {
    "client": r"this process can open no more files|\w+: this process has reached its limit of open files"
    "|cuMemCreate failed with CUDA_ERROR_OPERATING_SYSTEM",  # memory of the simulated driver is a file
    "vault": r"the vault can open no more files|in the vault: \w+: this process has reached its limit of open files",
}


@contextmanager
def suppress_files_short(refused: dict[str, int], operation: str, whose: str) -> Iterator[None]:
    """Counts the error, which says what is short."""
    try:
        yield
    except CumemSleepError as error:
        if not re.match(SHORT[whose], str(error)):
            raise
        refused[operation] += 1


@pytest.mark.parametrize("whose", ["client", "vault"])
def test_no_more_files_can_be_opened(through: MakeAllocator, memory: Memory, vault: RunningVault, whose: str) -> None:
    """Whatever step lacks one, nothing has changed, and nothing is kept."""
    allocator = through()
    contents = fill(allocator, memory, "weights", "default", "weights")
    memory.close()
    allocator._store.memory.tier.client()  # type: ignore[attr-defined]
    pid = os.getpid() if whose == "client" else vault.process.pid
    refused = {"sleep": 0, "wake": 0}
    for operation, count in ((operation, count) for operation in refused for count in range(12)):
        if operation == "wake":
            allocator.sleep()
        else:
            allocator.release_backups()
        before = [segment.sleep for segment in _core.segments()]
        with suppress_files_short(refused, operation, whose), descriptors_left(pid, count):
            allocator.sleep() if operation == "sleep" else allocator.wake_up()
            before = []
        if before:
            assert [segment.sleep for segment in _core.segments()] == before
        allocator.wake_up()
        check(memory, contents)
        status = vault.status()
        assert lent_bytes(vault) == 0
        assert status["asleep_bytes"] == 0
    assert refused["sleep"] > 0
    assert refused["wake"] > 0


# Memory


def test_slabs_that_cannot_be_registered_are_read_all_the_same(
    through: MakeAllocator, memory: Memory, vault: RunningVault
) -> None:
    """The bytes are nowhere else, and some drivers register nothing that is read-only."""
    allocator = through()
    contents = fill(allocator, memory, "weights", "default")
    memory.close()
    allocator.sleep()
    vault.kill()
    sim.fail("cuMemHostRegister", error="CUDA_ERROR_NOT_SUPPORTED")
    try:
        allocator.wake_up()
    finally:
        sim.reset()
    check(memory, contents)


@pytest.mark.parametrize("settings", [{}, {"compress": "auto"}])
def test_memory_is_short_at_any_stage(
    through: MakeAllocator, memory: Memory, vault: RunningVault, settings: dict[str, object]
) -> None:
    """However much others leave: a call succeeds, or changes nothing, here and in the vault."""
    allocator = through(**settings)
    contents = fill(allocator, memory, "weights", "default", "weights", pages=2)
    other = vault.client("other")
    refused = 0
    for left in range(0, 14 * PAGE, 2 * PAGE):
        allocator.release_backups()
        (taken,) = other.reserve(other.gpus[0], [(64 << 20) - left - UNIT_BYTES])
        for change in (False, True):
            if change:
                address = next(iter(contents))
                contents[address] = bf16_weights(2 * PAGE, np.random.default_rng(left))
                memory.write(address, contents[address])
            try:
                allocator.sleep()
            except OutOfHostMemory:
                refused += 1
                assert {segment.sleep for segment in _core.segments()} == {AWAKE}
                assert vault.status()["asleep_bytes"] == taken.bytes
            allocator.wake_up()
            check(memory, contents)
        other.release([taken])
    assert 2 < refused < 14
    other.close()
    allocator.sleep()
    allocator.wake_up()
    check(memory, contents)


def free_huge_pages() -> int:
    folder = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    counts = [folder / f"{name}_hugepages" for name in ("free", "resv")]
    free, promised = (int(each.read_text()) if each.exists() else 0 for each in counts)
    return free - promised


def test_reserved_huge_pages_are_taken_first(
    make_allocator: MakeAllocator, memory: Memory, start_vault: Callable[..., RunningVault]
) -> None:
    """As many whole slabs as there are; where there are none this shows what is done then."""
    before, pages_of_slab = free_huge_pages(), 8
    options = ("64MiB", "--slab-size", "16MiB", "--reserved-huge-pages")
    vault = start_vault(*options)
    vault.wait_until_ready()
    slabs = min(4, before // pages_of_slab)
    assert before - free_huge_pages() == slabs * pages_of_slab
    none_left = "no slab of reserved huge pages is left"
    if slabs < 4:
        eventually(lambda: vault.said(none_left), "it has said so")
    else:
        assert not vault.said(none_left)
    allocator = make_allocator(vault=str(vault.socket))
    contents = fill(allocator, memory, "weights", "default", pages=4)
    allocator.sleep()
    allocator.wake_up()
    check(memory, contents)
    allocator.sleep()
    vault.kill()
    allocator.wake_up()
    check(memory, contents)
    leave()
    eventually(lambda: free_huge_pages() == before, "all of them are back")


# GPUs, forks, ends


@pytest.mark.parametrize("at_exit", ["hand-over", "wait"])
def test_a_vault_that_is_told_to_end_keeps_what_sleeps(
    make_allocator: MakeAllocator, memory: Memory, start_vault: Callable[..., RunningVault], at_exit: str
) -> None:
    vault = start_vault("64MiB", "--at-exit", at_exit)
    vault.wait_until_ready()
    allocator = make_allocator(vault=str(vault.socket))
    contents = fill(allocator, memory, "weights", "default")
    allocator.sleep()
    vault.signal(signal.SIGTERM)
    eventually(lambda: vault.said(f"asleep: pid {os.getpid()}"), "it says for whom it is bad")
    if at_exit == "hand-over":
        assert vault.end() == 0
    allocator.wake_up()
    check(memory, contents)
    assert vault.end() == 0
    leave()


def test_a_vault_that_serves_none_of_these_gpus_is_not_used(
    start_vault: Callable[..., RunningVault],
) -> None:
    two = {"CUMEM_SLEEP_SIM_DEVICES": "2"}
    vault = start_vault("64MiB", "--gpus", "1", **two)
    script = f"""
        allocator, memory = CuMemAllocator(Settings(driver="sim", vault={str(vault.socket)!r})), Memory()
        contents = {{}}
        for device in range(DEVICES):
            address = allocator.malloc(PAGE, "weights", device)
            contents[address] = memory.fill_random(address, PAGE, device)
        with raises(VaultError, EXPECTED):
            allocator.sleep()
        assert {{s.sleep for s in _core.segments()}} == {{AWAKE}}
        assert all(memory.read(a, PAGE, d) == content for d, (a, content) in enumerate(contents.items()))
        """
    imports = "from cumem_sleep.errors import VaultError\n        "
    for devices, expected in ((1, "give the vault the GPUs that this process uses"), (2, "see its --gpus")):
        text = script.replace("DEVICES", str(devices)).replace("EXPECTED", repr(expected))
        text = text.replace("allocator, memory", imports + "allocator, memory", 1)
        assert_clean_exit(run_script(text, CUMEM_SLEEP_SIM_DEVICES=str(devices)))
