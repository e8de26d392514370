"""The two that copy to a device: its copy engine, or a kernel that reads host memory itself.

`engine_or_kernel` chooses between them.

Such a kernel reaches 51 GB/s where the engine reaches 55. But while the driver scrubs memory that this or another
process has just freed, it occupies the engine for host-to-device copies and leaves them 27 GB/s; a kernel keeps 48
(measured on an H200: `wake_paths.json`). Ours is `csrc/copy_kernel.cpp`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import closing

from .. import _core
from ..core import log
from ..core.extents import Lane, Piece
from ..core.pinned import pinned_block
from ..core.tuning import Tuning
from ..errors import CumemSleepError
from .engine_or_kernel import BestRate, Pace

_TIMES_TIMED = 3


def read_pieces(pace: Pace, lane: Lane, pieces: Iterable[Piece], *, by_engine: bool) -> None:
    """Begin to copy these to the device, as `pace` chose; their extents are pinned (`Lane.pin`)."""
    for piece in pieces:
        if not lane.begin(piece.extent, piece.rows, out=False, by_kernel=not by_engine) and not by_engine:
            pace.best, by_engine = None, True


def load_kernel(device: int) -> bool:
    """Make the context, if there is none yet, and load the kernel there; returns whether it can be used.

    Not if kernels cannot access pinned memory by its host address.
    """
    try:
        _core.memory_info(device)
        if not _core.device_info(device).host_pointers:
            return False
        _core.load_copy_kernel(device)
    except Exception as error:  # whatever it is, the engine copies
        log.warning("copies go by the copy engine alone, because the copy kernel failed: %s", error)
        return False
    return True


class Copiers:
    """Who can copy to each device.

    Attributes:
        best_rates: the highest rate seen on the link to each device on which the kernel runs.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.best_rates: dict[int, BestRate] = {}

    def warm_up(self, device: int) -> None:
        """Load the kernel on `device`; without this only the copy engine is used there."""
        if load_kernel(device):
            self._time_both(device, self.best_rates.setdefault(device, BestRate()))

    def _time_both(self, device: int, best: BestRate) -> None:
        """Time both before the first wake, which usually comes right after a sleep, when both are slow at first.

        Either may be slow now too, because of other copies or the driver's scrubbing, so the better rate counts.
        """
        nbytes = self._tuning.batch_bytes
        try:
            with (
                closing(_core.Scratch(device, nbytes)) as memory,
                closing(pinned_block(nbytes, device)) as block,
                _core.CopyStream(device) as stream,
            ):
                for number in range(2 * _TIMES_TIMED):
                    start = time.perf_counter()
                    if number % 2 == 0:
                        stream.to_device(memory.address, block, 0, nbytes)
                    else:
                        stream.to_device_by_kernel(memory.address, block, 0, nbytes)
                    stream.synchronize()
                    best.see(nbytes, time.perf_counter() - start)
        except CumemSleepError as error:  # most likely out of memory; the wakes time them themselves
            log.debug("copies to device %d could not be timed: %s", device, error)

    def pace(self, device: int, lanes: Sequence[Lane], total_bytes: int, timed_bytes: int) -> Pace:
        """For copies on these lanes of `device`; where `total_bytes` are few, the engine makes all of them.

        Args:
            timed_bytes: as for `Pace`.
        """
        is_worth_it = total_bytes >= self._tuning.worth_choosing_bytes and all(lane.kernels_reach for lane in lanes)
        return Pace(self.best_rates.get(device) if is_worth_it else None, timed_bytes, len(lanes), self._tuning)
