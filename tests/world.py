"""An allocator with memory of each kind, the operations on it, and what holds whatever fails in them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from support import (
    AWAKE,
    DEVICE_BYTES,
    DROPPED,
    PAGE,
    bf16_weights,
    forget_devices,
    free_everything,
    fresh_allocator,
    holds,
    is_accessible,
)

from cumem_sleep import CuMemAllocator, CumemSleepError, DriverError, OutOfHostMemory, _core, sim
from cumem_sleep.core.levels import DEFERRABLE_TAGS

HOST_PAGE = 4096
MIDDLE = PAGE // 4 + 16, PAGE // 2  # of a segment


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
        self.surviving: dict[int, bytes] = {}  # likewise: the `MIDDLE` of what was dropped but for that
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
        blocks = [block for backup in store.catalogue for block in backup.extents if block.pinned]
        unreleased_bytes = store.memory.bytes - sum(backup.bytes for backup in store.catalogue)
        pages = sum(-(-block.bytes // HOST_PAGE) for block in blocks)
        return sim.stats().registered_bytes - pages * HOST_PAGE - unreleased_bytes

    def forget_devices(self) -> None:
        """So that they are asked again."""
        forget_devices()

    def define(self) -> None:
        """New bytes where they are undefined. All must be awake."""
        for segment in self.segments:
            if self.contents.get(segment.id) is None and segment.address != self.extra:
                self._defined = (self._defined + 2) % 4096
                content = self._random_bytes[self._defined : self._defined + PAGE]
                ctypes.memmove(segment.address, content, PAGE)
                self.contents[segment.id] = content
        self.surviving.clear()

    def change(self) -> None:
        """Change one byte of each segment, to what it has not been for long: a backup may be of any content before."""
        for segment in self.segments:
            content = self.contents[segment.id]
            assert content is not None
            changed = bytes([(content[0] + 1) % 256]) + memoryview(content)[1:]
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
            if segment.sleep == AWAKE and segment.id in self.surviving:
                assert holds(segment.address + MIDDLE[0], self.surviving[segment.id]), f"the rest of {segment.tag}"
            if segment.sleep == AWAKE and content is not None:
                assert segment.has_memory, f"{segment.tag} is awake without memory"
                assert is_accessible(segment.address), f"{segment.tag} is awake without access"
                assert holds(segment.address, content), f"bytes of {segment.tag}"

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


def awake_with_backups(world: World) -> None:
    world.wake()
    if any(
        world.allocator._store.catalogue.get(segment) is None for segment in world.segments if segment.tag != "kv_cache"
    ):
        world.allocator.sleep()
        world.wake()


def _changed(world: World) -> None:
    awake_with_backups(world)
    world.change()


def _asleep(world: World) -> None:
    world.wake()
    world.allocator.sleep()
    world.note_drops()


def _asleep_at_level_2(world: World) -> None:
    world.wake()
    world.allocator.sleep(2)
    world.note_drops()


def _sleep_of_parts(world: World) -> None:
    first, last = MIDDLE
    mine = [segment for segment in world.segments if segment.tag != "default"]
    world.allocator.sleep(2, drop={segment.address: [(0, first), (last, PAGE - last)] for segment in mine})
    for segment in mine:
        content = world.contents[segment.id]
        assert content is not None
        world.surviving[segment.id], world.contents[segment.id] = content[first:last], None


def _asleep_but_for_parts(world: World) -> None:
    world.wake()
    _sleep_of_parts(world)


def _awake_after_parts(world: World) -> None:
    _asleep_but_for_parts(world)
    world.wake()


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


def _forget(world: World) -> None:
    world.allocator.release_backups(DEFERRABLE_TAGS)
    world.note_drops()


PHASES = [
    Phase("malloc", _without_extra, _malloc),
    Phase("first sleep", _awake_without_backups, lambda world: world.allocator.sleep()),
    Phase("sleep of changed", _changed, lambda world: world.allocator.sleep()),
    Phase("sleep of clean", awake_with_backups, lambda world: world.allocator.sleep()),
    Phase("sleep at level 2", awake_with_backups, lambda world: world.allocator.sleep(2)),
    Phase("discard", awake_with_backups, lambda world: world.allocator.discard(["kv_cache", "weights"])),
    Phase("wake of weights", _asleep, lambda world: world.allocator.wake_up("weights")),
    Phase("wake of all", _asleep, lambda world: world.allocator.wake_up()),
    Phase("forget", _asleep, _forget),
    Phase("wake after level 2", _asleep_at_level_2, lambda world: world.allocator.wake_up()),
    Phase("free awake", _extra_awake, _free),
    Phase("free asleep", _extra_asleep, _free),
    Phase("release backups", awake_with_backups, lambda world: world.allocator.release_backups()),
    Phase("sleep of parts", _awake_without_backups, _sleep_of_parts),
    Phase("sleep of all after one of parts", _awake_after_parts, lambda world: world.allocator.sleep()),
    Phase("wake of parts", _asleep_but_for_parts, lambda world: world.allocator.wake_up()),
    Phase("usage", _asleep, lambda world: world.allocator.usage()),
]


def phases(*names: str) -> list[Phase]:
    """Those of these names; KeyError: there is none of such a name."""
    by_name = {phase.name: phase for phase in PHASES}
    return [by_name[name] for name in names]


def _check_one_failure(world: World, phase: Phase, call: str, position: int, error_name: str) -> None:
    phase.prepare(world)
    world.forget_devices()
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


def check_every_call(world: World, phase: Phase, error_name: str, context_calls_too: bool) -> None:
    phase.prepare(world)
    world.forget_devices()
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
                begin_anew(world)
    assert not problems, f"{len(problems)} of {sum(calls.values())}:\n" + "\n".join(problems[:20])


def begin_anew(world: World) -> None:
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
