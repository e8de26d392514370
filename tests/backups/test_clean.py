"""Backups of what did not change are used again, within a budget of host memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from filled import fill, sleep_states
from support import AWAKE, MIB, PAGE, SIMULATED, Memory

from cumem_sleep import CuMemAllocator, OutOfHostMemory, _core, sim

MakeAllocator = Callable[..., CuMemAllocator]


class TestClean:
    def test_unchanged_bytes_are_not_copied_again(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, "weights", "default", nbytes=2 * PAGE)
        assert allocator.sleep().copied_bytes == 4 * PAGE
        allocator.wake_up()
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes, report.freed_bytes) == (0, 4 * PAGE, 4 * PAGE)
        assert "copy" not in report.phases

    @pytest.mark.parametrize(
        "offset",
        [0, PAGE, 3 * PAGE - 1, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, PAGE - 1, 2 * PAGE + MIB))],
    )
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
        assert allocator._store.memory.bytes == 0
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
        assert allocator._store.memory.bytes == 2 * PAGE
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
        take = allocator._store.memory.reserve

        def watched_take(segments: list[_core.Segment], *more: object, **named: object) -> None:
            take(segments, *more, **named)  # type: ignore[arg-type]
            held.append(allocator._store.memory.bytes)

        monkeypatch.setattr(allocator._store.memory, "reserve", watched_take)
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
