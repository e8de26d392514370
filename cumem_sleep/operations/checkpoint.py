"""From level 1 or 2 to level 3: the CUDA state of the process leaves the GPU as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .. import _core
from ..backups.memory import BackupStore
from ..checkpoint.process import THIS_PROCESS, CheckpointRefused
from ..core import log
from ..core.segments import awake_in_words
from ..report import PhaseTimer, SleepReport


def checkpoint(store: BackupStore, sleep_first: Callable[[], SleepReport], why_not: str) -> SleepReport:
    """The report of `sleep_first`, and of going on from there to level 3, or of why that cannot be.

    The backups are unpinned. A checkpoint and a restore would unpin and pin them as well, and nothing could happen
    meanwhile; a wake pins each part while the one before it is copied.

    Args:
        why_not: why this process stays at its level, or "".

    Raises:
        CheckpointFailed: the CUDA state could neither be taken nor brought back.
    """
    if not why_not and not _core.driver_calls_suspended():
        THIS_PROCESS.begin_helper()
    report = sleep_first()
    if _core.driver_calls_suspended():
        return report
    store.memory.settle()  # host memory that is not needed goes back: at level 3 that is impossible
    timer = PhaseTimer()

    def unpin() -> None:
        with timer("unpin"):
            store.memory.unpin()

    try:
        _refuse_unless_possible(why_not)
        taken = THIS_PROCESS.take(unpin, _refuse_if_awake)
    except CheckpointRefused as refused:
        log.warning("level 3 is not possible, so this process stays at level 1: %s", refused)
        report, phases = replace(report, why_not_deeper=str(refused)), timer.phases
    else:
        phases = {**timer.phases, **taken.seconds}
        mine = {segment.device for segment in _core.segments()}
        devices = [device for device, nbytes in taken.freed_bytes.items() if nbytes > 0 or device in mine]
        report = replace(
            report,
            note="",
            left={},
            checkpointed_bytes=sum(max(0, nbytes) for nbytes in taken.freed_bytes.values()),
            left_bytes=sum(taken.total_bytes[device] - taken.free_bytes[device] for device in devices),
        )
    return replace(report, seconds=report.seconds + sum(phases.values()), phases={**report.phases, **phases})


def why_not_for_ranks(ranks: int) -> str:
    """Why one of so many ranks stays at level 1; "" for a process that has no others."""
    if ranks == 1:
        return ""
    return f"this process is one of {ranks} ranks, whose CUDA state the driver does not restore"


def _refuse_unless_possible(why_not: str) -> None:
    if why_not:
        raise CheckpointRefused(why_not)
    if not _core.can_checkpoint():
        raise CheckpointRefused("the driver cannot checkpoint processes: driver 570 or newer (CUDA 12.8) is needed")
    _refuse_if_awake()
    if _core.reclaim():  # at level 3 nobody could try again
        raise CheckpointRefused("the driver refuses to release unused memory: see the driver's log")


def _refuse_if_awake() -> None:
    """Other threads may allocate until driver calls are suspended."""
    if awake := awake_in_words():
        raise CheckpointRefused(awake)
