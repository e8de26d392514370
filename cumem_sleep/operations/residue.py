"""What is left on the devices after a sleep: the driver tells the sum, and notes tell what is in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

from .. import _core
from ..core.scopes import scoped
from ..errors import CumemSleepError, DriverError


class Residue:
    """Notes of what is in use on a device and is not this layer's, taken at moments when it is known what came before.

    The driver tells what is in use by all processes, and other processes come and go. So items are about right. What
    the warm-up added counts as far as it fits into the sum; if what was there before does not fit, none is told.

    Attributes:
        by_communicators: bytes by device that came with communicators before this layer allocated there.
    """

    def __init__(self) -> None:
        self.by_communicators: dict[int, int] = {}
        self._before: dict[int, int] = {}  # in use before the first allocation, by device
        self._by_warm_up: dict[int, int] = {}
        self._warm_ups = 0  # that have begun
        self._before_warm_up: dict[int, int] = {}  # in use when the first of them began, by device

    def note_before(self, device: int) -> None:
        """Note what is in use, unless this layer has allocated on the device already."""
        if device not in self._before and not any(segment.device == device for segment in _core.segments()):
            with suppress(CumemSleepError), _core.RelaxedCapture():  # a thread may be capturing a graph
                self._before[device] = _used(device)

    @scoped
    def warm_up(self) -> Iterator[None]:
        """Put this around code that loads modules and captures graphs. Of several that overlap all counts once."""
        if not self._warm_ups:
            self._before_warm_up = _not_ours()
        self._warm_ups += 1
        try:
            yield
        finally:
            self._warm_ups -= 1
        if not self._warm_ups:  # the last of them counts for all
            for device, nbytes in _not_ours().items():
                grown = max(0, nbytes - self._before_warm_up.get(device, nbytes))
                self._by_warm_up[device] = self._by_warm_up.get(device, 0) + grown

    def look(self, devices: Collection[int]) -> tuple[int, dict[str, int]]:
        """Bytes in use on these devices, and about how they are made up by name (`SleepReport.left`), if that is known.

        0 if the driver does not say: no reason for a sleep to fail, since all is asleep by now.
        """
        try:
            left_bytes = sum(_used(device) for device in devices)
        except DriverError:
            return 0, {}
        known = {"awake": _core.bytes_with_memory(set(devices))}
        before = {}
        if all(device in self._before for device in devices):
            nccl = sum(min(self.by_communicators.get(device, 0), self._before[device]) for device in devices)
            before = {"context": sum(self._before[device] for device in devices) - nccl, "nccl": nccl}
        others = left_bytes - sum(known.values()) - sum(before.values())
        if others >= 0:  # else other processes have less than they had
            warm_up = sum(self._by_warm_up.get(device, 0) for device in devices)
            # PyTorch's unused cache counts as part of the warm-up, and is gone when memory sleeps.
            known |= {**before, "modules_and_graphs": min(warm_up, others)}
        known = {name: nbytes for name, nbytes in known.items() if nbytes}
        return left_bytes, {**known, "rest": max(0, left_bytes - sum(known.values()))} if known else {}


def _used(device: int) -> int:
    free_bytes, total_bytes = _core.memory_info(device)
    return total_bytes - free_bytes


def _not_ours() -> dict[int, int]:
    """For each device on which this layer has memory: the bytes in use that do not belong to its segments."""
    devices = {segment.device for segment in _core.segments()}
    try:
        return {device: _used(device) - _core.bytes_with_memory({device}) for device in devices}
    except CumemSleepError:
        return {}
