"""What this layer needs from vLLM, and where vLLM's versions differ. Other modules ask the running engine what it has.

| | since |
|---|---|
| `ray.ray_env.DEFAULT_ENV_VAR_PREFIXES` | 0.18.0 |
| `enable_cumem_allocator`: the allocator without sleep mode | between 0.19 and 0.22 |
| `device_allocator.get_mem_allocator_instance` | 0.23.0 |
| `CuMemAllocator.release_pools`, `close`; `device_allocator.sleep_mode_backend` | 0.25.0 |
| `CuMemAllocator.discard` | 0.28.0 |
| `SleepModeBackend.discard`, `Worker.discard`, `release_kv_cache_memory` | 0.31.0 |
| `CuMemAllocator.cudagraph_pool`; tags `runtime` and `cudagraph` are backed up at every level | 0.32.0 |
| `--sleep-mode-backend` | 0.33.0 |

Scratch memory (tag `workspace`, after 0.30) is not among the tags that the backend `cumem` backs up; the plugin asks
for a level instead (`droppable`), which backs it up. Graph memory comes from `cudagraph_pool` only with the backend
`cumem`, vLLM's default, which also uses this layer. Up to 0.26 a wake of `kv_cache` alone after level 2 restores
buffers of weights that still sleep: wake `weights` first.

Tested: 0.11.2, 0.18.1, 0.26.0 and 0.33.0 (tests/vllm). `misfit` checks the versions in between when they are used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from ..allocator import CuMemAllocator
from ..settings import PREFIX

# Minor versions; older ones need a PyTorch below 2.9, newer ones did not exist yet.
OLDEST, NEWEST = (0, 11), (0, 33)
WEIGHTS_OUTSIDE_POOLS = (0, 14), (0, 16)  # `load_model` makes the pool for weights, and does not enter it
# If set, other versions are served as well, if they have everything that is needed.
UNTESTED = PREFIX + "VLLM_UNTESTED"

# The fields of `EngineArgs` with which vLLM asks for its CuMemAllocator.
WHAT_ENABLES_THE_ALLOCATOR = ("enable_sleep_mode", "enable_cumem_allocator")

# What the plugin adds to `WorkerWrapperBase`.
WRAPPED = (
    *("load_model", "compile_or_warm_up_model", "sleep", "wake_up", "reload_weights", "discard"),
    *("cumem_sleep_deepen", "cumem_sleep_status", "cumem_sleep_keep_kv", "cumem_sleep_kept_kv", "worker"),
)


def is_cuda() -> bool:
    """Whether vLLM runs on NVIDIA GPUs here. Does not initialise CUDA."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def misfit(untested: bool = False) -> str | None:
    """Why this layer cannot serve the installed vLLM, or None if everything that it relies on is there.

    Args:
        untested: whether unknown versions are acceptable if their interface fits.
    """
    try:
        return (
            (None if untested else installed_version_misfit())
            or _allocator_misfit()
            or _worker_misfit()
            or _backend_misfit()
        )
    except Exception as error:  # a vLLM with an unforeseen structure must still start
        return f"looking at it failed with {type(error).__name__}: {error}"


def installed_version_misfit() -> str | None:
    """`version_misfit` of the vLLM in this process."""
    return version_misfit(str(getattr(importlib.import_module("vllm"), "__version__", "")))


def before_engine_config(check: Callable[[Any], None]) -> None:
    """Call `check` with the `EngineArgs` of every engine before it is configured; calling this again is harmless.

    A process that has not imported that module configures no engine.
    """
    arguments = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    configure = getattr(arguments, "create_engine_config", None)
    if arguments is None or configure is None or getattr(configure, "checked_by", None) is check:
        return

    @functools.wraps(configure)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return configure(self, *args, **kwargs)

    create_engine_config.checked_by = check  # type: ignore[attr-defined]
    arguments.create_engine_config = create_engine_config


def clear_senders_cache() -> None:
    """Have sleeps and pauses clear the frontend's cache of multimodal inputs, too; calling this again is harmless.

    They clear the engine's. From 0.18 on, and in some versions up to 0.26 only for it: what the frontend still takes
    for known there would be missing.
    """
    asynchronous = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    synchronous = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
    for client, name in ((asynchronous, "sleep"), (asynchronous, "pause_generation"), (synchronous, "sleep")):
        call = getattr(client, name, None)
        if call is not None and not hasattr(call, "clears") and "clear_mm_cache" not in inspect.getsource(call):
            setattr(client, name, _clearing(call))


