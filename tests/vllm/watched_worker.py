"""A vLLM worker that records each touch of memory that sleeps, and of weights that were dropped and not loaded since.

Everything above it is vLLM's own: the API server, AsyncLLM, the engine core in its process, scheduler and executor. Its
memory is this layer's on the simulated driver. Only the model is missing: a forward step says "good", or "bad" where
a GPU would have crashed or made garbage. It loads by name, so `--worker-cls watched_worker.WatchedWorker` finds it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

try:
    from vllm.v1.worker.worker_base import CompilationTimes
except ImportError:  # vLLM 0.18 answers with a number
    CompilationTimes = None

from cumem_sleep import CuMemAllocator, Settings
from cumem_sleep.vllm import worker_refusals

WEIGHTS, KV_CACHE = "weights", "kv_cache"
PAGE = 2 << 20
STEP_S = 0.003  # a forward step; streams last long enough to be slept under
CHANGE_S = 0.02  # a sleep, a wake, a load
GOOD, BAD, END = 3, 4, 2  # tokens of `model_folder`
CONTENT = torch.arange(1000, dtype=torch.bfloat16)


def _module(address: int, size: int) -> torch.nn.Module:
    """A model with one parameter, in the simulated device's memory."""
    memory = torch.frombuffer((ctypes.c_char * (2 * size)).from_address(address), dtype=torch.bfloat16)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(memory, requires_grad=False)
    module.weight.data.copy_(CONTENT[:size])
    return module


