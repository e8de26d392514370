"""The order of copies and digests on one link, and what is in flight meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from stand_ins import FakeStream, Log, Part, Store, parts_of
from ways import BATCHES_TIMED, ENGINE_FOR_A_WHILE

from cumem_sleep import CuMemAllocator, DriverError
from cumem_sleep.core.copy_chooser import BestRate, CopyChooser
from cumem_sleep.core.extents import LaneGroup
from cumem_sleep.store import copier
from cumem_sleep.store.transfer import Together, Transfer


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
    monkeypatch.setattr(CuMemAllocator.tuning, "trial_bytes", 4)
    monkeypatch.setattr(CuMemAllocator.tuning, "timed_bytes", 4 * BATCHES_TIMED)
    monkeypatch.setattr(CuMemAllocator.tuning, "least_timed_bytes", 0)


def test_together_in_parts_that_become_smaller_at_the_end() -> None:
    begun: list[list[int]] = []
    parts = parts_of(*[1] * 20)
    together = Together(lambda some: begun.append([part.id for part in some]), 20, 6)  # type: ignore[misc]
    for part in parts:
        together([part])  # type: ignore[list-item]
    assert [len(some) for some in begun] == [6, 6, 4, 2, 1, 1]
    assert [number for some in begun for number in some] == [part.id for part in parts]


def chooser(has_kernel: bool, in_flight: int = 2) -> CopyChooser:
    tuning = CuMemAllocator.tuning
    return CopyChooser(BestRate() if has_kernel else None, tuning.timed_bytes, in_flight, tuning)


@pytest.mark.usefixtures("one_segment_each")
class TestTransferIn:
    def transfer(
        self, log: Log, kernels: bool = False, lanes: int = 2, count: int = 0
    ) -> tuple[Transfer, list[FakeStream]]:
        def mapped(number: int) -> None:
            log.events.append(("mapped", number))

        streams = [FakeStream(number, log) for number in range(lanes)]
        tuning = CuMemAllocator.tuning
        arrived = FakeDigests(log).start
        mine = chooser(kernels, lanes)
        transfer = Transfer(streams, mine, arrived, tuning, out=False, mapped=mapped)  # type: ignore[arg-type]
        parts = parts_of(*[4] * count)
        return Store(parts, 4).add_all(transfer, parts), streams

    def run(self, transfer: Transfer) -> list[int]:
        sizes = list(iter(transfer.step, 0))
        transfer.finish()
        return sizes

    @pytest.mark.parametrize("ways", [1, 2, 4])
    @pytest.mark.parametrize("kernels", [False, True])
    @pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
    def test_order(self, kernels: bool, count: int, ways: int) -> None:
        log = Log()
        transfer, _ = self.transfer(log, kernels, lanes=ways, count=count)
        most = 0
        sizes = []
        while nbytes := transfer.step():
            sizes.append(nbytes)
            most = max(most, len(log.flying))
        transfer.finish()
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
            assert most == min(ways, count), "all are left in flight until the next is prepared"
            for number in range(1, count - ways + 2):  # the next is begun before this one is waited for
                begun = log.events.index(("engine", number + ways - 1))
                assert begun < log.events.index(("done", number))

    def test_trials_run_alone(self) -> None:
        log = Log()
        transfer, _ = self.transfer(log, kernels=True, count=2)
        while transfer.step():
            assert log.flying == []
        assert [e for e in log.events if e[0] in ("engine", "kernel", "done")] == [
            ("kernel", 1),
            ("done", 1),
            ("engine", 2),
            ("done", 2),
        ]

    @pytest.mark.parametrize("kernels", [False, True])
    def test_what_is_unpinned_is_pinned_before_its_copy_is_timed(
        self, kernels: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kernels cannot reach it otherwise, and an engine that seems slow would not be used."""
        log = Log()
        monkeypatch.setattr(copier.time, "monotonic", lambda: log.events.append(("clock", 0)) or float(len(log.events)))
        transfer, _ = self.transfer(log, kernels, count=2)
        for _, piece in transfer._pieces:
            piece.extent.pinned = False  # type: ignore[attr-defined]
        self.run(transfer)
        first, second = (
            log.events.index((copy, n)) for n, copy in ((1, "kernel" if kernels else "engine"), (2, "engine"))
        )
        assert log.events.count(("pinned", 4)) == 2
        assert log.events[first - 2 : first] == [("pinned", 4), ("clock", 0)]
        assert log.events[second - 2 : second] == [("pinned", 4), ("clock", 0)]

    def run_with_clock(
        self, monkeypatch: pytest.MonkeyPatch, log: Log, count: int, **seconds: Callable[[], int]
    ) -> list[int]:
        """The sizes of the batches of so many segments; each takes as long as its way does just then."""
        ticks = iter(range(10**6))
        spent = [0]
        counted = [0]

        def clock() -> float:
            starts = [event for event, _ in log.events if event in seconds]
            spent[0] += sum(seconds[event]() for event in starts[counted[0] :])
            counted[0] = len(starts)
            return spent[0] + next(ticks) * 1e-9

        monkeypatch.setattr(copier.time, "monotonic", clock)
        transfer, _ = self.transfer(log, kernels=True, lanes=LaneGroup.most_lanes, count=count)
        return self.run(transfer)

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
            *["engine"] * (2 + len(ENGINE_FOR_A_WHILE) + LaneGroup.most_lanes + 1),  # the last says enough
            *["kernel", "kernel", "kernel", "engine"] * 4,  # of these trials the fourth finds it free
            *["engine"] * (50 - 1 - 15 - 16),
        ]
        assert log.flying == []
        for number in range(1, 51):
            assert [event for event, batch in log.events if batch == number and event in ("done", "digest")] == [
                "done",
                "digest",
            ]

    def test_batches_of_the_engine_are_larger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Trials are smaller than any."""
        monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", 20)
        monkeypatch.setattr(CuMemAllocator.tuning, "trial_bytes", 2)
        monkeypatch.setattr(CuMemAllocator.tuning, "batches_between_trials", 2)
        transfer, _ = self.transfer(Log(), count=12)
        assert self.run(transfer) == [20, 20, 8]
        sizes = self.run_with_clock(monkeypatch, Log(), 12, engine=lambda: 1, kernel=lambda: 2)
        assert sizes == [4, 2, 4, 20, 18], "the second trial is as large as a batch of the kernel"
        sizes = self.run_with_clock(monkeypatch, Log(), 12, engine=lambda: 10, kernel=lambda: 1)
        assert sizes == [4, 2, *[4, 4, 2] * 4, 2]

    def test_nothing_is_digested_that_was_not_copied(self) -> None:
        log = Log()
        transfer, streams = self.transfer(log, count=5)
        streams[0].fails_at = 3
        with pytest.raises(DriverError):
            self.run(transfer)
        assert [batch for event, batch in log.events if event == "digest"] == [1]

    def test_a_kernel_that_failed_is_not_asked_again(self) -> None:
        """On no lane."""
        log = Log()
        transfer, streams = self.transfer(log, kernels=True, count=9)
        for stream in streams:
            stream.has_kernel = False
        self.run(transfer)
        assert [event for event, _ in log.events if event in ("engine", "kernel", "refused")] == [
            "refused",
            *["engine"] * 9,
        ]


class TestTransferOut:
    def test_a_lane_is_waited_for_when_it_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until then all are in flight, while the caller works out what comes next."""
        monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", 4)
        log = Log()
        streams = [FakeStream(number, log) for number in range(3)]
        arrived: list[int] = []
        tuning = CuMemAllocator.tuning
        transfer = Transfer(streams, None, lambda some: arrived.extend(p.id for p in some), tuning, out=True)  # type: ignore[arg-type]
        parts = parts_of(4, 6, 2, 4, 4)
        Store(parts, 4).add_all(transfer, parts)
        flying = []
        while transfer.step():
            flying.append(log.flying)
        assert flying == [[1], [1, 2], [1, 2, 2, 3], [2, 2, 3, 4], [2, 3, 4, 5]]
        assert transfer.in_flight == {2, 3, 4, 5}
        assert arrived == [1]
        transfer.finish()
        assert arrived == [1, 2, 3, 4, 5]
