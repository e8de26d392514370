"""The steps of the benchmark, in order. Filling is not part of the measured time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ... import _core
from ...allocator import CuMemAllocator
from ...errors import InvalidState
from ..console import Progress
from ..doctor.level_3 import refuse_unless_possible
from ..machine import machine_facts
from .host_memory import touch_host_memory
from .link import link_bytes, measure_link
from .memory import BenchMemory
from .report import BenchReport, BenchStep
from .workload import Room, Workload

_CHANGED_SEGMENT = 7  # of a model: gate_up_proj of the second layer, a large one
_POLL_S = 0.25
_TOUCHED_SHARE = 0.95  # of what is free: others on the machine need some, too


@dataclass(frozen=True)
class BenchOptions:
    """How to measure.

    Attributes:
        pause_s: how long to wait before the later wakes.
        deep: measure level 3 next to level 1, instead of all other steps.
        command: for the record.
    """

    device: int
    rounds: int
    pause_s: float
    deep: bool
    command: Sequence[str]


def run(
    allocator: CuMemAllocator, workload: Workload, room: Room, options: BenchOptions, progress: Progress
) -> BenchReport:
    """Measure. Everything is freed.

    Raises:
        CumemSleepError: the layer or the driver refused a call; level 3 is not possible.
        BackupMismatch: bytes did not come back.
    """
    if options.deep:
        progress("look whether level 3 is possible", 0, 0)
        refuse_unless_possible(options.device)
    with ExitStack() as stack:
        memory = BenchMemory(allocator, options.device)
        stack.callback(memory.close)
        progress("measure the link", 0, 0)
        link = measure_link(allocator, options.device, link_bytes(room))
        progress("allocate and fill", 0, 0)
        memory.allocate(workload.weights, workload.kv_cache)
        report = BenchReport(
            machine=machine_facts(_core.device_info(options.device).name, options.command),
            workload=workload.name,
            segments=len(workload.weights),
            weights_bytes=sum(workload.weights),
            kv_cache_bytes=sum(workload.kv_cache),
            rounds=options.rounds,
            host_memory_touched_before=not room.simulated,
            compress=allocator.settings.compress,
            link=link,
        )
        memory.fill(memory.weights)
        if not room.simulated:  # right before it is used, because a hypervisor reclaims free memory within seconds
            progress("prefault host memory", 0, 0)
            nbytes = min(
                2 * report.weights_bytes, int(_TOUCHED_SHARE * room.host_bytes)
            )  # the kernel may choose others
            touch_host_memory(nbytes, _core.device_info(room.device).numa_node)
        bench = _Bench(allocator, memory, report, options, progress)
        bench.play()
        return replace(report, steps=tuple(bench.steps))


class _Bench:
    def __init__(
        self,
        allocator: CuMemAllocator,
        memory: BenchMemory,
        report: BenchReport,
        options: BenchOptions,
        progress: Progress,
    ) -> None:
        self.steps: list[BenchStep] = []
        self._allocator = allocator
        self._memory = memory
        self._report = report
        self._options = options
        self._progress = progress
        self._round = 1

    def play(self) -> None:
        self._sleep("first sleep")
        self._wake("wake")
        if self._options.deep:  # it starts the helper
            self._sleep("first level 3 sleep", level=3)
            self._wake("wake")
        play_round = self._play_deep_round if self._options.deep else self._play_round
        for number in range(1, self._options.rounds + 1):
            self._round = number
            play_round()

    def _play_round(self) -> None:
        weights, later = self._memory.weights, f"{self._options.pause_s:g} s later"
        self._sleep("clean sleep")
        self._wake("wake")
        self._memory.fill(weights)
        self._sleep("dirty sleep")
        self._pause()
        self._wake(f"wake, {later}")
        self._memory.fill([weights[_CHANGED_SEGMENT % len(weights)]])
        self._sleep("one segment changed")
        self._wake("wake, weights", ["weights"])
        self._wake("wake, kv_cache", ["kv_cache"])
        self._allocator.release_backups()
        self._sleep("sleep without backups")
        self._pause()
        self._wake(f"wake, weights, {later}", ["weights"])
        self._wake("wake, kv_cache", ["kv_cache"])
        self._sleep("level 2 sleep", level=2)
        self._wake("level 2 wake")
        self._memory.fill(weights)
        self._prepare()
        self._sleep("prepared sleep")
        self._wake("wake")

    def _play_deep_round(self) -> None:
        self._sleep("level 1 sleep")
        self._wake("level 1 wake")
        self._sleep("level 3 sleep", level=3, parts=("unpin", "lock", "checkpoint"))
        self._wake("level 3 wake", parts=("restore", "unlock"))

    # Steps

    def _sleep(self, name: str, level: int = 1, parts: Sequence[str] = ()) -> None:
        self._show(name)
        start = time.perf_counter()
        report = self._allocator.sleep(level)
        seconds = time.perf_counter() - start
        if report.why_not_deeper:
            raise InvalidState(f"'{name}' stayed at level 1: {report.why_not_deeper}")
        backed_up = report.copied_bytes + report.clean_bytes
        held = sum(usage.host_bytes for usage in self._allocator.usage().values())
        step = BenchStep(
            name,
            self._round,
            seconds,
            report.copied_bytes,
            self._report.link.to_host_gbps,
            report.phases,
            host_bytes_per_byte=held / backed_up if backed_up else None,
            left_on_gpu_bytes=self._left_on_gpu(),
            checkpointed_bytes=report.checkpointed_bytes if level == 3 else None,
        )
        self._add(step, parts)

    def _wake(self, name: str, tags: Sequence[str] | None = None, parts: Sequence[str] = ()) -> None:
        self._show(name)
        start = time.perf_counter()
        report = self._allocator.wake_up(tags)
        seconds = time.perf_counter() - start
        link_gbps, verified = self._report.link.to_device_gbps, report.verified_bytes
        step = BenchStep(name, self._round, seconds, report.restored_bytes, link_gbps, report.phases, verified)
        self._add(step, parts)

    def _add(self, step: BenchStep, parts: Sequence[str]) -> None:
        """And what level 3 adds to it, as steps of their own."""
        self.steps.append(step)
        self.steps += [BenchStep(part, step.round, step.phases[part], 0, step.link_gbps) for part in parts]

    def _left_on_gpu(self) -> int:
        taken = self._allocator.checkpoint
        if taken is not None:  # nothing may ask the driver
            return taken.total_bytes[self._options.device] - taken.free_bytes[self._options.device]
        free_bytes, total_bytes = _core.memory_info(self._options.device)
        return total_bytes - free_bytes

    def _prepare(self) -> None:
        """Make the backups while the weights are awake, as a server does; here nothing else runs meanwhile."""
        self._show("prepare")
        start = time.perf_counter()
        preparation = self._allocator.prepare()
        try:
            while not preparation.wait(_POLL_S):
                done = self._allocator.usage()["weights"].backed_up_bytes
                self._show("prepare", done, self._report.weights_bytes)
        except BaseException:
            preparation.stop()
            raise
        seconds = time.perf_counter() - start
        if preparation.error is not None:
            raise preparation.error
        backed_up = self._allocator.usage()["weights"].backed_up_bytes
        self.steps.append(BenchStep("prepare", self._round, seconds, backed_up, self._report.link.to_host_gbps))

    def _pause(self) -> None:
        self._show(f"pause of {self._options.pause_s:g} s")
        time.sleep(self._options.pause_s)

    def _show(self, what: str, done: int = 0, total: int = 0) -> None:
        self._progress(f"round {self._round} of {self._options.rounds}: {what}", done, total)
