"""How the vault and its clients talk to each other, and over which socket. What they ask: `service._REQUESTS`.

A message is a header of 12 bytes, a JSON object, and maybe descriptors. JSON, because one message moves gigabytes: what
it costs to read is lost beside that, and a person can read it too. The header never changes, so every version can tell
every other one which it is. A request has a number (`id`), and its one answer has the same; answers come as the work
ends. While requests are unanswered the vault says every second that it is at work (`BUSY`), so that a client can tell a
long copy from a vault that was stopped.
"""

from __future__ import annotations

import array
import base64
import errno
import json
import os
import select
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DriverError, InvalidArgument, InvalidState, OutOfHostMemory, VaultError

VERSION = 9
MAX_REQUEST_BYTES = 2 << 20
MAX_REQUEST_VALUES = 1 << 17  # numbers, strings and so on: parsing them takes the vault 15 to 35 ms
MAX_ANSWER_BYTES = 64 << 20
MAX_AT_ONCE = 1 << 16  # of one list in a request
MAX_ROWS = 1 << 15  # of a table in a request: a megabyte of text, and a few milliseconds
MAX_KEPT = 1 << 13  # backups under one name, 0.1 s of the vault: a server says it once
MAX_MANIFEST = 1 << 20  # characters
MAX_BACKUPS = 1 << 9  # that a request is about: the vault needs about 15 µs for each
MAX_DESCRIPTORS = 253  # of one message: SCM_MAX_FD
BUSY_INTERVAL_S = 1.0

