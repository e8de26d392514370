"""Compressed backups made in the background."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from compression import (
    KINDS,
    Contents,
    Kind,
    MakeAllocator,
    QuickCodec,
    bf16,
    check_bytes,
    check_host_bytes,
    encodings,
    failing,
    fill,
    leave_free,
    noise,
    small_slots,  # noqa: F401  (autouse)
    write,
    zeros,
)
from preparing import Steps, finished
from support import (
    PAGE,
    Cuda,
    digest_by_the_kernel,
    free_everything,
    host_bytes_of,
    in_thread,
)

from cumem_sleep import CuMemAllocator, DriverError, _core, sim
from cumem_sleep.codec.chunks import EncodedRun
from cumem_sleep.codec.workspace import Workspace
from cumem_sleep.core.extents import LaneGroup

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

        def noted(workspace: Workspace, run: EncodedRun, lane_group: LaneGroup) -> int:
            nonlocal largest
            largest = max(largest, run.bytes)
            return decode_again(workspace, run, lane_group)

        with monkeypatch.context() as patch:
            patch.setattr(Workspace, "decode_again", noted)
            assert finished(allocator.prepare()).error is None
        assert largest > piece
        assert encodings(allocator, [address]) == ["bf16"]
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes({address: bytes(content)})

    @pytest.mark.parametrize("ends", ["", "free", "failing"])
    def test_leaves_a_capture_valid(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, ends: str
    ) -> None:
        """Of another thread, all the way through, of the mode that forbids most."""
        contents = fill(allocator, bf16, noise, bf16)
        cuda = Cuda()
        cuda.enter()
        stream = cuda.stream()
        steps = Steps(monkeypatch)
        if ends == "free":
            steps._act, steps._at = (lambda: allocator.free(next(iter(contents)))), 1
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
            preparation = in_thread(lambda: steps.prepare(allocator))
            assert cuda.capture_is_valid(stream)
        finally:
            result = cuda.end_capture(stream)
            cuda.call("cuStreamDestroy_v2", stream)
            cuda.leave()
        assert (result, preparation.error) == (0, None)
        assert allocator.sleep().copied_bytes == 0

    def test_a_plan_that_fails_leaves_nothing_at_work(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When its turn ends, the segment may go."""
        contents = fill(allocator, bf16, bf16, nbytes=3 * PAGE)
        monkeypatch.setattr(CuMemAllocator.tuning, "few_rows", 1)
        failing("count", monkeypatch, after=1)
        handles: list[int] = []
        Steps(monkeypatch, lambda: handles.append(sim.stats().live_handles)).prepare(allocator)
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
            if allocator._store.memory.bytes != sum(host_bytes_of(allocator, segment) for segment in ready):
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
        """Before each of its steps, the first of which plans."""
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
                    assert allocator._store.memory.bytes == 0
                else:
                    preparation = Steps(patch, change, turn).prepare(allocator)
            assert preparation.error is None
            assert sim.stats().live_handles in (0, len(contents)), "its workspace is left"
            allocator.sleep()
            check_host_bytes(allocator)
            allocator.wake_up()
            check_bytes(contents)

    def test_on_a_full_device(self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture) -> None:
        """It stores them uncompressed."""
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
