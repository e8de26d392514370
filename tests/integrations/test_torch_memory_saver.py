"""torch_memory_saver's interface: every name of it, on the simulated driver and without PyTorch where it can be."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import AWAKE, BACKED_UP, DROPPED, PAGE, Memory, assert_no_threads
from torch_memory_saver_calls import SHIM, FakeTensor, run_with_shim

from cumem_sleep import (
    CuMemAllocator,
    DriverError,
    InvalidArgument,
    InvalidState,
    OutOfDeviceMemory,
    _core,
    sim,
)
from cumem_sleep.core import log, preload
from cumem_sleep.core.operation import Operation
from cumem_sleep.integrations.torch_memory_saver import TorchMemorySaver, configure_subprocess
from cumem_sleep.integrations.torch_memory_saver.environment import Environment
from cumem_sleep.regions import Regions
from cumem_sleep.vault.files import filesystem_of

sys.path.append(str(pathlib.Path(__file__).parents[1] / "vault"))

from running import RunningVault

Sleep = _core.Segment.Sleep


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("TMS_"):
            monkeypatch.delenv(name)


@pytest.fixture
def saver(allocator: CuMemAllocator) -> Iterator[TorchMemorySaver]:
    yield TorchMemorySaver()
    allocator.regions.set_margin_bytes(0)


def malloc(saver: TorchMemorySaver, nbytes: int = PAGE, **region: object) -> int:
    with saver.region(**region):  # type: ignore[arg-type]
        return CuMemAllocator.get_instance().malloc(nbytes)


def states() -> dict[int, Sleep]:
    return {segment.address: segment.sleep for segment in _core.segments()}


class TestRegions:
    def test_the_default_is_called_default_and_not_backed_up(self, saver: TorchMemorySaver) -> None:
        address = malloc(saver)
        saver.pause("default")
        assert states() == {address: DROPPED}
        saver.resume("default")
        assert states() == {address: AWAKE}

    def test_pause_and_resume_keep_address_and_bytes(self, saver: TorchMemorySaver, memory: Memory) -> None:
        address = malloc(saver, tag="weights", enable_cpu_backup=True)
        content = memory.fill_random(address, PAGE)
        saver.pause()
        assert states() == {address: BACKED_UP}
        saver.resume()
        assert memory.read(address, PAGE) == content

    @pytest.mark.sim
    @pytest.mark.parametrize(("level", "asked"), [(logging.INFO, 2), (logging.WARNING, 0)])
    def test_what_is_left_is_looked_for_only_if_the_log_says_it(
        self, saver: TorchMemorySaver, caplog: pytest.LogCaptureFixture, level: int, asked: int
    ) -> None:
        malloc(saver)
        malloc(saver, tag="stays awake")
        with caplog.at_level(level, "cumem_sleep"):
            sim.reset()
            saver.pause("default")
            assert sim.stats().calls["cuMemGetInfo"] == asked
        assert ("left on the GPU" in caplog.text) == bool(asked)
        saver.resume()

    @pytest.mark.parametrize("tag", [None, ""])
    def test_no_tag_means_all(self, saver: TorchMemorySaver, tag: str | None) -> None:
        malloc(saver, tag="a")
        malloc(saver, tag="b", enable_cpu_backup=True)
        saver.pause(tag)
        assert set(states().values()) == {DROPPED, BACKED_UP}
        saver.resume(tag)
        assert set(states().values()) == {AWAKE}

    def test_a_tag_that_no_region_has_is_passed_over(self, saver: TorchMemorySaver) -> None:
        """As when SGLang pauses `cuda_graph` without having captured any."""
        address = malloc(saver, tag="a")
        saver.pause("cuda_graph")
        saver.resume("cuda_graph")
        assert states() == {address: AWAKE}

    def test_a_call_is_one_operation(self, saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
        """It waits for the lock, and for a thread, once; where it is passed over, never."""
        malloc(saver, tag="a")
        begun: list[object] = []
        run, run_operation = log.run, Operation.run
        monkeypatch.setattr(log, "run", lambda lock, work: (begun.append(work), run(lock, work))[1])
        monkeypatch.setattr(Operation, "run", lambda operation: (begun.append(operation), run_operation(operation))[1])
        for call, tag, operations in (
            (saver.pause, "a", 1),
            (saver.pause, "cuda_graph", 0),
            (saver.resume, "cuda_graph", 0),
            (saver.resume, "a", 1),
        ):
            begun.clear()
            call(tag)
            assert len(begun) == operations

    def test_disable_leaves_the_region_and_comes_back(self, saver: TorchMemorySaver) -> None:
        allocator = CuMemAllocator.get_instance()
        with saver.region("a"):
            with saver.disable():
                outside = allocator.malloc(PAGE)
            inside = allocator.malloc(PAGE)
        saver.pause()
        assert states() == {outside: AWAKE, inside: DROPPED}
        saver.resume()

    def test_disable_outside_of_a_region_is_refused(self, saver: TorchMemorySaver) -> None:
        with pytest.raises(InvalidState, match="outside of a region"), saver.disable():
            pass


class TestCudaGraphs:
    @pytest.mark.sim
    @pytest.mark.parametrize("hooked", [True, False])
    @pytest.mark.parametrize(
        ("said", "state"),
        [({}, BACKED_UP), ({"enable_cpu_backup": True}, BACKED_UP), ({"enable_cpu_backup": False}, DROPPED)],
    )
    def test_are_backed_up_unless_it_is_said_that_they_are_not(
        self,
        saver: TorchMemorySaver,
        monkeypatch: pytest.MonkeyPatch,
        hooked: bool,
        said: dict[str, bool],
        state: Sleep,
    ) -> None:
        """Kernels keep state in their memory, written at the capture, which replays only read."""
        allocator = CuMemAllocator.get_instance()
        graph = SimpleNamespace(cuda=SimpleNamespace(graph=lambda *_, **__: contextlib.nullcontext()))
        monkeypatch.setitem(sys.modules, "torch", graph)
        monkeypatch.setattr(preload, "serve", lambda: hooked)
        pools = SimpleNamespace(pool_of_one_graph=lambda: contextlib.nullcontext((0, 1)))
        with monkeypatch.context() as patch:
            patch.setattr(allocator._pools, "found", pools)
            with saver.cuda_graph(object(), tag="cuda_graph", **said):  # as SGLang captures: tag alone
                address = allocator.malloc(PAGE)
        saver.pause("cuda_graph")
        assert states() == {address: state}
        saver.resume("cuda_graph")


class _Wakes:
    """Counts the tries of a resume; `after_failure` is called after each one that failed."""

    def __init__(self, patch: pytest.MonkeyPatch, after_failure: Callable[[], object]) -> None:
        self.errors: list[BaseException] = []
        wake = Regions.wake

        def watched(*arguments: Any, **options: Any) -> object:
            try:
                return wake(*arguments, **options)
            except BaseException as error:
                self.errors.append(error)
                assert set(states().values()) == {BACKED_UP}
                after_failure()
                raise

        patch.setattr(Regions, "wake", watched)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C is heard, also where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.sim
class TestResumeWithoutRoom:
    """As while the trainer is still releasing its memory."""

    @pytest.fixture
    def saver_of(self, make_allocator: Callable[..., CuMemAllocator]) -> Callable[..., TorchMemorySaver]:
        def paused(**settings: object) -> TorchMemorySaver:
            make_allocator(**settings)
            saver = TorchMemorySaver()
            malloc(saver, tag="weights", enable_cpu_backup=True)
            return saver

        return paused

    @pytest.fixture
    def memory_of_others(self) -> Iterator[Callable[[], _core.Scratch]]:
        """Takes all that is free."""
        taken: list[_core.Scratch] = []

        def take() -> _core.Scratch:
            taken.append(_core.Scratch(0, _core.memory_info(0)[0] // PAGE * PAGE))
            return taken[-1]

        yield take
        for each in taken:
            each.close()

    def test_it_goes_on_once_there_is_room(
        self,
        saver_of: Callable[..., TorchMemorySaver],
        memory_of_others: Callable[[], _core.Scratch],
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        saver = saver_of()
        ((address, _),) = states().items()
        content = memory.fill_random(address, PAGE)
        saver.pause()
        others = memory_of_others()
        wakes = _Wakes(monkeypatch, lambda: others.close() if len(wakes.errors) == 2 else None)
        with caplog.at_level(logging.WARNING, "cumem_sleep"):
            saver.resume("weights")
        assert [type(error) for error in wakes.errors] == [OutOfDeviceMemory] * 2
        assert memory.read(address, PAGE) == content
        (said,) = [message for message in caplog.messages if "resume" in message]
        assert said.startswith("resume waits up to 10 s for device memory: cuMemCreate failed")

    @pytest.mark.parametrize(("wait_s", "slept"), [(0, []), (0.5, [0.2, 0.2, 0.1])])
    def test_it_raises_at_the_deadline_and_all_is_asleep(
        self,
        saver_of: Callable[..., TorchMemorySaver],
        memory_of_others: Callable[[], _core.Scratch],
        monkeypatch: pytest.MonkeyPatch,
        wait_s: float,
        slept: list[float],
    ) -> None:
        saver = saver_of(resume_wait_s=wait_s)
        saver.pause()
        others = memory_of_others()
        wakes, pauses = _Wakes(monkeypatch, lambda: None), list[float]()
        clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
        monkeypatch.setattr("cumem_sleep.integrations.torch_memory_saver.saver.time", clock)
        with pytest.raises(OutOfDeviceMemory, match="1 sleeping segment"):
            saver.resume()
        assert pauses == pytest.approx(slept)
        assert len(wakes.errors) == len(slept) + 1
        others.close()
        saver.resume()
        assert set(states().values()) == {AWAKE}

    @pytest.mark.usefixtures("interrupts")
    def test_the_wait_can_be_interrupted(
        self,
        saver_of: Callable[..., TorchMemorySaver],
        memory_of_others: Callable[[], _core.Scratch],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        saver = saver_of(resume_wait_s=24 * 3600)
        saver.pause()
        others = memory_of_others()
        here = threading.get_ident()
        interrupt = threading.Timer(0.02, lambda: signal.pthread_kill(here, signal.SIGINT))
        wakes = _Wakes(monkeypatch, lambda: interrupt.start() if len(wakes.errors) == 1 else None)
        with pytest.raises(KeyboardInterrupt):
            saver.resume()
        interrupt.join()
        assert set(states().values()) == {BACKED_UP}
        others.close()
        saver.resume()

    def test_other_errors_are_raised_at_once(
        self, saver_of: Callable[..., TorchMemorySaver], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saver = saver_of()
        saver.pause()
        sim.fail("cuMemMap", error="CUDA_ERROR_UNKNOWN")
        wakes = _Wakes(monkeypatch, lambda: None)
        with pytest.raises(DriverError, match="cuMemMap failed with CUDA_ERROR_UNKNOWN"):
            saver.resume()
        assert len(wakes.errors) == 1
        saver.resume()


class TestRetention:
    def test_what_is_not_restored_leaves_none(self, saver: TorchMemorySaver) -> None:
        """A trainer is about to write new weights there."""
        allocator = CuMemAllocator.get_instance()
        saver.retain_cpu_backup = True
        malloc(saver, enable_cpu_backup=True)
        saver.pause()
        saver.resume(restore=False)
        assert allocator.totals()["wake"].bytes["restored"] == 0
        assert allocator._store.memory.bytes == 0

    def test_is_asked_for_at_the_resume(self, saver: TorchMemorySaver) -> None:
        """Switched off, it concerns what is resumed after that."""
        allocator = CuMemAllocator.get_instance()
        malloc(saver, enable_cpu_backup=True)
        saver.pause()
        saver.retain_cpu_backup = True
        saver.resume()
        saver.retain_cpu_backup = False
        allocator.usage()
        assert allocator._store.memory.bytes == PAGE
        saver.pause()
        saver.resume()
        assert allocator._store.memory.bytes == 0

    def test_the_variable_switches_it_on(self, saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TMS_RETAIN_CPU_BACKUP", "1")
        assert saver.retain_cpu_backup is True


class TestCpuBackup:
    @pytest.fixture(autouse=True)
    def torch(self) -> object:
        return pytest.importorskip("torch", reason="get_cpu_backup returns tensors: pip install torch")

    @pytest.mark.parametrize("zero_copy", [False, True])
    def test_is_read_while_it_sleeps(
        self, saver: TorchMemorySaver, memory: Memory, torch: object, zero_copy: bool
    ) -> None:
        address = malloc(saver, enable_cpu_backup=True)
        values = np.random.default_rng(0).standard_normal((10, 20, 30)).astype(np.float32)
        memory.write(address + 512, values.tobytes())
        tensor = FakeTensor(address + 512, values.shape, torch.float32, values.nbytes)  # type: ignore[attr-defined]
        assert saver.get_cpu_backup(tensor) is None
        saver.pause()
        backup = saver.get_cpu_backup(tensor, zero_copy=zero_copy)
        assert (backup.device.type, backup.dtype, tuple(backup.shape)) == ("cpu", tensor.dtype, tensor.shape)
        assert np.array_equal(backup.numpy(), values)
        del backup
        saver.resume()
        assert saver.get_cpu_backup(tensor) is None

    def test_stays_readable_where_it_is_retained(self, saver: TorchMemorySaver, memory: Memory, torch: object) -> None:
        saver.retain_cpu_backup = True
        address = malloc(saver, enable_cpu_backup=True)
        content = memory.fill_random(address, PAGE)
        tensor = FakeTensor(address, (PAGE,), torch.uint8, PAGE)  # type: ignore[attr-defined]
        saver.pause()
        first = saver.get_cpu_backup(tensor, zero_copy=True).data_ptr()
        saver.resume()
        assert saver.get_cpu_backup(tensor, zero_copy=True).data_ptr() == first
        memory.fill_random(address, PAGE)
        assert saver.get_cpu_backup(tensor).numpy().tobytes() == content

    def test_what_cannot_be_had_is_refused(self, saver: TorchMemorySaver, torch: object) -> None:
        address = malloc(saver)
        saver.pause()
        of_bytes = torch.uint8  # type: ignore[attr-defined]
        with pytest.raises(InvalidState, match="without a backup"):
            saver.get_cpu_backup(FakeTensor(address, (4,), of_bytes, 4))
        with pytest.raises(InvalidArgument, match="not in one segment"):
            saver.get_cpu_backup(FakeTensor(4096, (4,), of_bytes, 4))
        with pytest.raises(InvalidArgument, match="contiguous"):
            saver.get_cpu_backup(FakeTensor(address, (4,), of_bytes, 4, contiguous=False))
        with pytest.raises(InvalidArgument, match="on a GPU"):
            saver.get_cpu_backup(torch.zeros(4))  # type: ignore[attr-defined]
        saver.resume()


class TestTheRestOfTheInterface:
    def test_without_a_vault_disk_backups_are_refused_by_name(
        self, saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(NotImplementedError, match=r"enable_disk_backup.*vault --spill"):
            malloc(saver, enable_disk_backup=True)
        with pytest.raises(NotImplementedError, match="set_disk_backup_dir"):
            saver.set_disk_backup_dir("/tmp")
        monkeypatch.setenv("TMS_INIT_ENABLE_DISK_BACKUP", "1")
        with pytest.raises(NotImplementedError, match="TMS_INIT_ENABLE_DISK_BACKUP"):
            TorchMemorySaver().pause()

    @pytest.mark.slow
    @pytest.mark.parametrize("spills", [True, False])
    def test_disk_backups_go_to_a_vault_that_spills(
        self, spills: bool, tmp_path: pathlib.Path, make_allocator: Callable[..., CuMemAllocator], memory: Memory
    ) -> None:
        files = tmp_path / "files"
        files.mkdir(mode=0o700)
        tmp_path.chmod(0o700)
        if filesystem_of(files) in ("tmpfs", "ramfs"):
            pytest.skip("pytest's folder is in memory")
        vault = RunningVault(tmp_path, "64MiB", *(["--spill", str(files), "--spill-size", "64MiB"] if spills else []))
        try:
            make_allocator(vault=str(vault.socket))
            saver = TorchMemorySaver()
            if not spills:
                with pytest.raises(NotImplementedError, match=r"vault --spill"):
                    malloc(saver, enable_disk_backup=True)
                return
            saver.set_disk_backup_dir(str(tmp_path / "other"))
            address = malloc(saver, enable_disk_backup=True)
            content = memory.fill_random(address, PAGE)
            saver.pause()
            assert states() == {address: BACKED_UP}
            saver.resume()
            assert memory.read(address, PAGE) == content
            with pytest.raises(InvalidArgument, match="not both"):
                malloc(saver, enable_cpu_backup=True, enable_disk_backup=True)
            CuMemAllocator.get_instance().free(address)
        finally:
            vault.close()

    @pytest.mark.parametrize(
        ("named", "by_environment", "at_once"),
        [("mmap", "", True), ("pinned", "", False), (None, "", False), (None, "mmap", True), ("pinned", "mmap", False)],
    )
    def test_host_memory_of_mmap_has_gone_back_when_resume_returns(
        self,
        monkeypatch: pytest.MonkeyPatch,
        allocator: CuMemAllocator,
        named: str | None,
        by_environment: str,
        at_once: bool,
    ) -> None:
        monkeypatch.setenv("TMS_INIT_CPU_BACKUP_BACKEND", by_environment)
        monkeypatch.setattr(CuMemAllocator.tuning, "release_later_bytes", PAGE)
        monkeypatch.setattr(CuMemAllocator.tuning, "before_releases_s", 1000.0)  # so its thread does nothing
        saver = TorchMemorySaver()
        malloc(saver, tag="x", enable_cpu_backup=True, cpu_backup_backend=named)
        malloc(saver, tag="other", enable_cpu_backup=True, cpu_backup_backend="pinned")
        try:
            for tag, goes in (("other", False), ("x", at_once)):
                saver.pause(tag)
                assert allocator._store.memory.bytes >= PAGE
                saver.resume(tag)
                assert (allocator._store.memory.bytes == 0) is goes, tag
            saver.pause()
            saver.resume()
            assert (allocator._store.memory.bytes == 0) is at_once
        finally:  # or later tests would wait for that thread
            allocator._store.memory.stop()
        assert_no_threads("cumem-give-back")

    def test_what_is_retained_stays_with_mmap_too(self, saver: TorchMemorySaver, allocator: CuMemAllocator) -> None:
        saver.retain_cpu_backup = True
        malloc(saver, enable_cpu_backup=True, cpu_backup_backend="mmap")
        saver.pause()
        saver.resume()
        assert allocator._store.memory.bytes == PAGE

    def test_other_backends_are_refused(self, saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="enable_cpu_backup"), saver.region(cpu_backup_backend="mmap"):
            pass
        with pytest.raises(ValueError, match="'disk'"), saver.region("x", True, cpu_backup_backend="disk"):
            pass
        monkeypatch.setenv("TMS_INIT_CPU_BACKUP_BACKEND", "disk")
        with pytest.raises(InvalidArgument, match="TMS_INIT_CPU_BACKUP_BACKEND='disk'"):
            TorchMemorySaver().pause()

    def test_the_margin_can_be_set_and_not_read(self, saver: TorchMemorySaver) -> None:
        saver.memory_margin_bytes = _core.memory_info(0)[1] if _core.driver_is_open() else 1 << 60
        with pytest.raises(OutOfDeviceMemory):
            malloc(saver)
        saver.memory_margin_bytes = 0
        malloc(saver)
        with pytest.raises(NotImplementedError):
            _ = saver.memory_margin_bytes

    def test_hook_modes(self, saver: TorchMemorySaver) -> None:
        for mode in ("torch", "preload"):
            saver.hook_mode = mode
            malloc(saver, tag=mode)
        assert saver.enabled
        with pytest.raises(InvalidArgument, match="'other'"):
            saver.hook_mode = "other"

    def test_the_first_use_logs_who_serves(self, saver: TorchMemorySaver, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "cumem_sleep"):
            saver.pause()
            saver.pause()
        said = [message for message in caplog.messages if "torch_memory_saver" in message]
        assert said == [
            "cumem-sleep: torch_memory_saver is served by this layer (without a hook in front of cudaMalloc)"
        ]

    def test_a_signal_handler_may_call_during_the_first_use(
        self, saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read, asked = Environment.read, []

        def interrupted() -> Environment:
            if not asked:
                asked.append(True)
                asked.append(saver.retain_cpu_backup)
            return read()

        monkeypatch.setattr(Environment, "read", interrupted)
        saver.pause()
        assert asked == [True, False]

    def test_configure_subprocess_puts_the_hook_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("LD_PRELOAD", raising=False)
        with configure_subprocess():
            hook = os.environ["LD_PRELOAD"]
        assert os.path.dirname(hook) == str(SHIM)
        assert "LD_PRELOAD" not in os.environ
        monkeypatch.setenv("LD_PRELOAD", "/other.so")
        with configure_subprocess():
            assert os.environ["LD_PRELOAD"] == f"{hook}:/other.so"
        assert os.environ["LD_PRELOAD"] == "/other.so"

    @pytest.mark.parametrize(
        ("text", "on"), [("1", True), ("true", True), ("YES", True), ("0", False), ("no", False), ("", False)]
    )
    def test_variables_that_are_on_or_off(self, text: str, on: bool) -> None:
        assert Environment.read({"TMS_INIT_ENABLE": text}).enable is on

    def test_a_variable_that_is_neither_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="TMS_RETAIN_CPU_BACKUP='2'"):
            Environment.read({"TMS_RETAIN_CPU_BACKUP": "2"})

    def test_a_process_that_is_to_be_a_region_needs_the_hook(
        self, saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TMS_INIT_ENABLE", "1")
        with pytest.raises(InvalidState, match="LD_PRELOAD="):
            saver.pause()


class TestPastTheInterface:
    """What its own tests, and code of others, take from `_impl`."""

    def test_a_region_without_a_pool_of_pytorchs(self, saver: TorchMemorySaver) -> None:
        allocator = CuMemAllocator.get_instance()
        saver.pause()
        assert saver._impl is not None
        cdll = saver._impl._binary_wrapper.cdll
        with saver._impl._with_region_config(tag="a", enable_cpu_backup=True, cpu_backup_backend="mmap"):
            assert cdll.tms_get_interesting_region()
            assert (cdll.tms_get_current_tag(), cdll.tms_get_cpu_backup_backend()) == (b"a", b"mmap")
            kept = allocator.malloc(PAGE)
            with saver._impl._with_region_config(tag="b", enable_cpu_backup=False):
                lost = allocator.malloc(PAGE)
        assert not cdll.tms_get_interesting_region()
        assert cdll.tms_get_cpu_backup_backend() == b"pinned"
        assert saver._impl.tags_of_mmap == {"a"}
        saver.pause("a")
        assert states() == {kept: BACKED_UP, lost: AWAKE}
        saver.pause()
        assert states() == {kept: BACKED_UP, lost: DROPPED}
        saver.resume()

    def test_what_it_refuses(self, saver: TorchMemorySaver) -> None:
        saver.pause()
        assert saver._impl is not None
        with pytest.raises(NotImplementedError, match="enable_disk_backup"):
            saver._impl._with_region_config("a", enable_cpu_backup=False, enable_disk_backup=True)
        with pytest.raises(InvalidArgument, match="needs enable_cpu_backup"):
            saver._impl._with_region_config("a", enable_cpu_backup=False, cpu_backup_backend="mmap")

    def test_no_pool_is_held_whose_memory_would_have_to_be_let_go(self, saver: TorchMemorySaver) -> None:
        address = malloc(saver, tag="a", enable_cpu_backup=True)
        assert saver._impl is not None
        saver._impl._mem_pools.pop(("a", True, False, "pinned", 0))
        saver._impl._mem_pools.clear()
        assert states() == {address: AWAKE}

    def test_functions_that_there_are_not_are_said_not_to_be(self, saver: TorchMemorySaver) -> None:
        saver.pause()
        assert saver._impl is not None
        cdll = saver._impl._binary_wrapper.cdll
        assert not hasattr(cdll, "tms_xpu_affected_devices")
        assert not hasattr(cdll, "cudaOfNoRuntime")


class TestBesideVllm:
    def test_each_has_its_own_weights(self, saver: TorchMemorySaver, memory: Memory) -> None:
        """An engine with vLLM's calls, and a trainer with these, in one process."""
        allocator = CuMemAllocator.get_instance()
        trainers = malloc(saver, tag="weights", enable_cpu_backup=True)
        assert allocator.get_current_usage() == 0  # else vLLM would not start
        engines = allocator.malloc(PAGE, tag="weights")
        contents = {address: memory.fill_random(address, PAGE) for address in (trainers, engines)}
        saver.pause("weights")
        assert states() == {trainers: BACKED_UP, engines: AWAKE}
        allocator.sleep(1)
        saver.resume("weights")
        assert states() == {trainers: AWAKE, engines: BACKED_UP}
        allocator.wake_up()
        assert {address: memory.read(address, PAGE) for address in contents} == contents


