"""How the commands use the simulated driver: if there is no GPU, and with devices that are large enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .. import host_facts, sim
from ..allocator import CuMemAllocator
from ..core.driver import open_driver
from ..errors import DriverError, InvalidState, format_bytes
from ..settings import Settings
from .layout import PAGE_BYTES, SegmentLayout, whole_pages

SIMULATED_NOTE = "Simulated driver: no GPU was used, and these times mean nothing."

_LEAST_DEVICE_BYTES = 1 << 30
_HOST_RESERVE_BYTES = 256 << 20  # for the interpreter and the demo's own buffers

_NO_GPU = ("CUDA_ERROR_NO_DRIVER", "CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY")


def open_allocator(environment: Mapping[str, str]) -> tuple[CuMemAllocator, str]:
    """The allocator with the settings of the environment; simulated if these name no driver and there is no GPU.

    Returns:
        The allocator, and why it fell back to the simulated driver ("" if it did not).

    Raises:
        DriverError: the chosen driver cannot be used, or there is a driver and it fails.
    """
    settings = Settings.from_environment(environment)
    reason = ""
    if not environment.get("CUMEM_SLEEP_DRIVER", "").strip():
        try:
            open_driver("cuda")
        except DriverError as error:
            if error.error not in _NO_GPU:
                raise
            reason = "no GPU driver was found" if error.call == "dlopen" else f"no GPU was found ({error.error})"
            settings = replace(settings, driver="sim")
    open_driver(settings.driver)
    return CuMemAllocator(settings), reason


def make_room(environment: Mapping[str, str], weights: Sequence[SegmentLayout], kv_bytes: int) -> None:
    """Make simulated devices large enough, if the host has enough memory for them and for the backups.

    Raises:
        InvalidState: it does not.
    """
    weights_bytes = sum(whole_pages(segment.nbytes) for segment in weights)
    device_bytes = weights_bytes + whole_pages(kv_bytes)
    needed = device_bytes + weights_bytes + _HOST_RESERVE_BYTES
    for limit, available in host_memory_left().items():
        if available is not None and available < needed:
            raise InvalidState(
                f"the simulated device and the backups are both host memory: needed {format_bytes(needed)},"
                f" available {format_bytes(available)} (limit: {limit}); choose a smaller model or a smaller --kv"
            )
    if "CUMEM_SLEEP_SIM_DEVICE_BYTES" not in environment:
        sim.configure(device_bytes=max(_LEAST_DEVICE_BYTES, device_bytes))


def enlarge_device(environment: Mapping[str, str]) -> None:
    """Make simulated devices as large as host memory allows, unless the environment gives their size."""
    if "CUMEM_SLEEP_SIM_DEVICE_BYTES" in environment:
        return
    available = min((limit for limit in host_memory_left().values() if limit is not None), default=0)
    sim.configure(device_bytes=max(_LEAST_DEVICE_BYTES, available // PAGE_BYTES * PAGE_BYTES))


def host_memory_left() -> dict[str, int | None]:
    """How much host memory each limit leaves for this process, in bytes; None if the limit does not bind."""
    return {"MemAvailable": host_facts.mem_available_bytes(), "cgroup": host_facts.cgroup_available_bytes()}
