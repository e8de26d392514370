"""The digest on the GPU: a kernel (`csrc/digest_kernel.cpp`) with a block for each chunk of a segment.

The table of chunks and their sums are in pinned host memory, so that a full GPU can still be verified.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .. import _core
from ..core.pinned import pinned_table
from .reference import chunks_of


class GpuSums:
    """Both sums of several contents, computed on its own stream.

    A content is (address, bytes, number of its first chunk) of memory that the GPU can access: device memory or pinned
    host memory. Its address and size are multiples of 16; its last chunk may be a short one.

    Args:
        chunks: the most chunks that are started between two calls of `finish`; the table has 32 bytes for each.
    """

    def __init__(self, device: int, chunks: int) -> None:
        self._firsts: list[npt.NDArray[np.int64]] = []
        self._used = 0
        self._block = pinned_table(32 * chunks, device)
        try:
            _, self._sums = np.frombuffer(memoryview(self._block), np.uint64).reshape(2, chunks, 2)
            self._stream = _core.CopyStream(device)
        except BaseException:
            self._block.close()
            raise

    def start(self, contents: npt.NDArray[np.int64]) -> None:
        """Begin with these contents, of shape (contents, 3), in one launch.

        Raises:
            DriverError: the driver refused.
        """
        if not len(contents):
            return
        count = self._stream.digest(self._block, self._used, np.ascontiguousarray(contents))
        chunks = chunks_of(contents[:, 1])
        self._firsts.append(self._used + np.cumsum(chunks) - chunks)
        self._used += count

    def finish(self) -> npt.NDArray[np.uint64]:
        """The sums of what was started since the last call, in order, of shape (contents, 2); waits for the kernels.

        Raises:
            DriverError: the driver refused.
        """
        self._stream.synchronize()
        firsts, used, self._firsts, self._used = self._firsts, self._used, [], 0
        sums: npt.NDArray[np.uint64] = np.add.reduceat(self._sums[:used], np.concatenate(firsts), axis=0)
        return sums

    def close(self) -> None:
        """Wait for the kernels and free the table."""
        self._stream.__exit__()
        self._block.close()
