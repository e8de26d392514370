"""The copies to one device, batch by batch: several are in flight, so that the link never waits for the caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from .. import _core
from ..extents import Piece
from ..segments import total_bytes
from ..tuning import Tuning
from .pacing import Choice, Choices
from .routes import Route


@dataclass
class Batch:
    """Pieces that are copied together.

    Attributes:
        segments: those that the pieces belong to.
        completed: those whose last byte is in this batch.
    """

    pieces: list[Piece] = field(default_factory=list)
    segments: list[_core.Segment] = field(default_factory=list)
    completed: list[_core.Segment] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The total size of all pieces."""
        return sum(piece.bytes for piece in self.pieces)


class Batches:
    """All pieces of the segments, in order, in batches of any size."""

    def __init__(self, backups: Iterable[tuple[_core.Segment, Sequence[Piece]]]) -> None:
        # Each piece with its segment, and whether it completes that segment.
        self._pieces: list[tuple[_core.Segment, Piece, bool]] = []
        for segment, pieces in backups:
            self._pieces += [(segment, piece, piece is pieces[-1]) for piece in pieces]
        self._pieces.reverse()

    def next(self, nbytes: int) -> Batch:
        """The next batch, of at most `nbytes`; empty if nothing is left."""
        batch = Batch()
        while self._pieces and nbytes > 0:
            segment, piece, is_last = self._pieces.pop()
            if piece.bytes > nbytes:
                piece, rest = piece.split(nbytes)
                self._pieces.append((segment, rest, is_last))
                is_last = False
            batch.pieces.append(piece)
            batch.segments.append(segment)
            if is_last:
                batch.completed.append(segment)
            nbytes -= piece.bytes
        return batch


class RawCopies:
    """The copies of uncompressed backups to one device."""

    def __init__(
        self,
        mapped: Callable[[int], None],
        completed: Callable[[Sequence[_core.Segment]], None],
        routes: Sequence[Route],
        choices: Choices,
        tuning: Tuning,
    ) -> None:
        self._mapped = mapped
        self._completed = completed
        self._routes = routes
        self._choices = choices
        self._tuning = tuning
        self._in_flight: list[tuple[Batch, Route]] = []

    def run(self, batches: Batches) -> Iterator[int]:
        """Yields the bytes of each batch after beginning it, so that several devices take turns."""
        choice = next(self._choices)
        for number in count():
            _core.stop_if_asked()
            batch = batches.next(self._batch_bytes(choice))
            if not batch.pieces:
                break
            start = time.perf_counter()  # before mapping and pinning, because copies in flight go on meanwhile
            for segment in batch.segments:
                self._mapped(segment.id)
            route = self._routes[number % len(self._routes)]
            route.lane.pin(piece.extent for piece in batch.pieces)
            if choice.alone:
                self._finish(leave=0)
                start = time.perf_counter()
            route.start(batch.pieces, by_engine=choice.by_engine)
            self._in_flight.append((batch, route))
            self._finish(leave=0 if choice.alone else len(self._routes) - 1)
            choice = self._choices.send((batch.bytes, time.perf_counter() - start))
            yield batch.bytes
        self._finish(leave=0)

    def _batch_bytes(self, choice: Choice) -> int:
        if choice.alone and not choice.again:
            return self._tuning.trial_bytes
        return self._tuning.engine_batch_bytes if choice.by_engine and not choice.alone else self._tuning.batch_bytes

    def _finish(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            _core.stop_if_asked()
            batch, route = self._in_flight[0]
            route.lane.synchronize()
            del self._in_flight[0]
            self._completed(batch.completed)


class Together:
    """Begins something for several segments at a time, as they are completed; at the end for fewer and fewer.

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
        """These are completed."""
        self._waiting += segments
        self._left_bytes -= total_bytes(segments)
        if total_bytes(self._waiting) >= min(self._together_bytes, self._left_bytes):
            waiting, self._waiting = self._waiting, []
            self._begin(waiting)


class SlotCopies:
    """Copies to the slots of one device, by whichever route is faster at the moment."""

    def __init__(self, routes: Sequence[Route], choices: Choices) -> None:
        self._routes = routes
        self._choices = choices
        self._choice = next(self._choices)

    @property
    def alone(self) -> bool:
        """Whether the next copy must run alone, so that its time gives the rate."""
        return self._choice.alone

    def start(self, slot: int, pieces: Sequence[Piece]) -> None:
        """Begin to copy these, in the order of this slot's stream."""
        self._routes[slot].start(pieces, by_engine=self._choice.by_engine)

    def took(self, nbytes: int, seconds: float) -> None:
        """Report how long the copy took or, with others in flight, how long until the next could begin."""
        self._choice = self._choices.send((nbytes, seconds))
