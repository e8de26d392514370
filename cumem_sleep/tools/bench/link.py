"""The ceiling: the rate of pinned copies between host memory and the device, measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np

from ... import _core
from ...allocator import CuMemAllocator
from ...core.pinned import pinned_block
from ..layout import PAGE_BYTES
from .report import LinkRates
from .workload import SIMULATED, Room

_SIZES = tuple(gib << 30 for gib in (8, 4, 2, 1))
_RANDOM_BYTES = 64 << 20
_TAG = "link"


def link_bytes(room: Room) -> int:
    """How much to copy at a time: up to 8 GiB, and at most a quarter of what is free."""
    least = room.device_bytes if room.host_bytes is None else min(room.device_bytes, room.host_bytes)
    sizes = (SIMULATED.link_bytes,) if room.simulated else _SIZES
    return next((size for size in sizes if size <= least // 4), max(PAGE_BYTES, least // 4 // PAGE_BYTES * PAGE_BYTES))


def measure_link(allocator: CuMemAllocator, device: int, nbytes: int, repeats: int = 3) -> LinkRates:
    """The median rates of `repeats` copies of `nbytes` in each direction, after a warm-up. Everything is freed.

    Raises:
        OutOfDeviceMemory, OutOfHostMemory, DriverError: there is too little memory, or the driver refuses.
    """
    address = allocator.malloc(nbytes, _TAG, device)
    try:
        with closing(pinned_block(nbytes, device)) as block, _core.CopyStream(device) as stream:
            _fill(block)
            to_device_s = _seconds(stream, lambda: stream.to_device(address, block, 0, nbytes), repeats)
            to_host_s = _seconds(stream, lambda: stream.to_host(block, 0, address, nbytes), repeats)
    finally:
        allocator.free(address)
    return LinkRates(to_host_gbps=nbytes / to_host_s / 1e9, to_device_gbps=nbytes / to_device_s / 1e9, bytes=nbytes)


def _fill(block: _core.HostBlock) -> None:
    """Fill it with repeated random bytes, because zeros might be copied faster."""
    content = np.frombuffer(memoryview(block), np.uint8)
    random = np.frombuffer(np.random.default_rng().bytes(min(_RANDOM_BYTES, block.bytes)), np.uint8)
    for start in range(0, block.bytes, _RANDOM_BYTES):
        size = min(_RANDOM_BYTES, block.bytes - start)
        content[start : start + size] = random[:size]


def _seconds(stream: _core.CopyStream, copy: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        copy()
        stream.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
