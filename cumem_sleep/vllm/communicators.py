"""What NCCL takes of a GPU: vLLM's workers make their communicators where nothing else allocates."""

from __future__ import annotations

import functools
import sys
from typing import Any

# In the module of the worker's class, in every version; called when the worker has set its device.
MAKES_THEM = "init_worker_distributed_environment"

_taken: dict[int, int] = {}


def watch(worker: Any) -> None:
    """Note what comes with this worker's communicators when it makes them; calling this again is harmless.

    Args:
        worker: vLLM's worker, before its `init_device`. One that makes them elsewhere is not watched, nor is one that
            is alone: it has none, and what changes meanwhile is another process's.
    """
    parallel = getattr(worker, "parallel_config", None)
    if getattr(parallel, "world_size", 1) * getattr(parallel, "data_parallel_size", 1) == 1:
        return
    for owner in type(worker).__mro__:  # an extension's class may be in front of vLLM's
        module = sys.modules.get(owner.__module__)
        make = getattr(module, MAKES_THEM, None)
        if make is not None and not hasattr(make, "is_watched"):
            setattr(module, MAKES_THEM, _watched(make))


def bytes_taken() -> dict[int, int]:
    """Device memory that came with the communicators, by device; what other processes took meanwhile is in it."""
    return dict(_taken)


def _watched(make: Any) -> Any:
    @functools.wraps(make)
    def make_and_note(*args: Any, **kwargs: Any) -> Any:
        import torch

        free_before, _ = torch.cuda.mem_get_info()  # makes the CUDA context, which is not theirs
        result = make(*args, **kwargs)
        free_bytes, _ = torch.cuda.mem_get_info()
        if free_bytes < free_before:
            _taken[torch.cuda.current_device()] = free_before - free_bytes
        return result

    make_and_note.is_watched = True  # type: ignore[attr-defined]
    return make_and_note
