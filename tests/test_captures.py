"""The allocator beside graph captures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import AWAKE, PAGE, Cuda, Memory, hooks, in_thread

from cumem_sleep import CuMemAllocator, InvalidState, _core, sim


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
