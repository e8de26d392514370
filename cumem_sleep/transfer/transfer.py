"""A transfer: the copies of one operation between one device and extents, out or in.

Several batches are in flight, so that the link never waits for us. The vault's own copies are in `vault/link.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .. import _core
from ..core.extents import Lane, Piece
from ..core.segments import total_bytes
from ..core.tuning import Tuning
from .copiers import read_pieces
from .engine_or_kernel import Pace


@dataclass
class Batch:
    """Pieces that are copied together, each with the segment that it belongs to."""

    pieces: list[Piece] = field(default_factory=list)
    segments: list[_core.Segment] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The total size of all pieces."""
        return sum(piece.bytes for piece in self.pieces)


class Transfer(ABC):
    """The pieces of some segments, copied in the order in which they were added, with a batch in flight on each lane.

    They may be added while others are copied, each segment once.

    Args:
        arrived: called with segments that have arrived: all of their pieces were copied.
    """

    def __init__(
        self, lanes: Sequence[Lane], arrived: Callable[[Sequence[_core.Segment]], None], tuning: Tuning
    ) -> None:
        self._lanes = deque(lanes)
        self._arrived = arrived
        self._tuning = tuning
        self._in_flight: deque[tuple[Batch, Lane]] = deque()  # may not have arrived yet, the oldest first
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

    @abstractmethod
    def step(self) -> int:
        """Begin the next batch; returns its bytes, or 0 if no piece is left.

        Raises:
            DriverError, OutOfHostMemory, InvalidState: not all is copied, and some is in flight.
        """

    def finish(self) -> None:
        """Wait until all that was begun has arrived.

        Raises:
            DriverError: not all is copied.
        """
        self._note_arrived(self._wait_until(0))

    @property
    def in_flight(self) -> set[int]:
        """Ids of the segments whose copies may not have ended yet."""
        return {segment.id for batch, _ in self._in_flight for segment in batch.segments}

    def _next_lane(self) -> Lane:
        self._lanes.rotate(-1)
        return self._lanes[-1]

    def _wait_until(self, in_flight: int) -> list[Batch]:
        """Wait until no more than so many batches are in flight; returns those that have arrived."""
        arrived = []
        while len(self._in_flight) > in_flight:
            batch, lane = self._in_flight[0]
            lane.synchronize()
            self._in_flight.popleft()
            arrived.append(batch)
        return arrived

    def _next_batch(self, most_bytes: int) -> Batch:
        batch, room = Batch(), most_bytes
        while self._pieces and room > 0:
            segment, piece = self._pieces.popleft()
            if piece.bytes > room:
                piece, rest = piece.split(room)
                self._pieces.appendleft((segment, rest))
            batch.pieces.append(piece)
            batch.segments.append(segment)
            room -= piece.bytes
        return batch

    def _note_arrived(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            whole = []
            for segment, piece in zip(batch.segments, batch.pieces, strict=True):
                self._missing[segment.id] -= piece.bytes
                if self._missing[segment.id]:
                    continue
                del self._missing[segment.id]
                whole.append(segment)
            if whole:
                self._arrived(whole)


class TransferOut(Transfer):
    """From a device to extents, by its copy engine. What is added bit by bit goes to one lane until that is full."""

    _room_bytes = 0  # on the lane in use

    def step(self) -> int:
        """Wait for a lane first where the one in use is full and all others are in flight."""
        if not self._pieces:
            return 0
        if not self._room_bytes or not self._in_flight:
            self._note_arrived(self._wait_until(len(self._lanes) - 1))
            self._in_flight.append((Batch(), self._next_lane()))
            self._room_bytes = self._tuning.stream_bytes
        batch = self._next_batch(self._room_bytes)
        self._room_bytes -= batch.bytes
        on_lane, lane = self._in_flight[-1]
        on_lane.pieces += batch.pieces
        on_lane.segments += batch.segments
        for piece in batch.pieces:
            lane.begin(piece.extent, piece.rows, out=True)
        return batch.bytes


class TransferIn(Transfer):
    """From extents to a device, by whoever its pace chooses.

    Args:
        mapped: waits until the segment with that id is mapped.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        arrived: Callable[[Sequence[_core.Segment]], None],
        tuning: Tuning,
        pace: Pace,
        mapped: Callable[[int], None],
    ) -> None:
        super().__init__(lanes, arrived, tuning)
        self._pace = pace
        self._mapped = mapped

    def step(self) -> int:
        """Then wait until a lane is free for the next batch; nothing stays in flight where this one is timed alone."""
        if not self._pieces:
            return 0
        choice, arrived = self._pace.next(), []
        if choice.alone:  # while the engine is slow, the kernel waits for a trial of it: that is small
            most_bytes = self._tuning.batch_bytes if choice.again else self._tuning.trial_bytes
        else:
            most_bytes = self._tuning.engine_batch_bytes if choice.by_engine else self._tuning.batch_bytes
        batch = self._next_batch(most_bytes)
        begin = time.perf_counter()  # before mapping and pinning, because copies in flight go on meanwhile
        for segment in batch.segments:
            self._mapped(segment.id)
        lane = self._next_lane()
        lane.pin(piece.extent for piece in batch.pieces)
        if choice.alone:
            arrived += self._wait_until(0)
            begin = time.perf_counter()
        self._in_flight.append((batch, lane))
        read_pieces(self._pace, lane, batch.pieces, by_engine=choice.by_engine)
        arrived += self._wait_until(0 if choice.alone else len(self._lanes) - 1)
        self._pace.record(batch.bytes, time.perf_counter() - begin)
        self._note_arrived(arrived)
        return batch.bytes


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
