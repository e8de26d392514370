"""Lanes to memory of this process: by copy engines, or by kernels that reach it; its pages are prefaulted ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from types import TracebackType
from typing import cast

import numpy as np
import numpy.typing as npt

from .. import _core, host_facts
from ..core import log
from ..core.extents import Extent, Lane, LaneGroup, PieceRows, cut
from ..core.pinned import pinned_table
from ..errors import CumemSleepError, OutOfHostMemory

_MOST_PREFAULT_THREADS = 16
_ROW_BYTES = 32  # of a piece in the table of a kernel
_LEAST_ROWS = 512  # of such a table: it stays pinned from one operation to the next
_PART_BYTES = 64 << 10  # of an extent: one block of the kernel copies no more at a time, so that all have work
_HEAP_BYTES = 16 << 10  # more than the driver allocates when it registers a block
_MOST_HEAP_BYTES = 32 << 20  # half of what one heap of a thread can hold
_HEAP_PIECE_BYTES = 60 << 10  # smaller than what the C library maps by itself


class HostLaneGroup(LaneGroup):
    """The lanes of one operation. Threads prefault new blocks ahead of the copies.

    Args:
        look_again: called before a new block is used.
        all_used: called when no more follow.
        kernel_blocks: with how many blocks a kernel copies.

    Attributes:
        has_kernel: none has failed to start yet.
    """

    def __init__(
        self,
        threads: int | None,
        prefault_bytes: int,
        look_again: Callable[[], None] = lambda: None,
        all_used: Callable[[], None] = lambda: None,
        kernel_blocks: int = 8,
    ) -> None:
        self.kernel_blocks = kernel_blocks
        self._threads = threads
        self._prefault_bytes = prefault_bytes
        self._look_again = look_again
        self._all_used = all_used
        self._prefaulted: _core.ThreadPool | None = None
        self._top_of_heap = b""
        self._expected: set[int] = set()  # ids of blocks
        self._stack = ExitStack()
        self.has_kernel = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._top_of_heap = b""
        self._all_used()

    def end(self) -> None:
        """All pages have been touched."""
        self._all_used()

    def expect(self, extents: Iterable[Extent]) -> None:
        """Begin to prefault their pages, in this order."""
        step = self._prefault_bytes
        tasks = {
            id(block): [
                _core.prefault_task(block, start, min(step, block.bytes - start))
                for start in range(0, block.bytes, step)
            ]
            for block in blocks_of(extents)
            if not block.pinned
        }
        if not tasks:
            return
        if self._prefaulted is None:
            # Now, because each step by which this thread's heap grows would wait for the threads that prefault, often
            # for 20 ms, and the driver allocates here when it registers a block. What is freed below stays.
            self._top_of_heap = _grown_heap(min(_HEAP_BYTES * len(tasks), _MOST_HEAP_BYTES))
            # Looked up here, because `prepare` needs none.
            threads = self._threads or host_facts.prefault_threads(_MOST_PREFAULT_THREADS)
            self._prefaulted = self._stack.enter_context(_core.ThreadPool(threads))
        self._prefaulted.add(tasks)
        self._expected.update(tasks)

    def lane(self, stream: _core.CopyStream) -> HostLane:
        """A lane in the order of `stream`."""
        return HostLane(stream, self)

    def table(self, nbytes: int, device: int) -> _core.HostBlock:
        """Pinned memory for a table of a kernel, until these are left."""
        return self._stack.enter_context(closing(pinned_table(nbytes, device)))

    def have_pinned(self, block: _core.HostBlock, device: int) -> None:
        """Make sure that its pages are faulted in and registered.

        Raises:
            DriverError, OutOfHostMemory: the driver or the system refused.
        """
        if block.pinned:
            return
        self._look_again()
        if self._prefaulted is not None and id(block) in self._expected:
            self._prefaulted.wait(id(block))
        else:
            block.prefault(0, block.bytes)
        block.pin(device)


class HostLane(Lane):
    """Copies in the order of a stream; a block is registered when it is first used."""

    kernels_reach = True

    def __init__(self, stream: _core.CopyStream, lane_group: HostLaneGroup) -> None:
        super().__init__(stream)
        self._lane_group = lane_group
        self._table: _core.HostBlock | None = None  # of pieces that a kernel copies
        self._used, self._rows = 0, 0

    def pin(self, extents: Iterable[Extent]) -> None:
        """Register what has been unpinned; its pages are there. Most of that is hidden by the copies before it."""
        for block in blocks_of(extents):
            if not block.pinned:
                block.pin(self.stream.device)

    def begin(self, extent: Extent, rows: PieceRows, *, out: bool, by_kernel: bool = False) -> bool:
        """Begin to copy."""
        block, stream = cast(_core.HostBlock, extent), self.stream
        if out:
            self._lane_group.have_pinned(block, stream.device)
        else:
            self.pin([extent])
        if by_kernel and self._lane_group.has_kernel and _core.device_info(stream.device).host_pointers:
            try:
                self._begin_by_kernel(block, rows, out)
                return True
            except CumemSleepError as error:
                self._lane_group.has_kernel = isinstance(error, OutOfHostMemory)  # of this table: the next may be had
                log.warning("the copy kernel failed, the copy engine takes over: %s", error)
        for address, offset, nbytes in rows if isinstance(rows, tuple) else rows.tolist():
            if out:
                stream.to_host(block, offset, address, nbytes)
            else:
                stream.to_device(address, block, offset, nbytes)
        return False

    def _begin_by_kernel(self, block: _core.HostBlock, rows: PieceRows, out: bool) -> None:
        if isinstance(rows, tuple) and not out:
            for address, offset, nbytes in rows:
                self.stream.to_device_by_kernel(address, block, offset, nbytes, self._lane_group.kernel_blocks)
            return
        ends = np.arange(_PART_BYTES, block.bytes + _PART_BYTES, _PART_BYTES)
        _, pieces = cut(np.asarray(rows), ends)
        if self._table is None or self._used + len(pieces) > self._rows:
            self._used, self._rows = 0, max(_LEAST_ROWS, 1 << len(pieces).bit_length())  # a few sizes, not any
            self._table = self._lane_group.table(_ROW_BYTES * self._rows, self.stream.device)
        self.stream.copy_pieces(self._table, self._used, block, pieces, to_host=out)
        self._used += len(pieces)

    @staticmethod
    def content(extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Not a copy."""
        held = np.frombuffer(memoryview(cast(_core.HostBlock, extent)), np.uint8)
        return held[offset : offset + nbytes]

    def synchronize(self) -> None:
        """From then on the table can be used anew."""
        super().synchronize()
        self._used = 0


def _grown_heap(nbytes: int) -> bytes:
    """Let this thread's heap grow so much, page faults included; what is returned keeps it from shrinking."""
    return [b"\1" * _HEAP_PIECE_BYTES for _ in range(nbytes // _HEAP_PIECE_BYTES + 2)][-1]


def blocks_of(extents: Iterable[Extent]) -> list[_core.HostBlock]:
    """The extents, which are of this process's memory."""
    return [cast(_core.HostBlock, extent) for extent in extents]
