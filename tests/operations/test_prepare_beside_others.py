"""Backups made in the background are complete and right, or not there at all, whatever happens beside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from preparing import (
    COPYING,
    STEPS,
    TAGS,
    Gate,
    Steps,
    backed_up_bytes,
    changed,
    check_bytes,
    fill,
    finished,
    refuse_prefault,
    small_pieces,  # noqa: F401  (autouse)
    until_asked_to_stop,
)
from support import AWAKE, PAGE, SIMULATED, Cuda, Memory, hooks, host_bytes_of, in_thread

from cumem_sleep import CuMemAllocator, _core, sim
from cumem_sleep.operations.prepare import Preparation

MakeAllocator = Callable[..., CuMemAllocator]


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
    @pytest.mark.parametrize("at", range(STEPS))
    @pytest.mark.parametrize("act", [name for name in vars(Other) if name[0] != "_" and name not in ("first", "last")])
    def test_at_every_stage(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, act: str, at: int
    ) -> None:
        contents = fill(allocator, memory, *TAGS)
        other = Other(allocator, memory, contents)
        steps = Steps(monkeypatch, getattr(other, act), at)
        preparation = steps.prepare(allocator)
        assert preparation.error is None
        for segment in _core.segments():
            backup = allocator._store.catalogue.get(segment)
            assert host_bytes_of(allocator, segment) == (0 if backup is None else PAGE), "half a backup is left"
        assert not any(backup.being_prepared for backup in allocator._store.catalogue)
        if act in ("look", "allocate"):
            assert backed_up_bytes(allocator) == 2 * PAGE
        ready = [s.id for s in _core.segments() if s.sleep == AWAKE and allocator._store.catalogue.get(s) is not None]
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

        Steps(monkeypatch, sleep, STEPS // 2).prepare(allocator)
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
        Steps(monkeypatch, Other(allocator, memory, contents).write_first, at).prepare(allocator)
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
            if steps.count - 1 in writes:
                memory.write(address, writes[steps.count - 1])

        steps = Steps(monkeypatch, write)
        steps.prepare(allocator)
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
        assert allocator._store.memory.bytes == PAGE
        del contents[address]
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(memory, contents)

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
        assert allocator._store.memory.bytes == 2 * PAGE
        gate.open()
        deadline = time.monotonic() + 30
        while allocator._store.memory.bytes != PAGE:
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
            assert allocator._store.memory.bytes == 0
        allocator.wake_up()
        if operation == "discard":
            del contents[next(iter(contents))]
        allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("at", range(STEPS))
    @pytest.mark.parametrize("operation", ["release_backups", "close", "prepare"])
    def test_what_ends_it_at_every_stage(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, operation: str, at: int
    ) -> None:
        contents = fill(allocator, memory, *TAGS)
        helpers: list[threading.Thread] = []
        results: list[object] = []

        def end() -> None:
            assert steps.preparation is not None
            helpers.append(threading.Thread(target=lambda: results.append(getattr(allocator, operation)())))
            helpers[0].start()
            until_asked_to_stop(steps.preparation)

        steps = Steps(monkeypatch, end, at)
        first = steps.prepare(allocator)
        helpers[0].join(30)
        assert first.error is None
        if operation == "prepare":
            second = results[0]
            assert isinstance(second, Preparation)
            assert finished(second).error is None
            assert backed_up_bytes(allocator) == 2 * PAGE
        else:
            assert allocator._store.memory.bytes == 0
        assert allocator.sleep().copied_bytes == (0 if operation == "prepare" else 2 * PAGE)
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("at", range(STEPS))
    def test_stop_at_every_stage(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, at: int
    ) -> None:
        """What is complete stays, and half a backup goes."""
        contents = fill(allocator, memory, *TAGS)
        steps = Steps(monkeypatch)

        def stop() -> None:
            assert steps.preparation is not None
            steps.preparation._worker.ask_to_stop()

        steps._act, steps._at = stop, at
        preparation = steps.prepare(allocator)
        assert preparation.error is None
        complete = sum(at >= last for last in (3, 7))
        assert backed_up_bytes(allocator) == allocator._store.memory.bytes == complete * PAGE
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
        assert allocator._store.memory.bytes == 0

    @pytest.mark.slow
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
        assert allocator._store.memory.bytes == 0

    def test_a_sleep_takes_the_backup_over(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It completes what was half done; the preparation must not write to it any more, though all is awake again."""
        contents = fill(allocator, memory, *TAGS)
        address, content = next(iter(contents.items()))

        def act() -> None:
            if steps.count == 3:
                allocator.sleep()
                allocator.wake_up()
                memory.write(address, changed(content, -1))
            elif steps.count == 4:
                memory.write(address, content)

        steps = Steps(monkeypatch, act)
        steps.prepare(allocator)
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
            assert steps.preparation is not None
            steps.preparation._worker.ask_to_stop()
            memory.write(address, content)

        steps = Steps(monkeypatch, act, at=2)
        steps.prepare(allocator)
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
        steps = Steps(monkeypatch)

        def act() -> None:
            if ends == "stop":
                steps.preparation._worker.ask_to_stop()  # type: ignore[union-attr]
            elif ends == "free":
                allocator.free(next(iter(contents)))

        if ends:
            steps._act, steps._at = act, COPYING[1]
        if ends == "short":
            refuse_prefault(monkeypatch, after=3)
        cuda.call("cuStreamBeginCapture_v2", stream, mode)
        try:
            preparation = in_thread(lambda: steps.prepare(allocator))
            assert cuda.capture_is_valid(stream)
        finally:
            result = cuda.end_capture(stream)
            cuda.call("cuStreamDestroy_v2", stream)
            cuda.leave()
        assert result == 0
        assert (preparation.error is not None) == (ends == "short")
        expected = {"": 2, "stop": 0, "free": 1, "short": 1}[ends] * PAGE
        assert allocator._store.memory.bytes == sim.stats().registered_bytes == expected
