"""What fails in the helper, or around it: a process that sleeps, or works, or says that it cannot."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from support import PAGE, Memory, assert_clean_exit, run_script

import cumem_sleep
from cumem_sleep import CheckpointFailed, CuMemAllocator, DriverError, _core, host_facts, sim
from cumem_sleep.checkpoint import helper, process
from cumem_sleep.checkpoint.process import THIS_PROCESS
from cumem_sleep.core import commitment
from cumem_sleep.core.commitment import Commitment

TESTS = pathlib.Path(__file__).parents[1]
BYTES = b"kept" * (PAGE // 4)


@pytest.fixture
def new_helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """The next helper fails driver calls like this (CUMEM_SLEEP_SIM_FAIL)."""

    def begin(failures: str = "") -> None:
        monkeypatch.setenv("CUMEM_SLEEP_SIM_FAIL", failures)
        THIS_PROCESS._end_helper()

    yield begin
    monkeypatch.delenv("CUMEM_SLEEP_SIM_FAIL", raising=False)
    THIS_PROCESS._end_helper()


@pytest.fixture
def weights(allocator: CuMemAllocator, memory: Memory) -> int:
    address = allocator.malloc(PAGE, "weights")
    memory.write(address, BYTES)
    return address


def failing(call: str, error: str, after: int = 0, times: int = 1) -> str:
    return f"cuCheckpointProcess{call}:{after}:CUDA_ERROR_{error}:{times}"


class TestDriverErrors:
    @pytest.mark.parametrize("call", ["Lock", "Checkpoint"])
    def test_on_the_way_down(
        self, allocator: CuMemAllocator, memory: Memory, weights: int, new_helper: Callable[[str], None], call: str
    ) -> None:
        new_helper(failing(call, "NOT_SUPPORTED"))
        report = allocator.sleep(level=3)
        assert f"cuCheckpointProcess{call} failed with CUDA_ERROR_NOT_SUPPORTED" in report.why_not_deeper
        assert allocator.checkpoint is None
        assert allocator.sleep(level=3).checkpointed_bytes > 0  # the next one does not fail
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES
        assert sim.stats().blocked_calls == 0

    @pytest.mark.parametrize("error", ["NOT_PERMITTED", "NOT_SUPPORTED"])
    @pytest.mark.parametrize("call", ["Restore", "Unlock", "GetState"])
    def test_on_the_way_back(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        weights: int,
        new_helper: Callable[[str], None],
        call: str,
        error: str,
    ) -> None:
        # The state is asked for after each request; first when the helper starts, then after the checkpoint.
        new_helper(failing(call, error, after=2 if call == "GetState" else 0))
        allocator.sleep(level=3)
        with pytest.raises((CheckpointFailed, DriverError)) as failed:
            allocator.wake_up()
        assert error in str(failed.value)
        assert _core.driver_calls_suspended()
        assert allocator.usage()["weights"].asleep_segments == 1
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES
        assert sim.stats().blocked_calls == 0

    def test_an_unlock_that_fails_after_a_checkpoint_that_failed(
        self, allocator: CuMemAllocator, memory: Memory, weights: int, new_helper: Callable[[str], None]
    ) -> None:
        """Locked, and all asleep: said, and the next wake tries again."""
        new_helper(f"{failing('Checkpoint', 'NOT_SUPPORTED')},{failing('Unlock', 'NOT_SUPPORTED', times=2)}")
        with pytest.raises(CheckpointFailed) as failed:
            allocator.sleep(level=3)
        assert failed.value.state == "LOCKED"
        assert "call wake_up again" in str(failed.value)
        assert allocator.usage()["weights"].asleep_segments == 1
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES
        assert sim.stats().blocked_calls == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("call", ["Checkpoint", "Restore"])
    def test_a_state_that_is_lost(self, call: str) -> None:
        """It is said, by the call and by each that follows, and the process ends when it is told to."""
        process = run_script(
            """
            allocator = fresh_allocator()
            allocator.malloc(PAGE, "weights")
            for call in (lambda: allocator.sleep(level=3), allocator.wake_up, allocator.wake_up):
                try:
                    call()
                except CheckpointFailed as error:
                    print(error.state, "restart this process" in str(error))
            print(allocator.usage()["weights"].asleep_segments, sim.stats().blocked_calls)
            """,
            CUMEM_SLEEP_SIM_FAIL=failing(call, "UNKNOWN"),
        )
        lost = "FAILED True\n"
        assert process.stdout == lost * (3 if call == "Checkpoint" else 2) + "1 0\n", process.stderr
        assert process.returncode == 1
        assert "ends at once" in process.stderr


class TestTheProcess:
    def test_stopped_and_killed_within_a_call(
        self, allocator: CuMemAllocator, memory: Memory, weights: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from cumem_sleep.checkpoint import process

        ask = process._Helper.ask

        def killed(self: process._Helper, request: dict[str, object]) -> dict[str, object]:
            monkeypatch.setattr(process._Helper, "ask", ask)
            self._process.kill()
            return ask(self, request)

        monkeypatch.setattr(process._Helper, "ask", killed)
        report = allocator.sleep(level=3)
        assert "the helper process has ended" in report.why_not_deeper
        assert not _core.driver_calls_suspended()
        allocator.sleep(level=3)
        monkeypatch.setattr(process._Helper, "ask", killed)
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES

    def test_that_cannot_be_started(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        weights: int,
        new_helper: Callable[[str], None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        new_helper("")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere/python")
            assert "cannot be started" in allocator.sleep(level=3).why_not_deeper
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/bin/true")
            assert "has ended" in allocator.sleep(level=3).why_not_deeper
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", None)
            assert "names no Python" in allocator.sleep(level=3).why_not_deeper
        assert allocator.sleep(level=3).checkpointed_bytes > 0
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES

    @pytest.mark.slow
    def test_that_does_not_answer(
        self, allocator: CuMemAllocator, memory: Memory, weights: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:

        allocator.sleep(level=3)
        os.kill(_helper_pid(), signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(THIS_PROCESS.deadlines, "answer_s", 15.0)
            allocator.wake_up()  # by the next helper
        assert memory.read(weights, PAGE) == BYTES

    @pytest.mark.slow
    def test_beside_what_python_starts_with(self, tmp_path: pathlib.Path) -> None:
        """A `sitecustomize` that prints, an odd encoding, and modules of the same names in the current directory."""
        (tmp_path / "path").mkdir()
        (tmp_path / "path" / "sitecustomize.py").write_text("print('hello', end='')")
        for module in ("json", "cumem_sleep"):
            (tmp_path / f"{module}.py").write_text("raise SystemExit('the wrong one')")
        path = [str(tmp_path / "path"), str(pathlib.Path(process.__file__).parents[2]), str(TESTS)]
        found = run_script(
            f"""
            allocator = fresh_allocator()
            allocator.malloc(PAGE, "weights")
            os.chdir({str(tmp_path)!r})
            assert not allocator.sleep(level=3).why_not_deeper
            allocator.wake_up()
            """,
            PYTHONPATH=os.pathsep.join(path),
            PYTHONIOENCODING="utf-16",
        )
        assert (found.returncode, found.stderr) == (0, "")

    @pytest.mark.slow
    def test_ends_with_this_process(self) -> None:
        process = run_script(
            """
            allocator = fresh_allocator()
            allocator.malloc(PAGE, "weights")
            allocator.sleep(level=3)
            from cumem_sleep.checkpoint.process import THIS_PROCESS
            print(THIS_PROCESS._helper._process.pid, flush=True)
            os.kill(os.getpid(), 9)
            """
        )
        assert process.returncode == -signal.SIGKILL, process.stderr
        _await_end(int(process.stdout))


class TestExit:
    @pytest.mark.slow
    @pytest.mark.parametrize("level", [3])
    def test_at_level_3(self, level: int) -> None:
        process = run_script(
            f"""
            allocator = fresh_allocator()
            allocator.malloc(PAGE, "weights")
            import atexit
            atexit.register(lambda: print(sim.stats().blocked_calls, _core.driver_calls_suspended()))
            assert not allocator.sleep(level={level}).why_not_deeper
            """
        )
        assert_clean_exit(process)
        assert process.stdout == "0 False\n"  # handlers of libraries may call CUDA

    @pytest.mark.slow
    @pytest.mark.parametrize("standard_output", ["sys.stdout", "None"])
    def test_that_cannot_come_back(self, standard_output: str) -> None:
        process = run_script(
            f"""
            import sys
            allocator = fresh_allocator()
            allocator.malloc(PAGE, "weights")
            allocator.sleep(level=3)
            print("slept", flush=True)
            sys.stdout = {standard_output}
            """,
            CUMEM_SLEEP_SIM_FAIL=failing("Restore", "NOT_SUPPORTED", times=9),
        )
        assert (process.returncode, process.stdout) == (1, "slept\n")
        assert "ends at once" in process.stderr

    @pytest.mark.slow
    def test_old_driver(self) -> None:
        process = run_script(
            """
            allocator = fresh_allocator()
            allocator.malloc(PAGE, "weights")
            print(allocator.sleep(level=3).why_not_deeper)
            allocator.wake_up()
            """,
            CUMEM_SLEEP_SIM_DRIVER_VERSION="12060",
        )
        assert process.returncode == 0, process.stderr
        assert "driver 570" in process.stdout

    @pytest.mark.slow
    def test_fork(self) -> None:
        """A child forked at level 3 cannot use the GPU, as any, and does not touch its parent's checkpoint."""
        process = run_script(
            """
            import sys
            allocator = fresh_allocator()
            allocator.malloc(PAGE, "weights")
            allocator.sleep(level=3)
            child = os.fork()
            if child == 0:
                try:
                    allocator.wake_up()
                except InvalidState as error:
                    print("forked" in str(error), flush=True)
                sys.exit(0)
            os.waitpid(child, 0)
            assert allocator.checkpoint is not None
            allocator.wake_up()
            """,
        )
        assert process.stdout == "True\n", process.stderr
        assert_clean_exit(process)


