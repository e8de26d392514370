"""Several threads at once: operations, the hooks that PyTorch calls, graph captures, kernels in flight."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support import AWAKE, PAGE, SIMULATED, Cuda, Memory, around_copies, assert_clean_exit, hooks, in_thread, run_script

from cumem_sleep import CuMemAllocator, CumemSleepError, DriverError, InvalidState, _core, sim
from cumem_sleep.allocator import _forget_freed_backups

SLOW_COPIES_US = "20000"


def run_together(*works: Callable[[], object], timeout_s: float = 60) -> None:
    """Run all at once, each on a thread of its own; raises the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            start.wait(timeout_s)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


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

    def test_several_sleep_and_wake(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Whoever comes second finds nothing to do, or what the first has left; the bytes stay."""
        address = allocator.malloc(2 * PAGE, "weights")
        content = memory.fill_random(address, 2 * PAGE)

        def sleep_and_wake() -> None:
            for _ in range(8):
                allocator.sleep()
                allocator.wake_up()

        run_together(*[sleep_and_wake] * 3)
        allocator.wake_up()
        assert memory.read(address, 2 * PAGE) == content

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
        going = allocator.malloc(PAGE, "weights")
        staying = allocator.malloc(PAGE, "weights")
        content = memory.fill_random(staying, PAGE)
        if operation == "wake_up":
            allocator.sleep()
        list_segments = _core.segments

        def list_and_free() -> list[_core.Segment]:
            listed = list_segments()
            monkeypatch.undo()
            if through_hook:
                in_thread(lambda: hooks().cumem_sleep_free(going, PAGE, 0, None))
            else:
                in_thread(lambda: _core.free(going))
            return listed

        calls: dict[str, Callable[[], object]] = {
            "sleep": allocator.sleep,
            "wake_up": allocator.wake_up,
            "discard": lambda: allocator.discard({"weights", "kv_cache"}),
        }
        monkeypatch.setattr(_core, "segments", list_and_free)
        calls[operation]()
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
        assert allocator._store.host_bytes == (3 * PAGE if RETAIN or OPERATION == "sleep" else 0)
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


class TestHooks:
    def test_take_the_threads_own_tag(self, allocator: CuMemAllocator) -> None:
        library = hooks()
        allocator.usage()
        tags: dict[int, str] = {}

        def allocate(tag: str) -> None:
            with allocator.use_memory_pool(tag):
                for _ in range(5):
                    address = library.cumem_sleep_malloc(PAGE, 0, None)
                    assert address
                    tags[address] = tag

        run_together(*[lambda tag=f"tag{i}": allocate(tag) for i in range(6)])  # type: ignore[misc]
        assert {segment.address: segment.tag for segment in _core.segments()} == tags
        assert len(tags) == 30

    def test_from_many_threads(self, allocator: CuMemAllocator) -> None:
        library = hooks()
        allocator.usage()
        with allocator.use_memory_pool("weights"):
            kept = library.cumem_sleep_malloc(PAGE, 0, None)

        def churn() -> None:
            for _ in range(15):
                addresses = [library.cumem_sleep_malloc(PAGE, 0, None) for _ in range(3)]
                assert len(set(addresses)) == 3
                for address in addresses:
                    library.cumem_sleep_free(address, PAGE, 0, None)

        run_together(*[churn] * 4)
        assert [segment.address for segment in _core.segments()] == [kept]

    def test_return_null_when_memory_is_out(self, allocator: CuMemAllocator, capfd: pytest.CaptureFixture[str]) -> None:
        """PyTorch then frees its cache, asks again, and raises its own error: nothing is said here."""
        allocator.malloc(PAGE)
        free_bytes, _ = _core.memory_info(0)
        whole = (free_bytes // PAGE + 1) * PAGE
        assert hooks().cumem_sleep_malloc(whole, 0, None) is None
        assert len(_core.segments()) == 1
        assert _core.memory_info(0)[0] == free_bytes
        if _core.driver_is_simulated():
            assert sim.stats().reserved_bytes == PAGE
        assert capfd.readouterr() == ("", "")

    @pytest.mark.sim
    @pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"])
    def test_return_null_when_the_driver_refuses(
        self, allocator: CuMemAllocator, capfd: pytest.CaptureFixture[str], call: str
    ) -> None:
        allocator.malloc(PAGE)
        before = sim.stats()
        sim.fail(call, error="CUDA_ERROR_UNKNOWN")
        assert hooks().cumem_sleep_malloc(PAGE, 0, None) is None
        after = sim.stats()
        assert (after.live_handles, after.reserved_bytes) == (before.live_handles, before.reserved_bytes)
        error_text = capfd.readouterr().err
        assert call in error_text
        assert error_text.count("\n") == 1

    @pytest.mark.parametrize("device", [-1, 64])
    def test_return_null_for_a_device_that_is_not_there(
        self, allocator: CuMemAllocator, capfd: pytest.CaptureFixture[str], device: int
    ) -> None:
        allocator.malloc(PAGE)
        assert hooks().cumem_sleep_malloc(PAGE, device, None) is None
        assert f"device {device}" in capfd.readouterr().err

    def test_free_of_what_is_not_ours_says_so(
        self, allocator: CuMemAllocator, capfd: pytest.CaptureFixture[str]
    ) -> None:
        allocator.malloc(PAGE)
        hooks().cumem_sleep_free(12345, PAGE, 0, None)
        assert "0x3039" in capfd.readouterr().err
        hooks().cumem_sleep_free(None, 0, 0, None)
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize("on_main_thread", [True, False])
    def test_backups_of_freed_segments_go_soon(
        self, allocator: CuMemAllocator, memory: Memory, on_main_thread: bool
    ) -> None:
        library = hooks()
        with allocator.use_memory_pool("weights"):
            addresses = [library.cumem_sleep_malloc(PAGE, 0, None) for _ in range(3)]
        for address in addresses:
            memory.fill_random(address, PAGE)
        allocator.sleep()
        allocator.wake_up()
        assert allocator._store.host_bytes == 3 * PAGE
        for address in addresses[:2]:

            def free(address: int = address) -> None:
                library.cumem_sleep_free(address, PAGE, 0, None)

            free() if on_main_thread else in_thread(free)
        deadline = time.monotonic() + 5
        while allocator._store.host_bytes != PAGE and time.monotonic() < deadline:
            time.sleep(0.001)
        assert allocator._store.host_bytes == PAGE

    def test_python_learns_only_of_what_leaves_more_to_be_given_back(self, allocator: CuMemAllocator) -> None:
        """What it does then costs more than a driver call, and most frees leave nothing."""
        library = hooks()
        told: list[None] = []
        with_backup, without = [library.cumem_sleep_malloc(PAGE, 0, None) for _ in range(2)]
        allocator._store.take(_core.segments()[:1], [], {})
        _core.on_free(lambda: told.append(None))
        try:
            library.cumem_sleep_free(without, PAGE, 0, None)
            assert told == []
            library.cumem_sleep_free(with_backup, PAGE, 0, None)
            assert told == [None]
            if SIMULATED:
                refused = library.cumem_sleep_malloc(PAGE, 0, None)
                sim.fail("cuMemRelease", times=2, error="CUDA_ERROR_UNKNOWN")
                library.cumem_sleep_free(refused, PAGE, 0, None)
                assert told == [None] * 2
        finally:
            _core.on_free(_forget_freed_backups)
        allocator.usage()
        assert allocator._store.host_bytes == 0

    def test_a_backup_that_is_made_as_its_segment_is_freed(self, allocator: CuMemAllocator) -> None:
        """Too early for the hook to know of it, so who makes it notices."""
        address = allocator.malloc(PAGE)
        with _core.Pinned(_core.segments()) as pinned, allocator._lock.hold():
            hooks().cumem_sleep_free(address, PAGE, 0, None)
            allocator._store.take(pinned, [], {})
            allocator._store.prune_freed()
            assert allocator._store.host_bytes == 0


# Graph captures


@pytest.mark.sim
class TestCapture:
    @pytest.fixture
    def cuda(self, allocator: CuMemAllocator) -> Iterator[Cuda]:
        allocator.usage()
        allocator.free(allocator.malloc(PAGE))
        cuda = Cuda()
        cuda.enter()
        yield cuda
        cuda.leave()

    @pytest.fixture(params=[Cuda.GLOBAL, Cuda.THREAD_LOCAL, Cuda.RELAXED], ids=["global", "thread-local", "relaxed"])
    def mode(self, request: pytest.FixtureRequest) -> int:
        mode: int = request.param
        return mode

    @pytest.mark.parametrize("on_another_thread", [False, True])
    def test_malloc_and_free_leave_it_valid(
        self, allocator: CuMemAllocator, memory: Memory, cuda: Cuda, mode: int, on_another_thread: bool
    ) -> None:
        """Whatever PyTorch allocates and frees while a graph is captured, on this thread or on another."""
        library = hooks()
        freed = [allocator.malloc(PAGE, "weights") for _ in range(3)]
        asleep = allocator.malloc(PAGE, "kv_cache")
        memory.fill_random(freed[0], PAGE)
        allocator.discard("kv_cache")
        stream = cuda.stream()

        def work() -> None:
            library.cumem_sleep_free(freed[0], PAGE, 0, None)
            library.cumem_sleep_free(asleep, PAGE, 0, None)
            allocator.free(freed[1])
            new = library.cumem_sleep_malloc(PAGE, 0, None)
            assert new
            library.cumem_sleep_free(new, PAGE, 0, None)
            allocator.free(allocator.malloc(PAGE))

        cuda.call("cuStreamBeginCapture_v2", stream, mode)
        try:
            in_thread(work) if on_another_thread else work()
            assert cuda.capture_is_valid(stream)
        finally:
            result = cuda.end_capture(stream)
            cuda.call("cuStreamDestroy_v2", stream)
        assert result == 0
        assert [segment.address for segment in _core.segments()] == freed[2:]

    def test_free_on_a_full_device_leaves_it_valid(self, allocator: CuMemAllocator, cuda: Cuda, mode: int) -> None:
        allocator.malloc(PAGE)
        eater = allocator.malloc(_core.memory_info(0)[0])
        stream = cuda.stream()
        cuda.call("cuStreamBeginCapture_v2", stream, mode)
        try:
            allocator.free(eater)
            assert cuda.capture_is_valid(stream)
        finally:
            result = cuda.end_capture(stream)
            cuda.call("cuStreamDestroy_v2", stream)
        assert result == 0

    @pytest.mark.parametrize("on_another_thread", [False, True])
    def test_forgetting_backups_leaves_it_valid(
        self, allocator: CuMemAllocator, memory: Memory, cuda: Cuda, mode: int, on_another_thread: bool
    ) -> None:
        address = allocator.malloc(PAGE, "weights")
        memory.fill_random(address, PAGE)
        memory.close()
        allocator.sleep()
        allocator.wake_up()
        stream = cuda.stream()
        cuda.call("cuStreamBeginCapture_v2", stream, mode)
        try:
            in_thread(lambda: allocator.free(address)) if on_another_thread else allocator.free(address)
            assert cuda.capture_is_valid(stream)
        finally:
            result = cuda.end_capture(stream)
            cuda.call("cuStreamDestroy_v2", stream)
        assert result == 0
        assert sim.stats().registered_bytes == 0

    @pytest.mark.parametrize("on_another_thread", [False, True])
    def test_refuses_a_sleep(
        self, allocator: CuMemAllocator, memory: Memory, cuda: Cuda, mode: int, on_another_thread: bool
    ) -> None:
        address = allocator.malloc(PAGE, "weights")
        content = memory.fill_random(address, PAGE)
        memory.close()
        stream = cuda.stream()
        cuda.call("cuStreamBeginCapture_v2", stream, mode)
        try:
            with pytest.raises(InvalidState, match=r"graph.*captur"):
                in_thread(allocator.sleep) if on_another_thread else allocator.sleep()
            assert [segment.sleep for segment in _core.segments()] == [AWAKE]
        finally:
            cuda.end_capture(stream)
            cuda.call("cuStreamDestroy_v2", stream)
        assert memory.read(address, PAGE) == content
        assert allocator.sleep().copied_bytes == PAGE
        allocator.wake_up()
        assert memory.read(address, PAGE) == content


# Work in flight


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
        self._ending.wait(3)
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
    allocator._open()
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
def test_memory_that_is_being_reclaimed_is_not_pinned(
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
        with _core.Pinned([segment]):
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


# Kernels in flight


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
        assert started.wait(10)
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

    def test_at_discard(self) -> None:
        self.check(
            """
            allocator.discard("weights")
            cuda.call("cuStreamSynchronize", stream)
            allocator.wake_up()
            free_everything()
            """
        )


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
