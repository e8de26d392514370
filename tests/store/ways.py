"""The ways of copying a batch, and how long each is kept."""

from __future__ import annotations

from cumem_sleep import CuMemAllocator
from cumem_sleep.core.copy_chooser import CopyChoice
from cumem_sleep.core.extents import LaneGroup

KERNEL, KERNEL_ALONE = CopyChoice(by_engine=False, alone=False), CopyChoice(by_engine=False, alone=True)
ENGINE, ENGINE_ALONE = CopyChoice(by_engine=True, alone=False), CopyChoice(by_engine=True, alone=True)
ENGINE_AGAIN = CopyChoice(by_engine=True, alone=True, again=True)
TRIALS = [ENGINE_ALONE, ENGINE_AGAIN]  # of an engine that is fast

# Between two looks at the engine's rate, and until the engine is tried again.
BATCHES_TIMED = 4
ENGINE_FOR_A_WHILE = [ENGINE] * (LaneGroup.most_lanes + BATCHES_TIMED)
ENGINE_UNTIL_IT_IS_BUSY = [ENGINE] * (LaneGroup.most_lanes + 3)  # at 22 GB/s: the fourth could not mend it
KERNEL_FOR_A_WHILE = [KERNEL] * CuMemAllocator.tuning.batches_between_trials
FREE, FAST_KERNEL, BUSY = 55.0, 51.0, 22.0  # GB/s
