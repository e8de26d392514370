"""The entry point in `vllm.general_plugins`, called by vLLM in every process of a server, sometimes more than once.

It replaces vLLM's allocator with this layer's. vLLM uses that class only if sleep mode (or its cumem allocator) is
enabled, so nothing changes for users of neither.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from .. import _core
from ..allocator import CuMemAllocator
from ..core.levels import is_checkpoint
from ..errors import CumemSleepError, InvalidState
from ..for_plugin import prepare_after_warm_up, prepare_where_there_is_room
from ..settings import FLAG, PREFIX, Settings
from . import (
    compatibility,
    droppable,
    engine_group,
    kept_kv,
    kv_blocks,
    loaded,
    view,
    worker_checkpoint,
    worker_refusals,
)
from .undone import undone_if_it_fails

logger = logging.getLogger("cumem_sleep")

DISABLE = PREFIX + "DISABLE"
NAME = "cumem_sleep"  # the sleep-mode backend
ENTRY_POINTS = (NAME, "cumem-sleep")  # VLLM_PLUGINS selects by these; the second is the package's name
# Set by the first process of a server that logs what it does about vLLM; the other processes inherit it.
_SAID = "_CUMEM_SLEEP_SAID"


def register() -> None:
    """Let vLLM's workers allocate from this layer, unless it is disabled or does not fit the installed vLLM.

    Without CUDA it does nothing. vLLM loads plugins for `--version` and `--help` too, so a variable with a bad value
    raises no error here, but when an engine that would use this layer is configured (`check_engine_arguments`).
    """
    compatibility.before_engine_config(check_engine_arguments)
    if _is_set(DISABLE) or not compatibility.is_cuda():
        return
    _log_as_vllm_does()
    untested = compatibility.installed_version_misfit()
    if misfit := compatibility.misfit(untested=_is_set(compatibility.UNTESTED)):
        try_it = f"{compatibility.UNTESTED}=1 tries it anyway, " if misfit == untested else ""
        _say_once(
            f"cumem-sleep does not serve this vLLM, whose own sleep mode stays: {misfit}."
            f" ({try_it}{DISABLE}=1 silences this message.)"
        )
        return
    if untested:
        _say_once(
            f"cumem-sleep serves this vLLM because {compatibility.UNTESTED} is set: {untested}."
            " Everything that the layer calls is there; nothing else was tested"
        )
    _take_over()


def check_engine_arguments(arguments: Any) -> None:
    """Stop a server at its start, rather than at its first sleep, if this layer cannot do what is asked of it.

    Args:
        arguments: vLLM's `EngineArgs`.

    Raises:
        InvalidArgument: an environment variable has a bad value, and the engine would use this layer.
        InvalidState: the engine asks for this layer's sleep-mode backend, but the layer does not serve here.
    """
    by_name = getattr(arguments, "sleep_mode_backend", None) == NAME
    sleeps = any(getattr(arguments, name, False) for name in compatibility.WHAT_ENABLES_THE_ALLOCATOR)
    if not (by_name or sleeps):
        return
    check_variables(os.environ)
    if refusal := _refusal():
        if by_name:
            raise InvalidState(
                f"--sleep-mode-backend {NAME} cannot be used: {refusal}."
                " Without that option vLLM uses its own sleep mode"
            )
        return
    Settings.from_environment()
    compatibility.clear_senders_cache()


def check_variables(environment: Mapping[str, str]) -> None:
    """Check the variables that only the plugin reads.

    Raises:
        InvalidArgument: one of them has a bad value.
    """
    for variable in (DISABLE, compatibility.UNTESTED):
        FLAG.read(variable, environment.get(variable, "").strip() or "0")


def _refusal() -> str | None:
    """Why this layer does not serve, or None if it does."""
    if _is_set(DISABLE):
        return f"{DISABLE}={os.environ[DISABLE]}"
    if not compatibility.is_cuda():
        return "vLLM does not run on CUDA here"
    return compatibility.misfit(untested=_is_set(compatibility.UNTESTED))


def left_out(environment: Mapping[str, str]) -> str:
    """How `VLLM_PLUGINS`, an allow-list, keeps this plugin out; "" if it does not."""
    plugins = environment.get("VLLM_PLUGINS")
    return f"VLLM_PLUGINS={plugins}" if plugins is not None and not set(ENTRY_POINTS) & set(plugins.split(",")) else ""


def why_not_active() -> str:
    """Why vLLM's memory does not come from this layer, in an API server whose workers say so."""
    unknown = "without --enable-sleep-mode, or the workers have another environment; see the server's log"
    return left_out(os.environ) or _refusal() or unknown


def _is_set(variable: str) -> bool:
    """Whether it is true. A bad value counts as not set: `check_engine_arguments` reports it where it matters."""
    try:
        return bool(FLAG.read(variable, os.environ.get(variable, "").strip() or "0"))
    except CumemSleepError:
        return False


