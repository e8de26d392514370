"""What a backup is: the extents of one segment's bytes, and how these lie in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

from .. import _core
from ..codec.encoding import EncodedChunk, Encoding
from ..codec.exponent import CHUNK_BYTES
from ..digest.reference import Digest
from ..extents import Extent, Piece

_ROOM_TO_GROW = 250  # 0.4 %
_MOST_TO_SPARE = 100  # a hundredth


@dataclass
class Backup:
    """One segment's bytes: extents in order, exactly the segment's size in all, or encoded.

    Attributes:
        encoding: how it is compressed; None: the bytes as they are.
        complete: every byte was copied, and found to be those of the digest; only then may it be restored from.
        digest: of the bytes at sleep; None where nothing will be compared with it.
        retained: whether it stays while the segment is awake; None: as the settings say.
        being_prepared: it is filled in the background (`prepare`), so it stays although it is not complete.
    """

    segment: _core.Segment
    extents: tuple[Extent, ...]
    encoding: Encoding | None = None
    complete: bool = False
    digest: Digest | None = None
    retained: bool | None = None
    being_prepared: bool = False

    @property
    def bytes(self) -> int:
        """What it takes of its tier's memory."""
        return sum(extent.bytes for extent in self.extents)

    def begin(self, encoding: Encoding | None, *, being_prepared: bool = False) -> None:
        """It is about to be written anew, in this way: what it held does not count any more."""
        self.complete, self.digest = False, None
        self.encoding, self.being_prepared = encoding, being_prepared

    def prove(self, digest: Digest | None) -> None:
        """Every byte is there, and has this digest."""
        self.complete, self.digest, self.being_prepared = True, digest, False

    def pieces(self, at_most: int | None = None) -> Iterator[Piece]:
        """All of it in order, in pieces of at most so many bytes; None: in whole extents."""
        address = self.segment.address
        for extent in self.extents:
            step = at_most or extent.bytes
            for offset in range(0, extent.bytes, step):
                yield Piece(extent, offset, address + offset, min(step, extent.bytes - offset))
            address += extent.bytes

    def chunks(self) -> Iterator[EncodedChunk]:
        """The encoded chunks, in order; a chunk lies in one extent."""
        if self.encoding is None:
            return
        sizes = self.encoding.sizes.tolist()
        where = _packed(sizes, [extent.bytes for extent in self.extents])
        for number, (nbytes, (extent, offset)) in enumerate(zip(sizes, where, strict=True)):
            address = self.segment.address + number * CHUNK_BYTES
            is_last = number == len(sizes) - 1
            yield EncodedChunk(self.segment, self.encoding.code, self.extents[extent], offset, address, nbytes, is_last)

    def has_room_for(self, encoding: Encoding | None) -> bool:
        """Whether its extents can hold the segment stored in this way, without being too large for it."""
        if encoding is None:
            return self.bytes == self.segment.bytes
        sizes = [extent.bytes for extent in self.extents]
        is_exact = self.bytes <= encoding.bytes + encoding.bytes // _MOST_TO_SPARE
        if not is_exact or self.bytes >= self.segment.bytes:
            return False
        return len(list(_packed(encoding.sizes.tolist(), sizes))) == len(encoding.sizes)


def extent_sizes(segment: _core.Segment, encoding: Encoding | None, slab_bytes: int) -> list[int]:
    """Of the extents for a backup of `segment`, each of at most `slab_bytes`."""
    if encoding is None:
        return [min(slab_bytes, segment.bytes - start) for start in range(0, segment.bytes, slab_bytes)]
    ends: dict[int, int] = {}
    sizes = encoding.sizes.tolist()
    for nbytes, (extent, offset) in zip(sizes, _packed(sizes, repeat(slab_bytes)), strict=True):
        ends[extent] = offset + nbytes
    # A little more, so that the same weights with other values fit as well.
    return [nbytes + nbytes // _ROOM_TO_GROW for nbytes in ends.values()]


def _packed(chunks: Iterable[int], extents: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(extent, offset) of each chunk, in order; a chunk lies in one extent. Ends early where one does not fit."""
    numbered = enumerate(extents)
    extent, room = next(numbered)
    offset = 0
    for nbytes in chunks:
        if offset + nbytes > room:
            extent, room = next(numbered, (extent, 0))
            offset = 0
            if nbytes > room:
                return
        yield extent, offset
        offset += nbytes
