"""A transfer: the copies of one operation between one device and extents, out or in, over one link or several."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from .. import _core
from ..core.extents import Piece
from ..core.segments import total_bytes
from .link import Batch, Link

_LOOK_S = 50e-6  # between looks for a link that is free: a batch takes a hundred times as long


class Transfer:
    """The pieces of some segments, copied in the order in which they were added.

    They may be added while others are copied, as they become ready. Whichever link is free takes the next batch.

    Args:
        links: to the device or from it.
        arrived: called with segments that have arrived: all of their pieces were added, and copied.
    """

    def __init__(self, links: Sequence[Link], arrived: Callable[[Sequence[_core.Segment]], None]) -> None:
        self._links = links
        self._arrived = arrived
        self._pieces: deque[tuple[_core.Segment, Piece]] = deque()
        self._missing: dict[int, int] = {}  # bytes that have not arrived, by the id of the segment
        self._more_follows: set[int] = set()  # ids of segments with pieces that are not ready yet

    def add(self, segment: _core.Segment, pieces: Iterable[Piece], *, more_follows: bool = False) -> None:
        """Copy these, too: all of the segment or, if more of it follows, what is ready.

        Pieces may be of any size, and need not be all of the segment's memory. Of a segment that turns out to have no
        more, nothing may be left to copy: then it has arrived.
        """
        for piece in pieces:
            if piece.bytes:
                self._pieces.append((segment, piece))
                self._missing[segment.id] = self._missing.get(segment.id, 0) + piece.bytes
        if more_follows:
            self._more_follows.add(segment.id)
            return
        self._more_follows.discard(segment.id)
        if segment.id not in self._missing:
            self._arrived([segment])

    def step(self) -> int:
        """Begin the next batch; returns its bytes, or 0 if no piece is left.

        Raises:
            DriverError, OutOfHostMemory, InvalidState: not all is copied, and some is in flight.
        """
        if not self._pieces:
            return 0
        link = self._free_link()
        batch = self._next_batch(link.most_bytes())
        self._note_arrived(link.begin(batch))
        return batch.bytes

    def finish(self) -> None:
        """Wait until all that was begun has arrived.

        Raises:
            DriverError: not all is copied.
        """
        for link in self._links:
            self._note_arrived(link.wait())

    @property
    def in_flight(self) -> set[int]:
        """Ids of the segments whose copies may not have ended yet."""
        batches = (batch for link in self._links for batch in link.in_flight)
        return {segment.id for batch in batches for segment in batch.segments}

    def _free_link(self) -> Link:
        while len(self._links) > 1:  # a slow one must not keep the others waiting
            for link in self._links:
                if link.is_free():
                    return link
            time.sleep(_LOOK_S)
        return self._links[0]

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
                if segment.id not in self._more_follows:
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
