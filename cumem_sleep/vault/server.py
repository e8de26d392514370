"""The vault itself: one thread that answers everybody and keeps the ledger; others take memory and copy.

Nothing in this thread waits for a client. One that floods is not read from while it has many requests open; one that
speaks nonsense is cut off; one that dies gives everything back as soon as what is in flight has ended.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import selectors
import socket
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import __version__, _core
from ..errors import (
    CumemSleepError,
    DriverError,
    InvalidArgument,
    InvalidState,
    OutOfHostMemory,
    VaultError,
    format_bytes,
)
from . import memory, protocol
from .ledger import UNIT_BYTES, Extent, Held, Hold, Key, Ledger
from .link import PIECE_BYTES, Job, Lent, Link, Piece
from .protocol import Channel, Message, Nonsense, boolean, integer, integers, objects, rows, text

DEFAULT_SLAB_BYTES = 1 << 30
MAX_SLABS = 200  # owners have a descriptor of each that they have bytes in
_SLAB_ALIGNMENT = 2 << 20  # a huge page
_MAX_CLIENTS = 256
_MAX_OPEN_REQUESTS = 128  # of one client
_MAX_UNSENT_BYTES = 8 << 20
_HELLO_WITHIN_S = 10.0
_TRY_AGAIN_S = 5.0  # after the host had too little memory for a slab
_NO_MORE_FILES = "the vault can open no more files: raise the limit of its open files (ulimit -n)"
_NOTE_BYTES, _NOTE_SHARE = 4096, 1024  # a note may have so many, and one for so many of its backup


@dataclass(frozen=True)
class Host:
    """What the vault may use of its host.

    Attributes:
        room_bytes: how much memory the host can still give, by every limit.
        threads: that touch new memory.
        say: shows a line to whoever runs the vault.
    """

    room_bytes: Callable[[], int]
    threads: int
    say: Callable[[str], None]


@dataclass(frozen=True)
class Gpu:
    """One GPU that the vault serves."""

    uuid: str
    ordinal: int
    name: str
    node: int


def visible_gpus(wanted: Sequence[str] = ()) -> list[Gpu]:
    """The GPUs of this process; those of these UUIDs or ordinals only, if any are given.

    Raises:
        InvalidArgument: there is no such GPU.
    """
    facts = [(ordinal, _core.device_info(ordinal)) for ordinal in range(_core.device_count())]
    gpus = [Gpu(info.uuid, ordinal, info.name, info.numa_node) for ordinal, info in facts]
    known = {name: gpu for gpu in gpus for name in (gpu.uuid, str(gpu.ordinal))}
    for name in wanted:
        if name not in known:
            raise InvalidArgument(f"gpu={name!r}: one of {', '.join(known) or 'none'} is visible here")
    return [known[name] for name in dict.fromkeys(wanted)] or gpus


class Address:
    """The socket of one vault, and the lock that keeps others from it."""

    def __init__(self, path: Path) -> None:
        """Take the path, from a vault that has died if need be.

        Raises:
            VaultError: another vault has it, or its folder is not private.
        """
        self.path = path
        if path == protocol.default_socket():
            path.parent.mkdir(mode=0o700, exist_ok=True)
        protocol.check_folder(path.parent)
        self._lock = _lock(path.with_name(path.name + ".lock"))
        try:
            path.unlink(missing_ok=True)
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                self.listener.bind(str(path))
            finally:
                os.umask(before)
            self.listener.listen(1024)  # a connection beyond that would be refused
            self.listener.setblocking(False)
        except OSError as error:
            os.close(self._lock)
            raise VaultError(f"the vault's socket {path}: {error.strerror or error}") from None

    def close(self) -> None:
        """Give the path up."""
        self.listener.close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def _lock(path: Path) -> int:
    """A descriptor of the lock file, locked for this process."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise VaultError(f"the vault's lock {path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.read(descriptor, 20).decode(errors="replace").strip()
        os.close(descriptor)
        raise VaultError(
            f"another vault (pid {pid or 'unknown'}) serves {path.with_suffix('')}: use it, or name another socket"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


class _Session:
    """One client, as long as it is connected."""

    def __init__(self, connection: socket.socket, pid: int, now: float) -> None:
        self.channel = Channel(connection, protocol.MAX_REQUEST_BYTES, protocol.MAX_ANSWER_BYTES)
        self.pid = pid
        self.name = ""
        self.since = now
        self.is_greeted = False
        self.is_cut_off = False
        self.is_open = True
        self.open_requests = 0
        self.lent: dict[int, Lent] = {}
        self.known_slabs: set[int] = set()
        self.process = -1  # a pidfd: a child that it forked may keep the connection open
        if pid:
            with suppress(OSError):
                self.process = os.pidfd_open(pid)

    def __str__(self) -> str:
        return f"pid {self.pid or 'unknown'}" + (f" ({self.name})" if self.name else "")

    @property
    def may_ask(self) -> bool:
        """Whether it has not too much open, or too many answers unread."""
        return self.open_requests < _MAX_OPEN_REQUESTS and self.channel.unsent_bytes < _MAX_UNSENT_BYTES

    @property
    def is_served(self) -> bool:
        """Whether it is there, and was not cut off."""
        return self.is_open and not self.is_cut_off


@dataclass(frozen=True)
class _Reservation:
    """Waits for memory that is still being taken."""

    session: _Session
    request: int
    gpu: Gpu
    sizes: Sequence[int]


_Answer = dict[str, Any]


class Vault:
    """Serves one socket until it is told to stop. `run` and all that it calls belong to one thread."""

    def __init__(
        self,
        address: Address,
        memory_bytes: int,
        gpus: Sequence[Gpu],
        host: Host,
        slab_bytes: int | None = None,
    ) -> None:
        """Nothing is taken yet.

        Raises:
            InvalidArgument: a size makes no sense, or there is no GPU.
        """
        if not gpus:
            raise InvalidArgument("gpus=[]: the vault needs a GPU to copy from and to")
        self.memory_bytes = memory_bytes // _SLAB_ALIGNMENT * _SLAB_ALIGNMENT
        if not self.memory_bytes:
            raise InvalidArgument(f"memory={memory_bytes}: at least {_SLAB_ALIGNMENT} bytes are allowed")
        most = -(-self.memory_bytes // MAX_SLABS // _SLAB_ALIGNMENT) * _SLAB_ALIGNMENT
        self._slab_bytes = max(_SLAB_ALIGNMENT, slab_bytes or DEFAULT_SLAB_BYTES, most)
        self._address = address
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._host = host
        self._ledger = Ledger()
        self._slabs: dict[int, memory.Slab] = {}
        self._last_slab = 0
        self._links: dict[tuple[str, bool], Link] = {}
        self._sessions: list[_Session] = []
        self._waiting: deque[_Reservation] = deque()
        self._taker = ThreadPoolExecutor(1, "vault-memory")
        self._taking = False
        self._touched_bytes = 0  # of the slab that is being taken
        self._short = ""  # why no more memory is being taken
        self._try_again = 0.0
        self._is_short_said = False
        self._tenths_said = 0
        self._counts: Counter[str] = Counter()
        self._selector = selectors.DefaultSelector()
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = ""  # "", "wait" or "now"
        self._warned_of_sleepers = False
        self._failure: VaultError | None = None

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            VaultError: a GPU cannot be used any more, by this process.
        """
        _raise_descriptor_limit()
        self._selector.register(self._address.listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        try:
            self._take_more()
            last_tick = time.monotonic()
            while not self._may_end():
                for key, _ in self._selector.select(protocol.BUSY_INTERVAL_S):
                    key.data()
                if time.monotonic() - last_tick >= protocol.BUSY_INTERVAL_S:
                    last_tick = time.monotonic()
                    self._tick(last_tick)
        finally:
            self._close()
        if self._failure is not None:
            raise self._failure

    def stop(self, wait: bool) -> None:
        """End: once nobody needs a backup any more (`wait`), or now. From any thread, and from a signal handler."""
        if self._stopping != "now":
            self._stopping = "wait" if wait else "now"
        os.eventfd_write(self._wake, 1)

    # The loop

    def _post(self, work: Callable[[], None]) -> None:
        """Have it done in the thread of `run`."""
        self._posted.append(work)
        os.eventfd_write(self._wake, 1)

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._posted:
            self._posted.popleft()()

    def _may_end(self) -> bool:
        if not self._stopping:
            return False
        needed = self._ledger.held().needed
        if needed and not self._warned_of_sleepers:
            self._warned_of_sleepers = True
            sleepers = [f"{s} {format_bytes(held.needed)}" for s in self._sessions if (held := self._held(s)).needed]
            ends = "ends when they have woken" if self._stopping == "wait" else "ends; they can still wake, more slowly"
            self._host.say(f"asleep: {', '.join(sleepers) or format_bytes(needed)}; the vault {ends}")
        return self._stopping == "now" or not needed

    def _tick(self, now: float) -> None:
        for session in list(self._sessions):
            if not session.is_greeted and now - session.since > _HELLO_WITHIN_S:
                self._cut_off(session, "it has not said hello")
            elif session.is_cut_off and session.channel.is_ended_there():
                self._end(session)
            elif session.open_requests and not session.channel.unsent_bytes:
                self._send(session, {"busy": True})
        if self._address.listener not in self._selector.get_map():
            self._selector.register(self._address.listener, selectors.EVENT_READ, self._accept)
        if self._short and now >= self._try_again:
            self._take_more()

    def _close(self) -> None:
        self._stopping = "now"
        for session in list(self._sessions):
            self._end(session)
        for link in self._links.values():
            link.stop()
        self._taker.shutdown()
        self._woken()
        self._selector.close()
        self._address.close()
        for slab in self._slabs.values():
            os.close(slab.descriptor)  # not the pages: owners read them on
            slab.block.close()
        os.close(self._wake)

    # Clients

    def _accept(self) -> None:
        try:
            connection, _ = self._address.listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._selector.unregister(self._address.listener)  # until the next tick
            return
        pid, uid = protocol.peer_credentials(connection)
        session = _Session(connection, pid, time.monotonic())
        self._sessions.append(session)
        if uid != os.getuid():
            self._cut_off(session, f"it runs as user {uid}, and this vault serves user {os.getuid()} only")
        elif len(self._sessions) > _MAX_CLIENTS:
            self._cut_off(session, f"{_MAX_CLIENTS} clients are connected already")
        else:
            self._selector.register(session.channel, selectors.EVENT_READ, partial(self._readable, session))
            if session.process >= 0:
                self._selector.register(session.process, selectors.EVENT_READ, partial(self._end, session))

    def _readable(self, session: _Session) -> None:
        """Something came, or can be sent."""
        if not session.is_served:
            return
        try:
            session.channel.flush()
            goes_on = not session.may_ask or session.channel.receive()
        except OSError:
            goes_on = False
        self._read_on(session)
        if not goes_on:
            self._end(session)

    def _read_on(self, session: _Session) -> None:
        """Do what was asked, as long as not too much is open; then see what to wait for."""
        try:
            while session.is_served and session.may_ask:
                message = session.channel.next_message()
                if message is None:
                    break
                self._handle(session, message)
        except Nonsense as nonsense:
            self._cut_off(session, str(nonsense))
        if not session.is_served:
            return
        events = selectors.EVENT_READ if session.may_ask else 0
        events |= selectors.EVENT_WRITE if session.channel.unsent_bytes else 0
        callback = partial(self._readable, session)
        registered = session.channel in self._selector.get_map()
        if events and registered:
            self._selector.modify(session.channel, events, callback)
        elif events:
            self._selector.register(session.channel, events, callback)
        elif registered:
            self._selector.unregister(session.channel)  # its answers wake it up; its end is seen by its pidfd, or later

    def _send(self, session: _Session, body: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        if not session.is_served:
            protocol.close_all(descriptors)
            return
        try:
            session.channel.send(body, descriptors)
        except OSError:
            self._post(partial(self._end, session))

    def _answer(self, session: _Session, request: int, result: _Answer | Exception) -> None:
        """The one answer to a request."""
        session.open_requests -= 1
        if isinstance(result, Exception):
            self._counts["refused"] += 1
            self._send(session, {"id": request, "error": protocol.error_to_json(result)})
        else:
            self._send(session, {"id": request, "ok": result})

    def _cut_off(self, session: _Session, reason: str) -> None:
        """Do no more for it. It keeps its backups until it ends the connection: it can read them itself."""
        if session.is_cut_off:
            return
        self._counts["cut off"] += 1
        self._host.say(f"{session} is cut off: {reason}")
        self._send(session, {"cut": reason})
        session.is_cut_off = True
        self._cancel(session)
        if session.channel in self._selector.get_map():
            self._selector.unregister(session.channel)
        if not session.lent and self._held(session) == Held():
            self._end(session)

    def _end(self, session: _Session) -> None:
        """It has gone, or is to go: whatever it has comes back."""
        if not session.is_open:
            return
        session.is_open = False
        self._sessions.remove(session)
        if session.channel in self._selector.get_map():
            self._selector.unregister(session.channel)
        session.channel.close()
        if session.process >= 0:
            if session.process in self._selector.get_map():
                self._selector.unregister(session.process)
            os.close(session.process)
        self._cancel(session)
        self._ledger.drop_owner(session)
        self._memory_came_back()

    def _cancel(self, session: _Session) -> None:
        """Whatever it asked for; its memory goes back when nothing of that is in flight any more."""
        for link in self._links.values():
            link.cancel(session)
        for lent in session.lent.values():
            if not lent.jobs:
                lent.close()
        self._waiting = deque(each for each in self._waiting if each.session is not session)

    # Requests

    def _handle(self, session: _Session, message: Message) -> None:
        """Do what it asks. Every descriptor is closed, unless the request keeps it."""
        body, descriptors, _ = message
        session.open_requests += 1
        try:
            request, verb = integer(body, "id"), text(body, "do")
            if (verb == "hello") == session.is_greeted:
                raise Nonsense("hello is said once, and first")
            handler = _REQUESTS.get(verb)
            if handler is None:
                raise Nonsense(f"do: {verb!r} is no request")
            if message.descriptors_lost:
                raise VaultError(_NO_MORE_FILES)
            answer = handler(self, session, request, body, descriptors)
            if answer is not None:
                self._answer(session, request, answer)
        except CumemSleepError as error:
            self._answer(session, request, error)
        except Nonsense:
            raise
        except Exception:  # a mistake of ours: one client less, and nobody else notices
            self._host.say(traceback.format_exc())
            self._cut_off(session, "the vault has failed at its request")
        finally:
            protocol.close_all(descriptors)

    def _hello(self, session: _Session, request: int, body: _Answer, descriptors: list[int]) -> _Answer:
        session.name = "".join(c for c in text(body, "name", 80) if c.isprintable())
        session.is_greeted = True
        return {
            "pid": os.getpid(),
            "version": __version__,
            "memory_bytes": self.memory_bytes,
            "gpus": list(self._gpus),
            "simulated": _core.driver_is_simulated(),
        }

    def _reserve(self, session: _Session, request: int, body: _Answer, descriptors: list[int]) -> None:
        gpu, sizes = self._gpu(body), integers(body, "sizes")
        if self._stopping:
            raise InvalidState("the vault is about to end: it takes no new backups")
        self._waiting.append(_Reservation(session, request, gpu, sizes))
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        """Whoever waits for memory, in order, as far as it goes; and refuse what can never be."""
        names: dict[Hashable, str] = {session: str(session) for session in self._sessions}
        goes_on = True
        for each in list(self._waiting):
            result: _Answer | Exception
            try:
                self._ledger.require_room(each.sizes, names)
                if not goes_on:
                    continue
                holds = self._ledger.reserve(each.session, each.gpu.uuid, each.sizes, each.gpu.node)
                result = self._handed_out(each.session, holds)
            except OutOfHostMemory as error:
                if error.needed_bytes <= error.available_bytes + self._bytes_to_come():
                    goes_on = False
                    continue
                result = error
            except CumemSleepError as error:
                result = error
            self._waiting.remove(each)
            self._answer(each.session, each.request, result)
            self._post(partial(self._read_on, each.session))

    def _find(self, session: _Session, request: int, body: _Answer, descriptors: list[int]) -> _Answer:
        gpu = self._gpu(body)
        keys = [_key(each) for each in objects(body, "keys")]
        return self._handed_out(session, [self._ledger.find(session, gpu.uuid, key) for key in keys])

    def _seal(self, session: _Session, request: int, body: _Answer, descriptors: list[int]) -> _Answer:
        sealed = [(integer(each, "number"), _key(each), each) for each in objects(body, "backups")]
        for number, _, _ in sealed:
            if self._ledger.writable(session, number).entry.copies:
                raise InvalidState(f"backup {number} is still being written: it cannot be sealed yet")
        holds = []
        for number, key, each in sealed:
            note = _note(each, self._ledger.hold(session, number).entry.nbytes)
            holds.append(self._ledger.seal(session, number, key, note))
        self._memory_came_back()
        return self._handed_out(session, holds)

    def _mark(self, session: _Session, request: int, body: _Answer, descriptors: list[int]) -> _Answer:
        gone = self._ledger.mark(session, integers(body, "numbers"), boolean(body, "needed"))
        self._memory_came_back()
        return {"gone": gone}

    def _release(self, session: _Session, request: int, body: _Answer, descriptors: list[int]) -> _Answer:
        self._ledger.release(session, integers(body, "numbers"))
        session.known_slabs -= set(integers(body, "slabs"))  # which it has closed
        self._memory_came_back()
        return {}

    def _copy(self, session: _Session, request: int, body: _Answer, descriptors: list[int]) -> _Answer | None:
        """Between a client's memory and its backups. The memory comes with its first copy; the client numbers it."""
        gpu, to_host, number = self._gpu(body), boolean(body, "out"), integer(body, "memory")
        ranges = rows(body, "ranges", 4)
        nbytes = integer(body, "bytes", 1)
        if descriptors:
            if number in session.lent:
                raise Nonsense(f"memory: {number} was sent before")
            session.lent[number] = Lent(descriptors.pop(), gpu.ordinal, nbytes)
        lent = session.lent.get(number)
        if len(session.lent) > protocol.MAX_AT_ONCE:
            raise InvalidState(f"{len(session.lent)} memories are lent: take some back")
        if lent is None:
            raise InvalidState(f"memory {number} was not sent, or did not arrive")
        holds = {each[0]: self._ledger.hold(session, each[0]) for each in ranges}
        if to_host:
            for each in holds:
                self._ledger.writable(session, each)
        pieces: deque[Piece] = deque()
        for hold, offset, lent_offset, size in ranges:
            entry = holds[hold].entry
            if offset + size > entry.nbytes or lent_offset + size > lent.nbytes or lent.device != gpu.ordinal:
                raise InvalidArgument(
                    f"range of {size} bytes at {offset} of backup {hold}, at {lent_offset} of memory {number}: it lies"
                    f" beyond their {entry.nbytes} and {lent.nbytes} bytes, or on another GPU"
                )
            pieces.extend(self._pieces(entry.ranges(offset, size), lent_offset))
        if not pieces:
            return {}
        entries = {hold.entry for hold in holds.values()}
        for entry in entries:
            self._ledger.begin_copy(entry)
        lent.jobs += 1

        def over(error: Exception | None) -> None:
            lent.jobs -= 1
            if not session.is_served and not lent.jobs:
                lent.close()
            for entry in entries:
                self._ledger.end_copy(entry)
            self._answer(session, request, error or {})
            self._memory_came_back()
            self._read_on(session)
            if isinstance(error, DriverError):
                self._look_at_gpu(gpu, error)

        self._link(gpu, to_host).submit(Job(session, lent, pieces, lambda error: self._post(partial(over, error))))
        return None

    def _look_at_gpu(self, gpu: Gpu, error: DriverError) -> None:
        """After some errors every call fails until the process has ended: then the next vault does better."""
        try:
            _core.memory_info(gpu.ordinal)
        except DriverError:
            self._failure = VaultError(f"{gpu.uuid} does not work for this process any more: {error}")
            self.stop(wait=False)

    def _pieces(self, extents: Iterable[Extent], lent_offset: int) -> Iterator[Piece]:
        for slab, offset, nbytes in extents:
            block = self._slabs[slab].block
            for start in range(0, nbytes, PIECE_BYTES):
                size = min(PIECE_BYTES, nbytes - start)
                yield Piece(block, offset + start, lent_offset, size)
                lent_offset += size

    def _forget(self, session: _Session, request: int, body: _Answer, descriptors: list[int]) -> _Answer:
        """The client has no copy of these memories open any more: they go back."""
        numbers = integers(body, "memories")
        for number in numbers:
            if number in session.lent and session.lent[number].jobs:
                raise InvalidState(f"memory {number} is still being copied: wait for that first")
        for number in numbers:
            if number in session.lent:
                session.lent.pop(number).close()
        return {}

    def _show(self, session: _Session, request: int, body: _Answer, descriptors: list[int]) -> None:
        """Backups in slabs that another vault has left behind. They are looked at by the thread that takes memory."""
        gpu = self._gpu(body)
        shown = [(_key(each), _note(each, integer(each, "bytes", 1)), each) for each in objects(body, "backups")]
        for _, _, each in shown:
            if any(row[0] >= len(descriptors) for row in rows(each, "extents", 3)):
                raise Nonsense("extents: they lie in a slab whose descriptor is not there")
        future = self._taker.submit(self._look_at, descriptors.copy())
        descriptors.clear()

        def looked_at(future: Future[list[memory.Slab]]) -> None:
            self._post(partial(self._adopt, session, request, gpu, shown, future))

        future.add_done_callback(looked_at)

    def _look_at(self, descriptors: list[int]) -> list[memory.Slab]:
        """The slabs that these open. On the taking thread."""
        found: list[memory.Slab] = []
        try:
            while descriptors:
                found.append(memory.adopt(descriptors[0], self._first_ordinal()))
                descriptors.pop(0)
        except BaseException:
            protocol.close_all(descriptors)
            for slab in found:
                slab.close()
            raise
        return found

    def _adopt(
        self,
        session: _Session,
        request: int,
        gpu: Gpu,
        shown: list[tuple[Key, str, _Answer]],
        future: Future[list[memory.Slab]],
    ) -> None:
        try:
            numbers = self._add_adopted(future.result())
            holds: list[Hold] = []
            try:
                for key, note, each in shown if session.is_served else ():
                    extents = [Extent(numbers[slab], offset, size) for slab, offset, size in each["extents"]]
                    holds.append(self._ledger.show(session, gpu.uuid, key, note, each["bytes"], extents))
            except CumemSleepError:
                self._ledger.release(session, [hold.number for hold in holds])
                raise
            self._answer(session, request, self._handed_out(session, holds))
        except (CumemSleepError, OSError) as error:
            self._answer(session, request, error)
        self._memory_came_back()
        self._read_on(session)

    def _add_adopted(self, found: Sequence[memory.Slab]) -> list[int]:
        """Their numbers, after as much of our own memory was given back: it is never more than `memory_bytes`."""
        known = {slab.identity: number for number, slab in self._slabs.items()}
        new = {slab.identity: slab for slab in found if slab.identity not in known}
        try:
            self._make_room(sum(slab.nbytes for slab in new.values()))
        except OutOfHostMemory:
            new.clear()
            raise
        finally:
            for slab in found:
                if new.get(slab.identity) is not slab:
                    self._taker.submit(slab.close)
        for slab in new.values():
            self._last_slab += 1
            known[slab.identity] = self._last_slab
            self._slabs[self._last_slab] = slab
            self._ledger.add_adopted_slab(self._last_slab, slab.nbytes)
        return [known[slab.identity] for slab in found]

    def _make_room(self, nbytes: int) -> None:
        excess = self._ledger.own_bytes + self._ledger.adopted_bytes + nbytes - self.memory_bytes
        if excess <= 0:
            return
        empty = self._ledger.empty(excess)
        if not empty:
            names: dict[Hashable, str] = {session: str(session) for session in self._sessions}
            raise OutOfHostMemory(nbytes, max(0, nbytes - excess), "vault", self._ledger.who_holds(names))
        for number in empty:
            self._remove_slab(number)

    def _status(self, session: _Session, request: int, body: _Answer, descriptors: list[int]) -> _Answer:
        return self.status(session)

    # Memory

    def _bytes_to_come(self) -> int:
        """Of memory that is still being taken."""
        if self._short:
            return 0
        return max(0, self.memory_bytes - self._ledger.own_bytes - self._ledger.adopted_bytes)

    def _take_more(self) -> None:
        """Begin with the next slab, if there is to be one."""
        self._short = ""
        nbytes = min(self._slab_bytes, self._bytes_to_come()) // _SLAB_ALIGNMENT * _SLAB_ALIGNMENT
        if self._taking or not nbytes or self._stopping:
            return
        self._taking = True
        nodes = [gpu.node for gpu in self._gpus.values()]
        node = nodes[self._last_slab % len(nodes)]
        future = self._taker.submit(self._take, nbytes, node)
        future.add_done_callback(lambda future: self._post(partial(self._taken, future, node)))

    def _take(self, nbytes: int, node: int) -> memory.Slab:
        room = self._host.room_bytes()
        if room < nbytes:
            raise OutOfHostMemory(nbytes, max(0, room), "MemAvailable")
        return memory.take(nbytes, node, self._first_ordinal(), self._host.threads, self._touched)

    def _touched(self, nbytes: int) -> None:
        self._touched_bytes += nbytes

    def _taken(self, future: Future[memory.Slab], node: int) -> None:
        self._taking, self._touched_bytes = False, 0
        try:
            slab = future.result()
        except Exception as error:
            if not self._is_short_said:
                self._host.say(f"has {self._of_all()}, and cannot take more now: {error}")
            self._short, self._try_again = str(error), time.monotonic() + _TRY_AGAIN_S
            self._is_short_said = True
            self._serve_waiting()
            return
        self._is_short_said = False
        if slab.nbytes > self._bytes_to_come():  # something was adopted meanwhile
            slab.close()
        else:
            self._last_slab += 1
            self._slabs[self._last_slab] = slab
            self._ledger.add_slab(self._last_slab, slab.nbytes, node)
        tenths = self._ledger.own_bytes * 10 // self.memory_bytes
        if tenths > self._tenths_said:
            self._tenths_said = tenths
            self._host.say(f"has {self._of_all()}")
        self._take_more()
        self._serve_waiting()

    def _of_all(self) -> str:
        return f"{format_bytes(self._ledger.own_bytes)} of {format_bytes(self.memory_bytes)}"

    def _memory_came_back(self) -> None:
        """Adopted slabs without backups go; whoever waits for memory may have it now."""
        for number in self._ledger.empty_slabs(adopted=True):
            self._remove_slab(number)
        if not self._short:
            self._take_more()
        self._serve_waiting()

    def _remove_slab(self, number: int) -> None:
        self._ledger.remove_slab(number)
        self._taker.submit(self._slabs.pop(number).close)  # before it takes more
        for session in self._sessions:
            session.known_slabs.discard(number)

    def _first_ordinal(self) -> int:
        return next(iter(self._gpus.values())).ordinal

    # What requests share

    def _gpu(self, body: _Answer) -> Gpu:
        uuid = text(body, "gpu")
        if uuid not in self._gpus:
            raise VaultError(f"the vault does not serve {uuid!r}, only {', '.join(self._gpus)}: see its --gpus")
        return self._gpus[uuid]

    def _link(self, gpu: Gpu, to_host: bool) -> Link:
        if (gpu.uuid, to_host) not in self._links:
            self._links[gpu.uuid, to_host] = Link(gpu.ordinal, to_host)
        return self._links[gpu.uuid, to_host]

    def _handed_out(self, session: _Session, holds: Sequence[Hold | None]) -> _Answer:
        """The answer that gives these to the client, after descriptors of the slabs that it has none of."""
        given = [hold for hold in holds if hold is not None]
        slabs = sorted({extent.slab for hold in given for extent in hold.entry.extents} - session.known_slabs)
        for start in range(0, len(slabs), protocol.MAX_DESCRIPTORS):
            some = slabs[start : start + protocol.MAX_DESCRIPTORS]
            descriptors: list[int] = []
            try:
                for number in some:
                    descriptors.append(os.dup(self._slabs[number].descriptor))
            except OSError:
                protocol.close_all(descriptors)
                self._ledger.release(session, [hold.number for hold in given])
                raise VaultError(_NO_MORE_FILES) from None
            self._send(session, {"slabs": [[number, self._slabs[number].nbytes] for number in some]}, descriptors)
            session.known_slabs.update(some)
        return {"backups": [None if hold is None else _described(hold) for hold in holds]}

    def _held(self, session: _Session) -> Held:
        return self._ledger.held_by(session)

    def status(self, asking: _Session) -> dict[str, Any]:
        """Everything that the vault knows, for people and programs; not of who asks, if that holds nothing."""
        held = self._ledger.held()
        return {
            "pid": os.getpid(),
            "version": __version__,
            "simulated": _core.driver_is_simulated(),
            "socket": str(self._address.path),
            "memory_bytes": self.memory_bytes,
            "pinned_bytes": self._ledger.own_bytes,
            "touched_bytes": self._touched_bytes,
            "adopted_bytes": self._ledger.adopted_bytes,
            "short": self._short,
            "free_bytes": self._ledger.free_bytes,
            "asleep_bytes": held.needed,
            "awake_bytes": held.retained,
            "shared_bytes": held.shared,
            "saved_bytes": self._ledger.saved_bytes(),
            "evicted_bytes": self._ledger.evicted_bytes,
            "waiting": len(self._waiting),
            "refused": self._counts["refused"],
            "cut_off": self._counts["cut off"],
            "gpus": [self._gpu_status(gpu) for gpu in self._gpus.values()],
            "clients": [
                self._client_status(session)
                for session in self._sessions
                if session.is_greeted and (session is not asking or self._held(session) != Held())
            ],
        }

    def _gpu_status(self, gpu: Gpu) -> dict[str, Any]:
        held = self._ledger.held_for(gpu.uuid)
        facts: dict[str, Any] = {
            "uuid": gpu.uuid,
            "name": gpu.name,
            "asleep_bytes": held.needed,
            "awake_bytes": held.retained,
        }
        for direction, to_host in (("out", True), ("in", False)):
            link = self._links.get((gpu.uuid, to_host))
            copied, busy_s = (link.copied_bytes, link.busy_s) if link else (0, 0.0)
            facts |= {f"copied_{direction}_bytes": copied, f"busy_{direction}_s": busy_s}
            facts[f"{direction}_gbps"] = copied / busy_s / 1e9 if busy_s else None
        return facts

    def _client_status(self, session: _Session) -> dict[str, Any]:
        held = self._held(session)
        return {
            "pid": session.pid,
            "name": session.name,
            "connected_s": time.monotonic() - session.since,
            "asleep_bytes": held.needed,
            "awake_bytes": held.retained,
            "shared_bytes": held.shared,
            "lent_bytes": sum(lent.nbytes for lent in session.lent.values()),
            "open_requests": session.open_requests,
        }


_REQUESTS: Mapping[str, Callable[[Vault, _Session, int, _Answer, list[int]], _Answer | None]] = {
    "hello": Vault._hello,
    "reserve": Vault._reserve,
    "find": Vault._find,
    "seal": Vault._seal,
    "mark": Vault._mark,
    "release": Vault._release,
    "copy": Vault._copy,
    "forget": Vault._forget,
    "show": Vault._show,
    "status": Vault._status,
}


def _described(hold: Hold) -> _Answer:
    """As an answer says it."""
    entry = hold.entry
    return {"number": hold.number, "bytes": entry.nbytes, "extents": list(entry.extents), "note": entry.note}


def _key(body: Mapping[str, Any]) -> Key:
    return Key(text(body, "digest", 64), integer(body, "of_bytes"), text(body, "encoding", 64))


def _note(body: Mapping[str, Any], nbytes: int) -> str:
    return text(body, "note", _NOTE_BYTES + nbytes // _NOTE_SHARE)


def _raise_descriptor_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


assert _SLAB_ALIGNMENT % UNIT_BYTES == 0
