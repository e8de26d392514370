"""How a segment is stored when it is compressed, and where its encoded chunks lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import _core
from ..extents import Extent
from .codec import CHUNK_BYTES, Code


@dataclass(frozen=True)
class Encoding:
    """How one segment is encoded; known before it is encoded.

    Attributes:
        sizes: bytes of each encoded chunk, in order.
    """

    code: Code
    sizes: npt.NDArray[np.int64]

    @property
    def bytes(self) -> int:
        """The total size of all encoded chunks."""
        return int(self.sizes.sum())


@dataclass(frozen=True)
class EncodedRun:
    """Consecutive chunks of a segment whose encoded bytes lie one after another in one extent.

    Attributes:
        offset: where the first one's encoded bytes begin in the extent.
        address: where its content is on the device.
        sizes: bytes of each encoded chunk; at least one.
        is_last: the segment ends with it.
    """

    segment: _core.Segment
    code: Code
    extent: Extent
    offset: int
    address: int
    sizes: npt.NDArray[np.int64]
    is_last: bool

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Total encoded size."""
        return int(self.sizes.sum())

    @property
    def content_bytes(self) -> int:
        """On the device, all of them."""
        return len(self) * CHUNK_BYTES

    def part(self, first: int, end: int) -> EncodedRun:
        """The chunks from number `first` up to, but without, number `end`; at least one."""
        if first == 0 and end >= len(self):
            return self
        return EncodedRun(
            self.segment,
            self.code,
            self.extent,
            self.offset + int(self.sizes[:first].sum()),
            self.address + first * CHUNK_BYTES,
            self.sizes[first:end],
            self.is_last and end >= len(self),
        )
