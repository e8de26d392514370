"""The routes by which bytes reach a device: the copy engine, through a lane, or a kernel that reads host memory itself.

The kernel is a little slower, but twice as fast while the driver scrubs memory that this or another process has just
freed (`copy_kernel`). `pacing` chooses the route of the next batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import _core, log
from ..errors import CumemSleepError
from ..extents import Lane, Piece
from ..pinned import pinned_block
from ..tuning import Tuning
from .pacing import BestRate, Choices, choices, engine_alone

if TYPE_CHECKING:
    from .copy_kernel import GpuCopies

_TIMES_TIMED = 3
_PIECE_BYTES = 2 << 20  # pieces are usually no smaller: segments and extents are multiples of it


@dataclass
class Route:
    """One lane to a device, and the copy kernel's table for it, if both routes are available."""

    lane: Lane
    kernel: GpuCopies | None

    def start(self, pieces: Sequence[Piece], *, by_engine: bool) -> None:
        """Begin to copy these to the device; their extents are pinned (`Lane.pin`)."""
        if not by_engine and self.kernel is not None:
            try:
                self.kernel.start(self.lane.stream, pieces)
                return
            except CumemSleepError:
                raise
            except Exception as error:
                log.warning("the copy kernel failed, the copy engine takes over: %s", error)
                self.kernel = None
        for piece in pieces:
            self.lane.read(piece.address, piece.extent, piece.offset, piece.bytes)


class Routes:
    """The routes to all devices, and the best rate seen on each."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._kernel_devices: set[int] = set()
        self._best_rates: dict[int, BestRate] = {}

    def warm_up(self, device: int) -> None:
        """Compile and load the kernel for `device`; without this only the copy engine is used there.

        The kernel is not used either if kernels cannot access pinned memory by its host address.
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
        """Time both routes before the first wake, which usually comes right after a sleep, when both are slow at first.

        Either may be slow now too, because of other copies or the driver's scrubbing, so the better rate counts.
        """
        from .copy_kernel import gpu_copies

        nbytes = self._tuning.batch_bytes
        try:
            with (
                closing(_core.Scratch(device, nbytes)) as memory,
                closing(pinned_block(nbytes, device)) as block,
                gpu_copies(device, nbytes, 1) as [kernel],
                _core.CopyStream(device) as stream,
            ):
                for number in range(2 * _TIMES_TIMED):
                    start = time.perf_counter()
                    if number % 2 == 0:
                        stream.to_device(memory.address, block, 0, nbytes)
                    else:
                        kernel.start(stream, [Piece(block, 0, memory.address, nbytes)])
                    stream.synchronize()
                    self.best_rate(device).see(nbytes, time.perf_counter() - start)
        except CumemSleepError as error:  # most likely out of memory; the wakes time the routes themselves
            log.debug("copies to device %d could not be timed: %s", device, error)

    def open(
        self,
        device: int,
        lanes: Sequence[Lane],
        total_bytes: int,
        batch_bytes: int,
        pieces: int | None,
        stack: ExitStack,
    ) -> list[Route]:
        """A route for each of these lanes of `device`; `stack` frees the kernel's table.

        Args:
            total_bytes: of all copies; if they are few, only the engine is used.
            batch_bytes: the most bytes that one route copies at a time.
            pieces: the most pieces that these bytes consist of; None: the usual number.
        """
        both = device in self._kernel_devices and total_bytes >= self._tuning.worth_choosing_bytes
        if not both or not all(lane.kernels_reach for lane in lanes):
            return [Route(lane, None) for lane in lanes]
        from .copy_kernel import gpu_copies

        if pieces is None:
            pieces = batch_bytes // _PIECE_BYTES + 2
        kernels = stack.enter_context(gpu_copies(device, batch_bytes, pieces, len(lanes)))
        return [Route(lane, kernel) for lane, kernel in zip(lanes, kernels, strict=True)]

    def choices(self, device: int, routes: Sequence[Route], timed_bytes: int) -> Choices:
        """The route of each next batch (`pacing.choices`)."""
        if routes[0].kernel is None:
            return engine_alone()
        return choices(self.best_rate(device), timed_bytes, len(routes), self._tuning)

    def best_rate(self, device: int) -> BestRate:
        """The highest rate seen on the link to `device`."""
        return self._best_rates.setdefault(device, BestRate())
