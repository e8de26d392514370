"""The digests of memory as it is: of what is awake on its device, of what sleeps in its backup."""

from __future__ import annotations

from .. import _core
from ..core.levels import SegmentGroup
from .layer import Layer

_Sleep = _core.Segment.Sleep


def digests(layer: Layer, meant: SegmentGroup) -> dict[int, str]:
    """As `CuMemAllocator.digests`, of the segments of `meant`."""
    with _core.HeldSegments(meant()) as segments:
        found = layer.digester.of([segment for segment in segments if segment.sleep == _Sleep.AWAKE])
        asleep = (layer.store.catalogue.get(s) for s in segments if s.sleep == _Sleep.BACKED_UP)
        found.update((backup.segment.id, backup.digest) for backup in asleep if backup and backup.digest)
        return {segment.address: str(found[segment.id]) for segment in segments if segment.id in found}
