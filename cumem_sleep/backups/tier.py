"""What a tier is: a place for extents, with everything that operations need from it.

A tier knows nothing about levels, tags or clean backups, and operations know no tier by name. Every tier passes the
same tests (`tests/backups/test_tiers.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.extents import Extent, LaneGroup
from ..digest.reference import Digest
from ..errors import OutOfHostMemory
from ..report import BackupPlace
from ..settings import Settings

# Takes the allocator's lock if it is free, and yields whether it was.
TryLock = Callable[[], AbstractContextManager[bool]]


class NotYet(Exception):
    """The tier is still taking the memory that it would need. Nothing has changed."""


class HostLimit(NamedTuple):
    """What one limit (`budget`, `cgroup` or `MemAvailable`) leaves for backups."""

    name: str
    available_bytes: int


def budget_limits(settings: Settings, held_bytes: int) -> list[HostLimit]:
    """What the budget leaves beside so many bytes of backups, if there is one."""
    budget = settings.host_budget_bytes
    return [] if budget is None else [HostLimit("budget", max(0, budget - held_bytes))]


@dataclass(frozen=True)
class Content:
    """The content of a backup: the digest and the size of what was backed up, however it is stored."""

    digest: Digest
    bytes: int
    is_encoded: bool = False


class Footprint(NamedTuple):
    """What a backup takes of the host's memory, in bytes.

    Attributes:
        vault_bytes: of these, what a vault holds; the rest is this process's own memory.
        shared_bytes: of these, what other processes share, as far as one can know.
        is_gone: the tier has evicted it. Then it takes nothing.
    """

    bytes: int = 0
    vault_bytes: int = 0
    shared_bytes: int = 0
    is_gone: bool = False


class Tier(ABC):
    """A place for extents. Not thread safe: the allocator's lock guards it.

    What every tier does is abstract. The rest is in four groups, of which a tier overrides all or nothing: those whose
    extents other processes may share, or that evict by themselves; those of another process; those that pin memory in
    this process; and those that do some of their work in a thread.
    """

    # What every tier does

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The size of all extents that were reserved or found and have not been released yet."""

    @abstractmethod
    def limits(self, needed_bytes: int | None = None) -> list[HostLimit]:
        """Every limit that `reserve` is checked against; exact only as far as they may be below `needed_bytes`.

        What other processes are about to touch is not counted before they do (`commit`).
        Extents that `release` has yet to give back count as room: `reserve` takes them, or gives them back first.
        """

    @abstractmethod
    def place(self) -> BackupPlace:
        """Where extents lie, as far as that is known without asking anybody."""

    @abstractmethod
    def footprints(self, backups: Sequence[Sequence[Extent]]) -> list[Footprint]:
        """What each of these backups takes of the host's memory; what several of them share counts once."""

    @property
    @abstractmethod
    def extent_bytes(self) -> int:
        """The largest size for an extent, so that to pin it or to release it does not keep a running model waiting."""

    @abstractmethod
    def reserve(self, device: int, sizes: Sequence[int], *, beside_work: bool = False) -> Sequence[Extent]:
        """Extents of exactly these sizes, in order, for copies to and from `device`; or none at all.

        Args:
            beside_work: the model runs meanwhile, so this is not to wait.

        Raises:
            OutOfHostMemory: there is too little.
            NotYet: it would have to wait.
        """

    def reserve_expendable(self, device: int, sizes: Sequence[int]) -> Sequence[Extent]:
        """As `reserve`, for what is kept of dropped segments (`backups.kept`): no backup gives way to it.

        Raises:
            OutOfHostMemory: there is too little.
        """
        nbytes = sum(sizes)
        limits = self.limits(nbytes)
        for limit in limits:
            if limit.available_bytes < nbytes:
                raise OutOfHostMemory(nbytes, limit.available_bytes, limit.name)
        with suppress(NotYet), self.commit(nbytes, beside_work=True) as is_left:
            if is_left:
                return self.reserve(device, sizes)
        tightest = min(limits, key=lambda limit: limit.available_bytes)
        raise OutOfHostMemory(nbytes, tightest.available_bytes, tightest.name, "other processes are taking it")

    def expendable_room(self) -> int:
        """How many bytes `reserve_expendable` would give."""
        return min((limit.available_bytes for limit in self.limits()), default=0)

    @abstractmethod
    def lane_group(self) -> LaneGroup:
        """For the copies of one operation."""

    @abstractmethod
    def content(self, extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """What lies there, for the CPU: not a copy, where it is memory of this process. No copy to it is in flight."""

    @abstractmethod
    def release(self, extents: Iterable[Extent]) -> None:
        """Release them, without keeping the caller waiting; no copy to or from them is in flight."""

    # Where several processes share extents, or the tier evicts what is merely retained. Otherwise: nobody, and nothing

    def seal(self, backups: Sequence[tuple[Sequence[Extent], Content]]) -> None:  # noqa: B027
        """These extents have been written and verified to hold that content: others may share them from now on.

        Raises:
            CumemSleepError: the caller must no longer trust them.
        """

    def find(self, device: int, contents: Sequence[Content]) -> list[tuple[Extent, ...] | None]:  # noqa: ARG002
        """For each content, sealed extents that hold it (the caller shares them from now on), or None."""
        return [None] * len(contents)

    def can_rewrite(self, extents: Sequence[Extent]) -> bool:  # noqa: ARG002
        """Whether a backup in these extents may be rewritten: not if others share them."""
        return True

    def set_needed(self, backups: Sequence[Sequence[Extent]], *, needed: bool) -> list[int]:  # noqa: ARG002
        """These backups, each given by its extents, are needed from now on, or merely retained, and may be evicted.

        Returns:
            The indices of those that have been evicted.
        """
        return []

    def mark_corrupt(self, backups: Sequence[Sequence[Extent]]) -> None:  # noqa: B027
        """These backups hold other bytes than those that were verified: nobody else is to share them."""

    def has_free(self, nbytes: int) -> bool:  # noqa: ARG002
        """Whether this much is free and ready, or soon will be: so an operation may reserve it bit by bit."""
        return False

    # Where another process keeps and copies the bytes. Otherwise nobody else has memory of this process

    def regain(self) -> None:  # noqa: B027
        """Get back, if that is possible now, device memory that the other process still has after a failure."""

    def read_ahead(self) -> None:  # noqa: B027
        """What sleeps is about to be woken: let it come from files into memory. Returns at once."""

    def leave(self) -> None:  # noqa: B027
        """Let the other process go, for no extent is left, and no memory that it might have. It is found anew."""

    # Where this process pins the memory itself. Otherwise there is nothing to do

    def pin(self, device: int, extents: Iterable[Extent]) -> None:  # noqa: B027
        """Pin now what the first copy to it would pin.

        Raises:
            DriverError, OutOfHostMemory: refused.
        """

    def unpin(self, extents: Iterable[Extent]) -> None:  # noqa: B027
        """Leave the bytes, but do not keep them pinned until they are copied again. No copy of them is in flight."""

    def device_bytes_to_pin(self, extents: Iterable[Extent]) -> int:  # noqa: ARG002
        """How much memory of each GPU it takes to pin those of `extents` that are not."""
        return 0

    @contextmanager
    def commit(self, nbytes: int, *, beside_work: bool = False) -> Iterator[bool]:  # noqa: ARG002
        """For what `reserve` takes inside: from now on no other process counts on these bytes.

        Gives whether they are left. Waits for others, at most a minute, if they have found the same bytes and have yet
        to touch them.

        Raises:
            NotYet: beside work, it would wait.
            OperationStopped: asked to stop meanwhile.
        """
        yield True

    # Where releasing takes long, and a thread does it. Otherwise it is done at once

    def finish_releasing(self) -> None:  # noqa: B027
        """Finish now what `release` has left to the thread."""

    def stop(self) -> None:  # noqa: B027
        """End the thread, for the process exits. May be called without the lock."""
