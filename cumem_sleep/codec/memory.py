"""The device memory that a workspace works in: free memory or, where the device has none left, that of a segment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import product

from .. import _core
from ..core.pinned import pinned_block
from ..core.tuning import Tuning
from ..errors import OutOfDeviceMemory
from .codec import CHUNK_BYTES
from .slots import head_bytes


def workspace_bytes(tuning: Tuning, slots: int, slot_bytes: int) -> int:
    """The size of all slots, in whole pages."""
    nbytes = slots * (head_bytes(tuning.rows) + slot_bytes)
    return -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES


class SegmentLoan:
    """The start of a segment, while it is used for something else. Afterwards its bytes are there again, or zeros.

    Zeros are what the driver hands out memory with.
    """

    def __init__(self, segment: _core.Segment, nbytes: int, *, keep_bytes: bool) -> None:
        self.address = segment.address
        self._segment = segment
        self._bytes = nbytes
        self._is_back = False
        self._stream = _core.CopyStream(segment.device)
        self._kept: _core.HostBlock | None = None
        if keep_bytes:
            self._kept = pinned_block(nbytes, segment.device, -1)
            self._stream.to_host(self._kept, 0, segment.address, nbytes)
            self._stream.synchronize()

    def lend(self) -> None:
        """From now on its bytes may be overwritten.

        Not earlier: if an interrupt discards the workspace, nothing would put the bytes back.
        """
        if self._kept is not None:
            self._segment.lend()

    def close(self) -> None:
        """Put the bytes back. If it failed, call it again: nobody else has them. Otherwise that does nothing.

        If it has not succeeded when the operation ends, the segment is dropped.
        """
        if not self._is_back:
            if self._kept is None:
                self._stream.zero(self.address, self._bytes)
            else:
                self._stream.to_device(self.address, self._kept, 0, self._bytes)
            self._stream.synchronize()
            if self._kept is not None:
                self._segment.take_back()
            self._is_back = True
        with self._stream:
            pass
        if self._kept is not None:
            self._kept.close()


def take_memory(
    device: int, tuning: Tuning, spare_bytes: int, lending_segments: Sequence[_core.Segment], *, keep_bytes: bool
) -> tuple[_core.Scratch | SegmentLoan | None, int, int]:
    """Memory for slots (None: there is none), how many they are, and how many bytes of encoded chunks each takes.

    Args:
        spare_bytes: how much may be free memory.
        lending_segments: segments that may lend theirs.
        keep_bytes: whether their bytes are put back.
    """
    for slots, slot_bytes in ((tuning.most_slots, tuning.slot_bytes[0]), *product([tuning.slots], tuning.slot_bytes)):
        nbytes = workspace_bytes(tuning, slots, slot_bytes)
        with suppress(OutOfDeviceMemory):
            if nbytes <= spare_bytes:
                return _core.Scratch(device, nbytes), slots, slot_bytes
    slots, slot_bytes = tuning.slots, tuning.lent_slot_bytes
    nbytes = workspace_bytes(tuning, slots, slot_bytes)
    large = [segment for segment in lending_segments if segment.device == device and segment.bytes >= nbytes]
    if not large:
        return None, slots, slot_bytes
    segment = min(large, key=lambda segment: segment.bytes)  # mapping may wait for the driver to scrub
    segment.map()
    return SegmentLoan(segment, nbytes, keep_bytes=keep_bytes), slots, slot_bytes
