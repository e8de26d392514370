"""The catalogue: which backups there are, of which ranges of which segments, and which of them anybody may need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from .. import _core
from ..codec.chunks import Encoding
from ..core.extents import Extent, Ranges
from ..digest.reference import Digest
from ..errors import InvalidState
from .backup import Backup
from .kept import KeptRanges
from .tier import Content, Footprint, Tier

_Sleep = _core.Segment.Sleep


class Catalogue:
    """The backups of all segments. Not thread safe: the allocator's lock guards it.

    Where ranges of a segment are given, () stands for all of it.

    Args:
        retain: whether backups stay while their segments are awake, unless they say otherwise themselves.

    Attributes:
        tiers: those that have been opened, among them every one that a backup lies in.
        kept: what is kept of dropped segments; it gives way to backups.
    """

    def __init__(self, retain: bool) -> None:
        self._retain = retain
        self.tiers: list[Tier] = []
        self.kept = KeptRanges(retain)
        self._backups: dict[int, dict[Ranges, Backup]] = {}  # by the segments' ids

    def __iter__(self) -> Iterator[Backup]:
        for of_one in self._backups.values():
            yield from of_one.values()

    def of(self, segment: _core.Segment, ranges: Ranges = ()) -> Backup | None:
        """The backup of `segment`, complete or not; None if there is none."""
        of_one = self._backups.get(segment.id)
        return of_one.get(ranges) if of_one else None

    def get(self, segment: _core.Segment, ranges: Ranges = ()) -> Backup | None:
        """The complete backup of `segment`, or None."""
        backup = self.of(segment, ranges)
        return backup if backup and backup.complete else None

    def needed(self, segment: _core.Segment) -> Backup:
        """The complete backup of `segment`.

        Raises:
            InvalidState: it has none.
        """
        backup = self.get(segment)
        if backup is None:
            raise InvalidState(f"the backup of the segment at 0x{segment.address:x} is gone: it cannot be restored")
        return backup

    def is_clean(self, segment: _core.Segment, digest: Digest | None) -> bool:
        """Whether `segment` has a complete backup whose bytes have this digest."""
        backup = self.get(segment)
        return backup is not None and backup.digest is not None and backup.digest == digest

    def encoding_of(self, segment: _core.Segment) -> Encoding | None:
        """How the backup of `segment` is compressed; None if it has no compressed backup."""
        backup = self.of(segment)
        return backup.encoding if backup else None

    def stored_bytes(self, segments: Iterable[_core.Segment]) -> int:
        """How much of the tiers' memory the backups of `segments` take; each has one."""
        encodings = ((segment, self.encoding_of(segment)) for segment in segments)
        return sum(segment.bytes if encoding is None else encoding.bytes for segment, encoding in encodings)

    def footprints(self, segments: Iterable[_core.Segment]) -> dict[int, Footprint]:
        """What the backups of `segments` take of the host's memory, by the segments' ids."""
        backups = [backup for segment in segments if (backup := self.of(segment))]
        found: dict[int, Footprint] = {}
        for tier, mine in self._by_tier(backups):
            held = tier.footprints([backup.extents for backup in mine])
            found.update(zip([backup.segment.id for backup in mine], held, strict=True))
        return found

    def add(self, backup: Backup) -> None:
        """Enter a backup of what has none yet."""
        backup.segment.note_backup()
        self._backups.setdefault(backup.segment.id, {})[backup.ranges] = backup

    def move(self, backup: Backup, tier: Tier, extents: Sequence[Extent]) -> None:
        """Let `backup`, which is complete, lie in other extents: they hold the same bytes, stored in the same way.

        Its segment may sleep meanwhile, but not wake.
        """
        if tier not in self.tiers:
            self.tiers.append(tier)
        before, left = backup.tier, backup.extents
        backup.tier, backup.extents = tier, tuple(extents)
        before.release(left)

    def prove(self, segments: Sequence[_core.Segment], digests: Mapping[int, Digest], ranges: Ranges = ()) -> None:
        """Mark the backups of `segments` as complete: filled with bytes that had these digests before and after.

        From now on others may share them.

        Args:
            digests: by segment id, for those segments that were digested.
        """
        backups = [backup for segment in segments if (backup := self.of(segment, ranges))]
        for backup in backups:
            backup.prove(digests.get(backup.segment.id))
        try:
            for tier, mine in self._by_tier(backups):
                sealed = [
                    (b.extents, Content(b.digest, b.content_bytes, b.encoding is not None))
                    for b in mine
                    if b.digest is not None
                ]
                if sealed:
                    tier.seal(sealed)
        except BaseException:
            self._release(backups)
            raise

    def require(self, segments: Iterable[_core.Segment], digests: Mapping[int, Digest]) -> None:
        """Check that each of `segments` has a complete backup with its digest, right before its memory is released.

        Args:
            digests: by segment id, for those segments that were digested.

        Raises:
            InvalidState: one has none.
        """
        for segment in segments:
            backup = self.get(segment)
            if backup is None or backup.digest != digests.get(segment.id):
                raise InvalidState(
                    f"the segment at 0x{segment.address:x} has no complete backup of its bytes: it stays awake"
                )

    def claim(self, segments: Iterable[_core.Segment]) -> None:
        """Mark the backups of `segments` as needed until `prune`; forget those that were evicted."""
        self._set_needed([backup for segment in segments if (backup := self.get(segment))], needed=True)

    def retain(self, segments: Iterable[_core.Segment], *, retained: bool) -> None:
        """Whether the backups of `segments` stay while these are awake, whatever the settings say."""
        for segment in segments:
            if (backup := self.of(segment)) is not None:
                backup.retained = retained

    def forget(self, segment_ids: Iterable[int]) -> None:
        """Release these segments' backups."""
        if backups := [b for segment_id in segment_ids for b in self._backups.get(segment_id, {}).values()]:
            self._release(backups)

    def prune(self) -> None:
        """Forget backups that nobody can need.

        That is: backups of what was freed or dropped, incomplete ones, and those that the settings do not retain.
        """
        _core.take_freed()  # the search below finds these anyway
        self.kept.prune()
        self._release([backup for backup in self if not self._is_needed(backup)])
        self._set_needed([b for b in self if b.complete and b.segment.sleep == _Sleep.AWAKE], needed=False)

    def prune_freed(self) -> None:
        """Forget the segments freed since the last call, and look at nothing else: every free by a hook calls this."""
        while freed := _core.take_freed():  # other threads may free more meanwhile
            backups = [backup for segment_id in freed for backup in self._backups.get(segment_id, {}).values()]
            self.forget({backup.segment.id for backup in backups if backup.segment.freed})
            self.kept.prune()

    def _release(self, backups: Sequence[Backup]) -> None:
        for backup in backups:
            backup.being_prepared = False
            of_one = self._backups[backup.segment.id]
            del of_one[backup.ranges]
            if not of_one:
                del self._backups[backup.segment.id]
        for tier, mine in self._by_tier(backups):  # of some it may be nothing: what they have left to a thread goes on
            tier.release([extent for backup in mine for extent in backup.extents])

    def _set_needed(self, backups: Sequence[Backup], *, needed: bool) -> None:
        for tier, mine in self._by_tier(backups):
            if gone := tier.set_needed([backup.extents for backup in mine], needed=needed):
                self._release([mine[place] for place in gone])

    def _by_tier(self, backups: Sequence[Backup]) -> list[tuple[Tier, list[Backup]]]:
        return [(tier, [backup for backup in backups if backup.tier is tier]) for tier in self.tiers]

    def _is_needed(self, backup: Backup) -> bool:
        if backup.segment.freed or not (backup.complete or backup.being_prepared):
            return False
        if backup.segment.sleep == _Sleep.AWAKE:
            return self._retain if backup.retained is None else backup.retained
        return backup.segment.sleep == _Sleep.BACKED_UP
