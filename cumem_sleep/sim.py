"""Controls of the simulated driver: its size, the failures it should inject, and its statistics.

They act on the simulated driver that this process runs on. If no driver is loaded yet, they act on this package's
simulated driver, which `CUMEM_SLEEP_DRIVER=sim` selects. If the process runs on a real driver, they raise
`InvalidState`.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cumem_sleep.errors import (
    MOST_BYTES,
    DriverError,
    InvalidArgument,
    InvalidArgumentType,
    InvalidState,
    check_integer,
)

_MAX_PID = 2**31 - 1
_LIMITS = {  # of what `configure` sets
    "device_bytes": (1, MOST_BYTES),
    "devices": (1, 64),
    "context_bytes": (0, MOST_BYTES),
    "context_us_per_mib": (0, 60_000_000),
}


@dataclass(frozen=True)
class SimStats:
    """What the simulated driver has allocated, and which calls were made.

    Attributes:
        live_handles: physical handles created and not yet released.
        mapped_bytes: address space with physical memory behind it.
        reserved_bytes: address space reserved, mapped or not.
        registered_bytes: host memory registered.
        calls: how often each call was made since the last `reset()`, including failed ones, by CUDA name.
        blocked_calls: how many calls had to wait since then, because another process had locked this one.
    """

    live_handles: int
    mapped_bytes: int
    reserved_bytes: int
    registered_bytes: int
    calls: Mapping[str, int]
    blocked_calls: int = 0


def configure(
    device_bytes: int | None = None,
    devices: int | None = None,
    context_bytes: int | None = None,
    context_us_per_mib: int | None = None,
) -> None:
    """Set the memory of every simulated device, their number, and what a context takes.

    None keeps the current value. All can be set at any time: a smaller device only refuses new memory, and contexts
    that exist stay as they are.

    Args:
        context_bytes: device memory that each new context takes.
        context_us_per_mib: microseconds that each new context takes for each MiB of host memory that is registered.
    """
    given = (device_bytes, devices, context_bytes, context_us_per_mib)
    for value, (name, (least, most)) in zip(given, _LIMITS.items(), strict=True):
        if value is not None:
            check_integer(name, value, least, most)
    if _driver().cumemSimConfigure(device_bytes or 0, devices or 0) != 0:
        raise InvalidArgument(f"devices={devices!r}: the simulated driver does not accept it")
    for name, value in (("Bytes", context_bytes), ("Time", context_us_per_mib)):
        if value is not None:
            getattr(_driver(), f"cumemSimSetContext{name}")(value)


def fail(call: str, after: int = 0, error: str = "CUDA_ERROR_OUT_OF_MEMORY", times: int = 1) -> None:
    """Let the next `after` calls of a driver call through, then fail the following `times` with `error`.

    Rules add up: each counts the calls that no rule failed. A failed call has no effect, with one exception:
    `CUDA_ERROR_UNKNOWN` of cuCheckpointProcessCheckpoint or cuCheckpointProcessRestore leaves the process that it was
    about in the state FAILED, if it was in the right state before. Such a process never returns from its next driver
    call. The rules are those of the process that makes the call; a process can start with some
    (`CUMEM_SLEEP_SIM_FAIL`).

    Args:
        call: the CUDA name, e.g. "cuMemCreate".
        error: the CUDA name of the error.
    """
    _check_text("call", call, "a CUDA name")
    check_integer("after", after, 0)
    _check_text("error", error, "a CUDA name")
    check_integer("times", times, 1)
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
    return SimStats(**{name: getattr(held, name) for name in _COUNTED}, calls=types.MappingProxyType(calls))


def process_memory(pid: int, uuid: str) -> tuple[int, int]:
    """What a process uses of a device, and how much memory that has, in bytes; as NVML tells it, without a context.

    Simulated devices are not shared: no other process takes part of their memory. A checkpointed process uses 4 MiB of
    each device on which it has a context.

    Args:
        pid: any process that runs on the simulated driver, this one too.
        uuid: of the device, as in `DeviceInfo.uuid`.

    Raises:
        DriverError: `CUDA_ERROR_INVALID_VALUE`: there is no such process; `CUDA_ERROR_NOT_INITIALIZED`: it does not
            use the simulated driver; `CUDA_ERROR_NOT_PERMITTED`: it is another user's; `CUDA_ERROR_INVALID_DEVICE`: it
            sees no such device.
    """
    check_integer("pid", pid, -_MAX_PID, _MAX_PID)
    used, total = ctypes.c_uint64(), ctypes.c_uint64()
    driver = _driver()
    code = driver.cumemSimProcessMemory(pid, _uuid_bytes(uuid), ctypes.byref(used), ctypes.byref(total))
    if code != 0:
        raise DriverError("cumemSimProcessMemory", _error_name(driver, code), f"pid={pid}, uuid={uuid}")
    return used.value, total.value


def reset() -> None:
    """Forget injected failures, set call counts (`blocked_calls` too) to zero and clear sticky errors.

    Memory is not touched.
    """
    _driver().cumemSimReset()


def library_path() -> pathlib.Path:
    """The shared object of the simulated driver, for use wherever a `libcuda.so.1` is loaded."""
    path = pathlib.Path(__file__).resolve().parent / "libcuda_sim.so"
    if not path.is_file():
        raise InvalidState(f"the simulated driver is not built: {path} does not exist; reinstall the package")
    return path


_COUNTED = ("live_handles", "mapped_bytes", "reserved_bytes", "registered_bytes", "blocked_calls")


class _Statistics(ctypes.Structure):
    """`CumemSimStatistics` of csrc/sim/control.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in _COUNTED]


