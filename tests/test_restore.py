"""The bytes of a wake: what is copied in which order and which way, what may run ahead, and how it goes wrong."""

from __future__ import annotations

import platform
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support import AWAKE, MIB, PAGE, SIMULATED, Memory, assert_clean_exit, quick_sums, run_script

import cumem_sleep
from cumem_sleep import BackupMismatch, CuMemAllocator, DriverError, OutOfHostMemory, _core, host_limits, restore, sim
from cumem_sleep.ahead import Ahead
from cumem_sleep.backup import Backup, Piece
from cumem_sleep.restore import Batch, Restorer, _batches, _choices, _Lane, _Way

MakeAllocator = Callable[..., CuMemAllocator]


def refuse_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


# Threads ahead of who waits


class TestAhead:
    def run_all(self, ahead: Ahead, keys: range) -> None:
        with ahead:
            ahead.start()
            for key in keys:
                ahead.wait(key)
                ahead.wait(key)

    @pytest.mark.parametrize("threads", [1, 4])
    def test_each_task_runs_once(self, threads: int) -> None:
        ran: list[tuple[int, str]] = []
        tasks = {key: [lambda key=key: ran.append((key, threading.current_thread().name))] * 3 for key in range(20)}
        self.run_all(Ahead(threads, tasks), range(20))
        assert sorted(key for key, _ in ran) == sorted(list(range(20)) * 3)
        assert all(name.startswith("cumem-sleep-ahead") for _, name in ran)

    def test_one_thread_keeps_the_order(self) -> None:
        ran: list[int] = []
        self.run_all(Ahead(1, {key: [lambda key=key: ran.append(key)] for key in (3, 1, 2)}), range(4))
        assert ran == [3, 1, 2]

    def test_raises_what_a_task_raised_where_it_is_waited_for(self) -> None:
        def fail() -> None:
            raise OutOfHostMemory(1, 0, "madvise")

        with Ahead(1, {1: [lambda: None], 2: [lambda: None, fail], 3: [lambda: None]}) as ahead:
            ahead.start()
            ahead.wait(1)
            with pytest.raises(OutOfHostMemory):
                ahead.wait(2)
            ahead.wait(3)

    def test_stop_waits_for_what_runs_and_drops_the_rest(self) -> None:
        begun, go, ran = threading.Event(), threading.Event(), []

        def first() -> None:
            begun.set()
            assert go.wait(30)
            ran.append(1)

        ahead = Ahead(1, {1: [first], 2: [lambda: ran.append(2)]})
        ahead.start()
        assert begun.wait(30)
        stopped = threading.Event()
        stopper = threading.Thread(target=lambda: (ahead.stop(), stopped.set()), daemon=True)
        stopper.start()
        while not ahead._stopped:
            pass
        assert not stopped.is_set()
        go.set()
        assert stopped.wait(30)
        assert ran == [1]
        ahead.stop()

    @pytest.mark.parametrize("started", [0, 1, 2])
    def test_without_threads_who_waits_does_the_work(self, monkeypatch: pytest.MonkeyPatch, started: int) -> None:
        """Or with fewer threads than wanted. No task runs on a thread while, or after, it runs where it is waited for.

        Where the kernel cannot touch pages by itself, touching writes: a second time it would harm the copy.
        """
        start, starts = threading.Thread.start, []

        def refuse_later(thread: threading.Thread) -> None:
            starts.append(thread)
            if len(starts) > started:
                raise RuntimeError("can't start new thread")
            start(thread)

        waited: set[int] = set()
        late: list[int] = []
        go = threading.Event()

        def task(key: int) -> None:
            if threading.current_thread() is threading.main_thread():
                go.set()
            elif not ahead._stopped:  # a thread that is slow, so that tasks are left for the next thread
                go.wait(0.05)
            if key in waited:
                late.append(key)

        ahead = Ahead(3, {key: [lambda key=key: task(key)] for key in range(6)})
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_later)
            with ahead:
                ahead.start()
                for key in range(6):
                    ahead.wait(key)
                    waited.add(key)
        assert go.is_set(), "this thread did nothing"
        assert late == []

    def test_an_interrupt_as_a_thread_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It works, but the pool does not know of it: stopping waits for it all the same."""
        start, begun, go, ran = threading.Thread.start, threading.Event(), threading.Event(), []

        def interrupted(thread: threading.Thread) -> None:
            start(thread)
            assert begun.wait(30)
            raise KeyboardInterrupt

        def work() -> None:
            begun.set()
            assert go.wait(30)
            ran.append(1)

        ahead = Ahead(1, {1: [work]})
        stopped = threading.Event()

        def begin() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    ahead.start()
            ahead.stop()
            stopped.set()

        beginner = threading.Thread(target=begin, daemon=True)
        beginner.start()
        assert begun.wait(30)
        assert not stopped.wait(0.02)
        go.set()
        assert stopped.wait(30)
        assert ran == [1]


class TestWithoutThreads:
    def test_sleep_and_wake(self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        contents = {allocator.malloc(PAGE, tag): b"" for tag in ("weights", "default", "kv_cache")}
        for address in contents:
            contents[address] = memory.fill_random(address, PAGE)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_thread)
            assert allocator.sleep().copied_bytes == 2 * PAGE
            assert allocator.wake_up().mapped_bytes == 3 * PAGE
        for address, content in list(contents.items())[:2]:
            assert memory.read(address, PAGE) == content


# Batches


@dataclass
class Part:
    """Of a segment, as much as batches look at."""

    id: int
    bytes: int
    address: int
    device: int = 0


@dataclass
class Block:
    """Of a host block, likewise."""

    bytes: int


class Store:
    """Backups in blocks of at most `block_bytes`."""

    def __init__(self, parts: list[Part], block_bytes: int) -> None:
        self.backups = {
            part.id: Backup(
                part,  # type: ignore[arg-type]
                tuple(Block(min(block_bytes, part.bytes - at)) for at in range(0, part.bytes, block_bytes)),  # type: ignore[misc]
            )
            for part in parts
        }

    def pieces(self, part: Part, at_most: int) -> Iterator[Piece]:
        return self.backups[part.id].pieces(at_most)


def parts_of(*sizes: int) -> list[Part]:
    return [Part(number, size, number << 32) for number, size in enumerate(sizes, start=1)]


class TestBatches:
    @pytest.mark.parametrize("block_bytes", [3, 8, 10, 128])
    @pytest.mark.parametrize(
        "sizes", [(1,), (8,), (9,), (4, 4, 4), (8, 8), (20, 1, 1), (1, 20, 1), (7, 7, 7), (1,) * 30, (64, 64), ()]
    )
    def test_hold_every_byte_once_and_in_order(
        self, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], block_bytes: int
    ) -> None:
        monkeypatch.setattr(restore, "_BATCH_BYTES", 8)
        parts = parts_of(*sizes)
        store = Store(parts, block_bytes)
        batches = list(_batches(parts, store))  # type: ignore[arg-type]
        assert all(0 < batch.bytes <= 8 for batch in batches)
        bytes_there = [
            (piece.address + place, id(piece.block), piece.offset + place)
            for batch in batches
            for piece in batch.pieces
            for place in range(piece.bytes)
        ]
        wanted = [
            (part.address + start + place, id(block), place)
            for part in parts
            for start, block in zip(range(0, part.bytes, block_bytes), store.backups[part.id].blocks, strict=True)
            for place in range(block.bytes)
        ]
        assert bytes_there == wanted
        completed = [segment.id for batch in batches for segment in batch.completed]
        assert completed == [part.id for part in parts]
        for number, batch in enumerate(batches):
            in_it = {piece.address >> 32 for piece in batch.pieces}
            assert {segment.id for segment in batch.segments} == in_it
            later = {piece.address >> 32 for after in batches[number + 1 :] for piece in after.pieces}
            assert {segment.id for segment in batch.completed} == in_it - later

    def test_are_full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two neighbours never fit into one: many small segments are not many small copies."""
        monkeypatch.setattr(restore, "_BATCH_BYTES", 8)
        parts = parts_of(*[1, 3, 2] * 10)
        sizes = [batch.bytes for batch in _batches(parts, Store(parts, 128))]  # type: ignore[arg-type]
        assert all(one + next_one > 8 for one, next_one in pairwise(sizes))


