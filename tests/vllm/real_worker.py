"""VLLM's real GPU worker without a model and without a GPU, and what it allocates."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from typing import Any

import pytest
from environment import Stock
from support import Memory

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.core.pools import Pools
from cumem_sleep.vllm import compatibility

PAGE = 2 << 20


class Model:
    """Stands for a PyTorch model: what a worker asks of one when it sleeps."""

    def __init__(self) -> None:
        import torch

        self.buffer = torch.arange(4.0)

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        yield "scale", self.buffer

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        yield from ()


class ModelRunner:
    """Stands for vLLM's model runner."""

    def __init__(self) -> None:
        self.model = Model()
        self.kv_cache_wakes = 0
        self.shut_down = False

    def get_draft_model(self) -> None:
        return None

    def post_kv_cache_wake_up(self) -> None:
        self.kv_cache_wakes += 1

    def shutdown(self) -> None:
        self.shut_down = True

    def ensure_kv_transfer_shutdown(self) -> None: ...


@pytest.fixture
def worker(plugged: Stock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """VLLM's real GPU worker, without the constructor, which wants a GPU."""
    import torch
    from vllm.v1.worker import gpu_worker

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: _core.memory_info(0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device=None: _core.memory_info(0), raising=False)
    model_config = types.SimpleNamespace(
        enable_sleep_mode=True,
        enable_cumem_allocator=True,
        enable_nccl_comm_suspend=False,
        sleep_mode_backend="cumem",
        sleep_preserve_parameter_names=[],
    )
    worker = gpu_worker.Worker.__new__(gpu_worker.Worker)
    worker.vllm_config = types.SimpleNamespace(model_config=model_config)
    worker.model_config = model_config
    worker.cache_config = types.SimpleNamespace(cache_dtype="auto")
    worker.model_runner = ModelRunner()
    worker.rank = 3
    worker.profiler = worker.weight_transfer_engine = worker.worker_sentinel = None
    worker.elastic_ep_executor = types.SimpleNamespace(shutdown=lambda: None)
    worker._sleep_mode_backend = None
    worker._sleep_saved_buffers = {}
    worker._sleep_saved_parameters = {}
    worker._sleep_saved_draft_buffers = {}
    worker._sleep_rebuild_draft_metadata_buffers = False
    return worker


class Contents:
    """Memory of every tag that vLLM uses, allocated in the worker's own pools, and what was written to it."""

    def __init__(self, worker: Any, memory: Memory, *more_tags: str) -> None:
        import torch

        self._memory = memory
        self.addresses: dict[str, int] = {}
        self.bytes: dict[str, bytes] = {}
        for tag in ("weights", "kv_cache", *more_tags):
            with worker._maybe_get_memory_pool_context(tag):
                self.addresses[tag] = CuMemAllocator.get_instance().malloc(PAGE)
            self.bytes[tag] = memory.fill_random(self.addresses[tag], PAGE)
        cache = torch.frombuffer((ctypes.c_char * PAGE).from_address(self.addresses["kv_cache"]), dtype=torch.uint8)
        worker.model_runner.kv_caches = [cache]

    def is_there(self, tag: str) -> bool:
        return self._memory.read(self.addresses[tag], PAGE) == self.bytes[tag]

    def free(self) -> None:
        for address in self.addresses.values():
            CuMemAllocator.get_instance().free(address)


class Models:
    """A model and its draft model in simulated device memory, and the wrapper of vLLM's worker around them."""

    def __init__(self, worker: Any, stock: Stock) -> None:
        import torch

        self.worker = worker
        self._segments: dict[str, int] = {}
        self._blocks: dict[str, list[tuple[int, int]]] = {}  # of PyTorch's, as its allocator would have them
        for tag in ("weights", "kv_cache"):
            with worker._maybe_get_memory_pool_context(tag):
                self._segments[tag] = CuMemAllocator.get_instance().malloc(PAGE)
            self._blocks[tag] = []
        self.model, self.draft = torch.nn.Module(), torch.nn.Module()
        runner = worker.model_runner
        runner.model, runner.drafter = self.model, types.SimpleNamespace(model=self.draft)
        runner.get_draft_model = lambda: self.draft
        self.runs = 0
        worker.execute_model = self._run
        self.wrapper = stock.wrapper.__new__(stock.wrapper)
        self.wrapper.worker = worker
        self.values: dict[int, Any] = {}

    def in_use(self) -> dict[int, list[tuple[int, int]]]:
        """As `Pools.in_use`."""
        return {address: self._blocks[tag] for tag, address in self._segments.items()}

    def _run(self, scheduled: Any) -> None:
        self.runs += 1

    def tensor(self, like: Any, tag: str = "weights") -> Any:
        """A copy of `like` in a block of its own of memory of this tag."""
        import torch

        nbytes, blocks = like.numel() * like.element_size(), self._blocks[tag]
        begin = -(-blocks[-1][1] // 512) * 512 if blocks else 0  # as PyTorch's allocator
        blocks.append((begin, begin + max(nbytes, 1)))
        block = (ctypes.c_char * max(nbytes, 1)).from_address(self._segments[tag] + begin)
        tensor = torch.frombuffer(block, dtype=torch.uint8)[:nbytes].view(like.dtype).view(like.shape)
        tensor.copy_(like)
        self.values[tensor.data_ptr()] = like
        return tensor

    def add(
        self, module: Any, name: str, *shape: int, dtype: Any = None, value: Any = None, buffer: bool = False
    ) -> Any:
        """A parameter with its own memory."""
        import torch

        tensor = self.tensor(torch.randn(shape).to(dtype or torch.bfloat16) if value is None else value)
        if buffer:
            module.register_buffer(name, tensor)
        else:
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
            module.register_parameter(name, tensor)
        return tensor

    def load(self, module: Any, *but: str) -> None:
        """As a loader: each parameter under its name."""
        for name, parameter in module.named_parameters():
            if name not in but:
                parameter.data.copy_(self.values[parameter.data_ptr()])

    def sleep_and_wake(self, level: int = 2, tags: Any = None) -> None:
        self.wrapper.sleep(level=level)
        self.wrapper.wake_up(tags)

    @property
    def not_loaded(self) -> str:
        status = self.wrapper.cumem_sleep_status()
        return str(status["not_loaded"])


@pytest.fixture
def models(worker: Any, plugged: Stock, monkeypatch: pytest.MonkeyPatch) -> Models:
    models = Models(worker, plugged)
    monkeypatch.setattr(Pools, "in_use", models.in_use)
    return models


def asleep() -> set[str]:
    return {tag for tag, usage in CuMemAllocator.get_instance().usage().items() if usage.asleep_segments}


backends = pytest.mark.parametrize("backend", ["cumem", "cumem_sleep"])


@pytest.fixture
def choose(worker: Any) -> Any:
    """Chooses vLLM's sleep-mode backend by name; skips where there is no choice."""

    def choose(backend: str) -> None:
        if backend != "cumem" and compatibility._backend_factory() is None:
            pytest.skip("this vLLM has no registry of sleep-mode backends")
        worker.model_config.sleep_mode_backend = backend

    return choose