def _say_once(text: str) -> None:
    """Log a warning in the first process of a server; the other processes inherit a variable that says so."""
    if _SAID not in os.environ:
        os.environ[_SAID] = "1"
        logger.warning("%s", text)


def _take_over() -> None:
    """Install this layer in vLLM; calling this again is harmless."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if others := compatibility.replace_allocator():
        logger.info(
            "vLLM's own CuMemAllocator was replaced in modules that had already imported it: %s", ", ".join(others)
        )
    view.install()
    compatibility.copy_to_ray_workers(PREFIX)
    prepare_after_warm_up()
    if not hasattr(WorkerWrapperBase.init_device, "registers"):
        WorkerWrapperBase.init_device = registering_the_loader(WorkerWrapperBase.init_device)
    WorkerWrapperBase.load_model = load_model
    WorkerWrapperBase.compile_or_warm_up_model = compile_or_warm_up_model
    WorkerWrapperBase.sleep = sleep
    WorkerWrapperBase.wake_up = wake_up
    WorkerWrapperBase.reload_weights = reload_weights
    WorkerWrapperBase.discard = discard
    WorkerWrapperBase.cumem_sleep_deepen = cumem_sleep_deepen
    WorkerWrapperBase.cumem_sleep_forget = cumem_sleep_forget
    WorkerWrapperBase.cumem_sleep_status = cumem_sleep_status
    WorkerWrapperBase.cumem_sleep_keep_kv = cumem_sleep_keep_kv
    WorkerWrapperBase.cumem_sleep_kept_kv = cumem_sleep_kept_kv
    WorkerWrapperBase.worker = worker_checkpoint.WORKER
    compatibility.register_backend(NAME, f"{__package__}.backend", "CumemSleepBackend")
    if _keeps_kv():
        if misfit := kept_kv.version_misfit():
            _say_once(f"the KV cache does not survive sleeps: {misfit}")
        else:
            kept_kv.install()


def _keeps_kv() -> bool:
    """Whether sleeps may keep the KV cache. With a bad value they do not: `check_engine_arguments` reports it."""
    try:
        return bool(Settings.from_environment().keep_kv_bytes)
    except CumemSleepError:
        return False


def registering_the_loader(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The wrapper's own, which knows `--load-format cumem_sleep` before: from 0.33 on the worker asks for its loader.

    Not since the plugin was loaded: vLLM's loaders import much, and most processes load no model.
    """

    @functools.wraps(own)
    def init_device(self: Any) -> Any:
        if self.vllm_config.load_config.load_format == NAME:
            importlib.import_module(f"{__package__}.vault_loader")
        return own(self)

    init_device.registers = True  # type: ignore[attr-defined]
    return init_device


def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The worker's own, inside the pool for weights."""
    worker, allocator = worker_checkpoint.of(self), CuMemAllocator.instance
    if allocator is not None and (why := worker_refusals.why_not(worker, "load_model", allocator)):
        return worker_refusals.refuse(worker, "load_model", why)
    with droppable.noting_what_is_written():
        result = worker.load_model(*args, **kwargs)
    for _, model in loaded.models(worker):
        worker_refusals.watch(model)
    return result


def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The worker's method. After it, the engine's workers form a group and prepare their first sleep."""
    worker, allocator = worker_checkpoint.of(self), CuMemAllocator.instance
    if allocator is not None and (why := worker_refusals.why_not(worker, "compile_or_warm_up_model", allocator)):
        return worker_refusals.refuse(worker, "compile_or_warm_up_model", why)
    result = worker.compile_or_warm_up_model(*args, **kwargs)
    engine_group.join(worker)
    _prepare(worker)
    return result


def _prepare(worker: Any) -> None:
    """As the settings say; all ranks of an engine call this."""
    if (allocator := CuMemAllocator.instance) is None:
        return
    settings, config = allocator.settings, getattr(getattr(worker, "vllm_config", None), "model_config", None)
    sleeps = getattr(config, "enable_sleep_mode", False)
    if settings.prepare == "auto":
        if settings.retain_backups and sleeps:
            prepare_where_there_is_room(allocator)
    elif settings.prepare and allocator.get_current_usage():
        try:
            allocator.prepare(keep_bytes=kv_blocks.bytes_to_prepare(worker))
        except CumemSleepError as error:
            logger.warning("prepare did not begin, so the first sleep copies everything: %s", error)
    if sleeps:
        kv_blocks.say_what_auto_keeps(worker)


def sleep(self: Any, level: int = 1, **kwargs: Any) -> Any:
    """The worker's method, without an assertion that fails because of other processes. At level 3 it goes on from 1.

    At its end it asserts that the GPU has more free memory than before. If another process (a model that wakes, say)
    took more memory meanwhile than this one released, the assertion fails although all memory is asleep. vLLM would
    then take the model to be awake: its next wake would wake nothing and run the model on unmapped memory.

    The worker never hears of level 3: it asks CUDA for free memory at the end, and before 0.33 takes 3 for 2.
    """
    if _core.driver_calls_suspended():  # all sleeps, though vLLM may not know, and the worker would ask CUDA
        return None
    worker = worker_checkpoint.of(self)
    own_level = 1 if is_checkpoint(level) else level
    try:
        call = partial(worker.sleep, level=own_level, **kwargs)
        with worker_checkpoint.using_cuda(worker), droppable.declared(worker, own_level), kv_blocks.keeping():
            result = engine_group.told_once(worker, partial(undone_if_it_fails, worker, call))
    except AssertionError as error:
        allocator = CuMemAllocator.instance
        usages = [] if allocator is None else list(allocator.usage().values())
        if not usages or any(usage.asleep_segments < usage.segments for usage in usages):
            raise
        logger.warning("another process took GPU memory while this one fell asleep: %s", error)
        result = None
    if is_checkpoint(level):
        worker_checkpoint.checkpoint_worker(worker)
    return result


def wake_up(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The worker's own, which calls the allocator before CUDA: so that comes back from level 3 itself.

    Weights that come back without their bytes are marked before the worker restores some of them.
    """
    worker = worker_checkpoint.of(self)
    with loaded.marking(worker), kv_blocks.restoring():
        return engine_group.told_once(worker, partial(worker.wake_up, *args, **kwargs))


