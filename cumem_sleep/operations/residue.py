"""What is left on the devices after a sleep: the driver tells the sum, and this layer what of it is its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from .. import _core
from ..errors import CumemSleepError


def left_on(devices: Collection[int], before: Mapping[int, int]) -> tuple[int, dict[str, int]]:
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
    awake = _core.bytes_with_memory(set(devices))
    rest = sum(others.values()) - held
    items = {name: nbytes for name, nbytes in {"awake": awake, "held_elsewhere": held}.items() if nbytes}
    return awake + held + rest, {**items, "rest": rest} if items else {}


def not_ours(devices: Iterable[int]) -> dict[int, int]:
    """By device, bytes in use of others; of none of the rest once the driver does not say."""
    used = {}
    with suppress(CumemSleepError):
        for device in devices:
            free_bytes, total_bytes = _core.memory_info(device)
            used[device] = total_bytes - free_bytes - _core.bytes_with_memory({device})
    return used
