"""Random sequences of everything, with failures in between, against a model of a few lines."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support import (
    AWAKE,
    BACKED_UP,
    DROPPED,
    PAGE,
    ample_host_memory,
    free_everything,
    fresh_allocator,
    holds,
    hooks,
    host_bytes_of,
    in_thread,
    is_accessible,
    quick_sums,
    reset_simulation,
)

from cumem_sleep import CuMemAllocator, CumemSleepError, OutOfDeviceMemory, OutOfHostMemory, SleepReport, _core, sim
from cumem_sleep.backups.backup import Backup

pytestmark = pytest.mark.sim

DEVICE_PAGES = 12  # few enough that a wake may find too little
BUDGET_PAGES = 4  # few enough that backups have to give way, or a sleep is refused
TAGS = ("weights", "kv_cache", "default", "lora")
CALLS = (
    "cuCtxPushCurrent",
    "cuCtxSynchronize",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc",
    "cuMemCreate",
    "cuMemFree",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuStreamCreate",
    "cuStreamSynchronize",
)
RANDOM_BYTES = np.random.default_rng(0).bytes(2 * PAGE + 4096)

tags = st.sampled_from(TAGS)
tag_sets = st.sets(tags)
places = st.integers(0, 63)  # which of the segments, modulo how many there are
no_failure = st.none()
one_failure = st.tuples(
    st.sampled_from(CALLS),
    st.integers(0, 6),
    st.sampled_from(["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"]),
    st.sampled_from([1, 1, 2, 5, 100]),  # the last: however often it is tried again
)
# A second one may meet what undoes the first.
failures = st.one_of(
    no_failure, no_failure, st.lists(one_failure, min_size=1, max_size=2, unique_by=lambda one: one[0])
)
Failure = list[tuple[str, int, str, int]] | None
# Sleep, mapping and backup, as rows of the table "The states of a segment" in docs/how-it-works.md: those that may be
# there between two operations, without and with memory that the driver refused to give back.
SETTLED = {
    (AWAKE, "mapped", "none"),
    (AWAKE, "mapped", "complete"),
    (BACKED_UP, "unmapped", "complete"),
    (DROPPED, "unmapped", "none"),
}
REFUSED = {
    (BACKED_UP, "without access", "complete"),
    (DROPPED, "without access", "none"),
    # A wake failed, and could not be undone.
    (BACKED_UP, "mapped", "complete"),
    (DROPPED, "mapped", "none"),
}


@dataclass(frozen=True)
class Model:
    """What is known of one segment. `content` is None where its bytes are undefined."""

    tag: str
    address: int
    nbytes: int
    content: bytes | None = None
    sleep: _core.Segment.Sleep = AWAKE
    saved: bytes | None = None  # what its backup holds
    backup_is_sure: bool = True  # after a failed sleep, the backup of an awake segment may be gone


def state_of(segment: _core.Segment, backup: Backup | None) -> tuple[_core.Segment.Sleep, str, str]:
    """Sleep, mapping and backup in the words of the table; `without access` is `detached`, too."""
    mapping = "unmapped"
    if segment.has_memory:
        mapping = "mapped" if is_accessible(segment.address) else "without access"
    return segment.sleep, mapping, "none" if backup is None else "complete" if backup.complete else "incomplete"


def check_state(segment: _core.Segment, backup: Backup | None, driver_has_refused: bool) -> None:
    """No operation is under way. Args: driver_has_refused: something, which nobody has tried again since."""
    state = state_of(segment, backup)
    allowed = SETTLED | REFUSED if driver_has_refused or segment.keeps_bytes else SETTLED
    assert state in allowed, f"{segment.tag}: {state}"
    if segment.keeps_bytes:
        assert segment.sleep == DROPPED, f"{segment.tag} keeps its bytes: {state}"
        assert segment.has_memory, f"{segment.tag} keeps its bytes: {state}"
    if backup is not None:
        assert not backup.being_prepared, f"{segment.tag}: a backup that nobody makes"
        assert backup.retained is not False or segment.sleep != AWAKE, f"{segment.tag}: a backup that is not to stay"


class Sequences(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("cumem_sleep.digest.digester.sums_of", quick_sums)
        ample_host_memory(self.patch)
        reset_simulation()
        self.allocator = fresh_allocator(host_budget_bytes=BUDGET_PAGES * PAGE)
        for tag in TAGS:  # tags that were never used are refused
            self.allocator.free(self.allocator.malloc(1, tag))
        sim.configure(device_bytes=DEVICE_PAGES * PAGE)
        self.registered_before = sim.stats().registered_bytes
        self.may_be_unpinned = False  # backups, for level 3, until they are copied again
        self.models: dict[int, Model] = {}
        self.written = 0
        self.driver_has_refused = False
        self.pools: list[tuple[str, AbstractContextManager[None]]] = []  # in which they are, as entered

    def teardown(self) -> None:
        sim.reset()
        try:
            self.pools.clear()
            assert _core.thread_tag() == "default"
            sim.configure(device_bytes=2 * DEVICE_PAGES * PAGE)
            self.allocator.wake_up()
            for segment, model in self.pairs():
                self.models[segment.id] = replace(model, sleep=AWAKE, content=self.after_wake(model))
            self.bytes_are_right()
            sim.configure(device_bytes=DEVICE_PAGES * PAGE)
            free_everything()
        finally:
            self.patch.undo()
            reset_simulation()

    # Helpers

    def pairs(self) -> list[tuple[_core.Segment, Model]]:
        return [(segment, self.models[segment.id]) for segment in _core.segments()]

    def pick(self, place: int, sleep: _core.Segment.Sleep | None = None) -> tuple[_core.Segment, Model] | None:
        fitting = [pair for pair in self.pairs() if sleep is None or pair[1].sleep == sleep]
        return fitting[place % len(fitting)] if fitting else None

    def attempt(self, failure: Failure, operation: Callable[[], object]) -> object | CumemSleepError:
        """Run with a failure injected; errors without one must have a reason."""
        self.driver_has_refused = failure is not None
        for call, after, error_name, times in failure or ():
            sim.fail(call, after=after, error=error_name, times=times)
        try:
            return operation()
        except CumemSleepError as error:
            device_is_full = isinstance(error, OutOfDeviceMemory) and error.needed_bytes > error.free_bytes
            host_is_full = isinstance(error, OutOfHostMemory) and error.needed_bytes > error.available_bytes
            if not failure and not device_is_full and not host_is_full:
                raise
            return error
        finally:
            sim.reset()

    @staticmethod
    def after_wake(model: Model) -> bytes | None:
        return None if model.sleep == DROPPED else model.content

    def slept(self, result: object, chosen: set[int], dropped_tags: set[str]) -> None:
        """What a sleep of the awake ones among `chosen` did, or what a failed one may have left."""
        if isinstance(result, CumemSleepError):
            for segment, model in self.pairs():
                # If it could not be undone either, it counts as asleep, and its bytes come back.
                unsure = model.sleep == AWAKE
                saved = model.content if segment.sleep == BACKED_UP and unsure else model.saved
                self.models[segment.id] = replace(
                    model, sleep=segment.sleep, saved=saved, backup_is_sure=model.backup_is_sure and not unsure
                )
                if unsure and segment.sleep == DROPPED:
                    self.models[segment.id] = replace(self.models[segment.id], sleep=DROPPED, content=None, saved=None)
            return
        assert isinstance(result, SleepReport)
        clean_bytes = copied_bytes = dropped_bytes = 0
        sure = True
        for segment, model in self.pairs():
            if segment.id not in chosen or model.sleep != AWAKE:
                if model.sleep == AWAKE:
                    self.models[segment.id] = replace(model, backup_is_sure=False)  # may have made room
                continue
            if model.tag in dropped_tags:
                dropped_bytes += model.nbytes
                self.models[segment.id] = replace(model, sleep=DROPPED, content=None, saved=None, backup_is_sure=True)
                continue
            sure = sure and model.backup_is_sure and model.content is not None
            if model.saved is not None and model.saved == model.content:
                clean_bytes += model.nbytes
            else:
                copied_bytes += model.nbytes
            self.models[segment.id] = replace(
                model, sleep=BACKED_UP, saved=model.content, backup_is_sure=model.content is not None
            )
        assert result.dropped_bytes == dropped_bytes
        assert result.clean_bytes + result.copied_bytes == clean_bytes + copied_bytes
        if sure:
            assert (result.clean_bytes, result.copied_bytes) == (clean_bytes, copied_bytes)

    # Rules

    @precondition(lambda self: len(self.models) < 8)
    @rule(tag=tags, pages=st.integers(1, 2), failure=failures)
    def malloc(self, tag: str, pages: int, failure: Failure) -> None:
        result = self.attempt(failure, lambda: self.allocator.malloc(pages * PAGE - 100, tag))
        if isinstance(result, int):
            segment = _core.segments()[-1]
            assert segment.address == result
            self.models[segment.id] = Model(tag, result, pages * PAGE)

    @precondition(lambda self: len(self.pools) < 6)
    @rule(tag=tags)
    def enter_a_pool(self, tag: str) -> None:
        pool = self.allocator.use_memory_pool(tag)
        pool.__enter__()
        self.pools.append((tag, pool))

    @precondition(lambda self: self.pools)
    @rule(place=places, way=st.sampled_from(["this thread", "another thread", "garbage"]))
    def leave_a_pool(self, place: int, way: str) -> None:
        _, pool = self.pools.pop(place % len(self.pools))
        leave = partial(pool.__exit__, None, None, None)
        if way != "garbage":
            in_thread(leave) if way == "another thread" else leave()

    @precondition(lambda self: len(self.models) < 8)
    @rule(by_hook=st.booleans(), failure=failures)
    def allocate_in_the_innermost_pool(self, by_hook: bool, failure: Failure) -> None:
        allocate = (
            partial(hooks().cumem_sleep_malloc, PAGE, 0, None) if by_hook else partial(self.allocator.malloc, PAGE)
        )
        result = self.attempt(failure, allocate)
        if isinstance(result, int):
            tag = self.pools[-1][0] if self.pools else "default"
            self.models[_core.segments()[-1].id] = Model(tag, result, PAGE)

    @rule(place=places, failure=failures)
    def free(self, place: int, failure: Failure) -> None:
        if pair := self.pick(place):
            segment, model = pair
            result = self.attempt(failure, lambda: self.allocator.free(model.address))
            if not isinstance(result, CumemSleepError):
                del self.models[segment.id]

    @rule(place=places)
    def write(self, place: int) -> None:
        if pair := self.pick(place, AWAKE):
            segment, model = pair
            self.written += 1
            content = RANDOM_BYTES[self.written % 4096 :][: model.nbytes]
            ctypes.memmove(model.address, content, model.nbytes)
            self.models[segment.id] = replace(model, content=content)

    @rule(place=places, offset=st.integers(0, 2 * PAGE - 1))
    def write_one_byte(self, place: int, offset: int) -> None:
        if pair := self.pick(place, AWAKE):
            segment, model = pair
            if model.content is not None:
                changed = bytearray(model.content)
                changed[offset % model.nbytes] ^= 0x55
                ctypes.memmove(model.address, bytes(changed), model.nbytes)
                self.models[segment.id] = replace(model, content=bytes(changed))

    @rule(level=st.sampled_from([0, 1, 2, 3]), failure=failures)
    def sleep(self, level: int, failure: Failure) -> None:
        self.may_be_unpinned |= level == 3
        result = self.attempt(failure, lambda: self.allocator.sleep(level))
        dropped = [set(), {"kv_cache"}, {"kv_cache", "weights"}, {"kv_cache"}][level]
        self.slept(result, set(self.models) if level else set(), dropped)

    @rule(offload_tags=tag_sets, failure=failures)
    def sleep_with_tags(self, offload_tags: set[str], failure: Failure) -> None:
        result = self.attempt(failure, lambda: self.allocator.sleep(offload_tags=offload_tags))
        self.slept(result, set(self.models), set(TAGS) - offload_tags)

    @rule(discarded=st.sets(st.sampled_from(["weights", "kv_cache"])), failure=failures)
    def discard(self, discarded: set[str], failure: Failure) -> None:
        result = self.attempt(failure, lambda: self.allocator.discard(discarded))
        chosen = {number for number, model in self.models.items() if model.tag in discarded}
        self.slept(result, chosen, set(TAGS))

    @rule(chosen=st.none() | st.sets(st.sampled_from(["weights", "kv_cache"])), failure=failures)
    def wake(self, chosen: set[str] | None, failure: Failure) -> None:
        result = self.attempt(failure, lambda: self.allocator.wake_up(chosen))
        if isinstance(result, CumemSleepError):
            return
        for segment, model in self.pairs():
            woken = chosen is None or model.tag in chosen or model.tag not in ("weights", "kv_cache")
            if woken and model.sleep != AWAKE:
                self.models[segment.id] = replace(model, sleep=AWAKE, content=self.after_wake(model))

    @rule(chosen=st.sets(st.sampled_from(["weights", "kv_cache"])), failure=failures)
    def give_up_backups(self, chosen: set[str], failure: Failure) -> None:
        result = self.attempt(failure, lambda: self.allocator.release_backups(chosen))
        if isinstance(result, CumemSleepError):
            return
        for segment, model in self.pairs():
            if model.sleep == BACKED_UP and model.tag in chosen:
                self.models[segment.id] = replace(model, sleep=DROPPED, content=None, saved=None)

    @rule(failure=failures)
    def prepare(self, failure: Failure) -> None:
        def prepare_all() -> None:
            preparation = self.allocator.prepare()
            assert preparation.wait(30)
            if preparation.error is not None:
                raise preparation.error

        result = self.attempt(failure, prepare_all)
        for segment, model in self.pairs():
            if model.sleep != AWAKE:
                continue
            if isinstance(result, CumemSleepError) or model.tag == "kv_cache":  # the latter's may have made room
                self.models[segment.id] = replace(model, backup_is_sure=False)
            else:
                self.models[segment.id] = replace(model, saved=model.content, backup_is_sure=model.content is not None)

    @rule(failure=failures)
    def release_backups(self, failure: Failure) -> None:
        self.attempt(failure, self.allocator.release_backups)
        for segment, model in self.pairs():
            if model.sleep == AWAKE:
                self.models[segment.id] = replace(model, saved=None, backup_is_sure=failure is None)

    # What always holds

    @invariant()
    def nothing_comes_or_goes_by_itself(self) -> None:
        seen = {segment.id: (segment.tag, segment.address, segment.bytes) for segment in _core.segments()}
        assert seen == {number: (model.tag, model.address, model.nbytes) for number, model in self.models.items()}

    @invariant()
    def sleep_states_are_right(self) -> None:
        for segment, model in self.pairs():
            assert segment.sleep == model.sleep
            check_state(segment, self.allocator._store.catalogue.of(segment), self.driver_has_refused)

    @invariant()
    def bytes_are_right(self) -> None:
        for _, model in self.pairs():
            if model.sleep == AWAKE and model.content is not None:
                assert holds(model.address, model.content)

    @invariant()
    def usage_and_host_memory_are_right(self) -> None:
        usage = self.allocator.usage()
        assert set(usage) == {model.tag for model in self.models.values()}
        for tag, part in usage.items():
            mine = [pair for pair in self.pairs() if pair[1].tag == tag]
            assert part.segments == len(mine)
            assert part.bytes == sum(model.nbytes for _, model in mine)
            assert part.asleep_segments == sum(model.sleep != AWAKE for _, model in mine)
            assert part.mapped_bytes == sum(segment.bytes for segment, _ in mine if segment.has_memory)
        host_bytes = 0
        for segment, model in self.pairs():
            held = host_bytes_of(self.allocator, segment)
            if model.sleep == DROPPED:
                assert held == 0
            elif model.sleep == BACKED_UP:
                assert held == model.nbytes
            elif not model.backup_is_sure:
                assert held in (0, model.nbytes)
            else:
                assert held == (0 if model.saved is None else model.nbytes)
            host_bytes += held
        assert self.allocator._store.memory.bytes == host_bytes
        assert host_bytes <= BUDGET_PAGES * PAGE
        registered_bytes = sim.stats().registered_bytes - self.registered_before  # by an example that failed
        backups = self.allocator._store.catalogue
        pinned_bytes = sum(extent.bytes for backup in backups for extent in backup.extents if extent.pinned)  # type: ignore[attr-defined]
        assert pinned_bytes <= registered_bytes <= pinned_bytes + host_bytes // 100
        assert pinned_bytes == host_bytes or self.may_be_unpinned


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_sequences() -> None:
    run_state_machine_as_test(
        Sequences,
        settings=settings(
            max_examples=100,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@dataclass(frozen=True)
class Refusal:
    """Calls that the driver refuses however often they are tried, and what that leaves."""

    name: str
    operation: str
    calls: dict[str, int]  # and how many of each succeed before
    left: tuple[_core.Segment.Sleep, str, str]
    keeps_bytes: bool = False

    def __str__(self) -> str:
        return self.name


UNMAPPED_ONE = {"cuMemUnmap": 1, "cuMemMap": 0}
REFUSALS = [
    Refusal("release, backed up", "sleep", {"cuMemRelease": 0}, (BACKED_UP, "without access", "complete")),
    Refusal("release, dropped", "sleep 2", {"cuMemRelease": 0}, (DROPPED, "without access", "none")),
    Refusal("undo a sleep, backed up", "sleep", UNMAPPED_ONE, (BACKED_UP, "without access", "complete")),
    Refusal("undo a sleep, dropped", "sleep 2", UNMAPPED_ONE, (DROPPED, "without access", "none"), True),
    Refusal("undo a wake", "wake", {"cuMemcpyHtoDAsync": 0, "cuMemUnmap": 0}, (BACKED_UP, "mapped", "complete")),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_the_driver_refused_is_held_until_it_is_tried_again(allocator: CuMemAllocator, refusal: Refusal) -> None:
    for _ in range(2):
        allocator.malloc(PAGE, "weights")
    operations = {"sleep": allocator.sleep, "sleep 2": partial(allocator.sleep, 2), "wake": allocator.wake_up}
    if refusal.operation == "wake":
        allocator.sleep()
    for call, after in refusal.calls.items():
        sim.fail(call, after=after, times=100)
    with contextlib.suppress(CumemSleepError):
        operations[refusal.operation]()
    sim.reset()
    first = _core.segments()[0]
    backup = allocator._store.catalogue.of(first)
    assert (state_of(first, backup), first.keeps_bytes) == (refusal.left, refusal.keeps_bytes)
    check_state(first, backup, driver_has_refused=True)
    if not refusal.keeps_bytes:
        with pytest.raises(AssertionError, match=first.tag):
            check_state(first, backup, driver_has_refused=False)
    allocator.usage()
    for segment in _core.segments():
        check_state(segment, allocator._store.catalogue.of(segment), driver_has_refused=False)
    allocator.wake_up()


@pytest.mark.skipif(_core.CHECKS_INVARIANTS, reason="such a build ends the process itself")
def test_states_outside_of_the_table_are_found(allocator: CuMemAllocator) -> None:
    allocator.malloc(PAGE, "weights")
    allocator.sleep()
    (segment,) = _core.segments()
    backup = allocator._store.catalogue.of(segment)
    check_state(segment, backup, driver_has_refused=False)
    for broken in (None, replace(backup, complete=False), replace(backup, being_prepared=True)):
        with pytest.raises(AssertionError, match="weights: "):
            check_state(segment, broken, driver_has_refused=True)
    with _core.HeldSegments([segment]):
        segment.map()
    with pytest.raises(AssertionError, match="weights: "):  # memory that nobody will release
        check_state(segment, backup, driver_has_refused=False)
    allocator.wake_up()
    with pytest.raises(AssertionError, match="weights: "):
        check_state(segment, replace(backup, retained=False), driver_has_refused=False)
    allocator.discard(["weights"])
    with pytest.raises(AssertionError, match="weights: "):
        check_state(segment, backup, driver_has_refused=True)
