"""Ranges of dropped memory that the vault keeps: expendable."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kept_cache import Cache
from running import MIB, RunningVault, Segment, eventually, lone_link, seal, table, take_back
from support import AWAKE, PAGE, Memory, forget_devices
from test_recovery import fall_silent, speak

from cumem_sleep import CuMemAllocator, CumemSleepError, DriverError, InvalidArgument, InvalidState, _core, sim
from cumem_sleep.errors import OutOfHostMemory, VaultLost
from cumem_sleep.store.lanes import HostLaneGroup
from cumem_sleep.vault import protocol, range_table
from cumem_sleep.vault.client import VaultBackup, VaultClient
from cumem_sleep.vault.jobs import BorrowedMemory, Job, LinkPiece
from cumem_sleep.vault.range_table import SMALL_RANGE_BYTES, check_table, table_pieces
from cumem_sleep.vault.slabs import UNIT_BYTES, SlabRange

pytestmark = pytest.mark.sim

MakeAllocator = Callable[..., CuMemAllocator]
MEMORY = 64 * MIB  # of the vault


@pytest.fixture
def make_cache(make_allocator: MakeAllocator, vault: RunningVault) -> Iterator[Callable[..., Cache]]:
    """One, whose backups the vault has; nothing of it is left behind."""
    made: list[Cache] = []

    def make(pages: tuple[int, ...] = (2, 3, 1), **settings: object) -> Cache:
        made.append(Cache(make_allocator(vault=str(vault.socket), **settings), pages))
        return made[0]

    yield make
    sim.reset()
    for cache in made:
        for address in (cache.weights, *cache.addresses):
            cache.allocator.free(address)
        if (tier := cache.allocator._store.catalogue.vault) is not None:
            tier.leave()


@pytest.fixture
def cache(make_cache: Callable[..., Cache]) -> Cache:
    return make_cache()


@pytest.fixture
def other(vault: RunningVault) -> Iterator[VaultClient]:
    connected = vault.client("other")
    yield connected
    connected.close()


def fill_up(client: VaultClient, nbytes: int = MEMORY - PAGE) -> list[VaultBackup]:
    """What others back up, beside the weights: nothing else is left then."""
    return client.reserve(client.gpus[0], [nbytes])


class TestKept:
    def test_the_bytes_come_back(self, cache: Cache, vault: RunningVault) -> None:
        for _ in range(3):
            cache.check_kept(cache.sleep())
            usage = cache.allocator.usage()["kv_cache"]
            assert usage.host_bytes == usage.vault_bytes >= cache.bytes
            assert vault.status()["awake_bytes"] >= cache.bytes
            cache.check_back()
            assert vault.status()["asleep_bytes"] == 0
            assert vault.status()["free_bytes"] == MEMORY - PAGE

    def test_the_room_is_what_is_free(self, cache: Cache, vault: RunningVault, other: VaultClient) -> None:
        room = cache.allocator.kept_room
        assert room() == MEMORY - PAGE, "without the backup of the weights"
        assert cache.allocator._store.memory.tier.expendable_room(2) == MEMORY // 2
        cache.check_kept(cache.sleep())
        assert MEMORY - PAGE - UNIT_BYTES < room() <= MEMORY - PAGE, "what is kept now is given up for it"
        cache.check_back()
        (backup,) = fill_up(other, MEMORY // 2)
        other.mark([backup], needed=False)
        assert room() == MEMORY // 2 - PAGE, "what others retain is not evicted for it"
        other.release([backup])

    def test_the_budget_holds_too(self, make_cache: Callable[..., Cache]) -> None:
        cache = make_cache(host_budget_bytes=PAGE + 4096)
        assert cache.allocator.kept_room() == 4096
        assert "budget" in cache.sleep().not_kept
        cache.check_lost("budget")

    def test_no_vault_has_no_room(self, cache: Cache, vault: RunningVault) -> None:
        vault.kill()
        assert cache.allocator.kept_room() == 0

    def test_nothing_is_evicted_for_it(self, cache: Cache, other: VaultClient) -> None:
        retained = fill_up(other)
        other.mark(retained, needed=False)
        report = cache.sleep()
        assert "vault" in report.not_kept
        assert other.owners(retained) == [1]
        cache.check_lost(report.not_kept)


def noting_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    verbs: list[str] = []
    begin = VaultClient._begin

    def noted(client: VaultClient, verb: str, *args: Any, **facts: Any) -> int:
        verbs.append(verb)
        return begin(client, verb, *args, **facts)

    monkeypatch.setattr(VaultClient, "_begin", noted)
    return verbs


class TestLost:
    def test_anybody_s_backup_evicts_it(self, cache: Cache, vault: RunningVault, other: VaultClient) -> None:
        (retained,) = fill_up(other, 4 * PAGE)
        other.mark([retained], needed=False)
        cache.check_kept(cache.sleep())
        backups = fill_up(other, MEMORY - 5 * PAGE)
        assert other.owners([retained]) == [1], "it is evicted before what others retain"
        assert cache.allocator.usage()["kv_cache"].host_bytes == 0
        cache.check_lost("needed the memory")
        other.release([*backups, retained])
        cache.check_kept(cache.sleep())
        cache.check_back()

    def test_one_s_own_backups_evict_it(self, cache: Cache, other: VaultClient) -> None:
        cache.check_kept(cache.sleep())
        cache.allocator.wake_up("weights")
        backups = fill_up(other, MEMORY - 2 * PAGE)
        more = cache.allocator.malloc(PAGE, "weights")
        cache.allocator.sleep()
        assert "memory" in cache.allocator.wake_up().not_kept
        cache.allocator.free(more)
        other.release(backups)

    def test_a_killed_vault_loses_it(
        self, cache: Cache, vault: RunningVault, start_vault: Callable[..., RunningVault]
    ) -> None:
        cache.check_kept(cache.sleep())
        vault.kill()
        cache.check_lost("ended")
        start_vault().wait_until_ready()
        cache.check_kept(cache.sleep())
        cache.check_back()

    @pytest.mark.parametrize("silent_from", ["the beginning", "the last question"])
    def test_a_vault_that_is_silent_loses_it_before_it_is_lent_memory(
        self, cache: Cache, vault: RunningVault, monkeypatch: pytest.MonkeyPatch, silent_from: str
    ) -> None:
        cache.check_kept(cache.sleep())
        mark = VaultClient.mark

        def then_silent(*args: Any, **kwargs: Any) -> list[VaultBackup]:
            fall_silent(vault, cache.allocator)
            return mark(*args, **kwargs)

        cache.allocator.wake_up("weights")
        if silent_from == "the beginning":
            fall_silent(vault, cache.allocator)
        else:
            monkeypatch.setattr(VaultClient, "mark", then_silent)
        verbs = noting_requests(monkeypatch)
        try:
            cache.check_lost("vault")
            assert "copy" not in verbs
        finally:
            speak(vault, cache.allocator)

    def test_a_vault_that_is_silent_while_it_copies_fails_the_wake(
        self, cache: Cache, vault: RunningVault, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Because it may write to that memory yet. The next wake has other memory."""
        cache.check_kept(cache.sleep())
        copy = VaultClient.copy

        def silent(*args: Any, **kwargs: Any) -> int:
            fall_silent(vault, cache.allocator)
            return copy(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(VaultClient, "copy", silent)
            with pytest.raises(VaultLost):
                cache.allocator.wake_up()
        assert all(segment.sleep != AWAKE for segment in _core.segments())
        cache.check_lost("does not answer")
        cache.contents = {address: np.random.bytes(len(content)) for address, content in cache.contents.items()}
        cache.fill()
        speak(vault, cache.allocator)
        eventually(
            lambda: not any(each["open_requests"] for each in vault.status()["clients"] if each["lent_bytes"]),
            "it has copied",
        )
        assert cache.is_all_there()

        def sleeps() -> bool:
            with suppress(VaultLost):
                return bool(cache.sleep().kept_bytes)
            return False

        eventually(sleeps, "it is used again")
        cache.check_back()

    def test_changed_bytes_are_noticed(self, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        """The owner proves them, not the vault: here its kernel copies to the wrong place."""
        cache.check_kept(cache.sleep())
        copy = VaultClient.copy

        def shifted(client: VaultClient, lent: Any, backup: VaultBackup, ranges: Any, *, to_host: bool) -> int:
            return copy(
                client, lent, backup, np.roll(ranges, 1, axis=0) * (1, 0, 1) + ranges * (0, 1, 0), to_host=to_host
            )

        monkeypatch.setattr(VaultClient, "copy", shifted)
        cache.check_lost("digest")


BAD = {
    "beyond the memory": table((PAGE, 0, 16)),
    "partly beyond the memory": table((PAGE - 16, 0, 32)),
    "beyond the backup": table((0, PAGE // 2, 16)),
    "partly beyond the backup": table((0, PAGE // 2 - 16, 32)),
    "huge": table((0, 0, (1 << 63) - 16)),
    "huge offsets": table(((1 << 63) - 16, (1 << 63) - 16, 16)),
    "the same memory": table((0, 0, 32), (16, 32, 16)),
    "the same bytes of the backup": table((0, 16, 32), (64, 32, 16)),
    "the same, not in order": table((64, 32, 16), (0, 16, 32)),
    "nothing": table((0, 0, 0)),
}


class TestTables:
    @pytest.fixture
    def mine(self, client: VaultClient, allocator: CuMemAllocator) -> Segment:
        return Segment(client, allocator.malloc(PAGE, "kv_cache"), PAGE)

    @pytest.mark.parametrize("ranges", BAD.values(), ids=BAD)
    @pytest.mark.parametrize("to_host", [True, False])
    def test_a_bad_one_is_refused_and_nothing_copied(
        self, mine: Segment, client: VaultClient, ranges: protocol.Table, to_host: bool
    ) -> None:
        (backup,) = client.reserve(mine.gpu, [PAGE // 2])
        lent, _ = mine.lend()
        with pytest.raises(InvalidArgument, match="ranges: "):
            client.wait([client.copy(lent, backup, ranges, to_host=to_host)])
        client.wait([client.copy(lent, backup, table((0, 0, 16)), to_host=True)])  # it still serves
        take_back(client, [lent])
        client.release([backup])

    @pytest.mark.parametrize("said", [None, 7, "$", "AAAA", protocol.table_to_json(table((0, -16, 16)))], ids=str)
    def test_what_is_none_ends_the_connection(self, mine: Segment, vault: RunningVault, said: object) -> None:
        client = vault.client()
        with pytest.raises(VaultLost):
            client._ask("copy", gpu=mine.gpu, memory=1, bytes=PAGE, out=True, ranges=said, number=1)
        client.close()
        assert vault.status()

    def test_sealed_and_strange_backups_are_not_written(
        self, mine: Segment, client: VaultClient, vault: RunningVault
    ) -> None:
        backup = mine.back_up()
        seal(client, backup, "x")
        lent, _ = mine.lend()
        with pytest.raises(InvalidState, match="sealed"):
            client.wait([client.copy(lent, backup, table((0, 0, 16)), to_host=True)])
        client.wait([client.copy(lent, backup, table((0, 0, 16)), to_host=False)])
        take_back(client, [lent])
        other = vault.client()
        for to_host in (True, False):
            lent, _ = Segment(other, mine.address, PAGE).lend()
            with pytest.raises(InvalidState, match="not held by this process"):
                other.wait([other.copy(lent, backup, table((0, 0, 16)), to_host=to_host)])
        other.close()
        client.release([backup])

    def test_many_small_ranges_beside_a_large_one(self, mine: Segment, client: VaultClient, memory: Memory) -> None:
        """There are more of them than a copy may have pieces, unless small ones are copied together."""
        large, count = SMALL_RANGE_BYTES + 16, 17_000
        ranges = np.array([(0, 0, large), *((large + 16 + 32 * n, large + 16 + 32 * n, 16) for n in range(count))])
        content = np.frombuffer(memory.fill_random(mine.address, PAGE), np.uint8)
        (backup,) = client.reserve(mine.gpu, [PAGE])
        lent, _ = mine.lend()
        client.wait([client.copy(lent, backup, ranges, to_host=True)])
        memory.write(mine.address, bytes(PAGE))
        client.wait([client.copy(lent, backup, ranges, to_host=False)])
        take_back(client, [lent])
        client.release([backup])
        expected = np.zeros(PAGE, np.uint8)
        for at, _, nbytes in ranges.tolist():
            expected[at : at + nbytes] = content[at : at + nbytes]
        assert memory.read(mine.address, PAGE) == expected.tobytes()

    def test_what_is_expendable_is_not_sealed(self, mine: Segment, client: VaultClient) -> None:
        backups = client.reserve_now(mine.gpu, [PAGE], expendable=True)
        assert backups is not None
        with pytest.raises(InvalidState, match="expendable"):
            seal(client, backups[0], "x")
        client.release(backups)

    @pytest.mark.parametrize("seed", range(20))
    def test_pieces_are_the_ranges(self, seed: int) -> None:
        """For any table and any extents; no piece is larger than others may wait for."""
        random = np.random.default_rng(seed)
        sizes = random.integers(1, 40, random.integers(1, 9)) * (1 << 16)
        slabs = random.integers(0, 3, len(sizes))
        extents = [SlabRange(int(s), int(at) << 24, int(n)) for at, (s, n) in enumerate(zip(slabs, sizes, strict=True))]
        total = int(sizes.sum())
        cuts = np.sort(random.choice(np.arange(1, total // 16), random.integers(1, 200), replace=False)) * 16
        starts, ends = np.concatenate(([0], cuts)), np.concatenate((cuts, [total]))
        at = random.permutation(len(starts))
        lent = np.cumsum((ends - starts)[at]) - (ends - starts)[at]
        ranges = np.column_stack((lent, starts[at], (ends - starts)[at]))[: random.integers(1, len(at) + 1)]
        check_table(ranges, total, total)
        places = np.concatenate(
            [(each.slab << 40) + np.arange(each.offset, each.offset + each.nbytes, 16) for each in extents]
        )
        expected, found = (np.full(total // 16, -1) for _ in range(2))
        for lent_at, offset, nbytes in ranges.tolist():
            expected[lent_at // 16 : (lent_at + nbytes) // 16] = places[offset // 16 : (offset + nbytes) // 16]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(range_table, "PIECE_ROWS", 16)
            patch.setattr(range_table, "_PIECE_BYTES", 1 << 20)
            for slab, rows in table_pieces(ranges, extents):
                assert len(rows) <= 16
                assert rows[:, 2].sum() <= (1 << 20) + ranges[:, 2].max()
                for lent_at, offset, nbytes in rows.tolist():
                    piece = found[lent_at // 16 : (lent_at + nbytes) // 16]
                    assert (piece == -1).all()
                    piece[:] = (slab << 40) + np.arange(offset, offset + nbytes, 16)
        assert np.array_equal(found, expected)


class TestLinks:
    """Of this process."""

    ROWS = 200

    @pytest.fixture
    def lent(self, allocator: CuMemAllocator, memory: Memory) -> Iterator[tuple[BorrowedMemory, int, bytes]]:
        address = allocator.malloc(4 * PAGE, "kv_cache")
        content = memory.fill_random(address, 4 * PAGE)
        descriptor, base, nbytes = _core.export_memory(address)
        borrowed = BorrowedMemory(descriptor, 0, nbytes)
        yield borrowed, address - base, content
        borrowed.close()

    @pytest.mark.parametrize(
        "by", ["the kernel", "the engine", "the engine, for the kernel fails", "both, for tables are not pinned"]
    )
    def test_a_table_is_copied_both_ways(
        self,
        lent: tuple[BorrowedMemory, int, bytes],
        memory: Memory,
        by: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        borrowed, lent_at, content = lent
        if by == "the engine":
            monkeypatch.setattr(_core, "device_info", lambda _: SimpleNamespace(host_pointers=False))
        elif "tables" in by:
            refused = Counter[HostLaneGroup]()
            made = HostLaneGroup.table

            def table_of(group: HostLaneGroup, nbytes: int, device: int) -> _core.HostBlock:
                refused[group] += 1
                if refused[group] <= 3:
                    raise OutOfHostMemory(nbytes, 0, "cuMemHostRegister")
                return made(group, nbytes, device)

            monkeypatch.setattr(HostLaneGroup, "table", table_of)
        elif by != "the kernel":
            monkeypatch.setattr(_core.CopyStream, "copy_pieces", refuse)
        block = _core.HostBlock(4 * PAGE, -1)
        block.prefault(0, 4 * PAGE)
        block.pin(0)
        random = np.random.default_rng(1)
        at, to = (random.permutation(4 * PAGE // 4096)[: self.ROWS] * 4096 for _ in range(2))
        rows = np.column_stack((at + lent_at, to, np.full(self.ROWS, 4096)))
        for to_host in (True, False):
            self.copy(borrowed, block, rows, to_host)
            held = np.frombuffer(memoryview(block), np.uint8)
            for offset, place in zip(at.tolist(), to.tolist(), strict=True):
                assert held[place : place + 4096].tobytes() == content[offset : offset + 4096]
        block.close()
        fails = sum("the copy kernel failed" in record.message for record in caplog.records)
        assert fails == (2 if "fails" in by else 6 if "tables" in by else 0), "each link asks once, but for a table"

    def copy(self, borrowed: BorrowedMemory, block: _core.HostBlock, rows: protocol.Table, to_host: bool) -> None:
        ended: list[Exception | None] = []
        pieces = deque(LinkPiece(block, 0, 0, int(some[:, 2].sum()), some) for some in np.array_split(rows, 11))
        pieces.insert(5, LinkPiece(block, 0, 0, 0))
        vault_link = lone_link(0, to_host)
        vault_link.submit(Job("client", borrowed, pieces, ended.append))
        eventually(lambda: bool(ended), "the job ends")
        vault_link.stop()
        assert ended == [None]
        assert vault_link.copied.nbytes == rows[:, 2].sum()


def refuse(*_: object, **__: object) -> None:
    raise DriverError("cuMemHostRegister", "CUDA_ERROR_UNKNOWN")


class TestFaults:
    @pytest.mark.slow
    @pytest.mark.parametrize("operation", ["sleep", "wake"])
    def test_every_driver_call_may_fail(self, make_cache: Callable[..., Cache], operation: str) -> None:
        """It is kept and back, or said to be lost; or the call fails as it would without, and nothing is lost."""
        cache = make_cache((1, 1))
        outcomes = set()
        for number, (call, position) in enumerate(self.calls_of(cache, operation)):
            cache.fill()
            if operation == "wake":
                cache.check_kept(cache.sleep())
            forget_devices()
            sim.reset()
            sim.fail(call, after=position, error="CUDA_ERROR_UNKNOWN")
            try:
                report = cache.sleep() if operation == "sleep" else cache.allocator.wake_up()
            except CumemSleepError:
                sim.reset()
                outcomes.add("failed")
                assert operation == "wake" or cache.is_all_there(), number
                cache.allocator.wake_up()
                continue
            sim.reset()
            outcomes.add(report.not_kept and "not kept")
            if operation == "sleep":
                assert cache.wake().not_kept == report.not_kept
            assert report.not_kept or cache.is_back()
        assert outcomes == {"", "failed", "not kept"}

    def calls_of(self, cache: Cache, operation: str) -> list[tuple[str, int]]:
        cache.sleep()
        cache.wake()
        counted = {}
        for name, work in (("sleep", cache.sleep), ("wake", cache.wake)):
            forget_devices()
            sim.reset()
            work()
            counted[name] = sim.stats().calls.items()
        return [(call, position) for call, count in counted[operation] for position in range(count)]
