"""What tests ask of the simulated driver: failures, sizes, statistics."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable

import pytest
from sim_driver import (
    CALLS,
    INVALID_VALUE,
    NOT_INITIALIZED,
    OK,
    OUT_OF_MEMORY,
    PAGE,
    Driver,
    HostFunction,
    Int,
    Size,
    properties,
    write,
)

import cumem_sleep
from cumem_sleep import sim
from cumem_sleep.errors import InvalidArgument, InvalidArgumentType, InvalidState


class TestControls:
    def test_failure_after_and_times(self, driver: Driver) -> None:
        sim.fail("cuMemCreate", after=2, times=2)
        answers = [driver("cuMemCreate", ctypes.byref(Size()), PAGE, properties(), 0) for _ in range(6)]
        assert answers == [OK, OK, OUT_OF_MEMORY, OUT_OF_MEMORY, OK, OK]
        assert sim.stats().live_handles == 4
        assert sim.stats().calls["cuMemCreate"] == 6

    def test_failed_call_has_no_effect(self, driver: Driver) -> None:
        address = driver.allocate()
        sim.fail("cuMemUnmap", error=INVALID_VALUE)
        assert driver("cuMemUnmap", address, PAGE) == INVALID_VALUE
        write(address, b"mapped")
        sim.fail("cuMemAddressReserve", error="CUDA_ERROR_UNKNOWN")
        before = sim.stats().reserved_bytes
        assert driver("cuMemAddressReserve", ctypes.byref(Size()), PAGE, 0, 0, 0) == "CUDA_ERROR_UNKNOWN"
        assert sim.stats().reserved_bytes == before

    def test_every_call_can_fail(self, driver: Driver) -> None:
        for name, (_, kinds) in CALLS.items():
            sim.fail(name, error="CUDA_ERROR_TIMEOUT")
            arguments = [HostFunction() if kind is HostFunction else kind(0) for kind in kinds]
            code = driver.calls[name](*arguments)
            assert code == 909, name
            assert sim.stats().calls[name] >= 1

    def test_before_init_a_rule_is_kept(self, load: Callable[..., Driver]) -> None:
        driver = load()
        sim.fail("cuDeviceGetCount")
        value = Int()
        assert driver("cuDeviceGetCount", ctypes.byref(value)) == NOT_INITIALIZED
        driver.ok("cuInit", 0)
        assert driver("cuDeviceGetCount", ctypes.byref(value)) == OUT_OF_MEMORY
        driver.ok("cuDeviceGetCount", ctypes.byref(value))

    def test_reset(self, driver: Driver) -> None:
        address = driver.allocate()
        sim.fail("cuCtxSynchronize", times=100)
        sim.reset()
        driver.ok("cuCtxSynchronize")
        after = sim.stats()
        assert {name: count for name, count in after.calls.items() if count} == {
            "cuCtxSynchronize": 1,
            "cuGetErrorName": 1,
        }
        assert after.mapped_bytes == PAGE
        write(address, b"untouched")

    @pytest.mark.parametrize(
        ("arguments", "wrong"),
        [
            ({"device_bytes": 0}, "device_bytes=0"),
            ({"device_bytes": -1}, "device_bytes=-1"),
            ({"device_bytes": 2**64}, f"device_bytes={2**64}"),
            ({"devices": 0}, "devices=0"),
            ({"devices": -3}, "devices=-3"),
            ({"devices": 65}, "devices=65"),
        ],
    )
    def test_bad_sizes(self, driver: Driver, arguments: dict[str, int], wrong: str) -> None:
        with pytest.raises(InvalidArgument, match=wrong):
            sim.configure(**arguments)
        assert driver.get(Int, "cuDeviceGetCount") == 1

    def test_bad_rules(self, driver: Driver) -> None:
        with pytest.raises(InvalidArgument, match=r"cuMemFantasy.*cuMemCreate"):
            sim.fail("cuMemFantasy")
        with pytest.raises(InvalidArgument, match="CUDA_ERROR_FANTASY"):
            sim.fail("cuMemMap", error="CUDA_ERROR_FANTASY")
        with pytest.raises(InvalidArgument, match="CUDA_SUCCESS"):
            sim.fail("cuMemMap", error=OK)
        with pytest.raises(InvalidArgument, match="after=-1"):
            sim.fail("cuMemMap", after=-1)
        with pytest.raises(InvalidArgument, match="times=0"):
            sim.fail("cuMemMap", times=0)
        with pytest.raises(InvalidArgumentType, match="call=None"):
            sim.fail(None)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentType, match="error=2"):
            sim.fail("cuMemMap", error=2)  # type: ignore[arg-type]
        driver.free(driver.allocate())

    def test_controls_refuse_a_real_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        core = types.SimpleNamespace(driver_path=lambda: "/usr/lib/libcuda.so.1", driver_is_simulated=lambda: False)
        monkeypatch.setitem(sys.modules, "cumem_sleep._core", core)
        monkeypatch.setattr(cumem_sleep, "_core", core, raising=False)
        for control in (sim.configure, sim.stats, sim.reset, lambda: sim.fail("cuInit")):
            with pytest.raises(InvalidState, match=r"/usr/lib/libcuda\.so\.1"):
                control()
