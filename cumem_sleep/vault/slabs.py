"""Memory of fixed size: what of its slabs is free, and the ranges that are taken."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

UNIT_BYTES = 64 << 10  # what an extent's size is rounded up to: small beside a backup, large for a copy


class SlabRange(NamedTuple):
    """A range of a slab: `nbytes` from `offset` on."""

    slab: int
    offset: int
    nbytes: int


class Slabs:
    """Slabs on NUMA nodes.

    Attributes:
        nbytes: the size of all.
        free_bytes: of these.
    """

    def __init__(self) -> None:
        self.nbytes = self.free_bytes = 0
        self._nodes: dict[int, int] = {}  # of the slabs, by their numbers
        self._runs: dict[int, _FreeRuns] = {}  # by node

    def add(self, slab: int, nbytes: int, node: int = -1) -> None:
        """One more, on that NUMA node."""
        self._nodes[slab] = node
        self.nbytes += nbytes
        self.give_back([SlabRange(slab, 0, nbytes)])

    def take(self, nbytes: int, node: int = -1) -> list[SlabRange]:
        """The smallest free run that is large enough, on that node if there is one, or the largest ones until it is
        enough. So much must be free.
        """
        taken: list[SlabRange] = []
        left = nbytes
        while left:
            fits = [(at != node, size, at) for at, runs in self._runs.items() if (size := runs.smallest(left))]
            size, at = min(fits)[1:] if fits else max((runs.largest(), at) for at, runs in self._runs.items())
            taken.append(self._runs[at].take(size, left))
            left -= taken[-1].nbytes
        self.free_bytes -= nbytes
        return taken

    def give_back(self, ranges: Iterable[SlabRange]) -> None:
        """These are free again."""
        for each in ranges:
            self._runs.setdefault(self._nodes[each.slab], _FreeRuns()).give_back(*each)
            self.free_bytes += each.nbytes


class _FreeRuns:
    """The free runs of the slabs of one NUMA node."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # bytes, slab and offset of each, in order
        self._sizes_at: dict[tuple[int, int], int] = {}  # by slab and offset
        self._starts: dict[tuple[int, int], int] = {}  # by slab and end

    def smallest(self, nbytes: int) -> int:
        """The size of the smallest run of at least so many bytes; 0 if there is none."""
        at = bisect_left(self._by_size, (nbytes, 0, 0))
        return self._by_size[at][0] if at < len(self._by_size) else 0

    def largest(self) -> int:
        """The size of the largest run; 0 if there is none."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, size: int, nbytes: int) -> SlabRange:
        """`nbytes` of a run of this size, at most all of it."""
        _, slab, offset = self._by_size[bisect_left(self._by_size, (size, 0, 0))]
        self.remove(slab, offset)
        if size > nbytes:
            self._add(slab, offset + nbytes, size - nbytes)
        return SlabRange(slab, offset, min(size, nbytes))

    def give_back(self, slab: int, offset: int, nbytes: int) -> None:
        """Make these bytes free again, in one run with the free ones beside them."""
        if (slab, offset + nbytes) in self._sizes_at:
            nbytes += self.remove(slab, offset + nbytes)
        if (slab, offset) in self._starts:
            start = self._starts[slab, offset]
            nbytes += self.remove(slab, start)
            offset = start
        self._add(slab, offset, nbytes)

    def remove(self, slab: int, offset: int) -> int:
        """The run that begins there; returns its size."""
        nbytes = self._sizes_at.pop((slab, offset))
        del self._starts[slab, offset + nbytes]
        del self._by_size[bisect_left(self._by_size, (nbytes, slab, offset))]
        return nbytes

    def _add(self, slab: int, offset: int, nbytes: int) -> None:
        self._sizes_at[slab, offset] = nbytes
        self._starts[slab, offset + nbytes] = offset
        insort(self._by_size, (nbytes, slab, offset))
