"""What a tier is: a place for extents.

A tier knows nothing about levels, tags or clean backups. Every tier passes the same tests
(`tests/backups/test_tiers.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.extents import Extent, LaneGroup
from ..digest.reference import Digest
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

    What only one of the two does, is asked of that one (`Catalogue.vault`, `Catalogue.own`).
    """

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The size of all extents that were reserved or found and have not been released yet."""

    @abstractmethod
    def limits(self, needed_bytes: int | None = None) -> list[HostLimit]:
        """Every limit that `reserve` is checked against; exact only as far as they may be below `needed_bytes`.

        What other processes are about to touch is not counted before they do (`HostTier.commit`).
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

    @abstractmethod
    def reserve_expendable(self, device: int, sizes: Sequence[int]) -> Sequence[Extent]:
        """As `reserve`, for what is kept of dropped segments (`backups.kept`): no backup gives way to it.

        Raises:
            OutOfHostMemory: there is too little.
        """

    @abstractmethod
    def expendable_room(self, sharers: int = 1) -> int:
        """How many bytes `reserve_expendable` would give to each of so many processes that ask at the same time."""

    @abstractmethod
    def lane_group(self) -> LaneGroup:
        """For the copies of one operation."""

    @abstractmethod
    def content(self, extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """What lies there, for the CPU: not a copy, where it is memory of this process. No copy to it is in flight."""

    @abstractmethod
    def release(self, extents: Iterable[Extent]) -> None:
        """Release them, without keeping the caller waiting; no copy to or from them is in flight."""
