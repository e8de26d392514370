"""Segments beyond number sleep and wake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import PAGE, SIMULATED, Memory, host_bytes_of, quick_sums
from waking import check_bytes, fill

from cumem_sleep import CuMemAllocator, _core, sim

MakeAllocator = Callable[..., CuMemAllocator]


class TestManySegments:
    @pytest.mark.slow
    def test_go_one_by_one(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        count = 300
        if SIMULATED:
            sim.configure(device_bytes=(count + 8) * PAGE)
            monkeypatch.setattr("cumem_sleep.digest.digester.sums_of", quick_sums)
        allocator = make_allocator()
        addresses = [allocator.malloc(PAGE, "weights") for _ in range(count)]
        marks = [number.to_bytes(8, "little") * 512 for number in range(1, count + 1)]
        for address, mark in zip(addresses, marks, strict=True):
            memory.write(address + 8192, mark)
        allocator.sleep()
        assert allocator.wake_up().verified_bytes == count * PAGE
        for address, mark in zip(addresses, marks, strict=True):
            assert memory.read(address + 8192, len(mark)) == mark
        memory.close()
        for left in reversed(range(count)):
            address = addresses.pop(left // 2)
            allocator.free(address)
            assert allocator._store.memory.bytes == left * PAGE
            if SIMULATED:
                assert sim.stats().registered_bytes == left * PAGE

    def test_each_free_forgets_its_own_backup(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, [PAGE, 2 * PAGE, PAGE])
        allocator.sleep()
        allocator.wake_up()
        segments = _core.segments()
        addresses = [segment.address for segment in segments]
        allocator.free(addresses[1])
        assert [host_bytes_of(allocator, segment) for segment in segments] == [PAGE, 0, PAGE]
        del contents[addresses[1]]
        assert allocator.sleep().copied_bytes == 0
        allocator.free(addresses[2])
        assert allocator._store.memory.bytes == PAGE
        del contents[addresses[2]]
        allocator.wake_up()
        check_bytes(memory, contents)