# The choice between two ways

ENGINE, KERNEL = True, False


class TestChoices:
    def choose(self, rates: dict[bool, list[float] | float], count: int) -> list[tuple[bool, bool]]:
        """What is chosen for so many batches, where each way copies at these rates (one after another)."""
        choices = _choices()
        given = [next(choices)]
        left = {way: list(rate) if isinstance(rate, list) else None for way, rate in rates.items()}
        while len(given) < count:
            way, is_trial = given[-1]
            queue = left[way]
            rate = rates[way] if queue is None else queue.pop(0) if is_trial else 0.0  # only trials are measured
            assert isinstance(rate, float)
            given.append(choices.send(rate))
        return given

    def test_both_are_tried_alone(self) -> None:
        assert self.choose({ENGINE: 55.0, KERNEL: 51.0}, 2) == [(ENGINE, True), (KERNEL, True)]

    @pytest.mark.parametrize("engine", [55.0, 51.0, 0.8 * 51.0])
    def test_a_free_engine_copies_all(self, engine: float) -> None:
        assert self.choose({ENGINE: engine, KERNEL: 51.0}, 200)[2:] == [(ENGINE, False)] * 198

    def test_a_busy_engine_is_tried_again_and_again(self) -> None:
        chosen = self.choose({ENGINE: 22.0, KERNEL: 51.0}, 2 + 33 * 4)[2:]
        assert chosen == ([(KERNEL, False)] * 32 + [(ENGINE, True)]) * 4

    def test_an_engine_that_becomes_free_takes_over_for_good(self) -> None:
        chosen = self.choose({ENGINE: [22.0, 24.0, 54.0], KERNEL: 51.0}, 2 + 33)
        chosen = self.choose({ENGINE: [22.0, 24.0, 54.0], KERNEL: [51.0]}, 2 + 33 * 2)
        assert chosen[2:] == ([(KERNEL, False)] * 32 + [(ENGINE, True)]) * 2
        choices = _choices()
        rates = iter([22.0, 51.0, *[1.0] * 32, 54.0])
        next(choices)
        for rate in rates:
            last = choices.send(rate)
        assert last == (ENGINE, False)
        assert [choices.send(0.001) for _ in range(100)] == [(ENGINE, False)] * 100


