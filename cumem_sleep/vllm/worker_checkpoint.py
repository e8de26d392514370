"""Level 3 in a worker of vLLM, of which nothing may call CUDA then.

vLLM reaches a worker through its wrapper alone, in `collective_rpc` by name or by a function that gets the wrapper,
and at its end. So the wrapper's attribute `worker` is where whatever may call CUDA passes (`WorkerOfWrapper`), in every
version and with every executor. To refuse in the gate would not do: vLLM's engine core calls workers by itself, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from .. import _core
from ..allocator import CuMemAllocator
from ..errors import CumemSleepError
from ..for_plugin import asleep_tags, checkpoint, may_be_asleep, may_checkpoint, prepare_to_end, stay_at_level_1
from ..operations.checkpoint import why_not_for_ranks
from . import worker_refusals

logger = logging.getLogger("cumem_sleep")

# What vLLM calls without anybody's wish, and does not reach CUDA.
_CALLS_NO_CUDA = frozenset(("check_health", "rank", "local_rank", "vllm_config", "model_config", "parallel_config"))
_last_memory: dict[int, tuple[int, int]] = {}


class WorkerOfWrapper:
    """The attribute `worker` of `WorkerWrapperBase`: the worker itself, or, asleep, what refuses or comes back."""

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self
        if "worker" not in vars(wrapper):
            raise AttributeError("worker")
        worker, allocator = vars(wrapper)["worker"], CuMemAllocator.instance
        if worker is None or allocator is None or not (may_be_asleep(allocator) or may_checkpoint(allocator)):
            return worker
        if not (asleep_tags(allocator) or may_checkpoint(allocator)):
            return worker
        return _SleepingWorker(worker, allocator)

    def __set__(self, wrapper: Any, worker: Any) -> None:
        vars(wrapper)["worker"] = worker


WORKER = WorkerOfWrapper()


class _SleepingWorker:
    """A worker whose memory sleeps, perhaps at level 3, or on its way there."""

    def __init__(self, worker: Any, allocator: CuMemAllocator) -> None:
        self.__dict__.update(_worker=worker, _allocator=allocator)

    def __getattr__(self, name: str) -> Any:
        worker, allocator = self._worker, self._allocator
        if why := worker_refusals.why_not(worker, name, allocator):
            return partial(worker_refusals.refuse, worker, name, why)
        if name in _CALLS_NO_CUDA or not may_checkpoint(allocator):
            return getattr(worker, name)
        if name == "shutdown":
            return partial(_shut_down, allocator, worker.shutdown)
        if name == "synchronize_device" and _core.driver_calls_suspended():
            return lambda: None  # no work runs on the device
        with allocator.using_cuda():  # it may be a property
            found = getattr(worker, name)
        return partial(_called, allocator, found) if callable(found) else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._worker, name, value)


def of(wrapper: Any) -> Any:
    """The worker itself, for calls that are made at level 3 as well."""
    return vars(wrapper)["worker"]


def checkpoint_worker(worker: Any) -> str:
    """Go from a sleep to level 3; returns why not, in words, or "". All memory has to be asleep.

    It never raises: the memory sleeps, whatever becomes of this, and vLLM is to know it.
    """
    allocator = _allocator_of(worker)
    try:
        _note_memory(allocator)
        return checkpoint(allocator).why_not_deeper
    except CumemSleepError as error:
        logger.warning("level 3 was not reached: %s", error)
        return str(error)


@contextmanager
def using_cuda(worker: Any) -> Iterator[None]:
    """As `CuMemAllocator.using_cuda`, for a call of the worker that puts memory to sleep and then calls CUDA."""
    allocator = _allocator_of(worker)
    with allocator.using_cuda():
        yield
        if allocator.settings.deep_after_s is not None:
            _note_memory(allocator)


def _allocator_of(worker: Any) -> CuMemAllocator:
    """The allocator, which knows how many ranks there are.

    Engines of data parallelism that know of each other share communicators, though each sleeps by itself.
    """
    allocator = CuMemAllocator.get_instance()
    parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    ranks = getattr(parallel, "world_size", 1) * getattr(parallel, "data_parallel_size", 1)
    stay_at_level_1(allocator, why_not_for_ranks(ranks))
    return allocator


def _note_memory(allocator: CuMemAllocator) -> None:
    device_memory(allocator, sorted({segment.device for segment in _core.segments()}))


def device_memory(allocator: CuMemAllocator, devices: Sequence[int]) -> list[tuple[int, int]]:
    """Free and total bytes of each device; at level 3 as they were after the checkpoint, or when last asked."""
    with _core.DriverCalls() as allowed:
        if allowed:
            _last_memory.update({device: _core.memory_info(device) for device in devices})
    if (taken := allocator.checkpoint) is not None:
        _last_memory.update({device: (taken.free_bytes[device], taken.total_bytes[device]) for device in devices})
    return [_last_memory.get(device, (0, 0)) for device in devices]


def _called(allocator: CuMemAllocator, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with allocator.using_cuda():
        return method(*args, **kwargs)


def _shut_down(allocator: CuMemAllocator, method: Callable[[], Any]) -> Any:
    """What follows in vLLM lets go of the GPU, and calls CUDA for that."""
    prepare_to_end(allocator)
    return method()
