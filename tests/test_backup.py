"""Host memory of backups: filled in two parts at a sleep, and given back in the background."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from support import (
    AWAKE,
    MIB,
    PAGE,
    SIMULATED,
    Memory,
    around_copies,
    assert_clean_exit,
    assert_no_threads,
    assert_thread_ends_in_order,
    digest_eagerly,
    hooks,
    in_thread,
    patch_touch,
    quick_sums,
    run_script,
    threads_of_ours,
)

from cumem_sleep import CuMemAllocator, DriverError, InvalidState, OutOfHostMemory, _core, sim
from cumem_sleep.backups import limits as host_limits
from cumem_sleep.digest.device import DigestRun
from cumem_sleep.digest.reference import Digest

MakeAllocator = Callable[..., CuMemAllocator]

GIVING_BACK = "cumem-give-back"  # the thread's name


@pytest.fixture(autouse=True)
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each page. And a busy machine is not to be taken for a device with work: then all is digested again."""
    monkeypatch.setattr(CuMemAllocator.tuning, "idle_s", 60.0)
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", MIB)
    monkeypatch.setattr(host_limits, "mem_available_bytes", lambda enough=None: None)  # reads hundreds of files
    if SIMULATED:
        monkeypatch.setattr("cumem_sleep.digest.device.sums_of", quick_sums)


def fill(allocator: CuMemAllocator, memory: Memory, pages: Sequence[int], tag: str = "weights") -> dict[int, bytes]:
    """A segment of random bytes of each size: the bytes by address."""
    addresses = [(allocator.malloc(count * PAGE, tag), count * PAGE) for count in pages]
    return {address: memory.fill_random(address, nbytes) for address, nbytes in addresses}


def check_bytes(memory: Memory, contents: dict[int, bytes]) -> None:
    for address, content in contents.items():
        assert memory.read(address, len(content)) == content


def change(memory: Memory, contents: dict[int, bytes], address: int, place: int = -1) -> None:
    """One byte of this segment."""
    content = bytearray(contents[address])
    content[place] ^= 0xFF
    contents[address] = bytes(content)
    memory.write(address, contents[address])


# A sleep goes in two parts


HEAD_PAGES = 3
SIZES = (1, 2, 1, 1, 2, 1)  # pages: the first two are the head


@pytest.fixture
def small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "head_bytes", HEAD_PAGES * PAGE)