def _clearing(call: Callable[..., Any]) -> Callable[..., Any]:
    def clear(client: Any) -> None:
        if callable(clear_mm_cache := getattr(getattr(client, "renderer", None), "clear_mm_cache", None)):
            clear_mm_cache()

    @functools.wraps(call)
    def clearing(self: Any, *args: Any, **kwargs: Any) -> Any:
        clear(self)
        return call(self, *args, **kwargs)

    @functools.wraps(call)
    async def clearing_twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Before, for requests that come meanwhile, and after, for those that the engine got before it cleared its."""
        clear(self)
        try:
            return await call(self, *args, **kwargs)
        finally:
            clear(self)

    wrapped: Any = clearing_twice if inspect.iscoroutinefunction(call) else clearing
    wrapped.clears = True
    return wrapped  # type: ignore[no-any-return]


def replace_allocator() -> list[str]:
    """Put this layer's class in every module that has vLLM's; returns its names in modules that imported it before."""
    cumem = importlib.import_module("vllm.device_allocator.cumem")
    theirs, replaced = cumem.CuMemAllocator, []
    if theirs is CuMemAllocator:
        return []
    for module in list(sys.modules.values()):
        try:
            names = object.__getattribute__(module, "__dict__")  # vars() would load a lazy module
        except AttributeError:
            continue
        for name in [name for name, value in list(names.items()) if value is theirs]:
            names[name] = CuMemAllocator
            if module is not cumem:
                replaced.append(f"{names.get('__name__', '?')}.{name}")
    return sorted(replaced)


def register_backend(name: str, module: str, class_name: str) -> None:
    """Register a sleep-mode backend if vLLM has a registry of them; calling this again is harmless."""
    factory = _backend_factory()
    if factory is not None and name not in factory._registry:
        factory.register_backend(name, module, class_name)


def copy_to_ray_workers(prefix: str) -> None:
    """Have vLLM copy variables with this prefix to workers on Ray, which do not inherit them; before 0.18 it cannot.

    Not by vLLM's variable for that: it is part of the key of the cache of compiled code.
    """
    if isinstance(prefixes := ray_prefixes(), set):
        prefixes.add(prefix)


def ray_prefixes() -> Any:
    """The prefixes of variables that vLLM copies to workers on Ray; None: this vLLM knows no prefixes."""
    try:
        return getattr(importlib.import_module("vllm.ray.ray_env"), "DEFAULT_ENV_VAR_PREFIXES", None)
    except ImportError:
        return None


def version_misfit(version: str) -> str | None:
    """Why vLLM of this version is left alone, or None if the version is known."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    first, last = WEIGHTS_OUTSIDE_POOLS
    known = f"known versions are {_dotted(OLDEST)} to {_dotted(NEWEST)}, but for {_dotted(first)} to {_dotted(last)}"
    if not numbers:
        return f"its version {version!r} cannot be parsed; {known}"
    minor = int(numbers[1]), int(numbers[2])
    if not OLDEST <= minor <= NEWEST or first <= minor <= last:
        return f"its version {version} is not known to work with it; {known}"
    return None


def _allocator_misfit() -> str | None:
    """Why this allocator cannot replace vLLM's: it must accept every call that vLLM's accepts."""
    try:
        theirs = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator
    except Exception as error:  # its C++ part and CUDA's runtime come with it
        return f"vllm.device_allocator.cumem.CuMemAllocator cannot be imported ({error})"
    if theirs is CuMemAllocator:
        return None
    if getattr(theirs, "instance", None) is not None:
        return "its own CuMemAllocator is in use already"
    if heirs := theirs.__subclasses__():
        names = ", ".join(f"{heir.__module__}.{heir.__qualname__}" for heir in heirs)
        return f"its own CuMemAllocator has subclasses ({names}), which would bypass this layer"
    for name in dir(theirs):
        if name.startswith("_"):
            continue
        if not hasattr(CuMemAllocator, name):
            return f"its CuMemAllocator.{name} is new"
        if callable(getattr(theirs, name)):
            reason = _refused_parameter(getattr(theirs, name), getattr(CuMemAllocator, name))
            if reason:
                return f"its CuMemAllocator.{name} takes {reason}"
    return None


def _refused_parameter(theirs: Callable[..., Any], ours: Callable[..., Any]) -> str | None:
    """A parameter of `theirs` that `ours` does not have under the same name, or takes in another way."""
    accepted = inspect.signature(ours).parameters
    for name, parameter in inspect.signature(theirs).parameters.items():
        if name not in accepted:
            return f"{name!r}, which is new"
        if parameter.kind is not accepted[name].kind or (
            parameter.default is not parameter.empty and accepted[name].default is parameter.empty
        ):
            return f"{name!r} differently ({parameter})"
    return None


def _worker_misfit() -> str | None:
    """Why the plugin cannot add methods to the workers' wrapper, which must forward what it does not define itself."""
    try:
        worker_base = importlib.import_module("vllm.v1.worker.worker_base")
        worker, wrapper = worker_base.WorkerBase, worker_base.WorkerWrapperBase
    except Exception as error:
        return f"vllm.v1.worker.worker_base cannot be used ({error})"
    for name in WRAPPED:
        own = getattr(wrapper, name, None)
        if own is not None and not own.__module__.startswith(__package__):
            return f"its WorkerWrapperBase.{name} is new"
    if not hasattr(worker, "compile_or_warm_up_model") or "__getattr__" not in vars(wrapper):
        return "its workers warm up in another way (WorkerBase.compile_or_warm_up_model behind WorkerWrapperBase)"
    return None


def _backend_misfit() -> str | None:
    factory = _backend_factory()
    if factory is None:
        return None
    if not isinstance(getattr(factory, "_registry", None), dict):
        return "its SleepModeBackendFactory has no registry"
    try:
        inspect.signature(factory.register_backend).bind("name", "module", "class")
    except TypeError as error:
        return f"its SleepModeBackendFactory.register_backend takes other arguments ({error})"
    from .backend import CumemSleepBackend

    if missing := getattr(CumemSleepBackend, "__abstractmethods__", None):
        return f"its SleepModeBackend asks for {', '.join(sorted(missing))}"
    return None


def _backend_factory() -> Any:
    """The registry of sleep-mode backends; None in versions without one."""
    try:
        module = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
    except ModuleNotFoundError:
        return None
    return getattr(module, "SleepModeBackendFactory", None)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