# A lane


@dataclass
class Log:
    """What happened, in order; and what is in flight on each stream."""

    events: list[tuple[str, object]] = field(default_factory=list)
    in_flight: dict[int, list[int]] = field(default_factory=dict)  # batches by stream

    @property
    def flying(self) -> list[int]:
        return sorted(number for numbers in self.in_flight.values() for number in numbers)


class FakeStream:
    def __init__(self, number: int, log: Log) -> None:
        self.number = number
        self.log = log
        self.fails_at: int | None = None

    def to_device(self, address: int, block: object, offset: int, nbytes: int) -> None:
        if self.fails_at == address >> 32:
            raise DriverError("cuMemcpyHtoDAsync", "CUDA_ERROR_UNKNOWN", "", "")
        self.log.events.append(("engine", address >> 32))
        self.log.in_flight.setdefault(self.number, []).append(address >> 32)

    def synchronize(self) -> None:
        self.log.events += [("done", batch) for batch in self.log.in_flight.pop(self.number, [])]


class FakeKernel:
    def __init__(self, log: Log, fails: Exception | None = None) -> None:
        self.log = log
        self.fails = fails

    def start(self, stream: FakeStream, pieces: list[Piece]) -> None:
        if self.fails:
            raise self.fails
        assert stream.number not in self.log.in_flight, "the table is still in use"
        for piece in pieces:
            self.log.events.append(("kernel", piece.address >> 32))
            self.log.in_flight.setdefault(stream.number, []).append(piece.address >> 32)


class FakeDigests:
    def __init__(self, log: Log) -> None:
        self.log = log

    def start(self, segments: list[Part]) -> None:
        self.log.events += [("digest", segment.id) for segment in segments]