def _driver() -> ctypes.CDLL:
    """The instance that this process uses: opening a loaded library by its path gives the same one."""
    from cumem_sleep import _core  # here, so that library_path() works without the compiled part

    path = _core.driver_path()
    if path is not None and not _core.driver_is_simulated():
        raise InvalidState(f"this process runs on a real CUDA driver ({path}), not on the simulated one")
    return _open(path or str(library_path()))


_TEXT, _NUMBER, _NUMBERS = ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {  # each with the types of its result and of its arguments
    "cumemSimConfigure": (ctypes.c_int, _NUMBER, ctypes.c_int),
    "cumemSimSetContextBytes": (None, _NUMBER),
    "cumemSimSetContextTime": (None, _NUMBER),
    "cumemSimProcessMemory": (ctypes.c_int, ctypes.c_int, _TEXT, _NUMBERS, _NUMBERS),
    "cuGetErrorName": (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_TEXT)),
    "cumemSimFail": (ctypes.c_int, _TEXT, _NUMBER, ctypes.c_int, _NUMBER),
    "cumemSimReset": (None,),
    "cumemSimStats": (None, ctypes.POINTER(_Statistics)),
    "cumemSimCallCount": (ctypes.c_int,),
    "cumemSimCallName": (_TEXT, ctypes.c_int),
    "cumemSimCallsMade": (_NUMBER, ctypes.c_int),
    "cumemSimErrorCode": (ctypes.c_int, _TEXT),
}


@functools.cache
def _open(path: str) -> ctypes.CDLL:
    driver = ctypes.CDLL(path)
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(driver, name)
        function.restype, function.argtypes = result, arguments
    return driver


def _uuid_bytes(uuid: str) -> bytes:
    _check_text("uuid", uuid, "the UUID of a device, as nvidia-smi prints it")
    digits = uuid.removeprefix("GPU-").replace("-", "")
    if not re.fullmatch("[0-9a-fA-F]{32}", digits):
        raise InvalidArgument(f"uuid={uuid!r}: expected the UUID of a device, as nvidia-smi prints it")
    return bytes.fromhex(digits)


def _error_name(driver: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"CUresult {code}"


def _check_text(name: str, value: object, expected: str) -> None:
    if not isinstance(value, str):
        raise InvalidArgumentType(f"{name}={value!r}: expected {expected}")
