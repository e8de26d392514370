"""The code of vLLM's own workers, executors and sleep-mode backends, on memory of this layer (simulated driver).

What is simulated: PyTorch's CUDA calls that read memory sizes or wait, and the model. What is real: everything of vLLM
between the executor and the allocator.
"""

from __future__ import annotations

import inspect
import json
import logging
import pathlib
import pickle
import sys
import types
from contextlib import nullcontext
from typing import Any

import pytest
from environment import Stock, skip_unless_vllm
from fake_vllm import FakeEngine
from real_worker import PAGE, Contents, asleep, backends
from support import Memory, fresh_allocator

sys.path.append(str(pathlib.Path(__file__).parents[1] / "vault"))

from running import RunningVault, eventually

from cumem_sleep import CuMemAllocator, DriverError, InvalidState, OutOfDeviceMemory, RankFailed, host_facts, sim
from cumem_sleep.vllm import compatibility, engine_group

skip_unless_vllm()
pytestmark = pytest.mark.sim


class TestWorker:
    @backends
    def test_level_2(self, worker: Any, memory: Memory, choose: Any, backend: str) -> None:
        choose(backend)
        contents, model = Contents(worker, memory), worker.model_runner.model
        worker.sleep(level=2)
        assert asleep() == {"weights", "kv_cache"}
        model.buffer.zero_()
        worker.wake_up(tags=["weights"])
        assert asleep() == {"kv_cache"}
        assert not contents.is_there("weights")
        assert model.buffer.tolist() == [0, 1, 2, 3]  # vLLM keeps buffers itself
        memory.write(contents.addresses["weights"], contents.bytes["weights"])  # reload_weights
        worker.wake_up(tags=["kv_cache"])
        assert asleep() == set()
        assert contents.is_there("weights")

    @backends
    @pytest.mark.parametrize("level", [1, 2])
    def test_runtime_state_and_graphs_stay(
        self, stock: Stock, worker: Any, memory: Memory, choose: Any, backend: str, level: int
    ) -> None:
        choose(backend)
        if backend == "cumem" and not hasattr(stock.allocator, "cudagraph_pool"):
            pytest.skip("this vLLM tags neither runtime state nor graphs")
        contents = Contents(worker, memory, "runtime", "cudagraph")
        worker.sleep(level=level)
        worker.wake_up(tags=["kv_cache"])
        assert contents.is_there("runtime")
        assert contents.is_there("cudagraph")

    def test_a_second_engine_in_one_process(self, worker: Any, memory: Memory) -> None:
        for _ in range(2):
            contents = Contents(worker, memory)
            worker.sleep(level=1)
            worker.wake_up()
            with pytest.raises(AssertionError, match="one instance per process"):
                worker._maybe_get_memory_pool_context("weights")
            contents.free()
            worker.shutdown()
            assert CuMemAllocator.get_instance().get_current_usage() == 0

    def test_shut_down_asleep(self, worker: Any, memory: Memory) -> None:
        contents = Contents(worker, memory)
        worker.sleep(level=1)
        contents.free()
        worker.shutdown()
        assert CuMemAllocator.get_instance().get_current_usage() == 0

    def test_without_sleep_mode(self, worker: Any) -> None:
        worker.model_config.enable_sleep_mode = worker.model_config.enable_cumem_allocator = False
        assert isinstance(worker._maybe_get_memory_pool_context("weights"), nullcontext)
        assert CuMemAllocator.instance is None

    @backends
    @pytest.mark.parametrize("call", ["sleep", "discard"])
    def test_a_sleep_that_is_undone_leaves_the_kv_connector_registered(
        self,
        worker: Any,
        plugged: Stock,
        memory: Memory,
        choose: Any,
        monkeypatch: pytest.MonkeyPatch,
        backend: str,
        call: str,
    ) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        class Connector:
            registered = True

            def unregister_kv_caches(self) -> None:
                self.registered = False

            def restore_kv_caches(self) -> None:
                assert "kv_cache" not in asleep()
                self.registered = True

        if call == "discard" and not hasattr(worker, "discard"):
            pytest.skip("this vLLM cannot discard")
        choose(backend)
        connector, wrapper = Connector(), plugged.wrapper.__new__(plugged.wrapper)
        wrapper.worker = worker
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        Contents(worker, memory)
        sim.fail("cuMemUnmap", error="CUDA_ERROR_UNKNOWN", times=100)
        with pytest.raises(DriverError, match="cuMemUnmap"):
            wrapper.sleep(level=1) if call == "sleep" else wrapper.discard(("kv_cache",))
        sim.reset()
        assert asleep() == set()
        assert connector.registered
        wrapper.sleep(level=1)
        wrapper.wake_up()
        assert connector.registered

    @backends
    def test_a_sleep_that_is_undone_leaves_no_copies_for_the_next_wake(
        self, worker: Any, plugged: Stock, memory: Memory, choose: Any, backend: str
    ) -> None:
        choose(backend)
        Contents(worker, memory)
        wrapper = plugged.wrapper.__new__(plugged.wrapper)
        wrapper.worker = worker
        sim.fail("cuMemUnmap", error="CUDA_ERROR_UNKNOWN", times=100)
        with pytest.raises(DriverError, match="cuMemUnmap"):
            wrapper.sleep(level=2)
        sim.reset()
        changed = worker.model_runner.model.buffer + 1
        worker.model_runner.model.buffer.copy_(changed)  # an update of the weights
        wrapper.sleep(level=1)
        wrapper.wake_up()
        assert (worker.model_runner.model.buffer == changed).all(), "the wake put back what an earlier sleep had saved"

    @backends
    @pytest.mark.parametrize("level", [1, 2])
    def test_another_process_takes_memory_meanwhile(
        self,
        worker: Any,
        plugged: Stock,
        memory: Memory,
        choose: Any,
        monkeypatch: pytest.MonkeyPatch,
        backend: str,
        level: int,
    ) -> None:
        """The worker asserts that the GPU has more free memory than before, though its own all sleeps."""
        import torch

        choose(backend)
        Contents(worker, memory)
        wrapper = plugged.wrapper.__new__(plugged.wrapper)
        wrapper.worker = worker
        numbers = iter([(100, 200), (50, 200)])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: next(numbers))
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device=None: next(numbers), raising=False)
        wrapper.sleep(level=level)
        assert asleep() == {"weights", "kv_cache"}

    def test_other_assertions_are_failures(self, worker: Any, plugged: Stock, memory: Memory) -> None:
        Contents(worker, memory)
        wrapper = plugged.wrapper.__new__(plugged.wrapper)
        wrapper.worker = worker

        def fail() -> None:
            raise AssertionError("of a layer")

        worker.model_runner.model.named_buffers = fail
        with pytest.raises(AssertionError, match="of a layer"):
            wrapper.sleep(level=2)
        assert asleep() == set()


