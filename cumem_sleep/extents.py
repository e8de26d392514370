"""The seam between those who move bytes and those who keep them: extents of a tier, and lanes to them.

Which tier it is, and whose memory, is not known here; `backups.tier` says what a tier is.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from . import _core


class Extent(Protocol):
    """A range of a tier's memory that holds a backup, or a part of one."""

    @property
    def bytes(self) -> int:
        """Its size."""

    @property
    def address(self) -> int:
        """Where kernels of this process find its bytes, if lanes say that they reach them."""


class Lane(Protocol):
    """Asynchronous copies between one device and extents, in the order of a stream."""

    @property
    def stream(self) -> _core.CopyStream:
        """On this, kernels are launched that fill, or use, the device memory of these copies."""

    @property
    def kernels_reach(self) -> bool:
        """Whether kernels of this process reach what lies in the extents, under their address."""

    def write(self, extent: Extent, offset: int, address: int, nbytes: int) -> None:
        """Begin to copy `nbytes` at the device's `address` to `offset` in `extent`.

        Raises:
            DriverError, OutOfHostMemory: refused; nothing was begun.
        """

    def read(self, address: int, extent: Extent, offset: int, nbytes: int) -> None:
        """Begin to copy `nbytes` at `offset` in `extent` to the device's `address`.

        Raises:
            DriverError: refused; nothing was begun.
        """

    def join(self) -> None:
        """Kernels that are launched on the stream from here on find what copies that were begun before it bring.

        Raises:
            DriverError: a copy failed.
        """

    def content(self, extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """What lies there, for the CPU; copies to it have ended."""

    def synchronize(self) -> None:
        """Wait for what was begun, and for the kernels on the stream.

        Raises:
            DriverError: a copy or kernel failed.
        """


class Transfers(Protocol):
    """The lanes of one operation: a context. Leave it when no copy is in flight."""

    def __enter__(self) -> Transfers: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def expect(self, extents: Iterable[Extent]) -> None:
        """These are written next: what can be made ready ahead, is."""

    def lane(self, stream: _core.CopyStream) -> Lane:
        """A lane in the order of `stream`, which the caller closes after the last copy."""


@dataclass(frozen=True)
class Piece:
    """Bytes that lie together, in an extent at `offset` and on the device at `address`."""

    extent: Extent
    offset: int
    address: int
    bytes: int

    def split(self, nbytes: int) -> tuple[Piece, Piece]:
        """The first so many bytes, and the rest."""
        rest = Piece(self.extent, self.offset + nbytes, self.address + nbytes, self.bytes - nbytes)
        return Piece(self.extent, self.offset, self.address, nbytes), rest
