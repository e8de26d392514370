"""A sleep: wait, find what changed, copy it, find that nothing else changed it meanwhile, release the memory."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from .. import _core
from ..backups.ranges import NOTHING_DECLARED, Declared, less
from ..backups.writer import BackupWriter
from ..codec.chunks import Encoding
from ..codec.codec import Code
from ..codec.plan import PLANNED_AT_ONCE, Plan
from ..codec.workspace import Workspace, close_all
from ..core import log
from ..core.extents import RangeTable
from ..core.levels import SegmentChoice, SegmentGroup
from ..core.operation import Vote
from ..core.segments import by_device, describe, total_bytes
from ..digest.digester import DigestRun
from ..digest.reference import Digest
from ..errors import CodecError, CumemSleepError, InvalidState, OutOfHostMemory, counted
from ..report import PhaseTimer, SleepReport
from .components import Components, quiesce
from .residue import left_on, not_ours

_Sleep = _core.Segment.Sleep


def sleep(
    components: Components,
    vote: Vote,
    meant: SegmentGroup,
    is_dropped: SegmentChoice,
    operation: str = "sleep",
    keep: Mapping[int, RangeTable] | None = None,
    drop: Declared = NOTHING_DECLARED,
    *,
    with_left: bool = True,
) -> SleepReport:
    """Back up the awake segments that are not dropped, and take the physical memory of all of them; all or nothing.

    An error before the memory is released leaves everything mapped with its bytes. So does an error of another rank:
    the ranks agree when everything is unmapped.

    Args:
        vote: through which the ranks agree.
        meant: which segments are to sleep.
        is_dropped: whether it sleeps without a backup.
        operation: what the report calls it.
        keep: what is kept of those that are dropped, by id, if that is possible.
        drop: what may be dropped of these. The rest of them is backed up.
        with_left: whether the report says what is left on the devices.

    Raises:
        InvalidState, OutOfHostMemory, DriverError, RankFailed: as `CuMemAllocator.sleep`.
    """
    timer = PhaseTimer()
    catalogue = components.store.catalogue
    # What an earlier failure left asleep, with its memory, is dropped for good, unless that has what is to survive.
    segments = [
        s
        for s in meant()
        if s.sleep == _Sleep.AWAKE or (s.keeps_bytes and is_dropped(s) and catalogue.has(s, drop.survives(s)))
    ]
    if not segments:
        vote.agree(timer)
        note = "nothing to do, no memory of these tags is awake; what sleeps stays as it is"
        not_kept = note if keep else ""
        return SleepReport(seconds=timer.seconds, note=note, operation=operation, not_kept=not_kept)
    if catalogue.vault is not None:
        catalogue.vault.regain()  # what others have still would not be free afterwards
    with _told_if_not_undone(segments), _core.HeldSegments(segments) as held, ExitStack() as copying:
        survives = {segment.id: drop.survives(segment) if is_dropped(segment) else () for segment in held}
        parts = {key: ranges for key, ranges in survives.items() if ranges}
        dropped = [segment for segment in held if survives[segment.id] != ()]  # some of them but for parts
        asleep_whole = [segment for segment in held if survives[segment.id] == ()]
        backed_up = [*asleep_whole, *(s for s in dropped if s.id in parts and s.sleep == _Sleep.AWAKE)]
        with timer("quiesce"):
            quiesce(held)
        catalogue.back_up_parts(parts, held)
        copied: list[_core.Segment] = []
        found: list[_core.Segment] = []
        if backed_up:
            with backing_up(components, backed_up, _to_be_digested(components, backed_up), timer) as work:
                while not work.attempt(copying):
                    pass
            copied, found = work.copied, [*work.found.values()]
        not_kept = ""
        if keep:
            with timer("keep"):
                not_kept = _keep(components, keep, asleep_whole, dropped)
        looked_at = {segment.device for segment in segments} if with_left else set()
        in_use = not_ours(looked_at)
        with timer("release"):
            # Unmaps all, calls `_agree`, and maps all again if that raises (`csrc/transitions.cpp`).
            freed_bytes = _core.put_to_sleep(asleep_whole, dropped, partial(_agree, vote, timer, copying))
        copied_bytes, covered_bytes = catalogue.content_bytes(copied), catalogue.content_bytes(backed_up)
        found_bytes, stored_bytes = catalogue.content_bytes(found), catalogue.stored_bytes(copied)
        parts_bytes = catalogue.content_bytes(segment for segment in dropped if segment.id in parts)
    left_bytes, left = left_on(looked_at, in_use)
    return SleepReport(
        freed_bytes=freed_bytes,
        copied_bytes=copied_bytes,
        stored_bytes=stored_bytes,
        clean_bytes=covered_bytes - copied_bytes,
        found_bytes=found_bytes,
        dropped_bytes=total_bytes(dropped) - parts_bytes,
        kept_bytes=catalogue.kept.bytes_of(dropped) if keep and not not_kept else 0,
        not_kept=not_kept,
        left_bytes=left_bytes,
        left=left,
        seconds=timer.seconds,
        phases=timer.phases,
        operation=operation,
    )


@contextmanager
def backing_up(
    components: Components,
    segments: Sequence[_core.Segment],
    digested: Sequence[_core.Segment],
    timer: PhaseTimer,
    *,
    looks_meanwhile: bool = False,
) -> Iterator[_BackingUp]:
    """For whoever brings the backups of awake segments up to date inside: by attempts, until one is the last.

    On leaving it is checked that nobody has written to them since.

    Args:
        digested: those of them whose bytes are compared.
        looks_meanwhile: the caller looks at their bytes, so that is checked even if nothing was copied.

    Raises:
        InvalidState, OutOfHostMemory, DriverError: as `CuMemAllocator.sleep`.
    """
    catalogue = components.store.catalogue
    catalogue.claim(segments)
    with DigestRun(components.digester, segments, catalogue.tables_of(segments)) as run:
        digests = _Digests(digested, run, components.tuning.idle_s)
        work = _BackingUp(components, segments, digests, timer)
        yield work
        with timer("check"):
            if work.copied or looks_meanwhile:
                _check_unchanged(components, segments, work.copied, digests)
            catalogue.check_complete(segments, digests.taken)


def _keep(
    components: Components,
    keep: Mapping[int, RangeTable],
    backed_up: Sequence[_core.Segment],
    dropped: Sequence[_core.Segment],
) -> str:
    """Keep what is to be kept of `dropped`; returns "", or why none of it is. What is backed up is kept anyway."""
    mine = [segment for segment in dropped if segment.id in keep and segment.sleep == _Sleep.AWAKE]
    if len(mine) + sum(segment.id in keep for segment in backed_up) < len(keep):
        return "some of this memory was asleep or freed when the sleep began"
    # What survives is backed up, and must not depend on what is kept.
    survives = components.store.catalogue.tables_of(mine)
    keep = {key: less(keep[key], survives[key]) if key in survives else keep[key] for key in keep}
    return components.store.catalogue.kept.keep(
        components.store.memory.tier, [s for s in mine if keep[s.id].size], keep, components.prover
    )


def _agree(vote: Vote, timer: PhaseTimer, copying: ExitStack) -> None:
    """All is unmapped. From here on the tier has no hold on this memory. After `agree` nothing may raise."""
    copying.close()
    vote.agree(timer)


class _BackingUp:
    """Brings the backups of some segments up to date, in one attempt or more.

    A segment whose backup has room for it, stored in the same way again, is digested part by part, while earlier
    parts are copied. So are the others, if the tier has free memory for them. Otherwise they are digested first, and
    all the memory that they need is taken before any copy. Another attempt follows if the memory ran short, or the
    codec failed: then with less retained, or uncompressed.

    Attributes:
        copied: what was copied. Until a check shows that nobody wrote meanwhile, these backups are incomplete.
        found: the segments, by id, whose bytes were found in the tier already; they stay clean in this sleep.
    """

    def __init__(
        self,
        components: Components,
        segments: Sequence[_core.Segment],
        digests: _Digests,
        timer: PhaseTimer,
    ) -> None:
        self._store = components.store
        self._compressor = components.compressor
        self._tuning = components.tuning
        self._segments = segments
        self._digests = digests
        self._timer = timer
        self.copied: list[_core.Segment] = []
        self.found: dict[int, _core.Segment] = {}
        self._changed: set[int] = set()  # ids of the segments found to have changed so far
        self._was_short = False  # the tier had too little memory
        # Of this attempt:
        self._undigested: deque[_core.Segment] = deque()  # of those that it copies in parts
        self._part_bytes: float = 0  # the least size of the next part of them
        self._unplanned: deque[_core.Segment] = deque()  # have changed, and are copied in parts
        self._plans: deque[Plan] = deque()  # of the parts that come next

    def attempt(self, copying: ExitStack) -> bool:
        """Copy what changed. False: there is another way left to try, in another attempt.

        Args:
            copying: entered, for the caller to leave: then the tier has given back all that it was lent.

        Raises:
            OutOfHostMemory, DriverError, InvalidState, CodecError: no other way is left.
        """
        with self._timer("host_memory"):
            in_parts = self._in_parts()
        try:
            new = self._begin(in_parts)
            if not new and not self._unplanned:
                return True
            with ExitStack() as attempt:
                lane_group = attempt.enter_context(self._store.memory.tier.lane_group())
                streams = attempt.enter_context(ExitStack())
                with self._workspaces([*new, *self._unplanned, *self._undigested]) as workspaces:
                    writer = BackupWriter(
                        self._store.catalogue, lane_group, streams, self._tuning, [*new, *in_parts], workspaces
                    )
                    encodings: dict[int, Encoding] = {}
                    for device, workspace in workspaces.items():
                        with self._timer("plan"):
                            mine = [s for s in new if s.device == device]
                            encodings.update(workspace.plan(mine, self._store.catalogue.tables_of(mine)))
                    with self._timer("host_memory"):
                        self._store.memory.reserve(new, self._segments, encodings)
                    with self._timer("copy"):
                        part = new or self._next_part(workspaces)
                        while part:
                            copies = writer.add(part)
                            while copies:
                                for transfer in [*copies]:
                                    if not transfer.step():
                                        copies.remove(transfer)
                            writer.encode(part)
                            part = self._next_part(workspaces)
                        self._digests.begin_check(writer.in_flight)
                        self.copied = writer.finish()
                copying.enter_context(attempt.pop_all())
            return True
        except CodecError as error:
            if not self._compressor.on:
                raise  # nothing is left to give up
            self._compressor.give_up(error)
        except OutOfHostMemory:
            gave_way = self._store.catalogue.kept.give_up("backups needed the host memory")
            if not gave_way and not any(segment.id in self._changed for segment in in_parts):
                raise
            self._was_short = True
            # The old backups of changed segments are worthless, and their memory may be what is missing. Without
            # them everything is planned, and checked, at once.
            self._store.catalogue.forget(self._changed)
            with self._timer("digest"):
                rest = self._changed_of(in_parts)
            self._store.catalogue.forget(segment.id for segment in rest)
        return False

    def _begin(self, in_parts: Sequence[_core.Segment]) -> list[_core.Segment]:
        """Find what changed of the segments that are not copied in parts, and in the first part of the others."""
        self._undigested, self._part_bytes = deque(in_parts), self._tuning.head_bytes
        self._plans.clear()
        known = {segment.id for segment in in_parts}
        others = [segment for segment in self._segments if segment.id not in known]
        if not self._compressor.on:  # otherwise their sizes are not known yet
            with self._timer("host_memory"):
                memory = self._store.memory
                memory.make_room(memory.needed_bytes(self._segments, compressed=False), self._segments)
            if others:
                # While new pages are prefaulted a digest takes long, because its table needs memory.
                with self._timer("digest"):
                    self._digests.take(self._segments)
        with self._timer("digest"):
            new = self._changed_of(others)
            self._unplanned = deque(self._next_changed())
        return new

    def _next_part(self, workspaces: Mapping[int, Workspace]) -> list[_core.Segment]:
        """The next segments that have changed, with memory for their backups; empty if there are no more.

        They are digested while copies of those before them are in flight. Likewise, while segments are encoded, the GPU
        counts the sizes of the next ones, and copies samples of those after that to the host, unless their codes are
        known.
        """
        if not workspaces:
            if part := [*self._unplanned] or self._next_changed():
                self._unplanned.clear()
                self._store.memory.reserve(part, self._segments, {})
            return part
        part = []
        while not part:
            while len(self._plans) < (3 if self._plans and self._plans[-1].is_sampled else 2):
                if not self._unplanned:
                    self._unplanned.extend(self._next_changed())
                following = _first_of(self._unplanned, self._tuning.count_part_bytes, PLANNED_AT_ONCE)
                for plan in self._plans:
                    plan.count()
                if not following:
                    break
                for device, mine in by_device(following).items():
                    raw = self._store.catalogue.tables_of(mine)
                    self._plans.append(workspaces[device].begin_plan(mine, self._codes(mine), raw))
            if not self._plans:
                return []
            plan = self._plans.popleft()
            encodings = plan.finish()
            part = self._fitting(plan.segments, encodings)
        self._store.memory.reserve(part, self._segments, encodings)
        return part

    def _codes(self, part: Iterable[_core.Segment]) -> dict[int, Code]:
        """The codes of the encoded backups that segments of `part` have, by the segments' ids."""
        return {segment.id: e.code for segment in part if (e := self._store.catalogue.encoding_of(segment))}

    def _fitting(self, planned: Sequence[_core.Segment], encodings: Mapping[int, Encoding]) -> list[_core.Segment]:
        """Without those whose values are so different that the codes of their backups do not suit them any more.

        Their backups go: they are planned anew, by samples.
        """
        backups = [b for b in map(self._store.catalogue.of, planned) if b is not None and b.encoding]
        unfit = {b.segment.id: b.segment for b in backups if not b.has_room_for(encodings.get(b.segment.id))}
        self._store.catalogue.forget(unfit)
        self._unplanned.extendleft(unfit.values())
        return [segment for segment in planned if segment.id not in unfit]

    def _in_parts(self) -> list[_core.Segment]:
        """The segments whose backups need no memory, or all of them if the vault has enough free."""
        rewritten = [segment for segment in self._segments if self._can_be_rewritten(segment)]
        content_bytes = self._store.catalogue.content_bytes
        missing_bytes = content_bytes(self._segments) - content_bytes(rewritten)
        vault = self._store.memory.vault if missing_bytes and not self._was_short else None
        return [*self._segments] if vault and vault.has_free(missing_bytes) else rewritten

    def _can_be_rewritten(self, segment: _core.Segment) -> bool:
        backup = self._store.catalogue.of(segment)
        if backup is None:
            return False
        return backup.encoding is not None if self._compressor.on and not backup.ranges else backup.has_room_for(None)

    def _changed_of(self, segments: Sequence[_core.Segment]) -> list[_core.Segment]:
        """The segments that do not equal their backups."""
        self._digests.take(segments)
        taken = self._digests.taken
        self.found.update((segment.id, segment) for segment in self._store.memory.adopt(segments, taken))
        changed = [
            segment for segment in segments if not self._store.catalogue.is_clean(segment, taken.get(segment.id))
        ]
        self._changed.update(segment.id for segment in changed)
        return changed

    def _next_changed(self) -> list[_core.Segment]:
        """Digest the next part that has changed, and return what changed in it; empty when everything is digested.

        The first part is small, so that its copies begin soon. Where a part did not change, the rest probably did not
        either, and is one part.
        """
        changed: list[_core.Segment] = []
        while self._undigested and not changed:
            changed = self._changed_of(_first_of(self._undigested, self._part_bytes))
            self._part_bytes = self._tuning.digest_part_bytes if changed else math.inf
        return changed

    @contextmanager
    def _workspaces(self, segments: Sequence[_core.Segment]) -> Iterator[dict[int, Workspace]]:
        """A workspace for each device of `segments`; none if nothing is to be compressed."""
        workspaces: dict[int, Workspace] = {}
        try:
            for device in by_device(segments) if self._compressor.on else ():
                with self._timer("plan"):
                    spare_bytes = _core.memory_info(device)[0]
                    workspaces[device] = self._compressor.workspace(device, spare_bytes)
            yield workspaces
        finally:
            close_all(workspaces.values())


