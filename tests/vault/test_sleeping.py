"""Allocators whose backups the vault keeps: the same calls, and what only a vault can do."""

from __future__ import annotations

import gc
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from running import SECONDS, RunningVault, eventually
from support import (
    AWAKE,
    BACKED_UP,
    PAGE,
    Memory,
    around_copies,
    assert_clean_exit,
    bf16_weights,
    run_script,
    weights_of,
)

import cumem_sleep
from cumem_sleep import CodecError, CuMemAllocator, InvalidState, OutOfHostMemory, _core, sim
from cumem_sleep.backups.catalogue import Catalogue
from cumem_sleep.backups.filling import Filling
from cumem_sleep.backups.vault import VaultTier, VaultTransfers, name_of
from cumem_sleep.digest.device import DigestRun
from cumem_sleep.errors import VaultError, VaultLost, VaultUnavailable
from cumem_sleep.transfer.transfer import Transfer
from cumem_sleep.vault.client import Sealed, VaultBackup, VaultClient
from cumem_sleep.vault.ledger import Key

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
        for tier in allocator._store.catalogue.tiers:
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


def test_an_allocator_that_is_replaced_leaves_the_vault(
    through: MakeAllocator, memory: Memory, vault: RunningVault
) -> None:
    contents = fill(through(), memory, "weights")
    CuMemAllocator.get_instance().sleep()
    assert len(vault.status()["clients"]) == 1
    CuMemAllocator.get_instance().wake_up()
    check(memory, contents)
    for address in contents:
        CuMemAllocator.get_instance().free(address)
    gc.collect()
    gc.disable()
    try:
        through()
        eventually(lambda: not vault.status()["clients"], "the vault knows that it has gone")
    finally:
        gc.enable()


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
    assert allocator._store.room.bytes == 0


