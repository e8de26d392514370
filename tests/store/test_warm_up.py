"""What the first sleep and wake would otherwise wait for."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
from support import DRIVER, PAGE

from cumem_sleep import CuMemAllocator, DriverError, OutOfHostMemory, _core
from cumem_sleep.core.driver import open_driver
from cumem_sleep.store.copier import CopyChoosers


class TestWarmUp:
    def warm_up(self, monkeypatch: pytest.MonkeyPatch, load: Callable[[int], None] | None = None) -> CopyChoosers:
        open_driver(DRIVER)
        if load is not None:
            monkeypatch.setattr(_core, "load_copy_kernel", load)
        made = CopyChoosers(CuMemAllocator.tuning)
        made.warm_up(0)
        return made

    def test_makes_the_kernel_a_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert set(self.warm_up(monkeypatch).best_rates) == {0}

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

    monkeypatch.setattr(allocator._components.digester, "warm_up", warm_up)
    allocator._left_pool()
    assert "were not made ready" in caplog.text
    assert "cuMemHostRegister" in caplog.text
    for _ in range(2):
        allocator._left_pool()
    assert warmed == [0], "made ready once"
