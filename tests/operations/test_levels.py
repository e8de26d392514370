"""What sleeps at which level, what wakes, and what is dropped."""

from __future__ import annotations

import re

import pytest
from filled import fill, sleep_states
from support import AWAKE, BACKED_UP, DROPPED, PAGE, Memory

from cumem_sleep import CuMemAllocator, InvalidArgument, InvalidArgumentType, _core


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
        with pytest.raises(InvalidArgumentType, match=re.escape(f"level={level!r}: expected 0 (keep all), 1 (back up")):
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
