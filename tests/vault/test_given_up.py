"""Memory that a client has lent to a vault and given up on: the vault may still write to it, and has it still."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running import SECONDS, RunningVault, eventually
from support import BACKED_UP, PAGE, Memory
from test_recovery import fall_silent, once_it_goes_on, speak, tier_of
from test_sleeping import MakeAllocator, check, fill, leave

from cumem_sleep import CuMemAllocator, OutOfDeviceMemory, _core, sim
from cumem_sleep.backups.vault_tier import VaultLaneGroup
from cumem_sleep.errors import DriverError, VaultLost

pytestmark = [pytest.mark.sim, pytest.mark.slow]

FOR_EVER = 10**6


@pytest.fixture
def through(make_allocator: MakeAllocator, vault: RunningVault) -> Iterator[MakeAllocator]:
    """Makes allocators that use the vault."""

    def make(**settings: object) -> CuMemAllocator:
        allocator = make_allocator(vault=str(vault.socket), **settings)
        allocator._operations.open()
        return allocator

    yield make
    sim.reset()
    vault.signal(signal.SIGCONT)
    leave()


def copied_in(vault: RunningVault) -> int:
    return int(vault.status()["gpus"][0]["copied_in_bytes"])


def goes_on(vault: RunningVault, allocator: CuMemAllocator, copied_before: int, nbytes: int) -> None:
    """Let it, and wait until it has made the copies that it was asked for before."""
    speak(vault, allocator)
    eventually(lambda: copied_in(vault) >= copied_before + nbytes, "the late copies are made")


def sleep_is_given_up(allocator: CuMemAllocator, vault: RunningVault, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the vault was asked for its first copy; it is stopped."""
    begin = VaultLaneGroup.begin

    def stopped(*arguments: Any) -> None:
        fall_silent(vault, allocator)
        begin(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(VaultLaneGroup, "begin", stopped)
        with pytest.raises(VaultLost):
            allocator.sleep()


@pytest.mark.parametrize("call", ["cuMemRelease", "cuMemUnmap"])
def test_a_late_copy_does_not_overwrite_what_was_written_after_the_next_wake(
    through: MakeAllocator, memory: Memory, vault: RunningVault, call: str
) -> None:
    allocator = through()
    contents = fill(allocator, memory, "weights")
    ((address, _),) = contents.items()
    allocator.sleep()
    copied = copied_in(vault)
    fall_silent(vault, allocator)
    sim.fail(call, times=4)
    with pytest.raises(VaultLost):
        allocator.wake_up()
    allocator.wake_up()  # reads for itself
    check(memory, contents)
    contents[address] = memory.fill_random(address, 2 * PAGE)
    goes_on(vault, allocator, copied, 2 * PAGE)
    check(memory, contents)
    once_it_goes_on(allocator.sleep)
    allocator.wake_up()
    check(memory, contents)


@pytest.mark.parametrize("call", ["cuMemRelease", "cuMemUnmap"])
def test_memory_that_the_driver_never_takes_back_is_not_used_again(
    through: MakeAllocator, memory: Memory, vault: RunningVault, call: str
) -> None:
    """Every wake fails, and all stays asleep with its backups, until the driver takes it or the vault goes on."""
    allocator = through()
    contents = fill(allocator, memory, "weights", "default")
    allocator.sleep()
    fall_silent(vault, allocator)
    sim.fail(call, times=FOR_EVER)
    with pytest.raises(VaultLost):
        allocator.wake_up()
    for _ in range(2):
        with pytest.raises(DriverError, match=call):
            allocator.wake_up()
        assert {segment.sleep for segment in _core.segments()} == {BACKED_UP}
    speak(vault, allocator)
    once_it_goes_on(lambda: tier_of(allocator).client())
    allocator.wake_up()  # the same memory, which nobody else has any more
    check(memory, contents)


def test_memory_that_a_stopped_vault_has_is_had_back_when_it_goes_on(
    make_allocator: MakeAllocator,
    memory: Memory,
    start_vault: Callable[..., RunningVault],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is full: without that a wake would not fit."""
    vault = start_vault("64MiB", CUMEM_SLEEP_SIM_COPY_DELAY_US="500000")
    allocator = make_allocator(vault=str(vault.socket))
    contents = fill(allocator, memory, "weights")
    allocator.sleep()
    maps = pathlib.Path(f"/proc/{vault.process.pid}/maps")
    begun = VaultLaneGroup.begun

    def stopped(*arguments: Any) -> None:
        begun(*arguments)
        eventually(lambda: "cumem-sim-device" in maps.read_text(), "the vault maps the memory")
        fall_silent(vault, allocator)

    client = tier_of(allocator).client()
    with monkeypatch.context() as patch:
        patch.setattr(VaultLaneGroup, "begun", stopped)
        with pytest.raises(VaultLost):
            allocator.wake_up()
    client.deadline_s = SECONDS
    sim.configure(device_bytes=2 * PAGE)
    with pytest.raises(OutOfDeviceMemory):
        allocator.wake_up()
    assert {segment.sleep for segment in _core.segments()} == {BACKED_UP}
    goes_on(vault, allocator, 0, 2 * PAGE)
    allocator.wake_up()
    check(memory, contents)
    leave()


@pytest.mark.parametrize("then", ["it goes on", "it is killed"])
def test_memory_that_a_stopped_vault_has_is_not_reported_as_freed(
    through: MakeAllocator, memory: Memory, vault: RunningVault, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    allocator = through()
    ((address, _),) = fill(allocator, memory, "weights").items()
    sleep_is_given_up(allocator, vault, monkeypatch)
    assert allocator.sleep(2).freed_bytes == 0
    if then == "it is killed":
        vault.kill()
    else:
        speak(vault, allocator)
        once_it_goes_on(lambda: tier_of(allocator).client())
    allocator.wake_up()
    memory.fill_random(address, 2 * PAGE)
    assert allocator.sleep(2).freed_bytes == 2 * PAGE
