"""The bytes of a wake: what is copied in which order and which way, what may run ahead, and how it goes wrong."""

from __future__ import annotations

import platform
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from support import (
    AWAKE,
    DRIVER,
    MIB,
    PAGE,
    SIMULATED,
    Memory,
    assert_clean_exit,
    assert_no_threads,
    patch_map,
    quick_sums,
    run_script,
    threads_refused,
)

import cumem_sleep.transfer
from cumem_sleep import BackupMismatch, CuMemAllocator, DriverError, OutOfDeviceMemory, OutOfHostMemory, _core, sim
from cumem_sleep._core import Ahead
from cumem_sleep.backups import limits as host_limits
from cumem_sleep.backups.backup import Backup
from cumem_sleep.driver import open_driver
from cumem_sleep.extents import Piece
from cumem_sleep.transfer import lanes, pacing, routes
from cumem_sleep.transfer.lanes import Batch, Batches, RawCopies
from cumem_sleep.transfer.pacing import BestRate, Choice
from cumem_sleep.transfer.restorer import Restorer, ToRestore
from cumem_sleep.transfer.routes import Route

MakeAllocator = Callable[..., CuMemAllocator]


# Threads ahead of who waits


def ahead_of(threads: int, tasks: dict[int, list[Callable[[], object]]]) -> Ahead:
    return Ahead(threads, as_tasks(tasks))


def as_tasks(tasks: dict[int, list[Callable[[], object]]]) -> dict[int, list[_core.Task]]:
    return {key: [_core.Task(task) for task in mine] for key, mine in tasks.items()}


