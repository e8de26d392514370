"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from cumem_sleep import CuMemAllocator


@pytest.fixture
def clean_pools(allocator: CuMemAllocator) -> Iterator[None]:  # noqa: ARG001  (comes first)
    """Tensors that a test left go before the allocator fixture looks for what was left behind."""
    yield
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
