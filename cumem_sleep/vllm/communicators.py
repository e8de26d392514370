"""What NCCL takes of a GPU: vLLM's workers make their communicators where nothing else allocates."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

logger = logging.getLogger("cumem_sleep")

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


def _free_bytes() -> dict[int, int]:
    """Of the current device; nothing if that is not known, which must not stop an engine."""
    import torch

    try:
        return {torch.cuda.current_device(): torch.cuda.mem_get_info()[0]}
    except Exception as error:
        logger.warning("how much memory NCCL takes is not known: %s", error)
        return {}


def _watched(make: Any) -> Any:
    @functools.wraps(make)
    def make_and_note(*args: Any, **kwargs: Any) -> Any:
        before = _free_bytes()  # makes the CUDA context, which is not theirs
        result = make(*args, **kwargs)
        for device, nbytes in _free_bytes().items():
            # Those of a later engine come when this layer has memory already: they are in the rest.
            if nbytes < before.get(device, 0):
                _taken.setdefault(device, before[device] - nbytes)
        return result

    make_and_note.is_watched = True  # type: ignore[attr-defined]
    return make_and_note
