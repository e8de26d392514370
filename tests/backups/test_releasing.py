"""Host memory of backups is given back in the background."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from backed_up import (
    check_bytes,
    fill,
    two_blocks,  # noqa: F401  (autouse)
)
from support import (
    MIB,
    PAGE,
    SIMULATED,
    Memory,
    assert_clean_exit,
    assert_no_threads,
    assert_thread_ends_in_order,
    hooks,
    in_thread,
    patch_prefault,
    run_script,
    thread_name,
    threads_of_ours,
)

from cumem_sleep import CuMemAllocator, InvalidState, OutOfHostMemory, _core, host_facts, sim

MakeAllocator = Callable[..., CuMemAllocator]
GIVING_BACK = "cumem-give-back"  # the thread's name


@pytest.mark.sim
def test_freed_while_another_free_gives_a_backup_back(
    allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python hears of it when the operation that holds the lock has ended."""
    first, second = fill(allocator, memory, [1, 1])
    allocator.sleep()
    allocator.wake_up()
    forget = allocator._store.catalogue.forget

    def slow_forget(segment_ids: Iterable[int]) -> None:
        forget(segment_ids)
        if any(segment.address == second for segment in _core.segments()):
            thread = threading.Thread(target=hooks().cumem_sleep_free, args=(second, PAGE, 0, None))
            thread.start()
            thread.join()

    monkeypatch.setattr(allocator._store.catalogue, "forget", slow_forget)
    allocator.free(first)
    assert allocator._store.memory.bytes == 0


class Gate:
    """While it is closed, the thread that gives back finds an operation at work at each try."""

    latest: Gate | None = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Gate.latest = self
        self.is_open = False
        self.tries = 0
        hold = _core.OperationLock.hold

        def refused(lock: _core.OperationLock, wait: bool = True) -> Any:
            if thread_name() == GIVING_BACK:
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
    until(lambda: not allocator._store.memory.tier._releasing.bytes and not threads_giving_back())
    assert allocator._store.memory.bytes == host_bytes
    assert allocator._store.memory.tier._releasing._worker is None


def available_bytes(allocator: CuMemAllocator) -> int:
    """Of a system that is taken to have as much at any time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_facts, "mem_available_bytes", lambda **_: 64 * PAGE)
        limits = {limit.name: limit.available_bytes for limit in allocator._store.memory.tier.limits()}
    available = limits["MemAvailable"]
    assert available is not None
    return available


@pytest.fixture
def closed_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of each block of a backup that was given back."""
    closed: list[str] = []
    close = _core.HostBlock.close

    def noted(block: _core.HostBlock) -> None:
        if block.bytes == MIB:  # others are no backups
            closed.append(thread_name())
        close(block)

    monkeypatch.setattr(_core.HostBlock, "close", noted)
    return closed