OTHER_TOOL = """
import sys
from cumem_sleep import _core
pid = int(sys.argv[1])
_core.open_driver(sys.argv[2])
_core.lock_process(pid, 120.0)
print("locked", flush=True)
sys.stdin.readline()
_core.unlock_process(pid)
"""


def test_another_tool_has_locked_the_process(
    allocator: CuMemAllocator, memory: Memory, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has locked is not unlocked: it counts on that."""
    package_root = str(pathlib.Path(cumem_sleep.__path__[0]).parent)
    tools: list[subprocess.Popen[str]] = []
    asked: list[str] = []
    ask = process._Helper.ask

    def after_another(self: process._Helper, request: Mapping[str, Any]) -> dict[str, Any]:
        asked.append(request["do"])
        if not tools:
            command = [sys.executable, "-c", OTHER_TOOL, str(os.getpid()), str(_core.driver_path())]
            environment = {**os.environ, "PYTHONPATH": package_root}
            pipe = subprocess.PIPE
            tools.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
            assert tools[0].stdin is not None
            assert tools[0].stdout is not None
            assert tools[0].stdout.readline() == "locked\n"
            try:
                return ask(self, request)
            finally:
                tools[0].stdin.write("unlock\n")
                tools[0].stdin.flush()
        return ask(self, request)

    monkeypatch.setattr(process._Helper, "ask", after_another)
    report = allocator.sleep(level=3)  # goes on when the other tool has unlocked
    assert "cuCheckpointProcessLock failed with CUDA_ERROR_ILLEGAL_STATE" in report.why_not_deeper
    assert asked == ["checkpoint"]
    with tools[0]:
        assert tools[0].wait(30) == 0, "it could unlock itself"
    assert not _core.driver_calls_suspended()
    allocator.sleep(level=3)
    assert allocator.checkpoint is not None
    allocator.wake_up()
    assert memory.read(weights, PAGE) == BYTES


def test_an_operating_system_error_alone_may_pass(
    allocator: CuMemAllocator, memory: Memory, weights: int, new_helper: Callable[[str], None]
) -> None:
    """It says that nothing is left to be tried only after a restore that ran out of memory."""
    new_helper(failing("Restore", "OPERATING_SYSTEM"))
    allocator.sleep(level=3)
    with pytest.raises(CheckpointFailed, match="call wake_up again") as failed:
        allocator.wake_up()
    assert not failed.value.lost
    allocator.wake_up()
    assert memory.read(weights, PAGE) == BYTES


@pytest.mark.slow
def test_a_restore_without_enough_memory_is_the_last_one() -> None:
    """Another process takes it after the look: as the driver does, this says that nothing can be tried any more."""
    process = run_script(
        """
        from cumem_sleep.checkpoint.process import THIS_PROCESS
        sim.configure(context_bytes=2 * PAGE)
        allocator = fresh_allocator()
        allocator.malloc(PAGE, "weights")
        allocator.sleep(level=3)
        look = THIS_PROCESS._bring_back
        THIS_PROCESS._bring_back = lambda needed_bytes, what: look({}, what)  # as if there had been room
        for device_bytes in (PAGE, 256 * PAGE):
            sim.configure(device_bytes=device_bytes)
            try:
                allocator.wake_up()
            except CheckpointFailed as error:
                print(error.state, error.lost, "restart this process" in str(error), error.reason)
        print(allocator.usage()["weights"].asleep_segments, sim.stats().blocked_calls)
        """,
    )
    lost = "CHECKPOINTED True True cuCheckpointProcessRestore failed with CUDA_ERROR_"
    first, second, last = process.stdout.splitlines()
    assert first.startswith(f"{lost}OUT_OF_MEMORY")
    assert second.startswith(f"{lost}OPERATING_SYSTEM")
    assert last == "1 0", process.stderr
    assert (process.returncode, "ends at once" in process.stderr) == (1, True)


@pytest.mark.parametrize(
    ("limit", "name"), [("cgroup_available_bytes", "the cgroup"), ("mem_available_bytes", "the system (MemAvailable)")]
)
def test_limits_of_the_system_count_before_a_checkpoint(monkeypatch: pytest.MonkeyPatch, limit: str, name: str) -> None:
    for each in ("cgroup_available_bytes", "mem_available_bytes"):
        monkeypatch.setattr(host_facts, each, lambda **_: None)
    helper._require_host_memory(1 << 50)  # nothing is limited
    monkeypatch.setattr(host_facts, limit, lambda **_: PAGE)
    helper._require_host_memory(PAGE)
    with pytest.raises(OSError, match=f"copies 4.00 MiB to host memory, and {re.escape(name)} leaves 2.00 MiB"):
        helper._require_host_memory(2 * PAGE)


def _helper_pid() -> int:
    helper = THIS_PROCESS._helper
    assert helper is not None
    return helper._process.pid


def _await_end(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    poll = select.poll()
    poll.register(process, select.POLLIN)
    assert poll.poll(30_000), "the helper lives on"
    os.close(process)


def test_a_checkpoint_after_which_nobody_tells_what_is_free(
    allocator: CuMemAllocator, memory: Memory, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody would know what a restore needs, so it is undone."""
    ask = process._Helper.ask

    def without_free_bytes(self: process._Helper, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = ask(self, request)
        if request["do"] != "checkpoint":
            return answer
        return {
            "error": OSError("NVML: Unknown Error"),
            **{k: answer[k] for k in ("seconds", "state")},
        }

    monkeypatch.setattr(process._Helper, "ask", without_free_bytes)
    report = allocator.sleep(level=3)
    assert report.why_not_deeper == "NVML: Unknown Error"
    assert allocator.checkpoint is None
    assert not _core.driver_calls_suspended()
    allocator.wake_up()
    assert memory.read(weights, PAGE) == BYTES


def test_a_checkpoint_takes_no_host_memory_that_others_are_about_to_touch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """They see what it is about to copy, as long as it does."""
    monkeypatch.setattr(host_facts, "memory_groups", lambda: [tmp_path])
    monkeypatch.setattr(host_facts, "cgroup_available_bytes", lambda **_: None)
    monkeypatch.setattr(host_facts, "mem_available_bytes", lambda **_: 3 * PAGE)
    monkeypatch.setattr(helper, "used_bytes", lambda *_: {"GPU-0": 2 * PAGE})
    other, seen, waited = Commitment(), list[int](), list[float]()
    other.set(2 * PAGE)

    def pause(seconds: float) -> None:
        waited.append(seconds)
        other.set(0)

    def lock(*_: object) -> None:
        seen.append(other.others()[tmp_path])
        raise OSError("enough")

    monkeypatch.setattr(commitment.time, "sleep", pause)
    monkeypatch.setattr(_core, "lock_process", lock)
    with pytest.raises(OSError, match="enough"):
        helper.Target(os.getpid()).checkpoint(1.0, ["GPU-0"], [])
    assert len(waited) == 1
    assert seen == [2 * PAGE]
    assert other.others()[tmp_path] == 0
