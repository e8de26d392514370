"""Compressed backups hold the same bytes, in less host memory."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from compression import (
    BENCH_BYTES,
    KINDS,
    Contents,
    MakeAllocator,
    bf16,
    check_bytes,
    check_host_bytes,
    cycle,
    encodings,
    fill,
    fp16,
    leave_free,
    noise,
    small_slots,  # noqa: F401  (autouse)
    some_noise,
    states,
    write,
    zeros,
)
from support import AWAKE, BACKED_UP, MIB, PAGE, patch_map

from cumem_sleep import CuMemAllocator, DriverError, _core, sim
from cumem_sleep.codec.decoding import Decoding
from cumem_sleep.codec.exponent import ExponentLayout
from cumem_sleep.codec.kernels import SimulatedKernels
from cumem_sleep.core.copy_chooser import BestRate, CopyChoice, CopyChooser

pytestmark = pytest.mark.sim


class TestRoundTrips:
    @pytest.mark.slow
    @pytest.mark.parametrize(("devices", "slab_bytes"), [(1, 128 * MIB), (2, 2 * MIB)])
    def test_of_all_kinds_at_once(
        self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch, devices: int, slab_bytes: int
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", slab_bytes)
        allocator = make_allocator(compress="auto")
        sim.configure(devices=devices)
        contents: Contents = {}
        for device in range(devices):
            contents |= fill(allocator, *KINDS, nbytes=3 * PAGE, device=device)
            fill(allocator, zeros, tag="kv_cache", device=device)
        for turn in range(3):
            report = allocator.sleep()
            assert report.copied_bytes == (len(contents) * 3 * PAGE if turn != 1 else 0)
            assert report.freed_bytes == len(contents) * 3 * PAGE + devices * 2 * PAGE
            assert encodings(allocator, contents) == ["bf16", "fp16", "e4m3", "fp32", None, "bf16"] * devices
            check_host_bytes(allocator)
            assert sim.stats().live_handles == 0
            assert allocator.wake_up().verified_bytes == report.copied_bytes + report.clean_bytes
            check_bytes(contents)
            assert sim.stats().live_handles == len(contents) + devices
            if turn == 1:
                for number, (address, content) in enumerate(contents.items()):
                    contents[address] = content[:number] + b"\x01" + content[number + 1 : -1] + b"\x02"
                    write(address, contents[address])

    @pytest.mark.parametrize(
        "settings", [{"verify": "off"}, {"retain_backups": False}, {"verify": "off", "retain_backups": False}], ids=str
    )
    def test_settings(self, make_allocator: MakeAllocator, settings: dict[str, object]) -> None:
        allocator = make_allocator(compress="auto", **settings)
        contents = fill(allocator, bf16, noise, some_noise)
        for turn in range(2):
            report = allocator.sleep()
            retained = settings.get("retain_backups", True)
            assert report.copied_bytes == (0 if turn and retained else 3 * 2 * PAGE)
            assert encodings(allocator, contents) == ["bf16", None, "bf16"]
            check_host_bytes(allocator)
            allocator.wake_up()
            check_bytes(contents)
            assert (allocator._store.memory.bytes > 0) is retained

    def test_in_parts(self, allocator: CuMemAllocator) -> None:
        contents = fill(allocator, bf16, noise) | fill(allocator, some_noise, tag="lora")
        cache = fill(allocator, bf16, tag="kv_cache")
        allocator.sleep(offload_tags=["weights", "lora", "kv_cache"])
        allocator.wake_up("weights")
        assert {segment.tag: segment.sleep for segment in _core.segments()} == {
            "weights": AWAKE,
            "lora": AWAKE,
            "kv_cache": BACKED_UP,
        }
        check_bytes(contents)
        allocator.wake_up()
        check_bytes(contents | cache)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("slots", "tight", "is_unpinned"),
        [(2, False, False), (2, True, False), (4, False, False), (4, False, True)],
    )
    def test_wake_by_the_copy_kernel(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, slots: int, tight: bool, is_unpinned: bool
    ) -> None:
        """By turns with the copy engine, and alone where its time is to tell the rate; also after level 3."""
        for name in ("slots", "most_slots"):
            monkeypatch.setattr(CuMemAllocator.tuning, name, slots)
        monkeypatch.setattr(CuMemAllocator.tuning, "slot_bytes", (8 * MIB, 4 * MIB))
        monkeypatch.setattr(CuMemAllocator.tuning, "worth_choosing_bytes", 0)
        monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", 3 * MIB)
        started: list[int] = []

        copy = _core.CopyStream.to_device_by_kernel

        def by_kernel(stream: _core.CopyStream, *arguments: Any) -> None:
            assert arguments[3] % 16 == 0, "the engine copies the rest"
            started.append(arguments[3])
            copy(stream, *arguments)

        took: list[tuple[int, float]] = []
        recorded: Counter[CopyChooser] = Counter()

        def next_choice(pace: CopyChooser) -> CopyChoice:
            number = recorded[pace]
            return CopyChoice(by_engine=number % 3 == 0, alone=number % 2 == 0)

        def record(pace: CopyChooser, nbytes: int, seconds: float) -> None:
            recorded[pace] += 1
            took.append((nbytes, seconds))

        monkeypatch.setattr(_core.CopyStream, "to_device_by_kernel", by_kernel)
        monkeypatch.setattr(CopyChooser, "next", next_choice)
        monkeypatch.setattr(CopyChooser, "record", record)
        allocator._paces.best_rates[0] = BestRate()
        contents = fill(allocator, *KINDS, nbytes=12 * PAGE)
        contents |= fill(allocator, bf16, fp16, nbytes=PAGE)
        allocator.sleep()
        if is_unpinned:
            allocator._store.memory.unpin()
        if tight:
            leave_free(sum(map(len, contents.values())) + BENCH_BYTES[0])
        took.clear()
        allocator.wake_up()
        check_bytes(contents)
        assert len(started) >= 6
        encoded = sum(e.bytes for s in _core.segments() if (e := allocator._store.catalogue.encoding_of(s)))
        # Of the 24 MiB that are stored as they are: a batch that is not full tells nothing where nothing follows it.
        assert sum(nbytes for nbytes, _ in took) == encoded + 16 * MIB
        assert all(seconds > 0 for _, seconds in took)

    @pytest.mark.slow
    def test_copies_by_the_kernel_end_before_the_memory_that_they_fill_goes(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("slots", "most_slots"):
            monkeypatch.setattr(CuMemAllocator.tuning, name, 4)
        monkeypatch.setattr(CuMemAllocator.tuning, "worth_choosing_bytes", 0)
        in_flight: set[int] = set()  # streams
        at_frees: list[set[int]] = []
        copy, synchronize = _core.CopyStream.to_device_by_kernel, _core.CopyStream.synchronize
        leave, free = _core.CopyStream.__exit__, _core.Scratch.close

        def by_kernel(stream: _core.CopyStream, *arguments: Any) -> None:
            in_flight.add(stream.handle)
            copy(stream, *arguments)

        def waited(stream: _core.CopyStream) -> None:
            synchronize(stream)
            in_flight.discard(stream.handle)

        def left(stream: _core.CopyStream, *exception: object) -> None:
            in_flight.discard(stream.handle)
            leave(stream, *exception)

        def freed(memory: _core.Scratch) -> None:
            at_frees.append({*in_flight})
            free(memory)

        monkeypatch.setattr(_core.CopyStream, "to_device_by_kernel", by_kernel)
        monkeypatch.setattr(_core.CopyStream, "synchronize", waited)
        monkeypatch.setattr(_core.CopyStream, "__exit__", left)
        monkeypatch.setattr(_core.Scratch, "close", freed)
        monkeypatch.setattr(CopyChooser, "next", lambda _: CopyChoice(by_engine=False, alone=False))
        monkeypatch.setattr(CopyChooser, "record", lambda *_: None)
        allocator._paces.best_rates[0] = BestRate()
        contents = fill(allocator, *[bf16] * 6, nbytes=4 * PAGE)
        allocator.sleep()
        sim.fail("cuMemCreate", after=4, error="CUDA_ERROR_UNKNOWN", times=100)
        with pytest.raises(DriverError, match="cuMemCreate"):
            allocator.wake_up()
        sim.reset()
        assert at_frees
        assert not any(at_frees)
        assert BACKED_UP in states()
        allocator.wake_up()
        check_bytes(contents)

    def test_off_compresses_nothing(self, make_allocator: MakeAllocator) -> None:
        allocator = make_allocator(compress="off")
        contents = fill(allocator, bf16)
        cycle(allocator, contents)
        assert encodings(allocator, contents) == [None]

    @pytest.mark.slow
    @pytest.mark.parametrize("slots", [2, 4])
    def test_nothing_is_decoded_to_what_is_not_mapped_yet(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, slots: int
    ) -> None:
        """But copies to slots, all but two of them, have begun by then."""
        for name in ("slots", "most_slots"):
            monkeypatch.setattr(CuMemAllocator.tuning, name, slots)
        contents = fill(allocator, bf16, bf16, nbytes=8 * PAGE)
        allocator.sleep()
        decode, map_segment, copy = SimulatedKernels.decode, _core.Segment.map, Decoding._copy
        events: list[str] = []

        def look_and_decode(kernels: SimulatedKernels, layout: ExponentLayout, *more: int) -> None:
            for _, _, target, _ in kernels._rows(layout, *more):
                assert any(s.address <= target < s.address + s.bytes and s.has_memory for s in _core.segments())
            decode(kernels, layout, *more)
            events.append("decode")

        def map_slowly(segment: _core.Segment) -> None:
            time.sleep(0.05)
            map_segment(segment)

        def note_and_copy(*arguments: Any) -> None:
            events.append("copy")
            copy(*arguments)

        monkeypatch.setattr(SimulatedKernels, "decode", look_and_decode)
        patch_map(monkeypatch, map_slowly)
        monkeypatch.setattr(Decoding, "_copy", note_and_copy)
        allocator.wake_up()
        check_bytes(contents)
        assert events.index("decode") == slots - 1
        assert events.count("copy") == events.count("decode") == 8  # two encoded pages in each