class TestBackend:
    @pytest.fixture
    def backend(self, plugged: Stock) -> Any:
        factory = compatibility._backend_factory()
        if factory is None:
            pytest.skip("this vLLM has no registry of sleep-mode backends")
        assert {"cumem", "cumem_sleep"} <= set(factory._registry)
        return factory.create_backend(types.SimpleNamespace(sleep_mode_backend="cumem_sleep"))

    def test_says_what_survives(self, backend: Any) -> None:
        assert backend.preserves_communicators()
        assert backend.preserves_compiled_artifacts()
        assert backend.preserves_graphs_with_communicators()
        assert not backend.supports_durable_storage()

    def test_tells_its_state(self, backend: Any) -> None:
        allocator = CuMemAllocator.get_instance()
        for tag in ("weights", "kv_cache"):
            allocator.malloc(PAGE, tag)
        states = [backend.state()]
        for step in (
            lambda: backend.suspend(1),
            lambda: backend.resume(["weights"]),
            lambda: backend.resume(["kv_cache"]),
            lambda: backend.discard(("kv_cache",)),
            backend.resume,
        ):
            step()
            states.append(backend.state())
        assert states == ["RUNNING", "SUSPENDED", "SUSPENDED", "RUNNING", "SUSPENDED", "RUNNING"]

    def test_tells_its_state_after_failures(self, backend: Any) -> None:
        CuMemAllocator.get_instance().malloc(PAGE, "weights")
        sim.fail("cuMemUnmap", error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError):
            backend.suspend(1)
        assert backend.state() == "RUNNING"
        backend.suspend(2)
        sim.fail("cuMemCreate")
        with pytest.raises(OutOfDeviceMemory):
            backend.resume()
        assert backend.state() == "SUSPENDED"

    def test_is_supported_only_where_the_layer_is(self, backend: Any, plugged: Stock) -> None:
        plugged.cumem.CuMemAllocator = plugged.allocator
        factory = compatibility._backend_factory()
        with pytest.raises(ValueError, match="cumem_sleep"):
            factory.create_backend(types.SimpleNamespace(sleep_mode_backend="cumem_sleep"))


