"""Backups are filled in two parts at a sleep."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import pytest
from backed_up import (
    change,
    check_bytes,
    fill,
    two_blocks,  # noqa: F401  (autouse)
)
from support import (
    AWAKE,
    MIB,
    PAGE,
    SIMULATED,
    Memory,
    around_copies,
    assert_no_threads,
    digest_by_the_kernel,
    host_bytes_of,
)

from cumem_sleep import CuMemAllocator, DriverError, InvalidState, _core, sim
from cumem_sleep.digest.digester import DigestRun
from cumem_sleep.digest.reference import Digest

MakeAllocator = Callable[..., CuMemAllocator]
HEAD_PAGES = 3
SIZES = (1, 2, 1, 1, 2, 1)  # pages: the first two are the head


@pytest.fixture
def small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "head_bytes", HEAD_PAGES * PAGE)


@pytest.fixture
def four_blocks_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", MIB)


def in_flight(dirty: Sequence[int]) -> list[int]:
    """Places of segments that are not there yet when the last copies were begun, with `four_blocks_in_flight`."""
    blocks = [place for place in dirty for _ in range(2 * SIZES[place])]
    return sorted(set(blocks[-4:]))


class Events:
    """What is digested, and copied for a backup, in order: places of segments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object] = lambda number: None) -> None:
        """`act` is called before each digest, with its number."""
        self.seen: list[tuple[str, list[int]]] = []
        self._digesting = False
        to_host, synchronize = _core.CopyStream.to_host, _core.CopyStream.synchronize
        start, finish = DigestRun.start, DigestRun.finish
        places = {segment.id: place for place, segment in enumerate(_core.segments())}
        addresses = [(segment.address, segment.bytes) for segment in _core.segments()]

        def begin(run: DigestRun, segments: Sequence[_core.Segment]) -> None:
            if segments:
                act(len(self.digests))
                self.seen.append(("digest", [places[segment.id] for segment in segments]))
            start(run, segments)

        def end(run: DigestRun) -> dict[int, Digest]:
            self._digesting = True
            try:
                return finish(run)
            finally:
                self._digesting = False

        def copy(stream: _core.CopyStream, block: _core.HostBlock, offset: int, address: int, nbytes: int) -> None:
            to_host(stream, block, offset, address, nbytes)
            if not self._digesting:
                (place,) = (at for at, (start, size) in enumerate(addresses) if start <= address < start + size)
                if self.seen and self.seen[-1][0] == "copy":
                    self.seen[-1][1].append(place)
                else:
                    self.seen.append(("copy", [place]))

        def wait(stream: _core.CopyStream) -> None:
            synchronize(stream)
            if not self._digesting:
                self.seen.append(("wait", []))

        monkeypatch.setattr(DigestRun, "start", begin)
        monkeypatch.setattr(DigestRun, "finish", end)
        monkeypatch.setattr(_core.CopyStream, "to_host", copy)
        monkeypatch.setattr(_core.CopyStream, "synchronize", wait)

    @property
    def digests(self) -> list[list[int]]:
        return [places for event, places in self.seen if event == "digest"]

    @property
    def copied(self) -> set[int]:
        return {place for event, places in self.seen if event == "copy" for place in places}


