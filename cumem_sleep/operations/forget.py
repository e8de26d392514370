"""Forget the backups of memory that sleeps, because new bytes are about to be written to it."""

from __future__ import annotations

from .. import _core
from ..core import log
from ..core.levels import SegmentGroup
from ..core.operation import Call
from ..core.segments import total_bytes
from ..errors import format_bytes
from ..report import PhaseTimer
from .layer import Layer


def forget(layer: Layer, call: Call, meant: SegmentGroup) -> int:
    """Let the segments of `meant` sleep on without their backups; returns the bytes that will not come back.

    Calls no driver. The ranks agree first, because nothing brings the bytes back; what follows cannot fail.

    Raises:
        RankFailed: as `CuMemAllocator.forget`.
    """
    backed_up = [segment for segment in meant() if segment.sleep == _core.Segment.Sleep.BACKED_UP]
    with _core.HeldSegments(backed_up) as segments:
        call.agree(PhaseTimer())
        _core.forget_backups(segments)
        layer.store.catalogue.kept.give_up("forget() was called")  # it was made with what is forgotten
        layer.store.catalogue.forget([segment.id for segment in segments])
        log.info("cumem-sleep: forgot the backups of %s", format_bytes(total_bytes(segments)))
        return total_bytes(segments)
