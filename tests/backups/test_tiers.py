"""What every tier does: one suite, for each of them. A new tier is one line in `TIERS`."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from support import PAGE, Memory, digest_of

sys.path.append(str(pathlib.Path(__file__).parents[1] / "vault"))

from running import RunningVault, eventually

from cumem_sleep import CuMemAllocator, DriverError, OutOfHostMemory, Settings, _core, host_facts, sim
from cumem_sleep.backups.backup import Backup, extent_sizes
from cumem_sleep.backups.catalogue import Catalogue
from cumem_sleep.backups.host_tier import HostTier
from cumem_sleep.backups.tier import Content, NotYet, Tier
from cumem_sleep.backups.vault_tier import VaultTier
from cumem_sleep.core.extents import Extent, Lane
from cumem_sleep.digest.digester import DeviceDigester, DigestRun
from cumem_sleep.digest.reference import Digest
from cumem_sleep.store.transfer import Transfer
from cumem_sleep.vault.files import filesystem_of
from cumem_sleep.vault.ledger import Key

BUDGET = 32 << 20
SIZES = [PAGE, 3 * PAGE, PAGE // 2 + 16]


@contextmanager
def host(folder: pathlib.Path) -> Iterator[Tier]:
    @contextmanager
    def turn() -> Iterator[bool]:
        yield True

    yield HostTier(Settings(host_budget_bytes=BUDGET), CuMemAllocator.tuning, turn)


@contextmanager
def vault(folder: pathlib.Path) -> Iterator[Tier]:
    running = RunningVault(folder, "64MiB", "--slab-size", "16MiB")
    try:
        running.wait_until_ready()
        tier = VaultTier(Settings(host_budget_bytes=BUDGET), running.socket)
        yield tier
        if tier._client is not None:
            tier._client.close()
    finally:
        running.close()


@contextmanager
def files(folder: pathlib.Path) -> Iterator[Tier]:
    """A vault with memory for half of what sleeps: all of it is somebody else's already."""
    (folder / "files").mkdir(mode=0o700)
    if filesystem_of(folder) in ("tmpfs", "ramfs"):
        pytest.skip("pytest's folder is in memory")
    running = RunningVault(
        folder, "72MiB", "--slab-size", "16MiB", "--spill", str(folder / "files"), "--spill-size", "256MiB"
    )
    try:
        running.wait_until_ready()
        others = running.client("others")
        backups = others.reserve(_core.device_info(0).uuid, [8 << 20] * 8)
        others.seal([(backup, Key(str(number), backup.bytes, "")) for number, backup in enumerate(backups)])
        tier = VaultTier(Settings(host_budget_bytes=BUDGET), running.socket)
        yield tier
        if tier._client is not None:
            tier._client.close()
        others.close()
    finally:
        running.close()


TIERS: dict[str, Callable[[pathlib.Path], contextmanager[Tier]]] = {  # type: ignore[type-arg]
    "host": host,  # type: ignore[dict-item]
    "vault": vault,  # type: ignore[dict-item]
    "files": files,  # type: ignore[dict-item]
}


SLOW = {"vault", "files"}  # a process of its own for each test, which takes half a second to start


def named(*names: str) -> list[ParameterSet]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in names]


OWN = pytest.mark.parametrize("tier", named("host"), indirect=True)
OF_A_VAULT = pytest.mark.parametrize("tier", named("vault", "files"), indirect=True)


@pytest.fixture(params=named(*TIERS))
def tier(request: pytest.FixtureRequest, tmp_path: pathlib.Path, allocator: CuMemAllocator) -> Iterator[Tier]:
    allocator.free(allocator.malloc(PAGE))  # the driver is open
    tmp_path.chmod(0o700)
    with TIERS[request.param](tmp_path) as opened:
        yield opened
        if isinstance(opened, HostTier):
            opened.finish_releasing()
            opened.stop()


@pytest.fixture
def segment(allocator: CuMemAllocator, memory: Memory) -> tuple[int, bytes]:
    """An address with 4 pages, and what lies there."""
    address = allocator.malloc(4 * PAGE, "weights")
    return address, memory.fill_random(address, 4 * PAGE)


