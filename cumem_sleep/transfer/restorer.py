"""The copies of a wake: from extents to mapped segments, on all devices at once, each digested once it is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, zip_longest

from .. import _core
from ..codec.encoding import EncodedRun
from ..codec.workbench import Workbench
from ..digest.device import DigestRun
from ..extents import Piece, Transfers
from ..segments import total_bytes
from ..tuning import Tuning
from .lanes import Batches, RawCopies, SlotCopies, Together
from .routes import Routes


@dataclass(frozen=True)
class ToRestore:
    """The segments to copy back, each with where its bytes are.

    Attributes:
        raw: segments with the pieces that hold their bytes.
        encoded: segments with their encoded chunks.
    """

    raw: Sequence[tuple[_core.Segment, Sequence[Piece]]]
    encoded: Sequence[tuple[_core.Segment, Sequence[EncodedRun]]]

    @property
    def segments(self) -> list[_core.Segment]:
        """All of them."""
        return [segment for segment, _ in (*self.raw, *self.encoded)]


class Restorer:
    """Copies backups to mapped segments, by the available routes."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._routes = Routes(tuning)

    def warm_up(self, device: int) -> None:
        """Load the copy kernel on `device`; without this only the copy engine is used there."""
        self._routes.warm_up(device)

    def restore(
        self,
        backups: ToRestore,
        transfers: Transfers,
        mapped: Callable[[int], None],
        half_done: Callable[[], None],
        digests: DigestRun | None,
        workbenches: Mapping[int, Workbench],
    ) -> None:
        """Copy all of `backups`; returns when every byte has arrived. Begins their digests.

        Args:
            transfers: gives the lanes to the extents.
            mapped: waits until the segment with that id is mapped.
            half_done: called once, when half of the bytes are on their way.
            digests: started for each segment once it is complete; None for no digests.
            workbenches: by device, for backups that are compressed.

        Raises:
            DriverError, InvalidState: what the driver or `mapped` raised. Copies are in flight at most to the working
                memory of a workbench, which waits for them when it is closed.
            CodecError: a kernel failed.
        """
        with ExitStack() as stack:
            lanes: dict[int, list[Iterator[int]]] = {}  # by device: one after the other, each with the whole link
            for device in sorted({segment.device for segment, _ in backups.raw}):
                raw = [(segment, pieces) for segment, pieces in backups.raw if segment.device == device]
                lanes.setdefault(device, []).append(self._copy(device, raw, transfers, mapped, digests, stack))
            for device, workbench in workbenches.items():
                runs = [run for segment, runs in backups.encoded if segment.device == device for run in runs]
                lanes.setdefault(device, []).append(self._decode(device, runs, workbench, transfers, mapped, digests))
            half = total_bytes(backups.segments) // 2
            begun = 0
            for turn in zip_longest(*map(chain.from_iterable, lanes.values()), fillvalue=0):
                before, begun = begun, begun + sum(turn)
                if before < half <= begun:
                    half_done()

    def _copy(
        self,
        device: int,
        backups: Sequence[tuple[_core.Segment, Sequence[Piece]]],
        transfers: Transfers,
        mapped: Callable[[int], None],
        digests: DigestRun | None,
        stack: ExitStack,
    ) -> Iterator[int]:
        nbytes = total_bytes(segment for segment, _ in backups)
        batches = -(-nbytes // self._tuning.batch_bytes)
        in_flight = min(self._tuning.batches_in_flight, batches)
        streams = [stack.enter_context(_core.CopyStream(device)) for _ in range(in_flight)]
        lanes = [transfers.lane(stream) for stream in streams]
        routes = self._routes.open(device, lanes, nbytes)
        choices = self._routes.choices(device, routes, self._tuning.timed_bytes)
        begin_digests = (
            _nothing if digests is None else Together(digests.start, nbytes, self._tuning.digest_together_bytes)
        )

        def completed(segments: Sequence[_core.Segment]) -> None:
            begin_digests(segments)
            transfers.done_with(segment.address for segment in segments)

        return RawCopies(mapped, completed, routes, choices, self._tuning).run(Batches(backups))

    def _decode(
        self,
        device: int,
        runs: Sequence[EncodedRun],
        workbench: Workbench,
        transfers: Transfers,
        mapped: Callable[[int], None],
        digests: DigestRun | None,
    ) -> Iterator[int]:
        nbytes = sum(run.bytes for run in runs) if workbench.has_memory else 0
        lanes = workbench.lanes(transfers)
        routes = self._routes.open(device, lanes, nbytes)
        copies = SlotCopies(routes, self._routes.choices(device, routes, self._tuning.slots_timed_bytes))
        completed = digests.start if digests is not None else _nothing
        return workbench.decode(runs, mapped, completed, copies)


def _nothing(segments: Sequence[_core.Segment]) -> None:
    pass
