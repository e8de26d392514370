"""A link: one way between host memory and a device, with several batches in flight, so that it never waits for us.

`operations/wake.py` and `backups/filling.py` make them; the vault's own copies are in `vault/link.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .. import _core
from ..core.extents import Lane, Piece
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


class Link(ABC):
    """One direction of a link, with one batch in flight on each of its lanes.

    A transfer asks its links in turn: whichever is free gets the next batch.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = deque(lanes)
        self._in_flight: deque[tuple[Batch, Lane]] = deque()

    @abstractmethod
    def most_bytes(self) -> int:
        """The most that the next batch may have."""

    @abstractmethod
    def begin(self, batch: Batch) -> list[Batch]:
        """Begin to copy a batch; returns those that have arrived meanwhile.

        Raises:
            DriverError, OutOfHostMemory, InvalidState: what was begun before may be in flight.
        """

    @abstractmethod
    def is_free(self) -> bool:
        """Whether `begin` would not wait for a batch."""

    def wait(self) -> list[Batch]:
        """Wait for all batches that are in flight, and return them."""
        return self._wait_until(0)

    @property
    def in_flight(self) -> Sequence[Batch]:
        """What may not have arrived yet, the oldest first."""
        return [batch for batch, _ in self._in_flight]

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


class LinkOut(Link):
    """From a device to extents, by its copy engine. What is added bit by bit goes to one lane until that is full."""

    def __init__(self, lanes: Sequence[Lane], tuning: Tuning) -> None:
        super().__init__(lanes)
        self._tuning = tuning
        self._room_bytes = 0  # on the lane in use

    def is_free(self) -> bool:
        """Whether there is room on a lane, or one is done."""
        has_room = self._room_bytes > 0 or len(self._in_flight) < len(self._lanes)
        return has_room or self._in_flight[0][1].is_done()

    def most_bytes(self) -> int:
        """What the lane in use has room for, or else a whole one."""
        return self._room_bytes or self._tuning.stream_bytes

    def begin(self, batch: Batch) -> list[Batch]:
        """Wait for a lane where the one in use is full and all others are in flight."""
        arrived = []
        if not self._room_bytes or not self._in_flight:
            arrived = self._wait_until(len(self._lanes) - 1)
            self._in_flight.append((Batch(), self._next_lane()))
            self._room_bytes = self._tuning.stream_bytes
        self._room_bytes -= batch.bytes
        on_lane, lane = self._in_flight[-1]
        on_lane.pieces += batch.pieces
        on_lane.segments += batch.segments
        for piece in batch.pieces:
            lane.write(piece.extent, piece.offset, piece.address, piece.bytes)
        return arrived


class LinkIn(Link):
    """From extents to a device, by whoever its pace chooses.

    Args:
        mapped: waits until the segment with that id is mapped.
    """

    def __init__(self, lanes: Sequence[Lane], pace: Pace, mapped: Callable[[int], None], tuning: Tuning) -> None:
        super().__init__(lanes)
        self._pace = pace
        self._mapped = mapped
        self._tuning = tuning

    def is_free(self) -> bool:
        """Whether a lane is left for the next batch after this one, or the oldest is done."""
        if len(self._in_flight) < len(self._lanes) - 1 or not self._in_flight:
            return True
        return self._in_flight[0][1].is_done()

    def most_bytes(self) -> int:
        """While the engine is slow, the kernel waits for a trial of it: that is small."""
        choice = self._pace.next()
        if choice.alone:
            return self._tuning.batch_bytes if choice.again else self._tuning.trial_bytes
        return self._tuning.engine_batch_bytes if choice.by_engine else self._tuning.batch_bytes

    def begin(self, batch: Batch) -> list[Batch]:
        """Then wait until a lane is free for the next batch; nothing stays in flight where this one is timed alone."""
        choice, arrived = self._pace.next(), []
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
        return arrived
