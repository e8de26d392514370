"""What this layer needs of vLLM: a list, looked up in the sources of an installed vLLM, of which nothing is imported.

`compatibility.misfit` decides whether the plugin serves; this says of a new version where to look.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..allocator import CuMemAllocator


class Seam(NamedTuple):
    """A place in vLLM that this layer calls, wraps or replaces.

    Attributes:
        name: of a class, a function, a method or a variable, or one that is imported there.
        parameters: those that are given by name.
        since: vLLM's minor version that had it first.
    """

    file: str
    name: str
    use: str
    parameters: tuple[str, ...] = ()
    since: int = 0

    def state(self, vllm: Path) -> str:
        """`found`, `gone`, or how it has changed.

        Args:
            vllm: the folder of the package.
        """
        try:
            found: ast.AST | None = ast.parse((vllm / self.file).read_text())
        except FileNotFoundError:
            return "gone"
        for name in self.name.split("."):
            found = (
                next((node for node in ast.iter_child_nodes(found) if name in _names(node)), None) if found else None
            )
        if found is None:
            return "gone"
        if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)) and found.args.kwarg is None:
            taken = {each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)}
            if missing := [name for name in self.parameters if name not in taken]:
                return f"changed: no parameter {', '.join(missing)}"
        return "found"


def _names(node: ast.AST) -> Iterator[str]:
    """What a statement defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (each.asname or each.name for each in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for each in targets if isinstance(each, ast.Name))


_WORKER, _CORE, _CLIENT = "v1/worker/gpu_worker.py", "v1/engine/core.py", "v1/engine/async_llm.py"
_LOADERS = "model_executor/model_loader"
_BASE_LOADER, _FILES = f"{_LOADERS}/base_loader.py", f"{_LOADERS}/default_loader.py"
_BACKENDS, _BASE = "device_allocator/sleep_mode_backend.py", "v1/worker/worker_base.py"
SEAMS = (
    Seam("device_allocator/cumem.py", "CuMemAllocator", "replaced"),
    Seam(_BACKENDS, "SleepModeBackendFactory.register_backend", "registers `cumem_sleep`", since=25),
    Seam(_BACKENDS, "SleepModeBackendFactory._registry", "tells whether it is registered", since=25),
    Seam(_BACKENDS, "SleepModeBackend.suspend", "overridden", ("level",), since=25),
    Seam(_BACKENDS, "SleepModeBackend.resume", "overridden", ("tags",), since=25),
    Seam(_BACKENDS, "SleepModeBackend.discard", "overridden", ("tags",), since=31),
    Seam(_BASE, "WorkerWrapperBase.__getattr__", "forwards what the plugin does not wrap"),
    Seam(_BASE, "WorkerBase.compile_or_warm_up_model", "wrapped: workers join, backups begin"),
    Seam(_WORKER, "Worker.load_model", "wrapped: what a load writes is noted"),
    Seam(_WORKER, "Worker.sleep", "wrapped: says what may be dropped", ("level",)),
    Seam(_WORKER, "Worker.wake_up", "wrapped: marks what is not loaded", ("tags",)),
    Seam(_WORKER, "Worker.reload_weights", "wrapped: names what it left out"),
    Seam(_BASE_LOADER, "initialize_model", "wrapped: what a load writes is noted"),
    Seam(_BASE, "WorkerWrapperBase.init_device", "wrapped: knows `--load-format cumem_sleep`"),
    Seam(f"{_LOADERS}/__init__.py", "register_model_loader", "registers `cumem_sleep`", since=26),
    Seam(_BASE_LOADER, "BaseModelLoader.load_model", "overridden", ("model_config", "prefix"), since=26),
    Seam(_FILES, "DefaultModelLoader.load_weights", "overridden", since=26),
    Seam(_FILES, "DefaultModelLoader.get_all_weights", "names files", since=26),
    Seam(_FILES, "DefaultModelLoader._prepare_weights", "names files", since=26),
    Seam(_FILES, "DefaultModelLoader._get_weights_iterator", "replaced to name files", since=26),
    Seam("config/compilation.py", "CompilationConfig.static_forward_context", "put back to build anew", since=26),
    Seam("distributed/parallel_state.py", "get_tp_group", "ranks agree on where weights come from", since=26),
    Seam("envs.py", "compile_factors", "in the key of weights", since=26),
    Seam("engine/arg_utils.py", "EngineArgs.create_engine_config", "wrapped: settings are checked"),
    Seam("platforms/interface.py", "Platform.is_cuda", "asked"),
    Seam("distributed/parallel_state.py", "get_world_group", "the workers' group"),
    Seam("ray/ray_env.py", "DEFAULT_ENV_VAR_PREFIXES", "variables for workers on Ray", since=18),
    Seam(_CLIENT, "AsyncLLM.sleep", "called by the gate", ("level", "mode"), since=18),
    Seam(_CLIENT, "AsyncLLM.wake_up", "called by the gate", ("tags",)),
    Seam(_CLIENT, "AsyncLLM.is_sleeping", "called by the gate"),
    Seam(_CLIENT, "AsyncLLM.abort", "called by the gate", ("request_id", "internal"), since=18),
    Seam(_CLIENT, "AsyncLLM.collective_rpc", "called by the gate", ("method",)),
    Seam(_CLIENT, "AsyncLLM.pause_generation", "called by the gate", since=18),
    Seam("v1/engine/core_client.py", "AsyncMPClient.add_request_async", "the gate's last check of a request"),
    Seam("v1/engine/output_processor.py", "OutputProcessor.get_num_unfinished_requests", "counted by the gate"),
    Seam("v1/engine/llm_engine.py", "LLMEngine.sleep", "wrapped: clears the cache of inputs"),
    Seam(_CORE, "EngineCore.sleep", "wrapped for a kept KV cache", since=26),
    Seam(_CORE, "EngineCore.resume_scheduler", "wrapped for a kept KV cache", since=26),
    Seam(_CORE, "EngineCore.collective_rpc", "wrapped for a kept KV cache", since=26),
    Seam("v1/core/sched/scheduler.py", "Scheduler._preempt_request", "wrapped for a kept KV cache", since=26),
)


def examined(vllm: Path, minor: int) -> dict[str, str]:
    """The state of each seam that this minor version has, and what of vLLM's allocator this layer's lacks (`new`).

    Args:
        vllm: the folder of the package.
    """
    states = {f"{seam.file}: {seam.name} ({seam.use})": seam.state(vllm) for seam in SEAMS if seam.since <= minor}
    allocator = vllm / SEAMS[0].file
    for node in ast.walk(ast.parse(allocator.read_text())) if allocator.exists() else ():
        if isinstance(node, ast.ClassDef) and node.name == SEAMS[0].name:
            for method in node.body:
                for name in _names(method):
                    if not name.startswith("_") and not hasattr(CuMemAllocator, name):
                        states[f"{SEAMS[0].file}: {SEAMS[0].name}.{name}"] = "new"
    return states
