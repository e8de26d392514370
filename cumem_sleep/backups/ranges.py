"""Ranges of segments: what a caller declares of them, and what has to survive beside what may be dropped."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

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
        live: what of a segment anybody uses, likewise; of those left out, all is in use.
    """

    tags: frozenset[str] = frozenset()
    may_go: Mapping[int, Spans] = field(default_factory=dict)
    live: Mapping[int, Spans] = field(default_factory=dict)

    def survives(self, segment: _core.Segment) -> Ranges | None:
        """What of `segment`, which is to be dropped, has to come back: ranges, or () for all of it; None: nothing."""
        if segment.tag not in self.tags:
            return None
        may_go = self.may_go.get(segment.id, [])
        rest = _aligned(without(self.live.get(segment.id, [(0, segment.bytes)]), may_go))
        if not rest:
            return None
        left_out = segment.bytes - sum(end - begin for begin, end in rest)
        if left_out == 0 or (not may_go and left_out < segment.bytes // _WHOLE):
            return ()
        return tuple((begin, end - begin) for begin, end in rest)


NOTHING_DECLARED = Declared()


def declared(
    drop: Mapping[int, npt.ArrayLike] | None, segments: Sequence[_core.Segment], in_use: Mapping[int, Spans]
) -> Declared:
    """What `CuMemAllocator.sleep` was told that it may drop.

    Args:
        segments: listed before `in_use`, so that this is not taken for that of segments made since.
        in_use: what of a segment anybody uses, by its address.

    Raises:
        InvalidArgument: an address or a range that does not lie in one of `segments`.
    """
    if drop is None:
        return NOTHING_DECLARED
    live = {segment.id: in_use[segment.address] for segment in segments if segment.address in in_use}
    given = _Given("drop", drop, segments, alignment=1)
    may_go: dict[int, Spans] = {}
    for place, begin, nbytes in given.joined.tolist():
        may_go.setdefault(given.segments[place].id, []).append((begin, begin + nbytes))
    return Declared(frozenset(given.segments[place].tag for place in given.places), may_go, live)


def ranges_to_keep(keep: Mapping[int, npt.ArrayLike], segments: Iterable[_core.Segment]) -> dict[int, RangeTable]:
    """What `CuMemAllocator.sleep` was asked to keep of each segment, by its id: in order, and adjacent ranges joined.

    Raises:
        InvalidArgument: an address or a range that does not lie in one of `segments`, or ranges that overlap.
    """
    given = _Given("keep", keep, segments, alignment=_ALIGNMENT)
    if given.joined[:, 2].sum() != given.bytes:
        raise InvalidArgument("keep: ranges overlap")
    parts = np.split(given.joined, np.flatnonzero(np.diff(given.joined[:, 0])) + 1) if given.joined.size else ()
    return {given.segments[part[0, 0]].id: part[:, 1:] for part in parts}


class _Given:
    """Ranges that were given by addresses, checked all at once: there may be hundreds of addresses.

    Attributes:
        segments: in order of their addresses.
        places: the numbers there of those in which an address lies.
        joined: rows of such a number, an offset and bytes: in order, with those joined that touch or overlap.
        bytes: of all ranges, as they were given.
    """

    def __init__(
        self, what: str, given: Mapping[int, npt.ArrayLike], segments: Iterable[_core.Segment], alignment: int
    ) -> None:
        if not isinstance(given, Mapping):
            raise InvalidArgumentType(f"{what}={shown(given)}: expected ranges by address")
        self.segments = sorted(segments, key=lambda segment: segment.address)
        starts, sizes = [s.address for s in self.segments], [s.bytes for s in self.segments]
        name, tables, self.places = f"an address to {what}", list[RangeTable](), list[int]()
        for address, rows in given.items():
            check_integer(name, address, minimum=0, maximum=MOST_ADDRESS)
            place = bisect_right(starts, address) - 1
            if place < 0 or address >= starts[place] + sizes[place]:
                raise InvalidArgument(f"{what}: 0x{address:x} is not in memory of this allocator's pools")
            self.places.append(place)
            tables.append(_table(f"{what}[0x{address:x}]", rows))
        counts = np.array([len(table) for table in tables], np.int64)
        of = np.repeat(np.arange(len(tables)), counts)  # by row, which address that is
        inside = np.array([address - starts[at] for address, at in zip(given, self.places, strict=True)], np.int64)
        begin, nbytes = np.concatenate([_NONE, *tables]).T
        begin, size = begin + inside[of], np.array([sizes[at] for at in self.places], np.int64)[of]
        outside = (begin < 0) | (nbytes < 0) | (nbytes > size) | (begin > size - nbytes)
        odd = (begin | nbytes) & (alignment - 1) != 0
        for is_wrong, why in (
            (outside, "a range is not in {}"),
            (odd, "expected addresses and bytes that are multiples of 16"),
        ):
            if is_wrong.any():
                number = of[int(is_wrong.argmax())]
                segment = describe(self.segments[self.places[number]])
                raise InvalidArgument(f"{what}[0x{[*given][number]:x}]: {why.format(segment)}")
        self.bytes = int(nbytes.sum())
        # Segments apart from one another, so that nothing is joined across them.
        base = np.array([0, *accumulate(nbytes + 1 for nbytes in sizes)], np.int64)
        table = np.column_stack((base[np.array(self.places, np.int64)][of] + begin, nbytes))
        joined = _union(table[nbytes > 0])
        at = np.searchsorted(base, joined[:, 0], "right") - 1
        self.joined = np.column_stack((at, joined[:, 0] - base[at], joined[:, 1]))


def _table(name: str, rows: npt.ArrayLike) -> RangeTable:
    """Rows of an offset and bytes, whatever their values.

    Raises:
        InvalidArgument: `rows` are something else.
    """
    try:
        table = np.asarray(rows)
    except Exception as error:  # rows of different lengths, a tensor on a GPU, or whatever else is no array
        raise InvalidArgument(f"{name}: expected integers of shape (n, 2): {error}") from error
    if table.size == 0:
        return _NONE
    if table.ndim != 2 or table.shape[1] != 2 or table.dtype.kind not in "iu":
        raise InvalidArgument(f"{name}: expected integers of shape (n, 2): offsets and bytes")
    if table.dtype == np.uint64:
        table = np.minimum(table, _BEYOND)
    return table.astype(np.int64, copy=False)


def _union(table: RangeTable) -> RangeTable:
    """In order, with those joined that touch or overlap."""
    table = table[np.argsort(table[:, 0], kind="stable")]
    ends = np.maximum.accumulate(table.sum(axis=1))
    first = np.flatnonzero(np.concatenate((np.full(len(table[:1]), True), table[1:, 0] > ends[:-1])))
    last = np.append(first[1:], len(table)) - 1
    return np.column_stack((table[first, 0], ends[last[: len(first)]] - table[first, 0]))


def spans_of(table: RangeTable) -> Spans:
    """The spans of ranges that may overlap."""
    return [(begin, begin + nbytes) for begin, nbytes in _union(table).tolist()]


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


def aligned_inwards(spans: Spans) -> Spans:
    """What of `spans`, which do not touch, a kernel can fill at once."""
    rounded = ((-(-begin // _ALIGNMENT) * _ALIGNMENT, end & -_ALIGNMENT) for begin, end in spans)
    return [(begin, end) for begin, end in rounded if begin < end]


def _aligned(spans: Spans) -> Spans:
    """Rounded outwards to what a kernel copies at once."""
    found: Spans = []
    for begin, end in spans:
        first, behind = begin & -_ALIGNMENT, -(-end // _ALIGNMENT) * _ALIGNMENT
        if found and first <= found[-1][1]:
            first = found.pop()[0]
        found.append((first, behind))
    return found
