"""Which way a batch is copied: by the copy engine or by the kernel."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
from ways import (
    BATCHES_TIMED,
    BUSY,
    ENGINE,
    ENGINE_AGAIN,
    ENGINE_ALONE,
    ENGINE_FOR_A_WHILE,
    ENGINE_UNTIL_IT_IS_BUSY,
    FAST_KERNEL,
    FREE,
    KERNEL,
    KERNEL_ALONE,
    KERNEL_FOR_A_WHILE,
    TRIALS,
)

from cumem_sleep import CuMemAllocator
from cumem_sleep.core.copy_chooser import BestRate, CopyChoice, CopyChooser
from cumem_sleep.core.extents import LaneGroup
from cumem_sleep.store.copier import CopyChoosers


class TestChoices:
    @pytest.fixture(autouse=True)
    def any_batch_is_large_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "least_timed_bytes", 0)

    def choose(
        self,
        count: int,
        engine: Callable[[int], float],
        kernel: float = FAST_KERNEL,
        best: BestRate | None = None,
        in_flight: int = LaneGroup.most_lanes,
    ) -> list[CopyChoice]:
        """What is chosen for so many batches; `engine` is its rate by the number of the batch.

        What says nothing of a rate gets a time that would spoil all if it counted.
        """
        chooser = CopyChooser(best or BestRate(), 100 * BATCHES_TIMED, in_flight, CuMemAllocator.tuning)
        chosen = [chooser.next()]
        while len(chosen) < count:
            choice = chosen[-1]
            rate = engine(len(chosen) - 1) if choice.by_engine else kernel if choice.alone else 1e-3
            chooser.record(100, 100 / rate)
            chosen.append(chooser.next())
        return chosen

    def test_both_are_tried_alone(self) -> None:
        assert self.choose(3, lambda _: FREE) == [KERNEL_ALONE, ENGINE_ALONE, ENGINE_AGAIN]
        assert self.choose(3, lambda _: BUSY) == [KERNEL_ALONE, ENGINE_ALONE, KERNEL]

    def test_an_engine_that_was_fast_only_once_is_not_believed(self) -> None:
        """It may have found a moment in which it scrubbed nothing."""
        turn = [*TRIALS, *KERNEL_FOR_A_WHILE]
        chosen = self.choose(1 + 4 * len(turn), lambda number: FREE if number % len(turn) == 1 else BUSY)
        assert chosen == [KERNEL_ALONE, *turn * 4]

    @pytest.mark.parametrize("engine", [FREE, FAST_KERNEL, 0.71 * FAST_KERNEL])
    def test_a_free_engine_copies_all(self, engine: float) -> None:
        assert self.choose(200, lambda _: engine)[3:] == [ENGINE] * 197

    @pytest.mark.parametrize("engine", [BUSY, 0.69 * FAST_KERNEL])
    def test_a_busy_engine_is_tried_again_and_again(self, engine: float) -> None:
        turn = [*KERNEL_FOR_A_WHILE, ENGINE_ALONE]
        assert self.choose(2 + 4 * len(turn), lambda _: engine)[2:] == turn * 4

    def test_an_engine_that_becomes_free_takes_over(self) -> None:
        third_trial = 1 + 2 * (len(KERNEL_FOR_A_WHILE) + 1)
        chosen = self.choose(400, lambda number: FREE if number >= third_trial else BUSY)[2:]
        assert chosen[: third_trial - 1] == [*KERNEL_FOR_A_WHILE, ENGINE_ALONE] * 2
        assert chosen[third_trial - 1 :] == [ENGINE_AGAIN, *[ENGINE] * len(chosen[third_trial:])]

    @pytest.mark.parametrize("whiles", [0, 1, 5])
    def test_an_engine_that_becomes_slow_hands_over_and_is_handed_back(self, whiles: int) -> None:
        """It has so many whiles, is slow in the next, and at the trial after that it is free again."""
        slow_from = 3 + whiles * len(ENGINE_FOR_A_WHILE)
        slow_to = slow_from + len(ENGINE_UNTIL_IT_IS_BUSY)
        chosen = self.choose(500, lambda number: BUSY if slow_from <= number < slow_to else FREE)
        before = [KERNEL_ALONE, *TRIALS, *ENGINE_FOR_A_WHILE * whiles]
        after = [*before, *ENGINE_UNTIL_IT_IS_BUSY, *KERNEL_FOR_A_WHILE, *TRIALS]
        assert chosen[: len(after)] == after
        assert chosen[len(after) :] == [ENGINE] * (500 - len(after))

    def test_slow_once_more_after_a_good_trial(self) -> None:
        """Even two trials alone may be lucky: what counts is the rate with the queue full."""
        turn = [*TRIALS, *ENGINE_UNTIL_IT_IS_BUSY, *KERNEL_FOR_A_WHILE]
        is_trial = {1 + turn_number * len(turn) + trial for turn_number in range(4) for trial in range(2)}
        chosen = self.choose(1 + 4 * len(turn), lambda number: FREE if number in is_trial else BUSY)
        assert chosen == [KERNEL_ALONE, *turn * 4]

    @pytest.mark.parametrize("rate", [1e-3, 1e9])
    def test_what_fills_the_queue_does_not_count(self, rate: float) -> None:
        """Nor for the best rate seen: nothing is waited for yet, so it may seem to take no time."""

        def engine(number: int) -> float:
            place = (number - 3) % len(ENGINE_FOR_A_WHILE)
            return rate if number >= 3 and place < LaneGroup.most_lanes else FREE

        assert self.choose(100, engine)[3:] == [ENGINE] * 97

    @pytest.mark.parametrize(("slow_batches", "is_busy"), [(1, False), (2, True)])
    def test_all_timed_batches_count_together(self, slow_batches: int, is_busy: bool) -> None:
        """Of four, one at 35 and three at 55 GB/s make 48; two at 25 make 34. The least that is enough is 38.5."""
        slow = range(3 + LaneGroup.most_lanes, 3 + LaneGroup.most_lanes + slow_batches)
        rate = {1: 35.0, 2: 25.0}[slow_batches]
        chosen = self.choose(4 + len(ENGINE_FOR_A_WHILE), lambda number: rate if number in slow else FREE)
        assert chosen[-1] == (KERNEL if is_busy else ENGINE)

    @pytest.mark.parametrize("small", [1, 10, 99])
    def test_batches_of_any_size(self, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
        """A batch takes as long as the one whose slot it waits for, which may be much larger."""
        monkeypatch.setattr(CuMemAllocator.tuning, "least_timed_bytes", 100)
        tuning = CuMemAllocator.tuning
        chooser = CopyChooser(BestRate(), 100 * BATCHES_TIMED, LaneGroup.most_lanes, tuning)
        chosen = []
        for number in range(300):
            nbytes = small if number % 5 == 0 else 100
            choice = chooser.next()
            chosen.append(choice)
            latency = 5.0 if choice.alone else 0.0
            chooser.record(nbytes, latency + (100 if number % 5 == 1 else nbytes) / FREE)
        assert chosen[:5] == [KERNEL_ALONE, KERNEL_ALONE, *TRIALS, ENGINE], "the first is too small to tell"
        assert chosen[5:] == [ENGINE] * 295

    def test_the_best_rate_is_also_the_engines(self) -> None:
        """It is busy although it is still faster than the kernel was."""
        chosen = self.choose(
            4 + len(ENGINE_FOR_A_WHILE), lambda number: 100.0 if number in (1, 2) else 60.0, kernel=30.0
        )
        assert chosen[3:] == [*ENGINE_FOR_A_WHILE, KERNEL]

    def test_a_busy_engine_is_known_from_the_first_batch_on(self) -> None:
        """Where it was timed before."""
        turn = [ENGINE_ALONE, *KERNEL_FOR_A_WHILE]
        assert self.choose(3 * len(turn), lambda _: BUSY, kernel=BUSY, best=BestRate(FREE)) == turn * 3

    def test_the_best_rate_is_of_the_link_not_of_one_wake(self) -> None:
        """Where both ways are slow at first, only an earlier wake tells that the engine is busy."""
        best = BestRate()
        assert self.choose(4, lambda _: BUSY, kernel=BUSY, best=best)[-1] == ENGINE
        assert self.choose(4, lambda _: FREE, best=best)[-1] == ENGINE
        assert best.value == pytest.approx(FREE)
        assert self.choose(3, lambda _: BUSY, kernel=BUSY, best=best)[-1] == KERNEL

    def test_without_a_kernel_there_is_no_choice(self) -> None:
        chooser = CopyChooser(None, 100, 2, CuMemAllocator.tuning)
        for nbytes in (1, 100, 1000):
            assert chooser.next() == ENGINE
            chooser.record(nbytes, 1e9)
        assert chooser.next() == ENGINE


@pytest.mark.parametrize("lanes", [1, CuMemAllocator.tuning.most_slots])
def test_each_lane_has_one_batch_in_flight(lanes: int) -> None:
    """So many batches fill the queue before the engine's rate counts."""
    tuning = CuMemAllocator.tuning
    choosers = CopyChoosers(tuning)
    choosers.best_rates[0] = BestRate()
    choosers.best_rates[0].see(int(FREE * 1e9), 1)
    timed_bytes = tuning.least_timed_bytes
    some = [types.SimpleNamespace(kernels_reach=True)] * lanes
    chooser = choosers.of(0, some, tuning.worth_choosing_bytes, timed_bytes)  # type: ignore[arg-type]
    chosen = [chooser.next()]
    while len(chosen) < 3 or chosen[-1] == ENGINE:
        chooser.record(timed_bytes, timed_bytes / (FREE * 1e9) if len(chosen) < 3 else 1.0)
        chosen.append(chooser.next())
    assert chosen == [*TRIALS, *[ENGINE] * (lanes + 1), KERNEL]
