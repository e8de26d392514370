"""Several threads at once: operations, the hooks that PyTorch calls, graph captures, kernels in flight."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import AWAKE, PAGE, Cuda, Memory, assert_clean_exit, hooks, in_thread, run_script

from cumem_sleep import CuMemAllocator, CumemSleepError, InvalidState, _core, sim

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

    def test_one_instance(self, allocator: CuMemAllocator) -> None:
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
    store = allocator._store

    def free_and_pin(block: _core.HostBlock, device: int) -> None:
        monkeypatch.undo()
        in_thread(lambda: hooks().cumem_sleep_free(going, PAGE, 0, None))
        pin(block, device)

    fill = store.fill

    def patched_fill(*arguments: Any, **more: Any) -> list[_core.Segment]:
        monkeypatch.setattr(_core.HostBlock, "pin", free_and_pin)
        return fill(*arguments, **more)

    monkeypatch.setattr(store, "fill", patched_fill)
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
