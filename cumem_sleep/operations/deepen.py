"""From level 1 to level 3: the CUDA state of the process leaves the GPU as well; and back, before anything else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace

from .. import _core, log
from ..checkpoint.process import THIS_PROCESS, Checkpointed, Refused
from ..errors import CumemSleepError, counted
from ..report import PhaseTimer, SleepReport


class DeepSleep:
    """Level 3 of this process.

    All but `expect`, `is_away`, `after`, `stay` and the ends are called with the lock held.
    """

    def __init__(self) -> None:
        self._checkpoint = THIS_PROCESS
        self._timer: _core.Worker | None = None

    @property
    def is_away(self) -> bool:
        """Whether the CUDA state is not on the GPU: then nothing in this process may call the driver."""
        return self._checkpoint.is_away

    @property
    def waits(self) -> bool:
        """Whether `after` has been called, and neither has `stay` since nor has its thread ended."""
        return self._timer is not None and self._timer.running

    @property
    def taken(self) -> Checkpointed | None:
        """The checkpoint, while the state is away."""
        return self._checkpoint.taken

    def expect(self) -> None:
        """Call this before `deepen`, on a thread that may run finalisers.

        It collects garbage: a finaliser that runs later might call the driver, and wait forever.
        """
        if not self.is_away:
            gc.collect()

    def deepen(self, work: Callable[[], SleepReport], unpin: Callable[[], None], ranks: int) -> SleepReport:
        """The report of `work`, a sleep at level 1, and of going on from there to level 3, or of why that cannot be.

        Args:
            unpin: unpins the backups. A checkpoint and a restore would unpin and pin them as well, and nothing could
                happen meanwhile; a wake pins each part while the one before it is copied.

        Raises:
            CheckpointFailed: the CUDA state could neither be taken nor brought back.
        """
        if not self.is_away:
            self._checkpoint.begin_helper()
        report = work()
        if self.is_away:
            return report
        timer = PhaseTimer()

        def timed_unpin() -> None:
            with timer("unpin"):
                unpin()

        try:
            _refuse_unless_possible(ranks)
            taken = self._checkpoint.take(timed_unpin, _refuse_if_awake)
        except Refused as refused:
            log.warning("level 3 is not possible, so this process stays at level 1: %s", refused)
            return replace(
                report,
                why_not_deeper=str(refused),
                seconds=report.seconds + sum(timer.phases.values()),
                phases={**report.phases, **timer.phases},
            )
        phases = {**timer.phases, **taken.seconds}
        mine = {segment.device for segment in _core.segments()}
        devices = [device for device, nbytes in taken.freed_bytes.items() if nbytes > 0 or device in mine]
        return replace(
            report,
            note="",
            left={},
            checkpointed_bytes=sum(max(0, nbytes) for nbytes in taken.freed_bytes.values()),
            left_bytes=sum(taken.total_bytes[device] - taken.free_bytes[device] for device in devices),
            seconds=report.seconds + sum(phases.values()),
            phases={**report.phases, **phases},
        )

    def come_back(self, needed_bytes: Mapping[int, int]) -> Mapping[str, float]:
        """Bring the CUDA state back to the GPU; as at level 1 from then on.

        Args:
            needed_bytes: by device, what the caller needs besides.

        Returns:
            Seconds by phase.

        Raises:
            OutOfDeviceMemory: too little memory is free for both: nothing was done.
            CheckpointFailed: the driver refused.
        """
        phases = self._checkpoint.bring_back(needed_bytes)
        log.info("cumem-sleep: back from level 3 in %.3f s, at level 1 now", sum(phases.values()))
        return phases

    def after(self, seconds: float, deepen: Callable[[], object]) -> None:
        """Call `deepen` once, on a thread of its own, when `stay` is not called for so long."""
        self.stay()
        timer = _core.Worker("cumem-deepen")

        def wait() -> None:
            if timer.pause(seconds) or self._timer is not timer:  # two calls at once: one of them counts
                return
            try:
                deepen()
            except CumemSleepError as error:
                if not timer.asked_to_stop:  # otherwise that is the reason
                    log.error("this process did not go from level 1 to level 3: %s", error)

        self._timer = timer
        try:
            timer.start(wait)
        except CumemSleepError as error:  # no thread can be started, which is no reason for the sleep to fail
            self._timer = None
            log.warning("this process does not go from level 1 to level 3 by itself: %s", error)

    def stay(self) -> None:
        """Cancel `after`. Does not wait for its thread, if that has already begun to go deeper."""
        if self._timer is not None:
            self._timer.ask_to_stop()
            self._timer = None

    def stop(self) -> None:
        """End the thread of `after`, and wait for that."""
        if self._timer is not None:
            self._timer.stop()

    def end_with_process(self) -> None:
        """At exit: let libraries use the driver again, or end the process."""
        self._checkpoint.end_with_process()


def everything_sleeps() -> bool:
    """Whether this layer has memory, none of which is on a device."""
    segments = _core.segments()
    return bool(segments) and not any(segment.has_memory for segment in segments)


def awake_in_words() -> str:
    """What of this layer's memory is on a device; "" if nothing is."""
    awake = [segment for segment in _core.segments() if segment.has_memory]
    tags = sorted({segment.tag for segment in awake})
    return f"{counted(len(awake), 'segment')} (tags {', '.join(tags)}) still have device memory" if awake else ""


def why_not_for_ranks(ranks: int) -> str:
    """Why one of so many ranks stays at level 1; "" for a process that has no others."""
    if ranks == 1:
        return ""
    return f"this process is one of {ranks} ranks, whose CUDA state the driver does not restore"


def _refuse_unless_possible(ranks: int) -> None:
    if why := why_not_for_ranks(ranks):
        raise Refused(why)
    if not _core.can_checkpoint():
        raise Refused("the driver cannot checkpoint processes: driver 570 or newer (CUDA 12.8) is needed")
    _refuse_if_awake()
    if _core.reclaim():  # at level 3 nobody could try again
        raise Refused("the driver refuses to release unused memory: see the driver's log")


def _refuse_if_awake() -> None:
    """Other threads may allocate until driver calls are suspended."""
    if awake := awake_in_words():
        raise Refused(awake)
