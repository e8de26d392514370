"""What the vault's links copy: jobs of clients, piece by piece and in turn, between memory that they lent and slabs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from .. import _core
from .files import PAGE_BYTES, SpillFile
from .protocol import Table, close_all

RELAYED_BYTES = 16 << 20  # of a piece that goes over another GPU's link: 0.3 ms of one


class BorrowedMemory:
    """A client's physical memory, from the descriptor that it sent; imported when the first copy needs it."""

    def __init__(self, descriptor: int, device: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.jobs = 0  # that use it
        self.is_returned = False
        self._descriptor = descriptor
        self._lock = threading.Lock()  # several links may use it
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


class PieceSource(NamedTuple):
    """Where a piece is read from first: the file, and for who hears that this fails, the number of the backup."""

    file: SpillFile
    backup: int


class LinkPiece(NamedTuple):
    """What is copied at once.

    Attributes:
        offset: in the block, or in the file of the source.
        rows: instead of one range: rows of an offset in lent memory, one in the block, and bytes.
        source: of what is to be read into the block first.
    """

    block: _core.HostBlock
    offset: int
    lent_offset: int
    nbytes: int
    rows: Table | None = None
    source: PieceSource | None = None

    def split(self, nbytes: int) -> tuple[LinkPiece, LinkPiece]:
        """So many bytes, of a file as many pages as these end in, and the rest; not of rows."""
        if self.source is not None:
            nbytes -= (self.offset + nbytes) % PAGE_BYTES
        rest = self.offset + nbytes, self.lent_offset + nbytes, self.nbytes - nbytes
        return self._replace(nbytes=nbytes), LinkPiece(self.block, *rest, source=self.source)


@dataclass(eq=False)
class Job:
    """The copies of one request. `done` is called on a link's thread when nothing of it is in flight any more.

    Attributes:
        relays: GPUs whose links help with it.
    """

    client: Hashable
    lent: BorrowedMemory
    pieces: deque[LinkPiece]
    done: Callable[[Exception | None], None]
    in_flight: int = 0
    error: Exception | None = None
    relays: set[int] = field(default_factory=set)

    @property
    def may_be_relayed(self) -> bool:
        """Whether the link of another GPU may carry its next piece."""
        return bool(self.pieces) and self.pieces[0].rows is None


class JobQueue:
    """The jobs of one GPU in one direction. Clients take turns, piece by piece; one client's jobs are in order.

    Attributes:
        waiting_bytes: of pieces that were not taken yet.
    """

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self._jobs: set[Job] = set()  # that have not ended
        self._turns: dict[Hashable, deque[Job]] = {}  # those to go on with, by client; the first is next

    def __bool__(self) -> bool:
        return bool(self._turns)

    def add(self, job: Job) -> None:
        """It waits for its client's turn."""
        self._jobs.add(job)
        self._turns.setdefault(job.client, deque()).append(job)
        self.waiting_bytes += sum(piece.nbytes for piece in job.pieces)

    def fail(self, job: Job, error: Exception) -> None:
        """Copy no more of it."""
        job.error = job.error or error
        self.waiting_bytes -= sum(piece.nbytes for piece in job.pieces)
        job.pieces.clear()

    def cancel(self, client: Hashable | None, error: Exception) -> None:
        """Copy no more of this client's, or of anybody's."""
        for job in self._jobs:
            if client in (None, job.client):
                self.fail(job, error)

    def take(self, most_bytes: int | None) -> tuple[Job, LinkPiece | None] | None:
        """The next client's first job, and its next piece, or as much of that; None if others have taken all.

        A job that was cancelled has no piece.
        """
        client = next(iter(self._turns), None)
        return None if client is None else self._take(client, most_bytes)

    @property
    def may_be_relayed(self) -> bool:
        """Whether the link of another GPU may carry something."""
        return any(jobs[0].may_be_relayed for jobs in self._turns.values())

    def take_to_relay(self) -> tuple[Job, LinkPiece] | None:
        """As `take`, what may go over the link of another GPU; None if there is nothing."""
        for client, jobs in self._turns.items():
            if jobs[0].may_be_relayed:
                job, piece = self._take(client, RELAYED_BYTES)
                return None if piece is None else (job, piece)
        return None

    def _take(self, client: Hashable, most_bytes: int | None) -> tuple[Job, LinkPiece | None]:
        jobs = self._turns.pop(client)
        job = jobs[0]
        piece = job.pieces.popleft() if job.pieces else None
        if piece is not None and piece.rows is None and most_bytes is not None and piece.nbytes > most_bytes:
            piece, rest = piece.split(most_bytes)
            job.pieces.appendleft(rest)
        if not job.pieces:
            jobs.popleft()
        if jobs:
            self._turns[client] = jobs  # behind the others
        if piece is not None:
            job.in_flight += 1
            self.waiting_bytes -= piece.nbytes
        return job, piece

    def give_back(self, job: Job, piece: LinkPiece) -> None:
        """It was taken, and is not copied."""
        job.in_flight -= 1
        if job.error is not None:
            return
        self.waiting_bytes += piece.nbytes
        job.pieces.appendleft(piece)
        jobs = self._turns.setdefault(job.client, deque())
        if job not in jobs:
            jobs.appendleft(job)

    def end_if_over(self, job: Job) -> bool:
        """Whether nothing of it is left. It says so once."""
        if job not in self._jobs or job.pieces or job.in_flight:
            return False
        self._jobs.remove(job)
        return True
