"""Helpers for segments that are used everywhere."""

from __future__ import annotations

from collections.abc import Iterable

from .. import _core
from ..errors import InvalidArgument, counted, format_bytes


def total_bytes(segments: Iterable[_core.Segment]) -> int:
    """The total size of these segments."""
    return sum(segment.bytes for segment in segments)


def by_device(segments: Iterable[_core.Segment]) -> dict[int, list[_core.Segment]]:
    """The segments of each device, in order; the lowest device first."""
    found: dict[int, list[_core.Segment]] = {}
    for segment in segments:
        found.setdefault(segment.device, []).append(segment)
    return dict(sorted(found.items()))


def describe(segment: _core.Segment) -> str:
    """Its tag, address, size and device, for messages."""
    return f"segment {segment.tag} at 0x{segment.address:x} ({format_bytes(segment.bytes)}, device {segment.device})"


def segment_around(address: int, nbytes: int) -> _core.Segment:
    """The segment that this device memory lies in.

    Raises:
        InvalidArgument: it does not lie in one.
    """
    for segment in _core.segments():
        if segment.address <= address and address + nbytes <= segment.address + segment.bytes:
            return segment
    raise InvalidArgument(f"address=0x{address:x}, nbytes={nbytes}: not in one segment of this layer")


def everything_sleeps() -> bool:
    """Whether this layer has memory, none of which is on a device."""
    segments = _core.segments()
    return bool(segments) and not any(segment.has_memory for segment in segments)


def awake_in_words() -> str:
    """What of this layer's memory is on a device; "" if nothing is."""
    awake = [segment for segment in _core.segments() if segment.has_memory]
    tags = sorted({segment.tag for segment in awake})
    return f"{counted(len(awake), 'segment')} (tags {', '.join(tags)}) still have device memory" if awake else ""
