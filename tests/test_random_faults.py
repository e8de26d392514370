"""Random histories with up to five faults at once, beside an oracle that knows what every byte has to be.

A history is made of its number alone. `CUMEM_SLEEP_TEST_HISTORIES=1000` runs so many, `CUMEM_SLEEP_TEST_HISTORY=17` the
one of that number.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from support import (
    AWAKE,
    BACKED_UP,
    DROPPED,
    MIB,
    PAGE,
    ample_host_memory,
    bf16_weights,
    free_everything,
    fresh_allocator,
    holds,
    hooks,
    host_bytes_of,
    is_accessible,
    quick_sums,
    reset_simulation,
    threads_refused,
)
from test_segment_states import check_state

from cumem_sleep import CuMemAllocator, CumemSleepError, OutOfHostMemory, _core, sim
from cumem_sleep.backups.ranges import Spans, spans_of, without
from cumem_sleep.store.lanes import HostLane

pytestmark = pytest.mark.sim

HISTORIES = int(os.environ.get("CUMEM_SLEEP_TEST_HISTORIES", "24"))
ONLY = os.environ.get("CUMEM_SLEEP_TEST_HISTORY")
STEPS = 20
MOST_FAULTS = 5
MOST_PAGES = 14  # of a device
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
    "cuMemGetAccess",
    "cuMemsetD32Async",
    "cuStreamDestroy",
    "cuMemGetInfo",
)
ERRORS = ("CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_PERMITTED")
BY_LEVEL = _core.BackupPlan.BY_LEVEL
TAGS = ("weights", "weights", "kv_cache", "default", "lora")
LENDER_BYTES = 3 * PAGE  # enough for the codec to work in
_BYTES = np.random.default_rng(0)
NOISE, WEIGHTS = _BYTES.bytes(LENDER_BYTES + 8192), bf16_weights(LENDER_BYTES + 8192, _BYTES)


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", PAGE)
    for name in ("slots", "most_slots"):
        monkeypatch.setattr(CuMemAllocator.tuning, name, 2)
    monkeypatch.setattr(CuMemAllocator.tuning, "slot_bytes", (4 * MIB, 2 * MIB))
    monkeypatch.setattr(CuMemAllocator.tuning, "worth_compiling_bytes", 0)
    monkeypatch.setattr(CuMemAllocator.tuning, "prepare_piece_bytes", PAGE)  # is decoded in a slot
    monkeypatch.setattr("cumem_sleep.digest.digester.sums_of", quick_sums)
    ample_host_memory(monkeypatch)


@dataclass
class Expected:
    """What one segment has to be. `content` is None where its bytes are undefined."""

    tag: str
    address: int
    bytes: int
    backup: _core.BackupPlan = _core.BackupPlan.BY_LEVEL  # otherwise it is a region's
    sleep: _core.Segment.Sleep = AWAKE
    content: bytes | None = None
    undefined: Spans = field(default_factory=list)  # of its bytes
    rest: Spans | None = None  # dropped, but for these
    keeps_bytes: bool = False  # it sleeps with its memory: a sleep could not be undone
    may_come_back: Spans = field(default_factory=list)  # kept of what was dropped
    forgotten: Spans = field(default_factory=list)  # of what is backed up all the same

    def survives(self, declared: Declaration) -> Spans | None:
        """What has to come back if it is dropped; None: nothing."""
        if self.tag not in declared.tags:
            return None
        may_go = [(-(-begin // 16) * 16, end // 16 * 16) for begin, end in declared.ranges.get(self.address, [])]
        return without([(0, self.bytes)], [(begin, end) for begin, end in may_go if begin < end]) or None

    def lose(self, spans: Spans) -> None:
        """These bytes are undefined from here on."""
        self.undefined = union([*self.undefined, *spans])

    def lose_all(self) -> None:
        self.content, self.undefined, self.rest, self.keeps_bytes = None, [], None, False


@dataclass(frozen=True)
class Declaration:
    """What somebody is about to write again: by the addresses of segments, of these tags."""

    ranges: dict[int, Spans] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()

    @property
    def drop(self) -> dict[int, list[tuple[int, int]]] | None:
        """As it is given to a call; overlapping, and not in order."""
        if not self.tags:
            return None
        return {at: [(b, e - b) for b, e in [*reversed(spans), *spans[:1]]] for at, spans in self.ranges.items()}


NOTHING = Declaration()


def union(spans: Spans) -> Spans:
    return spans_of(np.array([(begin, end - begin) for begin, end in spans], np.int64).reshape(-1, 2))


class History:
    """The allocator, and the oracle."""

    def __init__(self, number: int, patch: pytest.MonkeyPatch, **settings: object) -> None:
        self.random = random.Random(number)
        choose = self.random.choice
        self.poison = choose((False, False, True))
        self.devices = choose((1, 2))
        self.spare_pages = choose((0, 0, 1, 8))
        self.log: list[str] = []
        self.report: Any = None  # of the last operation
        self.driver_has_refused = False  # something, which nobody has tried again since
        self.has_kept = False  # ranges, for which memory stays pinned
        reset_simulation()
        chosen = {
            "compress": choose(("auto", "auto", "off")),
            "retain_backups": choose((True, True, False)),
            "verify": choose(("wake", "wake", "off")),
            "host_budget_bytes": choose((None, None, 4 * PAGE)),  # then backups give way, or a sleep is refused
            "poison": self.poison,
        }
        self.allocator: CuMemAllocator = fresh_allocator(**{**chosen, **settings})
        sim.configure(devices=self.devices)
        # As in a vault: where a device is full, what is encoded is decoded from a copy.
        patch.setattr(HostLane, "kernels_reach", choose((True, False)))
        self.expected: dict[int, Expected] = {}
        for tag in set(TAGS):
            self.allocator.free(self.allocator.malloc(1, tag))
        for _ in range(self.random.randint(3, 6)):
            self.malloc(faults=False)
            self.write()

    # What is done to it

    def run(self) -> None:
        steps: list[Callable[[], None]] = [
            *[self.write] * 3,
            *[self.sleep] * 4,
            *[self.wake] * 4,
            *[self.sleep_regions] * 2,
            *[self.wake_regions] * 2,
            self.discard,
            self.give_up_backups,
            self.malloc,
            self.free,
            self.prepare,
            self.release,
        ]
        for _ in range(STEPS):
            self.random.choice(steps)()
            self.check()
        self.attempt("wake_up()", self.allocator.wake_up, lambda error: self.woken(error, None), faults=False)
        regions = self.allocator.regions
        self.attempt("regions.wake()", regions.wake, lambda error: self.woken(error, None, regions=True), faults=False)
        self.check()

    def attempt(
        self,
        name: str,
        operation: Callable[[], object],
        finished: Callable[[CumemSleepError | None], None],
        *,
        faults: bool = True,
    ) -> None:
        """Do it, with faults as a rule; if it failed, once more without: `finished` tells the oracle each time."""
        count = self.random.choice((0, 1, 2, 3, MOST_FAULTS)) if faults else 0
        # `prepare` cannot do without threads; all else works on the caller's then.
        are_refused = faults and not name.startswith("prepare") and self.random.random() < 0.2
        with threads_refused() if are_refused else nullcontext():
            error = self.once(name, operation, count)
        sim.reset()
        assert error is None or count or lacks_host_memory(error), "failed without a fault"
        finished(error)
        if error is not None:
            self.check()
            error = self.once(name, operation, 0)  # the same call again
            assert error is None or lacks_host_memory(error), "failed without a fault"
            finished(error)

    def once(self, name: str, operation: Callable[[], object], faults: int) -> CumemSleepError | None:
        """Do it once, with so many new faults, which stay; the error that it raised."""
        rules = [self.fault() for _ in range(faults)]
        self.driver_has_refused = bool(rules)
        self.log.append(f"{name} with {rules}")
        for call, after, error_name, times in rules:
            sim.fail(call, after=after, error=error_name, times=times)
        try:
            self.report = operation()
        except CumemSleepError as error:
            self.log.append(f"  failed: {error}")
            return error.with_traceback(None)
        return None

    def fault(self) -> tuple[str, int, str, int]:
        """The call, how often it succeeds before, the error, and how often it comes."""
        call, error = self.random.choice(CALLS), self.random.choice(ERRORS)
        return call, self.random.choice((0, 0, 1, 2, 3, 5, 8, 13)), error, self.random.choice((1, 1, 2, 3, 4, 6, 10**6))

    def full(self) -> None:
        """Devices have little more than what is allocated."""
        pages = [sum(s.bytes for s in _core.segments() if s.device == device) // PAGE for device in range(self.devices)]
        sim.configure(device_bytes=max(MOST_PAGES // 2, *pages, 1) * PAGE + self.spare_pages * PAGE)

    def malloc(self, *, faults: bool = True) -> None:
        tag, device = self.random.choice(TAGS), self.random.randrange(self.devices)
        nbytes = LENDER_BYTES if tag == "kv_cache" else self.random.choice((PAGE, 2 * PAGE))
        if sum(s.bytes for s in _core.segments() if s.device == device) + nbytes > MOST_PAGES * PAGE:
            return
        sim.configure(device_bytes=4 * MOST_PAGES * PAGE)
        known = set(self.expected)
        plan = self.random.choice((BY_LEVEL, BY_LEVEL, _core.BackupPlan.ALWAYS, _core.BackupPlan.NEVER))

        def operation() -> None:
            if plan == BY_LEVEL:
                self.allocator.malloc(nbytes, tag, device)
            else:
                with self.allocator.regions.use(tag, backup=plan == _core.BackupPlan.ALWAYS):
                    self.allocator.malloc(nbytes, device=device)

        def made(error: CumemSleepError | None) -> None:
            new = [segment for segment in _core.segments() if segment.id not in known]
            assert len(new) == (error is None)
            for segment in new:
                assert (segment.tag, segment.bytes, segment.device) == (tag, nbytes, device)
                self.expected[segment.id] = Expected(tag, segment.address, nbytes, plan)

        self.attempt(f"malloc({nbytes}, {tag}, {device}, {plan})", operation, made, faults=faults)
        self.full()

    def free(self) -> None:
        if len(self.expected) < 2:
            return
        number = self.random.choice(sorted(self.expected))
        address = self.expected[number].address
        by_hook = self.random.random() < 0.3

        def operation() -> None:
            if by_hook:  # does not say what the driver refused
                hooks().cumem_sleep_free(address, 1, 0, None)
            else:
                self.allocator.free(address)

        def freed(error: CumemSleepError | None) -> None:
            if error is None:
                del self.expected[number]

        self.attempt(f"free(0x{address:x}), by hook: {by_hook}", operation, freed)

    def write(self) -> None:
        awake = [each for each in self.expected.values() if each.sleep == AWAKE]
        if not awake:
            return
        each = self.random.choice(awake)
        if each.content is not None and not each.undefined and self.random.random() < 0.3:
            at = self.random.randrange(each.bytes)
            changed = bytes([each.content[at] ^ 0x55])
            content = each.content[:at] + changed + each.content[at + 1 :]
        else:
            start = 2 * self.random.randrange(2048)
            content = self.random.choice((NOISE, WEIGHTS))[start : start + each.bytes]
        ctypes.memmove(each.address, content, each.bytes)
        each.content, each.undefined = content, []
        self.log.append(f"write 0x{each.address:x}")

    def sleep(self) -> None:
        kind = self.random.choice(("level 1", "level 1", "level 2", "level 3", "tags", "level 0"))
        if kind == "level 0":
            self.attempt(
                "sleep(0)", lambda: self.allocator.sleep(0), lambda error: self.slept(error, set(), only=set())
            )
        elif kind == "tags":
            kept = set(self.random.sample(sorted(set(TAGS)), self.random.randint(1, 3)))
            declared, keep = self.declare(set(TAGS) - kept), {}
            self.attempt(
                f"sleep({kept}, drop={declared.drop})",
                lambda: self.allocator.sleep(kept, drop=declared.drop),
                lambda error: self.slept(error, set(TAGS) - kept, declared=declared),
            )
        else:
            level = int(kind[-1])
            dropped = {"kv_cache", "weights"} if level == 2 else {"kv_cache"}
            declared = self.declare(dropped)
            keep = {} if level == 2 else self.some_to_keep()
            self.has_kept |= bool(keep)
            self.attempt(
                f"sleep({level}, keep={keep}, drop={declared.drop})",
                lambda: self.allocator.sleep(level, keep=keep or None, drop=declared.drop),
                lambda error: self.slept(error, dropped, declared=declared, keep=keep),
            )

    def declare(self, tags: set[str]) -> Declaration:
        """Of segments of some of `tags`, whether they are awake or asleep."""
        mine = [each for each in self.expected.values() if each.tag in tags and each.backup == BY_LEVEL]
        if not mine or self.random.random() < 0.2:
            return NOTHING
        ranges = {}
        for each in self.random.sample(mine, self.random.randint(1, len(mine))):
            at = sorted(self.random.sample(range(each.bytes), self.random.choice((0, 0, 2, 2, 4, 6))))
            cut = [place // 16 * 16 for place in at]
            ends = self.random.choice((at, cut, [0, each.bytes]))
            ranges[each.address] = [(b, e) for b, e in zip(ends[::2], ends[1::2], strict=True) if b < e]
        return Declaration(ranges, frozenset(each.tag for each in mine if each.address in ranges))

    def some_to_keep(self) -> dict[int, list[tuple[int, int]]]:
        mine = [each for each in self.expected.values() if each.tag == "kv_cache" and each.backup == BY_LEVEL]
        if not mine or self.random.random() < 0.2:
            return {}
        starts = range(0, LENDER_BYTES, MIB)
        return {each.address: [(at + 16, 65536 + 48) for at in self.random.sample(starts, 2)] for each in mine}

    def discard(self) -> None:
        tags = set(self.random.sample(("weights", "kv_cache"), self.random.randint(1, 2)))
        declared = self.declare(tags)
        self.attempt(
            f"discard({tags}, drop={declared.drop})",
            lambda: self.allocator.discard(tags, drop=declared.drop),
            lambda error: self.slept(error, tags, only=tags, declared=declared),
        )

    def give_up_backups(self) -> None:
        tags = {self.random.choice(("weights", "kv_cache", "lora"))}
        declared = self.declare(tags)

        def forgotten(error: CumemSleepError | None) -> None:
            for each in self.expected.values() if error is None else ():
                each.may_come_back = []
                if each.tag in tags and each.backup == BY_LEVEL and each.sleep == BACKED_UP:
                    each.forgotten = declared.ranges.get(each.address) or each.forgotten
                    if each.survives(declared) is None:
                        each.sleep = DROPPED
                        each.lose_all()

        self.attempt(
            f"release_backups({tags}, drop={declared.drop})",
            lambda: self.allocator.release_backups(tags, drop=declared.drop),
            forgotten,
        )

    def sleep_regions(self) -> None:
        tags = self.random.choice((None, {self.random.choice(TAGS)}))
        self.attempt(
            f"regions.sleep({tags})",
            lambda: self.allocator.regions.sleep(self.used_in_regions(tags)),
            lambda error: self.slept(error, None, only=tags),
        )

    def wake_regions(self) -> None:
        tags = self.random.choice((None, {self.random.choice(TAGS)}))
        self.attempt(
            f"regions.wake({tags})",
            lambda: self.allocator.regions.wake(self.used_in_regions(tags)),
            lambda error: self.woken(error, tags, regions=True),
        )

    def used_in_regions(self, tags: set[str] | None) -> set[str] | None:
        """These, with which regions may not have been used yet."""
        for tag in tags or ():
            with self.allocator.regions.use(tag):
                pass
        return tags

    def slept(
        self,
        error: CumemSleepError | None,
        dropped: set[str] | None,
        only: set[str] | None = None,
        declared: Declaration = NOTHING,
        keep: Mapping[int, list[tuple[int, int]]] = MappingProxyType({}),
    ) -> None:
        """`dropped`: the tags, for memory of pools; None: memory of regions was meant."""
        dropped_bytes = backed_up_bytes = 0
        for segment in _core.segments():
            each = self.expected[segment.id]
            if (each.backup == BY_LEVEL) is (dropped is None):
                continue
            is_dropped = each.backup == _core.BackupPlan.NEVER if dropped is None else each.tag in dropped
            rest = each.survives(declared) if is_dropped else None
            if rest == [(0, each.bytes)]:
                is_dropped, rest = False, None
            is_kept = each.keeps_bytes and is_dropped and rest in (None, each.rest)
            if not (each.sleep == AWAKE or is_kept) or (only is not None and each.tag not in only):
                continue
            name = f"segment {each.tag} at 0x{each.address:x}"
            if error is None:
                kept = union([(at, at + nbytes) for at, nbytes in keep.get(each.address, [])])
                each.sleep, each.keeps_bytes = DROPPED if is_dropped else BACKED_UP, False
                each.rest, each.may_come_back = rest, []
                dropped_bytes += each.bytes * is_dropped
                backed_up_bytes += each.bytes * (not is_dropped)
                if is_dropped:
                    before = each.undefined
                    each.lose(without([(0, each.bytes)], rest or []))
                    if not self.report.not_kept and each.content is not None:
                        each.may_come_back = without(without(kept, rest or []), before)
                    if rest is None and not each.may_come_back:
                        each.lose_all()
            elif any(named.startswith(name) for named in error.lost_segments):
                each.sleep = DROPPED
                each.lose_all()
            elif any(named.startswith(name) for named in error.asleep_segments):
                each.sleep, each.keeps_bytes, each.rest = DROPPED if is_dropped else BACKED_UP, is_dropped, rest
            else:
                each.sleep, each.keeps_bytes, each.rest = AWAKE, False, None
        if error is None and declared is NOTHING:
            assert self.report.dropped_bytes == dropped_bytes
            assert self.report.clean_bytes + self.report.copied_bytes == backed_up_bytes

    def wake(self) -> None:
        chosen = self.random.choice((None, None, {"weights"}, {"kv_cache"}, {"weights", "kv_cache"}))
        self.attempt(
            f"wake_up({chosen})", lambda: self.allocator.wake_up(chosen), lambda error: self.woken(error, chosen)
        )

    def woken(
        self,
        error: CumemSleepError | None,
        chosen: set[str] | None,
        *,
        regions: bool = False,
    ) -> None:
        for each in self.expected.values():
            has_plan = each.backup != BY_LEVEL
            if regions or chosen is None:
                is_chosen = has_plan is regions and (chosen is None or each.tag in chosen)
            else:
                is_chosen = each.tag in chosen or not (has_plan or each.tag in ("weights", "kv_cache"))
            if error is not None or each.sleep == AWAKE or not is_chosen:
                continue
            is_blank = each.sleep == DROPPED and not each.keeps_bytes and each.rest is None
            if self.poison and not each.keeps_bytes:
                each.lose(each.forgotten)
            if each.may_come_back and not self.report.not_kept:
                each.undefined = without(each.undefined, each.may_come_back)
            if each.undefined == [(0, each.bytes)] or (is_blank and not each.may_come_back):
                each.lose_all()
            if is_blank and self.poison and each.tag != "kv_cache":
                each.content = b"\xff" * each.bytes
            each.sleep, each.rest, each.keeps_bytes = AWAKE, None, False
            each.may_come_back, each.forgotten = [], []

    def prepare(self) -> None:
        def operation() -> None:
            preparation = self.allocator.prepare()
            assert preparation.wait(60)
            if preparation.error is not None:
                raise preparation.error

        if self.allocator.settings.retain_backups:
            self.attempt("prepare()", operation, lambda _: None)

    def release(self) -> None:
        self.attempt("release_backups()", self.allocator.release_backups, lambda _: None)

    # What always holds

    def check(self) -> None:
        usage = self.allocator.usage().values()
        segments = {segment.id: segment for segment in _core.segments()}
        assert segments.keys() == self.expected.keys()
        self.check_host_memory(list(segments.values()))
        assert sum(each.asleep_segments for each in usage) == sum(
            each.sleep != AWAKE for each in self.expected.values()
        )
        for number, each in self.expected.items():
            segment = segments[number]
            name = f"{each.tag} at 0x{each.address:x}"
            assert (segment.address, segment.bytes, segment.tag) == (each.address, each.bytes, each.tag)
            assert segment.sleep == each.sleep, name
            assert is_accessible(each.address) is (each.sleep == AWAKE), f"{name} is {each.sleep}"
            if each.sleep == AWAKE and each.content is not None:
                for begin, end in without([(0, each.bytes)], each.undefined):
                    assert holds(each.address + begin, each.content[begin:end]), f"bytes {begin} to {end} of {name}"
            if each.sleep == BACKED_UP:
                assert self.allocator._store.catalogue.get(segment) is not None, f"backup of {name}"
                assert not segment.has_memory, name
            if each.sleep == DROPPED:
                rest_bytes = sum(end - begin for begin, end in each.rest or ())
                assert host_bytes_of(self.allocator, segment) == rest_bytes, name
                assert not rest_bytes or self.allocator._store.catalogue.get(segment) is not None, name
                assert segment.has_memory is each.keeps_bytes, f"{name}: memory that nobody needs"
        assert _core.reclaim() == 0

    def check_host_memory(self, segments: list[_core.Segment]) -> None:
        catalogue = self.allocator._store.catalogue
        for segment in segments:
            backup = None if self.expected[segment.id].rest else catalogue.of(segment)  # of what else is dropped
            check_state(segment, backup, self.driver_has_refused)
        held_bytes = self.allocator._store.memory.bytes
        kept_bytes = sum(each.kept_bytes for each in self.allocator.usage().values())
        backup_bytes = sum(host_bytes_of(self.allocator, segment) for segment in segments)
        assert held_bytes >= backup_bytes + kept_bytes
        assert held_bytes == backup_bytes or self.has_kept
        assert held_bytes <= (self.allocator.settings.host_budget_bytes or held_bytes)


def lacks_host_memory(error: CumemSleepError) -> bool:
    return isinstance(error, OutOfHostMemory) and error.needed_bytes > error.available_bytes


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    reset_simulation()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("number", range(HISTORIES) if ONLY is None else [int(ONLY)])
def test_history(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(number, monkeypatch)
    try:
        history.run()
        free_everything()
    except BaseException as error:
        raise AssertionError(f"history {number}: {error!r}\n" + "\n".join(history.log[-12:])) from error
