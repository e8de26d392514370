"""Runs every layer through the same steps, each layer in processes of its own, and keeps what they measured.

In each process: load a model's tensors, then sleep and wake as in `_main_process`; after every wake every byte is
checked, outside of the measured time. A first sleep is one per process, so what time is left goes to more processes
that stop after their first wake.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layers import LAYERS, NotInstalled

GIB = 1 << 30
MIB = 1 << 20
PAGE_BYTES = 2 * MIB

FIRST_SLEEP = "first sleep"
WAKE = "wake right after sleeping"
CLEAN_SLEEP = "later sleep, nothing changed"
LATE_WAKE = "wake 3 s after sleeping"
DIRTY_SLEEP = "later sleep, everything changed"
SLEEP_2 = "sleep at level 2"
WAKE_2 = "wake from level 2"
STEPS = (FIRST_SLEEP, WAKE, CLEAN_SLEEP, LATE_WAKE, DIRTY_SLEEP, SLEEP_2, WAKE_2)

HOOK_SEGMENT_BYTES = (20 * MIB, 2 * MIB)
HOOKS = tuple(
    f"{call} of a {nbytes // MIB} MiB segment" for nbytes in HOOK_SEGMENT_BYTES for call in ("malloc", "free")
)
LINK = ("to_host", "to_device")

ANSWER_S = 150.0  # the longest that one command may take
GRACE_S = 60.0


def qwen3_32b_bytes(decoder_layers: int, scale: int) -> list[int]:
    """Sizes of a Qwen3-32B's weights in bf16 as vLLM fuses them: 258 tensors, 61.02 GiB."""
    hidden, heads, kv_heads, head_dim, intermediate, vocabulary = 5120, 64, 8, 128, 25600, 151936
    attention = [(heads + 2 * kv_heads) * head_dim * hidden, hidden * heads * head_dim]
    mlp = [2 * intermediate * hidden, hidden * intermediate]
    parameters = [vocabulary * hidden, *(attention + mlp) * decoder_layers, vocabulary * hidden]
    return [2 * count // scale // 512 * 512 for count in parameters]


def segment_bytes(sizes: list[int]) -> int:
    """What tensors of these sizes take in segments, which are whole pages."""
    return sum(-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes)


@dataclass(frozen=True)
class Workload:
    """What is put to sleep, and for how long it may take.

    Attributes:
        sizes: bytes of each weight.
        kv_bytes: of the KV cache.
        processes: how often a first sleep is measured, at most.
        rounds: of later sleeps and wakes in the first of these processes, at most (`Layer.rounds` may be fewer).
        pause_s: before a late wake.
        deadline_s: no further process is started that would end later than this; what runs `GRACE_S` later is ended.
    """

    sizes: list[int]
    kv_bytes: int
    processes: int = 3
    rounds: int = 3
    pause_s: float = 3.0
    deadline_s: float = 480.0
    link_bytes: int = 8 * GIB
    hook_segments: int = 500

    @property
    def weights_bytes(self) -> int:
        return sum(self.sizes)


@dataclass
class Record:
    """What became of one layer.

    Attributes:
        seconds: of every step, in the order in which they were measured.
        wakes: that were followed by a check of every byte, which held.
        host_bytes: of host memory that the first sleep took.
        left_on_gpu_bytes: of device memory in use while asleep, the CUDA context included.
        not_installed: why it was not measured.
        error: what ended it; steps before that are kept.
    """

    version: str | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wakes_checked: int = 0
    host_bytes: list[int] = field(default_factory=list)
    left_on_gpu_bytes: list[int] = field(default_factory=list)
    not_installed: str | None = None
    error: str | None = None

    def add(self, step: str, seconds: float) -> None:
        self.seconds.setdefault(step, []).append(seconds)

    @property
    def state(self) -> str:
        if self.not_installed is not None:
            return f"NOT MEASURED: {self.not_installed}"
        if self.error is not None:
            return f"FAILED: {self.error}"
        return f"measured, {self.wakes_checked} wakes, all bytes equal after each"


class WorkerFailed(Exception):
    """The process ended, hung, or said that something went wrong."""


class Process:
    """A worker process: `ask` sends a command and returns its answer, or kills it at `ends_at` (`time.monotonic`)."""

    def __init__(self, layer: str, ends_at: float, **environment: str) -> None:
        folder = Path(__file__).resolve().parent
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed in close()
        self._ends_at = ends_at
        self._process = subprocess.Popen(
            [sys.executable, str(folder / "worker.py"), layer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path, "CUMEM_SLEEP_DISABLE": "1", **environment},  # leaves vLLM as it is
            bufsize=0,
        )
        self._unread = b""
        try:
            self.version: str = self.answer()["version"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.begin(command, **arguments)
        return self.answer(command)

    def begin(self, command: str, **arguments: Any) -> None:
        """As `ask`, without its answer."""
        with contextlib.suppress(BrokenPipeError):  # the answer, or its absence, says why
            self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")

    def close(self) -> None:
        """End the process, and wait until its memory is free again."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def answer(self, command: str = "start") -> dict[str, Any]:
        start = time.monotonic()
        deadline = min(start + ANSWER_S, self._ends_at)
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._process.kill()
                raise WorkerFailed(f"{command}: no answer within {deadline - start:.0f} s{self._last_words()}")
            read = self._process.stdout.read(1 << 16)
            if not read:
                raise WorkerFailed(f"{command}: ended with status {self._process.wait(60)}{self._last_words()}")
            self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "not_installed" in answer:
            raise NotInstalled(answer["not_installed"])
        if "error" in answer:
            print(answer["traceback"], file=sys.stderr)
            raise WorkerFailed(answer["error"] + self._last_words())
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()[-15:]
        return "".join(f"\n    | {line}" for line in lines)


class Recording:
    """All layers' records of one run, and the machine's."""

    def __init__(self, workload: Workload, say: Callable[[str], None]) -> None:
        self.workload = workload
        self.records: dict[str, Record] = {}
        self.link: dict[str, list[float]] = {}
        self.machine: dict[str, Any] = {}
        self.machine_error: str | None = None
        self._say = say
        self._start = time.monotonic()

    def run(self, layers: list[str]) -> None:
        self._measure_machine()
        lasted: dict[str, float] = {}
        for layer in layers:
            if self._elapsed_s > self.workload.deadline_s:
                self.records[layer] = Record(error=f"not started within {self.workload.deadline_s:.0f} s")
                continue
            lasted[layer] = self._run_process(layer, self._main_process)
        for number in range(2, self.workload.processes + 1):
            for layer in layers:
                record = self.records[layer]
                if record.error or record.not_installed:
                    continue
                if self._elapsed_s + lasted[layer] > self.workload.deadline_s:
                    self._say(f"{layer}: no process {number}, it would end after {self.workload.deadline_s:.0f} s")
                    continue
                self._run_process(layer, self._first_sleep_and_wake)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def _ends_at(self) -> float:
        return self._start + self.workload.deadline_s + GRACE_S

    def _measure_machine(self) -> None:
        try:
            with Process("none", self._ends_at) as process:
                self.link = process.ask("link", nbytes=self.workload.link_bytes, rounds=3)
                self.machine = process.ask("machine")
        except (WorkerFailed, NotInstalled) as error:
            self.machine_error = str(error)
        self._say(f"{self._elapsed_s:5.0f} s  machine and link: {self.machine_error or 'measured'}")

    def _run_process(self, layer: str, steps: Callable[[Process, str], float]) -> float:
        """One process of `layer`; returns the seconds that a shorter one would take."""
        record = self.records.setdefault(layer, Record())
        start = time.monotonic()
        short_s = 0.0
        try:
            with Process(layer, self._ends_at) as process:
                record.version = process.version
                short_s = steps(process, layer) - start
                closing = time.monotonic()
            short_s += time.monotonic() - closing
        except NotInstalled as error:
            record.not_installed = str(error)
        except WorkerFailed as error:
            record.error = str(error)
        self._say(f"{self._elapsed_s:5.0f} s  {layer}: {record.state}")
        return short_s

    def _main_process(self, process: Process, layer: str) -> float:
        record = self.records[layer]
        # First: after a sleep at level 2 a layer may give host memory back in the background.
        self._measure_hooks(process, record)
        after_first_wake = self._first_sleep_and_wake(process, layer)
        rounds = min(self.workload.rounds, LAYERS[layer].rounds)
        for _ in range(rounds):
            record.add(CLEAN_SLEEP, process.ask("sleep", level=1)["seconds"])
            time.sleep(self.workload.pause_s)  # the driver has scrubbed the freed memory by then
            self._wake_and_check(process, record, LATE_WAKE)
        for _ in range(rounds):
            process.ask("change")
            record.add(DIRTY_SLEEP, process.ask("sleep", level=1)["seconds"])
            self._wake_and_check(process, record, WAKE)
        if 2 in LAYERS[layer].levels:
            for _ in range(rounds):
                record.add(SLEEP_2, process.ask("sleep", level=2)["seconds"])
                record.add(WAKE_2, process.ask("wake")["seconds"])  # with undefined bytes
        return after_first_wake

    def _measure_hooks(self, process: Process, record: Record) -> None:
        segments = self.workload.hook_segments
        costs = process.ask("hook_cost", sizes=list(HOOK_SEGMENT_BYTES), segments=segments, rounds=5)
        for nbytes in HOOK_SEGMENT_BYTES:
            for call, seconds in costs[str(nbytes)].items():
                record.seconds[f"{call} of a {nbytes // MIB} MiB segment"] = seconds

    def _first_sleep_and_wake(self, process: Process, layer: str) -> float:
        record = self.records[layer]
        process.ask("load", sizes=self.workload.sizes, kv_bytes=self.workload.kv_bytes)
        # Right before it is needed: the hypervisor takes free memory away within seconds. As much as any layer takes.
        process.ask("touch_host_memory", nbytes=int(self.workload.weights_bytes * 1.3))
        slept = process.ask("sleep", level=1)
        record.add(FIRST_SLEEP, slept["seconds"])
        record.host_bytes.append(slept["host_bytes"])
        record.left_on_gpu_bytes.append(slept["left_on_gpu_bytes"])
        self._wake_and_check(process, record, WAKE)
        return time.monotonic()

    def _wake_and_check(self, process: Process, record: Record, step: str) -> None:
        seconds = process.ask("wake")["seconds"]
        checked = process.ask("check")
        if checked["differing_tensors"]:
            raise WorkerFailed(f"{step}: bytes differ after it, in tensors {checked['differing_tensors']}")
        assert checked["checked_tensors"] == len(self.workload.sizes)
        record.add(step, seconds)
        record.wakes_checked += 1