class WatchedWorker(WorkerBase):  # type: ignore[misc]
    """Forbidden touches go to the file WATCHED_WORKER_RECORD, one JSON line each: what touched, and what was wrong."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self._executor = _caller()
        if os.environ.get("WATCHED_WORKER_REFUSES_NOTHING"):  # the gate alone is to keep calls from memory that sleeps
            worker_refusals.why_not = lambda *_: ""
        deep_after_s = Settings.from_environment().deep_after_s
        self._allocator = CuMemAllocator(Settings(driver="sim", prepare=False, deep_after_s=deep_after_s))
        CuMemAllocator.instance = self._allocator
        self._status = getattr(WorkerWrapperBase, "cumem_sleep_status", None)
        self._lost: set[Any] = set()  # of the model and its draft model: what was dropped and not loaded since
        self._failing: list[bool] = []  # which of the next wakes fail, after the memory is mapped
        self._torn = False  # weights were dropped during the update under way
        self._session: int | None = None  # chunks of the weight update under way (from 0.19 on; before, one is all)
        self._target: Any = None  # what it updates
        self._scheduled: Any = None
        assert self.sessions in (True, False)  # its import takes a while, which no episode should
        self._prompts: dict[str, int] = {}
        self._done: dict[str, int] = {}

    def load_model(self, **_: Any) -> None:
        address = self._allocator.malloc(PAGE, WEIGHTS)
        self._model, self._draft = _module(address, 300), _module(address + PAGE // 2, 40)
        self.model_runner = SimpleNamespace(model=self._model, drafter=None)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._allocator.malloc(PAGE, KV_CACHE)

    def compile_or_warm_up_model(self) -> Any:
        return CompilationTimes(0.0, 0.0) if CompilationTimes else 0.0

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {"layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def determine_available_memory(self) -> int:
        return 64 << 20

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_model(self) -> Any:
        return self._model

    @property
    def _models(self) -> set[Any]:
        return {self._model} if self.model_runner.drafter is None else {self._model, self._draft}

    def _load(self, *models: Any) -> None:
        for model in models:
            model.weight.data.copy_(CONTENT[: model.weight.numel()])
        self._lost -= set(models)

    # The oracle

    def _touch(self, what: str, *tags: str, needs_content: bool = False) -> bool:
        """Whether it may touch these; else it is recorded."""
        asleep = self._asleep()
        faults = [f"{tag} asleep" for tag in tags if tag in asleep]
        if needs_content and self._lost and WEIGHTS in tags and WEIGHTS not in asleep:
            faults.append("weights dropped and not loaded")
        if faults:
            with open(os.environ["WATCHED_WORKER_RECORD"], "a") as record:
                record.write(json.dumps({"touch": what, "faults": faults}) + "\n")
        return not faults

    def _asleep(self) -> set[str]:
        return {tag for tag, usage in self._allocator.usage().items() if usage.asleep_segments}

    def watched_state(self) -> dict[str, Any]:
        """What sleeps, and what the executor, in the same process, takes to be asleep."""
        asleep, taken = sorted(self._asleep()), sorted(self._executor.sleeping_tags)
        return {"asleep": asleep, "engine_asleep": taken, "lost": bool(self._lost)}

    def watched_break(self, failing: list[bool]) -> None:
        """Let some of the next wakes fail after the memory is mapped, as vLLM's own do for what follows it there."""
        self._failing = list(failing)

    def watched_reset(self, plugin: bool = True, draft: bool = False) -> None:
        """As freshly started, for the next episode; with the plugin's status to ask for, or without; with a model that
        drafts, or none.
        """
        self._allocator.wake_up()
        self._torn, self._session = False, None
        self.model_runner.drafter = SimpleNamespace(model=self._draft) if draft else None
        self._load(self._model, self._draft)
        if plugin and self._status is not None:
            WorkerWrapperBase.cumem_sleep_status = self._status
        elif hasattr(WorkerWrapperBase, "cumem_sleep_status"):
            del WorkerWrapperBase.cumem_sleep_status

    # Sleep, as vLLM's gpu_worker.py: level 1 keeps the weights, level 2 nothing

    def sleep(self, level: int = 1) -> None:
        time.sleep(CHANGE_S)
        if level != 1 and WEIGHTS not in self._asleep():
            self._lost |= self._models
            self._torn = self._session is not None  # what was written before is lost
        self._allocator.sleep(offload_tags=(WEIGHTS,) if level == 1 else ())

    def wake_up(self, tags: list[str] | None = None) -> None:
        time.sleep(CHANGE_S)
        weights = self._allocator.usage()[WEIGHTS]
        if weights.asleep_segments and not weights.backed_up_bytes:  # at level 2, or forgotten since
            self._lost |= self._models
            self._torn = self._session is not None
        self._allocator.wake_up(tags)
        if self._failing and self._failing.pop(0):
            raise RuntimeError("a wake failed after its memory was mapped")

    def discard(self, tags: tuple[str, ...]) -> None:
        self._allocator.discard(tags)

    # What reads and writes weights

    def reload_weights(self, *_: Any, **__: Any) -> None:
        time.sleep(CHANGE_S)
        if self._touch("reload_weights", WEIGHTS):
            self._load(self._model)  # as vLLM: no draft model

    def receive_weights(self) -> None:
        """A trainer's own method, by its worker extension."""
        if self._touch("receive_weights", WEIGHTS):
            self._load(*self._models)

    def init_weight_transfer_engine(self, init_info: Any = None) -> None: ...

    def shutdown_weight_transfer_engine(self) -> None: ...

    def start_weight_update(self, *_: Any, **__: Any) -> None:
        self._start(self._model)

    def start_draft_weight_update(self) -> None:
        if self.model_runner.drafter is None:
            raise RuntimeError("Draft model weight update requested, but no draft model is configured.")
        self._start(self._draft)

    def _start(self, target: Any) -> None:
        self._touch("start_weight_update", WEIGHTS)
        if self._session is not None:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._session, self._target = 0, target

    def update_weights(self, update_info: Any = None) -> None:
        if self.sessions and self._session is None:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        time.sleep(CHANGE_S)
        written = self._touch("update_weights", WEIGHTS)
        if written and not self.sessions:
            self._load(self._model)
        elif written:
            self._target.weight.data.copy_(CONTENT[: self._target.weight.numel()])
            self._session = (self._session or 0) + 1

    def finish_weight_update(self) -> None:
        if self._session is None:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        whole = self._session > 0 and not self._torn
        self._torn, self._session = False, None
        if self._touch("finish_weight_update", WEIGHTS) and whole:
            self._load(self._target)

    @property
    def sessions(self) -> bool:
        from vllm.engine.protocol import EngineClient

        return hasattr(EngineClient, "start_weight_update")

    def reset_weights(self) -> None:
        self._touch("reset_weights", WEIGHTS)

    def compute_weight_checksums(self) -> dict[str, str]:
        self._touch("compute_weight_checksums", WEIGHTS)
        return {"layer": "0"}

    def save_sharded_state(self, *_: Any, **__: Any) -> None:
        self._touch("save_sharded_state", WEIGHTS)

    def execute_dummy_batch(self) -> None:
        self._touch("execute_dummy_batch", WEIGHTS, KV_CACHE)

    def echo(self, *arguments: Any) -> list[Any]:
        return list(arguments)

    # Forward steps

    def execute_model(self, scheduler_output: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids or ())
            self._done[new.req_id] = new.num_computed_tokens
        for request in scheduler_output.finished_req_ids:
            self._prompts.pop(request, None)
            self._done.pop(request, None)
        if not scheduler_output.total_num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})
        self._scheduled = scheduler_output.num_scheduled_tokens
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        scheduled, self._scheduled = self._scheduled or {}, None
        time.sleep(STEP_S)
        good = self._touch("forward step", WEIGHTS, KV_CACHE, needs_content=True)
        sampled = []
        for request, count in scheduled.items():
            self._done[request] = self._done.get(request, 0) + count
            sampled.append([GOOD if good else BAD] if self._done[request] >= self._prompts.get(request, 0) else [])
        requests = list(scheduled)
        return ModelRunnerOutput(requests, {name: index for index, name in enumerate(requests)}, sampled)

    def take_draft_token_ids(self) -> None:
        return None

    def reset_encoder_cache(self) -> None: ...

    def synchronize_device(self) -> None: ...

    def profile(self, *_: Any, **__: Any) -> None: ...

    def update_max_model_len(self, *_: Any) -> None: ...

    def get_kv_connector_handshake_metadata(self) -> None:
        return None

    def list_loras(self) -> set[int]:
        return set()

    def check_health(self) -> None: ...


def _caller() -> Any:
    """The executor that is making its worker, in this process."""
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("self"), Executor):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["self"]
