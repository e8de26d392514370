"""The fixtures of the operations' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import MIB, SIMULATED, free_everything, quick_sums, reset_simulation
from world import World

from cumem_sleep import CuMemAllocator, host_facts


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    reset_simulation()
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", MIB)  # two blocks for each segment
    monkeypatch.setattr("cumem_sleep.digest.device.sums_of", quick_sums)  # what it tells apart is not the question here
    monkeypatch.setattr(host_facts, "mem_available_bytes", lambda enough=None: None)  # reads hundreds of files
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
        monkeypatch.setattr("cumem_sleep.digest.device.sums_of", quick_sums)
    monkeypatch.setattr(host_facts, "mem_available_bytes", lambda enough=None: None)
