"""Copies the bytes of segments into their backups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain

from .. import _core
from ..codec.workspace import Workspace
from ..core.extents import LaneGroup
from ..core.segments import by_device
from ..core.tuning import Tuning
from ..store.transfer import Transfer
from .catalogue import Catalogue


class BackupWriter:
    """The copies of one operation: `add` and `encode` segments part by part, then `finish`.

    Segments are copied while the caller works out what to add next. The tier prepares the extents ahead of the copies.
    Backups are not complete afterwards: the caller must first check whether anything wrote to the segments meanwhile.

    Args:
        streams: takes the streams of the copies; when it is left, no copy is in flight.
        segments: all that may be added.
        workspaces: by device, where segments are encoded.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        lane_group: LaneGroup,
        streams: ExitStack,
        tuning: Tuning,
        segments: Sequence[_core.Segment],
        workspaces: Mapping[int, Workspace],
    ) -> None:
        self._catalogue = catalogue
        self._lane_group = lane_group
        self._streams = streams
        self._tuning = tuning
        self._most_bytes = {device: catalogue.content_bytes(mine) for device, mine in by_device(segments).items()}
        self._raw: dict[int, Transfer] = {}  # by device
        self._workspaces = workspaces
        self._added: list[_core.Segment] = []

    def add(self, part: Sequence[_core.Segment]) -> list[Transfer]:
        """Take these segments, whose backups already have extents; `encode` must follow.

        Returns:
            The transfers of those that are not encoded: the caller steps them until nothing is left to begin.
        """
        self._added += part
        backups = [backup for segment in part if (backup := self._catalogue.of(segment))]
        backups.sort(key=lambda backup: backup.encoding is not None)  # as they are copied
        raw = [backup for backup in backups if backup.encoding is None]
        for backup in raw:
            device = backup.segment.device
            if device not in self._raw:
                self._raw[device] = self._transfer(device)
            self._raw[device].add(backup.segment, backup.pieces())
        self._lane_group.expect(chain.from_iterable(backup.extents for backup in backups))
        return [self._raw[device] for device in sorted({backup.segment.device for backup in raw})]

    def encode(self, part: Sequence[_core.Segment]) -> None:
        """Encode and copy the others of `part`.

        Raises:
            OutOfHostMemory, DriverError, InvalidState, CodecError: not every byte is there.
        """
        for device, mine in by_device(part).items():
            if device in self._workspaces:
                runs = chain.from_iterable(backup.runs() for backup in map(self._catalogue.of, mine) if backup)
                self._workspaces[device].encode(runs, self._lane_group)

    def _transfer(self, device: int) -> Transfer:
        """Made before pages are touched, because touching pages delays every change of the address space."""
        count = min(self._lane_group.most_lanes, -(-self._most_bytes[device] // self._tuning.engine_batch_bytes))
        streams = [self._streams.enter_context(_core.CopyStream(device)) for _ in range(count)]
        return Transfer(
            [self._lane_group.lane(stream) for stream in streams],
            None,
            lambda arrived: self._lane_group.done_with(segment.address for segment in arrived),
            self._tuning,
            out=True,
        )

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
        self._lane_group.end()
        return self._added

    def _at_work(self) -> Iterable[Transfer | Workspace]:
        return [*self._raw.values(), *self._workspaces.values()]
