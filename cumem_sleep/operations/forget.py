"""Give up the backups of memory that sleeps, because new bytes are about to be written to it."""

from __future__ import annotations

from .. import _core
from ..backups.ranges import Declared
from ..core import log
from ..core.levels import SegmentGroup
from ..core.operation import Vote
from ..core.segments import total_bytes
from ..errors import format_bytes
from ..report import PhaseTimer
from .components import Components


def forget(components: Components, vote: Vote, meant: SegmentGroup, drop: Declared) -> int:
    """Let the segments of `meant` sleep on without their backups; returns the bytes that will not come back.

    Calls no driver. The ranks agree first, because nothing brings the bytes back; what follows cannot fail.

    Args:
        drop: what may be lost. A segment that holds anything else keeps its backup, and that counts as lost when it
            wakes.

    Raises:
        RankFailed: as `CuMemAllocator.release_backups`.
    """
    backed_up = [segment for segment in meant() if segment.sleep == _core.Segment.Sleep.BACKED_UP]
    with _core.HeldSegments(backed_up) as segments:
        vote.agree(PhaseTimer())
        lost = {segment.id: segment for segment in segments if drop.survives(segment) is None}
        catalogue = components.store.catalogue
        mixed = {s.id: drop.may_go[s.id] for s in segments if s.id not in lost and s.id in drop.may_go}
        mixed = {key: spans for key, spans in mixed.items() if catalogue.given_up.get(key) != spans}
        _core.forget_backups([*lost.values()])
        catalogue.kept.give_up("release_backups() was called")  # it was made with what is forgotten
        catalogue.forget(lost)
        catalogue.given_up.update(mixed)
        nbytes = total_bytes(lost.values()) + sum(end - begin for spans in mixed.values() for begin, end in spans)
        log.info("cumem-sleep: released the backups of %s", format_bytes(nbytes))
        return nbytes
