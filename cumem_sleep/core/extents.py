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

        What was written through a lane is pinned already, unless the tier has unpinned it since. `read` needs no call.

        Raises:
            DriverError, OutOfHostMemory: refused.
        """

    @abstractmethod
    def write(self, extent: Extent, offset: int, address: int, nbytes: int) -> None:
        """Begin to copy `nbytes` at the device's `address` to `offset` in `extent`.

        Raises:
            DriverError, OutOfHostMemory: refused; nothing was begun.
        """

    @abstractmethod
    def read(self, address: int, extent: Extent, offset: int, nbytes: int, *, by_kernel: bool = False) -> None:
        """Begin to copy `nbytes` at `offset` in `extent` to the device's `address`.

        Args:
            by_kernel: by a kernel of this process instead of the copy engine; only if `kernels_reach`. Both addresses
                are multiples of 16.

        Raises:
            DriverError, OutOfHostMemory: refused; nothing was begun.
        """

    def write_pieces(self, extent: Extent, pieces: PieceTable) -> None:
        """Begin to copy all of `pieces` from the device to `extent`.

        Raises:
            DriverError, OutOfHostMemory: not all was begun.
        """
        for address, offset, nbytes in pieces.tolist():
            self.write(extent, offset, address, nbytes)

    def read_pieces(self, extent: Extent, pieces: PieceTable) -> None:
        """Begin to copy all of `pieces` from `extent` to the device; raises as `write_pieces`."""
        for address, offset, nbytes in pieces.tolist():
            self.read(address, extent, offset, nbytes)

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


class Transfers(ABC):
    """The lanes of one operation: a context manager. Leave it only when no copy is in flight.

    When it has been left, nobody else has a hold on the device memory of these copies.

    Attributes:
        most_lanes: on which batches may be in flight: 5 ms of a link, because the driver may block the caller for that
            long while it maps.
    """

    most_lanes = 4

    def __enter__(self) -> Transfers:
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
