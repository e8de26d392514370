"""Backups made in the background, with nothing beside: what is copied, what refuses it, and the setting."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from preparing import (
    STEPS,
    TAGS,
    Gate,
    Opened,
    Steps,
    backed_up_bytes,
    changed,
    check_bytes,
    fill,
    finished,
    small_pieces,  # noqa: F401  (autouse)
)
from support import MIB, PAGE, Memory, digest_by_the_kernel, threads_refused

from cumem_sleep import CuMemAllocator, InvalidArgument, InvalidState, _core, sim
from cumem_sleep.operations.prepare import Preparation

MakeAllocator = Callable[..., CuMemAllocator]


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

    @pytest.mark.sim
    def test_where_a_kernel_digests(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """The copy, piece by piece, and the segment have the same digest."""
        digest_by_the_kernel(allocator)
        contents = fill(allocator, memory, *TAGS)
        assert finished(allocator.prepare()).error is None
        assert sim.stats().calls["cuLaunchKernel"] > 2 * len(TAGS), "each segment is digested before and after"
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (0, 2 * PAGE)
        assert allocator.wake_up().verified_bytes == 2 * PAGE
        check_bytes(memory, contents)

    def test_copies_only_what_has_no_backup_of_the_same_bytes(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, *TAGS, "lora")
        allocator.sleep()
        allocator.wake_up()
        first, second, _ = contents
        contents[second] = changed(contents[second], -1)
        memory.write(second, contents[second])
        before = [allocator._store.catalogue.get(segment) for segment in _core.segments()]
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
        after = [allocator._store.catalogue.get(segment) for segment in _core.segments()]
        assert after == before, "host memory was taken anew"
        assert [old == new.digest for old, new in zip(digests, after, strict=True) if new] == [True, False, True]
        assert first in contents
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

        steps = Steps(monkeypatch, look)
        assert steps.prepare(allocator).error is None
        assert steps.count == STEPS
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
        turn = Preparation._step

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

        monkeypatch.setattr(allocator.tuning, "prepare_poll_s", -1.0)
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

        steps = Steps(monkeypatch, lambda: seen.append(list(in_flight)))
        monkeypatch.setattr(_core.CopyStream, "to_host", noted_copy)
        monkeypatch.setattr(_core.CopyStream, "synchronize", noted_wait)
        steps.prepare(allocator)
        assert seen == [[]] * STEPS


@pytest.mark.parametrize("timeout", ["x", True, [1], float("nan")])
def test_waiting_takes_seconds(allocator: CuMemAllocator, timeout: float) -> None:
    allocator.malloc(PAGE, "weights")
    preparation = allocator.prepare()
    with pytest.raises(InvalidArgument, match=re.escape(f"timeout={timeout!r}")):
        preparation.wait(timeout)
    for long in (10**400, float("inf"), np.float32(60), None):
        assert preparation.wait(long)


class TestRefused:
    def test_without_retained_backups(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(retain_backups=False)
        fill(allocator, memory, *TAGS)
        with pytest.raises(InvalidState, match="retain_backups"):
            allocator.prepare()
        assert allocator._preparation is None
        assert allocator._store.memory.bytes == 0

    def test_while_this_thread_captures(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """As PyTorch tells it."""

        class Pools:
            def is_capturing(self) -> bool:
                return True

        fill(allocator, memory, *TAGS)
        allocator._pools.found = Pools()  # type: ignore[assignment]
        try:
            with pytest.raises(InvalidState, match="prepare while this thread captures"):
                allocator.prepare()
        finally:
            allocator._pools.found = None
        assert allocator._preparation is None
        finished(allocator.prepare())
        assert backed_up_bytes(allocator) == 2 * PAGE

    def test_without_a_thread(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, *TAGS)
        with threads_refused():
            with pytest.raises(InvalidState, match="no thread can be started"):
                allocator.prepare()
            allocator.release_backups()  # has nothing to wait for
        assert allocator._store.memory.bytes == 0
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
        assert allocator._store.memory.bytes == 0
