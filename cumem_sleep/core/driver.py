"""Opens the driver that the settings name: CUDA's, or the simulated one."""

from __future__ import annotations

import functools

from .. import _core
from ..errors import DriverError


def driver_path(driver: str) -> str:
    """The path of the shared object that the setting `driver` names."""
    if driver != "sim":
        return "libcuda.so.1"
    from ..sim import library_path

    return str(library_path())


def open_driver(driver: str) -> None:
    """Open the driver that the setting names, `cuda` or `sim`; once per process, opening the same again does nothing.

    Raises:
        DriverError: it was not found, is too old, or fails to initialise.
        InvalidState: the process already uses the other one.
    """
    try:
        _core.open_driver(driver_path(driver))
    except DriverError as error:
        if driver == "sim" or error.call != "dlopen":
            raise
        raise DriverError(
            "dlopen",
            error.error,
            "libcuda.so.1 was not found: install the NVIDIA driver, or set CUMEM_SLEEP_DRIVER=sim to run on the"
            f" simulated driver ({error.detail})",
        ) from None


def integrated_devices() -> frozenset[int]:
    """The GPUs whose memory is the host's (GB10): a backup takes of what its segment needs to wake."""
    return _integrated_devices() if _core.driver_is_open() else frozenset()


def unified_free_bytes() -> int | None:
    """What the driver says is free of memory that GPUs share with the host; None if there is none, or at level 3."""
    devices = integrated_devices()
    if not devices or _core.driver_calls_suspended():
        return None
    return min(_core.memory_info(device)[0] for device in devices)


@functools.cache
def _integrated_devices() -> frozenset[int]:
    return frozenset(device for device in range(_core.device_count()) if _core.device_info(device).integrated)
