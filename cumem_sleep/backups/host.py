"""The tier in this process: its own pinned host memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import cast
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from .. import _core, host_facts
from ..core import commitment, log
from ..core.commitment import Commitment, Growth, left_bytes
from ..core.extents import Extent, Lane, PieceRows, Transfers, cut
from ..core.pinned import node_of, pinned_table
from ..core.tuning import Tuning
from ..errors import CumemSleepError, InvalidState, OutOfHostMemory, format_bytes
from ..report import BackupPlace
from ..settings import Settings
from .tier import Footprint, HostLimit, NotYet, Tier, Turn, budget_limits

_MOST_PREFAULT_THREADS = 16
_ROW_BYTES = 32  # of a piece in the table of a kernel
_LEAST_ROWS = 512  # of such a table: it stays pinned from one operation to the next
_PART_BYTES = 64 << 10  # of an extent: one block of the kernel copies no more at a time, so that all have work
_HEAP_BYTES = 16 << 10  # more than the driver allocates when it registers a block
_BETWEEN_LOOKS_S = 0.02  # at the limits, while pages are prefaulted: a look takes 0.2 ms


class HostTier(Tier):
    """Extents are blocks of host memory: address space once reserved, pinned pages once written, until `unpin`."""

    def __init__(self, settings: Settings, tuning: Tuning, turn: Turn) -> None:
        self._settings = settings
        self._tuning = tuning
        # By id; `limits` iterates over it and drops the pinned ones.
        self._untouched: WeakValueDictionary[int, _core.HostBlock] = WeakValueDictionary()
        self._to_touch: WeakValueDictionary[int, _core.HostBlock] = WeakValueDictionary()  # of these, not released
        self._commitment = Commitment()
        self._short_since: float | None = None  # in this operation, of what others have committed
        self._look_at = 0.0  # when the limits are next looked at while pages are prefaulted
        self._held_bytes = 0  # without what waits to be released
        self._releasing = _Releasing(turn, tuning)

    @property
    def bytes(self) -> int:  # noqa: D102
        return self._held_bytes + self._releasing.bytes

    def limits(self, needed_bytes: int | None = None) -> list[HostLimit]:  # noqa: D102
        return self._limits(needed_bytes, {})

    def _limits(self, needed_bytes: int | None, others: Mapping[Path, int]) -> list[HostLimit]:
        promised = self._promised_bytes()
        left = left_bytes(None if needed_bytes is None else needed_bytes + promised, others)
        found = [HostLimit(name, max(0, nbytes - promised)) for name, nbytes in left.items()]
        return [*budget_limits(self._settings, self._held_bytes), *found]

    def _promised_bytes(self) -> int:
        """Reserved but not touched yet, which the system still counts as available."""
        self._untouched = _not_pinned(self._untouched)
        untouched = sum(block.bytes - block.prefaulted_bytes for block in self._untouched.values())
        # What waits to be released is room too: `reserve` takes it, or releases it first.
        return untouched - self._releasing.bytes

    def expendable_room(self) -> int:  # noqa: D102
        return min((limit.available_bytes for limit in self._limits(None, self._commitment.others())), default=0)

    @contextmanager
    def commit(self, nbytes: int, *, beside_work: bool = False) -> Iterator[bool]:  # noqa: D102
        try:
            yield not nbytes or self._commit(nbytes, beside_work)
        finally:
            self._show()

    def _commit(self, nbytes: int, beside_work: bool) -> bool:
        while True:
            self._show()
            outcome = self._commitment.grow(self._commitment.bytes + nbytes, nbytes + self._promised_bytes())
            if outcome is not Growth.NOT_YET:
                return outcome is Growth.COMMITTED
            if beside_work:
                raise NotYet
            now, others = time.monotonic(), format_bytes(max(self._commitment.others().values(), default=0))
            if self._short_since is None:
                self._short_since = now
                log.info("waits for other processes to touch %s of host memory that they have committed", others)
            if now > self._short_since + commitment.FOR_OTHERS_S:
                log.warning("goes on, although others have committed %s of host memory and do not touch it", others)
                self._commitment.set(self._commitment.bytes + nbytes)
                return True
            _core.stop_if_asked()
            time.sleep(random.uniform(*commitment.BETWEEN_TRIES_S))

    def _show(self) -> None:
        """Show other processes what is yet to be touched."""
        self._to_touch = _not_pinned(self._to_touch)
        self._commitment.set(sum(max(0, block.bytes - block.prefaulted_bytes) for block in self._to_touch.values()))

    def _all_touched(self) -> None:
        self._show()
        self._short_since = None

    def _look_again(self) -> None:
        """Between the blocks that are prefaulted: whoever does not commit what he takes is seen here at the latest.

        Raises:
            OutOfHostMemory: a limit no longer leaves what is yet to be touched.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _BETWEEN_LOOKS_S
        self._show()
        needed = sum(max(0, block.bytes - block.prefault_begun_bytes) for block in self._to_touch.values())
        for name, left in left_bytes(needed).items():
            if left < needed and self._releasing.bytes:
                self._releasing.finish()
                return
            if left < needed:
                raise OutOfHostMemory(needed, max(0, left), name, "other processes took it meanwhile")

    def place(self) -> BackupPlace:  # noqa: D102
        return BackupPlace()

    def footprints(self, backups: Sequence[Sequence[Extent]]) -> list[Footprint]:  # noqa: D102
        return [Footprint(sum(extent.bytes for extent in extents)) for extents in backups]

    def reserve(  # noqa: D102
        self,
        device: int,
        sizes: Sequence[int],
        *,
        beside_work: bool = False,  # noqa: ARG002
    ) -> Sequence[Extent]:
        limits = self._limits(None, self._commitment.others()) if self._releasing.bytes else []
        pinned = [self._releasing.take(device, size) for size in sizes]
        most_bytes = sum(sizes) + self._releasing.bytes  # if what is left there stays
        if None in pinned and any(limit.available_bytes < most_bytes for limit in limits):
            self._releasing.finish()
        node = node_of(device)
        blocks = [block or _core.HostBlock(size, node) for block, size in zip(pinned, sizes, strict=True)]
        for blocks_of in (self._untouched, self._to_touch):
            blocks_of.update((id(block), block) for block in blocks if not block.pinned)
        self._held_bytes += sum(sizes)
        return blocks

    @property
    def extent_bytes(self) -> int:  # noqa: D102
        return self._tuning.slab_bytes

    def release(self, extents: Iterable[Extent]) -> None:  # noqa: D102
        blocks = _blocks(extents)
        nbytes = sum(block.bytes for block in blocks)
        self._held_bytes -= nbytes
        for block in blocks:
            self._to_touch.pop(id(block), None)
        self._show()
        if nbytes < self._tuning.release_later_bytes:
            for block in blocks:
                self._untouched.pop(id(block), None)
                block.close()
            blocks = []
        # Those that are untouched stay noted as such: to release them makes no more memory available.
        self._releasing.start(blocks)

    def finish_releasing(self) -> None:  # noqa: D102
        self._releasing.finish()

    def pin(self, device: int, extents: Iterable[Extent]) -> None:  # noqa: D102
        for block in _blocks(extents):
            if not block.pinned:
                self._look_again()
                block.prefault(0, block.bytes)
                block.pin(device)
        self._show()

    def unpin(self, extents: Iterable[Extent]) -> None:  # noqa: D102
        for block in _blocks(extents):
            if block.pinned:
                for blocks_of in (self._untouched, self._to_touch):
                    blocks_of.pop(id(block), None)
                block.unpin()

    def device_bytes_to_pin(self, extents: Iterable[Extent]) -> int:  # noqa: D102
        nbytes = sum(block.bytes for block in _blocks(extents) if not block.pinned)
        return nbytes * self._tuning.table_bytes_per_gib >> 30

    @staticmethod
    def content(extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:  # noqa: D102
        held = np.frombuffer(memoryview(cast(_core.HostBlock, extent)), np.uint8)
        return held[offset : offset + nbytes]

    def transfers(self) -> HostTransfers:  # noqa: D102
        threads, nbytes = self._settings.prefault_threads, self._tuning.prefault_bytes
        return HostTransfers(threads, nbytes, self._look_again, self._all_touched)

    def stop(self) -> None:  # noqa: D102
        self._releasing.stop()


class HostTransfers(Transfers):
    """The lanes of one operation. Threads prefault new blocks ahead of the copies.

    Args:
        look_again: called before a new block is used.
        all_used: called when no more follow.
    """

    def __init__(
        self,
        threads: int | None,
        prefault_bytes: int,
        look_again: Callable[[], None] = lambda: None,
        all_used: Callable[[], None] = lambda: None,
    ) -> None:
        self._threads = threads
        self._prefault_bytes = prefault_bytes
        self._look_again = look_again
        self._all_used = all_used
        self._prefaulted: _core.Ahead | None = None
        self._heap: _core.HeapReserve | None = None
        self._expected: set[int] = set()  # ids of blocks
        self._stack = ExitStack()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._heap = None
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
            for block in _blocks(extents)
            if not block.pinned
        }
        if not tasks:
            return
        if self._prefaulted is None:
            # Now, because each step by which this thread's heap grows would wait for the threads that prefault.
            self._heap = _core.HeapReserve(_HEAP_BYTES * len(tasks))
            # Looked up here, because `prepare` needs none.
            threads = self._threads or host_facts.prefault_threads(_MOST_PREFAULT_THREADS)
            self._prefaulted = self._stack.enter_context(_core.Ahead(threads))
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
    content = staticmethod(HostTier.content)

    def __init__(self, stream: _core.CopyStream, transfers: HostTransfers) -> None:
        super().__init__(stream)
        self._transfers = transfers
        self._table: _core.HostBlock | None = None  # of pieces that a kernel copies
        self._used, self._rows = 0, 0

    def pin(self, extents: Iterable[Extent]) -> None:
        """Register what has been unpinned; its pages are there. Most of that is hidden by the copies before it."""
        for block in _blocks(extents):
            if not block.pinned:
                block.pin(self.stream.device)

    def begin(self, extent: Extent, rows: PieceRows, *, out: bool, by_kernel: bool = False) -> bool:
        """Begin to copy."""
        block, stream = cast(_core.HostBlock, extent), self.stream
        if out:
            self._transfers.have_pinned(block, stream.device)
        else:
            self.pin([extent])
        if by_kernel and _core.device_info(stream.device).host_pointers:
            try:
                self._begin_by_kernel(block, rows, out)
                return True
            except CumemSleepError as error:
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
                self.stream.to_device_by_kernel(address, block, offset, nbytes)
            return
        ends = np.arange(_PART_BYTES, block.bytes + _PART_BYTES, _PART_BYTES)
        _, pieces = cut(np.asarray(rows), ends)
        if self._table is None or self._used + len(pieces) > self._rows:
            self._used, self._rows = 0, max(len(pieces), _LEAST_ROWS)
            self._table = self._transfers.table(_ROW_BYTES * self._rows, self.stream.device)
        self.stream.copy_pieces(self._table, self._used, block, pieces, to_host=out)
        self._used += len(pieces)

    def synchronize(self) -> None:
        """From then on the table can be used anew."""
        super().synchronize()
        self._used = 0


