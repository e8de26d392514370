"""What memory and its backups hold, looked at without changing anything: bytes by tag, digests, one backup."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
import numpy.typing as npt

from .. import _core
from ..backups.tier import Footprint
from ..core.levels import SegmentGroup
from ..core.operation import Operations
from ..core.segments import describe, segment_around
from ..errors import InvalidState
from ..report import TagUsage
from .components import Components

_Sleep = _core.Segment.Sleep


def usage(shared: Operations, components: Components, meant: SegmentGroup) -> dict[str, TagUsage]:
    """What the segments of each tag hold, and their backups; does not open the driver."""
    return shared.look("usage", _usage_by_tag, components, meant) if _core.driver_is_open() else {}


def _usage_by_tag(components: Components, meant: SegmentGroup) -> dict[str, TagUsage]:
    by_tag: dict[str, list[_core.Segment]] = {}
    for segment in meant():
        by_tag.setdefault(segment.tag, []).append(segment)
    held = components.store.catalogue.footprints(chain.from_iterable(by_tag.values()))
    return {tag: _of_a_tag(components, segments, held) for tag, segments in by_tag.items()}


def _of_a_tag(components: Components, segments: list[_core.Segment], held: Mapping[int, Footprint]) -> TagUsage:
    catalogue = components.store.catalogue
    kept, given_up = catalogue.kept, (catalogue.given_up.get(segment.id, []) for segment in segments)
    backups = [held[segment.id] for segment in segments if segment.id in held] + kept.footprints_of(segments)
    return TagUsage(
        segments=len(segments),
        bytes=sum(segment.bytes for segment in segments),
        mapped_bytes=sum(segment.bytes for segment in segments if segment.has_memory),
        host_bytes=sum(each.bytes for each in backups),
        vault_bytes=sum(each.vault_bytes for each in backups),
        shared_bytes=sum(each.shared_bytes for each in backups),
        kept_bytes=kept.bytes_of(segments),
        asleep_segments=sum(segment.sleep != _Sleep.AWAKE for segment in segments),
        backed_up_bytes=catalogue.content_bytes(
            s for s in segments if catalogue.get(s) is not None and not held[s.id].is_gone
        )
        - sum(end - begin for spans in given_up for begin, end in spans),
    )


def digests(components: Components, meant: SegmentGroup) -> dict[int, str]:
    """As `CuMemAllocator.digests`, of the segments of `meant`."""
    with _core.HeldSegments(meant()) as segments:
        found = components.digester.of([segment for segment in segments if segment.sleep == _Sleep.AWAKE])
        asleep = (components.store.catalogue.get(s) for s in segments if s.sleep == _Sleep.BACKED_UP)
        found.update((backup.segment.id, backup.digest) for backup in asleep if backup and backup.digest)
        return {segment.address: str(found[segment.id]) for segment in segments if segment.id in found}


def read_backup(components: Components, address: int, nbytes: int, copy: bool) -> npt.NDArray[np.uint8] | None:
    """As `CuMemAllocator.read_backup`."""
    segment = segment_around(address, nbytes)
    # The vault may have evicted what is only retained, and have others' bytes there now.
    components.store.catalogue.claim([segment])
    backup = components.store.catalogue.get(segment)
    if backup is None:
        if segment.sleep == _Sleep.AWAKE:
            return None
        raise InvalidState(f"{describe(segment)} sleeps without a backup: its bytes were dropped")
    if not backup.covers(address - segment.address, nbytes):
        if segment.sleep == _Sleep.AWAKE:
            return None
        raise InvalidState(f"of {describe(segment)} only parts are backed up, and not all of these {nbytes} bytes")
    content = backup.read(address - segment.address, nbytes)
    return content.copy() if copy else content
