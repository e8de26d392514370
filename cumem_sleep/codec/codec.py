"""What a codec is: a lossless code for chunks of segments.

A codec is two modules: a reference in NumPy (`Codec`), which also runs on the simulated driver, and kernels for a GPU
(`Kernels`). `codecs` lists them, and nothing else names one. `tests/codec/test_codecs.py` tests each reference.

What the rest of the package relies on:

- Chunks are independent of each other, and the size of each is known, by counting, before it is encoded.
- All that a decoder needs beside the encoded bytes and their size is the segment's code, in `PARAMETER_BYTES` bytes.
- Decoders are safe with any bytes. Digests detect damage, decoders need not.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 2 << 20  # segments are multiples of it
PARAMETER_BYTES = 12  # the most that a row of a table has room for

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


class Code(Protocol):
    """How the chunks of one segment are coded; the same for all of them."""

    @property
    def layout(self) -> Layout:
        """The form of the encoded chunks."""

    @property
    def parameters(self) -> bytes:
        """What distinguishes it from other codes of its layout; at most `PARAMETER_BYTES`."""


L = TypeVar("L", bound=Layout)
C = TypeVar("C", bound=Code)
L_contra = TypeVar("L_contra", bound=Layout, contravariant=True)


class Codec(Protocol[L, C]):
    """The reference: a module with these names."""

    @property
    def LAYOUTS(self) -> tuple[L, ...]:  # noqa: N802  (a constant of the module)
        """Its layouts, the most usual first: that one's kernels are made ready before the first sleep."""

    def rank(self, layout: L, samples: Bytes) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
        """The parameters of each sample's best code, of shape (segments, bytes), and the ratio expected of it.

        Args:
            samples: of shape (segments, bytes), contiguous; each a multiple of 4 bytes from one segment.
        """

    def code_of(self, layout: L, parameters: bytes) -> C:
        """The code with these parameters, after which there may be zeros."""

    def chunk_bytes(self, code: C, content: Bytes) -> Integers:
        """The encoded size of each chunk of `content`, which is a whole number of chunks."""

    def encode(self, code: C, content: Bytes) -> Bytes:
        """The encoded chunks of `content` (whole chunks), one after another."""

    def decode(self, code: C, stored: Bytes, sizes: npt.ArrayLike) -> Bytes:
        """The content of encoded chunks of the given sizes, which lie in `stored` one after another."""


class Kernels(Protocol[L_contra]):
    """The same on a GPU, on the current stream: a module with these functions. `table` is the address of a table."""

    def count(self, layout: L_contra, table: int, chunks: int) -> None:
        """Add the encoded size of each row's source to the u32 at its target."""

    def encode(self, layout: L_contra, table: int, counters: int, chunks: int) -> None:
        """Encode each row's source to its target, which is zero; add the bytes without header to its u32 of `counters`.

        What no longer fits into the row's encoded bytes, because the content has changed, is not written.
        """

    def decode(self, layout: L_contra, table: int, chunks: int) -> None:
        """Decode each row's source to its target; reads nothing but the row's encoded bytes, whatever they are."""

    def warm_up(self, layout: L_contra, device: int) -> None:
        """Compile and load all three, and compare them with the reference.

        Raises:
            CodecError: they give other results.
        """