@pytest.mark.parametrize("how", ["alive", "killed", "stopped"])
def test_what_is_forgotten_is_not_in_the_vault_any_more(
    through: MakeAllocator, memory: Memory, vault: RunningVault, how: str
) -> None:
    allocator = through()
    fill(allocator, memory, "weights")
    allocator.sleep()
    assert vault.status()["asleep_bytes"] > 0
    if how != "alive":
        vault.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if how == "killed":
        vault.process.wait()
    assert allocator.release_backups("weights") == 2 * PAGE
    assert allocator.usage()["weights"].vault_bytes == 0
    if how == "stopped":
        vault.signal(signal.SIGCONT)
    if how != "killed":
        eventually(lambda: not vault.status()["asleep_bytes"], "the vault has forgotten it")
    assert allocator.wake_up().restored_bytes == 0


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

    @pytest.mark.slow
    def test_memory_is_short(self, through: MakeAllocator, memory: Memory) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights", pages=40)  # 80 MiB of 64
        with pytest.raises(OutOfHostMemory):
            allocator.sleep()
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        check(memory, contents)

    def test_what_is_new_is_digested_part_by_part_while_it_is_copied(
        self, through: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, compress: str
    ) -> None:
        """The vault's memory is there already, so nothing has to be known of the last part to begin with the first."""
        allocator = through(compress=compress)
        for size in ("head_bytes", "digest_part_bytes", "count_part_bytes"):
            monkeypatch.setattr(allocator.tuning, size, 2 * PAGE)
        contents = fill(allocator, memory, *["weights"] * 4)
        places = {segment.id: place for place, segment in enumerate(_core.segments())}
        calls: list[object] = []
        start, add = DigestRun.start, Filling.add

        def noted_start(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            calls.append([places[segment.id] for segment in segments])
            start(run, segments)

        def noted_add(filling: Filling, part: Sequence[_core.Segment]) -> list[Transfer]:
            calls.append(("copy", *(places[segment.id] for segment in part)))
            return add(filling, part)

        with monkeypatch.context() as patch:
            patch.setattr(DigestRun, "start", noted_start)
            patch.setattr(Filling, "add", noted_add)
            report = allocator.sleep()
        assert report.copied_bytes == 8 * PAGE
        copies = [call for call in calls if call and call[0] == "copy"]  # type: ignore[index]
        assert copies == [("copy", 0), ("copy", 1), ("copy", 2), ("copy", 3)]
        assert calls.index(("copy", 0)) < calls.index([3])
        assert [call for call in calls if call and call[0] != "copy"][:4] == [[0], [1], [2], [3]]  # type: ignore[index]
        allocator.wake_up()
        check(memory, contents)

    @pytest.mark.parametrize("free", [True, False])
    def test_memory_that_runs_short_between_two_parts(
        self, through: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, compress: str, free: bool
    ) -> None:
        """Somebody else takes what was free a moment ago: the error names all that is needed."""
        allocator = through(compress=compress)
        for size in ("head_bytes", "digest_part_bytes", "count_part_bytes"):
            monkeypatch.setattr(allocator.tuning, size, 4 * PAGE)
        contents: dict[int, bytes] = {}
        for number in range(10):  # 80 MiB of 64, and random bytes cannot be compressed
            address = allocator.malloc(4 * PAGE, "weights")
            contents[address] = np.random.default_rng(number).bytes(4 * PAGE)
            memory.write(address, contents[address])
        added: list[int] = []
        add = Filling.add

        def noted_add(filling: Filling, part: Sequence[_core.Segment]) -> list[Transfer]:
            added.append(len(part))
            return add(filling, part)

        with monkeypatch.context() as patch:
            patch.setattr(Filling, "add", noted_add)
            if free:
                patch.setattr(VaultTier, "has_free", lambda tier, nbytes: True)
            with pytest.raises(OutOfHostMemory) as raised:
                allocator.sleep()
        assert raised.value.needed_bytes == 40 * PAGE
        assert sum(added) == (8 if free else 0)
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        assert allocator._store.room.bytes == 0
        check(memory, contents)
        for address in list(contents)[5:]:
            allocator.free(address)
            del contents[address]
        assert allocator.sleep().copied_bytes == 20 * PAGE
        allocator.wake_up()
        check(memory, contents)

    def test_what_others_retain_is_not_evicted_by_a_sleep_that_lacks_memory(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault
    ) -> None:
        other = vault.client()
        (retained,) = other.reserve(other.gpus[0], [8 * PAGE])
        other.seal([Sealed(retained, Key("of another", 8 * PAGE, ""))])
        assert other.mark([retained], needed=False) == []
        allocator = through()
        contents = fill(allocator, memory, *["weights"] * 10, pages=4)
        with pytest.raises(OutOfHostMemory):
            allocator.sleep()
        assert other.mark([retained], needed=True) == []
        check(memory, contents)
        other.close()

    def test_a_write_meanwhile(self, through: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights")
        address, content = next(iter(contents.items()))
        with monkeypatch.context() as patch:
            around_copies(patch, after=lambda: memory.write(address, bytes(len(content))))
            with pytest.raises(InvalidState, match="written to"):
                allocator.sleep()
        memory.write(address, content)
        assert allocator.sleep().copied_bytes == 2 * PAGE
        allocator.wake_up()
        check(memory, contents)


SECOND = """
import sys
sys.path[:0] = sys.argv[2:]
from support import *
from cumem_sleep import CuMemAllocator, Settings

allocator = CuMemAllocator(Settings(driver="sim", vault=sys.argv[1]))
memory = Memory()
address = allocator.malloc(2 * PAGE, "weights")
content = weights_of(2, 0)
memory.write(address, content)
report = allocator.sleep()
print("slept", report.copied_bytes, report.clean_bytes, flush=True)
sys.stdin.readline()
allocator.wake_up()
assert memory.read(address, 2 * PAGE) == content
memory.write(address, bytes(2 * PAGE))
print("dirty", allocator.sleep().copied_bytes, flush=True)
sys.stdin.readline()
allocator.wake_up()
assert memory.read(address, 2 * PAGE) == bytes(2 * PAGE)
print("done", flush=True)
"""


class TestGivingBackToTheVault:
    """What was lent to the vault comes back segment by segment, and the last of it before a sleep releases memory."""

    @pytest.mark.parametrize("lane_pages", [1, *(pytest.param(pages, marks=pytest.mark.slow) for pages in (2, 3, 5))])
    def test_each_segment_comes_back_while_others_are_copied(
        self, through: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, lane_pages: int
    ) -> None:
        """Not before its last byte has arrived."""
        for name in ("stream_bytes", "batch_bytes", "engine_batch_bytes"):
            monkeypatch.setattr(CuMemAllocator.tuning, name, lane_pages * PAGE)
        allocator = through()
        contents: dict[int, bytes] = {}
        for pages in (1, 3, 1, 1, 7, 1, 2, 1, 1, 1):  # some in one lane, some in all
            contents |= fill(allocator, memory, "weights", pages=pages)
        most_lent, lend, done_with, copy = 0, VaultTransfers.lend, VaultTransfers.done_with, VaultClient._copy
        requests: dict[int, list[int]] = {}  # by number of lent memory

        def noted(transfers: VaultTransfers, client: VaultClient, address: int, device: int) -> Any:
            nonlocal most_lent
            lent = lend(transfers, client, address, device)
            most_lent = max(most_lent, sum(nbytes for nbytes, _ in transfers._lent.values()))
            return lent

        def noted_copy(client: VaultClient, lent: Any, ranges: Any, to_host: bool) -> int:
            request = copy(client, lent, ranges, to_host)
            requests.setdefault(lent.number, []).append(request)
            return request

        def looked_at(transfers: VaultTransfers, addresses: Iterable[int]) -> None:
            some = [*addresses]
            for lent in (transfers._lent[address][1] for address in some if address in transfers._lent):
                assert transfers._client is not None
                assert not set(requests[lent.number]) & set(transfers._client._answers), "it may be in flight"
            done_with(transfers, some)

        monkeypatch.setattr(VaultTransfers, "lend", noted)
        monkeypatch.setattr(VaultTransfers, "done_with", looked_at)
        monkeypatch.setattr(VaultClient, "_copy", noted_copy)
        for call in (allocator.sleep, allocator.wake_up):
            most_lent = 0
            call()
            assert 0 < most_lent <= (4 * lane_pages + 2 * 7) * PAGE, "what is in flight, and what is not whole"
            if lane_pages == 1:
                assert most_lent < 19 * PAGE
        check(memory, contents)

    @staticmethod
    def lent_bytes(vault: RunningVault) -> int:
        return sum(client["lent_bytes"] for client in vault.status()["clients"])

    @pytest.mark.parametrize("call", ["sleep", "wake_up"])
    def test_what_could_not_be_asked_for_is_asked_for_again(
        self,
        through: MakeAllocator,
        memory: Memory,
        vault: RunningVault,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
    ) -> None:
        for name in ("stream_bytes", "batch_bytes", "engine_batch_bytes"):
            monkeypatch.setattr(CuMemAllocator.tuning, name, PAGE)
        allocator = through()
        contents = fill(allocator, memory, *["weights"] * 6, pages=1)
        if call == "wake_up":
            allocator.sleep()
        begin, failed = VaultClient._begin, False

        def faulty(client: VaultClient, verb: str, descriptors: Sequence[int] = (), **facts: Any) -> int:
            nonlocal failed
            if verb == "forget" and not failed:
                failed = True
                raise MemoryError
            return begin(client, verb, descriptors, **facts)

        monkeypatch.setattr(VaultClient, "_begin", faulty)
        with pytest.raises(MemoryError):
            getattr(allocator, call)()
        assert self.lent_bytes(vault) == 0
        allocator.wake_up()
        check(memory, contents)

    def test_begins_before_the_check_and_has_ended_before_the_release(
        self,
        through: MakeAllocator,
        memory: Memory,
        vault: RunningVault,
        compress: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        allocator = through(compress=compress)
        contents = fill(allocator, memory, *TAGS)
        steps: list[str] = []
        put_to_sleep, proven = _core.put_to_sleep, Catalogue.prove
        done_with, leave_transfers = VaultTransfers.done_with, VaultTransfers.__exit__

        def noted_done(transfers: VaultTransfers, addresses: Iterable[int]) -> None:
            if transfers._lent and "begun" not in steps:
                assert self.lent_bytes(vault) > 0
                steps.append("begun")
            done_with(transfers, addresses)

        def noted_exit(transfers: VaultTransfers, *exception: Any) -> None:
            leave_transfers(transfers, *exception)
            if transfers._returning:
                assert transfers._client is not None
                assert not set(transfers._returning) & set(transfers._client._answers), "it did not wait"
                steps.append("ended")

        def noted_proof(catalogue: Catalogue, *arguments: Any) -> None:
            steps.append("checked")
            proven(catalogue, *arguments)

        def looked_at(backed_up: Any, dropped: Any, last_check: Callable[[], None]) -> int:
            def check_and_look() -> None:
                last_check()
                steps.append(f"{self.lent_bytes(vault)} bytes lent")

            return put_to_sleep(backed_up, dropped, check_and_look)

        with monkeypatch.context() as patch:
            patch.setattr(VaultTransfers, "done_with", noted_done)
            patch.setattr(VaultTransfers, "__exit__", noted_exit)
            patch.setattr(Catalogue, "prove", noted_proof)
            patch.setattr(_core, "put_to_sleep", looked_at)
            allocator.sleep()
        assert steps == ["begun", "checked", "ended", "0 bytes lent"]
        allocator.wake_up()
        check(memory, {address: contents[address] for address in list(contents)[::2]})  # the cache was dropped

    def test_a_vault_that_dies_meanwhile_leaves_all_awake(
        self,
        through: MakeAllocator,
        memory: Memory,
        vault: RunningVault,
        start_vault: Callable[..., RunningVault],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        allocator = through()
        contents = fill(allocator, memory, *TAGS)
        end = VaultTransfers.end

        def end_and_die(transfers: VaultTransfers) -> None:
            end(transfers)
            vault.kill()

        with monkeypatch.context() as patch:
            patch.setattr(VaultTransfers, "end", end_and_die)
            with pytest.raises(VaultError):
                allocator.sleep()
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        check(memory, contents)
        start_vault().wait_until_ready()
        allocator.sleep()
        allocator.wake_up()
        check(memory, {address: contents[address] for address in list(contents)[::2]})


def test_a_replica_copies_nothing_and_writes_to_nobody_else(
    through: MakeAllocator, memory: Memory, vault: RunningVault
) -> None:
    allocator = through()
    contents = fill(allocator, memory, "weights")
    allocator.sleep()
    here = pathlib.Path(__file__).parent
    package = pathlib.Path(cumem_sleep.__path__[0]).parent
    with subprocess.Popen(
        [sys.executable, "-c", SECOND, str(vault.socket), str(here.parent), str(here), str(package)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as second:
        assert second.stdin is not None
        assert second.stdout is not None
        try:
            assert second.stdout.readline() == f"slept 0 {2 * PAGE}\n"
            assert vault.status()["asleep_bytes"] == 2 * PAGE, "one copy"
            second.stdin.write("\n")
            second.stdin.flush()
            assert second.stdout.readline() == f"dirty {2 * PAGE}\n"
            allocator.wake_up()
            check(memory, contents)
            second.stdin.write("\n")
            second.stdin.flush()
            assert second.stdout.readline() == "done\n"
            assert second.wait(SECONDS) == 0
        finally:
            second.kill()


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
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            message for message in caplog.messages if "read by this process itself" in message
        ]
        memory.write(next(iter(contents)), bytes(PAGE))
        with pytest.raises(VaultUnavailable):
            allocator.sleep()
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}

    @pytest.mark.slow
    def test_another_adopts_what_it_kept(
        self,
        through: MakeAllocator,
        memory: Memory,
        vault: RunningVault,
        start_vault: Callable[..., RunningVault],
        compress: str,
    ) -> None:
        allocator = through(compress=compress)
        contents = fill(allocator, memory, "weights", "default")
        stored = allocator.sleep().stored_bytes
        vault.kill()
        another = start_vault("64MiB", "--slab-size", "16MiB")
        another.wait_until_ready()
        assert allocator.wake_up().verified_bytes == 4 * PAGE
        check(memory, contents)
        assert another.status()["awake_bytes"] >= stored
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        address = next(iter(contents))
        contents[address] = bytes(2 * PAGE)
        memory.write(address, contents[address])
        assert allocator.sleep().copied_bytes == 2 * PAGE
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

    def test_what_was_evicted_is_neither_read_nor_taken_for_prepared(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault
    ) -> None:
        """Others may have their bytes there by now."""
        allocator = through()
        contents = fill(allocator, memory, "weights", pages=16)
        allocator.sleep()
        allocator.wake_up()
        for address, content in contents.items():
            assert bytes(allocator.read_backup(address, len(content))) == content
        other = vault.client()
        other.reserve(_core.device_info(0).uuid, [48 << 20])  # reading needs nothing any more
        usage = allocator.usage()["weights"]
        assert (usage.backed_up_bytes, usage.host_bytes, usage.vault_bytes, usage.shared_bytes) == (0, 0, 0, 0)
        for address, content in contents.items():
            assert allocator.read_backup(address, len(content)) is None
        other.close()
        eventually(lambda: len(vault.status()["clients"]) <= 2, "the other client is gone")
        allocator.sleep()
        allocator.wake_up()
        other = vault.client()
        other.reserve(_core.device_info(0).uuid, [48 << 20])
        other.close()
        eventually(lambda: len(vault.status()["clients"]) <= 2, "the other client is gone")
        allocator.prepare().wait()
        assert allocator.usage()["weights"].backed_up_bytes == sum(map(len, contents.values()))
        assert allocator.sleep().copied_bytes == 0, "prepared"
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

    @pytest.mark.slow
    def test_stopped_during_a_wake(self, through: MakeAllocator, memory: Memory, vault: RunningVault) -> None:
        """It may yet fill what it was lent: that memory goes back, and the next wake reads by itself."""
        allocator = through()
        contents = fill(allocator, memory, "weights", "default")
        allocator.sleep()
        tier = allocator._store.room.tier
        assert isinstance(tier, VaultTier)
        assert tier._client is not None
        tier._client.deadline_s = 0.5
        vault.signal(signal.SIGSTOP)
        try:
            with pytest.raises(VaultLost):
                allocator.wake_up()
            assert {segment.sleep for segment in _core.segments()} == {BACKED_UP}
            allocator.wake_up()
            check(memory, contents)
        finally:
            vault.kill()


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
        assert not isinstance(allocator._store.room.tier, VaultTier)
        allocator.wake_up()
        check(memory, contents)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["VLLM::Worker_TP0"], "VLLM::Worker_TP0"),
        (["/usr/bin/python3", "/venv/bin/vllm", "serve", "--port", "1"], "vllm"),
        (["python", "-u", "-W", "ignore", "-m", "sglang.launch_server", "x"], "sglang.launch_server"),
        (["python3.11", "-c", "from multiprocessing.spawn import spawn_main"], "python3.11"),
        (["python", "-m"], "python"),
        (["/opt/server/serve", "model"], "serve"),
        ([""], ""),
    ],
)
def test_clients_have_names_that_people_know(command: list[str], name: str) -> None:
    assert name_of(command) == name


class TestWhatOnceBroke:
    @pytest.mark.slow
    def test_bytes_without_a_digest_outlive_their_vault(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault, start_vault: Callable[..., RunningVault]
    ) -> None:
        """No vault can adopt those, and the numbers of the next one mean other backups."""
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

    def test_a_failure_with_copies_in_flight_leaves_the_vault_nothing(
        self, through: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights", pages=8)
        memory.close()

        def fail(_: Filling) -> None:
            raise InvalidState("in the middle")

        with monkeypatch.context() as patch:
            patch.setattr(Filling, "finish", fail)
            with pytest.raises(InvalidState, match="in the middle"):
                allocator.sleep()
        allocator.sleep()
        free_bytes, total_bytes = _core.memory_info(0)
        assert free_bytes == total_bytes, "the vault has some of it still"
        allocator.wake_up()
        check(memory, contents)

    def test_backups_in_the_making_are_needed(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault
    ) -> None:
        allocator = through()
        fill(allocator, memory, "weights", pages=8)
        (segment,) = _core.segments()
        with allocator._lock.hold():
            allocator._store.room.take([segment], [], {}, beside_work=True)
            allocator._store.catalogue.prune()
        assert vault.status()["asleep_bytes"] == 16 * PAGE // 2
        allocator.release_backups()

    def test_clearing_a_store_opens_no_tier(self, through: MakeAllocator) -> None:
        allocator = through()
        allocator._store.room.clear()
        allocator._store.room.stop()
        assert allocator._store.catalogue.tiers == []

    def test_an_error_of_the_codec_ends_where_nothing_is_left_to_give_up(
        self, through: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights")

        def fail(*_: object) -> None:
            raise CodecError("no such code")

        with monkeypatch.context() as patch:
            patch.setattr(allocator._store.room, "adopt", fail)
            with pytest.raises(CodecError):
                allocator.sleep()
        check(memory, contents)

    @pytest.mark.slow
    def test_a_mark_without_an_answer_counts(
        self, through: MakeAllocator, memory: Memory, vault: RunningVault, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The vault may have done it, and evicted the backup since."""
        allocator = through()
        contents = fill(allocator, memory, "weights", pages=16)
        allocator.sleep()
        mark = VaultClient.mark

        def lose_the_answer(client: VaultClient, backups: Sequence[VaultBackup], needed: bool) -> list[VaultBackup]:
            gone = mark(client, backups, needed)
            if not needed:
                raise VaultLost("it is silent")
            return gone

        with monkeypatch.context() as patch:
            patch.setattr(VaultClient, "mark", lose_the_answer)
            allocator.wake_up()
            other = vault.client()
            other.reserve(_core.device_info(0).uuid, [48 << 20])
            other.close()
            eventually(lambda: vault.status()["asleep_bytes"] == 0, "the other client is gone")
            assert allocator.sleep().copied_bytes == 16 * PAGE
        allocator.wake_up()
        check(memory, contents)

    def test_backups_whose_seal_has_no_answer_are_not_trusted(
        self, through: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocator = through()
        contents = fill(allocator, memory, "weights")
        seal = VaultClient.seal

        def lose_the_answer(client: VaultClient, sealed: Sequence[Sealed]) -> None:
            seal(client, sealed)
            raise VaultLost("it is silent")

        with monkeypatch.context() as patch:
            patch.setattr(VaultClient, "seal", lose_the_answer)
            with pytest.raises(VaultLost):
                allocator.sleep()
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        assert allocator._store.room.bytes == 0
        assert allocator.sleep().copied_bytes == 2 * PAGE
        allocator.wake_up()
        check(memory, contents)
