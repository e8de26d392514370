"""Sleep and wake where device memory is short, and of two devices."""

from __future__ import annotations

import pytest
from filled import fill, take_all_but
from support import PAGE, SIMULATED, Cuda, Memory

from cumem_sleep import CuMemAllocator, DriverError, OutOfDeviceMemory, _core, sim


class TestDeviceMemoryIsShort:
    @pytest.mark.slow
    def test_at_wake(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Somebody else took the memory meanwhile: an error, all asleep, and the same call works later."""
        filled = fill(allocator, memory, "weights", "default", "kv_cache", nbytes=2 * PAGE)
        allocator.sleep()
        eaters = take_all_but(3 * PAGE, allocator)
        left, _ = _core.memory_info(0)
        for _ in range(2):
            with pytest.raises(OutOfDeviceMemory) as raised:
                allocator.wake_up()
            assert (raised.value.needed_bytes, raised.value.free_bytes) == (6 * PAGE, left)
            assert "3 sleeping segments" in str(raised.value)
            assert _core.memory_info(0)[0] == left
            asleep = {tag: usage.asleep_segments for tag, usage in allocator.usage().items()}
            assert asleep == {"weights": 1, "default": 1, "kv_cache": 1, "eater": 0}
        for address in eaters:
            allocator.free(address)
        allocator.wake_up()
        for tag in ("weights", "default"):
            address, content = filled[tag]
            assert memory.read(address, 2 * PAGE) == content

    def test_a_selective_wake_fits_where_all_does_not(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address = allocator.malloc(16 * PAGE, "weights")
        content = memory.fill_random(address, PAGE)
        allocator.malloc(64 * PAGE, "kv_cache")
        allocator.sleep()
        take_all_but(32 * PAGE, allocator)
        with pytest.raises(OutOfDeviceMemory):
            allocator.wake_up()
        assert allocator.wake_up("weights").restored_bytes == 16 * PAGE
        assert memory.read(address, PAGE) == content

    def test_free_on_a_full_device(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Waiting for the device must not need memory of it."""
        address, content = fill(allocator, memory, "weights")["weights"]
        for eater in take_all_but(0, allocator):
            allocator.free(eater)
        assert allocator.get_current_usage() == PAGE
        assert memory.read(address, PAGE) == content


@pytest.fixture
def second_device(allocator: CuMemAllocator) -> None:
    """A second device; on a real host, only if there is one."""
    if SIMULATED:
        sim.configure(devices=2)
    else:
        _core.open_driver("libcuda.so.1")
        if _core.device_count() < 2:
            pytest.skip("this host has one GPU")


@pytest.mark.usefixtures("second_device")
class TestTwoDevices:
    @pytest.mark.sim
    def test_access_of_peers_outlives_sleep(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """Whoever could reach the memory, and how, can after it woke; also after a sleep that failed."""
        shared, own = (allocator.malloc(PAGE, "weights") for _ in range(2))
        cuda = Cuda()
        content = memory.fill_random(shared, PAGE)
        cuda.set_access(shared, PAGE, device=1, flags=Cuda.READ)
        for _ in range(2):
            allocator.sleep()
            allocator.wake_up()
            assert [cuda.access(address, device=1) for address in (shared, own)] == [Cuda.READ, Cuda.NO_ACCESS]
        sim.fail("cuMemUnmap", after=1, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError):
            allocator.sleep()
        assert [cuda.access(address, device=1) for address in (shared, own)] == [Cuda.READ, Cuda.NO_ACCESS]
        assert memory.read(shared, PAGE, device=1) == content
        memory.close()

    def test_too_little_memory_on_one_wakes_neither(self, allocator: CuMemAllocator, memory: Memory) -> None:
        contents = {}
        for device in (0, 1):
            address = allocator.malloc(2 * PAGE, "weights", device)
            contents[address, device] = memory.fill_random(address, 2 * PAGE, device)
        allocator.sleep()
        eaters = take_all_but(PAGE, allocator, device=1)
        with pytest.raises(OutOfDeviceMemory) as raised:
            allocator.wake_up()
        assert (raised.value.device, raised.value.needed_bytes) == (1, 2 * PAGE)
        assert allocator.usage()["weights"].mapped_bytes == 0
        for eater in eaters:
            allocator.free(eater)
        allocator.wake_up()
        for (address, device), content in contents.items():
            assert memory.read(address, 2 * PAGE, device) == content
        memory.close()
