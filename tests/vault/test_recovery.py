"""A vault that was stopped and goes on, a connection that broke, memory that is waited for: the client gets on."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
from running import SECONDS, RunningVault, Segment, eventually, seal, table
from support import AWAKE, BACKED_UP, PAGE, Memory, bf16_weights
from test_sleeping import MakeAllocator, check, fill, leave

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.backups.vault_tier import VaultTier
from cumem_sleep.errors import OutOfHostMemory, VaultError, VaultLost
from cumem_sleep.vault import protocol
from cumem_sleep.vault.address import VaultAddress
from cumem_sleep.vault.client import VaultClient
from cumem_sleep.vault.pool import VaultHost
from cumem_sleep.vault.server import Vault, visible_gpus

pytestmark = [pytest.mark.sim, pytest.mark.slow]

DEADLINE_S = 0.3


@pytest.fixture
def through(make_allocator: MakeAllocator, vault: RunningVault) -> Iterator[MakeAllocator]:
    """Makes allocators that use the vault."""

    def make(**settings: object) -> CuMemAllocator:
        allocator = make_allocator(vault=str(vault.socket), **settings)
        allocator._operations.open()
        tier_of(allocator).client().deadline_s = SECONDS
        return allocator

    yield make
    leave()


def tier_of(allocator: CuMemAllocator) -> VaultTier:
    tier = allocator._store.memory.tier
    assert isinstance(tier, VaultTier)
    return tier


class StoppedVault:
    """A vault that is stopped inside a `with`; only there its client gives it up soon."""

    def __init__(self, vault: RunningVault, client: VaultClient) -> None:
        self.vault, self.client = vault, client

    def __enter__(self) -> None:
        self.client.deadline_s = DEADLINE_S
        self.vault.signal(signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        self.vault.signal(signal.SIGCONT)
        self.client.deadline_s = SECONDS


def fall_silent(vault: RunningVault, allocator: CuMemAllocator) -> None:
    """The vault is stopped, and this client of it gives it up soon, until `speak`."""
    client = tier_of(allocator)._client
    assert client is not None
    client.deadline_s = DEADLINE_S  # not before: a vault that answers has its time
    vault.signal(signal.SIGSTOP)


def speak(vault: RunningVault, allocator: CuMemAllocator) -> None:
    """It goes on."""
    client = tier_of(allocator)._client
    assert client is not None
    client.deadline_s = SECONDS
    vault.signal(signal.SIGCONT)


def once_it_goes_on(call: Callable[[], object]) -> None:
    """Repeat the call until the vault has said that it is there."""

    def succeeds() -> bool:
        with suppress(VaultLost):
            call()
            return True
        return False

    eventually(succeeds, "the vault is there again")


def is_exactly_kept(vault: RunningVault, asleep: int, awake: int) -> bool:
    """The vault has that of one client, and neither its memory nor anything that it did not ask for."""
    status = vault.status()
    (client,) = status["clients"]
    assert client["lent_bytes"] == client["open_requests"] == status["waiting"] == 0
    return (status["asleep_bytes"], status["awake_bytes"]) == (asleep, awake)


class TestStopped:
    def test_backups_are_made_again_when_it_goes_on(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault
    ) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights", "default")
        allocator.sleep()
        with StoppedVault(vault, tier_of(allocator).client()):
            with pytest.raises(VaultLost) as lost:
                allocator.wake_up()
            assert lost.value.may_go_on
            allocator.wake_up()
            check(memory, contents)
            first = next(iter(contents))
            contents[first] = bf16_weights(2 * PAGE, np.random.default_rng(5))
            memory.write(first, contents[first])
            with pytest.raises(VaultLost):
                allocator.sleep()
            assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        once_it_goes_on(allocator.sleep)
        assert is_exactly_kept(vault, 4 * PAGE, 0)
        allocator.wake_up()
        check(memory, contents)
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()

    @pytest.mark.parametrize("settings", [{}, {"compress": "auto"}, {"verify": "off", "retain_backups": False}])
    def test_those_who_slept_all_the_time_are_woken_through_it(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault, settings: dict[str, object]
    ) -> None:
        """Bytes without a digest, too, which no other connection could find."""
        allocator = through(**settings)
        contents = fill(allocator, memory, "weights", "default")
        stored = allocator.sleep().stored_bytes
        with StoppedVault(vault, tier_of(allocator).client()), pytest.raises(VaultLost):
            allocator.wake_up()
        client = tier_of(allocator)._client
        once_it_goes_on(lambda: tier_of(allocator).client())
        assert tier_of(allocator)._client is not client
        assert vault.status()["asleep_bytes"] >= stored
        copied = vault.status()["gpus"][0]["copied_in_bytes"]
        allocator.wake_up()
        check(memory, contents)
        assert vault.status()["gpus"][0]["copied_in_bytes"] > copied, "it was read here"

    def test_what_it_was_not_told_it_is_told_later(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault
    ) -> None:
        """That backups are merely retained, or were given back."""
        allocator = through()
        contents = fill(allocator, memory, "weights", "default")
        allocator.sleep()
        with StoppedVault(vault, tier_of(allocator).client()):
            for _ in range(2):
                with suppress(VaultLost):
                    allocator.wake_up()
            allocator.free(contents.popitem()[0])
        once_it_goes_on(lambda: tier_of(allocator).client())
        assert is_exactly_kept(vault, 0, 2 * PAGE)
        check(memory, contents)

    def test_it_is_not_waited_for_again(self, through: MakeAllocator, memory: Memory, vault: RunningVault) -> None:
        """It was silent for a whole deadline; until it says something, nobody waits for another one."""
        allocator = through()
        contents = fill(allocator, memory, "weights")
        allocator.sleep()
        client = tier_of(allocator).client()
        with StoppedVault(vault, client):
            with pytest.raises(VaultLost):
                allocator.wake_up()
            client.deadline_s = 10**6
            allocator.wake_up()
            memory.write(next(iter(contents)), bytes(2 * PAGE))
            with pytest.raises(VaultLost):
                allocator.sleep()

    def test_copies_that_it_was_asked_for_have_ended_before_it_is_used_again(
        self, start_vault: Callable[..., RunningVault], allocator: CuMemAllocator, memory: Memory
    ) -> None:
        """One that is in flight when the vault is there again still fills memory of this process."""
        vault = start_vault("64MiB", CUMEM_SLEEP_SIM_COPY_DELAY_US="2500000")
        vault.wait_until_ready()
        client = vault.client()
        mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
        content = memory.fill_random(mine.address, PAGE)
        backup = mine.back_up()
        seal(client, backup, "mine")
        lent, offset = mine.lend()
        client.deadline_s = DEADLINE_S
        with pytest.raises(VaultLost):
            client.wait([client.copy(lent, backup, table((offset, 0, PAGE)), to_host=False)])
        again = VaultClient(vault.socket, "again", succeeds=client)
        assert again.instance == client.instance
        assert again.succeed(client, [backup]) == []
        assert vault.status()["gpus"][0]["copied_in_bytes"] == PAGE
        assert vault.status()["clients"][0]["lent_bytes"] == 0
        mine.client = again
        memory.write(mine.address, bytes(PAGE))
        mine.read(backup)
        assert memory.read(mine.address, PAGE) == content
        again.close()
        eventually(vault.is_unused, "nothing is left")

    def test_one_that_ends_after_all_is_replaced(
        self,
        through: MakeAllocator,
        memory: Memory,
        vault: RunningVault,
        start_vault: Callable[..., RunningVault],
    ) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights", "default")
        allocator.sleep()
        fall_silent(vault, allocator)
        with pytest.raises(VaultLost):
            allocator.wake_up()
        vault.kill()
        client = tier_of(allocator)._client
        assert client is not None
        client.deadline_s = SECONDS
        client.vault_pid = 0  # as in another pid namespace: nothing else shows that it is gone
        assert tier_of(allocator)._loans
        another = start_vault("64MiB", "--slab-size", "16MiB")
        another.wait_until_ready()
        allocator.wake_up()
        check(memory, contents)
        assert is_exactly_kept(another, 0, 0)
        assert not tier_of(allocator)._loans


class TestBroken:
    def test_one_that_was_cut_off_goes_on(self, through: MakeAllocator, memory: Memory, vault: RunningVault) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights", "default")
        allocator.sleep()
        client = tier_of(allocator).client()
        with pytest.raises(VaultLost, match="cut this process off"):
            client._ask("dance")
        allocator.wake_up()
        check(memory, contents)
        assert is_exactly_kept(vault, 0, 4 * PAGE)
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()

    def test_a_connection_that_broke_is_made_anew(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault
    ) -> None:
        """Of what is awake; its backups went with the connection."""
        allocator = through()
        contents = fill(allocator, memory, "weights", "default")
        allocator.sleep()
        allocator.wake_up()
        tier_of(allocator).client()._channel._socket.shutdown(socket.SHUT_RDWR)
        assert allocator.sleep().copied_bytes == 4 * PAGE
        assert is_exactly_kept(vault, 4 * PAGE, 0)
        allocator.wake_up()
        check(memory, contents)

    def test_what_was_given_away_is_never_taken_for_what_it_was(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault
    ) -> None:
        """Nothing proves these bytes, so nothing but the vault's word says whether they are there."""
        allocator = through(verify="off", retain_backups=False)
        fill(allocator, memory, "weights")
        allocator.sleep()
        tier_of(allocator).client()._channel._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(VaultError, match="released this backup"):
            allocator.wake_up()
        assert {segment.sleep for segment in _core.segments()} == {BACKED_UP}

    def test_no_connection_takes_over_from_another_client(self, vault: RunningVault, client: VaultClient) -> None:
        (backup,) = client.reserve(client.gpus[0], [PAGE])
        other = vault.client("other")
        assert other._ask("resume", slabs=[])["numbers"] == []
        assert other._ask("look", numbers=[backup.number])["backups"] == [None]
        assert vault.status()["asleep_bytes"] == PAGE
        other.close()


