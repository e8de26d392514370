"""The vault itself: one thread that hears and answers everybody. Others take memory and copy.

Nothing in this thread waits for a client. One that floods is not read from while it has many requests open; one that
speaks nonsense is cut off; one that dies gives everything back as soon as what is in flight has ended.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import selectors
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from .. import _core
from ..errors import InvalidArgument, VaultError, format_bytes
from ..settings import parse_list
from . import protocol
from .address import VaultAddress
from .files import SpillFile
from .pool import VaultHost, VaultPool
from .protocol import Nonsense
from .relay import Relaying
from .service import Service, VaultGpu
from .session import Session
from .spill import SpillPlan

_MAX_CLIENTS = 256
_HELLO_WITHIN_S = 10.0
_TURN_S = 0.002  # of a client that has sent several requests: then others are heard


def visible_gpus(wanted: Sequence[str] = ()) -> list[VaultGpu]:
    """The GPUs of this process; those of these UUIDs or ordinals only, if any are given, also with commas.

    Raises:
        InvalidArgument: there is no such GPU.
    """
    facts = [(ordinal, _core.device_info(ordinal)) for ordinal in range(_core.device_count())]
    gpus = [VaultGpu(info.uuid, ordinal, info.name, info.numa_node) for ordinal, info in facts]
    known = {name: gpu for gpu in gpus for name in (gpu.uuid, str(gpu.ordinal))}
    names = dict.fromkeys(name for each in wanted for name in parse_list(each))
    for name in names:
        if name not in known:
            raise InvalidArgument(f"gpu={name!r}: expected a visible GPU, one of {', '.join(known) or 'none'}")
    return [known[name] for name in names] or gpus


def keep_pauses_short() -> None:
    """Of a process that is a vault and nothing else, so that its clients do not wait for what Python does.

    A full collection would look at all backups, 50 ms for 10,000, and find next to nothing: nothing here is in circles
    for long. Long numbers take Python a time that grows with the square of their digits; those of requests have 19.
    """
    gc.set_threshold(*gc.get_threshold()[:2], 1 << 30)
    sys.set_int_max_str_digits(sys.int_info.str_digits_check_threshold)


class Vault:
    """Serves one socket until it is told to stop. `run` and all that it calls belong to one thread.

    Attributes:
        spills_directly: past the page cache.
    """

    def __init__(
        self,
        address: VaultAddress,
        memory_bytes: int,
        gpus: Sequence[VaultGpu],
        host: VaultHost,
        slab_bytes: int | None = None,
        used_at_once: Sequence[VaultGpu] = (),
        relays: Sequence[VaultGpu] = (),
        spill: SpillPlan | None = None,
        keep_bytes: int = 0,
    ) -> None:
        """Nothing is taken yet.

        Args:
            used_at_once: GPUs that get their contexts at the start. The first of all gets it in any case.
            relays: GPUs whose links help others, once they have a context.
            spill: what may be spilled, if anything is to be.
            keep_bytes: the most that is kept under names.

        Raises:
            InvalidArgument: a size makes no sense, or there is no GPU.
            VaultError: nothing can be spilled to that folder.
        """
        if not gpus:
            raise InvalidArgument("gpus=[]: the vault needs a GPU to copy from and to")
        self._address = address
        self._say = host.say
        self._sessions: list[Session] = []
        self._to_read: set[Session] = set()
        _raise_descriptor_limit()
        nodes = [gpu.node for gpu in gpus]
        spills = None
        if spill is not None:
            ring_bytes = spill.ring_bytes(memory_bytes)
            memory_bytes -= ring_bytes
            spills = SpillFile(spill.folder, spill.nbytes), spill, ring_bytes
        self.spills_directly = spills is not None and spills[0].is_direct
        self._pool = VaultPool(
            memory_bytes,
            slab_bytes,
            gpus[0].ordinal,
            nodes,
            host,
            self._post,
            self._serve_waiting,
            spills[0] if spills else None,
        )
        self._used_at_once = dict.fromkeys((gpus[0], *used_at_once))
        self._service = Service(
            address.path,
            gpus,
            self._pool,
            self._sessions,
            self._post,
            self._end,
            self._fail,
            self._gpu_lost,
            Relaying([gpu.ordinal for gpu in relays]),
            spills,
            keep_bytes,
        )
        self.memory_bytes = self._pool.memory_bytes
        self._selector = selectors.DefaultSelector()
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waking = threading.RLock()  # a signal may come in the middle of it
        self._stopping = ""  # "", "wait" or "now"
        self._failure: VaultError | None = None

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            VaultError: a GPU cannot be used any more, by this process.
        """
        self._selector.register(self._address.listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        try:
            self._service.begin(self._used_at_once)
            self._pool.take_more()
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
        self._wake_up()

    # The loop

    def _post(self, work: Callable[[], None]) -> None:
        """Have it done in the thread of `run`."""
        self._posted.append(work)
        self._wake_up()

    def _wake_up(self) -> None:
        with self._waking:
            if self._wake >= 0:  # a signal may come when all is over
                os.eventfd_write(self._wake, 1)

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for _ in range(len(self._posted)):  # what these post comes after everybody else's turn
            self._posted.popleft()()

    def _serve_waiting(self) -> None:
        self._service.serve_waiting()

    def thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """For `threading.excepthook`: end, or clients would wait for ever for what that thread was to do."""
        self._say("".join(traceback.format_exception(failure.exc_value)))
        self._gpu_lost(VaultError(f"a thread of the vault has failed: {failure.exc_value!r}"))

    def _gpu_lost(self, failure: VaultError) -> None:
        self._failure = failure
        self.stop(wait=False)

    def _may_end(self) -> bool:
        if not self._stopping:
            return False
        needed = self._pool.ledger.held()[None, None].asleep_bytes
        if not self._pool.is_stopped:
            self._service.take_no_more()
            if needed:
                self._say(f"asleep: {self._sleepers() or format_bytes(needed)}; the vault {_ENDS[self._stopping]}")
        return self._stopping == "now" or not needed

    def _sleepers(self) -> str:
        all_held = self._pool.ledger.held()
        held = [(session, all_held[session.owner, None].asleep_bytes) for session in self._sessions]
        return ", ".join(f"{session} {format_bytes(needed)}" for session, needed in held if needed)

    def _tick(self, now: float) -> None:
        for session in list(self._sessions):
            if not session.is_greeted and now - session.since > _HELLO_WITHIN_S:
                self._cut_off(session, "it has not said hello")
            elif session.is_cut_off and session.channel.is_ended_there():
                self._end(session)
            elif session.open_requests and not session.channel.unsent_bytes:
                session.send({"busy": True})
        if self._address.listener not in self._selector.get_map():
            self._selector.register(self._address.listener, selectors.EVENT_READ, self._accept)
        self._pool.try_again(now)
        self._service.look()

    def _close(self) -> None:
        for session in self._sessions:  # the ledger is left as it is: nobody's bytes may go now
            self._service.cancel(session)
            session.close()
        self._service.close()
        self._pool.finish()
        while self._posted:
            self._woken()
        self._service.finish()
        self._pool.close()
        self._selector.close()
        self._address.close()
        with self._waking:
            wake, self._wake = self._wake, -1
            os.close(wake)

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
        session = Session(connection, pid, time.monotonic(), self._read_later)
        self._sessions.append(session)
        if uid != os.getuid():
            self._cut_off(session, f"it runs as user {uid}, and this vault serves user {os.getuid()} only")
        elif len(self._sessions) > _MAX_CLIENTS:
            self._cut_off(session, f"{_MAX_CLIENTS} clients are connected already")
        else:
            self._listen(session)
            if session.process >= 0:
                self._selector.register(session.process, selectors.EVENT_READ, partial(self._end, session))

    def _readable(self, session: Session) -> None:
        """Something came, or can be sent."""
        if not session.is_served:
            return
        try:
            session.flush()
            goes_on = not self._hears(session) or session.channel.receive()
        except OSError:
            goes_on = False
        self._read_on(session)
        if not goes_on:
            self._end(session)

    def _read_on(self, session: Session) -> None:
        """Do what was asked, as long as not too much is open; then see what to wait for."""
        self._to_read.discard(session)
        turn_ends = time.monotonic() + _TURN_S
        try:
            while session.is_served and session.may_ask:
                if time.monotonic() > turn_ends:
                    self._read_later(session)
                    break
                message = session.channel.next_message()
                if message is None:
                    break
                self._service.handle(session, message)
        except Exception as error:
            self._fail(session, error)
        if session.is_served:
            self._listen(session)

    def _hears(self, session: Session) -> bool:
        """Whether it is to be read from: not before what it has sent is done."""
        return session.may_ask and session not in self._to_read

    def _listen(self, session: Session) -> None:
        events = selectors.EVENT_READ if self._hears(session) else 0
        events |= selectors.EVENT_WRITE if session.channel.unsent_bytes else 0
        self._unregister(session.channel)
        if events:  # otherwise its answers wake it up; its end is seen by its pidfd, or later
            self._selector.register(session.channel, events, partial(self._readable, session))

    def _read_later(self, session: Session) -> None:
        if session not in self._to_read:
            self._to_read.add(session)
            self._post(partial(self._read_on, session))

    def _fail(self, session: Session, error: Exception) -> None:
        """One client less, and nobody else notices."""
        if isinstance(error, Nonsense):
            self._cut_off(session, str(error))
        else:  # a mistake of ours
            self._say("".join(traceback.format_exception(error)))
            self._cut_off(session, "the vault has failed at its request")

    def _cut_off(self, session: Session, reason: str) -> None:
        """Do no more for it. It keeps its backups until it ends the connection: it can read them itself."""
        if session.is_cut_off:
            return
        self._service.cut_off += 1
        self._say(f"{session} is cut off: {reason}")
        session.send({"cut": reason})
        session.is_cut_off = True
        self._service.cancel(session)
        self._unregister(session.channel)
        if not session.lent and not self._pool.ledger.numbers(session.owner):
            self._end(session)

    def _end(self, session: Session) -> None:
        """It has gone, or is to go: whatever it has comes back."""
        if session.channel.fileno() < 0:  # it has ended already
            return
        self._sessions.remove(session)
        self._unregister(session.channel)
        if session.process >= 0:
            self._unregister(session.process)
        session.close()
        self._service.forget(session)

    def _unregister(self, file: protocol.Channel | int) -> None:
        if file in self._selector.get_map():
            self._selector.unregister(file)


_ENDS = {"wait": "ends when they have woken", "now": "ends; they can still wake, more slowly"}


def _raise_descriptor_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
