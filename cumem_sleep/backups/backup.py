"""What a backup is: the extents that hold bytes of one segment, and how the bytes are laid out in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat

import numpy as np
import numpy.typing as npt

from .. import _core
from ..codec.chunks import EncodedRun, Encoding
from ..codec.codec import CHUNK_BYTES
from ..codec.codecs import decode
from ..core.extents import Extent, Piece, Ranges
from ..digest.reference import Digest
from .tier import Tier

_Sleep = _core.Segment.Sleep
_ROOM_TO_GROW = 250  # 0.4 %
_MOST_TO_SPARE = 100  # a hundredth


@dataclass
class Backup:
    """The bytes of ranges of one segment in extents, in order: exactly their size in total, unless they are encoded.

    Attributes:
        tier: where the extents lie.
        encoding: how it is compressed; None: not compressed. What is compressed is a whole segment.
        ranges: of the segment: what survives of one that is dropped otherwise; () stands for all of it.
        complete: every byte was copied and verified against the digest. Only complete backups may be restored.
        digest: of the bytes at sleep; None if nothing will be compared with it.
        retained: whether it stays while the segment is awake; None: as the settings say.
        being_prepared: it is being filled in the background (`prepare`), so it is kept although it is incomplete.
    """

    segment: _core.Segment
    tier: Tier
    extents: tuple[Extent, ...]
    encoding: Encoding | None = None
    ranges: Ranges = ()
    complete: bool = False
    digest: Digest | None = None
    retained: bool | None = None
    being_prepared: bool = False

    @property
    def bytes(self) -> int:
        """How much of the tier's memory it takes."""
        return sum(extent.bytes for extent in self.extents)

    @property
    def content_bytes(self) -> int:
        """How much of the segment it covers."""
        return sum(nbytes for _, nbytes in self.ranges) if self.ranges else self.segment.bytes

    @property
    def is_needed_asleep(self) -> bool:
        """Whether its segment sleeps, and nothing else has the bytes that it covers."""
        sleep = self.segment.sleep
        return sleep == _Sleep.BACKED_UP or (sleep == _Sleep.DROPPED and bool(self.ranges))

    def covers(self, offset: int, nbytes: int) -> bool:
        """Whether it has all of these bytes of the segment."""
        return not self.ranges or any(o <= offset and offset + nbytes <= o + n for o, n in self.ranges)

    def begin(self, encoding: Encoding | None, *, being_prepared: bool = False) -> None:
        """Note that it is about to be rewritten with this encoding: its old content is no longer valid."""
        assert self.segment.has_memory, "a backup of a segment whose bytes are nowhere else"
        self.complete, self.digest = False, None
        self.encoding, self.being_prepared = encoding, being_prepared

    def mark_proven(self, digest: Digest | None) -> None:
        """Note that every byte has been copied and has this digest."""
        assert self.segment.has_memory, "a backup of a segment that was not there to be copied"
        assert not self.complete, "a backup that nothing was copied to"
        self.complete, self.digest, self.being_prepared = True, digest, False

    def pieces(self, at_most: int | None = None) -> Iterator[Piece]:
        """All of it in order, in pieces of at most `at_most` bytes, each in one range and one extent."""
        extents = iter(self.extents)
        extent, used = next(extents), 0
        for offset, nbytes in self.ranges or ((0, self.segment.bytes),):
            address, end = self.segment.address + offset, self.segment.address + offset + nbytes
            while address < end:
                if used == extent.bytes:
                    extent, used = next(extents), 0
                size = min(end - address, extent.bytes - used, at_most or nbytes)
                yield Piece(extent, used, address, size)
                address, used = address + size, used + size

    def runs(self) -> Iterator[EncodedRun]:
        """The encoded chunks, in order: one run for each extent."""
        if self.encoding is None:
            return
        code, sizes = self.encoding.code, self.encoding.sizes
        first = 0
        for extent, end in zip(self.extents, _packed(sizes, [extent.bytes for extent in self.extents]), strict=False):
            address = self.segment.address + first * CHUNK_BYTES
            yield EncodedRun(self.segment, code, extent, 0, address, sizes[first:end], end == len(sizes))
            first = end
        assert first == len(sizes), "a backup that has no room for its segment"

    def read(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """So many bytes from `offset` in the segment on, all of which it covers.

        Where they lie together and uncompressed in memory of this process, they are not copied: the array is valid as
        long as the backup stays as it is.
        """
        start, end = self.segment.address + offset, self.segment.address + offset + nbytes
        parts: list[npt.NDArray[np.uint8]] = []
        for run in self.runs():
            first, behind = (start - run.address) // CHUNK_BYTES, -(-(end - run.address) // CHUNK_BYTES)
            if first < len(run) and behind > 0:
                part = run.part(max(0, first), min(behind, len(run)))
                stored = self.tier.content(part.extent, part.offset, part.bytes)
                content = decode(part.code, stored, part.sizes)
                parts.append(content[max(0, start - part.address) : end - part.address])
        for piece in () if self.encoding is not None else self.pieces():
            begin, last = max(start, piece.address), min(end, piece.address + piece.bytes)
            if begin < last:
                parts.append(self.tier.content(piece.extent, piece.offset + begin - piece.address, last - begin))
        content = parts[0] if len(parts) == 1 else np.concatenate(parts)
        content.flags.writeable = False  # what is written there would be restored, or rather refused
        return content

    def has_room_for(self, encoding: Encoding | None) -> bool:
        """Whether its extents can hold what it covers with this encoding without being too large for it."""
        if encoding is None:
            return self.bytes == self.content_bytes
        sizes = [extent.bytes for extent in self.extents]
        is_exact = self.bytes <= encoding.bytes + encoding.bytes // _MOST_TO_SPARE
        if not is_exact or self.bytes >= self.segment.bytes:
            return False
        return len(encoding.sizes) in (0, *_packed(encoding.sizes, sizes))


def extent_sizes(nbytes: int, encoding: Encoding | None, slab_bytes: int) -> list[int]:
    """The sizes of the extents for a backup of so much, each at most `slab_bytes`."""
    if encoding is None:
        return [min(slab_bytes, nbytes - start) for start in range(0, nbytes, slab_bytes)]
    ends = list(_packed(encoding.sizes, repeat(slab_bytes)))
    stored = [int(encoding.sizes[first:end].sum()) for first, end in pairwise([0, *ends])]
    # A little more, so that the same weights still fit after their values change.
    return [size + size // _ROOM_TO_GROW for size in stored]


def _packed(sizes: npt.NDArray[np.int64], extents: Iterable[int]) -> Iterator[int]:
    """Chunks of these sizes one after another, each in one extent: for each extent, the number of the first chunk that
    does not lie in it or in those before. Ends with the last chunk, or earlier if an extent has no room for the next.
    """
    ends = np.cumsum(sizes)
    first, stored = 0, 0
    for room in extents:
        end = int(np.searchsorted(ends, stored + room, side="right"))
        if end == first:
            return
        yield end
        first, stored = end, int(ends[end - 1])
