"""Sizes and places of encoded chunks, and which are coded together. A chunk's format is its codec's (`exponent`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from .. import _core
from ..core.extents import Extent, Piece
from ..errors import InvalidState
from .codec import CHUNK_BYTES, Bytes, Code, Integers, parameters_of


class ChangedMeanwhile(InvalidState):
    """A segment was written to between plan and encoding."""


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
        return replace(
            self,
            offset=self.offset + int(self.sizes[:first].sum()),
            address=self.address + first * CHUNK_BYTES,
            sizes=self.sizes[first:end],
            is_last=self.is_last and end >= len(self),
        )


class ChunkBatch:
    """Chunks of one layout, for one launch of a kernel, one after another in a slot.

    Attributes:
        sizes: bytes of each encoded chunk.
        starts: where each begins in the slot.
    """

    def __init__(self, runs: Sequence[EncodedRun]) -> None:
        self.runs = runs
        self.layout = runs[0].code.layout
        self.sizes = np.concatenate([run.sizes for run in runs])
        self.starts: Integers = np.cumsum(self.sizes) - self.sizes
        self.bytes = int(self.sizes.sum())

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def parameters(self) -> Bytes:
        """Of each chunk's code."""
        return np.repeat(parameters_of([run.code for run in self.runs]), [len(run) for run in self.runs], axis=0)

    @property
    def addresses(self) -> Integers:
        """Where each chunk's content is on the device."""
        return np.concatenate([run.address + CHUNK_BYTES * np.arange(len(run)) for run in self.runs])

    def pieces(self, address: int) -> list[Piece]:
        """The encoded chunks, as they are copied between the extents and a slot whose chunks begin at `address`."""
        starts = accumulate((run.bytes for run in self.runs), initial=address)
        return [Piece(run.extent, run.offset, start, run.bytes) for run, start in zip(self.runs, starts, strict=False)]

    def check_sizes(self, counters: npt.NDArray[np.uint32]) -> None:
        """Compare what was encoded, without headers, with what was planned.

        Raises:
            ChangedMeanwhile: a chunk does not have the planned size.
        """
        encoded = counters + self.layout.header_bytes
        if (differing := np.flatnonzero(encoded != self.sizes)).size:
            segment = [run.segment for run in self.runs for _ in range(len(run))][differing[0]]
            raise ChangedMeanwhile(
                f"the segment at 0x{segment.address:x} was written to while it was backed up: run no work on"
                " the GPU during sleep, and call again; everything is awake"
            )


def batches(runs: Iterable[EncodedRun], most_rows: int, most_bytes: int) -> Iterator[ChunkBatch]:
    """The chunks in batches, in order; those of one batch have the same layout, and are at most so many and so large.

    A chunk that is larger is alone.
    """
    batch: list[EncodedRun] = []
    rows, room = most_rows, most_bytes  # left in the batch
    for run in runs:
        first = 0
        while first < len(run):
            fits = int(np.searchsorted(np.cumsum(run.sizes[first : first + rows]), room, side="right"))
            if batch and (not fits or batch[0].code.layout != run.code.layout):
                yield ChunkBatch(batch)
                batch, rows, room = [], most_rows, most_bytes
                continue
            part = run.part(first, first + max(fits, 1))
            batch.append(part)
            first, rows, room = first + len(part), rows - len(part), room - part.bytes
    if batch:
        yield ChunkBatch(batch)
