"""The bytes of a wake: copied batch by batch, by whichever way is the faster just then, digested behind the copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain, count, zip_longest
from typing import TYPE_CHECKING

from .. import _core, log
from ..backups.store import BackupStore, Piece
from ..codec.exponent import CHUNK_BYTES
from ..digest.device import DigestRun
from ..errors import CumemSleepError
from ..pinned import pinned_block

if TYPE_CHECKING:
    from ..codec.workbench import Workbench
    from .copy_kernel import GpuCopies


_BATCH_BYTES = 64 << 20
_ENGINE_BATCH_BYTES = 256 << 20  # faster than 64 MiB (benchmarks/results/wake_paths.json)
_BATCHES_IN_FLIGHT = 4  # 5 ms of work: the driver may keep us waiting for as long while it maps
_TIMES_TIMED = 3
_TIMED_BYTES = 1 << 30
_SLOTS_TIMED_BYTES = 768 << 20  # twelve of 64 MiB: a stall of ours is not to be taken for the engine's
_LEAST_TIMED_BYTES = 4 << 20  # alone: of less, most is latency
_BATCHES_BETWEEN_TRIALS = 48
_WORTH_CHOOSING_BYTES = 1 << 30
# Of the best rate seen; the engine has less than half of it while it wipes memory as well.
_ENGINE_IS_BUSY = 0.7


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


class Batches:
    """All bytes of `segments`, in order, in batches of any size."""

    def __init__(self, segments: Sequence[_core.Segment], store: BackupStore) -> None:
        # With each piece, what the batch that ends with it completes.
        self._pieces: list[tuple[_core.Segment, Piece, bool]] = []
        for segment in segments:
            pieces = list(store.pieces(segment))
            self._pieces += [(segment, piece, piece is pieces[-1]) for piece in pieces]
        self._pieces.reverse()

    def next(self, nbytes: int) -> Batch:
        """At most so many bytes; none where nothing is left."""
        batch = Batch()
        while self._pieces and nbytes > 0:
            segment, piece, is_last = self._pieces.pop()
            if piece.bytes > nbytes:
                piece, rest = piece.split(nbytes)
                self._pieces.append((segment, rest, is_last))
                is_last = False
            batch.pieces.append(piece)
            batch.segments.append(segment)
            if is_last:
                batch.completed.append(segment)
            nbytes -= piece.bytes
        return batch


class Restorer:
    """Copies backups to mapped segments.

    Some batches are in flight on each device, so that the link never waits for us. They go one of two ways: by the copy
    engine, or by a kernel that reads host memory (`copy_kernel`). The latter is a little slower, but twice as fast
    while the driver wipes memory that was just freed, by this process or another. So the engine's rate is watched.
    """

    def __init__(self) -> None:
        self._kernel_devices: set[int] = set()
        self._best_rates: dict[int, _BestRate] = {}

    def warm_up(self, device: int) -> None:
        """Compile and load the kernel for `device`; without this only the copy engine is used there.

        Nor is the kernel used where kernels do not reach pinned memory under its host address.
        """
        if not _core.device_info(device).host_pointers:
            return
        try:
            from . import copy_kernel

            copy_kernel.warm_up(device)
        except CumemSleepError:
            raise
        except Exception as error:
            log.warning("copies go by the copy engine alone, because the copy kernel failed: %s", error)
        else:
            self._kernel_devices.add(device)
            self._time_both_ways(device)

    def _time_both_ways(self, device: int) -> None:
        """Before the first wake: that comes right after a sleep as a rule, when both ways are slow at first.

        One of them may be slow now as well, beside other copies or the driver's wiping, so the better one counts.
        """
        from .copy_kernel import GpuCopies

        try:
            with (
                closing(_core.Scratch(device, _BATCH_BYTES)) as memory,
                closing(pinned_block(_BATCH_BYTES, device)) as block,
                closing(GpuCopies(device, _BATCH_BYTES // CHUNK_BYTES)) as kernel,
                _core.CopyStream(device) as stream,
            ):
                way, batch = _Way(stream, kernel), Batch([Piece(block, 0, memory.address, _BATCH_BYTES)])
                for number in range(2 * _TIMES_TIMED):
                    start = time.perf_counter()
                    way.start(batch, by_engine=number % 2 == 0)
                    stream.synchronize()
                    self._best_rate(device).see(_BATCH_BYTES, time.perf_counter() - start)
        except CumemSleepError as error:  # most likely no memory; the wakes find out by themselves
            log.debug("copies to device %d could not be timed: %s", device, error)

    def restore(
        self,
        segments: Sequence[_core.Segment],
        store: BackupStore,
        mapped: Callable[[int], None],
        half_done: Callable[[], None],
        digests: DigestRun | None,
        workbenches: Mapping[int, Workbench] | None = None,
    ) -> None:
        """Copy the backups of `segments`; returns when every byte is there. Begins their digests.

        Args:
            segments: asleep, with complete backups.
            store: has the backups.
            mapped: waits until the segment of that id is mapped.
            half_done: called once, when half of the bytes are on their way.
            digests: to be started for each segment once it is complete; None for no digests.
            workbenches: by device, for backups that are compressed.

        Raises:
            DriverError, InvalidState: what the driver or `mapped` raised; no copy is in flight.
            CodecError: a kernel failed.
        """
        raw = [segment for segment in segments if not workbenches or store.encoding_of(segment) is None]
        encoded = [segment for segment in segments if workbenches and store.encoding_of(segment) is not None]
        with ExitStack() as stack:
            lanes: dict[int, list[Iterator[int]]] = {}  # by device: one after the other, so that each has the link
            for device in sorted({segment.device for segment in raw}):
                mine = [segment for segment in raw if segment.device == device]
                ways = self._ways_to_copy(device, mine, stack)
                lane = _Lane(mapped, digests, ways, self._best_rate(device))
                lanes.setdefault(device, []).append(lane.run(Batches(mine, store)))
            for device, workbench in (workbenches or {}).items():
                mine = [segment for segment in encoded if segment.device == device]
                ways = self._ways_to_slots(device, store.stored_bytes(mine), workbench, stack)
                places = chain.from_iterable([store.places(segment) for segment in mine])
                completed = digests.start if digests is not None else _nothing
                copies = SlotCopies(ways, self._best_rate(device))
                lanes.setdefault(device, []).append(workbench.decode(places, mapped, completed, copies))
            half = sum(segment.bytes for segment in segments) // 2
            begun = 0
            for turn in zip_longest(*map(chain.from_iterable, lanes.values()), fillvalue=0):
                before, begun = begun, begun + sum(turn)
                if before < half <= begun:
                    half_done()

    def _ways_to_copy(self, device: int, segments: Sequence[_core.Segment], stack: ExitStack) -> list[_Way]:
        # Tables must outlive the copies, so they are made, and given back, around the streams.
        nbytes = sum(segment.bytes for segment in segments)
        kernels = [self._kernel(device, nbytes, _BATCH_BYTES // CHUNK_BYTES, stack) for _ in range(_BATCHES_IN_FLIGHT)]
        return [_Way(stack.enter_context(_core.CopyStream(device)), kernel) for kernel in kernels]

    def _ways_to_slots(self, device: int, nbytes: int, workbench: Workbench, stack: ExitStack) -> list[_Way]:
        if not workbench.has_memory:
            return [_Way(stream, None) for stream in workbench.streams]
        ways = [
            _Way(stream, self._kernel(device, nbytes, workbench.chunks_per_slot, stack)) for stream in workbench.streams
        ]
        for way in ways:  # after a failure its table may still be in use
            stack.callback(way.stream.synchronize)
        return ways

    def _kernel(self, device: int, nbytes: int, chunks: int, stack: ExitStack) -> GpuCopies | None:
        """For batches of so many chunks; None where only the engine is to be used, since so few bytes are copied."""
        if device not in self._kernel_devices or nbytes < _WORTH_CHOOSING_BYTES:
            return None
        from .copy_kernel import GpuCopies

        return stack.enter_context(closing(GpuCopies(device, chunks)))

    def _best_rate(self, device: int) -> _BestRate:
        return self._best_rates.setdefault(device, _BestRate())


def _nothing(segments: Sequence[_core.Segment]) -> None:
    pass


@dataclass
class _Way:
    """One of the streams of a device, and the kernel's table for it."""

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
                log.warning("the copy kernel failed, the copy engine takes over: %s", error)
                self.kernel = None
        for piece in batch.pieces:
            self.stream.to_device(piece.address, piece.block, piece.offset, piece.bytes)


