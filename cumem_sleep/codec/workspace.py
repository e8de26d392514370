"""Compressed backups: chunks are encoded on the GPU on their way to a tier, and decoded on their way back.

First `plan` says how, and so how large, they become; then `encode` brings them to the extents that were taken for them,
and later `decoding` brings them back. How they are coded is up to the codecs. Here chunks pass through a few
slots of device memory, each with its own stream, so that one slot's copies overlap with another's kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import product

import numpy as np

from .. import _core
from ..core import log
from ..core.extents import Lane, LaneGroup
from ..core.pinned import pinned_block
from ..core.tuning import Tuning
from ..errors import OutOfDeviceMemory
from .chunks import ChunkBatch, EncodedRun, Encoding, batches
from .codec import CHUNK_BYTES, Code, Layout
from .plan import PLANNED_AT_ONCE, SAMPLES_BYTES, Plan, Planner
from .slots import Slot, head_bytes


class Workspace:
    """The slots of one device. A context manager; after leaving it, nothing is in flight and all memory is freed.

    Attributes:
        has_memory: there are slots. Without them nothing is encoded or decoded here.
        slot_bytes: how many bytes of encoded chunks fit into a slot.
    """

    def __init__(
        self,
        device: int,
        tuning: Tuning,
        spare_bytes: int,
        ready: set[tuple[Layout, int]],
        *,
        small: bool,
    ) -> None:
        self._device = device
        self._most_rows = tuning.rows
        self._current = 0
        self._warned = False
        self._slots: list[Slot] = []  # before the memory: destroyed in this order if nobody closes them
        self._sampling = _core.CopyStream(device)
        if small:
            spare_bytes = min(spare_bytes, workspace_bytes(tuning, tuning.slots, tuning.slot_bytes[-1]))
        self._memory, slots, self.slot_bytes = _take_memory(device, tuning, spare_bytes)
        self.has_memory = self._memory is not None
        self._block: _core.HostBlock | None = None  # the slots' tables, and samples
        try:
            head = head_bytes(tuning.rows)
            self._block = pinned_block(slots * head + SAMPLES_BYTES, device, -1)
            self._planner = Planner(tuning, ready, self._sampling, self._block, small=small)
            for number in range(slots if self.has_memory else 0):
                at = self._memory.address + number * (head + self.slot_bytes) if self._memory else 0
                self._slots.append(Slot(device, at, tuning.rows, self._block, number))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is in flight and free all memory."""
        with ExitStack() as stack:
            if self._memory is not None:
                stack.callback(self._memory.close)
            if self._block is not None:
                stack.callback(self._block.close)
            # First, because an ExitStack goes from the last to the first. Leaving a stream waits for its work.
            for stream in [self._sampling, *(slot.stream for slot in self._slots)]:
                stack.enter_context(stream)

    def plan(self, segments: Sequence[_core.Segment], raw: Collection[int] = ()) -> dict[int, Encoding]:
        """How to encode each of `segments`, by id, without those that are better stored uncompressed.

        Args:
            raw: the ids of those that are not to be encoded.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        plans: list[Plan] = []
        for first in range(0, len(segments), PLANNED_AT_ONCE):  # while the GPU counts those before
            plans.append(self.begin_plan(segments[first : first + PLANNED_AT_ONCE], {}, raw))
            plans[-1].count()
        return {segment_id: encoding for plan in plans for segment_id, encoding in plan.finish().items()}

    def begin_plan(
        self, segments: Sequence[_core.Segment], codes: Mapping[int, Code], raw: Collection[int] = ()
    ) -> Plan:
        """Begin to plan how to encode `segments`; may be called between calls of `encode`, once the plan before counts.

        Args:
            codes: by id, where they are known. The other segments get theirs from samples.
            raw: as for `plan`.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        if not self.has_memory and not self._warned:
            self._warned = True
            log.warning(
                "device %d has no memory left for the codec to work in: its backups are stored uncompressed this time",
                self._device,
            )
        coded = [s for s in segments if s.bytes % CHUNK_BYTES == 0 and s.id not in raw] if self.has_memory else []
        known = [(segment, codes[segment.id]) for segment in coded if segment.id in codes]
        return Plan(self._planner, self.next_slot, segments, known, [s for s in coded if s.id not in codes])

    def encode(self, runs: Iterable[EncodedRun], lane_group: LaneGroup) -> None:
        """Encode chunks and copy them to their places in the extents.

        When `finish` has returned, they have arrived and have the planned sizes.

        Raises:
            ChangedMeanwhile: a chunk does not have the planned size. Nothing else was overwritten.
            DriverError, OutOfHostMemory: the driver or the system refused.
            CodecError: a kernel failed.
        """
        for batch in self.batches(runs):
            slot = self.next_slot()
            slot.use(lane_group)
            slot.encode(batch)
            self._slots[self._current - 1].copy()
        for slot in self._slots:
            slot.copy()

    def finish(self) -> None:
        """Wait for everything that was begun.

        Raises:
            ChangedMeanwhile: a chunk does not have the planned size. Nothing else was overwritten.
            DriverError: a copy or kernel failed.
        """
        for _ in self._slots:
            self.next_slot()
        for slot in self._slots:
            slot.read_counters()

    @property
    def in_flight(self) -> set[int]:
        """Ids of the segments whose chunks are being encoded or copied."""
        return {run.segment.id for slot in self._slots if slot.batch is not None for run in slot.batch.runs}

    def decode_again(self, run: EncodedRun, lane_group: LaneGroup) -> int:
        """Decode chunks (few enough for a slot) from their extent; returns the temporary address of their content.

        Raises:
            DriverError: the driver refused.
            CodecError: a kernel failed.
        """
        assert run.content_bytes <= self.slot_bytes
        target, source = self.next_slot(), self.next_slot()
        lane, targets = source.use(lane_group), target.chunks_address + CHUNK_BYTES * np.arange(len(run))
        for batch in self.batches([run]):  # encoded, what does not compress is larger, and may not fit at once
            for piece in batch.pieces(source.chunks_address):
                lane.begin(piece.extent, piece.rows, out=False)
            source.synchronize()
            target.decode(batch, source.chunks_address + batch.starts, targets[: len(batch)])
            target.finish()
            targets = targets[len(batch) :]
        return target.chunks_address

    def batches(self, runs: Iterable[EncodedRun]) -> Iterator[ChunkBatch]:
        """The chunks in batches that fit into a slot, in order."""
        return batches(runs, self._most_rows, self.slot_bytes)

    def lanes(self, lane_group: LaneGroup) -> list[Lane]:
        """Lanes for the copies to its slots, in the order of the slots."""
        return [slot.use(lane_group) for slot in self._slots]

    def next_slot(self) -> Slot:
        """Wait for the slot that was begun first, and return it."""
        self._current = (self._current + 1) % len(self._slots)
        slot = self._slots[self._current]
        slot.finish()
        return slot

    def finish_next_slot(self) -> None:
        """Wait for it, so that `next_slot` will not."""
        self._slots[(self._current + 1) % len(self._slots)].finish()


def close_all(workspaces: Collection[Workspace]) -> None:
    """Close all of them, even if some raise."""
    with ExitStack() as stack:
        for workspace in workspaces:
            stack.callback(workspace.close)


def workspace_bytes(tuning: Tuning, slots: int, slot_bytes: int) -> int:
    """The size of all slots, in whole pages."""
    nbytes = slots * (head_bytes(tuning.rows) + slot_bytes)
    return -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES


def _take_memory(device: int, tuning: Tuning, spare_bytes: int) -> tuple[_core.Scratch | None, int, int]:
    """Memory for slots (None: there is none), how many they are, and how many bytes of encoded chunks each takes.

    Args:
        spare_bytes: how much may be taken.
    """
    for slots, slot_bytes in ((tuning.most_slots, tuning.slot_bytes[0]), *product([tuning.slots], tuning.slot_bytes)):
        nbytes = workspace_bytes(tuning, slots, slot_bytes)
        with suppress(OutOfDeviceMemory):
            if nbytes <= spare_bytes:
                return _core.Scratch(device, nbytes), slots, slot_bytes
    return None, tuning.slots, tuning.slot_bytes[-1]
