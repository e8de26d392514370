"""The sleep-mode layers that are compared, with one face.

Each is used as its own documentation says, in a process that holds nothing else. Importing this module imports none of
them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

SIMULATED = os.environ.get("CUMEM_SLEEP_DRIVER") == "sim"


class NotInstalled(Exception):
    """The layer cannot be measured here; the text says why."""


class Layer:
    """What a layer can be asked for. Level 1 keeps the weights' bytes in host memory, level 2 drops them; both drop the
    KV cache.

    Raises:
        NotInstalled: on construction.
    """

    packages: ClassVar[tuple[str, ...]]  # import name and distribution name
    levels: ClassVar[tuple[int, ...]] = (1, 2)
    needs_gpu: ClassVar[bool] = True

    def __init__(self) -> None:
        found = importlib.util.find_spec(self.packages[0])
        if found is None:
            raise NotInstalled(f"{self.packages[1]} is not installed")
        if SIMULATED and self.needs_gpu and "cumem_sleep" not in Path(found.origin or "").parts:
            raise NotInstalled(f"{self.packages[1]} needs a GPU")

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.packages[1])
        except importlib.metadata.PackageNotFoundError:
            return "not installed but on the path"

    def pool(self, tag: str) -> AbstractContextManager[object]:
        """What PyTorch allocates inside belongs to the layer, under `tag`: `weights` or `kv_cache`."""
        raise NotImplementedError

    def sleep(self, level: int) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What the layer itself says of its last sleep or wake: bytes, by name, and the seconds of its `phases`."""
        return {}


class CumemSleep(Layer):
    """Our own, with its default settings: backups kept, restored bytes verified."""

    packages = ("cumem_sleep", "cumem-sleep")
    needs_gpu = False

    def __init__(self) -> None:
        super().__init__()
        from cumem_sleep import CuMemAllocator

        self._allocator = CuMemAllocator.get_instance()
        self._report: Any = None

    def pool(self, tag: str) -> AbstractContextManager[object]:
        return self._allocator.use_memory_pool(tag)

    def sleep(self, level: int) -> None:
        self._report = self._allocator.sleep(level)

    def wake(self) -> None:
        self._report = self._allocator.wake_up()

    def facts(self) -> dict[str, Any]:
        usages = self._allocator.usage().values()
        said = vars(self._report) if self._report is not None else {}
        report = {name: value for name, value in said.items() if name.endswith("_bytes")}
        return {
            **report,
            "pinned_by_itself_bytes": sum(usage.host_bytes - usage.vault_bytes for usage in usages),
            "phases": dict(said.get("phases", {})),
        }


class Vllm(Layer):
    """vLLM's own allocator, called as its worker calls it (`GPUWorker.sleep`)."""

    packages = ("vllm", "vllm")

    def __init__(self) -> None:
        super().__init__()
        from vllm.device_allocator import cumem

        if not cumem.cumem_available:  # it hides why: the same imports, for their error
            for module in ("vllm.cumem_allocator", "vllm.distributed.device_communicators.cuda_wrapper"):
                importlib.import_module(module)
            raise RuntimeError("vLLM says that its cumem allocator is not available")
        if cumem.CuMemAllocator.__module__ != cumem.__name__:
            raise RuntimeError(f"vLLM's allocator was replaced by {cumem.CuMemAllocator.__module__}'s")
        self._allocator = cumem.CuMemAllocator.get_instance()

    def pool(self, tag: str) -> AbstractContextManager[object]:
        return self._allocator.use_memory_pool(tag)

    def sleep(self, level: int) -> None:
        self._allocator.sleep(offload_tags=("weights",) if level == 1 else ())

    def wake(self) -> None:
        self._allocator.wake_up()


class TorchMemorySaver(Layer):
    """torch_memory_saver as a pluggable allocator (its hook mode `torch`), weights backed up to pinned memory.

    Whether bytes are kept is fixed where memory is allocated, so there is no level 2 for the same memory.
    """

    packages = ("torch_memory_saver", "torch_memory_saver")
    levels = (1,)
    retain_backups: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        from torch_memory_saver import torch_memory_saver

        torch_memory_saver.hook_mode = "torch"
        torch_memory_saver.retain_cpu_backup = self.retain_backups
        if bool(torch_memory_saver.retain_cpu_backup) != self.retain_backups:
            raise RuntimeError(f"retain_cpu_backup={self.retain_backups} had no effect")
        self._saver = torch_memory_saver

    def pool(self, tag: str) -> AbstractContextManager[object]:
        if tag == "kv_cache":
            return self._saver.region(tag=tag)
        return self._saver.region(tag=tag, enable_cpu_backup=True, cpu_backup_backend="pinned")

    def sleep(self, level: int) -> None:
        assert level in self.levels
        self._saver.pause()

    def wake(self) -> None:
        self._saver.resume()


class TorchMemorySaverRetained(TorchMemorySaver):
    """The same, with its host memory kept across wakes."""

    retain_backups = True


class Bare(Layer):
    """No layer: for what is measured of the machine itself."""

    packages = ("cumem_sleep", "cumem-sleep")
    needs_gpu = False

    def pool(self, _tag: str) -> AbstractContextManager[object]:
        return nullcontext()


LAYERS: dict[str, type[Layer]] = {
    "cumem-sleep": CumemSleep,
    "vllm": Vllm,
    "torch_memory_saver": TorchMemorySaver,
    "torch_memory_saver-retained": TorchMemorySaverRetained,
}
