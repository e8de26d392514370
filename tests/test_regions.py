"""Pools with a plan of their own, called regions in torch_memory_saver: backed up or not as they say, at no level."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support import AWAKE, BACKED_UP, DROPPED, MIB, PAGE, SIMULATED, Memory, bf16_weights, thread_name

from cumem_sleep import (
    CuMemAllocator,
    InvalidArgument,
    InvalidArgumentType,
    InvalidState,
    OutOfDeviceMemory,
    _core,
    sim,
)

Sleep = _core.Segment.Sleep
TAGS = ("weights", "kv_cache")


def malloc_in_region(allocator: CuMemAllocator, tag: str, *, backup: bool, nbytes: int = PAGE) -> int:
    with allocator.regions.use(tag, backup=backup):
        return allocator.malloc(nbytes)


def states() -> dict[int, Sleep]:
    return {segment.address: segment.sleep for segment in _core.segments()}


class Pools:
    """In the place of PyTorch's."""

    def __init__(self) -> None:
        self.trimmed = 0

    def is_capturing(self) -> bool:
        return False

    def trim(self) -> None:
        self.trimmed += 1


def test_pytorchs_unused_cache_is_left_to_the_process_that_goes_on(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    malloc_in_region(allocator, "same", backup=True)
    allocator.malloc(PAGE, "same")
    pools = Pools()
    monkeypatch.setattr(allocator._pools, "found", pools)
    allocator.regions.sleep()
    allocator.regions.wake()
    assert pools.trimmed == 0
    allocator.sleep()
    assert pools.trimmed == 1


@pytest.mark.sim
class TestRoomForAWake:
    @pytest.fixture
    def pools(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> Pools:
        malloc_in_region(allocator, "x", backup=False)
        allocator.regions.sleep()
        pools = Pools()
        monkeypatch.setattr(allocator._pools, "found", pools)
        return pools

    def test_is_asked_for_once(self, allocator: CuMemAllocator, pools: Pools) -> None:
        sim.reset()
        allocator.regions.wake()
        assert sim.stats().calls["cuMemGetInfo"] == 1
        assert pools.trimmed == 0

    def test_may_be_in_pytorchs_unused_cache(self, allocator: CuMemAllocator, pools: Pools) -> None:
        cached: list[_core.Scratch] = [_core.Scratch(0, _core.memory_info(0)[0] // PAGE * PAGE)]

        def trim() -> None:
            assert thread_name() == "", "it runs what the garbage collector finds, which may call the allocator"
            cached.pop().close()

        pools.trim = trim  # type: ignore[method-assign]
        assert allocator.regions.wake().mapped_bytes == PAGE
        assert allocator.totals()["wake"].failures == 0

    def test_that_there_is_not_leaves_all_asleep(self, allocator: CuMemAllocator, pools: Pools) -> None:
        taken = _core.Scratch(0, _core.memory_info(0)[0] // PAGE * PAGE)
        with pytest.raises(OutOfDeviceMemory, match="1 sleeping segment"):
            allocator.regions.wake()
        assert pools.trimmed == 1
        assert allocator.totals()["wake"].failures == 1
        taken.close()
        allocator.regions.wake()


class TestBackupIsOfTheRegion:
    def test_not_of_the_tag(self, allocator: CuMemAllocator, memory: Memory) -> None:
        kept = malloc_in_region(allocator, "same", backup=True)
        lost = malloc_in_region(allocator, "same", backup=False)
        content = memory.fill_random(kept, PAGE)
        report = allocator.regions.sleep("same")
        assert (report.copied_bytes, report.dropped_bytes) == (PAGE, PAGE)
        assert states() == {kept: BACKED_UP, lost: DROPPED}
        report_of_wake = allocator.regions.wake("same")
        assert (report_of_wake.verified_bytes, report_of_wake.mapped_bytes) == (PAGE, 2 * PAGE)
        assert memory.read(kept, PAGE) == content

    @pytest.mark.parametrize("tag", ["weights", "kv_cache", "cudagraph", "a b/ä"])
    @pytest.mark.parametrize("backup", [True, False])
    def test_whatever_the_tag_is_called(self, allocator: CuMemAllocator, tag: str, backup: bool) -> None:
        address = malloc_in_region(allocator, tag, backup=backup)
        allocator.regions.sleep()
        assert states() == {address: BACKED_UP if backup else DROPPED}
        allocator.regions.wake([tag])
        assert states() == {address: AWAKE}

    def test_a_region_that_is_entered_again_adds_to_it(self, allocator: CuMemAllocator) -> None:
        addresses = [malloc_in_region(allocator, "x", backup=True) for _ in range(2)]
        allocator.regions.sleep("x")
        assert states() == dict.fromkeys(addresses, BACKED_UP)

    def test_regions_nest_and_leaving_one_restores_the_outer(self, allocator: CuMemAllocator) -> None:
        with allocator.regions.use("outer", backup=True):
            first = allocator.malloc(PAGE)
            with allocator.regions.use("inner"):
                inner = allocator.malloc(PAGE)
                with allocator.regions.outside():
                    outside = allocator.malloc(PAGE)
            second = allocator.malloc(PAGE)
        with allocator.use_memory_pool("outer"), allocator.regions.use("inner"):
            nested = allocator.malloc(PAGE)
        assert _core.thread_backup() == _core.BackupPlan.BY_LEVEL
        allocator.regions.sleep()
        assert states() == {first: BACKED_UP, inner: DROPPED, outside: AWAKE, second: BACKED_UP, nested: DROPPED}

    def test_one_with_an_exception_in_it_is_left(self, allocator: CuMemAllocator) -> None:
        with pytest.raises(KeyError), allocator.regions.use("x", backup=True):
            raise KeyError
        assert (_core.thread_tag(), _core.thread_backup()) == ("default", _core.BackupPlan.BY_LEVEL)

    def test_a_tag_that_is_named_is_a_pools(self, allocator: CuMemAllocator) -> None:
        with allocator.regions.use("x", backup=True):
            address = allocator.malloc(PAGE, tag="x")
        allocator.regions.sleep()
        assert states() == {address: AWAKE}


class TestTags:
    def test_exactly_those_sleep_and_wake(self, allocator: CuMemAllocator) -> None:
        a, b, c = (malloc_in_region(allocator, tag, backup=True) for tag in "abc")
        allocator.regions.sleep(["a", "b"])
        assert states() == {a: BACKED_UP, b: BACKED_UP, c: AWAKE}
        allocator.regions.wake("b")
        assert states() == {a: BACKED_UP, b: AWAKE, c: AWAKE}
        allocator.regions.sleep()
        allocator.regions.wake()
        assert set(states().values()) == {AWAKE}

    def test_has_memory_while_a_region_does(self, allocator: CuMemAllocator) -> None:
        allocator.malloc(PAGE, "pool")
        address = malloc_in_region(allocator, "region", backup=False)
        has = allocator.regions.has
        assert [has(tag) for tag in ("region", "pool", "nothing")] == [True, False, False]
        assert [has(tag) for tag in ("", "\udcff", "re\0gion", None, 5, ["region"])] == [False] * 6  # type: ignore[arg-type]
        allocator.regions.sleep()
        assert has("region")
        allocator.free(address)
        assert not has("region")

    @pytest.mark.parametrize("call", ["sleep", "wake"])
    def test_an_unknown_one_is_refused(self, allocator: CuMemAllocator, call: str) -> None:
        malloc_in_region(allocator, "a", backup=True)
        with pytest.raises(InvalidArgument, match=r"\['b'\].*known are a"):
            getattr(allocator.regions, call)(["a", "b"])
        assert set(states().values()) == {AWAKE}

    @pytest.mark.parametrize("tag", ["", "a\0b", 7])
    def test_what_is_no_tag_is_refused(self, allocator: CuMemAllocator, tag: str) -> None:
        with pytest.raises(InvalidArgument), allocator.regions.use(tag):
            pass

    def test_backup_is_true_or_false(self, allocator: CuMemAllocator) -> None:
        with pytest.raises(InvalidArgument, match="backup='cpu'"), allocator.regions.use("x", backup="cpu"):  # type: ignore[arg-type]
            pass


class TestBesidePools:
    """vLLM's calls and those of regions, on one allocator, with the same tags."""

    @pytest.fixture
    def addresses(self, allocator: CuMemAllocator, memory: Memory) -> dict[str, int]:
        found = {tag: allocator.malloc(PAGE, tag=tag) for tag in TAGS}
        found["region weights"] = malloc_in_region(allocator, "weights", backup=True)
        found["region kv_cache"] = malloc_in_region(allocator, "kv_cache", backup=False)
        for address in found.values():
            memory.fill_random(address, PAGE)
        return found

    @pytest.mark.parametrize("level", [1, 2])
    def test_a_sleep_by_level_leaves_regions_awake(
        self, allocator: CuMemAllocator, memory: Memory, addresses: dict[str, int], level: int
    ) -> None:
        before = memory.read(addresses["region weights"], PAGE)
        assert allocator.sleep(level).freed_bytes == 2 * PAGE
        after = states()
        assert [after[addresses[name]] for name in ("region weights", "region kv_cache")] == [AWAKE, AWAKE]
        assert memory.read(addresses["region weights"], PAGE) == before

    def test_neither_wakes_the_other(self, allocator: CuMemAllocator, addresses: dict[str, int]) -> None:
        allocator.sleep(1)
        allocator.regions.sleep()
        allocator.wake_up()  # which wakes every tag
        after = states()
        assert [after[addresses[name]] for name in addresses] == [AWAKE, AWAKE, BACKED_UP, DROPPED]
        allocator.sleep(1)
        allocator.regions.wake()
        after = states()
        assert [after[addresses[name]] for name in addresses] == [BACKED_UP, DROPPED, AWAKE, AWAKE]
        allocator.wake_up()

    def test_a_partial_wake_of_pools_leaves_a_region_asleep(
        self, allocator: CuMemAllocator, addresses: dict[str, int]
    ) -> None:
        """Other tags than weights and kv_cache wake with the first: not those of regions."""
        extra = malloc_in_region(allocator, "extra", backup=True)
        allocator.sleep(1)
        allocator.regions.sleep()
        allocator.wake_up(["weights"])
        after = states()
        assert (after[addresses["weights"]], after[addresses["kv_cache"]], after[extra]) == (AWAKE, DROPPED, BACKED_UP)
        allocator.wake_up()
        allocator.regions.wake()

    @pytest.mark.usefixtures("addresses")
    def test_usage_is_counted_apart(self, allocator: CuMemAllocator) -> None:
        """None may be in use before vLLM loads a model."""
        assert {tag: usage.bytes for tag, usage in allocator.usage().items()} == dict.fromkeys(TAGS, 2 * PAGE)
        assert allocator.get_current_usage() == 2 * PAGE
        allocator.regions.sleep()
        usage = allocator.regions.usage()
        assert {tag: each.mapped_bytes for tag, each in usage.items()} == {"weights": 0, "kv_cache": 0}
        assert usage["weights"].host_bytes == PAGE

    def test_a_discard_drops_no_region(self, allocator: CuMemAllocator, addresses: dict[str, int]) -> None:
        allocator.discard(["weights", "kv_cache"])
        after = states()
        assert [after[addresses[name]] for name in addresses] == [DROPPED, DROPPED, AWAKE, AWAKE]

    def test_tags_that_are_named_mean_all_memory_with_them(
        self, allocator: CuMemAllocator, addresses: dict[str, int]
    ) -> None:
        """One namespace: what has a plan follows it, the rest the level."""
        other = malloc_in_region(allocator, "mine", backup=True)
        report = allocator.sleep(tags=["weights", "mine"])
        assert report.freed_bytes == 3 * PAGE
        after = states()
        assert [after[addresses[name]] for name in addresses] == [BACKED_UP, AWAKE, BACKED_UP, AWAKE]
        allocator.sleep(level=2, tags="kv_cache")
        assert set(states().values()) == {BACKED_UP, DROPPED}
        allocator.wake_up("kv_cache")
        after = states()
        assert [after[addresses[name]] for name in addresses] == [BACKED_UP, AWAKE, BACKED_UP, AWAKE]
        assert after[other] == BACKED_UP
        allocator.wake_up(["weights", "mine"], retain_backups=False)
        assert set(states().values()) == {AWAKE}
        assert allocator._store.memory.bytes == 0
        for call in (lambda: allocator.sleep(tags="no"), lambda: allocator.wake_up("no")):
            with pytest.raises(InvalidArgument, match="no memory was ever given such a tag"):
                call()

    def test_prepare_leaves_regions_to_their_own_sleep(
        self, allocator: CuMemAllocator, addresses: dict[str, int]
    ) -> None:
        preparation = allocator.prepare()
        assert preparation.wait()
        assert preparation.wanted_bytes == PAGE
        assert allocator.read_backup(addresses["region weights"], PAGE) is None


class TestRetainedBackups:
    def test_without_no_host_memory_stays(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address = malloc_in_region(allocator, "a", backup=True)
        content = memory.fill_random(address, PAGE)
        allocator.regions.sleep()
        assert allocator._store.memory.bytes == PAGE
        allocator.regions.wake(retain_backups=False)
        assert allocator._store.memory.bytes == 0
        assert allocator.read_backup(address, PAGE) is None
        assert allocator.regions.sleep().copied_bytes == PAGE
        allocator.regions.wake(retain_backups=True)
        assert allocator._store.memory.bytes == PAGE
        assert memory.read(address, PAGE) == content

    def test_what_is_not_restored_has_none(self, allocator: CuMemAllocator, memory: Memory) -> None:
        with allocator.regions.use("parameters", backup=True):
            address = allocator.malloc(PAGE)
        content = memory.fill_random(address, PAGE)
        memory.close()
        allocator.regions.sleep()
        report = allocator.regions.wake("parameters", restore=False)
        assert (report.mapped_bytes, report.restored_bytes) == (PAGE, 0)
        assert allocator.read_backup(address, PAGE) is None
        memory.write(address, content)
        allocator.regions.sleep()
        allocator.regions.wake()
        assert memory.read(address, PAGE) == content
        with pytest.raises(InvalidArgument, match="restore=1"):
            allocator.regions.wake(restore=1)  # type: ignore[arg-type]

    def test_what_the_settings_say_holds_where_nothing_is_said(
        self, make_allocator: Callable[..., CuMemAllocator]
    ) -> None:
        allocator = make_allocator(retain_backups=False)
        malloc_in_region(allocator, "a", backup=True)
        allocator.regions.sleep()
        allocator.regions.wake()
        assert allocator._store.memory.bytes == 0
        allocator.regions.sleep()
        allocator.regions.wake(retain_backups=True)
        assert allocator._store.memory.bytes == PAGE

    def test_what_is_retained_is_of_use_whatever_the_settings_say(
        self, make_allocator: Callable[..., CuMemAllocator], memory: Memory
    ) -> None:
        allocator = make_allocator(retain_backups=False, verify="off")
        address = malloc_in_region(allocator, "a", backup=True)
        content = memory.fill_random(address, PAGE)
        ordinary = allocator.malloc(PAGE, "weights")
        allocator.regions.sleep()
        allocator.regions.wake(retain_backups=True)
        assert allocator.regions.sleep().copied_bytes == 0
        allocator.sleep()
        allocator.wake_up()
        allocator.regions.wake()
        assert memory.read(address, PAGE) == content
        assert allocator.read_backup(ordinary, PAGE) is None


class TestReadingBackups:
    @pytest.mark.parametrize("copy", [True, False])
    def test_of_what_sleeps(self, allocator: CuMemAllocator, memory: Memory, copy: bool) -> None:
        address = malloc_in_region(allocator, "a", backup=True, nbytes=3 * PAGE)
        content = memory.fill_random(address, 3 * PAGE)
        allocator.regions.sleep()
        for offset, nbytes in ((0, 3 * PAGE), (5, 7), (PAGE - 1, PAGE + 2), (3 * PAGE - 1, 1)):
            read = allocator.read_backup(address + offset, nbytes, copy=copy)
            assert read is not None
            assert read.tobytes() == content[offset : offset + nbytes]
            assert not (read.flags.writeable and not copy)

    def test_that_lies_in_several_extents(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(allocator.tuning, "slab_bytes", PAGE)
        address = malloc_in_region(allocator, "a", backup=True, nbytes=3 * PAGE)
        content = memory.fill_random(address, 3 * PAGE)
        allocator.regions.sleep()
        read = allocator.read_backup(address + 3, 3 * PAGE - 5, copy=False)
        assert read is not None
        assert read.tobytes() == content[3:-2]

    @pytest.mark.sim
    def test_that_is_compressed(self, make_allocator: Callable[..., CuMemAllocator], memory: Memory) -> None:
        allocator = make_allocator(compress="auto")
        nbytes = 8 * PAGE
        address = malloc_in_region(allocator, "a", backup=True, nbytes=nbytes)
        content = bf16_weights(nbytes, np.random.default_rng(1))
        memory.write(address, content)
        report = allocator.regions.sleep()
        assert report.stored_bytes < report.copied_bytes
        read = allocator.read_backup(address + 12345, nbytes - 23456)
        assert read is not None
        assert read.tobytes() == content[12345 : 12345 + nbytes - 23456]

    def test_of_what_is_awake_with_the_bytes_of_its_last_sleep(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address = malloc_in_region(allocator, "a", backup=True)
        assert allocator.read_backup(address, PAGE) is None
        content = memory.fill_random(address, PAGE)
        allocator.regions.sleep()
        allocator.regions.wake(retain_backups=True)
        memory.fill_random(address, PAGE)
        read = allocator.read_backup(address, PAGE)
        assert read is not None
        assert read.tobytes() == content

    def test_without_a_copy_is_where_it_lies(self, allocator: CuMemAllocator) -> None:
        address = malloc_in_region(allocator, "a", backup=True)
        allocator.regions.sleep()
        first, second = (allocator.read_backup(address, PAGE, copy=False) for _ in range(2))
        copied = allocator.read_backup(address, PAGE)
        assert first is not None
        assert second is not None
        assert copied is not None
        assert first.ctypes.data == second.ctypes.data != copied.ctypes.data

    def test_of_what_was_dropped_is_refused(self, allocator: CuMemAllocator) -> None:
        address = malloc_in_region(allocator, "a", backup=False)
        allocator.regions.sleep()
        with pytest.raises(InvalidState, match="sleeps without a backup"):
            allocator.read_backup(address, PAGE)

    def test_outside_of_a_segment_is_refused(self, allocator: CuMemAllocator) -> None:
        address = malloc_in_region(allocator, "a", backup=True)
        for first, nbytes in ((address - 1, 1), (address, PAGE + 1), (address + PAGE, 1)):
            with pytest.raises(InvalidArgument, match="not in one segment"):
                allocator.read_backup(first, nbytes)


class TestMargin:
    @pytest.fixture(autouse=True)
    def no_margin_afterwards(self, allocator: CuMemAllocator) -> object:
        yield
        allocator.regions.set_margin_bytes(0)

    @pytest.mark.sim
    def test_refuses_as_if_the_device_were_full(self, allocator: CuMemAllocator) -> None:
        with allocator.regions.use("a"):
            allocator.malloc(PAGE)  # the driver's own needs show now
            free_bytes = _core.memory_info(0)[0]
            allocator.regions.set_margin_bytes(free_bytes - PAGE)
            address = allocator.malloc(PAGE)
            with pytest.raises(OutOfDeviceMemory):
                allocator.malloc(1)
            allocator.free(address)
            allocator.malloc(PAGE)
        allocator.malloc(16 * MIB, tag="weights")  # of no region

    def test_does_not_keep_regions_from_waking(self, allocator: CuMemAllocator) -> None:
        address = malloc_in_region(allocator, "a", backup=True)
        allocator.regions.sleep()
        allocator.regions.set_margin_bytes(_core.memory_info(0)[0])
        allocator.regions.wake()
        assert states() == {address: AWAKE}

    @pytest.mark.parametrize("nbytes", [-1, 0.5, None, 2**64])
    def test_is_a_number_of_bytes(self, allocator: CuMemAllocator, nbytes: int) -> None:
        with pytest.raises(InvalidArgument, match="nbytes="):
            allocator.regions.set_margin_bytes(nbytes)


@pytest.mark.parametrize("flag", ["no", 0, float("nan")])
def test_flags_are_true_or_false(allocator: CuMemAllocator, flag: bool) -> None:
    """`"no"` would be true."""
    malloc_in_region(allocator, "a", backup=True)
    with pytest.raises(InvalidArgumentType, match=f"with_left={flag!r}"):
        allocator.regions.sleep(with_left=flag)
    assert set(states().values()) == {AWAKE}
    allocator.regions.sleep()
    with pytest.raises(InvalidArgumentType, match=f"retain_backups={flag!r}"):
        allocator.regions.wake(retain_backups=flag)
    with pytest.raises(InvalidArgumentType, match=f"wait_for_release={flag!r}"):
        allocator.regions.wake(wait_for_release=flag)
    assert set(states().values()) == {BACKED_UP}
    allocator.regions.wake(retain_backups=None)


@pytest.mark.skipif(not SIMULATED, reason="with a GPU, PyTorch may be there")
def test_graph_pools_need_pytorch_and_a_gpu(allocator: CuMemAllocator) -> None:
    with pytest.raises(InvalidState, match=r"regions\.graph_pool needs PyTorch"), allocator.regions.graph_pool("a"):
        pass


def test_without_the_hook_a_process_is_no_region(allocator: CuMemAllocator) -> None:
    with pytest.raises(InvalidState, match="LD_PRELOAD="):
        allocator.regions.use_for_process()
    assert _core.thread_backup() == _core.BackupPlan.BY_LEVEL
