"""Whatever fails, the state stays whole: each driver call, each kind of host memory, each interrupt."""

from __future__ import annotations

import contextlib
import ctypes
import dis
import gc
import inspect
import itertools
import linecache
import os
import pathlib
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from support import (
    AWAKE,
    BACKED_UP,
    DEVICE_BYTES,
    DROPPED,
    MIB,
    PAGE,
    assert_clean_exit,
    assert_no_threads,
    bf16_weights,
    free_everything,
    fresh_allocator,
    in_thread,
    is_accessible,
    patch_touch,
    quick_sums,
    reset_simulation,
    run_script,
)

from cumem_sleep import (
    BackupMismatch,
    CuMemAllocator,
    CumemSleepError,
    DriverError,
    InvalidState,
    OutOfDeviceMemory,
    OutOfHostMemory,
    _core,
    report,
    sim,
)
from cumem_sleep import allocator as allocator_module
from cumem_sleep.backups import backup, filling, host, store
from cumem_sleep.backups import limits as host_limits
from cumem_sleep.codec import compressor, lent, slots, workbench
from cumem_sleep.digest import device as digest_device
from cumem_sleep.digest.device import DigestRun
from cumem_sleep.operations import layer, prepare, sleep, wake
from cumem_sleep.transfer import lanes, pacing, restorer, routes

pytestmark = pytest.mark.sim

MakeAllocator = Callable[..., CuMemAllocator]

MANY = 1_000_000
HOST_PAGE = 4096


