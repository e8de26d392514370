"""Allocators whose backups the vault keeps: the same calls, and what only a vault can do."""

from __future__ import annotations

import pathlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from running import SECONDS, RunningVault, eventually
from support import (
    AWAKE,
    PAGE,
    Memory,
    around_copies,
    assert_clean_exit,
    bf16_weights,
    run_script,
    weights_of,
)

from cumem_sleep import CuMemAllocator, _core, sim
from cumem_sleep.backups.vault_tier import VaultLaneGroup, VaultTier, _process_name
from cumem_sleep.errors import VaultError, VaultLost, VaultUnavailable
from cumem_sleep.vault.client import VaultClient

pytestmark = pytest.mark.sim

MakeAllocator = Callable[..., CuMemAllocator]
TAGS = ("weights", "kv_cache", "default")


@pytest.fixture(params=["off", "auto"])
def compress(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def through(make_allocator: MakeAllocator, vault: RunningVault) -> Iterator[MakeAllocator]:
    """Makes allocators that use the vault."""

    def make(**settings: object) -> CuMemAllocator:
        return make_allocator(vault=str(vault.socket), **settings)

    yield make
    leave()


def leave() -> None:
    """What this process has in the vault goes back."""
    allocator = CuMemAllocator.instance
    if allocator is not None:
        for segment in _core.segments():
            allocator.free(segment.address)
        tier = allocator._store.catalogue.tier
        if isinstance(tier, VaultTier) and tier._client is not None:
            tier._client.close()


def fill(allocator: CuMemAllocator, memory: Memory, *tags: str, pages: int = 2) -> dict[int, bytes]:
    contents: dict[int, bytes] = {}
    for number, tag in enumerate(tags):
        address = allocator.malloc(pages * PAGE, tag)
        content = weights_of(pages, number)
        memory.write(address, content)
        contents[address] = content
    return contents


def check(memory: Memory, contents: dict[int, bytes]) -> None:
    for address, content in contents.items():
        assert memory.read(address, len(content)) == content


@pytest.mark.parametrize("vault_is", ["there", "stopped", "another"])
def test_an_allocator_that_is_replaced_leaves_the_vault_whoever_has_it_still(
    through: MakeAllocator, memory: Memory, vault: RunningVault, start_vault: Callable[..., RunningVault], vault_is: str
) -> None:
    before = through()
    contents = fill(before, memory, "weights")
    before.sleep()
    if vault_is == "another":
        vault.kill()
        vault = start_vault("64MiB", "--slab-size", "16MiB")
        vault.wait_until_ready()
        before.wake_up()
        before.sleep()
    before.wake_up()
    check(memory, contents)
    for address in contents:
        before.free(address)
    if vault_is == "stopped":
        vault.signal(signal.SIGSTOP)
    through()
    vault.signal(signal.SIGCONT)
    eventually(lambda: not vault.status()["clients"], "the vault knows that it has gone")


def test_regions_sleep_and_their_backups_are_read(through: MakeAllocator, memory: Memory, compress: str) -> None:
    allocator = through(compress=compress)
    with allocator.regions.use("weights", backup=True):
        address = allocator.malloc(2 * PAGE)
    content = bf16_weights(2 * PAGE, np.random.default_rng(7))
    memory.write(address, content)
    allocator.regions.sleep()
    for copy in (True, False):
        read = allocator.read_backup(address + 5, 2 * PAGE - 9, copy=copy)
        assert read is not None
        assert read.tobytes() == content[5:-4]
    allocator.regions.wake(retain_backups=False)
    assert memory.read(address, 2 * PAGE) == content
    assert allocator.read_backup(address, 1) is None
    assert allocator._store.memory.bytes == 0


class TestCycles:
    def test_first_clean_dirty(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault, compress: str
    ) -> None:
        allocator = through(compress=compress)
        contents = fill(allocator, memory, "weights", "default", "kv_cache")
        kept = dict(list(contents.items())[:2])
        first = allocator.sleep()
        assert (first.copied_bytes, first.dropped_bytes) == (4 * PAGE, 2 * PAGE)
        assert (first.stored_bytes < first.copied_bytes) is (compress == "auto")
        assert vault.status()["asleep_bytes"] > 0
        woken = allocator.wake_up()
        assert woken.verified_bytes == 4 * PAGE
        check(memory, kept)
        assert allocator.sleep().clean_bytes == 4 * PAGE
        allocator.wake_up()
        address = next(iter(kept))
        kept[address] = bf16_weights(2 * PAGE, np.random.default_rng(77))
        memory.write(address, kept[address])
        dirty = allocator.sleep()
        assert (dirty.copied_bytes, dirty.clean_bytes) == (2 * PAGE, 2 * PAGE)
        allocator.wake_up()
        check(memory, kept)

    def test_this_process_pins_nothing_for_backups(self, through: MakeAllocator, memory: Memory) -> None:
        allocator = through()
        fill(allocator, memory, "weights", pages=8)
        memory.close()
        before = sim.stats().registered_bytes
        allocator.sleep()
        assert sim.stats().registered_bytes == before

    def test_prepare(self, through: MakeAllocator, memory: Memory, compress: str) -> None:
        allocator = through(compress=compress)
        contents = fill(allocator, memory, "weights", "default")
        preparation = allocator.prepare()
        assert preparation.wait(SECONDS)
        assert preparation.error is None
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check(memory, contents)

    def test_nothing_is_retained_that_should_not_be(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault
    ) -> None:
        allocator = through(retain_backups=False)
        contents = fill(allocator, memory, "weights")
        allocator.sleep()
        allocator.wake_up()
        check(memory, contents)
        assert vault.status()["asleep_bytes"] == vault.status()["awake_bytes"] == 0

    def test_awake_backups_are_marked_as_such(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault
    ) -> None:
        allocator = through()
        fill(allocator, memory, "weights")
        allocator.sleep()
        assert (vault.status()["asleep_bytes"], vault.status()["awake_bytes"]) == (2 * PAGE, 0)
        allocator.wake_up()
        assert (vault.status()["asleep_bytes"], vault.status()["awake_bytes"]) == (0, 2 * PAGE)
        allocator.release_backups()
        assert vault.is_unused() or not vault.status()["awake_bytes"]


class TestGivingBackToTheVault:
    """What was lent to the vault comes back segment by segment, and the last of it before a sleep releases memory."""

    @pytest.mark.parametrize("lane_pages", [1, *(pytest.param(pages, marks=pytest.mark.slow) for pages in (2, 3, 5))])
    def test_each_segment_comes_back_while_others_are_copied(
        self, through: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, lane_pages: int
    ) -> None:
        """Not before its last byte has arrived."""
        for name in ("batch_bytes", "engine_batch_bytes"):
            monkeypatch.setattr(CuMemAllocator.tuning, name, lane_pages * PAGE)
        allocator = through()
        contents: dict[int, bytes] = {}
        for pages in (1, 3, 1, 1, 7, 1, 2, 1, 1, 1):  # some in one lane, some in all
            contents |= fill(allocator, memory, "weights", pages=pages)
        most_lent, lend, done_with, copy = 0, VaultLaneGroup.lend, VaultLaneGroup.done_with, VaultClient.copy
        requests: dict[int, list[int]] = {}  # by number of lent memory

        def noted(lane_group: VaultLaneGroup, client: VaultClient, address: int, device: int) -> Any:
            nonlocal most_lent
            lent = lend(lane_group, client, address, device)
            most_lent = max(most_lent, sum(each.nbytes for each in lane_group._lent.values()))
            return lent

        def noted_copy(client: VaultClient, lent: Any, *arguments: Any, to_host: bool) -> int:
            request = copy(client, lent, *arguments, to_host=to_host)
            requests.setdefault(lent.number, []).append(request)
            return request

        def looked_at(lane_group: VaultLaneGroup, addresses: Iterable[int]) -> None:
            some = [*addresses]
            for lent in (lane_group._lent[address] for address in some if address in lane_group._lent):
                assert lane_group._client is not None
                assert not set(requests[lent.number]) & set(lane_group._client._answers), "it may be in flight"
            done_with(lane_group, some)

        monkeypatch.setattr(VaultLaneGroup, "lend", noted)
        monkeypatch.setattr(VaultLaneGroup, "done_with", looked_at)
        monkeypatch.setattr(VaultClient, "copy", noted_copy)
        for call in (allocator.sleep, allocator.wake_up):
            most_lent = 0
            call()
            assert 0 < most_lent <= (4 * lane_pages + 2 * 7) * PAGE, "what is in flight, and what is not whole"
            if lane_pages == 1:
                assert most_lent < 19 * PAGE
        check(memory, contents)


class TestVaultIsGone:
    @pytest.mark.slow
    def test_killed_while_all_sleep(
        self,
        through: MakeAllocator,
        memory: Memory,
        vault: RunningVault,
        compress: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        allocator = through(compress=compress)
        contents = fill(allocator, memory, "weights", "default")
        allocator.sleep()
        vault.kill()
        assert allocator.wake_up().verified_bytes == 4 * PAGE
        check(memory, contents)
        assert not allocator._store.memory.tier._client.slabs.by_number, "its memory is had back"  # type: ignore[attr-defined]
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            message for message in caplog.messages if "read by this process itself" in message
        ]
        memory.write(next(iter(contents)), bytes(PAGE))
        with pytest.raises(VaultUnavailable):
            allocator.sleep()
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}

    @pytest.mark.slow
    def test_another_serves_its_socket(
        self,
        through: MakeAllocator,
        memory: Memory,
        vault: RunningVault,
        start_vault: Callable[..., RunningVault],
        compress: str,
    ) -> None:
        """What sleeps reads the slabs of the one before, each of which goes when nothing sleeps in it any more."""
        allocator = through(compress=compress)
        contents = fill(allocator, memory, "weights", "kv_cache", pages=8)
        allocator.sleep(offload_tags=TAGS)
        before = allocator._store.memory.tier._client.slabs.by_number  # type: ignore[attr-defined]
        vault.kill()
        another = start_vault("64MiB", "--slab-size", "16MiB")
        another.wait_until_ready()
        slabs = len(before)
        for tag, left in (("weights", slabs - 1), ("kv_cache", 0)):
            assert allocator.wake_up([tag]).verified_bytes == 8 * PAGE
            assert len(before) == left
        check(memory, contents)
        assert another.status()["gpus"][0]["copied_in_bytes"] == 0
        assert allocator.sleep(offload_tags=TAGS).copied_bytes == 16 * PAGE
        allocator.wake_up()
        assert allocator.sleep(offload_tags=TAGS).copied_bytes == 0
        allocator.wake_up()
        check(memory, contents)

    @pytest.mark.slow
    def test_what_it_might_have_evicted_is_not_trusted(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault, start_vault: Callable[..., RunningVault]
    ) -> None:
        """Of an awake segment: it may have given those bytes to somebody else just before."""
        allocator = through()
        contents = fill(allocator, memory, "weights", "default")
        allocator.sleep()
        allocator.wake_up()
        vault.kill()
        start_vault("64MiB", "--slab-size", "16MiB").wait_until_ready()
        assert allocator.sleep().copied_bytes == 4 * PAGE
        allocator.wake_up()
        check(memory, contents)

    @pytest.mark.slow
    def test_evicted_while_awake(self, through: MakeAllocator, memory: Memory, vault: RunningVault) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights", pages=16)
        allocator.sleep()
        allocator.wake_up()
        other = vault.client()
        other.reserve(_core.device_info(0).uuid, [48 << 20])
        assert vault.status()["awake_bytes"] == 0
        other.close()
        eventually(lambda: len(vault.status()["clients"]) <= 2, "the other client is gone")
        assert allocator.sleep().copied_bytes == 32 * PAGE // 2
        allocator.wake_up()
        check(memory, contents)

    @pytest.mark.slow
    def test_killed_during_a_sleep(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights", "default")
        with monkeypatch.context() as patch:
            around_copies(patch, before=vault.kill)
            with pytest.raises(VaultError):
                allocator.sleep()
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        check(memory, contents)


class TestNoVault:
    @pytest.mark.parametrize(
        ("vault", "said"),
        [
            ("off", "memory of this process"),
            ("auto", "memory of this process"),
            ("/no/vault.sock", "the vault at /no/vault.sock"),
        ],
    )
    def test_asking_where_backups_are_opens_no_driver(self, vault: str, said: str) -> None:
        script = f"""
            allocator = CuMemAllocator(Settings(vault={vault!r}))
            assert str(allocator.backup_place()) == {said!r}, allocator.backup_place()
            assert not _core.driver_is_open()
            """
        assert_clean_exit(run_script(script))

    def test_named_but_not_there(self, make_allocator: MakeAllocator, memory: Memory, tmp_path: pathlib.Path) -> None:
        tmp_path.chmod(0o700)
        allocator = make_allocator(vault=str(tmp_path / "no.sock"))
        contents = fill(allocator, memory, "weights")
        with pytest.raises(VaultUnavailable, match="no vault answers"):
            allocator.sleep()
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        check(memory, contents)

    def test_auto_without_one(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        allocator = make_allocator(vault="auto")
        contents = fill(allocator, memory, "weights")
        allocator.sleep()
        assert not isinstance(allocator._store.memory.tier, VaultTier)
        allocator.wake_up()
        check(memory, contents)


@pytest.mark.parametrize(
    ("command", "script", "name"),
    [
        ("VLLM::Worker_TP0", "/venv/bin/vllm", "VLLM::Worker_TP0"),
        ("/usr/bin/python3\0/venv/bin/vllm\0serve", "/venv/bin/vllm", "vllm"),
        ("python3.11\0-c\0pass", "-c", "python3.11"),
        ("/opt/server/serve\0model", "", "serve"),
    ],
)
def test_clients_have_names_that_people_know(
    monkeypatch: pytest.MonkeyPatch, command: str, script: str, name: str
) -> None:
    monkeypatch.setattr(pathlib.Path, "read_text", lambda *_, **__: command + "\0")
    monkeypatch.setattr(sys, "argv", [script])
    assert _process_name() == name


class TestWhatOnceBroke:
    @pytest.mark.slow
    def test_bytes_without_a_digest_outlive_their_vault(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault, start_vault: Callable[..., RunningVault]
    ) -> None:
        """The numbers of the next one mean other backups."""
        allocator = through(verify="off", retain_backups=False)
        contents = fill(allocator, memory, "weights")
        allocator.sleep()
        vault.kill()
        start_vault("64MiB", "--slab-size", "16MiB").wait_until_ready()
        other = allocator.malloc(2 * PAGE, "default")
        contents[other] = memory.fill_random(other, 2 * PAGE)
        allocator.sleep()
        allocator.wake_up()
        check(memory, contents)

    @pytest.mark.slow
    def test_the_next_vault_is_too_small(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault, start_vault: Callable[..., RunningVault]
    ) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights", pages=8)
        allocator.sleep()
        vault.kill()
        start_vault("4MiB", "--slab-size", "4MiB").wait_until_ready()
        allocator.wake_up()
        check(memory, contents)

    def test_backups_whose_seal_has_no_answer_are_not_trusted(
        self, through: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights")
        seal = VaultClient.seal

        def lose_the_answer(client: VaultClient, sealed: Sequence[Any]) -> None:
            seal(client, sealed)
            raise VaultLost("it is silent")

        with monkeypatch.context() as patch:
            patch.setattr(VaultClient, "seal", lose_the_answer)
            with pytest.raises(VaultLost):
                allocator.sleep()
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        assert allocator._store.memory.bytes == 0
        assert allocator.sleep().copied_bytes == 2 * PAGE
        allocator.wake_up()
        check(memory, contents)