class TestExecutor:
    """Calls that reach every worker through its wrapper."""

    @pytest.fixture
    def executor(self, plugged: Stock) -> Any:
        """VLLM's executor of one process, around a worker that does nothing."""
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        executor = UniProcExecutor.__new__(UniProcExecutor)
        executor.driver_worker = plugged.wrapper.__new__(plugged.wrapper)
        executor.driver_worker.worker = types.SimpleNamespace(rank=3, compile_or_warm_up_model=lambda: "compiled")
        return executor

    @pytest.mark.parametrize("wanted", [True, False])
    def test_prepares_after_the_warm_up(self, executor: Any, make_allocator: Any, wanted: bool) -> None:
        allocator = fresh_allocator(prepare=wanted, prepare_bytes_per_second=0)
        with allocator.use_memory_pool("weights"):
            allocator.malloc(PAGE)
        assert allocator._preparation is None
        assert executor.collective_rpc("compile_or_warm_up_model") == ["compiled"]
        assert (allocator._preparation is not None) == wanted
        if allocator._preparation is not None:
            allocator._preparation.wait(30)
            assert allocator.sleep(1).copied_bytes == 0

    @pytest.mark.parametrize(
        ("left_bytes", "sleeps", "retain", "begins"),
        [(None, True, True, True), (PAGE, True, True, False), (None, False, True, False), (None, True, False, False)],
    )
    def test_by_default_it_prepares_where_there_is_room(
        self,
        executor: Any,
        make_allocator: Any,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        left_bytes: int | None,
        sleeps: bool,
        retain: bool,
        begins: bool,
    ) -> None:
        """And sleep mode is on: vLLM has this allocator for other purposes, too."""
        monkeypatch.setattr(host_facts, "mem_available_bytes", lambda **_: left_bytes)
        monkeypatch.setattr(host_facts, "cgroup_available_bytes", lambda **_: None)
        executor.driver_worker.worker.vllm_config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(enable_sleep_mode=sleeps, enable_cumem_allocator=True)
        )
        allocator = fresh_allocator(retain_backups=retain)
        with allocator.use_memory_pool("weights"):
            address = allocator.malloc(PAGE)
        content = memory.fill_random(address, PAGE)
        assert allocator._preparation is None, "the model is still being loaded"
        monkeypatch.setattr(logging.getLogger("cumem_sleep"), "propagate", True)
        with caplog.at_level(logging.INFO, "cumem_sleep"):
            executor.collective_rpc("compile_or_warm_up_model")
        said = [line for line in dict.fromkeys(caplog.messages) if "CUMEM_SLEEP_PREPARE=auto" in line]
        assert ["makes backups ahead" in line for line in said] == ([begins] if sleeps and retain else [])
        assert (allocator._preparation is not None) == begins
        if begins:
            eventually(lambda: allocator.usage()["weights"].backed_up_bytes == PAGE, "it has a backup")
            assert allocator.sleep(1).copied_bytes == 0
            allocator.wake_up()
            assert memory.read(address, PAGE) == content

    def test_a_preparation_that_cannot_begin(
        self, executor: Any, make_allocator: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.getLogger("cumem_sleep"), "propagate", True)
        allocator = fresh_allocator(prepare=True, host_budget_bytes=1)
        allocator.malloc(PAGE, "weights")
        assert executor.collective_rpc("compile_or_warm_up_model") == ["compiled"]
        assert "prepare did not begin" in caplog.text

    def test_without_memory_there_is_nothing_to_prepare(self, executor: Any, make_allocator: Any) -> None:
        assert executor.collective_rpc("compile_or_warm_up_model") == ["compiled"]
        assert CuMemAllocator.instance is None
        allocator = fresh_allocator(prepare=True)
        assert executor.collective_rpc("compile_or_warm_up_model") == ["compiled"]
        assert allocator._preparation is None

    def test_a_warm_up_that_fails(self, executor: Any, make_allocator: Any) -> None:
        allocator = fresh_allocator(prepare=True)
        allocator.malloc(PAGE, "weights")

        def fail() -> None:
            raise RuntimeError("out of registers")

        executor.driver_worker.worker.compile_or_warm_up_model = fail
        with pytest.raises(RuntimeError, match="out of registers"):
            executor.collective_rpc("compile_or_warm_up_model")
        assert allocator._preparation is None

    def test_status(self, executor: Any) -> None:
        (before,) = executor.collective_rpc("cumem_sleep_status")
        assert (before["rank"], before["devices"], before["usage"], before["operations"]) == (3, [], {}, {})
        allocator = CuMemAllocator.get_instance()
        for tag in ("weights", "kv_cache"):
            allocator.malloc(PAGE, tag)
        allocator.sleep(1)
        (status,) = executor.collective_rpc("cumem_sleep_status")
        assert json.loads(json.dumps(status)) == pickle.loads(pickle.dumps(status)) == status
        assert status.keys() - {"pid"} == (said := FakeEngine().status(0)).keys(), "the stand-in's is the same"
        assert status["usage"]["weights"].keys() == said["usage"]["weights"].keys()
        assert status["operations"]["sleep"].keys() == said["operations"]["sleep"].keys()
        assert status["simulated"]
        assert status["devices"] == [0]
        assert status["usage"]["weights"]["host_bytes"] == PAGE
        assert status["usage"]["kv_cache"]["mapped_bytes"] == 0
        assert status["operations"]["sleep"]["count"] == 1
        assert 0 <= status["device_used_bytes"] < status["device_total_bytes"]

    def test_other_executors_use_the_wrapper_too(self, plugged: Stock) -> None:
        import vllm.v1.executor.multiproc_executor as multiproc

        assert multiproc.WorkerWrapperBase is plugged.wrapper
        folder = inspect.getsourcefile(multiproc)
        assert folder is not None
        ray = pathlib.Path(folder).with_name("ray_utils.py").read_text()
        second = pathlib.Path(folder).with_name("ray_executor_v2.py")
        assert "class RayWorkerWrapper(WorkerWrapperBase)" in ray or "class RayWorkerProc(WorkerProc)" in (
            second.read_text()
        )


