"""The backup store: which segment has which backup, whether it is complete, and how long it is kept.

The store decides about backups; its tier only stores their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .. import _core
from ..codec.codec import CHUNK_BYTES
from ..codec.codecs import decode, least_bytes
from ..codec.encoding import EncodedRun, Encoding
from ..digest.reference import Digest
from ..errors import InvalidState
from ..extents import Extent, Piece, Transfers
from ..report import BackupPlace
from ..segments import by_device, total_bytes
from ..settings import Settings
from ..tuning import Tuning
from .backup import Backup, extent_sizes
from .filling import Filling
from .limits import HostLimit, missing_bytes
from .tier import Content, Footprint, Stored, Tier, Wanted
from .tiers import open_tier
from .turns import Turns

_Sleep = _core.Segment.Sleep


class BackupStore:
    """All backups of the process, by segment. Not thread safe: the allocator's lock guards it."""

    def __init__(self, settings: Settings, lock: _core.OperationLock, tuning: Tuning) -> None:
        self._settings = settings
        self._tuning = tuning
        self._lock = lock
        self._backups: dict[int, Backup] = {}
        self._backup_bytes = 0  # of all of them

    @cached_property
    def _tier(self) -> Tier:
        """Opened at the first use: making a store takes no memory and contacts no vault."""
        return open_tier(self._settings, self._tuning, self.turns.if_free)

    @property
    def turns(self) -> Turns:
        """Who may change the backups when."""
        return Turns(self._lock, self)  # not kept: a store that nobody uses goes at once, and what its tier holds

    @property
    def host_bytes(self) -> int:
        """How much of the tier's memory all backups take."""
        return self._backup_bytes + self._tier.unreleased_bytes

    def get(self, segment: _core.Segment) -> Backup | None:
        """The complete backup of `segment`, or None."""
        backup = self._backups.get(segment.id)
        return backup if backup and backup.complete else None

    def place(self) -> BackupPlace:
        """Where backups lie."""
        return self._tier.place()

    def footprints(self, segments: Iterable[_core.Segment]) -> dict[int, Footprint]:
        """What the backups of `segments` take of the host's memory, by the segments' ids."""
        backups = [backup for segment in segments if (backup := self._backups.get(segment.id))]
        held = self._tier.footprints([backup.extents for backup in backups])
        return {backup.segment.id: each for backup, each in zip(backups, held, strict=True)}

    def is_clean(self, segment: _core.Segment, digest: Digest | None) -> bool:
        """Whether `segment` has a complete backup whose bytes have this digest."""
        backup = self.get(segment)
        return backup is not None and backup.digest is not None and backup.digest == digest

    def has_room_for(self, segment: _core.Segment, encoding: Encoding | None) -> bool:
        """Whether the backup of `segment` can hold it with this encoding."""
        backup = self._backups.get(segment.id)
        return backup is not None and backup.has_room_for(encoding)

    def encoding_of(self, segment: _core.Segment) -> Encoding | None:
        """How the backup of `segment` is compressed; None if it has no compressed backup."""
        backup = self._backups.get(segment.id)
        return backup.encoding if backup else None

    def stored_bytes(self, segments: Iterable[_core.Segment]) -> int:
        """How much of the tier's memory the backups of `segments` take; each has one."""
        encodings = ((segment, self.encoding_of(segment)) for segment in segments)
        return sum(segment.bytes if encoding is None else encoding.bytes for segment, encoding in encodings)

    def pieces(self, segment: _core.Segment) -> list[Piece]:
        """The complete, uncompressed backup of `segment`: one piece per extent, in order.

        Raises:
            InvalidState: it has none.
        """
        return list(self._complete(segment).pieces())

    def runs(self, segment: _core.Segment) -> list[EncodedRun]:
        """The encoded chunks of the complete, compressed backup of `segment`, in order.

        Raises:
            InvalidState: it has none.
        """
        return list(self._complete(segment).runs())

    # Room

    def limits(self, needed: int | None = None) -> list[HostLimit]:
        """Every limit that new backups are checked against; exact only as far as they may be below `needed`."""
        return self._tier.limits(self.host_bytes, needed)

    def needed_bytes(self, segments: Iterable[_core.Segment], *, compressed: bool) -> int:
        """The least that `take` would need for those of `segments` that have no backup yet."""
        nbytes = total_bytes(segment for segment in segments if segment.id not in self._backups)
        return least_bytes(nbytes) if compressed else nbytes

    def has_free(self, segments: Iterable[_core.Segment]) -> bool:
        """Whether the tier has free memory for new backups of `segments`, however they are stored."""
        return self._tier.has_free(total_bytes(segments))

    def check(self, needed: int, keep: Iterable[_core.Segment]) -> None:
        """Raise if a limit leaves too little room, or evict as many retained backups as needed, oldest first.

        Raises:
            OutOfHostMemory: a limit leaves too little; nothing was evicted.
        """
        if not needed:
            return
        retained: list[Backup] = []

        def evictable() -> int:
            kept = {segment.id for segment in keep}
            retained.extend(
                backup
                for backup in self._backups.values()
                if backup.segment.sleep == _Sleep.AWAKE and backup.segment.id not in kept
            )
            return sum(backup.bytes for backup in retained)

        missing = missing_bytes(self.limits(needed), needed, evictable)
        for backup in retained:
            if missing <= 0:
                break
            missing -= backup.bytes
            self.forget([backup.segment.id])

    def take(
        self,
        segments: Sequence[_core.Segment],
        keep: Iterable[_core.Segment],
        encodings: Mapping[int, Encoding],
        *,
        beside_work: bool = False,
    ) -> None:
        """Make room for backups of `segments`, all of which are about to be rewritten.

        The total need is checked first. A backup keeps its extents if they have room for the segment as it will be
        stored now; otherwise they are released. Backups that are merely retained (of awake segments that are not in
        `keep`) are evicted if necessary.

        Args:
            encodings: how segments are compressed, by segment id; all others are stored uncompressed.
            beside_work: the model runs meanwhile.

        Raises:
            OutOfHostMemory: a limit leaves too little; nothing was taken.
            NotYet: beside work, the tier is still taking that memory; nothing was taken.
        """
        unfit: list[int] = []
        for segment in segments:
            backup = self._backups.get(segment.id)
            if backup is None:
                continue
            has_room = backup.has_room_for(encodings.get(segment.id))
            if has_room and self._tier.can_rewrite(backup.extents):
                backup.begin(encodings.get(segment.id))
            else:
                unfit.append(segment.id)
        self.forget(unfit)
        new = [segment for segment in segments if segment.id not in self._backups]
        if not new:
            return
        most_bytes = self._tier.extent_bytes(beside_work=beside_work)
        wanted = [Wanted(s.device, extent_sizes(s, encodings.get(s.id), most_bytes)) for s in new]
        self.check(sum(sum(each.sizes) for each in wanted), keep)
        for segment in new:
            segment.note_backup()
        reserved = self._tier.reserve(wanted, beside_work=beside_work)
        for segment, extents in zip(new, reserved, strict=True):
            self._put_in(Backup(segment, extents, encodings.get(segment.id)))

    def claim(self, segments: Iterable[_core.Segment]) -> None:
        """Mark the backups of `segments` as needed until `prune`; forget those that were evicted."""
        self._set_needed([backup for segment in segments if (backup := self.get(segment))], needed=True)

    def adopt(self, segments: Iterable[_core.Segment], digests: Mapping[int, Digest]) -> list[_core.Segment]:
        """Where the tier already stores the present bytes of `segments`, use that as their backup; returns these.

        Args:
            digests: of the bytes, by segment id, for those segments that were digested.
        """
        adopted: list[_core.Segment] = []
        lacking = [s for s in segments if s.id in digests and not self.is_clean(s, digests[s.id])]
        contents = [Content(segment.device, digests[segment.id], segment.bytes) for segment in lacking]
        for segment, content, found in zip(lacking, contents, self._tier.find_content(contents), strict=True):
            if found is None:
                continue
            self.forget([segment.id])
            segment.note_backup()
            backup = Backup(segment, found)
            backup.prove(content.digest)
            self._put_in(backup)
            adopted.append(segment)
        return adopted

    # Writing

    def transfers(self) -> Transfers:
        """For the copies of one operation; a context manager."""
        return self._tier.transfers()

    @contextmanager
    def filling(self, segments: Iterable[_core.Segment]) -> Iterator[Filling]:
        """For copying (some of) `segments` into their backups; after leaving it, no copy is in flight."""
        most_bytes = {device: total_bytes(mine) for device, mine in by_device(segments).items()}
        with self._tier.transfers() as transfers, ExitStack() as streams:
            yield Filling(self._backups, transfers, streams, self._tuning, most_bytes)

    def prove(self, segments: Sequence[_core.Segment], digests: Mapping[int, Digest]) -> None:
        """Mark the backups of `segments` as complete: filled with bytes that had these digests before and after.

        Args:
            digests: by segment id, for those segments that were digested.
        """
        for segment in segments:
            self._backups[segment.id].prove(digests.get(segment.id))
        self._seal(segments)

    def begin_preparing(self, segment: _core.Segment) -> Backup:
        """The backup of `segment`, which was taken, to be filled piece by piece; other operations may take it away."""
        backup = self._backups[segment.id]
        backup.begin(backup.encoding, being_prepared=True)
        return backup

    def finish_preparing(self, backup: Backup, digest: Digest) -> None:
        """Note that every byte was copied; `digest` is that of the backup's bytes."""
        backup.prove(digest)
        self._seal([backup.segment])

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

    # Reading

    def read(self, segment: _core.Segment, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """So many bytes of the complete backup of `segment`, from `offset` on.

        Where they lie together and uncompressed in memory of this process, they are not copied: the array is valid as
        long as the backup stays as it is.

        Raises:
            InvalidState: it has none.
        """
        backup = self._complete(segment)
        start, end = segment.address + offset, segment.address + offset + nbytes
        parts: list[npt.NDArray[np.uint8]] = []
        for run in backup.runs():
            number, behind = (start - run.address) // CHUNK_BYTES, -(-(end - run.address) // CHUNK_BYTES)
            if number < len(run) and behind > 0:
                part = run.part(max(0, number), min(behind, len(run)))
                stored = self._tier.content(part.extent, part.offset, part.bytes)
                content = decode(part.code, stored, part.sizes)
                parts.append(content[max(0, start - part.address) : end - part.address])
        for piece in () if backup.encoding is not None else backup.pieces():
            first, last = max(start, piece.address), min(end, piece.address + piece.bytes)
            if first < last:
                parts.append(self._tier.content(piece.extent, piece.offset + first - piece.address, last - first))
        content = parts[0] if len(parts) == 1 else np.concatenate(parts)
        content.flags.writeable = False  # what is written there would be restored, or rather refused
        return content

    # Letting go

    def retain(self, segments: Iterable[_core.Segment], *, retained: bool) -> None:
        """Whether the backups of `segments` stay while these are awake, whatever the settings say."""
        for segment in segments:
            if (backup := self._backups.get(segment.id)) is not None:
                backup.retained = retained

    def forget(self, segment_ids: Iterable[int]) -> None:
        """Release these segments' backups."""
        if extents := [extent for segment_id in segment_ids for extent in self._take_out(segment_id)]:
            self._tier.release(extents)

    def prune(self) -> None:
        """Forget backups that nobody can need.

        That is: backups of what was freed or dropped, incomplete ones, and those that the settings do not retain.
        """
        _core.take_freed()  # the search below finds these anyway
        unneeded = [segment_id for segment_id, backup in self._backups.items() if not self._is_needed(backup)]
        extents: list[Extent] = []
        for segment_id in unneeded:
            extents += self._take_out(segment_id)
        self._tier.release_later(extents)
        retained = [b for b in self._backups.values() if b.complete and b.segment.sleep == _Sleep.AWAKE]
        self._set_needed(retained, needed=False)

    def settle(self) -> None:
        """`prune`, and return when what nobody needs has gone back to the system."""
        self.prune()
        self._tier.finish_releasing()

    def regain(self) -> None:
        """Get back device memory that another process still has of an operation that failed, if it can be had now."""
        if "_tier" in self.__dict__:
            self._tier.regain()

    def unpin(self) -> None:
        """Let the tier unpin all backups; each is pinned again when it is next copied."""
        if "_tier" in self.__dict__:
            self._tier.unpin(extent for backup in self._backups.values() for extent in backup.extents)

    def device_bytes_to_pin(self, segments: Iterable[_core.Segment]) -> int:
        """How much memory of each GPU it takes to pin those backups of `segments` that are not."""
        if "_tier" not in self.__dict__:
            return 0
        backups = [backup for segment in segments if (backup := self._backups.get(segment.id))]
        return self._tier.device_bytes_to_pin(extent for backup in backups for extent in backup.extents)

    def prune_freed(self) -> None:
        """Forget the segments freed since the last call, and look at nothing else: every free by a hook calls this."""
        while freed := _core.take_freed():  # other threads may free more meanwhile
            backups = [self._backups.get(segment_id) for segment_id in freed]
            self.forget([backup.segment.id for backup in backups if backup is not None and backup.segment.freed])

    def clear(self) -> None:
        """Forget every backup of an awake segment; returns when the memory has gone back to the system."""
        if "_tier" not in self.__dict__:
            return
        self._tier.finish_releasing()
        self.forget(
            [segment_id for segment_id, backup in self._backups.items() if backup.segment.sleep != _Sleep.BACKED_UP]
        )

    def leave(self) -> None:
        """Forget all backups, of which no segment needs any, and let go of whoever keeps them."""
        self.clear()
        if "_tier" in self.__dict__:
            self._tier.leave()

    def stop(self) -> None:
        """End background work. May be called without the lock."""
        if "_tier" in self.__dict__:
            self._tier.stop()

    def _set_needed(self, backups: Sequence[Backup], *, needed: bool) -> None:
        for place in self._tier.set_needed([backup.extents for backup in backups], needed=needed):
            self.forget([backups[place].segment.id])

    def _seal(self, segments: Iterable[_core.Segment]) -> None:
        """Let others share these backups, which are complete."""
        backups = [self._backups[segment.id] for segment in segments]
        sealed = [
            Stored(Content(b.segment.device, b.digest, b.segment.bytes), b.extents, b.encoding is not None)
            for b in backups
            if b.digest is not None
        ]
        if not sealed:
            return
        try:
            self._tier.seal(sealed)
        except BaseException:
            self.forget(backup.segment.id for backup in backups)
            raise

    def _put_in(self, backup: Backup) -> None:
        self._backups[backup.segment.id] = backup
        self._backup_bytes += backup.bytes

    def _take_out(self, segment_id: int) -> Sequence[Extent]:
        """Remove that segment's backup; returns its extents."""
        backup = self._backups.pop(segment_id, None)
        if backup is None:
            return ()
        backup.being_prepared = False
        self._backup_bytes -= backup.bytes
        return backup.extents

    def _is_needed(self, backup: Backup) -> bool:
        if backup.segment.freed or not (backup.complete or backup.being_prepared):
            return False
        if backup.segment.sleep == _Sleep.AWAKE:
            return self._settings.retain_backups if backup.retained is None else backup.retained
        return backup.segment.sleep == _Sleep.BACKED_UP

    def _complete(self, segment: _core.Segment) -> Backup:
        backup = self.get(segment)
        if backup is None:
            raise InvalidState(f"the backup of the segment at 0x{segment.address:x} is gone: it cannot be restored")
        return backup
