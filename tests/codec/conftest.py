"""The fixtures of the tests of compressed backups."""

from __future__ import annotations

import pytest
from compressed import MakeAllocator
from support import MIB, PAGE, quick_sums

from cumem_sleep import CuMemAllocator
from cumem_sleep.backups import limits as host_limits


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two encoded chunks, or one; the simulated driver writes to all memory that it gives. And small parts."""
    monkeypatch.setattr(CuMemAllocator.tuning, "head_bytes", 2 * PAGE)
    monkeypatch.setattr(CuMemAllocator.tuning, "digest_part_bytes", 4 * PAGE)
    monkeypatch.setattr(CuMemAllocator.tuning, "idle_s", 60.0)  # this machine may be busy, and the device is not
    monkeypatch.setattr(CuMemAllocator.tuning, "slots", 2)
    monkeypatch.setattr(CuMemAllocator.tuning, "slot_bytes", (4 * MIB, 2 * MIB))
    monkeypatch.setattr(CuMemAllocator.tuning, "lent_slot_bytes", 2 * MIB)
    monkeypatch.setattr(CuMemAllocator.tuning, "prepare_piece_bytes", PAGE)  # is decoded in a slot
    monkeypatch.setattr(CuMemAllocator.tuning, "prepare_extent_bytes", PAGE)
    monkeypatch.setattr("cumem_sleep.digest.device.sums_of", quick_sums)  # what it tells apart is not the question here
    monkeypatch.setattr(host_limits, "mem_available_bytes", lambda enough=None: None)  # reads hundreds of files


@pytest.fixture
def allocator(make_allocator: MakeAllocator) -> CuMemAllocator:
    return make_allocator(compress="auto")
