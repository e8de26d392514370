"""The interface between the code that moves bytes and the tiers that keep them: extents, and lanes to them.

Nothing here depends on which tier it is, or whose memory; `backups.tier` defines what a tier is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .. import _core


Ranges = tuple[tuple[int, int], ...]  # of one segment: (offset, bytes), multiples of 16, in order; () is all of it
RangeTable = npt.NDArray[np.int64]  # of one segment: rows of offset and bytes, multiples of 16, in order
PieceTable = npt.NDArray[np.int64]  # rows of a device address, an offset in one extent, and bytes, multiples of 16
PieceRows = PieceTable | tuple[tuple[int, int, int], ...]  # a tuple where they are few


class Extent(Protocol):
    """A range of a tier's memory that holds a backup, or a part of one."""

    @property
    def bytes(self) -> int:
        """Its size."""

    @property
    def address(self) -> int:
        """Where kernels of this process find its bytes, if `Lane.kernels_reach` and it is pinned."""


class Lane(ABC):
    """Asynchronous copies between one device and extents, in the order of a stream.

    By itself it is one whose copies all are on the stream.

    Attributes:
        stream: the stream for kernels that fill, or use, the device memory of these copies.
        kernels_reach: whether kernels of this process can access the bytes of pinned extents by their address.
    """

    kernels_reach = False

    def __init__(self, stream: _core.CopyStream) -> None:
        self.stream = stream

    def pin(self, extents: Iterable[Extent]) -> None:  # noqa: B027
        """Let kernels reach these by their address; without `kernels_reach` it does nothing.

        What was written through a lane is pinned already, unless the tier has unpinned it since. `begin` needs no call.

        Raises:
            DriverError, OutOfHostMemory: refused.
        """

    @abstractmethod
    def begin(self, extent: Extent, rows: PieceRows, *, out: bool, by_kernel: bool = False) -> bool:
        """Begin to copy `rows` from the device to `extent` (`out`), or from there to the device.

        Args:
            by_kernel: by a kernel of this process, where it reaches the extent; where it fails, the copy engine takes
                over. A table is one launch.

        Returns:
            Whether a kernel copies them.

        Raises:
            DriverError, OutOfHostMemory: refused; not all was begun.
        """

    def join(self) -> None:  # noqa: B027
        """Make kernels launched on the stream from here on see the bytes of all copies that were begun before.

        Raises:
            DriverError: a copy failed.
        """

    @abstractmethod
    def content(self, extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The bytes there, for the CPU; copies to them have ended."""

    def synchronize(self) -> None:
        """Wait for all copies that were begun, and for the kernels on the stream.

        Raises:
            DriverError: a copy or kernel failed.
        """
        self.stream.synchronize()


class LaneGroup(ABC):
    """The lanes of one operation: a context manager. Leave it only when no copy is in flight.

    When it has been left, nobody else has a hold on the device memory of these copies.

    Attributes:
        most_lanes: on which batches may be in flight: 5 ms of a link, because the driver may block the caller for that
            long while it maps.
    """

    most_lanes = 4

    def __enter__(self) -> LaneGroup:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def expect(self, extents: Iterable[Extent]) -> None:  # noqa: B027
        """Announce extents that are written next, so that they can be prepared ahead."""

    def done_with(self, addresses: Iterable[int]) -> None:  # noqa: B027
        """Announce that no copy of the segments at these addresses follows, and none is in flight.

        Whoever was lent their memory can begin to give it back, while others are copied.
        """

    def end(self) -> None:  # noqa: B027
        """Announce the same of all memory: what leaving has to wait for can begin."""

    @abstractmethod
    def lane(self, stream: _core.CopyStream) -> Lane:
        """A lane in the order of `stream`, which the caller closes after the last copy."""


@dataclass(frozen=True)
class Piece:
    """Contiguous bytes: in an extent at `offset`, on the device at `address`."""

    extent: Extent
    offset: int
    address: int
    bytes: int

    def split(self, nbytes: int) -> tuple[Piece, Piece]:
        """The first `nbytes` bytes, and the rest."""
        rest = Piece(self.extent, self.offset + nbytes, self.address + nbytes, self.bytes - nbytes)
        return Piece(self.extent, self.offset, self.address, nbytes), rest

    @property
    def rows(self) -> tuple[tuple[int, int, int]]:
        """For `Lane.begin`."""
        return ((self.address, self.offset, self.bytes),)


def cut(rows: PieceTable, ends: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], PieceTable]:
    """The same rows, cut where their offsets pass one of `ends`, which ascend; and the number of the part of each."""
    address, offset, nbytes = rows.T
    first = np.searchsorted(ends, offset, "right")
    counts = np.searchsorted(ends, offset + nbytes - 1, "right") - first + 1  # parts that a row lies in
    of = np.repeat(np.arange(len(rows)), counts)
    part = first[of] + np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
    begin = np.maximum(offset[of], np.concatenate(([0], ends))[part])
    end = np.minimum((offset + nbytes)[of], ends[part])
    return part, np.column_stack(((address - offset)[of] + begin, begin, end - begin))
