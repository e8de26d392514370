"""The steps of the benchmark, in order. Filling and checking are not part of the measured time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from ... import _core
from ...allocator import CuMemAllocator
from ...digest.device import DeviceDigester
from ...errors import InvalidState
from ...report import SleepReport, WakeReport
from ..console import Progress
from ..doctor.level_3 import refuse_unless_possible
from ..machine import machine_facts
from .host_memory import touch_host_memory
from .link import link_bytes, measure_link
from .memory import DeviceMemory, Region, open_memory
from .report import BenchReport, BenchStep, DigestSpeed, StepKind
from .workload import Room, Workload

_CHANGED_SEGMENT = 7  # of a model: gate_up_proj of the second layer, a large one
_POLL_S = 0.25
_TOUCHED_SHARE = 0.95  # of what is free: others on the machine need some, too


@dataclass(frozen=True)
class BenchOptions:
    """How to measure.

    Attributes:
        pause_s: how long to wait before the later wakes.
        touch_host_memory: prefault host memory before the measurement.
        deep: measure level 3 next to level 1, instead of all other steps.
        command: for the record.
    """

    device: int = 0
    rounds: int = 3
    pause_s: float = 3.0
    touch_host_memory: bool = True
    deep: bool = False
    command: Sequence[str] = ("cumem-sleep", "bench")


def run(
    allocator: CuMemAllocator, workload: Workload, room: Room, options: BenchOptions, progress: Progress
) -> BenchReport:
    """Measure. The run ends at the first wake after which bytes differ, and the report says so. Everything is freed.

    Raises:
        CumemSleepError: the layer or the driver refused a call; level 3 is not possible.
    """
    if _core.segments():
        raise InvalidState("this process already has memory of the layer: run bench in a process of its own")
    if options.deep:
        progress("look whether level 3 is possible", 0, 0)
        refuse_unless_possible(options.device)
    with ExitStack() as stack:
        memory = open_memory(allocator, options.device)
        stack.callback(_close, allocator, memory)
        progress("measure the link", 0, 0)
        link = measure_link(allocator, options.device, link_bytes(room))
        progress("allocate and fill", 0, 0)
        weights = memory.allocate(workload.weights, "weights")
        kv_cache = memory.allocate(workload.kv_cache, "kv_cache")
        _check_segments((*weights, *kv_cache))
        usage = allocator.usage()
        report = BenchReport(
            machine=machine_facts(_core.device_info(options.device).name, options.command),
            workload=workload.name,
            segments=usage["weights"].segments,
            weights_bytes=usage["weights"].bytes,
            kv_cache_bytes=usage["kv_cache"].bytes,
            rounds=options.rounds,
            host_memory_touched_before=options.touch_host_memory,
            link=link,
            compress=allocator.settings.compress,
            steps=(),
        )
        bench = _Bench(allocator, memory, weights, kv_cache, report, options, progress)
        touch = partial(_touch_host_memory, workload, room, progress) if options.touch_host_memory else _nothing
        try:
            bench.play(touch)
        except _WrongBytesError as error:
            return replace(report, steps=tuple(bench.steps), wrong=str(error))
        return replace(report, steps=tuple(bench.steps), digest=bench.digest_speed())


class _WrongBytesError(Exception):
    """After a wake some bytes differ, so there is no point in going on."""


class _Bench:
    def __init__(
        self,
        allocator: CuMemAllocator,
        memory: DeviceMemory,
        weights: tuple[Region, ...],
        kv_cache: tuple[Region, ...],
        report: BenchReport,
        options: BenchOptions,
        progress: Progress,
    ) -> None:
        self.steps: list[BenchStep] = []
        self._allocator = allocator
        self._memory = memory
        self._weights = weights
        self._kv_cache = kv_cache
        self._report = report
        self._options = options
        self._progress = progress
        self._expected: list[int] | None = None  # None: the weights are undefined
        self._round = 1

    def play(self, touch_host_memory: Callable[[], None]) -> None:
        self._rewrite(self._weights)
        touch_host_memory()  # right before it is used, because a hypervisor reclaims free memory within seconds
        self._sleep("first sleep")
        self._wake("wake")
        if self._options.deep:  # it starts the helper
            self._sleep("first level 3 sleep", level=3)
            self._wake("wake")
        for number in range(1, self._options.rounds + 1):
            self._round = number
            if self._options.deep:
                self._play_deep_round()
            else:
                self._play_round()

    def digest_speed(self) -> DigestSpeed:
        """Measured on all weights, after a warm-up (which may compile the kernel)."""
        self._progress("digest", 0, 0)
        segments = [segment for segment in _core.segments() if segment.tag == "weights"]
        digester = DeviceDigester(CuMemAllocator.tuning)
        seconds = []
        self._memory.settle()
        with _core.CurrentContext():
            digester.of(segments)
            for _ in range(max(3, self._options.rounds)):
                start = time.perf_counter()
                digester.of(segments)
                seconds.append(time.perf_counter() - start)
        return DigestSpeed(self._report.weights_bytes, tuple(seconds))

    def _play_round(self) -> None:
        later = f"{self._options.pause_s:g} s later"
        self._sleep("clean sleep")
        self._wake("wake")
        self._rewrite(self._weights)
        self._sleep("dirty sleep")
        self._pause()
        self._wake(f"wake, {later}")
        self._rewrite([self._weights[_CHANGED_SEGMENT % len(self._weights)]])
        self._sleep("one segment changed")
        self._wake("wake, weights", ["weights"])
        self._wake("wake, kv_cache", ["kv_cache"])
        self._allocator.release_backups()
        self._sleep("sleep without backups")
        self._pause()
        self._wake(f"wake, weights, {later}", ["weights"])
        self._wake("wake, kv_cache", ["kv_cache"])
        self._sleep("level 2 sleep", level=2)
        self._expected = None
        self._wake("level 2 wake")
        self._rewrite(self._weights)
        self._prepare()
        self._sleep("prepared sleep")
        self._wake("wake")

    def _play_deep_round(self) -> None:
        self._sleep("level 1 sleep")
        self._wake("level 1 wake")
        slept = self._sleep("level 3 sleep", level=3)
        self._add_parts(StepKind.SLEEP, slept.phases, ("unpin", "lock", "checkpoint"))
        woke = self._wake("level 3 wake")
        self._add_parts(StepKind.WAKE, woke.phases, ("restore", "unlock"))

    # Steps

    def _add_parts(self, kind: StepKind, phases: Mapping[str, float], names: Sequence[str]) -> None:
        """What level 3 adds to a call, as steps of their own."""
        link_gbps = self._report.link.gbps(kind)
        self.steps += [BenchStep(name, kind, self._round, phases[name], 0, link_gbps) for name in names]

    def _left_on_gpu(self) -> int:
        taken = self._allocator.checkpoint
        if taken is not None:  # nothing may ask the driver
            return taken.total_bytes[self._options.device] - taken.free_bytes[self._options.device]
        free_bytes, total_bytes = _core.memory_info(self._options.device)
        return total_bytes - free_bytes

    def _sleep(self, name: str, level: int = 1) -> SleepReport:
        self._show(name)
        self._memory.settle()
        start = time.perf_counter()
        report = self._allocator.sleep(level)
        seconds = time.perf_counter() - start
        if report.why_not_deeper:
            raise InvalidState(f"'{name}' stayed at level 1: {report.why_not_deeper}")
        backed_up = report.copied_bytes + report.clean_bytes
        held = sum(usage.host_bytes for usage in self._allocator.usage().values())
        self.steps.append(
            BenchStep(
                name,
                StepKind.SLEEP,
                self._round,
                seconds,
                report.copied_bytes,
                self._report.link.gbps(StepKind.SLEEP),
                report.phases,
                host_bytes_per_byte=held / backed_up if backed_up else None,
                left_on_gpu_bytes=self._left_on_gpu(),
                checkpointed_bytes=report.checkpointed_bytes if level == 3 else None,
            )
        )
        return report

    def _wake(self, name: str, tags: Sequence[str] | None = None) -> WakeReport:
        self._show(name)
        start = time.perf_counter()
        report = self._allocator.wake_up(tags)
        seconds = time.perf_counter() - start
        differences = self._differences(kv_is_awake=tags != ["weights"])
        self.steps.append(
            BenchStep(
                name,
                StepKind.WAKE,
                self._round,
                seconds,
                report.restored_bytes,
                self._report.link.gbps(StepKind.WAKE),
                report.phases,
                verified_bytes=0 if self._expected is None else self._report.weights_bytes,
            )
        )
        if differences:
            more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
            raise _WrongBytesError(f"after '{name}' in round {self._round}: {differences[0]}{more}")
        return report

    def _prepare(self) -> None:
        """Make the backups while the weights are awake, as a server does; here nothing else runs meanwhile."""
        self._show("prepare")
        self._memory.settle()
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
        link_gbps = self._report.link.gbps(StepKind.PREPARE)
        self.steps.append(BenchStep("prepare", StepKind.PREPARE, self._round, seconds, backed_up, link_gbps))

    def _pause(self) -> None:
        self._show(f"pause of {self._options.pause_s:g} s")
        time.sleep(self._options.pause_s)

    # Contents

    def _rewrite(self, regions: Sequence[Region]) -> None:
        """Write fresh random bytes, and record the checksums to expect from now on."""
        self._show("fill")
        self._memory.fill(regions)
        if self._expected is None:
            self._expected = self._memory.checksums(self._weights)
        else:
            for region, checksum in zip(regions, self._memory.checksums(regions), strict=True):
                self._expected[region.index] = checksum

    def _differences(self, kv_is_awake: bool) -> list[str]:
        """The weight segments that changed. The KV cache is overwritten first, in case they share a page."""
        self._show("check")
        if kv_is_awake:
            self._memory.fill(self._kv_cache)
        if self._expected is None:
            return []
        actual = self._memory.checksums(self._weights)
        return [
            f"{region} has checksum {now:016x}, not {before:016x}"
            for region, before, now in zip(self._weights, self._expected, actual, strict=True)
            if now != before
        ]

    def _show(self, what: str, done: int = 0, total: int = 0) -> None:
        self._progress(f"round {self._round} of {self._options.rounds}: {what}", done, total)


def _touch_host_memory(workload: Workload, room: Room, progress: Progress) -> None:
    """Prefault more than the backups need, since the kernel may choose other pages for them."""
    nbytes = 2 * workload.weights_bytes
    if room.host_bytes is not None:
        nbytes = min(nbytes, int(_TOUCHED_SHARE * room.host_bytes))
    show: Callable[[int], None] = lambda done: progress("prefault host memory", done, nbytes)  # noqa: E731
    touch_host_memory(nbytes, _core.device_info(room.device).numa_node, show)


def _close(allocator: CuMemAllocator, memory: DeviceMemory) -> None:
    if _core.driver_calls_suspended():  # an interrupt at level 3, where PyTorch's calls would wait for ever
        allocator.release_backups()
    memory.close()


def _nothing() -> None:
    pass


def _check_segments(regions: Sequence[Region]) -> None:
    """Make sure that each is a segment of the layer: otherwise memory that never sleeps would be checked."""
    sizes = {segment.address: segment.bytes for segment in _core.segments()}
    for region in regions:
        if sizes.get(region.address, 0) < region.nbytes:
            raise InvalidState(f"{region} is not a segment of the layer: is PyTorch's caching allocator disabled?")