class SlotCopies:
    """Copies to the slots of one device, by whichever way is the faster just then."""

    def __init__(self, ways: Sequence[_Way], best_rate: _BestRate) -> None:
        self._ways = ways
        self._choices = _choices_of(ways, best_rate, _SLOTS_TIMED_BYTES)
        self._choice = next(self._choices)

    @property
    def alone(self) -> bool:
        """The next one is to have nothing beside it, so that its time tells the rate."""
        return self._choice.alone

    def start(self, slot: int, runs: Sequence[tuple[_core.HostBlock, int, int, int]]) -> None:
        """Begin to copy (block, offset, address, bytes) in the order of this slot's stream."""
        self._ways[slot].start(Batch([Piece(*run) for run in runs]), by_engine=self._choice.by_engine)

    def took(self, nbytes: int, seconds: float) -> None:
        """How long the copy took, or, with others in flight, how long it was until the next may begin."""
        self._choice = self._choices.send((nbytes, seconds))


class _Lane:
    """The copies to one device."""

    def __init__(
        self,
        mapped: Callable[[int], None],
        digests: DigestRun | None,
        ways: list[_Way],
        best_rate: _BestRate,
    ) -> None:
        self._mapped = mapped
        self._digests = digests
        self._ways = ways
        self._choices = _choices_of(ways, best_rate, _TIMED_BYTES)
        self._in_flight: list[tuple[Batch, _Way]] = []

    def run(self, batches: Batches) -> Iterator[int]:
        """Yields after each batch that was begun, its bytes: so several devices take turns."""
        choice = next(self._choices)
        for number in count():
            _core.stop_if_asked()
            batch = batches.next(_ENGINE_BATCH_BYTES if choice.by_engine and not choice.alone else _BATCH_BYTES)
            if not batch.pieces:
                break
            start = time.perf_counter()  # before a wait for mapping: what is in flight goes on meanwhile
            for segment in batch.segments:
                self._mapped(segment.id)
            if choice.alone:
                self._finish(leave=0)
                start = time.perf_counter()
            way = self._ways[number % len(self._ways)]
            way.start(batch, by_engine=choice.by_engine)
            self._in_flight.append((batch, way))
            self._finish(leave=0 if choice.alone else len(self._ways) - 1)
            choice = self._choices.send((batch.bytes, time.perf_counter() - start))
            yield batch.bytes
        self._finish(leave=0)

    def _finish(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            _core.stop_if_asked()
            batch, way = self._in_flight[0]
            way.stream.synchronize()
            del self._in_flight[0]
            if self._digests is not None:
                self._digests.start(batch.completed)


@dataclass(frozen=True)
class _Choice:
    """How to copy the next batch.

    Attributes:
        by_engine: by the copy engine, else by the kernel.
        alone: with nothing beside it, so that its time tells the rate.
    """

    by_engine: bool
    alone: bool


@dataclass
class _BestRate:
    """The highest rate seen on a link, in bytes per second."""

    value: float = 0.0

    def see(self, nbytes: int, seconds: float) -> float:
        """Returns this rate."""
        rate = nbytes / seconds
        self.value = max(self.value, rate)
        return rate


def _choices_of(ways: Sequence[_Way], best: _BestRate, timed_bytes: int) -> Generator[_Choice, tuple[int, float], None]:
    return _choices(best, timed_bytes) if ways[0].kernel is not None else _engine_alone()


def _choices(best: _BestRate, timed_bytes: int) -> Generator[_Choice, tuple[int, float], None]:
    """What to do with each next batch; is sent the bytes and seconds of the one before.

    The engine is used until it turns out slow beside the best rate seen; then the kernel for a while, and the engine is
    tried again. Where no rate was seen yet, the kernel's is the first. Rates are the best only if nothing else was in
    flight: after a stall of ours batches that were finished meanwhile seem to take no time.

    Args:
        timed_bytes: the engine's rate is that of so many together.
    """
    if not best.value:
        yield from _rate_alone(best, by_engine=False)
    while True:
        if (yield from _rate_alone(best, by_engine=True)) >= _ENGINE_IS_BUSY * best.value:
            while (yield from _engine_for_a_while(timed_bytes, _ENGINE_IS_BUSY * best.value)):
                pass
        for _ in range(_BATCHES_BETWEEN_TRIALS):
            yield _Choice(by_engine=False, alone=False)


def _rate_alone(best: _BestRate, *, by_engine: bool) -> Generator[_Choice, tuple[int, float], float]:
    """Of the next batch that is large enough to tell."""
    while True:
        nbytes, seconds = yield _Choice(by_engine, alone=True)
        if nbytes >= _LEAST_TIMED_BYTES:
            return best.see(nbytes, seconds)


def _engine_for_a_while(timed_bytes: int, least_rate: float) -> Generator[_Choice, tuple[int, float], bool]:
    """Whether so many bytes reach the rate, not counting the first batches: they have yet to fill the queue."""
    for _ in range(_BATCHES_IN_FLIGHT):
        yield _Choice(by_engine=True, alone=False)
    nbytes, seconds = 0, 0.0
    while nbytes < timed_bytes:
        batch_bytes, batch_s = yield _Choice(by_engine=True, alone=False)
        nbytes, seconds = nbytes + batch_bytes, seconds + batch_s
        if max(nbytes, timed_bytes) < least_rate * seconds:
            return False  # whatever the rest takes
    return True


def _engine_alone() -> Generator[_Choice, tuple[int, float], None]:
    while True:
        yield _Choice(by_engine=True, alone=False)
