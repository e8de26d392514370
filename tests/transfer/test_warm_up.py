"""Both ways of copying are timed before the first wake."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
from support import DRIVER, PAGE, SIMULATED

from cumem_sleep import CuMemAllocator, DriverError, OutOfDeviceMemory, OutOfHostMemory, _core, sim
from cumem_sleep.core.driver import open_driver
from cumem_sleep.transfer import copiers
from cumem_sleep.transfer.copiers import Copiers


class TestWarmUp:
    def warm_up(self, monkeypatch: pytest.MonkeyPatch, load: Callable[[int], None] | None = None) -> Copiers:
        open_driver(DRIVER)
        if load is not None:
            monkeypatch.setattr(_core, "load_copy_kernel", load)
        made = Copiers(CuMemAllocator.tuning)
        made.warm_up(0)
        return made

    def test_makes_the_kernel_a_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert set(self.warm_up(monkeypatch).best_rates) == {0}

    def test_times_both_ways_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that wakes right after its first sleep has no other way to know what the link can do."""
        monkeypatch.setattr(CuMemAllocator.tuning, "batch_bytes", PAGE)
        log: list[str] = []
        to_device, synchronize = _core.CopyStream.to_device, _core.CopyStream.synchronize
        to_device_by_kernel = _core.CopyStream.to_device_by_kernel

        def copied(stream: _core.CopyStream, address: int, block: _core.HostBlock, offset: int, nbytes: int) -> None:
            log.append(f"engine, {nbytes >> 20} MiB")
            to_device(stream, address, block, offset, nbytes)

        def by_kernel(stream: _core.CopyStream, address: int, block: _core.HostBlock, offset: int, nbytes: int) -> None:
            log.append(f"kernel, {nbytes >> 20} MiB")
            to_device_by_kernel(stream, address, block, offset, nbytes)

        def waited(stream: _core.CopyStream) -> None:
            synchronize(stream)
            log.append("wait")

        monkeypatch.setattr(_core.CopyStream, "to_device", copied)
        monkeypatch.setattr(_core.CopyStream, "to_device_by_kernel", by_kernel)
        monkeypatch.setattr(_core.CopyStream, "synchronize", waited)
        before = sim.stats() if SIMULATED else None
        best = self.warm_up(monkeypatch).best_rates[0]
        assert log == ["engine, 2 MiB", "wait", "kernel, 2 MiB", "wait"] * 3
        assert 0 < best.value < 1e15
        if before is not None:
            assert sim.stats().live_handles == before.live_handles
            assert sim.stats().registered_bytes == before.registered_bytes

    @pytest.mark.parametrize("what", ["Scratch", "pinned_block", "CopyStream"])
    def test_what_cannot_be_timed_the_wakes_find_out(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        def refuse(*_: object) -> None:
            if what == "pinned_block":
                raise OutOfHostMemory(1, 0, "budget")
            raise OutOfDeviceMemory(1, 0, 0) if what == "Scratch" else DriverError("cuStreamCreate", "", "", "")

        monkeypatch.setattr(copiers if what == "pinned_block" else _core, what, refuse)
        made = self.warm_up(monkeypatch)
        assert set(made.best_rates) == {0}
        assert made.best_rates[0].value == 0

    def test_not_where_kernels_do_not_reach_pinned_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_core, "device_info", lambda device: types.SimpleNamespace(host_pointers=False))
        warmed: list[int] = []
        assert self.warm_up(monkeypatch, warmed.append).best_rates == {}
        assert warmed == []

    def test_a_kernel_that_cannot_be_loaded(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: int) -> None:
            raise DriverError("cuModuleLoadData", "CUDA_ERROR_INVALID_PTX", "", "")

        assert self.warm_up(monkeypatch, fail).best_rates == {}
        assert "copy engine alone" in caplog.text
        assert "CUDA_ERROR_INVALID_PTX" in caplog.text


@pytest.mark.sim
def test_what_is_refused_after_a_pool_is_made_ready_after_the_next(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaving a pool is no place for an error: the model is loaded."""
    allocator.malloc(PAGE)
    monkeypatch.setattr(allocator._pools, "found", types.SimpleNamespace(is_capturing=lambda: False))
    warmed: list[int] = []
    errors = [OutOfHostMemory(1 << 20, 0, "cuMemHostRegister")]

    def warm_up(device: int) -> None:
        if errors:
            raise errors.pop()
        warmed.append(device)

    monkeypatch.setattr(allocator._layer.digester, "warm_up", warm_up)
    allocator._left_pool()
    assert "were not made ready" in caplog.text
    assert "cuMemHostRegister" in caplog.text
    for _ in range(2):
        allocator._left_pool()
    assert warmed == [0], "made ready once"
