"""Copies of many small ranges at once: a table says which, and a kernel copies what it says in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..core.extents import cut
from ..errors import InvalidArgument
from .protocol import Table
from .slabs import SlabRange

PIECE_ROWS = 1 << 12
_PIECE_BYTES = 64 << 20  # as other pieces, so that clients take turns
SMALL_RANGE_BYTES = 1 << 20  # one of the kernel's blocks copies a row


def check_table(ranges: Table, lent_bytes: int, backup_bytes: int) -> None:
    """See that these can be copied, in any order: rows of an offset in lent memory, one in a backup, and bytes.

    Raises:
        InvalidArgument: they lie beyond either, overlap, or are empty.
    """
    at, offset, nbytes = ranges.T
    if (nbytes == 0).any():
        raise InvalidArgument("ranges: one has no bytes")
    for start, whole in ((at, lent_bytes), (offset, backup_bytes)):
        if (start > whole - nbytes).any():
            raise InvalidArgument(f"ranges: one lies beyond {lent_bytes} bytes of memory or {backup_bytes} of a backup")
        order = np.argsort(start)
        if ((start + nbytes)[order][:-1] > start[order][1:]).any():
            raise InvalidArgument("ranges: they overlap")


def table_pieces(ranges: Table, extents: Sequence[SlabRange]) -> Iterator[tuple[int, Table]]:
    """The slab of each piece, and its rows: of an offset in lent memory, one in the slab, and bytes."""
    slab, start, size = np.array(extents).T
    ends = np.cumsum(size)
    part, rows = cut(ranges, ends)
    rows[:, 1] += (start - ends + size)[part]
    order = np.argsort(slab[part], kind="stable")
    rows, slabs = rows[order], slab[part][order]
    changes = np.diff(slabs) != 0
    for number in (np.cumsum(rows[:, 2]) // _PIECE_BYTES, np.arange(len(rows)) // PIECE_ROWS):
        changes |= np.diff(number) != 0
    for some in np.split(np.arange(len(rows)), np.flatnonzero(changes) + 1) if len(rows) else ():
        yield int(slabs[some[0]]), rows[some]
