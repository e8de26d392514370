"""What CUDA's process checkpoints do where the documentation says nothing: the facts that level 3 rests on.

    python benchmarks/checkpoint_behaviour.py --out benchmarks/results/checkpoint_behaviour.json   # ~90 s on an H200

Each question starts a process that sleeps at level 1, and checkpoints it from outside, without this layer's own steps:

- `memory`: free memory of the GPU, and host memory of the process, after each step; what NVML says of the process.
- `illegal`: what each call answers in each state, and the state after it.
- `restore_without_memory`: restores while another process has left a little less free memory than the checkpoint freed,
  or a little more; and again when that is gone, by the process that failed and by another one.
- `calls_while_locked`: which calls of a locked process return, and which wait.
- `lock_beside_work`: a lock with a timeout while a kernel runs, and after it.
- `ended_while_checkpointed`: by SIGTERM and by SIGKILL; when its memory is free again.
- `without_host_memory`, `stopped`, `caller_killed`, `other_memory`: a checkpoint that finds no host memory; calls about
  a process that is stopped; calls whose caller is killed; a process with managed memory, or whose memory others may
  open. And whether the process can be brought back then.
- `refused`: the checkpoint that this layer's helper refuses before it locks anything, because the process may take too
  little host memory; and the same with memory again.
- `twenty_times`: seconds and memory of twenty checkpoints and restores in a row, and the bytes after them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ending import end
from questions import main

from cumem_sleep import DriverError, _core
from cumem_sleep.checkpoint.device_memory import free_bytes, used_bytes
from cumem_sleep.checkpoint.helper import Target as HelperOf
from cumem_sleep.driver import driver_path

MIB = 1 << 20
SIMULATED = os.environ.get("CUMEM_SLEEP_DRIVER") == "sim"
WEIGHTS_BYTES = (8 if SIMULATED else 1024) * MIB
SECONDS = 120.0
STEPS = ("lock", "checkpoint", "restore", "unlock")
SLOW = ("checkpoint", "restore")


class Target:
    """A process with weights that sleep at level 1, which does what it is told (`serve`)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self._process.pid
        self.uuid: str = self.hear()["uuid"]

    def tell(self, command: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def answers_within(self, seconds: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def ask(self, command: str, **arguments: object) -> dict[str, Any]:
        self.tell(command, **arguments)
        return self.hear()

    def still_right(self) -> bool | str:
        """Whether a wake brings its bytes back, or what became of the process."""
        try:
            self.tell("wake")
            return bool(self.answers_within(20.0) and self.hear()["right"])
        except (OSError, ValueError):  # it ended
            return f"it ended with status {self._process.wait(10)}"

    def end(self, number: int = signal.SIGKILL) -> float:
        """Seconds until it has ended; -1 if that did not do it, and SIGKILL had to."""
        start = time.perf_counter()
        return time.perf_counter() - start if end(self._process, 20, number) else -1.0

    def free_mib(self) -> int:
        return free_bytes(self.pid, [self.uuid])[self.uuid] // MIB

    def host_mib(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) // 1024
        raise OSError("no VmRSS")


@contextlib.contextmanager
def target() -> Iterator[Target]:
    _core.open_driver(driver_path("sim" if SIMULATED else "cuda"))
    process = Target()
    try:
        yield process
    finally:
        process.end()


def do(step: str, pid: int, timeout_s: float = SECONDS) -> dict[str, Any]:
    """One call, and what came of it."""
    calls: dict[str, Callable[[], None]] = {
        "lock": lambda: _core.lock_process(pid, timeout_s),
        "checkpoint": lambda: _core.checkpoint_process(pid),
        "restore": lambda: _core.restore_process(pid),
        "unlock": lambda: _core.unlock_process(pid),
    }
    start = time.perf_counter()
    try:
        calls[step]()
        result = "CUDA_SUCCESS"
    except DriverError as error:
        result = error.error
    return {"result": result, "seconds": round(time.perf_counter() - start, 3), "state": state(pid)}


def state(pid: int) -> str:
    try:
        return _core.process_state(pid).name
    except DriverError as error:
        return error.error


def memory() -> dict[str, Any]:
    with target() as process:
        found: dict[str, Any] = {"asleep": _memory_of(process)}
        for step in STEPS:
            found[step] = {**do(step, process.pid), **_memory_of(process)}
        found["bytes are right"] = process.ask("wake")["right"]
        return found


def _memory_of(process: Target) -> dict[str, Any]:
    found: dict[str, Any] = {"gpu_free_mib": process.free_mib(), "host_mib": process.host_mib()}
    if not SIMULATED:
        import pynvml

        handle = pynvml.nvmlDeviceGetHandleByUUID(process.uuid)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        found["nvml"] = [{"is_it": each.pid == process.pid, "bytes": each.usedGpuMemory} for each in running]
    return found


def illegal() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in ((), ("lock",), ("lock", "checkpoint")):
        for step in STEPS:
            with target() as process:
                for before in way:
                    do(before, process.pid)
                at = state(process.pid)
                found[f"{step} when {at}"] = do(step, process.pid, 2.0)
    return found


def restore_without_memory() -> dict[str, Any]:
    tries = []
    for spare_mib, again_by in SPARE_MIB:
        with target() as process:
            asleep_mib = process.free_mib()
            for step in ("lock", "checkpoint"):
                do(step, process.pid)
            freed_mib = process.free_mib() - asleep_mib
            facts: dict[str, Any] = {"freed_mib": freed_mib}
            with _full(process, freed_mib + spare_mib) as free_mib:
                facts |= {"free_mib": free_mib, "full": do("restore", process.pid)}
            for who in again_by:
                if state(process.pid) == "CHECKPOINTED":
                    facts[f"room again, {who}"] = (do if who == "same process" else _do_elsewhere)(
                        "restore", process.pid
                    )
            facts["unlock"] = do("unlock", process.pid)
            if facts["unlock"]["state"] == "RUNNING":
                facts["bytes are right"] = process.ask("wake")["right"]
            tries.append({"more than it freed, mib": spare_mib, **facts})
    return {"tries": tries}


# By how much more is free than the checkpoint freed, and who tries again if that was too little.
SPARE_MIB = (
    (-100, ("another process", "same process")),
    (-100, ("same process", "another process")),
    (-12, ("another process", "a third process")),
    (4, ("another process",)),
    (36, ("another process",)),
)


def _do_elsewhere(step: str, pid: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--do", step, str(pid)], capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@contextlib.contextmanager
def _full(process: Target, left_mib: int) -> Iterator[int]:
    """Another process has taken all memory but so much."""
    if SIMULATED:  # simulated devices belong to one process
        process.ask("shrink")
        yield process.free_mib()
        process.ask("grow")
        return
    hog = subprocess.Popen(
        [sys.executable, __file__, "--hog", str(left_mib)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert hog.stdout is not None
    hog.stdout.readline()
    yield process.free_mib()
    hog.kill()
    hog.wait()
    time.sleep(1)


def calls_while_locked() -> dict[str, Any]:
    found = {}
    with target() as process:
        for name in process.ask("names")["names"]:
            do("lock", process.pid)
            process.tell("call", name=name)
            found[name] = "returns" if process.answers_within(1.0) else "waits"
            do("unlock", process.pid)
            process.hear()
    return found


def lock_beside_work() -> dict[str, Any]:
    with target() as process:
        process.ask("work")
        found = {"with a timeout of 0.5 s": do("lock", process.pid, 0.5)}
        if found["with a timeout of 0.5 s"]["state"] == "LOCKED":
            do("unlock", process.pid)
        process.ask("finish")
        found["afterwards"] = do("lock", process.pid, 2.0)
        return found


def ended_while_checkpointed() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        with target() as process:
            for step in ("lock", "checkpoint"):
                do(step, process.pid)
            before = None if SIMULATED else process.free_mib()
            seconds = process.end(number)
            after = None if SIMULATED else process.free_mib()
            found[number.name] = {"seconds": seconds, "gpu_free_mib before and after": [before, after]}
    return found


def without_host_memory() -> dict[str, Any]:
    return _each({"its address space may grow by 64 MiB": _without_host_memory})


def stopped() -> dict[str, Any]:
    return _each({"lock": _stopped_before_the_lock, **{f"{step}": partial(_stopped_before, step) for step in SLOW}})


def caller_killed() -> dict[str, Any]:
    ways = [(step, seconds) for step in SLOW for seconds in (0.02, 0.15)]
    return _each({f"{seconds} s into the {step}": partial(_caller_killed, step, seconds) for step, seconds in ways})


def other_memory() -> dict[str, Any]:
    return _each({what: partial(_has, what) for what in (() if SIMULATED else ("managed", "ipc"))})


def _each(ways: dict[str, Callable[[Target], dict[str, Any]]]) -> dict[str, Any]:
    """What came of each call, and then of those that bring the process back, with its bytes."""
    found: dict[str, Any] = {}
    for name, disturb in ways.items():
        with target() as process:
            found[name] = disturb(process)
            found[name]["brought back"] = _brought_back(process)
    return found


def _brought_back(process: Target) -> list[Any]:
    """By the calls that its state asks for, which are tried once; then whether its bytes are right."""
    steps: list[Any] = []
    if (at := state(process.pid)) == "CHECKPOINTED":
        steps.append(["restore", _do_for("restore", process.pid, 20.0)])
        at = state(process.pid)
    if at == "LOCKED":
        steps.append(["unlock", do("unlock", process.pid)])
        at = state(process.pid)
    if at == "RUNNING":
        steps.append(["bytes are right", process.still_right()])
    return [*steps, at]


def _without_host_memory(process: Target) -> dict[str, Any]:
    """Its address space may not grow by more than 64 MiB."""
    do("lock", process.pid)
    nbytes = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.prlimit(process.pid, resource.RLIMIT_AS, (nbytes + 64 * MIB, resource.RLIM_INFINITY))
    found = {"checkpoint": _do_for("checkpoint", process.pid, 20.0)}
    resource.prlimit(process.pid, resource.RLIMIT_AS, before)
    if state(process.pid) == "LOCKED":
        found["checkpoint, with memory again"] = _do_for("checkpoint", process.pid, 20.0)
    return found


def refused() -> dict[str, Any]:
    return _each({"its address space may grow by 4 MiB": _refused})


def _refused(process: Target) -> dict[str, Any]:
    helper = HelperOf(process.pid)
    request = {"do": "checkpoint", "lock_timeout_s": SECONDS, "uuids": [process.uuid], "in_use": [process.uuid]}
    nbytes = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.prlimit(process.pid, resource.RLIMIT_AS, (nbytes + 4 * MIB, resource.RLIM_INFINITY))
    found = {"counted bytes": used_bytes(process.pid, [process.uuid]), "checkpoint": helper.answer(request)}
    resource.prlimit(process.pid, resource.RLIMIT_AS, before)
    return {**found, "checkpoint, with memory again": helper.answer(request)}


def _stopped_before_the_lock(process: Target) -> dict[str, Any]:
    os.kill(process.pid, signal.SIGSTOP)
    found = {"lock, 1 s": _do_for("lock", process.pid, 20.0, "1.0")}
    os.kill(process.pid, signal.SIGCONT)
    return {**found, "state when it goes on": _states(process.pid, 2.0)}


def _stopped_before(step: str, process: Target) -> dict[str, Any]:
    for before in STEPS[: STEPS.index(step)]:
        do(before, process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    with _doing(step, process.pid) as caller:
        time.sleep(3)
        found: dict[str, Any] = {"after 3 s": "waits" if caller.poll() is None else "returns"}
        os.kill(process.pid, signal.SIGCONT)
        found["when it goes on"] = _answer_of(caller, 20.0)
    return found


def _caller_killed(step: str, seconds: float, process: Target) -> dict[str, Any]:
    for before in STEPS[: STEPS.index(step)]:
        do(before, process.pid)
    with _doing(step, process.pid) as caller:
        time.sleep(seconds)
        was_at_work = caller.poll() is None
        caller.kill()
    return {"it was at work": was_at_work, "state": _states(process.pid, 2.0)}


def _has(what: str, process: Target) -> dict[str, Any]:
    answer = process.ask("take", what=what)
    return {"taken": answer, **{step: _do_for(step, process.pid, 20.0) for step in ("lock", "checkpoint")}}


def _states(pid: int, seconds: float) -> list[list[Any]]:
    """Each state in that time, and after how many seconds it was first seen."""
    found: list[list[Any]] = []
    start = time.perf_counter()
    while (now := time.perf_counter() - start) < seconds:
        at = state(pid)
        if not found or found[-1][1] != at:
            found.append([round(now, 3), at])
        time.sleep(0.005)
    return found


@contextlib.contextmanager
def _doing(step: str, pid: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Another process has begun this call."""
    caller = subprocess.Popen(
        [sys.executable, __file__, "--do", step, str(pid), *more], stdout=subprocess.PIPE, text=True
    )
    assert caller.stdout is not None
    caller.stdout.readline()
    try:
        yield caller
    finally:
        caller.kill()
        caller.wait()


def _answer_of(caller: subprocess.Popen[str], seconds: float) -> Any:
    try:
        out, _ = caller.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds:.0f} s"
    return json.loads(out.splitlines()[-1]) if out.strip() else f"ended with {caller.returncode}"


def _do_for(step: str, pid: int, seconds: float, *more: str) -> Any:
    """By another process, which may not come back."""
    with _doing(step, pid, *more) as caller:
        return _answer_of(caller, seconds)


def twenty_times() -> dict[str, Any]:
    with target() as process:
        rounds = []
        for _ in range(20):
            seconds = {step: do(step, process.pid)["seconds"] for step in STEPS}
            rounds.append({**seconds, "gpu_free_mib": process.free_mib(), "host_mib": process.host_mib()})
        return {"rounds": rounds, "bytes are right": process.ask("wake")["right"]}


# In the process that is checkpointed


def serve() -> None:
    """Carries out one command a line."""
    import numpy as np

    from cumem_sleep import CuMemAllocator, Settings, sim

    allocator = CuMemAllocator(Settings(driver="sim" if SIMULATED else "cuda"))
    if SIMULATED:
        sim.configure(device_bytes=4 * WEIGHTS_BYTES, context_bytes=WEIGHTS_BYTES)
    address = allocator.malloc(WEIGHTS_BYTES, "weights")
    block = _core.HostBlock(WEIGHTS_BYTES, -1)
    content = np.frombuffer(memoryview(block), np.uint8)
    written = np.random.default_rng(7).integers(0, 256, WEIGHTS_BYTES, np.uint8)
    content[:] = written
    block.pin(0)
    stream = _core.CopyStream(0)
    stream.to_device(address, block, 0, WEIGHTS_BYTES)
    stream.synchronize()
    allocator.sleep(level=1)
    print(json.dumps({"uuid": _core.device_info(0).uuid}), flush=True)
    held: list[object] = []
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        request = json.loads(line)
        command = request["command"]
        if command == "wake":
            allocator.wake_up()
            content[:] = 0
            stream.to_host(block, 0, address, WEIGHTS_BYTES)
            stream.synchronize()
            answer = {"right": bool((content == written).all())}
        elif command in ("shrink", "grow"):
            sim.configure(device_bytes=(1 if command == "shrink" else 4 * WEIGHTS_BYTES // MIB) * MIB)
        elif command == "take":
            answer = {request["what"]: _take(request["what"], held)}
        elif command == "names":
            answer = {"names": list(_calls())}
        elif command == "call":
            _calls()[request["name"]]()
        elif command == "work":
            work = _work(stream, address, allocator)  # noqa: F841  (its memory is in use)
        elif command == "finish":
            stream.synchronize()
        print(json.dumps(answer), flush=True)


def _take(what: str, held: list[object]) -> str:
    """Memory that checkpoints may not know."""
    import torch

    if what == "ipc":
        held.append(tensor := torch.ones(8 * MIB, dtype=torch.uint8, device="cuda"))
        held.append(tensor.untyped_storage()._share_cuda_())
        return "a handle to be opened by other processes was made"
    torch.cuda.init()
    torch.cuda.current_stream().synchronize()
    pointer = ctypes.c_uint64()
    result = ctypes.CDLL(str(_core.driver_path())).cuMemAllocManaged(
        ctypes.byref(pointer), ctypes.c_size_t(8 * MIB), ctypes.c_uint(1)
    )
    ctypes.memset(pointer.value or 0, 1, 8 * MIB) if result == 0 else None
    return f"cuMemAllocManaged returned {result}"


def _work(stream: _core.CopyStream, address: int, allocator: Any) -> object:
    """Some seconds of it are under way when this returns."""
    if not SIMULATED:
        import torch

        torch.cuda._sleep(int(3e9))
        return None
    allocator.wake_up()
    block = _core.HostBlock(WEIGHTS_BYTES, -1)
    block.pin(0)
    for _ in range(10_000):  # each takes at least CUMEM_SLEEP_SIM_COPY_DELAY_US
        stream.to_host(block, 0, address, 4096)
    return block


def _calls() -> dict[str, Callable[[], object]]:
    driver, number = ctypes.CDLL(str(_core.driver_path())), ctypes.c_int()
    pointer = ctypes.c_void_p()
    calls: dict[str, Callable[[], object]] = {
        "cuDriverGetVersion": lambda: driver.cuDriverGetVersion(ctypes.byref(number)),
        "cuGetErrorName": lambda: driver.cuGetErrorName(2, ctypes.byref(pointer)),
        "cuDeviceGetCount": lambda: driver.cuDeviceGetCount(ctypes.byref(number)),
        "cuCtxGetCurrent": lambda: driver.cuCtxGetCurrent(ctypes.byref(pointer)),
        "cuMemGetInfo": lambda: _core.memory_info(0),
    }
    if not SIMULATED:
        import torch

        calls |= {
            "torch.cuda.current_device": torch.cuda.current_device,
            "torch.cuda.is_current_stream_capturing": torch.cuda.is_current_stream_capturing,
            "torch.cuda.memory_allocated": torch.cuda.memory_allocated,
            "torch.cuda.Event": torch.cuda.Event,
            "torch.cuda.Event().query": lambda: torch.cuda.Event().query(),
            "torch.empty": lambda: torch.empty(1, device="cuda"),
            "torch.cuda.synchronize": torch.cuda.synchronize,
        }
    return calls


def hog(left_mib: int) -> None:
    """All of the GPU's memory but so much, until it is killed."""
    import torch

    kept = []
    while (free := torch.cuda.mem_get_info()[0] - left_mib * MIB) >= 2 * MIB:
        kept.append(torch.empty(free // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device="cuda"))
    print(len(kept), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1:] == ["--target"]:
        serve()
    elif sys.argv[1:2] == ["--hog"]:
        hog(int(sys.argv[2]))
    elif sys.argv[1:2] == ["--do"]:
        _core.open_driver(driver_path("sim" if SIMULATED else "cuda"))
        print("begins", flush=True)
        print(json.dumps(do(sys.argv[2], int(sys.argv[3]), *map(float, sys.argv[4:]))))
    else:
        questions = (
            *(memory, illegal, restore_without_memory, calls_while_locked, lock_beside_work),
            *(
                ended_while_checkpointed,
                twenty_times,
                without_host_memory,
                refused,
                stopped,
                caller_killed,
                other_memory,
            ),
        )
        main(__doc__ or "", {question.__name__: question for question in questions}, timeout_s=150.0)