@pytest.mark.usefixtures("small_head")
class TestParts:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "dirty",
        [(), (0,), (1,), (0, 1), (2,), (5,), (3, 4), (1, 2), (0, 5), (0, 1, 2, 3, 4, 5)],
        ids=lambda dirty: ",".join(map(str, dirty)) or "none",
    )
    @pytest.mark.usefixtures("four_blocks_in_flight")
    def test_copy_what_changed(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, dirty: tuple[int, ...]
    ) -> None:
        contents = fill(allocator, memory, SIZES)
        addresses = list(contents)
        for turn in range(2):
            allocator.sleep()
            assert allocator.wake_up().verified_bytes == 8 * PAGE
            check_bytes(memory, contents)
            for place in dirty:
                change(memory, contents, addresses[place], place=[-1, 0][turn])
        with monkeypatch.context() as patch:
            events = Events(patch)
            report = allocator.sleep()
        copied_bytes = sum(SIZES[place] for place in dirty) * PAGE
        assert (report.copied_bytes, report.clean_bytes) == (copied_bytes, 8 * PAGE - copied_bytes)
        assert events.copied == set(dirty)
        late = in_flight(dirty)
        early = [place for place in range(6) if place not in late]
        again = [early, late] if dirty else []
        assert events.digests == [[0, 1], [2, 3, 4, 5], *again], "what is clean needs no second digest"
        assert allocator.wake_up().verified_bytes == 8 * PAGE
        check_bytes(memory, contents)
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (0, 8 * PAGE)
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_a_backup_of_other_bytes_is_not_enough(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """The last look before memory goes, should a segment ever be passed over."""
        fill(allocator, memory, SIZES)
        allocator.sleep()
        allocator.wake_up()
        store, segments = allocator._store, _core.segments()
        digests = {
            segment.id: backup.digest
            for segment in segments
            if (backup := store.catalogue.get(segment)) and backup.digest
        }
        store.catalogue.check_complete(segments, digests)
        for wrong in ({}, {**digests, segments[3].id: Digest(1, 2)}):
            with pytest.raises(InvalidState, match="no complete backup of its bytes: it stays awake"):
                store.catalogue.check_complete(segments, wrong)

    @pytest.mark.slow
    @pytest.mark.parametrize("error", [DriverError, KeyboardInterrupt])
    @pytest.mark.parametrize(
        ("dirty", "number"),
        [
            *((None, number) for number in range(3)),  # all, check, check of the last
            *((dirty, number) for dirty in ((0,), (1, 4), (5,)) for number in range(4)),  # head, rest, and so on
        ],
        ids=str,
    )
    @pytest.mark.usefixtures("four_blocks_in_flight")
    def test_a_digest_that_fails_leaves_all_awake(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        error: type[BaseException],
        number: int,
        dirty: tuple[int, ...] | None,
    ) -> None:
        contents = fill(allocator, memory, SIZES)
        addresses = list(contents)
        if dirty is not None:
            allocator.sleep()
            allocator.wake_up()
            for place in dirty:
                change(memory, contents, addresses[place])

        def act(at: int) -> None:
            if at == number:
                failed = DriverError("cuStreamSynchronize", "CUDA_ERROR_UNKNOWN", "", "")
                raise failed if error is DriverError else error

        with monkeypatch.context() as patch:
            events = Events(patch, act)
            with pytest.raises(error):
                allocator.sleep()
        assert all(segment.sleep == AWAKE and segment.has_memory for segment in _core.segments())
        assert_no_threads()
        check_bytes(memory, contents)
        for place, segment in enumerate(_core.segments()):
            backup = allocator._store.catalogue.get(segment)
            if place in events.copied and number < (2 if dirty is None else 3):
                assert backup is None, "half a sleep's copies are no backup"
            elif dirty is not None and place not in dirty:
                assert backup is not None, "it was clean"
        memory.close()
        held = sum(host_bytes_of(allocator, segment) for segment in _core.segments())
        assert allocator._store.memory.bytes == held
        if SIMULATED:
            assert sim.stats().registered_bytes == held
        allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("number", "place"),
        [*((1, place) for place in (0, 1, 2, 5)), *((2, place) for place in (0, 1, 2, 5)), (3, 1)],
    )
    @pytest.mark.usefixtures("four_blocks_in_flight")
    def test_what_is_written_to_meanwhile_is_noticed(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, number: int, place: int
    ) -> None:
        """While the rest is digested (1), before the check (2), and before that of what was in flight then (3).

        Also in what was clean: the copies take long, and it is digested again with the rest.
        """
        contents = fill(allocator, memory, SIZES)
        addresses = list(contents)
        allocator.sleep()
        allocator.wake_up()
        change(memory, contents, addresses[1], place=7)

        def act(at: int) -> None:
            if at == number:
                change(memory, contents, addresses[place])

        is_late = place < 2 or number > 1  # else it is just what is digested then
        with monkeypatch.context() as patch:
            events = Events(patch, act)
            with pytest.raises(InvalidState, match="written to") if is_late else contextlib.nullcontext():
                allocator.sleep()
        late = in_flight([1] if is_late else [1, place])
        assert events.digests[2:] == [[at for at in range(6) if at not in late], late]
        if is_late:
            assert all(segment.sleep == AWAKE and segment.has_memory for segment in _core.segments())
            check_bytes(memory, contents)
            allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("place", [0, 1, 5])
    @pytest.mark.usefixtures("four_blocks_in_flight")
    def test_what_work_writes_that_ends_during_the_check_is_noticed(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, place: int
    ) -> None:
        """Somebody began it in the middle of the sleep, and the check waits for it, but has digested much before."""
        monkeypatch.setattr(CuMemAllocator.tuning, "idle_s", 0.003)
        contents = fill(allocator, memory, SIZES)
        addresses = list(contents)
        if SIMULATED:
            digest_by_the_kernel(allocator)
        synchronize, calls = _core.synchronize, list[int]()

        def slow_synchronize(device: int) -> None:
            calls.append(device)
            synchronize(device)
            if len(calls) == 2:
                time.sleep(0.005)
                change(memory, contents, addresses[place])

        with monkeypatch.context() as patch:
            patch.setattr(_core, "synchronize", slow_synchronize)
            with pytest.raises(InvalidState, match="written to"):
                allocator.sleep()
        assert all(segment.sleep == AWAKE and segment.has_memory for segment in _core.segments())
        check_bytes(memory, contents)
        allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.slow
    @pytest.mark.parametrize("error", [DriverError("cuCtxSynchronize", "CUDA_ERROR_UNKNOWN", ""), KeyboardInterrupt()])
    @pytest.mark.parametrize("verify", ["wake", "off"])
    def test_without_the_check_nothing_copied_is_trusted(
        self,
        make_allocator: MakeAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        verify: str,
        error: BaseException,
    ) -> None:
        """Bytes change while they are copied, and change back: a backup of neither digest must not pass for clean."""
        allocator = make_allocator(verify=verify)
        contents = fill(allocator, memory, SIZES)
        address = next(iter(contents))
        synchronize, calls = _core.synchronize, list[int]()

        def fail_at_the_check(device: int) -> None:
            calls.append(device)
            if len(calls) == 2:
                raise error
            synchronize(device)

        with monkeypatch.context() as patch:
            around_copies(patch, before=lambda: change(memory, contents, address))
            patch.setattr(_core, "synchronize", fail_at_the_check)
            with pytest.raises(type(error)):
                allocator.sleep()
        assert sum(usage.backed_up_bytes for usage in allocator.usage().values()) == 0
        change(memory, contents, address)  # back
        assert allocator.sleep().clean_bytes == 0
        allocator.wake_up()
        check_bytes(memory, contents)
