"""What ranks have decided: for each round the first word counts, whoever said it.

The record is a file without a name that every rank of one host has open, and that is only ever appended to. Appending
is atomic, and needs no process but the one that appends. So a rank that is stopped, or dies, at any moment keeps nobody
from deciding, and finds what was decided when it goes on. No two ranks can read different decisions.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from ..errors import InvalidState

_RECORD = struct.Struct("<QiI")  # round, rank that failed, why
_NONCE_BYTES = _RECORD.size


class Reason(IntEnum):
    """Why a round ended as it did."""

    ALL_READY = 0
    REFUSED = 1  # the rank raised an error
    INTERRUPTED = 2  # a signal handler raised on it
    ENDED = 3
    UNFINISHED = 4  # it began, and was not ready in time
    SILENT = 5  # it did not begin in time
    LATE = 6  # it began when the others had given up
    OTHER_OPERATION = 7
    UNDECIDED = 8  # it was to tell the decision, and did not


@dataclass(frozen=True)
class Decision:
    """How a round ended.

    Attributes:
        failed: the rank for which all undo their half; -1: nobody failed, and all go on.
        why: the reason.
        text: what that rank said about it, if it did.
    """

    failed: int
    why: Reason
    text: str = ""

    @property
    def go(self) -> bool:
        """Whether all go on."""
        return self.failed < 0


GO = Decision(-1, Reason.ALL_READY)


@dataclass(frozen=True)
class RecordPlace:
    """Where other processes of this host find the record."""

    process: int
    descriptor: int
    nonce: bytes


class Record:
    """The record of one group. Not thread-safe: operations run one after the other."""

    def __init__(self, descriptor: int, nonce: bytes) -> None:
        self.place = RecordPlace(os.getpid(), descriptor, nonce)
        self._descriptor = descriptor
        self._read_bytes = _NONCE_BYTES
        self._decisions: dict[int, Decision] = {}

    @classmethod
    def make(cls) -> Record:
        """A new one, for the others to open."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        descriptor = os.memfd_create("cumem-sleep-ranks", os.MFD_CLOEXEC)
        os.write(descriptor, nonce)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        return cls(descriptor, nonce)

    @classmethod
    def open(cls, place: RecordPlace) -> Record | None:
        """The one that another process made; None if it cannot be reached from here, as on another host."""
        path = f"/proc/{place.process}/fd/{place.descriptor}"
        # Without O_NOFOLLOW: the entry is a link to the memory. What is opened proves itself by the nonce.
        try:
            record = cls(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK), place.nonce)
        except OSError:
            return None
        with suppress(OSError):
            if os.pread(record._descriptor, _NONCE_BYTES, 0) == place.nonce:
                return record
        record.close()
        return None

    def of(self, round_: int) -> Decision | None:
        """The decision, None as long as there is none. Those of earlier rounds are forgotten."""
        while content := os.pread(self._descriptor, 256 * _RECORD.size, self._read_bytes):
            for number, failed, why in _RECORD.iter_unpack(content):
                self._decisions.setdefault(number, Decision(failed, Reason(why)))
            self._read_bytes += len(content)
        self._decisions = {number: each for number, each in self._decisions.items() if number >= round_}
        return self._decisions.get(round_)

    def decide(self, round_: int, wanted: Decision) -> Decision:
        """The decision: `wanted`, unless another rank was first."""
        if (decision := self.of(round_)) is None:
            os.write(self._descriptor, _RECORD.pack(round_, wanted.failed, wanted.why))
            decision = self.of(round_)
        if decision is None:
            raise InvalidState("the record of the ranks' decisions cannot be read back: end this process")
        return decision

    def close(self) -> None:
        """Again is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
