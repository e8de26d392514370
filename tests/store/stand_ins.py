"""Stand-ins for segments, backups and streams, which note what is done with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cumem_sleep import DriverError
from cumem_sleep.backups.backup import Backup
from cumem_sleep.core.extents import PieceRows
from cumem_sleep.store.transfer import Transfer


@dataclass
class Part:
    """Of a segment, as much as batches look at."""

    id: int
    bytes: int
    address: int
    device: int = 0


@dataclass
class Block:
    """Of a host block, likewise."""

    bytes: int
    pinned: bool = True


class Store:
    """Backups in blocks of at most `block_bytes`."""

    def __init__(self, parts: list[Part], block_bytes: int) -> None:
        self.backups = {
            part.id: Backup(
                part,  # type: ignore[arg-type]
                None,  # type: ignore[arg-type]
                tuple(Block(min(block_bytes, part.bytes - at)) for at in range(0, part.bytes, block_bytes)),  # type: ignore[misc]
            )
            for part in parts
        }

    def backed_up(self, parts: list[Part]) -> Any:
        return [(part, list(self.backups[part.id].pieces())) for part in parts]

    def add_all(self, transfer: Transfer, parts: list[Part]) -> Transfer:
        for part, pieces in self.backed_up(parts):
            transfer.add(part, pieces)
        return transfer


def parts_of(*sizes: int) -> list[Part]:
    return [Part(number, size, number << 32) for number, size in enumerate(sizes, start=1)]


@dataclass
class Log:
    """What happened, in order; and what is in flight on each stream."""

    events: list[tuple[str, object]] = field(default_factory=list)
    in_flight: dict[int, list[int]] = field(default_factory=dict)  # batches by stream

    @property
    def flying(self) -> list[int]:
        return sorted(number for numbers in self.in_flight.values() for number in numbers)


class FakeStream:
    def __init__(self, number: int, log: Log) -> None:
        self.number = number
        self.log = log
        self.fails_at: int | None = None
        self.has_kernel = True

    @property
    def stream(self) -> FakeStream:
        """As a lane it is the same."""
        return self

    def pin(self, extents: Iterable[Block]) -> None:
        for extent in extents:
            if not extent.pinned:
                extent.pinned = True
                self.log.events.append(("pinned", extent.bytes))

    def begin(self, extent: object, rows: PieceRows, *, out: bool, by_kernel: bool = False) -> bool:
        if by_kernel and not self.has_kernel:
            self.log.events.append(("refused", rows[0][0] >> 32))
            by_kernel = False
        for address, _, _ in rows:
            if self.fails_at == address >> 32:
                raise DriverError("cuMemcpyHtoDAsync", "CUDA_ERROR_UNKNOWN", "", "")
            self.log.events.append(("kernel" if by_kernel else "engine", address >> 32))
            self.log.in_flight.setdefault(self.number, []).append(address >> 32)
        return by_kernel

    def synchronize(self) -> None:
        self.log.events += [("done", batch) for batch in self.log.in_flight.pop(self.number, [])]
