"""Frees device memory that PyTorch keeps and does not use, before an operation.

Both functions run on the caller's thread, without the allocator's lock.
"""

from __future__ import annotations

import gc

from ..integrations.torch import TorchPools


def trim(pools: TorchPools) -> None:
    """Before a sleep: memory that no tensor uses need not be backed up."""
    pools.trim()


def make_room(pools: TorchPools) -> None:
    """Before a wake that does not fit beside PyTorch's unused cache: free that."""
    gc.collect()
    pools.trim()
