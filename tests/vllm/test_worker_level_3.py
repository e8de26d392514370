"""Level 3 with the code of vLLM's own worker and executor: nothing asks CUDA then, and all of it comes back.

This layer's own calls into the driver fail at level 3, and those of others wait for ever; a GPU is not needed for that.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from environment import Stock, skip_unless_vllm
from real_worker import PAGE, Contents, asleep, backends
from support import DEVICE_BYTES, Memory, fresh_allocator

from cumem_sleep import CuMemAllocator, OutOfDeviceMemory, _core, sim
from cumem_sleep.checkpoint.process import THIS_PROCESS
from cumem_sleep.errors import CheckpointFailed
from cumem_sleep.for_plugin import may_checkpoint

skip_unless_vllm()
pytestmark = pytest.mark.sim

WITHIN_S = 180.0
OUTSIDE = 32 << 20
SIM_FAIL = "CUMEM_SLEEP_SIM_FAIL"


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("type", "handles", "location", "device")),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ulonglong),
    )


@pytest.fixture
def outside(memory: Memory) -> Iterator[int]:
    """Bytes of device memory that no layer knows of, as CUDA's context and NCCL have."""
    address = CuMemAllocator.get_instance().malloc(PAGE)  # opens the driver
    driver, handle = ctypes.CDLL(_core.driver_path()), ctypes.c_ulonglong()
    assert driver.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(OUTSIDE), ctypes.byref(Properties(1, 0, 1)), 0) == 0
    CuMemAllocator.get_instance().free(address)
    yield OUTSIDE
    sim.configure(device_bytes=DEVICE_BYTES)
    assert driver.cuMemRelease(handle) == 0


@pytest.fixture
def fail_helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lets calls of the process fail that takes and restores checkpoints: (call, error), the first of each, or more."""

    def fail(*rules: tuple[str, str], times: int = 1) -> None:
        THIS_PROCESS._end_helper()
        monkeypatch.setenv(SIM_FAIL, ",".join(f"cuCheckpointProcess{call}:0:{error}:{times}" for call, error in rules))

    yield fail
    monkeypatch.delenv(SIM_FAIL, raising=False)
    THIS_PROCESS._end_helper()


@pytest.fixture
def executor(outside: int, worker: Any, plugged: Stock) -> Any:
    """VLLM's executor of one process, around its real worker."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    executor = UniProcExecutor.__new__(UniProcExecutor)
    executor.sleeping_tags = set()
    if not isinstance(getattr(UniProcExecutor, "is_sleeping", None), property):
        executor.is_sleeping = False
    executor.driver_worker = plugged.wrapper.__new__(plugged.wrapper)
    executor.driver_worker.worker = worker
    executor.driver_worker._worker_extension_cls = None  # as its constructor does from 0.33 on
    return executor


@pytest.fixture
def contents(executor: Any, worker: Any, memory: Memory) -> Iterator[Contents]:
    contents = Contents(worker, memory)
    memory.close()
    yield contents
    contents.free()


def is_deep() -> bool:
    return CuMemAllocator.get_instance().checkpoint is not None


def until(is_so: Any) -> None:
    end = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def nobody_waited() -> bool:
    return sim.stats().blocked_calls == 0


def ask_cuda(worker: Any) -> tuple[int, int]:
    """As a worker's method may."""
    return _core.memory_info(0)


class TestSleepsAndWakes:
    @backends
    def test_from_awake(self, executor: Any, contents: Contents, choose: Any, backend: str, memory: Memory) -> None:
        choose(backend)
        sim.reset()
        for _ in range(2):
            executor.sleep(level=3)
            assert executor.is_sleeping
            assert is_deep()
            assert asleep() == {"weights", "kv_cache"}
            executor.wake_up()
            assert not executor.is_sleeping
            assert not is_deep()
            assert asleep() == set()
            assert contents.is_there("weights")
            memory.close()
        assert nobody_waited()

    def test_from_level_1(self, executor: Any, contents: Contents) -> None:
        executor.sleep(level=1)
        executor.sleep(level=3)
        assert not is_deep(), "vLLM takes it for asleep, and calls no worker"
        sim.reset()
        assert executor.collective_rpc("cumem_sleep_deepen") == [{"rank": 3, "checkpointed": True, "why": ""}]
        assert executor.collective_rpc("cumem_sleep_deepen") == [{"rank": 3, "checkpointed": True, "why": ""}]
        executor.wake_up()
        assert contents.is_there("weights")
        assert nobody_waited()

    def test_awake_memory_is_not_put_to_sleep_without_vllms_knowledge(self, executor: Any, contents: Contents) -> None:
        (answer,) = executor.collective_rpc("cumem_sleep_deepen")
        assert not answer["checkpointed"]
        assert "2 segments (tags kv_cache, weights) still have device memory" in answer["why"]
        assert asleep() == set()

    def test_again_though_vllm_takes_it_for_awake(self, executor: Any, contents: Contents, worker: Any) -> None:
        """As after a call that timed out. VLLM's worker asks CUDA first, which would wait."""
        executor.sleep(level=3)
        asked: list[str] = []
        worker.sleep = lambda **_: asked.append("sleep")
        worker.discard = lambda *_: asked.append("discard")
        for level in (1, 2, 3):
            executor.driver_worker.sleep(level)
        executor.driver_worker.discard(("weights",))
        assert (asked, is_deep()) == ([], True)
        executor.wake_up()
        assert contents.is_there("weights")


