"""Backups made in the background: complete and right, or not there at all, whatever happens meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support import (
    AWAKE,
    MIB,
    PAGE,
    SIMULATED,
    Cuda,
    Memory,
    assert_clean_exit,
    assert_thread_ends_in_order,
    hooks,
    in_thread,
    patch_touch,
    quick_sums,
    run_script,
    threads_refused,
)

from cumem_sleep import (
    BackupMismatch,
    CuMemAllocator,
    CumemSleepError,
    DriverError,
    InvalidArgument,
    InvalidState,
    OutOfHostMemory,
    _core,
    sim,
)
from cumem_sleep.backups import limits as host_limits
from cumem_sleep.operations.prepare import Preparation

MakeAllocator = Callable[..., CuMemAllocator]

PREPARING = "cumem-prepare"  # the thread's name
TAGS = ("weights", "default")
# For two segments of two pieces: each is begun, copied twice, finished and tidied up after; and at the end once more.
TURNS = 9
COPYING = (1, 2, 3)  # turns of the first segment between its two digests
MANY = 1_000_000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces, each a block of its own, in every segment."""
    monkeypatch.setattr(CuMemAllocator.tuning, "prepare_piece_bytes", MIB)
    monkeypatch.setattr(CuMemAllocator.tuning, "prepare_extent_bytes", MIB)
    monkeypatch.setattr(host_limits, "mem_available_bytes", lambda enough=None: None)  # reads hundreds of files
    if SIMULATED:
        monkeypatch.setattr("cumem_sleep.digest.device.sums_of", quick_sums)


def until_asked_to_stop(preparation: Preparation) -> None:
    while not preparation._worker.asked_to_stop:
        time.sleep(0.0005)


def on_preparing_thread() -> bool:
    return _core.thread_name() == PREPARING


def fill(allocator: CuMemAllocator, memory: Memory, *tags: str) -> dict[int, bytes]:
    """A segment of random bytes for each tag: the bytes by address."""
    addresses = [allocator.malloc(PAGE, tag) for tag in tags]
    return {address: memory.fill_random(address, PAGE) for address in addresses}


def check_bytes(memory: Memory, contents: dict[int, bytes]) -> None:
    for address, content in contents.items():
        assert memory.read(address, PAGE) == content


def changed(content: bytes, place: int = 0) -> bytes:
    new = bytearray(content)
    new[place] ^= 0xFF
    return bytes(new)


def finished(preparation: Preparation) -> Preparation:
    assert preparation.wait(30)
    assert not preparation.running
    return preparation


def backed_up_bytes(allocator: CuMemAllocator) -> int:
    return sum(usage.backed_up_bytes for usage in allocator.usage().values())


