"""How owners learn that backups have moved to files: by a log for each client, in memory that outlives the vault.

A client that sleeps reads nothing, so a message would wait in its socket, and the vault with it. The log takes any
number of them. The vault writes there before it gives the memory to others. Who has read a backup by itself looks there
afterwards: if it says nothing of that backup, the bytes were still there when they were read.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import VaultError
from .files import KEEP_SIZE, PAGE_BYTES, libc, punch
from .protocol import close_all


class Move(NamedTuple):
    """These backups, which are equal, lie there from then on."""

    numbers: Sequence[int]
    extents: Sequence[Sequence[int]]


def encoded(moves: Iterable[Move]) -> bytes:
    """As a log says them."""
    return "".join(json.dumps(move, separators=(",", ":")) + "\n" for move in moves).encode()


class MoveLog:
    """What the vault writes for one client.

    Attributes:
        end: its size in bytes.
    """

    def __init__(self) -> None:
        """Raises OSError: no more files can be opened."""
        self.end = 0
        self._punched = 0
        self._descriptor = os.memfd_create("moves", os.MFD_CLOEXEC)

    def reader(self) -> int:
        """A descriptor for the client. Raises OSError: no more files can be opened."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def make_room(self, text: bytes) -> None:
        """So that writing this cannot fail. Raises VaultError: there is no memory for that."""
        if libc.fallocate(self._descriptor, KEEP_SIZE, self.end, len(text)):
            why = os.strerror(ctypes.get_errno())
            raise VaultError(f"a client cannot be told what is in files: {why}")

    def add(self, text: bytes) -> None:
        """Of `said`, for which room was made."""
        self.end += os.pwrite(self._descriptor, text, self.end)

    def heard(self, position: int) -> None:
        """The client has read that far."""
        pages = min(position, self.end) // PAGE_BYTES * PAGE_BYTES
        if pages > self._punched:
            punch(self._descriptor, self._punched, pages - self._punched)
            self._punched = pages

    def close(self) -> None:
        """Close this end; the client can still read its own."""
        close_all([self._descriptor])
        self._descriptor = -1


class MoveReader:
    """What the client reads.

    Attributes:
        position: how far it has read.
    """

    def __init__(self, descriptor: int) -> None:
        self.position = 0
        self._descriptor = descriptor

    def read(self) -> list[Move]:
        """What is new."""
        nbytes = os.fstat(self._descriptor).st_size - self.position
        content = os.pread(self._descriptor, nbytes, self.position) if nbytes > 0 else b""
        content = content[: content.rfind(b"\n") + 1]  # the rest is being written
        self.position += len(content)
        return [Move(*json.loads(line)) for line in content.splitlines()]

    def close(self) -> None:
        """It is not needed any more."""
        close_all([self._descriptor])
