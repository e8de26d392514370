"""CuPy arrays in memory that can sleep."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from .. import _core
from ..allocator import CuMemAllocator
from ..core.tags import checked_tag
from ..errors import InvalidState


def cupy_allocator(tag: str = "weights") -> Callable[[int], Any]:
    """An allocator for `cupy.cuda.set_allocator`: arrays get memory that can sleep.

    Every array takes whole 2 MiB pages; `cupy.cuda.MemoryPool(cupy_allocator(tag)).malloc` packs small ones.

    Raises:
        InvalidArgument: not a tag.
        ImportError: CuPy is not installed.
        InvalidState: the driver is the simulated one.
    """
    if importlib.util.find_spec("cupy") is None:
        raise ModuleNotFoundError(
            "cupy_allocator needs CuPy, which is not installed: pip install 'cumem-sleep[cupy13]' for CUDA 13,"
            " 'cumem-sleep[cupy12]' for CUDA 12",
            name="cupy",
        )
    tag = checked_tag(tag)
    if CuMemAllocator.get_instance().settings.driver == "sim":
        raise InvalidState(
            "cupy_allocator needs a GPU: on the simulated driver (CUMEM_SLEEP_DRIVER=sim) only `malloc` allocates,"
            " and CuPy has nothing to run on"
        )
    import cupy

    class Owner:
        """Frees the memory when the last array that uses it is gone."""

        def __init__(self, nbytes: int, device: int) -> None:
            self.address = 0
            self.address = CuMemAllocator.get_instance().malloc(nbytes, tag, device)

        def __del__(self) -> None:
            if self.address and not _core.driver_is_forked():
                CuMemAllocator.get_instance().free(self.address)

    def allocate(nbytes: int) -> Any:
        device = cupy.cuda.runtime.getDevice()
        owner = Owner(max(nbytes, 1), device)
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(owner.address, nbytes, owner, device), 0)

    return allocate
