"""One client of the vault, as long as it is connected."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..errors import VaultError
from . import memory, protocol
from .jobs import BorrowedMemory
from .moves import MoveLog
from .protocol import Channel

_MAX_OPEN_REQUESTS = 128
_MAX_UNSENT_BYTES = 8 << 20


class Session:
    """What there is to know of a client.

    Attributes:
        pid: 0 if it is in a pid namespace that this process cannot see.
        process: a pidfd of it, or -1. A child that it forked may keep the connection open when it has died.
        since: when it came, by the monotonic clock.
        is_greeted: it has said hello.
        identity: the same for all connections of one client, of which each takes over from those before.
        owner: what the ledger knows it by. A later connection of the same client takes it over.
        is_cut_off: nothing more is done for it. It keeps its backups until it ends the connection.
        lent: its memory that may be mapped here, by its own numbers.
        known_slabs: of which it has a descriptor.
        moves: where it learns what has moved to files, if anything may.
    """

    def __init__(self, connection: socket.socket, pid: int, now: float, resume: Callable[[Session], None]) -> None:
        """`resume` is called when an answer may let it go on."""
        self.channel = Channel(
            connection, protocol.MAX_REQUEST_BYTES, protocol.MAX_ANSWER_BYTES, protocol.MAX_REQUEST_VALUES
        )
        self.pid = pid
        self.name = self.identity = ""
        self.since = now
        self.is_greeted = False
        self.is_cut_off = False
        self.open_requests = 0
        self.owner = object()
        self.lent: dict[int, BorrowedMemory] = {}
        self.known_slabs: set[int] = set()
        self.moves: MoveLog | None = None
        self.process = -1
        self._resume = resume
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
    def has_lent(self) -> bool:
        """Whether memory of its own may be mapped here, or being copied."""
        return not all(lent.is_returned for lent in self.lent.values())

    @property
    def is_served(self) -> bool:
        """Whether it is there, and was not cut off."""
        return self.channel.fileno() >= 0 and not self.is_cut_off

    @property
    def may_be_told(self) -> bool:
        """Whether it can hear now that something has moved to files."""
        return self.is_served and self.moves is not None and not self.channel.unsent_bytes

    def send(self, body: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Say it, if there is still somebody. That the connection has ended is found by who reads it.

        Raises:
            VaultError: the kernel sends no more descriptors, as long as those that were sent are not taken.
        """
        if not self.is_served:
            protocol.close_all(descriptors)
            return
        with suppress(OSError):
            if self.channel.send(body, descriptors):
                self.known_slabs.clear()  # of one at least it has none: it gets all again
                if descriptors:
                    raise VaultError(memory.NO_MORE_FILES)

    def flush(self) -> None:
        """Send what has to wait no longer. Raises OSError: the connection has ended."""
        if self.channel.flush():
            self.known_slabs.clear()

    def answer(self, request: int, result: Mapping[str, Any] | Exception) -> None:
        """The one answer to a request. With it the client may ask on."""
        kind, said = ("error", protocol.error_to_json(result)) if isinstance(result, Exception) else ("ok", result)
        could_ask = self.may_ask
        self.send({"id": request, kind: said})
        self.open_requests -= 1
        if not could_ask or self.channel.unsent_bytes:
            self._resume(self)

    def close(self) -> None:
        """End the connection."""
        self.channel.close()
        protocol.close_all([self.process])
        if self.moves is not None:
            self.moves.close()
