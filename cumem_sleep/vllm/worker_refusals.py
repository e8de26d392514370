"""What touches memory in a worker raises while that sleeps, and says which call comes first: it would crash.

The gate refuses such calls; `collective_rpc` of an `LLM`, Ray, and the engine itself reach a worker without it.
"""

from __future__ import annotations

import functools
from typing import Any

from ..allocator import CuMemAllocator
from ..errors import InvalidState
from ..for_plugin import asleep_tags, may_be_asleep
from . import engine_group
from .worker_methods import CALLS_BY_ENGINE, TOUCHES_WEIGHTS, needed


def why_not(worker: Any, name: str, allocator: CuMemAllocator) -> str:
    """Why the worker's method cannot be called now, in words; ""."""
    tags = needed(type(worker), name)
    if not (tags and may_be_asleep(allocator) and (asleep := tags & asleep_tags(allocator))):
        return ""
    first = "tags=['weights']" if name in TOUCHES_WEIGHTS else ""
    return f"{name} while {' and '.join(sorted(asleep))} sleep: wake_up({first}) comes first"


def refuse(worker: Any, name: str, why: str, *args: Any, **kwargs: Any) -> Any:
    """Raises InvalidState, in one of the workers whose answers are read. A step without tokens touches nothing."""
    if name == "execute_model":
        scheduled = [*args, *kwargs.values()][:1]
        if not all(getattr(each, "total_num_scheduled_tokens", 1) for each in scheduled):
            with CuMemAllocator.get_instance().using_cuda():
                return worker.execute_model(*args, **kwargs)
    if name == "execute_dummy_batch" and engine_group.all_engines_are_here(worker):
        return None  # vLLM before 0.26 has engines step that sleep
    if name not in CALLS_BY_ENGINE and engine_group.is_told_by_last(worker):
        return None
    raise InvalidState(why)


def watch(model: Any) -> None:
    """Have the model's own `load_weights` raise as well: trainers call it past the worker's methods."""
    load = getattr(model, "load_weights", None)
    if load is None or hasattr(load, "refuses_asleep"):
        return

    @functools.wraps(load)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        allocator = CuMemAllocator.instance
        if allocator is not None and (why := why_not(model, "load_weights", allocator)):
            raise InvalidState(why)
        return load(*args, **kwargs)

    load_weights.refuses_asleep = True  # type: ignore[attr-defined]
    model.load_weights = load_weights
