"""What clients may ask the vault for. Nothing here waits: what takes time is answered when it has ended.

A request is about a few hundred backups at most (`protocol.MAX_BACKUPS`), so it takes the vault a few milliseconds; a
client with more asks again. To evict a backup takes 10 µs. What calls the driver is done by threads of the GPU that it
is about, because the driver may need seconds for a new context there.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from .. import __version__, _core
from ..errors import CumemSleepError, DriverError, InvalidArgument, InvalidState, VaultError
from ..store.copier import CopyTotals
from . import memory, protocol
from .files import SpillFile
from .jobs import BorrowedMemory, Job, LinkPiece, PieceSource
from .ledger import Entry, HeldBytes, Key, Share, needed_bytes
from .link import PIECE_BYTES, LinkGroup, VaultLink
from .moves import Move, MoveLog, encoded
from .pool import VaultPool
from .protocol import Nonsense, Table, VaultMessage, boolean, integer, integers, objects, table, text
from .range_table import SMALL_RANGE_BYTES, check_table, table_pieces
from .relay import Relaying
from .session import Session
from .spill import REQUESTS_AT_ONCE, FileRead, Spiller, SpillPlan

_MAX_PIECES = 1 << 14  # of one copy: 64 MiB each, or an extent
_MAX_SAID, _EXTENT_CHARACTERS = 16 << 20, 24  # of one answer, about; a single backup has less


@dataclass(frozen=True)
class VaultGpu:
    """One GPU that the vault serves."""

    uuid: str
    ordinal: int
    name: str
    node: int


_Answer = dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Request:
    """What a client asks. Descriptors that are left in the list are closed afterwards."""

    session: Session
    number: int
    body: Mapping[str, Any]
    descriptors: list[int]


@dataclass(frozen=True)
class _Reservation:
    """Waits for memory that is still being taken, or whose content is being spilled, or sealed to be spilled."""

    asked: _Request
    gpu: VaultGpu
    sizes: Sequence[int]
    needed_bytes: int  # with what the client will ask for next: all of it has to be there before it gets any
    more_bytes: int  # how much that is
    waits: bool
    expendable: bool


class Service:
    """Answers requests, from the pool and over links. All of its calls belong to one thread."""

    def __init__(
        self,
        path: Path,
        gpus: Sequence[VaultGpu],
        pool: VaultPool,
        sessions: Sequence[Session],
        post: Callable[[Callable[[], None]], None],
        end: Callable[[Session], None],
        fail: Callable[[Session, Exception], None],
        gpu_lost: Callable[[VaultError], None],
        relaying: Relaying,
        spills: tuple[SpillFile, SpillPlan, int] | None = None,
        keep_bytes: int = 0,
    ) -> None:
        """Nothing is done yet.

        Args:
            path: of the socket, to be shown.
            sessions: all that there are, whenever they are looked at.
            post: has work done by the thread that calls the service.
            end: ends the connection of a session.
            fail: is called when a client has said what no client says, or the vault has failed at its request.
            gpu_lost: is called when no call for a GPU works any more.
            relaying: whose links may carry copies for other GPUs.
            spills: the file to spill to, how, and the bytes of the ring that they are read through.
            keep_bytes: the most that is kept under names, when nobody has it any more.
        """
        self._path, self._pool, self._sessions = path, pool, sessions
        self._post, self._end, self._fail, self._gpu_lost = post, end, fail, gpu_lost
        self._instance = uuid.uuid4().hex
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._links: dict[tuple[str, bool], VaultLink] = {}
        self._groups = {to_host: LinkGroup(to_host, relaying.refusal) for to_host in (True, False)}
        self._givers: dict[int, ThreadPoolExecutor] = {}  # give back what was lent of each GPU
        self._waiting: deque[_Reservation] = deque()
        self._leaving: set[Session] = set()  # have gone, and memory of theirs is here still
        # Who waits until what was lent is not here any more, and what is answered then.
        self._returning: list[tuple[_Request, Sequence[BorrowedMemory], Callable[[], _Answer]]] = []
        self._refused = self.cut_off = 0  # requests, and clients (by `Vault`)
        self._spills, self._keep_bytes = spills, keep_bytes
        self._spiller: Spiller | None = None

    def begin(self, gpus: Iterable[VaultGpu]) -> None:
        """Make the links of these GPUs, and so their contexts, while little memory is registered.

        A context that is made later maps all of it first, and its GPU's first client waits for that.
        """
        for gpu in gpus:
            self._link(gpu, True)
        if self._spills is not None:
            file, plan, ring_bytes = self._spills
            first = next(iter(self._gpus.values()))
            self._spiller = Spiller(
                self._pool,
                file,
                plan.free_bytes,
                memory.take(ring_bytes, first.node, first.ordinal, REQUESTS_AT_ONCE, lambda _: None),
                self._post,
                may_tell=lambda entry: all(owner.may_be_told for owner in self._owners_of(entry)),
                tell=self._tell_of_files,
                changed=self.serve_waiting,
            )

    def look(self) -> None:
        """Now and then: spill ahead."""
        if self._spiller is not None:
            self._spiller.look()
            self.serve_waiting()

    def handle(self, session: Session, message: VaultMessage) -> None:
        """Do what it asks, or begin to. Every descriptor is closed, unless the request keeps it.

        Raises:
            Nonsense: no client says this.
        """
        body, descriptors, _ = message
        session.open_requests += 1
        try:
            asked = _Request(session, integer(body, "id"), body, descriptors)
            verb = text(body, "do", protocol.MAX_REQUEST_BYTES)
            if (verb == "hello") == session.is_greeted:
                raise Nonsense("hello must be the first request, and only sent once")
            handler = _REQUESTS.get(verb)
            if handler is None:
                raise Nonsense(f"unknown request {verb!r:.50}")
            if message.descriptors_lost:
                self._answer(asked, VaultError(memory.NO_MORE_FILES))
            else:
                self._do(asked, partial(handler, self, asked))
        finally:
            protocol.close_all(descriptors)

    def _do(self, asked: _Request, work: Callable[[], _Answer | None]) -> None:
        """Answer with what this gives, or later if that is None. If the vault fails at it, its client alone notices."""
        try:
            result: _Answer | Exception | None = work()
        except (CumemSleepError, OSError) as error:
            result = error
        except Exception as error:
            self._fail(asked.session, error)
            return
        if result is not None:
            self._answer(asked, result)

    def cancel(self, session: Session) -> None:
        """Drop its pending requests. What it lent goes back to it when none of its copies is in flight any more."""
        if self._spiller is not None:
            self._spiller.reader.cancel(session)
        for link in self._links.values():
            link.cancel(session)
        self._give_back([lent for lent in session.lent.values() if not lent.jobs])
        self._waiting = deque(each for each in self._waiting if each.asked.session is not session)

    def forget(self, session: Session) -> None:
        """It has gone: whatever it has comes back."""
        self.cancel(session)
        if session.has_lent:
            self._leaving.add(session)
        self._pool.ledger.drop_owner(session.owner)
        self.serve_waiting()

    def take_no_more(self) -> None:
        """Refuse new backups, and those who wait for memory: the vault is about to end."""
        self._pool.is_stopped = True
        self.serve_waiting()

    def close(self) -> None:
        """Cancel all copies, and wait for what is in flight."""
        if self._spiller is not None:
            self._spiller.reader.stop()
        for link in self._links.values():
            link.stop()
        if self._spiller is not None:
            self._spiller.close()

    def finish(self) -> None:
        """Wait until everything that was lent is given back, after `close` and all that it has posted."""
        for giver in self._givers.values():
            giver.shutdown()

    # Requests

    def _hello(self, asked: _Request) -> _Answer:
        asked.session.name = "".join(c for c in text(asked.body, "name", 80) if c.isprintable())
        asked.session.identity = text(asked.body, "identity", 64)
        asked.session.is_greeted = True
        if self._spiller is not None:
            file, descriptors = self._spiller.file, list[int]()
            try:
                asked.session.moves = MoveLog()
                descriptors.append(asked.session.moves.reader())
                descriptors.append(os.dup(file.read_only))
            except OSError:
                protocol.close_all(descriptors)
                raise VaultError(memory.NO_MORE_FILES) from None
            asked.session.send({"file_bytes": file.nbytes, "folder": str(file.folder)}, descriptors)
        return {
            "pid": os.getpid(),
            "instance": self._instance,
            "version": __version__,
            "memory_bytes": self._pool.memory_bytes,
            "keep_bytes": self._keep_bytes,
            "gpus": list(self._gpus),
            "simulated": _core.driver_is_simulated(),
        }

    def _reserve(self, asked: _Request) -> None:
        """Backups. Who says that there will be more has that set aside, and the next parts at once."""
        gpu, sizes = self._gpu(asked.body), integers(asked.body, "sizes", protocol.MAX_BACKUPS)
        if self._pool.is_stopped:
            raise InvalidState("the vault is shutting down and accepts no new backups")
        more_bytes, waits = integer(asked.body, "more_bytes"), boolean(asked.body, "wait")
        if waits and self._pool.short:  # others may have given memory back since
            self._pool.take_more()
        expendable = boolean(asked.body, "expendable")
        needed = needed_bytes(sizes) + more_bytes
        self._waiting.append(_Reservation(asked, gpu, sizes, needed, more_bytes, waits, expendable))
        self.serve_waiting()

    def _room(self, _asked: _Request) -> _Answer:
        ledger = self._pool.ledger
        return {
            "free_bytes": max(0, ledger.memory.free_bytes - ledger.claims.total()) + self._pool.bytes_to_come(),
            "expendable_bytes": ledger.available_bytes(expendable=True),
        }

    def _withdraw(self, asked: _Request) -> _Answer:
        """The client does not wait any more for the memory that it asked for."""
        given_up = integer(asked.body, "request")
        for each in list(self._waiting):
            if each.asked.session is asked.session and each.asked.number == given_up:
                self._waiting.remove(each)
                self._answer(each.asked, InvalidState("it was withdrawn"))
        self.serve_waiting()
        return {}

    def serve_waiting(self) -> None:
        """Give memory to those who wait for it, in order, until there is too little; refuse what can never be had."""
        ledger = self._pool.ledger
        goes_on = True
        waiting, self._waiting = self._waiting, deque()
        while waiting:
            each = waiting.popleft()
            if not each.asked.session.is_served:  # it has gone since: nobody would give this back
                continue
            owner, will_have = each.asked.session.owner, self._will_have(each)
            available = ledger.available_bytes(owner, expendable=each.expendable)  # for it something may have gone
            if each.needed_bytes <= available and (goes_on or ledger.claims[owner]):
                self._do(each.asked, partial(self._reserved, each))
            elif will_have:
                if each.waits:
                    goes_on = goes_on and self._pool.waits  # for others, so it holds up nobody
                    self._waiting.append(each)
                else:
                    self._answer(each.asked, {"backups": None})
            elif each.waits and self._may_have(each, available):
                self._waiting.append(each)  # it holds up nobody: who is to seal for it may need more before that
            else:
                of_files = self._spiller.room_in_words() if self._spiller is not None else ""
                refusal = self._pool.out_of_memory(each.needed_bytes, available, self._names(), of_files)
                self._answer(each.asked, refusal)

    def _will_have(self, each: _Reservation) -> bool:
        """Whether there will be enough memory for it, when all is taken or, if need be, some is spilled."""
        ledger, owner = self._pool.ledger, each.asked.session.owner
        while True:
            available = ledger.available_bytes(owner, expendable=each.expendable)
            missing = each.needed_bytes - available - self._pool.bytes_to_come()
            if missing <= 0:
                return True
            if self._spiller is None or each.expendable:
                return False
            if self._spiller.make_room(missing):
                return True
            if not ledger.forget_for_room(missing):
                return False

    def _may_have(self, each: _Reservation, available: int) -> bool:
        """Whether there will be, if others who fall asleep seal their backups soon: then these can be spilled.

        Those who wait already do not, so nobody waits in a circle: the last one is refused, and gives up what it has.
        """
        if self._spiller is None or each.expendable:
            return False
        wait = {each.asked.session.owner, *(other.asked.session.owner for other in self._waiting)}
        missing = each.needed_bytes - available - self._pool.bytes_to_come()
        return self._spiller.could_make_room(missing, lambda entry: not wait & entry.owners)

    def _reserved(self, each: _Reservation) -> _Answer:
        session, gpu, ledger = each.asked.session, each.gpu, self._pool.ledger
        shares = ledger.reserve(session.owner, gpu.uuid, each.sizes, gpu.node, expendable=each.expendable)
        ledger.claims[session.owner] = each.more_bytes
        try:
            return self._handed_out(session, shares)
        except CumemSleepError:
            ledger.claims[session.owner] = 0  # the client hears of no backup, so it will not ask for more
            raise

    def _find(self, asked: _Request) -> _Answer:
        gpu, owner = self._gpu(asked.body), asked.session.owner
        keys = [_key(each) for each in objects(asked.body, "keys", protocol.MAX_BACKUPS)]
        shares = [self._pool.ledger.find(owner, gpu.uuid, key) for key in keys]
        return self._handed_out(asked.session, shares)

    def _seal(self, asked: _Request) -> _Answer:
        ledger, owner = self._pool.ledger, asked.session.owner
        backups = objects(asked.body, "backups", protocol.MAX_BACKUPS)
        shares = [ledger.sealable(owner, integer(each, "number")) for each in backups]
        keys = [_key(each) for each in backups]
        for share, key in zip(shares, keys, strict=True):
            ledger.seal(owner, share.number, key)
        self.serve_waiting()
        return self._handed_out(asked.session, shares)

    def _keep(self, asked: _Request) -> _Answer:
        """These backups, under a name."""
        name, manifest = text(asked.body, "name"), text(asked.body, "manifest", protocol.MAX_MANIFEST)
        numbers = integers(asked.body, "numbers", protocol.MAX_KEPT)
        self._pool.ledger.keep(name, manifest, asked.session.owner, numbers, self._keep_bytes)
        self.serve_waiting()
        return {}

    def _adopt(self, asked: _Request) -> _Answer:
        """What is kept under a name."""
        gpu, name = self._gpu(asked.body), text(asked.body, "name")
        found = self._pool.ledger.adopt(asked.session.owner, gpu.uuid, name)
        if found is None:
            return {"backups": None}
        manifest, shares = found
        return {"manifest": manifest, **self._handed_out(asked.session, shares)}

    def _drop(self, asked: _Request) -> _Answer:
        """Forget a name."""
        is_dropped = self._pool.ledger.forget(text(asked.body, "name"))
        self.serve_waiting()
        return {"dropped": is_dropped}

    def _mark(self, asked: _Request) -> _Answer:
        numbers = integers(asked.body, "numbers", protocol.MAX_BACKUPS)
        gone = self._pool.ledger.mark(asked.session.owner, numbers, boolean(asked.body, "needed"))
        self.serve_waiting()
        return {"gone": gone}

    def _distrust(self, asked: _Request) -> _Answer:
        """These hold other bytes than they were sealed with."""
        numbers = integers(asked.body, "numbers", protocol.MAX_BACKUPS)
        self._pool.ledger.distrust(asked.session.owner, numbers)
        self.serve_waiting()
        return {}

    def _owners(self, asked: _Request) -> _Answer:
        numbers = integers(asked.body, "numbers", protocol.MAX_BACKUPS)
        return {"owners": self._pool.ledger.owners(asked.session.owner, numbers)}

    def _release(self, asked: _Request) -> _Answer:
        """Backups, and what was set aside for others."""
        numbers = integers(asked.body, "numbers", protocol.MAX_BACKUPS)
        ledger, session, closed = self._pool.ledger, asked.session, set(integers(asked.body, "slabs"))
        session.known_slabs -= closed
        ledger.claims[session.owner] = 0
        ledger.release(session.owner, numbers)
        if session.moves is not None:
            session.moves.heard(integer(asked.body, "heard"))
        self.serve_waiting()
        return {}

    def _copy(self, asked: _Request) -> _Answer | None:
        """Between a client's memory and one of its backups."""
        gpu, to_host, ranges = self._gpu(asked.body), boolean(asked.body, "out"), table(asked.body, "ranges", 3)
        lent, ledger, number = self._lent(asked, gpu), self._pool.ledger, integer(asked.body, "number")
        entry = (ledger.writable if to_host else ledger.share)(asked.session.owner, number).entry
        if lent.device != gpu.ordinal:
            raise InvalidArgument("this memory is on another GPU")
        check_table(ranges, lent.nbytes, entry.nbytes)
        pieces = list(islice(self._pieces(number, entry, ranges), _MAX_PIECES + 1))
        if len(pieces) > _MAX_PIECES:
            raise InvalidArgument(f"a copy of over {_MAX_PIECES} pieces: ask for less at once")
        return self._begin_copy(asked, gpu, to_host, lent, entry, pieces)

    def _pieces(self, number: int, entry: Entry, ranges: Table) -> Iterator[LinkPiece]:
        """What links copy: small ranges together, by a kernel; there may be more of them than pieces."""
        slabs = self._pool.slabs
        is_small = ranges[:, 2] <= SMALL_RANGE_BYTES
        if entry.extents and is_small.sum() > 1:
            for slab, some in table_pieces(ranges[is_small], entry.extents):
                yield LinkPiece(slabs[slab].block, 0, 0, int(some[:, 2].sum()), some)
            ranges = ranges[~is_small]
        for lent_at, offset, size in ranges.tolist():
            at = lent_at
            if self._spiller is not None and not entry.extents:
                ring = self._spiller.ring.block
                for _, start, nbytes in entry.in_files.ranges(offset, size):
                    yield LinkPiece(ring, start, at, nbytes, source=PieceSource(self._spiller.file, number))
                    at += nbytes
            for slab, start, nbytes in entry.ranges(offset, size):
                for begin in range(0, nbytes, PIECE_BYTES):
                    yield LinkPiece(slabs[slab].block, start + begin, at + begin, min(PIECE_BYTES, nbytes - begin))
                at += nbytes

    def _begin_copy(
        self,
        asked: _Request,
        gpu: VaultGpu,
        to_host: bool,
        lent: BorrowedMemory,
        entry: Entry,
        pieces: Iterable[LinkPiece],
    ) -> _Answer | None:
        in_files = deque(piece for piece in pieces if piece.source)
        in_memory = deque(piece for piece in pieces if not piece.source)
        left = bool(in_memory) + bool(in_files)  # what is to end
        if not left:
            return {}
        link = self._link(gpu, to_host)  # its thread may not start
        if in_files and self._spiller is not None:
            self._spiller.reader.start()  # likewise
        lent.jobs += 1
        ledger = self._pool.ledger
        ledger.begin_copy(entry)
        failure: Exception | None = None
        relays: set[int] = set()

        def over(error: Exception | None, gpu_is_lost: bool) -> None:
            nonlocal left, failure
            left, failure = left - 1, failure or error
            if not left:
                all_over(failure, gpu_is_lost)

        def all_over(error: Exception | None, gpu_is_lost: bool) -> None:
            if isinstance(error, InvalidState):
                error = InvalidState(f"in the vault: {error}")  # which is "this process" there
            lent.jobs -= 1
            if not asked.session.is_served and not lent.jobs:
                self._give_back([lent])
            ledger.end_copy(entry)
            helped = [each.uuid for each in self._gpus.values() if each.ordinal in relays]
            self._answer(asked, error or {"relays": helped})
            self.serve_waiting()
            if gpu_is_lost:
                self._gpu_lost(VaultError(f"{gpu.uuid} does not work for this process any more: {error}"))

        def done(error: Exception | None) -> None:
            self._post(partial(over, error, isinstance(error, DriverError) and _is_lost(gpu)))

        if in_memory:
            link.submit(Job(asked.session, lent, in_memory, done, relays=relays))
        if in_files and self._spiller is not None:
            self._spiller.reader.submit(FileRead(asked.session, lent, in_files, done, relays=relays, link=link))
        return None

    def _lent(self, asked: _Request, gpu: VaultGpu) -> BorrowedMemory:
        """The memory that a copy is about. It comes with its first copy; the client numbers it."""
        number, nbytes = integer(asked.body, "memory"), integer(asked.body, "bytes", 1)
        mine = asked.session.lent
        if asked.descriptors:
            if number in mine:
                raise Nonsense(f"memory: {number} was sent before")
            if len(mine) >= protocol.MAX_AT_ONCE:
                raise InvalidState(f"{len(mine)} memory handles are lent already: return some first")
            mine[number] = BorrowedMemory(asked.descriptors.pop(), gpu.ordinal, nbytes)
        if number not in mine:
            raise InvalidState(f"memory {number} was not sent, or did not arrive")
        return mine[number]

    def _take_back(self, asked: _Request) -> _Answer | None:
        """The client has no copy of these memories open any more: they go back."""
        mine = asked.session.lent
        numbers = dict.fromkeys(number for number in integers(asked.body, "memories") if number in mine)
        for number in numbers:
            if mine[number].jobs:
                raise InvalidState(f"memory {number} is still being copied: wait for that first")
        if not numbers:
            return {}

        def returned() -> _Answer:
            for number in numbers:
                mine.pop(number, None)
            return {}

        lent = [mine[number] for number in numbers]
        self._returning.append((asked, lent, returned))
        self._give_back(lent)
        return None

    def _give_back(self, lent: Sequence[BorrowedMemory]) -> None:
        """No copy uses these any more. It takes a while, and ends later."""
        by_device: dict[int, list[BorrowedMemory]] = {}
        for each in lent:
            by_device.setdefault(each.device, []).append(each)
        for device, some in by_device.items():
            if device not in self._givers:
                self._givers[device] = ThreadPoolExecutor(1, f"vault-give-back-{device}")
            self._givers[device].submit(_close_all, some).add_done_callback(lambda _: self._post(self._returned))

    def _returned(self) -> None:
        """Some of what was lent is not here any more: answer whoever waits for that, once it is all of theirs."""
        self._leaving = {session for session in self._leaving if session.has_lent}
        for each in [each for each in self._returning if all(lent.is_returned for lent in each[1])]:
            self._returning.remove(each)
            asked, _, result = each
            self._answer(asked, result())

    def _resume(self, asked: _Request) -> None:
        """The client goes on over a new connection; what it held over those before is held over this one."""
        session = asked.session
        session.known_slabs = set(integers(asked.body, "slabs"))
        for before in [each for each in self._sessions if each.identity == session.identity and each is not session]:
            if self._pool.ledger.numbers(before.owner):
                session.owner, before.owner = before.owner, session.owner
            self._end(before)
        lent = [each for left in self._leaving if left.identity == session.identity for each in left.lent.values()]
        self._returning.append((asked, lent, lambda: {"numbers": self._pool.ledger.numbers(session.owner)}))
        self._returned()

    def _look(self, asked: _Request) -> _Answer:
        """Where backups are that the client holds."""
        numbers = integers(asked.body, "numbers", protocol.MAX_BACKUPS)
        return self._said(asked.session, [self._pool.ledger.find_share(asked.session.owner, each) for each in numbers])

    def _read_ahead(self, asked: _Request) -> _Answer:
        """What these processes have in files, they are about to need; none: the client itself."""
        pids = integers(asked.body, "pids", protocol.MAX_BACKUPS)
        if self._spiller is None:
            return {"bytes": 0}
        named = [session for session in self._sessions if session.pid in pids] if pids else [asked.session]
        entries = [share.entry for session in named for share in self._pool.ledger.shares(session.owner)]
        return {"bytes": self._spiller.read_ahead(entries)}

    # What requests share

    def _answer(self, asked: _Request, result: _Answer | Exception) -> None:
        self._refused += isinstance(result, Exception)
        asked.session.answer(asked.number, result)

    def _names(self) -> dict[Hashable, str]:
        return {session.owner: str(session) for session in self._sessions}

    def _gpu(self, body: Mapping[str, Any]) -> VaultGpu:
        uuid = text(body, "gpu")
        if uuid not in self._gpus:
            raise VaultError(f"the vault does not serve {uuid!r}, only {', '.join(self._gpus)}: see its --gpus")
        return self._gpus[uuid]

    def _link(self, gpu: VaultGpu, to_host: bool) -> VaultLink:
        if (gpu.uuid, to_host) not in self._links:
            self._links[gpu.uuid, to_host] = VaultLink(gpu.ordinal, self._groups[to_host])
            if to_host:  # so that the way back is ready when a wake comes
                self._link(gpu, False)
        return self._links[gpu.uuid, to_host]

    def _handed_out(self, session: Session, shares: Sequence[Share | None]) -> _Answer:
        """The answer that gives these to the client. If that cannot be said, they go back."""
        try:
            return self._said(session, shares)
        except CumemSleepError:
            self._pool.ledger.release(session.owner, [share.number for share in shares if share is not None])
            self.serve_waiting()
            raise

    def _said(self, session: Session, shares: Sequence[Share | None]) -> _Answer:
        """Where they are, after descriptors of the slabs that the client has none of."""
        there = [share for share in shares if share is not None]
        if sum(_EXTENT_CHARACTERS * len(share.entry.extents) for share in there) > _MAX_SAID:
            raise InvalidArgument(f"the answer has over {_MAX_SAID} bytes: ask for less at once")
        slabs = {extent.slab for share in there for extent in share.entry.extents}
        for number in sorted(slabs - session.known_slabs):
            self._send_slab(session, number)
        backups = [
            share
            and {
                "number": share.number,
                "bytes": share.entry.nbytes,
                # Where its owner reads it itself: what is in files may be dropped from memory at any moment.
                "extents": share.entry.spilled if share.entry.is_in_files else share.entry.extents,
            }
            for share in shares
        ]
        return {"backups": backups, "moves_end": session.moves.end if session.moves else 0}

    def _owners_of(self, entry: Entry) -> list[Session]:
        return [session for session in self._sessions if session.owner in entry.owners]

    def _tell_of_files(self, entries: Sequence[Entry]) -> None:
        """These are in files from here on. Raises VaultError: nobody was told."""
        by_session: dict[Session, list[Entry]] = {}
        for entry in entries:
            for session in self._owners_of(entry):
                by_session.setdefault(session, []).append(entry)
        told: list[tuple[MoveLog, bytes]] = []
        for session, mine in by_session.items():
            if session.moves is None or session.channel.unsent_bytes:
                raise VaultError(f"{session} takes no messages")
            moves = [
                Move([share.number for share in entry.shares if share.owner is session.owner], entry.spilled)
                for entry in mine
            ]
            told.append((session.moves, encoded(moves)))
        for log, moved in told:
            log.make_room(moved)
        for log, moved in told:
            log.add(moved)

    def _send_slab(self, session: Session, number: int) -> None:
        """A descriptor of it. Raises VaultError: this process can open no more files."""
        slab = self._pool.slabs[number]
        try:
            sent = os.dup(slab.descriptor)
        except OSError:
            raise VaultError(memory.NO_MORE_FILES) from None
        session.send({"slab": number, "bytes": slab.nbytes}, [sent])
        session.known_slabs.add(number)

    # What there is to know

    def _status(self, asked: _Request) -> _Answer:
        """All that the vault knows, for people and programs; a client that asks and holds nothing is left out."""
        ledger = self._pool.ledger
        held = ledger.held()
        return {
            "pid": os.getpid(),
            "version": __version__,
            "simulated": _core.driver_is_simulated(),
            "socket": str(self._path),
            "memory_bytes": self._pool.memory_bytes,
            "pinned_bytes": ledger.memory.nbytes,
            "touched_bytes": self._pool.prefaulted_bytes,
            "short": self._pool.short,
            "free_bytes": ledger.memory.free_bytes,
            "left_bytes": ledger.available_bytes() + self._pool.bytes_to_come(),
            **held[None, None]._asdict(),
            "saved_bytes": ledger.saved_bytes,
            **self._files_status(),
            "evicted_bytes": ledger.evicted_bytes,
            "keep_bytes": self._keep_bytes,
            "kept_bytes": ledger.kept_bytes,
            "kept": [{"name": name, "bytes": kept.nbytes} for name, kept in ledger.kept.items()],
            "waiting": len(self._waiting),
            "refused": self._refused,
            "cut_off": self.cut_off,
            "gpus": [self._gpu_status(gpu, held[None, gpu.uuid]) for gpu in self._gpus.values()],
            "clients": [
                self._client_status(session, held)
                for session in self._sessions
                if session.is_greeted and (session is not asked.session or ledger.numbers(session.owner))
            ],
        }

    def _files_status(self) -> dict[str, Any]:
        """Of a vault that does not spill, zeros."""
        spiller = self._spiller
        written, read = (spiller.written, spiller.reader.totals) if spiller else (CopyTotals(), CopyTotals())
        return {
            "ring_bytes": spiller.ring.nbytes if spiller else 0,
            "files_bytes": spiller.file.nbytes if spiller else 0,
            "files_free_bytes": self._pool.ledger.files.free_bytes,
            "files_writing_bytes": spiller.writing_bytes if spiller else 0,
            "files_written_bytes": written.nbytes,
            "files_written_gbps": written.gbps,
            "files_read_bytes": read.nbytes,
            "files_read_gbps": read.gbps,
            "files_failure": spiller.failure if spiller else "",
        }

    def _gpu_status(self, gpu: VaultGpu, held: HeldBytes) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "uuid": gpu.uuid,
            "ordinal": gpu.ordinal,
            "name": gpu.name,
            **held._asdict(),
        }
        into = self._links.get((gpu.uuid, False))
        helpers = into.helpers() if into else {}
        facts["helpers"] = {each.uuid: helpers[each.ordinal] for each in self._gpus.values() if each.ordinal in helpers}
        for direction, to_host in (("out", True), ("in", False)):
            link = self._links.get((gpu.uuid, to_host))
            copied, last, relayed = (link.copied, link.last, link.relayed) if link else [CopyTotals()] * 3
            facts |= {f"copied_{direction}_bytes": copied.nbytes, f"busy_{direction}_s": copied.seconds}
            facts |= {f"relayed_{direction}_bytes": relayed.nbytes, f"relayed_{direction}_s": relayed.seconds}
            facts |= {f"{direction}_gbps": copied.gbps}
            facts |= {f"last_{direction}_bytes": last.nbytes, f"last_{direction}_gbps": last.gbps}
        return facts

    def _client_status(self, session: Session, held: Mapping[tuple[Hashable, str | None], HeldBytes]) -> dict[str, Any]:
        return {
            "pid": session.pid,
            "name": session.name,
            "connected_s": time.monotonic() - session.since,
            **held[session.owner, None]._asdict(),
            "gpus": [
                {"uuid": uuid, **held[session.owner, uuid]._asdict()}
                for uuid in self._gpus
                if (session.owner, uuid) in held
            ],
            "lent_bytes": sum(lent.nbytes for lent in session.lent.values()),
            "open_requests": session.open_requests,
        }


_Handler = Callable[[Service, _Request], _Answer | None]
_REQUESTS: Mapping[str, _Handler] = {
    "hello": Service._hello,
    "reserve": Service._reserve,
    "find": Service._find,
    "seal": Service._seal,
    "keep": Service._keep,
    "adopt": Service._adopt,
    "drop": Service._drop,
    "mark": Service._mark,
    "distrust": Service._distrust,
    "owners": Service._owners,
    "release": Service._release,
    "copy": Service._copy,
    "forget": Service._take_back,
    "resume": Service._resume,
    "look": Service._look,
    "read_ahead": Service._read_ahead,
    "room": Service._room,
    "withdraw": Service._withdraw,
    "status": Service._status,
}


def _close_all(lent: Iterable[BorrowedMemory]) -> None:
    for each in lent:
        each.close()


def _is_lost(gpu: VaultGpu) -> bool:
    """After some errors every call fails until the process has ended: then the next vault does better."""
    with suppress(DriverError):
        _core.memory_info(gpu.ordinal)
        return False
    return True


def _key(body: Mapping[str, Any]) -> Key:
    return Key(text(body, "digest", 64), integer(body, "of_bytes"), text(body, "encoding", 64))
