"""What operations on little memory cost that does not depend on how little it is: driver calls, streams, threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from contextlib import closing

import numpy as np
import pytest
from support import MIB, PAGE, digest_by_the_kernel, forget_devices, fresh_allocator, threads_of_ours

from cumem_sleep import CuMemAllocator, DriverError, InvalidState, _core, sim
from cumem_sleep.backups.catalogue import Catalogue
from cumem_sleep.core.pinned import pinned_block, pinned_table

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("nothing_left_behind")]

# Which thread-local state a call is made in: they cost nanoseconds, and there are many.
OF_THE_THREAD = ("cuCtx", "cuThread")


def calls_of(operate: Callable[[], object]) -> dict[str, int]:
    """The driver calls that it makes, but for those that concern the thread alone."""
    sim.reset()
    operate()
    made = sim.stats().calls
    return {call: made[call] for call in made if made[call] and not call.startswith(OF_THE_THREAD)}


def streams_in(calls: Mapping[str, int]) -> tuple[int, int]:
    return calls.get("cuStreamCreate", 0), calls.get("cuStreamDestroy", 0)


class Region:
    """A region of some small segments that has slept and woken once."""

    def __init__(self, segments: int, *, backup: bool, device: int = 0) -> None:
        self.allocator = CuMemAllocator.instance or fresh_allocator()
        with self.allocator.regions.use("small", backup=backup):
            self.addresses = [self.allocator.malloc(PAGE, device=device) for _ in range(segments)]
        self.sleep()
        self.wake()

    def sleep(self) -> None:
        self.allocator.regions.sleep("small")

    def wake(self) -> None:
        self.allocator.regions.wake("small")

    def change(self) -> None:
        for address in self.addresses:
            ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 1, 1)

    def free(self) -> None:
        for address in self.addresses:
            self.allocator.free(address)


def test_all_backups_are_looked_through_once_unless_some_were_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region(2, backup=True)
    looked_at: list[int] = []
    prune = Catalogue.prune

    def noted(catalogue: Catalogue) -> None:
        looked_at.append(region.allocator._store.memory.bytes)
        prune(catalogue)

    monkeypatch.setattr(Catalogue, "prune", noted)
    for operate in (region.sleep, region.wake):
        looked_at.clear()
        operate()
        assert looked_at == [2 * PAGE]
    _core.free(region.addresses.pop())  # as by a hook while another operation has the lock
    looked_at.clear()
    region.sleep()
    assert looked_at == [2 * PAGE, PAGE]
    region.wake()


def test_what_drops_everything_backs_nothing_up() -> None:
    region = Region(2, backup=False)
    assert set(region.allocator.regions.sleep("small").phases) == {"quiesce", "release"}
    region.wake()


class TestStreams:
    def test_are_made_by_the_first_operation_only(self) -> None:
        region = Region(4, backup=True)
        for operate in (region.sleep, region.wake):
            assert streams_in(calls_of(operate)) == (0, 0)
        region.change()
        assert streams_in(calls_of(region.sleep)) == (0, 0)
        region.wake()

    def test_that_wakes_are_given_are_no_more_than_there_is_to_copy(self) -> None:
        region = Region(1, backup=True)
        region.sleep()
        forget_devices()
        assert streams_in(calls_of(region.wake)) == (1, 0)

    def test_that_sleeps_are_given_are_no_more_than_there_is_to_copy(self) -> None:
        region = Region(1, backup=True)
        region.change()
        forget_devices()
        assert streams_in(calls_of(region.sleep)) == (1, 0)  # the CPU's digests come before and after
        region.wake()

    def test_go_with_the_last_segment_of_their_device(self) -> None:
        sim.configure(devices=2)
        region, other = Region(2, backup=True), Region(1, backup=True, device=1)
        region.sleep()
        region.wake()
        forget_devices()
        sim.reset()
        with _core.CopyStream(0), _core.CopyStream(0), _core.CopyStream(1):
            pass
        assert streams_in(sim.stats().calls) == (3, 0)
        region.allocator.free(region.addresses[0])
        assert streams_in(sim.stats().calls) == (3, 0)
        region.allocator.free(region.addresses[1])
        assert streams_in(sim.stats().calls) == (3, 2)
        other.free()
        assert streams_in(sim.stats().calls) == (3, 3)

    def test_of_a_device_without_segments_are_not_kept(self) -> None:
        fresh_allocator()._operations.open()
        sim.reset()
        with _core.CopyStream(0):
            pass
        assert streams_in(sim.stats().calls) == (1, 1)

    def test_that_outlive_the_last_segment_are_not_kept(self) -> None:
        region = Region(1, backup=False)
        forget_devices()
        sim.reset()
        with _core.CopyStream(0):
            region.free()
            assert streams_in(sim.stats().calls) == (1, 0)
        assert streams_in(sim.stats().calls) == (1, 1)

    def test_are_kept_by_the_handful(self) -> None:
        region = Region(1, backup=False)
        forget_devices()
        sim.reset()
        streams = [_core.CopyStream(0) for _ in range(20)]
        for stream in streams:
            stream.__exit__()
        made, destroyed = streams_in(sim.stats().calls)
        assert made == 20
        assert made - destroyed == 8
        region.free()
        assert streams_in(sim.stats().calls) == (20, 20)

    def test_that_could_not_be_waited_for_are_not_used_again(self) -> None:
        region = Region(1, backup=False)
        forget_devices()
        sim.reset()
        sim.fail("cuStreamSynchronize", error="CUDA_ERROR_UNKNOWN", times=2)
        with _core.CopyStream(0):
            pass
        assert streams_in(sim.stats().calls) == (1, 1)
        region.free()

    def test_are_never_used_by_two_at_once(self) -> None:
        region = Region(1, backup=False)
        with _core.CopyStream(0), _core.CopyStream(0):
            pass
        with _core.CopyStream(0) as first, _core.CopyStream(0) as second, _core.CopyStream(0) as third:
            assert len({first.handle, second.handle, third.handle}) == 3
            first.__exit__()
            first.__exit__()  # closing again gives it to nobody a second time
            with _core.CopyStream(0) as fourth, _core.CopyStream(0) as fifth:
                assert len({second.handle, third.handle, fourth.handle, fifth.handle}) == 4
        region.free()


def test_what_fits_into_one_batch_is_mapped_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region(4, backup=True)
    at_work: list[str] = []
    to_device = _core.CopyStream.to_device

    def noted(stream: _core.CopyStream, address: int, block: _core.HostBlock, offset: int, nbytes: int) -> None:
        at_work.extend(threads_of_ours())
        to_device(stream, address, block, offset, nbytes)

    monkeypatch.setattr(_core.CopyStream, "to_device", noted)
    region.sleep()
    region.wake()
    assert set(at_work) == {"cumem-operation"}
    monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", PAGE)
    region.sleep()
    region.wake()
    assert set(at_work) == {"cumem-operation", "cumem-ahead"}


def test_while_driver_calls_are_suspended_no_stream_is_taken() -> None:
    region = Region(1, backup=False)
    forget_devices()
    with _core.CopyStream(0):
        pass
    assert _core.suspend_driver_calls(1.0)
    try:
        with pytest.raises(InvalidState, match="checkpointed"):
            _core.CopyStream(0)
    finally:
        _core.resume_driver_calls()
    sim.reset()
    with _core.CopyStream(0):
        pass
    assert streams_in(sim.stats().calls) == (0, 0)
    region.free()


class TestTables:
    def test_small_ones_stay_pinned_until_the_last_segment_of_their_device_is_freed(self) -> None:
        region = Region(1, backup=False)
        before = sim.stats().registered_bytes
        address = (table := pinned_table(1000, 0)).address
        assert (table.bytes, table.pinned) == (1000, True)
        np.frombuffer(memoryview(table), np.uint8)[:] = 7
        table.close()
        assert not table.pinned
        again = pinned_table(4096, 0)
        assert (again.address, again.bytes, again.pinned) == (address, 4096, True)
        with closing(pinned_table(1000, 0)) as other:  # two at once are never the same
            assert other.address != address
        again.close()
        again.close()
        assert before < sim.stats().registered_bytes < before + MIB
        region.free()
        assert sim.stats().registered_bytes == before

    def test_large_ones_do_not(self) -> None:
        region = Region(1, backup=False)
        before = sim.stats().registered_bytes
        pinned_table(MIB, 0).close()
        assert sim.stats().registered_bytes == before
        region.free()

    def test_of_a_device_without_segments_do_not(self) -> None:
        fresh_allocator()._operations.open()
        pinned_table(1000, 0).close()
        assert sim.stats().registered_bytes == 0

    def test_that_outlive_the_last_segment_do_not(self) -> None:
        region = Region(1, backup=False)
        table = pinned_table(1000, 0)
        region.free()
        table.close()
        assert sim.stats().registered_bytes == 0

    def test_are_given_back_later_if_the_driver_refuses(self) -> None:
        region = Region(1, backup=False)
        pinned_table(1000, 0).close()
        sim.fail("cuMemHostUnregister", error="CUDA_ERROR_UNKNOWN", times=2)
        region.free()
        assert _core.reclaim() == 0
        assert sim.stats().registered_bytes == 0

    def test_that_could_not_be_pinned_are_pinned_by_the_next(self) -> None:
        region = Region(1, backup=False)
        sim.fail("cuMemHostRegister", error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemHostRegister"):
            pinned_table(1000, 0)
        assert sim.stats().registered_bytes == 0
        with closing(pinned_table(1000, 0)) as table:
            assert table.pinned
        region.free()


def test_nothing_stays_however_frees_and_closes_meet() -> None:
    """The last segment may be freed at any moment of a close."""
    allocator = fresh_allocator()
    allocator._operations.open()
    forget_devices()
    sim.reset()
    over = threading.Event()

    def use() -> None:
        while not over.is_set():
            with _core.CopyStream(0), closing(pinned_table(1000, 0)), _core.CopyStream(0):
                pass

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        allocator.free(allocator.malloc(PAGE))
    over.set()
    for thread in threads:
        thread.join()
    made, destroyed = streams_in(sim.stats().calls)
    assert made == destroyed > 0
    assert sim.stats().registered_bytes == 0


class TestCalls:
    def test_of_backed_up_memory_where_the_gpu_digests(self) -> None:
        """The table of the digests stays registered, and their stream is kept."""
        region = Region(1, backup=True)
        digest_by_the_kernel(region.allocator)
        for call in (region.sleep, region.wake, region.sleep):
            call()
        waking = calls_of(region.wake)
        clean = calls_of(region.sleep)
        region.wake()
        region.change()
        changed = calls_of(region.sleep)
        for calls in (waking, clean, changed):
            calls.pop("cuStreamSynchronize", None)
            calls.pop("cuDeviceGetCount", None)
        assert waking == {
            "cuMemCreate": 1,
            "cuMemMap": 1,
            "cuMemSetAccess": 1,
            "cuMemGetInfo": 1,
            "cuMemcpyHtoDAsync": 1,
            "cuLaunchKernel": 1,
        }
        assert clean == {"cuLaunchKernel": 1, "cuMemUnmap": 1, "cuMemRelease": 1, "cuMemGetInfo": 2}
        assert changed == {**clean, "cuLaunchKernel": 2, "cuMemcpyDtoHAsync": 1}

    @pytest.mark.parametrize("segments", [1, 4])
    def test_of_dropped_memory(self, segments: int) -> None:
        """Its own steps and looks at the device, two for a sleep: nothing else."""
        region = Region(segments, backup=False)
        sleeping, waking = calls_of(region.sleep), calls_of(region.wake)
        sleeping.pop("cuDeviceGetCount")
        assert sleeping == {"cuMemUnmap": segments, "cuMemRelease": segments, "cuMemGetInfo": 2}
        assert waking == {
            "cuMemCreate": segments,
            "cuMemMap": segments,
            "cuMemSetAccess": segments,
            "cuMemGetInfo": 1,
        }

    def test_of_a_wake(self) -> None:
        """What the digest of the CPU needs comes on top: one copy, two waits, and a block of its own."""
        region = Region(1, backup=True)
        region.sleep()
        calls = calls_of(region.wake)
        assert calls.pop("cuStreamSynchronize") <= 4
        assert calls == {
            "cuMemCreate": 1,
            "cuMemMap": 1,
            "cuMemSetAccess": 1,
            "cuMemGetInfo": 1,
            "cuMemcpyHtoDAsync": 1,
            "cuMemcpyDtoHAsync": 1,
            "cuMemHostRegister": 1,
            "cuMemHostUnregister": 1,
        }

    def test_for_the_numa_node_are_made_once(self) -> None:
        region = Region(1, backup=False)
        pinned_block(MIB, 0).close()
        calls = calls_of(lambda: pinned_block(MIB, 0).close())
        assert calls == {"cuMemHostRegister": 1, "cuMemHostUnregister": 1}
        region.free()
