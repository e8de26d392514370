"""Device memory through which chunks pass, batch by batch, on their way to host memory or back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .. import _core
from ..core.extents import Lane, LaneGroup
from .chunks import ChunkBatch
from .codec import ROW_BYTES, Bytes, Integers, Layout, rows
from .codecs import kernels_of
from .kernels import launching


def head_bytes(most_rows: int) -> int:
    """The size of what precedes a slot's chunks: a table of so many rows, a counter for each, and alignment."""
    return -(-most_rows * (ROW_BYTES + 4) // _HEAD_ALIGN_BYTES) * _HEAD_ALIGN_BYTES


_HEAD_ALIGN_BYTES = 64 << 10


class Slot:
    """Device memory for one batch, its table and counters, and its stream.

    Args:
        block: pinned host memory for the tables of all slots: to pin it takes as long as to pin one.
        number: which of these slots this is.

    Attributes:
        batch: what is being encoded, or copied after that.
        is_busy: `finish` has something to wait for.
        lane: copies encoded chunks, in the order of its stream; `use` sets it.
    """

    def __init__(self, device: int, address: int, most_rows: int, block: _core.HostBlock, number: int) -> None:
        self.batch: ChunkBatch | None = None
        self.is_busy = False
        self._uncopied: ChunkBatch | None = None
        # Whose counters have not been read: what was encoded, and the sizes of what is being counted.
        self._counted: list[ChunkBatch | Integers] = []
        self._most_rows = most_rows
        self._address = address
        self.chunks_address = address + head_bytes(most_rows)
        self.stream = _core.CopyStream(device)  # before the block: destroyed in this order if nobody closes it
        self.lane: Lane | None = None
        self._block, self._offset = block, number * head_bytes(most_rows)
        self.table = address

    def use(self, lane_group: LaneGroup) -> Lane:
        """A lane of `lane_group`, for everything that is begun from here on."""
        self.lane = lane_group.lane(self.stream)
        return self.lane

    @property
    def opened_lane(self) -> Lane:
        """The lane that `use` has opened."""
        assert self.lane is not None
        return self.lane

    def count(self, layout: Layout, parameters: Bytes, sources: Integers, sizes: Integers) -> None:
        """Begin to count the encoded sizes of chunks at `sources`; `finish` puts them into `sizes`."""
        counters = self._zero_counters(sizes)
        self._set_rows(rows(parameters, sources, counters + 4 * np.arange(len(sizes))))
        with launching(self.stream):
            kernels_of(layout).count(layout, self.table, len(sizes))
        self.is_busy = True

    def encode(self, batch: ChunkBatch) -> None:
        """Begin to encode a batch; `copy`, or at the latest `finish`, begins to copy it."""
        self._set_rows(rows(batch.parameters, batch.addresses, self.chunks_address + batch.starts, batch.sizes))
        self.stream.fill(self.chunks_address, 0, batch.bytes)
        counters = self._zero_counters(batch)
        with launching(self.stream):
            kernels_of(batch.layout).encode(batch.layout, self.table, counters, len(batch))
        self.batch, self._uncopied, self.is_busy = batch, batch, True

    def copy(self) -> None:
        """Begin to copy the batch to its extents, once it is encoded.

        A lane may have to wait for the kernel. So one slot's copies begin when the next one's kernel is at work.
        """
        batch, self._uncopied = self._uncopied, None
        if batch is not None:
            for piece in batch.pieces(self.chunks_address):
                self.opened_lane.begin(piece.extent, piece.rows, out=True)

    def decode(self, batch: ChunkBatch, sources: Integers, targets: Integers | None = None) -> None:
        """Begin to decode a batch.

        Args:
            sources: where the kernel finds each encoded chunk.
            targets: where its content goes; None: to its segment.

        Raises:
            DriverError: the driver refused.
            CodecError: the kernel failed.
        """
        self._set_rows(rows(batch.parameters, sources, batch.addresses if targets is None else targets, batch.sizes))
        with launching(self.stream):
            kernels_of(batch.layout).decode(batch.layout, self.table, len(batch))
        self.is_busy = True

    def synchronize(self) -> None:
        """Wait for the pending work on its stream, including copies to and from extents."""
        (self.lane or self.stream).synchronize()

    def finish(self) -> None:
        """Begin what was left for later, and wait for everything that was begun.

        Raises:
            ChangedMeanwhile: as `read_counters`.
            DriverError: a copy or kernel failed.
        """
        if self.is_busy:
            self.is_busy = False
            self.copy()
            self.synchronize()
            batch, self.batch = self.batch, None
            if batch is None:
                self.read_counters()

    def read_counters(self) -> None:
        """Wait for the kernels, and look at their counters: of encoded batches, and of what was counted.

        Not after each kernel: as a copy to the host, however small, it would queue behind those of other slots.

        Raises:
            ChangedMeanwhile: a chunk does not have the planned size.
        """
        counted, self._counted = self._counted, []
        if not counted:
            return
        ends = np.cumsum([len(each) for each in counted])
        at, nbytes = self._most_rows * ROW_BYTES, 4 * int(ends[-1])
        self.stream.to_host(self._block, self._offset + at, self._address + at, nbytes)
        self.stream.synchronize()
        for each, counters in zip(counted, np.split(self._in_block(at, nbytes).view("<u4"), ends[:-1]), strict=True):
            if isinstance(each, ChunkBatch):
                each.check_sizes(counters)
            else:
                each[:] = counters

    def _set_rows(self, table: npt.NDArray[np.uint64]) -> None:
        """Set the table of the next kernel."""
        self._in_block(0, table.nbytes)[:] = table.reshape(-1).view(np.uint8)
        self.stream.to_device(self.table, self._block, self._offset, table.nbytes)

    def _zero_counters(self, chunks: ChunkBatch | Integers) -> int:
        """The address of a counter for each of `chunks`, all zero."""
        if sum(map(len, self._counted)) + len(chunks) > self._most_rows:
            self.read_counters()
        address = self._address + self._most_rows * ROW_BYTES + 4 * sum(map(len, self._counted))
        self._counted.append(chunks)
        self.stream.fill(address, 0, 4 * len(chunks))
        return address

    def _in_block(self, at: int, nbytes: int) -> Bytes:
        return np.frombuffer(memoryview(self._block), np.uint8, nbytes, self._offset + at)
