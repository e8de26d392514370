"""Copies the bytes of segments into their backups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain

from .. import _core
from ..codec.workbench import Workbench
from ..extents import Lane, Piece, Transfers
from ..segments import by_device
from .backup import Backup

_MOST_STREAMS = 4


class Filling:
    """The copies of one operation: `add` segments part by part, then `finish`.

    Segments are copied while the caller works out what to add next. The tier prepares the extents ahead of the copies.
    Backups are not complete afterwards: the caller must first check whether anything wrote to the segments meanwhile.

    Args:
        most_bytes: by device, the most that is added.
    """

    def __init__(
        self,
        backups: Mapping[int, Backup],
        transfers: Transfers,
        streams: ExitStack,
        stream_bytes: int,
        most_bytes: Mapping[int, int],
    ) -> None:
        self._backups = backups  # by the segments' ids
        self._transfers = transfers
        self._streams = streams
        self._stream_bytes = stream_bytes
        self._most_bytes = most_bytes
        self._copies: dict[int, _Copies] = {}  # by device
        self._workbenches: dict[int, Workbench] = {}
        self._added: list[_core.Segment] = []

    def add(self, part: Sequence[_core.Segment], workbenches: Mapping[int, Workbench]) -> None:
        """Begin to copy these segments, whose backups already have extents; segments to encode come last.

        Args:
            workbenches: by device, for the segments to encode.

        Raises:
            OutOfHostMemory, DriverError, InvalidState, CodecError: not every byte is there.
        """
        self._workbenches.update(workbenches)
        backups = [self._backups[segment.id] for segment in part]
        raw = [backup for backup in backups if backup.encoding is None]
        encoded = [backup for backup in backups if backup.encoding is not None]
        # Before pages are touched, because touching pages delays every change of the address space.
        for device in {backup.segment.device for backup in raw} - self._copies.keys():
            lanes = min(_MOST_STREAMS, -(-self._most_bytes[device] // self._stream_bytes))
            streams = [self._streams.enter_context(_core.CopyStream(device)) for _ in range(lanes)]
            lanes_of_device = [self._transfers.lane(stream) for stream in streams]
            self._copies[device] = _Copies(lanes_of_device, self._stream_bytes, self._transfers.done_with)
        self._transfers.expect(chain.from_iterable(backup.extents for backup in [*raw, *encoded]))
        self._added += [backup.segment for backup in [*raw, *encoded]]
        for backup in raw:
            for piece in backup.pieces():
                self._copies[backup.segment.device].start(piece, backup.segment)
        for device, mine in by_device(backup.segment for backup in encoded).items():
            runs = chain.from_iterable(self._backups[segment.id].runs() for segment in mine)
            workbenches[device].encode(runs, self._transfers)

    @property
    def in_flight(self) -> set[int]:
        """Ids of the segments whose copies may not have ended yet."""
        return set().union(*(each.in_flight for each in self._at_work()))

    def finish(self) -> list[_core.Segment]:
        """Wait until every byte of the added segments has been copied; returns these segments.

        Raises:
            OutOfHostMemory, DriverError, InvalidState, CodecError: not every byte is there.
        """
        for each in self._at_work():
            each.finish()
        self._streams.close()  # the digests that follow take them
        self._transfers.end()
        return self._added

    def _at_work(self) -> Iterable[_Copies | Workbench]:
        return [*self._copies.values(), *self._workbenches.values()]


class _Copies:
    """Copies from one device. About a gibibyte is in flight; whatever was begun before that has arrived.

    Args:
        done_with: called with the addresses of segments all of whose bytes have arrived, while there are others.
    """

    def __init__(self, lanes: Sequence[Lane], stream_bytes: int, done_with: Callable[[Iterable[int]], None]) -> None:
        self._lanes = lanes
        self._segments: list[dict[int, int]] = [{} for _ in self._lanes]  # addresses by id, by lane
        self._stream_bytes = stream_bytes
        self._done_with = done_with
        self._turn = 0
        self._bytes = 0  # begun in this turn

    @property
    def in_flight(self) -> set[int]:
        """Ids of the segments whose copies may not have ended yet."""
        return set().union(*self._segments)

    def start(self, piece: Piece, segment: _core.Segment) -> None:
        """Begin to copy it; all pieces of a segment come one after the other."""
        _core.stop_if_asked()
        if self._bytes >= self._stream_bytes:
            self._turn, self._bytes = (self._turn + 1) % len(self._lanes), 0
            self._lanes[self._turn].synchronize()
            arrived, self._segments[self._turn] = self._segments[self._turn], {}
            not_whole = self.in_flight | {segment.id}
            self._done_with(address for number, address in arrived.items() if number not in not_whole)
        self._lanes[self._turn].write(piece.extent, piece.offset, piece.address, piece.bytes)
        self._segments[self._turn][segment.id] = segment.address
        self._bytes += piece.bytes

    def finish(self) -> None:
        """Wait for all of them."""
        for lane in self._lanes:
            _core.stop_if_asked()
            lane.synchronize()
