"""Segment memory that the codec borrows when the GPU has none left, and whose content comes back afterwards."""

from __future__ import annotations

from contextlib import closing

from .. import _core
from ..errors import DriverError
from ..pinned import pinned_block


class Cleared:
    """The start of a segment with no bytes to keep: zeroed afterwards, as the driver hands out memory."""

    def __init__(self, segment: _core.Segment, nbytes: int) -> None:
        self._segment = segment
        self._bytes = nbytes
        self._is_back = False
        self._stream = _core.CopyStream(segment.device)

    def lend(self) -> None:
        """Nothing to save: nobody needs these bytes."""

    def put_back(self) -> None:
        """If it failed, call it again; otherwise a second call does nothing."""
        if not self._is_back:
            self._stream.zero(self._segment.address, self._bytes)
            self._stream.synchronize()
            self._is_back = True
        with self._stream:
            pass


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
        """From now on they may be overwritten.

        Not earlier: if an interrupt discards the workbench, nothing would put the bytes back.
        """
        self._segment.lend()

    def put_back(self) -> None:
        """If it failed, call it again: nobody else has these bytes. Otherwise a second call does nothing.

        The copy is tried twice. If it has not succeeded when the operation ends, the segment is dropped.
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
