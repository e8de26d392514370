"""What a backup is: the extents that hold one segment's bytes, and how the bytes are laid out in them."""

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
    """One segment's bytes in extents, in order: exactly the segment's size in total, unless they are encoded.

    Attributes:
        encoding: how it is compressed; None: not compressed.
        complete: every byte was copied and verified against the digest. Only complete backups may be restored.
        digest: of the bytes at sleep; None if nothing will be compared with it.
        retained: whether it stays while the segment is awake; None: as the settings say.
        being_prepared: it is being filled in the background (`prepare`), so it is kept although it is incomplete.
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
        """How much of the tier's memory it takes."""
        return sum(extent.bytes for extent in self.extents)

    def begin(self, encoding: Encoding | None, *, being_prepared: bool = False) -> None:
        """Note that it is about to be rewritten with this encoding: its old content is no longer valid."""
        self.complete, self.digest = False, None
        self.encoding, self.being_prepared = encoding, being_prepared

    def prove(self, digest: Digest | None) -> None:
        """Note that every byte has been copied and has this digest."""
        self.complete, self.digest, self.being_prepared = True, digest, False

    def pieces(self, at_most: int | None = None) -> Iterator[Piece]:
        """All of it in order, in pieces of at most `at_most` bytes; None: in whole extents."""
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
        """Whether its extents can hold the segment with this encoding without being too large for it."""
        if encoding is None:
            return self.bytes == self.segment.bytes
        sizes = [extent.bytes for extent in self.extents]
        is_exact = self.bytes <= encoding.bytes + encoding.bytes // _MOST_TO_SPARE
        if not is_exact or self.bytes >= self.segment.bytes:
            return False
        return len(list(_packed(encoding.sizes.tolist(), sizes))) == len(encoding.sizes)


def extent_sizes(segment: _core.Segment, encoding: Encoding | None, slab_bytes: int) -> list[int]:
    """The sizes of the extents for a backup of `segment`, each at most `slab_bytes`."""
    if encoding is None:
        return [min(slab_bytes, segment.bytes - start) for start in range(0, segment.bytes, slab_bytes)]
    ends: dict[int, int] = {}
    sizes = encoding.sizes.tolist()
    for nbytes, (extent, offset) in zip(sizes, _packed(sizes, repeat(slab_bytes)), strict=True):
        ends[extent] = offset + nbytes
    # A little more, so that the same weights still fit after their values change.
    return [nbytes + nbytes // _ROOM_TO_GROW for nbytes in ends.values()]


def _packed(chunks: Iterable[int], extents: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(extent, offset) of each chunk, in order; a chunk lies in one extent. Ends early if a chunk does not fit."""
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
