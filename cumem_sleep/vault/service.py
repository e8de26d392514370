"""What clients may ask the vault for. Nothing here waits: what takes time is answered when it has ended.

Nor does a large request hold up others: its work is done in steps, a few at a time (`Service._go_on`). What calls the
driver is done by threads of the GPU that it is about, because the driver may need seconds for a new context there.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .. import __version__, _core
from ..errors import CumemSleepError, DriverError, InvalidArgument, InvalidState, VaultError
from . import memory, protocol
from .ledger import Entry, Extent, Held, Hold, Key, needed_bytes
from .link import PIECE_BYTES, Copied, Job, Lent, Link, Piece
from .pool import Pool
from .protocol import Message, Nonsense, boolean, integer, integers, objects, rows, text
from .session import Session

_NOTE_BYTES, _NOTE_SHARE = 4096, 1024  # a note may have so many, and one for so many of its backup
_STEPS = 256  # of one request before others have their turn: a few milliseconds
_EXTENTS = 64  # that are put into words in one step


@dataclass(frozen=True)
class Gpu:
    """One GPU that the vault serves."""

    uuid: str
    ordinal: int
    name: str
    node: int


_Answer = dict[str, Any]
_Result = _Answer | str | None  # str: JSON, of what was put into words in steps; None: the answer comes later
_Work = Generator[None, None, _Result]
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


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
    needed_bytes: int
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
        fail: Callable[[Session, Exception], None],
        gpu_lost: Callable[[VaultError], None],
    ) -> None:
        """Nothing is done yet.

        Args:
            path: of the socket, to be shown.
            sessions: all that there are, whenever they are looked at.
            post: has work done by the thread that calls the service.
            end: ends the connection of a session.
            fail: is called when a client has said what no client says, or the vault has failed at its request.
            gpu_lost: is called when no call for a GPU works any more.
        """
        self._path, self._pool, self._sessions = path, pool, sessions
        self._post, self._end, self._fail, self._gpu_lost = post, end, fail, gpu_lost
        self._instance = uuid.uuid4().hex
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._links: dict[tuple[str, bool], Link] = {}
        self._givers: dict[int, ThreadPoolExecutor] = {}  # give back what was lent of each GPU
        self._waiting: deque[_Reservation] = deque()
        self._leaving: set[Session] = set()  # have gone, and copies of theirs are under way still
        self._resuming: dict[_Request, list[int]] = {}  # who waits for these, and which backups are wanted
        self._showing = 0  # how many requests are about to show backups in adopted slabs
        self._counts: Counter[str] = Counter()
        self._is_ending = False

    def begin(self, gpus: Iterable[Gpu]) -> None:
        """Make the links of these GPUs, and so their contexts, while little memory is registered.

        A context that is made later maps all of it first, and its GPU's first client waits for that.
        """
        for gpu in gpus:
            self._link(gpu, True)

    def handle(self, session: Session, message: Message) -> None:
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
        except Nonsense:
            protocol.close_all(descriptors)
            raise
        self._begin(asked, self._work(handler, asked, message.descriptors_lost))

    def _work(self, handler: _Handler, asked: _Request, descriptors_lost: bool) -> _Work:
        if descriptors_lost:
            raise VaultError(memory.NO_MORE_FILES)
        result = handler(self, asked)
        if isinstance(result, Generator):
            result = yield from result
        return result

    def _begin(self, asked: _Request, work: _Work) -> None:
        """Its client is not heard before this work has ended: requests of one client are done in order."""
        asked.session.at_work += 1
        self._go_on(asked, work)

    def _go_on(self, asked: _Request, work: _Work) -> None:
        """A few steps; the rest when all others have had their turn."""
        session = asked.session
        result: _Result | Exception = None
        try:
            for _ in range(_STEPS if session.is_served else 0):
                next(work)
            if session.is_served:
                self._post(partial(self._go_on, asked, work))
                return
            work.close()
        except StopIteration as end:
            result = end.value
        except CumemSleepError as error:
            result = error
        except Exception as error:
            self._fail(session, error)
        protocol.close_all(asked.descriptors)
        asked.descriptors.clear()
        session.at_work -= 1
        if result is None:
            session.go_on()
        else:
            self._answer(asked, result)

    def _in_background(self, steps: Iterator[None], then: Callable[[], None]) -> None:
        """Work that no client waits for."""
        for at, _ in enumerate(steps, 1):
            if at == _STEPS:
                self._post(partial(self._in_background, steps, then))
                return
        then()

    def cancel(self, session: Session) -> None:
        """Drop its pending requests. What it lent goes back to it when none of its copies is in flight any more."""
        for link in self._links.values():
            link.cancel(session)
        self._give_back([lent for lent in session.lent.values() if not lent.jobs])
        self._waiting = deque(each for each in self._waiting if each.asked.session is not session)

    def forget(self, session: Session) -> None:
        """It has gone: whatever it has comes back."""
        self.cancel(session)
        if session.is_copying:
            self._leaving.add(session)
        self._in_background(self._pool.ledger.dropping_owner(session), self._memory_came_back)

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

    def finish(self) -> None:
        """Wait until everything that was lent is given back, after `close` and all that it has posted."""
        for giver in self._givers.values():
            giver.shutdown()

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
        self._waiting.append(_Reservation(asked, gpu, sizes, needed_bytes(sizes), boolean(asked.body, "wait")))
        self.serve_waiting()

    def _room(self, asked: _Request) -> _Answer:
        return {"free_bytes": max(0, self._pool.ledger.free_bytes) + self._pool.bytes_to_come()}

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
        goes_on = True
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            available = self._pool.ledger.available_bytes()
            if each.needed_bytes <= available and goes_on:
                self._begin(each.asked, self._reserved(each))
            elif each.needed_bytes > available + self._pool.bytes_to_come():
                self._answer(each.asked, self._pool.out_of_memory(each.needed_bytes, self._names()))
            elif each.waits:
                goes_on = False
                self._waiting.append(each)
            else:
                self._answer(each.asked, {"backups": None})

    def _reserved(self, each: _Reservation) -> _Work:
        session = each.asked.session
        gpu, ledger = each.gpu, self._pool.ledger
        holds = yield from ledger.reserving(session, gpu.uuid, each.sizes, gpu.node, self._names())
        return (yield from self._handed_out(session, holds))

    def _find(self, asked: _Request) -> _Work:
        gpu = self._gpu(asked.body)
        keys = yield from _each(_key, objects(asked.body, "keys"))
        holds = yield from _each(partial(self._pool.ledger.find, asked.session, gpu.uuid), keys)
        return (yield from self._handed_out(asked.session, holds))

    def _seal(self, asked: _Request) -> _Work:
        ledger, session = self._pool.ledger, asked.session
        backups = objects(asked.body, "backups")
        sealed = yield from _each(lambda each: (integer(each, "number"), _key(each), each), backups)
        for number, _, _ in sealed:
            if ledger.writable(session, number).entry.copies:
                raise InvalidState(f"backup {number} is still being written: it cannot be sealed yet")
            yield
        holds = []
        for number, key, each in sealed:
            note = _note(each, ledger.hold(session, number).entry.nbytes)
            holds.append(ledger.seal(session, number, key, note))
            yield
        self._memory_came_back()
        return (yield from self._handed_out(session, holds))

    def _mark(self, asked: _Request) -> _Work:
        needed = boolean(asked.body, "needed")
        gone: list[int] = []
        for number in integers(asked.body, "numbers"):
            gone += self._pool.ledger.mark(asked.session, [number], needed)
            yield
        self._memory_came_back()
        return {"gone": gone}

    def _owners(self, asked: _Request) -> _Work:
        owners: list[int] = []
        for number in integers(asked.body, "numbers"):
            owners += self._pool.ledger.owners(asked.session, [number])
            yield
        return {"owners": owners}

    def _release(self, asked: _Request) -> _Work:
        numbers = integers(asked.body, "numbers")
        asked.session.known_slabs -= set(integers(asked.body, "slabs"))  # which it has closed
        yield from self._released(asked.session, numbers)
        return {}

    def _released(self, session: Session, numbers: Iterable[int]) -> Iterator[None]:
        for number in numbers:
            self._pool.ledger.release(session, [number])
            yield
        self._memory_came_back()

    def _copy(self, asked: _Request) -> _Work:
        """Between a client's memory and its backups."""
        gpu, to_host, ranges = self._gpu(asked.body), boolean(asked.body, "out"), rows(asked.body, "ranges", 4)
        lent = self._lent(asked, gpu)
        ledger = self._pool.ledger
        entries: dict[int, Entry] = {}
        pieces: deque[Piece] = deque()
        may = ledger.writable if to_host else ledger.hold
        link: Link | None = None
        try:
            for hold, offset, lent_offset, size in ranges:
                if hold not in entries:
                    entry = may(asked.session, hold).entry
                    ledger.begin_copy(entry)
                    entries[hold] = entry
                entry = entries[hold]
                if offset + size > entry.nbytes or lent_offset + size > lent.nbytes or lent.device != gpu.ordinal:
                    raise InvalidArgument(
                        f"range of {size} bytes at {offset} of backup {hold}, at {lent_offset} of lent memory: it lies"
                        f" beyond their {entry.nbytes} and {lent.nbytes} bytes, or on another GPU"
                    )
                for piece in self._pieces(entry.ranges(offset, size), lent_offset):
                    pieces.append(piece)
                    yield
                yield
            if not pieces:
                return {}
            link = self._link(gpu, to_host)  # its thread may not start
        finally:
            if link is None:
                for entry in entries.values():
                    ledger.end_copy(entry)
        lent.jobs += 1

        def over(error: Exception | None, gpu_is_lost: bool) -> None:
            if isinstance(error, InvalidState):
                error = InvalidState(f"in the vault: {error}")  # which is "this process" there
            lent.jobs -= 1
            if not asked.session.is_served and not lent.jobs:
                self._give_back([lent])
            for entry in entries.values():
                ledger.end_copy(entry)
            self._answer(asked, error or {})
            self._memory_came_back()
            self._answer_resuming()
            if gpu_is_lost:
                self._gpu_lost(VaultError(f"{gpu.uuid} does not work for this process any more: {error}"))

        def done(error: Exception | None) -> None:
            self._post(partial(over, error, isinstance(error, DriverError) and _is_lost(gpu)))

        link.submit(Job(asked.session, lent, pieces, done))
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

    def _pieces(self, extents: Iterable[Extent], lent_offset: int) -> Iterator[Piece]:
        for slab, offset, nbytes in extents:
            block = self._pool.block(slab)
            for start in range(0, nbytes, PIECE_BYTES):
                size = min(PIECE_BYTES, nbytes - start)
                yield Piece(block, offset + start, lent_offset, size)
                lent_offset += size

    def _take_back(self, asked: _Request) -> _Answer | None:
        """The client has no copy of these memories open any more: they go back."""
        mine = asked.session.lent
        numbers = [number for number in integers(asked.body, "memories") if number in mine]
        for number in numbers:
            if mine[number].jobs:
                raise InvalidState(f"memory {number} is still being copied: wait for that first")
        if not numbers:
            return {}
        self._give_back([mine.pop(number) for number in dict.fromkeys(numbers)], lambda: self._answer(asked, {}))
        return None

    def _give_back(self, lent: Sequence[Lent], then: Callable[[], None] = lambda: None) -> None:
        """No copy uses these any more. It takes a while, and ends later."""
        by_device: dict[int, list[Lent]] = {}
        for each in lent:
            by_device.setdefault(each.device, []).append(each)
        left = len(by_device)

        def given_back() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for device, some in by_device.items():
            if device not in self._givers:
                self._givers[device] = ThreadPoolExecutor(1, f"vault-give-back-{device}")
            future = self._givers[device].submit(_close_all, some)
            future.add_done_callback(lambda _: self._post(given_back))

    def _resume(self, asked: _Request) -> _Work:
        """The client goes on over a new connection; what it held over those before is held over this one."""
        session, wanted = asked.session, integers(asked.body, "numbers")
        session.known_slabs = set(integers(asked.body, "slabs"))
        for before in [each for each in self._sessions if each.identity == session.identity and each is not session]:
            for number in wanted:
                self._pool.ledger.move(before, session, [number])
                yield
            self._end(before)
        self._resuming[asked] = wanted
        self._answer_resuming()
        return None

    def _answer_resuming(self) -> None:
        """Those who resume, once nothing is under way that they asked for over earlier connections."""
        self._leaving = {session for session in self._leaving if session.is_copying}
        leaving = {session.identity for session in self._leaving}
        for asked in [each for each in self._resuming if each.session.identity not in leaving]:
            self._begin(asked, self._resumed(asked.session, self._resuming.pop(asked)))

    def _resumed(self, session: Session, numbers: Sequence[int]) -> _Work:
        holds = yield from _each(partial(self._pool.ledger.find_hold, session), numbers)
        return (yield from self._handed_out(session, holds))

    def _show(self, asked: _Request) -> _Work:
        """Backups in slabs that another vault has left behind. They are looked at by the thread that takes memory."""
        gpu = self._gpu(asked.body)
        shown: list[tuple[Key, str, _Answer]] = []
        for each in objects(asked.body, "backups"):
            shown.append((_key(each), _note(each, integer(each, "bytes", 1)), each))
            if any(row[0] >= len(asked.descriptors) for row in rows(each, "extents", 3)):
                raise Nonsense("extents: they lie in a slab whose descriptor is not there")
            yield

        def looked_at(found: Future[list[memory.Slab]]) -> None:
            self._in_background(self._pool.making_room(found), partial(self._adopt, asked, gpu, shown, found))

        self._pool.look_at(asked.descriptors.copy(), looked_at)
        asked.descriptors.clear()
        return None

    def _adopt(
        self,
        asked: _Request,
        gpu: Gpu,
        shown: Sequence[tuple[Key, str, _Answer]],
        looked_at: Future[list[memory.Slab]],
    ) -> None:
        try:
            slabs = self._pool.adopt(looked_at.result(), self._names())
        except (CumemSleepError, OSError) as error:
            self._answer(asked, error)
        else:
            self._begin(asked, self._shown(asked.session, gpu, shown, slabs))
        self._memory_came_back()

    def _shown(
        self, session: Session, gpu: Gpu, shown: Sequence[tuple[Key, str, _Answer]], slabs: Sequence[int]
    ) -> _Work:
        ledger = self._pool.ledger
        holds: list[Hold] = []
        self._showing += 1
        try:
            for key, note, each in shown:
                extents = [Extent(slabs[slab], offset, size) for slab, offset, size in each["extents"]]
                holds.append(ledger.show(session, gpu.uuid, key, note, each["bytes"], extents))
                yield
        except CumemSleepError:
            yield from self._released(session, [hold.number for hold in holds])
            raise
        finally:
            self._showing -= 1
            self._memory_came_back()
        return (yield from self._handed_out(session, holds))

    def _status(self, asked: _Request) -> _Answer:
        return self.status(asked.session)

    # What requests share

    def _answer(self, asked: _Request, result: _Answer | str | Exception) -> None:
        self._counts["refused"] += isinstance(result, Exception)
        asked.session.answer(asked.number, result)

    def _memory_came_back(self) -> None:
        """Adopted slabs without backups go; whoever waits for memory may have it now."""
        if not self._showing:  # some may be about to have backups
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

    def _handed_out(self, session: Session, holds: Sequence[Hold | None]) -> _Work:
        """The answer that gives these to the client, after descriptors of the slabs that it has none of."""
        said: list[str] = []
        size = 0
        try:
            for at, hold in enumerate(holds):
                is_there = hold is not None and self._pool.ledger.find_hold(session, hold.number) is hold
                said.append(("," if at else "") + ("" if is_there else "null"))
                if hold is not None and is_there:
                    self._send_slabs(session, hold.entry.slabs - session.known_slabs)
                    for words in _described(hold):
                        said.append(words)
                        size += len(words)
                        yield
                if size > protocol.MAX_ANSWER_BYTES // 2:
                    raise InvalidArgument(f"the answer has over {size} bytes: ask for less at once")
                yield
        except CumemSleepError:
            yield from self._released(session, [hold.number for hold in holds if hold is not None])
            raise
        return f'{{"backups":[{"".join(said)}]}}'

    def _send_slabs(self, session: Session, slabs: Iterable[int]) -> None:
        """Descriptors of these. Raises VaultError: this process can open no more files."""
        numbers = sorted(slabs)
        for start in range(0, len(numbers), protocol.MAX_DESCRIPTORS):
            some = numbers[start : start + protocol.MAX_DESCRIPTORS]
            descriptors: list[int] = []
            try:
                for number in some:
                    descriptors.append(os.dup(self._pool.slab(number).descriptor))
            except OSError:
                protocol.close_all(descriptors)
                raise VaultError(memory.NO_MORE_FILES) from None
            session.send({"slabs": [[number, self._pool.slab(number).nbytes] for number in some]}, descriptors)
            session.known_slabs.update(some)

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
            "free_bytes": max(0, self._pool.ledger.free_bytes),
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


