"""The memory that the codec works in, on a device that is full."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from compression import (
    BENCH_BYTES,
    USUAL_BENCH_BYTES,
    Contents,
    MakeAllocator,
    at,
    bf16,
    check_bytes,
    check_host_bytes,
    cycle,
    encodings,
    fill,
    leave_free,
    noise,
    small_slots,  # noqa: F401  (autouse)
    some_noise,
    write,
    zeros,
)
from support import AWAKE, DEVICE_BYTES, DROPPED, MIB, PAGE, is_accessible

from cumem_sleep import CuMemAllocator, CumemSleepError, DriverError, _core, sim
from cumem_sleep.codec.codec import ROW_BYTES
from cumem_sleep.codec.memory import SegmentLoan, workspace_bytes

pytestmark = pytest.mark.sim


class TestFullDevice:
    CACHE_BYTES = BENCH_BYTES[1]

    def fill(self, allocator: CuMemAllocator, *, cache: bool = True) -> tuple[Contents, Contents]:
        lent = fill(allocator, noise, nbytes=self.CACHE_BYTES, tag="kv_cache") if cache else {}
        return fill(allocator, bf16, some_noise, nbytes=3 * PAGE), lent

    def test_kv_cache_lends_its_memory(self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture) -> None:
        contents, cache = self.fill(allocator)
        leave_free(0)
        sim.fail("cuMemUnmap", after=1, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemUnmap"):
            allocator.sleep()
        sim.reset()
        check_bytes(contents | cache)
        assert encodings(allocator, contents) == ["bf16", "bf16"]
        allocator.release_backups()
        for _ in range(2):
            cycle(allocator, contents)
            assert encodings(allocator, contents) == ["bf16", "bf16"]
            check_host_bytes(allocator)
            assert sim.stats().live_handles == len(_core.segments())
            assert _core.memory_info(0)[0] == 0
        assert caplog.records == []

    @pytest.mark.parametrize("put_back", [True, False])
    def test_ranges_of_lenders_are_kept(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, put_back: bool
    ) -> None:
        """As they were before they were lent, or not at all."""
        contents, cache = self.fill(allocator)
        leave_free(0)
        keep = {address: np.array([(0, 4096), (PAGE, 65536)]) for address in cache}
        close = SegmentLoan.close

        def close_alone(loan: SegmentLoan) -> None:
            if not loan._is_back:
                loan._segment.take_back()
                loan._is_back = True
            close(loan)

        if not put_back:
            monkeypatch.setattr(SegmentLoan, "close", close_alone)
        report = allocator.sleep(keep=keep)
        assert (report.kept_bytes, report.not_kept) == (len(cache) * (4096 + 65536), "")
        assert encodings(allocator, contents) == ["bf16", "bf16"]
        woken = allocator.wake_up()
        check_bytes(contents)
        if put_back:
            assert woken.kept_bytes == report.kept_bytes
            for address, content in cache.items():
                for offset, nbytes in keep[address].tolist():
                    assert ctypes.string_at(address + offset, nbytes) == content[offset : offset + nbytes]
        else:
            assert "digest" in woken.not_kept

    @pytest.mark.slow
    @pytest.mark.parametrize("devices", [1, 2])
    @pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuStreamSynchronize"])
    @pytest.mark.parametrize("times", [1, 2, 8])
    def test_bytes_of_lenders_are_put_back_or_said_to_be_lost(
        self, make_allocator: MakeAllocator, devices: int, call: str, times: int
    ) -> None:
        """Wherever so many refusals in a row begin: nothing is awake with what the codec left there."""
        allocator = make_allocator(compress="auto", retain_backups=False)
        sim.configure(devices=devices)
        contents: Contents = {}
        caches: Contents = {}
        for device in range(devices):
            contents |= fill(allocator, bf16, nbytes=3 * PAGE, device=device)
            caches |= fill(allocator, noise, nbytes=self.CACHE_BYTES, tag="kv_cache", device=device)
        leave_free(0)
        lost_ever = 0
        for position in itertools.count():
            made_before = sim.stats().calls[call]
            sim.fail(call, after=position, times=times, error="CUDA_ERROR_UNKNOWN")
            error: CumemSleepError | None = None
            try:
                allocator.sleep()
            except CumemSleepError as raised:
                error = raised
            was_reached = sim.stats().calls[call] - made_before > position
            sim.reset()
            lost = {address for address in caches if at(address).sleep == DROPPED}
            if error is not None:
                check_bytes({a: content for a, content in (contents | caches).items() if a not in lost})
                assert {at(address).sleep for address in contents} == {AWAKE}
                assert len(error.lost_segments) == len(lost), error
                assert times > 1 or not lost, "it is not tried again"
                assert all(f"kv_cache at 0x{address:x}" in str(error) for address in lost)
                assert not any(is_accessible(address) for address in lost)
                assert allocator.usage()["kv_cache"].asleep_segments == len(lost)
                lost_ever += len(lost)
            allocator.wake_up()
            check_bytes(contents)
            for address, content in caches.items():
                write(address, content)
            if not was_reached:
                break
        assert error is None
        assert position > 2 * devices
        if call == "cuMemcpyHtoDAsync" and times == 8:
            assert lost_ever, "the test does not reach what it is about"

    def test_nothing_to_lend_at_sleep(self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture) -> None:
        contents, _ = self.fill(allocator, cache=False)
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

    def test_a_workspace_is_bounded(self) -> None:
        assert 128 * MIB < USUAL_BENCH_BYTES <= 512 * MIB

    def test_there_are_more_slots_where_there_is_memory(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "most_slots", 5)
        allocator.free(allocator.malloc(PAGE))  # the driver is open
        assert allocator._compressor.on
        enough = workspace_bytes(CuMemAllocator.tuning, 5, CuMemAllocator.tuning.slot_bytes[0])
        for spare_bytes, slots in ((enough, 5), (enough - 1, 2)):
            with allocator._compressor.workspace(0, spare_bytes) as workspace:
                assert (len(workspace._slots), workspace.slot_bytes) == (slots, CuMemAllocator.tuning.slot_bytes[0])

    @pytest.mark.parametrize("free_bytes", BENCH_BYTES)
    def test_room_for_a_workspace(
        self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture, free_bytes: int
    ) -> None:
        contents, _ = self.fill(allocator, cache=False)
        leave_free(free_bytes)
        cycle(allocator, contents)
        assert encodings(allocator, contents) == ["bf16", "bf16"]
        assert _core.memory_info(0)[0] == free_bytes
        assert caplog.records == []

    @pytest.mark.slow
    @pytest.mark.parametrize("cache", [True, False])
    @pytest.mark.parametrize("free_bytes", [0, PAGE])
    def test_wake_with_room_for_the_segments_only(
        self, allocator: CuMemAllocator, cache: bool, free_bytes: int
    ) -> None:
        contents, lent = self.fill(allocator, cache=cache)
        allocator.sleep()
        assert encodings(allocator, contents) == ["bf16", "bf16"]
        sim.configure(device_bytes=sum(segment.bytes for segment in _core.segments()) + free_bytes)
        cleared = sim.stats().calls["cuMemsetD32Async"]
        assert allocator.wake_up().verified_bytes == 6 * PAGE
        assert sim.stats().calls["cuMemsetD32Async"] - cleared == len(lent), "once"
        check_bytes(contents)
        assert sim.stats().live_handles == len(_core.segments())
        assert _core.memory_info(0)[0] == free_bytes
        for address in lent:  # not what was encoded there, which a model might take for numbers
            assert ctypes.string_at(address, self.CACHE_BYTES) == bytes(self.CACHE_BYTES)

    def test_what_is_decoded_in_place_is_pinned_first(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after level 3, for which backups are unpinned. There is no memory for a copy of what is encoded."""
        monkeypatch.setattr(CuMemAllocator.tuning, "table_bytes_per_gib", 2 * MIB)
        contents, _ = self.fill(allocator, cache=False)
        allocator.sleep()
        registered = sim.stats().registered_bytes
        allocator._store.room.unpin()
        assert sim.stats().registered_bytes < registered
        tables_bytes = allocator._store.room.device_bytes_to_pin(_core.segments())
        assert tables_bytes > 0
        sim.configure(device_bytes=sum(segment.bytes for segment in _core.segments()) + tables_bytes)
        allocator.wake_up()
        assert sim.stats().registered_bytes == registered
        check_bytes(contents)

    def test_wake_of_weights_borrows_from_nobody(self, allocator: CuMemAllocator) -> None:
        contents, _ = self.fill(allocator)
        allocator.sleep()
        sim.configure(device_bytes=6 * PAGE)
        allocator.wake_up("weights")
        check_bytes(contents)
        assert {segment.has_memory for segment in _core.segments() if segment.tag == "kv_cache"} == {False}
        sim.configure(device_bytes=DEVICE_BYTES)
        allocator.wake_up()

    def test_lent_memory_is_poisoned(self, make_allocator: MakeAllocator) -> None:
        allocator = make_allocator(compress="auto", poison=True)
        contents = fill(allocator, bf16, nbytes=3 * PAGE, tag="lora")
        (weights,) = fill(allocator, bf16, nbytes=self.CACHE_BYTES)
        leave_free(0)
        allocator.sleep(2)
        assert encodings(allocator, contents) == ["bf16"]
        allocator.wake_up()
        check_bytes(contents)
        assert ctypes.string_at(weights, self.CACHE_BYTES) == b"\xff" * self.CACHE_BYTES

    def test_memory_that_the_driver_kept_is_not_lent(self, allocator: CuMemAllocator) -> None:
        """A sleep that could not be undone: all bytes come back with the next wake, those of `kv_cache` as well."""
        contents, cache = self.fill(allocator)
        fill(allocator, zeros, tag="kv_cache")  # sleeps last
        leave_free(0)
        sim.fail("cuMemUnmap", after=3, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemMap", times=1_000_000, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemUnmap"):
            allocator.sleep()
        sim.reset()
        assert all(segment.has_memory for segment in _core.segments())
        assert at(next(iter(cache))).sleep == DROPPED
        allocator.wake_up()
        check_bytes(contents | cache)

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

    def test_malloc_takes_memory_of_the_codec_that_the_driver_kept(self, allocator: CuMemAllocator) -> None:
        with allocator._compressor.workspace(0, DEVICE_BYTES):
            sim.fail("cuMemRelease", times=1_000_000, error="CUDA_ERROR_UNKNOWN")
        sim.reset()
        free_bytes, _ = _core.memory_info(0)
        allocator.malloc(free_bytes + BENCH_BYTES[0])

    def test_each_device_borrows_from_itself(self, make_allocator: MakeAllocator) -> None:
        allocator = make_allocator(compress="auto")
        sim.configure(devices=2)
        contents, _ = self.fill(allocator)
        contents |= fill(allocator, bf16, nbytes=9 * PAGE, device=1)
        leave_free(0)
        cycle(allocator, contents)
        assert encodings(allocator, contents) == ["bf16", "bf16", None]


@pytest.mark.parametrize("spare_bytes", [DEVICE_BYTES, 0], ids=["with memory", "without"])
def test_slots_have_tables_of_their_own(allocator: CuMemAllocator, spare_bytes: int) -> None:
    """They lie in one block. The simulated driver runs one kernel at a time, so a wake would not notice."""
    fill(allocator, bf16)  # so that the driver is open
    with allocator._compressor.workspace(0, spare_bytes) as workspace:
        heads = [slot._in_block(0, slot._most_rows * (ROW_BYTES + 4)) for slot in workspace._slots]
        assert not any(np.shares_memory(one, other) for one, other in itertools.combinations(heads, 2))
        assert len({slot.table for slot in workspace._slots}) == len(workspace._slots) > 1
        if not spare_bytes:
            assert [slot.table for slot in workspace._slots] == [head.ctypes.data for head in heads]
