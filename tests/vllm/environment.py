"""What the tests in real vLLM environments share: where they can run, and a vLLM that the plugin has not touched.

They want a vLLM wheel, and, since its extensions are linked against it, a `libcuda.so.1`: the simulated driver by that
name, in a folder of LD_LIBRARY_PATH. `bash .ci/run vllm` arranges all of it, for several versions of vLLM.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import MagicMock

import pytest
from fresh_process import investigate

_FOLDER = pathlib.Path(__file__).parent
_ENTRY_POINT = "[vllm.platform_plugins]\nsimulated_cuda = simulated_cuda:platform\n"
_METADATA = "Metadata-Version: 2.1\nName: simulated-cuda\nVersion: 0\n"


def skip_unless_vllm() -> None:
    """Skip the module that is being collected, and say why, where vLLM cannot be imported."""
    try:
        importlib.metadata.version("vllm")  # not an import: the folder of these tests goes by that name, too
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is not installed; `bash .ci/run vllm` tests with several versions", allow_module_level=True)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        pytest.skip(f"vLLM needs libcuda.so.1 ({error}); `bash .ci/run vllm` provides one", allow_module_level=True)


def skip_vllm_before(version: tuple[int, int]) -> None:
    """Skip the test, or the module that is being collected. `WatchedWorker` and the gate are for vLLM from 0.18 on."""
    if tuple(map(int, importlib.metadata.version("vllm").split(".")[:2])) < version:
        pytest.skip(f"it needs vLLM {version[0]}.{version[1]}", allow_module_level=True)


def simulate_cuda(folder: pathlib.Path) -> None:
    """Let vLLM find a CUDA platform without a GPU, in this process and in its children, by a plugin in `folder`."""
    information = folder / "simulated_cuda-0.dist-info"
    information.mkdir()
    (information / "entry_points.txt").write_text(_ENTRY_POINT)
    (information / "METADATA").write_text(_METADATA)
    folders = [str(folder), str(_FOLDER)]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    # vLLM does without Triton where it sees no driver, unless there is no device to see: then there may be one later.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def in_fork(work: Callable[[], object]) -> None:
    """Run it in a forked process, as vLLM's workers are where CUDA is not in use yet."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(30)
    assert process.exitcode == 0


@pytest.fixture(scope="session")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """Where a spawned process sends its `Findings`; it works beside the tests that do not need them."""
    simulate_cuda(tmp_path_factory.mktemp("simulated_cuda"))
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=investigate, args=(sender,))
    process.start()
    sender.close()
    yield receiver
    process.join(60)


@pytest.fixture(scope="session")
def vllm_version(spawned: Connection) -> tuple[int, int]:
    """The installed vLLM, with all that the tests look at imported on the simulated platform."""
    import vllm
    import vllm.device_allocator.cumem
    import vllm.v1.engine.async_llm

    # The largest part, and no part of what is tested: models and kernels.
    with pytest.MonkeyPatch.context() as context:
        context.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", MagicMock())
        import vllm.v1.worker.gpu_worker

    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int(minor)


class Stock:
    """vLLM as it is without the plugin; `restore` makes it so again."""

    def __init__(self) -> None:
        from vllm.device_allocator import cumem
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        from cumem_sleep.vllm import compatibility

        self.engine_args = EngineArgs
        self.configure = EngineArgs.create_engine_config
        self.allocator = cumem.CuMemAllocator
        self.cumem = cumem
        self.wrapper = WorkerWrapperBase
        factory = compatibility._backend_factory()
        self.registry: dict[str, Any] | None = None if factory is None else factory._registry
        self._init_device = WorkerWrapperBase.init_device
        self._wrapper_names = set(vars(WorkerWrapperBase))
        self._backends = set(self.registry or ())

    def restore(self) -> None:
        import vllm.plugins

        from cumem_sleep import CuMemAllocator
        from cumem_sleep.settings import PREFIX
        from cumem_sleep.vllm import compatibility, plugin

        vllm.plugins.plugins_loaded = False
        self.cumem.CuMemAllocator = self.allocator
        self.allocator.instance = None
        CuMemAllocator._prepares_after_pools = True
        self.engine_args.create_engine_config = self.configure
        for name in set(vars(self.wrapper)) - self._wrapper_names:
            delattr(self.wrapper, name)
        self.wrapper.init_device = self._init_device
        for name in set(self.registry or ()) - self._backends:
            del self.registry[name]  # type: ignore[index]
        os.environ.pop(plugin._SAID, None)
        (compatibility.ray_prefixes() or set()).discard(PREFIX)
        ours = logging.getLogger("cumem_sleep")
        ours.handlers.clear()
        ours.setLevel(logging.NOTSET)
        ours.propagate = True

    def is_untouched(self) -> bool:
        backends = self.registry is None or set(self.registry) == self._backends
        wrapper = set(vars(self.wrapper)) == self._wrapper_names
        return self.cumem.CuMemAllocator is self.allocator and wrapper and backends


@pytest.fixture(scope="session")
def _stock(vllm_version: tuple[int, int]) -> Stock:
    return Stock()


@pytest.fixture
def stock(_stock: Stock, make_allocator: object) -> Iterator[Stock]:
    """VLLM without the plugin before the test and after it; no memory and no allocator of ours, either."""
    _stock.restore()
    yield _stock
    _stock.restore()


@pytest.fixture
def plugged(stock: Stock) -> Stock:
    """VLLM with the plugin loaded, as vLLM loads it."""
    import vllm.plugins

    vllm.plugins.load_general_plugins()
    assert not stock.is_untouched()
    return stock
