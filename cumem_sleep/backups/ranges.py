"""Ranges of segments: what a caller declares of them, and what has to survive beside what may be dropped."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .. import _core
from ..core.extents import Ranges, RangeTable
from ..core.segments import describe
from ..errors import MOST_ADDRESS, InvalidArgument, InvalidArgumentType, check_integer, shown

_NONE: RangeTable = np.empty((0, 2), np.int64)
_BEYOND = 1 << 62
_ALIGNMENT = 16  # what a kernel copies at once
_WHOLE = 8  # where less than an eighth of a segment may be left out, all of it is backed up


Spans = list[tuple[int, int]]  # of one segment: begin and end, in order, apart from one another


@dataclass(frozen=True)
class Declared:
    """What of the memory of some tags will be written again by somebody, and so may be dropped. All else survives.

    Attributes:
        tags: a tag that is not among them has no declaration, and is dropped whole.
        may_go: what was declared, by the ids of segments.
        live: what of a segment anybody uses, by its address; of those left out, all is in use.
    """

    tags: frozenset[str] = frozenset()
    may_go: Mapping[int, Spans] = field(default_factory=dict)
    live: Mapping[int, Spans] = field(default_factory=dict)

    def survives(self, segment: _core.Segment) -> Ranges | None:
        """What of `segment`, which is to be dropped, has to come back: ranges, or () for all of it; None: nothing."""
        if segment.tag not in self.tags:
            return None
        may_go = self.may_go.get(segment.id, [])
        rest = _aligned(without(self.live.get(segment.address, [(0, segment.bytes)]), may_go))
        if not rest:
            return None
        left_out = segment.bytes - sum(end - begin for begin, end in rest)
        if left_out == 0 or (not may_go and left_out < segment.bytes // _WHOLE):
            return ()
        return tuple((begin, end - begin) for begin, end in rest)


NOTHING_DECLARED = Declared()


def declared(
    drop: Mapping[int, npt.ArrayLike] | None, segments: Sequence[_core.Segment], live: Mapping[int, Spans]
) -> Declared:
    """What `CuMemAllocator.sleep` was told that it may drop.

    Args:
        live: as `Declared.live`.

    Raises:
        InvalidArgument: an address or a range that does not lie in one of `segments`.
    """
    if drop is None:
        return NOTHING_DECLARED
    found = _by_segment("drop", drop, segments, alignment=1)
    may_go = {key: spans for key, tables in found.items() if (spans := spans_of(np.concatenate([_NONE, *tables])))}
    return Declared(frozenset(segment.tag for segment in segments if segment.id in found), may_go, live)


def ranges_to_keep(keep: Mapping[int, npt.ArrayLike], segments: Iterable[_core.Segment]) -> dict[int, RangeTable]:
    """What `CuMemAllocator.sleep` was asked to keep of each segment, by its id: in order, and adjacent ranges joined.

    Raises:
        InvalidArgument: an address or a range that does not lie in one of `segments`, or ranges that overlap.
    """
    found: dict[int, RangeTable] = {}
    for key, tables in _by_segment("keep", keep, segments, alignment=_ALIGNMENT).items():
        joined = _union(tables)
        if joined[:, 1].sum() != sum(table[:, 1].sum() for table in tables):
            raise InvalidArgument("keep: ranges overlap")
        if joined.size:
            found[key] = joined
    return found


def _by_segment(
    what: str, given: Mapping[int, npt.ArrayLike], segments: Iterable[_core.Segment], alignment: int
) -> dict[int, list[RangeTable]]:
    """The ranges that were given by addresses, as offsets in their segments, by the segments' ids."""
    if not isinstance(given, Mapping):
        raise InvalidArgumentType(f"{what}={shown(given)}: expected ranges by address")
    ordered = sorted(segments, key=lambda segment: segment.address)
    addresses = [segment.address for segment in ordered]
    found: dict[int, list[RangeTable]] = {}
    for address, rows in given.items():
        check_integer(f"an address to {what}", address, minimum=0, maximum=MOST_ADDRESS)
        segment = ordered[max(0, bisect_right(addresses, address) - 1)] if ordered else None
        if segment is None or not segment.address <= address < segment.address + segment.bytes:
            raise InvalidArgument(f"{what}: 0x{address:x} is not in memory of this allocator's pools")
        tables = found.setdefault(segment.id, [])
        try:
            table = np.asarray(rows)
        except Exception as error:  # rows of different lengths, a tensor on a GPU, or whatever else is no array
            raise InvalidArgument(f"{what}[0x{address:x}]: expected integers of shape (n, 2): {error}") from error
        if table.size == 0:
            continue
        if table.ndim != 2 or table.shape[1] != 2 or table.dtype.kind not in "iu":
            raise InvalidArgument(f"{what}[0x{address:x}]: expected integers of shape (n, 2): offsets and bytes")
        offset = address - segment.address
        if int(table.min()) < -offset or table[:, 1].min() < 0 or int(table.max()) > segment.bytes:
            raise InvalidArgument(f"{what}[0x{address:x}]: a range is not in {describe(segment)}")
        table = table.astype(np.int64) + np.array((offset, 0))
        if (table[:, 0] < 0).any() or (table[:, 0] + table[:, 1] > segment.bytes).any():
            raise InvalidArgument(f"{what}[0x{address:x}]: a range is not in {describe(segment)}")
        if (table & (alignment - 1)).any():
            raise InvalidArgument(f"{what}[0x{address:x}]: expected addresses and bytes that are multiples of 16")
        tables.append(table[table[:, 1] > 0])
    return found