_HEADER = struct.Struct("<4sHHI")  # magic, version, descriptors, bytes of JSON
_COUNT, _COUNT_OFFSET, _NOT_SENT = struct.Struct("<H"), 6, 0xFFFF  # of descriptors, and what is said if there are none
_MAGIC = b"CMSV"
_RECEIVE_BYTES = 1 << 18
_CREDENTIALS = struct.Struct("3i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)

Table = npt.NDArray[np.int64]  # rows of whole numbers: as bytes, because there may be many


class Nonsense(Exception):
    """What came is not a message of this protocol, or says what no client says: the connection ends."""


class OtherVersion(Nonsense):
    """The other side speaks another version of the protocol."""

    def __init__(self, version: int) -> None:
        super().__init__(f"received version {version} of the protocol, expected version {VERSION}")


class VaultMessage(NamedTuple):
    """One message; the descriptors are the receiver's to close.

    Attributes:
        descriptors_lost: this process can open no more, or the kernel has sent no more of the other side's.
    """

    body: dict[str, Any]
    descriptors: list[int]
    descriptors_lost: bool


class Channel:
    """Messages over a connected socket. Sends what it can; the rest waits: `unsent_bytes`."""

    def __init__(
        self,
        connection: socket.socket,
        max_received_bytes: int,
        max_sent_bytes: int,
        max_received_values: int | None = None,
    ) -> None:
        """A message has at most so many bytes; what comes also values, if that is given, and no fractions then."""
        connection.setblocking(False)
        self._socket = connection
        self._max_received_bytes = max_received_bytes
        self._max_sent_bytes = max_sent_bytes
        self._max_received_values = max_received_values
        self._received = bytearray()
        self._batches: deque[tuple[list[int], bool]] = deque()  # each was sent with one message
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self.unsent_bytes = 0

    def fileno(self) -> int:
        """Of the socket, for `select`; -1 once it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the connection; closing again does nothing."""
        self._socket.close()
        while self._batches:
            close_all(self._batches.popleft()[0])
        self._drop_unsent()

    def send(self, body: Mapping[str, Any], descriptors: Sequence[int] = (), version: int = VERSION) -> int:
        """Send it now or with later calls of `flush`. The descriptors are the channel's from here on.

        Returns:
            As `flush`.

        Raises:
            InvalidArgument: it is longer than the other side takes; nothing was sent.
            OSError: the connection has ended.
        """
        text = json.dumps(body, separators=(",", ":")).encode()
        if len(text) > self._max_sent_bytes or len(descriptors) > MAX_DESCRIPTORS:
            close_all(descriptors)
            raise InvalidArgument(
                f"message of {len(text)} bytes and {len(descriptors)} descriptors: expected at most"
                f" {self._max_sent_bytes} and {MAX_DESCRIPTORS}: ask for less at once"
            )
        header = _HEADER.pack(_MAGIC, version, len(descriptors), len(text))
        self._unsent.append((memoryview(bytearray(header) + text), descriptors))
        self.unsent_bytes += len(header) + len(text)
        return self.flush()

    def flush(self) -> int:
        """Send what the socket takes now.

        Returns:
            How many messages went without their descriptors: too many are on their way to those who do not take them.

        Raises:
            OSError: the connection has ended.
        """
        without = 0
        while self._unsent:
            content, descriptors = self._unsent[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                sent = self._socket.sendmsg([content], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    self._drop_unsent()  # descriptors of GPU memory would keep that memory
                    raise
                without, sent = without + 1, 0
                _COUNT.pack_into(content, _COUNT_OFFSET, _NOT_SENT)
            close_all(descriptors)
            self.unsent_bytes -= sent
            if sent < len(content):
                self._unsent[0] = (content[sent:], ())
            else:
                self._unsent.popleft()
        return without

    def _drop_unsent(self) -> None:
        while self._unsent:
            close_all(self._unsent.popleft()[1])
        self.unsent_bytes = 0

    def receive(self) -> bool:
        """Take in what has come. False when the other side has ended the connection. Raises OSError likewise."""
        try:
            content, ancillary, flags, _ = self._socket.recvmsg(
                _RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return True
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if descriptors or flags & socket.MSG_CTRUNC:
            self._batches.append((descriptors.tolist(), bool(flags & socket.MSG_CTRUNC)))
        self._received += content
        return bool(content)

    def next_message(self) -> VaultMessage | None:
        """The next whole message that has come, or None.

        Raises:
            Nonsense: what has come is none.
        """
        if len(self._received) < _HEADER.size:
            self._check_unfinished()
            return None
        magic, version, count, nbytes = _HEADER.unpack_from(self._received)
        if magic != _MAGIC:
            raise Nonsense("bad magic bytes at the start of a message")
        if version != VERSION:
            raise OtherVersion(version)
        if nbytes > self._max_received_bytes:
            raise Nonsense(f"announced a message of {nbytes} bytes: expected at most {self._max_received_bytes}")
        end = _HEADER.size + nbytes
        if len(self._received) < end:
            self._check_unfinished()
            return None
        text = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        has_some = 0 < count < _NOT_SENT and len(self._batches) > 0
        descriptors, lost = self._batches.popleft() if has_some else ([], count == _NOT_SENT)
        try:
            if (len(descriptors) != count and not lost) or len(self._batches) > (len(self._received) > 0):
                raise Nonsense("a message's descriptor count does not match its header")
            return VaultMessage(self._body(text), descriptors, lost)
        except Nonsense:
            close_all(descriptors)
            raise

    def _body(self, text: bytes) -> dict[str, Any]:
        if self._max_received_values is not None and _values(text) > self._max_received_values:
            raise Nonsense(f"a message has over {self._max_received_values} values")
        decode = json.loads if self._max_received_values is None else _WITHOUT_FRACTIONS.decode
        with suppress(ValueError, RecursionError):
            body = decode(text.decode())
            if isinstance(body, dict):
                return body
        raise Nonsense("a message is not a JSON object")

    def _check_unfinished(self) -> None:
        """Of a message that has not come as a whole, the descriptors come with its first byte; there are no others."""
        if len(self._batches) > 1:
            raise Nonsense("descriptors came in the middle of a message")

    def is_ended_there(self) -> bool:
        """Whether the other side has closed the connection, read or not what it sent before."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def wait(self, deadline: float, to_send: bool = False) -> bool:
        """Wait until something has come, or the rest can be sent. False where nothing happened by `deadline`."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if to_send else 0))
        return bool(poll.poll(max(0, (deadline - time.monotonic()) * 1000)))


def _values(text: bytes) -> int:
    """How many values this JSON has, at most, but for those that are its only ones."""
    return len(text) - len(text.translate(None, b",[{"))


def _refuse_fraction(text: str) -> float:
    raise ValueError(f"{text:.20}: no request has fractions")


_WITHOUT_FRACTIONS = json.JSONDecoder(parse_float=_refuse_fraction)  # these take ten times as long to parse


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors of this process; -1 stands for none."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


# Fields of a message


def integer(body: Mapping[str, Any], name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
    """The whole number of that name. Raises Nonsense: there is none."""
    value = body.get(name)
    if type(value) is not int or not least <= value <= most:
        raise Nonsense(f"{name}: expected a whole number from {least} to {most}")
    return value


def text(body: Mapping[str, Any], name: str, most: int = 256) -> str:
    """The string of that name. Raises Nonsense: there is none; InvalidArgument: it is too long."""
    value = body.get(name)
    if not isinstance(value, str):
        raise Nonsense(f"{name}: expected a string")
    if len(value) > most:
        raise InvalidArgument(f"{name} of {len(value)} characters: expected at most {most}")
    return value


def boolean(body: Mapping[str, Any], name: str) -> bool:
    """The truth value of that name. Raises Nonsense: there is none."""
    value = body.get(name)
    if not isinstance(value, bool):
        raise Nonsense(f"{name}: expected true or false")
    return value


def integers(body: Mapping[str, Any], name: str, most: int = MAX_AT_ONCE) -> list[int]:
    """The list of whole numbers of that name, none negative. Raises Nonsense: there is none."""
    value = _list(body, name, most)
    if not all(type(each) is int and 0 <= each < 1 << 63 for each in value):
        raise Nonsense(f"{name}: expected whole numbers")
    return value


def table_to_json(rows: Table) -> str:
    """What a message says of it."""
    return base64.b64encode(rows.astype("<i8").tobytes()).decode()


def table(body: Mapping[str, Any], name: str, columns: int) -> Table:
    """The table of that name, of so many columns. Raises Nonsense: there is none; InvalidArgument: it is too long."""
    value = body.get(name)
    if not isinstance(value, str):
        raise Nonsense(f"{name}: expected a table")
    try:
        content = base64.b64decode(value, validate=True)
        found: Table = np.frombuffer(content, "<i8").astype(np.int64).reshape(-1, columns)
    except ValueError:
        raise Nonsense(f"{name}: expected rows of {columns} numbers, as bytes") from None
    if (found < 0).any():
        raise Nonsense(f"{name}: expected whole numbers")
    if len(found) > MAX_ROWS:
        raise InvalidArgument(f"{name}: {len(found)} at once: expected at most {MAX_ROWS}")
    return found


def objects(body: Mapping[str, Any], name: str, most: int) -> list[dict[str, Any]]:
    """The list of objects of that name. Raises Nonsense: there is none."""
    value = _list(body, name, most)
    if not all(isinstance(each, dict) for each in value):
        raise Nonsense(f"{name}: expected objects")
    return value


def _list(body: Mapping[str, Any], name: str, most: int) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise Nonsense(f"{name}: expected a list")
    if len(value) > most:
        raise InvalidArgument(f"{name}: {len(value)} at once: expected at most {most}")
    return value


# Errors on their way


_ERRORS: Mapping[type[Exception], Sequence[str]] = {  # and what each is made from; without that from its text
    OutOfHostMemory: ("needed_bytes", "available_bytes", "limit", "detail"),
    DriverError: ("call", "error", "detail"),
    **dict.fromkeys((InvalidArgument, InvalidState, VaultError), ()),
}


def error_to_json(error: Exception) -> dict[str, Any]:
    """What an answer says of an error."""
    kind = next((each for each in type(error).__mro__ if each in _ERRORS), VaultError)
    arguments = [getattr(error, name) for name in _ERRORS[kind]] or [str(error)]
    return {"type": kind.__name__, "arguments": arguments}


def error_from_json(facts: object) -> Exception:
    """That error again, as an exception of this package."""
    kinds = {kind.__name__: kind for kind in _ERRORS}
    if isinstance(facts, dict) and facts.get("type") in kinds and isinstance(facts.get("arguments"), list):
        with suppress(TypeError):
            error: Exception = kinds[facts["type"]](*facts["arguments"])
            return error
    return VaultError(f"the vault answered with an unknown error: {facts!r:.200}")


# The socket


def default_socket() -> Path:
    """Of this user: in `$XDG_RUNTIME_DIR`, which is private, or in a private folder of /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "cumem-sleep" if runtime else Path(f"/tmp/cumem-sleep-{os.getuid()}")
    return folder / "vault.sock"


def check_folder(
    folder: Path, what: str = "the socket's folder", *, private: bool = False, descriptor: int | None = None
) -> None:
    """See that nobody but this user (and root) can put anything else there or, if it is to be private, enter it.

    Args:
        descriptor: of the folder, whatever has its name by now.

    Raises:
        VaultError: somebody could; the message says what is wrong.
    """
    named = f"{what} {folder}"
    try:
        facts = os.lstat(folder) if descriptor is None else os.fstat(descriptor)
    except OSError as error:
        raise VaultError(f"{named}: {error.strerror}") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise VaultError(f"{named} is not a folder: name another")
    if facts.st_uid not in (os.getuid(), 0):
        raise VaultError(f"{named} belongs to user {facts.st_uid}: name another")
    if private and facts.st_mode & 0o077:
        raise VaultError(f"others can enter {named}: `chmod 700 {folder}`")
    if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        raise VaultError(f"others can write to {named}: `chmod go-w {folder}`")


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end; pid 0 if it is in a pid namespace that this process cannot see."""
    size = _CREDENTIALS.size
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid
