"""How a segment is stored when it is compressed, and where each of its encoded chunks lies."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import CodecError
from ..extents import Extent
from .exponent import LAYOUTS, Code


@dataclass(frozen=True)
class Encoding:
    """How one segment is stored, known before it is encoded.

    Attributes:
        sizes: bytes of each encoded chunk, in order.
    """

    code: Code
    sizes: npt.NDArray[np.int64]

    @property
    def bytes(self) -> int:
        """Of all encoded chunks."""
        return int(self.sizes.sum())

    def to_note(self) -> str:
        """As text, for whoever shares the backup."""
        sizes = base64.b85encode(zlib.compress(self.sizes.astype("<u4").tobytes())).decode()
        return json.dumps([self.code.layout.name, list(map(int, self.code.symbols)), sizes])

    @classmethod
    def from_note(cls, note: str) -> Encoding:
        """What `to_note` made.

        Raises:
            CodecError: it is another version's.
        """
        try:
            name, symbols, sizes = json.loads(note)
            (layout,) = (layout for layout in LAYOUTS if layout.name == name)
            stored = np.frombuffer(zlib.decompress(base64.b85decode(sizes)), "<u4")
            return cls(Code(layout, tuple(symbols)), stored.astype(np.int64))
        except (ValueError, TypeError, zlib.error) as error:
            raise CodecError(f"this version cannot read how a backup is encoded: {note[:80]!r} ({error})") from None


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
