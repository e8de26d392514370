"""How a segment is stored when it is compressed, and where each of its encoded chunks lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import _core
from ..extents import Extent
from .exponent import Code


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
class EncodedChunk:
    """Where one encoded chunk lies in its extent, and where its bytes are on the device."""

    segment: _core.Segment
    code: Code
    extent: Extent
    offset: int
    address: int
    bytes: int
    is_last: bool
