"""Host memory that processes have found to be available and have yet to touch.

The system counts memory as available until its pages are touched. Processes that look at a limit at the same time would
all find the same bytes, and the kernel would kill some of them while they prefault. So each shows the others what it is
about to touch: it locks as many pages of an offset range that nobody reads, by read locks on the folders of its memory
control groups. Whoever can look at a limit can open these folders, which takes no right to write; a process that dies
gives its locks back; and read locks keep nobody waiting.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from .. import host_facts
from ..errors import CumemSleepError, OutOfHostMemory, format_bytes
from . import log
from .driver import unified_free_bytes

# For others to touch what they have committed: enough for 600 GiB. Who has been stopped, or locks what he does not
# mean to touch, is passed over then.
FOR_OTHERS_S = 60.0
HOST_RESERVE_BYTES = 2 << 30  # who takes all there is leaves so much: for servers' own memory, the interpreter
_RESERVED_SHARE = 16  # who takes what it can do without leaves a sixteenth, if that is more
BETWEEN_TRIES_S = (0.005, 0.05)  # at random, so that of two that try at the same time one comes first
_PAGE_BYTES = 4096
_FLOCK = "hhqqi0q"  # struct flock: type, whence, start, length, pid
_END = (1 << 63) - 1
_FIRST_RANGES = 1 << 62  # where ranges begin, at random: it is as good as certain that no two overlap
_MOST_LOCKS = 4096  # that are counted: to find each takes a call


class Commitment:
    """What one process, or one part of it, is about to touch, and what the limits leave beside that of others.

    Not thread safe. Where the system has no such locks, or no file can be opened, nobody sees anything.

    Attributes:
        bytes: what is committed now.
        short_since: when it first waited for others since somebody has set this to None.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.short_since: float | None = None
        self._pages = 0
        self._first = 0  # page of the range
        self._folders: dict[Path, int] = {}  # their descriptors, while anything is committed
        _commitments.add(self)

    def take(
        self,
        nbytes: int,
        check: Callable[[Mapping[Path, int]], None],
        before_wait: Callable[[], object] = lambda: None,
    ) -> None:
        """Commit so much more, if `check` raises nothing when it is given what others have committed.

        Where only that is in the way, it waits for others to touch it, at most a minute since `short_since`.
        Of several that do so at the same time, too few may succeed, but never too many.

        Args:
            before_wait: called before each wait.

        Raises:
            CumemSleepError, OSError: of `check`. No more is committed than before; nor if `before_wait` raises.
        """
        while True:
            before = self.bytes
            self.set(before + nbytes)
            # Others after that: what they touch meanwhile counts twice then, not never.
            others = self.others()
            with suppress(CumemSleepError, OSError):
                return check(others)
            self.set(before)
            check({})
            before_wait()
            now, most = time.monotonic(), format_bytes(max(others.values(), default=0))
            if self.short_since is None:
                self.short_since = now
                log.info("waits for other processes to touch %s of host memory that they have committed", most)
            if now > self.short_since + FOR_OTHERS_S:
                log.warning("goes on, although others have committed %s of host memory and do not touch it", most)
                return self.set(self.bytes + nbytes)
            time.sleep(random.uniform(*BETWEEN_TRIES_S))

    def set(self, nbytes: int) -> None:
        """So much, in all, is yet to be touched; without a look at any limit."""
        self.bytes, before = nbytes, self._pages
        self._pages = -(-nbytes // _PAGE_BYTES)
        if self._pages and not self._folders:
            self._folders, self._first = _open_folders(), random.randrange(_FIRST_RANGES)
        kind = fcntl.F_RDLCK if self._pages > before else fcntl.F_UNLCK
        start, end = sorted((before, self._pages))
        if start < end:
            for folder in self._folders.values():
                with suppress(OSError):
                    fcntl.fcntl(folder, fcntl.F_OFD_SETLK, _flock(kind, self._first + start, end - start))
        if self._pages == 0:
            folders, self._folders = self._folders, {}
            _close(folders.values())

    def others(self) -> dict[Path, int]:
        """What all others have committed, in bytes, by the folder of the memory control group."""
        folders = self._folders or _open_folders()
        try:
            return {path: _PAGE_BYTES * _locked_pages(folder) for path, folder in folders.items()}
        finally:
            if folders is not self._folders:
                _close(folders.values())


_commitments: weakref.WeakSet[Commitment] = weakref.WeakSet()


def _close_in_child() -> None:
    """The locks belong to the open folders, which a child that lives longer would keep."""
    for commitment in list(_commitments):
        _close(commitment._folders.values())
        commitment.bytes, commitment._pages, commitment._folders = 0, 0, {}


os.register_at_fork(after_in_child=_close_in_child)


def require_room(
    nbytes: int, committed: Mapping[Path, int] | None = None, note: str = "", reserved: Mapping[str, int] | None = None
) -> None:
    """Every limit leaves so much beside what others have committed, and what is reserved of it.

    Raises:
        OutOfHostMemory: one does not.
    """
    reserved = reserved or {}
    for name, left in left_bytes(nbytes + max(reserved.values(), default=0), committed).items():
        reserve = reserved.get(name, 0)
        if left - reserve < nbytes:
            note = note or (f"{format_bytes(reserve)} are reserved for others" if reserve else "")
            raise OutOfHostMemory(nbytes, max(0, left - reserve), name, note)


def left_bytes(enough: int | None = None, committed: Mapping[Path, int] | None = None) -> dict[str, int]:
    """What each limit (`cgroup`, `MemAvailable`, `unified memory`) leaves beside what others committed; <0: too much.

    Args:
        enough: a limit that leaves at least so much need not be exact.
        committed: as of `Commitment.others`.
    """
    committed = committed or {}
    of_host = max(committed.values(), default=0)  # of the outermost group: whoever commits shows it in all of his
    found = {
        "cgroup": host_facts.cgroup_available_bytes(committed=committed),
        "MemAvailable": host_facts.mem_available_bytes(enough=None if enough is None else enough + of_host),
        "unified memory": unified_free_bytes(),
    }
    left = {name: nbytes for name, nbytes in found.items() if nbytes is not None}
    if "MemAvailable" in left:
        left["MemAvailable"] -= of_host
    return left


def reserved_bytes() -> dict[str, int]:
    """What is left to others of each limit, by name, by who takes what it can do without."""
    found = {"cgroup": host_facts.cgroup_limit_bytes(), "MemAvailable": host_facts.mem_total_bytes()}
    known = {name: total for name, total in found.items() if total is not None}
    return {name: max(HOST_RESERVE_BYTES, total // _RESERVED_SHARE) for name, total in known.items()}


def _open_folders() -> dict[Path, int]:
    folders: dict[Path, int] = {}
    for path in host_facts.memory_groups():
        with suppress(OSError):
            folders[path] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return folders


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _locked_pages(folder: int) -> int:
    """By others: the kernel tells one lock in a range, in no order, so the ranges beside it are asked for next."""
    pages, ranges = 0, [(0, _END)]
    for _ in range(_MOST_LOCKS):
        if not ranges:
            break
        start, end = ranges.pop()
        try:
            answer = fcntl.fcntl(folder, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, start, end - start))
        except OSError:
            return 0
        kind, _, first, length, _ = struct.unpack(_FLOCK, answer)
        if kind == fcntl.F_UNLCK:
            continue
        first, last = max(start, first), min(end, first + length if length else end)
        pages += last - first
        ranges += [each for each in ((start, first), (last, end)) if each[0] < each[1]]
    return pages


def _flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)
