"""What vLLM's worker does before its memory sleeps, and does not take back when that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..allocator import CuMemAllocator

logger = logging.getLogger("cumem_sleep")

# Copies that its next wake puts back, whichever sleep made them: by then they may be old.
_COPIES = ("_sleep_saved_buffers", "_sleep_saved_parameters", "_sleep_saved_draft_buffers")


def undone_if_it_fails(worker: Any, call: Callable[[], Any]) -> Any:
    """The result of a worker's sleep or discard. If it fails, what is mapped is as it was before.

    vLLM takes a KV connector's registrations back before memory sleeps (from 0.33 on), and makes them again in the
    wake, which never comes: its executor takes the worker to be awake.
    """
    before = {name: getattr(worker, name) for name in _COPIES if hasattr(worker, name)}
    try:
        return call()
    except Exception:
        asleep = {tag for tag, usage in CuMemAllocator.get_instance().usage().items() if usage.asleep_segments}
        if "weights" not in asleep:
            for name, value in before.items():
                setattr(worker, name, value)
        if "kv_cache" not in asleep:
            _register_kv_caches()
        raise


def _register_kv_caches() -> None:
    """Does nothing where they are registered: so vLLM's connectors promise."""
    from vllm.distributed import kv_transfer

    try:
        if kv_transfer.has_kv_transfer_group():
            getattr(kv_transfer.get_kv_transfer_group(), "restore_kv_caches", lambda: None)()
    except Exception as error:  # the failure of the sleep is the one to be told
        logger.error("after a sleep that failed, the KV connector did not register its memory again: %s", error)
