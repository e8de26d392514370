"""Device memory through which chunks pass, batch by batch, on their way to host memory or back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .. import _core
from ..extents import Lane, Transfers
from .codec import Bytes
from .table import ROW_BYTES, set_rows


def head_bytes(rows: int) -> int:
    """The size of what precedes a slot's chunks: a table of `rows` rows, a counter for each, and alignment."""
    return -(-rows * (ROW_BYTES + 4) // _HEAD_ALIGN_BYTES) * _HEAD_ALIGN_BYTES


_HEAD_ALIGN_BYTES = 64 << 10


class Slot:
    """Device memory for one batch, its table, and its stream.

    Args:
        block: pinned host memory for the tables of all slots: to pin it takes as long as to pin one.
        number: which of these slots this is.

    Attributes:
        segments: ids of the segments that are being encoded.
        lane: copies encoded chunks, in the order of its stream; `use` sets it.
    """

    def __init__(self, device: int, address: int, rows: int, block: _core.HostBlock, number: int) -> None:
        self._finished: Callable[[Slot], None] | None = None
        self._copies: Callable[[], None] | None = None
        self._readers: list[tuple[slice, Callable[[npt.NDArray[np.uint32]], None]]] = []
        self._counted = 0  # counters in use
        self.segments: set[int] = set()
        counters_at = rows * ROW_BYTES
        self._counters_at = counters_at
        self._counters_address = address + counters_at
        self.chunks_address = address + head_bytes(rows)
        self.stream = _core.CopyStream(device)  # before the block: destroyed in this order if nobody closes the slot
        self.lane: Lane | None = None
        self._block, self._offset = block, number * head_bytes(rows)
        content = np.frombuffer(memoryview(block), np.uint8)[self._offset :]
        self._rows = content[:counters_at].view("<u8").reshape(-1, 4)
        self._counters = content[counters_at : counters_at + 4 * rows].view("<u4")
        self._address = address
        self.table = address or block.address + self._offset

    def close(self) -> None:
        """Wait for what is in flight. Closing again does nothing."""
        self._finished = self._copies = None
        self._readers = []
        with self.stream:
            pass

    def set_rows(self, parameters: Bytes, sources: npt.ArrayLike, targets: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        """Set the table of the next kernel; `parameters` are those of each chunk's code."""
        set_rows(self._rows[: len(parameters)], parameters, sources, targets, sizes)
        if self._address:
            self.stream.to_device(self.table, self._block, self._offset, len(parameters) * ROW_BYTES)

    def counters_for(self, chunks: int, found: Callable[[npt.NDArray[np.uint32]], None]) -> int:
        """The address of a counter for each of so many chunks, all zero. `read_counters` gives them to `found`."""
        if self._counted + chunks > len(self._counters):
            self.read_counters()
        mine = slice(self._counted, self._counted + chunks)
        self._readers.append((mine, found))
        self._counted = mine.stop
        address = self._counters_address + 4 * mine.start
        self.stream.zero(address, 4 * chunks)
        return address

    def read_counters(self) -> None:
        """Wait for the kernels, and give their counters to whoever asked for them since the last time.

        Not after each kernel: as a copy to the host, however small, it would queue behind those of other slots.
        """
        readers, self._readers = self._readers, []
        counted, self._counted = self._counted, 0
        if readers:
            self.stream.to_host(self._block, self._offset + self._counters_at, self._counters_address, 4 * counted)
            self.stream.synchronize()
        for mine, found in readers:
            found(self._counters[mine])

    def use(self, transfers: Transfers) -> Lane:
        """A lane of `transfers`, for everything that is begun from here on."""
        self.lane = transfers.lane(self.stream)
        return self.lane

    @property
    def opened_lane(self) -> Lane:
        """The lane that `use` has opened."""
        assert self.lane is not None
        return self.lane

    def join(self) -> None:
        """Make kernels launched on its stream from here on see what was copied to it."""
        if self.lane is not None:
            self.lane.join()

    def synchronize(self) -> None:
        """Wait for the pending work on its stream, including copies to and from extents."""
        (self.lane or self.stream).synchronize()

    def copy_later(self, copies: Callable[[], None]) -> None:
        """Let `copy`, or at the latest `finish`, call `copies`, which begins to copy what a kernel on its stream wrote.

        A lane may have to wait for the kernel. So one slot's copies begin when the next one's kernel is at work. They
        begin before `finish` returns.
        """
        self._copies = copies

    def copy(self) -> None:
        """Begin the copies that were left for later, if there are any."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies()

    def begun(self, then: Callable[[Slot], None] | None = None) -> None:
        """Note that `finish` has something to wait for; after that it calls `then` with the slot."""
        self._finished = then or _nothing

    def finish(self) -> None:
        """Wait for the pending work, then run its completion callback. Does nothing if nothing is pending."""
        finished, self._finished = self._finished, None
        if finished is not None:
            self.copy()
            self.synchronize()
            self.segments = set()
            finished(self)


def _nothing(_: Slot) -> None:
    pass
