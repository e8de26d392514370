"""The checkpoint of this process's own CUDA state: taken and brought back by a helper process."""

from __future__ import annotations

import logging
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .. import _core, host_facts
from ..errors import CheckpointFailed, CumemSleepError, InvalidState, OutOfDeviceMemory
from .helper import MESSAGE_BYTES

# What driver 580 says of a restore without enough memory, and of every one after that
# (`checkpoint_behaviour.json`).
_RAN_OUT, _AFTER_THAT = "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_OPERATING_SYSTEM"
# What a checkpoint does with some drivers, from NVIDIA/cuda-checkpoint's issues 53 and 58.
DANGEROUS_DRIVERS = {
    "595.71.05": "killing a process that was once restored hangs the host",
    "610.57.04": "locking a process for a checkpoint ends it with SIGSEGV",
}
# Not `-m`, which looks for modules in the current directory first; and what the program has added to `sys.path` counts.
_HELPER = """\
import sys
sys.path[:] = sys.argv[3:]
from cumem_sleep.checkpoint.helper import main
main(int(sys.argv[1]), sys.argv[2])
"""


@dataclass(slots=True)
class Deadlines:
    """How long is waited for others. Nobody has to set them; tests make them short.

    Attributes:
        calls_end_s: for calls of this process to leave the driver. Not long: one of them may wait for the operation
            that waits here, and other calls fail meanwhile.
        lock_s: for work on the GPU, and calls of other libraries.
        answer_s: for an answer of the helper. A checkpoint copies everything that is left, and writes down what others
            have pinned in this process.
    """

    calls_end_s: float = 2.0
    lock_s: float = 10.0
    answer_s: float = 180.0


class CheckpointRefused(Exception):
    """The CUDA state stays on the GPU, and works as before; the argument says why."""


@dataclass(frozen=True)
class Checkpointed:
    """What a checkpoint did.

    Attributes:
        freed_bytes: by device, by how much its free memory grew: what the CUDA state took there, unless other processes
            took or gave back some meanwhile. Negative, by up to 4 MiB, where it had less than that.
        needed_bytes: by device, what must be free to bring it back.
        free_bytes: by device, what was free after it.
        total_bytes: by device.
        seconds: by phase: `lock`, `checkpoint`.
    """

    freed_bytes: Mapping[int, int]
    needed_bytes: Mapping[int, int]
    free_bytes: Mapping[int, int]
    total_bytes: Mapping[int, int]
    seconds: Mapping[str, float]


def danger() -> str:
    """Why no checkpoint must be taken with this driver; "" if nothing is known against it."""
    version = host_facts.nvidia_driver()
    if version is None or version not in DANGEROUS_DRIVERS or _core.driver_is_simulated():
        return ""
    return f"with NVIDIA driver {version}, {DANGEROUS_DRIVERS[version]}: use another one"


def examine() -> str:
    """In which state CUDA tells a helper that this process is, such as `RUNNING`; in words, if it does not tell that.

    Raises:
        CheckpointRefused: the helper cannot be started, or cannot use the driver.
    """
    helper = _Helper(Deadlines())
    try:
        return helper.wait_until_ready().state
    finally:
        helper.end()


