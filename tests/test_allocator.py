"""The allocator suite: what every user may rely on. Runs on the simulated driver and on a real GPU alike."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable

import pytest
from support import AWAKE, BACKED_UP, DROPPED, MIB, PAGE, SIMULATED, Cuda, Memory, around_copies, in_thread

import cumem_sleep
from cumem_sleep import (
    CuMemAllocator,
    DriverError,
    InvalidArgument,
    InvalidArgumentType,
    InvalidState,
    OutOfDeviceMemory,
    OutOfHostMemory,
    Settings,
    SleepReport,
    TagUsage,
    _core,
    sim,
    variables,
)

MakeAllocator = Callable[..., CuMemAllocator]
Contents = dict[int, bytes]


def sleep_states() -> dict[str, _core.Segment.Sleep]:
    """How each tag sleeps; every test that asks has one segment of each."""
    return {segment.tag: segment.sleep for segment in _core.segments()}


def fill(allocator: CuMemAllocator, memory: Memory, *tags: str, nbytes: int = PAGE) -> dict[str, tuple[int, bytes]]:
    """One segment of random bytes for each tag: its address and its bytes."""
    filled = {}
    for tag in tags:
        address = allocator.malloc(nbytes, tag)
        filled[tag] = (address, memory.fill_random(address, nbytes))
    return filled


def take_all_but(nbytes: int, allocator: CuMemAllocator, device: int = 0) -> list[int]:
    """Allocate until about `nbytes` are free on the device; returns the addresses."""
    taken = []
    _, size = _core.memory_info(device)
    while (size := min(size, (_core.memory_info(device)[0] - nbytes) // PAGE * PAGE)) > 0:
        try:
            taken.append(allocator.malloc(size, "eater", device))
        except OutOfDeviceMemory:  # a GPU needs some for itself
            size //= 2
    return taken


class TestMalloc:
    @pytest.mark.parametrize(
        ("nbytes", "whole"),
        [(1, PAGE), (PAGE - 1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (5 * MIB, 3 * PAGE)],
    )
    def test_rounds_up_to_the_granularity(self, allocator: CuMemAllocator, nbytes: int, whole: int) -> None:
        assert allocator.malloc(nbytes) % PAGE == 0
        assert allocator.usage() == {"default": TagUsage(segments=1, bytes=whole, mapped_bytes=whole)}
        assert allocator.get_current_usage() == whole

    def test_memory_is_usable_to_the_last_byte(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address = allocator.malloc(3 * PAGE)
        content = memory.fill_random(address, 3 * PAGE)
        assert memory.read(address, 3 * PAGE) == content

    def test_takes_and_gives_back_device_memory(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(PAGE)
        before, _ = _core.memory_info(0)
        other = allocator.malloc(8 * PAGE)
        assert _core.memory_info(0)[0] <= before - 8 * PAGE
        allocator.free(other)
        assert _core.memory_info(0)[0] == before
        allocator.free(address)

    def test_addresses_differ(self, allocator: CuMemAllocator) -> None:
        addresses = [allocator.malloc(PAGE) for _ in range(8)]
        assert len(set(addresses)) == 8
        assert [segment.address for segment in _core.segments()] == addresses  # oldest first

    def test_tags(self, allocator: CuMemAllocator) -> None:
        with allocator.use_memory_pool("weights"):
            allocator.malloc(PAGE)
            with allocator.use_memory_pool("kv_cache"):
                allocator.malloc(PAGE)
                allocator.malloc(PAGE, "named")
            with allocator.use_memory_pool():
                allocator.malloc(PAGE)
            allocator.malloc(PAGE)
        allocator.malloc(PAGE)
        tags = [segment.tag for segment in _core.segments()]
        assert tags == ["weights", "kv_cache", "named", "default", "weights", "default"]

    def test_a_pool_is_left_on_an_error(self, allocator: CuMemAllocator) -> None:
        with pytest.raises(KeyError), allocator.use_memory_pool("weights"):
            raise KeyError
        allocator.malloc(PAGE)
        assert set(allocator.usage()) == {"default"}

    def test_a_pool_is_this_threads_own(self, allocator: CuMemAllocator) -> None:
        with allocator.use_memory_pool("weights"):
            in_thread(lambda: allocator.malloc(PAGE))
        assert set(allocator.usage()) == {"default"}

    def test_larger_than_the_device(self, allocator: CuMemAllocator) -> None:
        allocator.malloc(PAGE)
        free_bytes, total_bytes = _core.memory_info(0)
        for nbytes in (total_bytes + 1, total_bytes * 1000, 2**63, 2**80):
            with pytest.raises(OutOfDeviceMemory) as raised:
                allocator.malloc(nbytes)
            assert raised.value.needed_bytes >= nbytes
            assert raised.value.free_bytes == free_bytes
            assert raised.value.error == "CUDA_ERROR_OUT_OF_MEMORY"
        assert _core.memory_info(0)[0] == free_bytes

    def test_larger_than_what_is_free(self, allocator: CuMemAllocator) -> None:
        allocator.malloc(PAGE)
        free_bytes, _ = _core.memory_info(0)
        whole = (free_bytes // PAGE + 1) * PAGE
        with pytest.raises(OutOfDeviceMemory) as raised:
            allocator.malloc(whole)
        assert (raised.value.call, raised.value.needed_bytes) == ("cuMemCreate", whole)
        assert raised.value.free_bytes == free_bytes
        assert _core.memory_info(0)[0] == free_bytes
        assert len(_core.segments()) == 1


class TestFree:
    def test_twice(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(PAGE)
        allocator.free(address)
        with pytest.raises(InvalidState, match=f"0x{address:x}"):
            allocator.free(address)

    def test_of_an_address_that_is_not_ours(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(2 * PAGE)
        for wrong in (0, 1, address + 1, address + PAGE, address - PAGE, 2**47, 2**64 - 1):
            with pytest.raises(InvalidState, match="not the address"):
                allocator.free(wrong)
        assert allocator.get_current_usage() == 2 * PAGE

    @pytest.mark.parametrize("level", [1, 2])
    def test_of_what_sleeps(self, allocator: CuMemAllocator, memory: Memory, level: int) -> None:
        filled = fill(allocator, memory, "weights", "kv_cache", "default")
        allocator.sleep(level)
        for address, _ in filled.values():
            allocator.free(address)
        assert allocator.usage() == {}
        assert allocator._store.host_bytes == 0

    def test_forgets_the_backup_at_once(self, allocator: CuMemAllocator, memory: Memory) -> None:
        (address, _), (other, content) = fill(allocator, memory, "weights", "default").values()
        allocator.sleep()
        allocator.wake_up()
        assert allocator._store.host_bytes == 2 * PAGE
        allocator.free(address)
        assert allocator._store.host_bytes == PAGE
        allocator.sleep()
        allocator.wake_up()
        assert memory.read(other, PAGE) == content

    def test_a_freed_address_may_come_again_with_nothing_of_its_past(
        self, allocator: CuMemAllocator, memory: Memory
    ) -> None:
        first = allocator.malloc(PAGE, "weights")
        memory.fill_random(first, PAGE)
        allocator.sleep()
        allocator.wake_up()
        allocator.free(first)
        second = allocator.malloc(PAGE, "weights")
        content = memory.fill_random(second, PAGE)
        assert allocator.sleep().copied_bytes == PAGE
        allocator.wake_up()
        assert memory.read(second, PAGE) == content


class TestLevels:
    TAGS = ("weights", "kv_cache", "default", "lora")

    @pytest.mark.parametrize(
        ("level", "dropped"), [(None, {"kv_cache"}), (1, {"kv_cache"}), (2, {"weights", "kv_cache"})]
    )
    def test_what_is_backed_up_and_what_dropped(
        self, allocator: CuMemAllocator, memory: Memory, level: int | None, dropped: set[str]
    ) -> None:
        filled = fill(allocator, memory, *self.TAGS)
        report = allocator.sleep() if level is None else allocator.sleep(level)
        kept = set(self.TAGS) - dropped
        assert sleep_states() == {tag: DROPPED if tag in dropped else BACKED_UP for tag in self.TAGS}
        assert report.freed_bytes == 4 * PAGE
        assert (report.copied_bytes, report.clean_bytes) == (len(kept) * PAGE, 0)
        assert report.dropped_bytes == len(dropped) * PAGE
        assert {tag for tag, usage in allocator.usage().items() if usage.host_bytes == PAGE} == kept
        woken = allocator.wake_up()
        assert (woken.mapped_bytes, woken.restored_bytes) == (4 * PAGE, len(kept) * PAGE)
        assert set(sleep_states().values()) == {AWAKE}
        for tag in kept:
            address, content = filled[tag]
            assert memory.read(address, PAGE) == content, tag

    def test_level_0_touches_nothing(self, allocator: CuMemAllocator, memory: Memory) -> None:
        filled = fill(allocator, memory, *self.TAGS)
        before = _core.memory_info(0)
        report = allocator.sleep(level=0)
        assert (report.freed_bytes, report.copied_bytes, report.dropped_bytes) == (0, 0, 0)
        assert "level 0" in str(report)
        assert _core.memory_info(0) == before
        for address, content in filled.values():
            assert memory.read(address, PAGE) == content

    def test_sleep_gives_device_memory_back(self, allocator: CuMemAllocator, memory: Memory) -> None:
        memory.fill_random(allocator.malloc(4 * PAGE, "weights"), 4 * PAGE)
        free_awake, _ = _core.memory_info(0)
        allocator.sleep()
        assert _core.memory_info(0)[0] >= free_awake + 4 * PAGE
        allocator.wake_up()
        assert _core.memory_info(0)[0] < free_awake + PAGE

    @pytest.mark.parametrize(
        ("offload_tags", "kept"),
        [
            ("weights", {"weights"}),
            (("weights", "lora"), {"weights", "lora"}),
            (["kv_cache"], {"kv_cache"}),
            ({"default"}, {"default"}),
            ((), set()),
            ([], set()),
            (("runtime", "weights"), {"weights"}),
            (("runtime", "cudagraph"), set()),  # vLLM's from 0.32 on, at level 2, whether or not it uses them
        ],
    )
    @pytest.mark.parametrize("positional", [False, True])
    def test_offload_tags(
        self, allocator: CuMemAllocator, memory: Memory, offload_tags: object, kept: set[str], positional: bool
    ) -> None:
        filled = fill(allocator, memory, *self.TAGS)
        report = (
            allocator.sleep(offload_tags)  # type: ignore[arg-type]  # as vLLM calls it
            if positional
            else allocator.sleep(offload_tags=offload_tags)  # type: ignore[arg-type]
        )
        assert {tag for tag, state in sleep_states().items() if state == BACKED_UP} == kept
        assert (report.copied_bytes, report.dropped_bytes) == (len(kept) * PAGE, (4 - len(kept)) * PAGE)
        allocator.wake_up()
        for tag in kept:
            address, content = filled[tag]
            assert memory.read(address, PAGE) == content

    def test_misspelt_tags_drop_nothing(self, allocator: CuMemAllocator, memory: Memory) -> None:
        filled = fill(allocator, memory, "weights")
        for tags in ("weigths", ["1"], {"weigths", "kvcache"}):
            with pytest.raises(InvalidArgument, match=r"known are cudagraph, default, kv_cache, runtime, weights"):
                allocator.sleep(offload_tags=tags)
        assert memory.read(filled["weights"][0], PAGE) == filled["weights"][1]

    @pytest.mark.parametrize("level", ["1", " 2", "-1"])
    def test_a_level_given_as_text_is_taken_for_one(self, allocator: CuMemAllocator, level: str) -> None:
        allocator.malloc(PAGE, "weights")
        with pytest.raises(InvalidArgumentType, match=re.escape(f"level={level!r}: 0 (keep all), 1 (back up all but")):
            allocator.sleep(level=level)

    def test_one_of_level_and_offload_tags(self, allocator: CuMemAllocator) -> None:
        allocator.malloc(PAGE, "weights")
        with pytest.raises(InvalidArgument, match="one of the two"):
            allocator.sleep(1, offload_tags="weights")
        with pytest.raises(InvalidArgument, match="one of the two"):
            allocator.sleep(level=2, offload_tags=())
        assert sleep_states() == {"weights": AWAKE}

    def test_a_second_deeper_sleep_keeps_the_backups(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address, content = fill(allocator, memory, "weights")["weights"]
        allocator.sleep(1)
        report = allocator.sleep(2)
        assert (report.freed_bytes, report.dropped_bytes) == (0, 0)
        assert "nothing to do" in str(report)
        allocator.wake_up()
        assert memory.read(address, PAGE) == content

    def test_what_is_allocated_while_the_rest_sleeps_can_sleep_too(
        self, allocator: CuMemAllocator, memory: Memory
    ) -> None:
        filled = [fill(allocator, memory, "weights")["weights"]]
        allocator.sleep()
        filled.append(fill(allocator, memory, "weights")["weights"])
        report = allocator.sleep()
        assert (report.freed_bytes, report.copied_bytes) == (PAGE, PAGE)
        assert allocator.wake_up().restored_bytes == 2 * PAGE
        for address, content in filled:
            assert memory.read(address, PAGE) == content


class TestSelectiveWake:
    TAGS = ("weights", "kv_cache", "default", "cudagraph")

    @pytest.mark.parametrize(
        ("tags", "left_asleep"),
        [
            ("weights", {"kv_cache"}),
            (["kv_cache"], {"weights"}),
            (("weights", "kv_cache"), set()),
            ({"default"}, {"weights", "kv_cache"}),
            ([], {"weights", "kv_cache"}),
            (None, set()),
        ],
    )
    def test_only_weights_and_kv_cache_can_be_left_asleep(
        self, allocator: CuMemAllocator, memory: Memory, tags: list[str] | None, left_asleep: set[str]
    ) -> None:
        filled = fill(allocator, memory, *self.TAGS)
        allocator.sleep(1)
        report = allocator.wake_up(tags)
        assert report.mapped_bytes == (4 - len(left_asleep)) * PAGE
        assert {tag for tag, state in sleep_states().items() if state != AWAKE} == left_asleep
        assert {tag for tag, usage in allocator.usage().items() if usage.mapped_bytes == 0} == left_asleep
        for tag in {"weights", "default", "cudagraph"} - left_asleep:
            address, content = filled[tag]
            assert memory.read(address, PAGE) == content
        allocator.wake_up()
        for tag in ("weights", "default", "cudagraph"):
            address, content = filled[tag]
            assert memory.read(address, PAGE) == content

    def test_in_steps_as_vllm_does(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address, content = fill(allocator, memory, *self.TAGS)["weights"]
        allocator.sleep(1)
        allocator.wake_up(["weights"])
        assert memory.read(address, PAGE) == content
        assert allocator.wake_up(["kv_cache"]).mapped_bytes == PAGE
        assert allocator.wake_up(["kv_cache"]).mapped_bytes == 0

    def test_sleep_after_a_selective_wake_takes_what_is_awake(self, allocator: CuMemAllocator, memory: Memory) -> None:
        filled = fill(allocator, memory, "weights", "kv_cache", "default")
        allocator.sleep(1)
        allocator.wake_up("weights")
        report = allocator.sleep(1)
        assert (report.freed_bytes, report.clean_bytes, report.copied_bytes) == (2 * PAGE, 2 * PAGE, 0)
        allocator.wake_up()
        for tag in ("weights", "default"):
            address, content = filled[tag]
            assert memory.read(address, PAGE) == content


class TestDiscard:
    def test_drops_these_tags_and_no_others(self, allocator: CuMemAllocator, memory: Memory) -> None:
        filled = fill(allocator, memory, "weights", "kv_cache", "default")
        report = allocator.discard("kv_cache")
        assert (report.freed_bytes, report.dropped_bytes, report.copied_bytes) == (PAGE, PAGE, 0)
        assert sleep_states() == {"weights": AWAKE, "kv_cache": DROPPED, "default": AWAKE}
        for tag in ("weights", "default"):
            address, content = filled[tag]
            assert memory.read(address, PAGE) == content
        assert allocator.wake_up(["kv_cache"]).mapped_bytes == PAGE

    def test_what_sleeps_keeps_its_backup(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address, content = fill(allocator, memory, "weights")["weights"]
        allocator.sleep()
        assert "nothing to do" in str(allocator.discard(["weights"]))
        allocator.wake_up()
        assert memory.read(address, PAGE) == content

    def test_forgets_retained_backups(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, "weights")
        allocator.sleep()
        allocator.wake_up()
        assert allocator.usage()["weights"].host_bytes == PAGE
        allocator.discard("weights")
        assert allocator.usage()["weights"].host_bytes == 0
        assert allocator.wake_up().restored_bytes == 0


class TestBytes:
    def test_exact_at_constant_addresses_after_many_cycles(self, allocator: CuMemAllocator, memory: Memory) -> None:
        sizes = {"weights": 3 * PAGE, "default": PAGE, "lora": 2 * PAGE}
        addresses = {tag: allocator.malloc(nbytes, tag) for tag, nbytes in sizes.items()}
        contents = {tag: memory.fill_random(addresses[tag], nbytes) for tag, nbytes in sizes.items()}
        for cycle in range(6):
            if cycle != 3:  # nothing changes in one of them
                changed = list(sizes)[cycle % len(sizes)]
                contents[changed] = memory.fill_random(addresses[changed], sizes[changed])
            allocator.sleep()
            allocator.wake_up("weights" if cycle % 2 else None)
            for tag, nbytes in sizes.items():
                assert memory.read(addresses[tag], nbytes) == contents[tag], (cycle, tag)
            assert [segment.address for segment in _core.segments()] == list(addresses.values())

    def test_order_of_segments_does_not_matter(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Backups are not mixed up between segments of one size, or of several, freed and allocated in between."""
        kept: Contents = {}
        for _ in range(6):
            address = allocator.malloc(PAGE, "weights")
            kept[address] = memory.fill_random(address, PAGE)
        for address in list(kept)[::2]:
            allocator.free(address)
            del kept[address]
        allocator.sleep()
        address = allocator.malloc(2 * PAGE, "weights")
        kept[address] = memory.fill_random(address, 2 * PAGE)
        allocator.sleep()
        allocator.wake_up()
        for address, content in kept.items():
            assert memory.read(address, len(content)) == content

    def test_backups_of_several_blocks(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As of segments above 256 MiB, on a smaller scale: each block holds its own part."""
        monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", 2 * PAGE)
        address = allocator.malloc(5 * PAGE, "weights")
        content = memory.fill_random(address, 5 * PAGE)
        allocator.sleep()
        (backup,) = allocator._store._backups.values()
        assert [extent.bytes for extent in backup.extents] == [2 * PAGE, 2 * PAGE, PAGE]
        allocator.wake_up()
        assert memory.read(address, 5 * PAGE) == content

    @pytest.mark.parametrize("pieces_mib", [1, 2, 32])
    def test_pages_are_touched_in_pieces(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, pieces_mib: int
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "touch_bytes", pieces_mib * MIB)
        address = allocator.malloc(2 * PAGE)
        content = memory.fill_random(address, 2 * PAGE)
        allocator.sleep()
        allocator.wake_up()
        assert memory.read(address, 2 * PAGE) == content

    @pytest.mark.sim
    def test_dropped_bytes_are_gone(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address, content = fill(allocator, memory, "kv_cache")["kv_cache"]
        allocator.sleep()
        allocator.wake_up()
        assert memory.read(address, PAGE) == b"\xdb" * PAGE != content

    def test_poison(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(poison=True)
        filled = fill(allocator, memory, "weights", "kv_cache", "default")
        allocator.sleep(2)
        allocator.wake_up()
        assert memory.read(filled["weights"][0], PAGE) == b"\xff" * PAGE
        assert memory.read(filled["default"][0], PAGE) == filled["default"][1]
        if SIMULATED:  # on a GPU, whatever was there before
            assert memory.read(filled["kv_cache"][0], PAGE) == b"\xdb" * PAGE


class TestWritesDuringSleep:
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_are_noticed(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, when: str
    ) -> None:
        """Work that still runs may change bytes that were digested or copied already: then the backup is worthless."""
        (address, content), (other, other_content) = fill(allocator, memory, "weights", "default").values()
        changed = content[:-1] + bytes([content[-1] ^ 1])

        with monkeypatch.context() as patch:
            around_copies(patch, **{when: lambda: memory.write(address, changed)})
            with pytest.raises(InvalidState, match="written to"):
                allocator.sleep()
        assert sleep_states() == {"weights": AWAKE, "default": AWAKE}
        assert memory.read(address, PAGE) == changed
        allocator.sleep()
        allocator.wake_up()
        assert memory.read(address, PAGE) == changed
        assert memory.read(other, PAGE) == other_content


class TestClean:
    def test_unchanged_bytes_are_not_copied_again(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, "weights", "default", nbytes=2 * PAGE)
        assert allocator.sleep().copied_bytes == 4 * PAGE
        allocator.wake_up()
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes, report.freed_bytes) == (0, 4 * PAGE, 4 * PAGE)
        assert "copy" not in report.phases

    @pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE, 2 * PAGE + MIB, 3 * PAGE - 1])
    def test_one_changed_byte_costs_one_segment(self, allocator: CuMemAllocator, memory: Memory, offset: int) -> None:
        filled = fill(allocator, memory, "weights", "default", nbytes=3 * PAGE)
        allocator.sleep()
        allocator.wake_up()
        address, content = filled["weights"]
        changed = bytearray(content)
        changed[offset] ^= 1
        memory.write(address + offset, bytes(changed[offset : offset + 1]))
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (3 * PAGE, 3 * PAGE)
        allocator.wake_up()
        assert memory.read(address, 3 * PAGE) == changed
        assert memory.read(filled["default"][0], 3 * PAGE) == filled["default"][1]

    def test_bytes_that_moved_between_segments_are_changed(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """A sum over everything would not see it."""
        (one, first), (two, second) = fill(allocator, memory, "weights", "default").values()
        allocator.sleep()
        allocator.wake_up()
        memory.write(one, second)
        memory.write(two, first)
        assert allocator.sleep().copied_bytes == 2 * PAGE
        allocator.wake_up()
        assert (memory.read(one, PAGE), memory.read(two, PAGE)) == (second, first)

    def test_without_retained_backups(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(retain_backups=False)
        address, content = fill(allocator, memory, "weights")["weights"]
        allocator.sleep()
        assert allocator.usage()["weights"].host_bytes == PAGE
        assert allocator.wake_up().verified_bytes == PAGE
        assert allocator.usage()["weights"].host_bytes == 0
        assert allocator.sleep().copied_bytes == PAGE
        allocator.wake_up()
        assert memory.read(address, PAGE) == content

    @pytest.mark.parametrize("retain_backups", [True, False])
    def test_without_verification(self, make_allocator: MakeAllocator, memory: Memory, retain_backups: bool) -> None:
        allocator = make_allocator(verify="off", retain_backups=retain_backups)
        address, _ = fill(allocator, memory, "weights")["weights"]
        for _ in range(3):
            content = memory.fill_random(address, PAGE)
            assert allocator.sleep().copied_bytes == PAGE
            report = allocator.wake_up()
            assert report.verified_bytes == 0
            assert "verify" not in report.phases
            assert memory.read(address, PAGE) == content
        assert allocator.sleep().clean_bytes == (PAGE if retain_backups else 0)
        allocator.wake_up()
        assert memory.read(address, PAGE) == content

    def test_release_backups(self, allocator: CuMemAllocator, memory: Memory) -> None:
        filled = fill(allocator, memory, "weights", "default", "kv_cache")
        allocator.sleep()
        allocator.wake_up(["kv_cache"])  # and default; weights sleep on
        assert allocator.release_backups() == PAGE
        assert {tag: usage.host_bytes for tag, usage in allocator.usage().items()} == {
            "weights": PAGE,
            "default": 0,
            "kv_cache": 0,
        }
        assert allocator.release_backups() == 0
        allocator.wake_up()
        assert memory.read(filled["weights"][0], PAGE) == filled["weights"][1]
        allocator.close()
        assert allocator._store.host_bytes == 0
        assert allocator.sleep().copied_bytes == 2 * PAGE
        allocator.wake_up()
        assert memory.read(filled["default"][0], PAGE) == filled["default"][1]


class TestHostMemory:
    def test_is_exact(self, allocator: CuMemAllocator, memory: Memory) -> None:
        nbytes = 3 * PAGE
        fill(allocator, memory, "weights", "default", "kv_cache", nbytes=nbytes)
        memory.close()
        allocator.sleep()
        usage = allocator.usage()
        assert {tag: part.host_bytes for tag, part in usage.items()} == {
            "weights": nbytes,
            "default": nbytes,
            "kv_cache": 0,
        }
        if SIMULATED:
            assert sim.stats().registered_bytes == 2 * nbytes

    def test_budget_is_enough(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(host_budget_bytes=2 * PAGE)
        filled = fill(allocator, memory, "weights", "default")
        for _ in range(2):
            allocator.sleep()
            allocator.wake_up()
        for address, content in filled.values():
            assert memory.read(address, PAGE) == content

    def test_budget_is_too_small(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(host_budget_bytes=2 * PAGE - 1)
        filled = fill(allocator, memory, "weights", "default", "kv_cache")
        with pytest.raises(OutOfHostMemory) as raised:
            allocator.sleep()
        error = raised.value
        assert (error.needed_bytes, error.available_bytes, error.limit) == (2 * PAGE, 2 * PAGE - 1, "budget")
        assert "CUMEM_SLEEP_HOST_BUDGET_BYTES" in str(error)
        assert set(sleep_states().values()) == {AWAKE}
        for address, content in filled.values():
            assert memory.read(address, PAGE) == content
        assert allocator.sleep(2).copied_bytes == PAGE  # only default is backed up

    def test_retained_backups_give_way_to_the_budget(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(host_budget_bytes=2 * PAGE)
        filled = fill(allocator, memory, "weights", "lora")
        allocator.sleep()
        allocator.wake_up()
        filled["default"] = fill(allocator, memory, "default")["default"]
        report = allocator.sleep(offload_tags=["default", "lora"])  # weights' backup makes room
        assert (report.copied_bytes, report.clean_bytes) == (PAGE, PAGE)
        assert allocator._store.host_bytes == 2 * PAGE
        allocator.wake_up()
        for tag in ("default", "lora"):
            assert memory.read(filled[tag][0], PAGE) == filled[tag][1]

    def test_room_is_made_before_it_is_taken(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocator = make_allocator(host_budget_bytes=2 * PAGE)
        fill(allocator, memory, "weights", "lora")
        allocator.sleep()
        allocator.wake_up()
        fill(allocator, memory, "default")
        held = []
        take = allocator._store.take

        def watched_take(segments: list[_core.Segment], *more: object, **named: object) -> None:
            take(segments, *more, **named)  # type: ignore[arg-type]
            held.append(allocator._store.host_bytes)

        monkeypatch.setattr(allocator._store, "take", watched_take)
        allocator.sleep(offload_tags="default")
        assert held == [2 * PAGE]

    def test_backups_of_what_goes_to_sleep_do_not_give_way(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        """They are clean, so nothing of theirs is copied: without the backup their bytes would be lost."""
        allocator = make_allocator(host_budget_bytes=2 * PAGE)
        filled = fill(allocator, memory, "weights", "lora")
        allocator.sleep()
        allocator.wake_up()
        filled |= fill(allocator, memory, "default")
        with pytest.raises(OutOfHostMemory) as raised:
            allocator.sleep()
        assert (raised.value.needed_bytes, raised.value.available_bytes) == (PAGE, 0)
        assert set(sleep_states().values()) == {AWAKE}
        allocator.sleep(offload_tags=["weights", "lora"])
        allocator.wake_up()
        for tag in ("weights", "lora"):
            assert memory.read(filled[tag][0], PAGE) == filled[tag][1]


class TestDeviceMemoryIsShort:
    def test_at_wake(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Somebody else took the memory meanwhile: an error, all asleep, and the same call works later."""
        filled = fill(allocator, memory, "weights", "default", "kv_cache", nbytes=2 * PAGE)
        allocator.sleep()
        eaters = take_all_but(3 * PAGE, allocator)
        left, _ = _core.memory_info(0)
        for _ in range(2):
            with pytest.raises(OutOfDeviceMemory) as raised:
                allocator.wake_up()
            assert (raised.value.needed_bytes, raised.value.free_bytes) == (6 * PAGE, left)
            assert "3 sleeping segments" in str(raised.value)
            assert _core.memory_info(0)[0] == left
            asleep = {tag: usage.asleep_segments for tag, usage in allocator.usage().items()}
            assert asleep == {"weights": 1, "default": 1, "kv_cache": 1, "eater": 0}
        for address in eaters:
            allocator.free(address)
        allocator.wake_up()
        for tag in ("weights", "default"):
            address, content = filled[tag]
            assert memory.read(address, 2 * PAGE) == content

    def test_a_selective_wake_fits_where_all_does_not(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address = allocator.malloc(16 * PAGE, "weights")
        content = memory.fill_random(address, PAGE)
        allocator.malloc(64 * PAGE, "kv_cache")
        allocator.sleep()
        take_all_but(32 * PAGE, allocator)
        with pytest.raises(OutOfDeviceMemory):
            allocator.wake_up()
        assert allocator.wake_up("weights").restored_bytes == 16 * PAGE
        assert memory.read(address, PAGE) == content

    def test_free_on_a_full_device(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Waiting for the device must not need memory of it."""
        address, content = fill(allocator, memory, "weights")["weights"]
        for eater in take_all_but(0, allocator):
            allocator.free(eater)
        assert allocator.get_current_usage() == PAGE
        assert memory.read(address, PAGE) == content


class TestTwice:
    def test_sleeping_what_sleeps(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address, content = fill(allocator, memory, "weights")["weights"]
        allocator.sleep()
        report = allocator.sleep()
        assert (report.freed_bytes, report.copied_bytes) == (0, 0)
        assert "nothing to do" in report.note
        assert report.note in str(report)
        allocator.wake_up()
        assert memory.read(address, PAGE) == content

    def test_waking_what_is_awake(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address, content = fill(allocator, memory, "weights")["weights"]
        report = allocator.wake_up()
        assert (report.mapped_bytes, report.restored_bytes) == (0, 0)
        assert "nothing to do" in report.note
        assert report.note in str(report)
        assert memory.read(address, PAGE) == content

    def test_with_nothing_allocated(self, allocator: CuMemAllocator) -> None:
        assert "nothing to do" in str(allocator.sleep())
        assert "nothing to do" in str(allocator.wake_up())
        assert "nothing to do" in str(allocator.discard("kv_cache"))
        assert allocator.release_backups() == 0
        allocator.close()
        allocator.release_pools()
        assert allocator.usage() == {}


class TestReports:
    def test_add_up(self, allocator: CuMemAllocator, memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
        filled = fill(allocator, memory, "weights", "default", "kv_cache")
        allocator.sleep()
        allocator.wake_up()
        memory.fill_random(filled["default"][0], PAGE)
        with caplog.at_level(logging.INFO, "cumem_sleep"):
            slept = allocator.sleep()
            woken = allocator.wake_up()
        assert (slept.freed_bytes, slept.copied_bytes, slept.clean_bytes, slept.dropped_bytes) == (
            3 * PAGE,
            PAGE,
            PAGE,
            PAGE,
        )
        assert (woken.mapped_bytes, woken.restored_bytes, woken.verified_bytes) == (3 * PAGE, 2 * PAGE, 2 * PAGE)
        for report in (slept, woken):
            assert report.simulated is SIMULATED
            assert str(report).startswith("[simulated] ") is SIMULATED
            assert 0 < sum(report.phases.values()) <= report.seconds
            assert all(seconds >= 0 for seconds in report.phases.values())
        assert list(slept.phases) == ["quiesce", "host_memory", "digest", "copy", "check", "release"]
        assert list(woken.phases) == ["copy", "map", "verify"]
        assert [record.getMessage() for record in caplog.records] == [
            f"cumem-sleep: {report}" for report in (slept, woken)
        ]
        assert "freed 6.00 MiB" in str(slept)
        assert "copied 2.00 MiB" in str(slept)
        assert "mapped 6.00 MiB" in str(woken)

    def test_usage(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, "weights", "kv_cache")
        allocator.malloc(3 * PAGE, "weights")
        allocator.sleep()
        allocator.wake_up("weights")
        assert allocator.usage() == {
            "weights": TagUsage(
                segments=2, bytes=4 * PAGE, mapped_bytes=4 * PAGE, host_bytes=4 * PAGE, backed_up_bytes=4 * PAGE
            ),
            "kv_cache": TagUsage(segments=1, bytes=PAGE, asleep_segments=1),
        }
        assert allocator.get_current_usage() == 5 * PAGE


@pytest.fixture
def second_device(allocator: CuMemAllocator) -> None:  # noqa: ARG001  (comes first)
    """A second device; on a real host, only if there is one."""
    if SIMULATED:
        sim.configure(devices=2)
    else:
        _core.open_driver("libcuda.so.1")
        if _core.device_count() < 2:
            pytest.skip("this host has one GPU")


@pytest.mark.usefixtures("second_device")
class TestTwoDevices:
    @pytest.mark.sim
    def test_access_of_peers_outlives_sleep(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Whoever could reach the memory, and how, can after it woke; also after a sleep that failed."""
        shared, own = (allocator.malloc(PAGE, "weights") for _ in range(2))
        cuda = Cuda()
        content = memory.fill_random(shared, PAGE)
        cuda.set_access(shared, PAGE, device=1, flags=Cuda.READ)
        for _ in range(2):
            allocator.sleep()
            allocator.wake_up()
            assert [cuda.access(address, device=1) for address in (shared, own)] == [Cuda.READ, Cuda.NO_ACCESS]
        sim.fail("cuMemUnmap", after=1, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError):
            allocator.sleep()
        assert [cuda.access(address, device=1) for address in (shared, own)] == [Cuda.READ, Cuda.NO_ACCESS]
        assert memory.read(shared, PAGE, device=1) == content
        memory.close()

    def test_sleep_and_wake_together(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = {}
        for device in (0, 1, 1, 0):
            address = allocator.malloc(PAGE, "weights", device)
            contents[address, device] = memory.fill_random(address, PAGE, device)
        assert allocator.sleep().copied_bytes == 4 * PAGE
        assert allocator.wake_up().verified_bytes == 4 * PAGE
        for (address, device), content in contents.items():
            assert memory.read(address, PAGE, device) == content
        assert allocator.sleep().clean_bytes == 4 * PAGE
        memory.close()

    def test_too_little_memory_on_one_wakes_neither(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = {}
        for device in (0, 1):
            address = allocator.malloc(2 * PAGE, "weights", device)
            contents[address, device] = memory.fill_random(address, 2 * PAGE, device)
        allocator.sleep()
        eaters = take_all_but(PAGE, allocator, device=1)
        with pytest.raises(OutOfDeviceMemory) as raised:
            allocator.wake_up()
        assert (raised.value.device, raised.value.needed_bytes) == (1, 2 * PAGE)
        assert allocator.usage()["weights"].mapped_bytes == 0
        for eater in eaters:
            allocator.free(eater)
        allocator.wake_up()
        for (address, device), content in contents.items():
            assert memory.read(address, 2 * PAGE, device) == content
        memory.close()


class TestBadInput:
    """Every bad value is an error that names it, and nothing changes."""

    @pytest.fixture
    def used(self, allocator: CuMemAllocator) -> CuMemAllocator:
        allocator.malloc(PAGE, "weights")
        return allocator

    @pytest.fixture(autouse=True)
    def nothing_changes(self, used: CuMemAllocator) -> object:
        before = used.usage()
        yield
        assert used.usage() == before

    @pytest.mark.parametrize("level", [3, -1, True, False, 2**70])
    def test_level(self, used: CuMemAllocator, level: int) -> None:
        with pytest.raises(InvalidArgument, match=re.escape(f"level={level!r}")):
            used.sleep(level)

    @pytest.mark.parametrize("tags", [1.5, b"weights", [1], [None], ["weights", b"x"], object()])
    def test_tags_of_the_wrong_type(self, used: CuMemAllocator, tags: object) -> None:
        with pytest.raises(InvalidArgumentType, match="tag"):
            used.sleep(offload_tags=tags)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentType, match=r"tag|level"):
            used.sleep(tags)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentType, match="tag"):
            used.wake_up(tags)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentType, match="tag"):
            used.discard(tags)  # type: ignore[arg-type]

    @pytest.mark.parametrize("tags", ["", [""], ["weights", ""]])
    def test_empty_tag(self, used: CuMemAllocator, tags: str | list[str]) -> None:
        for call in (used.sleep, used.wake_up, used.discard):
            with pytest.raises(InvalidArgument, match="tag=''"):
                call(tags)  # type: ignore[arg-type]

    @pytest.mark.parametrize("tags", ["weigths", ["weights", "kv-cache"]])
    def test_unknown_tag(self, used: CuMemAllocator, tags: str | list[str]) -> None:
        """A misspelt tag must not pass for nothing to do."""
        for call in (used.wake_up, used.discard):
            with pytest.raises(InvalidArgument, match=r"weigths|kv-cache.*known are.*weights"):
                call(tags)

    @pytest.mark.parametrize("tag", ["weights", "kv_cache", "default"])
    def test_known_tags_without_memory_are_fine(self, used: CuMemAllocator, tag: str) -> None:
        used.free(used.malloc(PAGE))
        used.free(used.malloc(PAGE, "kv_cache"))
        assert used.wake_up(tag).mapped_bytes == 0

    @pytest.mark.parametrize(
        ("nbytes", "error"),
        [
            (0, InvalidArgument),
            (-1, InvalidArgument),
            (-PAGE, InvalidArgument),
            (True, InvalidArgumentType),
            (1.0, InvalidArgumentType),
            ("2MiB", InvalidArgumentType),
            (None, InvalidArgumentType),
        ],
    )
    def test_size(self, used: CuMemAllocator, nbytes: int, error: type[Exception]) -> None:
        with pytest.raises(error, match=re.escape(f"nbytes={nbytes!r}")):
            used.malloc(nbytes)

    @pytest.mark.parametrize(
        ("device", "error"),
        [(-1, InvalidArgument), (64, InvalidArgument), (2**40, InvalidArgument), (True, InvalidArgumentType)],
    )
    def test_device(self, used: CuMemAllocator, device: int, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"device={device}"):
            used.malloc(PAGE, device=device)

    @pytest.mark.parametrize("tag", [1, b"weights", ["weights"], True])
    def test_tag_is_no_string(self, used: CuMemAllocator, tag: str) -> None:
        with pytest.raises(InvalidArgumentType, match=re.escape(f"tag={tag!r}")):
            used.malloc(PAGE, tag)
        with pytest.raises(InvalidArgumentType, match="tag="), used.use_memory_pool(tag):
            pass

    def test_tag_is_empty(self, used: CuMemAllocator) -> None:
        with pytest.raises(InvalidArgument, match="tag=''"):
            used.malloc(PAGE, "")
        with pytest.raises(InvalidArgument, match="tag=''"), used.use_memory_pool(""):
            pass

    @pytest.mark.parametrize("tag", ["größe", "重み", "a" * 1000, "with space", "%s", "line\nbreak"])
    def test_any_other_string_is_a_tag(self, used: CuMemAllocator, memory: Memory, tag: str) -> None:
        address = used.malloc(PAGE, tag)
        content = memory.fill_random(address, PAGE)
        used.sleep(offload_tags=[tag, "weights"])
        used.wake_up(tag)
        assert used.usage()[tag].bytes == PAGE
        assert memory.read(address, PAGE) == content
        used.free(address)
        used.wake_up()
        used.release_backups()

    @pytest.mark.parametrize(
        ("address", "error"),
        [(-1, InvalidArgument), (True, InvalidArgumentType), (1.0, InvalidArgumentType), (None, InvalidArgumentType)],
    )
    def test_address(self, used: CuMemAllocator, address: int, error: type[Exception]) -> None:
        with pytest.raises(error, match=re.escape(f"address={address!r}")):
            used.free(address)

    def test_address_beyond_64_bits(self, used: CuMemAllocator) -> None:
        with pytest.raises(InvalidState):
            used.free(2**64)

    def test_settings(self) -> None:
        with pytest.raises(InvalidArgumentType, match="settings='sim'"):
            CuMemAllocator("sim")  # type: ignore[arg-type]

    def test_errors_are_of_pythons_kinds_too(self, used: CuMemAllocator) -> None:
        with pytest.raises(ValueError, match="level"):
            used.sleep(3)
        with pytest.raises(TypeError, match="tag"):
            used.malloc(PAGE, 1)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):  # what vLLM's allocator raises
            used.free(1)


class TestInstances:
    def test_get_instance(self, allocator: CuMemAllocator) -> None:
        assert CuMemAllocator.get_instance() is allocator
        assert CuMemAllocator.instance is allocator

    def test_none_beside_one_with_memory(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(PAGE)
        with pytest.raises(InvalidState, match="get_instance"):
            CuMemAllocator()
        assert CuMemAllocator.get_instance() is allocator
        allocator.free(address)
        replacement = CuMemAllocator(Settings(driver=allocator.settings.driver, poison=True))
        assert CuMemAllocator.get_instance() is replacement

    def test_sleep_of_a_fresh_process_needs_no_level(self, allocator: CuMemAllocator) -> None:
        assert isinstance(allocator.sleep(), SleepReport)

    def test_cudagraph_pool_needs_pytorch(self, allocator: CuMemAllocator) -> None:
        if not SIMULATED:
            pytest.skip("PyTorch may reach this GPU")
        with pytest.raises(InvalidState, match="PyTorch"), allocator.cudagraph_pool():
            pass

    def test_totals_add_up_what_was_done(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, "weights", "kv_cache")
        reports = [allocator.sleep(), allocator.wake_up(), allocator.sleep(level=2), allocator.wake_up()]
        allocator.wake_up()  # nothing to do, so it does not count
        discarded = allocator.discard("kv_cache")
        totals = allocator.totals()
        assert {name: (total.count, total.failures) for name, total in totals.items()} == {
            "sleep": (2, 0),
            "wake": (2, 0),
            "discard": (1, 0),
        }
        assert totals["sleep"].bytes == {
            "freed": 4 * PAGE,
            "copied": PAGE,
            "clean": 0,
            "dropped": 3 * PAGE,
            "stored": PAGE,
        }
        assert totals["wake"].bytes == {"mapped": 4 * PAGE, "restored": PAGE, "verified": PAGE, "stored": PAGE}
        assert totals["discard"].bytes["freed"] == PAGE
        for name, first, second in (("sleep", 0, 2), ("wake", 1, 3)):
            assert totals[name].seconds == pytest.approx(reports[first].seconds + reports[second].seconds)
            assert sum(totals[name].phases.values()) == pytest.approx(
                sum(sum(reports[number].phases.values()) for number in (first, second))
            )
        assert totals["discard"].phases == discarded.phases

    @pytest.mark.sim
    def test_totals_count_what_failed(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, "weights")
        allocator.sleep()
        sim.fail("cuMemCreate")
        with pytest.raises(OutOfDeviceMemory):
            allocator.wake_up()
        allocator.wake_up()
        assert (allocator.totals()["wake"].count, allocator.totals()["wake"].failures) == (1, 1)

    @pytest.mark.sim
    def test_a_sleep_says_what_is_left_on_its_devices(self, allocator: CuMemAllocator, memory: Memory) -> None:
        filled = fill(allocator, memory, "weights", "kv_cache")
        assert filled
        free_bytes, total_bytes = _core.memory_info(0)
        report = allocator.discard("kv_cache")
        assert report.left_bytes == total_bytes - free_bytes - PAGE
        assert "2.00 MiB left on the GPU" in str(report)
        sim.fail("cuMemGetInfo")  # all is asleep by then: no reason to fail
        assert allocator.sleep().left_bytes == 0
        assert sleep_states() == {"weights": BACKED_UP, "kv_cache": DROPPED}


class TestEmptyPools:
    """A pool that nothing was allocated in: its memory does not sleep, and who entered it does not know."""

    @pytest.fixture(autouse=True)
    def _anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CuMemAllocator, "_warned_of_empty_pool", False)

    @pytest.mark.sim
    def test_are_told_of_once_with_the_reason(
        self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture
    ) -> None:
        for tag in ("weights", "weights", "kv_cache"):
            with allocator.use_memory_pool(tag):
                pass
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "nothing was allocated in the memory pool 'weights', so nothing of it can sleep" in warning
        assert "on the simulated driver PyTorch does not allocate from this layer" in warning

    @pytest.mark.parametrize(
        ("torch_pools", "why"),
        [
            (None, "PyTorch is not installed, or reaches no GPU"),
            (object(), "built on the CPU and moved to the GPU later"),
        ],
    )
    def test_on_a_gpu(
        self,
        allocator: CuMemAllocator,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        torch_pools: object,
        why: str,
    ) -> None:
        with monkeypatch.context() as context:
            context.setattr(_core, "driver_is_simulated", lambda: False)
            context.setattr(allocator, "_torch_pools", torch_pools)
            allocator._warn_of_empty_pool("weights")
        assert why in caplog.text

    def test_memory_in_the_pool_is_no_reason(self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture) -> None:
        with allocator.use_memory_pool("weights"):
            allocator.malloc(PAGE)
        with allocator.use_memory_pool("lora"):  # optional parts may be empty
            pass
        assert "nothing was allocated" not in caplog.text


class TestMisspeltVariables:
    @pytest.fixture(autouse=True)
    def _anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(variables, "_warned_of", set())

    def test_are_logged_once(
        self,
        make_allocator: MakeAllocator,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("CUMEM_SLEEP_RETAIN_BACKUP", "0")
        monkeypatch.setenv("CUMEM_SLEEP_XYZ", "0")
        for _ in range(2):
            make_allocator()
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warnings == [
            "CUMEM_SLEEP_RETAIN_BACKUP is set, but nothing reads it: is CUMEM_SLEEP_RETAIN_BACKUPS meant?",
            "CUMEM_SLEEP_XYZ is set, but nothing reads it",
        ]


def test_cupy_allocator_without_cupy_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "cupy" else find_spec(name, *more)
    )
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'cumem-sleep\[cupy13\]' for CUDA 13") as caught:
        cumem_sleep.cupy_allocator()
    assert caught.value.name == "cupy"
