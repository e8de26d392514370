"""Copies between the vault's memory and GPUs, in one direction: each link serves its own GPU, and then helps others.

Copies to a link's own GPU go by its copy engine, or by a kernel while the engine is slow, because the driver scrubs
memory that was just freed (`core/copy_chooser`). What it carries for others goes as `vault/relay.py` says.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from .. import _core
from ..core.copy_chooser import BestRate, CopyChooser
from ..core.extents import PieceRows
from ..core.tuning import Tuning
from ..errors import VaultError
from ..store.copier import Copier, CopyTotals, load_kernel
from ..store.lanes import HostLane, HostLaneGroup
from .jobs import RELAYED_BYTES, Job, JobQueue, LinkPiece
from .relay import SLOTS, Relay

PIECE_BYTES = 64 << 20  # about a millisecond of a link
WORTH_RELAYING_BYTES = 128 << 20  # that wait for one link: less of it, it has carried as soon by itself
SMALL_PIECES_BYTES = 1 << 30  # that wait: with more, large pieces save time of the vault's threads
QUIET_S = 0.005  # without copies for its own GPU: from then on a link helps others
STAGING_S = 10.0  # without copies for others: then the memory for these goes
_PAUSE_S = 1.0  # without copies: what comes then is another operation's
_KERNEL_BLOCKS = 16  # twice as many as in a process that maps memory meanwhile
_IN_FLIGHT = SLOTS  # pieces: enough for the link never to wait for this thread


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
    """A piece that is being copied, and the link whose turn it was; it is there when the last lane is done."""

    lanes: Sequence[HostLane]
    home: VaultLink
    job: Job
    piece: LinkPiece


class VaultLink:
    """A thread that copies for all clients between host memory and one GPU, in one direction.

    Attributes:
        queue: what is to be copied for this GPU, by this link and those that help it.
    """

    def __init__(self, device: int, group: LinkGroup) -> None:
        self.device = device
        self.queue = JobQueue()
        self._group = group
        self._changed = threading.Condition(group.lock)  # notified when it may have something to do
        self._to_host = group.to_host
        tuning = Tuning(engine_batch_bytes=PIECE_BYTES)
        self._best_rate: BestRate | None = None  # of this GPU, if a kernel can copy
        self._chooser = CopyChooser(None, tuning.timed_bytes, _IN_FLIGHT, tuning)
        self._own = Copier(self._chooser, tuning, self._finish)  # for its own GPU
        self._for_others = Copier(CopyChooser(None, 0, _IN_FLIGHT, tuning), tuning, self._finish)
        self._before_pause = CopyTotals()
        self._home = self  # the link that it copies for
        self._relay = Relay(device, self._to_host)
        self._stopping = False
        self._transfers = HostLaneGroup(1, 0, kernel_blocks=_KERNEL_BLOCKS)
        self._streams = ExitStack()
        self._idle: dict[int, list[HostLane]] = {}  # by GPU
        name = f"vault-{'out' if self._to_host else 'in'}-{device}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        with group.lock:
            group.links.append(self)

    @property
    def copied(self) -> CopyTotals:
        """By this link for this GPU, since the start."""
        return self._own.copied

    @property
    def last(self) -> CopyTotals:
        """The same since it had last nothing to do for a second or more."""
        return self._own.copied.since(self._before_pause)

    @property
    def relayed(self) -> CopyTotals:
        """By this link for other GPUs, since the start."""
        return self._for_others.copied

    def submit(self, job: Job) -> None:
        """Copy its pieces when it is its client's turn. Jobs of one client are done in order."""
        with self._group.lock:
            self.queue.add(job)
            self._notify()

    def cancel(self, client: Hashable, why: str = "the client has gone") -> None:
        """Start no more copies of this client (None: of any). Its jobs end as soon as what is in flight has ended."""
        with self._group.lock:
            self.queue.cancel(client, VaultError(why))
            self._changed.notify()

    def _notify(self) -> None:
        """There is more to copy for this GPU: for its own link, and with much of it for those that may help."""
        self._changed.notify()
        if self.queue.waiting_bytes >= WORTH_RELAYING_BYTES:
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
        if not self._to_host and load_kernel(self.device):
            self._best_rate = self._chooser.best = BestRate()
        with self._transfers, self._streams:
            self._streams.callback(self._relay.close)
            while True:
                copier = self._copier
                home = self._next_home(wait=not copier.in_flight)
                if home is None and not copier.in_flight:
                    if self._is_over():
                        return
                    self._relay.close()
                    continue
                if home is not None and home is not self._home:
                    copier.wait()  # their times are of another kind of copies
                    self._home = home
                if home is self:
                    self._begin()
                elif home is not None:
                    self._begin_for(home)
                self._copier.wait(len(copier.in_flight) - 1 if home is None else _IN_FLIGHT - 1)

    @property
    def _copier(self) -> Copier[_InFlight]:
        return self._own if self._home is self else self._for_others

    def _next_home(self, wait: bool) -> VaultLink | None:
        """The link that has something to copy: this one, or one to help.

        If this is to wait, there is none only at the end, or when the memory for relays is not needed any more.
        """
        with self._group.lock:
            while True:
                now = time.monotonic()
                if self.queue:
                    return self
                if self._stopping:
                    return None
                quiet_s, home = now - self._own.until, self._in_need()
                if home is not None and quiet_s >= QUIET_S:
                    return home
                unused_s = now - self._for_others.until if self._relay.is_open else -math.inf
                if not wait or unused_s >= STAGING_S:
                    return None
                if home is not None:
                    self._changed.wait(QUIET_S - quiet_s)
                else:
                    self._changed.wait(STAGING_S - unused_s if self._relay.is_open else None)

    def _is_over(self) -> bool:
        with self._group.lock:  # what came since the look for work ends with an error, as all that waits
            return self._stopping and not self.queue

    def _in_need(self) -> VaultLink | None:
        """Of the links that this one may help: the one that it helps already, or the one with most to copy."""
        others = [
            each
            for each in self._group.links
            if each is not self
            and each.queue.waiting_bytes >= WORTH_RELAYING_BYTES
            and self._may_help(each)
            and each.queue.may_be_relayed
        ]
        return max(others, key=lambda each: (each is self._home, each.queue.waiting_bytes), default=None)

    def _is_helped(self) -> bool:
        return any(each is not self and each._may_help(self) for each in list(self._group.links))

    def _may_help(self, home: VaultLink) -> bool:
        return not (self._group.refusal(self.device, home.device) or self._relay.refusal(home.device))

    def _begin(self) -> None:
        """Copy the next piece for this GPU."""
        if not self._own.in_flight and time.monotonic() - self._own.until > _PAUSE_S:
            self._before_pause = self._own.copied
            self._transfers.has_kernel, self._chooser.best = True, self._best_rate  # one that has failed may work again
        self._own.go_on()
        most_bytes = self._own.most_bytes
        if self.queue.waiting_bytes < SMALL_PIECES_BYTES and self._is_helped():
            most_bytes = min(most_bytes, RELAYED_BYTES)  # what this link holds on to, others wait for at the end
        with self._group.lock:
            taken = self.queue.take(most_bytes)
        if taken is None:
            return
        job, piece = taken
        if piece is not None:
            self._start(job, piece)
        self._end_if_over(self, job)

    def _start(self, job: Job, piece: LinkPiece) -> None:
        own, lanes = self._own, list[HostLane]()
        try:
            address = job.lent.address() + piece.lent_offset
            lanes.append(self._lane(self.device))
            if piece.rows is None:
                rows: PieceRows = ((address, piece.offset, piece.nbytes),)
                wanted = own.ready() and (address | piece.offset) % 16 == 0
            else:
                rows = table = piece.rows + np.array((address, 0, 0))
                own.count()
                wanted = not (table % 16).any()
            by_kernel = lanes[0].begin(piece.block, rows, out=self._to_host, by_kernel=wanted)
        except Exception as error:
            _close(lanes)
            self._fail(self, job, error)
            return
        own.in_flight.append(_InFlight(lanes, self, job, piece))
        if piece.rows is None:
            own.begun(piece.nbytes, kernel_failed=wanted and not by_kernel)
        else:  # others are not chosen by how long this takes
            own.start_batch()

    def _begin_for(self, home: VaultLink) -> None:
        """Copy the next piece of a link that this one helps. What this one cannot copy, that one copies itself."""
        if not self._relay.open(home.device):
            return
        if self._relay.is_on_trial(home.device):
            self._for_others.wait()
        with self._group.lock:
            taken = home.queue.take_to_relay()
        if taken is None:
            return
        job, piece = taken
        try:
            address = job.lent.address() + piece.lent_offset
        except Exception as error:
            self._fail(home, job, error)
            return
        lanes: list[HostLane] = []
        try:
            for device in (self.device, home.device):
                lanes.append(self._lane(device))
            link, peer = (lane.stream for lane in lanes)
            self._for_others.count()
            self._relay.begin(link, peer, piece, address)
            job.relays.add(self.device)
            self._for_others.in_flight.append(_InFlight(lanes[::-1] if self._to_host else lanes, home, job, piece))
        except Exception as error:
            _close(lanes)
            self._relay.disable(home.device, error)
            self._give_back(home, job, piece)

    def _fail(self, home: VaultLink, job: Job, error: Exception) -> None:
        """A piece of it was taken, and is not copied; nor are those that follow."""
        with self._group.lock:
            home.queue.fail(job, error)
            job.in_flight -= 1
        self._end_if_over(home, job)

    def _give_back(self, home: VaultLink, job: Job, piece: LinkPiece) -> None:
        with self._group.lock:
            home.queue.give_back(job, piece)
            home._notify()
        self._end_if_over(home, job)

    def _lane(self, device: int) -> HostLane:
        idle = self._idle.setdefault(device, [])
        return idle.pop() if idle else self._transfers.lane(self._streams.enter_context(_core.CopyStream(device)))

    def _finish(self, copy: _InFlight) -> None:
        lanes, home, job, piece = copy
        try:
            lanes[-1].synchronize()
        except Exception as error:
            _close(lanes)
            if home is self:
                self._fail(self, job, error)
            else:
                self._relay.disable(home.device, error)
                self._give_back(home, job, piece)
            return
        self._copier.count(piece.nbytes)  # before anybody hears of it
        for lane in lanes:
            self._idle[lane.stream.device].append(lane)
        with self._group.lock:
            job.in_flight -= 1
        self._end_if_over(home, job)

    def _end_if_over(self, home: VaultLink, job: Job) -> None:
        with self._group.lock:
            if not home.queue.end_if_over(job):
                return
        job.done(job.error)


def _close(lanes: Sequence[HostLane]) -> None:
    """Wait for their copies, by other means if need be: nobody may unmap what is still being copied."""
    for lane in lanes:
        with lane.stream:
            pass
