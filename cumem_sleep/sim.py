"""Controls of the simulated driver: its size, the failures it should inject, and its statistics.

They act on the simulated driver that this process runs on. If no driver is loaded yet, they act on this package's
simulated driver, which `CUMEM_SLEEP_DRIVER=sim` selects. If the process runs on a real driver, they raise
`InvalidState`.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import types
from collections.abc import Mapping
from dataclasses import dataclass

from cumem_sleep.errors import InvalidArgument, InvalidArgumentType, InvalidState

_MAX_BYTES = 2**63 - 1
_MAX_COUNT = 2**64 - 1
_MAX_DEVICES = 64


@dataclass(frozen=True)
class SimStats:
    """What the simulated driver has allocated, and which calls were made.

    Attributes:
        live_handles: physical handles created and not yet released.
        mapped_bytes: address space with physical memory behind it.
        reserved_bytes: address space reserved, mapped or not.
        registered_bytes: host memory registered.
        calls: how often each call was made since the last `reset()`, including failed ones, by CUDA name.
    """

    live_handles: int
    mapped_bytes: int
    reserved_bytes: int
    registered_bytes: int
    calls: Mapping[str, int]


def configure(device_bytes: int | None = None, devices: int | None = None) -> None:
    """Set the memory of every simulated device and their number, at any time; None keeps the current value.

    A smaller device only refuses new memory.
    """
    if device_bytes is not None:
        _check_number("device_bytes", device_bytes, 1, _MAX_BYTES)
    if devices is not None:
        _check_number("devices", devices, 1, _MAX_DEVICES)
    if _driver().cumemSimConfigure(device_bytes or 0, devices or 0) != 0:
        raise InvalidArgument(f"devices={devices!r}: the simulated driver does not accept it")


def fail(call: str, after: int = 0, error: str = "CUDA_ERROR_OUT_OF_MEMORY", times: int = 1) -> None:
    """Let the next `after` calls of a driver call through, then fail the following `times` with `error`.

    Rules add up: each counts the calls that no rule failed. A failed call has no effect.

    Args:
        call: the CUDA name, e.g. "cuMemCreate".
        error: the CUDA name of the error.
    """
    _check_text("call", call)
    _check_number("after", after, 0, _MAX_COUNT)
    _check_text("error", error)
    _check_number("times", times, 1, _MAX_COUNT)
    driver = _driver()
    code = driver.cumemSimErrorCode(error.encode())
    if code <= 0:
        raise InvalidArgument(f"error={error!r}: not a CUDA error such as CUDA_ERROR_OUT_OF_MEMORY")
    if driver.cumemSimFail(call.encode(), after, code, times) != 0:
        raise InvalidArgument(f"call={call!r}: the simulated driver has only {', '.join(stats().calls)}")


def stats() -> SimStats:
    """What the simulated driver has allocated now, and its call counts."""
    driver = _driver()
    held = _Statistics()
    driver.cumemSimStats(ctypes.byref(held))
    calls = {
        driver.cumemSimCallName(index).decode(): driver.cumemSimCallsMade(index)
        for index in range(driver.cumemSimCallCount())
    }
    return SimStats(
        held.live_handles,
        held.mapped_bytes,
        held.reserved_bytes,
        held.registered_bytes,
        types.MappingProxyType(calls),
    )


def reset() -> None:
    """Forget injected failures, set call counts to zero and clear sticky errors. Memory is not touched."""
    _driver().cumemSimReset()


def library_path() -> pathlib.Path:
    """The shared object of the simulated driver, for use wherever a `libcuda.so.1` is loaded."""
    path = pathlib.Path(__file__).resolve().parent / "libcuda_sim.so"
    if not path.is_file():
        raise InvalidState(f"the simulated driver is not built: {path} does not exist; reinstall the package")
    return path


class _Statistics(ctypes.Structure):
    """`CumemSimStatistics` of csrc/sim/control.h."""

    _fields_ = [
        ("live_handles", ctypes.c_uint64),
        ("mapped_bytes", ctypes.c_uint64),
        ("reserved_bytes", ctypes.c_uint64),
        ("registered_bytes", ctypes.c_uint64),
    ]


def _driver() -> ctypes.CDLL:
    """The instance that this process uses: opening a loaded library by its path gives the same one."""
    from cumem_sleep import _core  # here, so that library_path() works without the compiled part

    path = _core.driver_path()
    if path is not None and not _core.driver_is_simulated():
        raise InvalidState(f"this process runs on a real CUDA driver ({path}), not on the simulated one")
    return _open(path if path is not None else str(library_path()))


@functools.cache
def _open(path: str) -> ctypes.CDLL:
    driver = ctypes.CDLL(path)
    driver.cumemSimConfigure.argtypes = [ctypes.c_uint64, ctypes.c_int]
    driver.cumemSimFail.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64]
    driver.cumemSimReset.argtypes = []
    driver.cumemSimReset.restype = None
    driver.cumemSimStats.argtypes = [ctypes.POINTER(_Statistics)]
    driver.cumemSimStats.restype = None
    driver.cumemSimCallCount.argtypes = []
    driver.cumemSimCallName.argtypes = [ctypes.c_int]
    driver.cumemSimCallName.restype = ctypes.c_char_p
    driver.cumemSimCallsMade.argtypes = [ctypes.c_int]
    driver.cumemSimCallsMade.restype = ctypes.c_uint64
    driver.cumemSimErrorCode.argtypes = [ctypes.c_char_p]
    return driver


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgumentType(f"{name}={value!r}: expected a whole number")
    if not least <= value <= most:
        raise InvalidArgument(f"{name}={value!r}: expected a number from {least} to {most}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgumentType(f"{name}={value!r}: expected a CUDA name")
