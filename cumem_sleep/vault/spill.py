"""What the vault writes to files when memory runs short, and how it is read back: through a ring of its own memory.

A batch of backups is written at a time, with several requests in flight. When their owners have been told, and so can
read the files themselves, the backups may be dropped from memory. For wakes, threads read piece by piece into the slots
of the ring, from which the link of the GPU copies: disk and link are at work at the same time. The ring is there from
the start, so what sleeps can be woken without any other memory.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

from .. import _core
from ..errors import InvalidArgument, VaultError, format_bytes
from ..store.copier import CopyTotals
from . import memory
from .files import PAGE_BYTES, SpillError, SpillFile
from .jobs import Job, JobQueue, LinkPiece
from .ledger import Entry
from .link import VaultLink
from .pool import VaultPool
from .slabs import SlabRange

RING_BYTES = 256 << 20
_RING_SHARE = 8  # of a small vault's memory it takes no more
_REQUEST_BYTES = 16 << 20
_LEAST_SLOTS = 4
REQUESTS_AT_ONCE = 8  # requests in flight: what a fast disk needs
_BATCH_BYTES = 256 << 20
SEALED_WITHIN_S = 30.0  # who falls asleep has proven its backups by then
TRY_AGAIN_S = 5.0  # after a disk was full, or failed
_STAND_BACK_S = 0.01  # how long work in the background pauses while somebody's wake reads
_ALIGNMENT = 2 << 20


@dataclass(frozen=True)
class SpillPlan:
    """What may be spilled where.

    Attributes:
        folder: for the files.
        nbytes: the most that they hold.
        free_bytes: of memory that is kept free ahead, in the background.
    """

    folder: Path
    nbytes: int
    free_bytes: int = 0

    def ring_bytes(self, memory_bytes: int) -> int:
        """How much of that memory the ring takes.

        Raises:
            InvalidArgument: the plan makes no sense.
        """
        ring = min(RING_BYTES, memory_bytes // _RING_SHARE // _ALIGNMENT * _ALIGNMENT)
        if not ring:
            raise InvalidArgument(f"memory={memory_bytes}: to spill, the vault needs {_RING_SHARE * _ALIGNMENT} bytes")
        if self.nbytes < _ALIGNMENT:
            raise InvalidArgument(f"spill_size={self.nbytes}: expected at least {_ALIGNMENT} bytes")
        if self.free_bytes > memory_bytes - ring:
            raise InvalidArgument(
                f"spill_free={self.free_bytes}: expected at most {memory_bytes - ring} bytes, the memory without the"
                f" {format_bytes(ring)} for reading"
            )
        return ring


@dataclass(eq=False, kw_only=True)
class FileRead(Job):
    """Pieces of one request that are read from files first, and by which link they are copied then."""

    link: VaultLink


class RingReader:
    """Threads that read files into the slots of a ring, and let links copy from there, in turn as these do.

    Attributes:
        totals: what was read, and for how long.
    """

    def __init__(self, ring: _core.HostBlock) -> None:
        slot_bytes = min(_REQUEST_BYTES + PAGE_BYTES, ring.bytes // _LEAST_SLOTS // PAGE_BYTES * PAGE_BYTES)
        self.totals = CopyTotals()
        self._ring = ring
        self._most_bytes = slot_bytes - PAGE_BYTES  # of a piece: the pages that it lies in may have one more
        self._free = [start * slot_bytes for start in range(ring.bytes // slot_bytes)]
        self._most_threads = min(REQUESTS_AT_ONCE, len(self._free))
        self._queue = JobQueue()
        self._changed = threading.Condition()
        self._reading, self._counted_until = 0, 0.0
        self._is_stopping = False
        self._threads: list[threading.Thread] = []

    @property
    def is_reading(self) -> bool:
        """Whether somebody waits for what is read."""
        return self._reading > 0 or bool(self._queue)

    def start(self) -> None:
        """Have the threads, from the first read on. Raises RuntimeError: they cannot be started."""
        while len(self._threads) < self._most_threads:
            thread = threading.Thread(target=self._run, name=f"vault-read-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, read: FileRead) -> None:
        """Begin with it, when it is its client's turn."""
        with self._changed:
            self._queue.add(read)
            self._changed.notify_all()

    def cancel(self, client: Hashable, why: str = "the client has gone") -> None:
        """Read no more for this client (None: for any). Copies of a link are cancelled there."""
        with self._changed:
            self._queue.cancel(client, VaultError(why))
            self._changed.notify_all()

    def stop(self) -> None:
        """Cancel everything, and wait for what is being read."""
        with self._changed:  # or threads would take what is not cancelled yet, although no slot is free
            self._is_stopping = True
            self.cancel(None, "the vault ends")
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or (self._queue and self._free))
                taken = self._queue.take(self._most_bytes)
                if taken is None:
                    return
                read, piece = taken
                if piece is not None:
                    slot = self._free.pop()
                    self._count(1, 0)
            if piece is None:  # it was cancelled
                self._end_if_over(read)
                continue
            offset, error = piece.offset % PAGE_BYTES, self._fill(slot, piece)
            with self._changed:
                self._count(-1, 0 if error else piece.nbytes)
            if error is not None:
                self._over(read, slot, error)
                continue
            link_piece = LinkPiece(self._ring, slot + offset, piece.lent_offset, piece.nbytes)
            over = partial(self._over, read, slot)
            assert isinstance(read, FileRead)
            read.link.submit(Job(read.client, read.lent, deque([link_piece]), over, relays=read.relays))

    def _fill(self, slot: int, piece: LinkPiece) -> Exception | None:
        """Read the pages that it lies in."""
        assert piece.source is not None
        start = piece.offset // PAGE_BYTES * PAGE_BYTES
        nbytes = -(-(piece.offset + piece.nbytes) // PAGE_BYTES) * PAGE_BYTES - start
        try:
            piece.source.file.read(memoryview(self._ring)[slot : slot + nbytes], start)
        except Exception as error:  # whatever it is: whoever asked waits for it
            return VaultError(f"backup {piece.source.backup}: {error}")
        return None

    def _over(self, read: Job, slot: int, error: Exception | None) -> None:
        """The slot is free again."""
        with self._changed:
            self._free.append(slot)
            read.in_flight -= 1
            if error is not None:
                self._queue.fail(read, error)
            self._changed.notify()
        self._end_if_over(read)

    def _end_if_over(self, read: Job) -> None:
        with self._changed:
            if not self._queue.end_if_over(read):
                return
        read.done(read.error)

    def _count(self, change: int, nbytes: int) -> None:
        """So many more are being read, and these bytes were."""
        now = time.monotonic()
        self.totals = self.totals.plus(nbytes, now - self._counted_until if self._reading else 0)
        self._reading, self._counted_until = self._reading + change, now


@dataclass(eq=False)
class _Batch:
    """What is being written.

    Attributes:
        is_awaited: somebody waits for the memory; otherwise those who read go first.
    """

    entries: Sequence[Entry]
    is_awaited: bool
    began: float = field(default_factory=time.monotonic)

    @property
    def nbytes(self) -> int:
        return sum(entry.taken_bytes for entry in self.entries)


class Spiller:
    """Spills when it is told to, and reads. Its calls belong to the thread of the service.

    Attributes:
        file: what it spills to.
        reader: of the ring.
        written: since the start, and for how long.
        failure: why the last spill failed, and when; "" once another has not.
    """

    def __init__(
        self,
        pool: VaultPool,
        file: SpillFile,
        free_bytes: int,
        ring: memory.Slab,
        post: Callable[[Callable[[], None]], None],
        may_tell: Callable[[Entry], bool],
        tell: Callable[[Sequence[Entry]], None],
        changed: Callable[[], None],
    ) -> None:
        """Have threads. Raises RuntimeError: they cannot be started.

        Args:
            free_bytes: of memory that is kept free ahead.
            post: has work done by the thread of the service.
            may_tell: whether all owners of an entry can be told that it is in files.
            tell: tells them. Raises VaultError: not all of them can be told, and none was.
            changed: is called when there may be more memory, or when it has failed.
        """
        self._pool, self._ledger, self.file = pool, pool.ledger, file
        self._free_bytes, self.ring = free_bytes, ring
        self._post, self._may_tell, self._tell = post, may_tell, tell
        self._changed = changed
        self.reader = RingReader(ring.block)
        self.written = CopyTotals()
        self.failure, self._try_again = "", 0.0
        self._batch: _Batch | None = None
        self._is_closed = False
        self._ahead_bytes = 0  # of what is being read ahead
        self._ahead_is_awaited = False  # somebody waits for that memory
        self._wanted: dict[Entry, int] = {}  # to be read ahead, in place of what was used before that time
        self._ahead = ThreadPoolExecutor(1, "vault-read-ahead")
        for threads in (self._ahead, self.file.worker):
            threads.submit(int)  # have them now: when none can be started, who spills would wait for ever

    def close(self) -> None:
        """Wait for what is being written; nobody hears of it any more. No copy from the ring is in flight."""
        self._is_closed = True
        self._ahead.shutdown()
        self.file.close()
        self.ring.close()

    # Reading

    def read_ahead(self, entries: Iterable[Entry]) -> int:
        """Begin to read these into memory, as far as there is some that nobody needs; returns their bytes."""
        needed = dict.fromkeys(entries)
        before = self._ledger.touch(needed)  # or one would make room for another
        wanted = [entry for entry in needed if entry.is_in_files and not entry.extents]
        for entry in wanted:
            self._wanted.setdefault(entry, before)
        self._read_next()
        return sum(entry.taken_bytes for entry in wanted)

    def _read_next(self) -> None:
        """One after the other, so that little memory is in nobody's hands."""
        while self._wanted and not self._ahead_bytes and not self._pool.is_stopped:
            entry = next(iter(self._wanted))
            before = self._wanted.pop(entry)
            if extents := self._ledger.begin_read_ahead(entry, before):
                self._begin_read(entry, extents)

    def _begin_read(self, entry: Entry, extents: list[SlabRange]) -> None:
        self._ahead_bytes, self._ahead_is_awaited = entry.taken_bytes, False
        future = self._ahead.submit(
            _read_ahead,
            self.file,
            list(self._requests(entry, extents)),
            lambda: self._is_reading() and not self._ahead_is_awaited,
        )
        future.add_done_callback(lambda future: self._post(partial(self._was_read, entry, extents, future)))

    def _was_read(self, entry: Entry, extents: list[SlabRange], future: Future[None]) -> None:
        self._ahead_bytes = 0
        if self._is_closed:
            return
        self._ledger.end_read_ahead(entry, extents, is_read=future.exception() is None)
        if future.exception() is not None:  # who wakes reads it again, and hears why that fails
            self._wanted.clear()
        self._changed()  # who waits for memory goes first
        self._read_next()

    # Writing

    def make_room(self, nbytes: int) -> bool:
        """Begin to spill, if that is not under way; returns whether so much more can be dropped from memory then."""
        self._ahead_is_awaited = True
        if self._batch is not None:
            self._batch.is_awaited = True
        missing = nbytes - self.writing_bytes - self._ahead_bytes
        if missing <= 0:
            return True
        if self._pool.is_stopped or time.monotonic() < self._try_again or self._ledger.spillable_bytes < missing:
            return False
        chosen = self._ledger.to_spill(missing, self._may_tell)
        if sum(entry.taken_bytes for entry in chosen) < missing:
            return False
        self._write_some(chosen, is_awaited=True)  # what is being copied comes later
        return True

    def could_make_room(self, nbytes: int, is_sealed_by: Callable[[Entry], bool]) -> bool:
        """Whether so much more can be dropped from memory if those who have just reserved memory seal it."""
        if self._pool.is_stopped or time.monotonic() < self._try_again:
            return False
        missing = nbytes - self.writing_bytes - self._ahead_bytes
        since = time.monotonic() - SEALED_WITHIN_S
        return self._ledger.may_seal_enough(missing, since, lambda e: is_sealed_by(e) and self._may_tell(e))

    def look(self) -> None:
        """Spill ahead, slowly, if too little memory is free."""
        missing = self._free_bytes - self._ledger.available_bytes() - self._pool.bytes_to_come()
        if missing > 0 and not self._pool.is_stopped and time.monotonic() >= self._try_again:
            self._write_some(self._ledger.to_spill(missing, self._may_tell), is_awaited=False)

    def _write_some(self, chosen: Sequence[Entry], *, is_awaited: bool) -> None:
        """Begin with the next batch of these, unless there is one."""
        ready = [entry for entry in chosen if not entry.copies]
        if self._batch is not None or not ready:
            return
        sizes = accumulate(entry.taken_bytes for entry in ready)
        entries = [entry for entry, end in zip(ready, sizes, strict=True) if end - entry.taken_bytes < _BATCH_BYTES]
        entries = [entry for entry in entries if self._ledger.begin_spill(entry)]
        if not entries:
            self._post(self._changed)
            return
        self._batch = _Batch(entries, is_awaited)
        parts = [part for entry in entries for part in entry.spilled]
        requests = [request for entry in entries for request in self._requests(entry, entry.extents)]
        future = self.file.worker.submit(_write, self.file, self._batch, parts, requests, self._is_reading)
        future.add_done_callback(lambda future: self._post(partial(self._written, future)))

    def _is_reading(self) -> bool:
        return self.reader.is_reading and not self._is_closed

    def _requests(self, entry: Entry, extents: Sequence[SlabRange]) -> Iterable[tuple[int, memoryview]]:
        """Which part of the file, from its offset on, goes where in memory."""
        at, in_memory = 0, Entry(entry.nbytes, entry.taken_bytes, list(extents))
        for _, offset, nbytes in entry.spilled:
            written = 0
            for slab, start, size in in_memory.ranges(at, nbytes):
                content = memoryview(self._pool.slabs[slab].block)
                for begin in range(start, start + size, _REQUEST_BYTES):
                    end = min(begin + _REQUEST_BYTES, start + size)
                    yield offset + written, content[begin:end]
                    written += end - begin
            at += nbytes

    def _written(self, future: Future[None]) -> None:
        assert self._batch is not None
        if self._is_closed:  # the ledger is left as it is
            return
        batch, self._batch = self._batch, None
        held = [entry for entry in batch.entries if (entry.shares or entry.names) and self._may_tell(entry)]
        error = future.exception()
        if error is None:
            self.written = self.written.plus(batch.nbytes, time.monotonic() - batch.began)
            try:
                self._tell(held)
            except VaultError as refused:
                error = refused
        for entry in batch.entries:
            self._ledger.end_spill(entry, is_written=error is None and entry in held)
        is_full = isinstance(error, SpillError) and error.code in (errno.ENOSPC, errno.EDQUOT)
        if is_full and self._ledger.evict_in_files(batch.nbytes):
            error = None  # it is tried again at once
        self.failure = "" if error is None else f"{error} (at {time.strftime('%F %T %z')})"
        if error is not None:
            self._try_again = time.monotonic() + TRY_AGAIN_S
        self.look()
        self._changed()

    @property
    def writing_bytes(self) -> int:
        """Of what is being spilled."""
        return self._batch.nbytes if self._batch else 0

    def room_in_words(self) -> str:
        """How much is free in files, and why nothing is spilled, for an error that says what memory is missing."""
        free = f"{format_bytes(self._ledger.files.free_bytes)} of {format_bytes(self.file.nbytes)} of files are free"
        return f"{free}; {self.failure}" if self.failure else free


def _read_ahead(file: SpillFile, requests: Iterable[tuple[int, memoryview]], is_reading: Callable[[], bool]) -> None:
    """Stand back while others read."""
    for offset, content in requests:
        while is_reading():
            time.sleep(_STAND_BACK_S)
        file.read(content, offset)


def _write(
    file: SpillFile,
    batch: _Batch,
    parts: Sequence[SlabRange],
    requests: Iterable[tuple[int, memoryview]],
    is_reading: Callable[[], bool],
) -> None:
    """Have space set aside for these parts, then write. When it returns or raises, nothing is in flight."""
    for _, offset, nbytes in parts:
        file.allocate(offset, nbytes)
    left = deque(requests)
    while left and not batch.is_awaited:
        if is_reading():
            time.sleep(_STAND_BACK_S)
            continue
        offset, content = left.popleft()
        file.write(content, offset)
    if left:
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "vault-write") as threads:
            writes = [threads.submit(file.write, content, offset) for offset, content in left]
            wait(writes)
        for each in writes:
            each.result()
    file.sync()