class _Releasing:
    """Unpins and frees host memory in a thread, one block at a time, as long as no operation runs.

    Whatever else calls the driver meanwhile waits for the block: an operation, and a model that decodes after its wake.
    So the thread works for a small share of the time only, unless the host is short of memory. What an operation needs
    itself, it takes from here: such a block is pinned already.
    """

    def __init__(self, turn: Turn, tuning: Tuning) -> None:
        self._turn = turn
        self._tuning = tuning
        # By the device that they are pinned for (-1: none), and their size. Guarded by the lock.
        self._blocks: dict[tuple[int, int], list[_core.HostBlock]] = {}
        self._worker: _core.Worker | None = None
        self._stopped = False
        self.bytes = 0  # not freed yet

    def start(self, blocks: Iterable[_core.HostBlock]) -> None:
        """Free these soon. The lock must be held, as for `take` and `finish`."""
        for block in blocks:
            self._blocks.setdefault((block.pinned_device, block.bytes), []).append(block)
            self.bytes += block.bytes
        if not self.bytes or self._stopped or (self._worker is not None and self._worker.running):
            return
        self._worker = _core.Worker("cumem-give-back")
        try:
            self._worker.start(partial(self._run, self._worker))
        except InvalidState:  # no thread can be started: at exit, or at a limit
            self._worker = None
            self.finish()

    def take(self, device: int, nbytes: int) -> _core.HostBlock | None:
        """A block of this size that is pinned for `device`, which is no longer freed; None if none is left."""
        blocks = self._blocks.get((device, nbytes))
        if not blocks:
            return None
        self.bytes -= nbytes
        return blocks.pop()

    def finish(self) -> None:
        """Free now what is left."""
        while self.bytes:
            self._release_one()

    def stop(self) -> None:
        """End the thread because the process exits, which frees what is left."""
        self._stopped = True
        if self._worker is not None:
            self._worker.stop()

    def _release_one(self) -> None:
        block = next(filter(None, self._blocks.values())).pop()
        self.bytes -= block.bytes
        block.close()

    def _run(self, worker: _core.Worker) -> None:
        pause_s = self._tuning.before_releases_s
        while not worker.pause(pause_s):
            begin = time.perf_counter()
            with self._turn() as held:
                if held and not self.bytes:
                    self._worker = None
                    return
                if held:
                    self._release_one()
            pause_s = self._tuning.between_releases_s
            if not self._is_short():
                pause_s = max(pause_s, (time.perf_counter() - begin) * self._tuning.pause_per_release)

    def _is_short(self) -> bool:
        """Whether another process might miss what is not freed yet."""
        left = (host_facts.mem_available_bytes(enough=self.bytes), host_facts.cgroup_available_bytes())
        return any(nbytes is not None and nbytes < self.bytes for nbytes in left)


def _not_pinned(blocks: WeakValueDictionary[int, _core.HostBlock]) -> WeakValueDictionary[int, _core.HostBlock]:
    return WeakValueDictionary({key: block for key, block in blocks.items() if not block.pinned})


def _blocks(extents: Iterable[Extent]) -> list[_core.HostBlock]:
    return [cast(_core.HostBlock, extent) for extent in extents]
