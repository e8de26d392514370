"""The engine core's side of a KV cache that survives a sleep: which blocks are kept, and whether they still count.

vLLM clears its prefix cache before a sleep, because the bytes go. Here level 1 pauses without that, and chooses the
blocks whose hashes promise bytes: all requests are preempted, nothing refers to a block, every scheduled step has run.
The workers keep the bytes (`kv_blocks`), the other blocks leave the prefix cache, and nothing runs after the wake
before every worker has said that its part is whole. Wherever that is not certain, the prefix cache is reset as vLLM
does it, and the log says why: a block too few costs a recomputation, a block too many would be a wrong answer.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from ..errors import format_bytes
from ..settings import Settings
from .worker_methods import ASK_KV, DEEPEN, KEEP_KV, Effect, effect_of

logger = logging.getLogger("cumem_sleep")

# Read and tested: what a scheduler preempts, when blocks are hashed, and what is idle differ between versions.
VERSIONS = ("0.26", "0.33")
_LEVELS = (1, 3)  # level 3 is a sleep at level 1 for the engine core
# Of these groups a block's bytes are what its hash says, whatever other blocks hold. Each is tested in both versions.
_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
# Worker methods that write neither weights nor KV cache; what else a request for all workers calls might.
_HARMLESS = ("wake_up", "compute_weight_checksums", "save_sharded_state", DEEPEN)


def version_misfit() -> str:
    """Why no engine of this vLLM keeps its KV cache over a sleep, or ""."""
    version = str(importlib.import_module("vllm").__version__)
    if (numbers := re.match(r"\d+\.\d+", version)) is not None and numbers[0] in VERSIONS:
        return ""
    return f"vLLM {version} is none of those with which that was tested ({', '.join(VERSIONS)})"


def install() -> None:
    """Have engine cores of this process keep the KV cache over a sleep; calling this again is harmless."""
    core = importlib.import_module("vllm.v1.engine.core")
    engine, scheduler = core.EngineCore, importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    _wrap(engine, "sleep", lambda own, core, *args, **kwargs: _of(core).sleep(own, *args, **kwargs))
    _wrap(engine, "resume_scheduler", lambda own, core: _of(core).resume(own))
    _wrap(engine, "collective_rpc", _collective_rpc)
    for owner, name in (
        (engine, "add_lora"),  # hashes know an adapter by its name alone
        (engine, "remove_lora"),
        (engine, "set_weight_version"),
        (core.DPEngineCoreProc, "reinitialize_distributed"),
    ):
        if hasattr(owner, name):
            _wrap(owner, name, functools.partial(_changing, name))
    _wrap(scheduler, "_preempt_request", _preempt_request)


def _wrap(owner: Any, name: str, through: Callable[..., Any]) -> None:
    """Call `through` with the method in front of its arguments."""
    own = getattr(owner, name)
    if hasattr(own, "keeps_kv"):
        return

    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return through(functools.partial(own, self), self, *args, **kwargs)

    method.keeps_kv = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _of(core: Any) -> KeptKv:
    kept: KeptKv | None = vars(core).get("cumem_sleep_kept_kv")
    if kept is None:
        kept = core.cumem_sleep_kept_kv = KeptKv(core)
    return kept


def _collective_rpc(own: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    is_being_made = not hasattr(core, "scheduler")
    return own(*args, **kwargs) if is_being_made else _of(core).call_workers(own, *args, **kwargs)


def _changing(name: str, own: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    _of(core).note_change(name)
    return own(*args, **kwargs)


def _preempt_request(own: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """The scheduler's, after blocks left the prefix cache that are hashed and will never be executed.

    vLLM hashes blocks when it schedules them. A request of lower priority can be preempted in the step for which it was
    scheduled: its new blocks would be free, with hashes and without bytes.
    """
    manager, unexecuted = scheduler.kv_cache_manager, set()
    groups = zip(manager.coordinator.single_type_managers, manager.get_block_ids(request.request_id), strict=True)
    for group, blocks in groups:
        if group.block_pool is manager.block_pool:
            unexecuted.update(blocks[request.num_computed_tokens // group.block_size :])
    manager.evict_blocks(unexecuted)
    return own(request, *args, **kwargs)


class KeptKv:
    """What an engine's prefix cache has to do with its sleeps. Everything runs in the thread of the engine core."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._refusal = refusal(core.vllm_config, core.scheduler.kv_cache_config)
        self._budget = Settings.from_environment().keep_kv_bytes
        self._is_wanted = True  # for the next sleep
        self._changed = ""  # what may have written weights since the prefix cache was last reset
        self._generation = 0  # of the plan that workers have
        self._is_pending = False  # blocks are kept whose workers have not been asked yet
        self._is_sparing = False
        if not self._refusal:
            manager = core.scheduler.kv_cache_manager
            manager.reset_prefix_cache = functools.partial(self._reset_prefix_cache, manager.reset_prefix_cache)
        else:
            logger.warning("the KV cache does not survive sleeps of this engine: %s", self._refusal)

    # What vLLM calls

    def sleep(self, own: Callable[..., Any], level: int = 1, mode: str = "abort") -> Any:
        """`EngineCore.sleep`."""
        is_wanted = self._is_wanted
        if level:
            self._is_wanted = True
        if level not in _LEVELS or self._refusal or not is_wanted:
            return own(level, mode)
        executor, pausing = self._core.model_executor, {"mode": mode, "clear_cache": False}
        if executor.is_sleeping:
            if self._is_pending and "weights" in executor.sleeping_tags:
                return self._core.pause_scheduler(**pausing)  # vLLM's sleep does no more: all sleeps already
            return own(level, mode)
        return _then(self._core.pause_scheduler(**pausing), functools.partial(self._fall_asleep, level))

    def resume(self, own: Callable[[], None]) -> None:
        """`EngineCore.resume_scheduler`: after it, the model runs."""
        if self._is_pending:
            if why := self._why_lost():
                self._reset(why)
            else:
                logger.info("the kept blocks of the KV cache are back")
            self._is_pending = False
        own()

    def call_workers(self, own: Callable[..., Any], method: Any, *args: Any, **kwargs: Any) -> Any:
        """`EngineCore.collective_rpc`."""
        if method == KEEP_KV:
            (self._is_wanted,) = kwargs.get("args") or args[1]
        elif method not in _HARMLESS and (not isinstance(method, str) or effect_of(method) is not Effect.HARMLESS):
            self.note_change(getattr(method, "__name__", str(method)))
        return own(method, *args, **kwargs)

    def note_change(self, what: str) -> None:
        """The prefix cache is not to outlive the next sleep, nor this one."""
        self._changed = what

    def _reset_prefix_cache(self, own: Callable[[], bool]) -> bool:
        """`KVCacheManager.reset_prefix_cache`. While this spares the cache, it only says whether it could be reset."""
        pool = self._core.scheduler.kv_cache_manager.block_pool
        if self._is_sparing and pool.num_gpu_blocks - pool.get_num_free_blocks() == 1:  # the null block
            return True
        is_reset = own()
        if is_reset:
            self._changed = ""
            if self._is_pending:
                self._is_pending = False
                self._drop()
        return is_reset

    # A sleep

    def _fall_asleep(self, level: int) -> Any:
        """What follows vLLM's pause. Everything that was scheduled has run."""
        core, manager = self._core, self._core.scheduler.kv_cache_manager
        # In the user's own process, vLLM's pause waits for no step. Without a request, their outputs are empty.
        while core.batch_queue and not core.scheduler.requests:
            core.step_fn()
        why = self._why_not()
        self._is_sparing = not why
        try:
            core._reset_caches()  # preempts what runs, and clears vLLM's other caches
        finally:
            self._is_sparing = False
        blocks: list[int] = []
        if not why:
            blocks, why = self._chosen()
            if why:
                self._reset(why)
        else:
            logger.info("the prefix cache is reset: %s", why)
        if not blocks:
            return core.model_executor.sleep(level)
        hashed = {block.block_id for block in manager.block_pool.blocks if block.block_hash is not None}
        self._generation += 1
        if why := _first_reason(self._answers("plan", self._generation, blocks)):
            self._reset(why)
            self._drop()
            return core.model_executor.sleep(level)
        try:
            result = core.model_executor.sleep(level)
        except BaseException:
            if any(answer.get("slept", True) for answer in self._answers("kept", self._generation)):
                self._reset("the sleep failed, and some memory slept for a while")
            self._drop()
            raise
        answers = self._answers("kept", self._generation)
        if why := _first_reason(answers):
            self._reset(why)
            self._drop()
            return result
        manager.evict_blocks(hashed.difference(blocks))
        self._is_pending = True
        logger.info(
            "the sleep keeps %d blocks of the KV cache, %s in each worker, and evicts %d",
            len(blocks),
            format_bytes(max(answer["bytes"] for answer in answers)),
            len(hashed) - len(blocks),
        )
        return result

    def _why_not(self) -> str:
        """What is known before anybody is asked."""
        if self._changed:
            return f"{self._changed} may have changed weights since the last reset"
        if self._core.batch_queue:
            return "steps are still under way"
        if not self._core.is_scheduler_paused():
            return "the scheduler was resumed meanwhile"
        return ""

    def _chosen(self) -> tuple[list[int], str]:
        """The blocks to keep, the most recently used first, or why there are none."""
        answers = self._answers("room", self._budget)
        if why := _first_reason(answers):
            return [], why
        most = min(answer["room"] // answer["block_bytes"] for answer in answers)
        pool = self._core.scheduler.kv_cache_manager.block_pool
        found = [
            block.block_id for block in reversed(pool.free_block_queue.get_all_free_blocks()) if _counts(pool, block)
        ]
        if not found:
            return [], "it is empty"
        return found[:most], "" if most else "there is no host memory for a block of it"

    # A wake

    def _why_lost(self) -> str:
        if self._core.model_executor.is_sleeping:
            return "the scheduler is resumed while memory sleeps"
        if self._changed:
            return f"{self._changed} may have changed weights while the model slept"
        return _first_reason(self._answers("whole", self._generation))

    def _reset(self, why: str) -> None:
        """As vLLM resets it. It raises where vLLM cannot, and then nothing runs."""
        logger.warning("the prefix cache is reset: %s", why)
        self._core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    # The workers

    def _ask(self, question: str, *args: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self._core.model_executor.collective_rpc(ASK_KV, args=(question, *args))
        return answers

    def _answers(self, question: str, *args: Any) -> list[dict[str, Any]]:
        """Of all workers; one that does not answer says no."""
        try:
            return self._ask(question, *args)
        except Exception as error:
            return [{"why": f"the workers cannot be asked ({error})"}]

    def _drop(self) -> None:
        """Have the workers give up what they keep."""
        if why := _first_reason(self._answers("drop")):
            logger.warning("kept blocks of the KV cache may still take host memory: %s", why)


def _then(pause: Future[Any] | None, go_on: Callable[[], Any]) -> Any:
    """As vLLM's sleep goes on after its pause."""
    if pause is None:
        go_on()
        return None
    future: Future[Any] = Future()

    def paused(done: Future[Any]) -> None:
        try:
            done.result()
            future.set_result(go_on())
        except Exception as error:
            future.set_exception(error)

    pause.add_done_callback(paused)
    return future


def _counts(pool: Any, block: Any) -> bool:
    """Whether a hit could find it: of several blocks with the same hash, vLLM takes one."""
    if block.block_hash is None or block.ref_cnt or block.is_null:
        return False
    hashes = {block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ())}
    return any(pool.cached_block_hash_to_block.get_one_block(each) is block for each in hashes)


def _first_reason(answers: Iterable[dict[str, Any]]) -> str:
    return next((answer["why"] for answer in answers if answer["why"]), "")


def refusal(config: Any, kv_cache_config: Any) -> str:
    """Why no engine that is configured so keeps blocks, or "". Both the engine core and its workers ask."""
    groups, parallel, offload = kv_cache_config.kv_cache_groups, config.parallel_config, config.offload_config
    kinds = {type(spec).__name__ for group in groups for spec in _specs(group.kv_cache_spec)} - set(_SPECS)
    aux_outputs = getattr(config, "aux_output_config", None)  # not in vLLM 0.26
    reasons = {
        "there is no KV cache": not groups,
        "the scheduler is not vLLM's usual one": config.scheduler_config.scheduler_cls is not None,
        "prefix caching is off": not config.cache_config.enable_prefix_caching,
        "a KV connector reads and writes blocks, too": config.kv_transfer_config is not None,
        "auxiliary outputs belong to cached prefixes, and are not kept": bool(aux_outputs and aux_outputs.enabled),
        "part of the KV cache is in host memory": any(getattr(group, "host_resident", False) for group in groups),
        f"it has layers of a kind with which that was not tested ({', '.join(sorted(kinds))})": bool(kinds),
        "each worker has an engine of its own": parallel.distributed_executor_backend == "external_launcher"
        and parallel.world_size > 1,
        "weights may be in host memory": offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _specs(spec: Any) -> list[Any]:
    """Of a group's layers, which may differ in size."""
    return list(spec.kv_cache_specs.values()) if type(spec).__name__ == "UniformTypeKVCacheSpecs" else [spec]
