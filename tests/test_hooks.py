"""The hooks that PyTorch's caching allocator calls, from any thread."""

from __future__ import annotations

import time

import pytest
from support import HANGS_S, PAGE, SIMULATED, Memory, hooks, in_thread, run_together

from cumem_sleep import CuMemAllocator, _core, sim
from cumem_sleep.allocator import _forget_freed_backups


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
        assert allocator._store.memory.bytes == 3 * PAGE
        for address in addresses[:2]:

            def free(address: int = address) -> None:
                library.cumem_sleep_free(address, PAGE, 0, None)

            free() if on_main_thread else in_thread(free)
        deadline = time.monotonic() + HANGS_S
        while allocator._store.memory.bytes != PAGE and time.monotonic() < deadline:
            time.sleep(0.001)
        assert allocator._store.memory.bytes == PAGE

    def test_python_learns_only_of_what_leaves_more_to_be_given_back(self, allocator: CuMemAllocator) -> None:
        """What it does then costs more than a driver call, and most frees leave nothing."""
        library = hooks()
        told: list[None] = []
        with_backup, without = [library.cumem_sleep_malloc(PAGE, 0, None) for _ in range(2)]
        allocator._store.memory.reserve(_core.segments()[:1], [], {})
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
        assert allocator._store.memory.bytes == 0

    def test_a_backup_that_is_made_as_its_segment_is_freed(self, allocator: CuMemAllocator) -> None:
        """Too early for the hook to know of it, so who makes it notices."""
        address = allocator.malloc(PAGE)
        with _core.HeldSegments(_core.segments()) as held, allocator._lock.hold():
            hooks().cumem_sleep_free(address, PAGE, 0, None)
            allocator._store.memory.reserve(held, [], {})
            allocator._store.catalogue.prune_freed()
            assert allocator._store.memory.bytes == 0
