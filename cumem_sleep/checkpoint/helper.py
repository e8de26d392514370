"""The helper of a process that sleeps at level 3, which calls `main` in it (`process.py`).

While the CUDA state of a process is checkpointed, whatever in it calls the driver waits until another process restores
it. This is the other process. It has no CUDA context, so it takes no memory of a GPU. Its standard input is a socket
that carries requests and answers, one pickled dictionary in each packet. It ends with the process it serves.
"""

from __future__ import annotations

import os
import pickle
import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from .. import _core
from ..core.commitment import Commitment, left_bytes
from ..errors import CumemSleepError, DriverError, format_bytes
from ..report import PhaseTimer
from .device_memory import free_bytes, used_bytes

_State = _core.ProcessState
# What a checkpointed process keeps on a GPU. It may have had less there.
_KEPT_BYTES = 4 << 20
# What a process may have on a GPU that NVML does not count as its own: 9 MiB of an idle one, 130 MiB, mostly page
# tables, of one that had registered 66 GiB of host memory (`checkpoint_behaviour.json`, `vault.json`).
_UNCOUNTED_BYTES = 256 << 20
# A context, where nothing is counted: 522 to 683 MiB were seen.
_CONTEXT_BYTES = 1 << 30
# Restores succeeded with so much more than free memory had grown by; with less, nobody has tried.
_SLACK_BYTES = 4 << 20
_MARGINS = (_UNCOUNTED_BYTES, _CONTEXT_BYTES, _SLACK_BYTES)
_LIMITS = {"cgroup": "the cgroup", "MemAvailable": "the system (MemAvailable)"}
_SOCKET = 0  # standard input
MESSAGE_BYTES = 1 << 17  # the most of one packet


class Target:
    """The process that is checkpointed and restored. Every method goes by the state in which CUDA says it is.

    Args:
        pid: its number.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._timer = PhaseTimer()

    def checkpoint(self, lock_timeout_s: float, uuids: Sequence[str], in_use: Sequence[str]) -> dict[str, Any]:
        """Lock it and take its CUDA state off these GPUs; if that fails, unlock it again.

        Args:
            in_use: on which of them it surely has a context.

        Returns:
            By GPU, by how many bytes free memory grew (`freed_bytes`), how many must be free for a restore
            (`needed_bytes`), and how many are free now (`free_bytes`).
        """
        commitment, needed_bytes = Commitment(), sum(used_bytes(self._pid, uuids).values())
        commitment.take(needed_bytes, partial(_require_host_memory, needed_bytes))
        try:
            return self._checkpoint(lock_timeout_s, uuids, in_use)
        finally:
            commitment.set(0)

    def _checkpoint(self, lock_timeout_s: float, uuids: Sequence[str], in_use: Sequence[str]) -> dict[str, Any]:
        with self._timer("lock"):
            _core.lock_process(self._pid, lock_timeout_s)
        try:
            # As late as can be: what other processes take or give back until `after` is counted, too.
            before, used = free_bytes(self._pid, uuids), used_bytes(self._pid, uuids)
            with self._timer("checkpoint"):
                _core.checkpoint_process(self._pid)
        except (DriverError, OSError):
            if _core.process_state(self._pid) == _State.LOCKED:
                _core.unlock_process(self._pid)
            raise
        try:
            after = free_bytes(self._pid, uuids)
        except OSError:  # to restore it without knowing what is free would be worse than not to know what it freed
            after = before
        kept = used_bytes(self._pid, uuids)
        grown = {uuid: after[uuid] - before[uuid] for uuid in uuids}
        counted = {uuid: nbytes - kept.get(uuid, 0) for uuid, nbytes in used.items()}
        return {
            "freed_bytes": {uuid: max(-_KEPT_BYTES, nbytes) for uuid, nbytes in grown.items()},
            "needed_bytes": {uuid: _needed_bytes(grown[uuid], counted.get(uuid, 0), uuid in in_use) for uuid in uuids},
            "free_bytes": after,
        }

    def restore(self, needed_bytes: Mapping[str, int]) -> dict[str, Any]:
        """Bring its CUDA state back and unlock it; whichever of that has been done already is not done again.

        Args:
            needed_bytes: by GPU, what must be free for that. After a restore fails for want of memory, every later one
                fails too.

        Returns:
            If less is (`too_little`), what is needed and what is free on those GPUs; nothing was done then.
        """
        if _core.process_state(self._pid) == _State.CHECKPOINTED:
            free = free_bytes(self._pid, list(needed_bytes))
            if short := {uuid: (needed, free[uuid]) for uuid, needed in needed_bytes.items() if needed > free[uuid]}:
                return {"too_little": short}
            with self._timer("restore"):
                _core.restore_process(self._pid)
        if _core.process_state(self._pid) == _State.LOCKED:
            with self._timer("unlock"):
                _core.unlock_process(self._pid)
        return {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what one request says, and describe what came of it."""
        self._timer = PhaseTimer()
        arguments = dict(request)
        try:
            answer: dict[str, Any] = getattr(self, arguments.pop("do"))(**arguments)  # `checkpoint` or `restore`
        except (CumemSleepError, OSError) as error:
            answer = {"error": error}
        return {**answer, "seconds": self._timer.phases, "state": self.state()}

    def state(self) -> str:
        """As CUDA tells it, such as `RUNNING`; in words, if it does not."""
        try:
            return _core.process_state(self._pid).name
        except (CumemSleepError, OSError) as error:
            return f"not known ({error})"