@pytest.mark.slow
class TestTheShim:
    def test_a_package_of_that_name_is_found_in_child_processes_too(self) -> None:
        process = run_with_shim(
            """
            import subprocess, sys, torch_memory_saver
            code = "import torch_memory_saver as t; print(t.__file__, type(t.torch_memory_saver).__module__)"
            assert "torch" not in sys.modules
            subprocess.run([sys.executable, "-c", code], check=True)
            """
        )
        assert process.returncode == 0, process.stderr
        file, module = process.stdout.split()
        assert file == str(SHIM / "torch_memory_saver" / "__init__.py")
        assert module == "cumem_sleep.integrations.torch_memory_saver.saver"

    def test_it_has_the_modules_that_others_import(self) -> None:
        process = run_with_shim(
            """
            from torch_memory_saver import configure_subprocess, torch_memory_saver
            from torch_memory_saver.entrypoint import TorchMemorySaver
            from torch_memory_saver.hooks.base import HookMode
            from torch_memory_saver.hooks import mode_preload
            from torch_memory_saver.utils import change_env, get_binary_path_from_package, is_xpu
            import os
            assert isinstance(torch_memory_saver, TorchMemorySaver) and not is_xpu()
            print(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
            with configure_subprocess():
                print(os.environ["LD_PRELOAD"])
            with mode_preload.configure_subprocess():
                print(os.environ["LD_PRELOAD"])
            mode_preload.get_binary_path_from_package = lambda _: "/another.so"  # as its own tests do
            with mode_preload.configure_subprocess():
                print(os.environ["LD_PRELOAD"])
            """
        )
        assert process.returncode == 0, process.stderr
        library = str(SHIM / "torch_memory_saver_hook_mode_preload.abi3.so")
        assert process.stdout.split() == [library, library, library, "/another.so"]
