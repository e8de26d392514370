"""The backup store: what each segment's bytes look like in host memory, whether they are complete, and for how long.

The store owns all host memory. A backup is one or more pinned blocks of at most `SLAB_BYTES`, so that the pages of one
can be touched and registered while the GPU already fills another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from . import _core, host_limits
from .digest import Digest
from .errors import InvalidState, OutOfHostMemory
from .settings import Settings

SLAB_BYTES = 256 << 20
_TOUCH_BYTES = 32 << 20
_MOST_PREFAULT_THREADS = 16


@dataclass
class Backup:
    """One segment's bytes in host memory: its blocks in order, exactly the segment's size in all.

    Attributes:
        complete: every byte was copied; only then may it be restored from.
        digest: of the bytes at sleep; None where nothing will be compared with it.
    """

    segment: _core.Segment
    blocks: tuple[_core.HostBlock, ...]
    complete: bool = False
    digest: Digest | None = None

    @property
    def bytes(self) -> int:
        """Host memory that it holds."""
        return sum(block.bytes for block in self.blocks)

    def pieces(self) -> Iterator[tuple[_core.HostBlock, int]]:
        """The blocks, each with the device address that its bytes belong to."""
        address = self.segment.address
        for block in self.blocks:
            yield block, address
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

    def limits(self) -> list[host_limits.HostLimit]:
        """Every limit that new host memory is checked against."""
        budget = self._settings.host_budget_bytes
        return [
            host_limits.HostLimit("budget", None if budget is None else max(0, budget - self.host_bytes)),
            host_limits.HostLimit("cgroup", host_limits.cgroup_available_bytes()),
            host_limits.HostLimit("MemAvailable", host_limits.mem_available_bytes()),
        ]

    def take(self, segments: Sequence[_core.Segment], keep: Iterable[_core.Segment]) -> None:
        """Make room for backups of `segments`: address space now, pages when they are filled.

        The whole need is checked first. Backups that are merely retained (of segments that are awake and not among
        those to `keep`) give way.

        Raises:
            OutOfHostMemory: a limit leaves too little; nothing was taken.
        """
        new = [segment for segment in segments if segment.id not in self._backups]
        needed = sum(segment.bytes for segment in new)
        if needed:
            self._check(needed, {segment.id for segment in keep})
        nodes = {device: _core.device_info(device).numa_node for device in {segment.device for segment in new}}
        for segment in new:
            sizes = [min(SLAB_BYTES, segment.bytes - start) for start in range(0, segment.bytes, SLAB_BYTES)]
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
            backup.complete, backup.digest = False, None
        new = [block for backup in backups for block in backup.blocks if not block.pinned]
        with ExitStack() as stack:  # on leaving it, no copy is in flight
            devices = {segment.device for segment in segments}
            streams = {device: stack.enter_context(_core.CopyStream(device)) for device in devices}
            with self._touching(new) as touched:
                for backup in backups:
                    stream = streams[backup.segment.device]
                    for block, address in backup.pieces():
                        if not block.pinned:
                            touched(block)
                            block.pin(stream.device)
                        stream.to_host(block, 0, address, block.bytes)
            for stream in streams.values():
                stream.synchronize()
        for backup in backups:
            backup.digest = digests.get(backup.segment.id)
            backup.complete = True

    def require(self, segments: Iterable[_core.Segment]) -> None:
        """See that each of `segments` has a complete backup: the last look before its memory goes.

        Raises:
            InvalidState: one has none.
        """
        for segment in segments:
            if self.get(segment) is None:
                raise InvalidState(f"the segment at 0x{segment.address:x} has no complete backup: it stays awake")

    def restore(self, segment: _core.Segment, stream: _core.CopyStream) -> None:
        """Start copying the backup of `segment` to its address, in `stream`'s order."""
        backup = self.get(segment)
        if backup is None:
            raise InvalidState(f"the backup of the segment at 0x{segment.address:x} is gone: it cannot be restored")
        for block, address in backup.pieces():
            stream.to_device(address, block, 0, block.bytes)

    def forget(self, segments: Iterable[_core.Segment]) -> None:
        """Give back the host memory of these segments' backups."""
        for segment in segments:
            backup = self._backups.pop(segment.id, None)
            for block in backup.blocks if backup else ():
                block.close()

    def prune(self) -> None:
        """Forget what nobody can need.

        That is: backups of what was freed or dropped, incomplete ones, and those that the settings do not retain.
        """
        self.forget([backup.segment for backup in self._backups.values() if not self._is_needed(backup)])

    def _is_needed(self, backup: Backup) -> bool:
        if backup.segment.freed or not backup.complete:
            return False
        if backup.segment.sleep == _core.Segment.Sleep.AWAKE:
            return self._settings.retain_backups
        return backup.segment.sleep == _core.Segment.Sleep.BACKED_UP

    def clear(self) -> None:
        """Forget every backup of a segment that is awake."""
        self.forget(
            [
                backup.segment
                for backup in self._backups.values()
                if backup.segment.sleep != _core.Segment.Sleep.BACKED_UP
            ]
        )

    def _check(self, needed: int, keep: set[int]) -> None:
        """Refuse what a limit leaves no room for, or evict as many retained backups, oldest first, as it takes."""
        retained = self._retained(keep)
        evictable = sum(backup.bytes for backup in retained)
        missing = 0
        for limit in self.limits():
            if limit.available_bytes is not None and limit.available_bytes < needed:
                if limit.available_bytes + evictable < needed:
                    raise OutOfHostMemory(needed, limit.available_bytes, limit.name)
                missing = max(missing, needed - limit.available_bytes)
        for backup in retained:
            if missing <= 0:
                break
            missing -= backup.bytes
            self.forget([backup.segment])

    def _retained(self, keep: set[int]) -> list[Backup]:
        return [
            backup
            for backup in self._backups.values()
            if backup.segment.sleep == _core.Segment.Sleep.AWAKE and backup.segment.id not in keep
        ]

    @contextmanager
    def _touching(self, blocks: Sequence[_core.HostBlock]) -> Iterator[_Touched]:
        threads = self._settings.prefault_threads or min(_MOST_PREFAULT_THREADS, host_limits.usable_cores())
        if not blocks:
            yield _Touched({})
            return
        pool = ThreadPoolExecutor(threads, thread_name_prefix="cumem-sleep-touch")
        touched = _Touched({})
        try:
            with suppress(RuntimeError):  # no threads to be had (at exit, or a limit): then `touched` does it itself
                for block in blocks:
                    touched.pieces[id(block)] = [
                        pool.submit(block.touch, start, min(_TOUCH_BYTES, block.bytes - start))
                        for start in range(0, block.bytes, _TOUCH_BYTES)
                    ]
            yield touched
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class _Touched:
    """Waits until the pages of one block are there; raises what touching them raised."""

    pieces: dict[int, list[Future[None]]]

    def __call__(self, block: _core.HostBlock) -> None:
        pieces = self.pieces.pop(id(block), None)
        if pieces is None:
            block.touch(0, block.bytes)
        for piece in pieces or ():
            piece.result()
