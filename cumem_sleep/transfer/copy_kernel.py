"""Copies from pinned host memory by the GPU's processors instead of its copy engine: a Triton kernel.

The kernel reaches 51 GB/s where the copy engine reaches 55. But while the driver scrubs freed memory, it occupies the
engine for host-to-device copies and leaves them 27 GB/s; the kernel keeps 48 (measured on an H200:
benchmarks/results/wake_paths.json). Launches are short and have few programs, because long and wide ones delay the
mapping of memory that goes on at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from .. import _core
from ..extents import Piece
from ..pinned import pinned_block, pinned_table
from ..streams import current_in_torch

CHUNK_BYTES = 2 << 20  # most pieces of backups are multiples of it
_PROGRAMS = 8
_WARPS = 8
_WORDS = 8192  # of 8 bytes, in flight in each program
_CHUNKS_PER_LAUNCH = 8
_ROW_WORDS = 4  # three, and one to keep them aligned
_ROW_BYTES = 8 * _ROW_WORDS


@triton.jit(do_not_specialize=["chunks"])  # type: ignore[untyped-decorator]  # otherwise Triton compiles again for 1
def _copy_chunks(table, chunks, PROGRAMS: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """`table` has (source, target, pairs of words) of chunks of at most CHUNK words. Programs copy a slice of each."""
    program = tl.program_id(0).to(tl.int64)
    entry = table.to(tl.pointer_type(tl.uint64))
    slice_words = CHUNK // PROGRAMS
    lane = tl.arange(0, WORDS)
    for chunk in tl.range(0, chunks):
        source = tl.multiple_of(tl.load(entry + 4 * chunk).to(tl.pointer_type(tl.uint64)), 16)
        target = tl.multiple_of(tl.load(entry + 4 * chunk + 1).to(tl.pointer_type(tl.uint64)), 16)
        words = tl.load(entry + 4 * chunk + 2).to(tl.int64) * 2  # so that Triton knows it is even
        for start in tl.range(0, slice_words, WORDS):
            place = program * slice_words + start + lane
            inside = place < words
            tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


class GpuCopies:
    """Copies to one device, in the order of the given stream.

    A piece takes one row of the table for each part of `CHUNK_BYTES`; the last part may be smaller.

    Args:
        table: shape (rows, 4), in pinned memory.
        address: of the first row.
    """

    def __init__(self, table: npt.NDArray[np.uint64], address: int) -> None:
        self._table = table
        self._address = address

    def start(self, stream: _core.CopyStream, pieces: Sequence[Piece]) -> None:
        """Begin to copy `pieces` to the device: addresses and sizes are multiples of 16 bytes.

        The table is in use until `stream` has been synchronised; only then may this be called again.

        Raises:
            ValueError: they take more chunks than the table was made for.
        """
        sizes = np.array([piece.bytes for piece in pieces])
        chunks = -(-sizes // CHUNK_BYTES)
        ends = np.cumsum(chunks)
        if ends[-1] > len(self._table):
            raise ValueError(f"{ends[-1]} chunks to copy at a time, and a table of {len(self._table)}")
        offsets = (np.arange(ends[-1]) - np.repeat(ends - chunks, chunks)) * CHUNK_BYTES
        ends_of_copies = [(piece.extent.address + piece.offset, piece.address) for piece in pieces]
        rows = self._table[: ends[-1]]
        rows[:, :2] = np.repeat(ends_of_copies, chunks, axis=0) + offsets[:, None]
        rows[:, 2] = np.minimum(np.repeat(sizes, chunks) - offsets, CHUNK_BYTES) // 16
        with current_in_torch(stream):
            for first in range(0, len(rows), _CHUNKS_PER_LAUNCH):
                self._launch(self._address + _ROW_BYTES * first, min(_CHUNKS_PER_LAUNCH, len(rows) - first))

    @staticmethod
    def _launch(table: int, chunks: int) -> None:
        _copy_chunks[(_PROGRAMS,)](table, chunks, _PROGRAMS, _WORDS, CHUNK_BYTES // 8, num_warps=_WARPS)


@contextmanager
def gpu_copies(device: int, nbytes: int, pieces: int, count: int = 1) -> Iterator[list[GpuCopies]]:
    """`count` of them, for that many streams. No copy may be in flight when this is left.

    Args:
        nbytes: the most bytes that each copies at a time.
        pieces: the most pieces that these bytes consist of.

    Raises:
        OutOfHostMemory, DriverError: there is no memory for their tables, which are one block.
    """
    rows = nbytes // CHUNK_BYTES + pieces
    with closing(pinned_table(count * rows * _ROW_BYTES, device)) as block:
        tables = np.frombuffer(memoryview(block), np.uint64).reshape(count, rows, _ROW_WORDS)
        yield [GpuCopies(table, block.address + n * rows * _ROW_BYTES) for n, table in enumerate(tables)]


def warm_up(device: int) -> None:
    """Compile and load the kernel."""
    block = pinned_block(2 * CHUNK_BYTES, device)
    with closing(block), gpu_copies(device, CHUNK_BYTES, 1) as [copies], _core.CopyStream(device) as stream:
        copies.start(stream, [Piece(block, 0, block.address + CHUNK_BYTES, CHUNK_BYTES)])
        stream.synchronize()
