"""What is left on the devices after a sleep: the driver tells the sum, and notes tell what is in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from .. import _core
from ..errors import CumemSleepError


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
        self._by_warm_up: Counter[int] = Counter()
        self._warm_ups = 0  # that have begun
        self._before_warm_up: dict[int, int] = {}  # in use when the first of them began, by device

    def note_before(self, device: int) -> None:
        """Note what is in use, unless this layer has allocated on the device already."""
        if device not in self._before and not any(segment.device == device for segment in _core.segments()):
            with suppress(CumemSleepError), _core.RelaxedCapture():  # a thread may be capturing a graph
                self._before |= not_ours([device])

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Put this around code that loads modules and captures graphs. Of several that overlap all counts once."""
        if not self._warm_ups:
            self._before_warm_up = not_ours()
        self._warm_ups += 1
        try:
            yield
        finally:
            self._warm_ups -= 1
        if not self._warm_ups:  # the last of them counts for all
            before, after = self._before_warm_up, not_ours()
            self._by_warm_up += +Counter({device: after[device] - before[device] for device in {*before} & {*after}})

    def look(self, devices: Collection[int], before: Mapping[int, int]) -> tuple[int, dict[str, int]]:
        """Bytes in use on these devices, and about how they are made up by name (`SleepReport.left`), if that is known.

        0 if the driver does not say: no reason for a sleep to fail, since all is asleep by now.

        Args:
            before: `not_ours` of them just before the sleep released its memory. What became free on one device does
                not make up for what did not on another.
        """
        others = not_ours(devices)
        if len(others) < len(devices):
            return 0, {}
        held = sum(max(0, others[device] - before.get(device, others[device])) for device in devices)
        items = {"awake": _core.bytes_with_memory(set(devices)), "held_elsewhere": held}
        left_bytes = sum(others.values()) + items["awake"]
        noted = devices if all(device in self._before for device in devices) else ()
        nccl = sum(min(self.by_communicators.get(device, 0), self._before[device]) for device in noted)
        context = sum(self._before[device] for device in noted) - nccl
        added = sum(others.values()) - nccl - context - held
        if added >= 0:  # else other processes have less than they had
            # PyTorch's unused cache counts as part of the warm-up, and is gone when memory sleeps.
            warm_up = min(added, sum(self._by_warm_up[device] for device in devices))
            items |= {"context": context, "nccl": nccl, "modules_and_graphs": warm_up}
        items = {name: nbytes for name, nbytes in items.items() if nbytes}
        return left_bytes, {**items, "rest": left_bytes - sum(items.values())} if items else {}


def not_ours(devices: Iterable[int] | None = None) -> dict[int, int]:
    """By device (None: on which this layer has memory), bytes in use of others; of none if the driver does not say."""
    used = {}
    with suppress(CumemSleepError):
        for device in {segment.device for segment in _core.segments()} if devices is None else devices:
            free_bytes, total_bytes = _core.memory_info(device)
            used[device] = total_bytes - free_bytes - _core.bytes_with_memory({device})
    return used