class ProcessCheckpoint:
    """Whether the CUDA state of this process is on the GPU. Any thread may call its methods; they take turns.

    They are called on threads that run no signal handlers: such a handler may call them as well, and would wait for
    itself.

    Attributes:
        taken: the last checkpoint, while it has not been brought back.
        stays: from now on the state stays on the GPU, because this process ends.
        deadlines: how long its calls may wait.
    """

    def __init__(self) -> None:
        self.taken: Checkpointed | None = None
        self._lock = threading.RLock()
        self.stays = False
        self.deadlines = Deadlines()
        self._uuids: dict[int, str] = {}  # by device
        self._helper: _Helper | None = None
        self._ran_out = False  # a restore of this checkpoint had too little memory

    def begin_helper(self) -> None:
        """Start the helper, if there is none, and do not wait until it is ready."""
        with self._lock, suppress(_HelperLost):
            self._started_helper()

    def take(self, unpin: Callable[[], None], last_check: Callable[[], None]) -> Checkpointed:
        """Take the CUDA state off the GPU. From then on all driver calls of this layer fail at once.

        Args:
            unpin: called when only other threads, and the driver, can still prevent that. It may call the driver, and
                wait for the GPU, on which no work runs then.
            last_check: called when they do, and before anything else; it may raise `CheckpointRefused`.

        Raises:
            CheckpointRefused: it cannot be; all is as before.
            CheckpointFailed: it can neither be taken nor brought back.
        """
        with self._lock:
            if why := "this process ends" if self.stays else danger():
                raise CheckpointRefused(why)
            devices = {device: _core.device_info(device) for device in range(_core.device_count())}
            self._uuids = {device: info.uuid for device, info in devices.items()}
            helper = self._started_helper().wait_until_ready()
            self._wait_for_work()
            unpin()
            if not _core.suspend_driver_calls(self.deadlines.calls_end_s):
                raise CheckpointRefused(
                    f"CUDA was in use for longer than {self.deadlines.calls_end_s:.0f} s: by calls of other threads of"
                    " this process, or by a block of using_cuda(), or of a memory pool or region, that has not ended"
                )
            try:
                last_check()
            except CheckpointRefused:
                _core.resume_driver_calls()
                raise
            answer = self._checkpointed(helper)
            self._ran_out = False
            freed, needed, free = (
                {device: answer[what][uuid] for device, uuid in self._uuids.items()}
                for what in ("freed_bytes", "needed_bytes", "free_bytes")
            )
            total = {device: info.total_bytes for device, info in devices.items()}
            self.taken = Checkpointed(freed, needed, free, total, answer["seconds"])
            return self.taken

    def _checkpointed(self, helper: _Helper) -> dict[str, Any]:
        """The helper's answer. If it refuses, driver calls are let through again.

        Raises:
            CheckpointRefused, CheckpointFailed: as `take`.
        """
        in_use = sorted({self._uuids[segment.device] for segment in _core.segments()})
        request = {"lock_timeout_s": self.deadlines.lock_s, "uuids": list(self._uuids.values()), "in_use": in_use}
        try:
            answer = helper.ask({"do": "checkpoint", **request})
        except _HelperLost as error:
            answer = {"error": error, "state": "not known"}
        if answer["state"] == "CHECKPOINTED" and "freed_bytes" in answer:
            return answer
        refusal = answer.get("error", "")
        # Where the lock was refused, somebody else has it, and is to give it back.
        if answer["state"] != "RUNNING" and getattr(refusal, "call", "") != "cuCheckpointProcessLock":
            self._bring_back({}, f"a checkpoint that failed ({refusal})")
        _core.resume_driver_calls()
        raise CheckpointRefused(str(refusal))

    def _wait_for_work(self) -> None:
        """Wait for what runs on the GPUs, as the lock will, and not longer.

        CUDA has no call for this that ends by itself. So a thread makes it, and is left behind if that takes too long.

        Raises:
            CheckpointRefused: it took too long, or the driver or the system refused.
        """
        errors: list[CumemSleepError] = []

        def wait() -> None:
            try:
                for device in sorted({segment.device for segment in _core.segments()}):
                    _core.wait_for_running_work(device)
                    _core.release_waiter(device)
            except CumemSleepError as error:
                errors.append(error)

        worker = _core.Worker("cumem-wait")
        try:
            worker.start(wait)
        except InvalidState as error:  # at a limit, or Python is exiting
            raise CheckpointRefused(f"work on the GPU cannot be waited for: {error}") from None
        if not worker.wait(self.deadlines.lock_s):
            raise CheckpointRefused(f"work on the GPU did not end within {self.deadlines.lock_s:.0f} s")
        if errors:
            raise CheckpointRefused(str(errors[0]))

    def bring_back(self, also_needed_bytes: Mapping[int, int]) -> Mapping[str, float]:
        """Put the CUDA state on the GPU again, and let driver calls through.

        Args:
            also_needed_bytes: by device, what else has to be free there. If it is not, nothing is restored.

        Returns:
            Seconds by phase: `restore`, `unlock`.

        Raises:
            OutOfDeviceMemory: too little is free. All is as before, and this can be tried again.
            CheckpointFailed: the driver refused; it says whether trying again makes sense.
        """
        with self._lock:
            if not _core.driver_calls_suspended():
                return {}
            own_bytes = {} if self.taken is None else self.taken.needed_bytes
            needed = {
                uuid: own_bytes.get(device, 0) + also_needed_bytes.get(device, 0)
                for device, uuid in self._uuids.items()
            }
            seconds = self._bring_back(needed, "level 3")
            self.taken = None
            _core.resume_driver_calls()
            return seconds

    def _bring_back(self, needed_bytes: Mapping[str, int], what: str) -> Mapping[str, float]:
        """Ask a helper, and if that one is lost a new one, to restore and unlock."""
        answer: dict[str, Any] = {}
        one_was_lost = False  # and could not say what it had heard
        for _ in range(2):
            try:
                answer = self._started_helper().wait_until_ready().ask({"do": "restore", "needed_bytes": needed_bytes})
                break
            except _HelperLost as error:
                one_was_lost = True
                answer = {"error": error, "state": "not known"}
        if answer["state"] == "RUNNING":
            seconds: Mapping[str, float] = answer["seconds"]
            return seconds
        if short := answer.get("too_little"):
            device, (needed, free) = next((d, short[uuid]) for d, uuid in self._uuids.items() if uuid in short)
            raise OutOfDeviceMemory(needed, free, device, "cuCheckpointProcessRestore")
        refusal = answer.get("error", "")
        failed = refusal.error if getattr(refusal, "call", "") == "cuCheckpointProcessRestore" else ""
        self._ran_out |= failed == _RAN_OUT or (failed == _AFTER_THAT and one_was_lost)
        lost = self._ran_out and failed in (_RAN_OUT, _AFTER_THAT)
        raise CheckpointFailed(what, str(refusal), answer["state"], lost)

    def end_with_process(self) -> None:
        """At exit: bring the state back, so that libraries can let go of it; where that fails, end the process at once.

        Otherwise their calls into the driver would wait for ever. Other threads may be on the way there or back.
        """
        with self._lock:
            try:
                self.bring_back({})
            except CumemSleepError as error:
                _end_at_once(f"its CUDA state did not come back: {error}")
            self._end_helper()

    def _started_helper(self) -> _Helper:
        if self._helper is None or not self._helper.runs():
            self._end_helper()
            self._helper = _Helper(self.deadlines)
        return self._helper

    def _end_helper(self) -> None:
        if self._helper is not None:
            self._helper.end()
            self._helper = None


