"""Copies between the vault's memory and GPUs, in one direction: each link serves its own GPU, and then helps others.

Copies to a link's own GPU go by its copy engine, or by a kernel while the engine is slow, because the driver scrubs
memory that was just freed (`transfer/engine_or_kernel`). What it carries for others goes as `vault/relay.py` says.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

import numpy as np

from .. import _core
from ..core import log
from ..core.pinned import pinned_block
from ..core.tuning import Tuning
from ..errors import CumemSleepError, VaultError
from ..transfer.copiers import load_kernel
from ..transfer.engine_or_kernel import BestRate, Pace
from .jobs import RELAYED_BYTES, Job, JobQueue, LinkPiece
from .protocol import Table
from .range_table import PIECE_ROWS
from .relay import SLOTS, Relay

PIECE_BYTES = 64 << 20  # about a millisecond of a link
WORTH_RELAYING_BYTES = 128 << 20  # that wait for one link: less of it, it has carried as soon by itself
SMALL_PIECES_BYTES = 1 << 30  # that wait: with more, large pieces save time of the vault's threads
QUIET_S = 0.005  # without copies for its own GPU: from then on a link helps others
STAGING_S = 10.0  # without copies for others: then the memory for these goes
_PAUSE_S = 1.0  # without copies: what comes then is another operation's
_STALE_S = 0.05  # without copies: by then the driver may have begun to scrub, or ended
_KERNEL_BLOCKS = 16  # twice as many as in a process that maps memory meanwhile
_IN_FLIGHT = SLOTS  # pieces: enough for the link never to wait for this thread
_ROW_BYTES = 32  # of a table for the kernel


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


class LinkGroup:
    """All links in one direction.

    Attributes:
        refusal: why the link of the first GPU may not carry copies for the second one; "" if it may.
        lock: guards the turns of all links.
    """

    def __init__(self, to_host: bool, refusal: Callable[[int, int], str]) -> None:
        self.to_host = to_host
        self.refusal = refusal
        self.lock = threading.RLock()
        self.links: list[VaultLink] = []


class _InFlight(NamedTuple):
    """A piece that is being copied, and the link whose turn it was; it is there when the last stream is done."""

    streams: Sequence[_core.CopyStream]
    home: VaultLink
    job: Job
    piece: LinkPiece


class VaultLink:
    """A thread that copies for all clients between host memory and one GPU, in one direction.

    Attributes:
        turns: what is to be copied for this GPU, by this link and those that help it.
        copied: by this link for this GPU, since the start.
        last: the same since it had last nothing to do for a second or more.
        relayed: by this link for other GPUs, since the start.
    """

    def __init__(self, device: int, group: LinkGroup, tuning: Tuning | None = None) -> None:
        self.device = device
        self.turns = JobQueue()
        self.copied = self.last = self.relayed = CopyTotals()
        self._group = group
        self._changed = threading.Condition(group.lock)  # notified when it may have something to do
        self._to_host = group.to_host
        self._tuning = tuning or Tuning()
        self._use(None)
        self._batch_began = 0.0
        self._counted_until = time.monotonic()
        self._home = self  # the link that it copies for
        self._served_until = -math.inf  # its own GPU
        self._relayed_until = -math.inf
        self._relay = Relay(device, self._to_host)
        self._stopping = False
        self._idle: dict[int, list[_core.CopyStream]] = {}  # by GPU
        self._table: _core.HostBlock | None = None  # room for the rows of as many pieces as may be in flight
        self._tables = 0  # copied so far; each uses another part of that than those before it
        self._has_rows_kernel = True
        name = f"vault-{'out' if self._to_host else 'in'}-{device}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        with group.lock:
            group.links.append(self)

    def submit(self, job: Job) -> None:
        """Copy its pieces when it is its client's turn. Jobs of one client are done in order."""
        with self._group.lock:
            self.turns.add(job)
            self._notify()

    def cancel(self, client: Hashable, why: str = "the client has gone") -> None:
        """Start no more copies of this client (None: of any). Its jobs end as soon as what is in flight has ended."""
        with self._group.lock:
            self.turns.cancel(client, VaultError(why))
            self._changed.notify()

    def _notify(self) -> None:
        """There is more to copy for this GPU: for its own link, and with much of it for those that may help."""
        self._changed.notify()
        if self.turns.waiting_bytes >= WORTH_RELAYING_BYTES:
            for each in self._group.links:
                if each is not self and each._may_help(self):
                    each._changed.notify()

    def stop(self) -> None:
        """Cancel everything, and wait for what is in flight here."""
        self._stopping = True
        self.cancel(None, "the vault ends")
        self._thread.join()

    def helpers(self) -> dict[int, str]:
        """The other GPUs with a link, each with the reason why that carries nothing for this one; "" if it does."""
        others = [each for each in list(self._group.links) if each is not self]
        return {
            each.device: self._group.refusal(each.device, self.device) or each._relay.refusal(self.device)
            for each in others
        }

    def _run(self) -> None:
        in_flight: deque[_InFlight] = deque()
        if not self._to_host and load_kernel(self.device):
            self._use(BestRate())
        with ExitStack() as stack:
            stack.callback(self._relay.close)
            while True:
                home = self._next_home(wait=not in_flight)
                if home is None and not in_flight:
                    if self._is_over():
                        return
                    self._relay.close()
                    continue
                if home is not None and home is not self._home:
                    self._turn_to(home, in_flight)
                self._go_on()
                if home is self:
                    self._begin(in_flight, stack)
                elif home is not None:
                    self._begin_for(home, in_flight, stack)
                if in_flight and (home is None or len(in_flight) == _IN_FLIGHT):
                    self._finish(in_flight.popleft())
                self._count(0)

    def _next_home(self, wait: bool) -> VaultLink | None:
        """The link that has something to copy: this one, or one to help.

        If this is to wait, there is none only at the end, or when the memory for relays is not needed any more.
        """
        with self._group.lock:
            while True:
                now = time.monotonic()
                if self.turns:
                    return self
                if self._stopping:
                    return None
                quiet_s, home = now - self._served_until, self._in_need()
                if home is not None and quiet_s >= QUIET_S:
                    return home
                unused_s = now - self._relayed_until if self._relay.is_open else -math.inf
                if not wait or unused_s >= STAGING_S:
                    return None
                if home is not None:
                    self._changed.wait(QUIET_S - quiet_s)
                else:
                    self._changed.wait(STAGING_S - unused_s if self._relay.is_open else None)

    def _is_over(self) -> bool:
        with self._group.lock:  # what came since the look for work ends with an error, as all that waits
            return self._stopping and not self.turns

    def _in_need(self) -> VaultLink | None:
        """Of the links that this one may help: the one that it helps already, or the one with most to copy."""
        others = [
            each
            for each in self._group.links
            if each is not self
            and each.turns.waiting_bytes >= WORTH_RELAYING_BYTES
            and self._may_help(each)
            and each.turns.may_be_relayed
        ]
        return max(others, key=lambda each: (each is self._home, each.turns.waiting_bytes), default=None)

    def _is_helped(self) -> bool:
        return any(each is not self and each._may_help(self) for each in list(self._group.links))

    def _may_help(self, home: VaultLink) -> bool:
        return not (self._group.refusal(self.device, home.device) or self._relay.refusal(home.device))

    def _turn_to(self, home: VaultLink, in_flight: deque[_InFlight]) -> None:
        """Copy for this one from here on."""
        self._finish_all(in_flight)  # their times are of another kind of copies
        self._home = home
        if home is self:
            self._counted_until = self._served_until

    def _begin(self, in_flight: deque[_InFlight], stack: ExitStack) -> None:
        """Copy the next piece for this GPU."""
        self._choose(in_flight)
        most = [self._most_bytes()] if self._best is not None else []
        if self.turns.waiting_bytes < SMALL_PIECES_BYTES and self._is_helped():
            most.append(RELAYED_BYTES)  # what this link holds on to, others wait for at the end
        with self._group.lock:
            taken = self.turns.take(min(most, default=None))
        if taken is None:
            return
        job, piece = taken
        if piece is not None and (stream := self._start(job, piece, stack)) is not None:
            in_flight.append(_InFlight([stream], self, job, piece))
            if piece.rows is None:
                self._batch_bytes += piece.nbytes
            else:  # others are not chosen by how long this takes
                self._begin_batch()
        self._end_if_over(self, job)

    def _begin_for(self, home: VaultLink, in_flight: deque[_InFlight], stack: ExitStack) -> None:
        """Copy the next piece of a link that this one helps. What this one cannot copy, that one copies itself."""
        if not self._relay.open(home.device):
            return
        if self._relay.is_on_trial(home.device):
            self._finish_all(in_flight)
        with self._group.lock:
            taken = home.turns.take_to_relay()
        if taken is None:
            return
        job, piece = taken
        try:
            address = job.lent.address() + piece.lent_offset
        except Exception as error:
            with self._group.lock:
                home.turns.fail(job, error)
                job.in_flight -= 1
            self._end_if_over(home, job)
            return
        streams: list[_core.CopyStream] = []
        try:
            for device in (self.device, home.device):
                streams.append(self._stream(device, stack))
            link, peer = streams
            self._relay.begin(link, peer, piece, address)
            job.relays.add(self.device)
            in_flight.append(_InFlight(streams[::-1] if self._to_host else streams, home, job, piece))
        except Exception as error:
            _close(streams)
            self._relay.disable(home.device, error)
            self._give_back(home, job, piece)

    def _give_back(self, home: VaultLink, job: Job, piece: LinkPiece) -> None:
        with self._group.lock:
            home.turns.give_back(job, piece)
            home._notify()
        self._end_if_over(home, job)

    def _use(self, best: BestRate | None) -> None:
        """From here on choose by the best rate seen so far; None: there is no kernel to choose."""
        self._best = best
        self._batch_bytes = 0  # begun since `copied.seconds` was `_batch_began`
        self._pace = Pace(best, self._tuning.timed_bytes, _IN_FLIGHT, self._tuning)
        self._choice = self._pace.next()

    def _choose(self, in_flight: deque[_InFlight]) -> None:
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

    def _finish_all(self, in_flight: deque[_InFlight]) -> None:
        while in_flight:
            self._finish(in_flight.popleft())

    def _go_on(self) -> None:
        """From here on time counts."""
        now = time.monotonic()
        if self._home is self and now - self._counted_until > _PAUSE_S:
            self.last = CopyTotals()
        if now - self._counted_until > _STALE_S and self._best is not None:
            self._use(self._best)
        self._counted_until = now

    def _count(self, nbytes: int) -> None:
        """So many bytes more are copied."""
        now = time.monotonic()
        seconds, self._counted_until = now - self._counted_until, now
        if self._home is self:
            self.copied, self.last = self.copied.plus(nbytes, seconds), self.last.plus(nbytes, seconds)
            self._served_until = now
        else:
            self.relayed = self.relayed.plus(nbytes, seconds)
            self._relayed_until = now

    def _stream(self, device: int, stack: ExitStack) -> _core.CopyStream:
        idle = self._idle.setdefault(device, [])
        return idle.pop() if idle else stack.enter_context(_core.CopyStream(device))

    def _start(self, job: Job, piece: LinkPiece, stack: ExitStack) -> _core.CopyStream | None:
        """The stream that copies the piece; None if that failed: the job fails, too."""
        stream: _core.CopyStream | None = None
        try:
            address = job.lent.address() + piece.lent_offset
            stream = self._stream(self.device, stack)
            if piece.rows is not None:
                self._copy_rows(stream, piece.rows + np.array((address, 0, 0)), piece.block, stack)
            elif self._to_host:
                stream.to_host(piece.block, piece.offset, address, piece.nbytes)
            else:
                self._to_device(stream, address, piece)
            return stream
        except Exception as error:
            _close([stream] if stream else [])
            with self._group.lock:
                self.turns.fail(job, error)
                job.in_flight -= 1
            return None

    def _copy_rows(self, stream: _core.CopyStream, rows: Table, block: _core.HostBlock, stack: ExitStack) -> None:
        """By a kernel, where it reaches host memory."""
        is_aligned = not (rows % 16).any()
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

    def _finish(self, copy: _InFlight) -> None:
        streams, home, job, piece = copy
        try:
            streams[-1].synchronize()
        except Exception as error:
            _close(streams)
            if home is not self:
                self._relay.disable(home.device, error)
                self._give_back(home, job, piece)
                return
            with self._group.lock:
                self.turns.fail(job, error)
        else:
            self._count(piece.nbytes)  # before anybody hears of it
            for stream in streams:
                self._idle[stream.device].append(stream)
        with self._group.lock:
            job.in_flight -= 1
        self._end_if_over(home, job)

    def _end_if_over(self, home: VaultLink, job: Job) -> None:
        with self._group.lock:
            if not home.turns.end_if_over(job):
                return
        job.done(job.error)


def _close(streams: Sequence[_core.CopyStream]) -> None:
    """Wait for their copies, by other means if need be: nobody may unmap what is still being copied."""
    for stream in streams:
        with stream:
            pass


def _reached_by_kernels(piece: LinkPiece, address: int) -> bool:
    """Memory of a vault before this one may not be registered: then a kernel that reads it would end the context."""
    return piece.block.pinned and (address | (piece.block.address + piece.offset)) % 16 == 0
