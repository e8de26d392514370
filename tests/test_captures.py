"""The allocator beside graph captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support import AWAKE, PAGE, Cuda, Memory, hooks, in_thread

from cumem_sleep import CuMemAllocator, InvalidState, _core, sim

Beside = Callable[..., None]


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
    def beside_a_capture(self, cuda: Cuda, request: pytest.FixtureRequest) -> Beside:
        """Does some work while a stream is captured, on this thread or on another; the capture stays valid."""

        def beside(work: Callable[[], object], on_another_thread: bool, is_valid: bool = True) -> None:
            stream = cuda.stream()
            cuda.call("cuStreamBeginCapture_v2", stream, request.param)
            try:
                in_thread(work) if on_another_thread else work()
                assert not is_valid or cuda.capture_is_valid(stream)
            finally:
                result = cuda.end_capture(stream)
                cuda.call("cuStreamDestroy_v2", stream)
            assert not is_valid or result == 0

        return beside

    @pytest.mark.parametrize("on_another_thread", [False, True])
    def test_malloc_and_free_leave_it_valid(
        self, allocator: CuMemAllocator, memory: Memory, beside_a_capture: Beside, on_another_thread: bool
    ) -> None:
        """Whatever PyTorch allocates and frees while a graph is captured; one has a backup, and the device is full."""
        library = hooks()
        freed = [allocator.malloc(PAGE, "weights") for _ in range(3)]
        asleep = allocator.malloc(PAGE, "kv_cache")
        memory.fill_random(freed[0], PAGE)
        memory.close()
        allocator.sleep()
        allocator.wake_up("weights")
        eater = allocator.malloc(_core.memory_info(0)[0])

        def work() -> None:
            allocator.free(eater)
            library.cumem_sleep_free(freed[0], PAGE, 0, None)
            library.cumem_sleep_free(asleep, PAGE, 0, None)
            allocator.free(freed[1])
            new = library.cumem_sleep_malloc(PAGE, 0, None)
            assert new
            library.cumem_sleep_free(new, PAGE, 0, None)
            allocator.free(allocator.malloc(PAGE))

        beside_a_capture(work, on_another_thread)
        assert [segment.address for segment in _core.segments()] == freed[2:]
        allocator.free(freed[2])
        assert sim.stats().registered_bytes == 0

    @pytest.mark.parametrize("on_another_thread", [False, True])
    def test_refuses_a_sleep(
        self, allocator: CuMemAllocator, memory: Memory, beside_a_capture: Beside, on_another_thread: bool
    ) -> None:
        address = allocator.malloc(PAGE, "weights")
        content = memory.fill_random(address, PAGE)
        memory.close()

        def work() -> None:
            with pytest.raises(InvalidState, match=r"graph.*captur"):
                allocator.sleep()
            assert [segment.sleep for segment in _core.segments()] == [AWAKE]

        beside_a_capture(work, on_another_thread, is_valid=False)
        assert memory.read(address, PAGE) == content
        assert allocator.sleep().copied_bytes == PAGE
        allocator.wake_up()
        assert memory.read(address, PAGE) == content