class TestStatus:
    def test_asks_nobody(self, executor: Any, contents: Contents, outside: int) -> None:
        (before,) = executor.collective_rpc("cumem_sleep_status")
        assert not before["checkpointed"]
        executor.sleep(level=3)
        sim.reset()
        (status,) = executor.collective_rpc("cumem_sleep_status")
        assert not any(sim.stats().calls.values())
        assert json.loads(json.dumps(status)) == status
        assert status["checkpointed"]
        assert status["usage"]["weights"]["asleep_segments"] == 1
        assert status["device_total_bytes"] == before["device_total_bytes"]
        assert status["device_used_bytes"] < outside, "as after the checkpoint"
        assert is_deep()
        executor.wake_up()
        assert executor.collective_rpc("cumem_sleep_status")[0]["device_used_bytes"] >= outside


class TestOtherCalls:
    @pytest.mark.parametrize(
        "call",
        ["asks", lambda wrapper: wrapper.asks(), lambda wrapper: wrapper.model_runner and ask_cuda(wrapper)],
        ids=["by name", "by function", "by a function that looks around"],
    )
    def test_come_back_before(self, executor: Any, worker: Any, contents: Contents, call: Any) -> None:
        worker.asks = lambda: ask_cuda(worker)
        executor.sleep(level=3)
        assert is_deep()
        sim.reset()
        assert executor.collective_rpc(call)[0][1] == DEVICE_BYTES
        assert not is_deep()
        assert asleep() == {"weights", "kv_cache"}
        assert nobody_waited()
        executor.wake_up()
        assert contents.is_there("weights")

    @pytest.mark.parametrize("name", ["check_health", "synchronize_device"])
    def test_those_that_need_no_cuda_leave_it_there(
        self, executor: Any, worker: Any, contents: Contents, name: str
    ) -> None:
        if not hasattr(worker, name):
            pytest.skip("this vLLM has no such method")
        executor.sleep(level=3)
        sim.reset()
        executor.collective_rpc(name)
        assert is_deep()
        assert not any(sim.stats().calls.values())
        executor.wake_up()


class TestByItself:
    @pytest.fixture(autouse=True)
    def _soon(self, plugged: Stock, outside: int) -> None:
        fresh_allocator(deep_after_s=0.1)

    def test_goes_deeper_and_wakes(self, executor: Any, contents: Contents) -> None:
        executor.sleep(level=1)
        until(is_deep)
        executor.wake_up()
        assert contents.is_there("weights")
        assert not may_checkpoint(CuMemAllocator.get_instance())
        assert nobody_waited()

    def test_again_after_a_discard(self, executor: Any, worker: Any, contents: Contents) -> None:
        if not hasattr(worker, "discard"):
            pytest.skip("the worker of this vLLM has no `discard`")
        executor.sleep(level=1)
        executor.wake_up(["kv_cache"])
        assert not may_checkpoint(CuMemAllocator.get_instance())
        executor.collective_rpc("discard", args=(["kv_cache"],))
        until(is_deep)
        executor.wake_up()
        assert contents.is_there("weights")

    def test_not_while_a_method_runs(self, executor: Any, worker: Any, contents: Contents) -> None:
        allocator = CuMemAllocator.get_instance()
        seen = []

        def slow() -> None:
            threading.Event().wait(0.5)  # five times as long as it takes to begin
            seen.append((is_deep(), ask_cuda(worker)[1]))

        worker.slow = slow
        executor.sleep(level=1)
        executor.collective_rpc("slow")
        assert seen == [(False, DEVICE_BYTES)]
        until(is_deep)
        executor.collective_rpc("slow")
        assert seen[1:] == [(False, DEVICE_BYTES)]
        until(is_deep)
        executor.wake_up()
        assert allocator.checkpoint is None
        assert contents.is_there("weights")
        assert nobody_waited()


