"""Device memory that other processes are giving back: a wake may begin before all of it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from .. import _core
from ..errors import OutOfDeviceMemory, counted
from ..segments import by_device, total_bytes

_LOOK_EVERY_S = 0.001


def wanting(segments: Iterable[_core.Segment]) -> dict[int, int]:
    """How many bytes the segments without memory need, by device."""
    return {device: total_bytes(mine) for device, mine in by_device(s for s in segments if not s.has_memory).items()}


class ComingMemory:
    """The device memory of one wake, which may have to be waited for.

    Args:
        segments: those that wake.
        within_s: how long it may take to come, in seconds from now. 0: it has to be free now.
        spared_bytes: what stays free on each device until all is there, for whoever gives memory back.

    Raises:
        OutOfDeviceMemory: too little is free, and it may not be waited for; or a device does not have so much.
    """

    def __init__(self, segments: Sequence[_core.Segment], within_s: float, spared_bytes: int) -> None:
        self._segments = {segment.id: segment for segment in segments}
        self._ends_at = time.monotonic() + within_s
        self._spared_bytes = spared_bytes
        self._to_start: list[_core.Ahead] = []
        lack = _lack(segments)
        self._is_there = lack is None
        if lack is not None and (within_s <= 0 or _can_never_fit(segments)):
            raise lack

    def wait(self, segments: Iterable[_core.Segment]) -> None:
        """Return when there is memory for those of `segments` that have none.

        Raises:
            OutOfDeviceMemory: it has not come in time.
        """
        if self._is_there:
            return
        while (lack := _lack(self._segments.values())) is not None:
            if _lack(segments, self._spared_bytes) is None:
                return
            _core.stop_if_asked()
            if time.monotonic() >= self._ends_at:
                raise lack
            time.sleep(_LOOK_EVERY_S)
        self._is_there = True
        for mapping in self._to_start:
            mapping.start()

    def fitting_now(self, segments: Sequence[_core.Segment]) -> Sequence[_core.Segment]:
        """The first ones of `segments` that fit in what is free; none where all memory is there.

        A thread maps these at once: when another process releases its memory, calls of the driver wait for that.
        """
        if self._is_there:
            return ()
        left = {device: _core.memory_info(device)[0] - self._spared_bytes for device in by_device(segments)}
        for place, segment in enumerate(segments):
            left[segment.device] -= 0 if segment.has_memory else segment.bytes
            if left[segment.device] < 0:
                return segments[:place]
        return segments

    def start(self, mapping: _core.Ahead) -> None:
        """Start it when there is memory for all segments."""
        if self._is_there:
            mapping.start()
        else:
            self._to_start.append(mapping)

    def mapped_by(self, mapping: _core.Ahead) -> Callable[[int], None]:
        """What waits for the memory of the segment with that id, and returns when `mapping` has mapped it."""

        def mapped(segment_id: int) -> None:
            self.wait([self._segments[segment_id]])
            mapping.wait(segment_id)

        return mapped


def _can_never_fit(segments: Sequence[_core.Segment]) -> bool:
    return any(nbytes > _core.memory_info(device)[1] for device, nbytes in wanting(segments).items())


def _lack(segments: Iterable[_core.Segment], spared_bytes: int = 0) -> OutOfDeviceMemory | None:
    """What the error would say if the segments were mapped now; None if they fit."""
    without = [segment for segment in segments if not segment.has_memory]
    for device, needed_bytes in wanting(without).items():
        free_bytes = _core.memory_info(device)[0]
        if needed_bytes + spared_bytes > free_bytes:
            count = sum(segment.device == device for segment in without)
            return OutOfDeviceMemory(needed_bytes, free_bytes, device, segment=counted(count, "sleeping segment"))
    return None