@pytest.fixture
def much(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three pages are much."""
    monkeypatch.setattr(CuMemAllocator.tuning, "release_later_bytes", 3 * PAGE)
    monkeypatch.setattr(CuMemAllocator.tuning, "before_releases_s", 0.0)
    yield
    if Gate.latest is not None:  # a test that fails leaves it closed
        Gate.latest.is_open = True
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

    def test_what_was_unpinned_for_level_3(
        self, allocator: CuMemAllocator, memory: Memory, closed_by: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its pages take long to free as well. Until that is done they count as room, once."""
        fill(allocator, memory, [1] * 4)
        allocator.sleep()
        allocator.wake_up()
        allocator._store.memory.unpin()
        before = available_bytes(allocator)
        with monkeypatch.context() as patch:
            Gate(patch)
            allocator.sleep(2)
            assert closed_by == []
            assert allocator._store.memory.bytes == 4 * PAGE
            assert available_bytes(allocator) == before + 4 * PAGE
            assert Gate.latest is not None
            Gate.latest.is_open = True
            wait_for_the_end(allocator)
        assert closed_by == [GIVING_BACK] * 8
        allocator.wake_up()

    def test_little_goes_at_once(
        self, unretained: CuMemAllocator, memory: Memory, closed_by: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Gate(monkeypatch)
        self.going(unretained, memory, pages=2)
        assert unretained._store.memory.bytes == 0
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
                assert store.memory.bytes == 4 * PAGE
            wait_for_the_end(unretained)

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
            if not begun and thread_name() == GIVING_BACK:
                begun.append("freeing")
                in_thread(free)
            close(block)

        monkeypatch.setattr(_core.HostBlock, "close", free_and_close)
        allocator.sleep(2)
        wait_for_the_end(allocator)
        assert begun

    @pytest.mark.slow
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
        """It counts as room, because what needs host memory takes it, or has it released first."""
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
        budget = allocator._store.memory.tier.limits()[0]
        assert (budget.name, budget.available_bytes) == ("budget", (4 + spare_pages) * PAGE)
        most = [0]
        take = allocator._store.memory.reserve

        def noted(*arguments: Any, **options: Any) -> None:
            take(*arguments, **options)
            most[0] = max(most[0], allocator._store.memory.bytes)

        monkeypatch.setattr(allocator._store.memory, "reserve", noted)
        if operation == "prepare":
            assert allocator.prepare().wait(30)
        report = allocator.sleep()
        assert (report.copied_bytes == 0) == (operation == "prepare")
        assert most == [5 * PAGE]
        allocator.wake_up()
        check_bytes(memory, contents)
        gate.is_open = True
        wait_for_the_end(allocator, 5 * PAGE)

    def test_a_sleep_takes_what_still_goes(
        self, unretained: CuMemAllocator, memory: Memory, closed_by: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is pinned already: nothing is released, and nothing is pinned anew."""
        gate = Gate(monkeypatch)
        contents = fill(unretained, memory, [1, 2, 1])
        unretained.sleep()
        unretained.wake_up()
        gate.wait()
        for address in contents:
            contents[address] = memory.fill_random(address, len(contents[address]))
        pinned: list[int] = []
        pin = _core.HostBlock.pin

        def noted(block: _core.HostBlock, device: int) -> None:
            if block.bytes == MIB:  # others are no backups
                pinned.append(block.bytes)
            pin(block, device)

        monkeypatch.setattr(_core.HostBlock, "pin", noted)
        assert unretained.sleep().copied_bytes == 4 * PAGE
        assert (closed_by, pinned, unretained._store.memory.bytes) == ([], [], 4 * PAGE)
        unretained.wake_up()
        check_bytes(memory, contents)
        assert (closed_by, pinned, unretained._store.memory.bytes) == ([], [], 4 * PAGE)
        memory.close()
        gate.is_open = True
        wait_for_the_end(unretained)

    @pytest.mark.parametrize("slab_bytes", [MIB, PAGE])
    def test_a_sleep_of_more_releases_what_it_cannot_take(
        self,
        make_allocator: MakeAllocator,
        memory: Memory,
        closed_by: list[str],
        monkeypatch: pytest.MonkeyPatch,
        slab_bytes: int,
    ) -> None:
        """First, so that the budget holds at every moment. If it is too little anyway, all stays as it is."""
        allocator = make_allocator(retain_backups=False, host_budget_bytes=6 * PAGE)
        gate = Gate(monkeypatch)
        contents = self.going(allocator, memory)
        gate.wait()
        contents |= fill(allocator, memory, [2, 1])
        memory.close()
        monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", slab_bytes)
        with pytest.raises(OutOfHostMemory) as refused:
            allocator.sleep()
        assert (refused.value.available_bytes, refused.value.limit) == (6 * PAGE, "budget")
        assert (closed_by, allocator._store.memory.bytes) == ([], 4 * PAGE)
        allocator.free(contents.popitem()[0])
        most = [0]
        prefault = _core.HostBlock.prefault

        def noted(block: _core.HostBlock, offset: int, nbytes: int) -> None:
            most[0] = max(most[0], allocator._store.memory.bytes)
            prefault(block, offset, nbytes)

        patch_prefault(monkeypatch, noted)
        allocator.sleep()
        assert closed_by == ([] if slab_bytes == MIB else [OPERATION] * 8)
        assert most == [6 * PAGE]
        allocator.wake_up()
        check_bytes(memory, contents)
        memory.close()
        gate.is_open = True
        wait_for_the_end(allocator)

    @pytest.mark.parametrize("call", ["release_backups", "close"])
    def test_release_returns_when_all_is_back(
        self, unretained: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        gate = Gate(monkeypatch)
        contents = self.going(unretained, memory)
        gate.wait()
        assert unretained._store.memory.bytes == 4 * PAGE
        assert getattr(unretained, call)() == (4 * PAGE if call == "release_backups" else None)
        assert unretained._store.memory.bytes == 0
        if SIMULATED:
            assert sim.stats().registered_bytes == 0
        gate.is_open = True
        wait_for_the_end(unretained)
        check_bytes(memory, contents)

    def test_without_threads_it_goes_at_once(
        self, unretained: CuMemAllocator, memory: Memory, closed_by: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(worker: _core.Worker, work: Callable[[], object]) -> None:
            raise InvalidState("no thread can be started")

        with monkeypatch.context() as patch:
            patch.setattr(_core.Worker, "start", refuse)
            contents = self.going(unretained, memory)
            assert unretained._store.memory.bytes == 0
        assert closed_by == [OPERATION] * 8
        unretained.sleep()
        unretained.wake_up()
        wait_for_the_end(unretained)
        assert closed_by[8:] == [GIVING_BACK] * 8
        check_bytes(memory, contents)

    @pytest.mark.parametrize(("left", "is_slow"), [(None, True), (8 * PAGE, True), (2 * PAGE, False)])
    def test_it_takes_a_small_share_of_the_time_while_memory_is_not_short(
        self,
        unretained: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        left: int | None,
        is_slow: bool,
    ) -> None:
        """A model that decodes after its wake waits for each block."""
        monkeypatch.setattr(CuMemAllocator.tuning, "between_releases_s", 0.0)
        pauses: list[float] = []
        pause = _core.Worker.pause

        def noted(worker: _core.Worker, seconds: float) -> bool:
            pauses.append(seconds)
            return pause(worker, 0.0)

        close = _core.HostBlock.close

        def slow(block: _core.HostBlock) -> None:
            if thread_name() == GIVING_BACK:
                time.sleep(0.002)
            close(block)

        monkeypatch.setattr(_core.Worker, "pause", noted)
        monkeypatch.setattr(_core.HostBlock, "close", slow)
        monkeypatch.setattr(
            host_facts, "mem_available_bytes", lambda **_: left if thread_name() == GIVING_BACK else None
        )
        self.going(unretained, memory)
        wait_for_the_end(unretained)
        after_blocks = pauses[1:9]
        assert len(after_blocks) == 8
        slow_ones = [seconds for seconds in after_blocks if seconds >= 0.002 * 19]
        # Towards the end, little waits: then even little that is left is enough.
        assert len(slow_ones) == 8 if is_slow else after_blocks[0] == 0.0

    def test_stopping_ends_the_thread(
        self, unretained: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(monkeypatch)
        self.going(unretained, memory)
        gate.wait()
        for _ in range(2):
            unretained._store.memory.stop()
            assert_no_threads(GIVING_BACK)
        unretained.release_backups()
        assert unretained._store.memory.bytes == 0


GOING = """
    import sys, time

    tuning = CuMemAllocator.tuning
    tuning.release_later_bytes, tuning.slab_bytes = PAGE, MIB
    tuning.before_releases_s = tuning.between_releases_s = BETWEEN_S
    reset_simulation()
    allocator, memory = fresh_allocator(retain_backups=False), Memory()
    contents = {}
    for _ in range(4):
        address = allocator.malloc(4 * PAGE, "weights")
        contents[address] = memory.fill_random(address, 4 * PAGE)
    memory.close()
    allocator.sleep()
    allocator.wake_up()
    going = allocator._store.memory.tier._releasing
    """


@pytest.mark.sim
class TestProcess:
    @pytest.mark.slow
    @pytest.mark.parametrize("between_s", [0, 1000])
    @pytest.mark.parametrize("rest", ["sys.exit(0)", "CuMemAllocator.instance = None; del allocator, going"])
    def test_exit_meanwhile(self, between_s: float, rest: str) -> None:
        assert_clean_exit(run_script(f"BETWEEN_S = {between_s}", GOING, rest))

    @pytest.mark.slow
    def test_exit_ends_it_in_an_orderly_way(self) -> None:
        """Before the interpreter is taken down, not by that."""
        assert_thread_ends_in_order("BETWEEN_S = 1000", GOING, thread="going._worker")

    @pytest.mark.slow
    @pytest.mark.parametrize("as_python_does", [False, True])
    def test_fork_meanwhile(self, as_python_does: bool) -> None:
        process = run_script(
            "BETWEEN_S = 0.5",
            GOING,
            f"""
            calls = (allocator.usage, allocator.sleep, allocator.release_backups)
            fork_beside(going._worker, allocator, *calls, as_python_does={as_python_does})
            assert going.bytes
            tuning.between_releases_s = 0
            while going._worker is not None:
                time.sleep(0.001)
            assert allocator._store.memory.bytes == 0
            for address, content in contents.items():
                assert memory.read(address, 4 * PAGE) == content
            memory.close()
            free_everything()
            """,
        )
        assert_clean_exit(process)
