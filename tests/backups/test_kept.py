"""Ranges that are kept of dropped memory: their bytes come back, or somebody is told why none of them did."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kept_cache import Cache
from support import (
    AWAKE,
    DROPPED,
    MIB,
    PAGE,
    Memory,
    ample_host_memory,
    digest_by_the_kernel,
    forget_devices,
    holds,
    quick_sums,
)
from world import CONTEXT_CALLS

from cumem_sleep import (
    CuMemAllocator,
    CumemSleepError,
    DriverError,
    InvalidArgument,
    _core,
    sim,
)
from cumem_sleep.core.operation import Vote
from cumem_sleep.digest.digester import DigestRun
from cumem_sleep.digest.reference import CHUNK_BYTES, digests_from, sums_of
from cumem_sleep.for_plugin import drop_kept
from cumem_sleep.store.lanes import HostLane

Ranges = npt.NDArray[np.int64]


MakeAllocator = Callable[..., CuMemAllocator]


def refuse_kernel(*_: object) -> None:
    raise DriverError("cuLaunchKernel", "CUDA_ERROR_UNKNOWN")


class NoArray:
    """As a tensor that NumPy cannot look at."""

    def __array__(self) -> object:
        raise RuntimeError("no array")


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ranges lie in several extents."""
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", MIB)


@pytest.fixture(params=[True, False], ids=["by kernel", "by engine"])
def by_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether kernels reach pinned host memory by its address."""
    if not request.param:
        monkeypatch.setattr(HostLane, "_begin_by_kernel", refuse_kernel)
    return bool(request.param)


@pytest.fixture
def quick_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are not the question: most of a sweep would be digests, and a look into hundreds of files."""
    monkeypatch.setattr("cumem_sleep.digest.digester.sums_of", quick_sums)
    ample_host_memory(monkeypatch)


@pytest.fixture
def cache(allocator: CuMemAllocator) -> Cache:
    return Cache(allocator)


SETTINGS: list[dict[str, object]] = [{}, {"verify": "off"}, {"retain_backups": False}, {"poison": True}]


