"""The memory that the codec works in, on a device that is full."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from compression import (
    BENCH_BYTES,
    Contents,
    bf16,
    check_bytes,
    cycle,
    encodings,
    fill,
    leave_free,
    small_slots,  # noqa: F401  (autouse)
    some_noise,
    write,
    zeros,
)
from support import DEVICE_BYTES, PAGE

from cumem_sleep import CuMemAllocator, _core, sim
from cumem_sleep.codec.codec import ROW_BYTES
from cumem_sleep.codec.kernels import SimulatedKernels

pytestmark = pytest.mark.sim


class TestFullDevice:
    CACHE_BYTES = BENCH_BYTES[1]

    def fill(self, allocator: CuMemAllocator) -> Contents:
        return fill(allocator, bf16, some_noise, nbytes=3 * PAGE)

    def test_a_sleep_without_memory_stores_uncompressed(
        self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture
    ) -> None:
        contents = self.fill(allocator)
        fill(allocator, zeros, nbytes=self.CACHE_BYTES - PAGE, tag="kv_cache")
        leave_free(BENCH_BYTES[1] - PAGE)
        cycle(allocator, contents)
        assert encodings(allocator, contents) == [None, None]
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "no memory left for the codec" in caplog.text
        sim.configure(device_bytes=DEVICE_BYTES)
        write(next(iter(contents)), b"\1")
        contents[next(iter(contents))] = b"\1" + contents[next(iter(contents))][1:]
        cycle(allocator, contents)
        assert encodings(allocator, contents) == ["bf16", None]
        assert len(caplog.records) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("free_bytes", [0, PAGE])
    @pytest.mark.parametrize("unpinned", [False, True], ids=["", "as after level 3"])
    def test_wake_with_room_for_the_segments_only(
        self, allocator: CuMemAllocator, free_bytes: int, unpinned: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The CPU decodes, and no kernel."""
        contents = self.fill(allocator)
        allocator.sleep()
        if unpinned:
            allocator._store.memory.unpin()
        monkeypatch.setattr(SimulatedKernels, "decode", None)
        assert encodings(allocator, contents) == ["bf16", "bf16"]
        sim.configure(device_bytes=sum(segment.bytes for segment in _core.segments()) + free_bytes)
        assert allocator.wake_up().verified_bytes == 6 * PAGE
        check_bytes(contents)
        assert sim.stats().live_handles == len(_core.segments())
        assert _core.memory_info(0)[0] == free_bytes

    @pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
    def test_memory_of_the_codec_that_the_driver_keeps_is_given_back_later(
        self, allocator: CuMemAllocator, call: str
    ) -> None:
        """However often it refuses: it is counted, tried again, and not lost."""
        fill(allocator, bf16)
        workspace = allocator._compressor.workspace(0, DEVICE_BYTES)
        held = sim.stats()
        sim.fail(call, times=1_000_000, error="CUDA_ERROR_UNKNOWN")
        for _ in range(3):
            workspace.close()
        del workspace
        assert _core.reclaim() == 1
        sim.reset()
        assert sim.stats().reserved_bytes == held.reserved_bytes
        assert _core.reclaim() == 0
        assert sim.stats().live_handles == held.live_handles - 1
        assert sim.stats().reserved_bytes == held.reserved_bytes - BENCH_BYTES[0]


def test_slots_have_tables_of_their_own(allocator: CuMemAllocator) -> None:
    """They lie in one block. The simulated driver runs one kernel at a time, so a wake would not notice."""
    fill(allocator, bf16)  # so that the driver is open
    with allocator._compressor.workspace(0, DEVICE_BYTES) as workspace:
        heads = [slot._in_block(0, slot._most_rows * (ROW_BYTES + 4)) for slot in workspace._slots]
        assert not any(np.shares_memory(one, other) for one, other in itertools.combinations(heads, 2))
        assert len({slot.table for slot in workspace._slots}) == len(workspace._slots) > 1
