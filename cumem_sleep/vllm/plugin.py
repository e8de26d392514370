"""The entry point in `vllm.general_plugins`, called by vLLM in every process of a server, sometimes more than once.

It puts this layer's allocator where vLLM's own stood. vLLM asks for that class whenever sleep mode (or its cumem
allocator) is enabled and never otherwise, so nothing changes for who uses neither.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import Any

from .. import _core
from ..allocator import CuMemAllocator
from ..errors import CumemSleepError
from ..settings import PREFIX, Settings, parse_bool
from . import compatibility

logger = logging.getLogger("cumem_sleep")

DISABLE = PREFIX + "DISABLE"
NAME = "cumem_sleep"  # of the entry point and of the sleep-mode backend
# Set by the first process of a server that says why it keeps vLLM's own layer; the others inherit it.
_REFUSED = "_CUMEM_SLEEP_REFUSED"


def register() -> None:
    """Let vLLM's workers allocate from this layer, unless it is disabled or does not fit the installed vLLM.

    Elsewhere than on CUDA nothing happens.

    Raises:
        InvalidArgument: an environment variable has a bad value: better at the start than at the first sleep.
    """
    if parse_bool(DISABLE, os.environ.get(DISABLE, "").strip() or "0") or not compatibility.is_cuda():
        return
    Settings.from_environment()
    _log_as_vllm_does()
    if misfit := compatibility.misfit():
        if _REFUSED not in os.environ:
            os.environ[_REFUSED] = "1"
            logger.warning(
                "cumem-sleep does not serve this vLLM, whose own sleep mode stays: %s. (%s=1 takes this message away.)",
                misfit,
                DISABLE,
            )
        return
    _take_over()


def _take_over() -> None:
    """Again is harmless."""
    from vllm.device_allocator import cumem
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    cumem.CuMemAllocator = CuMemAllocator
    CuMemAllocator.prepares_after_pools = False
    WorkerWrapperBase.compile_or_warm_up_model = compile_or_warm_up_model
    WorkerWrapperBase.sleep = sleep
    WorkerWrapperBase.cumem_sleep_status = cumem_sleep_status
    compatibility.register_backend(NAME, f"{__package__}.backend", "CumemSleepBackend")


def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The worker's own, and after it, if the settings say so, the backups for the first sleep (in the background)."""
    result = self.worker.compile_or_warm_up_model(*args, **kwargs)
    allocator = CuMemAllocator.instance
    if allocator is not None and allocator.settings.prepare and allocator.get_current_usage():
        try:
            allocator.prepare()
        except CumemSleepError as error:
            logger.warning("prepare did not begin, the first sleep copies everything: %s", error)
    return result


def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The worker's own, which holds against us what other processes do.

    At its end it asserts that the GPU has more free memory than before. If another process, as a model that wakes, took
    more meanwhile than this one gave, that fails with all memory asleep, and vLLM takes a sleep that failed for none:
    its next wake would wake nothing and run the model on unmapped memory.
    """
    try:
        return self.worker.sleep(*args, **kwargs)
    except AssertionError as error:
        allocator = CuMemAllocator.instance
        usages = [] if allocator is None else list(allocator.usage().values())
        if not usages or any(usage.asleep_segments < usage.segments for usage in usages):
            raise
        logger.warning("another process took GPU memory while this one fell asleep: %s", error)


def cumem_sleep_status(self: Any) -> dict[str, Any]:
    """What `collective_rpc("cumem_sleep_status")` answers for one worker: plain numbers, for metrics and for people."""
    allocator = CuMemAllocator.get_instance()
    devices = sorted({segment.device for segment in _core.segments()})
    free_bytes, total_bytes = (sum(numbers) for numbers in zip((0, 0), *map(_core.memory_info, devices), strict=True))
    return {
        "rank": self.worker.rank,
        "devices": devices,
        "simulated": allocator.settings.driver == "sim",
        "usage": {tag: asdict(usage) for tag, usage in allocator.usage().items()},
        "operations": {operation: asdict(totals) for operation, totals in allocator.totals().items()},
        "device_used_bytes": total_bytes - free_bytes,
        "device_total_bytes": total_bytes,
    }


def _log_as_vllm_does() -> None:
    """Write where vLLM writes, which configures only its own loggers, unless the user has seen to ours."""
    ours = logging.getLogger("cumem_sleep")
    if ours.handlers:
        return
    ours.addHandler(_ToVllm())
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.DEBUG)  # vLLM's level decides


class _ToVllm(logging.Handler):
    """Passes records on to vLLM's logger, which some versions configure only after the plugins were loaded."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger("vllm")
        if theirs.isEnabledFor(record.levelno):
            theirs.handle(record)
