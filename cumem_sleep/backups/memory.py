"""All backups of a process, and memory for more: which tier, its limits, what is reserved, and who has to give way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path

from .. import _core
from ..codec.chunks import Encoding
from ..codec.codecs import least_bytes
from ..core import log
from ..core.segments import by_device
from ..core.tuning import Tuning
from ..digest.reference import Digest
from ..errors import OutOfHostMemory, VaultUnavailable
from ..report import BackupPlace
from ..settings import Settings
from .backup import Backup, extent_sizes
from .catalogue import Catalogue
from .host_tier import HostTier
from .pruning import PruningLock
from .tier import Content, Tier
from .vault_tier import VaultTier

_Sleep = _core.Segment.Sleep


class BackupMemory:
    """Memory for backups. Not thread safe: the allocator's lock guards it."""

    def __init__(self, settings: Settings, tuning: Tuning, lock: PruningLock, catalogue: Catalogue) -> None:
        self._settings = settings
        self._tuning = tuning
        self._lock = lock
        self._catalogue = catalogue

    @property
    def tier(self) -> Tier:
        """Where backups go. Opened at the first use: making a store takes no memory and contacts no vault."""
        if self._catalogue.tier is None:
            self._catalogue.tier = self._wanted_tier()
        return self._catalogue.tier

    def _wanted_tier(self) -> Tier:
        """The tier that the settings ask for."""
        own, vault = partial(HostTier, self._settings, self._tuning, self._lock.if_free), self._settings.vault
        if vault != "auto":
            return own() if vault == "off" else VaultTier(self._settings, Path(vault))
        tier = VaultTier(self._settings, None)
        try:
            client = tier.client()
        except VaultUnavailable as error:
            log.info("CUMEM_SLEEP_VAULT=auto: backups lie in this process's own memory (%s)", error)
            return own()
        log.info("CUMEM_SLEEP_VAULT=auto: backups lie in the vault at %s", client.path)
        return tier

    @property
    def vault(self) -> VaultTier | None:
        """As `tier`, if that is the vault's."""
        tier = self.tier
        return tier if isinstance(tier, VaultTier) else None

    @property
    def bytes(self) -> int:
        """How much of the tier's memory all backups take."""
        return 0 if self._catalogue.tier is None else self._catalogue.tier.bytes

    def place(self) -> BackupPlace:
        """Where new backups go."""
        return self.tier.place()

    def needed_bytes(self, segments: Iterable[_core.Segment], *, compressed: bool) -> int:
        """The least that `reserve` would need for those of `segments` that have no backup yet."""
        nbytes = self._catalogue.content_bytes(s for s in segments if self._catalogue.of(s) is None)
        return least_bytes(nbytes) if compressed else nbytes

    def make_room(self, needed: int, keep: Iterable[_core.Segment]) -> None:
        """Raise if a limit leaves too little room, or evict as many retained backups as needed, oldest first.

        What is kept of dropped segments gives way before them.

        Raises:
            OutOfHostMemory: a limit leaves too little; nothing was evicted.
        """
        limits = self.tier.limits(needed) if needed else []
        short = [limit for limit in limits if limit.available_bytes < needed]
        if short and self._catalogue.kept.give_up("backups needed the host memory"):
            short = [limit for limit in self.tier.limits(needed) if limit.available_bytes < needed]
        if not short:
            return
        kept = {segment.id for segment in keep}
        awake = [backup for backup in self._catalogue if backup.segment.sleep == _Sleep.AWAKE]
        retained = [backup for backup in awake if backup.segment.id not in kept]
        for limit in short:
            if limit.available_bytes + sum(backup.bytes for backup in retained) < needed:
                raise OutOfHostMemory(needed, limit.available_bytes, limit.name)
        missing = needed - min(limit.available_bytes for limit in short)
        for backup in retained:
            if missing > 0:
                missing -= backup.bytes
                self._catalogue.forget([backup.segment.id])

    def reserve(
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
            beside_work: the model runs meanwhile, and the backups are being prepared.

        Raises:
            OutOfHostMemory: a limit leaves too little; nothing was taken, or only for some devices.
            NotYet: beside work, the tier or another process is still taking that memory; likewise.
        """
        tier, vault, own = self.tier, self.vault, self._catalogue.own
        unfit: list[int] = []
        for backup in filter(None, map(self._catalogue.of, segments)):
            encoding = encodings.get(backup.segment.id)
            if backup.has_room_for(encoding) and (vault is None or vault.can_rewrite(backup.extents)):
                backup.begin(encoding, being_prepared=beside_work)
            else:
                unfit.append(backup.segment.id)
        self._catalogue.forget(unfit)
        new = [segment for segment in segments if self._catalogue.of(segment) is None]
        most_bytes = tier.extent_bytes
        sizes = {
            segment.id: extent_sizes(self._catalogue.content_bytes([segment]), encodings.get(segment.id), most_bytes)
            for segment in new
        }
        nbytes, is_taken = sum(map(sum, sizes.values())), False
        while not is_taken:
            self.make_room(nbytes, keep)
            with own.commit(nbytes, beside_work=beside_work) if own else nullcontext(True) as is_taken:
                if is_taken:
                    self._reserve(new, sizes, encodings, beside_work)

    def _reserve(
        self,
        segments: Sequence[_core.Segment],
        sizes: Mapping[int, Sequence[int]],
        encodings: Mapping[int, Encoding],
        beside_work: bool,
    ) -> None:
        tier = self.tier
        for device, mine in by_device(segments).items():
            wanted = [nbytes for segment in mine for nbytes in sizes[segment.id]]
            reserved = iter(tier.reserve(device, wanted, beside_work=beside_work))
            for segment in mine:
                extents = tuple(islice(reserved, len(sizes[segment.id])))
                encoding = encodings.get(segment.id)
                ranges = self._catalogue.ranges_of(segment)
                self._catalogue.add(Backup(segment, tier, extents, encoding, ranges, being_prepared=beside_work))

    def adopt(self, segments: Iterable[_core.Segment], digests: Mapping[int, Digest]) -> list[_core.Segment]:
        """Where the vault already stores the present bytes of `segments`, use that as their backup; returns these.

        Args:
            digests: of the bytes, by segment id, for those segments that were digested.
        """
        adopted: list[_core.Segment] = []
        clean, vault = self._catalogue.is_clean, self.vault
        if vault is None:
            return adopted
        lacking = [s for s in segments if s.id in digests and not clean(s, digests[s.id])]
        for device, mine in by_device(lacking).items():
            contents = [Content(digests[segment.id], self._catalogue.content_bytes([segment])) for segment in mine]
            for segment, extents in zip(mine, vault.find(device, contents), strict=True):
                if extents is not None:
                    ranges = self._catalogue.ranges_of(segment)
                    self._catalogue.forget([segment.id])
                    backup = Backup(segment, vault, extents, ranges=ranges)
                    backup.mark_proven(digests[segment.id])
                    self._catalogue.add(backup)
                    adopted.append(segment)
        return adopted

    def left_bytes(self, segments: Sequence[_core.Segment], sharers: int) -> int:
        """What the limits leave for what may be kept, once `segments` are backed up, and what is kept now is not.

        Args:
            sharers: how many processes do the same at the same time.
        """
        available = self.tier.expendable_room(sharers)
        needed = self.needed_bytes(segments, compressed=False)
        parts = [b for b in map(self._catalogue.of, segments) if b and b.ranges]  # those make room for whole ones
        needed += sum(backup.segment.bytes - backup.bytes for backup in parts)
        return max(0, available + self._catalogue.kept.bytes - needed)

    def unpin(self) -> None:
        """Unpin all that this process has pinned; each backup is pinned again when it is next copied."""
        if self._catalogue.own is not None:
            self._catalogue.own.unpin(self._catalogue.kept.extents())
            self._catalogue.own.unpin(extent for backup in self._catalogue for extent in backup.extents)

    def device_bytes_to_pin(self, segments: Iterable[_core.Segment]) -> int:
        """How much memory of each GPU it takes to pin those backups of `segments` that are not."""
        backups, own = filter(None, map(self._catalogue.of, segments)), self._catalogue.own
        return own.device_bytes_to_pin(extent for backup in backups for extent in backup.extents) if own else 0

    def settle(self) -> None:
        """Forget backups that nobody can need, and return when all that was released has gone back to the system."""
        self._catalogue.prune()
        self._catalogue.kept.release_spare()
        if self._catalogue.own is not None:
            self._catalogue.own.finish_releasing()

    def give_up(self) -> int:
        """Forget every backup of an awake segment; the memory goes back to the system soon. Returns their bytes."""
        awake = {b.segment.id: b.bytes for b in self._catalogue if not b.is_needed_asleep}
        self._catalogue.forget(awake.keys())
        return sum(awake.values())

    def clear(self) -> None:
        """As `give_up`; returns when the memory has gone back to the system."""
        self.give_up()
        self.settle()

    def leave(self) -> None:
        """Forget all backups, of which no segment needs any, and let go of whoever keeps them."""
        self.clear()
        if self._catalogue.vault is not None:
            self._catalogue.vault.leave()

    def stop(self) -> None:
        """End background work. May be called without the lock."""
        if self._catalogue.own is not None:
            self._catalogue.own.stop()


class BackupStore:
    """All backups of the process: what is where, and the memory for more. What one holds, it knows itself (`Backup`).

    Attributes:
        catalogue, memory: the two parts, which the allocator's lock guards.
        lock: the allocator's; whoever takes it forgets the backups of freed segments.
    """

    def __init__(self, settings: Settings, lock: _core.OperationLock, tuning: Tuning) -> None:
        self.catalogue = Catalogue(settings.retain_backups)
        self.lock = PruningLock(lock, self.catalogue)
        self.memory = BackupMemory(settings, tuning, self.lock, self.catalogue)
