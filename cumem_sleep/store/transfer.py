"""A transfer: the copies of one operation between one device and extents, out or in.

Several batches are in flight, so that the link never waits for us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .. import _core
from ..core.copy_chooser import CopyChooser
from ..core.extents import Lane, Piece
from ..core.segments import total_bytes
from ..core.tuning import Tuning
from .copier import Copier


@dataclass
class Batch:
    """Pieces that are copied together on one lane, each with the segment that it belongs to."""

    lane: Lane
    pieces: list[Piece] = field(default_factory=list)
    segments: list[_core.Segment] = field(default_factory=list)


class Transfer:
    """The pieces of some segments, copied in the order in which they were added, with a batch in flight on each lane.

    They may be added while others are copied, each segment once. What is added bit by bit fills a batch.

    Args:
        chooser: chooses who copies; None: the copy engine.
        arrived: called with segments that have arrived: all of their pieces were copied.
        out: from the device.
        mapped: waits until the segment with that id is mapped.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        chooser: CopyChooser | None,
        arrived: Callable[[Sequence[_core.Segment]], None],
        tuning: Tuning,
        *,
        out: bool,
        mapped: Callable[[int], None] | None = None,
    ) -> None:
        self._lanes = deque(lanes)
        self._arrived = arrived
        self._out = out
        self._mapped = mapped
        self._copier: Copier[Batch] = Copier(chooser or CopyChooser(None, 0, len(lanes), tuning), tuning, self._finish)
        self._pieces: deque[tuple[_core.Segment, Piece]] = deque()
        self._missing: dict[int, int] = {}  # bytes that have not arrived, by the id of the segment

    def add(self, segment: _core.Segment, pieces: Iterable[Piece]) -> None:
        """Copy these, too. They may be of any size, and need not be all of the segment's memory; there may be none."""
        pieces = [piece for piece in pieces if piece.bytes]
        self._pieces += [(segment, piece) for piece in pieces]
        if pieces:
            self._missing[segment.id] = sum(piece.bytes for piece in pieces)
        else:
            self._arrived([segment])

    def step(self) -> int:
        """Begin the next part of a batch, when a lane is free for it.

        Nothing stays in flight where the batch is timed alone.

        Returns:
            Its bytes; 0 if no piece is left.

        Raises:
            DriverError, OutOfHostMemory, InvalidState: not all is copied, and some is in flight.
        """
        if not self._pieces:
            return 0
        copier = self._copier
        copier.go_on()
        part = self._next_part(copier.most_bytes - copier.batch_bytes)
        nbytes = sum(piece.bytes for _, piece in part)
        if self._mapped is not None:
            for segment, _ in part:
                self._mapped(segment.id)
        if not copier.batch_bytes:
            self._lanes.rotate(-1)
        lane = self._lanes[-1]
        if not self._out:
            lane.pin(piece.extent for _, piece in part)
        by_kernel = wanted = copier.ready()
        if not copier.batch_bytes:
            copier.in_flight.append(Batch(lane))
        batch = copier.in_flight[-1]
        for segment, piece in part:
            batch.segments.append(segment)
            batch.pieces.append(piece)
            by_kernel = lane.begin(piece.extent, piece.rows, out=self._out, by_kernel=by_kernel)
        copier.begun(nbytes, kernel_failed=wanted and not by_kernel)
        if copier.choice.alone:
            copier.end_batch()
        return nbytes

    def finish(self) -> None:
        """Wait until all that was begun has arrived.

        Raises:
            DriverError: not all is copied.
        """
        self._copier.wait()

    @property
    def in_flight(self) -> set[int]:
        """Ids of the segments whose copies may not have ended yet."""
        return {segment.id for batch in self._copier.in_flight for segment in batch.segments}

    def _next_part(self, most_bytes: int) -> list[tuple[_core.Segment, Piece]]:
        part, room = [], most_bytes
        while self._pieces and room > 0:
            segment, piece = self._pieces.popleft()
            if piece.bytes > room:
                piece, rest = piece.split(room)
                self._pieces.appendleft((segment, rest))
            part.append((segment, piece))
            room -= piece.bytes
        return part

    def _finish(self, batch: Batch) -> None:
        batch.lane.synchronize()
        self._copier.count(sum(piece.bytes for piece in batch.pieces))
        whole = []
        for segment, piece in zip(batch.segments, batch.pieces, strict=True):
            self._missing[segment.id] -= piece.bytes
            if not self._missing[segment.id]:
                del self._missing[segment.id]
                whole.append(segment)
        if whole:
            self._arrived(whole)


class Together:
    """Begins something for several segments at a time, as they arrive; at the end for fewer and fewer.

    Args:
        nbytes: of all segments.
        together_bytes: the least at a time, as long as so many are left.
    """

    def __init__(self, begin: Callable[[Sequence[_core.Segment]], None], nbytes: int, together_bytes: int) -> None:
        self._begin = begin
        self._left_bytes = nbytes
        self._together_bytes = together_bytes
        self._waiting: list[_core.Segment] = []

    def __call__(self, segments: Sequence[_core.Segment]) -> None:
        """These have arrived."""
        self._waiting += segments
        self._left_bytes -= total_bytes(segments)
        if total_bytes(self._waiting) >= min(self._together_bytes, self._left_bytes):
            waiting, self._waiting = self._waiting, []
            self._begin(waiting)
