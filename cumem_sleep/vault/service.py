"""What clients may ask the vault for. Nothing here waits: what takes time is answered when it has ended."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import __version__, _core
from ..errors import CumemSleepError, DriverError, InvalidArgument, InvalidState, OutOfHostMemory, VaultError
from . import memory, protocol
from .ledger import Extent, Held, Hold, Key
from .link import PIECE_BYTES, Copied, Job, Lent, Link, Piece
from .pool import Pool
from .protocol import Message, Nonsense, boolean, integer, integers, objects, rows, text
from .session import Session

_NOTE_BYTES, _NOTE_SHARE = 4096, 1024  # a note may have so many, and one for so many of its backup


@dataclass(frozen=True)
class Gpu:
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
    """Waits for memory that is still being taken."""

    asked: _Request
    gpu: Gpu
    sizes: Sequence[int]
    waits: bool


class Service:
    """Answers requests, from the pool and over links. All of its calls belong to one thread."""

    def __init__(
        self,
        path: Path,
        gpus: Sequence[Gpu],
        pool: Pool,
        sessions: Sequence[Session],
        post: Callable[[Callable[[], None]], None],
        end: Callable[[Session], None],
        gpu_lost: Callable[[VaultError], None],
    ) -> None:
        """Nothing is done yet.

        Args:
            path: of the socket, to be shown.
            sessions: all that there are, whenever they are looked at.
            post: has work done by the thread that calls the service.
            end: ends the connection of a session.
            gpu_lost: is called when no call for a GPU works any more.
        """
        self._path, self._pool, self._sessions = path, pool, sessions
        self._post, self._end, self._gpu_lost = post, end, gpu_lost
        self._instance = uuid.uuid4().hex
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._links: dict[tuple[str, bool], Link] = {}
        self._waiting: deque[_Reservation] = deque()
        self._leaving: set[Session] = set()  # have gone, and copies of theirs are under way still
        self._resuming: dict[_Request, list[int]] = {}  # who waits for these, and which backups are wanted
        self._counts: Counter[str] = Counter()
        self._is_ending = False

    def begin(self) -> None:
        """Make the links of the GPU that registers the memory, so that its first copies do not wait for the kernel."""
        self._link(next(iter(self._gpus.values())), True)

    def handle(self, session: Session, message: Message) -> None:
        """Do what it asks. Every descriptor is closed, unless the request keeps it.

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
            try:
                if message.descriptors_lost:
                    raise VaultError(memory.NO_MORE_FILES)
                answer = handler(self, asked)
            except CumemSleepError as error:
                self._answer(asked, error)
            else:
                if answer is not None:
                    self._answer(asked, answer)
        finally:
            protocol.close_all(descriptors)

    def cancel(self, session: Session) -> None:
        """Drop its pending requests. What it lent goes back to it when none of its copies is in flight any more."""
        for link in self._links.values():
            link.cancel(session)
        for lent in session.lent.values():
            if not lent.jobs:
                lent.close()
        self._waiting = deque(each for each in self._waiting if each.asked.session is not session)

    def forget(self, session: Session) -> None:
        """It has gone: whatever it has comes back."""
        self.cancel(session)
        if session.is_copying:
            self._leaving.add(session)
        self._pool.ledger.drop_owner(session)
        self._memory_came_back()

    def count_cut_off(self) -> None:
        """One client more was cut off."""
        self._counts["cut off"] += 1

    def held(self, session: Session) -> Held:
        """Its backups."""
        return self._pool.ledger.held_by(session)

    def take_no_more(self) -> None:
        """Refuse new backups, and those who wait for memory: the vault is about to end."""
        self._is_ending = True
        self._pool.stop_taking()
        self.serve_waiting()

    def close(self) -> None:
        """Cancel all copies, and wait for what is in flight."""
        for link in self._links.values():
            link.stop()

    # Requests

    def _hello(self, asked: _Request) -> _Answer:
        asked.session.name = "".join(c for c in text(asked.body, "name", 80) if c.isprintable())
        asked.session.identity = text(asked.body, "identity", 64)
        asked.session.is_greeted = True
        return {
            "pid": os.getpid(),
            "instance": self._instance,
            "version": __version__,
            "memory_bytes": self._pool.memory_bytes,
            "gpus": list(self._gpus),
            "simulated": _core.driver_is_simulated(),
        }

    def _reserve(self, asked: _Request) -> None:
        gpu, sizes = self._gpu(asked.body), integers(asked.body, "sizes")
        if self._is_ending:
            raise InvalidState("the vault is shutting down and accepts no new backups")
        self._waiting.append(_Reservation(asked, gpu, sizes, boolean(asked.body, "wait")))
        self.serve_waiting()

    def _room(self, asked: _Request) -> _Answer:
        return {"free_bytes": self._pool.ledger.free_bytes + self._pool.bytes_to_come()}

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
        names = self._names()
        goes_on = True
        for each in list(self._waiting):
            result: _Answer | Exception | None = None
            try:
                self._pool.ledger.require_room(each.sizes, names)
                if goes_on:
                    holds = self._pool.ledger.reserve(each.asked.session, each.gpu.uuid, each.sizes, each.gpu.node)
                    result = self._handed_out(each.asked.session, holds)
            except OutOfHostMemory as error:
                if error.needed_bytes > error.available_bytes + self._pool.bytes_to_come():
                    result = error
                else:
                    goes_on = goes_on and not each.waits
            except CumemSleepError as error:
                result = error
            if result is None and each.waits:
                continue
            self._waiting.remove(each)
            self._answer(each.asked, {"backups": None} if result is None else result)

    def _find(self, asked: _Request) -> _Answer:
        gpu = self._gpu(asked.body)
        keys = [_key(each) for each in objects(asked.body, "keys")]
        return self._handed_out(asked.session, [self._pool.ledger.find(asked.session, gpu.uuid, key) for key in keys])

    def _seal(self, asked: _Request) -> _Answer:
        sealed = [(integer(each, "number"), _key(each), each) for each in objects(asked.body, "backups")]
        for number, _, _ in sealed:
            if self._pool.ledger.writable(asked.session, number).entry.copies:
                raise InvalidState(f"backup {number} is still being written: it cannot be sealed yet")
        holds = []
        for number, key, each in sealed:
            note = _note(each, self._pool.ledger.hold(asked.session, number).entry.nbytes)
            holds.append(self._pool.ledger.seal(asked.session, number, key, note))
        self._memory_came_back()
        return self._handed_out(asked.session, holds)

    def _mark(self, asked: _Request) -> _Answer:
        gone = self._pool.ledger.mark(asked.session, integers(asked.body, "numbers"), boolean(asked.body, "needed"))
        self._memory_came_back()
        return {"gone": gone}

    def _owners(self, asked: _Request) -> _Answer:
        return {"owners": self._pool.ledger.owners(asked.session, integers(asked.body, "numbers"))}

    def _release(self, asked: _Request) -> _Answer:
        self._pool.ledger.release(asked.session, integers(asked.body, "numbers"))
        asked.session.known_slabs -= set(integers(asked.body, "slabs"))  # which it has closed
        self._memory_came_back()
        return {}

    def _copy(self, asked: _Request) -> _Answer | None:
        """Between a client's memory and its backups."""
        gpu, to_host, ranges = self._gpu(asked.body), boolean(asked.body, "out"), rows(asked.body, "ranges", 4)
        lent = self._lent(asked, gpu)
        may = self._pool.ledger.writable if to_host else self._pool.ledger.hold
        holds = {row[0]: may(asked.session, row[0]) for row in ranges}
        pieces: deque[Piece] = deque()
        for hold, offset, lent_offset, size in ranges:
            entry = holds[hold].entry
            if offset + size > entry.nbytes or lent_offset + size > lent.nbytes or lent.device != gpu.ordinal:
                raise InvalidArgument(
                    f"range of {size} bytes at {offset} of backup {hold}, at {lent_offset} of lent memory: it lies"
                    f" beyond their {entry.nbytes} and {lent.nbytes} bytes, or on another GPU"
                )
            pieces.extend(self._pieces(entry.ranges(offset, size), lent_offset))
        if not pieces:
            return {}
        link = self._link(gpu, to_host)  # its thread may not start
        entries = {hold.entry for hold in holds.values()}
        for entry in entries:
            self._pool.ledger.begin_copy(entry)
        lent.jobs += 1

        def over(error: Exception | None) -> None:
            if isinstance(error, InvalidState):
                error = InvalidState(f"in the vault: {error}")  # which is "this process" there
            lent.jobs -= 1
            if not asked.session.is_served and not lent.jobs:
                lent.close()
            for entry in entries:
                self._pool.ledger.end_copy(entry)
            self._answer(asked, error or {})
            self._memory_came_back()
            self._answer_resuming()
            if isinstance(error, DriverError):
                self._look_at_gpu(gpu, error)

        link.submit(Job(asked.session, lent, pieces, lambda error: self._post(partial(over, error))))
        return None

    def _lent(self, asked: _Request, gpu: Gpu) -> Lent:
        """The memory that a copy is about. It comes with its first copy; the client numbers it."""
        number, nbytes = integer(asked.body, "memory"), integer(asked.body, "bytes", 1)
        mine = asked.session.lent
        if asked.descriptors:
            if number in mine:
                raise Nonsense(f"memory: {number} was sent before")
            if len(mine) >= protocol.MAX_AT_ONCE:
                raise InvalidState(f"{len(mine)} memory handles are lent already: return some first")
            mine[number] = Lent(asked.descriptors.pop(), gpu.ordinal, nbytes)
        if number not in mine:
            raise InvalidState(f"memory {number} was not sent, or did not arrive")
        return mine[number]

    def _look_at_gpu(self, gpu: Gpu, error: DriverError) -> None:
        """After some errors every call fails until the process has ended: then the next vault does better."""
        try:
            _core.memory_info(gpu.ordinal)
        except DriverError:
            self._gpu_lost(VaultError(f"{gpu.uuid} does not work for this process any more: {error}"))

    def _pieces(self, extents: Iterable[Extent], lent_offset: int) -> Iterator[Piece]:
        for slab, offset, nbytes in extents:
            block = self._pool.block(slab)
            for start in range(0, nbytes, PIECE_BYTES):
                size = min(PIECE_BYTES, nbytes - start)
                yield Piece(block, offset + start, lent_offset, size)
                lent_offset += size

    def _take_back(self, asked: _Request) -> _Answer:
        """The client has no copy of these memories open any more: they go back."""
        numbers = integers(asked.body, "memories")
        for number in numbers:
            if number in asked.session.lent and asked.session.lent[number].jobs:
                raise InvalidState(f"memory {number} is still being copied: wait for that first")
        for number in numbers:
            if number in asked.session.lent:
                asked.session.lent.pop(number).close()
        return {}

    def _resume(self, asked: _Request) -> None:
        """The client goes on over a new connection; what it held over those before is held over this one."""
        session, wanted = asked.session, integers(asked.body, "numbers")
        session.known_slabs = set(integers(asked.body, "slabs"))
        for before in [each for each in self._sessions if each.identity == session.identity and each is not session]:
            self._pool.ledger.move(before, session, wanted)
            self._end(before)
        self._resuming[asked] = wanted
        self._answer_resuming()

    def _answer_resuming(self) -> None:
        """Those who resume, once nothing is under way that they asked for over earlier connections."""
        self._leaving = {session for session in self._leaving if session.is_copying}
        leaving = {session.identity for session in self._leaving}
        for asked in [each for each in self._resuming if each.session.identity not in leaving]:
            holds = [self._pool.ledger.find_hold(asked.session, number) for number in self._resuming.pop(asked)]
            try:
                self._answer(asked, self._handed_out(asked.session, holds))
            except CumemSleepError as error:
                self._answer(asked, error)

    def _show(self, asked: _Request) -> None:
        """Backups in slabs that another vault has left behind. They are looked at by the thread that takes memory."""
        gpu = self._gpu(asked.body)
        shown = [(_key(each), _note(each, integer(each, "bytes", 1)), each) for each in objects(asked.body, "backups")]
        for _, _, each in shown:
            if any(row[0] >= len(asked.descriptors) for row in rows(each, "extents", 3)):
                raise Nonsense("extents: they lie in a slab whose descriptor is not there")
        self._pool.look_at(asked.descriptors.copy(), partial(self._adopt, asked, gpu, shown))
        asked.descriptors.clear()

    def _adopt(
        self,
        asked: _Request,
        gpu: Gpu,
        shown: Sequence[tuple[Key, str, _Answer]],
        looked_at: Future[list[memory.Slab]],
    ) -> None:
        ledger = self._pool.ledger
        holds: list[Hold] = []
        try:
            numbers = self._pool.adopt(looked_at.result(), self._names())
            for key, note, each in shown if asked.session.is_served else ():
                extents = [Extent(numbers[slab], offset, size) for slab, offset, size in each["extents"]]
                holds.append(ledger.show(asked.session, gpu.uuid, key, note, each["bytes"], extents))
            result: _Answer | Exception = self._handed_out(asked.session, holds)
        except (CumemSleepError, OSError) as error:
            ledger.release(asked.session, [hold.number for hold in holds])
            result = error
        self._answer(asked, result)
        self._memory_came_back()

    def _status(self, asked: _Request) -> _Answer:
        return self.status(asked.session)

    # What requests share

    def _answer(self, asked: _Request, result: _Answer | Exception) -> None:
        self._counts["refused"] += isinstance(result, Exception)
        asked.session.answer(asked.number, result)

    def _memory_came_back(self) -> None:
        """Adopted slabs without backups go; whoever waits for memory may have it now."""
        self._pool.tidy()
        self.serve_waiting()

    def _names(self) -> dict[Hashable, str]:
        return {session: str(session) for session in self._sessions}

    def _gpu(self, body: Mapping[str, Any]) -> Gpu:
        uuid = text(body, "gpu")
        if uuid not in self._gpus:
            raise VaultError(f"the vault does not serve {uuid!r}, only {', '.join(self._gpus)}: see its --gpus")
        return self._gpus[uuid]

    def _link(self, gpu: Gpu, to_host: bool) -> Link:
        if (gpu.uuid, to_host) not in self._links:
            self._links[gpu.uuid, to_host] = Link(gpu.ordinal, to_host)
            if to_host:  # so that the way back is ready when a wake comes
                self._link(gpu, False)
        return self._links[gpu.uuid, to_host]

    def _handed_out(self, session: Session, holds: Sequence[Hold | None]) -> _Answer:
        """The answer that gives these to the client, after descriptors of the slabs that it has none of."""
        given = [hold for hold in holds if hold is not None]
        slabs = sorted({extent.slab for hold in given for extent in hold.entry.extents} - session.known_slabs)
        for start in range(0, len(slabs), protocol.MAX_DESCRIPTORS):
            some = slabs[start : start + protocol.MAX_DESCRIPTORS]
            descriptors: list[int] = []
            try:
                for number in some:
                    descriptors.append(os.dup(self._pool.slab(number).descriptor))
            except OSError:
                protocol.close_all(descriptors)
                self._pool.ledger.release(session, [hold.number for hold in given])
                raise VaultError(memory.NO_MORE_FILES) from None
            session.send({"slabs": [[number, self._pool.slab(number).nbytes] for number in some]}, descriptors)
            session.known_slabs.update(some)
        return {"backups": [None if hold is None else _described(hold) for hold in holds]}

    # What there is to know

    def status(self, asking: Session) -> dict[str, Any]:
        """All that the vault knows, for people and programs; a client that asks and holds nothing is left out."""
        held = self._pool.ledger.held()
        return {
            "pid": os.getpid(),
            "version": __version__,
            "simulated": _core.driver_is_simulated(),
            "socket": str(self._path),
            "memory_bytes": self._pool.memory_bytes,
            "pinned_bytes": self._pool.ledger.own_bytes,
            "touched_bytes": self._pool.prefaulted_bytes,
            "adopted_bytes": self._pool.ledger.adopted_bytes,
            "short": self._pool.short,
            "free_bytes": self._pool.ledger.free_bytes,
            "left_bytes": self._pool.ledger.available_bytes() + self._pool.bytes_to_come(),
            **_held(held),
            "saved_bytes": self._pool.ledger.saved_bytes(),
            "evicted_bytes": self._pool.ledger.evicted_bytes,
            "waiting": len(self._waiting),
            "refused": self._counts["refused"],
            "cut_off": self._counts["cut off"],
            "gpus": [self._gpu_status(gpu) for gpu in self._gpus.values()],
            "clients": [
                self._client_status(session)
                for session in self._sessions
                if session.is_greeted and (session is not asking or self.held(session) != Held())
            ],
        }

    def _gpu_status(self, gpu: Gpu) -> dict[str, Any]:
        held = self._pool.ledger.held_for(gpu.uuid)
        facts: dict[str, Any] = {
            "uuid": gpu.uuid,
            "ordinal": gpu.ordinal,
            "name": gpu.name,
            **_held(held),
        }
        for direction, to_host in (("out", True), ("in", False)):
            link = self._links.get((gpu.uuid, to_host))
            copied, last = (link.copied, link.last) if link else (Copied(), Copied())
            facts |= {f"copied_{direction}_bytes": copied.nbytes, f"busy_{direction}_s": copied.seconds}
            facts |= {f"{direction}_gbps": copied.gbps}
            facts |= {f"last_{direction}_bytes": last.nbytes, f"last_{direction}_gbps": last.gbps}
        return facts

    def _client_status(self, session: Session) -> dict[str, Any]:
        held = self.held(session)
        return {
            "pid": session.pid,
            "name": session.name,
            "connected_s": time.monotonic() - session.since,
            **_held(held),
            "gpus": [
                {"uuid": uuid, **_held(on_gpu)}
                for uuid in self._gpus
                if (on_gpu := self._pool.ledger.held_by(session, uuid)) != Held()
            ],
            "lent_bytes": sum(lent.nbytes for lent in session.lent.values()),
            "open_requests": session.open_requests,
        }


_REQUESTS: Mapping[str, Callable[[Service, _Request], _Answer | None]] = {
    "hello": Service._hello,
    "reserve": Service._reserve,
    "find": Service._find,
    "seal": Service._seal,
    "mark": Service._mark,
    "owners": Service._owners,
    "release": Service._release,
    "copy": Service._copy,
    "forget": Service._take_back,
    "resume": Service._resume,
    "room": Service._room,
    "withdraw": Service._withdraw,
    "show": Service._show,
    "status": Service._status,
}


def _described(hold: Hold) -> _Answer:
    """As an answer says it."""
    entry = hold.entry
    return {"number": hold.number, "bytes": entry.nbytes, "extents": list(entry.extents), "note": entry.note}


def _held(held: Held) -> dict[str, int]:
    """As the status says it."""
    return {"asleep_bytes": held.needed, "awake_bytes": held.retained, "shared_bytes": held.shared}


def _key(body: Mapping[str, Any]) -> Key:
    return Key(text(body, "digest", 64), integer(body, "of_bytes"), text(body, "encoding", 64))


def _note(body: Mapping[str, Any], nbytes: int) -> str:
    return text(body, "note", _NOTE_BYTES + nbytes // _NOTE_SHARE)