@pytest.fixture
def four_blocks_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator.tuning, "stream_bytes", MIB)


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

    @pytest.mark.parametrize(
        ("head_bytes", "head"), [(1, 1), (PAGE, 1), (PAGE + 1, 2), (7 * PAGE, 5), (8 * PAGE, 6), (100 * PAGE, 6)]
    )
    def test_heads_of_any_size(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, head_bytes: int, head: int
    ) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "head_bytes", head_bytes)
        contents = fill(allocator, memory, SIZES)
        allocator.sleep()
        allocator.wake_up()
        for address in contents:
            change(memory, contents, address)
        with monkeypatch.context() as patch:
            events = Events(patch)
            assert allocator.sleep().copied_bytes == 8 * PAGE
        parts = [part for part in (list(range(head)), list(range(head, 6))) if part]
        assert events.digests == [*parts, [0, 1, 2, 3, 4, 5]], "all were in flight when the check could begin"
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_the_rest_is_digested_behind_the_copies_of_the_head(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which nobody waits for before."""
        contents = fill(allocator, memory, SIZES)
        allocator.sleep()
        allocator.wake_up()
        for address in contents:
            change(memory, contents, address)
        with monkeypatch.context() as patch:
            events = Events(patch)
            allocator.sleep()
        seen = [(event, sorted(set(places))) for event, places in events.seen]
        assert seen[:5] == [
            ("digest", [0, 1]),
            ("copy", [0, 1]),
            ("digest", [2, 3, 4, 5]),
            ("copy", [2, 3, 4, 5]),
            ("wait", []),
        ]
        assert seen[-1] == ("digest", [0, 1, 2, 3, 4, 5])
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("known", [0, 1, 5])
    def test_digests_and_streams_come_before_new_pages_are_touched(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, known: int
    ) -> None:
        """They change the address space, which takes long meanwhile."""
        contents = fill(allocator, memory, SIZES[:known])
        if known:
            allocator.sleep()
            allocator.wake_up()
        contents |= fill(allocator, memory, SIZES[known:])
        with monkeypatch.context() as patch:
            events = Events(patch)
            touch, stream = _core.HostBlock.touch, _core.CopyStream

            def noted(block: _core.HostBlock, start: int, nbytes: int) -> None:
                if block.bytes == MIB:  # others are no backups
                    events.seen.append(("touch", []))
                touch(block, start, nbytes)

            def create(device: int) -> _core.CopyStream:
                threading.Event().wait(0.02)  # for threads that touch, if there are any
                events.seen.append(("stream", []))
                return stream(device)

            patch_touch(patch, noted)
            patch.setattr(_core, "CopyStream", create)
            allocator.sleep()
        seen = [event for event, _ in events.seen]
        touched = seen.index("touch")
        copied = max(number for number, event in enumerate(seen) if event == "copy")
        assert "digest" in seen[:touched]
        assert "stream" in seen[:touched]
        assert not {"digest", "stream"} & set(seen[touched:copied])
        assert events.digests[0] == [0, 1, 2, 3, 4, 5]
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_a_backup_of_other_bytes_is_not_enough(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """The last look before memory goes, should a segment ever be passed over."""
        fill(allocator, memory, SIZES)
        allocator.sleep()
        allocator.wake_up()
        store, segments = allocator._store, _core.segments()
        digests = {
            segment.id: backup.digest for segment in segments if (backup := store.get(segment)) and backup.digest
        }
        store.require(segments, digests)
        for wrong in ({}, {**digests, segments[3].id: Digest(1, 2)}):
            with pytest.raises(InvalidState, match="no complete backup of its bytes: it stays awake"):
                store.require(segments, wrong)

    @pytest.mark.parametrize(
        ("dirty", "parts"),
        [
            ((0, 2, 4), [[0, 1], [2, 3], [4], [5]]),
            ((0,), [[0, 1], [2, 3], [4, 5]]),
            ((2,), [[0, 1], [2, 3, 4, 5]]),
            ((), [[0, 1], [2, 3, 4, 5]]),
        ],
        ids=str,
    )
    def test_what_comes_after_a_change_is_digested_in_parts(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        dirty: tuple[int, ...],
        parts: list[list[int]],
    ) -> None:
        """So that no digest takes longer than the copies before it; where nothing changed, nothing waits for it."""
        monkeypatch.setattr(CuMemAllocator.tuning, "digest_part_bytes", 2 * PAGE)
        contents = fill(allocator, memory, SIZES)
        addresses = list(contents)
        allocator.sleep()
        allocator.wake_up()
        for place in dirty:
            change(memory, contents, addresses[place])
        with monkeypatch.context() as patch:
            events = Events(patch)
            assert allocator.sleep().copied_bytes == sum(SIZES[place] for place in dirty) * PAGE
        # The last two pages are longer than a part, and a part has at least so many bytes.
        assert events.digests[: len(parts)] == parts
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.usefixtures("four_blocks_in_flight")
    def test_the_check_begins_while_the_last_copies_are_in_flight(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, memory, SIZES)
        with monkeypatch.context() as patch:
            events = Events(patch)
            allocator.sleep()
        last_copy = max(number for number, (event, _) in enumerate(events.seen) if event == "copy")
        assert events.seen[last_copy + 1 :] == [("digest", [0, 1, 2, 3]), *[("wait", [])] * 4, ("digest", [4, 5])]
        allocator.wake_up()
        check_bytes(memory, contents)

    @pytest.mark.parametrize("verify", ["wake", "off"])
    @pytest.mark.parametrize("retain_backups", [True, False])
    def test_whatever_the_settings(
        self, make_allocator: MakeAllocator, memory: Memory, verify: str, retain_backups: bool
    ) -> None:
        allocator = make_allocator(verify=verify, retain_backups=retain_backups)
        contents = fill(allocator, memory, SIZES)
        addresses = list(contents)
        for dirty in ((0, 1, 2, 3, 4, 5), (0,), (4, 5), ()):
            for place in dirty:
                change(memory, contents, addresses[place])
            report = allocator.sleep()
            copied = [SIZES[place] for place in dirty] if retain_backups else SIZES
            assert report.copied_bytes == sum(copied) * PAGE
            allocator.wake_up()
            check_bytes(memory, contents)

    def test_new_segments_among_clean_ones(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = fill(allocator, memory, SIZES)
        allocator.sleep()
        allocator.wake_up()
        first, _, third, *_ = contents
        for address in (first, third):  # the head is another, then
            allocator.free(address)
            del contents[address]
        contents |= fill(allocator, memory, [2, 1])
        report = allocator.sleep()
        assert (report.copied_bytes, report.clean_bytes) == (3 * PAGE, 6 * PAGE)
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_a_limit_refuses_before_anything_is_digested(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocator = make_allocator(host_budget_bytes=7 * PAGE)
        contents = fill(allocator, memory, SIZES)
        with monkeypatch.context() as patch:
            events = Events(patch)
            with pytest.raises(OutOfHostMemory):
                allocator.sleep()
        assert events.seen == []
        assert allocator._store.host_bytes == 0
        check_bytes(memory, contents)

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
            backup = allocator._store.get(segment)
            if place in events.copied and number < (2 if dirty is None else 3):
                assert backup is None, "half a sleep's copies are no backup"
            elif dirty is not None and place not in dirty:
                assert backup is not None, "it was clean"
        memory.close()
        held = sum(allocator._store.host_bytes_of(segment) for segment in _core.segments())
        assert allocator._store.host_bytes == held
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
            digest_eagerly(allocator)
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


@pytest.mark.sim
def test_freed_while_another_free_gives_a_backup_back(
    allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python hears of it when the operation that holds the lock has ended."""
    first, second = fill(allocator, memory, [1, 1])
    allocator.sleep()
    allocator.wake_up()
    forget = allocator._store.forget

    def slow_forget(segment_ids: Iterable[int]) -> None:
        forget(segment_ids)
        if any(segment.address == second for segment in _core.segments()):
            thread = threading.Thread(target=hooks().cumem_sleep_free, args=(second, PAGE, 0, None))
            thread.start()
            thread.join()

    monkeypatch.setattr(allocator._store, "forget", slow_forget)
    allocator.free(first)
    assert allocator._store.host_bytes == 0


# Given back in the background


class Gate:
    """While it is closed, the thread that gives back finds an operation at work at each try."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = False
        self.tries = 0
        hold = _core.OperationLock.hold

        def refused(lock: _core.OperationLock, wait: bool = True) -> Any:
            if _core.thread_name() == GIVING_BACK:
                self.tries += 1
                if not self.is_open:
                    return contextlib.nullcontext(False)
            return hold(lock, wait)

        monkeypatch.setattr(_core.OperationLock, "hold", refused)

    def wait(self) -> None:
        """For the thread to have tried in vain."""
        tries = self.tries
        until(lambda: self.tries > tries + 2)


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline, "it never comes to that"
        time.sleep(0.0005)


def threads_giving_back() -> list[str]:
    return threads_of_ours(GIVING_BACK)


def wait_for_the_end(allocator: CuMemAllocator, host_bytes: int = 0) -> None:
    """Until only so much is held, and the thread has ended."""
    until(lambda: not allocator._store._tier._releasing.bytes and not threads_giving_back())
    assert allocator._store.host_bytes == host_bytes
    assert allocator._store._tier._releasing._worker is None


@pytest.fixture
def closed_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of each block of a backup that was given back."""
    closed: list[str] = []
    close = _core.HostBlock.close

    def noted(block: _core.HostBlock) -> None:
        if block.bytes == MIB:  # others are no backups
            closed.append(_core.thread_name())
        close(block)

    monkeypatch.setattr(_core.HostBlock, "close", noted)
    return closed


@pytest.fixture
def much(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three pages are much."""
    monkeypatch.setattr(CuMemAllocator.tuning, "release_later_bytes", 3 * PAGE)
    yield
    assert_no_threads(GIVING_BACK)


OPERATION = "cumem-operation"


@pytest.mark.usefixtures("much")
class TestGivingBack:
    def going(self, allocator: CuMemAllocator, memory: Memory, pages: int = 4) -> dict[int, bytes]:
        """Segments that are awake and whose backups are no longer wanted."""
        contents = fill(allocator, memory, [1] * pages)
        allocator.sleep()
        allocator.wake_up()
        memory.close()
        return contents

    @pytest.fixture
    def unretained(self, make_allocator: MakeAllocator) -> CuMemAllocator:
        return make_allocator(retain_backups=False)

    def test_after_a_wake(self, unretained: CuMemAllocator, memory: Memory, closed_by: list[str]) -> None:
        contents = self.going(unretained, memory)
        wait_for_the_end(unretained)
        assert closed_by == [GIVING_BACK] * 8
        if SIMULATED:
            assert sim.stats().registered_bytes == 0
        check_bytes(memory, contents)

    def test_after_a_sleep_that_drops(self, allocator: CuMemAllocator, memory: Memory, closed_by: list[str]) -> None:
        fill(allocator, memory, [2, 2])
        kept = fill(allocator, memory, [1, 2], "default")
        allocator.sleep()
        allocator.wake_up()
        allocator.sleep(2)
        wait_for_the_end(allocator, 3 * PAGE)
        assert closed_by == [GIVING_BACK] * 8
        allocator.wake_up()
        check_bytes(memory, kept)

    def test_little_goes_at_once(
        self, unretained: CuMemAllocator, memory: Memory, closed_by: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Gate(monkeypatch)
        self.going(unretained, memory, pages=2)
        assert unretained._store.host_bytes == 0
        assert closed_by == [OPERATION] * 4
        assert threads_giving_back() == []

    def test_not_beside_an_operation(self, unretained: CuMemAllocator, memory: Memory, closed_by: list[str]) -> None:
        """None but one that began with it: that block is waited for."""
        store = unretained._store
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            self.going(unretained, memory)
            gate.wait()
            with unretained._lock.hold():
                gate.is_open = True
                gate.wait()
                assert closed_by == []
                assert store.host_bytes == 4 * PAGE
            wait_for_the_end(unretained)

    def test_a_block_at_a_time(
        self, unretained: CuMemAllocator, memory: Memory, closed_by: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An operation may come between any two."""
        hold = _core.OperationLock.hold
        most = [0]

        class Counted:
            def __init__(self, held: _core.Held) -> None:
                self.held = held

            def __enter__(self) -> bool:
                self.before = len(closed_by)
                return self.held.__enter__()

            def __exit__(self, *exception: object) -> None:
                most[0] = max(most[0], len(closed_by) - self.before)
                self.held.__exit__(*exception)

        def counted(lock: _core.OperationLock, wait: bool = True) -> Any:
            held = hold(lock, wait)
            return Counted(held) if _core.thread_name() == GIVING_BACK else held

        monkeypatch.setattr(_core.OperationLock, "hold", counted)
        self.going(unretained, memory)
        wait_for_the_end(unretained)
        assert most == [1]

    def test_operations_meanwhile(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, closed_by: list[str]
    ) -> None:
        """Those that take no host memory leave it to the thread; then it goes on."""
        allocator = make_allocator()
        contents = fill(allocator, memory, [2, 2])
        kept = fill(allocator, memory, [1], "default")
        allocator.sleep()
        allocator.wake_up()
        gate = Gate(monkeypatch)
        allocator.sleep(2)
        for _ in range(2):
            allocator.wake_up()
            check_bytes(memory, kept)
            allocator.usage()
            for address in contents:
                memory.write(address, contents[address])
            assert allocator.sleep(2).clean_bytes == PAGE
        allocator.wake_up()
        gate.wait()
        assert closed_by == []
        assert allocator._store.host_bytes == 5 * PAGE
        assert sum(usage.backed_up_bytes for usage in allocator.usage().values()) == PAGE
        gate.is_open = True
        wait_for_the_end(allocator, PAGE)

    @pytest.mark.parametrize("through_hook", [False, True])
    def test_backups_of_what_is_freed_meanwhile_go_with_it(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, through_hook: bool
    ) -> None:
        """Whoever frees finds the lock held, and no operation may follow that would forget them."""
        fill(allocator, memory, [2, 2])
        (freed,) = fill(allocator, memory, [1], "default")
        allocator.sleep()
        allocator.wake_up()
        memory.close()
        close = _core.HostBlock.close
        begun: list[str] = []

        def free() -> None:
            hooks().cumem_sleep_free(freed, PAGE, 0, None) if through_hook else allocator.free(freed)

        def free_and_close(block: _core.HostBlock) -> None:
            if not begun and _core.thread_name() == GIVING_BACK:
                begun.append("freeing")
                in_thread(free)
            close(block)

        monkeypatch.setattr(_core.HostBlock, "close", free_and_close)
        allocator.sleep(2)
        wait_for_the_end(allocator)
        assert begun

    @pytest.mark.parametrize("operation", ["sleep", "prepare"])
    @pytest.mark.parametrize("spare_pages", [0, 3])
    def test_a_budget_counts_what_still_goes(
        self,
        make_allocator: MakeAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        operation: str,
        spare_pages: int,
    ) -> None:
        """It makes way at once, all of it, for what needs host memory."""
        allocator = make_allocator(host_budget_bytes=(5 + spare_pages) * PAGE)
        contents = fill(allocator, memory, [2, 2])
        contents |= fill(allocator, memory, [1], "default")
        allocator.sleep()
        allocator.wake_up()
        gate = Gate(monkeypatch)
        allocator.sleep(2)
        allocator.wake_up()
        for address in contents:
            memory.write(address, contents[address])
        memory.close()
        gate.wait()
        budget = allocator._store.limits()[0]
        assert (budget.name, budget.available_bytes) == ("budget", spare_pages * PAGE)
        most = [0]
        touch = _core.HostBlock.touch

        def noted(block: _core.HostBlock, offset: int, nbytes: int) -> None:
            most[0] = max(most[0], allocator._store.host_bytes)
            touch(block, offset, nbytes)

        patch_touch(monkeypatch, noted)
        if operation == "prepare":
            assert allocator.prepare().wait(30)
        report = allocator.sleep()
        assert (report.copied_bytes == 0) == (operation == "prepare")
        assert most == [5 * PAGE]
        allocator.wake_up()
        check_bytes(memory, contents)
        gate.is_open = True
        wait_for_the_end(allocator, 5 * PAGE)

    @pytest.mark.parametrize("call", ["release_backups", "close"])
    def test_release_returns_when_all_is_back(
        self, unretained: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        gate = Gate(monkeypatch)
        contents = self.going(unretained, memory)
        gate.wait()
        assert unretained._store.host_bytes == 4 * PAGE
        assert getattr(unretained, call)() == (4 * PAGE if call == "release_backups" else None)
        assert unretained._store.host_bytes == 0
        if SIMULATED:
            assert sim.stats().registered_bytes == 0
        gate.is_open = True
        wait_for_the_end(unretained)
        check_bytes(memory, contents)

    def test_more_comes_while_the_thread_works_and_after(
        self, unretained: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(monkeypatch)
        segments = fill(unretained, memory, [1] * 6)
        unretained.sleep(offload_tags=["weights"])
        unretained.wake_up()
        until(lambda: len(threads_giving_back()) == 1)  # it names itself when it begins
        with unretained._lock.hold():
            for segment in _core.segments():
                unretained._store.take([segment], [], {})  # gives back what goes, and then all of it goes again
            unretained._store.prune()
        until(lambda: len(threads_giving_back()) == 1)
        assert unretained._store.host_bytes == 6 * PAGE
        gate.is_open = True
        wait_for_the_end(unretained)
        unretained.sleep()
        unretained.wake_up()
        wait_for_the_end(unretained)
        check_bytes(memory, segments)

    def test_without_threads_it_goes_at_once(
        self, unretained: CuMemAllocator, memory: Memory, closed_by: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(worker: _core.Worker, work: Callable[[], object]) -> None:
            raise InvalidState("no thread can be started")

        with monkeypatch.context() as patch:
            patch.setattr(_core.Worker, "start", refuse)
            contents = self.going(unretained, memory)
            assert unretained._store.host_bytes == 0
        assert closed_by == [OPERATION] * 8
        unretained.sleep()
        unretained.wake_up()
        wait_for_the_end(unretained)
        assert closed_by[8:] == [GIVING_BACK] * 8
        check_bytes(memory, contents)

    def test_of_a_replaced_allocator(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The old one does no more work, and holds nothing, though somebody may still have it."""
        allocator = make_allocator(retain_backups=False)
        gate = Gate(monkeypatch)
        for address in self.going(allocator, memory):
            allocator.free(address)
        gate.wait()
        assert allocator._store.host_bytes == 4 * PAGE
        make_allocator()
        assert_no_threads(GIVING_BACK)
        assert allocator._store.host_bytes == 0
        if SIMULATED:
            assert sim.stats().registered_bytes == 0

    @pytest.mark.parametrize("began", [True, False])
    def test_an_interrupt_as_the_thread_starts(
        self, unretained: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, began: bool
    ) -> None:
        """All goes back all the same, at the latest after the next operation."""
        start = _core.Worker.start

        def interrupted(worker: _core.Worker, work: Callable[[], object]) -> None:
            if began:
                start(worker, work)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(_core.Worker, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                self.going(unretained, memory)
        assert all(segment.sleep == AWAKE for segment in _core.segments())
        in_thread(unretained.usage)
        wait_for_the_end(unretained)

    def test_stopping_ends_the_thread(
        self, unretained: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(monkeypatch)
        self.going(unretained, memory)
        gate.wait()
        for _ in range(2):
            unretained._store.stop()
            assert_no_threads(GIVING_BACK)
        unretained.release_backups()
        assert unretained._store.host_bytes == 0


# Processes

GOING = """
    import sys, time

    tuning = CuMemAllocator.tuning
    tuning.release_later_bytes, tuning.slab_bytes, tuning.between_releases_s = PAGE, MIB, BETWEEN_S
    reset_simulation()
    allocator, memory = fresh_allocator(retain_backups=False), Memory()
    contents = {}
    for _ in range(4):
        address = allocator.malloc(4 * PAGE, "weights")
        contents[address] = memory.fill_random(address, 4 * PAGE)
    memory.close()
    allocator.sleep()
    allocator.wake_up()
    going = allocator._store._tier._releasing
    """


@pytest.mark.sim
class TestProcess:
    @pytest.mark.slow
    @pytest.mark.parametrize("between_s", [0, 1000])
    @pytest.mark.parametrize("rest", ["sys.exit(0)", "CuMemAllocator.instance = None; del allocator, going"])
    def test_exit_meanwhile(self, between_s: float, rest: str) -> None:
        assert_clean_exit(run_script(f"BETWEEN_S = {between_s}", GOING, rest, timeout_s=30))

    def test_exit_ends_it_in_an_orderly_way(self) -> None:
        """Before the interpreter is taken down, not by that."""
        assert_thread_ends_in_order("BETWEEN_S = 1000", GOING, thread="going._worker")

    @pytest.mark.parametrize("as_python_does", [False, True])
    def test_fork_meanwhile(self, as_python_does: bool) -> None:
        process = run_script(
            "BETWEEN_S = 0.05",
            GOING,
            f"""
            calls = (allocator.usage, allocator.sleep, allocator.release_backups)
            fork_beside(going._worker, allocator, *calls, as_python_does={as_python_does})
            assert going.bytes
            tuning.between_releases_s = 0
            while going._worker is not None:
                time.sleep(0.001)
            assert allocator._store.host_bytes == 0
            for address, content in contents.items():
                assert memory.read(address, 4 * PAGE) == content
            memory.close()
            free_everything()
            """,
            timeout_s=20,
        )
        assert_clean_exit(process)
