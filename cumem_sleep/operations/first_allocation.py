"""After a sleep: a thread makes the first allocation, which takes the driver long, so that no wake has to."""

from __future__ import annotations

from .. import _core
from ..backups.turns import Turns
from ..core import log
from ..core.segments import by_device, everything_sleeps
from ..core.tuning import Tuning
from ..errors import CumemSleepError

_BYTES = 2 << 20  # the least that the driver allocates


class FirstAllocation:
    """The first allocation on each device after memory was freed there.

    The driver scrubs freed memory by itself, but the first allocation after that takes 0.2 to 0.3 ms for each freed
    gibibyte, however small it is (`later_wakes.json`).

    Args:
        turns: the thread holds the lock meanwhile, which it never waits for, so that no wake finds this memory taken.
    """

    def __init__(self, turns: Turns, tuning: Tuning) -> None:
        self._turns = turns
        self._tuning = tuning
        self._worker: _core.Worker | None = None

    def after(self, freed_bytes: int) -> None:
        """A sleep has freed this much: make that allocation soon, if it is worth it and all is asleep still."""
        if freed_bytes < self._tuning.first_allocation_least_bytes:
            return
        if self._worker is not None:
            self._worker.ask_to_stop()
        worker = self._worker = _core.Worker("cumem-allocate")
        try:
            worker.start(lambda: self._run(worker))
        except CumemSleepError as error:  # no thread can be started
            log.info("the next wake makes the first allocation itself: %s", error)

    def stop(self) -> None:
        """Make none, and wait for one that has begun."""
        if self._worker is not None:
            self._worker.stop()

    def _run(self, worker: _core.Worker) -> None:
        pause_s = self._tuning.first_allocation_after_s
        refused: dict[int, CumemSleepError] = {}
        is_over = False
        while not is_over and not worker.pause(pause_s):
            pause_s = self._tuning.first_allocation_retry_s
            with self._turns.if_free() as is_held:
                is_over = is_held
                # Beside memory that is awake something may run, which should not wait for this.
                may = is_held and not _core.driver_calls_suspended() and everything_sleeps()
                devices = by_device(_core.segments()) if may else ()
                for device in devices:
                    if not worker.asked_to_stop:
                        try:
                            self._allocate(device)
                        except CumemSleepError as error:
                            refused[device] = error
        for device, why in refused.items():  # without the lock, for which whoever logs may wait
            log.info("the next wake makes the first allocation on device %d itself: %s", device, why)

    def _allocate(self, device: int) -> None:
        with _core.RelaxedCapture():
            # Otherwise others have probably taken the memory since, and made that allocation. They may need the rest.
            if _core.memory_info(device)[0] >= self._tuning.first_allocation_least_bytes:
                _core.Scratch(device, _BYTES).close()