def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The worker's own, which returns nothing; where it leaves weights out that level 2 dropped, their names."""
    result = self.worker.reload_weights(*args, **kwargs)
    if result is None and (names := loaded.not_loaded(worker_checkpoint.of(self))):
        logger.warning("reload_weights left out weights that level 2 dropped: %s", names)
        return names
    return result


def discard(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The worker's own."""
    if _core.driver_calls_suspended():
        return None
    worker = worker_checkpoint.of(self)
    call = partial(worker.discard, *args, **kwargs)
    with worker_checkpoint.using_cuda(worker), droppable.declared(worker, 2):
        return engine_group.told_once(worker, partial(undone_if_it_fails, worker, call))


def cumem_sleep_deepen(self: Any) -> dict[str, Any]:
    """One worker's answer to `collective_rpc("cumem_sleep_deepen")`: whether it is at level 3 now, or why not.

    vLLM's own sleep does nothing where memory sleeps already. An error would be no answer: see `told_once`.
    """
    why = worker_checkpoint.checkpoint_worker(worker_checkpoint.of(self))
    return {"rank": worker_checkpoint.of(self).rank, "checkpointed": _core.driver_calls_suspended(), "why": why}


def cumem_sleep_forget(self: Any, tags: Any = None) -> Any:
    """One worker's answer to `collective_rpc("cumem_sleep_forget")`: bytes that the next wake does not restore."""
    worker = worker_checkpoint.of(self)
    return engine_group.told_once(worker, partial(droppable.forget, worker, tags))


def cumem_sleep_status(self: Any) -> dict[str, Any]:
    """One worker's answer to `collective_rpc("cumem_sleep_status")`: plain numbers, for metrics and for people.

    Touches no GPU at level 3 (`checkpointed`): the device's numbers are the last ones then.
    """
    allocator = CuMemAllocator.get_instance()
    devices = sorted({segment.device for segment in _core.segments()})
    memory = worker_checkpoint.device_memory(allocator, devices)
    place = allocator.backup_place()
    return {
        "rank": worker_checkpoint.of(self).rank,
        "pid": os.getpid(),
        "devices": devices,
        "simulated": allocator.settings.driver == "sim",
        "usage": {tag: asdict(usage) for tag, usage in allocator.usage().items()},
        "place": {"vault": place.vault, "lost": place.lost},
        "operations": {operation: asdict(totals) for operation, totals in allocator.totals().items()},
        "device_used_bytes": sum(total_bytes - free_bytes for free_bytes, total_bytes in memory),
        "device_total_bytes": sum(total_bytes for _, total_bytes in memory),
        "checkpointed": _core.driver_calls_suspended(),
        "not_loaded": loaded.not_loaded(worker_checkpoint.of(self)),
    }


def cumem_sleep_keep_kv(self: Any, _: bool) -> None:
    """One worker's answer to `collective_rpc("cumem_sleep_keep_kv")`, which is for the engine core alone."""


def cumem_sleep_kept_kv(self: Any, question: str, *args: Any) -> dict[str, Any]:
    """One worker's answer to a question of its engine core about a KV cache that survives a sleep."""
    return kv_blocks.answer(worker_checkpoint.of(self), question, *args)


def _log_as_vllm_does() -> None:
    """Log where vLLM logs, unless the user configured our logger: vLLM configures only its own loggers."""
    ours = logging.getLogger("cumem_sleep")
    if ours.handlers:
        return
    ours.addHandler(_ToVllm())
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.DEBUG)  # vLLM's level decides


class _ToVllm(logging.Handler):
    """Forwards records to vLLM's logger, which some versions configure only after loading the plugins."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger("vllm")
        if theirs.isEnabledFor(record.levelno):
            theirs.handle(record)