_Handler = Callable[[Service, _Request], _Result | _Work]
_REQUESTS: Mapping[str, _Handler] = {
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


def _each(make: Callable[[_Item], _Made], items: Iterable[_Item]) -> Generator[None, None, list[_Made]]:
    """What `make` makes of each, in steps."""
    made = []
    for item in items:
        made.append(make(item))
        yield
    return made


def _described(hold: Hold) -> Iterator[str]:
    """As an answer says it, in parts."""
    entry = hold.entry
    yield f'{{"number":{hold.number},"bytes":{entry.nbytes},"note":{json.dumps(entry.note)},"extents":['
    for start in range(0, len(entry.extents), _EXTENTS):
        some = json.dumps(entry.extents[start : start + _EXTENTS], separators=(",", ":"))
        yield ("," if start else "") + some[1:-1]
    yield "]}"


def _close_all(lent: Iterable[Lent]) -> None:
    for each in lent:
        each.close()


def _is_lost(gpu: Gpu) -> bool:
    """After some errors every call fails until the process has ended: then the next vault does better."""
    try:
        _core.memory_info(gpu.ordinal)
    except DriverError:
        return True
    return False


def _held(held: Held) -> dict[str, int]:
    """As the status says it."""
    return {"asleep_bytes": held.needed, "awake_bytes": held.retained, "shared_bytes": held.shared}


def _key(body: Mapping[str, Any]) -> Key:
    return Key(text(body, "digest", 64), integer(body, "of_bytes"), text(body, "encoding", 64))


def _note(body: Mapping[str, Any], nbytes: int) -> str:
    return text(body, "note", _NOTE_BYTES + nbytes // _NOTE_SHARE)