def _end_at_once(why: str) -> None:
    """Not through `sys.exit`: libraries call CUDA on that way."""
    logging.getLogger("cumem_sleep").error("this process ends at once, because %s", why)  # nobody logs it later
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be None, closed, or a pipe that nobody reads
            stream.flush()
    os._exit(1)


# There is one CUDA state, whichever allocator asks.
THIS_PROCESS = ProcessCheckpoint()


class _HelperLost(CheckpointRefused):
    """The helper could not be started, has ended, or does not answer; the argument says which."""


class _Helper:
    """The other process (`helper.py`), and how to ask it.

    Raises:
        _HelperLost: it cannot be started.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._owner = os.getpid()
        self.state = ""  # of this process, once the helper is ready
        if not sys.executable:
            raise _HelperLost("the helper process cannot be started: sys.executable names no Python")
        command = [sys.executable, "-c", _HELPER, str(self._owner), str(_core.driver_path()), *_module_path()]
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:  # a session of its own, so that a Ctrl-C for this process does not end it
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
                )
        except OSError as error:
            raise _HelperLost(f"the helper process cannot be started: {error}") from None

    def runs(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def wait_until_ready(self) -> _Helper:
        if not self.state:
            answer = self._answer()
            if "is_ready" not in answer:
                raise _HelperLost(f"the helper process cannot use the driver: {answer['error']}")
            self.state = answer["state"]
        return self

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._socket.send(pickle.dumps(request))
        except OSError as error:
            self.end()
            raise _HelperLost(f"the helper process has ended ({error})") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next answer that it sends. An interrupt does not end the wait: what was begun has to be finished."""
        self._socket.settimeout(self._deadlines.answer_s)
        why = "has ended"
        try:
            if content := self._socket.recv(MESSAGE_BYTES):
                answer: dict[str, Any] = pickle.loads(content)
                return answer
        except TimeoutError:
            why = f"has not answered within {self._deadlines.answer_s:.0f} s"
        except OSError as error:
            why = f"has ended ({error})"
        self.end()
        raise _HelperLost(f"the helper process {why}")

    def end(self) -> None:
        if self._owner != os.getpid():
            return
        self._process.kill()
        self._process.wait()
        self._socket.close()


def _module_path() -> list[str]:
    """Where a helper finds the modules that this process finds; not in the current directory."""
    path = [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
    package_root = str(pathlib.Path(__file__).parents[2])
    return path if package_root in path else [*path, package_root]
