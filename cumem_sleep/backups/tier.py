"""What a tier is: a place for extents, and all that operations need of it.

A tier knows nothing of levels, tags or what is clean; operations and the store know no tier by name. Every tier passes
the same tests (`tests/backups/test_tiers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..digest.reference import Digest
from ..extents import Extent, Transfers
from .limits import HostLimit

# Holds the allocator's lock if it is free, and gives whether it was.
Turn = Callable[[], AbstractContextManager[bool]]


@dataclass(frozen=True)
class Wanted:
    """Memory for one backup: extents of exactly these sizes, in order, for copies to and from `device`."""

    device: int
    sizes: Sequence[int]


@dataclass(frozen=True)
class Content:
    """What a backup holds: bytes of a segment on `device`, whatever way they are stored."""

    device: int
    digest: Digest
    bytes: int


@dataclass(frozen=True)
class Stored:
    """Extents that hold some content, encoded or as it is."""

    content: Content
    extents: tuple[Extent, ...]
    is_encoded: bool


class Tier(Protocol):
    """A place for extents. Not thread safe: the allocator's lock guards it."""

    @property
    def unreleased_bytes(self) -> int:
        """What `release_later` has yet to give back."""

    def limits(self, held_bytes: int, needed_bytes: int | None = None) -> list[HostLimit]:
        """Every limit that `reserve` is checked against; exact only as far as they may be below `needed_bytes`.

        Args:
            held_bytes: what the caller's extents hold, those that have yet to be released included.
        """

    def extent_bytes(self, *, beside_work: bool) -> int:
        """The most that an extent is to have, so that taking it does not keep others waiting.

        Args:
            beside_work: the model runs meanwhile.
        """

    def reserve(self, wanted: Sequence[Wanted]) -> list[tuple[Extent, ...]]:
        """Extents for each of `wanted`, or none at all.

        Raises:
            OutOfHostMemory: there is too little.
        """

    def can_rewrite(self, extents: Sequence[Extent]) -> bool:
        """Whether a backup in these extents may be written anew: not if others share them."""

    def find(self, contents: Sequence[Content]) -> list[tuple[Extent, ...] | None]:
        """For each, extents that hold it as it is already, of whomever: from here on the caller's as well."""

    def seal(self, sealed: Sequence[Stored]) -> None:
        """These have been written, and proven to hold that content: others may share them.

        Raises:
            CumemSleepError: the caller is not to trust them any more.
        """

    def mark(self, backups: Sequence[Sequence[Extent]], *, needed: bool) -> list[int]:
        """Say of backups, each by its extents, whether they are needed, or merely retained and may be evicted.

        Returns:
            The places of those that have been evicted.
        """

    def release(self, extents: Iterable[Extent]) -> None:
        """Give them back now; no copy of them is in flight."""

    def release_later(self, extents: Sequence[Extent]) -> None:
        """Give them back without keeping the caller waiting, if there is much to give back."""

    def settle(self) -> None:
        """Do now what `release_later` has put off."""

    def content(self, extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """What lies there, for the CPU: not a copy, where it is memory of this process. No copy to it is in flight."""

    def transfers(self) -> Transfers:
        """For the copies of one operation."""

    def stop(self) -> None:
        """End what goes on in the background. May be called without the lock."""
