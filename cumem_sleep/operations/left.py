"""What is left on the devices after a sleep: the driver tells the sum, and notes tell what is in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

from .. import _core
from ..errors import CumemSleepError
from ..scopes import scoped
from ..segments import total_bytes


class LeftOnDevices:
    """Notes of what is in use on a device and is not this layer's, taken at moments when it is known what came before.

    The driver tells what is in use by all processes, and other processes come and go. So items are about right. What
    the warm-up added counts as far as it fits into the sum; if what was there before does not fit, none is told.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}  # the first allocation, by device
        self._by_communicators: dict[int, int] = {}  # a part of what was in use before
        self._by_warm_up: dict[int, int] = {}
        self._warming_up: set[object] = set()  # blocks that have begun
        self._before_warm_up: dict[int, int] = {}  # what was in use when the first of them began, by device

    def note_before(self, device: int) -> None:
        """As `note_used`, for a caller that has not asked the driver."""
        if device not in self._before:
            with suppress(CumemSleepError), _core.RelaxedCapture():  # a thread may be capturing a graph
                free_bytes, total = _core.memory_info(device)
                self.note_used(device, total - free_bytes)

    def note_used(self, device: int, used_bytes: int) -> None:
        """Note that so much is in use; does nothing if this layer has allocated on the device already."""
        if device not in self._before and not any(segment.device == device for segment in _core.segments()):
            self._before[device] = used_bytes

    def note_communicators(self, device: int, nbytes: int) -> None:
        """Note that communicators made before the first allocation take so much of the device."""
        self._by_communicators[device] = nbytes

    @scoped
    def warm_up(self) -> Iterator[None]:
        """Put this around code that loads modules and captures graphs. Of several that overlap all counts once."""
        mine = object()
        try:
            if not self._warming_up:
                self._before_warm_up = {}
            self._warming_up.add(mine)
            self._before_warm_up = {**_not_ours(), **self._before_warm_up}
            yield
        finally:
            self._warming_up.discard(mine)
        if self._warming_up:  # the last of them counts for all
            return
        for device, nbytes in _not_ours().items():
            if (grown := nbytes - self._before_warm_up.get(device, nbytes)) > 0:
                self._by_warm_up[device] = self._by_warm_up.get(device, 0) + grown

    def items(self, devices: Collection[int], left_bytes: int) -> dict[str, int]:
        """`left_bytes` of these devices by name, as in `SleepReport.left`; empty if nothing is known."""
        known = {"awake": _core.bytes_with_memory(set(devices))}
        before = {}
        if all(device in self._before for device in devices):
            nccl = sum(min(self._by_communicators.get(device, 0), self._before[device]) for device in devices)
            before = {"context": sum(self._before[device] for device in devices) - nccl, "nccl": nccl}
        others = left_bytes - sum(known.values()) - sum(before.values())
        if others >= 0:  # else other processes have less than they had
            warm_up = sum(self._by_warm_up.get(device, 0) for device in devices)
            # PyTorch's unused cache counts as part of the warm-up, and is gone when memory sleeps.
            known |= {**before, "modules_and_graphs": min(warm_up, others)}
        known = {name: nbytes for name, nbytes in known.items() if nbytes}
        return {**known, "rest": max(0, left_bytes - sum(known.values()))} if known else {}


def _not_ours() -> dict[int, int]:
    """For each device on which this layer has memory: the bytes in use that do not belong to its segments."""
    segments = _core.segments()
    found = {}
    with suppress(CumemSleepError):
        for device in {segment.device for segment in segments}:
            free_bytes, total = _core.memory_info(device)
            ours = total_bytes(segment for segment in segments if segment.device == device and segment.has_memory)
            found[device] = total - free_bytes - ours
    return found