def _union(tables: Iterable[RangeTable]) -> RangeTable:
    """In order, with those joined that touch or overlap."""
    table = np.concatenate([_NONE, *tables])
    table = table[np.argsort(table[:, 0], kind="stable")]
    ends = np.maximum.accumulate(table.sum(axis=1))
    first = np.flatnonzero(np.concatenate((np.full(len(table[:1]), True), table[1:, 0] > ends[:-1])))
    last = np.append(first[1:], len(table)) - 1
    return np.column_stack((table[first, 0], ends[last[: len(first)]] - table[first, 0]))


def spans_of(table: RangeTable) -> Spans:
    """The spans of ranges that may overlap."""
    return [(begin, begin + nbytes) for begin, nbytes in _union([table]).tolist()]


def without(spans: Spans, others: Spans) -> Spans:
    """`spans`, less what `others` cover."""
    rest: Spans = []
    holes = iter([*others, (_BEYOND, _BEYOND)])
    hole, hole_end = next(holes)
    for begin, end in spans:
        while begin < end:
            while hole_end <= begin:
                hole, hole_end = next(holes)
            if begin < hole:
                rest.append((begin, min(hole, end)))
            begin = min(hole_end, end) if hole < end else end  # noqa: PLW2901
    return rest


def covers(spans: Iterable[tuple[int, int]], nbytes: int) -> bool:
    """Whether spans, in any order, cover all of so many bytes."""
    end = 0
    for begin, behind in sorted(spans):
        if begin > end:
            return False
        end = max(end, behind)
    return end >= nbytes


def less(table: RangeTable, other: RangeTable) -> RangeTable:
    """As `without`, of tables."""
    rest = without(spans_of(table), spans_of(other))
    return np.array([(begin, end - begin) for begin, end in rest], np.int64).reshape(-1, 2)


def _aligned(spans: Spans) -> Spans:
    """Rounded outwards to what a kernel copies at once."""
    found: Spans = []
    for begin, end in spans:
        first, behind = begin & -_ALIGNMENT, -(-end // _ALIGNMENT) * _ALIGNMENT
        if found and first <= found[-1][1]:
            first = found.pop()[0]
        found.append((first, behind))
    return found
