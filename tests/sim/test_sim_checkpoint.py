"""The simulated driver's process checkpoints: this process, or one more, is the helper; another one is the target."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from checkpoint_target import Target, process_that_answers, wait_until
from sim_driver import (
    CALLS,
    ILLEGAL_STATE,
    INVALID_DEVICE,
    INVALID_VALUE,
    MIB,
    NOT_INITIALIZED,
    NOT_READY,
    NOT_SUPPORTED,
    OK,
    OUT_OF_MEMORY,
    PAGE,
    Driver,
    Int,
)

from cumem_sleep import sim
from cumem_sleep.errors import DriverError, InvalidArgument, InvalidArgumentType

# Each starts processes; tests/checkpoint uses these calls in every run.
pytestmark = pytest.mark.slow

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
UNKNOWN = "CUDA_ERROR_UNKNOWN"
CHANGES = ("Lock", "Checkpoint", "Restore", "Unlock")
DO_NOT_WAIT = {
    *("cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuCheckpointProcessGetState"),
    *(f"cuCheckpointProcess{change}" for change in CHANGES),
}
LEFT_BYTES = 4 * MIB


class Arguments(ctypes.Structure):
    """Of all four calls; only a lock has a timeout."""

    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved", ctypes.c_uint), ("more", ctypes.c_uint64 * 7)]


class Helper:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def state(self, pid: int) -> int:
        return int(self.driver.get_second(Int, "cuCheckpointProcessGetState", pid))

    def __call__(self, change: str, pid: int, timeout_ms: int | None = None) -> str:
        if change == "Lock" and timeout_ms is None:
            timeout_ms = 30_000
        arguments = ctypes.byref(Arguments(timeout_ms)) if timeout_ms is not None else None
        return self.driver(f"cuCheckpointProcess{change}", pid, arguments)

    def all(self, pid: int, *changes: str) -> None:
        assert [self(change, pid) for change in changes] == [OK] * len(changes)


@pytest.fixture
def helper(load: Callable[..., Driver]) -> Helper:
    """Has no context, and makes none."""
    driver = load()
    driver.ok("cuInit", 0)
    return Helper(driver)


@pytest.fixture
def target() -> Iterator[Target]:
    with a_target() as process:
        process.ask("driver.start()")
        yield process


def a_target(**environment: object) -> contextlib.AbstractContextManager[Target]:
    return process_that_answers(["checkpoint_target.py"], **environment)


def uuid(device: int = 0) -> str:
    digits = f"cumem-sim-{device:05d}".encode().ljust(16, b"\0").hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


@contextlib.contextmanager
def a_child(target: Target, fork: str) -> Iterator[int]:
    child = target.ask(f"{fork} or signal.pause()")
    assert child > 1  # to kill others would kill many
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)


def used(target: Target, device: int = 0) -> int:
    return sim.process_memory(target.pid, uuid(device))[0]


class TestStates:
    def test_there_and_back(self, helper: Helper, target: Target) -> None:
        address = target.ask("driver.allocate()")
        target.ask(f"write({address}, b'kept')")
        states = [helper.state(target.pid)]
        for change in CHANGES:
            assert helper(change, target.pid) == OK
            states.append(helper.state(target.pid))
        assert states == [RUNNING, LOCKED, CHECKPOINTED, LOCKED, RUNNING]
        assert target.ask(f"read({address}, 4)") == b"kept"
        assert target.ask("driver('cuCtxSynchronize')") == OK
        helper.all(target.pid, "Lock", "Unlock", *CHANGES)

    @pytest.mark.parametrize(
        ("to_get_there", "state", "possible"),
        [
            ((), RUNNING, {"Lock"}),
            (("Lock",), LOCKED, {"Checkpoint", "Unlock"}),
            (("Lock", "Checkpoint"), CHECKPOINTED, {"Restore"}),
            (("Lock", "fail Checkpoint"), FAILED, set()),
            (("Lock", "Checkpoint", "fail Restore"), FAILED, set()),
        ],
    )
    def test_what_each_state_does_not_allow(
        self, helper: Helper, target: Target, to_get_there: tuple[str, ...], state: int, possible: set[str]
    ) -> None:
        for step in to_get_there:
            change = step.removeprefix("fail ")
            if change != step:
                sim.fail(f"cuCheckpointProcess{change}", error=UNKNOWN)
            assert helper(change, target.pid) == (OK if change == step else UNKNOWN)
        for change in sorted(set(CHANGES) - possible):
            assert (helper(change, target.pid), helper.state(target.pid)) == (ILLEGAL_STATE, state), change

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("error", ["CUDA_ERROR_NOT_PERMITTED", OUT_OF_MEMORY, UNKNOWN])
    def test_an_injected_error_changes_nothing(self, helper: Helper, target: Target, change: str, error: str) -> None:
        """But `CUDA_ERROR_UNKNOWN` while the memory moves; here it does not, because the state is the wrong one."""
        before = {"Lock": (), "Checkpoint": ("Lock",), "Restore": ("Lock", "Checkpoint"), "Unlock": ("Lock",)}[change]
        if error == UNKNOWN and change in ("Checkpoint", "Restore"):
            before = ()
        helper.all(target.pid, *before)
        state = helper.state(target.pid)
        sim.fail(f"cuCheckpointProcess{change}", error=error)
        assert (helper(change, target.pid), helper.state(target.pid)) == (error, state)
        helper.all(target.pid, *CHANGES[state:])
        assert target.ask("driver('cuCtxSynchronize')") == OK

    def test_a_failed_process_never_returns_from_a_call(self, helper: Helper, target: Target) -> None:
        target.ask("driver.allocate()")
        helper.all(target.pid, "Lock")
        sim.fail("cuCheckpointProcessCheckpoint", error=UNKNOWN)
        assert helper("Checkpoint", target.pid) == UNKNOWN
        assert used(target) == PAGE
        target.ask("worker.begin('cuCtxSynchronize')")
        target.wait_for_blocked(1)
        assert target.ask("worker.begin('cuDriverGetVersion', None), worker.result()")[1][0] == "cuDriverGetVersion"


class TestProcesses:
    @pytest.fixture(params=[*CHANGES, "GetState"])
    def ask(self, helper: Helper, request: pytest.FixtureRequest) -> Callable[[int], str]:
        value = Int()
        arguments = ctypes.byref(value) if request.param == "GetState" else None
        return lambda pid: helper.driver(f"cuCheckpointProcess{request.param}", pid, arguments)

    def test_that_is_none(self, ask: Callable[[int], str]) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait(30)
        assert [ask(pid) for pid in (0, -1, gone.pid, 2**31 - 1)] == [INVALID_VALUE] * 4

    def test_that_does_not_use_the_driver(self, ask: Callable[[int], str]) -> None:
        with a_target() as target:
            target.ask("driver.get(Int, 'cuDriverGetVersion')")
            assert ask(target.pid) == NOT_INITIALIZED
            target.ask("driver.ok('cuInit', 0)")
            assert ask(target.pid) in (OK, ILLEGAL_STATE)

    @pytest.mark.parametrize("before", [(), ("Lock",), ("Lock", "Checkpoint")])
    @pytest.mark.parametrize("reap", [False, True])
    def test_that_died(self, helper: Helper, target: Target, before: tuple[str, ...], reap: bool) -> None:
        helper.all(target.pid, *before)
        target.kill(reap)
        assert {helper(change, target.pid) for change in CHANGES} == {INVALID_VALUE}
        assert helper.driver("cuCheckpointProcessGetState", target.pid, ctypes.byref(Int())) == INVALID_VALUE
        with pytest.raises(DriverError, match=INVALID_VALUE):
            sim.process_memory(target.pid, uuid())

    @pytest.mark.parametrize("before", [("Lock",), ("Lock", "Checkpoint")])
    def test_another_helper_goes_on(self, helper: Helper, target: Target, before: tuple[str, ...]) -> None:
        with a_target() as other:
            other.ask("driver.ok('cuInit', 0)")
            for change in before:
                assert other.ask(f"driver('cuCheckpointProcess{change}', {target.pid}, None)") == OK
            other.kill()
        helper.all(target.pid, *CHANGES[len(before) :])
        assert target.ask("driver('cuCtxSynchronize')") == OK

    @pytest.mark.parametrize("fork", ["os.fork()", "ctypes.CDLL(None)._Fork()"])
    def test_a_forked_child_is_another_process(self, helper: Helper, target: Target, fork: str) -> None:
        """Also one made by a call that runs no handlers, as some programs do just before they start another."""
        if "_Fork" in fork and not hasattr(ctypes.CDLL(None), "_Fork"):
            pytest.skip("glibc before 2.34")
        with a_child(target, fork) as child:
            assert helper("Lock", child) == NOT_INITIALIZED
            helper.all(target.pid, "Lock")


class TestBlocking:
    def test_every_call_that_says_or_does_something(self, helper: Helper, target: Target) -> None:
        helper.all(target.pid, "Lock", "Checkpoint")
        for name in CALLS:
            target.ask(f"worker.begin_with_zeros({name!r})")
        waiting = set(CALLS) - DO_NOT_WAIT
        target.wait_for_blocked(len(waiting))
        assert {target.ask("worker.result()")[0] for _ in DO_NOT_WAIT} == DO_NOT_WAIT
        assert target.ask("worker.has_result()") is False
        helper.all(target.pid, "Restore")
        assert target.ask("worker.has_result()") is False
        helper.all(target.pid, "Unlock")
        assert {target.ask("worker.result()")[0] for _ in waiting} == waiting
        assert target.ask("sim.stats().blocked_calls") == len(waiting)
        target.ask("sim.reset()")
        assert target.ask("sim.stats().blocked_calls") == 0

    def test_a_forked_child_of_a_locked_process(self, helper: Helper, target: Target) -> None:
        helper.all(target.pid, "Lock")
        answer = "driver('cuInit', 0) == 'CUDA_ERROR_NOT_INITIALIZED'"
        child = target.ask(f"os.fork() or os._exit({answer})")
        assert target.ask(f"os.waitstatus_to_exitcode(os.waitpid({child}, 0)[1])") == 1
        assert helper.state(target.pid) == LOCKED

    @pytest.mark.slow
    def test_no_call_of_many_threads_slips_through(self, helper: Helper, target: Target) -> None:
        target.ask("worker.keep_calling(threads=4)")
        for _ in range(50):
            before = target.calls_made()
            wait_until(functools.partial(lambda least: target.calls_made() > least, before))
            helper.all(target.pid, "Lock")
            before = target.calls_made()
            helper.all(target.pid, "Checkpoint", "Restore")
            assert target.calls_made() == before
            helper.all(target.pid, "Unlock")
        assert target.ask("worker.stop_calling()") == []


class TestLock:
    def test_waits_for_work(self, helper: Helper, target: Target) -> None:
        """A host function counts, and so does a call that waits for it."""
        target.ask("worker.keep_busy()")
        target.ask("worker.begin('cuCtxSynchronize')")
        wait_until(lambda: target.ask("sim.stats().calls['cuCtxSynchronize']") == 1)
        assert helper("Lock", target.pid, timeout_ms=20) == NOT_READY
        assert helper.state(target.pid) == RUNNING
        assert target.ask("driver.get(Int, 'cuDeviceGetCount')") == 1
        assert target.ask("sim.stats().blocked_calls") == 0
        target.ask("worker.end_work()")
        helper.all(target.pid, *CHANGES)

    def test_meanwhile_new_calls_wait(self, helper: Helper, target: Target) -> None:
        target.ask("worker.keep_busy()")
        target.ask("worker.begin_when_locked('cuMemGetInfo', 0, 0)")
        assert helper("Lock", target.pid, timeout_ms=2000) == NOT_READY
        assert target.ask("worker.result()")[0] == "cuMemGetInfo"
        assert target.ask("sim.stats().blocked_calls") > 0

    def test_of_a_process_that_dies(self, helper: Helper, target: Target) -> None:
        target.ask("worker.keep_busy()")
        target.ask("worker.die_when_locked('cuCtxGetDevice', 0)")
        assert helper("Lock", target.pid, timeout_ms=0) == INVALID_VALUE

    def test_by_a_helper_that_dies(self, helper: Helper, target: Target) -> None:
        """What it blocked goes on, and the next lock works."""
        target.ask("worker.keep_busy()")
        with a_target() as other:
            other.ask("driver.ok('cuInit', 0)")
            other.ask(f"worker.begin('cuCheckpointProcessLock', {target.pid}, None)")
            target.ask("worker.begin_when_locked('cuCtxGetDevice', 0)")
            target.wait_for_blocked(1)
            assert target.ask("worker.has_result()") is False
            assert helper("Checkpoint", target.pid) == ILLEGAL_STATE  # at once, although the other one never ends
            assert helper("Lock", target.pid, timeout_ms=20) == NOT_READY
            assert target.ask("worker.has_result()") is False
            other.kill()
        assert target.ask("worker.result()")[0] == "cuCtxGetDevice"
        target.ask("worker.end_work()")
        helper.all(target.pid, *CHANGES)


class TestMemory:
    def test_is_off_the_device_meanwhile(self, helper: Helper) -> None:
        with a_target(CONTEXT_BYTES=6 * MIB) as target:
            target.ask("driver.ok('cuInit', 0)")
            assert sim.process_memory(target.pid, uuid()) == (0, 64 * MIB)
            target.ask("driver.start()")
            assert used(target) == 6 * MIB
            target.ask("driver.allocate(), driver.get(Address, 'cuMemAlloc', 1)")
            seen = {change: (helper(change, target.pid), used(target)) for change in CHANGES}
            whole = 6 * MIB + 2 * PAGE
            assert seen == {
                "Lock": (OK, whole),
                "Checkpoint": (OK, LEFT_BYTES),
                "Restore": (OK, whole),
                "Unlock": (OK, whole),
            }

    def test_restore_needs_room(self, helper: Helper, target: Target) -> None:
        target.ask("driver.allocate(8 * PAGE)")
        helper.all(target.pid, "Lock", "Checkpoint")
        target.ask("sim.configure(device_bytes=8 * PAGE - 1)")
        assert sim.process_memory(target.pid, uuid()) == (LEFT_BYTES, 8 * PAGE - 1)
        assert (helper("Restore", target.pid), helper.state(target.pid)) == (OUT_OF_MEMORY, CHECKPOINTED)
        assert used(target) == LEFT_BYTES
        target.ask("sim.configure(device_bytes=8 * PAGE)")
        for _ in range(2):  # as on a GPU
            again = helper("Restore", target.pid), helper.state(target.pid)
            assert again == ("CUDA_ERROR_OPERATING_SYSTEM", CHECKPOINTED)

    @pytest.mark.usefixtures("helper")
    def test_bad_arguments(self) -> None:
        for wrong in ("", "GPU-", "GPU-12", uuid()[:-1], uuid() + "0", "GPU-" + "x" * 32):
            with pytest.raises(InvalidArgument, match="uuid="):
                sim.process_memory(os.getpid(), wrong)
        with pytest.raises(InvalidArgumentType, match="uuid="):
            sim.process_memory(os.getpid(), b"")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentType, match="pid="):
            sim.process_memory("1", uuid())  # type: ignore[arg-type]
        with pytest.raises(DriverError, match=INVALID_DEVICE):
            sim.process_memory(os.getpid(), "GPU-" + "0" * 32)
        for pid in (-1, 0, 2**31 - 1):
            with pytest.raises(DriverError, match=rf"{INVALID_VALUE}.*pid={pid}"):
                sim.process_memory(pid, uuid())
        with pytest.raises(InvalidArgument, match="context_bytes=-1"):
            sim.configure(context_bytes=-1)
        with pytest.raises(InvalidArgument, match="context_us_per_mib=60000001"):
            sim.configure(context_us_per_mib=60_000_001)


class TestEnvironment:
    def test_an_old_driver(self, load: Callable[..., Driver], target: Target) -> None:
        driver = load(DRIVER_VERSION=12079)
        driver.ok("cuInit", 0)
        for change in CHANGES:
            assert driver(f"cuCheckpointProcess{change}", target.pid, None) == NOT_SUPPORTED
        assert driver("cuCheckpointProcessGetState", target.pid, ctypes.byref(Int())) == NOT_SUPPORTED
        pointer = ctypes.c_void_p()
        driver.ok("cuGetProcAddress", b"cuCheckpointProcessLock", ctypes.byref(pointer), 12000, 0, None)
        assert pointer.value
        assert Helper(load(DRIVER_VERSION=12080)).driver("cuCheckpointProcessLock", 0, None) == NOT_INITIALIZED

    @pytest.mark.parametrize(
        "rule",
        [
            *("cuInit", "cuInit:0:CUDA_ERROR_UNKNOWN", "cuInit:0:CUDA_ERROR_UNKNOWN:0", "cuInit:0:CUDA_SUCCESS:1"),
            *("cuFantasy:0:CUDA_ERROR_UNKNOWN:1", "cuInit:0:CUDA_ERROR_FANTASY:1", "cuInit:-1:CUDA_ERROR_UNKNOWN:1"),
            *("cuInit:0:CUDA_ERROR_UNKNOWN:1:1", "cuInit:0:CUDA_ERROR_UNKNOWN:99999999999999999999", "cuInit:::1"),
        ],
    )
    @pytest.mark.parametrize(
        "other", ["{}", "cuMemMap:0:CUDA_ERROR_UNKNOWN:1,{}", "{},cuMemMap:0:CUDA_ERROR_UNKNOWN:1"]
    )
    def test_bad_failures(
        self, load: Callable[..., Driver], capfd: pytest.CaptureFixture[str], rule: str, other: str
    ) -> None:
        assert load(FAIL=other.format(rule))("cuInit", 0) == INVALID_VALUE
        message = capfd.readouterr().err
        assert f'CUMEM_SLEEP_SIM_FAIL="{other.format(rule)}"' in message
        assert f'"{rule}" is not a rule such as' in message


class TestCore:
    """The bindings, in a process that has opened the simulated driver with them."""

    @pytest.fixture
    def core(self) -> Iterator[Target]:
        with self.with_driver(sim.library_path()) as process:
            yield process

    def with_driver(self, path: pathlib.Path, **environment: object) -> contextlib.AbstractContextManager[Target]:
        script = f"""
