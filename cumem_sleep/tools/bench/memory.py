"""The benchmark's device memory: allocated as users do it, filled with random bytes, and checked.

The checksums share nothing with the layer's own digests: they sum words, each multiplied by an odd number for its
position, so that a changed word always changes the sum. On a GPU PyTorch does the work; on the simulated driver NumPy
does, at the addresses themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ... import _core
from ...allocator import CuMemAllocator
from ...core.torch_pools import torch_with_cuda
from ...errors import InvalidState, OutOfDeviceMemory, format_bytes

_PART_WORDS = 1 << 22  # checked at a time
_OWN_SEGMENT_BYTES = 10 << 20  # from this size on PyTorch's caching allocator gives each tensor a segment of its own
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Region:
    """The memory of one segment, the `index`-th of its tag."""

    tag: str
    index: int
    address: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.tag} segment {self.index} at 0x{self.address:x} ({format_bytes(self.nbytes)})"


class DeviceMemory(Protocol):
    """Memory of one device. It must be awake to be filled or checked."""

    def allocate(self, sizes: Sequence[int], tag: str) -> tuple[Region, ...]:
        """A segment for each size.

        Raises:
            OutOfDeviceMemory: there is too little device memory.
        """
        ...

    def fill(self, regions: Iterable[Region]) -> None:
        """Write fresh random bytes."""
        ...

    def checksums(self, regions: Iterable[Region]) -> list[int]:
        """64 bits for each region, which depend on every bit and on the position of every word."""
        ...

    def settle(self) -> None:
        """Wait for the device, and free what filling and checking allocated."""
        ...

    def close(self) -> None:
        """Free all regions, asleep or awake."""
        ...


def open_memory(allocator: CuMemAllocator, device: int) -> DeviceMemory:
    """Memory for the driver in use.

    Raises:
        InvalidState: this is a GPU that PyTorch does not reach.
    """
    if _core.driver_is_simulated():
        return SimulatedMemory(allocator, device)
    torch = torch_with_cuda()
    if torch is None:
        raise InvalidState(
            "on a GPU, bench fills and checks memory with PyTorch, which is not installed or does not reach it:"
            " pip install torch (a build for CUDA)"
        )
    return TorchMemory(allocator, torch, torch.device("cuda", device))


class SimulatedMemory:
    """Simulated device memory, which the host can access at the same address."""

    def __init__(self, allocator: CuMemAllocator, device: int) -> None:
        self._allocator = allocator
        self._device = device
        self._addresses: list[int] = []
        self._random = np.random.Generator(np.random.SFC64())

    def allocate(self, sizes: Sequence[int], tag: str) -> tuple[Region, ...]:
        """Allocate with `malloc`."""
        regions = []
        for index, nbytes in enumerate(sizes):
            self._addresses.append(self._allocator.malloc(nbytes, tag, self._device))
            regions.append(Region(tag, index, self._addresses[-1], nbytes))
        return tuple(regions)

    def fill(self, regions: Iterable[Region]) -> None:
        """Uniformly random bytes; with compression, normally distributed bf16, as on a GPU."""
        compress = self._allocator.settings.compress != "off"
        for region in regions:
            for part in _parts(region):
                if compress:
                    part[:] = self._weights(part.size)
                else:
                    part[:] = self._random.integers(0, _MASK, part.size, np.uint64, endpoint=True)

    def _weights(self, words: int) -> npt.NDArray[np.uint64]:
        values = self._random.standard_normal(4 * words, np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint64)

    def checksums(self, regions: Iterable[Region]) -> list[int]:
        """Computed with NumPy."""
        places = np.arange(1, 2 * _PART_WORDS, 2, dtype=np.uint64)
        return [
            _combined(int((part * places[: part.size]).sum(dtype=np.uint64)) for part in _parts(region))
            for region in regions
        ]

    def settle(self) -> None:
        """Nothing runs asynchronously."""

    def close(self) -> None:
        """Free with `free`."""
        while self._addresses:
            self._allocator.free(self._addresses.pop())


class TorchMemory:
    """Memory of a GPU, in PyTorch pools of the allocator, as in a model server."""

    def __init__(self, allocator: CuMemAllocator, torch: Any, device: Any) -> None:
        self._allocator = allocator
        self._torch = torch
        self._device = device
        self._tensors: dict[Region, Any] = {}
        self._addresses: list[int] = []

    def allocate(self, sizes: Sequence[int], tag: str) -> tuple[Region, ...]:
        """Allocate a tensor for each size, in the pool of this tag."""
        regions = []
        with self._allocator.use_memory_pool(tag):
            for index, nbytes in enumerate(sizes):
                tensor = self._tensor(nbytes, tag)
                regions.append(Region(tag, index, tensor.data_ptr(), nbytes))
                self._tensors[regions[-1]] = tensor
        return tuple(regions)

    def _tensor(self, nbytes: int, tag: str) -> Any:
        if nbytes >= _OWN_SEGMENT_BYTES:
            try:
                return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)
            except self._torch.OutOfMemoryError:
                free_bytes, _ = _core.memory_info(self._device.index)
                raise OutOfDeviceMemory(nbytes, free_bytes, self._device.index, segment=f"a {tag} tensor") from None
        # PyTorch would put several tensors into one segment, and segments are what is measured.
        address = self._allocator.malloc(nbytes, tag, self._device.index)
        self._addresses.append(address)
        return self._torch.as_tensor(_DeviceArray(address, nbytes), device=self._device)

    def fill(self, regions: Iterable[Region]) -> None:
        """Normally distributed bf16, as in weights: neither zeros nor uniformly random bytes."""
        for region in regions:
            self._tensors[region].view(self._torch.bfloat16).normal_()

    def checksums(self, regions: Iterable[Region]) -> list[int]:
        """Computed on the device, where int64 wraps around, as required."""
        torch = self._torch
        places = torch.arange(1, 2 * _PART_WORDS, 2, dtype=torch.int64, device=self._device)
        sums: list[list[Any]] = [
            [
                (part * places[: part.numel()]).sum()
                for part in self._tensors[region].view(torch.int64).split(_PART_WORDS)
            ]
            for region in regions
        ]
        flat = iter(torch.stack([each for of_region in sums for each in of_region]).tolist())
        return [_combined(next(flat) for _ in of_region) for of_region in sums]

    def settle(self) -> None:
        """PyTorch caches freed memory until it is told not to."""
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)
            self._torch.cuda.empty_cache()

    def close(self) -> None:
        """PyTorch gives the segments back once they are no longer in its cache."""
        self._tensors.clear()
        self.settle()
        while self._addresses:
            self._allocator.free(self._addresses.pop())


class _DeviceArray:
    """Device memory with the CUDA array interface (version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _parts(region: Region) -> Iterator[npt.NDArray[np.uint64]]:
    words = np.ctypeslib.as_array((ctypes.c_uint64 * (region.nbytes // 8)).from_address(region.address))
    for start in range(0, words.size, _PART_WORDS):
        yield words[start : start + _PART_WORDS]


def _combined(sums: Iterable[int]) -> int:
    total = 0
    for number, part in enumerate(sums):
        total = (total * 31 + number + part) & _MASK
    return total