class TestLane:
    """One batch for each segment, so that numbers of segments are numbers of batches."""

    def batches(self, count: int) -> Iterator[Batch]:
        for part in parts_of(*[4] * count):
            piece = Piece(Block(4), 0, part.address, 4)  # type: ignore[arg-type]
            yield Batch([piece], [part], [part])  # type: ignore[list-item]

    def lane(self, log: Log, kernels: bool = False, digests: bool = True) -> tuple[_Lane, list[FakeStream]]:
        def mapped(number: int) -> None:
            log.events.append(("mapped", number))

        streams = [FakeStream(number, log) for number in range(2)]
        ways = [_Way(stream, FakeKernel(log) if kernels else None) for stream in streams]  # type: ignore[arg-type]
        return _Lane(mapped, FakeDigests(log) if digests else None, ways), streams  # type: ignore[arg-type]

    @pytest.mark.parametrize("kernels", [False, True])
    @pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
    def test_order(self, kernels: bool, count: int) -> None:
        log = Log()
        lane, _ = self.lane(log, kernels)
        most = 0
        for _ in lane.run(self.batches(count)):
            most = max(most, len(log.flying))
        assert log.flying == []
        for number in range(1, count + 1):
            mine = [event for event, batch in log.events if batch == number]
            assert [event if event != "kernel" else "engine" for event in mine] == [
                "mapped",
                "engine",
                "done",
                "digest",
            ]
        copies = [batch for event, batch in log.events if event in ("engine", "kernel")]
        assert copies == list(range(1, count + 1))
        if count > 2 and not kernels:
            assert most == 1, "one is left in flight while we prepare the next"
            for number in range(1, count):  # the next is begun before this one is waited for
                assert log.events.index(("engine", number + 1)) < log.events.index(("done", number))

    def test_trials_run_alone(self) -> None:
        log = Log()
        lane, _ = self.lane(log, kernels=True)
        for _ in lane.run(self.batches(2)):
            assert log.flying == []
        assert [e for e in log.events if e[0] in ("engine", "kernel", "done")] == [
            ("engine", 1),
            ("done", 1),
            ("kernel", 2),
            ("done", 2),
        ]

    def test_a_later_trial_waits_for_what_flies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(restore, "_BATCHES_BETWEEN_TRIALS", 3)
        clock = iter(range(1000))
        rates = {"engine": 10, "kernel": 1}  # seconds that each takes
        log = Log()
        now = [0.0]

        def perf_counter() -> float:
            starts = [event for event, _ in log.events if event in rates]
            now[0] = float(sum(rates[event] for event in starts)) + next(clock) * 1e-9
            return now[0]

        monkeypatch.setattr(restore.time, "perf_counter", perf_counter)
        lane, _ = self.lane(log, kernels=True)
        for _ in lane.run(self.batches(11)):
            pass
        ways = [event for event, _ in log.events if event in rates]
        assert ways == ["engine", "kernel", *["kernel"] * 3, "engine", *["kernel"] * 3, "engine", "kernel"]
        copies = [e for e in log.events if e[0] in (*rates, "done")]
        assert copies.index(("done", 5)) < copies.index(("engine", 6)) < copies.index(("done", 6))
        assert copies.index(("done", 6)) < copies.index(("kernel", 7))

    def test_without_digests(self) -> None:
        log = Log()
        lane, _ = self.lane(log, digests=False)
        assert len(list(lane.run(self.batches(3)))) == 3
        assert not [event for event, _ in log.events if event == "digest"]

    def test_nothing_is_digested_that_was_not_copied(self) -> None:
        log = Log()
        lane, streams = self.lane(log)
        streams[0].fails_at = 3
        with pytest.raises(DriverError):
            list(lane.run(self.batches(5)))
        assert [batch for event, batch in log.events if event == "digest"] == [1]


class TestWay:
    def piece(self) -> Batch:
        return next(TestLane().batches(1))

    def test_a_kernel_that_fails_is_done_without(self, caplog: pytest.LogCaptureFixture) -> None:
        log = Log()
        way = _Way(FakeStream(0, log), FakeKernel(log, ValueError("no such register")))  # type: ignore[arg-type]
        for _ in range(2):
            way.start(self.piece(), by_engine=False)
        assert log.events == [("engine", 1)] * 2
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "no such register" in caplog.text

    def test_an_error_of_the_driver_is_none_of_the_kernels(self) -> None:
        log = Log()
        error = DriverError("cuLaunchKernel", "CUDA_ERROR_UNKNOWN", "", "")
        way = _Way(FakeStream(0, log), FakeKernel(log, error))  # type: ignore[arg-type]
        with pytest.raises(DriverError):
            way.start(self.piece(), by_engine=False)
        assert log.events == []


class TestWarmUp:
    def warm_up(self, monkeypatch: pytest.MonkeyPatch, work: Callable[[int], None]) -> Restorer:
        module = types.ModuleType("cumem_sleep.copy_kernel")
        module.warm_up = work  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(cumem_sleep, "copy_kernel", module, raising=False)
        restorer = Restorer()
        restorer.warm_up(0)
        return restorer

    def test_makes_the_kernel_a_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.warm_up(monkeypatch, lambda device: None)._kernel_devices == {0}

    def test_a_kernel_that_does_not_compile(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: int) -> None:
            raise AssertionError("PTX")

        assert self.warm_up(monkeypatch, fail)._kernel_devices == set()
        assert "copy engine alone" in caplog.text

    def test_an_error_of_the_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: int) -> None:
            raise DriverError("cuStreamCreate", "CUDA_ERROR_UNKNOWN", "", "")

        with pytest.raises(DriverError):
            self.warm_up(monkeypatch, fail)


