"""Connections from every rank of a group to every other, and the messages on them.

They are made once, from what the ranks tell each other through a `RankGroup` (over `torch.distributed`, say), which is
not used after that: a collective that times out would break it for everybody else. No thread works here: what arrives
waits in the sockets until an operation looks. Messages are JSON, one a line.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import selectors
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ..errors import InvalidState
from .decisions import GO, Decision, Reason, Record, RecordPlace
from .group import RankGroup

_TOKEN_BYTES = 32
_MOST_TEXT = 2000  # of an error; a message is never larger than a socket's buffer
_HELLO_BYTES = _TOKEN_BYTES + 4

_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


class MessageKind(str, Enum):
    """What a message says of a round."""

    BEGUN = "begun"  # its operation runs
    VOTE = "vote"  # its half is done and can be undone; or it failed
    YOURS = "yours"  # rank 0 may decide: this rank will not go back on its vote
    DECIDED = "decided"  # by rank 0
    GAVE_BACK = "gave back"  # of no round: the backups that it made ahead


@dataclass(frozen=True)
class RankMessage:
    """One message; `operation` goes with BEGUN."""

    kind: MessageKind
    round: int
    operation: str = ""
    decision: Decision = GO

    def encoded(self) -> bytes:
        """One line."""
        text = self.decision.text[:_MOST_TEXT]
        facts = [self.kind.value, self.round, self.operation, self.decision.failed, int(self.decision.why), text]
        return json.dumps(facts).encode() + b"\n"

    @classmethod
    def decoded(cls, line: bytes) -> RankMessage:
        """Of a line of a rank of the same version."""
        kind, round_, operation, failed, why, text = json.loads(line)
        return cls(MessageKind(kind), round_, operation, Decision(failed, Reason(why), text))


@dataclass(frozen=True)
class _Facts:
    """What a rank tells of itself before there are connections."""

    host: str
    address: str
    record: RecordPlace | None


@dataclass(frozen=True)
class _Door:
    port: int
    token: bytes
    has_record: bool


class Mesh:
    """The connections of one rank. Not thread-safe: operations run one after the other.

    Attributes:
        rank: of this process.
        size, size_here: of the group, and of its part on this host.
        record: of decisions, where all ranks are on one host; else None, and rank 0 decides.
        gone: ranks whose process has ended, or closed its connection.
        is_closed: this rank has left the group, or is a fork of the process that is in it.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], record: Record | None, size_here: int = 1) -> None:
        self.rank = rank
        self.size, self.size_here = len(peers) + 1, size_here
        self.record = record
        self.gone: set[int] = set()
        self.is_closed = False
        self._peers = peers
        self._unread = dict.fromkeys(peers, b"")
        self._ready = selectors.PollSelector()
        for number, connection in peers.items():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ready.register(connection, selectors.EVENT_READ, number)
        _meshes.add(self)

    def send(self, message: RankMessage, rank: int | None = None) -> None:
        """To one rank, or to all others. To a rank that has ended, or has read nothing for long, nothing is sent."""
        line = message.encoded()
        for number, connection in self._peers.items():
            if number in self.gone or rank not in (None, number):
                continue
            try:
                connection.sendall(line)
            except BlockingIOError:  # not all of it was sent
                self._lose(number)
            except OSError:
                continue  # what it said before it ended is still to be read

    def receive(self, timeout_s: float, take: Callable[[int, RankMessage], None]) -> None:
        """Wait for messages, at most so long, and hand each to `take` with its sender; notes who has `gone`."""
        if not self._ready.get_map():
            return
        for key, _ in self._ready.select(timeout_s):
            number = key.data
            try:
                while content := self._peers[number].recv(1 << 16):
                    self._unread[number] += content
                self._lose(number)
            except BlockingIOError:
                pass
            except OSError:
                self._lose(number)
            *lines, self._unread[number] = self._unread[number].split(b"\n")
            for line in lines:
                take(number, RankMessage.decoded(line))

    def close(self) -> None:
        """Again is harmless. The others find that this rank has ended."""
        self.is_closed = True
        self._ready.close()
        for connection in self._peers.values():
            connection.close()
        self.gone.update(self._peers)
        if self.record is not None:
            self.record.close()

    def _lose(self, number: int) -> None:
        self._ready.unregister(self._peers[number])
        self._peers[number].close()
        self.gone.add(number)


def connect(group: RankGroup, timeout_s: float) -> Mesh:
    """Connect to all other ranks of the group, which call this, too.

    Raises:
        InvalidState: a rank cannot be reached.
    """
    record = Record.make() if group.rank == 0 else None
    peers: dict[int, socket.socket] = {}
    try:
        facts: list[_Facts] = group.all_gather(_Facts(_host(), group.address, record.place if record else None))
        place = facts[0].record
        assert place is not None
        one_host = len({each.host for each in facts}) == 1
        if record is None and one_host:
            record = Record.open(place)
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=group.size + 16) as listener:
            door = _Door(listener.getsockname()[1], token, one_host and record is not None)
            doors: list[_Door] = group.all_gather(door)
            for number in range(group.rank):
                address = "127.0.0.1" if facts[number].host == facts[group.rank].host else facts[number].address
                peers[number] = _call(group.rank, number, address, doors[number], timeout_s)
            _answer(listener, peers, group, token, time.monotonic() + timeout_s)
    except BaseException:
        Mesh(group.rank, peers, record).close()
        raise
    if record is not None and not all(door.has_record for door in doors):
        record.close()
        record = None
    return Mesh(group.rank, peers, record, sum(each.host == facts[group.rank].host for each in facts))


def _call(rank: int, other: int, address: str, door: _Door, timeout_s: float) -> socket.socket:
    try:
        connection = socket.create_connection((address, door.port), timeout_s)
        connection.sendall(door.token + rank.to_bytes(4, "little"))
        if connection.recv(1) != b"\n":
            raise OSError("it closed the connection")
    except OSError as error:
        raise InvalidState(f"rank {other} cannot be reached at {address}, port {door.port}: {error}") from error
    return connection


def _answer(
    listener: socket.socket, peers: dict[int, socket.socket], group: RankGroup, token: bytes, deadline: float
) -> None:
    """Until all higher ranks have called. Who does not know the token is not let in."""
    while missing := set(range(group.rank + 1, group.size)) - set(peers):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([listener], [], [], left_s)[0]:
            raise InvalidState(f"rank {min(missing)} has not connected in time")
        connection, _ = listener.accept()
        try:
            connection.settimeout(max(min(left_s, 5.0), 0.1))
            hello = bytearray()
            while len(hello) < _HELLO_BYTES and (content := connection.recv(_HELLO_BYTES - len(hello))):
                hello += content
            number = int.from_bytes(hello[_TOKEN_BYTES:], "little")
            if not hmac.compare_digest(bytes(hello[:_TOKEN_BYTES]), token) or number not in missing:
                raise OSError("a stranger")
            connection.sendall(b"\n")
        except OSError:
            connection.close()
            continue
        peers[number] = connection


def _host() -> str:
    """Processes with the same reach each other at 127.0.0.1."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def _close_in_child() -> None:
    """A child that lives longer must not keep others from seeing that this rank has ended."""
    for mesh in list(_meshes):
        with contextlib.suppress(OSError):
            mesh.close()


os.register_at_fork(after_in_child=_close_in_child)
