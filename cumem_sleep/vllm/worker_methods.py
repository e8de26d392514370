"""What the worker methods do that `/collective_rpc` can call: everything that the gate knows about them."""

from __future__ import annotations

import json
from enum import Enum


class Effect(Enum):
    """What a method does to sleeping memory."""

    DEEPENS = "goes from a sleep to level 3"
    FORGETS = "forgets backups of what sleeps"
    CHANGES_SLEEP = "changes the sleep"  # without the engine's knowledge, which would run the model on sleeping memory
    RUNS = "runs the model"  # needs all memory awake and the weights loaded
    STARTS = "starts a weight update"  # nothing is loaded until it is finished
    STARTS_DRAFT = "starts an update of the draft model's weights"  # which are not all
    UPDATES = "writes weights"  # all of them, unless an update was started
    FINISHES = "finishes a weight update"
    LOADS = "loads weights"  # all of them
    HARMLESS = "touches no weights"
    WRITES = "may touch weights"  # not known to be anything else


MAY_LOAD_ALL = (Effect.LOADS, Effect.UPDATES, Effect.FINISHES)
DEEPEN = "cumem_sleep_deepen"
FORGET = "cumem_sleep_forget"
KEEP_KV = "cumem_sleep_keep_kv"  # says whether the next sleep keeps the KV cache
ASK_KV = "cumem_sleep_kept_kv"  # the engine core's questions

_METHODS = {
    Effect.DEEPENS: (DEEPEN,),
    Effect.FORGETS: (FORGET,),
    Effect.CHANGES_SLEEP: (
        *("sleep", "wake_up", "discard", "checkpoint_prepare", "checkpoint_restore", "shutdown"),
        *("execute_method", "sleep_mode_backend"),  # the first calls any other method
    ),
    Effect.RUNS: (
        *("execute_model", "execute_dummy_batch", "sample_tokens", "take_draft_token_ids", "compile_or_warm_up_model"),
        *("elastic_ep_execute", "save_sharded_state", "save_tensorized_model", "determine_available_memory"),
    ),
    Effect.STARTS: ("start_weight_update",),
    Effect.STARTS_DRAFT: ("start_draft_weight_update",),
    Effect.UPDATES: ("update_weights",),
    Effect.FINISHES: ("finish_weight_update",),
    Effect.LOADS: ("reload_weights",),
    Effect.HARMLESS: (
        *("cumem_sleep_status", KEEP_KV, "annotate_profile", "check_health", "list_loras", "profile"),
        *("get_cache_block_size_bytes", "get_compilation_match_table", "get_encoder_timing_stats"),
        *("get_kv_cache_spec", "get_kv_connector_handshake_metadata", "get_model_inspection"),
        *("get_simple_cpu_offload_num_cpu_blocks", "get_supported_kv_cache_layouts", "get_supported_tasks"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "supports_draft_weight_updates"),
        *("release_late_interaction_query_cache", "reset_encoder_cache", "reset_mm_cache", "synchronize_device"),
        *("update_max_model_len", "vocab_size"),
    ),
}
_EFFECTS = {name: effect for effect, names in _METHODS.items() for name in names}
# What needs awake weights alone, the engine's own calls that run the model, and what vLLM may call at any time.
TOUCHES_WEIGHTS = frozenset(
    (
        *("update_weights", "start_weight_update", "start_draft_weight_update", "finish_weight_update"),
        *("reload_weights", "load_weights", "save_sharded_state", "save_tensorized_model", "compute_weight_checksums"),
        *("reset_weights", "apply_model", "get_model", "get_draft_model", "add_lora", "remove_lora", "pin_lora"),
    )
)
CALLS_BY_ENGINE = frozenset(("execute_model", "execute_dummy_batch", "sample_tokens", "take_draft_token_ids"))
_HARMLESS_ASLEEP = (Effect.HARMLESS, Effect.CHANGES_SLEEP, Effect.DEEPENS, Effect.FORGETS)


def needed(worker: type, name: str) -> frozenset[str]:
    """The tags whose memory has to be awake for a method of this class of workers, by vLLM's names.

    All of them for what vLLM's own workers have and the table above does not know. Methods that others add are theirs.
    """
    if name in TOUCHES_WEIGHTS:
        return frozenset(("weights",))
    if name not in CALLS_BY_ENGINE and (effect_of(name) in _HARMLESS_ASLEEP or not _is_vllms_method(worker, name)):
        return frozenset()
    return frozenset(("weights", "kv_cache"))


def _is_vllms_method(worker: type, name: str) -> bool:
    found = [vars(each)[name] for each in worker.__mro__ if each.__module__.startswith("vllm.") and name in vars(each)]
    return any(map(callable, found)) and not name.startswith("_")


def effect_of(method: str, loading: tuple[str, ...] = ()) -> Effect:
    """What a worker method does; `loading` names a trainer's own methods that load all weights."""
    if method in loading and _EFFECTS.get(method) not in (Effect.CHANGES_SLEEP, Effect.DEEPENS, Effect.FORGETS):
        return Effect.LOADS
    return _EFFECTS.get(method, Effect.WRITES)


def method_of(body: bytes) -> str:
    """The method that the body of a POST /collective_rpc calls; "" if vLLM will reject the body."""
    try:
        method = json.loads(body)["method"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return method if isinstance(method, str) else ""
