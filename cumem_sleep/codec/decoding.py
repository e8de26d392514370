"""Compressed backups on their way back: chunks are copied to the slots of a workspace, and decoded from there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from .. import _core
from ..core.copy_chooser import CopyChooser
from ..core.extents import LaneGroup
from .chunks import ChunkBatch, EncodedRun
from .codec import CHUNK_BYTES
from .slots import Slot
from .workspace import Workspace


class Decoding:
    """The encoded chunks of one device; used like a `Transfer`, by `step` and `finish`.

    Args:
        chooser: of as many batches in flight as the workspace has slots.
        mapped: waits until the segment with that id is mapped.
        completed: called with segments all of whose chunks are in place.
    """

    def __init__(
        self,
        runs: Iterable[EncodedRun],
        workspace: Workspace,
        lane_group: LaneGroup,
        chooser: CopyChooser,
        mapped: Callable[[int], None],
        completed: Callable[[Sequence[_core.Segment]], None],
    ) -> None:
        self._chooser = chooser
        self._workspace = workspace
        self._lane_group = lane_group
        self._batches = workspace.batches(runs)
        self._mapped = mapped
        self._completed = completed
        self._copied: deque[tuple[Slot, ChunkBatch]] = deque()  # or being copied
        self._decoded: deque[tuple[Slot, list[_core.Segment]]] = deque()  # or being decoded: what is whole then

    def step(self) -> int:
        """Begin to copy the next batch, and decode one that has been copied.

        Returns:
            The bytes of its content; 0 if no batch is left.

        Raises:
            DriverError, InvalidState: what the driver or `mapped` raised.
            CodecError: a kernel failed.
        """
        batch = next(self._batches, None)
        if batch is None:
            return 0
        slot = self._workspace.next_slot()
        self._tell_of_decoded()
        begin = time.perf_counter()  # before pinning, because copies in flight go on meanwhile
        slot.use(self._lane_group).pin(run.extent for run in batch.runs)
        self._copy(slot, batch, begin)
        return len(batch) * CHUNK_BYTES

    def finish(self) -> None:
        """Decode the rest, and wait for it.

        Raises:
            DriverError, InvalidState, CodecError: as `step`.
        """
        while self._copied:
            self._decode_next()
        self._workspace.finish()
        self._tell_of_decoded()

    def _copy(self, slot: Slot, batch: ChunkBatch, begin: float) -> None:
        choice = self._chooser.next()
        if choice.alone:
            self._workspace.finish()
            for other, _ in self._copied:
                other.synchronize()
            begin = time.perf_counter()
        by_kernel = not choice.by_engine
        for piece in batch.pieces(slot.chunks_address):
            by_kernel = slot.opened_lane.begin(piece.extent, piece.rows, out=False, by_kernel=by_kernel)
        if not (by_kernel or choice.by_engine):
            self._chooser.best = None
        self._copied.append((slot, batch))
        if choice.alone:
            slot.synchronize()
            self._chooser.record(batch.bytes, time.perf_counter() - begin)
        # Keep this many copies in flight while the first batch waits for its segment to be mapped.
        if len(self._copied) > self._chooser.in_flight - 2:
            self._decode_next()
        if not choice.alone:
            self._workspace.finish_next_slot()
            self._tell_of_decoded()
            self._chooser.record(batch.bytes, time.perf_counter() - begin)

    def _decode_next(self) -> None:
        slot, batch = self._copied.popleft()
        for segment_id in dict.fromkeys(run.segment.id for run in batch.runs):
            self._mapped(segment_id)
        slot.opened_lane.join()
        slot.decode(batch, slot.chunks_address + batch.starts)
        self._decoded.append((slot, [run.segment for run in batch.runs if run.is_last]))

    def _tell_of_decoded(self) -> None:
        while self._decoded and not self._decoded[0][0].is_busy:
            self._completed(self._decoded.popleft()[1])
