"""Level 3: whether the CUDA state of a process can leave the GPU here, as far as that can be known without trying."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ... import _core
from ...checkpoint.device_memory import free_bytes
from ...checkpoint.process import CheckpointRefused, danger, examine
from ...errors import CumemSleepError, InvalidState, format_bytes
from .report import Check, CheckStatus

OLDEST_CUDA = 12080
"""As in csrc/checkpoint.cpp: CUDA 12.8."""


def calls() -> Check:
    """Whether the driver is new enough, and has the calls."""
    name = "level 3"
    version = _core.driver_version()
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if version < OLDEST_CUDA:
        advice = "update the NVIDIA driver to 570 or newer; until then a sleep at level 3 stays at level 1"
        return Check(name, CheckStatus.WARN, f"not possible: CUDA 12.8 is needed, the driver has {cuda}", advice)
    if not _core.can_checkpoint():
        advice = "is libcuda.so.1 of another, older driver? A sleep at level 3 stays at level 1"
        return Check(name, CheckStatus.WARN, f"not possible: the driver ({cuda}) lacks the checkpoint calls", advice)
    if why := danger():
        return Check(name, CheckStatus.WARN, f"not possible: {why}", "until then a sleep at level 3 stays at level 1")
    return Check(name, CheckStatus.OK, f"the driver ({cuda}) has the checkpoint calls")


def helper() -> Check:
    """Whether the helper process can be started, and CUDA lets it ask about this one."""
    name = "level 3 helper"
    try:
        state = examine()
    except CheckpointRefused as refused:
        advice = "look at what it wrote to standard error; until it starts, a sleep at level 3 stays at level 1"
        return Check(name, CheckStatus.WARN, str(refused), advice)
    if state == "RUNNING":
        text = "it starts, and CUDA lets it ask about this process; only a sleep shows whether it may checkpoint it"
        return Check(name, CheckStatus.OK, text)
    advice = "does a container, or a security module, forbid that one process looks at another of the same user?"
    return Check(name, CheckStatus.WARN, f"it starts, but the state of this process is {state}", advice)


def free_memory(devices: Sequence[int]) -> Check:
    """Whether the free memory of these GPUs can be asked for without CUDA, which a restore does before it begins."""
    name = "level 3 memory"
    source = "the simulated driver" if _core.driver_is_simulated() else "NVML"
    free, troubles = [], []
    for device in devices:
        uuid = _core.device_info(device).uuid
        try:
            free.append(f"GPU {device}: {format_bytes(free_bytes(os.getpid(), [uuid])[uuid])}")
        except (CumemSleepError, OSError) as error:
            troubles.append(f"GPU {device}: {error}")
    if troubles:
        advice = "a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility; until then a sleep stays at level 1"
        return Check(name, CheckStatus.WARN, f"{source} does not say what is free: {'; '.join(troubles)}", advice)
    return Check(name, CheckStatus.OK, f"{source} says what is free: {', '.join(free)}")


def refuse_unless_possible(device: int) -> None:
    """
    Raises:
        InvalidState: a sleep at level 3 would stay at level 1; the message says why, and what to do.
    """
    looks: tuple[Callable[[], Check], ...] = (calls, helper, lambda: free_memory([device]))
    for look in looks:
        check = look()
        if check.status is not CheckStatus.OK:
            raise InvalidState(f"{check.name}: {check.found}: {check.advice}")
