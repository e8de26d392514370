"""Compressed backups: chunks are encoded on the GPU on their way to host memory, and decoded on their way back.

What is encoded how is in `codec`. Here its kernels are given work: they pass chunks through a few slots of device
memory, each with a stream of its own, so that one slot's copies go on beside another's kernels.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import _core, log
from ..errors import CodecError, CumemSleepError, DriverError, InvalidState, OutOfDeviceMemory
from . import exponent as codec
from .exponent import CHUNK_BYTES, ROW_BYTES, Code, Layout
from .kernels import Kernels, choose_kernels

if TYPE_CHECKING:
    from ..transfer.restorer import SlotCopies


_SLOTS = 4
_SLOT_BYTES = (64 << 20, 8 << 20)  # of encoded chunks; the second where the GPU is full
_LENT_SLOT_BYTES = _SLOT_BYTES[-1]
_ROWS = 1024  # chunks in one launch, at most
# Beside a running model, whose launches queue behind those of all slots: 128 MiB to count, so a fraction of a
# millisecond, as behind the registering of a block.
_FEW_ROWS = 16
_HEAD_BYTES = 64 << 10  # of a slot, before the chunks: the rows, and a counter for each
_COUNTERS_AT = _ROWS * ROW_BYTES
_PART_BYTES = 1 << 30  # counted in 1 ms, encoded in 13: the copies before it last longer than its count
_SAMPLE_BYTES = 8 << 10  # of a segment, from up to so many places
_SAMPLE_PLACES = 8
_WORTH = 0.95


@dataclass(frozen=True)
class Encoding:
    """How one segment is stored, known before it is encoded.

    Attributes:
        sizes: bytes of each encoded chunk, in order.
    """

    code: Code
    sizes: npt.NDArray[np.int64]

    @property
    def bytes(self) -> int:
        """Of all encoded chunks."""
        return int(self.sizes.sum())


@dataclass(frozen=True)
class Place:
    """Where one encoded chunk lies in host memory, and where its bytes are on the device."""

    segment: _core.Segment
    code: Code
    block: _core.HostBlock
    offset: int
    address: int
    bytes: int
    is_last: bool


class ChangedMeanwhile(InvalidState):
    """A segment was written to between plan and encoding."""


class Compressor:
    """Whether and how segments are compressed, for one allocator."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._kernels: Kernels | None = None
        self._ready: set[tuple[Layout, int]] = set()

    @property
    def on(self) -> bool:
        """Whether backups are to be compressed (known once the driver is open)."""
        if self._wanted and self._kernels is None:
            try:
                self._kernels = choose_kernels()
            except Exception as error:
                self.give_up(error)
        return self._wanted

    def give_up(self, reason: object) -> None:
        """Make no more compressed backups, and say why. Those that there are can still be restored."""
        if self._wanted:
            log.warning(
                "backups are stored uncompressed from now on: %s; CUMEM_SLEEP_COMPRESS=off says nothing about it",
                reason,
            )
        self._wanted = False

    def warm_up(self, device: int) -> None:
        """Compile and load what bf16 weights need, rather than during the first sleep."""
        if self.on and self._kernels is not None:
            try:
                self._check(device)
                self._have_ready(codec.LAYOUTS[0], device)
            except CodecError as error:
                self.give_up(error)

    def _have_ready(self, layout: Layout, device: int) -> None:
        """Compile, load and try the kernels: before anything is stored that only they can read.

        Raises:
            CodecError: they fail, or do not do what they should.
        """
        assert self._kernels is not None
        if (layout, device) not in self._ready:
            with _codec_errors():
                self._kernels.warm_up(layout, device)
            self._ready.add((layout, device))

    @staticmethod
    def _check(device: int) -> None:
        if not _core.device_info(device).host_pointers:
            raise CodecError(f"kernels of device {device} do not reach pinned host memory by its host address")

    def workbench(
        self,
        device: int,
        spare_bytes: int,
        lenders: Sequence[_core.Segment] = (),
        *,
        keep_bytes: bool = True,
        small: bool = False,
    ) -> Workbench:
        """Slots on `device`, for one operation; a context.

        Args:
            spare_bytes: device memory that may be taken for it.
            lenders: segments whose memory may be used meanwhile, should there be too little.
            keep_bytes: their bytes are put back at the end.
            small: take little memory, and count few chunks at once, because the model runs meanwhile.

        Raises:
            CodecError: the kernels cannot be had, or do not reach what they need.
            DriverError, OutOfHostMemory: the driver refused.
        """
        if self._kernels is None:
            try:
                self._kernels = choose_kernels()
            except Exception as error:
                raise CodecError(f"compressed backups cannot be read: {error}") from error
        self._check(device)
        spare_bytes = min(spare_bytes, _bench_bytes(_SLOT_BYTES[-1])) if small else spare_bytes
        return Workbench(
            device,
            self._kernels,
            spare_bytes,
            lenders,
            keep_bytes=keep_bytes,
            have_ready=self._have_ready,
            count_rows=_FEW_ROWS if small else _ROWS,
        )