def reserve(tier: Tier, *sizes: int) -> tuple[Extent, ...]:
    return tuple(tier.reserve(0, sizes))


@contextmanager
def lane_of(tier: Tier) -> Iterator[Lane]:
    with tier.lane_group() as lane_group, _core.CopyStream(0) as stream:
        yield lane_group.lane(stream)


def write(tier: Tier, extent: Extent, address: int, nbytes: int) -> None:
    with lane_of(tier) as lane:
        lane.begin(extent, ((address, 0, nbytes),), out=True)
        lane.synchronize()


class TestRoom:
    def test_extents_have_exactly_the_sizes_that_were_asked_for(self, tier: Tier) -> None:
        extents = tier.reserve(0, SIZES)
        assert [extent.bytes for extent in extents] == SIZES
        assert tier.bytes == sum(SIZES)
        tier.release(extents)
        assert tier.bytes == 0

    def test_nothing_is_reserved_for_nothing(self, tier: Tier) -> None:
        assert tier.reserve(0, []) == []

    def test_beside_work_the_same_is_reserved(self, tier: Tier) -> None:
        """What has to be spilled for that is not waited for."""
        reserved: list[Sequence[Extent]] = []

        def is_reserved() -> bool:
            with suppress(NotYet):
                reserved.append(tier.reserve(0, SIZES, beside_work=True))
            return reserved != []

        eventually(is_reserved, "there is room")
        assert [extent.bytes for extent in reserved[0]] == SIZES
        tier.release(reserved[0])

    @pytest.mark.parametrize("tier", named("vault"), indirect=True)
    def test_what_is_said_to_be_free_can_be_reserved_bit_by_bit(self, tier: VaultTier) -> None:
        assert not tier.has_free(1 << 50)
        assert tier.has_free(8 << 20)
        held = [reserve(tier, 1 << 20) for _ in range(8)]
        while tier.has_free(1 << 20):
            held.append(reserve(tier, 1 << 20))
            assert len(held) <= 64
        for extents in held:
            tier.release(extents)
        assert tier.has_free(8 << 20)

    def test_the_budget_is_a_limit(self, tier: Tier) -> None:
        for held_bytes in (BUDGET - PAGE, BUDGET + PAGE):
            extents = reserve(tier, held_bytes)
            left = {limit.name: limit.available_bytes for limit in tier.limits()}
            assert left["budget"] == max(0, BUDGET - held_bytes)
            tier.release(extents)

    def test_what_was_released_can_be_reserved_again(self, tier: Tier) -> None:
        for _ in range(3):
            extents = reserve(tier, *[8 << 20] * 7)
            tier.release(extents)
        for _ in range(3):
            tier.release(reserve(tier, *[8 << 20] * 7))
            if isinstance(tier, HostTier):
                tier.finish_releasing()
            assert tier.bytes == 0

    def test_what_is_held_is_counted_backup_by_backup(self, tier: Tier) -> None:
        reserved = [reserve(tier, PAGE, 3 * PAGE), reserve(tier, PAGE // 2 + 16)]
        whole, odd = tier.footprints(reserved)
        assert (whole.bytes, whole.shared_bytes) == (4 * PAGE, 0)
        assert PAGE // 2 + 16 <= odd.bytes <= PAGE // 2 + (64 << 10)
        for each in (whole, odd):
            assert each.vault_bytes == (each.bytes if tier.place().vault else 0)
        assert (tier.place().vault != "") is isinstance(tier, VaultTier)
        for extents in reserved:
            tier.release(extents)


class TestCopies:
    def test_there_and_back(
        self, tier: Tier, allocator: CuMemAllocator, memory: Memory, segment: tuple[int, bytes]
    ) -> None:
        address, content = segment
        extents = reserve(tier, PAGE, 3 * PAGE)
        with tier.lane_group() as lane_group, _core.CopyStream(0) as stream:
            lane_group.expect(extents)
            lane = lane_group.lane(stream)
            lane.begin(extents[0], ((address, 0, PAGE),), out=True)
            for start in range(0, 3 * PAGE, PAGE // 2):
                lane.begin(extents[1], ((address + PAGE + start, start, PAGE // 2),), out=True)
            lane.synchronize()
            assert lane.content(extents[1], 16, PAGE).tobytes() == content[PAGE + 16 : 2 * PAGE + 16]
        assert tier.content(extents[1], 16, PAGE).tobytes() == content[PAGE + 16 : 2 * PAGE + 16]
        target = allocator.malloc(4 * PAGE, "weights")
        with lane_of(tier) as lane:
            lane.begin(extents[0], ((target, 0, PAGE),), out=False)
            lane.begin(extents[1], ((target + PAGE, 0, 3 * PAGE),), out=False)
            lane.synchronize()
        assert memory.read(target, 4 * PAGE) == content
        tier.release(extents)

    def test_several_lanes_at_once(
        self, tier: Tier, allocator: CuMemAllocator, memory: Memory, segment: tuple[int, bytes]
    ) -> None:
        address, content = segment
        extents = reserve(tier, *[PAGE] * 4)
        with (
            tier.lane_group() as lane_group,
            _core.CopyStream(0) as first,
            _core.CopyStream(0) as second,
        ):
            lanes = [lane_group.lane(first), lane_group.lane(second)]
            for number, extent in enumerate(extents):
                lanes[number % 2].begin(extent, ((address + number * PAGE, 0, PAGE),), out=True)
            for lane in lanes:
                lane.synchronize()
        target = allocator.malloc(4 * PAGE, "weights")
        with lane_of(tier) as lane:
            for number, extent in enumerate(extents):
                lane.begin(extent, ((target + number * PAGE, 0, PAGE),), out=False)
            lane.synchronize()
        assert memory.read(target, 4 * PAGE) == content
        tier.release(extents)

    def test_scratch_memory_is_as_good_as_a_segment(self, tier: Tier, memory: Memory) -> None:
        scratch = _core.Scratch(0, PAGE)
        content = memory.fill_random(scratch.address, PAGE)
        extents = reserve(tier, PAGE)
        write(tier, extents[0], scratch.address, PAGE)
        memory.write(scratch.address, bytes(PAGE))
        with lane_of(tier) as lane:
            lane.begin(extents[0], ((scratch.address, 0, PAGE),), out=False)
            lane.join()
            lane.synchronize()
        assert memory.read(scratch.address, PAGE) == content
        memory.close()
        scratch.close()
        tier.release(extents)

    def test_kernels_reach_what_a_lane_says_that_they_do(self, tier: Tier, segment: tuple[int, bytes]) -> None:
        address, content = segment
        extents = reserve(tier, PAGE)
        write(tier, extents[0], address, PAGE)
        with lane_of(tier) as lane:
            if lane.kernels_reach:
                held = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * PAGE).from_address(extents[0].address))
                assert held.tobytes() == content[:PAGE]
        tier.release(extents)

    @pytest.mark.parametrize("fails", [False, True])
    def test_rows_of_an_extent_by_a_kernel_where_it_can(
        self,
        tier: Tier,
        memory: Memory,
        segment: tuple[int, bytes],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        fails: bool,
    ) -> None:
        """Large rows and small ones; a few, or a table of them."""
        address, content = segment
        extents = reserve(tier, 2 * PAGE)
        sizes = [PAGE - 48, 16, 32, (64 << 10) + 16, 48]
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        places = enumerate(zip(offsets, sizes, strict=True))
        rows = [(address + offset + 16 * number, offset, size) for number, (offset, size) in places]

        def refuse(*_: object, **__: object) -> None:
            raise DriverError("cuLaunchKernel", "CUDA_ERROR_UNKNOWN")

        for name in ("copy_pieces", "to_device_by_kernel") if fails else ():
            monkeypatch.setattr(_core.CopyStream, name, refuse)
        for some in (np.array(rows), tuple(rows)):
            with lane_of(tier) as lane:
                by_kernel = lane.begin(extents[0], some, out=True, by_kernel=True)
                lane.synchronize()
                assert by_kernel is (lane.kernels_reach and not fails)
                packed = b"".join(content[at - address : at - address + size] for at, _, size in rows)
                assert lane.content(extents[0], 0, len(packed)).tobytes() == packed
                memory.write(address, bytes(4 * PAGE))
                by_kernel = lane.begin(extents[0], some, out=False, by_kernel=by_kernel)
                lane.synchronize()
                assert by_kernel is (lane.kernels_reach and not fails)
            for at, _, size in rows:
                assert memory.read(at, size) == content[at - address : at - address + size]
            memory.write(address, content)
        warnings = [record.message for record in caplog.records if "the copy engine takes over" in record.message]
        assert len(warnings) == (2 if fails and not isinstance(tier, VaultTier) else 0)
        tier.release(extents)

    @OWN
    def test_what_is_unpinned_keeps_its_bytes_and_can_be_copied(
        self, tier: HostTier, allocator: CuMemAllocator, memory: Memory, segment: tuple[int, bytes]
    ) -> None:
        address, content = segment
        extents = reserve(tier, PAGE, PAGE, PAGE)
        for number, extent in enumerate(extents):
            write(tier, extent, address + number * PAGE, PAGE)
        tier.unpin(extents)
        tier.unpin(extents)
        assert [tier.content(extent, 0, PAGE).tobytes() for extent in extents] == [
            content[start : start + PAGE] for start in range(0, 3 * PAGE, PAGE)
        ]
        target = allocator.malloc(2 * PAGE, "weights")
        with lane_of(tier) as lane:
            lane.begin(extents[0], ((target, 0, PAGE),), out=False)
            lane.pin(extents[1:2])
            assert extents[1].pinned  # type: ignore[attr-defined]
            assert not extents[2].pinned  # type: ignore[attr-defined]
            lane.begin(extents[1], ((target + PAGE, 0, PAGE),), out=False)
            lane.synchronize()
        write(tier, extents[2], address, PAGE)
        assert memory.read(target, 2 * PAGE) == content[: 2 * PAGE]
        assert tier.content(extents[2], 0, PAGE).tobytes() == content[:PAGE]
        tier.release(extents)

    @OWN
    def test_what_is_unpinned_takes_no_room_twice(self, tier: HostTier, segment: tuple[int, bytes]) -> None:
        """Its pages are there, so the system does not count them as available any more."""
        address, _ = segment
        extents = reserve(tier, PAGE)
        write(tier, extents[0], address, PAGE)
        tier.unpin(extents)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_facts, "cgroup_available_bytes", lambda **_: 8 * PAGE)
            left = {limit.name: limit.available_bytes for limit in tier.limits(PAGE)}
        assert left.get("cgroup", 8 * PAGE) == 8 * PAGE
        tier.release(extents)

    @pytest.mark.sim
    def test_nothing_of_the_segment_is_held_afterwards(
        self, tier: Tier, allocator: CuMemAllocator, memory: Memory, segment: tuple[int, bytes]
    ) -> None:
        """Its memory has to go back to the device when it sleeps."""
        address, _ = segment
        extents = reserve(tier, PAGE)
        write(tier, extents[0], address, PAGE)
        memory.close()
        handles = sim.stats().live_handles
        allocator.free(address)
        assert sim.stats().live_handles == handles - 1
        tier.release(extents)


class TestSharing:
    def content(self, data: bytes) -> Content:
        return Content(digest_of(np.frombuffer(data, np.uint8)), len(data))

    @OF_A_VAULT
    def test_what_is_not_sealed_is_not_found(self, tier: VaultTier, segment: tuple[int, bytes]) -> None:
        address, data = segment
        extents = reserve(tier, PAGE)
        write(tier, extents[0], address, PAGE)
        assert tier.find(0, [self.content(data[:PAGE])]) == [None]
        assert tier.can_rewrite(extents)
        tier.release(extents)

    @OF_A_VAULT
    def test_what_is_found_holds_the_content(
        self, tier: VaultTier, allocator: CuMemAllocator, memory: Memory, segment: tuple[int, bytes]
    ) -> None:
        address, data = segment
        content = self.content(data[:PAGE])
        extents = reserve(tier, PAGE)
        write(tier, extents[0], address, PAGE)
        tier.seal([(extents, content)])
        found, other = tier.find(0, [content, Content(Digest(1, 2), PAGE)])
        assert other is None
        assert found is not None
        assert not tier.can_rewrite(extents)
        assert not tier.can_rewrite(found)
        tier.release(extents)
        target = allocator.malloc(PAGE, "weights")
        with lane_of(tier) as lane:
            lane.begin(found[0], ((target, 0, PAGE),), out=False)
            lane.synchronize()
        assert memory.read(target, PAGE) == data[:PAGE]
        tier.release(found)

    def test_two_ranges_of_a_segment_there_and_back(
        self, tier: Tier, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Copied, digested and proven, found by their content, and copied back. The rest stays as it is."""
        monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", 2 * PAGE)  # an extent may end in the middle of a range
        address = allocator.malloc(8 * PAGE, "kv_cache")
        before = memory.fill_random(address, 8 * PAGE)
        (segment,) = (each for each in _core.segments() if each.address == address)
        ranges = ((PAGE, PAGE), (5 * PAGE, 2 * PAGE))
        chosen = b"".join(before[offset : offset + nbytes] for offset, nbytes in ranges)
        extents = reserve(tier, *extent_sizes(len(chosen), None, tier.extent_bytes))
        backup = Backup(segment, tier, extents, ranges=ranges)
        catalogue = Catalogue(retain=True)
        catalogue.tier = tier
        catalogue.add(backup)

        def digest() -> Digest:
            with DigestRun(DeviceDigester(CuMemAllocator.tuning), [segment], {segment.id: np.array(ranges)}) as run:
                run.start([segment])
                return run.finish()[segment.id]

        with lane_of(tier) as lane:
            self.copy(backup, lane, out=True)
        assert digest() == self.content(chosen).digest
        catalogue.mark_proven([segment], {segment.id: digest()})
        assert catalogue.get(segment) is backup
        assert backup.read(5 * PAGE + 16, PAGE).tobytes() == before[5 * PAGE + 16 : 6 * PAGE + 16]
        if isinstance(tier, VaultTier):
            (found,) = tier.find(0, [self.content(chosen)])
            assert found is not None
            tier.release(found)
        after = memory.fill_random(address, 8 * PAGE)
        assert digest() != backup.digest
        with lane_of(tier) as lane:
            self.copy(backup, lane, out=False)
        restored = bytearray(after)
        for offset, nbytes in ranges:
            restored[offset : offset + nbytes] = before[offset : offset + nbytes]
        assert memory.read(address, 8 * PAGE) == restored
        assert digest() == backup.digest
        catalogue.forget([segment.id])
        assert (list(catalogue), tier.bytes) == ([], 0)

    def copy(self, backup: Backup, lane: Lane, *, out: bool) -> None:
        arrived: list[_core.Segment] = []
        transfer = Transfer([lane], None, arrived.extend, CuMemAllocator.tuning, out=out)
        transfer.add(backup.segment, backup.pieces())
        while transfer.step():
            pass
        transfer.finish()
        assert arrived == [backup.segment]

    @OF_A_VAULT
    def test_what_is_encoded_is_not_found(self, tier: VaultTier, segment: tuple[int, bytes]) -> None:
        """The same bytes can be encoded in several ways, and not everybody can decode them."""
        address, data = segment
        content = self.content(data[:PAGE])
        extents = reserve(tier, PAGE)
        write(tier, extents[0], address, PAGE)
        tier.seal([(extents, replace(content, is_encoded=True))])
        assert tier.find(0, [content]) == [None]
        tier.release(extents)

    @OF_A_VAULT
    def test_what_is_needed_is_not_evicted(self, tier: VaultTier, segment: tuple[int, bytes]) -> None:
        address, data = segment
        extents = reserve(tier, 4 * PAGE)
        write(tier, extents[0], address, 4 * PAGE)
        tier.seal([(extents, self.content(data))])
        assert tier.set_needed([extents], needed=False) == []
        assert tier.set_needed([extents], needed=True) == []
        with pytest.raises(OutOfHostMemory):
            tier.reserve(0, [1 << 60])
        with lane_of(tier) as lane:
            assert lane.content(extents[0], 0, 4 * PAGE).tobytes() == data
        tier.release(extents)
