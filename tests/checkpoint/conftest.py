"""Something stays at level 1, as with a real driver, whose context alone takes half a GiB."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Iterator

import pytest
from checkpointing import LEFT_AT_LEVEL_1
from support import DEVICE_BYTES, Cuda

from cumem_sleep import CuMemAllocator, sim
from cumem_sleep.checkpoint.process import THIS_PROCESS

FOLDER = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What this folder's fixture does needs the simulated driver."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.sim)


@pytest.fixture(autouse=True)
def left_at_level_1(allocator: CuMemAllocator) -> Iterator[None]:
    """Device memory of this process that is not the allocator's."""
    allocator.free(allocator.malloc(1))  # opens the driver
    cuda, address = Cuda(), ctypes.c_uint64()
    cuda.enter()
    cuda.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(LEFT_AT_LEVEL_1))
    cuda.leave()
    yield
    sim.configure(device_bytes=DEVICE_BYTES)
    THIS_PROCESS.bring_back({})  # after a test that failed half-way
    cuda.enter()
    cuda.call("cuMemFree_v2", address)
    cuda.leave()