class TestAhead:
    def run_all(self, ahead: Ahead, keys: range) -> None:
        with ahead:
            ahead.start()
            for key in keys:
                ahead.wait(key)
                ahead.wait(key)

    @pytest.mark.parametrize("threads", [1, 4])
    def test_each_task_runs_once(self, threads: int) -> None:
        ran: list[tuple[int, int]] = []
        self.run_all(
            ahead_of(
                threads, {key: [lambda key=key: ran.append((key, threading.get_ident()))] * 3 for key in range(20)}
            ),
            range(20),
        )
        assert sorted(key for key, _ in ran) == sorted(list(range(20)) * 3)
        assert threading.get_ident() not in {thread for _, thread in ran}

    def test_one_thread_keeps_the_order(self) -> None:
        ran: list[int] = []
        self.run_all(ahead_of(1, {key: [lambda key=key: ran.append(key)] for key in (3, 1, 2)}), range(4))
        assert ran == [3, 1, 2]

    @pytest.mark.parametrize("threads_to_be_had", [True, False])
    def test_more_tasks(self, threads_to_be_had: bool) -> None:
        ran: list[tuple[int, int]] = []

        def tasks(*keys: int) -> dict[int, list[Callable[[], object]]]:
            return {key: [lambda key=key: ran.append((key, threading.get_ident()))] for key in keys}  # type: ignore[misc]

        with ahead_of(1, tasks(1)) as ahead:
            ahead.start()
            ahead.wait(1)
            if not threads_to_be_had:
                ahead.stop()
            ahead.add(as_tasks(tasks(4, 2)))
            ahead.add(as_tasks(tasks(3)))
            for key in (2, 3, 4):
                ahead.wait(key)
        keys = [key for key, _ in ran]
        assert keys == ([1, 4, 2, 3] if threads_to_be_had else [1, 2, 3, 4])
        by_threads = {thread != threading.get_ident() for _, thread in ran[1:]}
        assert by_threads == {threads_to_be_had}

    @pytest.mark.parametrize("error", [OutOfHostMemory(1, 0, "madvise"), MemoryError(), KeyboardInterrupt()])
    def test_raises_what_a_task_raised_where_it_is_waited_for(self, error: BaseException) -> None:
        """Whatever it is, the thread goes on."""

        def fail() -> None:
            raise error

        with ahead_of(1, {1: [lambda: None], 2: [lambda: None, fail], 3: [lambda: None]}) as ahead:
            ahead.start()
            ahead.wait(1)
            with pytest.raises(type(error)):
                ahead.wait(2)
            ahead.wait(3)

    def test_stop_waits_for_what_runs_and_drops_the_rest(self) -> None:
        begun, go, ran = threading.Event(), threading.Event(), []

        def first() -> None:
            begun.set()
            assert go.wait(30)
            ran.append(1)

        ahead = ahead_of(1, {1: [first], 2: [lambda: ran.append(2)]})
        ahead.start()
        assert begun.wait(30)
        stopped = threading.Event()
        stopper = threading.Thread(target=lambda: (ahead.stop(), stopped.set()), daemon=True)
        stopper.start()
        assert not stopped.wait(0.02)
        go.set()
        assert stopped.wait(30)
        assert ran == [1]
        ahead.stop()
        assert_no_threads()

    @pytest.mark.parametrize("started", [0, 1, 2])
    def test_without_threads_who_waits_does_the_work(self, started: int) -> None:
        """Or with fewer threads than wanted. Each task runs once.

        Where the kernel cannot touch pages by itself, touching writes: a second time it would harm the copy.
        """
        ran: list[tuple[int, int]] = []
        tasks = {key: [lambda key=key: ran.append((key, threading.get_ident()))] for key in range(6)}
        with threads_refused(after=started), ahead_of(3, tasks) as ahead:  # type: ignore[arg-type]
            ahead.start()
            for key in range(6):
                ahead.wait(key)
        assert ran == [(key, threading.get_ident()) for key in range(6)]
        assert_no_threads()

    @pytest.mark.parametrize(("threads", "keys"), [(1, 3), (3, 2), (3, 3), (4, 20)])
    def test_as_many_threads_as_keep_at_work(self, threads: int, keys: int) -> None:
        """All at once: each task waits for the others' threads."""
        wanted = min(threads, 2 * keys)
        together = threading.Barrier(wanted)
        with ahead_of(threads, {}) as ahead:
            ahead.start()
            assert _core.thread_names() == []  # with nothing to do, nothing begins
            ahead.add(
                as_tasks({key: [lambda: together.wait(30)] * 2 for key in range(keys // wanted * wanted or wanted)})
            )
            assert len(_core.thread_names()) == wanted
            for key in range(keys // wanted * wanted or wanted):
                ahead.wait(key)


class TestWithoutThreads:
    def test_sleep_and_wake(self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        contents = {allocator.malloc(PAGE, tag): b"" for tag in ("weights", "default", "kv_cache")}
        for address in contents:
            contents[address] = memory.fill_random(address, PAGE)
        with threads_refused():
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

    def backed_up(self, parts: list[Part]) -> Any:
        return [(part, list(self.backups[part.id].pieces())) for part in parts]

    def batches(self, parts: list[Part]) -> Batches:
        return Batches(self.backed_up(parts))


def parts_of(*sizes: int) -> list[Part]:
    return [Part(number, size, number << 32) for number, size in enumerate(sizes, start=1)]


def batches_of(parts: list[Part], store: Store, sizes: Iterator[int]) -> list[Batch]:
    """All there are, each of at most the next of `sizes`."""
    batches = store.batches(parts)
    return list(iter(lambda: batches.next(next(sizes)), Batch()))


class TestBatches:
    @pytest.mark.parametrize("block_bytes", [3, 8, 10, 128])
    @pytest.mark.parametrize(
        "sizes", [(1,), (8,), (9,), (4, 4, 4), (8, 8), (20, 1, 1), (1, 20, 1), (7, 7, 7), (1,) * 30, (64, 64), ()]
    )
    @pytest.mark.parametrize("wanted_bytes", [(8,), (1,), (8, 32), (5, 1, 13), (1000,)], ids=str)
    def test_hold_every_byte_once_and_in_order(
        self, sizes: tuple[int, ...], block_bytes: int, wanted_bytes: tuple[int, ...]
    ) -> None:
        parts = parts_of(*sizes)
        store = Store(parts, block_bytes)
        batches = batches_of(parts, store, cycle(wanted_bytes))
        for batch, wanted in zip(batches[:-1], cycle(wanted_bytes)):
            assert batch.bytes == wanted, "many small segments are not many small copies"
        assert not batches or 0 < batches[-1].bytes <= wanted_bytes[(len(batches) - 1) % len(wanted_bytes)]
        bytes_there = [
            (piece.address + place, id(piece.extent), piece.offset + place)
            for batch in batches
            for piece in batch.pieces
            for place in range(piece.bytes)
        ]
        wanted_there = [
            (part.address + start + place, id(block), place)
            for part in parts
            for start, block in zip(range(0, part.bytes, block_bytes), store.backups[part.id].extents, strict=True)
            for place in range(block.bytes)
        ]
        assert bytes_there == wanted_there
        completed = [segment.id for batch in batches for segment in batch.completed]
        assert completed == [part.id for part in parts]
        for number, batch in enumerate(batches):
            in_it = [piece.address >> 32 for piece in batch.pieces]
            assert [segment.id for segment in batch.segments] == in_it
            later = {piece.address >> 32 for after in batches[number + 1 :] for piece in after.pieces}
            assert {segment.id for segment in batch.completed} == set(in_it) - later

    def test_split_no_more_than_they_must(self) -> None:
        """A piece for each block, where the batch has room for it: copies of a block are one copy."""
        parts = parts_of(20, 6)
        batches = batches_of(parts, Store(parts, 10), iter([4, 100, 100]))
        assert [[piece.bytes for piece in batch.pieces] for batch in batches] == [[4], [6, 10, 6]]

    def test_none_is_left_after_the_last(self) -> None:
        parts = parts_of(3)
        batches = Store(parts, 3).batches(parts)
        assert batches.next(3).bytes == 3
        for _ in range(2):
            assert batches.next(3) == Batch()


# The choice between two ways

KERNEL, KERNEL_ALONE = Choice(by_engine=False, alone=False), Choice(by_engine=False, alone=True)
ENGINE, ENGINE_ALONE = Choice(by_engine=True, alone=False), Choice(by_engine=True, alone=True)
# Between two looks at the engine's rate, and until the engine is tried again.
BATCHES_TIMED = 4
ENGINE_FOR_A_WHILE = [ENGINE] * (CuMemAllocator.tuning.batches_in_flight + BATCHES_TIMED)
ENGINE_UNTIL_IT_IS_BUSY = [ENGINE] * (
    CuMemAllocator.tuning.batches_in_flight + 3
)  # at 22 GB/s: the fourth could not mend it
KERNEL_FOR_A_WHILE = [KERNEL] * CuMemAllocator.tuning.batches_between_trials
FREE, FAST_KERNEL, BUSY = 55.0, 51.0, 22.0  # GB/s


class TestChoices:
    @pytest.fixture(autouse=True)
    def any_batch_is_large_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "least_timed_bytes", 0)

    def choose(
        self, count: int, engine: Callable[[int], float], kernel: float = FAST_KERNEL, best: BestRate | None = None
    ) -> list[Choice]:
        """What is chosen for so many batches; `engine` is its rate by the number of the batch.

        What says nothing of a rate gets a time that would spoil all if it counted.
        """
        choices = pacing.choices(best or BestRate(), 100 * BATCHES_TIMED, CuMemAllocator.tuning)
        chosen = [next(choices)]
        while len(chosen) < count:
            choice = chosen[-1]
            rate = engine(len(chosen) - 1) if choice.by_engine else kernel if choice.alone else 1e-3
            chosen.append(choices.send((100, 100 / rate)))
        return chosen

    def test_both_are_tried_alone(self) -> None:
        assert self.choose(2, lambda _: FREE) == [KERNEL_ALONE, ENGINE_ALONE]

    @pytest.mark.parametrize("engine", [FREE, FAST_KERNEL, 0.71 * FAST_KERNEL])
    def test_a_free_engine_copies_all(self, engine: float) -> None:
        assert self.choose(200, lambda _: engine)[2:] == [ENGINE] * 198

    @pytest.mark.parametrize("engine", [BUSY, 0.69 * FAST_KERNEL])
    def test_a_busy_engine_is_tried_again_and_again(self, engine: float) -> None:
        turn = [*KERNEL_FOR_A_WHILE, ENGINE_ALONE]
        assert self.choose(2 + 4 * len(turn), lambda _: engine)[2:] == turn * 4

    def test_an_engine_that_becomes_free_takes_over(self) -> None:
        third_trial = 1 + 2 * (len(KERNEL_FOR_A_WHILE) + 1)
        chosen = self.choose(400, lambda number: FREE if number >= third_trial else BUSY)[2:]
        assert chosen[: third_trial - 1] == [*KERNEL_FOR_A_WHILE, ENGINE_ALONE] * 2
        assert chosen[third_trial - 1 :] == [ENGINE] * len(chosen[third_trial - 1 :])

    @pytest.mark.parametrize("whiles", [0, 1, 5])
    def test_an_engine_that_becomes_slow_hands_over_and_is_handed_back(self, whiles: int) -> None:
        """It has so many whiles, is slow in the next, and at the trial after that it is free again."""
        slow_from = 2 + whiles * len(ENGINE_FOR_A_WHILE)
        slow_to = slow_from + len(ENGINE_UNTIL_IT_IS_BUSY)
        chosen = self.choose(500, lambda number: BUSY if slow_from <= number < slow_to else FREE)
        before = [KERNEL_ALONE, ENGINE_ALONE, *ENGINE_FOR_A_WHILE * whiles]
        after = [*before, *ENGINE_UNTIL_IT_IS_BUSY, *KERNEL_FOR_A_WHILE, ENGINE_ALONE]
        assert chosen[: len(after)] == after
        assert chosen[len(after) :] == [ENGINE] * (500 - len(after))

    def test_slow_once_more_after_a_good_trial(self) -> None:
        """A trial alone may be lucky: what counts is the rate with the queue full."""
        turn = [ENGINE_ALONE, *ENGINE_UNTIL_IT_IS_BUSY, *KERNEL_FOR_A_WHILE]
        is_trial = {1 + turn_number * len(turn) for turn_number in range(4)}
        chosen = self.choose(1 + 4 * len(turn), lambda number: FREE if number in is_trial else BUSY)
        assert chosen == [KERNEL_ALONE, *turn * 4]

    @pytest.mark.parametrize("rate", [1e-3, 1e9])
    def test_what_fills_the_queue_does_not_count(self, rate: float) -> None:
        """Nor for the best rate seen: nothing is waited for yet, so it may seem to take no time."""

        def engine(number: int) -> float:
            place = (number - 2) % len(ENGINE_FOR_A_WHILE)
            return rate if number >= 2 and place < CuMemAllocator.tuning.batches_in_flight else FREE

        assert self.choose(100, engine)[2:] == [ENGINE] * 98

    @pytest.mark.parametrize(("slow_batches", "is_busy"), [(1, False), (2, True)])
    def test_all_timed_batches_count_together(self, slow_batches: int, is_busy: bool) -> None:
        """Of four, one at 35 and three at 55 GB/s make 48; two at 25 make 34. The least that is enough is 38.5."""
        slow = range(
            2 + CuMemAllocator.tuning.batches_in_flight, 2 + CuMemAllocator.tuning.batches_in_flight + slow_batches
        )
        rate = {1: 35.0, 2: 25.0}[slow_batches]
        chosen = self.choose(3 + len(ENGINE_FOR_A_WHILE), lambda number: rate if number in slow else FREE)
        assert chosen[-1] == (KERNEL if is_busy else ENGINE)

    @pytest.mark.parametrize("small", [1, 10, 99])
    def test_batches_of_any_size(self, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
        """A batch takes as long as the one whose slot it waits for, which may be much larger."""
        monkeypatch.setattr(CuMemAllocator.tuning, "least_timed_bytes", 100)
        choices = pacing.choices(BestRate(), 100 * BATCHES_TIMED, CuMemAllocator.tuning)
        choice, chosen = next(choices), []
        for number in range(300):
            nbytes = small if number % 5 == 0 else 100
            chosen.append(choice)
            latency = 5.0 if choice.alone else 0.0
            choice = choices.send((nbytes, latency + (100 if number % 5 == 1 else nbytes) / FREE))
        assert chosen[:4] == [KERNEL_ALONE, KERNEL_ALONE, ENGINE_ALONE, ENGINE], "the first is too small to tell"
        assert chosen[4:] == [ENGINE] * 296

    @pytest.mark.parametrize("place", range(BATCHES_TIMED))
    def test_what_seems_to_take_no_time_is_not_thebest_rate(self, place: int) -> None:
        """After a stall of ours the batches in flight have finished already."""
        number = 2 + CuMemAllocator.tuning.batches_in_flight + place
        assert self.choose(200, lambda n: 1e9 if n == number else FREE)[2:] == [ENGINE] * 198

    def test_the_best_rate_is_also_the_engines(self) -> None:
        """It is busy although it is still faster than the kernel was."""
        chosen = self.choose(3 + len(ENGINE_FOR_A_WHILE), lambda number: 100.0 if number == 1 else 60.0, kernel=30.0)
        assert chosen[2:] == [*ENGINE_FOR_A_WHILE, KERNEL]

    def test_a_busy_engine_is_known_from_the_first_batch_on(self) -> None:
        """Where it was timed before."""
        turn = [ENGINE_ALONE, *KERNEL_FOR_A_WHILE]
        assert self.choose(3 * len(turn), lambda _: BUSY, kernel=BUSY, best=BestRate(FREE)) == turn * 3

    def test_the_best_rate_is_of_the_link_not_of_one_wake(self) -> None:
        """Where both ways are slow at first, only an earlier wake tells that the engine is busy."""
        best = BestRate()
        assert self.choose(3, lambda _: BUSY, kernel=BUSY, best=best)[-1] == ENGINE
        assert self.choose(3, lambda _: FREE, best=best)[-1] == ENGINE
        assert best.value == pytest.approx(FREE)
        assert self.choose(3, lambda _: BUSY, kernel=BUSY, best=best)[-1] == KERNEL


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

    @property
    def stream(self) -> FakeStream:
        """As a lane it is the same."""
        return self

    def read(self, address: int, extent: object, offset: int, nbytes: int) -> None:
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


@pytest.fixture
def one_segment_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches as large as the segments, so that numbers of segments are numbers of batches."""
    monkeypatch.setattr(CuMemAllocator.tuning, "batch_bytes", 4)
    monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", 4)
    monkeypatch.setattr(CuMemAllocator.tuning, "timed_bytes", 4 * BATCHES_TIMED)
    monkeypatch.setattr(CuMemAllocator.tuning, "least_timed_bytes", 0)


@pytest.mark.usefixtures("one_segment_each")
class TestLane:
    def batches(self, count: int) -> Batches:
        parts = parts_of(*[4] * count)
        return Store(parts, 4).batches(parts)

    def lane(
        self, log: Log, kernels: bool = False, digests: bool = True, ways: int = 2
    ) -> tuple[RawCopies, list[FakeStream]]:
        def mapped(number: int) -> None:
            log.events.append(("mapped", number))

        streams = [FakeStream(number, log) for number in range(ways)]
        all_ways = [Route(stream, FakeKernel(log) if kernels else None) for stream in streams]  # type: ignore[arg-type]
        tuning = CuMemAllocator.tuning
        choices = pacing.choices(BestRate(), tuning.timed_bytes, tuning) if kernels else pacing.engine_alone()
        lane = RawCopies(mapped, FakeDigests(log) if digests else None, all_ways, choices, tuning)  # type: ignore[arg-type]
        return lane, streams

    @pytest.mark.parametrize("ways", [1, 2, 4])
    @pytest.mark.parametrize("kernels", [False, True])
    @pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
    def test_order(self, kernels: bool, count: int, ways: int) -> None:
        log = Log()
        lane, _ = self.lane(log, kernels, ways=ways)
        most = 0
        sizes = []
        for nbytes in lane.run(self.batches(count)):
            sizes.append(nbytes)
            most = max(most, len(log.flying))
        assert sizes == [4] * count
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
        if not kernels:
            assert most == min(ways - 1, count), "all but one are left in flight while we prepare the next"
            for number in range(1, count - ways + 2):  # the next is begun before this one is waited for
                begun = log.events.index(("engine", number + ways - 1))
                assert begun < log.events.index(("done", number))

    def test_trials_run_alone(self) -> None:
        log = Log()
        lane, _ = self.lane(log, kernels=True)
        for _ in lane.run(self.batches(2)):
            assert log.flying == []
        assert [e for e in log.events if e[0] in ("engine", "kernel", "done")] == [
            ("kernel", 1),
            ("done", 1),
            ("engine", 2),
            ("done", 2),
        ]

    def run_with_clock(
        self, monkeypatch: pytest.MonkeyPatch, log: Log, count: int, **seconds: Callable[[], int]
    ) -> list[int]:
        """The sizes of the batches of so many segments; each takes as long as its way does just then."""
        ticks = iter(range(10**6))
        spent = [0]
        counted = [0]

        def perf_counter() -> float:
            starts = [event for event, _ in log.events if event in seconds]
            spent[0] += sum(seconds[event]() for event in starts[counted[0] :])
            counted[0] = len(starts)
            return spent[0] + next(ticks) * 1e-9

        monkeypatch.setattr(lanes.time, "perf_counter", perf_counter)
        lane, _ = self.lane(log, kernels=True)
        return list(lane.run(self.batches(count)))

    def test_a_later_trial_waits_for_what_flies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "batches_between_trials", 3)
        log = Log()
        self.run_with_clock(monkeypatch, log, 11, engine=lambda: 10, kernel=lambda: 1)
        ways = [event for event, _ in log.events if event in ("engine", "kernel")]
        assert ways == ["kernel", "engine", *["kernel"] * 3, "engine", *["kernel"] * 3, "engine", "kernel"]
        copies = [e for e in log.events if e[0] in ("engine", "kernel", "done")]
        assert copies.index(("kernel", 5)) < copies.index(("done", 4)), "no trial, not alone"
        assert copies.index(("done", 5)) < copies.index(("engine", 6)) < copies.index(("done", 6))
        assert copies.index(("done", 6)) < copies.index(("kernel", 7))

    def test_an_engine_that_becomes_slow_hands_over_to_the_kernel_and_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "batches_between_trials", 3)
        log = Log()
        is_slow = range(15, 30)  # by the number of the batch

        def engine() -> int:
            return 10 if sum(event in ("engine", "kernel") for event, _ in log.events) in is_slow else 1

        self.run_with_clock(monkeypatch, log, 50, engine=engine, kernel=lambda: 1)
        ways = [event for event, _ in log.events if event in ("engine", "kernel")]
        assert ways == [
            "kernel",
            *["engine"]
            * (1 + len(ENGINE_FOR_A_WHILE) + CuMemAllocator.tuning.batches_in_flight + 1),  # the last says enough
            *["kernel", "kernel", "kernel", "engine"] * 4,  # of these trials the fourth finds it free
            *["engine"] * (50 - 1 - 14 - 16),
        ]
        assert log.flying == []
        for number in range(1, 51):
            assert [event for event, batch in log.events if batch == number and event in ("done", "digest")] == [
                "done",
                "digest",
            ]

    def test_batches_of_the_engine_are_larger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """But for trials, and as the kernel's table has it."""
        monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", 20)
        monkeypatch.setattr(CuMemAllocator.tuning, "batches_between_trials", 2)
        lane, _ = self.lane(Log())
        assert list(lane.run(self.batches(12))) == [20, 20, 8]
        sizes = self.run_with_clock(monkeypatch, Log(), 12, engine=lambda: 1, kernel=lambda: 1)
        assert sizes == [4, 4, 20, 20]
        sizes = self.run_with_clock(monkeypatch, Log(), 12, engine=lambda: 10, kernel=lambda: 1)
        assert sizes == [4] * 12

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
    def pieces(self) -> list[Piece]:
        return TestLane().batches(1).next(4).pieces

    def test_a_kernel_that_fails_is_done_without(self, caplog: pytest.LogCaptureFixture) -> None:
        log = Log()
        way = Route(FakeStream(0, log), FakeKernel(log, ValueError("no such register")))  # type: ignore[arg-type]
        for _ in range(2):
            way.start(self.pieces(), by_engine=False)
        assert log.events == [("engine", 1)] * 2
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "no such register" in caplog.text

    def test_an_error_of_the_driver_is_none_of_the_kernels(self) -> None:
        log = Log()
        error = DriverError("cuLaunchKernel", "CUDA_ERROR_UNKNOWN", "", "")
        way = Route(FakeStream(0, log), FakeKernel(log, error))  # type: ignore[arg-type]
        with pytest.raises(DriverError):
            way.start(self.pieces(), by_engine=False)
        assert log.events == []


class FakeCopies:
    """Stands in for the kernel's copies, where no kernel runs."""

    def __init__(self, device: int, nbytes: int, pieces: int) -> None:
        self.bytes = nbytes
        self.pieces = pieces

    def start(self, stream: _core.CopyStream, pieces: list[Piece]) -> None:
        assert sum(piece.bytes for piece in pieces) <= self.bytes
        assert len(pieces) <= self.pieces
        stream.poison(pieces[0].address, pieces[0].bytes)

    def close(self) -> None:
        pass


class TestWarmUp:
    def warm_up(self, monkeypatch: pytest.MonkeyPatch, work: Callable[[int], None]) -> Restorer:
        module = types.ModuleType("cumem_sleep.transfer.copy_kernel")
        module.warm_up = work  # type: ignore[attr-defined]
        module.GpuCopies = FakeCopies  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(vars(cumem_sleep.transfer), "copy_kernel", module)
        open_driver(DRIVER)
        restorer = Restorer(CuMemAllocator.tuning)
        restorer.warm_up(0)
        return restorer

    def test_makes_the_kernel_a_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.warm_up(monkeypatch, lambda device: None)._routes._kernel_devices == {0}

    def test_times_both_ways_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that wakes right after its first sleep has no other way to know what the link can do."""
        monkeypatch.setattr(CuMemAllocator.tuning, "batch_bytes", PAGE)
        log: list[str] = []
        to_device, synchronize = _core.CopyStream.to_device, _core.CopyStream.synchronize
        poison = _core.CopyStream.poison

        def copied(stream: _core.CopyStream, address: int, block: _core.HostBlock, offset: int, nbytes: int) -> None:
            log.append(f"engine, {nbytes >> 20} MiB")
            to_device(stream, address, block, offset, nbytes)

        def by_kernel(stream: _core.CopyStream, address: int, nbytes: int) -> None:
            log.append(f"kernel, {nbytes >> 20} MiB")
            poison(stream, address, nbytes)

        def waited(stream: _core.CopyStream) -> None:
            synchronize(stream)
            log.append("wait")

        monkeypatch.setattr(_core.CopyStream, "to_device", copied)
        monkeypatch.setattr(_core.CopyStream, "poison", by_kernel)
        monkeypatch.setattr(_core.CopyStream, "synchronize", waited)
        before = sim.stats() if SIMULATED else None
        best = self.warm_up(monkeypatch, lambda device: None)._routes.best_rate(0)
        assert log == ["engine, 2 MiB", "wait", "kernel, 2 MiB", "wait"] * 3
        assert 0 < best.value < 1e15
        if before is not None:
            assert sim.stats().live_handles == before.live_handles
            assert sim.stats().registered_bytes == before.registered_bytes

    @pytest.mark.parametrize("what", ["Scratch", "pinned_block", "CopyStream"])
    def test_what_cannot_be_timed_the_wakes_find_out(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        def refuse(*_: object) -> None:
            if what == "pinned_block":
                raise OutOfHostMemory(1, 0, "budget")
            raise OutOfDeviceMemory(1, 0, 0) if what == "Scratch" else DriverError("cuStreamCreate", "", "", "")

        monkeypatch.setattr(routes if what == "pinned_block" else _core, what, refuse)
        restorer = self.warm_up(monkeypatch, lambda device: None)
        assert restorer._routes._kernel_devices == {0}
        assert restorer._routes.best_rate(0).value == 0

    def test_not_where_kernels_do_not_reach_pinned_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_core, "device_info", lambda device: types.SimpleNamespace(host_pointers=False))
        warmed: list[int] = []
        assert self.warm_up(monkeypatch, warmed.append)._routes._kernel_devices == set()
        assert warmed == []

    def test_a_kernel_that_does_not_compile(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: int) -> None:
            raise AssertionError("PTX")

        assert self.warm_up(monkeypatch, fail)._routes._kernel_devices == set()
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
    monkeypatch.setattr(CuMemAllocator.tuning, "batch_bytes", MIB // 2)
    monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", MIB // 2)
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", MIB)
    if SIMULATED:
        monkeypatch.setattr("cumem_sleep.digest.device.sums_of", quick_sums)
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


def assert_all_asleep() -> None:
    """And no thread at work on it."""
    assert all(segment.sleep != AWAKE and not segment.has_memory for segment in _core.segments())
    assert_no_threads()


@pytest.mark.usefixtures("small_batches")
class TestWake:
    @pytest.mark.parametrize("batch_bytes", [MIB // 2, MIB, 3 * MIB, 64 * MIB])
    def test_bytes_in_batches_of_any_size(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", batch_bytes)
        contents = fill(allocator, memory, [PAGE, 3 * PAGE, PAGE, 2 * PAGE])
        allocator.sleep()
        report = allocator.wake_up()
        assert (report.restored_bytes, report.verified_bytes) == (7 * PAGE, 7 * PAGE)
        check_bytes(memory, contents)

    @pytest.mark.slow
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
        content = np.frombuffer(memoryview(backup.extents[block]), np.uint8)
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

        patch_map(monkeypatch, noted)
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

        patch_map(monkeypatch, wait_and_map)
        monkeypatch.setattr(_core.CopyStream, "to_device", copy)
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("where", ["mapping", "copying"])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, OutOfHostMemory])
    @pytest.mark.parametrize("what", ["weights", "kv_cache"])
    def test_the_mapping_thread_is_at_rest_before_a_failed_wake_is_undone(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        where: str,
        error: type[BaseException],
        what: str,
    ) -> None:
        """The error comes while the thread is in the middle of mapping; undoing at once would leave that mapped.

        One thread maps what will be restored, another, that begins later, what has no bytes to come.
        """
        contents = fill(allocator, memory, [PAGE] * 3)
        *_, last_copied = contents
        fill(allocator, memory, [PAGE] if what == "kv_cache" else [], "kv_cache")
        allocator.sleep()
        last = _core.segments()[-1]
        in_map, go = threading.Event(), threading.Event()
        at_undo: list[bool] = []
        map_segment, undo_wake = _core.Segment.map, _core.undo_wake
        wait, leave, to_device = Ahead.wait, Ahead.__exit__, _core.CopyStream.to_device

        def slow_map(segment: _core.Segment) -> None:
            if segment.address == last.address:
                in_map.set()
                assert go.wait(30)
            map_segment(segment)

        def fail() -> None:
            assert in_map.wait(30)
            raise error(1, 0, "here") if error is OutOfHostMemory else error

        def fail_to_wait(ahead: Ahead, key: int) -> None:
            if key == last.id:
                fail()
            wait(ahead, key)

        def fail_to_copy(stream: _core.CopyStream, address: int, *more: Any) -> None:
            if what == "weights" or address == last_copied:
                fail()
            to_device(stream, address, *more)

        fails: Any = (Ahead, "wait", fail_to_wait)
        if where != "mapping":
            fails = (_core.CopyStream, "to_device", fail_to_copy)

        def stop(ahead: Ahead, *error: object) -> None:
            threading.Timer(0.02, go.set).start()  # after this has begun to wait, most likely; else nothing is shown
            leave(ahead, *error)

        def undo(segments: list[_core.Segment]) -> None:
            at_undo.append(all(segment.has_memory for segment in segments))
            undo_wake(segments)

        with monkeypatch.context() as patch:
            patch_map(patch, slow_map)
            patch.setattr(_core, "undo_wake", undo)
            patch.setattr(Ahead, "__exit__", stop)
            patch.setattr(*fails)
            with pytest.raises(error):
                allocator.wake_up()
        assert at_undo == [True], "undone while the thread was mapping"
        assert_all_asleep()
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


class TestHalfDone:
    """`Restorer.restore` says when half of the bytes are on their way."""

    def restore(
        self, monkeypatch: pytest.MonkeyPatch, parts: list[Part], batch_bytes: int, half_done: Callable[[int], None]
    ) -> Log:
        """`half_done` is given the bytes on their way."""
        log = Log()

        class Stream(FakeStream):
            def __init__(self, device: int) -> None:
                super().__init__(len(log.in_flight), log)

            def read(self, address: int, extent: object, offset: int, nbytes: int) -> None:
                super().read(address, extent, offset, nbytes)
                log.events.append(("bytes", nbytes))

            def __enter__(self) -> Stream:
                return self

            def __exit__(self, *_: object) -> None:
                self.synchronize()

        def begun_bytes() -> int:
            return sum(nbytes for event, nbytes in log.events if event == "bytes")  # type: ignore[misc]

        def half() -> None:
            log.events.append(("half", begun_bytes()))
            half_done(begun_bytes())

        monkeypatch.setattr(_core, "CopyStream", Stream)
        monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", batch_bytes)
        transfers = types.SimpleNamespace(lane=lambda stream: stream)
        backups = ToRestore(Store(parts, 8).backed_up(parts), [])
        restorer = Restorer(CuMemAllocator.tuning)
        restorer.restore(backups, transfers, lambda _: None, half, None, {})  # type: ignore[arg-type]
        assert begun_bytes() == sum(part.bytes for part in parts)
        assert log.flying == []
        return log

    @pytest.mark.parametrize("batch_bytes", [1, 3, 8, 20, 1000])
    @pytest.mark.parametrize("sizes", [(8,), (8, 8), (20, 1, 1), (1, 1, 20), (7,) * 9, (100, 5, 100)], ids=str)
    @pytest.mark.parametrize("devices", [1, 2, 3])
    def test_once_and_as_soon_as_it_is(
        self, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], batch_bytes: int, devices: int
    ) -> None:
        parts = parts_of(*sizes)
        for number, part in enumerate(parts):
            part.device = number % devices
        calls: list[int] = []
        self.restore(monkeypatch, parts, batch_bytes, calls.append)
        (begun,) = calls
        half = sum(sizes) // 2
        assert begun >= half
        assert begun - min(devices, len(sizes)) * batch_bytes < half, "a batch of each device before, it was so already"

    def test_what_it_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.restore(monkeypatch, parts_of(8, 8, 8), 4, fail)


@pytest.mark.usefixtures("small_batches")
class TestBlankSegments:
    """What has no bytes to come is mapped by a second thread, in the second half of the copies."""

    @pytest.fixture
    def contents(self, allocator: CuMemAllocator, memory: Memory) -> dict[int, bytes]:
        """Blank segments first, so that nothing is in order just because segments are."""
        fill(allocator, memory, [PAGE] * 2, "kv_cache")
        contents = fill(allocator, memory, [PAGE] * 4)
        fill(allocator, memory, [PAGE], "kv_cache")
        return contents

    @pytest.fixture
    def begun(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
        """The sizes of the copies to the device that were asked for."""
        begun: list[int] = []
        to_device = _core.CopyStream.to_device

        def noted(stream: _core.CopyStream, address: int, block: _core.HostBlock, offset: int, nbytes: int) -> None:
            to_device(stream, address, block, offset, nbytes)
            begun.append(nbytes)

        monkeypatch.setattr(_core.CopyStream, "to_device", noted)
        yield begun
        monkeypatch.undo()

    def test_are_mapped_from_half_on(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        contents: dict[int, bytes],
        begun: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Not sooner; and not later, for the last copy but waits for them here."""
        begun_at_map: list[tuple[str, int]] = []
        blank_mapped = threading.Event()
        map_segment, to_device = _core.Segment.map, _core.CopyStream.to_device

        def noted(segment: _core.Segment) -> None:
            begun_at_map.append((segment.tag, sum(begun)))
            map_segment(segment)
            if [tag for tag, _ in begun_at_map].count("kv_cache") == 3:
                blank_mapped.set()

        def wait(stream: _core.CopyStream, *more: Any) -> None:
            if sum(begun) == 4 * PAGE - MIB // 2:
                assert blank_mapped.wait(30)
            to_device(stream, *more)

        allocator.sleep()
        begun.clear()
        patch_map(monkeypatch, noted)
        monkeypatch.setattr(_core.CopyStream, "to_device", wait)
        allocator.wake_up()
        assert len(begun_at_map) == 7
        assert all(nbytes >= 2 * PAGE for tag, nbytes in begun_at_map if tag == "kv_cache")
        assert blank_mapped.is_set()
        assert sum(begun) == 4 * PAGE
        check_bytes(memory, contents)

    @pytest.mark.parametrize("level", [1, 2])
    def test_alone_are_mapped_at_once(
        self, allocator: CuMemAllocator, memory: Memory, contents: dict[int, bytes], begun: list[int], level: int
    ) -> None:
        allocator.sleep(level)
        report = allocator.wake_up(tags="kv_cache")
        assert (report.mapped_bytes, report.restored_bytes) == (3 * PAGE, 0)
        assert begun == []
        assert all(segment.has_memory is (segment.tag == "kv_cache") for segment in _core.segments())
        if level == 1:
            allocator.wake_up()
            check_bytes(memory, contents)

    def test_all_is_blank(self, allocator: CuMemAllocator, contents: dict[int, bytes], begun: list[int]) -> None:
        allocator.sleep(2)
        assert allocator.wake_up().mapped_bytes == (3 + len(contents)) * PAGE
        assert begun == []
        assert all(segment.sleep == AWAKE and segment.has_memory for segment in _core.segments())

    @pytest.mark.parametrize("refused", [1, 2])
    def test_where_only_so_many_threads_can_be_started(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        contents: dict[int, bytes],
        monkeypatch: pytest.MonkeyPatch,
        refused: int,
    ) -> None:
        allocator.sleep()
        with threads_refused(after=refused):  # the first is the operation's own
            assert allocator.wake_up().mapped_bytes == 7 * PAGE
        check_bytes(memory, contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("place", [0, 1, 2])
    @pytest.mark.parametrize("restored", [True, False])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, DriverError])
    def test_that_cannot_be_mapped_leave_all_asleep(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        contents: dict[int, bytes],
        monkeypatch: pytest.MonkeyPatch,
        place: int,
        restored: bool,
        error: type[BaseException],
    ) -> None:
        """With what was restored by then. An interrupt hits the one who waits, or who maps if nobody else does."""
        allocator.sleep(1 if restored else 2)
        before = [segment.sleep for segment in _core.segments()]
        chosen = [segment for segment in _core.segments() if segment.tag == "kv_cache"][place]
        map_segment, wait = _core.Segment.map, Ahead.wait

        def fail() -> None:
            raise error("cuMemCreate", "CUDA_ERROR_UNKNOWN", "", "") if error is DriverError else error

        def fail_to_map(segment: _core.Segment) -> None:
            if segment.id == chosen.id:
                fail()
            map_segment(segment)

        def fail_to_wait(ahead: Ahead, key: int) -> None:
            if key == chosen.id:
                fail()
            wait(ahead, key)

        with monkeypatch.context() as patch:
            if error is DriverError or not restored:
                patch_map(patch, fail_to_map)
            else:
                patch.setattr(Ahead, "wait", fail_to_wait)
            for _ in range(2):
                with pytest.raises(error):
                    allocator.wake_up()
                assert_all_asleep()
                assert [segment.sleep for segment in _core.segments()] == before
        allocator.wake_up()
        if restored:
            check_bytes(memory, contents)

    def test_a_mismatch_after_they_were_mapped(
        self, allocator: CuMemAllocator, memory: Memory, contents: dict[int, bytes]
    ) -> None:
        allocator.sleep()
        (first, *_) = [segment for segment in _core.segments() if segment.tag == "weights"]
        backup = allocator._store.get(first)
        assert backup is not None
        content = np.frombuffer(memoryview(backup.extents[0]), np.uint8)
        content[5] ^= 1
        with pytest.raises(BackupMismatch):
            allocator.wake_up()
        assert_all_asleep()
        content[5] ^= 1
        allocator.wake_up()
        check_bytes(memory, contents)


class TestManySegments:
    @pytest.mark.slow
    def test_go_one_by_one(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        count = 300
        if SIMULATED:
            sim.configure(device_bytes=(count + 8) * PAGE)
            monkeypatch.setattr("cumem_sleep.digest.device.sums_of", quick_sums)
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
    @pytest.mark.slow
    @pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
    @pytest.mark.parametrize("refused", [[14], [14, 23]], ids=["huge pages", "huge pages and populating"])
    def test_the_kernel_refuses_advice(self, refused: list[int]) -> None:
        process = run_script(f"REFUSED = {refused}", REFUSE_MADVISE, CYCLES)
        if process.stdout == "no filter\n":
            pytest.skip("no system-call filter here")
        assert_clean_exit(process)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "poverty",
        [
            "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))",
            "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
            """
            from cumem_sleep import _core

            def start_all_the_same(worker, work):
                _core.allow_threads(1)
                start(worker, work)

            start, _core.Worker.start = _core.Worker.start, start_all_the_same  # of prepare, which is refused else
            _core.allow_threads(0)
            """,
        ],
        ids=["no locked memory", "one core", "no threads"],
    )
    def test_sleep_wake_and_prepare_work(self, poverty: str) -> None:
        assert_clean_exit(run_script(poverty, CYCLES))