class TestOnAnyDevice:
    """On a GPU, too: what its kernels do is what the reference says."""

    PAGES = 4

    def ranges(self, random: np.random.Generator, block: int) -> Ranges:
        blocks = np.sort(random.permutation(self.PAGES * PAGE // block)[:60])
        return np.column_stack((blocks * block, np.full(len(blocks), block)))

    @pytest.mark.parametrize("block", [16, 4096 + 16, 65536, 3 * 65536 + 48, PAGE])
    def test_the_bytes_come_back(self, allocator: CuMemAllocator, memory: Memory, block: int) -> None:
        weights = allocator.malloc(PAGE, "weights")
        content = memory.fill_random(weights, PAGE)
        addresses = [allocator.malloc(self.PAGES * PAGE, "kv_cache") for _ in range(3)]
        contents = [memory.fill_random(address, self.PAGES * PAGE) for address in addresses]
        random = np.random.default_rng(block)
        keep = {address: random.permutation(self.ranges(random, block)) for address in addresses}
        nbytes = sum(int(rows[:, 1].sum()) for rows in keep.values())
        for _ in range(2):
            report = allocator.sleep(keep=keep)
            assert (report.kept_bytes, report.not_kept) == (nbytes, "")
            report = allocator.wake_up()
            assert (report.kept_bytes, report.not_kept) == (nbytes, "")
            for address, before in zip(addresses, contents, strict=True):
                now = memory.read(address, len(before))
                for offset, size in keep[address].tolist():
                    assert now[offset : offset + size] == before[offset : offset + size]
        assert memory.read(weights, PAGE) == content

    @pytest.mark.parametrize("block", [16, 4096 + 16, 65536, 3 * 65536 + 48, PAGE])
    def test_the_digest_is_the_reference(self, allocator: CuMemAllocator, memory: Memory, block: int) -> None:
        address = allocator.malloc(self.PAGES * PAGE, "kv_cache")
        content = np.frombuffer(memory.fill_random(address, self.PAGES * PAGE), np.uint8)
        (segment,) = _core.segments()
        rows = self.ranges(np.random.default_rng(block), block)
        total, first_chunk = np.zeros((1, 2), np.uint64), 0
        for offset, size in rows.tolist():
            total += np.array(sums_of(content[offset : offset + size], first_chunk), np.uint64)
            first_chunk += -(-size // CHUNK_BYTES)
        with DigestRun(allocator._digester, [segment], {segment.id: rows}) as run:
            run.start([segment])
            assert run.finish()[segment.id] == digests_from(total, [int(rows[:, 1].sum())])[0]


@pytest.mark.sim
class TestBytes:
    @pytest.mark.parametrize(("seed", "devices"), [(0, 1), (1, 2), (2, 1), (3, 2)])
    def test_come_back(self, allocator: CuMemAllocator, seed: int, devices: int) -> None:
        cache = Cache(allocator, (2, 3, 1, 2), devices=devices, seed=seed)
        for _ in range(3):
            cache.check_kept(cache.sleep())
            cache.check_back()
        allocator.sleep()
        report = allocator.wake_up()
        assert (report.kept_bytes, report.not_kept) == (0, ""), "what was kept before is not asked for again"

    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    def test_come_back_whatever_copies(
        self, make_allocator: MakeAllocator, settings: dict[str, object], by_kernel: bool
    ) -> None:
        cache = Cache(make_allocator(**settings))
        for _ in range(2):
            cache.check_kept(cache.sleep())
            assert bool(sim.stats().calls["cuLaunchKernel"]) == by_kernel
            cache.check_back()

    @pytest.mark.parametrize("seed", range(3))
    def test_come_back_with_digests_by_the_kernel(self, cache: Cache, seed: int) -> None:
        digest_by_the_kernel(cache.allocator)
        cache.check_kept(cache.sleep())
        launches = sim.stats().calls["cuLaunchKernel"]
        cache.check_back()
        assert sim.stats().calls["cuLaunchKernel"] > launches
        cache.sleep()
        extents = cache.allocator._store.catalogue.kept._places[0].extents
        np.frombuffer(memoryview(extents[0]), np.uint8)[-1 - seed] ^= 1  # type: ignore[arg-type]
        cache.check_lost("digest")

    def test_are_those_at_the_sleep(self, cache: Cache) -> None:
        """And not of the sleep before."""
        cache.sleep()
        cache.wake()
        cache.contents = {address: content[::-1] for address, content in cache.contents.items()}
        cache.fill()
        cache.check_kept(cache.sleep())
        cache.check_back()


@pytest.mark.sim
class TestArguments:
    @pytest.mark.parametrize(
        "rows",
        [
            [(0, 16), (8, 16)],
            [(0, 8)],
            [(0, 32), (16, 16)],
            [(0, 32), (0, 32)],
            [(0, -16)],
            [(-16, 16)],
            [(PAGE - 16, 32)],
            [(PAGE, 16)],
            [(0, PAGE + 16)],
            [(1 << 62, 1 << 62)],
            [((1 << 64) - 16, 16)],
            [(0.0, 16.0)],
            [0, 16],
            [(0, 16, 32)],
            [("0", "16")],
            [(1 << 70, 16)],
            "none",
            [(0, 16), (32,)],
            NoArray(),
        ],
        ids=str,
    )
    def test_nonsense_is_refused_before_anything_is_done(self, cache: Cache, rows: Any) -> None:
        with pytest.raises(InvalidArgument, match="keep"):
            cache.allocator.sleep(keep={cache.addresses[-1]: rows})
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        assert sim.stats().calls["cuMemUnmap"] == 0

    @pytest.mark.parametrize("keep", [5, [(0, 16)], {"a": [(0, 16)]}, {-1: [(0, 16)]}, {16: [(0, 16)]}], ids=str)
    def test_addresses_of_nobody_are_refused(self, cache: Cache, keep: Any) -> None:
        with pytest.raises(InvalidArgument, match="keep"):
            cache.allocator.sleep(keep=keep)
        with cache.allocator.regions.use("a", backup=True):
            address = cache.allocator.malloc(PAGE)
        with pytest.raises(InvalidArgument, match="pools"):
            cache.allocator.sleep(keep={address: [(0, 16)]})

    @pytest.mark.parametrize("level", [0, 2])
    def test_levels_that_keep_nothing(self, cache: Cache, level: int) -> None:
        with pytest.raises(InvalidArgument, match=f"level={level}"):
            cache.sleep(level=level)
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}

    def test_by_tags(self, cache: Cache) -> None:
        cache.check_kept(cache.sleep(offload_tags=("weights",)))
        cache.check_back()


@pytest.mark.sim
class TestGivenUp:
    """None of it is back then, and the reports say why."""

    def test_too_little_host_memory(self, make_allocator: MakeAllocator) -> None:
        cache = Cache(make_allocator(host_budget_bytes=PAGE + 4096))
        assert cache.allocator.kept_room() == 4096
        assert cache.allocator._store.memory.tier.expendable_room(2) == PAGE + 4096, "a budget is not shared"
        report = cache.sleep()
        assert report.kept_bytes == 0
        assert "limit: budget" in report.not_kept
        assert report.not_kept in str(report)
        assert (cache.host_bytes, cache.kept_bytes) == (0, 0)
        cache.check_lost("limit: budget")
        cache.keep = {cache.addresses[0]: np.array([(0, 4096)])}
        cache.check_kept(cache.sleep())
        cache.check_back()

    def test_no_backup_gives_way(self, make_allocator: MakeAllocator) -> None:
        """Not even one that is merely retained."""
        cache = Cache(make_allocator(host_budget_bytes=2 * PAGE))
        cache.keep = {cache.addresses[0]: np.array([(0, PAGE + 16)])}
        cache.allocator.sleep()
        cache.wake()
        assert cache.allocator.kept_room() == PAGE
        assert "budget" in cache.sleep().not_kept
        assert cache.allocator.usage()["weights"].host_bytes == PAGE
        cache.wake()

    def test_it_gives_way_to_backups(self, make_allocator: MakeAllocator) -> None:
        cache = Cache(make_allocator(host_budget_bytes=2 * PAGE))
        cache.keep = {cache.addresses[0]: np.array([(0, 4096)]), cache.addresses[1]: np.array([(0, 16)])}
        cache.check_kept(cache.sleep())
        cache.allocator.wake_up("weights")
        assert cache.kept_bytes == cache.bytes
        extra = cache.allocator.malloc(PAGE, "weights")
        report = cache.allocator.sleep()
        assert report.copied_bytes == PAGE
        assert cache.kept_bytes == cache.host_bytes == 0
        cache.check_lost("backups needed the host memory")
        cache.allocator.free(extra)

    def test_dropped_on_demand(self, cache: Cache) -> None:
        cache.sleep()
        assert drop_kept(cache.allocator) == cache.bytes
        assert drop_kept(cache.allocator) == 0
        assert cache.host_bytes == 0
        cache.check_lost("drop_kept")
        assert drop_kept(cache.allocator) == 0
        cache.check_kept(cache.sleep())
        cache.check_back()

    @pytest.mark.parametrize("place", range(4))
    def test_damaged_bytes(self, cache: Cache, place: int) -> None:
        cache.sleep()
        extents = cache.allocator._store.catalogue.kept._places[0].extents
        content = np.frombuffer(memoryview(extents[place % len(extents)]), np.uint8)  # type: ignore[arg-type]
        content[place * 16] ^= 4
        cache.check_lost("digest")
        assert cache.host_bytes == 0
        cache.fill()
        cache.check_kept(cache.sleep())
        cache.check_back()

    def test_once_something_is_lost_all_is(self, cache: Cache) -> None:
        """Of what wakes later, too; that of another sleep included."""
        cache.sleep()
        cache.allocator.wake_up("weights")
        more = Cache(cache.allocator, (1,), seed=2)
        assert more.sleep().kept_bytes == more.bytes
        extent = cache.allocator._store.catalogue.kept._places[0].extents[0]
        np.frombuffer(memoryview(extent), np.uint8)[0] ^= 1  # type: ignore[arg-type]
        report = cache.allocator.wake_up("kv_cache")
        assert "digest" in report.not_kept
        assert report.kept_bytes == cache.host_bytes == 0


@pytest.mark.sim
class TestPinnedAhead:
    """Host memory that sleeps need not pin any more."""

    @pytest.fixture(autouse=True)
    def by_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kernel's table is pinned as well; and, to verify, what the CPU digests."""
        monkeypatch.setattr(HostLane, "_begin_by_kernel", refuse_kernel)

    @pytest.mark.parametrize("devices", [1, 2])
    def test_the_first_sleep_pins_nothing(self, make_allocator: MakeAllocator, devices: int) -> None:
        cache = Cache(make_allocator(prepare_bytes_per_second=0, verify="off"), (2, 3, 1, 2), devices=devices)
        preparation = cache.allocator.prepare(keep_bytes=cache.bytes)
        assert preparation.wait(30)
        assert preparation.error is None
        assert cache.bytes <= cache.host_bytes
        assert cache.kept_bytes == 0
        assert len(cache.allocator._store.catalogue.kept._places) == devices, "each operation looks at all of them"
        for _ in range(2):
            pinned = sim.stats().calls["cuMemHostRegister"]
            cache.check_kept(cache.sleep())
            assert sim.stats().calls["cuMemHostRegister"] == pinned + 1  # to digest the weights
            cache.check_back()

    def test_a_second_sleep_uses_what_the_first_has_pinned(self, make_allocator: MakeAllocator) -> None:
        cache = Cache(make_allocator(verify="off"))
        cache.sleep()
        cache.wake()
        pinned = sim.stats().calls["cuMemHostRegister"]
        cache.keep = {address: rows[1:] for address, rows in cache.keep.items()}
        cache.check_kept(cache.sleep())
        assert sim.stats().calls["cuMemHostRegister"] == pinned + 1  # to digest the weights
        cache.check_back()

    def test_no_more_than_the_limits_leave_beside_backups(self, make_allocator: MakeAllocator) -> None:
        cache = Cache(make_allocator(prepare_bytes_per_second=0, host_budget_bytes=2 * PAGE + 4096))
        preparation = cache.allocator.prepare(keep_bytes=1 << 50)
        assert preparation.wait(30)
        assert preparation.error is None
        assert cache.host_bytes == PAGE
        assert cache.allocator.usage()["weights"].backed_up_bytes == PAGE

    def test_it_is_given_back_with_the_backups(self, make_allocator: MakeAllocator) -> None:
        cache = Cache(make_allocator(prepare_bytes_per_second=0))
        assert cache.allocator.prepare(keep_bytes=PAGE).wait(30)
        assert cache.allocator.release_backups() == 2 * PAGE
        assert cache.host_bytes == 0


@pytest.mark.sim
class TestOtherCalls:
    def test_a_wake_by_tags_leaves_it(self, cache: Cache) -> None:
        cache.sleep()
        report = cache.allocator.wake_up("weights")
        assert (report.kept_bytes, report.not_kept) == (0, "")
        assert cache.kept_bytes == cache.bytes
        cache.allocator.sleep()
        assert cache.kept_bytes == cache.bytes
        cache.check_back()

    def test_freeing_some_of_it_asleep(self, cache: Cache) -> None:
        cache.sleep()
        freed = cache.addresses.pop(0)
        cache.allocator.free(freed)
        del cache.keep[freed], cache.contents[freed]
        assert cache.kept_bytes == cache.bytes
        cache.check_back()

    @pytest.mark.parametrize("asleep", [True, False])
    def test_freeing_all_of_it(self, cache: Cache, asleep: bool) -> None:
        cache.keep = {cache.addresses[0]: np.array([(0, PAGE)]), cache.addresses[1]: np.array([(0, PAGE)])}
        cache.sleep()
        if not asleep:
            cache.wake()
        for address in cache.addresses:
            cache.allocator.free(address)
        assert cache.allocator._store.memory.bytes == PAGE

    def test_discard_leaves_what_sleeps(self, cache: Cache) -> None:
        cache.sleep()
        cache.allocator.discard("kv_cache")
        cache.check_back()
        cache.allocator.discard("kv_cache")
        cache.check_lost("")

    def test_level_3(self, cache: Cache) -> None:
        cache.sleep()
        cache.wake()
        cache.allocator.release_backups()
        registered_bytes = sim.stats().registered_bytes  # small tables are kept
        report = cache.sleep(level=3)
        assert not report.why_not_deeper
        assert (report.kept_bytes, report.not_kept) == (cache.bytes, "")
        assert cache.kept_bytes == cache.bytes
        assert sim.stats().registered_bytes == registered_bytes
        cache.check_back()
        cache.sleep(level=3)
        assert drop_kept(cache.allocator) == cache.bytes
        cache.check_lost("drop_kept")

    def test_the_room_is_what_the_weights_leave(self, make_allocator: MakeAllocator) -> None:
        cache = Cache(make_allocator(host_budget_bytes=5 * PAGE))
        assert cache.allocator.kept_room() == 4 * PAGE
        cache.allocator.sleep()
        assert cache.allocator.kept_room() == 4 * PAGE
        cache.wake()
        assert cache.allocator.kept_room() == 4 * PAGE
        cache.keep = {cache.addresses[0]: np.array([(0, 2 * PAGE)]), cache.addresses[1]: np.array([(0, 2 * PAGE)])}
        cache.check_kept(cache.sleep())
        assert cache.allocator.kept_room() == 4 * PAGE
        cache.check_back()


@pytest.mark.sim
@pytest.mark.usefixtures("quick_facts")
class TestFailures:
    def test_a_wake_that_other_ranks_refuse_keeps_it(self, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise DriverError("agree", "CUDA_ERROR_UNKNOWN")

        agree = Vote.agree
        monkeypatch.setattr(Vote, "agree", refuse)
        with pytest.raises(DriverError):
            cache.sleep()
        assert cache.is_all_there()
        assert cache.kept_bytes == 0
        monkeypatch.setattr(Vote, "agree", agree)
        cache.check_kept(cache.sleep())
        monkeypatch.setattr(Vote, "agree", refuse)
        with pytest.raises(DriverError):
            cache.allocator.wake_up()
        assert cache.kept_bytes == cache.bytes
        monkeypatch.setattr(Vote, "agree", agree)
        cache.check_back()

    def calls_of(self, work: Callable[[], object], error_name: str, by_kernel: bool) -> list[tuple[str, int]]:
        """Each position of each call; those around every step only for one of the errors.

        Every other one by kernel and the others by engine, which differ in a few calls: all of both take two minutes.
        """
        forget_devices()
        sim.reset()
        work()
        calls = sim.stats().calls.items()
        left_out = CONTEXT_CALLS if error_name == "CUDA_ERROR_OUT_OF_MEMORY" else set()
        every = [(call, position) for call, count in calls if call not in left_out for position in range(count)]
        return every[int(by_kernel) :: 2]

    @pytest.mark.slow
    @pytest.mark.parametrize("error_name", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
    def test_every_driver_call_of_a_sleep_may_fail(
        self, allocator: CuMemAllocator, error_name: str, by_kernel: bool
    ) -> None:
        """It is kept, or not; or the sleep fails as it would without, and nothing is lost and nothing kept."""
        cache = Cache(allocator, (1, 1))
        outcomes = set()
        for call, position in self.calls_of(cache.sleep, error_name, by_kernel):
            cache.wake()
            cache.fill()
            allocator.release_backups()
            forget_devices()
            sim.reset()
            sim.fail(call, after=position, error=error_name)
            try:
                report = cache.sleep()
            except CumemSleepError:
                sim.reset()
                outcomes.add("failed")
                assert {segment.sleep for segment in _core.segments()} == {AWAKE}
                assert cache.is_all_there()
                assert cache.kept_bytes == 0
                continue
            sim.reset()
            outcomes.add(report.not_kept and "not kept")
            woken = cache.wake()
            assert woken.not_kept == report.not_kept
            assert woken.kept_bytes == report.kept_bytes
        assert outcomes == {"", "failed", "not kept"}

    @pytest.mark.slow
    @pytest.mark.parametrize("error_name", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
    def test_every_driver_call_of_a_wake_may_fail(
        self, allocator: CuMemAllocator, error_name: str, by_kernel: bool
    ) -> None:
        """It is back, or said to be lost; or the wake fails as it would without, and the next one brings it back."""
        cache = Cache(allocator, (1, 1))
        outcomes = set()
        cache.sleep()
        for call, position in self.calls_of(allocator.wake_up, error_name, by_kernel):
            cache.fill()
            cache.check_kept(cache.sleep())
            forget_devices()
            sim.fail(call, after=position, error=error_name)
            try:
                report = allocator.wake_up()
            except CumemSleepError:
                sim.reset()
                outcomes.add("failed")
                assert all(segment.sleep != AWAKE for segment in _core.segments())
                if cache.kept_bytes:
                    cache.check_back()
                else:
                    assert allocator.wake_up().not_kept
                continue
            sim.reset()
            outcomes.add(report.not_kept and "not kept")
            assert report.not_kept or (report.kept_bytes == cache.bytes and cache.is_back())
            assert cache.kept_bytes == 0
        assert outcomes == {"", "failed", "not kept"}


@pytest.mark.sim
class TestHistories:
    """Whatever is done in whatever order: what is said to be back is, and what is not is said."""

    CALLS = ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuLaunchKernel", "cuMemHostRegister", "cuMemMap", "cuMemUnmap")

    @pytest.mark.slow
    @pytest.mark.usefixtures("by_kernel", "quick_facts")
    @pytest.mark.parametrize("seed", range(4))
    def test_at_random(self, make_allocator: MakeAllocator, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.allocator = make_allocator(host_budget_bytes=6 * PAGE, retain_backups=bool(seed % 2))
        self.contents: dict[int, bytes] = {}
        self.kept: dict[int, Ranges] = {}  # by the addresses of what sleeps
        self.kept_ever = 0
        for _ in range(3):
            self.malloc(random)
        acts = [self.sleep, self.sleep, self.wake, self.wake, self.malloc, self.free, self.damage, self.others]
        for _ in range(150):
            act = acts[random.integers(len(acts))]
            if random.random() < 0.2:
                sim.fail(str(random.choice(self.CALLS)), after=int(random.integers(8)), error="CUDA_ERROR_UNKNOWN")
            act(random)
            sim.reset()
            for segment in _core.segments():
                if segment.sleep == AWAKE:
                    assert holds(segment.address, self.contents[segment.address])
        assert self.kept_ever > 3

    def malloc(self, random: np.random.Generator) -> None:
        if len(self.contents) < 6:
            pages, tag = int(random.integers(1, 3)), str(random.choice(["kv_cache", "kv_cache", "weights"]))
            with contextlib.suppress(CumemSleepError):
                address = self.allocator.malloc(pages * PAGE, tag)
                self.fill([address], random)

    def fill(self, addresses: Iterable[int], random: np.random.Generator) -> None:
        for address in addresses:
            (segment,) = (each for each in _core.segments() if each.address == address)
            self.contents[address] = random.bytes(segment.bytes)
            ctypes.memmove(address, self.contents[address], segment.bytes)

    def free(self, random: np.random.Generator) -> None:
        if self.contents:
            address = int(random.choice([*self.contents]))
            with contextlib.suppress(CumemSleepError):
                self.allocator.free(address)
                del self.contents[address]
                self.kept.pop(address, None)

    def sleep(self, random: np.random.Generator) -> None:
        awake = [segment for segment in _core.segments() if segment.sleep == AWAKE]
        keep = {}
        for segment in awake:
            blocks = random.permutation(segment.bytes // 4096)[: random.integers(300)] * 4096
            keep[segment.address] = np.column_stack((blocks, np.full(len(blocks), 4096)))
        try:
            report = self.allocator.sleep(keep=keep)
        except CumemSleepError:
            assert all(segment.sleep == AWAKE for segment in awake)
            return
        if report.kept_bytes:
            dropped = {segment.address for segment in awake if segment.tag == "kv_cache"}
            mine = {address: rows for address, rows in keep.items() if address in dropped and len(rows)}
            assert report.kept_bytes == sum(int(rows[:, 1].sum()) for rows in mine.values())
            self.kept.update(mine)
            self.kept_ever += 1

    def wake(self, random: np.random.Generator) -> None:
        tag = str(random.choice(["weights", "kv_cache", ""])) or None
        dropped = [segment for segment in _core.segments() if segment.sleep == DROPPED]
        with contextlib.suppress(CumemSleepError):
            report = self.allocator.wake_up(tag)
            woken = [segment for segment in dropped if segment.sleep == AWAKE]
            mine = {segment.address: self.kept[segment.address] for segment in woken if segment.address in self.kept}
            if report.not_kept:
                assert report.kept_bytes == 0
                self.kept.clear()
            else:
                assert report.kept_bytes == sum(int(rows[:, 1].sum()) for rows in mine.values())
            for address, rows in mine.items() if not report.not_kept else ():
                for offset, nbytes in rows.tolist():
                    expected = self.contents[address][offset : offset + nbytes]
                    assert holds(address + offset, expected), "a wrong byte, said to be kept"
            self.kept = {address: rows for address, rows in self.kept.items() if address not in mine}
            self.fill((segment.address for segment in woken), random)

    def damage(self, random: np.random.Generator) -> None:
        places = self.allocator._store.catalogue.kept._places
        if places and random.random() < 0.3:
            content = np.frombuffer(memoryview(places[0].extents[0]), np.uint8)  # type: ignore[arg-type]
            content[random.integers(len(content))] ^= 1

    def others(self, random: np.random.Generator) -> None:
        with contextlib.suppress(CumemSleepError):
            if random.random() < 0.2:
                drop_kept(self.allocator)
            elif random.random() < 0.5:
                self.allocator.release_backups()
            else:
                self.allocator.usage()
                assert self.allocator.kept_room() >= 0