class _Digests:
    """The digests of one sleep: `taken` before the copies, by segment id, and compared with new ones after them.

    This check begins when the last copies are in flight. What is written to a segment after its turn goes unnoticed, as
    it does between the check and the release.
    """

    def __init__(self, segments: Sequence[_core.Segment], run: DigestRun, idle_s: float) -> None:
        self.taken: dict[int, Digest] = {}
        self._segments = {segment.id: segment for segment in segments}
        self._run = run
        self._idle_s = idle_s

    def take(self, part: Iterable[_core.Segment]) -> None:
        """Digest the segments of `part`, and wait for that; not those taken already, or not to be compared."""
        if ids := [s.id for s in part if s.id in self._segments and s.id not in self.taken]:
            self._begin(ids)
            self.taken.update(self._run.finish())

    def begin_check(self, in_flight: set[int]) -> None:
        """Begin to digest again what was digested before, except for the segments with these ids."""
        self._begin(segment_id for segment_id in self.taken if segment_id not in in_flight)

    def changed(self, quiesce: Callable[[], None]) -> list[_core.Segment]:
        """The segments whose digests have changed. Waits for all work on their devices.

        If there was any work, it may have written until it ended, so digests begun before that do not count.
        """
        now = self._run.finish()
        start = time.perf_counter()
        quiesce()
        if time.perf_counter() - start > self._idle_s:
            now = {}
        self._begin(segment_id for segment_id in self.taken if segment_id not in now)
        now.update(self._run.finish())
        return [self._segments[segment_id] for segment_id in self.taken if now[segment_id] != self.taken[segment_id]]

    def _begin(self, ids: Iterable[int]) -> None:
        self._run.finish()  # what a failed attempt began
        self._run.start([self._segments[segment_id] for segment_id in ids])