class TestRefused:
    @pytest.mark.parametrize("parallel", [{"world_size": 2}, {"world_size": 1, "data_parallel_size": 2}])
    @pytest.mark.parametrize("deep_after_s", [None, 0.1])
    def test_several_ranks(
        self,
        executor: Any,
        worker: Any,
        memory: Memory,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        parallel: dict[str, int],
        deep_after_s: float | None,
    ) -> None:
        monkeypatch.setattr(logging.getLogger("cumem_sleep"), "propagate", True)
        fresh_allocator(deep_after_s=deep_after_s)
        contents = Contents(worker, memory)
        worker.vllm_config.parallel_config = types.SimpleNamespace(**parallel)
        executor.sleep(level=1 if deep_after_s else 3)
        assert "one of 2 ranks" in caplog.text
        assert not may_checkpoint(CuMemAllocator.get_instance())
        assert asleep() == {"weights", "kv_cache"}
        (answer,) = executor.collective_rpc("cumem_sleep_deepen")
        assert (answer["checkpointed"], "one of 2 ranks" in answer["why"]) == (False, True)
        executor.wake_up()
        assert contents.is_there("weights")
        contents.free()

    def test_by_the_driver(self, executor: Any, contents: Contents, fail_helper: Any) -> None:
        fail_helper(("Lock", "CUDA_ERROR_NOT_PERMITTED"))
        executor.sleep(level=3)
        assert executor.is_sleeping
        assert not is_deep()
        (answer,) = executor.collective_rpc("cumem_sleep_deepen")
        assert answer == {"rank": 3, "checkpointed": True, "why": ""}, "the failure was the first call's alone"
        executor.wake_up()
        assert contents.is_there("weights")


class TestFailures:
    def test_of_a_restore(self, executor: Any, contents: Contents, fail_helper: Any) -> None:
        fail_helper(("Restore", "CUDA_ERROR_NOT_SUPPORTED"))
        executor.sleep(level=3)
        with pytest.raises(CheckpointFailed, match="call wake_up again"):
            executor.wake_up()
        assert executor.is_sleeping
        (status,) = executor.collective_rpc("cumem_sleep_status")
        assert status["checkpointed"]
        executor.wake_up()
        assert contents.is_there("weights")
        assert nobody_waited()

    def test_of_memory(self, executor: Any, contents: Contents) -> None:
        executor.sleep(level=3)
        sim.configure(device_bytes=OUTSIDE // 2)
        with pytest.raises(OutOfDeviceMemory):
            executor.wake_up()
        assert executor.is_sleeping
        assert is_deep()
        sim.configure(device_bytes=DEVICE_BYTES)
        executor.wake_up()
        assert contents.is_there("weights")

    def test_of_a_checkpoint_and_of_coming_back_from_it(
        self, executor: Any, contents: Contents, fail_helper: Any
    ) -> None:
        fail_helper(("Checkpoint", "CUDA_ERROR_NOT_PERMITTED"), ("Unlock", "CUDA_ERROR_NOT_PERMITTED"), times=2)
        executor.sleep(level=3)
        assert executor.is_sleeping, "its memory sleeps, whatever became of the rest"
        (status,) = executor.collective_rpc("cumem_sleep_status")
        assert status["checkpointed"], "nothing may call CUDA"
        assert status["device_total_bytes"] == DEVICE_BYTES, "the last value"
        executor.wake_up()
        assert not executor.is_sleeping
        assert contents.is_there("weights")
        assert nobody_waited()


class TestShutdown:
    def test_comes_back_before(
        self, executor: Any, worker: Any, contents: Contents, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []
        monkeypatch.setattr(worker.model_runner, "ensure_kv_transfer_shutdown", ask_cuda, raising=False)
        monkeypatch.setattr(type(worker), "shutdown", lambda self: asked.append(ask_cuda(self)))
        executor.sleep(level=3)
        executor.shutdown()
        assert len(asked) == 1
        assert not is_deep()

    def test_ends_at_once_if_it_cannot(
        self, executor: Any, worker: Any, contents: Contents, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Ended(BaseException): ...

        def end(code: int) -> None:
            raise Ended(code)

        monkeypatch.setattr(type(worker), "shutdown", lambda self: pytest.fail("CUDA is asked"))
        executor.sleep(level=3)
        sim.configure(device_bytes=OUTSIDE // 2)
        with monkeypatch.context() as context:
            context.setattr("os._exit", end)
            with pytest.raises(Ended):
                executor.shutdown()
        sim.configure(device_bytes=DEVICE_BYTES)
        executor.wake_up()