def _require_host_memory(needed_bytes: int, committed: Mapping[Path, int] | None = None) -> None:
    """Before anything is changed: after a checkpoint that found too little, half of the processes crashed later.

    Args:
        needed_bytes: what the process has on its GPUs, which a checkpoint copies; 0 where nobody counts it.
        committed: by others (`core.commitment`).

    Raises:
        OSError: a limit of the system, or of the cgroup that this process shares with it, leaves less.
    """
    for limit, left in left_bytes(needed_bytes, committed).items():
        if left < needed_bytes:
            raise OSError(
                f"a checkpoint copies {format_bytes(needed_bytes)} to host memory, and {_LIMITS[limit]} leaves"
                f" {format_bytes(max(0, left))}"
            )


def _needed_bytes(grown_bytes: int, counted_bytes: int, in_use: bool) -> int:
    """What must be free for a restore. Errs on the high side, see `Target.restore`.

    Args:
        grown_bytes: by how much free memory grew: too little where other processes took some meanwhile.
        counted_bytes: how much less the process has now, as far as that is counted; 0 if nobody counts it.
        in_use: whether it surely has a context there.
    """
    uncounted, context, slack = _MARGINS
    if _core.driver_is_simulated():  # whose account is exact
        uncounted, context, slack = 0, -_KEPT_BYTES, 0
    uncertain = context if in_use else -_KEPT_BYTES
    least = counted_bytes + uncounted if counted_bytes > 0 else uncertain
    return max(least, grown_bytes + slack, -_KEPT_BYTES)


def main(pid: int, driver: str) -> None:
    """Answer requests until nobody can make any."""
    target = Target(pid)
    with suppress(BrokenPipeError, ConnectionResetError):  # the process has ended meanwhile
        try:
            _core.open_driver(driver)
        except CumemSleepError as error:
            _send({"error": error, "state": "not known"})
            return
        _send({"is_ready": True, "state": target.state()})
        for request in _requests(pid):
            _send(target.answer(pickle.loads(request)))


def _send(answer: Mapping[str, Any]) -> None:
    os.write(_SOCKET, pickle.dumps(answer))


def _requests(pid: int) -> Iterator[bytes]:
    """Those of the process, while it lives; a child of it may keep the socket open."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(_SOCKET, select.POLLIN)
    while process not in [file for file, _ in poll.poll()] and (request := os.read(_SOCKET, MESSAGE_BYTES)):
        yield request
