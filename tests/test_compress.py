"""Compressed backups: the same bytes, in less host memory, whatever happens meanwhile. The codec has its own tests."""

from __future__ import annotations

import ctypes
import itertools
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import (
    AWAKE,
    BACKED_UP,
    DEVICE_BYTES,
    DROPPED,
    MIB,
    PAGE,
    Cuda,
    EagerSums,
    assert_thread_ends_in_order,
    bf16_weights,
    digest_eagerly,
    free_everything,
    in_thread,
    is_accessible,
    patch_map,
    patch_touch,
    quick_sums,
    reset_simulation,
    run_script,
)
from test_failures import (
    PHASES,
    Phase,
    World,
    check_every_call,
    check_interrupts,
)
from test_prepare import Turns, finished, on_preparing_thread

from cumem_sleep import (
    BackupMismatch,
    CodecError,
    CuMemAllocator,
    CumemSleepError,
    DriverError,
    InvalidState,
    OutOfHostMemory,
    _core,
    sim,
)
from cumem_sleep.backups import filling, store
from cumem_sleep.backups import limits as host_limits
from cumem_sleep.backups.filling import Filling
from cumem_sleep.codec import slots, workbench
from cumem_sleep.codec.compressor import Compressor
from cumem_sleep.codec.exponent import Bytes, Code, Layout
from cumem_sleep.codec.kernels import SimulatedKernels
from cumem_sleep.codec.workbench import Workbench, workbench_bytes
from cumem_sleep.digest.device import DigestRun
from cumem_sleep.digest.reference import Digest
from cumem_sleep.extents import Piece
from cumem_sleep.operations import sleep, wake
from cumem_sleep.transfer import routes
from cumem_sleep.transfer.lanes import RawCopies, SlotCopies
from cumem_sleep.transfer.pacing import Choice

pytestmark = pytest.mark.sim

MakeAllocator = Callable[..., CuMemAllocator]
Contents = dict[int, bytes]  # by address

