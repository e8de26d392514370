"""The simulated driver's start, version, errors and table of calls."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable

import pytest
from sim_driver import CALLS, ILLEGAL_ADDRESS, INVALID_VALUE, NOT_INITIALIZED, PAGE, Driver, Int, properties

from cumem_sleep import sim


class TestStart:
    def test_every_call_needs_init(self, load: Callable[..., Driver]) -> None:
        driver = load()
        value = ctypes.c_uint64()
        assert driver("cuDeviceGetCount", ctypes.byref(value)) == NOT_INITIALIZED
        assert driver("cuCtxGetCurrent", ctypes.byref(value)) == NOT_INITIALIZED
        assert driver("cuMemCreate", ctypes.byref(value), PAGE, properties(), 0) == NOT_INITIALIZED
        assert driver("cuStreamSynchronize", None) == NOT_INITIALIZED
        assert driver("cuMemAddressFree", 0, 0) == NOT_INITIALIZED
        assert driver("cuInit", 1) == INVALID_VALUE
        driver.ok("cuInit", 0)
        driver.ok("cuInit", 0)
        driver.ok("cuDeviceGetCount", ctypes.byref(value))

    def test_version_from_environment(self, load: Callable[..., Driver]) -> None:
        assert load(DRIVER_VERSION=12020).get(Int, "cuDriverGetVersion") == 12020

    @pytest.mark.parametrize("value", ["0", "many", "-1", "65", "1.5", "1 "])
    def test_bad_environment_is_an_error(
        self, load: Callable[..., Driver], capfd: pytest.CaptureFixture[str], value: str
    ) -> None:
        assert load(DEVICES=value)("cuInit", 0) == INVALID_VALUE
        assert f'CUMEM_SLEEP_SIM_DEVICES="{value}"' in capfd.readouterr().err

    def test_error_names_and_strings(self, load: Callable[..., Driver]) -> None:
        driver = load()
        assert driver.error_name(700) == ILLEGAL_ADDRESS
        text = ctypes.c_char_p()
        driver.ok("cuGetErrorString", 2, ctypes.byref(text))
        assert text.value == b"out of memory"
        for call in ("cuGetErrorName", "cuGetErrorString"):
            assert driver(call, 12345, ctypes.byref(text)) == INVALID_VALUE
            assert text.value is None

    def test_proc_address_finds_every_call(self, load: Callable[..., Driver]) -> None:
        driver = load()
        for name, (suffix, _) in CALLS.items():
            pointer, status = ctypes.c_void_p(), Int(-1)
            arguments = (name.encode(), ctypes.byref(pointer), 13000, 0, ctypes.byref(status))
            driver.ok("cuGetProcAddress", *arguments)
            exported = ctypes.cast(getattr(driver.library, name + suffix), ctypes.c_void_p).value
            assert (pointer.value, status.value) == (exported, 0), name

    @pytest.mark.parametrize("name", ["cuMemFantasy", "malloc", "cumemSimReset", ""])
    def test_proc_address_of_unknown(self, load: Callable[..., Driver], name: str) -> None:
        pointer, status = ctypes.c_void_p(1), Int(-1)
        driver = load()
        driver.ok("cuGetProcAddress", name.encode(), ctypes.byref(pointer), 12000, 0, ctypes.byref(status))
        assert (pointer.value, status.value) == (None, 1)

    @pytest.mark.slow
    def test_exports_nothing_else(self) -> None:
        tool = shutil.which("nm")
        if tool is None:
            pytest.skip("nm (binutils) is not installed")
        listing = subprocess.run(
            [tool, "-D", "--defined-only", sim.library_path()], capture_output=True, text=True, check=True
        ).stdout
        strong = {fields[2] for fields in map(str.split, listing.splitlines()) if fields[1] == "T"}
        calls = {name + suffix for name, (suffix, _) in CALLS.items()} | {"cuDeviceGetUuid"}
        assert {name for name in strong if not name.startswith("cumemSim")} == calls
