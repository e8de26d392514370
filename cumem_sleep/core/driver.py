"""Opens the driver that the settings name: CUDA's, or the simulated one."""

from __future__ import annotations

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
