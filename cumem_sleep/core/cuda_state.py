"""`CudaState`: the CUDA state of this process, which is on the GPU while anybody holds a lease of it.

Whoever calls the driver holds one. To take it brings the process back from level 3; while it is held nothing goes
deeper; and when the last one ends, the time until level 3 is counted anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from .. import _core
from ..errors import CumemSleepError
from . import log
from .segments import everything_sleeps


class CudaState:
    """The leases of one allocator.

    Args:
        lock: the allocator's. Whoever has it, and is not at level 3, needs no lease: to go deeper takes the lock.
        bring_back: returns the state to the GPU if it is not there, and says how long that took, by phase. It is called
            with the lock held, and with what else must be free then, in bytes by device.
        checkpoint: goes from level 1 or 2 to level 3.
        deep_after_s: how long after the last lease that is called, if everything sleeps; None: never.

    Attributes:
        why_not: why this process does not leave level 1 or 2, or "".
        successor: of the allocator that has taken this one's place, while leases of this one may not have ended.
    """

    def __init__(
        self,
        lock: _core.OperationLock,
        bring_back: Callable[[Mapping[int, int]], Mapping[str, float]],
        checkpoint: Callable[[], object],
        deep_after_s: float | None,
    ) -> None:
        self._lock = lock
        self._bring_back = bring_back
        self._checkpoint = checkpoint
        self._deep_after_s = deep_after_s
        self._timer: _core.Worker | None = None
        self.why_not = ""
        self.successor: CudaState | None = None

    @property
    def may_checkpoint(self) -> bool:
        """Whether the process is at level 3, or goes there by itself at some time."""
        return _core.driver_calls_suspended() or ((timer := self._timer) is not None and timer.running)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Put this around calls of the driver, this layer's or others'; without the lock.

        Raises:
            OutOfDeviceMemory, CheckpointFailed: the state cannot come back; nothing was called.
            InvalidState: this process is a fork of one at level 3.
        """
        try:
            self.stop_timer()
            while True:
                with _core.DriverCalls(is_lease=True) as allowed:
                    if allowed:
                        yield
                        return
                if _core.driver_is_forked():
                    _core.device_count()  # raises, and says why
                # It may go deeper again before the next look.
                log.run(self._lock, partial(self.come_back, {}), holding=True)
        finally:
            if self._deep_after_s is not None or self.successor is not None:
                self.start_timer()

    def come_back(self, needed_bytes: Mapping[int, int]) -> Mapping[str, float]:
        """With the lock held: from level 3, if the process is there, to level 1.

        Args:
            needed_bytes: by device, what the caller needs besides.

        Returns:
            Seconds by phase.

        Raises:
            OutOfDeviceMemory: too little memory is free for both: nothing was done.
            CheckpointFailed: the driver refused.
        """
        phases = self._bring_back(needed_bytes)
        if phases:
            log.info("cumem-sleep: back from level 3 in %.3f s, at level 1 now", sum(phases.values()))
        return phases

    def start_timer(self) -> None:
        """Count from now on, if everything sleeps and there is no lease: `checkpoint` is called once, on a thread."""
        if self.successor is not None:
            return self.successor.start_timer()
        self.stop_timer()
        seconds = self._deep_after_s
        is_used = _core.driver_is_leased() or _core.driver_calls_suspended() or _core.driver_is_forked()
        if seconds is None or is_used or not everything_sleeps():
            return
        if self.why_not:
            log.warning("this process does not go deeper than this level by itself: %s", self.why_not)
            return
        timer = self._timer = _core.Worker("cumem-level-3")

        def wait() -> None:
            if timer.pause(seconds) or self._timer is not timer or _core.driver_is_leased():  # who counts again
                return
            try:
                self._checkpoint()
            except CumemSleepError as error:
                if not timer.asked_to_stop:  # otherwise that is the reason
                    log.error("this process did not go from level 1 to level 3: %s", error)

        try:
            timer.start(wait)
        except CumemSleepError as error:  # no thread can be started, which is no reason for the sleep to fail
            log.warning("this process does not go from level 1 to level 3 by itself: %s", error)

    def stop_timer(self) -> None:
        """An operation does so when it begins. Does not wait for the thread, if that has already begun to go deeper."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.ask_to_stop()

    def stop(self) -> None:
        """End the thread that counts, and wait for that."""
        if (timer := self._timer) is not None:
            timer.stop()