class World:
    """An allocator with a segment of each kind, and what their bytes have to be.

    Bytes are read and written at their addresses, which the simulated driver allows, so that no call is made for it.
    """

    TAGS = ("weights", "kv_cache", "default")

    def __init__(self, devices: int = 1, device_bytes: int | None = None, **settings: object) -> None:
        """Args: device_bytes: what the devices have from when all is allocated; None: plenty."""
        self.allocator = fresh_allocator(**settings)
        self.start_over = partial(World.__init__, self, devices, device_bytes, **settings)
        self.contents: dict[int, bytes | None] = {}  # by the segment's id; None: undefined, the bytes were dropped
        self.extra = 0  # a segment that a phase makes and frees
        random = np.random.default_rng(0)
        self._compresses = settings.get("compress") == "auto"
        self._random_bytes = bf16_weights(PAGE + 4096, random) if self._compresses else random.bytes(PAGE + 4096)
        self._defined = 0
        sim.configure(devices=devices, device_bytes=DEVICE_BYTES)
        self.devices = devices
        for device in range(devices):
            for tag in self.TAGS:
                self.allocator.malloc(PAGE, tag, device)
        if device_bytes is not None:
            sim.configure(devices=devices, device_bytes=device_bytes)
        self.define()

    @property
    def segments(self) -> list[_core.Segment]:
        return _core.segments()

    def state(self) -> dict[int, tuple[str, _core.Segment.Sleep, bool]]:
        return {segment.address: (segment.tag, segment.sleep, segment.has_memory) for segment in self.segments}

    def held(self) -> tuple[int, ...]:
        """All that the driver holds for this process; equal states hold the same, but for how backups are stored."""
        if self.unaccounted_bytes():
            gc.collect()
        _core.release_waiter(0)  # what makes many frees cheap is kept until the next sleep or wake
        stats = sim.stats()
        registered_bytes = self.unaccounted_bytes() if self._compresses else stats.registered_bytes
        free_bytes = [_core.memory_info(device)[0] for device in range(self.devices)]
        return stats.live_handles, stats.mapped_bytes, stats.reserved_bytes, registered_bytes, *free_bytes

    def unaccounted_bytes(self) -> int:
        """Registered host memory that the store does not know of; an exception that nobody dropped may hold some."""
        store = self.allocator._store
        blocks = [block for backup in store._backups.values() for block in backup.extents if block.pinned]
        pages = sum(-(-block.bytes // HOST_PAGE) for block in blocks)
        return sim.stats().registered_bytes - pages * HOST_PAGE - store._tier.unreleased_bytes

    def define(self) -> None:
        """New bytes where they are undefined. All must be awake."""
        for segment in self.segments:
            if self.contents.get(segment.id) is None and segment.address != self.extra:
                self._defined = (self._defined + 2) % 4096
                content = self._random_bytes[self._defined : self._defined + PAGE]
                ctypes.memmove(segment.address, content, PAGE)
                self.contents[segment.id] = content

    def change(self) -> None:
        """Change one byte of each segment, to what it has not been for long: a backup may be of any content before."""
        for segment in self.segments:
            content = self.contents[segment.id]
            assert content is not None
            changed = bytes([(content[0] + 1) % 256]) + content[1:]
            ctypes.memmove(segment.address, changed, 1)
            self.contents[segment.id] = changed

    def note_drops(self) -> None:
        """Bytes of what was dropped are undefined from here on."""
        for segment in self.segments:
            if segment.sleep == DROPPED:
                self.contents[segment.id] = None

    def check_bytes(self) -> None:
        """Whatever is awake and defined has its bytes."""
        for segment in self.segments:
            content = self.contents.get(segment.id)
            if segment.sleep == AWAKE and content is not None:
                assert segment.has_memory, f"{segment.tag} is awake without memory"
                assert is_accessible(segment.address), f"{segment.tag} is awake without access"
                assert ctypes.string_at(segment.address, PAGE) == content, f"bytes of {segment.tag}"

    def check_all_is_told(self, error: CumemSleepError) -> None:
        """After a failed sleep: what is awake has its bytes, and everything else is named, and counted as asleep."""
        self.check_bytes()
        asleep = [segment for segment in self.segments if segment.sleep != AWAKE]
        assert len(error.asleep_segments) == len(asleep), error
        assert error.lost_segments == ()
        for segment in asleep:
            assert f"segment {segment.tag} at 0x{segment.address:x}" in str(error)
        usage = self.allocator.usage()
        assert sum(each.asleep_segments for each in usage.values()) == len(asleep)

    def wake(self) -> None:
        """Wake all; every defined byte is right."""
        self.note_drops()
        self.allocator.wake_up()
        self.check_bytes()
        self.define()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    reset_simulation()
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", MIB)  # two blocks for each segment
    monkeypatch.setattr("cumem_sleep.digest.device.sums_of", quick_sums)  # what it tells apart is not the question here
    monkeypatch.setattr(host_limits, "mem_available_bytes", lambda enough=None: None)  # reads hundreds of files
    current = World()
    yield current
    free_everything()
    reset_simulation()


# Every driver call fails once


@dataclass(frozen=True)
class Phase:
    """One operation, from a state that `prepare` reaches from any other."""

    name: str
    prepare: Callable[[World], object]
    operate: Callable[[World], object]

    def __str__(self) -> str:
        return self.name


def _awake_without_backups(world: World) -> None:
    world.wake()
    world.allocator.release_backups()


def _awake_with_backups(world: World) -> None:
    world.wake()
    if any(world.allocator._store.get(segment) is None for segment in world.segments if segment.tag != "kv_cache"):
        world.allocator.sleep()
        world.wake()


def _changed(world: World) -> None:
    _awake_with_backups(world)
    world.change()


def _asleep(world: World) -> None:
    world.wake()
    world.allocator.sleep()
    world.note_drops()


def _asleep_at_level_2(world: World) -> None:
    world.wake()
    world.allocator.sleep(2)
    world.note_drops()


def _malloc(world: World) -> None:
    world.extra = world.allocator.malloc(PAGE, "weights")


def _free(world: World) -> None:
    world.allocator.free(world.extra)
    world.extra = 0


def _without_extra(world: World) -> None:
    if world.extra:
        _free(world)


def _extra_asleep(world: World) -> None:
    _without_extra(world)
    world.wake()
    _malloc(world)
    world.allocator.sleep()
    world.note_drops()


def _extra_awake(world: World) -> None:
    _without_extra(world)
    world.wake()
    _malloc(world)


PHASES = [
    Phase("malloc", _without_extra, _malloc),
    Phase("first sleep", _awake_without_backups, lambda world: world.allocator.sleep()),
    Phase("sleep of changed", _changed, lambda world: world.allocator.sleep()),
    Phase("sleep of clean", _awake_with_backups, lambda world: world.allocator.sleep()),
    Phase("sleep at level 2", _awake_with_backups, lambda world: world.allocator.sleep(2)),
    Phase("discard", _awake_with_backups, lambda world: world.allocator.discard(["kv_cache", "weights"])),
    Phase("wake of weights", _asleep, lambda world: world.allocator.wake_up("weights")),
    Phase("wake of all", _asleep, lambda world: world.allocator.wake_up()),
    Phase("wake after level 2", _asleep_at_level_2, lambda world: world.allocator.wake_up()),
    Phase("free awake", _extra_awake, _free),
    Phase("free asleep", _extra_asleep, _free),
    Phase("release backups", _awake_with_backups, lambda world: world.allocator.release_backups()),
    Phase("usage", _asleep, lambda world: world.allocator.usage()),
]


def _check_one_failure(world: World, phase: Phase, call: str, position: int, error_name: str) -> None:
    phase.prepare(world)
    world.allocator._store._tier._numa_nodes.clear()  # so that the device is asked again
    before = world.state()
    sim.reset()
    sim.fail(call, after=position, error=error_name)
    failed = True
    try:
        phase.operate(world)
        failed = False
    except CumemSleepError as error:
        _check_names_the_call(error, call, error_name)
    assert sim.stats().calls[call] > position, "the call was not reached"
    sim.reset()
    if failed:
        assert world.state() == before, "a failed operation changed the state"
        world.check_bytes()
        phase.operate(world)


def _check_names_the_call(error: CumemSleepError, call: str, error_name: str) -> None:
    if isinstance(error, OutOfHostMemory):
        assert error.limit == call, error
    else:
        assert isinstance(error, DriverError), repr(error)
        assert (error.call, error.error) == (call, error_name)
    assert call in str(error), error


# Half of all calls, the same around every step: at each position in some of the phases is enough.
CONTEXT_CALLS = {
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuCtxSetCurrent",
    "cuThreadExchangeStreamCaptureMode",
}
ALL_CALLS_OF = ("malloc", "first sleep", "wake of all", "free awake", "free asleep", "release backups", "usage")


@pytest.mark.slow
@pytest.mark.parametrize("error_name", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_every_driver_call_may_fail_once(world: World, phase: Phase, error_name: str) -> None:
    check_every_call(world, phase, error_name, error_name == "CUDA_ERROR_UNKNOWN" and phase.name in ALL_CALLS_OF)


@pytest.mark.slow
def test_every_driver_call_of_a_wake_of_two_devices_may_fail_once(world: World) -> None:
    free_everything()
    world.__init__(devices=2)  # type: ignore[misc]
    phase = next(phase for phase in PHASES if phase.name == "wake of all")
    check_every_call(world, phase, "CUDA_ERROR_UNKNOWN", False)


def check_every_call(world: World, phase: Phase, error_name: str, context_calls_too: bool) -> None:
    phase.prepare(world)
    world.allocator._store._tier._numa_nodes.clear()  # so that the device is asked again
    sim.reset()
    phase.operate(world)
    calls = {call: count for call, count in sim.stats().calls.items() if count}
    if not context_calls_too:
        calls = {call: count for call, count in calls.items() if call not in CONTEXT_CALLS}
    expected, held = list(world.state().values()), world.held()
    problems = []
    for call, count in calls.items():
        for position in range(count):
            try:
                _check_one_failure(world, phase, call, position, error_name)
                assert list(world.state().values()) == expected, "the state after a retry"
                assert world.held() == held, "held after a retry: handles, mapped, reserved, registered, free"
                world.wake()
            except Exception as error:
                problems.append(f"{call} number {position + 1} of {count}: {type(error).__name__}: {error}")
                _start_over(world)
    assert not problems, f"{len(problems)} of {sum(calls.values())}:\n" + "\n".join(problems[:20])


def _start_over(world: World) -> None:
    """After a failed check: what is left behind is known already, so the next check starts from nothing."""
    sim.reset()
    with contextlib.suppress(Exception, AssertionError):
        free_everything()
    for segment in _core.segments():
        with contextlib.suppress(CumemSleepError):
            _core.free(segment.address)
    CuMemAllocator.instance = None
    gc.collect()
    sim.reset()
    world.start_over()


# Several calls fail, for long


class TestPersistentFailures:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "call",
        [
            "cuMemUnmap",
            "cuMemRelease",
            "cuMemHostRegister",
            "cuMemHostUnregister",
            "cuMemMap",
            "cuMemCreate",
            "cuMemSetAccess",
            "cuMemAddressFree",
            "cuStreamCreate",
            "cuStreamDestroy",
            "cuStreamSynchronize",
            "cuCtxSynchronize",
            "cuMemcpyDtoHAsync",
            "cuMemcpyHtoDAsync",
            "cuMemFree",
            "cuMemAlloc",
        ],
    )
    @pytest.mark.parametrize("error_name", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"])
    def test_all_works_again_afterwards(self, world: World, call: str, error_name: str) -> None:
        """Through a whole cycle with one call out of order, whatever raises; then all is whole, and nothing is lost."""
        allocator = world.allocator
        operations: list[Callable[[], object]] = [
            lambda: allocator.sleep(offload_tags=World.TAGS),
            lambda: allocator.wake_up("weights"),
            allocator.wake_up,
            allocator.usage,
            allocator.release_backups,
            lambda: allocator.malloc(PAGE, "default"),
            lambda: allocator.free(extra),
        ]
        for first in range(len(operations)):
            extra = allocator.malloc(PAGE, "default")
            world.define()
            sim.fail(call, error=error_name, times=MANY)
            for operation in operations[first:]:
                with contextlib.suppress(CumemSleepError):
                    operation()
            sim.reset()
            world.wake()
            for segment in world.segments[len(World.TAGS) :]:
                allocator.free(segment.address)

    def test_memory_that_the_driver_keeps_is_given_back_later(self, world: World) -> None:
        """A sleep that cannot release is honest about it, and the next operation tries again."""
        sim.fail("cuMemRelease", times=MANY, error="CUDA_ERROR_UNKNOWN")
        report = world.allocator.sleep()
        assert report.freed_bytes == 0
        assert {usage.mapped_bytes for usage in world.allocator.usage().values()} == {PAGE}
        sim.reset()
        assert {usage.mapped_bytes for usage in world.allocator.usage().values()} == {0}
        assert sim.stats().live_handles == 0
        world.wake()

    def test_malloc_takes_memory_that_the_driver_kept(self, world: World) -> None:
        """Before it says that memory is out, it asks the driver once more to release what sleeps."""
        sim.fail("cuMemRelease", times=MANY, error="CUDA_ERROR_UNKNOWN")
        world.allocator.sleep()
        sim.reset()
        free_bytes, _ = _core.memory_info(0)
        eater = world.allocator.malloc(free_bytes + 3 * PAGE, "eater")
        world.allocator.free(eater)
        world.wake()

    def test_wake_uses_memory_that_the_driver_kept(self, world: World) -> None:
        sim.fail("cuMemRelease", times=MANY, error="CUDA_ERROR_UNKNOWN")
        world.allocator.sleep()
        assert world.allocator.wake_up().mapped_bytes == 3 * PAGE
        sim.reset()
        world.wake()
        assert sim.stats().live_handles == 3

    @pytest.mark.parametrize("poison", [False, True])
    def test_a_failed_sleep_that_cannot_be_undone_loses_nothing(self, world: World, poison: bool) -> None:
        """What cannot be mapped again counts as asleep; its bytes come back with the next wake, backed up or not."""
        if poison:
            free_everything()
            world.__init__(poison=True)  # type: ignore[misc]
        sim.fail("cuMemUnmap", after=2, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemMap", times=MANY, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemUnmap"):
            world.allocator.sleep(offload_tags=())
        sim.reset()
        assert sum(segment.sleep != AWAKE for segment in world.segments) == 2
        assert all(segment.has_memory for segment in world.segments)
        world.allocator.wake_up()
        world.check_bytes()

    def test_a_failed_wake_that_cannot_be_undone_stays_asleep(self, world: World) -> None:
        world.allocator.sleep()
        world.note_drops()
        sim.fail("cuMemMap", after=2, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemUnmap", times=MANY, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemMap"):
            world.allocator.wake_up()
        assert all(segment.sleep != AWAKE for segment in world.segments)
        sim.reset()
        world.wake()

    def test_access_that_cannot_be_set_again(self, world: World) -> None:
        """Neither that nor taking the mapping back: then it sleeps, with its bytes, and whoever asks is told."""
        sim.fail("cuMemUnmap", after=2, times=3, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemSetAccess", times=1, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemUnmap") as raised:
            world.allocator.sleep()
        sim.reset()
        world.check_all_is_told(raised.value)
        world.allocator.wake_up()
        assert [segment.sleep for segment in world.segments] == [AWAKE] * 3
        world.check_bytes()

    @pytest.mark.parametrize("phase", ["first sleep", "sleep at level 2", "wake of all", "wake after level 2"])
    @pytest.mark.parametrize("refused", ["cuMemMap", "cuMemSetAccess"])
    def test_refusals_in_a_row(self, world: World, phase: str, refused: str) -> None:
        """Up to four of unmapping, beside up to four of mapping, at every position: nothing awake is out of reach."""
        operation = next(each for each in PHASES if each.name == phase)
        positions = range(len(World.TAGS))
        for first, times, map_first, map_times in itertools.product(positions, (1, 3, 4), positions, (1, 2, 3, 4)):
            operation.prepare(world)
            sim.reset()
            sim.fail("cuMemUnmap", after=first, times=times, error="CUDA_ERROR_UNKNOWN")
            sim.fail(refused, after=map_first, times=map_times, error="CUDA_ERROR_UNKNOWN")
            was_asleep = world.segments[0].sleep != AWAKE
            error = None
            try:
                operation.operate(world)
            except CumemSleepError as raised:
                error = raised
            sim.reset()
            if was_asleep and error is not None:
                assert all(segment.sleep != AWAKE for segment in world.segments), "a failed wake"
            elif error is not None:
                world.check_all_is_told(error)
                world.allocator.wake_up()
                assert all(segment.sleep == AWAKE for segment in world.segments)
                world.check_bytes()  # of what was to be dropped as well
            world.wake()

    def test_bytes_that_a_failed_sleep_kept_outlast_a_failed_wake(self, world: World) -> None:
        """They were not backed up, so only their memory has them: a wake that is undone must not give it back."""
        sim.fail("cuMemUnmap", after=2, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemMap", times=4, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemUnmap") as raised:
            world.allocator.sleep(offload_tags=())
        assert len(raised.value.asleep_segments) == 2
        sim.reset()
        for call in ("cuMemMap", "cuMemSetAccess"):
            sim.fail(call, after=1, error="CUDA_ERROR_UNKNOWN")
            with pytest.raises(DriverError, match=call):
                world.allocator.wake_up()
        world.allocator.wake_up()
        world.check_bytes()

    @pytest.mark.parametrize("offload_tags", [(), World.TAGS])
    def test_a_sleep_that_is_asked_for_again_releases_what_it_left(
        self, world: World, offload_tags: tuple[str, ...]
    ) -> None:
        sim.fail("cuMemUnmap", after=2, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemMap", times=4, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemUnmap"):
            world.allocator.sleep(offload_tags=offload_tags)
        assert sim.stats().live_handles == 3
        world.allocator.sleep(offload_tags=offload_tags)
        assert sim.stats().live_handles == 0
        world.wake()

    def test_a_wake_sets_access_that_one_before_it_could_not(self, world: World) -> None:
        """What that mapped is mapped still, since the driver refuses to unmap anything."""
        world.allocator.sleep()
        world.note_drops()
        sim.fail("cuMemUnmap", times=MANY, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemSetAccess", after=1, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemSetAccess"):
            world.allocator.wake_up()
        assert all(segment.sleep != AWAKE for segment in world.segments)
        world.allocator.wake_up()
        assert all(is_accessible(segment.address) for segment in world.segments)
        world.check_bytes()

    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_full_device_and_a_failed_wait(self, times: int) -> None:
        """On a full device freeing waits by way of host memory; if that fails, nothing of it may stay."""
        process = run_script(
            f"TIMES = {times}",
            """
            reset_simulation()
            allocator = fresh_allocator()
            allocator.malloc(PAGE)
            eater = allocator.malloc(_core.memory_info(0)[0])
            sim.fail("cuMemHostUnregister", error="CUDA_ERROR_UNKNOWN", times=TIMES)
            try:
                allocator.free(eater)
            except DriverError:
                allocator.free(eater)
            assert sim.stats().registered_bytes == 0
            free_everything()
            """,
        )
        assert_clean_exit(process)


class TestCopiesInFlight:
    """When a later step fails, earlier copies still run: no memory of theirs may be taken away before they end."""

    SCRIPT = """
        reset_simulation()
        allocator, memory = fresh_allocator(verify="off", retain_backups=False), Memory()
        contents = {}
        for tag in ("weights", "default", "lora"):
            address = allocator.malloc(PAGE, tag)
            contents[address] = memory.fill_random(address, PAGE)
        memory.close()
        if OPERATION == "wake_up":
            allocator.sleep()
        sim.fail(CALL, after=AFTER, error="CUDA_ERROR_UNKNOWN", times=TIMES)
        try:
            getattr(allocator, OPERATION)()
        except DriverError as error:
            failed = error  # and with it, all that its frames hold
        assert failed.call == CALL
        assert len({segment.sleep for segment in _core.segments()}) == 1
        _core.synchronize(0)  # fails if work on the device found its memory gone
        allocator.wake_up()
        for address, content in contents.items():
            assert memory.read(address, PAGE) == content
        memory.close()
        del failed
        free_everything()
        """

    def check(self, operation: str, call: str, after: int = 2, times: int = 1) -> None:
        constants = f"OPERATION, CALL, AFTER, TIMES = {operation!r}, {call!r}, {after}, {times}\n"
        assert_clean_exit(run_script(constants, self.SCRIPT, CUMEM_SLEEP_SIM_COPY_DELAY_US="20000"))

    @pytest.mark.slow
    @pytest.mark.parametrize("call", ["cuMemMap", "cuMemCreate", "cuMemSetAccess", "cuMemcpyHtoDAsync"])
    def test_at_wake(self, call: str) -> None:
        """The first three in the thread that maps ahead, while what it mapped before is being filled."""
        self.check("wake_up", call)

    @pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemcpyDtoHAsync"])
    def test_at_sleep(self, call: str) -> None:
        self.check("sleep", call)

    # Three times: also while the stream is given back.
    @pytest.mark.slow
    @pytest.mark.parametrize(("operation", "times"), [("sleep", 1), ("sleep", 3), ("wake_up", 1), ("wake_up", 3)])
    def test_waiting_for_them_fails(self, operation: str, times: int) -> None:
        self.check(operation, "cuStreamSynchronize", after=0, times=times)


# Signals

_PACKAGE = pathlib.Path(allocator_module.__file__).parent
_TRACED_FILES = tuple(
    str(module.__file__)
    for module in (
        *(allocator_module, report),
        *(layer, sleep, wake, prepare),
        *(backup, filling, host, store),
        *(compressor, lent, slots, workbench),
        *(lanes, pacing, restorer, routes),
        digest_device,
    )
)
Place = types.ModuleType | Callable[..., object]
Position = tuple[str, int, str]  # file and function, line, event
# What the handlers raise, one after the other, at one place; and what the caller is to get.
STORMS: list[tuple[type[BaseException], list[type[BaseException]]]] = [
    (KeyboardInterrupt, [KeyboardInterrupt]),
    (TimeoutError, [TimeoutError]),
    (SystemExit, [SystemExit, TimeoutError, KeyboardInterrupt, SystemExit, TimeoutError]),
    (KeyboardInterrupt, [TimeoutError, TimeoutError, KeyboardInterrupt, SystemExit, KeyboardInterrupt]),
]


class Signals:
    """Counts the places of an operation, and sends its caller signals at one of them, whose handlers raise.

    Places are every line of this package's code, and every return from a C function, on the operation's own thread.
    """

    def __init__(self, at: int | None = None) -> None:
        self.positions: list[Position] = []
        self.expected, self._errors = STORMS[(at or 0) % len(STORMS)]
        self.sent = False
        self._at = at
        self._handled = threading.Event()
        self._patch = pytest.MonkeyPatch()
        self._main = threading.get_ident()

    def __enter__(self) -> Signals:
        run = _core.OperationLock.run

        def traced_run(lock: _core.OperationLock, work: Callable[[], object]) -> object:
            return run(lock, partial(self._traced, work))

        self._patch.setattr(_core.OperationLock, "run", traced_run)
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        signal.signal(signal.SIGUSR1, self._before)

    def _traced(self, work: Callable[[], object]) -> object:
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            return work()
        finally:
            sys.settrace(None)
            sys.setprofile(None)

    def _handle(self, *_: object) -> None:
        error = self._errors[self._number]
        self._handled.set()
        raise error

    def _trace(self, frame: types.FrameType, event: str, _: object) -> Callable[..., object] | None:
        if not _is_traced(frame):
            return None
        if event == "line":
            self._reach(frame, event)
        return self._trace

    def _profile(self, frame: types.FrameType, event: str, _: object) -> None:
        if event == "c_return" and _is_traced(frame):
            self._reach(frame, event)

    def _reach(self, frame: types.FrameType, event: str) -> None:
        if self.sent:
            return
        if self._at == len(self.positions):
            self.sent = True
            for number in range(len(self._errors)):
                self._number = number
                self._handled.clear()
                signal.pthread_kill(self._main, signal.SIGUSR1)
                assert self._handled.wait(10), "the caller does not let signals be handled"
        self.positions.append((name_of_code(frame.f_code), frame.f_lineno, event))


def _is_traced(frame: types.FrameType) -> bool:
    """Code of this package, and of contextlib where this package calls it."""
    file = frame.f_code.co_filename
    if file.endswith("contextlib.py") and frame.f_back is not None:
        file = frame.f_back.f_code.co_filename
    return file in _TRACED_FILES


def name_of_code(code: types.CodeType) -> str:
    """As `operations/sleep.py:sleep`."""
    return f"{code.co_filename.removeprefix(f'{_PACKAGE}/')}:{code.co_name}"


def name_of(place: Place) -> str:
    """What the names of its code begin with: a module's, or a function's."""
    if isinstance(place, types.ModuleType):
        return f"{place.__file__}:".removeprefix(f"{_PACKAGE}/")
    return name_of_code(inspect.unwrap(place).__code__)  # type: ignore[attr-defined]


def _chosen(positions: list[Position]) -> list[int]:
    """The first time that each place is reached, and the last return from each C function: loops make the rest."""
    first = {position: index for index, position in reversed(list(enumerate(positions)))}
    last = {position: index for index, position in enumerate(positions) if position[2] == "c_return"}
    return sorted({*first.values(), *last.values()})


INTERRUPTED = [phase for phase in PHASES if phase.name in ("first sleep", "sleep of changed", "wake of all")]


@pytest.mark.slow
@pytest.mark.parametrize("phase", INTERRUPTED, ids=str)
def test_interrupt_anywhere(world: World, phase: Phase) -> None:
    check_interrupts(world, phase)


def check_interrupts(world: World, phase: Phase, places: Sequence[Place] = ()) -> None:
    """At every place in these modules and functions, each of which is reached; none: in all of them."""
    phase.prepare(world)
    phase.operate(world)  # what is done only once is not to shift the places
    phase.prepare(world)
    world.allocator._store._tier._numa_nodes.clear()  # so that the device is asked again
    unaccounted_bytes = world.unaccounted_bytes()
    with Signals() as clean:
        phase.operate(world)
    problems = []
    names = tuple(map(name_of, places))
    for name in names:
        assert any(position.startswith(name) for position, *_ in clean.positions), f"{name} is not reached"
    chosen = [index for index in _chosen(clean.positions) if clean.positions[index][0].startswith(names or "")]
    for index in chosen:
        try:
            phase.prepare(world)
            world.allocator._store._tier._numa_nodes.clear()  # so that the device is asked again
            _check_signals(world, phase, index)
            assert world.unaccounted_bytes() == unaccounted_bytes, "registered host memory is left"
        except Exception as error:
            file, line, event = clean.positions[index]
            problems.append(f"{event} at line {line} of {file}: {type(error).__name__}: {error}")
            _start_over(world)
            unaccounted_bytes = world.unaccounted_bytes()
    assert len(chosen) > 100
    assert not problems, f"{len(problems)} of {len(chosen)}:\n" + "\n".join(problems[:20])


def _check_signals(world: World, phase: Phase, index: int) -> None:
    signals = Signals(index)
    with signals:
        _raises_exactly(signals.expected, lambda: phase.operate(world))
    assert signals.sent, "the place was not reached"
    sleeps = {segment.sleep != AWAKE for segment in world.segments}
    assert len(sleeps) == 1, "some sleep and some do not"
    assert all(segment.has_memory is (segment.sleep == AWAKE) for segment in world.segments)
    world.check_bytes()
    assert_no_threads()
    in_thread(world.allocator.usage, timeout_s=5)  # the lock is free again
    assert world.allocator._compressor.on == (world.allocator.settings.compress == "auto"), "taken for a failure"
    world.wake()
    assert {segment.sleep for segment in world.segments} == {AWAKE}


def _raises_exactly(error_type: type[BaseException], work: Callable[[], object]) -> None:
    raised: list[BaseException] = []
    try:
        work()
    except BaseException as error:
        raised.append(error)
    assert [type(error) for error in raised] == [error_type]


@pytest.mark.slow
def test_interrupt_of_prepare(world: World) -> None:
    """What it began can be ended, wherever the signals came."""
    free_everything()
    world.__init__(prepare_bytes_per_second=1)  # type: ignore[misc]  # else it would end by itself
    allocator = world.allocator
    with Signals() as clean:
        allocator.prepare()
    chosen = _chosen(clean.positions)
    problems = []
    for index in chosen:
        allocator.release_backups()
        allocator._preparation = None  # as at first, so that the places are the same
        signals = Signals(index)
        with signals:
            _raises_exactly(signals.expected, allocator.prepare)
        assert signals.sent, "the place was not reached"
        file, line, event = clean.positions[index]
        in_thread(allocator.usage, timeout_s=5)
        allocator.release_backups()
        try:
            assert_no_threads()
            assert allocator._store.host_bytes == 0
        except AssertionError:
            problems.append(f"{event} at line {line} of {file}: it goes on")
    world.check_bytes()
    assert len(chosen) > 50
    assert not problems, f"{len(problems)} of {len(chosen)}:\n" + "\n".join(problems[:20])


class Interrupter:
    """Raises KeyboardInterrupt at one of the places of a call on this thread at which a signal may be handled.

    These are every line of this package's code and, above all, every return from a C function: that is where CPython
    looks for signals. Left out are lines of no instruction (`try:`) and a `with` line as the block is left: there it
    does not look, and no code could protect itself.
    """

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.positions: list[Position] = []
        self.raised = False
        self._interrupt_at = interrupt_at
        self._with_lines: set[tuple[int, int]] = set()

    def __enter__(self) -> Interrupter:
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _trace(self, frame: types.FrameType, event: str, _: object) -> Callable[..., object] | None:
        if not _is_traced(frame):
            return None
        if event == "line" and "contextlib" not in frame.f_code.co_filename:
            is_nop = frame.f_code.co_code[frame.f_lasti] == dis.opmap["NOP"]
            if not is_nop and not self._leaves_with(frame):
                self._reach(frame, event)
        return self._trace

    def _profile(self, frame: types.FrameType, event: str, _: object) -> None:
        if event == "c_return" and _is_traced(frame):
            self._reach(frame, event)

    def _leaves_with(self, frame: types.FrameType) -> bool:
        if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            return False
        visit = (id(frame), frame.f_lineno)
        seen = visit in self._with_lines
        self._with_lines.add(visit)
        return seen

    def _reach(self, frame: types.FrameType, event: str) -> None:
        if self.raised:
            return
        if self._interrupt_at == len(self.positions):
            self.raised = True
            raise KeyboardInterrupt
        self.positions.append((name_of_code(frame.f_code), frame.f_lineno, event))


@pytest.mark.slow
def test_interrupt_of_malloc(world: World) -> None:
    """Whoever did not get the address cannot free it, so nothing may be left there."""
    world.allocator.malloc(PAGE, "weights")
    with Interrupter() as clean:
        address = world.allocator.malloc(PAGE, "weights")
    world.allocator.free(address)
    before, held = world.state(), world.held()
    for index in _chosen(clean.positions):
        with contextlib.suppress(KeyboardInterrupt), Interrupter(index):
            world.allocator.malloc(PAGE, "weights")
        if world.state() != before:
            gc.collect()  # exceptions may hold frames
        assert world.state() == before, clean.positions[index]
        assert world.held() == held, clean.positions[index]


@pytest.mark.slow
def test_interrupt_of_malloc_by_a_signal() -> None:
    """Handlers that raise, at ever later moments: no address is lost on its way through this package."""
    process = run_script(
        """
        import signal, sys

        reset_simulation()
        allocator = fresh_allocator()
        allocator.malloc(PAGE, "warm")

        class Timeout(Exception):
            pass

        def handle(number, frame):
            # Not between the return of `malloc` and the assignment: from there on the address is the caller's.
            if armed and frame.f_code is not here:
                raise Timeout

        signal.signal(signal.SIGALRM, handle)
        hits, armed, here = 0, False, sys._getframe().f_code
        for turn in range(600):
            address = 0
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 2e-4 + turn % 300 * 4e-6)
                address = allocator.malloc(PAGE, "weights")
            except Timeout:
                hits += 1
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            if address:
                allocator.free(address)
            assert len(_core.segments()) == 1, (turn, address)
        assert hits > 20, hits
        free_everything()
        """
    )
    assert_clean_exit(process)


# Where an operation looks whether it is to stop, by phase; at the last one everything is detached.
LOOKS = {
    "first sleep": {
        "operations/layer.py:quiesce",
        "operations/sleep.py:_changed_of",
        "digest/device.py:finish",
        "digest/device.py:_sums_of_memory",
        "backups/filling.py:start",
        "backups/filling.py:finish",
        "put_to_sleep",
    },
    "wake of all": {
        "transfer/lanes.py:run",
        "transfer/lanes.py:_finish",
        "digest/device.py:finish",
        "digest/device.py:_sums_of_memory",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase.name in LOOKS], ids=str)
def test_stops_at_every_look(world: World, phase: Phase) -> None:
    check_looks(world, phase, LOOKS[phase.name])


def check_looks(world: World, phase: Phase, expected: set[str]) -> None:
    """It stops there, and all is as it was before."""
    phase.prepare(world)
    looks = Looks()
    with looks:
        phase.operate(world)
    assert set(looks.places) == expected
    for index, place in enumerate(looks.places):
        phase.prepare(world)
        before = world.state()
        looks = Looks(index)
        with looks, pytest.raises(TimeoutError):
            phase.operate(world)
        assert looks.stopped, f"it went on after {place}"
        assert world.state() == before, place
        world.check_bytes()
        assert_no_threads()


class Looks:
    """Counts the looks of an operation, and asks it to stop just before one."""

    def __init__(self, at: int | None = None) -> None:
        self.places: list[str] = []
        self.stopped = False
        self._at = at
        self._main = threading.get_ident()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Looks:
        self._look, put_to_sleep = _core.stop_if_asked, _core.put_to_sleep

        def look() -> None:
            self._note(name_of_code(sys._getframe(1).f_code))
            self._look()

        def put(backed_up: list[_core.Segment], dropped: list[_core.Segment]) -> int:
            self._note("put_to_sleep")
            return put_to_sleep(backed_up, dropped)

        self._patch.setattr(_core, "stop_if_asked", look)
        self._patch.setattr(_core, "put_to_sleep", put)
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        signal.signal(signal.SIGUSR1, self._before)
        self.stopped = len(self.places) - 1 == self._at

    def _handle(self, *_: object) -> None:
        raise TimeoutError

    def _note(self, place: str) -> None:
        self.places.append(place)
        if len(self.places) - 1 != self._at:
            return
        signal.pthread_kill(self._main, signal.SIGUSR1)
        ends_at = time.monotonic() + 10
        while True:
            assert time.monotonic() < ends_at, "nobody asks it to stop"
            try:
                self._look()
            except _core.OperationStopped:
                return


@pytest.mark.slow
def test_interrupt_by_a_signal() -> None:
    """SIGINT at ever later moments of a sleep and of a wake, in a process of its own."""
    process = run_script(
        """
        import signal
        import time

        reset_simulation()
        allocator, memory = fresh_allocator(), Memory()
        contents = {}
        for tag in ("weights", "default", "lora", "weights"):
            address = allocator.malloc(2 * PAGE, tag)
            contents[address] = memory.fill_random(address, 2 * PAGE)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))

        def interrupted(operation, delay_s):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, delay_s)
                    operation()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                return True
            return False

        def check():
            states = {segment.sleep != AWAKE for segment in _core.segments()}
            assert len(states) == 1, states
            assert all(segment.has_memory is (segment.sleep == AWAKE) for segment in _core.segments())

        hits = 0
        for operation in (allocator.sleep, allocator.wake_up):
            for turn in range(40):
                if operation == allocator.wake_up:
                    allocator.sleep()
                elif turn % 2:
                    allocator.release_backups()
                start = time.perf_counter()
                hits += interrupted(operation, 1e-4 + turn * 6e-4)
                check()
                allocator.wake_up()
                for address, content in contents.items():
                    assert memory.read(address, 2 * PAGE) == content, (operation, turn)
        assert hits > 10, hits
        memory.close()
        free_everything()
        """
    )
    assert_clean_exit(process)


# Host memory is short


class TestHostMemoryIsShort:
    def _check_refused(self, world: World, limit: str) -> OutOfHostMemory:
        before, held = world.state(), world.held()
        with pytest.raises(OutOfHostMemory) as raised:
            world.allocator.sleep()
        assert raised.value.limit == limit
        assert isinstance(raised.value, MemoryError)
        assert limit in str(raised.value)
        assert world.state() == before
        world.check_bytes()
        error = raised.value.with_traceback(None)
        del raised
        gc.collect()
        assert world.held() == held
        return error

    def _check_works(self, world: World) -> None:
        world.allocator.sleep()
        world.note_drops()
        world.wake()

    @pytest.mark.parametrize(
        ("function", "limit"), [("cgroup_available_bytes", "cgroup"), ("mem_available_bytes", "MemAvailable")]
    )
    def test_limits(self, world: World, monkeypatch: pytest.MonkeyPatch, function: str, limit: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(host_limits, function, lambda **_: 2 * PAGE - 1)
            error = self._check_refused(world, limit)
            assert (error.needed_bytes, error.available_bytes) == (2 * PAGE, 2 * PAGE - 1)
        self._check_works(world)

    def test_limits_that_leave_just_enough(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_limits, "cgroup_available_bytes", lambda: 2 * PAGE)
        monkeypatch.setattr(host_limits, "mem_available_bytes", lambda enough=None: 2 * PAGE)
        self._check_works(world)

    def test_no_limit_applies_to_clean_segments(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        _awake_with_backups(world)
        monkeypatch.setattr(host_limits, "cgroup_available_bytes", lambda: 0)
        assert world.allocator.sleep().clean_bytes == 2 * PAGE
        world.wake()

    def test_register(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DigestRun, "start", lambda run, segments: None)  # digests register memory too
        for position in range(3):
            sim.fail("cuMemHostRegister", after=position)
            error = self._check_refused(world, "cuMemHostRegister")
            assert error.needed_bytes == MIB
            sim.reset()
        monkeypatch.undo()
        self._check_works(world)

    def test_touch(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel refuses pages, in one of the threads that touch them."""
        touch, touched = _core.HostBlock.touch, []

        def refuse_last(block: _core.HostBlock, offset: int, nbytes: int) -> None:
            touched.append(block)
            if len(touched) == 3:
                raise OutOfHostMemory(nbytes, 0, "madvise")
            touch(block, offset, nbytes)

        monkeypatch.setattr(world.allocator._digester, "of", lambda segments: {})
        with monkeypatch.context() as patch:
            patch_touch(patch, refuse_last)
            before = world.state()
            with pytest.raises(OutOfHostMemory, match="madvise"):
                world.allocator.sleep()
            touched.clear()
            assert world.state() == before
        world.check_bytes()
        monkeypatch.undo()
        self._check_works(world)

    @pytest.mark.slow
    @pytest.mark.skipif(
        "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer needs address space without limit"
    )
    @pytest.mark.parametrize("verify", ["off", "wake"])
    def test_address_space(self, verify: str) -> None:
        process = run_script(
            f"""
            import resource
            reset_simulation()
            allocator = fresh_allocator(verify={verify!r}, retain_backups=False)
            memory = Memory()
            contents = {{}}
            for tag in ("weights", "default"):
                address = allocator.malloc(32 * PAGE, tag)
                contents[address] = memory.fill_random(address, 32 * PAGE)
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 96 * MIB, resource.RLIM_INFINITY))
            with raises(OutOfHostMemory, "needed 64.00 MiB", "limit: mmap"):
                allocator.sleep()
            assert {{segment.sleep for segment in _core.segments()}} == {{AWAKE}}
            assert allocator._store.host_bytes == 0
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            allocator.sleep()
            allocator.wake_up()
            for address, content in contents.items():
                assert memory.read(address, 32 * PAGE) == content
            memory.close()
            free_everything()
            """
        )
        assert_clean_exit(process)


# Damage


class TestDamage:
    @pytest.mark.parametrize("tag", ["weights", "default"])
    @pytest.mark.parametrize("place", [0, -1])
    def test_a_flipped_bit_in_a_backup(self, world: World, tag: str, place: int) -> None:
        world.allocator.sleep()
        world.note_drops()
        segment = next(segment for segment in world.segments if segment.tag == tag)
        backup = world.allocator._store.get(segment)
        assert backup is not None
        content = np.frombuffer(memoryview(backup.extents[place]), np.uint8)
        before = world.state()
        content[place] ^= 4
        for _ in range(2):
            with pytest.raises(BackupMismatch) as raised:
                world.allocator.wake_up()
            assert tag in raised.value.segment
            assert f"0x{segment.address:x}" in raised.value.segment
            assert raised.value.expected != raised.value.actual
            assert raised.value.expected == str(backup.digest)
            assert world.state() == before
        content[place] ^= 4
        world.wake()

    def test_without_verification_nobody_notices(self, world: World) -> None:
        """What `verify=off` gives up."""
        free_everything()
        world.__init__(verify="off")  # type: ignore[misc]
        world.allocator.sleep()
        segment = world.segments[0]
        backup = world.allocator._store.get(segment)
        assert backup is not None
        np.frombuffer(memoryview(backup.extents[0]), np.uint8)[7] ^= 1
        world.allocator.wake_up()
        assert ctypes.string_at(segment.address, PAGE) != world.contents[segment.id]

    def test_a_damaged_tag_can_be_left_asleep(self, world: World) -> None:
        """Damage of the weights does not keep the rest from waking, and they can be freed."""
        world.allocator.sleep()
        world.note_drops()
        weights = world.segments[0]
        backup = world.allocator._store.get(weights)
        assert backup is not None
        np.frombuffer(memoryview(backup.extents[0]), np.uint8)[0] ^= 1
        del backup
        world.allocator.wake_up("kv_cache")
        world.check_bytes()
        world.allocator.free(weights.address)
        assert world.allocator.wake_up().mapped_bytes == 0

    def test_a_half_written_backup_is_not_trusted(self, world: World) -> None:
        """Not even when the bytes are again those that it held before a sleep failed half-way."""
        _awake_with_backups(world)
        before = dict(world.contents)
        world.change()
        sim.fail(
            "cuMemcpyDtoHAsync", after=3 * 2 + 1, error="CUDA_ERROR_UNKNOWN"
        )  # the digests copy, then one block is
        with pytest.raises(DriverError, match="cuMemcpyDtoHAsync"):
            world.allocator.sleep(offload_tags=World.TAGS)
        sim.reset()
        for segment in world.segments:
            content = before[segment.id]
            assert content is not None
            ctypes.memmove(segment.address, content, PAGE)
            world.contents[segment.id] = content
        world.allocator.sleep(offload_tags=World.TAGS)
        world.wake()


class TestErrors:
    def test_of_the_driver_say_which_memory(self, world: World) -> None:
        sim.fail("cuMemUnmap", after=1, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError) as raised:
            world.allocator.sleep(2)
        assert (raised.value.call, raised.value.error) == ("cuMemUnmap", "CUDA_ERROR_UNKNOWN")
        assert "0x" in raised.value.segment
        assert raised.value.segment in str(raised.value)

    def test_out_of_memory_at_wake_says_how_much(self, world: World) -> None:
        """The device had room when asked, and none when the memory was taken."""
        world.allocator.sleep()
        world.note_drops()
        sim.fail("cuMemCreate", after=1)
        with pytest.raises(OutOfDeviceMemory) as raised:
            world.allocator.wake_up()
        assert (raised.value.needed_bytes, raised.value.device) == (PAGE, 0)
        assert raised.value.free_bytes == _core.memory_info(0)[0] - PAGE
        world.wake()

    def test_a_capture_elsewhere_refuses_a_sleep(self, world: World) -> None:
        sim.fail("cuCtxSynchronize", error="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        with pytest.raises(InvalidState, match="graph is being captured"):
            world.allocator.sleep()
        world.check_bytes()

    @pytest.mark.parametrize("error_name", ["CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED"])
    def test_handles_that_the_device_refuses_are_done_without(self, error_name: str) -> None:
        """Support for fabric, GPUDirect RDMA and file descriptors is tried out, and remembered."""
        process = run_script(
            f"""
            reset_simulation()
            allocator = fresh_allocator()
            _core.open_driver(str(sim.library_path()))
            info = _core.device_info(0)
            advertised = [info.fabric, info.gpu_direct_rdma, info.posix_fd].count(True)
            assert advertised >= 2
            sim.fail("cuMemCreate", times=advertised, error={error_name!r})
            address = allocator.malloc(PAGE)
            assert sim.stats().calls["cuMemCreate"] == advertised + 1
            info = _core.device_info(0)
            assert not (info.fabric or info.gpu_direct_rdma or info.posix_fd)
            allocator.free(address)
            allocator.malloc(PAGE)
            assert sim.stats().calls["cuMemCreate"] == advertised + 2
            free_everything()
            """,
            CUMEM_SLEEP_SIM_FABRIC="1",
        )
        assert_clean_exit(process)

    def test_states_after_a_failed_wake_are_those_before(self, world: World) -> None:
        world.allocator.sleep()
        sim.fail("cuMemcpyHtoDAsync", after=1, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError):
            world.allocator.wake_up()
        assert {segment.tag: segment.sleep for segment in world.segments} == {
            "weights": BACKED_UP,
            "kv_cache": DROPPED,
            "default": BACKED_UP,
        }
        assert {usage.mapped_bytes for usage in world.allocator.usage().values()} == {0}
        assert world.allocator.usage()["weights"].host_bytes == PAGE
        world.note_drops()
        world.wake()
