"""The backup store: what each segment's bytes look like in host memory, whether they are complete, and for how long.

The store owns all host memory. A backup is one or more pinned blocks, so that the pages of one can be touched and
registered while the GPU already fills another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat

from .. import _core
from ..codec.exponent import CHUNK_BYTES, least_bytes
from ..codec.workbench import Encoding, Place, Workbench
from ..digest.device import Digest
from ..errors import InvalidState, OutOfHostMemory
from ..settings import Settings
from . import limits as host_limits

SLAB_BYTES = 128 << 20
_TOUCH_BYTES = 64 << 20
_MOST_PREFAULT_THREADS = 16
_STREAMS = 4  # for copies to host memory
_STREAM_BYTES = 256 << 20  # 18 ms of copies in flight, as long as it takes to digest 61 GiB
_MUCH_BYTES = 1 << 30  # unpinning and freeing takes 16 ms
_ROOM_TO_GROW = 250  # 0.4 %
_MOST_TO_SPARE = 100  # a hundredth
_BETWEEN_BLOCKS_S = 0.0002  # for who waits for the lock


@dataclass(frozen=True)
class Piece:
    """Bytes that lie together, in a host block at `offset` and on the device at `address`."""

    block: _core.HostBlock
    offset: int
    address: int
    bytes: int

    def split(self, nbytes: int) -> tuple[Piece, Piece]:
        """The first so many bytes, and the rest."""
        rest = Piece(self.block, self.offset + nbytes, self.address + nbytes, self.bytes - nbytes)
        return Piece(self.block, self.offset, self.address, nbytes), rest


@dataclass
class Backup:
    """One segment's bytes in host memory: its blocks in order, exactly the segment's size in all, or encoded.

    Attributes:
        encoding: how it is compressed; None: the bytes as they are.
        complete: every byte was copied, and found to be those of the digest; only then may it be restored from.
        digest: of the bytes at sleep; None where nothing will be compared with it.
        being_prepared: it is filled in the background (`prepare`), so it stays although it is not complete.
    """

    segment: _core.Segment
    blocks: tuple[_core.HostBlock, ...]
    encoding: Encoding | None = None
    complete: bool = False
    digest: Digest | None = None
    being_prepared: bool = False

    @property
    def bytes(self) -> int:
        """Host memory that it holds."""
        return sum(block.bytes for block in self.blocks)

    def pieces(self, at_most: int | None = None) -> Iterator[Piece]:
        """All of it in order, in pieces of at most so many bytes; None: in whole blocks."""
        address = self.segment.address
        for block in self.blocks:
            step = at_most or block.bytes
            for offset in range(0, block.bytes, step):
                yield Piece(block, offset, address + offset, min(step, block.bytes - offset))
            address += block.bytes

    def places(self) -> Iterator[Place]:
        """Of the encoded chunks, in order; a chunk lies in one block."""
        if self.encoding is None:
            return
        sizes = self.encoding.sizes.tolist()
        where = _packed(sizes, [block.bytes for block in self.blocks])
        for number, (nbytes, (block, offset)) in enumerate(zip(sizes, where, strict=True)):
            address = self.segment.address + number * CHUNK_BYTES
            is_last = number == len(sizes) - 1
            yield Place(self.segment, self.encoding.code, self.blocks[block], offset, address, nbytes, is_last)

    def has_room_for(self, encoding: Encoding | None) -> bool:
        """Whether its blocks can hold the segment stored in this way, without being too large for it."""
        if encoding is None:
            return self.bytes == self.segment.bytes
        sizes = [block.bytes for block in self.blocks]
        is_exact = self.bytes <= encoding.bytes + encoding.bytes // _MOST_TO_SPARE
        if not is_exact or self.bytes >= self.segment.bytes:
            return False
        return len(list(_packed(encoding.sizes.tolist(), sizes))) == len(encoding.sizes)


class _Copies:
    """Copies from one device to host memory. About a gibibyte is in flight, what was begun before is there."""

    def __init__(self, device: int, stack: ExitStack) -> None:
        self._streams = [stack.enter_context(_core.CopyStream(device)) for _ in range(_STREAMS)]
        self._segments: list[set[int]] = [set() for _ in self._streams]  # copied by each stream
        self._turn = 0
        self._bytes = 0  # begun in this turn

    @property
    def in_flight(self) -> set[int]:
        """Ids of the segments that may not be there yet."""
        return set().union(*self._segments)

    def start(self, piece: Piece, segment_id: int) -> None:
        """Begin to copy it."""
        _core.stop_if_asked()
        if self._bytes >= _STREAM_BYTES:
            self._turn, self._bytes = (self._turn + 1) % _STREAMS, 0
            self._streams[self._turn].synchronize()
            self._segments[self._turn].clear()
        self._streams[self._turn].to_host(piece.block, piece.offset, piece.address, piece.bytes)
        self._segments[self._turn].add(segment_id)
        self._bytes += piece.bytes

    def finish(self) -> None:
        """Wait for all of them."""
        for stream in self._streams:
            _core.stop_if_asked()
            stream.synchronize()


class BackupStore:
    """All backups of the process, by segment. Not thread safe: the allocator's lock guards it."""

    def __init__(self, settings: Settings, lock: _core.OperationLock) -> None:
        self._settings = settings
        self._lock = lock
        self._backups: dict[int, Backup] = {}
        self._backup_bytes = 0  # of all of them
        self._unpinned: dict[int, _core.HostBlock] = {}  # blocks by their ids; looked through, and trimmed, in `limits`
        self._going = GivingBack(lock, self.prune_freed, self.look_for_freed)
        self._numa_nodes: dict[int, int] = {}  # by device

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that is held."""
        return self._backup_bytes + self._going.bytes

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
        # Taken, but not touched yet: what the system counts as available is promised to these already.
        self._unpinned = {number: block for number, block in self._unpinned.items() if not block.pinned}
        promised = sum(block.bytes for block in self._unpinned.values())
        enough = None if needed is None else needed + promised
        return [
            host_limits.HostLimit("budget", None if budget is None else max(0, budget - self.host_bytes)),
            host_limits.HostLimit("cgroup", _less(host_limits.cgroup_available_bytes(), promised)),
            host_limits.HostLimit("MemAvailable", _less(host_limits.mem_available_bytes(enough=enough), promised)),
        ]

    def take(
        self,
        segments: Sequence[_core.Segment],
        keep: Iterable[_core.Segment],
        slab_bytes: int | None = None,
        encodings: Mapping[int, Encoding] | None = None,
    ) -> None:
        """Make room for backups of `segments`: address space now, pages when they are filled.

        The need of all of them is checked first. Backups that are merely retained (of segments that are awake and not
        among those to `keep`) give way.

        Args:
            encodings: all `segments` are to be written anew, those whose id is in here in this way, the rest as they
                are; a backup whose blocks do not suit is given back. None: what has a backup keeps it.

        Raises:
            OutOfHostMemory: a limit leaves too little; nothing was taken.
        """
        if encodings is not None:
            self._reuse_or_forget(segments, encodings)
        new = [segment for segment in segments if segment.id not in self._backups]
        blocks = {s.id: _block_sizes(s, (encodings or {}).get(s.id), slab_bytes or SLAB_BYTES) for s in new}
        needed = sum(map(sum, blocks.values()))
        if needed:
            self.check(needed, keep)
        for segment in new:
            node = self._numa_node(segment.device)
            segment.note_backup()
            backup = Backup(
                segment,
                tuple(_core.HostBlock(size, node) for size in blocks[segment.id]),
                (encodings or {}).get(segment.id),
            )
            self._backups[segment.id] = backup
            self._backup_bytes += backup.bytes
            self._unpinned.update((id(block), block) for block in backup.blocks)

    def needed_bytes(self, segments: Iterable[_core.Segment], *, compressed: bool) -> int:
        """Host memory that `take` would have to find for those of `segments` that have none yet: at least so much."""
        nbytes = sum(segment.bytes for segment in segments if segment.id not in self._backups)
        return least_bytes(nbytes) if compressed else nbytes

    def _reuse_or_forget(self, segments: Sequence[_core.Segment], encodings: Mapping[int, Encoding]) -> None:
        for segment in segments:
            backup = self._backups.get(segment.id)
            if backup is None:
                continue
            if backup.has_room_for(encodings.get(segment.id)):
                backup.complete, backup.digest, backup.being_prepared = False, None, False
                backup.encoding = encodings.get(segment.id)
            else:
                self.forget([segment.id])

    def fill(
        self,
        parts: Iterable[Sequence[_core.Segment]],
        nearly_done: Callable[[set[int]], None],
        workbenches: Mapping[int, Workbench] | None = None,
    ) -> list[_core.Segment]:
        """Copy the bytes of all segments of `parts` into their backups; returns them, when every byte is there.

        The backups are not complete before `prove`: who wrote meanwhile has to be found out first.

        Pages of new blocks are touched by threads ahead of the copies; a block is registered when it is next, while the
        GPU fills the ones before. The next part is asked for while the one before is being copied.

        Args:
            parts: segments for whose backups room was taken, by when the part is asked for.
            nearly_done: called when the last copies are in flight, with the ids of their segments.
            workbenches: by device, for those that are to be encoded; they come last in their part.

        Raises:
            OutOfHostMemory, DriverError, InvalidState, CodecError: not every byte is there.
        """
        workbenches = workbenches or {}
        touched = _core.Ahead(self._settings.prefault_threads or _default_prefault_threads())

        def pin(block: _core.HostBlock, device: int) -> None:
            if not block.pinned:
                touched.wait(id(block))
                block.pin(device)

        filled: list[_core.Segment] = []
        with touched, ExitStack() as stack:  # on leaving it, no copy is in flight
            copies: dict[int, _Copies] = {}  # by device
            for part in parts:
                backups = sorted((self._backups[segment.id] for segment in part), key=lambda b: b.encoding is not None)
                # Before pages are touched: what changes the address space meanwhile has to wait.
                for device in {backup.segment.device for backup in backups if backup.encoding is None} - copies.keys():
                    copies[device] = _Copies(device, stack)
                touched.add(_touch_tasks(chain.from_iterable(backup.blocks for backup in backups)))
                encoded: dict[int, list[Backup]] = {}
                for backup in backups:
                    backup.complete, backup.digest, backup.being_prepared = False, None, False
                    filled.append(backup.segment)
                    device = backup.segment.device
                    if backup.encoding is not None:
                        encoded.setdefault(device, []).append(backup)
                        continue
                    for piece in backup.pieces():
                        pin(piece.block, device)
                        copies[device].start(piece, backup.segment.id)
                for device, mine in encoded.items():
                    places = chain.from_iterable(backup.places() for backup in mine)
                    workbenches[device].encode(places, partial(pin, device=device))
            at_work: list[_Copies | Workbench] = [*copies.values(), *workbenches.values()]
            nearly_done(set().union(*(each.in_flight for each in at_work)))
            for each in at_work:
                each.finish()
        return filled

    def prove(self, segments: Iterable[_core.Segment], digests: Mapping[int, Digest]) -> None:
        """The backups of `segments`, which were filled, hold what had these digests, and has them still.

        Args:
            digests: by the segments' ids, as far as any were taken.
        """
        for segment in segments:
            backup = self._backups[segment.id]
            backup.complete, backup.digest = True, digests.get(segment.id)

    def has_room_for(self, segment: _core.Segment, encoding: Encoding | None) -> bool:
        """Whether the backup of `segment` can hold it in this way."""
        backup = self._backups.get(segment.id)
        return backup is not None and backup.has_room_for(encoding)

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
        """Every block was filled; `digest` is of what lies there."""
        backup.complete, backup.digest, backup.being_prepared = True, digest, False

    def require(self, segments: Iterable[_core.Segment], digests: Mapping[int, Digest]) -> None:
        """See that each of `segments` has a complete backup of bytes with its digest: the last look before they go.

        Args:
            digests: by the segments' ids, as far as any were taken.

        Raises:
            InvalidState: one has none.
        """
        for segment in segments:
            backup = self.get(segment)
            if backup is None or backup.digest != digests.get(segment.id):
                raise InvalidState(
                    f"the segment at 0x{segment.address:x} has no complete backup of its bytes: it stays awake"
                )

    def stored_bytes(self, segments: Iterable[_core.Segment]) -> int:
        """What the bytes of `segments`, which have backups, take in host memory."""
        encodings = ((segment, self.encoding_of(segment)) for segment in segments)
        return sum(segment.bytes if encoding is None else encoding.bytes for segment, encoding in encodings)

    def encoding_of(self, segment: _core.Segment) -> Encoding | None:
        """How the backup of `segment` is compressed, if it has one, and it is."""
        backup = self._backups.get(segment.id)
        return backup.encoding if backup else None

    def pieces(self, segment: _core.Segment) -> Iterator[Piece]:
        """The complete backup of `segment`, which is not compressed, in order, a piece for each block.

        Raises:
            InvalidState: it has none.
        """
        return self._complete(segment).pieces()

    def places(self, segment: _core.Segment) -> Iterator[Place]:
        """The chunks of the complete backup of `segment`, which is compressed, in order.

        Raises:
            InvalidState: it has none.
        """
        return self._complete(segment).places()

    def _complete(self, segment: _core.Segment) -> Backup:
        backup = self.get(segment)
        if backup is None:
            raise InvalidState(f"the backup of the segment at 0x{segment.address:x} is gone: it cannot be restored")
        return backup

    def forget(self, segment_ids: Iterable[int]) -> None:
        """Give back the host memory of these segments' backups."""
        for segment_id in segment_ids:
            for block in self._take_out(segment_id):
                block.close()

    def _take_out(self, segment_id: int) -> Sequence[_core.HostBlock]:
        """The blocks of that segment's backup, which is none any more."""
        backup = self._backups.pop(segment_id, None)
        if backup is None:
            return ()
        backup.being_prepared = False
        self._backup_bytes -= backup.bytes
        for block in backup.blocks:
            self._unpinned.pop(id(block), None)
        return backup.blocks

    def prune(self) -> None:
        """Forget what nobody can need.

        That is: backups of what was freed or dropped, incomplete ones, and those that the settings do not retain. Much
        memory is given back by a thread, since that takes as long as copying it did.
        """
        _core.take_freed()  # found here anyway
        unneeded = [segment_id for segment_id, backup in self._backups.items() if not self._is_needed(backup)]
        blocks: list[_core.HostBlock] = []
        if sum(self._backups[segment_id].bytes for segment_id in unneeded) < _MUCH_BYTES:
            self.forget(unneeded)
            unneeded = []
        for segment_id in unneeded:
            blocks += self._take_out(segment_id)
        self._going.start(blocks)

    def prune_freed(self) -> None:
        """Forget what was freed since this was asked last, and look at nothing else: each free by a hook asks."""
        while freed := _core.take_freed():  # others may free meanwhile
            backups = [self._backups.get(segment_id) for segment_id in freed]
            self.forget([backup.segment.id for backup in backups if backup is not None and backup.segment.freed])

    def look_for_freed(self) -> None:
        """For who has just released the lock, or has not got it: whoever frees may have come after the last look."""
        while _core.has_freed():
            with self._lock.hold(wait=False) as held:
                if not held:
                    return  # who holds it looks when that is released
                self.prune_freed()

    def stop(self) -> None:
        """End what goes on in the background. May be called without the lock."""
        self._going.stop()

    def _is_needed(self, backup: Backup) -> bool:
        if backup.segment.freed or not (backup.complete or backup.being_prepared):
            return False
        if backup.segment.sleep == _core.Segment.Sleep.AWAKE:
            return self._settings.retain_backups
        return backup.segment.sleep == _core.Segment.Sleep.BACKED_UP

    def clear(self) -> None:
        """Forget every backup of a segment that is awake; returns when its memory has gone back to the system."""
        self._going.finish()
        asleep = _core.Segment.Sleep.BACKED_UP
        self.forget([segment_id for segment_id, backup in self._backups.items() if backup.segment.sleep != asleep])

    def check(self, needed: int, keep: Iterable[_core.Segment]) -> None:
        """Refuse what a limit leaves no room for, or evict as many retained backups, oldest first, as it takes.

        Raises:
            OutOfHostMemory: a limit leaves too little; nothing was evicted.
        """
        self._going.finish()
        limits = [(limit.available_bytes, limit.name) for limit in self.limits(needed)]
        short = [(available, name) for available, name in limits if available is not None and available < needed]
        if not short:
            return
        retained = self._retained({segment.id for segment in keep})
        evictable = sum(backup.bytes for backup in retained)
        missing = 0
        for available, name in short:
            if available + evictable < needed:
                raise OutOfHostMemory(needed, available, name)
            missing = max(missing, needed - available)
        for backup in retained:
            if missing <= 0:
                break
            missing -= backup.bytes
            self.forget([backup.segment.id])

    def _numa_node(self, device: int) -> int:
        if device not in self._numa_nodes:
            self._numa_nodes[device] = _core.device_info(device).numa_node
        return self._numa_nodes[device]

    def _retained(self, keep: set[int]) -> list[Backup]:
        return [
            backup
            for backup in self._backups.values()
            if backup.segment.sleep == _core.Segment.Sleep.AWAKE and backup.segment.id not in keep
        ]


