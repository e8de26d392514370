"""The hook in front of cudaMalloc and cudaFree (`csrc/preload`), where LD_PRELOAD names it.

With it, memory can be a region's that PyTorch's own allocator asks for, or somebody else through the CUDA runtime.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from .. import _core

_SERVE = "cumem_sleep_preload_serve"
_HOOKS = ("cumem_sleep_malloc", "cumem_sleep_free", "cumem_sleep_wants", "cumem_sleep_owns")


def library_path() -> Path:
    """Of the hook, for LD_PRELOAD."""
    return Path(__file__).parent / "torch_memory_saver" / "shim" / "torch_memory_saver_hook_mode_preload.abi3.so"


@cache
def serve() -> bool:
    """Have the hook ask this layer; returns whether there is one in this process."""
    served = getattr(ctypes.CDLL(None), _SERVE, None)
    if served is None:
        return False
    layer = ctypes.CDLL(_core.__file__)
    served(*(ctypes.cast(getattr(layer, name), ctypes.c_void_p) for name in _HOOKS))
    return True
