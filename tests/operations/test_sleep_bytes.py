"""Bytes are exact after any sleep and wake, and writes meanwhile are noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from filled import fill, sleep_states
from support import AWAKE, BACKED_UP, DROPPED, PAGE, SIMULATED, Memory, around_copies

from cumem_sleep import CuMemAllocator, InvalidState, _core
from cumem_sleep.for_plugin import filling

MakeAllocator = Callable[..., CuMemAllocator]
Contents = dict[int, bytes]


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

    def test_backups_of_several_blocks(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As of segments above 256 MiB, on a smaller scale: each block holds its own part."""
        monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", 2 * PAGE)
        address = allocator.malloc(5 * PAGE, "weights")
        content = memory.fill_random(address, 5 * PAGE)
        allocator.sleep()
        (backup,) = allocator._store.catalogue
        assert [extent.bytes for extent in backup.extents] == [2 * PAGE, 2 * PAGE, PAGE]
        allocator.wake_up()
        assert memory.read(address, 5 * PAGE) == content

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

    def test_a_wake_gives_what_lost_its_bytes_to_be_filled(self, allocator: CuMemAllocator, memory: Memory) -> None:
        filled = fill(allocator, memory, "weights", "default")
        given: list[list[str]] = []

        def mark(lost: Sequence[tuple[_core.Segment, list[tuple[int, int]]]]) -> None:
            assert all(spans == [(0, PAGE)] for _, spans in lost)
            given.append([segment.tag for segment, _ in lost])
            for segment, _ in lost:
                with _core.CopyStream(segment.device) as stream:
                    stream.fill(segment.address + 3, 0x5A, 7)
                    stream.synchronize()
            if len(given) == 1:
                raise ValueError("not yet")

        allocator.sleep(2)
        with filling(allocator, mark):
            with pytest.raises(ValueError, match="not yet"):
                allocator.wake_up()
            assert sleep_states() == {"weights": DROPPED, "default": BACKED_UP}
            allocator.wake_up()
        assert memory.read(filled["weights"][0], 16)[3:10] == b"\x5a" * 7
        assert memory.read(filled["default"][0], PAGE) == filled["default"][1]
        allocator.sleep(2)
        allocator.wake_up()
        assert given == [["weights"], ["weights"]]


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