class Enough(Exception):
    """Of who waits."""


class RoomOnceGiven:
    """What the host has; asked for each slab, and answered when `given` is set."""

    def __init__(self) -> None:
        self.given = threading.Event()

    def require(self, _nbytes: int, _committed: object = None) -> None:
        assert self.given.wait(30)


@pytest.fixture
def filling_up(
    folder: pathlib.Path, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CuMemAllocator, RoomOnceGiven]]:
    """An allocator, and the room of its vault, a thread here, which has no memory before that is given."""
    room = RoomOnceGiven()
    monkeypatch.setattr(protocol, "BUSY_INTERVAL_S", 0.05)
    monkeypatch.setattr("cumem_sleep.vault.pool.require_room", room.require)
    allocator = make_allocator(vault=str(folder / "vault.sock"))
    allocator._operations.open()
    vault = Vault(
        VaultAddress(folder / "vault.sock"), 16 * PAGE, visible_gpus(), VaultHost(1, lambda _: None), 8 * PAGE
    )
    thread = threading.Thread(target=vault.run)
    thread.start()
    yield allocator, room
    leave()
    vault.stop(wait=False)
    room.given.set()
    thread.join(30)
    assert not thread.is_alive()


class TestMemoryToCome:
    def test_a_signal_ends_the_wait(self, filling_up: tuple[CuMemAllocator, RoomOnceGiven], memory: Memory) -> None:
        allocator, room = filling_up
        contents = fill(allocator, memory, "weights", "default")
        looks = VaultClient(tier_of(allocator)._path)

        def handle(*_: object) -> None:
            raise Enough

        def send() -> None:
            eventually(lambda: looks.status()["waiting"] == 1, "it waits")
            os.kill(os.getpid(), signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, handle)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            with pytest.raises(Enough):
                allocator.sleep()
        finally:
            sender.join(30)
            signal.signal(signal.SIGUSR1, before)
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        assert looks.status()["waiting"] == 0, "others would wait behind it"
        looks.close()
        room.given.set()
        allocator.sleep()
        allocator.wake_up()
        check(memory, contents)

    def test_prepare_keeps_nobody_from_the_allocator(
        self, filling_up: tuple[CuMemAllocator, RoomOnceGiven], memory: Memory
    ) -> None:
        allocator, room = filling_up
        contents = fill(allocator, memory, "weights", "default")
        asked = threading.Event()
        tier = tier_of(allocator)
        reserve = tier.reserve

        def watched(*arguments: object, **options: object) -> object:
            asked.set()
            return reserve(*arguments, **options)  # type: ignore[arg-type]

        tier.reserve = watched  # type: ignore[assignment,method-assign]
        preparation = allocator.prepare()
        assert asked.wait(30)
        assert allocator.usage()["weights"].backed_up_bytes == 0  # has the lock in between
        assert preparation.running
        room.given.set()
        assert preparation.wait(30)
        assert preparation.error is None
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check(memory, contents)

    def test_prepare_is_stopped_while_it_waits(
        self, filling_up: tuple[CuMemAllocator, RoomOnceGiven], memory: Memory
    ) -> None:
        allocator, _ = filling_up
        fill(allocator, memory, "weights")
        preparation = allocator.prepare()
        preparation.stop()
        assert not preparation.running
        assert preparation.error is None

    def test_who_does_not_wait_holds_up_nobody_and_goes_before_nobody(
        self, filling_up: tuple[CuMemAllocator, RoomOnceGiven]
    ) -> None:
        allocator, room = filling_up
        path = tier_of(allocator)._path
        first, second = VaultClient(path), VaultClient(path)
        gpu = first.gpus[0]
        waits = threading.Thread(target=lambda: first.reserve(gpu, [4 * PAGE]))
        waits.start()
        eventually(lambda: second.status()["waiting"] == 1, "it waits")
        assert second.reserve_now(gpu, [PAGE]) is None
        assert second.status()["waiting"] == 1
        with pytest.raises(OutOfHostMemory):
            second.reserve_now(gpu, [17 * PAGE])
        room.given.set()
        waits.join(30)
        assert len(second.reserve_now(gpu, [PAGE]) or ()) == 1
        first.close()
        second.close()
