"""A wake: take memory, map it under the old addresses, copy the bytes back, prove them; or undo all of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain

import numpy as np

from .. import _core
from ..backups.backup import Backup
from ..backups.ranges import NOTHING_DECLARED, Declared, Spans, aligned_inwards, spans_of, without
from ..codec.codec import CHUNK_BYTES
from ..codec.decoding import Decoding
from ..codec.workspace import Workspace, close_all
from ..core.commitment import left_bytes
from ..core.driver import integrated_devices
from ..core.extents import LaneGroup
from ..core.levels import SegmentGroup
from ..core.operation import Operation, Operations, Vote
from ..core.pinned import bounce_block
from ..core.segments import by_device, total_bytes
from ..digest.digester import DigestRun
from ..digest.reference import Digest
from ..errors import OutOfDeviceMemory, counted
from ..report import PhaseTimer, WakeReport
from ..store.transfer import Together, Transfer
from .components import Components

_Sleep = _core.Segment.Sleep


def waking(
    shared: Operations,
    components: Components,
    meant: SegmentGroup,
    work: Callable[..., WakeReport],
    *arguments: object,
    vote: Vote,
) -> Operation[WakeReport]:
    """The operation that wakes `meant` by `work`, which is called with the arguments."""
    return Operation(
        shared,
        "wake_up",
        work,
        arguments,
        vote=vote,
        counts_as="wake",
        needs=lambda: wanting(components, asleep(meant)),
        check_device_memory=lambda: check_device_memory(components, asleep(meant)),
    )


def asleep(meant: SegmentGroup) -> list[_core.Segment]:
    """The segments of `meant` that are asleep."""
    return [segment for segment in meant() if segment.sleep != _Sleep.AWAKE]


def wanting(components: Components, segments: Sequence[_core.Segment]) -> dict[int, int]:
    """How many bytes the segments without memory need, by device, with the page tables of what their wake pins."""
    lacking = [segment for segment in segments if not segment.keeps_memory]
    tables_bytes = components.store.memory.device_bytes_to_pin(lacking)
    return {device: total_bytes(mine) + tables_bytes for device, mine in by_device(lacking).items()}


def check_device_memory(components: Components, segments: Sequence[_core.Segment]) -> None:
    """Refuse a wake of these segments that cannot fit, before anything is mapped.

    Raises:
        OutOfDeviceMemory: a device has too little free memory.
    """
    with _core.HeldSegments(segments) as held:
        _core.begin_wake(held)  # which releases what a vault may still write to
    for device in by_device(segments):
        _core.release_waiter(device)  # whose page counts, too
    if short := _short(components, segments):
        if (vault := components.store.catalogue.vault) is not None:
            vault.regain()
        short = _short(components, segments)
    for device, needed_bytes, free_bytes in short:
        count = sum(segment.device == device and not segment.keeps_memory for segment in segments)
        raise OutOfDeviceMemory(needed_bytes, free_bytes, device, segment=counted(count, "sleeping segment"))


def _short(components: Components, segments: Sequence[_core.Segment]) -> list[tuple[int, int, int]]:
    """The devices with less free memory than the segments need there: each with what is needed, and what is free."""
    found = [(device, nbytes, _free_bytes(device)) for device, nbytes in wanting(components, segments).items()]
    return [(device, needed, free) for device, needed, free in found if needed > free]


def _free_bytes(device: int) -> int:
    free_bytes = _core.memory_info(device)[0]
    if device not in integrated_devices():
        return free_bytes
    # Memory control groups do not count what GPUs take of it, as others have measured on GB10.
    return min([free_bytes, *(nbytes for name, nbytes in left_bytes().items() if name != "cgroup")])


def wake(
    components: Components,
    vote: Vote,
    meant: SegmentGroup,
    retained: bool | None = None,
    unwanted: SegmentGroup | None = None,
    drop: Declared = NOTHING_DECLARED,
) -> WakeReport:
    """Wake the segments of `meant`, for which there is room (`check_device_memory`).

    If anything fails, what was taken goes back, and everything stays asleep. The same holds if anything fails on
    another rank: the ranks agree when everything is verified.

    Args:
        retained: whether backups stay for the next sleep; None: as the settings say.
        unwanted: of these nothing is restored, and their backups go when all is awake.
        drop: of `unwanted`, what may be lost. A segment that holds anything else is restored.

    Raises:
        OutOfDeviceMemory, OutOfHostMemory, BackupMismatch, CodecError, DriverError, RankFailed: as
            `CuMemAllocator.wake_up`.
    """
    timer = PhaseTimer()
    sleeping = asleep(meant)
    if not sleeping:
        vote.agree(timer)
        return WakeReport(seconds=timer.seconds, note="nothing to do, no memory of these tags is asleep")
    catalogue = components.store.catalogue
    with _core.HeldSegments(sleeping) as segments:
        loses, to_load = _given_up(unwanted, drop)
        restored, parts, dropped = _restored(components, segments, loses)
        expected = _digests_at_sleep(components, restored) if components.settings.verify == "wake" else {}
        checked = [segment for segment in restored if segment.id in expected]
        mapping = _core.ThreadPool(1, {segment.id: [_core.map_task(segment)] for segment in restored[1:]})
        # Begins when half of the bytes are there, because it costs nothing then. Earlier it could have to wait for the
        # driver to scrub freed memory, and hold a lock of the driver meanwhile that copies need.
        mapping_dropped = _core.ThreadPool(1, {segment.id: [_core.map_task(segment)] for segment in dropped})
        try:
            with (
                mapping,
                mapping_dropped,
                DigestRun(components.digester, checked, catalogue.tables_of(checked)) as digests,
            ):
                with ExitStack() as leaving, _workspaces(components, restored, segments) as workspaces:
                    lane_group = leaving.enter_context(components.store.memory.tier.lane_group()) if restored else None
                    # The first copy waits for this anyway. What fits into one batch is all mapped before its copy
                    # begins: a thread would not get ahead.
                    if restored:
                        restored[0].map()
                    if workspaces or total_bytes(restored) > components.tuning.engine_batch_bytes:
                        mapping.start()
                    if not all(workspace.has_memory for workspace in workspaces.values()):
                        # Before anything else can take this memory, if only for page tables.
                        _wait_for(timer, mapping, restored)
                        _wait_for(timer, mapping_dropped, dropped)
                    with timer("copy"), ExitStack() as streams:
                        copies = _copies(
                            components, restored, lane_group, streams, mapping, digests if checked else None, workspaces
                        )
                        begun, half = 0, catalogue.content_bytes(restored) // 2
                        while copies:
                            before = begun
                            for queue in copies:
                                if not (nbytes := queue[0].step()):
                                    queue.popleft().finish()
                                begun += nbytes
                            copies = [queue for queue in copies if queue]
                            if before < half <= begun:
                                mapping_dropped.start()
                _wait_for(timer, mapping_dropped, dropped)
                if checked:
                    with timer("verify"):
                        digests.verify(checked, expected, catalogue.mark_corrupt)
            _fill(components, _lost(components, dropped, parts, restored, to_load))
            if unwanted is not None:
                catalogue.kept.give_up("the wake was not to restore")
            kept_bytes, not_kept = catalogue.kept.bring_back([*dropped, *parts], components.prover, timer)
            vote.agree(timer)
            _core.finish_wake(segments)
            catalogue.forget(segment.id for segment in dropped if segment.id in loses)
            catalogue.retain(segments, retained=retained)
        except BaseException:
            _core.undo_wake(segments)  # leaves alone what finish_wake has woken
            raise
    return WakeReport(
        mapped_bytes=total_bytes(segments),
        restored_bytes=catalogue.content_bytes(restored),
        verified_bytes=catalogue.content_bytes(checked),
        kept_bytes=kept_bytes,
        not_kept=not_kept,
        stored_bytes=catalogue.stored_bytes(restored),
        seconds=timer.seconds,
        phases=timer.phases,
    )


def _wait_for(timer: PhaseTimer, mapping: _core.ThreadPool, segments: Iterable[_core.Segment]) -> None:
    with timer("map"):
        for segment in segments:
            mapping.wait(segment.id)


def _given_up(unwanted: SegmentGroup | None, drop: Declared) -> tuple[set[int], dict[int, Spans]]:
    """Which segments are not restored, by id; and of those that are, since they hold other things, what is loaded."""
    segments = unwanted() if unwanted is not None else []
    loses = {segment.id for segment in segments if drop.survives(segment) is None}
    return loses, {segment.id: drop.may_go.get(segment.id, []) for segment in segments}


def _restored(
    components: Components, segments: Sequence[_core.Segment], loses: Container[int]
) -> tuple[list[_core.Segment], list[_core.Segment], list[_core.Segment]]:
    """Those that come back from backups, in the order of their copies; of them, those in parts; and the others."""
    catalogue = components.store.catalogue
    whole = [s for s in segments if s.sleep == _Sleep.BACKED_UP and s.id not in loses]
    parts = [s for s in segments if s.sleep == _Sleep.DROPPED and not s.keeps_bytes and catalogue.get(s)]
    restored = sorted([*whole, *parts], key=lambda segment: catalogue.encoding_of(segment) is not None)
    with_bytes = {segment.id for segment in restored}
    return restored, parts, [segment for segment in segments if segment.id not in with_bytes]


def _lost(
    components: Components,
    dropped: Sequence[_core.Segment],
    parts: Sequence[_core.Segment],
    restored: Sequence[_core.Segment],
    to_load: Mapping[int, Spans],
) -> list[tuple[_core.Segment, Spans]]:
    """What comes back with undefined bytes, or counts as lost because new bytes are to be loaded there (`to_load`)."""
    catalogue = components.store.catalogue
    tables = catalogue.tables_of(parts)
    lost = [(segment, [(0, segment.bytes)]) for segment in dropped if not segment.keeps_bytes]
    lost += [(segment, without([(0, segment.bytes)], spans_of(tables[segment.id]))) for segment in parts]
    for segment in restored:
        lost += [(segment, spans.get(segment.id, [])) for spans in (catalogue.given_up, to_load)]
    return [(segment, spans) for segment, spans in lost if spans]


def _copies(
    components: Components,
    restored: Sequence[_core.Segment],
    lane_group: LaneGroup | None,
    streams: ExitStack,
    mapping: _core.ThreadPool,
    digests: DigestRun | None,
    workspaces: Mapping[int, Workspace],
) -> list[deque[Transfer | Decoding | _DecodingByCpu]]:
    """The copies to each device, which are made one after the other: each has the whole link.

    Args:
        streams: their owner; once it is closed, nothing is in flight.
        digests: begun for segments that have arrived.
    """
    copies: list[deque[Transfer | Decoding | _DecodingByCpu]] = []
    if lane_group is None:  # nothing is restored
        return copies
    for device, mine in by_device(restored).items():
        queue: deque[Transfer | Decoding | _DecodingByCpu] = deque()
        backups = [components.store.catalogue.get_or_raise(segment) for segment in mine]
        if raw := [backup for backup in backups if backup.encoding is None]:
            queue.append(_transfer_in(components, device, raw, lane_group, streams, mapping, digests))
        if encoded := [backup for backup in backups if backup.encoding is not None]:
            workspace, completed = workspaces[device], digests.start if digests is not None else _nothing
            if workspace.has_memory:
                runs = [*chain.from_iterable(backup.runs() for backup in encoded)]
                lanes, timed_bytes = workspace.lanes(lane_group), components.tuning.slots_timed_bytes
                chooser = components.choosers.of(device, lanes, sum(run.bytes for run in runs), timed_bytes)
                queue.append(Decoding(runs, workspace, lane_group, chooser, mapping.wait, completed))
            else:
                queue.append(_DecodingByCpu(encoded, mapping.wait, completed))
        copies.append(queue)
    return copies


class _DecodingByCpu:
    """In place of a `Decoding` where a device has no memory for a workspace, at some 300 MB/s: so what fits wakes."""

    def __init__(
        self,
        backups: Iterable[Backup],
        mapped: Callable[[int], None],
        completed: Callable[[Sequence[_core.Segment]], None],
    ) -> None:
        self._left, self._mapped, self._completed = deque(backups), mapped, completed

    def step(self) -> int:
        """Decode one more backup; returns its bytes, 0 if none is left."""
        if not self._left:
            return 0
        backup = self._left.popleft()
        segment = backup.segment
        self._mapped(segment.id)
        with closing(bounce_block(CHUNK_BYTES, segment.device)) as block, _core.CopyStream(segment.device) as stream:
            for offset in range(0, segment.bytes, CHUNK_BYTES):
                np.frombuffer(memoryview(block), np.uint8)[:] = backup.read(offset, CHUNK_BYTES)
                stream.to_device(segment.address + offset, block, 0, CHUNK_BYTES)
                stream.synchronize()
        self._completed([segment])
        return segment.bytes

    def finish(self) -> None:
        """Nothing is in flight."""


def _transfer_in(
    components: Components,
    device: int,
    backups: Sequence[Backup],
    lane_group: LaneGroup,
    streams: ExitStack,
    mapping: _core.ThreadPool,
    digests: DigestRun | None,
) -> Transfer:
    tuning, nbytes = components.tuning, sum(backup.content_bytes for backup in backups)
    count = min(lane_group.most_lanes, -(-nbytes // tuning.batch_bytes))
    lanes = [lane_group.lane(streams.enter_context(_core.CopyStream(device))) for _ in range(count)]
    chooser = components.choosers.of(device, lanes, nbytes, tuning.timed_bytes)
    begin_digests = _nothing if digests is None else Together(digests.start, nbytes, tuning.digest_together_bytes)

    def arrived(some: Sequence[_core.Segment]) -> None:
        begin_digests(some)
        lane_group.done_with(segment.address for segment in some)

    transfer = Transfer(lanes, chooser, arrived, tuning, out=False, mapped=mapping.wait)
    for backup in backups:
        transfer.add(backup.segment, backup.pieces())
    return transfer


def _nothing(segments: Sequence[_core.Segment]) -> None:
    pass


@contextmanager
def _workspaces(
    components: Components, restored: Sequence[_core.Segment], waking: Sequence[_core.Segment]
) -> Iterator[dict[int, Workspace]]:
    """A workspace per device with compressed backups, in memory that `waking` does not need."""
    workspaces: dict[int, Workspace] = {}
    encoded = [segment for segment in restored if components.store.catalogue.encoding_of(segment) is not None]
    needed_bytes = wanting(components, waking)
    try:
        for device in by_device(encoded):
            spare_bytes = _core.memory_info(device)[0] - needed_bytes.get(device, 0)
            workspaces[device] = components.compressor.workspace(device, spare_bytes)
        yield workspaces
    finally:
        close_all(workspaces.values())


def _digests_at_sleep(components: Components, segments: Sequence[_core.Segment]) -> dict[int, Digest]:
    """The digests of the segments at sleep, by id; those whose digest was not taken are left out."""
    backups = [backup for backup in map(components.store.catalogue.get, segments) if backup is not None]
    return {backup.segment.id: backup.digest for backup in backups if backup.digest is not None}


def _fill(components: Components, lost: Sequence[tuple[_core.Segment, Spans]]) -> None:
    """With poison, or what others want there: these spans come back without their bytes."""
    for segment, spans in lost if components.settings.poison else ():
        if segment.tag != "kv_cache":
            with _core.CopyStream(segment.device) as stream:
                for begin, end in aligned_inwards(spans):
                    stream.fill(segment.address + begin, 0xFF, end - begin)  # a NaN in every float type
                stream.synchronize()
    for fill in components.fills:
        fill(lost)
