"""The fixtures of the operations' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support import MIB, SIMULATED, Memory, ample_host_memory, free_everything, quick_sums, reset_simulation
from waking import OldWeights
from world import World

from cumem_sleep import CuMemAllocator


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    reset_simulation()
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", MIB)  # two blocks for each segment
    # What it tells apart is not the question here
    monkeypatch.setattr("cumem_sleep.digest.digester.sums_of", quick_sums)
    ample_host_memory(monkeypatch)
    current = World()
    yield current
    free_everything()
    reset_simulation()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four batches for each page, two blocks."""
    monkeypatch.setattr(CuMemAllocator.tuning, "batch_bytes", MIB // 2)
    monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", MIB // 2)
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", MIB)
    if SIMULATED:
        monkeypatch.setattr("cumem_sleep.digest.digester.sums_of", quick_sums)
    ample_host_memory(monkeypatch)


@pytest.fixture(params=["off", "auto"])
def old_weights(
    request: pytest.FixtureRequest, make_allocator: Callable[..., CuMemAllocator], memory: Memory
) -> OldWeights:
    """Asleep, uncompressed or compressed."""
    return OldWeights.asleep(make_allocator(poison=True, compress=request.param), memory)
