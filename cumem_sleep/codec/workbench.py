"""Compressed backups: chunks are encoded on the GPU on their way to a tier, and decoded on their way back.

How they are coded is up to the codecs. Here chunks pass through a few slots of device memory, each with its own stream,
so that one slot's copies overlap with another's kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from .. import _core, log
from ..errors import InvalidState, OutOfDeviceMemory
from ..extents import Lane, Piece, Transfers
from ..pinned import bounce_block, pinned_block
from ..tuning import Tuning
from . import codecs
from .codec import CHUNK_BYTES, Bytes, Code, Layout
from .codecs import all_layouts, choose_codes, usual_layouts
from .encoding import EncodedRun, Encoding
from .lent import Cleared, Kept
from .runner import Runner, codec_errors
from .slots import Slot, head_bytes
from .table import parameters_of

_SAMPLE_BYTES = 8 << 10  # bytes sampled from a segment, and from how many places at most
_SAMPLE_PLACES = 4
_CHOSEN_AT_ONCE = 32  # segments whose codes are chosen together
_WORTH = 0.95


class ChangedMeanwhile(InvalidState):
    """A segment was written to between plan and encoding."""


class Workbench:
    """The slots of one device. A context manager; after leaving it, nothing is in flight and all memory is freed.

    Attributes:
        has_memory: chunks can be encoded. Decoding works without, so that what fits can wake, but slowly: kernels read
            host memory, or the CPU decodes.
        slot_bytes: how many bytes of encoded chunks fit into a slot.
    """

    def __init__(
        self,
        device: int,
        runner: Runner,
        tuning: Tuning,
        spare_bytes: int,
        lenders: Sequence[_core.Segment],
        *,
        keep_bytes: bool,
        is_ready: Callable[[Layout, int], bool],
        have_ready: Callable[[Layout, int], None],
        worth_compiling_bytes: int,
        count_rows: int,
    ) -> None:
        self._device = device
        self._runner = runner
        self._tuning = tuning
        self._is_ready = is_ready
        self._have_ready = have_ready
        self._worth_compiling_bytes = worth_compiling_bytes
        self._bytes_of: Counter[Layout] = Counter()  # planned so far: those that suit the layout best
        self._count_rows = count_rows
        self._turn = 0
        self._warned = False
        self._slots: list[Slot] = []  # before the memory: destroyed in this order if nobody closes them
        self._tables: _core.HostBlock | None = None
        self._staging: _core.HostBlock | None = None  # for `_within_reach`
        self._samples: list[Samples] = []  # as many as were ever in use at once
        self._kept: Kept | Cleared | None = None
        self._memory: _core.Scratch | None = None
        try:
            address, slots, self.slot_bytes = self._take_memory(spare_bytes, lenders, keep_bytes=keep_bytes)
            self.has_memory = bool(address)
            step = head_bytes(tuning.rows) + self.slot_bytes
            self._tables = pinned_block(slots * head_bytes(tuning.rows), device, -1)
            for number in range(slots):
                at = address and address + number * step
                self._slots.append(Slot(device, at, tuning.rows, self._tables, number))
        except BaseException:
            self.close()
            raise

    def lanes(self, transfers: Transfers) -> list[Lane]:
        """Lanes for the copies to its slots, in the order of the slots."""
        return [slot.use(transfers) for slot in self._slots]

    @property
    def in_flight(self) -> set[int]:
        """Ids of the segments whose chunks are being encoded or copied."""
        return set().union(*(slot.segments for slot in self._slots))

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is in flight and free all memory. If it raises, call it again.

        Raises:
            DriverError: the bytes of a segment that lent its memory could not be put back; that segment is dropped.
        """
        with ExitStack() as stack:
            if self._memory is not None:
                stack.callback(self._memory.close)
            if self._kept is not None:
                stack.callback(self._kept.put_back)
            for samples in self._samples:
                stack.callback(samples.close)
            for block in (self._tables, self._staging):
                if block is not None:
                    stack.callback(block.close)
            for slot in self._slots:
                stack.callback(slot.close)

    def plan(self, segments: Sequence[_core.Segment]) -> dict[int, Encoding]:
        """How to encode each of `segments`, by id, without those that are better stored uncompressed.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        plans: list[Plan] = []
        for first in range(0, len(segments), _CHOSEN_AT_ONCE):  # while the GPU counts those before
            plans.append(self.begin_plan(segments[first : first + _CHOSEN_AT_ONCE], {}))
            for plan in plans[-2:-1]:
                plan.count()
        return {segment_id: encoding for plan in plans for segment_id, encoding in plan.finish().items()}

    def begin_plan(self, segments: Sequence[_core.Segment], codes: Mapping[int, Code]) -> Plan:
        """Begin to plan how to encode `segments`; may be called between calls of `encode`.

        Args:
            codes: by id, for segments whose codes are known already. The others get theirs from samples.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        plan = Plan(self, segments)
        if not self.has_memory:
            if segments and not self._warned:
                self._warned = True
                log.warning(
                    "device %d has no memory left for the codec to work in: its backups are stored uncompressed"
                    " this time",
                    self._device,
                )
            return plan
        segments = [segment for segment in segments if segment.bytes % CHUNK_BYTES == 0]
        plan.counts += self._counts([(segment, codes.get(segment.id)) for segment in segments])
        if new := [segment for segment in segments if segment.id not in codes]:
            plan.samples = self._idle_samples(len(new))
            plan.samples.begin(new)
        return plan

    def count_sampled(self, samples: Samples) -> list[Count]:
        """Choose codes for the segments of these samples, and begin to count with them."""
        segments, content = samples.segments, samples.finish()
        codes = choose_codes(content, _WORTH)
        without = self._not_worth_compiling(segments, codes)
        if others := [number for number, code in enumerate(codes) if code is not None and code.layout in without]:
            for number, code in zip(others, choose_codes(content[others], _WORTH, without), strict=True):
                codes[number] = code
        return self._counts(zip(segments, codes, strict=True))

    def _not_worth_compiling(self, segments: Sequence[_core.Segment], codes: Sequence[Code | None]) -> set[Layout]:
        """Layouts whose kernels are not ready, and that too little would have so far, such as one buffer of float32."""
        for segment, code in zip(segments, codes, strict=True):
            if code is not None:
                self._bytes_of[code.layout] += segment.bytes
        return {
            layout
            for layout in all_layouts()
            if layout not in usual_layouts()
            and self._bytes_of[layout] < self._worth_compiling_bytes
            and not self._is_ready(layout, self._device)
        }

    def encode(self, runs: Iterable[EncodedRun], transfers: Transfers) -> None:
        """Encode chunks and copy them to their places in the extents.

        When `finish` has returned, they have arrived and have the planned sizes.

        Raises:
            ChangedMeanwhile: a chunk does not have the planned size. Nothing else was overwritten.
            DriverError, OutOfHostMemory: the driver or the system refused.
            CodecError: a kernel failed.
        """
        before: Slot | None = None
        for batch in self.batches(runs):
            _core.stop_if_asked()
            slot = self.next_slot()
            lane = slot.use(transfers)
            slot.set_rows(batch.parameters, batch.addresses, slot.chunks_address + batch.starts, batch.sizes)
            slot.stream.zero(slot.chunks_address, batch.bytes)
            counters = slot.counters_for(len(batch), batch.check_sizes)
            with codec_errors():
                self._runner.encode(slot.stream, batch.layout, slot.table, counters, len(batch))
            slot.segments = {run.segment.id for run in batch.runs}
            slot.copy_later(partial(_write, lane, batch.pieces(slot.chunks_address)))
            slot.begun()
            if before is not None:
                before.copy()
            before = slot
        if before is not None:
            before.copy()

    def finish(self) -> None:
        """Wait for everything that was begun.

        Raises:
            ChangedMeanwhile: a chunk does not have the planned size. Nothing else was overwritten.
            DriverError: a copy or kernel failed.
        """
        for _ in self._slots:
            _core.stop_if_asked()
            self.next_slot()
        for slot in self._slots:
            slot.read_counters()

    def decode(self, slot: Slot, batch: Batch, sources: npt.NDArray[np.int64]) -> None:
        """Launch the kernel that decodes a batch.

        Args:
            sources: where it finds each encoded chunk.

        Raises:
            DriverError: the driver refused.
            CodecError: the kernel failed.
        """
        slot.set_rows(batch.parameters, sources, batch.addresses, batch.sizes)
        with codec_errors():
            self._runner.decode(slot.stream, batch.layout, slot.table, len(batch))

    def decode_without_memory(self, slot: Slot, batch: Batch) -> None:
        """As `decode`, where there is no device memory that the chunks could be copied to; slowly.

        Raises:
            DriverError, OutOfHostMemory: the driver refused.
            CodecError: the kernel failed.
        """
        sources = self._within_reach(slot, batch)
        if sources is None:
            self._decode_by_cpu(slot, batch)
        else:
            self.decode(slot, batch, sources)

    def _within_reach(self, slot: Slot, batch: Batch) -> npt.NDArray[np.int64] | None:
        """Where kernels find each encoded chunk without device memory: in its extent, or else in a pinned copy.

        None: the driver pins nothing more, which takes memory for page tables.

        Raises:
            DriverError, OutOfHostMemory: there is no memory for that copy.
        """
        if slot.opened_lane.kernels_reach:
            return batch.addresses_in_extents
        if self._staging is None:
            self._staging = bounce_block(len(self._slots) * self.slot_bytes, self._device)
        if not self._staging.pinned:
            return None
        start = self._turn * self.slot_bytes
        copy = np.frombuffer(memoryview(self._staging), np.uint8)[start : start + batch.bytes]
        for piece in batch.pieces(0):
            content = slot.opened_lane.content(piece.extent, piece.offset, piece.bytes)
            copy[piece.address : piece.address + piece.bytes] = content
        first: int = self._staging.address + start
        return first + batch.starts

    def _decode_by_cpu(self, slot: Slot, batch: Batch) -> None:
        """By the reference, chunk by chunk, at some 300 MB/s: it needs nothing but the memory that is mapped."""
        assert self._staging is not None
        decoded = np.frombuffer(memoryview(self._staging), np.uint8)[:CHUNK_BYTES]
        for run in batch.runs:
            for number in range(len(run)):
                _core.stop_if_asked()
                chunk = run.part(number, number + 1)
                stored = slot.opened_lane.content(chunk.extent, chunk.offset, chunk.bytes)
                decoded[:] = codecs.decode(chunk.code, stored, chunk.sizes)
                slot.stream.to_device(chunk.address, self._staging, 0, CHUNK_BYTES)
                slot.stream.synchronize()

    def decode_again(self, run: EncodedRun, transfers: Transfers) -> int:
        """Decode chunks (few enough for a slot) from their extent; returns the temporary address of their content.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        assert run.content_bytes <= self.slot_bytes
        target, source = self.next_slot(), self.next_slot()
        lane, decoded = source.use(transfers), 0
        for batch in self.batches([run]):  # encoded, what does not compress is larger, and may not fit at once
            for piece in batch.pieces(source.chunks_address):
                lane.read(piece.address, piece.extent, piece.offset, piece.bytes)
            source.synchronize()
            targets = target.chunks_address + CHUNK_BYTES * (decoded + np.arange(len(batch)))
            target.set_rows(batch.parameters, source.chunks_address + batch.starts, targets, batch.sizes)
            with codec_errors():
                self._runner.decode(target.stream, batch.layout, target.table, len(batch))
            target.stream.synchronize()
            decoded += len(batch)
        return target.chunks_address

    def batches(self, runs: Iterable[EncodedRun]) -> Iterator[Batch]:
        """The chunks in batches, in order; those of one batch have the same layout and fit into a slot."""
        batch: list[EncodedRun] = []
        rows, room = self._tuning.rows, self.slot_bytes  # left in the batch
        for run in runs:
            first = 0
            while first < len(run):
                fits = int(np.searchsorted(np.cumsum(run.sizes[first : first + rows]), room, side="right"))
                if batch and (not fits or batch[0].code.layout != run.code.layout):
                    yield Batch(batch)
                    batch, rows, room = [], self._tuning.rows, self.slot_bytes
                    continue
                part = run.part(first, first + max(fits, 1))
                batch.append(part)
                first, rows, room = first + len(part), rows - len(part), room - part.bytes
        if batch:
            yield Batch(batch)

    def next_slot(self) -> Slot:
        """Wait for the slot that was begun first, and return it."""
        if self._kept is not None:
            self._kept.lend()
        self._turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[self._turn]
        slot.finish()
        return slot

    def finish_next_slot(self) -> None:
        """Wait for it, so that `next_slot` will not."""
        self._slots[(self._turn + 1) % len(self._slots)].finish()

    @property
    def slot_count(self) -> int:
        """How many batches can be at work."""
        return len(self._slots)

    def _idle_samples(self, segments: int) -> Samples:
        """For so many segments. They are used again, because pinning memory takes long while copies are in flight."""
        for samples in self._samples:
            if not samples.segments and samples.room >= segments:
                return samples
        self._samples.append(Samples(max(segments, _CHOSEN_AT_ONCE), self._device))
        return self._samples[-1]

    def _counts(self, coded: Iterable[tuple[_core.Segment, Code | None]]) -> list[Count]:
        """Begin to count the encoded sizes of those segments that have codes: one count for each layout."""
        by_layout: dict[Layout, list[tuple[_core.Segment, Code]]] = {}
        for segment, code in coded:
            if code is not None:
                by_layout.setdefault(code.layout, []).append((segment, code))
        return [self._count(chosen) for chosen in by_layout.values()]

    def _count(self, chosen: Sequence[tuple[_core.Segment, Code]]) -> Count:
        """Begin to count the encoded sizes of these segments, all of one layout."""
        layout = chosen[0][1].layout
        self._have_ready(layout, self._device)
        chunks = [segment.bytes // CHUNK_BYTES for segment, _ in chosen]
        parameters = np.repeat(parameters_of([code for _, code in chosen]), chunks, axis=0)
        starts = np.array([segment.address for segment, _ in chosen])
        firsts = np.cumsum(chunks) - chunks
        sources = np.repeat(starts, chunks) + (np.arange(len(parameters)) - np.repeat(firsts, chunks)) * CHUNK_BYTES
        result = Count(chosen, np.zeros(len(parameters), np.int64))
        for first in range(0, len(parameters), self._count_rows):
            _core.stop_if_asked()
            mine = slice(first, min(first + self._count_rows, len(parameters)))
            slot, count = self.next_slot(), mine.stop - mine.start
            counters = slot.counters_for(count, partial(_store_sizes, result.sizes[mine]))
            slot.set_rows(parameters[mine], sources[mine], counters + 4 * np.arange(count), 0)
            with codec_errors():
                self._runner.count(slot.stream, layout, slot.table, count)
            slot.begun(then=Slot.read_counters)
            result.slots.append((first, slot))
        return result

    def _take_memory(
        self, spare_bytes: int, lenders: Sequence[_core.Segment], *, keep_bytes: bool
    ) -> tuple[int, int, int]:
        """The address of all slots (0: there is no memory), their number, and how many bytes of chunks each takes."""
        tuning = self._tuning
        shapes = [(tuning.most_slots, tuning.slot_bytes[0]), *((tuning.slots, each) for each in tuning.slot_bytes)]
        for slots, slot_bytes in shapes:
            nbytes = workbench_bytes(tuning, slots, slot_bytes)
            if nbytes > spare_bytes:
                continue
            try:
                self._memory = _core.Scratch(self._device, nbytes)
            except OutOfDeviceMemory:
                continue
            return self._memory.address, slots, slot_bytes
        needed = workbench_bytes(tuning, tuning.slots, tuning.lent_slot_bytes)
        large = [segment for segment in lenders if segment.device == self._device and segment.bytes >= needed]
        if not large:
            return 0, tuning.slots, tuning.lent_slot_bytes
        segment = min(large, key=lambda segment: segment.bytes)  # mapping may wait for the driver to scrub
        segment.map()
        self._kept = Kept(segment, needed) if keep_bytes else Cleared(segment, needed)
        return segment.address, tuning.slots, tuning.lent_slot_bytes


class Samples:
    """A sample of each of some segments, from places all over it, copied to the host.

    Attributes:
        room: the most segments.
        segments: whose samples are being copied.
    """

    def __init__(self, room: int, device: int) -> None:
        self.room = room
        self.segments: Sequence[_core.Segment] = ()
        self._stream = _core.CopyStream(device)  # before the block: destroyed in this order if nobody closes this
        self._block = pinned_block(room * _SAMPLE_BYTES, device, -1)

    def begin(self, segments: Sequence[_core.Segment]) -> None:
        """Begin to copy samples of these, which must not change before `finish`."""
        self.segments = segments
        for number, segment in enumerate(segments):
            places = 1 << (min(_SAMPLE_PLACES, segment.bytes // CHUNK_BYTES).bit_length() - 1)
            nbytes = _SAMPLE_BYTES // places
            for place in range(places):
                address = segment.address + segment.bytes // places * place
                self._stream.to_host(self._block, number * _SAMPLE_BYTES + place * nbytes, address, nbytes)

    def finish(self) -> npt.NDArray[np.uint8]:
        """Wait for the copies, and return them; shape (segments, _SAMPLE_BYTES)."""
        self._stream.synchronize()
        content = np.frombuffer(memoryview(self._block), np.uint8)[: len(self.segments) * _SAMPLE_BYTES]
        self.segments = ()
        samples: npt.NDArray[np.uint8] = content.reshape(-1, _SAMPLE_BYTES).copy()
        return samples

    def close(self) -> None:
        """Wait for the copies, and free the memory. Closing again does nothing."""
        with closing(self._block), self._stream:
            pass


@dataclass
class Plan:
    """How to encode some segments of one device. It is found in steps, between which the caller can do other work.

    Attributes:
        counts: that were begun.
        samples: by which the codes are still to be chosen.
    """

    workbench: Workbench
    segments: Sequence[_core.Segment]
    counts: list[Count] = field(default_factory=list)
    samples: Samples | None = None

    def count(self) -> None:
        """Wait for the samples, choose codes by them, and begin to count the encoded sizes; once is enough.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        samples, self.samples = self.samples, None
        if samples is not None:
            self.counts += self.workbench.count_sampled(samples)

    def finish(self) -> dict[int, Encoding]:
        """Wait for the counts: how to encode each segment, by id, without those better stored uncompressed.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        self.count()
        return {segment_id: encoding for count in self.counts for segment_id, encoding in count.finish().items()}


@dataclass
class Count:
    """Sizes of encoded chunks, which are being counted; each is 0 until its count has finished.

    Attributes:
        sizes: of all chunks of `chosen`.
        slots: the slots that count, each with the index of its first chunk.
    """

    chosen: Sequence[tuple[_core.Segment, Code]]
    sizes: npt.NDArray[np.int64]
    slots: list[tuple[int, Slot]] = field(default_factory=list)

    def finish(self) -> dict[int, Encoding]:
        """How to encode each segment, by id, without those that would not become smaller."""
        for first, slot in self.slots:
            if not self.sizes[first]:  # otherwise the slot may already have other work
                slot.finish()
        ends = np.cumsum([segment.bytes // CHUNK_BYTES for segment, _ in self.chosen])
        pairs = zip(self.chosen, np.split(self.sizes, ends[:-1]), strict=True)
        return {s.id: Encoding(code, sizes) for (s, code), sizes in pairs if sizes.sum() < _WORTH * s.bytes}


def close_all(workbenches: Iterable[Workbench]) -> None:
    """Close all of them, even if some raise."""
    with ExitStack() as stack:
        for workbench in workbenches:
            stack.callback(workbench.close)


def parts_to_plan(segments: Iterable[_core.Segment], part_bytes: int) -> Iterator[list[_core.Segment]]:
    """Parts in order, each of one device, and no larger than the limit unless a single segment is."""
    part: list[_core.Segment] = []
    nbytes = 0
    for segment in segments:
        if part and (nbytes + segment.bytes > part_bytes or segment.device != part[0].device):
            yield part
            part, nbytes = [], 0
        part.append(segment)
        nbytes += segment.bytes
    if part:
        yield part


class Batch:
    """Chunks of one layout, for one launch of a kernel, one after another in a slot.

    Attributes:
        sizes: bytes of each encoded chunk.
        starts: where each begins in the slot.
    """

    def __init__(self, runs: Sequence[EncodedRun]) -> None:
        self.runs = runs
        self.layout = runs[0].code.layout
        self.sizes = np.concatenate([run.sizes for run in runs])
        ends = np.cumsum(self.sizes)
        self.starts: npt.NDArray[np.int64] = ends - self.sizes
        self.bytes = int(ends[-1])

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def parameters(self) -> Bytes:
        """Of each chunk's code."""
        return np.repeat(parameters_of([run.code for run in self.runs]), [len(run) for run in self.runs], axis=0)

    @property
    def addresses(self) -> npt.NDArray[np.int64]:
        """Where each chunk's content is on the device."""
        return np.concatenate([run.address + CHUNK_BYTES * np.arange(len(run)) for run in self.runs])

    @property
    def addresses_in_extents(self) -> npt.NDArray[np.int64]:
        """Where kernels find each encoded chunk, if they reach its extent."""
        starts = [run.extent.address + run.offset + np.cumsum(run.sizes) - run.sizes for run in self.runs]
        return np.concatenate(starts)

    def pieces(self, address: int) -> list[Piece]:
        """The encoded chunks, as they are copied between the extents and a slot whose chunks begin at `address`."""
        pieces = []
        for run in self.runs:
            pieces.append(Piece(run.extent, run.offset, address, run.bytes))
            address += run.bytes
        return pieces

    def check_sizes(self, counters: npt.NDArray[np.uint32]) -> None:
        """Compare what was encoded, without headers, with what was planned.

        Raises:
            ChangedMeanwhile: a chunk does not have the planned size.
        """
        encoded = counters + self.layout.header_bytes
        if (differing := np.flatnonzero(encoded != self.sizes)).size:
            ends = np.cumsum([len(run) for run in self.runs])
            segment = self.runs[int(np.searchsorted(ends, differing[0], side="right"))].segment
            raise ChangedMeanwhile(
                f"the segment at 0x{segment.address:x} was written to while it was backed up: run no work on"
                " the GPU during sleep, and call again; everything is awake"
            )


def _write(lane: Lane, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        lane.write(piece.extent, piece.offset, piece.address, piece.bytes)


def _store_sizes(sizes: npt.NDArray[np.int64], counters: npt.NDArray[np.uint32]) -> None:
    sizes[:] = counters


def workbench_bytes(tuning: Tuning, slots: int, slot_bytes: int) -> int:
    """The size of all slots, in whole pages."""
    nbytes = slots * (head_bytes(tuning.rows) + slot_bytes)
    return -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES
