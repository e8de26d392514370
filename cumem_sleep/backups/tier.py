"""What a tier is: a place for extents, with everything that operations need from it.

A tier knows nothing about levels, tags or clean backups; operations and the store know no tier by name. Every tier
passes the same tests (`tests/backups/test_tiers.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..digest.reference import Digest
from ..extents import Extent, Transfers
from ..report import BackupPlace
from .limits import HostLimit

# Takes the allocator's lock if it is free, and yields whether it was.
Turn = Callable[[], AbstractContextManager[bool]]


class NotYet(Exception):
    """The tier is still taking the memory that it would need. Nothing has changed."""


@dataclass(frozen=True)
class Wanted:
    """Memory for one backup: extents of exactly these sizes, in order, for copies to and from `device`."""

    device: int
    sizes: Sequence[int]


@dataclass(frozen=True)
class Content:
    """The content of a backup: bytes of a segment on `device`, however they are stored."""

    device: int
    digest: Digest
    bytes: int


@dataclass(frozen=True)
class Stored:
    """Extents that hold some content, encoded or not."""

    content: Content
    extents: tuple[Extent, ...]
    is_encoded: bool


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

    What every tier does is abstract. The rest is in five groups, of which a tier overrides all or nothing: those whose
    extents other processes may share, or that evict by themselves; those whose memory is ready before it is reserved;
    those of another process; those that pin memory in this process; and those where releasing takes
    long.
    """

    # What every tier does

    @abstractmethod
    def limits(self, held_bytes: int, needed_bytes: int | None = None) -> list[HostLimit]:
        """Every limit that `reserve` is checked against; exact only as far as they may be below `needed_bytes`.

        Args:
            held_bytes: the size of the caller's extents, including those that are not released yet. The latter count as
                room: `reserve` takes them, or releases them first.
        """

    @abstractmethod
    def place(self) -> BackupPlace:
        """Where extents lie, as far as that is known without asking anybody."""

    @abstractmethod
    def footprints(self, backups: Sequence[Sequence[Extent]]) -> list[Footprint]:
        """What each of these backups takes of the host's memory; what several of them share counts once."""

    @abstractmethod
    def extent_bytes(self, *, beside_work: bool) -> int:
        """The largest size for an extent, so that reserving it does not keep others waiting.

        Args:
            beside_work: the model runs meanwhile.
        """

    @abstractmethod
    def reserve(self, wanted: Sequence[Wanted], *, beside_work: bool = False) -> list[tuple[Extent, ...]]:
        """Extents for each of `wanted`, or none at all.

        Args:
            beside_work: the model runs meanwhile, so this is not to wait.

        Raises:
            OutOfHostMemory: there is too little.
            NotYet: it would have to wait.
        """

    @abstractmethod
    def transfers(self) -> Transfers:
        """For the copies of one operation."""

    @abstractmethod
    def content(self, extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """What lies there, for the CPU: not a copy, where it is memory of this process. No copy to it is in flight."""

    @abstractmethod
    def release(self, extents: Iterable[Extent]) -> None:
        """Release them now; no copy to or from them is in flight."""

    # Where several processes share extents, or the tier evicts what is merely retained. Otherwise: nobody, and nothing

    def seal(self, sealed: Sequence[Stored]) -> None:  # noqa: B027
        """These have been written and verified to hold that content: others may share them from now on.

        Raises:
            CumemSleepError: the caller must no longer trust them.
        """

    def find_content(self, contents: Sequence[Content]) -> list[tuple[Extent, ...] | None]:
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

    # Where memory is ready before it is reserved. Otherwise an operation reserves all that it needs at once

    def has_free(self, nbytes: int) -> bool:  # noqa: ARG002
        """Whether this much is free and ready, or soon will be: so an operation may reserve it bit by bit."""
        return False

    # Where another process keeps and copies the bytes. Otherwise nobody else has memory of this process

    def regain(self) -> None:  # noqa: B027
        """Get back, if that is possible now, device memory that the other process still has after a failure."""

    def leave(self) -> None:  # noqa: B027
        """Let the other process go, for no extent is left, and no memory that it might have. It is found anew."""

    # Where this process pins the memory itself. Otherwise there is nothing to do

    def unpin(self, extents: Iterable[Extent]) -> None:  # noqa: B027
        """Leave the bytes, but do not keep them pinned until they are copied again. No copy of them is in flight.

        Raises:
            OperationStopped: some may be pinned still.
        """

    def device_bytes_to_pin(self, extents: Iterable[Extent]) -> int:  # noqa: ARG002
        """How much memory of each GPU it takes to pin those of `extents` that are not."""
        return 0

    # Where releasing takes long. Otherwise it is done at once

    @property
    def unreleased_bytes(self) -> int:
        """What `release_later` has not released yet."""
        return 0

    def release_later(self, extents: Sequence[Extent]) -> None:
        """Release them; in the background, without keeping the caller waiting."""
        self.release(extents)

    def finish_releasing(self) -> None:  # noqa: B027
        """Finish now what `release_later` has deferred."""

    def stop(self) -> None:  # noqa: B027
        """End background work, for the process exits. May be called without the lock."""
