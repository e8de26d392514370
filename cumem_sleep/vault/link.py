"""Copies between the vault's memory and one GPU, in one direction. Clients take turns, piece by piece.

Copies to a GPU go by its copy engine, or by a kernel while the engine is slow, because the driver scrubs memory that
was just freed (`transfer/engine_or_kernel`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import _core
from ..core import log
from ..core.pinned import pinned_block
from ..core.tuning import Tuning
from ..errors import CumemSleepError, VaultError
from ..transfer.engine_or_kernel import BestRate, Pace
from .protocol import Table, close_all
from .range_table import PIECE_ROWS

PIECE_BYTES = 64 << 20  # about a millisecond of a link
_PAUSE_S = 1.0  # without copies: what comes then is another operation's
_STALE_S = 0.05  # without copies: by then the driver may have begun to scrub, or ended
_KERNEL_BLOCKS = 16  # twice as many as in a process that maps memory meanwhile
_IN_FLIGHT = 4  # pieces: enough for the link never to wait for this thread
_ROW_BYTES = 32  # of a table for the kernel


class BorrowedMemory:
    """A client's physical memory, from the descriptor that it sent; imported when the first copy needs it."""

    def __init__(self, descriptor: int, device: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.jobs = 0  # that use it
        self.is_returned = False
        self._descriptor = descriptor
        self._lock = threading.Lock()  # both links of a GPU may use it
        self._imported: _core.ImportedMemory | None = None

    def address(self) -> int:
        """Where it is mapped here.

        Raises:
            DriverError: the driver does not import it, or it has not as many bytes.
        """
        with self._lock:
            if self._imported is None:
                self._imported = _core.ImportedMemory(self._descriptor, self.device, self.nbytes)
                self._close_descriptor()
            return self._imported.address

    def close(self) -> None:
        """Give it back; no copy may use it."""
        with self._lock:
            try:
                self._close_descriptor()
                if self._imported is not None:
                    self._imported.close()
                    self._imported = None
            finally:
                self.is_returned = True

    def _close_descriptor(self) -> None:
        close_all([self._descriptor])
        self._descriptor = -1


class CopyTotals(NamedTuple):
    """Bytes, and for how long copies of them were in flight."""

    nbytes: int = 0
    seconds: float = 0.0

    @property
    def gbps(self) -> float | None:
        """10⁹ bytes per second; None where nothing was copied."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else None

    def plus(self, nbytes: int, seconds: float) -> CopyTotals:
        """These and more."""
        return CopyTotals(self.nbytes + nbytes, self.seconds + seconds)


class LinkPiece(NamedTuple):
    """What is copied at once.

    Attributes:
        rows: instead of one range: rows of an offset in lent memory, one in the block, and bytes.
    """

    block: _core.HostBlock
    offset: int
    lent_offset: int
    nbytes: int
    rows: Table | None = None


@dataclass(eq=False)
class Job:
    """The copies of one request. `done` is called on the link's thread when nothing of it is in flight any more."""

    client: Hashable
    lent: BorrowedMemory
    pieces: deque[LinkPiece]
    done: Callable[[Exception | None], None]
    in_flight: int = 0
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Copy no more of it."""
        self.error = self.error or error
        self.pieces.clear()


class VaultLink:
    """A thread that copies for all clients between host memory and one GPU, in one direction.

    Attributes:
        copied: since the start.
        last: since it had last nothing to do for a second or more.
    """

    def __init__(self, device: int, to_host: bool, tuning: Tuning | None = None) -> None:
        self.device = device
        self._tuning = tuning or Tuning()
        self._use(None)
        self._batch_began = 0.0
        self.copied = self.last = CopyTotals()
        self._counted_until = time.monotonic()
        self._to_host = to_host
        self._changed = threading.Condition()
        self._jobs: set[Job] = set()  # that have not ended
        self._turns: dict[Hashable, deque[Job]] = {}  # those with pieces left, by client; the first is next
        self._stopping = False
        self._idle: list[_core.CopyStream] = []
        self._table: _core.HostBlock | None = None  # room for the rows of as many pieces as may be in flight
        self._tables = 0  # copied so far; each uses another part of that than those before it
        self._has_rows_kernel = True
        name = f"vault-{'out' if to_host else 'in'}-{device}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Copy its pieces when it is its client's turn. Jobs of one client are done in order."""
        with self._changed:
            self._jobs.add(job)
            self._turns.setdefault(job.client, deque()).append(job)
            self._changed.notify()

    def cancel(self, client: Hashable, why: str = "the client has gone") -> None:
        """Start no more copies of this client (None: of any). Its jobs end as soon as what is in flight has ended."""
        with self._changed:
            for job in self._jobs:
                if client in (None, job.client):
                    job.fail(VaultError(why))
            self._changed.notify()

    def stop(self) -> None:
        """Cancel everything, and wait for what is in flight."""
        self._stopping = True
        self.cancel(None, "the vault ends")
        self._thread.join()

    def _run(self) -> None:
        in_flight: deque[tuple[_core.CopyStream, Job, int]] = deque()
        if not self._to_host:
            self._use_kernel()
        with ExitStack() as stack:
            while True:
                has_turn = self._has_turn(wait=not in_flight)
                if not has_turn and not in_flight:
                    return
                self._go_on()
                if has_turn:
                    self._choose(in_flight)
                    job, piece = self._take()
                    if piece is not None and (stream := self._start(job, piece, stack)) is not None:
                        in_flight.append((stream, job, piece.nbytes))
                        if piece.rows is None:
                            self._batch_bytes += piece.nbytes
                        else:  # others are not chosen by how long this takes
                            self._begin_batch()
                    self._end_if_over(job)
                if in_flight and (not has_turn or len(in_flight) == _IN_FLIGHT):
                    self._finish(*in_flight.popleft())
                self._count(0)

    def _use_kernel(self) -> None:
        """Make the context, if there is none yet, and load it, to be used from now on while the engine is slow."""
        try:
            _core.memory_info(self.device)
            if not _core.device_info(self.device).host_pointers:
                return
            _core.load_copy_kernel(self.device)
        except Exception as error:  # whatever it is: without this thread every copy would wait for ever
            log.warning("copies go by the copy engine alone, because the copy kernel failed: %s", error)
            return
        self._use(BestRate())

    def _use(self, best: BestRate | None) -> None:
        """From here on choose by the best rate seen so far; None: there is no kernel to choose."""
        self._best = best
        self._batch_bytes = 0  # begun since `copied.seconds` was `_batch_began`
        self._pace = Pace(best, self._tuning.timed_bytes, _IN_FLIGHT, self._tuning)
        self._choice = self._pace.next()

    def _choose(self, in_flight: deque[tuple[_core.CopyStream, Job, int]]) -> None:
        """How the next piece is copied: as the one before, until there are enough of them for a rate."""
        if self._batch_bytes >= self._most_bytes():
            if self._choice.alone:
                self._finish_all(in_flight)
            self._count(0)
            seconds = max(self.copied.seconds - self._batch_began, 1e-9)
            self._pace.record(self._batch_bytes, seconds)
            self._choice = self._pace.next()
        elif self._batch_bytes:
            return
        if self._choice.alone:
            self._finish_all(in_flight)
        self._begin_batch()

    def _most_bytes(self) -> int:
        """Of this batch: while the engine is slow, a trial of it takes longer than a copy by the kernel."""
        is_first_trial = self._choice.by_engine and self._choice.alone and not self._choice.again
        return self._tuning.trial_bytes if is_first_trial else self._tuning.batch_bytes

    def _begin_batch(self) -> None:
        self._count(0)
        self._batch_bytes, self._batch_began = 0, self.copied.seconds

    def _finish_all(self, in_flight: deque[tuple[_core.CopyStream, Job, int]]) -> None:
        while in_flight:
            self._finish(*in_flight.popleft())

    def _go_on(self) -> None:
        """From here on time counts."""
        now = time.monotonic()
        if now - self._counted_until > _PAUSE_S:
            self.last = CopyTotals()
        if now - self._counted_until > _STALE_S and self._best is not None:
            self._use(self._best)
        self._counted_until = now

    def _count(self, nbytes: int) -> None:
        """So many bytes more are copied."""
        now = time.monotonic()
        seconds, self._counted_until = now - self._counted_until, now
        self.copied, self.last = self.copied.plus(nbytes, seconds), self.last.plus(nbytes, seconds)

    def _has_turn(self, wait: bool) -> bool:
        """Whether there is a job to go on with; if this is to wait, it says no only at the end."""
        with self._changed:
            self._changed.wait_for(lambda: not wait or self._turns or self._stopping)
            return bool(self._turns)

    def _take(self) -> tuple[Job, LinkPiece | None]:
        """The next client's first job, and its next piece, or as much of that as this batch takes.

        A job that was cancelled has none.
        """
        with self._changed:
            client = next(iter(self._turns))
            jobs = self._turns.pop(client)
            job = jobs[0]
            piece = job.pieces.popleft() if job.pieces else None
            most = self._most_bytes()
            if piece is not None and piece.rows is None and self._best is not None and piece.nbytes > most:
                block, offset, lent_offset, nbytes, _ = piece
                job.pieces.appendleft(LinkPiece(block, offset + most, lent_offset + most, nbytes - most))
                piece = piece._replace(nbytes=most)
            if not job.pieces:
                jobs.popleft()
            if jobs:
                self._turns[client] = jobs  # behind the others
            job.in_flight += piece is not None
            return job, piece

    def _start(self, job: Job, piece: LinkPiece, stack: ExitStack) -> _core.CopyStream | None:
        """The stream that copies the piece; None if that failed: the job fails, too."""
        stream: _core.CopyStream | None = None
        try:
            address = job.lent.address() + piece.lent_offset
            stream = self._idle.pop() if self._idle else stack.enter_context(_core.CopyStream(self.device))
            if piece.rows is not None:
                self._copy_rows(stream, piece.rows + np.array((address, 0, 0)), piece.block, stack)
            elif self._to_host:
                stream.to_host(piece.block, piece.offset, address, piece.nbytes)
            else:
                self._to_device(stream, address, piece)
            return stream
        except Exception as error:
            if stream is not None:
                with stream:  # closes it: a part of the piece may be in flight, and the memory is unmapped next
                    pass
            job.in_flight -= 1
            self._fail(job, error)
            return None

    def _copy_rows(self, stream: _core.CopyStream, rows: Table, block: _core.HostBlock, stack: ExitStack) -> None:
        """By a kernel, where it reaches host memory."""
        is_aligned = not (rows % 16).any()  # what was adopted lies wherever its owner says
        if self._has_rows_kernel and block.pinned and is_aligned and _core.device_info(self.device).host_pointers:
            try:
                if self._table is None:
                    table_bytes = _IN_FLIGHT * PIECE_ROWS * _ROW_BYTES
                    self._table = stack.enter_context(closing(pinned_block(table_bytes, self.device)))
                self._tables += 1
                at = self._tables % _IN_FLIGHT * PIECE_ROWS
                stream.copy_pieces(self._table, at, block, rows, to_host=self._to_host)
                return
            except CumemSleepError as error:
                log.warning("the kernel for tables failed, the copy engine takes over: %s", error)
                self._has_rows_kernel = False
        for address, offset, nbytes in rows.tolist():
            if self._to_host:
                stream.to_host(block, offset, address, nbytes)
            else:
                stream.to_device(address, block, offset, nbytes)

    def _to_device(self, stream: _core.CopyStream, address: int, piece: LinkPiece) -> None:
        if self._choice.alone and not self._batch_bytes:
            self._begin_batch()  # what the import took is not the rate of a copy
        if not self._choice.by_engine and _reached_by_kernels(piece, address):
            try:
                stream.to_device_by_kernel(address, piece.block, piece.offset, piece.nbytes, _KERNEL_BLOCKS)
                return
            except CumemSleepError as error:
                log.warning("the copy kernel failed, the copy engine takes over: %s", error)
                self._use(None)
        stream.to_device(address, piece.block, piece.offset, piece.nbytes)

    def _finish(self, stream: _core.CopyStream, job: Job, nbytes: int) -> None:
        try:
            stream.synchronize()
            self._count(nbytes)  # before anybody hears of it
            self._idle.append(stream)
        except Exception as error:
            self._fail(job, error)
            with stream:  # closes it: waits by other means, since nobody may unmap what is still being copied
                pass
        job.in_flight -= 1
        self._end_if_over(job)

    def _fail(self, job: Job, error: Exception) -> None:
        with self._changed:
            job.fail(error)

    def _end_if_over(self, job: Job) -> None:
        with self._changed:
            if job not in self._jobs or job.pieces or job.in_flight:
                return
            self._jobs.remove(job)
        job.done(job.error)


def _reached_by_kernels(piece: LinkPiece, address: int) -> bool:
    """Memory of a vault before this one may not be registered: then a kernel that reads it would end the context."""
    return piece.block.pinned and (address | (piece.block.address + piece.offset)) % 16 == 0
