"""The fixtures of the tests of compressed backups."""

from __future__ import annotations

import pytest
from compression import MakeAllocator

from cumem_sleep import CuMemAllocator


@pytest.fixture
def allocator(make_allocator: MakeAllocator) -> CuMemAllocator:
    return make_allocator(compress="auto")
