"""The bytes of a wake: copied batch by batch, by whichever way is the faster just then, digested behind the copies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from . import _core
from .backup import BackupStore, Piece
from .digest import DigestRun
from .errors import CumemSleepError

if TYPE_CHECKING:
    from .copy_kernel import GpuCopies

logger = logging.getLogger("cumem_sleep")

_BATCH_BYTES = 64 << 20
_BATCHES_BETWEEN_TRIALS = 32  # 42 ms: a trial costs 1.5 ms while the driver wipes memory
_WORTH_MEASURING_BYTES = 1 << 30
# A quiet copy engine beats the processors by 7 %, one that wipes memory has half their speed.
_ENGINE_IS_FREE = 0.8


@dataclass
class Batch:
    """Pieces that are copied together.

    Attributes:
        segments: that the pieces belong to.
        completed: those of which the last byte is in this batch.
    """

    pieces: list[Piece] = field(default_factory=list)
    segments: list[_core.Segment] = field(default_factory=list)
    completed: list[_core.Segment] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """In all pieces."""
        return sum(piece.bytes for piece in self.pieces)


class Restorer:
    """Copies backups to mapped segments.

    Two batches are in flight on each device, on two streams, so that the link never waits for us. There are two ways:
    the copy engine, and a kernel that reads host memory (`copy_kernel`), which is the faster one as long as the driver
    wipes memory that was just freed, by this process or another. So both are tried, and the engine now and then again.
    """

    def __init__(self) -> None:
        self._kernel_devices: set[int] = set()

    def warm_up(self, device: int) -> None:
        """Compile and load the kernel for `device`; without this only the copy engine is used there."""
        try:
            from . import copy_kernel

            copy_kernel.warm_up(device)
        except CumemSleepError:
            raise
        except Exception as error:
            logger.warning("copies go by the copy engine alone, because the copy kernel failed: %s", error)
        else:
            self._kernel_devices.add(device)

    def restore(
        self,
        segments: Sequence[_core.Segment],
        store: BackupStore,
        mapped: Callable[[int], None],
        digests: DigestRun | None,
    ) -> None:
        """Copy the backups of `segments`; returns when every byte is there. Begins their digests.

        Args:
            segments: asleep, with complete backups.
            store: has the backups.
            mapped: waits until the segment of that id is mapped.
            digests: to be started for each segment once it is complete; None for no digests.

        Raises:
            DriverError, InvalidState: what the driver or `mapped` raised; no copy is in flight.
        """
        with ExitStack() as stack:
            lanes = []
            for device in sorted({segment.device for segment in segments}):
                mine = [segment for segment in segments if segment.device == device]
                lanes.append(_Lane(mapped, digests, self._ways_to_copy(device, mine, stack)).run(_batches(mine, store)))
            for _ in zip_longest(*lanes):
                pass

    def _ways_to_copy(self, device: int, segments: Sequence[_core.Segment], stack: ExitStack) -> list[_Way]:
        kernels: list[GpuCopies] = []
        if device in self._kernel_devices and sum(segment.bytes for segment in segments) >= _WORTH_MEASURING_BYTES:
            from .copy_kernel import GpuCopies

            # Their tables must outlive the copies, so they are made, and given back, around the streams.
            kernels = [stack.enter_context(closing(GpuCopies(device, _BATCH_BYTES))) for _ in range(2)]
        streams = [stack.enter_context(_core.CopyStream(device)) for _ in range(2)]
        return [_Way(stream, kernels[place] if kernels else None) for place, stream in enumerate(streams)]


@dataclass
class _Way:
    """One of the two streams of a device, and the kernel's table for it."""

    stream: _core.CopyStream
    kernel: GpuCopies | None

    def start(self, batch: Batch, *, by_engine: bool) -> None:
        if not by_engine and self.kernel is not None:
            try:
                self.kernel.start(self.stream, batch.pieces)
                return
            except CumemSleepError:
                raise
            except Exception as error:
                logger.warning("the copy kernel failed, the copy engine takes over: %s", error)
                self.kernel = None
        for piece in batch.pieces:
            self.stream.to_device(piece.address, piece.block, piece.offset, piece.bytes)


class _Lane:
    """The copies to one device."""

    def __init__(self, mapped: Callable[[int], None], digests: DigestRun | None, ways: list[_Way]) -> None:
        self._mapped = mapped
        self._digests = digests
        self._ways = ways
        self._in_flight: list[tuple[Batch, _Way]] = []

    def run(self, batches: Iterator[Batch]) -> Iterator[None]:
        """Yields after each batch that was begun, so that several devices take turns."""
        choices = _choices() if self._ways[0].kernel else _engine_alone()
        by_engine, is_trial = next(choices)
        for number, batch in enumerate(batches):
            for segment in batch.segments:
                self._mapped(segment.id)
            if is_trial:
                self._finish(leave=0)
            start = time.perf_counter()
            way = self._ways[number % 2]
            way.start(batch, by_engine=by_engine)
            self._in_flight.append((batch, way))
            self._finish(leave=0 if is_trial else 1)
            by_engine, is_trial = choices.send(batch.bytes / (time.perf_counter() - start))
            yield
        self._finish(leave=0)

    def _finish(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            batch, way = self._in_flight[0]
            way.stream.synchronize()
            del self._in_flight[0]
            if self._digests is not None:
                self._digests.start(batch.completed)


def _choices() -> Generator[tuple[bool, bool], float, None]:
    """Whether the engine copies the next batch, and whether that is a trial: then nothing runs beside it.

    Is sent the rate of the batch before.
    """
    engine = yield True, True
    processors = yield False, True
    while engine < _ENGINE_IS_FREE * processors:
        for _ in range(_BATCHES_BETWEEN_TRIALS):
            yield False, False
        engine = yield True, True
    yield from _engine_alone()


def _engine_alone() -> Generator[tuple[bool, bool], float, None]:
    while True:
        yield True, False


def _batches(segments: Sequence[_core.Segment], store: BackupStore) -> Iterator[Batch]:
    """All bytes of `segments`, in order, in batches of `_BATCH_BYTES`."""
    batch, room = Batch(), _BATCH_BYTES
    for segment in segments:
        for piece in store.pieces(segment, at_most=_BATCH_BYTES):
            if piece.bytes > room:
                yield batch
                batch, room = Batch(), _BATCH_BYTES
            batch.pieces.append(piece)
            batch.segments.append(segment)
            room -= piece.bytes
        batch.completed.append(segment)
    if batch.pieces:
        yield batch
