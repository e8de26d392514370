"""Several threads at once: operations, frees during copies, kernels in flight."""

from __future__ import annotations

import random
import threading
import time
import types
from collections.abc import Callable, Iterator

import pytest
from support import (
    AWAKE,
    PAGE,
    Cuda,
    Memory,
    around_copies,
    assert_clean_exit,
    hooks,
    in_thread,
    run_script,
    run_together,
)

from cumem_sleep import CuMemAllocator, CumemSleepError, DriverError, InvalidState, _core, sim

SLOW_COPIES_US = "300000"  # others have all the time that they need meanwhile


class TestOperations:
    @pytest.mark.slow
    def test_all_at_once(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Sleep and wake go on while other threads allocate, free and look; nobody sees an error."""
        contents = {}
        for tag in ("weights", "default", "weights"):
            address = allocator.malloc(PAGE, tag)
            contents[address] = memory.fill_random(address, PAGE)
        done = threading.Event()

        def sleep_and_wake() -> None:
            try:
                for turn in range(12):
                    allocator.sleep(1 if turn % 3 else None, offload_tags=None)
                    allocator.wake_up("weights" if turn % 2 else None)
                    allocator.wake_up()
            finally:
                done.set()

        def allocate_and_free() -> None:
            choice = random.Random(threading.get_ident())
            mine: list[int] = []
            while not done.is_set():
                if len(mine) < 3:
                    mine.append(allocator.malloc(PAGE, choice.choice(["weights", "kv_cache", "other"])))
                else:
                    allocator.free(mine.pop(choice.randrange(len(mine))))
            for address in mine:
                allocator.free(address)

        def look() -> None:
            while not done.is_set():
                for usage in allocator.usage().values():
                    assert 0 <= usage.mapped_bytes <= usage.bytes
                    assert 0 <= usage.asleep_segments <= usage.segments
                allocator.get_current_usage()
                time.sleep(0.001)

        run_together(sleep_and_wake, allocate_and_free, allocate_and_free, look)
        assert [segment.address for segment in _core.segments()] == list(contents)
        for address, content in contents.items():
            assert memory.read(address, PAGE) == content

    def test_one_of_two_frees_fails(self, allocator: CuMemAllocator) -> None:
        for _ in range(20):
            address = allocator.malloc(PAGE)
            errors: list[CumemSleepError] = []

            def free(address: int = address, errors: list[CumemSleepError] = errors) -> None:
                try:
                    allocator.free(address)
                except InvalidState as error:
                    errors.append(error)

            run_together(free, free)
            assert len(errors) == 1

    @pytest.mark.usefixtures("allocator")
    def test_one_instance(self) -> None:
        CuMemAllocator.instance = None
        made: list[CuMemAllocator] = []
        run_together(*[lambda: made.append(CuMemAllocator.get_instance())] * 4)
        assert len({id(one) for one in made}) == 1

    @pytest.mark.parametrize("operation", ["sleep", "wake_up", "discard"])
    @pytest.mark.parametrize("through_hook", [False, True])
    def test_free_just_before_an_operation_takes_hold(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        operation: str,
        through_hook: bool,
    ) -> None:
        """A segment that goes while the operation draws up its list is no error, and no use of freed memory."""
        self.free_at(1, allocator, memory, monkeypatch, operation, through_hook=through_hook)

    @pytest.mark.sim
    @pytest.mark.parametrize("listing", [1, 2])
    @pytest.mark.parametrize("through_hook", [False, True])
    def test_free_just_before_a_wake_beside_pytorch_takes_hold(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        listing: int,
        through_hook: bool,
    ) -> None:
        """Such a wake draws up its list twice: to see whether it fits, and to wake."""
        pools = types.SimpleNamespace(is_capturing=lambda: False, trim=lambda: None)
        monkeypatch.setattr(allocator._pools, "found", pools)
        self.free_at(listing, allocator, memory, monkeypatch, "wake_up", through_hook=through_hook)

    @staticmethod
    def free_at(
        listing: int,
        allocator: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        operation: str,
        *,
        through_hook: bool,
    ) -> None:
        """Free one of two segments when the operation lists segments for that time."""
        going = allocator.malloc(PAGE, "weights")
        staying = allocator.malloc(PAGE, "weights")
        content = memory.fill_random(staying, PAGE)
        if operation == "wake_up":
            allocator.sleep()
        list_segments, listings = _core.segments_in, 0

        def list_and_free(own_plan: bool | None, tags: set[str] | None) -> list[_core.Segment]:
            nonlocal listings
            listed = list_segments(own_plan, tags)
            listings += 1
            if listings == listing and through_hook:
                in_thread(lambda: hooks().cumem_sleep_free(going, PAGE, 0, None))
            elif listings == listing:
                in_thread(lambda: _core.free(going))
            return listed

        calls: dict[str, Callable[[], object]] = {
            "sleep": allocator.sleep,
            "wake_up": allocator.wake_up,
            "discard": lambda: allocator.discard({"weights", "kv_cache"}),
        }
        with monkeypatch.context() as patch:
            patch.setattr(_core, "segments_in", list_and_free)
            calls[operation]()
        assert listings >= listing
        allocator.wake_up()
        assert [segment.address for segment in _core.segments()] == [staying]
        if operation != "discard":
            assert memory.read(staying, PAGE) == content


@pytest.mark.sim
class TestFreeDuringCopies:
    SCRIPT = """
        import sys, threading, time

        reset_simulation()
        allocator, memory = fresh_allocator(verify="off", retain_backups=RETAIN), Memory()
        contents = {}
        for tag in ("weights", "default", "lora", "other"):
            address = allocator.malloc(PAGE, tag)
            contents[address] = memory.fill_random(address, PAGE)
        memory.close()
        if OPERATION == "wake_up":
            allocator.sleep()
        sim.reset()
        copy = "cuMemcpyHtoDAsync" if OPERATION == "wake_up" else "cuMemcpyDtoHAsync"
        library = hooks()

        def free_while_copying(address):
            while sim.stats().calls[copy] == 0:
                time.sleep(0.0005)
            assert working.is_set()
            library.cumem_sleep_free(address, PAGE, 0, None) if THROUGH_HOOK else allocator.free(address)
            assert working.is_set(), "the free waited for the copies: nothing was shown"

        working = threading.Event()
        working.set()
        def operate():
            getattr(allocator, OPERATION)()
            working.clear()

        freed = list(contents)[1]
        del contents[freed]
        if OPERATE_ON_MAIN_THREAD:
            helper = threading.Thread(target=free_while_copying, args=[freed])
            helper.start()
            operate()
        else:
            helper = threading.Thread(target=operate)
            helper.start()
            free_while_copying(freed)
        helper.join()
        _core.synchronize(0)
        assert freed not in [segment.address for segment in _core.segments()]
        assert sim.stats().reserved_bytes == 3 * PAGE, "the freed segment is still there"
        assert allocator._store.memory.bytes == (3 * PAGE if RETAIN or OPERATION == "sleep" else 0)
        allocator.wake_up()
        for address, content in contents.items():
            assert memory.read(address, PAGE) == content
        memory.close()
        free_everything()
        """

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("operation", "through_hook", "on_main_thread"),
        [("sleep", True, True), ("sleep", False, False), ("wake_up", True, False), ("wake_up", False, True)],
    )
    def test_is_deferred(self, operation: str, through_hook: bool, on_main_thread: bool) -> None:
        constants = f"OPERATION, THROUGH_HOOK, OPERATE_ON_MAIN_THREAD, RETAIN = {operation!r}, {through_hook}, "
        constants += f"{on_main_thread}, {not through_hook}\n"
        assert_clean_exit(run_script(constants, self.SCRIPT, CUMEM_SLEEP_SIM_COPY_DELAY_US=SLOW_COPIES_US))


@pytest.mark.sim
def test_pending_work_does_not_disturb_the_operation_that_it_interrupts(
    allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs what follows a freed segment on the main thread, in the middle of whatever runs there."""
    going, *staying = [allocator.malloc(PAGE, tag) for tag in ("weights", "weights", "default")]
    contents = {address: memory.fill_random(address, PAGE) for address in staying}
    pin = _core.HostBlock.pin

    def free_and_pin(block: _core.HostBlock, device: int) -> None:
        monkeypatch.undo()
        in_thread(lambda: hooks().cumem_sleep_free(going, PAGE, 0, None))
        pin(block, device)

    around_copies(monkeypatch, before=lambda: monkeypatch.setattr(_core.HostBlock, "pin", free_and_pin))
    allocator.sleep()
    assert {segment.address for segment in _core.segments()} == set(staying)
    allocator.wake_up()
    for address, content in contents.items():
        assert memory.read(address, PAGE) == content


class Running:
    """Work on device 0 of the simulated driver that goes on until it is ended, or for too long."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._started, self._ending, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._work = Cuda.HostFunction(self._run)
        self._stream = cuda.stream()
        cuda.call("cuLaunchHostFunc", self._stream, self._work, None)
        assert self._started.wait(30)

    def _run(self, _: object) -> None:
        self._started.set()
        self._ending.wait(20)
        self.ended.set()

    def end(self) -> None:
        self._ending.set()

    def close(self) -> None:
        self.end()
        self._cuda.call("cuStreamSynchronize", self._stream)
        self._cuda.call("cuStreamDestroy_v2", self._stream)


@pytest.fixture
def running(allocator: CuMemAllocator) -> Iterator[Callable[[], Running]]:
    """Begins it."""
    allocator._operations.open()
    cuda = Cuda()
    cuda.enter()
    begun: list[Running] = []

    def begin() -> Running:
        begun.append(Running(cuda))
        return begun[-1]

    yield begin
    for work in begun:
        work.close()
    cuda.leave()


@pytest.mark.sim
@pytest.mark.parametrize("call", ["free", "free through hook", "free of all", "usage", "release_waiter"])
def test_work_of_one_device_does_not_hold_up_another(
    allocator: CuMemAllocator, running: Callable[[], Running], call: str
) -> None:
    """Both devices have a page that makes waiting cheap, and giving it back waits as well."""
    sim.configure(devices=2)
    library = hooks()
    freed, _ = [allocator.malloc(PAGE) for _ in range(2)]
    others = [allocator.malloc(PAGE, device=1) for _ in range(3)]
    library.cumem_sleep_free(freed, PAGE, 0, None)
    library.cumem_sleep_free(others.pop(), PAGE, 1, None)
    work = running()
    calls: dict[str, Callable[[], object]] = {
        "free": lambda: allocator.free(others[0]),
        "free through hook": lambda: library.cumem_sleep_free(others[0], PAGE, 1, None),
        "free of all": lambda: [library.cumem_sleep_free(other, PAGE, 1, None) for other in others],
        "usage": allocator.usage,
        "release_waiter": lambda: _core.release_waiter(1),
    }
    in_thread(calls[call])
    assert not work.ended.is_set(), "it waited"


@pytest.mark.sim
def test_memory_that_is_being_reclaimed_is_not_held(
    allocator: CuMemAllocator, memory: Memory, running: Callable[[], Running]
) -> None:
    """An allocation that finds no room takes what the driver refused to take before: no wake may map it meanwhile."""
    address = allocator.malloc(PAGE, "weights")
    content = memory.fill_random(address, PAGE)
    allocator.sleep()
    sim.fail("cuMemcpyHtoDAsync", error="CUDA_ERROR_UNKNOWN")
    sim.fail("cuMemUnmap", times=2, error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(DriverError):
        allocator.wake_up()
    (segment,) = _core.segments()
    assert segment.has_memory, "nothing was refused"
    free_bytes, _ = _core.memory_info(0)
    work = running()
    waits = sim.stats().calls["cuMemFree"]
    made: list[int] = []
    seen: list[bool] = []
    malloc = threading.Thread(
        target=lambda: made.append(_core.Allocation(free_bytes + PAGE, "eater", 0).handed_out), daemon=True
    )
    malloc.start()
    while sim.stats().calls["cuMemFree"] == waits:
        time.sleep(0.0005)

    def pin() -> None:
        with _core.HeldSegments([segment]):
            seen.append(segment.has_memory)

    pinning = threading.Thread(target=pin, daemon=True)
    pinning.start()
    pinning.join(0.1)
    assert seen == []
    work.end()
    for thread in (malloc, pinning):
        thread.join(30)
    assert seen == [False]
    _core.free(made[0])
    allocator.wake_up()
    assert memory.read(address, PAGE) == content


@pytest.mark.sim
class TestKernelInFlight:
    """A fault would end the process, so each runs in one of its own."""

    SCRIPT = """
        import ctypes, threading, time

        reset_simulation()
        allocator, memory = fresh_allocator(), Memory()
        address = allocator.malloc(PAGE, "weights")
        memory.fill_random(address, PAGE)
        memory.close()
        if FULL_DEVICE:
            allocator.malloc(_core.memory_info(0)[0], "eater")
        cuda = Cuda()
        cuda.enter()
        stream = cuda.stream()
        started = threading.Event()

        @Cuda.HostFunction
        def kernel(_):
            for part in range(16):
                time.sleep(0.005)
                ctypes.memset(address + part * (PAGE // 16), part + 1, PAGE // 16)
                started.set()

        cuda.call("cuLaunchHostFunc", stream, kernel, None)
        assert started.wait(30)
        expected = b"".join(bytes([part + 1]) * (PAGE // 16) for part in range(16))
        """

    def check(self, rest: str, full_device: bool = False) -> None:
        assert_clean_exit(run_script(f"FULL_DEVICE = {full_device}\n", self.SCRIPT, rest))

    @pytest.mark.slow
    @pytest.mark.parametrize("through_hook", [False, True])
    @pytest.mark.parametrize("full_device", [False, True])
    def test_at_free(self, through_hook: bool, full_device: bool) -> None:
        call = "hooks().cumem_sleep_free(address, PAGE, 0, None)" if through_hook else "allocator.free(address)"
        self.check(f"{call}\ncuda.call('cuStreamSynchronize', stream)\nfree_everything()\n", full_device)

    @pytest.mark.slow
    def test_at_sleep(self) -> None:
        self.check(
            """
            allocator.sleep()
            cuda.call("cuStreamSynchronize", stream)
            allocator.wake_up()
            assert memory.read(address, PAGE) == expected
            memory.close()
            free_everything()
            """
        )

    @pytest.mark.slow
    def test_at_discard(self) -> None:
        self.check(
            """
            allocator.discard("weights")
            cuda.call("cuStreamSynchronize", stream)
            allocator.wake_up()
            free_everything()
            """
        )


@pytest.mark.slow
@pytest.mark.sim
def test_looking_beside_hooks(allocator: CuMemAllocator) -> None:
    """Hooks take no lock of Python's, so what is looked at meanwhile goes (for ThreadSanitizer above all)."""
    library = hooks()
    stopped = threading.Event()

    def allocate_and_free() -> None:
        while not stopped.is_set():
            addresses = [library.cumem_sleep_malloc(PAGE, 0, None) for _ in range(4)]
            for address in addresses:
                library.cumem_sleep_free(address, PAGE, 0, None)

    threads = [threading.Thread(target=allocate_and_free, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(100):
            for segment in _core.segments():
                assert segment.address % PAGE == 0
                assert segment.has_memory in (False, True)
                assert segment.sleep == AWAKE
            allocator.usage()
            if turn % 25 == 0:
                allocator.sleep()
                allocator.wake_up()
    finally:
        stopped.set()
        for thread in threads:
            thread.join(30)