class Turns:
    """Counts the turns of a preparation (each begins with taking the allocator's lock), and acts just before one.

    The act runs on a thread of its own while the preparing thread waits for it.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object] | None = None, at: int | None = None
    ) -> None:
        self.count = 0
        self.preparation: Preparation | None = None
        self._act = act
        self._at = at
        self._begun = threading.Event()
        self._errors: list[BaseException] = []
        hold = _core.OperationLock.hold

        def counted(lock: _core.OperationLock, wait: bool = True) -> _core.Held:
            if on_preparing_thread() and not self._errors:
                self._take()
            return hold(lock, wait)

        monkeypatch.setattr(_core.OperationLock, "hold", counted)

    def begin(self, allocator: CuMemAllocator) -> Preparation:
        self.preparation = allocator.prepare()
        self._begun.set()
        return self.preparation

    def prepare(self, allocator: CuMemAllocator) -> Preparation:
        """Begin, wait for the end, and see that the act went well."""
        preparation = finished(self.begin(allocator))
        if self._errors:
            raise self._errors[0]
        assert self._at is None or self.count > self._at, "there was no such turn"
        return preparation

    def _take(self) -> None:
        assert self._begun.wait(30)
        number, self.count = self.count, self.count + 1
        if self._act is not None and (self._at is None or number == self._at):
            try:
                in_thread(self._act)
            except BaseException as error:
                self._errors.append(error)


# By itself


class TestAlone:
    def test_the_next_sleep_copies_nothing(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, *TAGS, "kv_cache")
        preparation = finished(allocator.prepare())
        assert preparation.error is None
        assert preparation.wanted_bytes == 2 * PAGE
        assert {tag: usage.backed_up_bytes for tag, usage in allocator.usage().items()} == {
            "weights": PAGE,
            "default": PAGE,
            "kv_cache": 0,
        }
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes, report.dropped_bytes) == (0, 2 * PAGE, PAGE)
        assert backed_up_bytes(allocator) == 2 * PAGE
        assert allocator.wake_up().verified_bytes == 2 * PAGE
        check_bytes(memory, dict(list(contents.items())[:2]))

    def test_of_nothing(self, allocator: CuMemAllocator) -> None:
        preparation = finished(allocator.prepare())
        assert (preparation.error, preparation.wanted_bytes) == (None, 0)
        preparation.stop()

    def test_copies_only_what_has_no_backup_of_the_same_bytes(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, *TAGS, "lora")
        allocator.sleep()
        allocator.wake_up()
        first, second, _ = contents
        contents[second] = changed(contents[second], -1)
        memory.write(second, contents[second])
        before = [allocator._store.get(segment) for segment in _core.segments()]
        assert all(before)
        digests = [backup.digest for backup in before if backup]
        copied = []
        to_host = _core.CopyStream.to_host

        def noted(stream: _core.CopyStream, block: _core.HostBlock, offset: int, address: int, nbytes: int) -> None:
            if any(backup and block in backup.extents for backup in before):
                copied.append(address)
            to_host(stream, block, offset, address, nbytes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_core.CopyStream, "to_host", noted)
            assert finished(allocator.prepare()).error is None
        assert set(copied) == set(range(second, second + PAGE, MIB))
        after = [allocator._store.get(segment) for segment in _core.segments()]
        assert after == before, "host memory was taken anew"
        assert [old == new.digest for old, new in zip(digests, after, strict=True) if new] == [True, False, True]
        assert first in contents
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_what_changes_afterwards_is_left_to_the_sleep(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, *TAGS)
        finished(allocator.prepare())
        address = next(iter(contents))
        contents[address] = changed(contents[address])
        memory.write(address, contents[address])
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (PAGE, PAGE)
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_without_verification(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(verify="off")
        contents = fill(allocator, memory, *TAGS)
        assert finished(allocator.prepare()).error is None
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_what_sleeps_is_not_wanted(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, "weights")
        allocator.sleep()
        contents |= fill(allocator, memory, "default")
        preparation = finished(allocator.prepare())
        assert (preparation.error, preparation.wanted_bytes) == (None, PAGE)
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_backed_up_bytes_grow_by_whole_segments(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, memory, *TAGS)
        seen: list[tuple[int, int]] = []

        def look() -> None:
            usage = allocator.usage().values()
            seen.append((sum(u.backed_up_bytes for u in usage), sum(u.host_bytes for u in usage)))

        turns = Turns(monkeypatch, look)
        assert turns.prepare(allocator).error is None
        assert turns.count == TURNS
        done = [0] * 4 + [PAGE] * 4 + [2 * PAGE]
        assert [backed_up for backed_up, _ in seen] == done
        assert [host for _, host in seen] == [0] + [PAGE] * 4 + [2 * PAGE] * 4, "memory is taken as it is needed"
        check_bytes(memory, contents)

    @pytest.mark.parametrize(("rate", "pause_s"), [(0, 0.0002), (4 * MIB, 0.25), (1 << 60, 0.0002)])
    def test_rate(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, rate: int, pause_s: float
    ) -> None:
        """After each piece it rests until the next is due, and at least a little."""
        allocator = make_allocator(prepare_bytes_per_second=rate)
        fill(allocator, memory, *TAGS)
        pauses: list[float] = []

        class NeverPauses:
            def __init__(self, worker: _core.Worker) -> None:
                self._worker = worker

            def __getattr__(self, name: str) -> Any:
                return getattr(self._worker, name)

            def pause(self, seconds: float) -> bool:
                if not polling:
                    pauses.append(seconds)
                return self._worker.asked_to_stop

        polling = False
        turn = Preparation._turn

        def turn_that_polls(*arguments: object) -> object:
            nonlocal polling
            polling = True
            entered = turn(*arguments)  # type: ignore[arg-type]
            polling = False
            return entered

        start = Preparation.start

        def start_with_clock(preparation: Preparation) -> None:
            preparation._worker = NeverPauses(preparation._worker)  # type: ignore[assignment]
            start(preparation)

        monkeypatch.setattr("cumem_sleep.operations.prepare._POLL_S", -1.0)
        monkeypatch.setattr("cumem_sleep.operations.prepare.time.monotonic", lambda: 1000.0)
        monkeypatch.setattr(Preparation, "start", start_with_clock)
        preparation = allocator.prepare()
        while preparation.running:
            preparation.wait(30)
        assert preparation.error is None
        assert [pause for pause in pauses if pause >= 0] == pytest.approx(
            [pause_s * n if rate == 4 * MIB else pause_s for n in (1, 2, 3, 4)]
        )

    def test_again_ends_the_one_before(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, memory, *TAGS)
        gate = Gate(monkeypatch)
        first = allocator.prepare()
        gate.wait()
        second = Opened(gate, first, allocator.prepare).result()
        assert not first.running
        assert first.error is None
        assert finished(second).error is None
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_no_copy_is_in_flight_between_turns(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Then the segment may go at any time."""
        fill(allocator, memory, *TAGS)
        in_flight: list[int] = []
        seen: list[list[int]] = []
        to_host, synchronize = _core.CopyStream.to_host, _core.CopyStream.synchronize

        def noted_copy(
            stream: _core.CopyStream, block: _core.HostBlock, offset: int, address: int, nbytes: int
        ) -> None:
            to_host(stream, block, offset, address, nbytes)
            in_flight.append(stream.handle)

        def noted_wait(stream: _core.CopyStream) -> None:
            synchronize(stream)
            in_flight[:] = [handle for handle in in_flight if handle != stream.handle]

        turns = Turns(monkeypatch, lambda: seen.append(list(in_flight)))
        monkeypatch.setattr(_core.CopyStream, "to_host", noted_copy)
        monkeypatch.setattr(_core.CopyStream, "synchronize", noted_wait)
        turns.prepare(allocator)
        assert seen == [[]] * TURNS

    def test_memory_allocated_later_needs_another(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, *TAGS)
        finished(allocator.prepare())
        fill(allocator, memory, "lora")
        assert backed_up_bytes(allocator) == 2 * PAGE
        finished(allocator.prepare())
        assert backed_up_bytes(allocator) == 3 * PAGE


