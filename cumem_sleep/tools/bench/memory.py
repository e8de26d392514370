"""The benchmark's device memory: segments of random weights, written from the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np

from ... import _core
from ...allocator import CuMemAllocator
from ...core.pinned import pinned_block

_RANDOM_BYTES = 64 << 20
_MOST_BYTES = _RANDOM_BYTES // 2  # written at a time, so that it may begin anywhere in the first half
_STEP_BYTES = 512  # from where one content begins to where the next one does


class BenchMemory:
    """Weights and a KV cache on one device.

    Attributes:
        weights: address and size of each segment.
    """

    def __init__(self, allocator: CuMemAllocator, device: int) -> None:
        self.weights: list[tuple[int, int]] = []
        self._kv_cache: list[int] = []
        self._allocator = allocator
        self._device = device
        self._contents = 0  # written so far

    def allocate(self, weights: Sequence[int], kv_cache: Sequence[int]) -> None:
        """A segment for each size.

        Raises:
            OutOfDeviceMemory: there is too little device memory.
        """
        for nbytes in weights:
            self.weights.append((self._allocator.malloc(nbytes, "weights", self._device), nbytes))
        for nbytes in kv_cache:
            self._kv_cache.append(self._allocator.malloc(nbytes, "kv_cache", self._device))

    def fill(self, segments: Sequence[tuple[int, int]]) -> None:
        """Write random weights to segments that are awake, to each other ones than to any before."""
        with random_weights(_RANDOM_BYTES, self._device) as content, _core.CopyStream(self._device) as stream:
            for address, nbytes in segments:
                self._contents += 1
                begin = self._contents * _STEP_BYTES % _MOST_BYTES
                for start in range(0, nbytes, _MOST_BYTES):
                    stream.to_device(address + start, content, begin, min(_MOST_BYTES, nbytes - start))
            stream.synchronize()

    def close(self) -> None:
        """Free all of it, asleep or awake."""
        for address in (*(address for address, _ in self.weights), *self._kv_cache):
            self._allocator.free(address)


@contextmanager
def random_weights(nbytes: int, device: int) -> Iterator[_core.HostBlock]:
    """Pinned host memory with normally distributed bf16, as in weights, which repeat after 64 MiB."""
    normal = np.random.default_rng().standard_normal(min(nbytes, _RANDOM_BYTES) // 2, np.float32)
    weights = (normal.view(np.uint32) >> 16).astype(np.uint16)  # bf16 is the upper half of a float32
    with closing(pinned_block(nbytes, device)) as block:
        content = np.frombuffer(memoryview(block), np.uint16)
        for start in range(0, nbytes // 2, weights.size):
            content[start : start + weights.size] = weights[: nbytes // 2 - start]
        yield block