import os, sys
from checkpoint_target import answer
from cumem_sleep import _core, errors, sim
_core.open_driver({str(path)!r})
def attempt(call, *arguments):
    try:
        return str(getattr(_core, call)(*arguments))
    except errors.DriverError as error:
        return error.call, error.error, error.detail
    except ValueError as error:
        return str(error)
answer(_core=_core, attempt=attempt)
"""
        return process_that_answers(["-c", script], **environment)

    @pytest.mark.parametrize("timeout", ["1e9", "float('inf')"])
    def test_others_run_while_a_lock_waits(self, core: Target, target: Target, timeout: str) -> None:
        target.ask("worker.keep_busy()")
        core.ask(f"__import__('threading').Thread(target=_core.lock_process, args=({target.pid}, {timeout})).start()")
        target.ask("worker.begin_when_locked('cuCtxGetDevice', 0)")
        target.wait_for_blocked(1)
        assert core.ask(f"attempt('process_state', {target.pid})") == "ProcessState.RUNNING"
        target.ask("worker.end_work()")
        wait_until(lambda: core.ask(f"attempt('process_state', {target.pid})") == "ProcessState.LOCKED")

    def test_a_driver_that_lacks_the_calls(self, target: Target, tmp_path: pathlib.Path) -> None:
        """In whose table of symbols they go by another name; all else is found."""
        copy = tmp_path / "libcuda_sim.so"
        shutil.copy(sim.library_path(), copy)
        library = copy.read_bytes()
        assert b"cuCheckpointProcessUnlock" in library
        copy.write_bytes(library.replace(b"cuCheckpointProcessUnlock", b"cuCheckpointProcessUnloxx"))
        with self.with_driver(copy) as core:
            self.check_unsupported(core, target, "13.0")

    def check_unsupported(self, core: Target, target: Target, version: str) -> None:
        assert core.ask("_core.can_checkpoint()") is False
        for change in (
            "'checkpoint_process', 1",
            "'restore_process', 1",
            "'unlock_process', 1",
            "'lock_process', 1, 1",
        ):
            _, error, detail = core.ask(f"attempt({change})")
            assert error == NOT_SUPPORTED
            assert f"CUDA {version}" in detail
            assert "570" in detail
        assert core.ask(f"attempt('process_state', {target.pid})")[:2] == ("cuCheckpointProcessGetState", NOT_SUPPORTED)
        assert core.ask("_core.device_count(), _core.memory_info(0)[1]") == (1, 64 * MIB)
