"""Where host memory is short, an operation is refused or undone."""

from __future__ import annotations

import gc
import os

import pytest
from support import MIB, PAGE, assert_clean_exit, patch_prefault, run_script
from world import World, awake_with_backups

from cumem_sleep import OutOfHostMemory, _core, host_facts, sim
from cumem_sleep.digest.digester import DigestRun

pytestmark = pytest.mark.sim


class TestHostMemoryIsShort:
    def _check_refused(self, world: World, limit: str) -> OutOfHostMemory:
        before, held = world.state(), world.held()
        with pytest.raises(OutOfHostMemory) as raised:
            world.allocator.sleep()
        assert raised.value.limit == limit
        assert isinstance(raised.value, MemoryError)
        assert limit in str(raised.value)
        assert world.state() == before
        world.check_bytes()
        error = raised.value.with_traceback(None)
        del raised
        gc.collect()
        assert world.held() == held
        return error

    def _check_works(self, world: World) -> None:
        world.allocator.sleep()
        world.note_drops()
        world.wake()

    @pytest.mark.parametrize(
        ("function", "limit"), [("cgroup_available_bytes", "cgroup"), ("mem_available_bytes", "MemAvailable")]
    )
    def test_limits(self, world: World, monkeypatch: pytest.MonkeyPatch, function: str, limit: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(host_facts, function, lambda **_: 2 * PAGE - 1)
            error = self._check_refused(world, limit)
            assert (error.needed_bytes, error.available_bytes) == (2 * PAGE, 2 * PAGE - 1)
        self._check_works(world)

    def test_limits_that_leave_just_enough(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_facts, "cgroup_available_bytes", lambda **_: 2 * PAGE)
        monkeypatch.setattr(host_facts, "mem_available_bytes", lambda enough=None: 2 * PAGE)
        self._check_works(world)

    def test_no_limit_applies_to_clean_segments(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        awake_with_backups(world)
        monkeypatch.setattr(host_facts, "cgroup_available_bytes", lambda **_: 0)
        assert world.allocator.sleep().clean_bytes == 2 * PAGE
        world.wake()

    def test_register(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DigestRun, "start", lambda run, segments: None)  # digests register memory too
        for position in range(3):
            sim.fail("cuMemHostRegister", after=position)
            error = self._check_refused(world, "cuMemHostRegister")
            assert error.needed_bytes == MIB
            sim.reset()
        monkeypatch.undo()
        self._check_works(world)

    def test_prefault(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel refuses pages, in one of the threads that prefault them."""
        prefault, prefaulted = _core.HostBlock.prefault, []

        def refuse_last(block: _core.HostBlock, offset: int, nbytes: int) -> None:
            prefaulted.append(block)
            if len(prefaulted) == 3:
                raise OutOfHostMemory(nbytes, 0, "madvise")
            prefault(block, offset, nbytes)

        monkeypatch.setattr(world.allocator._digester, "of", lambda segments: {})
        with monkeypatch.context() as patch:
            patch_prefault(patch, refuse_last)
            before = world.state()
            with pytest.raises(OutOfHostMemory, match="madvise"):
                world.allocator.sleep()
            prefaulted.clear()
            assert world.state() == before
        world.check_bytes()
        monkeypatch.undo()
        self._check_works(world)

    @pytest.mark.slow
    @pytest.mark.skipif(
        "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer needs address space without limit"
    )
    @pytest.mark.parametrize("verify", ["off", "wake"])
    def test_address_space(self, verify: str) -> None:
        process = run_script(
            f"""
            import resource
            reset_simulation()
            allocator = fresh_allocator(verify={verify!r}, retain_backups=False)
            memory = Memory()
            contents = {{}}
            for tag in ("weights", "default"):
                address = allocator.malloc(32 * PAGE, tag)
                contents[address] = memory.fill_random(address, 32 * PAGE)
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 96 * MIB, resource.RLIM_INFINITY))
            with raises(OutOfHostMemory, "needed 16.00 MiB", "limit: mmap"):
                allocator.sleep()
            assert {{segment.sleep for segment in _core.segments()}} == {{AWAKE}}
            assert allocator._store.memory.bytes == 0
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            allocator.sleep()
            allocator.wake_up()
            for address, content in contents.items():
                assert memory.read(address, 32 * PAGE) == content
            memory.close()
            free_everything()
            """
        )
        assert_clean_exit(process)