class Gate:
    """Stops the first preparing thread that comes to copy, until it is opened. The thread holds the lock meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()
        to_host = _core.CopyStream.to_host
        self.address = 0

        def gated(stream: _core.CopyStream, block: _core.HostBlock, offset: int, address: int, nbytes: int) -> None:
            to_host(stream, block, offset, address, nbytes)
            if on_preparing_thread() and block.bytes == MIB and not self._reached.is_set():
                self.address = address
                self._reached.set()
                assert self._opened.wait(30)

        monkeypatch.setattr(_core.CopyStream, "to_host", gated)

    def wait(self) -> None:
        assert self._reached.wait(30)

    def open(self) -> None:
        self._opened.set()


class Opened:
    """Runs what waits for a preparation on a thread of its own, and opens the gate once the thread runs."""

    def __init__(self, gate: Gate, preparation: Preparation, work: Callable[[], Preparation]) -> None:
        self._results: list[Preparation] = []
        started = threading.Event()

        def run() -> None:
            started.set()
            self._results.append(work())

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(30)
        assert preparation.running
        gate.open()

    def result(self) -> Preparation:
        self._thread.join(30)
        return self._results[0]


class TestRefused:
    def test_without_retained_backups(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(retain_backups=False)
        fill(allocator, memory, *TAGS)
        with pytest.raises(InvalidState, match="retain_backups"):
            allocator.prepare()
        assert allocator._preparation is None
        assert allocator._store.host_bytes == 0

    def test_while_this_thread_captures(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """As PyTorch tells it."""

        class Pools:
            def is_capturing(self) -> bool:
                return True

        fill(allocator, memory, *TAGS)
        allocator._torch_pools = Pools()  # type: ignore[assignment]
        try:
            with pytest.raises(InvalidState, match="prepare while this thread captures"):
                allocator.prepare()
        finally:
            allocator._torch_pools = None
        assert allocator._preparation is None
        finished(allocator.prepare())
        assert backed_up_bytes(allocator) == 2 * PAGE

    def test_without_a_thread(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, *TAGS)
        with threads_refused():
            with pytest.raises(InvalidState, match="no thread can be started"):
                allocator.prepare()
            allocator.release_backups()  # has nothing to wait for
        assert allocator._store.host_bytes == 0
        assert finished(allocator.prepare()).error is None
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(memory, contents)


class TestSetting:
    def test_begins_when_a_pool_is_left(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(prepare=True)
        with allocator.use_memory_pool("weights"):
            address = allocator.malloc(PAGE)
            content = memory.fill_random(address, PAGE)
            assert allocator._preparation is None
        assert allocator._preparation is not None
        finished(allocator._preparation)
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(memory, {address: content})

    def test_is_off_unless_asked_for(self, allocator: CuMemAllocator) -> None:
        with allocator.use_memory_pool("weights"):
            allocator.malloc(PAGE)
        assert allocator._preparation is None

    def test_not_after_an_error(self, make_allocator: MakeAllocator) -> None:
        allocator = make_allocator(prepare=True)
        with pytest.raises(InvalidArgument), allocator.use_memory_pool("weights"):
            allocator.malloc(0)
        assert allocator._preparation is None

    @pytest.mark.parametrize(
        ("settings", "words"), [({"host_budget_bytes": PAGE}, "budget"), ({"retain_backups": False}, "retain_backups")]
    )
    def test_what_refuses_it_is_a_warning(
        self,
        make_allocator: MakeAllocator,
        memory: Memory,
        caplog: pytest.LogCaptureFixture,
        settings: dict[str, object],
        words: str,
    ) -> None:
        allocator = make_allocator(prepare=True, **settings)
        with caplog.at_level(logging.WARNING, "cumem_sleep"), allocator.use_memory_pool("weights"):
            fill(allocator, memory, *TAGS)
        assert len(caplog.records) == 1
        assert "prepare did not begin" in caplog.text
        assert words in caplog.text
        assert allocator._store.host_bytes == 0


# Beside other operations


@dataclass
class Other:
    """What happens beside a preparation. Changes `contents` to what the bytes have to be."""

    allocator: CuMemAllocator
    memory: Memory
    contents: dict[int, bytes]

    @property
    def first(self) -> int:
        return next(iter(self.contents))

    @property
    def last(self) -> int:
        return list(self.contents)[-1]

    def sleep(self) -> None:
        self.allocator.sleep()

    def sleep_and_wake(self) -> None:
        self.allocator.sleep()
        self.allocator.wake_up()

    def sleep_and_wake_some(self) -> None:
        self.allocator.sleep()
        self.allocator.wake_up("kv_cache")  # and `default` with it

    def drop_weights(self) -> None:
        self.allocator.sleep(2)
        del self.contents[self.first]

    def discard_and_wake(self) -> None:
        self.allocator.discard("weights")
        self.allocator.wake_up()
        self.contents[self.first] = self.memory.fill_random(self.first, PAGE)

    def free_first(self) -> None:
        self.allocator.free(self.first)
        del self.contents[self.first]

    def free_last_through_hook(self) -> None:
        hooks().cumem_sleep_free(self.last, PAGE, 0, None)
        del self.contents[self.last]

    def free_and_allocate(self) -> None:
        """The same address, most likely."""
        self.free_first()
        self.allocate()

    def allocate(self) -> None:
        self.contents |= fill(self.allocator, self.memory, "weights")

    def look(self) -> None:
        usage = self.allocator.usage()
        assert sum(part.bytes for part in usage.values()) == PAGE * len(self.contents)

    def write_first(self) -> None:
        self.contents[self.first] = changed(self.contents[self.first], 10)
        self.memory.write(self.first, self.contents[self.first])

    def write_last(self) -> None:
        self.contents[self.last] = changed(self.contents[self.last], PAGE - 10)
        self.memory.write(self.last, self.contents[self.last])


class TestBesideOthers:
    @pytest.mark.slow
    @pytest.mark.parametrize("at", range(TURNS))
    @pytest.mark.parametrize("act", [name for name in vars(Other) if name[0] != "_" and name not in ("first", "last")])
    def test_at_every_stage(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, act: str, at: int
    ) -> None:
        contents = fill(allocator, memory, *TAGS)
        other = Other(allocator, memory, contents)
        turns = Turns(monkeypatch, getattr(other, act), at)
        preparation = turns.prepare(allocator)
        assert preparation.error is None
        for segment in _core.segments():
            backup = allocator._store.get(segment)
            assert allocator._store.host_bytes_of(segment) == (0 if backup is None else PAGE), "half a backup is left"
        assert not any(backup.being_prepared for backup in allocator._store._backups.values())
        if act in ("look", "allocate"):
            assert backed_up_bytes(allocator) == 2 * PAGE
        ready = [s.id for s in _core.segments() if s.sleep == AWAKE and allocator._store.get(s) is not None]
        awake = [s.id for s in _core.segments() if s.sleep == AWAKE]
        report = allocator.sleep()
        if not act.startswith("write"):
            assert report.copied_bytes == PAGE * (len(awake) - len(ready)), "a backup was not of the segment's bytes"
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("act", ["sleep", "sleep_and_wake"])
    def test_a_sleep_does_not_copy_what_is_ready(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, act: str
    ) -> None:
        """After the first of two segments; and the preparation ends, since it finds nothing to do."""
        contents = fill(allocator, memory, *TAGS)
        copied = []

        def sleep() -> None:
            report = allocator.sleep()
            copied.append(report.copied_bytes)
            if act == "sleep_and_wake":
                allocator.wake_up()

        Turns(monkeypatch, sleep, TURNS // 2).prepare(allocator)
        assert copied == [PAGE]
        allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("at", COPYING)
    def test_a_write_during_the_copy(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, at: int
    ) -> None:
        """To what was copied already (after turn 1): the backup is true, of the bytes before. Else it is void."""
        contents = fill(allocator, memory, *TAGS)
        Turns(monkeypatch, Other(allocator, memory, contents).write_first, at).prepare(allocator)
        assert [usage.backed_up_bytes for usage in allocator.usage().values()] == [PAGE if at > 1 else 0, PAGE]
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (PAGE, PAGE)
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_bytes_that_change_and_change_back_during_the_copy(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As counters and workspaces do that every kernel leaves at zero: the copy may be of what lies between."""
        contents = fill(allocator, memory, *TAGS)
        address, content = next(iter(contents.items()))
        writes = {1: changed(content), 2: content}

        def write() -> None:
            if turns.count - 1 in writes:
                memory.write(address, writes[turns.count - 1])

        turns = Turns(monkeypatch, write)
        turns.prepare(allocator)
        allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("through_hook", [False, True])
    def test_free_of_the_segment_that_is_being_copied(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, through_hook: bool
    ) -> None:
        """Its memory stays until the piece is copied (else the copy would fault), then all of it goes."""
        contents = fill(allocator, memory, *TAGS)
        gate = Gate(monkeypatch)
        preparation = allocator.prepare()
        gate.wait()
        address = next(iter(contents))
        assert gate.address == address
        in_thread(lambda: hooks().cumem_sleep_free(address, PAGE, 0, None) if through_hook else allocator.free(address))
        assert len(_core.segments()) == 1
        if SIMULATED:
            assert sim.stats().reserved_bytes == 2 * PAGE, "it went while a copy was in flight"
        gate.open()
        assert finished(preparation).error is None
        _core.synchronize(0)
        if SIMULATED:
            assert sim.stats().reserved_bytes == PAGE
        assert allocator._store.host_bytes == PAGE
        del contents[address]
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_free_of_another_segment_while_a_piece_is_copied(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has a backup, which cannot be forgotten at once, but is by the time the preparation ends."""
        contents = fill(allocator, memory, "weights")
        finished(allocator.prepare())
        contents |= fill(allocator, memory, "default")
        gate = Gate(monkeypatch)
        preparation = allocator.prepare()
        gate.wait()
        in_thread(lambda: allocator.free(min(contents, key=lambda address: address == gate.address)))
        gate.open()
        finished(preparation)
        assert allocator._store.host_bytes == PAGE

    @pytest.mark.parametrize("through_hook", [False, True])
    def test_a_backup_of_what_is_freed_goes_after_the_piece(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, through_hook: bool
    ) -> None:
        """Not only at the end, which at one byte per second is weeks away."""
        allocator = make_allocator(prepare_bytes_per_second=1)
        (freed,) = fill(allocator, memory, "weights")
        allocator.sleep()
        allocator.wake_up()
        fill(allocator, memory, "default")
        gate = Gate(monkeypatch)
        preparation = allocator.prepare()
        gate.wait()
        in_thread(lambda: hooks().cumem_sleep_free(freed, PAGE, 0, None) if through_hook else allocator.free(freed))
        assert allocator._store.host_bytes == 2 * PAGE
        gate.open()
        deadline = time.monotonic() + 30
        while allocator._store.host_bytes != PAGE:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert preparation.running
        preparation.stop()

    @pytest.mark.parametrize("operation", ["sleep", "wake_up", "discard", "usage", "release_backups", "close"])
    def test_waits_for_the_piece_and_no_longer(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, operation: str
    ) -> None:
        """Called while the preparing thread holds the lock and a copy is in flight."""
        contents = fill(allocator, memory, *TAGS)
        gate = Gate(monkeypatch)
        preparation = allocator.prepare()
        gate.wait()
        call = getattr(allocator, operation)
        started, done = threading.Event(), threading.Event()

        def operate() -> None:
            started.set()
            call("weights") if operation == "discard" else call()
            done.set()

        thread = threading.Thread(target=operate, daemon=True)
        thread.start()
        assert started.wait(30)
        assert not done.is_set()
        gate.open()
        assert done.wait(30)
        finished(preparation)
        assert preparation.error is None
        if operation in ("release_backups", "close"):
            assert allocator._store.host_bytes == 0
        allocator.wake_up()
        if operation == "discard":
            del contents[next(iter(contents))]
        allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("at", range(TURNS))
    @pytest.mark.parametrize("operation", ["release_backups", "close", "prepare"])
    def test_what_ends_it_at_every_stage(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, operation: str, at: int
    ) -> None:
        contents = fill(allocator, memory, *TAGS)
        helpers: list[threading.Thread] = []
        results: list[object] = []

        def end() -> None:
            assert turns.preparation is not None
            helpers.append(threading.Thread(target=lambda: results.append(getattr(allocator, operation)())))
            helpers[0].start()
            until_asked_to_stop(turns.preparation)

        turns = Turns(monkeypatch, end, at)
        first = turns.prepare(allocator)
        helpers[0].join(30)
        assert first.error is None
        if operation == "prepare":
            second = results[0]
            assert isinstance(second, Preparation)
            assert finished(second).error is None
            assert backed_up_bytes(allocator) == 2 * PAGE
        else:
            assert allocator._store.host_bytes == 0
        assert allocator.sleep().copied_bytes == (0 if operation == "prepare" else 2 * PAGE)
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("at", range(TURNS))
    def test_stop_at_every_stage(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, at: int
    ) -> None:
        """What is complete stays, and half a backup goes."""
        contents = fill(allocator, memory, *TAGS)
        turns = Turns(monkeypatch)

        def stop() -> None:
            assert turns.preparation is not None
            turns.preparation._worker.ask_to_stop()

        turns._act, turns._at = stop, at
        preparation = turns.prepare(allocator)
        assert preparation.error is None
        complete = sum(at >= last for last in (3, 7))
        assert backed_up_bytes(allocator) == allocator._store.host_bytes == complete * PAGE
        preparation.stop()
        preparation.stop()
        assert allocator.sleep().clean_bytes == complete * PAGE
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_stop_and_wait(self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(allocator, memory, *TAGS)
        gate = Gate(monkeypatch)
        preparation = allocator.prepare()
        gate.wait()
        assert preparation.running
        assert not preparation.wait(0)
        threading.Thread(target=preparation.stop, daemon=True).start()
        until_asked_to_stop(preparation)
        gate.open()
        assert finished(preparation).error is None
        assert preparation.wait(0)
        assert allocator._store.host_bytes == 0

    def test_through_many_sleeps(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Nothing is held still here: each preparation goes on through the sleep, the wake and the writes after it."""
        contents = fill(allocator, memory, *TAGS, "lora", "weights")
        for turn in range(25):
            preparation = allocator.prepare()
            address = list(contents)[turn % 4]
            contents[address] = changed(contents[address], turn)
            memory.write(address, contents[address])
            allocator.sleep()
            allocator.wake_up()
            check_bytes(memory, {address: contents[address]})
            if turn % 3 == 0:
                finished(preparation)
            elif turn % 3 == 1:
                allocator.release_backups()
            assert preparation.error is None
        check_bytes(memory, contents)
        preparation.stop()

    def test_a_replaced_allocator_stops_preparing(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocator = make_allocator(prepare_bytes_per_second=1)  # would go on for days
        (address,) = fill(allocator, memory, "weights")
        gate = Gate(monkeypatch)
        preparation = allocator.prepare()
        gate.wait()
        gate.open()
        allocator.free(address)
        make_allocator()
        assert not preparation.running
        assert preparation.error is None
        assert allocator._store.host_bytes == 0

    def test_a_sleep_takes_the_backup_over(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It completes what was half done; the preparation must not write to it any more, though all is awake again."""
        contents = fill(allocator, memory, *TAGS)
        address, content = next(iter(contents.items()))

        def act() -> None:
            if turns.count == 3:
                allocator.sleep()
                allocator.wake_up()
                memory.write(address, changed(content, -1))
            elif turns.count == 4:
                memory.write(address, content)

        turns = Turns(monkeypatch, act)
        turns.prepare(allocator)
        allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_an_old_backup_counts_no_more_once_it_is_written_to(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not even if the segment has the old bytes again."""
        contents = fill(allocator, memory, *TAGS)
        allocator.sleep()
        allocator.wake_up()
        address, content = next(iter(contents.items()))
        memory.write(address, changed(content))

        def act() -> None:
            assert turns.preparation is not None
            turns.preparation._worker.ask_to_stop()
            memory.write(address, content)

        turns = Turns(monkeypatch, act, at=2)
        turns.prepare(allocator)
        allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)


@pytest.mark.sim
class TestBesideCaptures:
    @pytest.mark.parametrize("mode", [Cuda.GLOBAL, Cuda.THREAD_LOCAL, Cuda.RELAXED])
    @pytest.mark.parametrize("ends", ["", "stop", "free", "short"])
    def test_leaves_the_capture_valid(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        mode: int,
        ends: str,
    ) -> None:
        """Of another thread, all the way through: taking, registering, copying and giving host memory back."""
        contents = fill(allocator, memory, *TAGS)
        memory.close()
        cuda = Cuda()
        cuda.enter()
        stream = cuda.stream()
        turns = Turns(monkeypatch)

        def act() -> None:
            if ends == "stop":
                turns.preparation._worker.ask_to_stop()  # type: ignore[union-attr]
            elif ends == "free":
                allocator.free(next(iter(contents)))

        if ends:
            turns._act, turns._at = act, COPYING[1]
        if ends == "short":
            refuse_touch(monkeypatch, after=3)
        cuda.call("cuStreamBeginCapture_v2", stream, mode)
        try:
            preparation = in_thread(lambda: turns.prepare(allocator))
            assert cuda.capture_is_valid(stream)
        finally:
            result = cuda.end_capture(stream)
            cuda.call("cuStreamDestroy_v2", stream)
            cuda.leave()
        assert result == 0
        assert (preparation.error is not None) == (ends == "short")
        expected = {"": 2, "stop": 0, "free": 1, "short": 1}[ends] * PAGE
        assert allocator._store.host_bytes == sim.stats().registered_bytes == expected


# What was not to be


def refuse_touch(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The kernel has no page for the block after so many of a preparation's blocks."""
    touch, touched = _core.HostBlock.touch, []

    def refusing(block: _core.HostBlock, offset: int, nbytes: int) -> None:
        if on_preparing_thread() and block.bytes == MIB:
            touched.append(offset)
            if len(touched) > after:
                raise OutOfHostMemory(nbytes, 0, "madvise")
        touch(block, offset, nbytes)

    patch_touch(monkeypatch, refusing)


def refuse_mmap(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    make, made = _core.HostBlock, []

    def refusing(nbytes: int, numa_node: int) -> _core.HostBlock:
        if on_preparing_thread() and nbytes == MIB:
            made.append(nbytes)
            if len(made) > after:
                raise OutOfHostMemory(nbytes, 0, "mmap")
        return make(nbytes, numa_node)

    monkeypatch.setattr(_core, "HostBlock", refusing)


def refuse_register(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    pin, pinned = _core.HostBlock.pin, []

    def refusing(block: _core.HostBlock, device: int) -> None:
        if on_preparing_thread() and block.bytes == MIB:
            pinned.append(block.bytes)
            if len(pinned) > after:
                raise OutOfHostMemory(block.bytes, 0, "cuMemHostRegister")
        pin(block, device)

    monkeypatch.setattr(_core.HostBlock, "pin", refusing)


class TestHostMemoryIsShort:
    @pytest.mark.parametrize("limit", ["budget", "cgroup", "MemAvailable"])
    def test_for_all_of_it(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, limit: str
    ) -> None:
        """Known at once: the call itself refuses, and nothing is begun or taken."""
        short = 2 * PAGE - 1
        allocator = make_allocator(host_budget_bytes=short if limit == "budget" else None)
        contents = fill(allocator, memory, *TAGS)
        with monkeypatch.context() as patch:
            if limit == "cgroup":
                patch.setattr(host_limits, "cgroup_available_bytes", lambda: short)
            elif limit == "MemAvailable":
                patch.setattr(host_limits, "mem_available_bytes", lambda enough=None: short)
            with pytest.raises(OutOfHostMemory) as raised:
                allocator.prepare()
        error = raised.value
        assert (error.needed_bytes, error.available_bytes, error.limit) == (2 * PAGE, short, limit)
        assert allocator._preparation is None
        assert allocator._store.host_bytes == 0
        check_bytes(memory, contents)

    def test_what_is_backed_up_already_is_not_counted(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(host_budget_bytes=2 * PAGE)
        fill(allocator, memory, *TAGS)
        for _ in range(2):
            assert finished(allocator.prepare()).error is None
        assert allocator._store.host_bytes == 2 * PAGE

    def test_backups_that_no_sleep_would_use_give_way(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(host_budget_bytes=2 * PAGE)
        contents = fill(allocator, memory, "weights", "kv_cache")
        allocator.sleep(offload_tags=["kv_cache", "weights"])
        allocator.wake_up()
        contents |= fill(allocator, memory, "default")
        assert finished(allocator.prepare()).error is None
        assert {tag: usage.backed_up_bytes for tag, usage in allocator.usage().items()} == {
            "weights": PAGE,
            "kv_cache": 0,
            "default": PAGE,
        }
        check_bytes(memory, contents)

    @pytest.mark.parametrize("stage", ["cgroup", "budget", "mmap", "touch", "register"])
    @pytest.mark.parametrize("complete", [0, 1])
    def test_half_way(
        self,
        make_allocator: MakeAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        stage: str,
        complete: int,
    ) -> None:
        """What was complete stays; the next sleep copies the rest, once there is memory again."""
        allocator = make_allocator()
        contents = fill(allocator, memory, *TAGS)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "cumem_sleep"):
            turns = Turns(patch)
            if stage in ("cgroup", "budget"):

                def shrink() -> None:
                    if stage == "cgroup":
                        patch.setattr(host_limits, "cgroup_available_bytes", lambda: PAGE - 1)
                    else:  # of another sort: settings do not change, but other backups may fill the budget
                        limit = host_limits.HostLimit("budget", PAGE - 1)
                        patch.setattr(allocator._store, "limits", lambda needed=None: [limit])

                turns._act, turns._at = shrink, 4 * complete
            else:
                refuse = {"mmap": refuse_mmap, "touch": refuse_touch, "register": refuse_register}[stage]
                refuse(patch, after=2 * complete + 1)  # in the middle of a segment
            preparation = turns.prepare(allocator)
        limit = {"touch": "madvise", "register": "cuMemHostRegister"}.get(stage, stage)
        assert isinstance(preparation.error, OutOfHostMemory)
        assert preparation.error.limit == limit
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "prepare ended early" in caplog.text
        assert limit in caplog.text
        assert all(segment.sleep == AWAKE for segment in _core.segments())
        assert backed_up_bytes(allocator) == allocator._store.host_bytes == complete * PAGE
        report = allocator.sleep()
        assert (report.clean_bytes, report.copied_bytes) == (complete * PAGE, (2 - complete) * PAGE)
        allocator.wake_up()
        check_bytes(memory, contents)


class TestDamage:
    def test_a_flipped_bit_in_a_backup(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, *TAGS, "lora")
        finished(allocator.prepare())
        assert allocator.sleep().copied_bytes == 0
        segment = _core.segments()[1]
        backup = allocator._store.get(segment)
        assert backup is not None
        content = np.frombuffer(memoryview(backup.extents[1]), np.uint8)
        content[5] ^= 1
        for _ in range(2):
            with pytest.raises(BackupMismatch, match=f"default at 0x{segment.address:x}"):
                allocator.wake_up()
            assert all(s.sleep != AWAKE and not s.has_memory for s in _core.segments())
        content[5] ^= 1
        allocator.wake_up()
        check_bytes(memory, contents)


@pytest.mark.sim
class TestDriverErrors:
    def check(self, allocator: CuMemAllocator, memory: Memory, contents: dict[int, bytes], call: str) -> None:
        """Prepare while `call` fails; then all is awake, and sleeps and wakes as if nothing had been."""
        try:
            error: CumemSleepError | None = finished(allocator.prepare()).error
        except CumemSleepError as raised:
            error = raised
        reached = sim.stats().calls[call]
        sim.reset()
        if error is not None:
            assert isinstance(error, DriverError) or (isinstance(error, OutOfHostMemory) and error.limit == call)
            assert call in str(error)
        assert reached
        assert all(segment.sleep == AWAKE for segment in _core.segments())
        ready_bytes = backed_up_bytes(allocator)
        assert allocator._store.host_bytes == ready_bytes
        report = allocator.sleep()
        assert (report.clean_bytes, report.copied_bytes) == (ready_bytes, 2 * PAGE - ready_bytes)
        allocator.wake_up()
        check_bytes(memory, contents)
        memory.close()
        allocator.release_backups()
        assert _core.reclaim() == 0
        assert sim.stats().registered_bytes == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("error_name", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
    def test_at_every_call(self, allocator: CuMemAllocator, memory: Memory, error_name: str) -> None:
        contents = fill(allocator, memory, *TAGS)
        memory.close()
        sim.reset()
        finished(allocator.prepare())
        calls = {
            call: count
            for call, count in sim.stats().calls.items()
            if count and (error_name == "CUDA_ERROR_UNKNOWN" or not call.startswith(("cuCtx", "cuThread")))
        }
        assert calls["cuMemcpyDtoHAsync"] == 4 + 2  # and the digests
        allocator.release_backups()
        problems = []
        for call, count in calls.items():
            for position in range(count):
                sim.reset()
                allocator._store._tier._numa_nodes.clear()  # so that the device is asked again
                sim.fail(call, after=position, error=error_name)
                try:
                    self.check(allocator, memory, contents, call)
                except Exception as error:
                    problems.append(f"{call} number {position + 1} of {count}: {type(error).__name__}: {error}")
                    sim.reset()
                    allocator.wake_up()
                    allocator.release_backups()
        assert not problems, f"{len(problems)} of {sum(calls.values())}:\n" + "\n".join(problems[:20])

    @pytest.mark.parametrize(
        "call",
        [
            "cuMemHostRegister",
            "cuMemHostUnregister",
            "cuMemcpyDtoHAsync",
            "cuStreamCreate",
            "cuStreamDestroy",
            "cuStreamSynchronize",
        ],
    )
    def test_for_long(self, allocator: CuMemAllocator, memory: Memory, call: str) -> None:
        contents = fill(allocator, memory, *TAGS)
        memory.close()
        sim.fail(call, error="CUDA_ERROR_UNKNOWN", times=MANY)
        self.check(allocator, memory, contents, call)


# Processes

BEGUN = """
    import sys, threading

    reset_simulation()
    allocator, memory = fresh_allocator(prepare_bytes_per_second=RATE), Memory()
    contents = {}
    for tag in ("weights", "default"):
        address = allocator.malloc(2 * PAGE, tag)
        contents[address] = memory.fill_random(address, 2 * PAGE)
    memory.close()
    CuMemAllocator.tuning.prepare_piece_bytes = MIB
    copied = threading.Event()
    copy = Preparation._copy

    def noted(*arguments):
        copied.set()
        return copy(*arguments)

    Preparation._copy = noted
    preparation = allocator.prepare()
    assert copied.wait(30)
    """


@pytest.mark.sim
class TestProcess:
    @pytest.mark.slow
    @pytest.mark.parametrize("rate", [1, 0])
    @pytest.mark.parametrize(
        "rest", ["", "sys.exit(0)", "preparation.wait(0.005)", "CuMemAllocator.instance = None; del allocator"]
    )
    def test_exit_meanwhile(self, rate: int, rest: str) -> None:
        """At one byte per second it would take weeks."""
        process = run_script(f"RATE = {rate}", BEGUN, rest, CUMEM_SLEEP_SIM_COPY_DELAY_US="5000")
        assert_clean_exit(process)

    def test_exit_ends_it_in_an_orderly_way(self) -> None:
        """Before the interpreter is taken down, not by that."""
        assert_thread_ends_in_order("RATE = 1", BEGUN, thread="preparation._worker")

    @pytest.mark.parametrize("as_python_does", [False, True])
    def test_fork_meanwhile(self, as_python_does: bool) -> None:
        process = run_script(
            "RATE = 1",
            BEGUN,
            f"""
            calls = (allocator.prepare, allocator.usage, allocator.sleep)
            fork_beside(preparation._worker, allocator, *calls, as_python_does={as_python_does})
            assert preparation.running
            assert allocator.sleep().copied_bytes == 4 * PAGE
            allocator.wake_up()
            for address, content in contents.items():
                assert memory.read(address, 2 * PAGE) == content
            memory.close()
            preparation.stop()
            assert preparation.error is None
            free_everything()
            """,
        )
        assert_clean_exit(process)


class TestForeignErrorsAndPromisedMemory:
    def test_an_error_of_another_kind_is_told(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, memory, *TAGS)

        def fails(*_: object, **__: object) -> None:
            raise MemoryError("no more")

        with monkeypatch.context() as patch:
            patch.setattr("cumem_sleep.digest.device.DigestRun.add_copy", fails)
            preparation = finished(allocator.prepare())
        assert isinstance(preparation.error, InvalidState)
        assert "no more" in str(preparation.error)
        assert allocator._store.host_bytes == 0
        allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_memory_that_was_taken_but_not_touched_is_not_offered_again(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, memory, *TAGS)
        first, second = _core.segments()
        monkeypatch.setattr(host_limits, "mem_available_bytes", lambda enough=None: 2 * PAGE - 1)
        allocator._store.take([first], [first, second], {})
        with pytest.raises(OutOfHostMemory, match="MemAvailable"):
            allocator._store.take([second], [first, second], {})
        allocator._store.clear()
        monkeypatch.undo()
        check_bytes(memory, contents)
