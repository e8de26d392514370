"""Backups made in the background while the model runs, so that the next sleep copies nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real

from .. import _core
from ..backups.backup import Backup
from ..backups.host_tier import HostTier
from ..backups.tier import NotYet
from ..codec.chunks import ChangedMeanwhile, EncodedRun, Encoding
from ..codec.codec import CHUNK_BYTES
from ..codec.workspace import Workspace
from ..core import log
from ..core.driver import integrated_devices
from ..core.extents import Piece
from ..core.levels import DROPPED_AT_LEVEL_1, in_pools
from ..core.segments import by_device, total_bytes
from ..digest.digester import DigestRun
from ..errors import (
    CodecError,
    CumemSleepError,
    InvalidArgument,
    InvalidArgumentType,
    InvalidState,
    OutOfHostMemory,
    format_bytes,
)
from ..ranks.agreement import Agreement
from .components import Components

_SHORTEST_PAUSE_S = 0.0002  # in which other threads get the allocator
_LONGEST_TIMEOUT_S = 1e9  # decades
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0  # for a tier that is still taking memory
LOOK_S = 1.0  # between looks at what is left of host memory


class _Slept(Exception):
    """Of what nobody asked for, nothing is made any more: a sleep has backed up all, or drops it."""


@dataclass
class Unasked:
    """What is made ahead because host memory has room for it: when it ends, and is given back.

    Attributes:
        own: where it is, if that is memory of this process, of which limits of the host leave a reserve.
        agreement: with the other ranks, all of which give it back if one does.
        sleeps: how many there were of all memory. A discard, as of a KV cache before an update of weights, or a sleep
            of some tags leaves the rest awake, which is still to be made, or looked at.
    """

    own: HostTier | None
    agreement: Agreement | None
    sleeps: Callable[[], int]


def wanted_ahead(components: Components) -> tuple[list[_core.Segment], int]:
    """What a sleep at level 1 would back up, and the least host memory that takes.

    Raises:
        InvalidState: GPU and host have one memory.
        OutOfHostMemory: a limit leaves too little for all of it, compressed or not.
    """
    if integrated_devices():
        raise InvalidState("the GPU's memory is the host's: backups made ahead would take of it")
    wanted = _awake(is_dropped=False)
    components.store.catalogue.back_up_parts({}, wanted)
    memory = components.store.memory
    needed_bytes = memory.needed_bytes(wanted, compressed=components.compressor.on)
    memory.make_room(needed_bytes, wanted)
    return wanted, needed_bytes


def _awake(*, is_dropped: bool) -> list[_core.Segment]:
    """What of this memory a sleep at level 1 would drop, and may keep ranges of; or else back up."""
    awake = _core.Segment.Sleep.AWAKE
    return [s for s in in_pools()() if s.sleep == awake and (s.tag in DROPPED_AT_LEVEL_1) == is_dropped]


class Preparation:
    """Backups in the making; what `CuMemAllocator.prepare` returns. `TagUsage.backed_up_bytes` shows its progress.

    A thread of its own backs up one segment after the other, piece by piece. It holds the allocator's lock while it
    examines one segment, or copies one piece, at a time, so that any operation may come between. It skips what is
    asleep by then, freed, or backed up in another way. The sleep detects and copies what the model writes to meanwhile,
    or later. The thread has no lower priority than others, because it would then hold the interpreter lock for longer;
    its rate is bounded instead.

    Attributes:
        wanted_bytes: the size of all segments that it is to back up.
        error: why it ended early, or None; what was backed up by then stays.
    """

    def __init__(
        self,
        segments: Sequence[_core.Segment],
        components: Components,
        keep_bytes: int = 0,
        unasked: Unasked | None = None,
    ) -> None:
        self.wanted_bytes = self._rest_bytes = total_bytes(segments)
        self._unasked = unasked
        self._sleeps = unasked.sleeps() if unasked else 0
        self._look_at = 0.0  # when the reserve is next looked at
        self._gave_back_bytes: int | None = None
        self._segments = segments
        self._keep_bytes = keep_bytes
        self._components = components
        self._store = components.store
        self._tuning = components.tuning
        self._bytes_per_second = components.settings.prepare_bytes_per_second
        self._workspaces: dict[int, Workspace] = {}  # by device
        self._checked_devices: set[int] = set()  # had room for all of it uncompressed when checked
        self._due = time.monotonic()  # when the next piece may be copied
        self.error: CumemSleepError | None = None
        self._worker = _core.Worker("cumem-prepare")

    @property
    def running(self) -> bool:
        """Whether it still works."""
        return self._worker.running

    def start(self) -> None:
        """Begin (`CuMemAllocator.prepare` has done so).

        Raises:
            InvalidState: no thread can be started.
        """
        try:
            self._worker.start(self._run)
        except InvalidState as error:
            self._rest_bytes = 0  # nothing is to come
            raise InvalidState(f"prepare() works in a thread, but {error}") from error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds. Returns whether it has; `error` says how.

        Raises:
            InvalidArgument: `timeout` is neither a number nor None.
        """
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, Real):
                raise InvalidArgumentType(f"timeout={timeout!r}: expected seconds or None")
            timeout = float(min(timeout, _LONGEST_TIMEOUT_S))  # an integer may be too large for a float
            if math.isnan(timeout):  # it would wait forever
                raise InvalidArgument(f"timeout={timeout!r}: expected seconds or None")
        return self._worker.wait(timeout)

    def stop(self) -> None:
        """End it after the piece that is being copied. What was backed up stays. Stopping again does nothing.

        A finaliser that the garbage collector runs on its own thread only asks it to end.
        """
        self._worker.stop()
        self._rest_bytes = 0

    def share_to_come(self, nbytes: int) -> int:
        """Of so many bytes, how many are for segments that it has not come to yet."""
        return nbytes * max(0, self._rest_bytes) // max(1, self.wanted_bytes)

    def _run(self) -> None:
        try:
            for work in (self._make, self._watch):  # what was made before an error is watched, too
                try:
                    work()
                except _Slept:
                    return
                except BaseException as error:
                    self._end_early(error)
                    if self._gave_back_bytes is not None:
                        return
        finally:
            self._rest_bytes = 0
            self._prune()

    def _end_early(self, error: BaseException) -> None:
        self._rest_bytes = 0
        self.error = error if isinstance(error, CumemSleepError) else InvalidState(f"prepare failed: {error!r}")
        if nbytes := self._gave_back_bytes:  # not with the lock held: whoever logs may be waiting for it
            log.warning(
                "cumem-sleep gives back %s of backups made ahead, so the next sleep copies everything: %s",
                format_bytes(nbytes),
                error,
            )
        else:
            log.warning("prepare ended early, the next sleep copies the rest: %s", error)

    def _watch(self) -> None:
        """What nobody asked for, until a sleep."""
        if self._unasked is not None and self._unasked.own is not None:
            while self._store.memory.bytes and not self._worker.pause(LOOK_S):
                with self._turn():
                    pass

    def _make(self) -> None:
        try:
            with _core.RelaxedCapture(), DigestRun(self._components.digester, self._segments) as digests:
                self._components.warm_up()
                for segment in self._segments:
                    self._rest_bytes -= segment.bytes
                    self._prepare(segment, digests)
                if self._keep_bytes:
                    self._pin_for_kept()
        finally:
            while self._workspaces:
                self._workspaces.popitem()[1].close()

    def _prepare(self, segment: _core.Segment, digests: DigestRun) -> None:
        """Back up one segment. Waits, without the lock, while the tier has yet to take memory for it."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return self._try_to_prepare(segment, digests)
            except NotYet:
                self._worker.pause(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _try_to_prepare(self, segment: _core.Segment, digests: DigestRun) -> None:
        with self._step(segment) as mine:
            if not mine:
                return
            self._store.catalogue.back_up_parts({}, [segment])  # a sleep at level 2 may have come between
            self._store.catalogue.claim([segment])  # what the vault has evicted meanwhile is no backup
            digests.start([segment])
            before = digests.finish()[segment.id]
            is_clean = self._store.catalogue.is_clean(segment, before)
            if is_clean or self._store.memory.adopt([segment], {segment.id: before}):
                return
            encodings = self._plan(segment)
            if encodings is None:
                return
            self._store.memory.reserve([segment], self._segments, encodings, beside_work=True)
            backup = self._store.catalogue.of(segment)
        assert backup is not None
        digests.begin_copy()
        try:
            if self._copy_all(backup, digests):
                with self._step(segment, backup) as mine:
                    # The copy's own digest, not the segment's again: bytes may change and change back while they are
                    # copied, as counters and workspaces do that every kernel leaves at zero.
                    if digests.finish_copy(segment) == before and mine:
                        self._store.catalogue.mark_proven([segment], {segment.id: before})
        finally:
            if backup.being_prepared:
                backup.being_prepared = False
                self._prune()

    def _pin_for_kept(self) -> None:
        """Pin what a sleep may keep of memory that it drops: after the backups, which it gives way to."""
        for segments in by_device(_awake(is_dropped=True)).values():
            nbytes, pinned_bytes = min(self._keep_bytes, total_bytes(segments)), 1
            while pinned_bytes:
                with self._step(segments[0]) as mine:
                    kept, tier = self._store.catalogue.kept, self._store.memory.tier
                    pinned_bytes = kept.pin_ahead(tier, segments, nbytes) if mine and isinstance(tier, HostTier) else 0
                self._pace(pinned_bytes)

    def _plan(self, segment: _core.Segment) -> dict[int, Encoding] | None:
        """How to encode the segment, by its id (empty: not at all); None: it is left to the next sleep.

        In one step, because only an operation waits for that, and not for long: the GPU counts several hundred GB/s.
        (The first time for a type other than bf16 Triton compiles, for seconds.) The model waits for less, since a
        small workspace launches little at once.

        Raises:
            OutOfHostMemory: it can only be stored uncompressed, and a limit leaves too little for all of its device.
        """
        if not self._components.compressor.on:
            return {}
        try:
            with self._workspace(segment.device) as workspace:
                encodings = workspace.plan([segment])
                if workspace.has_memory:
                    return encodings
            if self._store.catalogue.encoding_of(segment) is not None:
                return None  # a sleep may have the memory, and encodes it again in the room that it has
        except CodecError as error:
            self._components.compressor.give_up(error)
        # All or nothing: a sleep may find the memory that lacks here, and half of the backups, uncompressed, would
        # take the room that all of them have compressed.
        if segment.device not in self._checked_devices:
            awake = [s for s in self._segments if s.sleep == _core.Segment.Sleep.AWAKE and not s.freed]
            rest = [s for s in awake if s.device == segment.device]
            needed_bytes = self._store.memory.needed_bytes(rest, compressed=False)
            self._store.memory.make_room(needed_bytes, self._segments)
            self._checked_devices.add(segment.device)
        return {}

    @contextmanager
    def _workspace(self, device: int) -> Iterator[Workspace]:
        """The workspace of `device`, made at the first use. An error closes it: then no work of it is in flight."""
        if device not in self._workspaces:
            spare_bytes = _core.memory_info(device)[0]
            self._workspaces[device] = self._components.compressor.workspace(device, spare_bytes, small=True)
        try:
            yield self._workspaces[device]
        except BaseException:
            self._workspaces.pop(device).close()
            raise

    def _copy_all(self, backup: Backup, digests: DigestRun) -> bool:
        if backup.encoding is None:
            return all(self._copy(backup, piece, digests) for piece in backup.pieces(self._tuning.prepare_piece_bytes))
        count = self._tuning.prepare_piece_bytes // CHUNK_BYTES
        parts = (run.part(first, first + count) for run in backup.runs() for first in range(0, len(run), count))
        return all(self._encode(backup, part, digests) for part in parts)

    def _encode(self, backup: Backup, run: EncodedRun, digests: DigestRun) -> bool:
        """As `_copy`; also false if the bytes are no longer those that room was taken for."""
        segment = backup.segment
        with self._step(segment, backup) as mine:
            if not mine:
                return False
            offset = run.address - segment.address
            try:
                with backup.tier.lane_group() as lane_group, self._workspace(segment.device) as workspace:
                    workspace.encode([run], lane_group)
                    workspace.finish()
                    digests.add_decoded(segment, offset, workspace.decode_again(run, lane_group), run.content_bytes)
            except ChangedMeanwhile:
                return False
        self._pace(run.content_bytes)
        return True

    def _copy(self, backup: Backup, piece: Piece, digests: DigestRun) -> bool:
        """One piece, at the rate that was asked for; false if the backup is no longer ours to make."""
        with self._step(backup.segment, backup) as mine:
            if not mine:
                return False
            # On leaving the stream, no copy is in flight.
            with backup.tier.lane_group() as lane_group, _core.CopyStream(backup.segment.device) as stream:
                lane = lane_group.lane(stream)
                lane.begin(piece.extent, piece.rows, out=True)
                lane.synchronize()
            digests.add_copy(backup.segment, piece, lane)
        self._pace(piece.bytes)
        return True

    def _pace(self, nbytes: int) -> None:
        """Wait as the rate demands; time lost by taking an extent may be made up for until the end of that extent."""
        now = time.monotonic()
        seconds = nbytes / self._bytes_per_second if self._bytes_per_second else 0.0
        pieces = self._tuning.slab_bytes / self._tuning.prepare_piece_bytes
        self._due = max(self._due + seconds, now - seconds * pieces)
        self._worker.pause(max(_SHORTEST_PAUSE_S, self._due - now))

    @contextmanager
    def _step(self, segment: _core.Segment, backup: Backup | None = None) -> Iterator[bool]:
        """As `_turn`; gives whether the segment is still awake (and this backup still to be made)."""
        with self._turn() as mine, _core.HeldSegments([segment] if mine else []) as held:
            awake = bool(held) and segment.sleep == _core.Segment.Sleep.AWAKE
            yield awake and (backup is None or backup.being_prepared)

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Holds the allocator's lock; gives False if it is asked to stop before that is free.

        Raises:
            _Slept, OutOfHostMemory: what nobody asked for ends.
        """
        while not self._worker.asked_to_stop:
            # Never waits for the lock: its holder may be waiting for this thread to stop.
            with self._store.lock.if_free() as has_lock:
                if has_lock:
                    self._look()
                    yield True
            if has_lock:
                return
            self._worker.pause(self._tuning.prepare_poll_s)
        yield False

    def _look(self) -> None:
        """Whether what nobody asked for goes on."""
        if (unasked := self._unasked) is None:
            return
        if unasked.sleeps() != self._sleeps:
            raise _Slept
        now, agreement = time.monotonic(), unasked.agreement
        if unasked.own is None or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        try:
            unasked.own.check_reserve()
            if agreement is not None:
                agreement.listen(0)
                if agreement.gave_back:
                    raise OutOfHostMemory(0, 0, "MemAvailable", "another rank has given its own back")
        except OutOfHostMemory:
            if agreement is not None and not agreement.gave_back:
                agreement.tell_gave_back()
            self._gave_back_bytes = self._store.memory.give_up()
            raise

    def _prune(self) -> None:
        """Drop backups that are incomplete or of freed segments: now, or when the operation that runs now has ended."""
        with self._store.lock.if_free() as has_lock:
            if has_lock:
                self._store.catalogue.prune()
