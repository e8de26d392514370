"""Frees device memory that PyTorch keeps and does not use, before an operation.

Both functions run on the caller's thread, without the allocator's lock.
"""

from __future__ import annotations

import gc

from .. import _core
from ..integrations.torch import TorchPools
from ..levels import Choice
from .wake import asleep, wanting


def trim(pools: TorchPools) -> None:
    """Before a sleep: memory that no tensor uses need not be backed up."""
    pools.trim()


def make_room(meant: Choice, pools: TorchPools) -> None:
    """Before a wake of these segments: free PyTorch's unused cache if they would not fit beside it."""
    if any(nbytes > _core.memory_info(device)[0] for device, nbytes in wanting(asleep(meant)).items()):
        gc.collect()
        pools.trim()
