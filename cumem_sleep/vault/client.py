"""How a process that sleeps talks to the vault. It needs no driver, and imports nothing of the memory layer."""

from __future__ import annotations

import os
import secrets
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CumemSleepError, VaultError, VaultLost, VaultUnavailable
from . import protocol
from .ledger import FILES, Key, needed_bytes
from .moves import MoveReader
from .protocol import Channel, Nonsense, OtherVersion, Table, VaultMessage
from .slabs import SlabRange

DEADLINE_S = 5.0  # of silence: the vault says every second that it is at work
NO_MORE_FILES = "this process can open no more files: raise the limit of its open files (ulimit -n)"
_BRIEFLY_S = 1.0  # how long a question of no consequence waits for its answer
_HAND_OUT = ("reserve", "find", "adopt")  # backups
_LOOK_INTERVAL_S = 0.02

_Item = TypeVar("_Item")

_clients: weakref.WeakSet[VaultClient] = weakref.WeakSet()


class _NoAnswer(Exception):
    """Within the time of a mere look."""


@dataclass(eq=False)
class VaultBackup:
    """A backup that the vault keeps for this process; an extent of its tier.

    Attributes:
        bytes: of what is stored.
        slabs: those that it lies in, by the vault that keeps it now.
        extents: where it lies there, in order: (slab, offset, bytes).
        sealed: what it holds; others may share it, so it is not written again. None: not known yet.
        needed: the vault may not evict it.
        is_lost: it went with the vault that kept it, or that vault has given it away.
        is_distrusted: it holds other bytes than it was sealed with.
    """

    number: int
    bytes: int
    slabs: SlabTable
    extents: tuple[SlabRange, ...] = ()
    sealed: Key | None = None
    needed: bool = True
    is_lost: bool = False
    is_distrusted: bool = False
    address: int = 0  # no kernel reaches it

    def descriptor(self, slab: int) -> int:
        """Of that slab, for reading. Raises VaultLost: this process can open no more files, or could not be sent it."""
        if slab not in self.slabs.by_number:
            raise VaultLost(f"this backup cannot be read without the vault: {NO_MORE_FILES}")
        return self.slabs.by_number[slab][0]

    def ranges(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(slab, offset in it, bytes) of so many bytes from `offset` on, in order.

        Raises:
            VaultLost: they are not there any more.
        """
        for slab, start, size in self.extents:
            if nbytes <= 0:
                return
            if offset < size:
                taken = min(nbytes, size - offset)
                yield slab, start + offset, taken
                nbytes -= taken
            offset = max(0, offset - size)
        if nbytes > 0:
            raise VaultLost("the vault released this backup when its connection to this process ended")


@dataclass(eq=False)
class LentMemory:
    """Physical memory of this process that the vault may map, until `VaultClient.begin_to_take_back`."""

    number: int
    gpu: str
    nbytes: int
    descriptor: int  # -1 once it was sent


class SlabTable:
    """Read-only descriptors of slabs: with them, backups can be read when the vault is gone.

    Attributes:
        by_number: the descriptor of each, which is the table's to close, and the size of the slab in bytes.
        folder: where the file is that is slab `FILES`, if the vault spills.
        backups: that lie in them, by their numbers, as long as somebody has them.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, tuple[int, int]] = {}
        self.folder = Path()
        self.backups: weakref.WeakValueDictionary[int, VaultBackup] = weakref.WeakValueDictionary()
        self.moves: list[MoveReader] = []  # of this connection, if its vault spills, after those before it
        self._backups: Counter[int] = Counter()

    def put(self, backup: VaultBackup, extents: tuple[SlabRange, ...]) -> None:
        """It lies there now; nowhere: it is gone."""
        self._backups.subtract({extent.slab for extent in backup.extents})
        self._backups.update({extent.slab for extent in extents})
        if extents:
            self.backups[backup.number] = backup
        else:
            self.backups.pop(backup.number, None)
        backup.extents = extents

    def hear(self) -> None:
        """Of backups that have moved since: before this process reads them by itself, and once more afterwards."""
        for moves in self.moves:
            for numbers, extents in moves.read():
                for number in numbers:
                    if number in self.backups:
                        self.put(self.backups[number], tuple(SlabRange(*extent) for extent in extents))

    def close_unused(self, *, is_over: bool) -> list[int]:
        """Close what no backup lies in, the file only if the vault has ended: it is not sent again. Returns their
        numbers.
        """
        self.hear()
        kept = {slab for slab, backups in self._backups.items() if backups > 0} | (set() if is_over else {FILES})
        unused = list(self.by_number.keys() - kept)
        for slab in unused:
            protocol.close_all([self.by_number.pop(slab)[0]])
            del self._backups[slab]
        return unused

    def close(self) -> None:
        """Close all."""
        protocol.close_all([descriptor for descriptor, _ in self.by_number.values()])
        self.by_number.clear()
        while self.moves:
            self.moves.pop().close()