@contextmanager
def _told_if_not_undone(segments: Sequence[_core.Segment]) -> Iterator[None]:
    """Around a sleep of `segments`: if it fails, its error says which of them are asleep all the same."""
    try:
        yield
    except BaseException as error:
        asleep = [segment for segment in segments if segment.sleep != _Sleep.AWAKE and not segment.freed]
        lost = [segment for segment in asleep if segment.sleep == _Sleep.DROPPED and not segment.keeps_bytes]
        if isinstance(error, CumemSleepError):
            error.asleep_segments = tuple(describe(segment) for segment in asleep if segment not in lost)
            error.lost_segments = tuple(map(describe, lost))
        elif 0 < len(asleep) < len(segments):  # otherwise it came when all were asleep
            log.error(
                "an interrupted sleep could not be undone: %s", ", ".join(f"{describe(s)} sleeps" for s in asleep)
            )
        raise


def _first_of(queue: deque[_core.Segment], least_bytes: float, most: float = math.inf) -> list[_core.Segment]:
    """Take off the first segments, until they have so many bytes, or are so many."""
    part, nbytes = list[_core.Segment](), 0
    while queue and nbytes < least_bytes and len(part) < most:
        part.append(queue.popleft())
        nbytes += part[-1].bytes
    return part


def _to_be_digested(components: Components, segments: Sequence[_core.Segment]) -> Sequence[_core.Segment]:
    """Those whose digests are of use: to compare with those of backups now, or with those after a wake."""
    if components.settings.verify != "off" or components.settings.retain_backups:
        return segments
    return [
        segment for segment in segments if segment.backup == _core.BackupPlan.ALWAYS
    ]  # a wake may retain their backups


def _check_unchanged(
    components: Components, segments: Sequence[_core.Segment], copied: Sequence[_core.Segment], digests: _Digests
) -> None:
    """Refuse a sleep whose backups may hold other bytes than the device does by now; the others are complete."""
    changed = digests.changed(lambda: quiesce(segments))
    components.store.catalogue.mark_proven([segment for segment in copied if segment not in changed], digests.taken)
    if changed:
        components.store.catalogue.forget(segment.id for segment in changed)
        raise InvalidState(
            f"{describe(changed[0])} was written to while it was backed up ({counted(len(changed), 'segment')} in all):"
            " let no work run on the GPU during sleep, and call again; everything is awake"
        )
