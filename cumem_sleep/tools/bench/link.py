"""The ceiling: the rate of pinned copies between host memory and the device, measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from ... import _core
from ...allocator import CuMemAllocator
from ..layout import PAGE_BYTES
from .memory import random_weights
from .report import LinkRates
from .workload import Room

_SIMULATED_BYTES, _MOST_BYTES = 64 << 20, 8 << 30


def link_bytes(room: Room) -> int:
    """How much to copy at a time: up to 8 GiB, and at most a quarter of what is free."""
    most = _SIMULATED_BYTES if room.simulated else _MOST_BYTES
    free = min(room.device_bytes, room.host_bytes) // 4
    return max(PAGE_BYTES, min(most, free // PAGE_BYTES * PAGE_BYTES))


def measure_link(allocator: CuMemAllocator, device: int, nbytes: int, repeats: int = 3) -> LinkRates:
    """The median rates of `repeats` copies of `nbytes` in each direction, after a warm-up. Everything is freed.

    Raises:
        OutOfDeviceMemory, OutOfHostMemory, DriverError: there is too little memory, or the driver refuses.
    """
    address = allocator.malloc(nbytes, "link", device)
    try:
        with random_weights(nbytes, device) as block, _core.CopyStream(device) as stream:
            to_device_s = _seconds(stream, lambda: stream.to_device(address, block, 0, nbytes), repeats)
            to_host_s = _seconds(stream, lambda: stream.to_host(block, 0, address, nbytes), repeats)
    finally:
        allocator.free(address)
    return LinkRates(to_host_gbps=nbytes / to_host_s / 1e9, to_device_gbps=nbytes / to_device_s / 1e9, bytes=nbytes)


def _seconds(stream: _core.CopyStream, copy: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        copy()
        stream.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
