"""A tier unlike that of the host: nothing reaches its extents, which are filled and read through other memory."""

# ruff: noqa: ARG002

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.backups.backup import Backup
from cumem_sleep.backups.host import HostLane, HostTransfers
from cumem_sleep.backups.tier import Footprint, HostLimit, Tier
from cumem_sleep.core.extents import Extent
from cumem_sleep.core.pinned import pinned_block
from cumem_sleep.report import BackupPlace

EXTENT_BYTES = 2 << 20


@dataclass
class Page:
    """An extent that no kernel and no copy engine reaches."""

    content: bytearray
    address: int = 0

    @property
    def bytes(self) -> int:
        return len(self.content)


class Cold(Tier):
    """Like files: what lies there is read through a small block of memory."""

    bytes = 0  # type: ignore[assignment]

    def limits(self, needed_bytes: int | None = None) -> list[HostLimit]:
        return []

    def place(self) -> BackupPlace:
        return BackupPlace()

    def footprints(self, backups: Sequence[Sequence[Extent]]) -> list[Footprint]:
        return [Footprint() for _ in backups]

    @property
    def extent_bytes(self) -> int:
        return EXTENT_BYTES

    def reserve(self, device: int, sizes: Sequence[int], *, beside_work: bool = False) -> list[Page]:
        self.bytes += sum(sizes)
        return [Page(bytearray(size)) for size in sizes]

    def transfers(self) -> ColdTransfers:
        return ColdTransfers()

    @staticmethod
    def content(extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(cast(Page, extent).content, np.uint8)[offset : offset + nbytes].copy()

    def release(self, extents: Iterable[Extent]) -> None:
        self.bytes -= sum(extent.bytes for extent in extents)


class ColdTransfers(HostTransfers):
    def __init__(self) -> None:
        super().__init__(1, EXTENT_BYTES)

    def lane(self, stream: _core.CopyStream) -> ColdLane:
        return ColdLane(stream, self)


class ColdLane(HostLane):
    kernels_reach = False
    content = staticmethod(Cold.content)

    def pin(self, extents: Iterable[Extent]) -> None:
        assert all(isinstance(extent, Page) for extent in extents)

    def read(self, address: int, extent: Extent, offset: int, nbytes: int, *, by_kernel: bool = False) -> None:
        with contextlib.closing(pinned_block(nbytes, self.stream.device)) as block:
            np.frombuffer(memoryview(block), np.uint8)[:] = np.frombuffer(cast(Page, extent).content, np.uint8)[
                offset : offset + nbytes
            ]
            self.stream.to_device(address, block, 0, nbytes)
            self.stream.synchronize()


def moved(allocator: CuMemAllocator, backup: Backup) -> Cold:
    """As by whoever spills: copied without its segment, which sleeps."""
    with allocator._lock.hold():
        tier = Cold()
        pages = tier.reserve(0, [extent.bytes for extent in backup.extents])
        for extent, page in zip(backup.extents, pages, strict=True):
            page.content[:] = backup.tier.content(extent, 0, extent.bytes).tobytes()
        allocator._store.catalogue.move(backup, tier, pages)
    return tier
