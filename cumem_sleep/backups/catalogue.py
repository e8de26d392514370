"""The catalogue: which backups there are, of which segments or ranges of them, and which of them anybody may need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from .. import _core
from ..codec.chunks import Encoding
from ..core.driver import integrated_devices
from ..core.extents import Ranges, RangeTable
from ..digest.reference import Digest
from ..errors import InvalidState
from .backup import Backup
from .host_tier import HostTier
from .kept import KeptRanges
from .ranges import Spans
from .tier import Content, Footprint, Tier
from .vault_tier import VaultTier

_Sleep = _core.Segment.Sleep


class Catalogue:
    """The backups of all segments, at most one each. Not thread safe: the allocator's lock guards it.

    Args:
        retain: whether backups stay while their segments are awake, unless they say otherwise themselves.

    Attributes:
        tier: where all of them lie; None until it is opened.
        kept: what is kept of dropped segments; it gives way to backups.
    """

    def __init__(self, retain: bool) -> None:
        self._retain = retain
        self.tier: Tier | None = None
        self.kept = KeptRanges(retain)
        self._backups: dict[int, Backup] = {}  # by the segments' ids
        self._parts: Mapping[int, Ranges] = {}  # what a sleep under way backs up of a segment, if not all of it
        self.given_up: dict[int, Spans] = {}  # of what is backed up whole: what counts as lost when it wakes

    @property
    def vault(self) -> VaultTier | None:
        """The tier, if it is the vault's, where others share what is sealed, and what is merely retained is evicted."""
        return self.tier if isinstance(self.tier, VaultTier) else None

    @property
    def own(self) -> HostTier | None:
        """The tier, if it is memory that this process pins, and gives back, itself."""
        return self.tier if isinstance(self.tier, HostTier) else None

    def __iter__(self) -> Iterator[Backup]:
        yield from self._backups.values()

    def of(self, segment: _core.Segment) -> Backup | None:
        """The backup of `segment`, complete or not; None if there is none."""
        return self._backups.get(segment.id)

    def get(self, segment: _core.Segment) -> Backup | None:
        """The complete backup of `segment`, or None."""
        backup = self.of(segment)
        return backup if backup and backup.complete else None

    def back_up_parts(self, parts: Mapping[int, Ranges], segments: Iterable[_core.Segment]) -> None:
        """From now until `prune`, backups of `segments` are of these ranges, by the segments' ids, or of all of them.

        Backups of other ranges are of no use to that, and go.
        """
        self._parts = parts
        self.forget(s.id for s in segments if (backup := self.of(s)) and backup.ranges != parts.get(s.id, ()))

    def has(self, segment: _core.Segment, ranges: Ranges | None) -> bool:
        """Whether there is a complete backup of just these ranges of `segment`; None: of none."""
        backup = self.get(segment)
        return ranges is None or bool(ranges and backup and backup.ranges == ranges)

    def ranges_of(self, segment: _core.Segment) -> Ranges:
        """What a backup of `segment` is to cover; () stands for all of it."""
        backup = self.of(segment)
        return self._parts.get(segment.id, ()) if backup is None else backup.ranges

    def content_bytes(self, segments: Iterable[_core.Segment]) -> int:
        """How many bytes of `segments` their backups cover, or are to."""
        return sum(sum(n for _, n in self.ranges_of(segment)) or segment.bytes for segment in segments)

    def tables_of(self, segments: Iterable[_core.Segment]) -> dict[int, RangeTable]:
        """The ranges that backups cover, by the ids of those of `segments` that are not backed up whole."""
        return {s.id: np.array(ranges, np.int64) for s in segments if (ranges := self.ranges_of(s))}

    def get_or_raise(self, segment: _core.Segment) -> Backup:
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
        backups = [backup for segment in segments if (backup := self.of(segment))]
        return sum(b.content_bytes if b.encoding is None else b.encoding.bytes for b in backups)

    def footprints(self, segments: Iterable[_core.Segment]) -> dict[int, Footprint]:
        """What the backups of `segments` take of the host's memory, by the segments' ids."""
        backups = [backup for segment in segments if (backup := self.of(segment))]
        if not backups or self.tier is None:
            return {}
        held = self.tier.footprints([backup.extents for backup in backups])
        return dict(zip([backup.segment.id for backup in backups], held, strict=True))

    def add(self, backup: Backup) -> None:
        """Enter a backup of what has none yet."""
        backup.segment.note_backup()
        self._backups[backup.segment.id] = backup

    def mark_proven(self, segments: Sequence[_core.Segment], digests: Mapping[int, Digest]) -> None:
        """Mark the backups of `segments` as complete: filled with bytes that had these digests before and after.

        From now on others may share them.

        Args:
            digests: by segment id, for those segments that were digested.
        """
        backups = [backup for segment in segments if (backup := self.of(segment))]
        for backup in backups:
            backup.mark_proven(digests.get(backup.segment.id))
        try:
            sealed = [
                (b.extents, Content(b.digest, b.content_bytes, b.encoding is not None))
                for b in backups
                if b.digest is not None
            ]
            if sealed and self.vault is not None:
                self.vault.seal(sealed)
        except BaseException:
            self._release(backups)
            raise

    def check_complete(self, segments: Iterable[_core.Segment], digests: Mapping[int, Digest]) -> None:
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

    def mark_corrupt(self, segments: Iterable[_core.Segment]) -> None:
        """The backups of these hold other bytes than those at sleep: they stay, but nobody else is to share them."""
        backups = [backup for segment in segments if (backup := self.of(segment))]
        if backups and self.vault is not None:
            self.vault.mark_corrupt([backup.extents for backup in backups])

    def claim(self, segments: Iterable[_core.Segment]) -> None:
        """Mark the backups of `segments` as needed until `prune`; forget those that were evicted."""
        self._set_needed([backup for segment in segments if (backup := self.get(segment))], needed=True)

    def retain(self, segments: Iterable[_core.Segment], *, retained: bool | None) -> None:
        """Whether the backups of `segments` stay while these are awake; None: as the settings say."""
        for segment in segments:
            if (backup := self.of(segment)) is not None:
                backup.retained = retained

    def forget(self, segment_ids: Iterable[int]) -> None:
        """Release these segments' backups."""
        if backups := [self._backups[segment_id] for segment_id in {*segment_ids} & self._backups.keys()]:
            self._release(backups)

    def prune(self) -> None:
        """Forget backups that nobody can need.

        That is: backups of what was freed or dropped, incomplete ones, and those that the settings do not retain.
        """
        _core.take_freed()  # the search below finds these anyway
        self.kept.prune()
        self._parts = {}
        self._release([backup for backup in self if not self._is_needed(backup)])
        asleep = {backup.segment.id for backup in self if backup.segment.sleep == _Sleep.BACKED_UP}
        self.given_up = {key: spans for key, spans in self.given_up.items() if key in asleep}
        self._set_needed([b for b in self if b.complete and b.segment.sleep == _Sleep.AWAKE], needed=False)

    def prune_freed(self) -> None:
        """Forget the segments freed since the last call, and look at nothing else: every free by a hook calls this."""
        while freed := _core.take_freed():  # other threads may free more meanwhile
            self.forget(key for key in freed if key in self._backups and self._backups[key].segment.freed)
            self.kept.prune()

    def _release(self, backups: Sequence[Backup]) -> None:
        for backup in backups:
            backup.being_prepared = False
            del self._backups[backup.segment.id]
        if self.tier is not None:  # even of nothing: what it has left to a thread goes on
            self.tier.release([extent for backup in backups for extent in backup.extents])

    def _set_needed(self, backups: Sequence[Backup], *, needed: bool) -> None:
        if self.vault is not None:
            gone = self.vault.set_needed([backup.extents for backup in backups], needed=needed)
            if gone:
                self._release([backups[place] for place in gone])

    def _is_needed(self, backup: Backup) -> bool:
        if backup.segment.freed or not (backup.complete or backup.being_prepared):
            return False
        if backup.segment.sleep == _Sleep.AWAKE:
            is_retained = self._retain if backup.retained is None else backup.retained
            return is_retained and backup.segment.device not in integrated_devices()
        return backup.is_needed_asleep