class VaultClient:
    """One connection to the vault. What it keeps goes back when the connection ends.

    For one thread at a time, which the allocator's lock sees to. A call that the vault does not answer within
    `deadline_s`, or a connection that ends, raises `VaultLost`, as does every later call; the slabs of `slabs` can
    still be read. Keep a client that was lost, and do not close it, as long as backups in its slabs are needed: a vault
    that is still there keeps their bytes for as long as the connection is. When it answers again, another client can
    `succeed` this one.

    Attributes:
        gpus: the GPUs that the vault serves, by their UUIDs.
        keep_bytes: how much the vault keeps under names; 0: nothing.
        instance: names the vault: no other one, before or after it, has the same.
        is_silent: the vault has not answered in time, and nothing has come from it since; see `lost`.
        vault_pid: 0 if this process cannot see it.
        slabs: of the backups that it keeps for this process.
    """

    def __init__(
        self,
        path: Path | None = None,
        name: str = "",
        deadline_s: float = DEADLINE_S,
        look: Callable[[], None] | None = None,
        succeeds: VaultClient | None = None,
    ) -> None:
        """Connect.

        Args:
            path: of the vault's socket; None: this user's own.
            name: shown to people who look at the vault, with the pid.
            look: called again and again while the vault takes memory that was asked for; what it raises ends the wait.
            succeeds: a client that was lost, for `succeed`.

        Raises:
            VaultUnavailable: no vault of this user and version answers there.
        """
        self.path = protocol.default_socket() if path is None else path
        self.deadline_s = deadline_s
        self.slabs = SlabTable()
        self._lost: VaultLost | None = None
        self._last_request = self._last_lent = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._given_up: dict[int, bool] = {}  # requests that nobody waits for any more: do they hand out backups
        self._unclaimed: list[int] = []  # backups that were handed out to nobody
        self._closed_slabs: list[int] = []
        self._look = look
        self._identity: str = secrets.token_hex(16) if succeeds is None else succeeds._identity
        self.is_silent = False
        self._channel, self.vault_pid = self._connect()
        self._connections = [self._channel]  # and those whose backups have yet to become this one's
        _clients.add(self)
        try:
            facts = self._ask("hello", name=name[:80], identity=self._identity)
        except (VaultError, OSError) as error:
            self.close()
            raise VaultUnavailable(f"the vault at {self.path}: {error}") from None
        self.gpus: tuple[str, ...] = tuple(facts["gpus"])
        self.keep_bytes: int = facts["keep_bytes"]
        self.instance: str = facts["instance"]

    def _connect(self) -> tuple[Channel, int]:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            raise VaultUnavailable(NO_MORE_FILES) from None
        connection.settimeout(self.deadline_s)
        try:
            protocol.check_folder(self.path.parent)
            connection.connect(str(self.path))
            pid, uid = protocol.peer_credentials(connection)
        except (OSError, VaultError) as error:
            connection.close()
            raise VaultUnavailable(f"no vault answers at {self.path}: {error}; `cumem-sleep vault` runs one") from None
        if uid != os.getuid():
            connection.close()
            raise VaultUnavailable(f"the vault at {self.path} belongs to user {uid}: name another socket")
        return Channel(connection, protocol.MAX_ANSWER_BYTES, protocol.MAX_REQUEST_BYTES), pid

    @property
    def lost(self) -> VaultLost | None:
        """Why the vault cannot be asked any more, or None. Looks whether it has ended, or has said something since."""
        if self._lost is None or self.is_silent:
            self._take_in_all()
        may_go_on = self._lost is not None and self._lost.may_go_on
        if may_go_on and self._channel.is_ended_there():  # it will not any more
            self._take_in_all()
            self._lost = VaultLost(f"{self._lost}; it has ended since")
            self._close_connections()
        return self._lost

    @property
    def is_gone(self) -> bool:
        """Whether the vault's process is known to have ended, so that the driver has all that it had of others."""
        try:
            os.kill(self.vault_pid or os.getpid(), 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False

    def _take_in_all(self) -> None:
        """What has come."""
        for before in self._connections[1:]:
            self._take_slabs(before)
        try:
            if self.is_silent:
                self._take_in(self._channel.flush)  # to half a request it answers nothing
            while self._channel.fileno() >= 0 and self._channel.wait(0):
                if self._take_in(self._channel.receive):
                    self.is_silent = False
        except VaultLost:  # it says that it has cut this process off
            self.is_silent = False

    def _take_slabs(self, before: Channel) -> None:
        """That came over a connection before this one. Its answers are nobody's any more."""
        with suppress(OSError, Nonsense):
            while before.wait(0) and before.receive():
                pass
            while (message := before.next_message()) is not None:
                if "slab" in message.body:
                    self._understand(message)

    def close(self) -> None:
        """End the connection: the vault gives away what it kept. Closing again does nothing."""
        self._close_connections()
        self.slabs.close()
        self._lost = VaultLost("the connection was closed")

    def _close_connections(self) -> None:
        while self._connections:
            self._connections.pop().close()

    # After a loss

    def succeed(self, before: VaultClient, backups: Sequence[VaultBackup]) -> list[VaultBackup]:
        """Take over what the vault keeps for `before`, a client of the same vault that was lost; `before` is closed.

        Returns when the vault does nothing more that it was asked before, and has given back all memory that was lent
        to it. Whatever becomes of this, the slabs are this client's from here on. If it raises, this client is lost in
        its turn.

        Args:
            backups: to keep. What else there was goes back.

        Returns:
            Those that the vault does not have any more: they have no extents.
        """
        self.slabs, before.slabs = before.slabs, self.slabs
        self.slabs.moves += before.slabs.moves  # what it has moved, it says there from now on
        before.slabs.moves = []
        before.slabs.close()
        self._last_lent = before._last_lent
        self._connections += before._connections
        before._connections = []
        before._lost = VaultLost(f"{before._lost}; another connection has taken its place")
        try:
            held = self._ask("resume", slabs=list(self.slabs.by_number))["numbers"]
            facts = []
            for some in _parts(backups):
                said = self._ask("look", numbers=_numbers(some))["backups"]
                facts += self._readable(said)
        except BaseException as error:
            self._unclaimed = []  # they are to stay
            self._lost = self._lost or VaultLost(f"backups could not be taken over: {error}", may_go_on=True)
            raise
        for each, said in zip(backups, facts, strict=True):
            self.slabs.put(each, ())
            if said is not None:
                self._fill(each, said)
        while len(self._connections) > 1:
            self._connections.pop().close()
        while len(self.slabs.moves) > 1:
            self.slabs.moves.pop(0).close()
        self._unclaimed += set(held).difference(_numbers(backups))
        self.release([])
        return [each for each, said in zip(backups, facts, strict=True) if said is None]

    # Backups

    def reserve(self, gpu: str, sizes: Sequence[int]) -> list[VaultBackup]:
        """A backup of each size, to be written: all, or none.

        Raises:
            OutOfHostMemory: the vault has too little; the message says who holds what. Nothing has changed.
        """
        return self._reserve(gpu, sizes, wait=True) or []

    def reserve_now(self, gpu: str, sizes: Sequence[int], *, expendable: bool = False) -> list[VaultBackup] | None:
        """As `reserve`; None where the vault is still taking the memory for that.

        Args:
            expendable: nothing is evicted for these, and the vault may evict them before anything else; never sealed.
        """
        return self._reserve(gpu, sizes, wait=False, expendable=expendable)

    def _reserve(
        self, gpu: str, sizes: Sequence[int], wait: bool, expendable: bool = False
    ) -> list[VaultBackup] | None:
        """Part by part; with the first one the vault sets aside what the others need."""
        more_bytes = needed_bytes(sizes)
        with self._all_or_none() as reserved:
            for some in _parts(sizes):
                more_bytes -= needed_bytes(some)
                facts = self._ask(
                    "reserve", gpu=gpu, sizes=some, more_bytes=more_bytes, wait=wait, expendable=expendable
                )["backups"]
                if facts is None:
                    self.release(reserved)
                    return None
                reserved += [self._backup(each) for each in self._readable(facts)]
            return reserved

    def free_bytes(self) -> int:
        """What could be reserved without evicting anything, with what the vault is still taking."""
        return int(self._ask("room")["free_bytes"])

    def expendable_bytes(self) -> int:
        """What could be reserved now of what is expendable."""
        return int(self._ask("room")["expendable_bytes"])

    def find(self, gpu: str, keys: Sequence[Key]) -> list[VaultBackup | None]:
        """For each, a share in the backup that has these bytes, if there is one."""
        with self._all_or_none() as found:
            for some in _parts(keys):
                facts = self._ask("find", gpu=gpu, keys=[_described(key) for key in some])["backups"]
                found += [None if each is None else self._backup(each) for each in self._readable(facts)]
            return found

    def seal(self, sealed: Sequence[tuple[VaultBackup, Key]]) -> None:
        """These have been written and proven: others may share them, and nobody writes to them again.

        Where another process sealed the same bytes before, both share that backup: `extents` changes.
        """
        for some in _parts(sealed):
            said = [{"number": backup.number, **_described(key)} for backup, key in some]
            facts = self._readable(self._ask("seal", backups=said)["backups"])
            for (backup, _), now in zip(some, facts, strict=True):
                self._fill(backup, now)

    def keep(self, name: str, manifest: str, backups: Sequence[VaultBackup]) -> None:
        """Have these, which are sealed, kept under a name, in place of what had it, also when this process has ended.

        Raises:
            OutOfHostMemory: the vault does not keep so much.
            InvalidArgument: the name or the manifest is too long, or there are too many.
            InvalidState: the vault has evicted one.
        """
        self._ask("keep", name=name, manifest=manifest, numbers=_numbers(backups))

    def adopt(self, gpu: str, name: str) -> tuple[str, list[VaultBackup]] | None:
        """What the vault keeps under a name: its manifest, and a share in each of its backups."""
        with self._all_or_none() as found:
            said = self._ask("adopt", gpu=gpu, name=name)
            if said["backups"] is None:
                return None
            found += [self._backup(each) for each in self._readable(said["backups"])]
            return str(said["manifest"]), found

    def drop(self, name: str) -> bool:
        """Let the vault forget a name; returns whether it had it."""
        return bool(self._ask("drop", name=name)["dropped"])

    def mark(self, backups: Sequence[VaultBackup], needed: bool) -> list[VaultBackup]:
        """Say whether these are needed, because their segments sleep, or may be evicted; returns what has been."""
        gone: set[int] = set()
        for some in _parts(backups):
            gone.update(self._ask("mark", numbers=_numbers(some), needed=needed)["gone"])
        evicted = [each for each in backups if each.number in gone]
        for each in evicted:
            self.slabs.put(each, ())
        return evicted

    def distrust(self, backups: Sequence[VaultBackup]) -> None:
        """These hold other bytes than they were sealed with. The vault offers them to nobody from here on; who needs
        them keeps them, and what is merely retained goes.
        """
        for some in _parts(backups):
            self._ask("distrust", numbers=_numbers(some))

    def owners(self, backups: Sequence[VaultBackup]) -> list[int] | None:
        """How many processes share each of these, 0 if it was evicted; None if the vault does not answer at once.

        A mere look: a vault that is silent is not lost for that.
        """
        owners: list[int] = []
        for some in _parts(backups):
            facts = self._ask_briefly("owners", numbers=_numbers(some))
            if facts is None:
                return None
            owners += facts["owners"]
        return owners

    def release(self, backups: Sequence[VaultBackup]) -> None:
        """Give these back. Never fails for a vault that is gone: then they are, too."""
        for each in backups:
            self.slabs.put(each, ())
        self._unclaimed += _numbers(backups)
        self._closed_slabs += self.slabs.close_unused(is_over=self._lost is not None and not self._lost.may_go_on)
        with suppress(VaultLost):
            self._wait_until(lambda: not any(self._given_up.values()))  # these may have handed out more
            closed, self._closed_slabs = self._closed_slabs, []  # what is lost again meanwhile, is asked for next time
            while self._unclaimed or closed:
                heard = self.slabs.moves[-1].position if self.slabs.moves else 0
                try:
                    self._ask("release", numbers=self._unclaimed[: protocol.MAX_BACKUPS], slabs=closed, heard=heard)
                except VaultLost:
                    raise
                except VaultError:  # it can open no more files, and has sent some of these anew at most
                    self._closed_slabs += [slab for slab in closed if slab not in self.slabs.by_number]
                self._unclaimed, closed = self._unclaimed[protocol.MAX_BACKUPS :], []

    @contextmanager
    def _all_or_none(self) -> Iterator[list[Any]]:
        """The backups that the list has by then go back if what is inside fails."""
        handed_out: list[VaultBackup | None] = []
        try:
            yield handed_out
        except BaseException:
            if handed_out:
                self.release([each for each in handed_out if each is not None])
            raise

    # Copies

    def lend(self, gpu: str, descriptor: int, nbytes: int) -> LentMemory:
        """Physical memory for copies, by the descriptor that the driver exports, which is the client's from here on."""
        self._last_lent += 1
        return LentMemory(self._last_lent, gpu, nbytes, descriptor)

    def copy(self, lent: LentMemory, backup: VaultBackup, ranges: Table, *, to_host: bool) -> int:
        """Begin to copy between lent memory, whose bytes must be there, and a backup. Returns what to `wait` for.

        If the vault is lost before a copy to the memory has ended, it may be carried out later: give the memory back to
        the driver.

        Args:
            ranges: rows of an offset in the memory, one in the backup, and bytes; at most `protocol.MAX_ROWS`, of which
                none overlap.
        """
        descriptors = [lent.descriptor] if lent.descriptor >= 0 else []
        lent.descriptor = -1
        facts = {"gpu": lent.gpu, "memory": lent.number, "bytes": lent.nbytes, "out": to_host, "number": backup.number}
        return self._begin("copy", descriptors, **facts, ranges=protocol.table_to_json(ranges))

    def wait(self, requests: Iterable[int]) -> set[str]:
        """Return when these copies have ended, or this memory was given back. Waiting again for the same does nothing.

        Returns:
            The UUIDs of other GPUs whose links have carried some of it.

        Raises:
            DriverError: a copy, or the import of the memory, failed; all of these have ended.
            VaultLost: it may still have the memory.
        """
        failure: Exception | None = None
        relays: set[str] = set()
        for request in requests:
            try:
                relays.update(self._answer_to(request).get("relays", ()))
            except VaultLost:
                raise
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return relays

    def begin_to_take_back(self, lent: Sequence[LentMemory]) -> int | None:
        """Let the vault give this memory back; its copies have ended. Returns what to `wait` for, if it has any of it.

        Raises:
            VaultLost: it may still have it.
        """
        sent = [each.number for each in lent if each.descriptor < 0]
        for each in lent:
            protocol.close_all([each.descriptor])
            each.descriptor = -1
        return self._begin("forget", memories=sent) if sent else None

    def read_ahead(self, pids: Sequence[int] = ()) -> int:
        """Let the vault read into memory what these processes (none: this one) are about to need of its files.

        Returns:
            How many bytes that are, whether or not there is memory for them.
        """
        return int(self._ask("read_ahead", pids=list(pids))["bytes"])

    def status(self) -> dict[str, Any]:
        """Everything that the vault knows."""
        return self._ask("status")

    # How it is said

    def _ask(self, verb: str, look: Callable[[], None] | None = None, **facts: Any) -> dict[str, Any]:
        request = self._begin(verb, **facts)
        try:
            return self._answer_to(request, look or (self._look if verb == "reserve" else None))
        except CumemSleepError:
            raise
        except BaseException:  # of a signal handler, or of a look: the answer comes later
            self._give_up(request, verb)
            raise

    def _ask_briefly(self, verb: str, **facts: Any) -> dict[str, Any] | None:
        """The answer, if it comes at once. No second question is sent before the first was answered: none piles up."""
        if self._lost is not None:
            return None
        ends = time.monotonic() + min(_BRIEFLY_S, self.deadline_s)

        def look() -> None:
            if time.monotonic() >= ends:
                raise _NoAnswer

        try:
            self._take_in(self._channel.receive)
            return None if self._given_up else self._ask(verb, look=look, **facts)
        except (VaultError, _NoAnswer):
            return None

    def _give_up(self, request: int, verb: str) -> None:
        self._given_up[request] = verb in _HAND_OUT
        if verb == "reserve":  # others may wait behind it
            with suppress(CumemSleepError):
                self._given_up[self._begin("withdraw", request=request)] = False

    def _begin(self, verb: str, descriptors: Sequence[int] = (), **facts: Any) -> int:
        """Send a request; returns its number."""
        if self._lost is not None:
            protocol.close_all(descriptors)
            raise self._lost.with_traceback(None)
        self._last_request += 1
        request = self._last_request
        self._answers[request] = {}
        body = {"id": request, "do": verb, **facts}
        self._take_in(partial(self._channel.send, body, descriptors))
        self._wait_until(lambda: not self._channel.unsent_bytes)
        return request

    def _answer_to(self, request: int, look: Callable[[], None] | None = None) -> dict[str, Any]:
        if request not in self._answers:
            return {}
        self._wait_until(lambda: bool(self._answers[request]), look)
        answer = self._answers.pop(request)
        if "error" in answer:
            raise protocol.error_from_json(answer["error"])
        result: dict[str, Any] = answer.get("ok", {})
        if "moves_end" in result and self.slabs.moves:  # what was heard of later moves, is said anew
            moves = self.slabs.moves[-1]
            moves.position = min(moves.position, result["moves_end"])
        return result

    def _wait_until(self, is_so: Callable[[], bool], look: Callable[[], None] | None = None) -> None:
        """Take in what comes until that is so. Every message shows that the vault lives."""
        deadline = time.monotonic() + self.deadline_s
        while not is_so():
            if self._lost is not None:
                raise self._lost.with_traceback(None)
            now = time.monotonic()
            next_look = deadline if look is None else min(deadline, now + _LOOK_INTERVAL_S)
            has_come = self._channel.wait(next_look, to_send=self._channel.unsent_bytes > 0)
            if look is not None:
                look()
            if not has_come and next_look < deadline:
                continue
            if not has_come:
                self.is_silent = True
                self._lose(f"the vault does not answer: it was silent for {self.deadline_s:g} s", may_go_on=True)
            self._take_in(self._channel.flush)
            if self._take_in(self._channel.receive):
                deadline = time.monotonic() + self.deadline_s

    def _take_in(self, step: Callable[[], object]) -> int:
        """After a step of the channel: the messages that have come. Raises VaultLost: it has ended."""
        ended = ""
        count = 0
        try:
            ended = "the vault has ended, or was killed" if step() is False else ""
        except OSError as error:
            ended = f"the connection to the vault has ended ({error.strerror})"
            with suppress(OSError):  # why, it may have said before
                while self._channel.receive() and self._channel.is_ended_there():
                    pass
        try:
            while (message := self._channel.next_message()) is not None:
                count += 1
                self._understand(message)
        except OtherVersion as other:
            self._lose(f"{other}: install the same version of cumem-sleep on both sides")
        except (Nonsense, KeyError, TypeError, ValueError) as error:
            self._lose(f"the vault sent an invalid message: {error!r}", may_go_on=True)
        if ended:
            self._lose(ended)
        return count

    def _understand(self, message: VaultMessage) -> None:
        body = message.body
        if "slab" in body:
            if message.descriptors_lost:
                self._closed_slabs.append(body["slab"])
            else:
                (descriptor,) = message.descriptors
                protocol.close_all([self.slabs.by_number.get(body["slab"], (-1, 0))[0]])
                self.slabs.by_number[body["slab"]] = descriptor, body["bytes"]
        elif "folder" in body:
            if message.descriptors_lost:
                protocol.close_all(message.descriptors)
                self._lose(NO_MORE_FILES)
            moves, file = message.descriptors
            self.slabs.moves.append(MoveReader(moves))
            self.slabs.by_number[FILES] = file, body["file_bytes"]
            self.slabs.folder = Path(body["folder"])
        elif "cut" in body:
            self._lose(f"the vault has cut this process off: {body['cut']}", may_go_on=True)
        elif body.get("id") in self._given_up:
            del self._answers[body["id"]]
            if self._given_up.pop(body["id"]):
                self._unclaimed += [each["number"] for each in body.get("ok", {}).get("backups") or () if each]
        elif body.get("id") in self._answers:
            self._answers[body["id"]] = body

    def _lose(self, why: str, may_go_on: bool = False) -> None:
        self._lost = self._lost or VaultLost(why, may_go_on)
        raise self._lost.with_traceback(None)  # or it would keep the frames of every call that it has ended

    def _readable(self, facts: list[Any]) -> list[Any]:
        """What the vault says of backups, if this process has the descriptors of all their slabs.

        Raises:
            VaultError: it could open no more files. What was handed out goes back with the next release.
        """
        there = [each for each in facts if each is not None]
        if any(slab not in self.slabs.by_number for each in there for slab, _, _ in each["extents"]):
            self._unclaimed += [each["number"] for each in there]
            raise VaultError(NO_MORE_FILES)
        return facts

    def _backup(self, facts: dict[str, Any]) -> VaultBackup:
        backup = VaultBackup(facts["number"], 0, self.slabs)
        self._fill(backup, facts)
        return backup

    def _fill(self, backup: VaultBackup, facts: dict[str, Any]) -> None:
        backup.bytes = facts["bytes"]
        self.slabs.put(backup, tuple(SlabRange(*extent) for extent in facts["extents"]))


def _parts(items: Sequence[_Item]) -> list[Sequence[_Item]]:
    """So that one request is about each; there is one at least."""
    at_once = protocol.MAX_BACKUPS
    return [items[start : start + at_once] for start in range(0, max(1, len(items)), at_once)]


def _numbers(backups: Iterable[VaultBackup]) -> list[int]:
    return [each.number for each in backups]


def _described(key: Key) -> dict[str, Any]:
    return {"digest": key.digest, "of_bytes": key.nbytes, "encoding": key.encoding}


def _after_fork_in_child() -> None:
    """A child would keep the connections, and so the backups, when the parent has died."""
    for client in list(_clients):
        client.close()
        client.is_silent = False
        client._lost = VaultLost("this connection to the vault was made before a fork: connect anew in this process")


os.register_at_fork(after_in_child=_after_fork_in_child)