# Of one slot of a workbench, which is then a page.
ONE_PAGE_BENCH = PAGE - (64 << 10)
BENCH_BYTES = 5 * PAGE, 3 * PAGE  # with `small_slots`; the second can be lent
EXACT = 1.01
USUAL_BENCH_BYTES = workbench_bytes(
    CuMemAllocator.tuning, CuMemAllocator.tuning.slot_bytes[0]
)  # before the tests make it small


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two encoded chunks, or one; the simulated driver writes to all memory that it gives. And small parts."""
    monkeypatch.setattr(CuMemAllocator.tuning, "head_bytes", 2 * PAGE)
    monkeypatch.setattr(CuMemAllocator.tuning, "digest_part_bytes", 4 * PAGE)
    monkeypatch.setattr(CuMemAllocator.tuning, "idle_s", 60.0)  # this machine may be busy, and the device is not
    monkeypatch.setattr(CuMemAllocator.tuning, "slots", 2)
    monkeypatch.setattr(CuMemAllocator.tuning, "slot_bytes", (4 * MIB, 2 * MIB))
    monkeypatch.setattr(CuMemAllocator.tuning, "lent_slot_bytes", 2 * MIB)
    monkeypatch.setattr(CuMemAllocator.tuning, "prepare_piece_bytes", PAGE)  # is decoded in a slot
    monkeypatch.setattr(CuMemAllocator.tuning, "prepare_extent_bytes", PAGE)
    monkeypatch.setattr("cumem_sleep.digest.device.sums_of", quick_sums)  # what it tells apart is not the question here
    monkeypatch.setattr(host_limits, "mem_available_bytes", lambda enough=None: None)  # reads hundreds of files


@pytest.fixture
def allocator(make_allocator: MakeAllocator) -> CuMemAllocator:
    return make_allocator(compress="auto")


# What memory may hold


def bf16(nbytes: int, random: np.random.Generator) -> bytes:
    return bf16_weights(nbytes, random)


def fp16(nbytes: int, random: np.random.Generator) -> bytes:
    return bytes((random.standard_normal(nbytes // 2, np.float32) * np.float32(0.02)).astype("<f2"))


def fp32(nbytes: int, random: np.random.Generator) -> bytes:
    return bytes(random.standard_normal(nbytes // 4, np.float32) * np.float32(0.02))


def e4m3(nbytes: int, random: np.random.Generator) -> bytes:
    values = np.abs(random.standard_normal(nbytes, np.float32))
    exponents = np.clip(np.floor(np.log2(values + 1e-9)) + 8, 0, 14).astype(np.uint8)
    return bytes((exponents << 3) | (random.integers(0, 256, nbytes, np.uint8) & 0x87))


def noise(nbytes: int, random: np.random.Generator) -> bytes:
    return random.bytes(nbytes)


def some_noise(nbytes: int, random: np.random.Generator) -> bytes:
    return bf16(nbytes // 8 * 7, random) + random.bytes(nbytes // 8)


def zeros(nbytes: int, random: np.random.Generator) -> bytes:
    return bytes(nbytes)


Kind = Callable[[int, np.random.Generator], bytes]
KINDS: tuple[Kind, ...] = (bf16, fp16, e4m3, fp32, noise, some_noise)


def write(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


def fill(
    allocator: CuMemAllocator, *kinds: Kind, nbytes: int = 2 * PAGE, tag: str = "weights", device: int = 0
) -> Contents:
    """A segment of each kind."""
    random = np.random.default_rng(len(_core.segments()))
    contents = {allocator.malloc(nbytes, tag, device): kind(nbytes, random) for kind in kinds}
    for address, content in contents.items():
        write(address, content)
    return contents


def check_bytes(contents: Mapping[int, bytes]) -> None:
    for address, content in contents.items():
        assert ctypes.string_at(address, len(content)) == content, f"0x{address:x}"


def at(address: int) -> _core.Segment:
    (segment,) = (segment for segment in _core.segments() if segment.address == address)
    return segment


def encodings(allocator: CuMemAllocator, addresses: Sequence[int] | Contents) -> list[str | None]:
    """The names of the layouts; None for what is stored as it is. All must have a complete backup."""
    found = []
    for address in addresses:
        assert allocator._store.get(at(address)) is not None
        encoding = allocator._store.encoding_of(at(address))
        found.append(encoding.code.layout.name if encoding is not None else None)
    return found


def check_host_bytes(allocator: CuMemAllocator) -> None:
    """Not more than the bytes that are stored need: by what we say, and what the driver says."""
    stored = 0
    for segment in _core.segments():
        backup = allocator._store.get(segment)
        if backup is not None:
            mine = backup.encoding.bytes if backup.encoding else segment.bytes
            assert mine <= backup.bytes <= EXACT * mine
            stored += mine
    said = sum(usage.host_bytes for usage in allocator.usage().values())
    assert stored <= said <= EXACT * stored
    assert said <= sim.stats().registered_bytes <= EXACT * stored


def states() -> set[_core.Segment.Sleep]:
    return {segment.sleep for segment in _core.segments()}


def leave_free(nbytes: int) -> None:
    """On every device."""
    used = max(total - free for free, total in map(_core.memory_info, range(_core.device_count())))
    sim.configure(device_bytes=used + nbytes)


def cycle(allocator: CuMemAllocator, contents: Contents) -> None:
    allocator.sleep()
    assert AWAKE not in states()
    allocator.wake_up()
    check_bytes(contents)


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
            assert (allocator._store.host_bytes > 0) is retained

    @pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE + 1, 5 * MIB])
    def test_odd_sizes(self, allocator: CuMemAllocator, nbytes: int) -> None:
        address = allocator.malloc(nbytes)
        contents = {address: bf16(at(address).bytes, np.random.default_rng(0))}
        write(address, contents[address])
        cycle(allocator, contents)
        assert encodings(allocator, contents) == ["bf16"]

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
    @pytest.mark.parametrize(("slots", "tight"), [(2, False), (2, True), (4, False)])
    def test_wake_by_the_copy_kernel(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, slots: int, tight: bool
    ) -> None:
        """By turns with the copy engine, and alone where its time is to tell the rate."""
        monkeypatch.setattr(CuMemAllocator.tuning, "slots", slots)
        monkeypatch.setattr(CuMemAllocator.tuning, "slot_bytes", (8 * MIB, 4 * MIB))
        monkeypatch.setattr(CuMemAllocator.tuning, "worth_choosing_bytes", 0)
        monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", 3 * MIB)
        started: list[int] = []

        class GpuCopies:
            def __init__(self, device: int, nbytes: int, pieces: int) -> None:
                self.chunks = nbytes // PAGE + pieces

            def start(self, stream: _core.CopyStream, pieces: Sequence[Piece]) -> None:
                assert sum(-(-piece.bytes // PAGE) for piece in pieces) <= self.chunks
                started.append(sum(piece.bytes for piece in pieces))
                for piece in pieces:
                    assert piece.bytes % 16 == piece.offset % 16 == piece.address % 16 == 0
                    ctypes.memmove(piece.address, piece.extent.address + piece.offset, piece.bytes)

            def close(self) -> None:
                pass

        took: list[tuple[int, float]] = []

        def choices(*_: object) -> Iterator[Choice]:
            for number in itertools.count():
                took.append((yield Choice(by_engine=number % 3 == 0, alone=number % 2 == 0)))

        monkeypatch.setitem(sys.modules, "cumem_sleep.transfer.copy_kernel", SimpleNamespace(GpuCopies=GpuCopies))
        monkeypatch.setattr(routes, "choices", choices)
        allocator._restorer._routes._kernel_devices.add(0)
        contents = fill(allocator, *KINDS, nbytes=12 * PAGE)
        contents |= fill(allocator, bf16, fp16, nbytes=PAGE)
        allocator.sleep()
        if tight:
            leave_free(sum(map(len, contents.values())) + BENCH_BYTES[0])
        allocator.wake_up()
        check_bytes(contents)
        assert len(started) >= 6
        encoded = sum(e.bytes for s in _core.segments() if (e := allocator._store.encoding_of(s)))
        assert sum(nbytes for nbytes, _ in took if nbytes) == encoded + 12 * PAGE, "and what is stored as it is"
        assert all(seconds > 0 for _, seconds in took)

    def test_a_wake_copies_raw_backups_first(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each kind has the link for itself, and what it copies is mapped in that order."""
        contents = fill(allocator, bf16, noise, fp16, noise, nbytes=4 * PAGE)
        allocator.sleep()
        events: list[str] = []
        run, start, map_segment = RawCopies.run, SlotCopies.start, _core.Segment.map

        def noted_run(*arguments: Any) -> Iterator[int]:
            yield from run(*arguments)
            events.append("raw done")

        def noted_start(*arguments: Any) -> None:
            events.append("slot")
            start(*arguments)

        def noted_map(segment: _core.Segment) -> None:
            events.append(f"map {list(contents).index(segment.address)}")
            map_segment(segment)

        monkeypatch.setattr(RawCopies, "run", noted_run)
        monkeypatch.setattr(SlotCopies, "start", noted_start)
        patch_map(monkeypatch, noted_map)
        allocator.wake_up()
        check_bytes(contents)
        assert events.index("raw done") < events.index("slot")
        assert [event for event in events if event.startswith("map")] == ["map 1", "map 3", "map 0", "map 2"]

    def test_tables_of_the_copy_kernel_outlive_its_copies(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "slots", 4)
        monkeypatch.setattr(CuMemAllocator.tuning, "worth_choosing_bytes", 0)
        in_flight: set[int] = set()  # streams
        closed: list[bool] = []
        synchronize = _core.CopyStream.synchronize

        class GpuCopies:
            def __init__(self, device: int, nbytes: int, pieces: int) -> None:
                self.stream = 0

            def start(self, stream: _core.CopyStream, pieces: Sequence[Piece]) -> None:
                self.stream = stream.handle
                in_flight.add(stream.handle)
                for piece in pieces:
                    stream.to_device(piece.address, piece.extent, piece.offset, piece.bytes)

            def close(self) -> None:
                closed.append(self.stream in in_flight)

        def note_and_synchronize(stream: _core.CopyStream) -> None:
            synchronize(stream)
            in_flight.discard(stream.handle)

        monkeypatch.setattr(_core.CopyStream, "synchronize", note_and_synchronize)
        monkeypatch.setitem(sys.modules, "cumem_sleep.transfer.copy_kernel", SimpleNamespace(GpuCopies=GpuCopies))
        monkeypatch.setattr(routes, "choices", lambda *_: itertools.repeat(Choice(by_engine=False, alone=False)))
        monkeypatch.setattr(SlotCopies, "took", lambda *_: None)
        allocator._restorer._routes._kernel_devices.add(0)
        contents = fill(allocator, *[bf16] * 6, nbytes=4 * PAGE)
        allocator.sleep()
        sim.fail("cuMemCreate", after=4, error="CUDA_ERROR_UNKNOWN", times=100)
        with pytest.raises(DriverError):
            allocator.wake_up()
        sim.reset()
        assert closed == [False] * 4
        assert BACKED_UP in states()
        allocator.wake_up()
        check_bytes(contents)

    def test_off_compresses_nothing(self, make_allocator: MakeAllocator) -> None:
        allocator = make_allocator(compress="off")
        contents = fill(allocator, bf16)
        cycle(allocator, contents)
        assert encodings(allocator, contents) == [None]

    @pytest.mark.parametrize("slots", [2, 4])
    def test_digests_begin_when_segments_are_complete(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, slots: int
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "slots", slots)
        contents = fill(allocator, bf16, some_noise, bf16, nbytes=3 * PAGE)
        allocator.sleep()
        started: list[int] = []
        start = DigestRun.start

        def look_and_start(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            check_bytes({segment.address: contents[segment.address] for segment in segments})
            started.extend(segment.address for segment in segments)
            start(run, segments)

        monkeypatch.setattr(DigestRun, "start", look_and_start)
        allocator.wake_up()
        assert started == list(contents)

    @pytest.mark.parametrize("slots", [2, 4])
    def test_nothing_is_decoded_to_what_is_not_mapped_yet(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, slots: int
    ) -> None:
        """But copies to slots, all but two of them, have begun by then."""
        monkeypatch.setattr(CuMemAllocator.tuning, "slots", slots)
        contents = fill(allocator, bf16, bf16, nbytes=8 * PAGE)
        allocator.sleep()
        decode, map_segment, start = SimulatedKernels.decode, _core.Segment.map, SlotCopies.start
        events: list[str] = []

        def look_and_decode(kernels: SimulatedKernels, stream: _core.CopyStream, layout: Layout, *more: int) -> None:
            stream.synchronize()
            for _, _, target, _ in kernels._rows(stream, layout, *more):
                assert any(s.address <= target < s.address + s.bytes and s.has_memory for s in _core.segments())
            decode(kernels, stream, layout, *more)
            events.append("decode")

        def map_slowly(segment: _core.Segment) -> None:
            time.sleep(0.05)
            map_segment(segment)

        def note_and_start(*arguments: Any) -> None:
            events.append("copy")
            start(*arguments)

        monkeypatch.setattr(SimulatedKernels, "decode", look_and_decode)
        patch_map(monkeypatch, map_slowly)
        monkeypatch.setattr(SlotCopies, "start", note_and_start)
        allocator.wake_up()
        check_bytes(contents)
        assert events.index("decode") == slots - 1
        assert events.count("copy") == events.count("decode") == 8  # two encoded pages in each

    def test_host_memory_of_weights(self, allocator: CuMemAllocator) -> None:
        fill(allocator, bf16)
        allocator.sleep()
        assert allocator.usage()["weights"].host_bytes < 0.68 * 2 * PAGE


class TestChanges:
    def test_clean_segments_are_not_encoded(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        contents = fill(allocator, bf16, bf16)
        cycle(allocator, contents)
        second = list(contents)[1]
        content = contents[second]
        contents[second] = content[:-1] + bytes([content[-1] ^ 0x80])
        write(second, contents[second])
        encoded = []
        encode = SimulatedKernels.encode

        def counted(*arguments: Any) -> None:
            encoded.append(arguments[-1])
            encode(*arguments)

        monkeypatch.setattr(SimulatedKernels, "encode", counted)
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (2 * PAGE, 2 * PAGE)
        assert sum(encoded) == 2
        allocator.wake_up()
        check_bytes(contents)
        assert allocator.sleep().copied_bytes == 0
        assert sum(encoded) == 2
        allocator.wake_up()

    def test_similar_values_need_no_new_memory_and_no_samples(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, bf16, bf16)
        cycle(allocator, contents)
        before = [allocator._store._backups[at(address).id] for address in contents]
        sizes = [backup.encoding.sizes for backup in before if backup.encoding]
        random = np.random.default_rng(7)
        for address in contents:
            contents[address] = bf16(2 * PAGE, random)
            write(address, contents[address])
        with monkeypatch.context() as patch:
            patch.setattr(Workbench, "_samples", None)
            report = allocator.sleep()
        assert report.copied_bytes == 2 * 2 * PAGE
        after = [allocator._store._backups[at(address).id] for address in contents]
        for old, new, old_sizes in zip(before, after, sizes, strict=True):
            assert new is old
            assert new.encoding is not None
            assert (new.encoding.sizes != old_sizes).all()
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    def test_the_next_part_is_counted_while_one_is_encoded(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        contents = fill(allocator, bf16, bf16, fp16, bf16)
        cycle(allocator, contents)
        random = np.random.default_rng(11)
        for address, kind in zip(contents, (bf16, noise, fp16, zeros), strict=True):
            contents[address] = kind(2 * PAGE, random)
            write(address, contents[address])
        calls: list[str] = []

        def noted(name: str, work: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: Any) -> None:
                calls.append(name)
                work(*arguments)

            return call

        for name in ("count", "encode"):
            monkeypatch.setattr(SimulatedKernels, name, noted(name, getattr(SimulatedKernels, name)))
        allocator.sleep()
        # The second is noise by now; the fourth is counted once more, with a code for zeros.
        assert calls == ["count", "count", "encode", "count", "count", "encode", "count", "encode"]
        assert encodings(allocator, contents) == ["bf16", None, "fp16", "bf16"]
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    def test_the_next_part_is_digested_while_one_is_encoded(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of what has a compressed backup; what has none is digested first, because it has to be planned as a whole."""
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        contents = fill(allocator, noise, bf16, bf16, fp16, bf16)
        cycle(allocator, contents)
        for address, kind in zip(contents, (noise, bf16, bf16, fp16, bf16), strict=True):
            contents[address] = kind(2 * PAGE, np.random.default_rng(address))
            write(address, contents[address])
        places = {segment.id: place for place, segment in enumerate(_core.segments())}
        calls: list[object] = []
        start, encode = DigestRun.start, SimulatedKernels.encode

        def noted_start(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            calls.append([places[segment.id] for segment in segments])
            start(run, segments)

        def noted_encode(*arguments: Any) -> None:
            calls.append("encode")
            encode(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(DigestRun, "start", noted_start)
            patch.setattr(SimulatedKernels, "encode", noted_encode)
            report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (10 * PAGE, 0)
        assert calls == [[0], [1], [2, 3], "encode", [4], "encode", "encode", "encode", [1, 2], [0, 3, 4]]
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(4))
    def test_a_digest_that_finds_no_memory_leaves_nothing_out(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """It raises what a backup raises that finds none, which all begins anew after: with that part, too."""
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        contents = fill(allocator, bf16, bf16, fp16, bf16, bf16)
        cycle(allocator, contents)
        self.change_all(contents)
        start, calls = DigestRun.start, list[int]()

        def fail_once(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            if segments:
                calls.append(len(segments))
                if len(calls) == number + 1:
                    raise OutOfHostMemory(4096, 0, "budget")
            start(run, segments)

        with monkeypatch.context() as patch:
            patch.setattr(DigestRun, "start", fail_once)
            if number == 0:  # before anything was found that could make way
                with pytest.raises(OutOfHostMemory):
                    allocator.sleep()
                assert states() == {AWAKE}
            report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (10 * PAGE, 0)
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("after", [0, 1, 3, 5])
    def test_a_codec_that_fails_before_the_last_part_leaves_nothing_out(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, after: int
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        contents = fill(allocator, *[bf16] * 6)
        cycle(allocator, contents)
        self.change_all(contents)
        failing("encode", monkeypatch, after=after)
        report = allocator.sleep()
        assert (report.copied_bytes, report.stored_bytes, report.clean_bytes) == (12 * PAGE, 12 * PAGE, 0)
        assert encodings(allocator, contents) == [None] * 6
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    def test_parts_of_two_devices(self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of the second are found while the first one's are encoded."""
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        allocator = make_allocator(compress="auto")
        sim.configure(devices=2)
        contents: Contents = {}
        for number in range(8):
            contents |= fill(allocator, bf16, device=number % 2)
        cycle(allocator, contents)
        self.change_all(contents)
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (16 * PAGE, 0)
        assert encodings(allocator, contents) == ["bf16"] * 8
        allocator.wake_up()
        check_bytes(contents)

    def test_a_check_that_fails_is_begun_anew(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its tables have room for each segment once."""
        contents = fill(allocator, *[bf16] * 6)
        cycle(allocator, contents)
        self.change_all(contents)
        start, finish, begun, checks = DigestRun.start, DigestRun.finish, list[int](), 0

        def noted_start(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            nonlocal checks
            begun.extend(segment.id for segment in segments)
            assert len(begun) == len(set(begun))
            start(run, segments)
            checks += len(segments) > 2  # more than a part
            if checks == 1:
                checks += 1
                raise OutOfHostMemory(4096, 0, "budget")

        def noted_finish(run: DigestRun) -> dict[int, Digest]:
            begun.clear()
            return finish(run)

        with monkeypatch.context() as patch:
            patch.setattr(DigestRun, "start", noted_start)
            patch.setattr(DigestRun, "finish", noted_finish)
            report = allocator.sleep()
        assert checks == 3
        assert (report.copied_bytes, report.clean_bytes) == (12 * PAGE, 0)
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    def test_a_digest_that_finds_no_memory_on_the_second_device(
        self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where what was begun on the first is kept by a table of its own."""
        allocator = make_allocator(compress="auto")
        sim.configure(devices=2)
        contents = fill(allocator, bf16, bf16, bf16) | fill(allocator, bf16, bf16, device=1)
        digest_eagerly(allocator)
        cycle(allocator, contents)
        self.change_all(contents)
        create, failed = EagerSums.__init__, list[int]()

        def fail_once(sums: EagerSums, device: int, chunks: int) -> None:
            if device == 1 and not failed:
                failed.append(device)
                raise OutOfHostMemory(4096, 0, "mmap")
            create(sums, device, chunks)

        monkeypatch.setattr(EagerSums, "__init__", fail_once)
        report = allocator.sleep()
        assert failed == [1]
        assert (report.copied_bytes, report.clean_bytes) == (10 * PAGE, 0)
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    def test_old_backups_make_way_for_a_digest(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That finds no memory before they do."""
        contents = fill(allocator, *[bf16] * 5)
        cycle(allocator, contents)
        self.change_all(contents)
        start, calls = DigestRun.start, list[int]()
        forget, forgotten = allocator._store.forget, list[int]()

        def refuse_at_first(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            calls.append(len(segments))
            if len(calls) > 1 and not forgotten:
                raise OutOfHostMemory(4096, 0, "MemAvailable")
            start(run, segments)

        def noted_forget(ids: Iterable[int]) -> None:
            forgotten.extend(ids := list(ids))
            forget(ids)

        with monkeypatch.context() as patch:
            patch.setattr(allocator._store, "forget", noted_forget)
            patch.setattr(DigestRun, "start", refuse_at_first)
            assert allocator.sleep().copied_bytes == 10 * PAGE
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.parametrize(("kind", "devices"), [(bf16, [0, 1]), (noise, [0])])
    def test_a_full_device_where_nothing_changed_is_left_alone(
        self,
        make_allocator: MakeAllocator,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        kind: Kind,
        devices: list[int],
    ) -> None:
        """What has a compressed backup may turn out to have changed later: only then it matters."""
        allocator = make_allocator(compress="auto")
        sim.configure(devices=2)
        contents = fill(allocator, bf16) | fill(allocator, kind, device=1)
        cycle(allocator, contents)
        first = next(iter(contents))
        contents[first] = bf16(2 * PAGE, np.random.default_rng(77))
        write(first, contents[first])
        workbench, seen = Compressor.workbench, list[int]()

        def noted(compressor: Compressor, device: int, *arguments: Any, **named: Any) -> Workbench:
            seen.append(device)
            return workbench(compressor, device, *arguments, **named)

        with closing(_core.Scratch(1, _core.memory_info(1)[0])), monkeypatch.context() as patch:
            patch.setattr(Compressor, "workbench", noted)
            assert allocator.sleep().copied_bytes == 2 * PAGE
        assert seen == devices
        assert "no memory left" not in caplog.text
        allocator.wake_up()
        check_bytes(contents)

    @staticmethod
    def change_all(contents: Contents) -> None:
        for address in contents:
            contents[address] = bf16(2 * PAGE, np.random.default_rng(address))
            write(address, contents[address])

    @pytest.mark.slow
    @pytest.mark.parametrize("first", [bf16, noise, zeros, some_noise, fp16])
    @pytest.mark.parametrize("second", [bf16, noise, zeros, some_noise])
    def test_of_kind(self, allocator: CuMemAllocator, first: Kind, second: Kind) -> None:
        """Host memory is as much as the bytes need that are there now."""
        contents = fill(allocator, first)
        cycle(allocator, contents)
        (address,) = contents
        contents[address] = second(2 * PAGE, np.random.default_rng(9))
        write(address, contents[address])
        allocator.sleep()
        assert encodings(allocator, contents) == [None if second is noise else "bf16"]
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    def test_pages_of_late_memory_are_touched_ahead(
        self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What does not fit any more takes memory in the middle of a sleep, and not in the thread that copies."""
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", 2 * PAGE)
        allocator = make_allocator(compress="auto", prefault_threads=2)
        contents = fill(allocator, bf16, bf16, bf16)
        cycle(allocator, contents)
        for address in contents:
            contents[address] = noise(2 * PAGE, np.random.default_rng(address))
            write(address, contents[address])
        touch, touched = _core.HostBlock.touch, Counter[str]()

        def noted(block: _core.HostBlock, start: int, nbytes: int) -> None:
            touched[_core.thread_name()] += nbytes
            touch(block, start, nbytes)

        patch_touch(monkeypatch, noted)
        allocator.sleep()
        assert touched["cumem-ahead"] == 3 * 2 * PAGE
        allocator.wake_up()
        check_bytes(contents)

    def test_during_sleep_are_noticed(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the sizes of chunks tell, and where only the digest does."""
        contents = fill(allocator, bf16, bf16)
        address = list(contents)[1]
        encode = Workbench.encode
        flipped = contents[address][:-2] + bytes([contents[address][-2] ^ 1]) + contents[address][-1:]
        for changed in (
            flipped,
            noise(2 * PAGE, np.random.default_rng(1)),
        ):

            def write_and_encode(*arguments: Any, changed: bytes = changed) -> None:
                write(address, changed)
                encode(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(Workbench, "encode", write_and_encode)
                with pytest.raises(InvalidState, match=f"0x{address:x}.* written to"):
                    allocator.sleep()
            assert states() == {AWAKE}
            contents[address] = changed
            check_bytes(contents)
            cycle(allocator, contents)
            allocator.release_backups()

    def test_memory_that_was_to_be_reused_is_not_trusted(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A sleep that fails before it writes to it; and then the bytes are again those that it held."""
        contents = fill(allocator, bf16)
        cycle(allocator, contents)
        (address,) = contents
        write(address, bf16(2 * PAGE, np.random.default_rng(8)))

        def refuse(*_: object, **__: object) -> None:
            raise InvalidState("not now")

        with monkeypatch.context() as patch:
            patch.setattr(Filling, "add", refuse)
            with pytest.raises(InvalidState, match="not now"):
                allocator.sleep()
        write(address, contents[address])
        cycle(allocator, contents)

    def test_sizes_alone_tell_without_digests(
        self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocator = make_allocator(compress="auto", verify="off", retain_backups=False)
        contents = fill(allocator, bf16)
        (address,) = contents
        encode = Workbench.encode

        def write_and_encode(*arguments: Any) -> None:
            write(address, noise(2 * PAGE, np.random.default_rng(1)))
            encode(*arguments)

        monkeypatch.setattr(Workbench, "encode", write_and_encode)
        with pytest.raises(InvalidState, match=f"0x{address:x}.* written to"):
            allocator.sleep()
        assert states() == {AWAKE}
        assert allocator._store.host_bytes == 0


class TestHostMemory:
    COMPRESSED_BYTES = int(0.70 * 2 * PAGE)

    @pytest.mark.parametrize("prepare", [False, True])
    def test_budget_that_suffices_for_compressed(self, make_allocator: MakeAllocator, prepare: bool) -> None:
        for setting in ("off", "auto"):
            allocator = make_allocator(compress=setting, host_budget_bytes=self.COMPRESSED_BYTES)
            contents = fill(allocator, bf16)
            if setting == "off":
                with pytest.raises(OutOfHostMemory, match="budget"):
                    allocator.prepare() if prepare else allocator.sleep()
                free_everything()
                continue
            if prepare:
                assert finished(allocator.prepare()).error is None
            report = allocator.sleep()
            assert report.copied_bytes == (0 if prepare else 2 * PAGE)
            assert allocator.usage()["weights"].host_bytes <= self.COMPRESSED_BYTES
            allocator.wake_up()
            check_bytes(contents)

    def test_budget_that_is_too_small(self, make_allocator: MakeAllocator) -> None:
        allocator = make_allocator(compress="auto", host_budget_bytes=self.COMPRESSED_BYTES)
        contents = fill(allocator, bf16, bf16) | fill(allocator, bf16, tag="kv_cache")
        for operation in (allocator.sleep, allocator.prepare, allocator.sleep):
            before = sim.stats()
            with pytest.raises(OutOfHostMemory, match="budget") as raised:
                operation()
            assert self.COMPRESSED_BYTES < raised.value.needed_bytes < 2 * self.COMPRESSED_BYTES
            assert states() == {AWAKE}
            assert sim.stats().registered_bytes == before.registered_bytes
            assert sim.stats().live_handles == before.live_handles
            check_bytes(contents)
        allocator.free(next(iter(contents)))
        del contents[next(iter(contents))]
        allocator.sleep()
        allocator.wake_up("weights")
        check_bytes(dict(list(contents.items())[:1]))

    @pytest.mark.slow
    @pytest.mark.parametrize("part_bytes", [2 * PAGE, 1 << 30])
    @pytest.mark.parametrize("what", ["one grows", "a new one"])
    def test_old_backups_of_what_changed_make_way(
        self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch, what: str, part_bytes: int
    ) -> None:
        """What comes first wants more memory than there is until the others, which shrink, have their turn."""
        monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", part_bytes)
        room = int(2 * PAGE * ((0.70 if what == "one grows" else 0.02) + 3 * 0.88))
        allocator = make_allocator(compress="auto", host_budget_bytes=room)
        contents = fill(allocator, *([bf16] if what == "one grows" else []), fp16, fp16, fp16)
        cycle(allocator, contents)
        for number, address in enumerate(contents):
            kind = noise if what == "one grows" and number == 0 else zeros
            contents[address] = kind(2 * PAGE, np.random.default_rng(5))
            write(address, contents[address])
        if what == "a new one":
            contents |= fill(allocator, zeros)
        cycle(allocator, contents)
        check_host_bytes(allocator)

    def test_budget_that_is_too_small_for_what_changed(self, make_allocator: MakeAllocator) -> None:
        """The error names the need of all of it."""
        allocator = make_allocator(compress="auto", host_budget_bytes=3 * self.COMPRESSED_BYTES)
        contents = fill(allocator, bf16, bf16, bf16)
        cycle(allocator, contents)
        for address in contents:
            contents[address] = noise(2 * PAGE, np.random.default_rng(address))
            write(address, contents[address])
        with pytest.raises(OutOfHostMemory) as refused:
            allocator.sleep()
        assert refused.value.needed_bytes == 3 * 2 * PAGE
        assert states() == {AWAKE}
        check_bytes(contents)

    def test_budget_that_is_reached_while_preparing(
        self, make_allocator: MakeAllocator, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Weights would fit, the noise among them does not."""
        allocator = make_allocator(compress="auto", host_budget_bytes=2 * self.COMPRESSED_BYTES)
        contents = fill(allocator, bf16, noise)
        error = finished(allocator.prepare()).error
        assert isinstance(error, OutOfHostMemory)
        assert (error.needed_bytes, error.limit) == (2 * PAGE, "budget")
        assert "prepare ended early" in caplog.text
        assert encodings(allocator, list(contents)[:1]) == ["bf16"]
        check_host_bytes(allocator)
        allocator.free(list(contents)[1])
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()

    def test_budget_that_only_a_clean_backup_could_make_way_for(self, make_allocator: MakeAllocator) -> None:
        allocator = make_allocator(compress="auto", host_budget_bytes=3 * PAGE)
        contents = fill(allocator, bf16, bf16)
        cycle(allocator, contents)
        address = list(contents)[1]
        contents[address] = noise(2 * PAGE, np.random.default_rng(1))
        write(address, contents[address])
        with pytest.raises(OutOfHostMemory, match="budget"):
            allocator.sleep()
        assert states() == {AWAKE}
        check_bytes(contents)


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

        for place, name in [(Compressor, "workbench"), (Workbench, "plan"), (SimulatedKernels, "count")]:
            monkeypatch.setattr(place, name, noted(getattr(place, name), name))
        preparation = allocator.prepare()
        returned.set()
        assert finished(preparation).error is None
        assert seen == ["workbench"] + 2 * ["plan", "count"]
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
        plan = Workbench.plan

        def look_and_plan(*arguments: Any) -> Any:
            mode = ctypes.c_int(Cuda.RELAXED)
            cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            assert mode.value == Cuda.RELAXED, "PyTorch and Triton make calls that would end the capture"
            return plan(*arguments)

        monkeypatch.setattr(Workbench, "plan", look_and_plan)
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
            ready = [s for s in _core.segments() if allocator._store.get(s) is not None]
            if allocator._store.host_bytes != sum(map(allocator._store.host_bytes_of, ready)):
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
                    assert allocator._store.host_bytes == 0
                else:
                    preparation = Turns(patch, change, turn).prepare(allocator)
            assert preparation.error is None
            assert sim.stats().live_handles in (0, len(contents)), "its workbench is left"
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
        allocator = make_allocator(compress="auto", host_budget_bytes=2 * TestHostMemory.COMPRESSED_BYTES)
        contents = fill(allocator, bf16, bf16)
        fill(allocator, zeros, nbytes=8 * PAGE, tag="kv_cache")
        leave_free(0)
        error = finished(allocator.prepare()).error
        assert isinstance(error, OutOfHostMemory)
        assert (error.needed_bytes, error.limit) == (4 * PAGE, "budget")
        assert allocator._store.host_bytes == 0
        cycle(allocator, contents)
        assert encodings(allocator, contents) == ["bf16", "bf16"]

    def test_on_a_full_device_compressed_backups_stay(self, make_allocator: MakeAllocator) -> None:
        """As they are, they would take the room in which the sleep compresses all."""
        allocator = make_allocator(compress="auto", host_budget_bytes=int(3.5 * 2 * PAGE))
        contents = fill(allocator, *[bf16] * 4)
        fill(allocator, zeros, nbytes=8 * PAGE, tag="kv_cache")
        cycle(allocator, contents)
        held = allocator._store.host_bytes
        random = np.random.default_rng(5)
        for address in contents:
            contents[address] = bf16(2 * PAGE, random)
            write(address, contents[address])
        leave_free(0)
        assert finished(allocator.prepare()).error is None
        assert allocator._store.host_bytes == held
        allocator.sleep()
        assert allocator._store.host_bytes == held
        allocator.wake_up()
        check_bytes(contents)

    def test_takes_a_small_workbench(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert allocator._store.get(at(first)) is None
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
            from cumem_sleep.codec import workbench as compress

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
            from cumem_sleep.codec import workbench as compress

            reset_simulation()
            CuMemAllocator.tuning.prepare_extent_bytes = PAGE
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


# The device is full


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

    @pytest.mark.parametrize("devices", [1, 2])
    @pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuStreamSynchronize"])
    @pytest.mark.parametrize("times", [1, 2, 3, 4, 8])
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

    def test_a_workbench_is_bounded(self) -> None:
        assert 128 * MIB < USUAL_BENCH_BYTES <= 512 * MIB

    @pytest.mark.parametrize("free_bytes", BENCH_BYTES)
    def test_room_for_a_workbench(
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
        workbench = allocator._compressor.workbench(0, DEVICE_BYTES)
        held = sim.stats()
        sim.fail(call, times=1_000_000, error="CUDA_ERROR_UNKNOWN")
        for _ in range(3):
            workbench.close()
        del workbench
        assert _core.reclaim() == 1
        sim.reset()
        assert sim.stats().reserved_bytes == held.reserved_bytes
        assert _core.reclaim() == 0
        assert sim.stats().live_handles == held.live_handles - 1
        assert sim.stats().reserved_bytes == held.reserved_bytes - BENCH_BYTES[0]

    def test_malloc_takes_memory_of_the_codec_that_the_driver_kept(self, allocator: CuMemAllocator) -> None:
        with allocator._compressor.workbench(0, DEVICE_BYTES):
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


# Damage


class TestDamage:
    @pytest.mark.slow
    @pytest.mark.parametrize("verify", ["wake", "off"])
    @pytest.mark.parametrize("part", ["header", "plane", "level 0", "symbols", "second chunk"])
    def test_of_a_backup(self, make_allocator: MakeAllocator, part: str, verify: str) -> None:
        allocator = make_allocator(compress="auto", verify=verify)
        contents = fill(allocator, bf16, some_noise) | fill(allocator, noise, tag="lora")
        allocator.sleep()
        address = list(contents)[1]
        backup = allocator._store.get(at(address))
        assert backup is not None
        assert backup.encoding is not None
        layout, sizes = backup.encoding.code.layout, backup.encoding.sizes
        first = layout.header_bytes
        content = np.frombuffer(memoryview(backup.extents[0]), np.uint8)
        place = {
            "header": 0,
            "plane": first + 7,
            "level 0": first + layout.fixed_bytes - 1,
            # The last block of the second chunk is noise, so it has many; at most 15 bytes of nothing follow.
            "symbols": int(sizes[:2].sum()) - 100,
            "second chunk": int(sizes[0]) + first,
        }[part]
        content[place] ^= 0x10
        if verify == "off":
            allocator.wake_up()
            assert ctypes.string_at(address, 2 * PAGE) != contents[address]
            return
        for _ in range(2):
            with pytest.raises(BackupMismatch) as raised:
                allocator.wake_up()
            assert f"0x{address:x}" in raised.value.segment
            assert raised.value.expected == str(backup.digest)
            assert states() == {BACKED_UP}
            assert sim.stats().live_handles == 0
        content[place] ^= 0x10
        allocator.wake_up()
        check_bytes(contents)


# The codec fails


def failing(name: str, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
    real, calls = getattr(SimulatedKernels, name), []

    def fail(*arguments: Any) -> None:
        calls.append(name)
        if len(calls) > after:
            raise RuntimeError("no such kernel")
        real(*arguments)

    monkeypatch.setattr(SimulatedKernels, name, fail)


class TestCodecFails:
    @pytest.mark.parametrize("prepare", [False, True])
    def test_on_trial(
        self,
        allocator: CuMemAllocator,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        prepare: bool,
    ) -> None:
        """Kernels of any layout are tried before anything is stored that only they can read."""
        tried = []

        def refuse(self: SimulatedKernels, layout: Layout, device: int) -> None:
            tried.append(layout.name)
            if layout.name == "fp16":
                raise RuntimeError("no such kernel")

        monkeypatch.setattr(SimulatedKernels, "warm_up", refuse)
        contents = fill(allocator, bf16)
        cycle(allocator, contents)
        assert (tried, encodings(allocator, contents)) == (["bf16"], ["bf16"])
        contents |= fill(allocator, fp16)
        if prepare:
            assert finished(allocator.prepare()).error is None
        cycle(allocator, contents)
        assert tried == ["bf16", "fp16"]
        assert encodings(allocator, contents) == ["bf16", None]
        assert "no such kernel" in caplog.text

    @pytest.mark.slow
    @pytest.mark.parametrize("lend", [False, True])
    @pytest.mark.parametrize(("name", "after"), [("count", 0), ("encode", 0), ("encode", 1)])
    def test_at_sleep(
        self,
        allocator: CuMemAllocator,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        name: str,
        after: int,
        lend: bool,
    ) -> None:
        contents = fill(allocator, bf16, noise, bf16)
        fill(allocator, noise, nbytes=BENCH_BYTES[1], tag="kv_cache")
        if lend:
            leave_free(0)
        failing(name, monkeypatch, after)
        for _ in range(2):
            cycle(allocator, contents)
            assert encodings(allocator, contents) == [None] * 3
            check_host_bytes(allocator)
            assert sim.stats().live_handles == 4
        assert len(caplog.records) == 1
        assert "stored uncompressed" in caplog.text
        assert "no such kernel" in caplog.text

    @pytest.mark.parametrize("prepare", [False, True])
    def test_after_a_good_sleep(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, prepare: bool
    ) -> None:
        """What is clean stays compressed, and can still be restored; what changed is stored as it is."""
        contents = fill(allocator, bf16, bf16)
        cycle(allocator, contents)
        first, second = contents
        contents[second] = bytes([contents[second][0] ^ 1]) + contents[second][1:]
        write(second, contents[second])
        failing("encode", monkeypatch)
        cycle(allocator, contents)
        assert encodings(allocator, contents) == ["bf16", None]
        contents[first] = bytes([contents[first][0] ^ 1]) + contents[first][1:]
        write(first, contents[first])
        if prepare:
            assert finished(allocator.prepare()).error is None
            assert encodings(allocator, contents) == [None, None]
        assert allocator.sleep().copied_bytes == (0 if prepare else 2 * PAGE)
        assert encodings(allocator, contents) == [None, None]
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("after", [0, 1])
    @pytest.mark.parametrize("tight", [False, True])
    def test_at_wake(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, after: int, tight: bool) -> None:
        contents = fill(allocator, bf16, noise, bf16)
        fill(allocator, zeros, nbytes=BENCH_BYTES[1], tag="kv_cache")
        allocator.sleep()
        if tight:
            sim.configure(device_bytes=sum(segment.bytes for segment in _core.segments()))
        for _ in range(2):
            with monkeypatch.context() as patch:
                failing("decode", patch, after)
                with pytest.raises(CodecError, match="no such kernel"):
                    allocator.wake_up()
            assert states() == {BACKED_UP, DROPPED}
            assert sim.stats().live_handles == 0
            assert encodings(allocator, contents) == ["bf16", None, "bf16"]
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.parametrize("name", ["count", "encode", "decode"])
    def test_while_preparing(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        contents = fill(allocator, bf16, noise)
        with monkeypatch.context() as patch:
            failing(name, patch)
            preparation = finished(allocator.prepare())
        assert len(caplog.records) == 1
        if name == "count":  # while planning
            assert preparation.error is None
            assert encodings(allocator, contents) == [None, None]
        else:
            assert isinstance(preparation.error, CodecError)
        assert sim.stats().live_handles == 2
        cycle(allocator, contents)

    def test_on_the_second_device(self, make_allocator: MakeAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is compressed from then on; what was, stays."""
        allocator = make_allocator(compress="auto")
        sim.configure(devices=2)
        contents = fill(allocator, bf16) | fill(allocator, bf16, device=1)
        failing("count", monkeypatch, after=1)
        assert finished(allocator.prepare()).error is None
        assert encodings(allocator, contents) == ["bf16", None]
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(contents)

    def test_kernels_cannot_be_had(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse() -> SimulatedKernels:
            raise ImportError("no Triton here")

        monkeypatch.setattr("cumem_sleep.codec.compressor.choose_kernels", refuse)
        contents = fill(allocator, bf16)
        for _ in range(2):
            assert finished(allocator.prepare()).error is None
            cycle(allocator, contents)
            write(next(iter(contents)), contents[next(iter(contents))])
        assert encodings(allocator, contents) == [None]
        assert len(caplog.records) == 1
        assert "no Triton here" in caplog.text

    def test_kernels_do_not_reach_host_memory(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        info = SimpleNamespace(host_pointers=False, numa_node=-1)
        monkeypatch.setattr("cumem_sleep.codec.workbench._core.device_info", lambda device: info)
        contents = fill(allocator, bf16)
        cycle(allocator, contents)
        assert encodings(allocator, contents) == [None]
        assert "do not reach pinned host memory" in caplog.text

    def test_error_can_be_pickled(self) -> None:
        error = pickle.loads(pickle.dumps(CodecError("compressed backups cannot be read: no Triton here")))
        assert type(error) is CodecError
        assert isinstance(error, CumemSleepError)
        assert str(error) == "compressed backups cannot be read: no Triton here"


# Beside other threads


class TestFree:
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_during_encode(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
        contents = fill(allocator, bf16, noise, bf16)
        freed = list(contents)[place]
        del contents[freed]
        encode = SimulatedKernels.encode

        def free_and_encode(*arguments: Any) -> None:
            if any(segment.address == freed for segment in _core.segments()):
                with suppress(InvalidState):
                    in_thread(lambda: allocator.free(freed))
            encode(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(SimulatedKernels, "encode", free_and_encode)
            allocator.sleep()
        assert {segment.address for segment in _core.segments()} == set(contents)
        check_host_bytes(allocator)
        allocator.wake_up()
        check_bytes(contents)

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_during_decode(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
        contents = fill(allocator, bf16, noise, bf16)
        allocator.sleep()
        freed = list(contents)[place]
        del contents[freed]
        decode = SimulatedKernels.decode
        calls: list[int] = []

        def free_and_decode(*arguments: Any) -> None:
            if not calls:
                calls.append(freed)
                in_thread(lambda: allocator.free(freed))
            decode(*arguments)

        monkeypatch.setattr(SimulatedKernels, "decode", free_and_decode)
        allocator.wake_up()
        assert {segment.address for segment in _core.segments()} == set(contents)
        check_bytes(contents)

    def test_sleeps_from_several_threads(self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """A second sleep during the first finds nothing to do."""
        contents = fill(allocator, bf16)
        encode = SimulatedKernels.encode
        begun: list[threading.Thread] = []

        def sleep_and_encode(*arguments: Any) -> None:
            if not begun:
                begun.append(threading.Thread(target=allocator.sleep))
                begun[0].start()
            encode(*arguments)

        monkeypatch.setattr(SimulatedKernels, "encode", sleep_and_encode)
        allocator.sleep()
        begun[0].join(30)
        assert states() == {BACKED_UP}
        allocator.wake_up()
        check_bytes(contents)


# Whatever fails


def one_page_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "slots", 1)
    monkeypatch.setattr(CuMemAllocator.tuning, "slot_bytes", (ONE_PAGE_BENCH,))
    monkeypatch.setattr(CuMemAllocator.tuning, "lent_slot_bytes", ONE_PAGE_BENCH)


class QuickCodec:
    """In place of the codec's own work, where how it encodes is not the question: chunks by their hash."""

    BYTES = 1_400_000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._chunks: dict[int, Bytes] = {}
        for name in ("chunk_bytes", "encode", "decode"):
            monkeypatch.setattr(f"cumem_sleep.codec.exponent.{name}", getattr(self, name))

    def chunk_bytes(self, _: Code, content: Bytes) -> npt.NDArray[np.int64]:
        return np.array([self.BYTES])

    def encode(self, _: Code, content: Bytes) -> Bytes:
        encoded = np.zeros(self.BYTES, np.uint8)
        key = hash(content.tobytes())
        self._chunks[key] = content.copy()
        encoded[:8].view(np.int64)[0] = key
        return encoded

    def decode(self, _: Code, stored: Bytes, sizes: npt.ArrayLike) -> Bytes:
        return self._chunks[int(stored[:8].view(np.int64)[0])]


@pytest.fixture(params=["ample", "tight"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """In the tight one the kernels have to work in the memory of `kv_cache`."""
    reset_simulation()
    one_page_bench(monkeypatch)
    QuickCodec(monkeypatch)
    current = World(device_bytes={"ample": None, "tight": 3 * PAGE}[request.param], compress="auto")
    yield current
    free_everything()
    reset_simulation()


COMPRESSED = [
    phase for phase in PHASES if phase.name in ("first sleep", "sleep of changed", "wake of weights", "wake of all")
]


def all_compressed(world: World) -> bool:
    return all(
        world.allocator._store.encoding_of(segment) is not None
        for segment in world.segments
        if world.allocator._store.get(segment) is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "error_name"),
    [
        (phase, error_name)
        for phase in COMPRESSED
        for error_name in ("CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY")
        if (phase.name, error_name) != ("sleep of changed", "CUDA_ERROR_OUT_OF_MEMORY")  # as in a first sleep
    ],
    ids=str,
)
def test_every_driver_call_may_fail_once(world: World, phase: Phase, error_name: str) -> None:
    def operate(world: World) -> None:
        phase.operate(world)
        # Without memory to work in it goes on without compression.
        assert error_name == "CUDA_ERROR_OUT_OF_MEMORY" or all_compressed(world)

    check_every_call(world, Phase(phase.name, phase.prepare, operate), error_name, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase", [phase for phase in COMPRESSED if phase.name in ("first sleep", "wake of all")], ids=str
)
def test_interrupt_anywhere(world: World, phase: Phase) -> None:
    operation = (
        (wake._workbenches,) if phase.name == "wake of all" else (sleep._BackingUp._try, sleep._BackingUp._workbenches)
    )
    check_interrupts(world, phase, (workbench, slots, *operation))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "part_bytes"), [("tight", 1 << 30), ("ample", PAGE)], indirect=["world"])
def test_interrupt_of_a_sleep_of_changed(world: World, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    """Whose backups are written to again, while the next part is counted."""
    monkeypatch.setattr(CuMemAllocator.tuning, "count_part_bytes", part_bytes)
    (phase,) = (phase for phase in COMPRESSED if phase.name == "sleep of changed")
    bench = (Workbench.encode, Workbench.begin_count, Workbench._count, Workbench.finish, workbench.parts_to_count)
    check_interrupts(world, phase, (*bench, store, filling, sleep._BackingUp._try, sleep._BackingUp._planned_again))


@pytest.mark.slow
def test_every_driver_call_of_a_wake_of_two_devices_may_fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_simulation()
    one_page_bench(monkeypatch)
    QuickCodec(monkeypatch)
    world = World(devices=2, device_bytes=3 * PAGE, compress="auto")
    check_every_call(world, COMPRESSED[-1], "CUDA_ERROR_UNKNOWN", False)
    free_everything()
    reset_simulation()