# Whole wakes


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four batches for each page, two blocks."""
    monkeypatch.setattr(restore, "_BATCH_BYTES", MIB // 2)
    monkeypatch.setattr("cumem_sleep.backup.SLAB_BYTES", MIB)
    if SIMULATED:
        monkeypatch.setattr("cumem_sleep.digest.sums_of", quick_sums)
    monkeypatch.setattr(host_limits, "mem_available_bytes", lambda enough=None: None)


def fill(allocator: CuMemAllocator, memory: Memory, sizes: list[int], tag: str = "weights") -> dict[int, bytes]:
    contents = {}
    for nbytes in sizes:
        address = allocator.malloc(nbytes, tag)
        contents[address] = memory.fill_random(address, nbytes)
    return contents


def check_bytes(memory: Memory, contents: dict[int, bytes]) -> None:
    for address, content in contents.items():
        assert memory.read(address, len(content)) == content


@pytest.mark.usefixtures("small_batches")
class TestWake:
    @pytest.mark.parametrize("batch_bytes", [MIB // 2, MIB, 3 * MIB, 64 * MIB])
    def test_bytes_in_batches_of_any_size(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
    ) -> None:
        monkeypatch.setattr(restore, "_BATCH_BYTES", batch_bytes)
        contents = fill(allocator, memory, [PAGE, 3 * PAGE, PAGE, 2 * PAGE])
        allocator.sleep()
        report = allocator.wake_up()
        assert (report.restored_bytes, report.verified_bytes) == (7 * PAGE, 7 * PAGE)
        check_bytes(memory, contents)

    @pytest.mark.parametrize("place", [0, 2, 4])
    @pytest.mark.parametrize("block", [0, -1])
    def test_a_flipped_bit_in_any_batch(
        self, allocator: CuMemAllocator, memory: Memory, place: int, block: int
    ) -> None:
        contents = fill(allocator, memory, [2 * PAGE] * 5)
        allocator.sleep()
        segment = _core.segments()[place]
        backup = allocator._store.get(segment)
        assert backup is not None
        content = np.frombuffer(memoryview(backup.blocks[block]), np.uint8)
        content[-7] ^= 0x10
        for _ in range(2):
            with pytest.raises(BackupMismatch) as raised:
                allocator.wake_up()
            assert f"0x{segment.address:x}" in raised.value.segment
            assert all(one.sleep != AWAKE and not one.has_memory for one in _core.segments())
        content[-7] ^= 0x10
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_what_has_bytes_is_mapped_first(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mapped: list[str] = []
        kv_cache = fill(allocator, memory, [PAGE], "kv_cache")
        contents = fill(allocator, memory, [PAGE, PAGE])
        allocator.sleep()
        map_segment = _core.Segment.map

        def noted(segment: _core.Segment) -> None:
            mapped.append(segment.tag)
            map_segment(segment)

        monkeypatch.setattr(_core.Segment, "map", noted)
        allocator.wake_up()
        assert mapped == ["weights", "weights", "kv_cache"]
        check_bytes(memory, contents)
        assert len(kv_cache) == 1

    def test_a_copy_begins_before_all_is_mapped(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last segment is mapped only once the first copy was asked for: nobody waits for all of the mapping."""
        contents = fill(allocator, memory, [PAGE] * 4)
        allocator.sleep()
        last = _core.segments()[-1].address
        copying = threading.Event()
        map_segment, to_device = _core.Segment.map, _core.CopyStream.to_device

        def wait_and_map(segment: _core.Segment) -> None:
            assert segment.address != last or copying.wait(30)
            map_segment(segment)

        def copy(stream: _core.CopyStream, address: int, *more: Any) -> None:
            to_device(stream, address, *more)
            copying.set()

        monkeypatch.setattr(_core.Segment, "map", wait_and_map)
        monkeypatch.setattr(_core.CopyStream, "to_device", copy)
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("where", ["mapping", "copying", "copying, and stopping"])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, OutOfHostMemory])
    def test_the_mapping_thread_is_at_rest_before_a_failed_wake_is_undone(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        where: str,
        error: type[BaseException],
    ) -> None:
        """The error comes while the thread is in the middle of mapping; undoing at once would leave that mapped."""
        contents = fill(allocator, memory, [PAGE] * 3)
        allocator.sleep()
        last = _core.segments()[-1].address
        in_map, go = threading.Event(), threading.Event()
        at_undo: list[bool] = []
        stops: list[Ahead] = []
        map_segment, undo_wake = _core.Segment.map, _core.undo_wake
        shutdown = Ahead.stop

        def slow_map(segment: _core.Segment) -> None:
            if segment.address == last:
                in_map.set()
                assert go.wait(30)
            map_segment(segment)

        def fail(*_: object) -> None:
            assert in_map.wait(30)
            raise error(1, 0, "here") if error is OutOfHostMemory else error

        def stop(ahead: Ahead) -> None:
            stops.append(ahead)
            if where == "copying, and stopping" and len(stops) == 1:
                raise KeyboardInterrupt
            threading.Timer(0.02, go.set).start()  # after this has begun to wait, most likely; else nothing is shown
            shutdown(ahead)

        def undo(segments: list[_core.Segment]) -> None:
            at_undo.append(all(segment.has_memory for segment in segments))
            undo_wake(segments)

        with monkeypatch.context() as patch:
            patch.setattr(_core.Segment, "map", slow_map)
            patch.setattr(_core, "undo_wake", undo)
            patch.setattr(Ahead, "stop", stop)
            if where != "mapping":
                patch.setattr(_core.CopyStream, "to_device", fail)
            else:
                patch.setattr(Ahead, "wait", fail)
            with pytest.raises(KeyboardInterrupt if where == "copying, and stopping" else error):
                allocator.wake_up()
        assert at_undo == [True], "undone while the thread was mapping"
        assert all(segment.sleep != AWAKE and not segment.has_memory for segment in _core.segments())
        assert not [t for t in threading.enumerate() if t.name.startswith("cumem-sleep")]
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_an_interrupt_as_the_mapping_thread_starts(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, memory, [PAGE] * 3)
        allocator.sleep()
        start, map_segment, undo_wake = threading.Thread.start, _core.Segment.map, _core.undo_wake
        in_map = threading.Event()
        mapping: list[int] = []
        mapped_at_undo: list[list[int]] = []

        def slow_map(segment: _core.Segment) -> None:
            mapping.append(segment.address)
            in_map.set()
            threading.Event().wait(0.05)
            map_segment(segment)
            mapping.remove(segment.address)

        def interrupted(thread: threading.Thread) -> None:
            start(thread)
            assert in_map.wait(30)
            raise KeyboardInterrupt

        def undo(segments: list[_core.Segment]) -> None:
            mapped_at_undo.append(list(mapping))
            undo_wake(segments)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            patch.setattr(_core.Segment, "map", slow_map)
            patch.setattr(_core, "undo_wake", undo)
            with pytest.raises(KeyboardInterrupt):
                allocator.wake_up()
        assert mapped_at_undo == [[]], "undone while the thread was mapping"
        assert all(segment.sleep != AWAKE and not segment.has_memory for segment in _core.segments())
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.sim
    def test_devices_take_turns(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sim.configure(devices=2)
        contents = {}
        for device in (0, 0, 1):
            address = allocator.malloc(PAGE, "weights", device)
            contents[address, device] = memory.fill_random(address, PAGE, device)
        allocator.sleep()
        order: list[int] = []
        to_device = _core.CopyStream.to_device

        def noted(stream: _core.CopyStream, *more: Any) -> None:
            order.append(stream.device)
            to_device(stream, *more)

        with monkeypatch.context() as patch:
            patch.setattr(_core.CopyStream, "to_device", noted)
            allocator.wake_up()
        assert order == [0, 1] * 4 + [0] * 4
        for (address, device), content in contents.items():
            assert memory.read(address, PAGE, device) == content
        memory.close()


class TestManySegments:
    def test_go_one_by_one(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        count = 300
        if SIMULATED:
            sim.configure(device_bytes=(count + 8) * PAGE)
            monkeypatch.setattr("cumem_sleep.digest.sums_of", quick_sums)
        allocator = make_allocator()
        addresses = [allocator.malloc(PAGE, "weights") for _ in range(count)]
        marks = [number.to_bytes(8, "little") * 512 for number in range(1, count + 1)]
        for address, mark in zip(addresses, marks, strict=True):
            memory.write(address + 8192, mark)
        allocator.sleep()
        assert allocator.wake_up().verified_bytes == count * PAGE
        for address, mark in zip(addresses, marks, strict=True):
            assert memory.read(address + 8192, len(mark)) == mark
        memory.close()
        for left in reversed(range(count)):
            address = addresses.pop(left // 2)
            allocator.free(address)
            assert allocator._store.host_bytes == left * PAGE
            if SIMULATED:
                assert sim.stats().registered_bytes == left * PAGE

    def test_each_free_forgets_its_own_backup(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, [PAGE, 2 * PAGE, PAGE])
        allocator.sleep()
        allocator.wake_up()
        segments = _core.segments()
        addresses = [segment.address for segment in segments]
        allocator.free(addresses[1])
        assert [allocator._store.host_bytes_of(segment) for segment in segments] == [PAGE, 0, PAGE]
        del contents[addresses[1]]
        assert allocator.sleep().copied_bytes == 0
        allocator.free(addresses[2])
        assert allocator._store.host_bytes == PAGE
        del contents[addresses[2]]
        allocator.wake_up()
        check_bytes(memory, contents)


# Poor machines

CYCLES = """
    reset_simulation()
    allocator, memory = fresh_allocator(), Memory()
    contents = {}
    for tag in ("weights", "default"):
        address = allocator.malloc(4 * PAGE, tag)
        contents[address] = memory.fill_random(address, 4 * PAGE)
    memory.close()

    def check():
        for address, content in contents.items():
            assert memory.read(address, 4 * PAGE) == content
        memory.close()

    assert allocator.sleep().copied_bytes == 8 * PAGE
    assert allocator.wake_up().verified_bytes == 8 * PAGE
    check()
    allocator.release_backups()
    preparation = allocator.prepare()
    assert preparation.wait(30)
    assert preparation.error is None, preparation.error
    assert allocator.sleep().copied_bytes == 0
    allocator.wake_up()
    check()
    free_everything()
    """

REFUSE_MADVISE = """
    # A filter of system calls: madvise with these kinds of advice is refused, as a kernel does that does not know them.
    import ctypes, errno, mmap, struct

    def statement(code, true, false, value):
        return struct.pack("HBBI", code, true, false, value)

    LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
    MADVISE = 28
    statements = [
        statement(LOAD, 0, 0, 0),
        statement(EQUAL, 0, 3 + len(REFUSED), MADVISE),
        statement(LOAD, 0, 0, 16 + 2 * 8),
        *[statement(EQUAL, len(REFUSED) - place, 0, kind) for place, kind in enumerate(REFUSED)],
        statement(RETURN, 0, 0, 0x7FFF0000),
        statement(RETURN, 0, 0, 0x00050000 | errno.EINVAL),
        statement(RETURN, 0, 0, 0x7FFF0000),
    ]
    program = ctypes.create_string_buffer(b"".join(statements))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(statements), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, header, 0, 0):
        print("no filter")
        raise SystemExit
    pages = mmap.mmap(-1, 1 << 21)
    for kind in REFUSED:
        with raises(OSError, "Invalid argument"):
            pages.madvise(kind)
    """


@pytest.mark.sim
class TestPoorMachines:
    @pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
    @pytest.mark.parametrize("refused", [[14], [14, 23]], ids=["huge pages", "huge pages and populating"])
    def test_the_kernel_refuses_advice(self, refused: list[int]) -> None:
        process = run_script(f"REFUSED = {refused}", REFUSE_MADVISE, CYCLES)
        if process.stdout == "no filter\n":
            pytest.skip("no system-call filter here")
        assert_clean_exit(process)

    @pytest.mark.parametrize(
        "poverty",
        [
            "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))",
            "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
            """
            import threading
            start = threading.Thread.start

            def refuse(thread):
                if thread.name.startswith("cumem-sleep-ahead"):
                    raise RuntimeError("can't start new thread")
                start(thread)

            threading.Thread.start = refuse
            """,
        ],
        ids=["no locked memory", "one core", "no threads"],
    )
    def test_sleep_wake_and_prepare_work(self, poverty: str) -> None:
        assert_clean_exit(run_script(poverty, CYCLES))
