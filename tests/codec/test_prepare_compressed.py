"""Compressed backups made in the background."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from compression import (
    BENCH_BYTES,
    COMPRESSED_BYTES,
    KINDS,
    Contents,
    Kind,
    MakeAllocator,
    QuickCodec,
    at,
    bf16,
    check_bytes,
    check_host_bytes,
    cycle,
    encodings,
    failing,
    fill,
    leave_free,
    noise,
    small_slots,  # noqa: F401  (autouse)
    some_noise,
    write,
    zeros,
)
from preparing import Turns, finished, on_preparing_thread
from support import (
    DEVICE_BYTES,
    PAGE,
    Cuda,
    assert_thread_ends_in_order,
    digest_by_the_kernel,
    free_everything,
    host_bytes_of,
    in_thread,
    run_script,
)

from cumem_sleep import CuMemAllocator, DriverError, InvalidState, OutOfHostMemory, _core, sim
from cumem_sleep.codec.chunks import EncodedRun
from cumem_sleep.codec.compressor import Compressor
from cumem_sleep.codec.kernels import SimulatedKernels
from cumem_sleep.codec.workspace import Workspace
from cumem_sleep.core.extents import Transfers

pytestmark = pytest.mark.sim


class TestPrepare:
    @pytest.mark.slow
    @pytest.mark.parametrize("verify", ["off", "wake"])
    def test_the_next_sleep_copies_nothing(self, make_allocator: MakeAllocator, verify: str) -> None:
        allocator = make_allocator(compress="auto", verify=verify)
        contents = fill(allocator, *KINDS)
        fill(allocator, zeros, tag="kv_cache")
        preparation = finished(allocator.prepare())
        assert preparation.error is None
        assert preparation.wanted_bytes == len(KINDS) * 2 * PAGE
        assert allocator.usage()["weights"].backed_up_bytes == len(KINDS) * 2 * PAGE
        assert sim.stats().live_handles == len(KINDS) + 1
        check_host_bytes(allocator)
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (0, len(KINDS) * 2 * PAGE)
        assert encodings(allocator, contents) == ["bf16", "fp16", "e4m3", "fp32", None, "bf16"]
        allocator.wake_up()
        check_bytes(contents)

    def test_where_a_kernel_digests(self, make_allocator: MakeAllocator) -> None:
        """What was decoded again, part by part, and the segment have the same digest."""
        allocator = make_allocator(compress="auto")
        digest_by_the_kernel(allocator)
        contents = fill(allocator, bf16, noise)
        assert finished(allocator.prepare()).error is None
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (0, 4 * PAGE)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.parametrize("kind", [bf16, noise, zeros])
    def test_again_after_a_change(self, allocator: CuMemAllocator, kind: Kind) -> None:
        contents = fill(allocator, bf16, bf16)
        finished(allocator.prepare())
        address = list(contents)[1]
        contents[address] = kind(2 * PAGE, np.random.default_rng(3))
        write(address, contents[address])
        assert finished(allocator.prepare()).error is None
        check_host_bytes(allocator)
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.parametrize("place", [0, *(pytest.param(place, marks=pytest.mark.slow) for place in (1, 2))])
    def test_a_piece_that_is_larger_encoded_than_a_slot(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, place: int
    ) -> None:
        """Its content is read back in as many batches as it takes, and not beyond the slot."""
        piece = 2 * PAGE
        monkeypatch.setattr(CuMemAllocator.tuning, "slot_bytes", (piece, piece))
        monkeypatch.setattr(CuMemAllocator.tuning, "prepare_piece_bytes", piece)
        monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", 8 * PAGE)
        content = bytearray(bf16(8 * PAGE, np.random.default_rng(5)))
        content[place * piece : (place + 1) * piece] = noise(piece, np.random.default_rng(6))
        address = allocator.malloc(8 * PAGE, "weights")
        write(address, bytes(content))
        largest = 0
        decode_again = Workspace.decode_again

        def noted(workspace: Workspace, run: EncodedRun, transfers: Transfers) -> int:
            nonlocal largest
            largest = max(largest, run.bytes)
            return decode_again(workspace, run, transfers)

        with monkeypatch.context() as patch:
            patch.setattr(Workspace, "decode_again", noted)
            assert finished(allocator.prepare()).error is None
        assert largest > piece
        assert encodings(allocator, [address]) == ["bf16"]
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes({address: bytes(content)})

    def test_the_caller_counts_nothing(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor waits until it was: it may be who runs the model."""
        contents = fill(allocator, bf16, some_noise)
        returned = threading.Event()
        seen: list[str] = []

        def noted(work: Callable[..., Any], name: str) -> Callable[..., Any]:
            def wait_and_work(*arguments: Any, **options: Any) -> Any:
                assert on_preparing_thread()
                assert returned.wait(30)
                seen.append(name)
                return work(*arguments, **options)

            return wait_and_work

        for place, name in [(Compressor, "workspace"), (Workspace, "plan"), (SimulatedKernels, "count")]:
            monkeypatch.setattr(place, name, noted(getattr(place, name), name))
        preparation = allocator.prepare()
        returned.set()
        assert finished(preparation).error is None
        assert seen == ["workspace"] + 2 * ["plan", "count"]
        assert encodings(allocator, contents) == ["bf16", "bf16"]

    def test_launches_are_narrow(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        contents = fill(allocator, bf16, nbytes=5 * PAGE)
        monkeypatch.setattr(CuMemAllocator.tuning, "few_rows", 2)
        counted: list[int] = []
        count = SimulatedKernels.count

        def noted(*arguments: Any) -> None:
            counted.append(arguments[-1])
            count(*arguments)

        monkeypatch.setattr(SimulatedKernels, "count", noted)
        assert finished(allocator.prepare()).error is None
        assert counted == [2, 2, 1]
        assert encodings(allocator, contents) == ["bf16"]
        cycle(allocator, contents)
        allocator.release_backups()
        counted.clear()
        cycle(allocator, contents)
        assert counted == [5], "no model runs beside a sleep"

    @pytest.mark.parametrize("ends", ["", "free", "failing"])
    def test_leaves_a_capture_valid(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, ends: str
    ) -> None:
        """Of another thread, all the way through, of the mode that forbids most."""
        contents = fill(allocator, bf16, noise, bf16)
        cuda = Cuda()
        cuda.enter()
        stream = cuda.stream()
        turns = Turns(monkeypatch)
        if ends == "free":
            turns._act, turns._at = (lambda: allocator.free(next(iter(contents)))), 1
        elif ends == "failing":
            failing("count", monkeypatch, after=1)
        plan = Workspace.plan

        def look_and_plan(*arguments: Any) -> Any:
            mode = ctypes.c_int(Cuda.RELAXED)
            cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            assert mode.value == Cuda.RELAXED, "PyTorch and Triton make calls that would end the capture"
            return plan(*arguments)

        monkeypatch.setattr(Workspace, "plan", look_and_plan)
        cuda.call("cuStreamBeginCapture_v2", stream, Cuda.GLOBAL)
        try:
            preparation = in_thread(lambda: turns.prepare(allocator))
            assert cuda.capture_is_valid(stream)
        finally:
            result = cuda.end_capture(stream)
            cuda.call("cuStreamDestroy_v2", stream)
            cuda.leave()
        assert (result, preparation.error) == (0, None)
        assert allocator.sleep().copied_bytes == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_free_during_the_plan(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
        """What is counted stays until it was."""
        contents = fill(allocator, bf16, bf16, some_noise)
        freed = list(contents)[place]
        del contents[freed]
        count = SimulatedKernels.count

        def free_and_count(*arguments: Any) -> None:
            with suppress(InvalidState):
                in_thread(lambda: allocator.free(freed))
            count(*arguments)

        monkeypatch.setattr(SimulatedKernels, "count", free_and_count)
        assert finished(allocator.prepare()).error is None
        assert {segment.address for segment in _core.segments()} == set(contents)
        check_host_bytes(allocator)
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(contents)

    def test_a_plan_that_fails_leaves_nothing_at_work(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When its turn ends, the segment may go."""
        contents = fill(allocator, bf16, bf16, nbytes=3 * PAGE)
        monkeypatch.setattr(CuMemAllocator.tuning, "few_rows", 1)
        failing("count", monkeypatch, after=1)
        handles: list[int] = []
        Turns(monkeypatch, lambda: handles.append(sim.stats().live_handles)).prepare(allocator)
        assert handles == [len(contents)] * len(handles)
        assert encodings(allocator, contents) == [None, None]

    @pytest.mark.slow
    def test_every_driver_call_may_fail_once(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        QuickCodec(monkeypatch)
        contents = fill(allocator, bf16)
        sim.reset()
        finished(allocator.prepare())
        around = ("cuCtx", "cuDevice", "cuThread")  # as of any operation
        calls = {call: count for call, count in sim.stats().calls.items() if not call.startswith(around)}
        allocator.release_backups()
        problems = []
        for call, position in [(call, position) for call, count in calls.items() for position in range(count)]:
            sim.reset()
            sim.fail(call, position, "CUDA_ERROR_UNKNOWN")
            with suppress(DriverError):  # of what the caller asks
                finished(allocator.prepare())
            sim.reset()
            _core.synchronize(0)  # fails if work on the device found its memory gone
            ready = [s for s in _core.segments() if allocator._store.catalogue.get(s) is not None]
            if allocator._store.room.bytes != sum(host_bytes_of(allocator, segment) for segment in ready):
                problems.append(f"{call} number {position + 1}: half a backup is left")
            if allocator.sleep().clean_bytes != 2 * PAGE * len(ready):
                problems.append(f"{call} number {position + 1}: a backup is not of the segment's bytes")
            allocator.wake_up()
            allocator.release_backups()
            _core.reclaim()
            if (stats := sim.stats()).live_handles != len(contents) or stats.registered_bytes:
                problems.append(f"{call} number {position + 1}: memory is left")
        check_bytes(contents)
        assert not problems, f"{len(problems)} of {sum(calls.values())}:\n" + "\n".join(problems[:20])

    @pytest.mark.slow
    @pytest.mark.parametrize("act", ["noise", "flip", "free", "sleep", "sleep and wake", "release", "close"])
    def test_beside(self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
        """Before each of its turns, the first of which plans."""
        for turn in range(1 if act in ("release", "close") else 6):
            free_everything()
            allocator = make_allocator(compress="auto")
            contents = fill(allocator, bf16, bf16)
            first = next(iter(contents))

            def change(
                act: str = act, first: int = first, contents: Contents = contents, allocator: CuMemAllocator = allocator
            ) -> None:
                if act == "noise":
                    contents[first] = contents[first][:PAGE] + noise(PAGE, np.random.default_rng(5))
                    write(first, contents[first])
                elif act == "flip":
                    contents[first] = bytes([contents[first][0] ^ 1]) + contents[first][1:]
                    write(first, contents[first])
                elif act == "free":
                    allocator.free(first)
                    del contents[first]
                elif act.startswith("sleep"):
                    allocator.sleep()
                    if act == "sleep and wake":
                        allocator.wake_up()

            with monkeypatch.context() as patch:
                if act in ("release", "close"):  # they wait for the thread
                    preparation = allocator.prepare()
                    allocator.release_backups() if act == "release" else allocator.close()
                    assert not preparation.running
                    assert allocator._store.room.bytes == 0
                else:
                    preparation = Turns(patch, change, turn).prepare(allocator)
            assert preparation.error is None
            assert sim.stats().live_handles in (0, len(contents)), "its workspace is left"
            allocator.sleep()
            check_host_bytes(allocator)
            allocator.wake_up()
            check_bytes(contents)

    def test_on_a_full_device(self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture) -> None:
        """Nothing can be lent while the model runs."""
        contents = fill(allocator, bf16, bf16)
        fill(allocator, zeros, nbytes=8 * PAGE, tag="kv_cache")
        leave_free(0)
        assert finished(allocator.prepare()).error is None
        assert allocator.sleep().copied_bytes == 0
        assert encodings(allocator, contents) == [None, None]
        assert len(caplog.records) == 1
        assert "no memory left for the codec" in caplog.text
        allocator.wake_up()
        check_bytes(contents)

    def test_on_a_full_device_with_a_budget_for_compressed(self, make_allocator: MakeAllocator) -> None:
        """What a sleep can do, which is lent memory, no preparation makes impossible."""
        allocator = make_allocator(compress="auto", host_budget_bytes=2 * COMPRESSED_BYTES)
        contents = fill(allocator, bf16, bf16)
        fill(allocator, zeros, nbytes=8 * PAGE, tag="kv_cache")
        leave_free(0)
        error = finished(allocator.prepare()).error
        assert isinstance(error, OutOfHostMemory)
        assert (error.needed_bytes, error.limit) == (4 * PAGE, "budget")
        assert allocator._store.room.bytes == 0
        cycle(allocator, contents)
        assert encodings(allocator, contents) == ["bf16", "bf16"]

    @pytest.mark.slow
    def test_on_a_full_device_compressed_backups_stay(self, make_allocator: MakeAllocator) -> None:
        """As they are, they would take the room in which the sleep compresses all."""
        allocator = make_allocator(compress="auto", host_budget_bytes=int(3.5 * 2 * PAGE))
        contents = fill(allocator, *[bf16] * 4)
        fill(allocator, zeros, nbytes=8 * PAGE, tag="kv_cache")
        cycle(allocator, contents)
        held = allocator._store.room.bytes
        random = np.random.default_rng(5)
        for address in contents:
            contents[address] = bf16(2 * PAGE, random)
            write(address, contents[address])
        leave_free(0)
        assert finished(allocator.prepare()).error is None
        assert allocator._store.room.bytes == held
        allocator.sleep()
        assert allocator._store.room.bytes == held
        allocator.wake_up()
        check_bytes(contents)

    def test_takes_a_small_workspace(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        contents = fill(allocator, bf16)
        sizes: list[int] = []

        class Scratch(_core.Scratch):
            def __init__(self, device: int, nbytes: int) -> None:
                sizes.append(nbytes)
                super().__init__(device, nbytes)

        monkeypatch.setattr(_core, "Scratch", Scratch)
        assert finished(allocator.prepare()).error is None
        assert set(sizes) == {BENCH_BYTES[1]}
        allocator.release_backups()
        leave_free(BENCH_BYTES[1])
        assert finished(allocator.prepare()).error is None
        assert encodings(allocator, contents) == ["bf16"]

    def test_the_device_is_full_by_when_it_begins_anew(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As it does after a segment that was written to meanwhile."""
        contents = fill(allocator, bf16, bf16)
        first, second = contents
        contents[first] = noise(2 * PAGE, np.random.default_rng(5))

        def write_and_fill() -> None:
            write(first, contents[first])
            sim.configure(device_bytes=2 * 2 * PAGE)

        assert Turns(monkeypatch, write_and_fill, 1).prepare(allocator).error is None
        assert allocator._store.catalogue.get(at(first)) is None
        assert encodings(allocator, [second]) == [None]
        sim.configure(device_bytes=DEVICE_BYTES)
        cycle(allocator, contents)

    @pytest.mark.slow
    def test_exit_while_it_counts(self) -> None:
        assert_thread_ends_in_order(
            """
            import threading, time
            import numpy as np
            from cumem_sleep.codec import kernels as coders
            from cumem_sleep.codec import workspace as compress

            reset_simulation()
            allocator, memory = fresh_allocator(compress="auto"), Memory()
            for _ in range(2):
                address = allocator.malloc(2 * PAGE, "weights")
                memory.write(address, bf16_weights(2 * PAGE, np.random.default_rng(0)))
            memory.close()
            counting, count = threading.Event(), coders.SimulatedKernels.count

            def count_slowly(*arguments):
                counting.set()
                time.sleep(0.2)
                count(*arguments)

            coders.SimulatedKernels.count = count_slowly
            preparation = allocator.prepare()
            assert counting.wait(30)
            """,
            thread="preparation._worker",
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("call", ["cuMemHostRegister"])
    def test_no_copy_is_in_flight_after_a_failure(self, call: str) -> None:
        """Two chunks in a block each: the copy of the first goes on while the next step fails."""
        process = run_script(
            f"""
            import numpy as np
            from cumem_sleep.codec import kernels as coders
            from cumem_sleep.codec import workspace as compress

            reset_simulation()
            CuMemAllocator.tuning.slab_bytes = PAGE
            allocator = fresh_allocator(compress="auto")
            address = allocator.malloc(2 * PAGE, "weights")
            memory = Memory()
            memory.write(address, bf16_weights(2 * PAGE, np.random.default_rng(0)))
            memory.close()
            encode, failures = coders.SimulatedKernels.encode, 0

            def encode_and_fail(*arguments):
                encode(*arguments)
                sim.fail({call!r}, position, "CUDA_ERROR_UNKNOWN")

            coders.SimulatedKernels.encode = encode_and_fail
            for position in range(4):
                preparation = allocator.prepare()
                assert preparation.wait(30)
                sim.reset()
                _core.synchronize(0)  # fails if work on the device found its memory gone
                failures += preparation.error is not None
                allocator.release_backups()
            assert failures
            free_everything()
            """,
            CUMEM_SLEEP_SIM_COPY_DELAY_US="20000",
        )
        assert process.returncode == 0, process.stderr
