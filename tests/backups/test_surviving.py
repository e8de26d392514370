"""What a sleep may drop is declared (`drop`), and everything else of these tags comes back, proven like any backup."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from support import AWAKE, BACKED_UP, DROPPED, HANGS_S, PAGE, Memory

from cumem_sleep import (
    BackupMismatch,
    CuMemAllocator,
    DriverError,
    InvalidArgument,
    InvalidArgumentType,
    InvalidState,
    OutOfHostMemory,
    _core,
    sim,
)
from cumem_sleep.backups.ranges import Declared, declared, less, spans_of, without
from cumem_sleep.for_plugin import drop_kept, filling

MakeAllocator = Callable[..., CuMemAllocator]

ALL = np.array([(0, 4 * PAGE)])


def but(content: bytes, now: bytes, *ranges: tuple[int, int]) -> bool:
    """Whether `now` equals `content` in all but these ranges, rounded inwards to 16 bytes."""
    left, right = (np.frombuffer(each, np.uint8).copy() for each in (content, now))
    for offset, nbytes in ranges:
        begin, end = -(-offset // 16) * 16, (offset + nbytes) // 16 * 16
        left[begin:end] = right[begin:end] = 0
    return bool((left == right).all())


def scribble(allocator: CuMemAllocator, memory: Memory) -> None:
    """Take the freed memory and overwrite it, so that bytes which come back do not do so by luck."""
    addresses = [allocator.malloc(PAGE, "scribbled") for _ in range(24)]
    for address in addresses:
        memory.fill_random(address, PAGE)
    for address in addresses:
        allocator.free(address)


class TestOnAnyDevice:
    @pytest.mark.parametrize("level", [1, 2])
    def test_all_but_what_was_declared_comes_back(self, allocator: CuMemAllocator, memory: Memory, level: int) -> None:
        mixed, dropped, whole = (allocator.malloc(4 * PAGE, "kv_cache") for _ in range(3))
        before = {address: memory.fill_random(address, 4 * PAGE) for address in (mixed, dropped, whole)}
        ranges = [(5, 100), (PAGE, PAGE), (PAGE + 64, 3 * PAGE // 2), (4 * PAGE - 7, 7)]
        for _ in range(2):
            report = allocator.sleep(level, drop={mixed: ranges, dropped: ALL})
            states = {segment.address: segment.sleep for segment in _core.segments()}
            assert states == {mixed: DROPPED, dropped: DROPPED, whole: BACKED_UP}
            assert report.dropped_bytes == 4 * PAGE + 80 + 64 + 3 * PAGE // 2
            scribble(allocator, memory)
            assert allocator.wake_up().verified_bytes == 8 * PAGE - 80 - 64 - 3 * PAGE // 2
            assert but(before[mixed], memory.read(mixed, 4 * PAGE), *ranges)
            assert memory.read(whole, 4 * PAGE) == before[whole]
        assert report.copied_bytes == 0, "what did not change is not copied again"

    def test_a_tag_without_a_declaration_is_dropped_whole(self, allocator: CuMemAllocator, memory: Memory) -> None:
        weights, cache = allocator.malloc(PAGE, "weights"), allocator.malloc(PAGE, "kv_cache")
        content = memory.fill_random(weights, PAGE)
        assert allocator.sleep(2, drop={weights: [(0, 16)]}).dropped_bytes == PAGE + 16
        scribble(allocator, memory)
        allocator.wake_up()
        assert but(content, memory.read(weights, PAGE), (0, 16))
        assert allocator.sleep(2, drop={cache: []}).dropped_bytes == PAGE, "no ranges: nothing of that tag may go"

    def test_what_is_kept_may_go_and_what_survives_may_not(self, allocator: CuMemAllocator, memory: Memory) -> None:
        cache = allocator.malloc(4 * PAGE, "kv_cache")
        content = memory.fill_random(cache, 4 * PAGE)
        report = allocator.sleep(keep={cache: [(0, PAGE), (3 * PAGE, PAGE)]}, drop={cache: [(0, 2 * PAGE)]})
        assert report.not_kept == ""
        assert drop_kept(allocator) == PAGE, "the rest of what was to be kept survives anyway"
        scribble(allocator, memory)
        report = allocator.wake_up()
        assert (report.kept_bytes, bool(report.not_kept)) == (0, True)
        assert but(content, memory.read(cache, 4 * PAGE), (0, 2 * PAGE))

    @pytest.mark.parametrize("restoring", ["wake_up", "release_backups"])
    def test_forgetting_takes_no_more(self, allocator: CuMemAllocator, memory: Memory, restoring: str) -> None:
        mixed, dropped = (allocator.malloc(4 * PAGE, "weights") for _ in range(2))
        before = memory.fill_random(mixed, 4 * PAGE), memory.fill_random(dropped, 4 * PAGE)
        drop = {mixed: [(PAGE, PAGE)], dropped: ALL}
        allocator.sleep()
        seen: list[tuple[int, list[tuple[int, int]]]] = []
        with filling(allocator, lambda lost: seen.extend((segment.address, spans) for segment, spans in lost)):
            if restoring == "release_backups":
                assert allocator.release_backups("weights", drop=drop) == 5 * PAGE
                scribble(allocator, memory)
                allocator.wake_up()
            else:
                allocator.wake_up(restore=False, drop=drop)
        assert sorted(seen) == sorted([(mixed, [(PAGE, 2 * PAGE)]), (dropped, [(0, 4 * PAGE)])])
        assert memory.read(mixed, 4 * PAGE) == before[0]
        assert not allocator._store.catalogue.given_up

    def test_what_survives_cannot_be_forgotten(self, allocator: CuMemAllocator, memory: Memory) -> None:
        weights = allocator.malloc(PAGE, "weights")
        content = memory.fill_random(weights, PAGE)
        allocator.sleep(2, drop={weights: [(0, 64)]})
        for drop in (None, {weights: [(0, PAGE)]}):
            assert allocator.release_backups("weights", drop=drop) == 0
        assert allocator.wake_up(restore=False).restored_bytes == PAGE - 64
        assert but(content, memory.read(weights, PAGE), (0, 64))


@pytest.mark.sim
class TestPromises:
    def test_what_is_kept_may_survive_anyway(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """All of it, or of one of two segments."""
        one, other = (allocator.malloc(4 * PAGE, "kv_cache") for _ in range(2))
        before = {address: memory.fill_random(address, 4 * PAGE) for address in (one, other)}
        drop = {one: [(2 * PAGE, PAGE)], other: ALL}
        for keep, nbytes in (({one: [(0, PAGE)]}, 0), ({one: [(0, PAGE)], other: [(64, 128)]}, 128)):
            for report in (allocator.sleep(keep=keep, drop=drop), allocator.wake_up()):
                assert (report.kept_bytes, report.not_kept) == (nbytes, "")
            assert but(before[one], memory.read(one, 4 * PAGE), (2 * PAGE, PAGE))
            assert not nbytes or memory.read(other + 64, nbytes) == before[other][64 : 64 + nbytes]
            memory.write(other, before[other])

    def test_what_a_refused_sleep_has_dropped_all_the_same(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Its memory has the bytes still, and goes with the next sleep that gives up no more."""
        one, other = (allocator.malloc(2 * PAGE, "weights") for _ in range(2))
        before = memory.fill_random(one, 2 * PAGE)
        drop = {one: [(0, PAGE)], other: [(0, 2 * PAGE)]}
        for again in (drop, {**drop, one: [(0, 32)]}, None):
            sim.fail("cuMemUnmap", after=1, error="CUDA_ERROR_UNKNOWN")
            sim.fail("cuMemMap", times=100, error="CUDA_ERROR_UNKNOWN")
            with pytest.raises(DriverError, match="cuMemUnmap") as raised:
                allocator.discard("weights", drop=drop)
            sim.reset()
            assert (len(raised.value.asleep_segments), raised.value.lost_segments) == (1, ())
            asleep = [segment for segment in _core.segments() if segment.sleep == DROPPED]
            assert [(segment.address, segment.keeps_bytes) for segment in asleep] == [(one, True)]
            assert allocator.read_backup(one + PAGE, PAGE) is not None
            allocator.release_backups()
            report = allocator.discard("weights", drop=again)
            kept = again is not None and again is not drop
            assert asleep[0].keeps_bytes is kept, "the backup is of other ranges"
            assert report.dropped_bytes == (2 if kept else 3 if again else 4) * PAGE
            scribble(allocator, memory)
            seen: list[tuple[_core.Segment, object]] = []
            with filling(allocator, seen.extend):
                allocator.wake_up()
            assert {segment.address for segment, _ in seen} == ({other} if kept else {one, other})
            if again is not None:
                assert but(before, memory.read(one, 2 * PAGE), *([] if kept else [(0, PAGE)]))
            memory.write(one, before)

    def test_prepare_backs_up_all_of_what_was_backed_up_in_parts(self, make_allocator: MakeAllocator) -> None:
        """A sleep at level 1 would do so. The limits count that, and what goes meanwhile."""
        allocator = make_allocator(host_budget_bytes=4 * PAGE)
        weights, cache = allocator.malloc(3 * PAGE, "weights"), allocator.malloc(2 * PAGE, "kv_cache")
        for _ in range(2):
            allocator.sleep(2, drop={weights: [(0, 2 * PAGE)]})
            allocator.wake_up()
            assert allocator.usage()["weights"].backed_up_bytes == PAGE
            assert allocator.kept_room() == PAGE
            assert allocator.sleep(keep={cache: [(0, PAGE)]}).kept_bytes == PAGE
            allocator.wake_up()
            allocator.sleep(2, drop={weights: [(0, 2 * PAGE)]})
            allocator.wake_up()
            preparation = allocator.prepare()
            assert preparation.wait(HANGS_S)
            assert preparation.error is None
            assert allocator.usage()["weights"].backed_up_bytes == 3 * PAGE
            assert allocator.sleep().copied_bytes == 0
            allocator.wake_up()
        allocator.malloc(2 * PAGE, "weights")
        allocator.sleep(2, drop={weights: [(0, 2 * PAGE)]})
        allocator.wake_up()
        with pytest.raises(OutOfHostMemory) as raised:
            allocator.prepare()
        assert raised.value.needed_bytes == 3 * PAGE

    def test_limits_count_what_survives(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(host_budget_bytes=4096)
        weights = [allocator.malloc(2 * PAGE, "weights") for _ in range(2)]
        before = {address: memory.fill_random(address, 2 * PAGE) for address in weights}
        rest = {address: [(0, PAGE), (PAGE + 2048, PAGE - 2048)] for address in weights}
        with pytest.raises(OutOfHostMemory) as raised:
            allocator.sleep(2, drop={address: [(0, 2 * PAGE - 4096)] for address in weights})
        assert raised.value.needed_bytes == 8192
        assert {segment.sleep for segment in _core.segments()} == {AWAKE}
        allocator.sleep(2, drop=rest)
        assert allocator.usage()["weights"].host_bytes == 4096
        assert allocator.usage()["weights"].backed_up_bytes == 4096
        assert allocator.digests("weights") == {}, "of what there is only in parts"
        scribble(allocator, memory)
        allocator.wake_up()
        for address in weights:
            assert but(before[address], memory.read(address, 2 * PAGE), *rest[address])

    def test_a_segment_made_since_is_in_use(self, allocator: CuMemAllocator) -> None:
        """It may have the address of one whose blocks PyTorch has freed."""
        address = allocator.malloc(PAGE, "weights")
        may_go = declared({address: []}, _core.segments(), {address: [(0, 16)]})
        assert may_go.survives(_core.segments()[0]) == ((0, 16),)
        allocator.free(address)
        assert allocator.malloc(PAGE, "weights") == address
        assert may_go.survives(_core.segments()[0]) == ()

    def test_one_stored_byte_changes(self, allocator: CuMemAllocator, memory: Memory) -> None:
        cache = allocator.malloc(PAGE, "kv_cache")
        content = memory.fill_random(cache, PAGE)
        allocator.sleep(drop={cache: [(0, PAGE // 2)]})
        (backup,) = allocator._store.catalogue
        stored = np.frombuffer(memoryview(backup.extents[0]), np.uint8)
        stored[17] ^= 1
        with pytest.raises(BackupMismatch):
            allocator.wake_up()
        stored[17] ^= 1
        allocator.wake_up()
        assert but(content, memory.read(cache, PAGE), (0, PAGE // 2))

    def test_read_backup_reads_what_there_is(self, allocator: CuMemAllocator, memory: Memory) -> None:
        cache = allocator.malloc(PAGE, "kv_cache")
        content = memory.fill_random(cache, PAGE)
        allocator.sleep(drop={cache: [(64, 64)]})
        read = allocator.read_backup(cache + 128, 256)
        assert read is not None
        assert read.tobytes() == content[128:384]
        with pytest.raises(InvalidState, match="only parts"):
            allocator.read_backup(cache + 64, 64)
        assert allocator.release_backups() == 0, "nothing of that is merely retained"
        allocator.wake_up()

    @pytest.mark.parametrize(
        ("drop", "error"),
        [
            ([(0, 16)], InvalidArgumentType),
            ({"a": [(0, 16)]}, InvalidArgumentType),
            ({1: [(0, 16)]}, InvalidArgument),
            ("outside", InvalidArgument),
            ("negative", InvalidArgument),
            ("floats", InvalidArgument),
        ],
    )
    def test_nonsense_is_refused(self, allocator: CuMemAllocator, drop: object, error: type[Exception]) -> None:
        address = allocator.malloc(PAGE, "kv_cache")
        rows = {"outside": [(0, PAGE + 1)], "negative": [(-1, 16)], "floats": [(0.5, 16.0)]}
        given = {address: rows[drop]} if isinstance(drop, str) else drop
        calls = (
            allocator.sleep,
            partial(allocator.release_backups, "kv_cache"),
            partial(allocator.wake_up, restore=False),
        )
        for call in calls:
            with pytest.raises(error, match="drop"):
                call(drop=given)  # type: ignore[operator]
        with pytest.raises(InvalidArgument, match="needs tags"):
            allocator.release_backups(drop={address: [(0, PAGE)]})


class TestSpans:
    def test_as_sets_of_bytes(self) -> None:
        random = np.random.default_rng(0)
        for _ in range(500):
            one, other = (random.integers(0, 60, (random.integers(0, 6), 2)) for _ in range(2))
            marks = [np.zeros(200, bool) for _ in range(3)]
            for mark, table in zip(marks, (one, other), strict=False):
                for offset, nbytes in table:
                    mark[offset : offset + nbytes] = True
            for begin, end in without(spans_of(one), spans_of(other)):
                assert begin < end
                marks[2][begin:end] = True
            assert (marks[2] == (marks[0] & ~marks[1])).all()
            assert less(one, other)[:, 1].sum() == marks[2].sum()

    def test_what_is_not_in_use_need_not_survive(self, allocator: CuMemAllocator) -> None:
        allocator.malloc(PAGE, "weights")
        (segment,) = _core.segments()
        live = {segment.id: [(0, 4), (512, 1024)]}
        declared = Declared(frozenset(["weights"]), {segment.id: [(0, 4)]}, live)
        assert declared.survives(segment) == ((512, 512),)
        assert Declared(frozenset(["weights"]), {}, live).survives(segment) == ((0, 16), (512, 512))
        assert Declared(frozenset(["weights"]), {}, {segment.id: [(0, PAGE - 512)]}).survives(segment) == ()
        assert Declared(frozenset(["weights"]), {segment.id: [(0, 1024)]}, live).survives(segment) is None