class Workbench:
    """The slots of one device. A context; on leaving it nothing is in flight and all memory has been given back.

    Attributes:
        has_memory: chunks can be encoded. Decoding works without, slowly: the kernels read host memory.
    """

    def __init__(
        self,
        device: int,
        kernels: Kernels,
        spare_bytes: int,
        lenders: Sequence[_core.Segment],
        *,
        keep_bytes: bool,
        have_ready: Callable[[Layout, int], None],
        count_rows: int,
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._have_ready = have_ready
        self._count_rows = count_rows
        self._turn = 0
        self._slots: list[_Slot] = []  # before the memory: in this order they go, should nobody close it
        self._kept: _Kept | _Cleared | None = None
        self._memory: _core.Scratch | None = None
        try:
            address, self._slot_bytes = self._take_memory(spare_bytes, lenders, keep_bytes=keep_bytes)
            self.has_memory = bool(address)
            step = _HEAD_BYTES + self._slot_bytes
            for number in range(_SLOTS):
                self._slots.append(_Slot(device, address and address + number * step))
        except BaseException:
            self.close()
            raise

    @property
    def streams(self) -> list[_core.CopyStream]:
        """Of its slots."""
        return [slot.stream for slot in self._slots]

    @property
    def chunks_per_slot(self) -> int:
        """The most that a slot takes: encoded, a chunk has more than half of its bytes."""
        return 2 * self._slot_bytes // CHUNK_BYTES

    @property
    def in_flight(self) -> set[int]:
        """Ids of the segments of which chunks are being encoded or copied."""
        return set().union(*(slot.segments for slot in self._slots))

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is in flight, and give all memory back. Close again what failed.

        Raises:
            DriverError: it refuses to put back the bytes of who lent memory, which is dropped unless that succeeds yet.
        """
        with ExitStack() as stack:
            if self._memory is not None:
                stack.callback(self._memory.close)
            if self._kept is not None:
                stack.callback(self._kept.put_back)
            for slot in self._slots:
                stack.callback(slot.close)

    def plan(self, segments: Sequence[_core.Segment]) -> dict[int, Encoding]:
        """How each of `segments`, by id, is to be stored; those that are better left as they are are left out.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        if not self.has_memory:
            return {}
        segments = [segment for segment in segments if segment.bytes % CHUNK_BYTES == 0]
        if not segments:
            return {}
        by_layout: dict[Layout, list[tuple[_core.Segment, Code]]] = {}
        for segment, code in zip(segments, codec.choose_codes(self._samples(segments), _WORTH), strict=True):
            if code is not None:
                by_layout.setdefault(code.layout, []).append((segment, code))
        counts = [self._count(chosen) for chosen in by_layout.values()]
        return {segment_id: encoding for count in counts for segment_id, encoding in count.finish().items()}

    def plan_again(
        self, coded: Iterable[tuple[_core.Segment, Code]]
    ) -> Iterator[tuple[list[_core.Segment], dict[int, Encoding]]]:
        """As `plan`, with codes that are known, part by part: yields segments, and how they are to be stored.

        While the caller encodes one part, the GPU counts the next. Calls may be mixed with those of `encode`.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        counts = map(self._count, _parts(coded))
        count = next(counts, None)
        while count is not None:
            following = next(counts, None)
            yield count.segments, count.finish()
            count = following

    def encode(self, places: Iterable[Place], pin: Callable[[_core.HostBlock], None]) -> None:
        """Encode chunks, and copy them to where they are to lie; `pin` is called with each block before.

        They are there, and are what was planned, when `finish` has returned.

        Raises:
            ChangedMeanwhile: a chunk has another size than planned. Nothing else was overwritten.
            DriverError: the driver refused, or what `pin` raises.
            CodecError: a kernel failed.
        """
        for batch in _batches(places, self._slot_bytes):
            _core.stop_if_asked()
            slot, layout = self._next_slot(), batch[0].code.layout
            targets = slot.chunks_address + np.cumsum([0] + [place.bytes for place in batch])
            slot.set_rows_of(batch, [place.address for place in batch], targets[:-1])
            slot.stream.zero(slot.counters_address, 4 * len(batch))
            slot.stream.zero(slot.chunks_address, int(targets[-1] - targets[0]))
            with _codec_errors():
                self._kernels.encode(slot.stream, layout, slot.table, slot.counters_address, len(batch))
            slot.read_counters(len(batch))
            for place, nbytes, source in _together(batch, targets):
                pin(place.block)
                slot.stream.to_host(place.block, place.offset, source, nbytes)
            slot.segments = {place.segment.id for place in batch}
            slot.then(partial(_check_sizes, batch))

    def finish(self) -> None:
        """Wait for all that was begun.

        Raises:
            ChangedMeanwhile: a chunk has another size than planned. Nothing else was overwritten.
            DriverError: a copy or kernel failed.
        """
        for _ in self._slots:
            _core.stop_if_asked()
            self._next_slot()

    def decode(
        self,
        places: Iterable[Place],
        mapped: Callable[[int], None],
        completed: Callable[[list[_core.Segment]], None],
        copies: SlotCopies,
    ) -> Iterator[int]:
        """Copy encoded chunks to the device and decode them; yields the bytes of each batch that was begun.

        Args:
            mapped: waits until the segment of that id is mapped.
            completed: called with segments of which every chunk is in its place.
            copies: to the slots.

        Raises:
            DriverError, InvalidState: what the driver or `mapped` raised.
            CodecError: a kernel failed.
        """
        copied: deque[tuple[_Slot, list[Place], npt.NDArray[np.int64]]] = deque()  # or being copied

        def decode_next() -> None:
            slot, batch, sources = copied.popleft()
            for segment_id in dict.fromkeys(place.segment.id for place in batch):
                mapped(segment_id)
            slot.set_rows_of(batch, sources[:-1], [place.address for place in batch])
            with _codec_errors():
                self._kernels.decode(slot.stream, batch[0].code.layout, slot.table, len(batch))
            slot.then(partial(_complete, completed, [place.segment for place in batch if place.is_last]))

        for batch in _batches(places, self._slot_bytes):
            _core.stop_if_asked()
            slot = self._next_slot()
            if self.has_memory:
                sources = slot.chunks_address + np.cumsum([0] + [place.bytes for place in batch])
                runs = [(place.block, place.offset, at, nbytes) for place, nbytes, at in _together(batch, sources)]
                alone = copies.alone
                if alone:
                    self.finish()
                    for other, _, _ in copied:
                        other.stream.synchronize()
                begin = time.perf_counter()
                copies.start(self._turn, runs)
                copied.append((slot, batch, sources))
                if alone:
                    slot.stream.synchronize()
                    copies.took(int(sources[-1] - sources[0]), time.perf_counter() - begin)
                if len(copied) > _SLOTS - 2:  # so many copies go on while the first is waited for to be mapped
                    decode_next()
                if not alone:
                    self._slots[(self._turn + 1) % _SLOTS].finish()
                    copies.took(int(sources[-1] - sources[0]), time.perf_counter() - begin)
            else:
                sources = np.array([place.block.address + place.offset for place in batch] + [0])
                copied.append((slot, batch, sources))
                decode_next()
            yield len(batch) * CHUNK_BYTES
        while copied:
            decode_next()
        self.finish()

    def decode_again(self, places: Sequence[Place]) -> int:
        """Decode chunks (of one layout, few enough for a slot) from host memory; returns where they are, for now.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        assert len(places) * CHUNK_BYTES <= self._slot_bytes
        slot = self._next_slot()
        targets = slot.chunks_address + CHUNK_BYTES * np.arange(len(places))
        slot.set_rows_of(places, [place.block.address + place.offset for place in places], targets)
        with _codec_errors():
            self._kernels.decode(slot.stream, places[0].code.layout, slot.table, len(places))
        slot.stream.synchronize()
        return slot.chunks_address

    def _next_slot(self) -> _Slot:
        """The one that was begun first, when it has finished."""
        if self._kept is not None:
            self._kept.lend()
        self._turn = (self._turn + 1) % _SLOTS
        slot = self._slots[self._turn]
        slot.finish()
        return slot

    def _count(self, chosen: Sequence[tuple[_core.Segment, Code]]) -> _Count:
        """Begin to count what these segments, all of one layout, take when they are encoded."""
        layout = chosen[0][1].layout
        self._have_ready(layout, self._device)
        chunks = [segment.bytes // CHUNK_BYTES for segment, _ in chosen]
        symbols = np.repeat(np.array([code.symbols for _, code in chosen], np.uint8), chunks, axis=0)
        starts = np.array([segment.address for segment, _ in chosen])
        firsts = np.cumsum(chunks) - chunks
        sources = np.repeat(starts, chunks) + (np.arange(len(symbols)) - np.repeat(firsts, chunks)) * CHUNK_BYTES
        result = _Count(chosen, np.zeros(len(symbols), np.int64))
        for first in range(0, len(symbols), self._count_rows):
            _core.stop_if_asked()
            mine = slice(first, min(first + self._count_rows, len(symbols)))
            slot, count = self._next_slot(), mine.stop - mine.start
            slot.set_rows(symbols[mine], sources[mine], slot.counters_address + 4 * np.arange(count), 0)
            slot.stream.zero(slot.counters_address, 4 * count)
            with _codec_errors():
                self._kernels.count(slot.stream, layout, slot.table, count)
            slot.read_counters(count)
            slot.then(partial(_store_counters, result.sizes[mine]))
            result.slots.append((first, slot))
        return result

    def _samples(self, segments: Sequence[_core.Segment]) -> npt.NDArray[np.uint8]:
        """Of each segment, from places all over it; shape (segments, _SAMPLE_BYTES)."""
        block = _core.HostBlock(len(segments) * _SAMPLE_BYTES, -1)
        with closing(block), _core.CopyStream(self._device) as stream:  # no copy is in flight when the block goes
            block.touch(0, block.bytes)
            block.pin(self._device)
            for number, segment in enumerate(segments):
                places = 1 << (min(_SAMPLE_PLACES, segment.bytes // CHUNK_BYTES).bit_length() - 1)
                nbytes = _SAMPLE_BYTES // places
                for place in range(places):
                    address = segment.address + segment.bytes // places * place
                    stream.to_host(block, number * _SAMPLE_BYTES + place * nbytes, address, nbytes)
            stream.synchronize()
            content = np.frombuffer(memoryview(block), np.uint8)[: len(segments) * _SAMPLE_BYTES]
            samples: npt.NDArray[np.uint8] = content.reshape(-1, _SAMPLE_BYTES).copy()
            return samples

    def _take_memory(self, spare_bytes: int, lenders: Sequence[_core.Segment], *, keep_bytes: bool) -> tuple[int, int]:
        """The address of all slots (0: there is no memory), and how many bytes of chunks each takes."""
        for slot_bytes in _SLOT_BYTES:
            nbytes = _bench_bytes(slot_bytes)
            if nbytes > spare_bytes:
                continue
            try:
                self._memory = _core.Scratch(self._device, nbytes)
            except OutOfDeviceMemory:
                continue
            return self._memory.address, slot_bytes
        needed = _bench_bytes(_LENT_SLOT_BYTES)
        large = [segment for segment in lenders if segment.device == self._device and segment.bytes >= needed]
        if not large:
            return 0, _LENT_SLOT_BYTES
        segment = min(large, key=lambda segment: segment.bytes)  # mapping it may have to wait for the driver to wipe
        segment.map()
        self._kept = _Kept(segment, needed) if keep_bytes else _Cleared(segment, needed)
        return segment.address, _LENT_SLOT_BYTES


@dataclass
class _Count:
    """Sizes of encoded chunks in the making; they are 0 until then.

    Attributes:
        sizes: of all chunks of `chosen`.
        slots: that count, each with the first of its chunks.
    """

    chosen: Sequence[tuple[_core.Segment, Code]]
    sizes: npt.NDArray[np.int64]
    slots: list[tuple[int, _Slot]] = field(default_factory=list)

    @property
    def segments(self) -> list[_core.Segment]:
        """Those of `chosen`."""
        return [segment for segment, _ in self.chosen]

    def finish(self) -> dict[int, Encoding]:
        """How each segment, by id, is to be stored; those that would not become smaller are left out."""
        for first, slot in self.slots:
            if not self.sizes[first]:  # else the slot may have something else to do by now
                slot.finish()
        ends = np.cumsum([segment.bytes // CHUNK_BYTES for segment, _ in self.chosen])
        pairs = zip(self.chosen, np.split(self.sizes, ends[:-1]), strict=True)
        return {s.id: Encoding(code, sizes) for (s, code), sizes in pairs if sizes.sum() < _WORTH * s.bytes}


class _Slot:
    """Device memory for one batch, its table, and its stream.

    Attributes:
        segments: ids of those that are being encoded.
    """

    def __init__(self, device: int, address: int) -> None:
        self._finished: Callable[[_Slot], None] | None = None
        self.segments: set[int] = set()
        self.counters_address = address + _COUNTERS_AT
        self.chunks_address = address + _HEAD_BYTES
        self.stream = _core.CopyStream(device)  # before the block: in this order they go, should nobody close it
        self._block = _core.HostBlock(_HEAD_BYTES, -1)
        self._block.touch(0, self._block.bytes)
        self._block.pin(device)
        content = np.frombuffer(memoryview(self._block), np.uint8)[:_HEAD_BYTES]
        self._rows = content[:_COUNTERS_AT].view("<u8").reshape(-1, 4)
        self.counters = content[_COUNTERS_AT : _COUNTERS_AT + 4 * _ROWS].view("<u4")
        self._address = address
        self.table = address or self._block.address

    def close(self) -> None:
        """Wait for what is in flight. Closing again does nothing."""
        self._finished = None
        with closing(self._block), self.stream:
            pass

    def set_rows_of(self, batch: Sequence[Place], sources: npt.ArrayLike, targets: npt.ArrayLike) -> None:
        """The table of the next kernel, for these chunks."""
        symbols = np.array([place.code.symbols for place in batch], np.uint8)
        self.set_rows(symbols, sources, targets, [place.bytes for place in batch])

    def set_rows(
        self, symbols: npt.NDArray[np.uint8], sources: npt.ArrayLike, targets: npt.ArrayLike, sizes: npt.ArrayLike
    ) -> None:
        """The table of the next kernel; `symbols` has the shape (chunks, 9)."""
        codec.set_rows(self._rows[: len(symbols)], symbols, sources, targets, sizes)
        if self._address:
            self.stream.to_device(self.table, self._block, 0, len(symbols) * ROW_BYTES)

    def read_counters(self, chunks: int) -> None:
        """`counters` are there when it has finished."""
        self.stream.to_host(self._block, _COUNTERS_AT, self.counters_address, 4 * chunks)

    def then(self, work: Callable[[_Slot], None]) -> None:
        """Do this, with the slot, when all of it has finished."""
        self._finished = work

    def finish(self) -> None:
        """Wait for what was begun, and do what is to be done then. With nothing begun it does nothing."""
        finished, self._finished = self._finished, None
        if finished is not None:
            self.stream.synchronize()
            self.segments = set()
            finished(self)


class _Cleared:
    """The start of a segment that has no bytes to keep: zeros, as the driver gives memory, not what was done there."""

    def __init__(self, segment: _core.Segment, nbytes: int) -> None:
        self._segment = segment
        self._bytes = nbytes
        self._is_back = False
        self._stream = _core.CopyStream(segment.device)

    def lend(self) -> None:
        """Nobody misses what lies there."""

    def put_back(self) -> None:
        """Call it again where it failed. Else that does nothing."""
        if not self._is_back:
            self._stream.zero(self._segment.address, self._bytes)
            self._stream.synchronize()
            self._is_back = True


class _Kept:
    """The first bytes of a segment, for as long as its memory is used for something else."""

    def __init__(self, segment: _core.Segment, nbytes: int) -> None:
        self._segment = segment
        self._bytes = nbytes
        self._is_back = False
        self._stream = _core.CopyStream(segment.device)
        self._block = _core.HostBlock(nbytes, -1)
        self._block.touch(0, nbytes)
        self._block.pin(segment.device)
        self._stream.to_host(self._block, 0, segment.address, nbytes)
        self._stream.synchronize()

    def lend(self) -> None:
        """From here on they are overwritten. Not earlier: a bench that an interrupt lost is not closed, nor used."""
        self._segment.lend()

    def put_back(self) -> None:
        """Call it again where it failed: nobody else has these bytes. Else that does nothing.

        The driver is asked twice. If it has not taken them when the operation ends, the segment is dropped.
        """
        if not self._is_back:
            try:
                self._copy_back()
            except DriverError:
                self._copy_back()
            self._segment.take_back()
            self._is_back = True
        with closing(self._block), self._stream:
            pass

    def _copy_back(self) -> None:
        self._stream.to_device(self._segment.address, self._block, 0, self._bytes)
        self._stream.synchronize()


def close_all(workbenches: Iterable[Workbench]) -> None:
    """Close every one, whatever the others raise."""
    with ExitStack() as stack:
        for workbench in workbenches:
            stack.callback(workbench.close)


def _parts(coded: Iterable[tuple[_core.Segment, Code]]) -> Iterator[list[tuple[_core.Segment, Code]]]:
    """In order; of one layout, and no more bytes than that unless a segment has."""
    part: list[tuple[_core.Segment, Code]] = []
    nbytes = 0
    for segment, code in coded:
        if part and (nbytes + segment.bytes > _PART_BYTES or code.layout != part[0][1].layout):
            yield part
            part, nbytes = [], 0
        part.append((segment, code))
        nbytes += segment.bytes
    if part:
        yield part


def _batches(places: Iterable[Place], most_bytes: int | None) -> Iterator[list[Place]]:
    """In order; places of one batch have the same layout, and so many bytes at most."""
    batch: list[Place] = []
    nbytes = 0
    for place in places:
        full = len(batch) == _ROWS or (most_bytes is not None and nbytes + place.bytes > most_bytes)
        if batch and (full or batch[0].code.layout != place.code.layout):
            yield batch
            batch, nbytes = [], 0
        batch.append(place)
        nbytes += place.bytes
    if batch:
        yield batch


def _together(batch: Sequence[Place], addresses: npt.NDArray[np.int64]) -> Iterator[tuple[Place, int, int]]:
    """(first place, bytes, address in the slot) of what lies together in host memory."""
    first = 0
    for end in range(1, len(batch) + 1):
        before = batch[end - 1]
        goes_on = (
            end < len(batch) and batch[end].block is before.block and batch[end].offset == before.offset + before.bytes
        )
        if not goes_on:
            yield batch[first], int(addresses[end] - addresses[first]), int(addresses[first])
            first = end


def _complete(completed: Callable[[list[_core.Segment]], None], segments: list[_core.Segment], _: _Slot) -> None:
    completed(segments)


def _store_counters(sizes: npt.NDArray[np.int64], slot: _Slot) -> None:
    sizes[:] = slot.counters[: len(sizes)]


@contextmanager
def _codec_errors() -> Iterator[None]:
    """Triton compiles at the first use, and there is no end of ways in which that fails."""
    try:
        yield
    except CumemSleepError:
        raise
    except Exception as error:
        raise CodecError(f"the codec's kernel failed: {error!r}") from error


def _check_sizes(batch: list[Place], slot: _Slot) -> None:
    for place, nbytes in zip(batch, slot.counters.tolist(), strict=False):
        if nbytes + place.code.layout.header_bytes != place.bytes:
            raise ChangedMeanwhile(
                f"the segment at 0x{place.segment.address:x} was written to while it was backed up: let no work run on"
                " the GPU during sleep, and call again; everything is awake"
            )


def _bench_bytes(slot_bytes: int) -> int:
    """Of all slots, in whole pages."""
    return -(-_SLOTS * (_HEAD_BYTES + slot_bytes) // CHUNK_BYTES) * CHUNK_BYTES