class GivingBack:
    """Unpins and frees host memory in a thread, one block at a time, as long as no operation runs.

    An operation that came at the same time would wait for every block: the driver locks both out of each other.
    """

    def __init__(
        self, lock: _core.OperationLock, before_release: Callable[[], None], after_release: Callable[[], None]
    ) -> None:
        self._lock = lock
        self._before_release = before_release
        self._after_release = after_release
        self._blocks: list[_core.HostBlock] = []  # guarded by the lock
        self._worker: _core.Worker | None = None
        self._stopped = False
        self.bytes = 0  # what has yet to go

    def start(self, blocks: Iterable[_core.HostBlock]) -> None:
        """Give these back soon. The lock must be held, as for `finish`."""
        for block in blocks:
            self._blocks.append(block)
            self.bytes += block.bytes
        if not self._blocks or self._stopped or (self._worker is not None and self._worker.running):
            return
        self._worker = _core.Worker("cumem-give-back")
        try:
            self._worker.start(partial(self._run, self._worker))
        except InvalidState:  # no thread to be had: at exit, or a limit
            self._worker = None
            self.finish()

    def finish(self) -> None:
        """Give back what is left now."""
        while self._blocks:
            self._give_back_one()

    def stop(self) -> None:
        """End the thread, for the exit of the process; what is left goes with it."""
        self._stopped = True
        if self._worker is not None:
            self._worker.stop()

    def _give_back_one(self) -> None:
        block = self._blocks.pop()
        self.bytes -= block.bytes
        block.close()

    def _run(self, worker: _core.Worker) -> None:
        while not worker.pause(_BETWEEN_BLOCKS_S):
            with self._lock.hold(wait=False) as held:
                if held and not self._blocks:
                    self._worker = None
                    return
                if held:
                    self._give_back_one()
                    self._before_release()
            self._after_release()


