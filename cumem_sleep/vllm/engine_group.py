"""The workers of one engine, as the ranks that sleep and wake together, and how they tell vLLM that they did not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ..allocator import CuMemAllocator
from ..errors import CumemSleepError, RankFailed
from ..for_plugin import agreement as agreement_of
from ..ranks.group import address_of_this_host
from .compatibility import WHAT_ENABLES_THE_ALLOCATOR

logger = logging.getLogger("cumem_sleep")

# An engine is their product. vLLM's world group may have all engines of a data-parallel deployment in it.
_GROUPS = ("get_tp_group", "get_pcp_group", "get_pp_group")
_skipped = 0  # steps that all engines came to asleep


class EngineGroup:
    """The workers of an engine: tensor, prefill-context and pipeline parallel, over vLLM's CPU groups."""

    def __init__(self) -> None:
        from vllm.distributed import parallel_state

        getters = [getattr(parallel_state, name) for name in _GROUPS if hasattr(parallel_state, name)]
        self._groups = [group.cpu_group for group in (get() for get in getters) if group.world_size > 1]
        self.size = 1
        self.rank = 0
        if self._groups:
            import torch.distributed

            mine = torch.distributed.get_rank()
            self._ranks = sorted(self._gathered(mine))
            self.size, self.rank = len(self._ranks), self._ranks.index(mine)
        self.address = _address()

    def all_gather(self, value: Any) -> list[Any]:
        """Group by group."""
        by_rank = dict(self._gathered((self.rank, value)))
        return [by_rank[rank] for rank in range(self.size)]

    def _gathered(self, value: Any) -> list[Any]:
        import torch.distributed

        values = [value]
        for group in self._groups:
            parts: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(parts, values, group=group)
            values = [each for part in parts for each in part]
        return values


def join(worker: Any) -> None:
    """Have this worker's memory sleep and wake with that of its engine's others; called by all of them.

    Raises:
        InvalidState: another worker cannot be reached.
    """
    model_config = getattr(getattr(worker, "vllm_config", None), "model_config", None)
    if not any(getattr(model_config, name, False) for name in WHAT_ENABLES_THE_ALLOCATOR):
        return
    parallel = getattr(worker.vllm_config, "parallel_config", None)
    if getattr(parallel, "world_size", 1) > 1:
        CuMemAllocator.get_instance().join(EngineGroup())


def told_once(worker: Any, call: Callable[[], Any]) -> Any:
    """The result of a worker's call; if all workers failed together, only the last one raises.

    vLLM's executors read the workers' answers in order, stop at the first error, and leave the others unread: they
    would be taken for the answers to its next call.
    """
    try:
        return call()
    except CumemSleepError as error:
        if _is_told_by_another(worker, error):
            logger.error("%s", error)
            return None
        raise


def _is_told_by_another(worker: Any, error: CumemSleepError) -> bool:
    by_all = error.rank is not None or (isinstance(error, RankFailed) and not error.undecided)
    return by_all and is_told_by_last(worker)


def is_told_by_last(worker: Any) -> bool:
    """Whether an error that all workers have is for the last one to raise, and this is another one."""
    allocator = CuMemAllocator.instance
    agreement = None if allocator is None else agreement_of(allocator)
    parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    if agreement is None or getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        return False  # an engine of its own reads this answer
    last = agreement.mesh.size - 1
    return agreement.mesh.rank < last and last not in agreement.mesh.gone


def all_engines_are_here(worker: Any) -> bool:
    """Whether all data-parallel engines that step with this one have come to the same step, with memory asleep.

    An engine that runs never comes: in its step it waits for this one, which cannot follow, nor leave it alone. So this
    waits for the others, at most `Settings.agreement_timeout_s`, over PyTorch's store.
    """
    parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    if getattr(parallel, "data_parallel_size", 1) == 1:
        return True
    import torch.distributed
    from torch.distributed.distributed_c10d import _get_default_store
    from vllm.distributed import parallel_state

    global _skipped
    group, rank = parallel_state.get_dp_group(), torch.distributed.get_rank()
    if max(group.ranks) >= torch.distributed.get_world_size():
        return False  # each engine has a store of its own
    store, within_s = _get_default_store(), CuMemAllocator.get_instance().settings.agreement_timeout_s
    try:
        store.set(f"cumem_sleep/{_skipped}/{rank}", "")
        store.wait([f"cumem_sleep/{_skipped}/{each}" for each in group.ranks], timedelta(seconds=within_s))
        store.delete_key(f"cumem_sleep/{_skipped - 1}/{rank}")  # which nobody waits for any more
    except RuntimeError as error:
        logger.error("an engine that steps with this sleeping one did not come within %g s: %s", within_s, error)
        with suppress(RuntimeError):
            store.delete_key(f"cumem_sleep/{_skipped}/{rank}")
        return False
    _skipped += 1
    return True


def _address() -> str:
    try:
        from vllm.utils.network_utils import get_ip
    except ImportError:  # 0.11
        try:
            from vllm.utils import get_ip
        except ImportError:
            return address_of_this_host()
    return str(get_ip())
