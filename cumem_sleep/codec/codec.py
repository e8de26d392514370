"""What a codec is: a lossless code for chunks of segments.

A codec is two modules: a reference in NumPy (`Codec`), which also runs on the simulated driver, and kernels for a GPU
(`Kernels`), which need PyTorch and Triton. `codecs` lists the first, and nothing else names one.
`tests/codec/test_codecs.py` tests each reference.

What the rest of the package relies on:

- Chunks are independent of each other, and the size of each is known, by counting, before it is encoded.
- All that a decoder needs beside the encoded bytes and their size is the segment's code, in `PARAMETER_BYTES` bytes.
- Decoders are safe with any bytes. Digests detect damage, decoders need not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 2 << 20  # segments are multiples of it
PARAMETER_BYTES = 12  # the most that a row has room for
ROW_BYTES = 32

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]


class Layout(Protocol):
    """One form of a codec's chunks. Kernels are compiled for it, and run on chunks of the same one. Hashable."""

    @property
    def name(self) -> str:
        """What logs and reports call it; no two layouts have the same."""

    @property
    def header_bytes(self) -> int:
        """The size of what every encoded chunk has besides the bytes that `Kernels.encode` counts."""

    @property
    def smallest_chunk_bytes(self) -> int:
        """The least that a chunk can become."""


@dataclass(frozen=True)
class Code:
    """How the chunks of one segment are coded; the same for all of them.

    Attributes:
        parameters: what distinguishes it from other codes of its layout, at most `PARAMETER_BYTES`; zeros may follow.
    """

    layout: Any
    parameters: bytes


class Codec(Protocol):
    """The reference: a module with these names. Its layouts are of a type of its own."""

    __name__: str

    @property
    def LAYOUTS(self) -> tuple[Any, ...]:  # noqa: N802  (a constant of the module)
        """Its layouts, the most usual first: that one's kernels are made ready before the first sleep."""

    def rank(self, layout: Any, samples: Bytes) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
        """The parameters of each sample's best code, of shape (segments, bytes), and the ratio expected of it.

        Args:
            samples: of shape (segments, bytes), contiguous; each a multiple of 4 bytes from one segment.
        """

    def chunk_bytes(self, code: Code, content: Bytes) -> Integers:
        """The encoded size of each chunk of `content`, which is a whole number of chunks."""

    def encode(self, code: Code, content: Bytes) -> Bytes:
        """The encoded chunks of `content` (whole chunks), one after another."""

    def decode(self, code: Code, stored: Bytes, sizes: npt.ArrayLike) -> Bytes:
        """The content of encoded chunks of the given sizes, which lie in `stored` one after another."""


class Kernels(Protocol):
    """The same on a GPU, on the current stream: a module with these functions. `table` is the address of `rows`."""

    def count(self, layout: Any, table: int, chunks: int) -> None:
        """Add the encoded size of each row's source to the u32 at its target."""

    def encode(self, layout: Any, table: int, counters: int, chunks: int) -> None:
        """Encode each row's source to its target, which is zero; add the bytes without header to its u32 of `counters`.

        What no longer fits into the row's encoded bytes, because the content has changed, is not written.
        """

    def decode(self, layout: Any, table: int, chunks: int) -> None:
        """Decode each row's source to its target; reads nothing but the row's encoded bytes, whatever they are."""


def parameters_of(codes: Sequence[Code]) -> Bytes:
    """The parameters of each code, of shape (codes, PARAMETER_BYTES)."""
    joined = b"".join(code.parameters.ljust(PARAMETER_BYTES, b"\0") for code in codes)
    return np.frombuffer(joined, np.uint8).reshape(-1, PARAMETER_BYTES)


def rows(
    parameters: Bytes, sources: npt.ArrayLike, targets: npt.ArrayLike, sizes: npt.ArrayLike = 0
) -> npt.NDArray[np.uint64]:
    """A table that tells a kernel what to do with which chunk: for each a row of four little-endian words.

    A row is the source's address, the target's address, the code's parameters in 12 bytes, the encoded bytes in 4.

    Args:
        parameters: of codes, of shape (chunks, PARAMETER_BYTES), or (1, PARAMETER_BYTES) for all chunks.
        sizes: of the encoded chunks in bytes.
    """
    table = np.empty((np.size(sources), ROW_BYTES // 8), np.uint64)
    table[:, 0], table[:, 1] = sources, targets
    table[:, 2:].view(np.uint8)[:, :PARAMETER_BYTES] = parameters
    table.view("<u4")[:, 7] = sizes
    return table
