"""Memory of a segment that the codec works in where the GPU has none left: what lay there comes back."""

from __future__ import annotations

from contextlib import closing

from .. import _core
from ..errors import DriverError
from ..pinned import pinned_block


class Cleared:
    """The start of a segment that has no bytes to keep: zeros, as the driver gives memory, not what was done there."""

    def __init__(self, segment: _core.Segment, nbytes: int) -> None:
        self._segment = segment
        self._bytes = nbytes
        self._is_back = False
        self._stream = _core.CopyStream(segment.device)

    def lend(self) -> None:
        """Nobody misses what lies there."""

    def put_back(self) -> None:
        """Call it again where it failed. Else that does nothing."""
        if not self._is_back:
            self._stream.zero(self._segment.address, self._bytes)
            self._stream.synchronize()
            self._is_back = True


class Kept:
    """The first bytes of a segment, for as long as its memory is used for something else."""

    def __init__(self, segment: _core.Segment, nbytes: int) -> None:
        self._segment = segment
        self._bytes = nbytes
        self._is_back = False
        self._stream = _core.CopyStream(segment.device)
        self._block = pinned_block(nbytes, segment.device, -1)
        self._stream.to_host(self._block, 0, segment.address, nbytes)
        self._stream.synchronize()

    def lend(self) -> None:
        """From here on they are overwritten. Not earlier: a bench that an interrupt lost is not closed, nor used."""
        self._segment.lend()

    def put_back(self) -> None:
        """Call it again where it failed: nobody else has these bytes. Else that does nothing.

        The driver is asked twice. If it has not taken them when the operation ends, the segment is dropped.
        """
        if not self._is_back:
            try:
                self._copy_back()
            except DriverError:
                self._copy_back()
            self._segment.take_back()
            self._is_back = True
        with closing(self._block), self._stream:
            pass

    def _copy_back(self) -> None:
        self._stream.to_device(self._segment.address, self._block, 0, self._bytes)
        self._stream.synchronize()