def _block_sizes(segment: _core.Segment, encoding: Encoding | None, slab_bytes: int) -> list[int]:
    """Of the blocks for a backup of `segment`."""
    if encoding is None:
        return [min(slab_bytes, segment.bytes - start) for start in range(0, segment.bytes, slab_bytes)]
    ends: dict[int, int] = {}
    sizes = encoding.sizes.tolist()
    for nbytes, (block, offset) in zip(sizes, _packed(sizes, repeat(slab_bytes)), strict=True):
        ends[block] = offset + nbytes
    # A little more, so that the same weights with other values fit as well.
    return [nbytes + nbytes // _ROOM_TO_GROW for nbytes in ends.values()]


def _packed(chunks: Iterable[int], blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(block, offset) of each chunk, in order; a chunk lies in one block. Ends early where one does not fit."""
    numbered = enumerate(blocks)
    block, room = next(numbered)
    offset = 0
    for nbytes in chunks:
        if offset + nbytes > room:
            block, room = next(numbered, (block, 0))
            offset = 0
            if nbytes > room:
                return
        yield block, offset
        offset += nbytes


def _less(available_bytes: int | None, promised: int) -> int | None:
    return None if available_bytes is None else max(0, available_bytes - promised)


def _touch_tasks(blocks: Iterable[_core.HostBlock]) -> dict[int, list[_core.Task]]:
    """By the blocks' ids, for those whose pages may not be there yet."""
    return {
        id(block): [
            _core.touch_task(block, start, min(_TOUCH_BYTES, block.bytes - start))
            for start in range(0, block.bytes, _TOUCH_BYTES)
        ]
        for block in blocks
        if not block.pinned
    }


def _default_prefault_threads() -> int:
    """Three quarters of the cores: another thread registers what they touch, and would starve beside more."""
    return min(_MOST_PREFAULT_THREADS, max(1, host_limits.usable_cores() * 3 // 4))
