"""The vault's own life: it begins with what is ready, dies, is stopped, comes back, and ends as it is asked to."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import pytest
from running import MIB, RunningVault, Segment, eventually, from_slabs, seal, take_back
from support import PAGE, Memory

from cumem_sleep import CuMemAllocator, InvalidState, OutOfHostMemory, VaultLost, _core, host_facts
from cumem_sleep.core.commitment import Commitment
from cumem_sleep.vault import protocol
from cumem_sleep.vault.address import VaultAddress
from cumem_sleep.vault.client import VaultBackup, VaultClient
from cumem_sleep.vault.pool import VaultHost, VaultPool
from cumem_sleep.vault.server import Vault, visible_gpus

pytestmark = [pytest.mark.sim, pytest.mark.slow]

StartVault = Callable[..., RunningVault]


class SleepingClient:
    """A process with one backup, sealed under its own name."""

    def __init__(self, client: VaultClient, allocator: CuMemAllocator, memory: Memory, nbytes: int = PAGE) -> None:
        self.client, self._memory = client, memory
        self.segment = Segment(client, allocator.malloc(nbytes, "weights"), nbytes)
        self.content = memory.fill_random(self.segment.address, nbytes)
        self.backup = self.segment.back_up()
        self.key = seal(client, self.backup, f"{self.segment.address:x}")

    def check(self, client: VaultClient, backup: VaultBackup) -> None:
        """Its bytes come back through this client."""
        segment = Segment(client, self.segment.address, self.segment.nbytes)
        self._memory.fill_random(segment.address, segment.nbytes)
        segment.read(backup)
        assert self._memory.read(segment.address, segment.nbytes) == self.content


@pytest.fixture
def sleeper(client: VaultClient, allocator: CuMemAllocator, memory: Memory) -> SleepingClient:
    return SleepingClient(client, allocator, memory)


# Death


def test_a_killed_vault_is_noticed_at_once_and_its_slabs_are_read(vault: RunningVault, sleeper: SleepingClient) -> None:
    client = sleeper.client
    assert client.lost is None
    vault.kill()
    assert client.lost is not None
    assert not client.lost.may_go_on
    for call in (client.status, lambda: client.reserve(client.gpus[0], [1]), sleeper.segment.back_up):
        with pytest.raises(VaultLost, match="vault"):
            call()
    assert from_slabs(client, sleeper.backup) == sleeper.content
    client.release([sleeper.backup])
    assert len(client.slabs.by_number) == 0


@pytest.mark.parametrize("to_host", [True, False])
def test_a_vault_that_is_killed_while_it_copies_is_noticed(
    start_vault: StartVault, allocator: CuMemAllocator, to_host: bool
) -> None:
    vault = start_vault("64MiB", CUMEM_SLEEP_SIM_COPY_DELAY_US="60000000")
    client = vault.client()
    mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
    (backup,) = client.reserve(mine.gpu, [PAGE])
    lent, _ = mine.lend()
    request = mine.begin(backup, lent, to_host=to_host)
    vault.kill()
    with pytest.raises(VaultLost):
        client.wait([request])
    with pytest.raises(VaultLost):
        take_back(client, [lent])
    client.close()


@pytest.mark.parametrize("ends", [False, True])
def test_a_vault_that_grows_takes_no_memory_that_others_are_about_to_touch(
    allocator: CuMemAllocator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """It waits until they have, or it ends itself."""
    allocator._operations.open()
    monkeypatch.setattr(host_facts, "memory_groups", lambda: [tmp_path])
    other, waits, posted = Commitment(), threading.Event(), deque[Callable[[], None]]()
    other.set(PAGE)

    def left(committed: Mapping[pathlib.Path, int]) -> int:
        if any(committed.values()):
            waits.set()
        return PAGE + PAGE // 32 - sum(committed.values())  # so much is left to the host

    monkeypatch.setattr(host_facts, "mem_available_bytes", lambda **_: None)
    monkeypatch.setattr(host_facts, "cgroup_available_bytes", left)
    seen: list[int] = []
    prefault = _core.HostBlock.prefault

    def look(block: _core.HostBlock, offset: int, nbytes: int) -> None:
        seen.append(other.others()[tmp_path])
        prefault(block, offset, nbytes)

    monkeypatch.setattr(_core.HostBlock, "prefault", look)
    pool = VaultPool(PAGE, None, 0, [-1], VaultHost(1, lambda _: None), posted.append, lambda: None)
    pool.take_more()
    assert waits.wait(30)
    eventually(lambda: len(posted) == 1, "it says that it waits")
    if ends:
        pool.finish()
    else:
        other.set(0)
    eventually(lambda: len(posted) == 2, "the wait is over")
    while posted:
        posted.popleft()()
    assert (len(pool.slabs), seen[:1]) == ((0, []) if ends else (1, [PAGE]))
    assert other.others()[tmp_path] == 0
    other.set(0)
    pool.finish()
    pool.close()


# Stopped


def test_a_stopped_vault_is_given_up_in_time_and_keeps_everything(
    vault: RunningVault, allocator: CuMemAllocator, memory: Memory
) -> None:
    client = vault.client()
    sleeper = SleepingClient(client, allocator, memory)
    client.deadline_s = 0.3
    vault.signal(signal.SIGSTOP)
    with pytest.raises(VaultLost, match=r"silent for 0\.3 s") as lost:
        client.reserve(sleeper.segment.gpu, [PAGE])
    assert lost.value.may_go_on
    with pytest.raises(VaultLost):
        client.status()
    assert from_slabs(client, sleeper.backup) == sleeper.content
    vault.signal(signal.SIGCONT)
    again = vault.client()
    (found,) = again.find(sleeper.segment.gpu, [sleeper.key])
    assert found is not None
    client.close()
    sleeper.check(again, found)
    eventually(lambda: vault.status()["asleep_bytes"] == PAGE, "what nobody waited for is gone")
    again.close()


@pytest.mark.slow
def test_a_vault_that_is_at_work_is_waited_for(
    start_vault: StartVault, allocator: CuMemAllocator, memory: Memory
) -> None:
    vault = start_vault("64MiB", CUMEM_SLEEP_SIM_COPY_DELAY_US="4500000")
    client = vault.client(deadline_s=4)  # it says every second that it is at work
    sleeper = SleepingClient(client, allocator, memory)
    assert from_slabs(client, sleeper.backup) == sleeper.content
    client.close()


# One socket


def test_a_second_vault_leaves_the_socket_alone(
    vault: RunningVault, start_vault: StartVault, sleeper: SleepingClient
) -> None:
    second = start_vault("64MiB")
    assert second.end() == 2
    assert second.said(f"another vault (pid {vault.process.pid}) serves {vault.socket}")
    sleeper.check(sleeper.client, sleeper.backup)
    assert vault.status()["pid"] == vault.process.pid


def test_a_socket_that_a_killed_vault_left_is_taken_over(vault: RunningVault, start_vault: StartVault) -> None:
    vault.kill()
    assert vault.socket.exists()
    assert start_vault("64MiB").status()["memory_bytes"] == 64 * MIB


def test_a_folder_that_others_may_write_to_is_refused(start_vault: StartVault, folder: pathlib.Path) -> None:
    folder.chmod(0o777)
    vault = start_vault("64MiB")
    assert vault.end() == 2
    assert vault.said("others can write")


# The end


def test_a_vault_nobody_needs_ends_at_once(vault: RunningVault) -> None:
    vault.signal(signal.SIGTERM)
    assert vault.end() == 0
    assert not vault.socket.exists()
    assert not vault.said("asleep")


def test_a_vault_hands_over(vault: RunningVault, start_vault: StartVault, sleeper: SleepingClient) -> None:
    vault.signal(signal.SIGTERM)
    assert vault.end() == 0
    assert vault.said(f"asleep: pid {os.getpid()} (test) 2.00 MiB; the vault ends; they can still wake")
    assert sleeper.client.lost is not None
    assert start_vault("64MiB").status()["asleep_bytes"] == 0
    assert from_slabs(sleeper.client, sleeper.backup) == sleeper.content


def test_a_vault_waits_for_those_who_sleep(start_vault: StartVault, allocator: CuMemAllocator, memory: Memory) -> None:
    vault = start_vault("64MiB", "--at-exit", "wait")
    vault.wait_until_ready()
    client = vault.client()
    sleeper = SleepingClient(client, allocator, memory)
    vault.signal(signal.SIGTERM)
    eventually(lambda: vault.said("ends when they have woken"), "it says for whom it waits")
    with pytest.raises(InvalidState, match="shutting down"):
        client.reserve(sleeper.segment.gpu, [PAGE])
    sleeper.check(client, sleeper.backup)
    client.mark([sleeper.backup], needed=False)
    assert vault.end() == 0


def test_a_second_signal_ends_the_wait(start_vault: StartVault, allocator: CuMemAllocator, memory: Memory) -> None:
    vault = start_vault("64MiB", "--at-exit", "wait")
    vault.wait_until_ready()
    sleeper = SleepingClient(vault.client(), allocator, memory)
    vault.signal(signal.SIGTERM)
    eventually(lambda: vault.said("ends when they have woken"), "it says for whom it waits")
    vault.signal(signal.SIGINT)
    assert vault.end() == 0
    assert from_slabs(sleeper.client, sleeper.backup) == sleeper.content


# The beginning

RESERVE = 4 * PAGE // 32  # what a vault of four pages leaves the host


class RoomBySlab:
    """How much the host has: asked for each slab, one ahead of each `give`."""

    def __init__(self) -> None:
        self.bytes = 1 << 40
        self.others_touch = threading.Event()  # what they have committed
        self.others_touch.set()
        self._given = threading.Semaphore(0)

    def give(self, slabs: int = 1) -> None:
        self._given.release(slabs)

    def require(self, nbytes: int, committed: object = None) -> None:
        assert self._given.acquire(timeout=30)
        if self.bytes < nbytes or (committed and not self.others_touch.is_set()):
            raise OutOfHostMemory(nbytes, self.bytes, "MemAvailable")


@pytest.fixture
def room() -> RoomBySlab:
    return RoomBySlab()


@pytest.fixture
def slow_vault(
    folder: pathlib.Path, room: RoomBySlab, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., VaultClient]]:
    """A vault of four slabs of a page in a thread here, which takes each when the room says so."""
    allocator.get_current_usage()
    allocator._operations.open()
    monkeypatch.setattr(protocol, "BUSY_INTERVAL_S", 0.05)
    monkeypatch.setattr("cumem_sleep.vault.pool.require_room", room.require)
    host = VaultHost(1, lambda _: None, try_again_s=3600)
    vault = Vault(VaultAddress(folder / "vault.sock"), 4 * PAGE, visible_gpus(), host, PAGE)
    thread = threading.Thread(target=vault.run)
    thread.start()
    yield lambda deadline_s=30.0: VaultClient(folder / "vault.sock", "test", deadline_s)
    vault.stop(wait=False)
    for _ in range(4):
        room.give()
    thread.join(30)
    assert not thread.is_alive()


def test_a_reservation_waits_for_memory_that_is_to_come(
    slow_vault: Callable[..., VaultClient], room: RoomBySlab
) -> None:
    client, other = slow_vault(deadline_s=2.0), slow_vault()
    gpu = client.gpus[0]
    got: list[VaultBackup] = []
    thread = threading.Thread(target=lambda: got.extend(client.reserve(gpu, [3 * PAGE])))
    thread.start()
    eventually(lambda: other.status()["waiting"] == 1, "it waits")
    with pytest.raises(OutOfHostMemory):
        other.reserve(gpu, [5 * PAGE])  # that will never be there
    for _ in range(2):
        room.give()
    eventually(lambda: other.status()["pinned_bytes"] == 2 * PAGE, "two slabs")
    thread.join(2.2)  # longer than its deadline
    assert thread.is_alive()
    assert got == []
    room.give()
    thread.join(30)
    assert len(got) == 1
    client.close()
    other.close()


def test_who_waits_until_others_have_touched_theirs_holds_up_nobody(
    slow_vault: Callable[..., VaultClient], room: RoomBySlab
) -> None:
    client, other = slow_vault(), slow_vault()
    room.give()
    eventually(lambda: other.status()["pinned_bytes"] == PAGE, "a slab")
    room.others_touch.clear()
    got: list[VaultBackup] = []
    thread = threading.Thread(target=lambda: got.extend(client.reserve(client.gpus[0], [2 * PAGE])))
    thread.start()
    eventually(lambda: other.status()["waiting"] == 1, "it waits")
    room.give(1 << 20)
    other.reserve(other.gpus[0], [PAGE])
    assert not got
    room.others_touch.set()
    thread.join(30)
    assert len(got) == 1
    client.close()
    other.close()


def test_a_host_without_memory_ends_the_wait(slow_vault: Callable[..., VaultClient], room: RoomBySlab) -> None:
    client = slow_vault()
    room.bytes = PAGE + RESERVE - 1
    room.give(1000)
    with pytest.raises(
        OutOfHostMemory, match=r"the vault has 0 B of .*, and cannot take more now: .*MemAvailable"
    ) as no:
        client.reserve(client.gpus[0], [PAGE])
    assert no.value.limit == "vault_host"
    assert "give the vault more" not in str(no.value)
    assert "MemAvailable" in client.status()["short"]
    with pytest.raises(OutOfHostMemory, match=r"\(limit: vault\).*give the vault more --memory"):
        client.reserve(client.gpus[0], [1 << 40])
    client.close()


def test_what_others_give_back_is_taken_for_who_needs_it(
    slow_vault: Callable[..., VaultClient], room: RoomBySlab
) -> None:
    client = slow_vault()
    room.bytes = PAGE + RESERVE - 1
    room.give()
    eventually(lambda: client.status()["short"] != "", "it takes no more for now")
    room.bytes = PAGE + RESERVE
    room.give(4)
    client.reserve(client.gpus[0], [4 * PAGE])
    client.close()