@backends
def test_through_the_vault(
    plugged: Stock,
    worker: Any,
    memory: Memory,
    choose: Any,
    backend: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same calls; the worker is a client of the vault, and pins nothing."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    choose(backend)
    executor = UniProcExecutor.__new__(UniProcExecutor)
    executor.driver_worker = plugged.wrapper.__new__(plugged.wrapper)
    executor.driver_worker.worker = worker
    tmp_path.chmod(0o700)
    vault = RunningVault(tmp_path)
    try:
        monkeypatch.setenv("CUMEM_SLEEP_VAULT", str(vault.socket))
        contents = Contents(worker, memory)
        memory.close()
        registered_bytes = sim.stats().registered_bytes
        for _ in range(2):
            executor.collective_rpc("sleep", kwargs={"level": 1})
            assert asleep() == {"weights", "kv_cache"}
            (status,) = executor.collective_rpc("cumem_sleep_status")
            assert status["place"] == {"vault": str(vault.socket), "lost": ""}
            assert status["usage"]["weights"]["vault_bytes"] == vault.status()["asleep_bytes"] == PAGE
            assert sim.stats().registered_bytes == registered_bytes
            executor.collective_rpc("wake_up")
            assert asleep() == set()
            assert contents.is_there("weights")
            memory.close()
        contents.free()
    finally:
        vault.close()


class TestSeveralWorkers:
    """One of the workers of an engine, whose others are not there: what it does with an error that all have."""

    @pytest.fixture
    def of_two(self, worker: Any, plugged: Stock, monkeypatch: pytest.MonkeyPatch) -> Any:
        wrapper = plugged.wrapper.__new__(plugged.wrapper)
        wrapper.worker = worker
        worker.vllm_config.parallel_config = types.SimpleNamespace(world_size=2, distributed_executor_backend="mp")
        mesh = types.SimpleNamespace(size=2, rank=0, gone=set())
        CuMemAllocator.get_instance()
        monkeypatch.setattr(engine_group, "agreement_of", lambda _: types.SimpleNamespace(mesh=mesh))
        wrapper.mesh = mesh
        return wrapper

    @pytest.mark.parametrize("call", ["sleep", "wake_up"])
    @pytest.mark.parametrize(("rank", "gone", "raises"), [(0, set(), False), (1, set(), True), (0, {1}, True)])
    def test_the_last_one_tells(
        self, of_two: Any, monkeypatch: pytest.MonkeyPatch, call: str, rank: int, gone: set[int], raises: bool
    ) -> None:
        def fail(*arguments: object, **names: object) -> None:
            raise RankFailed(call, 0, 2, "failed")

        monkeypatch.setattr(of_two.worker, call, fail)
        of_two.mesh.rank, of_two.mesh.gone = rank, gone
        with pytest.raises(RankFailed) if raises else nullcontext():
            assert getattr(of_two, call)() is None

    def test_what_only_this_one_knows_is_raised(self, of_two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object, **names: object) -> None:
            raise InvalidState("alone")

        monkeypatch.setattr(of_two.worker, "sleep", fail)
        with pytest.raises(InvalidState, match="alone"):
            of_two.sleep()
