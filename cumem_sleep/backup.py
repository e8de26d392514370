"""The backup store: what each segment's bytes look like in host memory, whether they are complete, and for how long.

The store owns all host memory. A backup is one or more pinned blocks, so that the pages of one can be touched and
registered while the GPU already fills another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from . import _core, host_limits
from .ahead import Ahead, Task
from .digest import Digest
from .errors import InvalidState, OutOfHostMemory
from .settings import Settings

SLAB_BYTES = 128 << 20
_TOUCH_BYTES = 16 << 20
_MOST_PREFAULT_THREADS = 16


@dataclass(frozen=True)
class Piece:
    """Bytes that lie together, in a host block at `offset` and on the device at `address`."""

    block: _core.HostBlock
    offset: int
    address: int
    bytes: int


@dataclass
class Backup:
    """One segment's bytes in host memory: its blocks in order, exactly the segment's size in all.

    Attributes:
        complete: every byte was copied; only then may it be restored from.
        digest: of the bytes at sleep; None where nothing will be compared with it.
        being_prepared: it is filled in the background (`prepare`), so it stays although it is not complete.
    """

    segment: _core.Segment
    blocks: tuple[_core.HostBlock, ...]
    complete: bool = False
    digest: Digest | None = None
    being_prepared: bool = False

    @property
    def bytes(self) -> int:
        """Host memory that it holds."""
        return sum(block.bytes for block in self.blocks)

    def pieces(self, at_most: int) -> Iterator[Piece]:
        """All of it in order, in pieces of at most so many bytes."""
        address = self.segment.address
        for block in self.blocks:
            for offset in range(0, block.bytes, at_most):
                yield Piece(block, offset, address + offset, min(at_most, block.bytes - offset))
            address += block.bytes


class BackupStore:
    """All backups of the process, by segment. Not thread safe: the allocator's lock guards it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._backups: dict[int, Backup] = {}

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that is held."""
        return sum(backup.bytes for backup in self._backups.values())

    def get(self, segment: _core.Segment) -> Backup | None:
        """The complete backup of `segment`, if there is one."""
        backup = self._backups.get(segment.id)
        return backup if backup and backup.complete else None

    def host_bytes_of(self, segment: _core.Segment) -> int:
        """Host memory that `segment`'s backup holds, complete or not."""
        backup = self._backups.get(segment.id)
        return backup.bytes if backup else 0

    def limits(self, needed: int | None = None) -> list[host_limits.HostLimit]:
        """Every limit that new host memory is checked against; exact only as far as they may be below `needed`."""
        budget = self._settings.host_budget_bytes
        return [
            host_limits.HostLimit("budget", None if budget is None else max(0, budget - self.host_bytes)),
            host_limits.HostLimit("cgroup", host_limits.cgroup_available_bytes()),
            host_limits.HostLimit("MemAvailable", host_limits.mem_available_bytes(enough=needed)),
        ]

    def take(
        self, segments: Sequence[_core.Segment], keep: Iterable[_core.Segment], slab_bytes: int | None = None
    ) -> None:
        """Make room for backups of `segments`: address space now, pages when they are filled.

        The whole need is checked first. Backups that are merely retained (of segments that are awake and not among
        those to `keep`) give way.

        Raises:
            OutOfHostMemory: a limit leaves too little; nothing was taken.
        """
        slab_bytes = slab_bytes or SLAB_BYTES
        new = [segment for segment in segments if segment.id not in self._backups]
        needed = sum(segment.bytes for segment in new)
        if needed:
            self.check(needed, {segment.id for segment in keep})
        nodes = {device: _core.device_info(device).numa_node for device in {segment.device for segment in new}}
        for segment in new:
            sizes = [min(slab_bytes, segment.bytes - start) for start in range(0, segment.bytes, slab_bytes)]
            self._backups[segment.id] = Backup(
                segment, tuple(_core.HostBlock(size, nodes[segment.device]) for size in sizes)
            )

    def fill(self, segments: Sequence[_core.Segment], digests: dict[int, Digest]) -> None:
        """Copy the bytes of `segments` into their backups; returns when every byte is there.

        Pages of new blocks are touched by threads ahead of the copies; a block is registered when it is next, while the
        GPU fills the ones before.

        Raises:
            OutOfHostMemory, DriverError: a backup is incomplete; `prune` gives its memory back.
        """
        backups = [self._backups[segment.id] for segment in segments]
        for backup in backups:
            backup.complete, backup.digest, backup.being_prepared = False, None, False
        blocks = [block for backup in backups for block in backup.blocks]
        with ExitStack() as stack:  # on leaving it, no copy is in flight
            devices = {segment.device for segment in segments}
            streams = {device: stack.enter_context(_core.CopyStream(device)) for device in devices}
            touched = self._touching([block for block in blocks if not block.pinned])
            stack.callback(touched.stop)  # once more: an interrupt may have come while it stopped
            stack.enter_context(touched).start()
            for backup in backups:
                stream = streams[backup.segment.device]
                for piece in backup.pieces(SLAB_BYTES):
                    if not piece.block.pinned:
                        touched.wait(id(piece.block))
                        piece.block.pin(stream.device)
                    stream.to_host(piece.block, piece.offset, piece.address, piece.bytes)
            for stream in streams.values():
                stream.synchronize()
        for backup in backups:
            backup.digest = digests.get(backup.segment.id)
            backup.complete = True

    def is_clean(self, segment: _core.Segment, digest: Digest | None) -> bool:
        """Whether the complete backup of `segment` is of bytes with this digest."""
        backup = self.get(segment)
        return backup is not None and backup.digest is not None and backup.digest == digest

    def begin_preparing(self, segment: _core.Segment) -> Backup:
        """The backup of `segment`, which was taken, to be filled piece by piece; other operations may take it away."""
        backup = self._backups[segment.id]
        backup.complete, backup.digest, backup.being_prepared = False, None, True
        return backup

    def finish_preparing(self, backup: Backup, digest: Digest) -> None:
        """Every byte is there, and the segment's are still those that `digest` was taken of."""
        backup.complete, backup.digest, backup.being_prepared = True, digest, False

    def require(self, segments: Iterable[_core.Segment]) -> None:
        """See that each of `segments` has a complete backup: the last look before its memory goes.

        Raises:
            InvalidState: one has none.
        """
        for segment in segments:
            if self.get(segment) is None:
                raise InvalidState(f"the segment at 0x{segment.address:x} has no complete backup: it stays awake")

    def pieces(self, segment: _core.Segment, at_most: int) -> Iterator[Piece]:
        """The complete backup of `segment`, in order, in pieces of at most so many bytes.

        Raises:
            InvalidState: it has none.
        """
        backup = self.get(segment)
        if backup is None:
            raise InvalidState(f"the backup of the segment at 0x{segment.address:x} is gone: it cannot be restored")
        return backup.pieces(at_most)

    def forget(self, segment_ids: Iterable[int]) -> None:
        """Give back the host memory of these segments' backups."""
        for segment_id in segment_ids:
            backup = self._backups.pop(segment_id, None)
            if backup is not None:
                backup.being_prepared = False
                for block in backup.blocks:
                    block.close()

    def prune(self) -> None:
        """Forget what nobody can need.

        That is: backups of what was freed or dropped, incomplete ones, and those that the settings do not retain.
        """
        self.forget([segment_id for segment_id, backup in self._backups.items() if not self._is_needed(backup)])

    def _is_needed(self, backup: Backup) -> bool:
        if backup.segment.freed or not (backup.complete or backup.being_prepared):
            return False
        if backup.segment.sleep == _core.Segment.Sleep.AWAKE:
            return self._settings.retain_backups
        return backup.segment.sleep == _core.Segment.Sleep.BACKED_UP

    def clear(self) -> None:
        """Forget every backup of a segment that is awake."""
        asleep = _core.Segment.Sleep.BACKED_UP
        self.forget([segment_id for segment_id, backup in self._backups.items() if backup.segment.sleep != asleep])

    def check(self, needed: int, keep: set[int]) -> None:
        """Refuse what a limit leaves no room for, or evict as many retained backups, oldest first, as it takes.

        Raises:
            OutOfHostMemory: a limit leaves too little; nothing was evicted.
        """
        retained = self._retained(keep)
        evictable = sum(backup.bytes for backup in retained)
        missing = 0
        for limit in self.limits(needed):
            if limit.available_bytes is not None and limit.available_bytes < needed:
                if limit.available_bytes + evictable < needed:
                    raise OutOfHostMemory(needed, limit.available_bytes, limit.name)
                missing = max(missing, needed - limit.available_bytes)
        for backup in retained:
            if missing <= 0:
                break
            missing -= backup.bytes
            self.forget([backup.segment.id])

    def _retained(self, keep: set[int]) -> list[Backup]:
        return [
            backup
            for backup in self._backups.values()
            if backup.segment.sleep == _core.Segment.Sleep.AWAKE and backup.segment.id not in keep
        ]

    def _touching(self, blocks: Sequence[_core.HostBlock]) -> Ahead:
        tasks: dict[int, list[Task]] = {
            id(block): [
                partial(block.touch, start, min(_TOUCH_BYTES, block.bytes - start))
                for start in range(0, block.bytes, _TOUCH_BYTES)
            ]
            for block in blocks
        }
        return Ahead(self._settings.prefault_threads or _default_prefault_threads(), tasks)


def _default_prefault_threads() -> int:
    """Three quarters of the cores: one thread registers what they touch, and the GPU writes to the same memory.

    With 16 cores: 8 to 14 threads reach 36 to 38 GiB/s, 16 threads 29 (benchmarks/results/first_sleep_pipeline.json).
    """
    return min(_MOST_PREFAULT_THREADS, max(1, host_limits.usable_cores() * 3 // 4))
