"""Whatever driver call fails, the state stays whole."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest
from support import AWAKE, PAGE, assert_clean_exit, free_everything, is_accessible, run_script
from world import ALL_CALLS_OF, PHASES, Phase, World, check_every_call, phases

from cumem_sleep import CumemSleepError, DriverError, InvalidState, OutOfDeviceMemory, _core, sim

pytestmark = pytest.mark.sim

MANY = 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("error_name", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_every_driver_call_may_fail_once(world: World, phase: Phase, error_name: str) -> None:
    check_every_call(world, phase, error_name, error_name == "CUDA_ERROR_UNKNOWN" and phase.name in ALL_CALLS_OF)


@pytest.mark.slow
def test_every_driver_call_of_a_wake_of_two_devices_may_fail_once(world: World) -> None:
    free_everything()
    world.__init__(devices=2)  # type: ignore[misc]
    (phase,) = phases("wake of all")
    check_every_call(world, phase, "CUDA_ERROR_UNKNOWN", False)


class TestPersistentFailures:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "call",
        [
            "cuMemUnmap",
            "cuMemRelease",
            "cuMemHostRegister",
            "cuMemHostUnregister",
            "cuMemMap",
            "cuMemCreate",
            "cuMemSetAccess",
            "cuMemAddressFree",
            "cuStreamCreate",
            "cuStreamDestroy",
            "cuStreamSynchronize",
            "cuCtxSynchronize",
            "cuMemcpyDtoHAsync",
            "cuMemcpyHtoDAsync",
            "cuMemFree",
            "cuMemAlloc",
        ],
    )
    @pytest.mark.parametrize("error_name", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"])
    def test_all_works_again_afterwards(self, world: World, call: str, error_name: str) -> None:
        """Through a whole cycle with one call out of order, whatever raises; then all is whole, and nothing is lost."""
        allocator = world.allocator
        operations: list[Callable[[], object]] = [
            lambda: allocator.sleep(offload_tags=World.TAGS),
            lambda: allocator.wake_up("weights"),
            allocator.wake_up,
            allocator.usage,
            allocator.release_backups,
            lambda: allocator.malloc(PAGE, "default"),
            lambda: allocator.free(extra),
        ]
        for first in range(len(operations)):
            extra = allocator.malloc(PAGE, "default")
            world.define()
            sim.fail(call, error=error_name, times=MANY)
            for operation in operations[first:]:
                with contextlib.suppress(CumemSleepError):
                    operation()
            sim.reset()
            world.wake()
            for segment in world.segments[len(World.TAGS) :]:
                allocator.free(segment.address)

    def test_memory_that_the_driver_keeps_is_given_back_later(self, world: World) -> None:
        """A sleep that cannot release is honest about it, and the next operation tries again."""
        sim.fail("cuMemRelease", times=MANY, error="CUDA_ERROR_UNKNOWN")
        report = world.allocator.sleep()
        assert report.freed_bytes == 0
        assert {usage.mapped_bytes for usage in world.allocator.usage().values()} == {PAGE}
        sim.reset()
        assert {usage.mapped_bytes for usage in world.allocator.usage().values()} == {0}
        assert sim.stats().live_handles == 0
        world.wake()

    def test_malloc_takes_memory_that_the_driver_kept(self, world: World) -> None:
        """Before it says that memory is out, it asks the driver once more to release what sleeps."""
        sim.fail("cuMemRelease", times=MANY, error="CUDA_ERROR_UNKNOWN")
        world.allocator.sleep()
        sim.reset()
        free_bytes, _ = _core.memory_info(0)
        eater = world.allocator.malloc(free_bytes + 3 * PAGE, "eater")
        world.allocator.free(eater)
        world.wake()

    def test_wake_uses_memory_that_the_driver_kept(self, world: World) -> None:
        sim.fail("cuMemRelease", times=MANY, error="CUDA_ERROR_UNKNOWN")
        world.allocator.sleep()
        assert world.allocator.wake_up().mapped_bytes == 3 * PAGE
        sim.reset()
        world.wake()
        assert sim.stats().live_handles == 3

    @pytest.mark.parametrize("poison", [False, True])
    def test_a_failed_sleep_that_cannot_be_undone_loses_nothing(self, world: World, poison: bool) -> None:
        """What cannot be mapped again counts as asleep; its bytes come back with the next wake, backed up or not."""
        if poison:
            free_everything()
            world.__init__(poison=True)  # type: ignore[misc]
        sim.fail("cuMemUnmap", after=2, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemMap", times=MANY, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemUnmap"):
            world.allocator.sleep(offload_tags=())
        sim.reset()
        assert sum(segment.sleep != AWAKE for segment in world.segments) == 2
        assert all(segment.has_memory for segment in world.segments)
        world.allocator.wake_up()
        world.check_bytes()

    def test_memory_that_several_wakes_could_not_release_is_given_back_at_once(self, world: World) -> None:
        """Level 3 asks once whether the driver refuses something, and is refused if it does."""
        world.allocator.sleep()
        world.note_drops()
        sim.fail("cuMemSetAccess", times=MANY, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemRelease", times=MANY, error="CUDA_ERROR_UNKNOWN")
        for _ in range(3):
            with pytest.raises(DriverError, match="cuMemSetAccess"):
                world.allocator.wake_up()
        sim.reset()
        assert _core.reclaim() == 0
        assert sim.stats().live_handles == 0
        world.wake()

    @pytest.mark.slow
    @pytest.mark.parametrize("phase", ["first sleep", "sleep at level 2", "wake of all", "wake after level 2"])
    @pytest.mark.parametrize("refused", ["cuMemMap", "cuMemSetAccess"])
    def test_refusals_in_a_row(self, world: World, phase: str, refused: str) -> None:
        """Up to four of unmapping, beside up to four of mapping, at every position: nothing awake is out of reach."""
        (operation,) = phases(phase)
        positions = range(len(World.TAGS))
        for first, times, map_first, map_times in itertools.product(positions, (1, 3, 4), positions, (1, 2, 3, 4)):
            operation.prepare(world)
            sim.reset()
            sim.fail("cuMemUnmap", after=first, times=times, error="CUDA_ERROR_UNKNOWN")
            sim.fail(refused, after=map_first, times=map_times, error="CUDA_ERROR_UNKNOWN")
            was_asleep = world.segments[0].sleep != AWAKE
            error = None
            try:
                operation.operate(world)
            except CumemSleepError as raised:
                error = raised
            sim.reset()
            if was_asleep and error is not None:
                assert all(segment.sleep != AWAKE for segment in world.segments), "a failed wake"
            elif error is not None:
                world.check_all_is_told(error)
                world.allocator.wake_up()
                assert all(segment.sleep == AWAKE for segment in world.segments)
                world.check_bytes()  # of what was to be dropped as well
            world.wake()

    def test_bytes_that_a_failed_sleep_kept_outlast_a_failed_wake(self, world: World) -> None:
        """They were not backed up, so only their memory has them: a wake that is undone must not give it back."""
        sim.fail("cuMemUnmap", after=2, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemMap", times=4, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemUnmap") as raised:
            world.allocator.sleep(offload_tags=())
        assert len(raised.value.asleep_segments) == 2
        sim.reset()
        for call in ("cuMemMap", "cuMemSetAccess"):
            sim.fail(call, after=1, error="CUDA_ERROR_UNKNOWN")
            with pytest.raises(DriverError, match=call):
                world.allocator.wake_up()
        world.allocator.wake_up()
        world.check_bytes()

    @pytest.mark.parametrize("offload_tags", [(), World.TAGS])
    def test_a_sleep_that_is_asked_for_again_releases_what_it_left(
        self, world: World, offload_tags: tuple[str, ...]
    ) -> None:
        sim.fail("cuMemUnmap", after=2, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemMap", times=4, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemUnmap"):
            world.allocator.sleep(offload_tags=offload_tags)
        assert sim.stats().live_handles == 3
        world.allocator.sleep(offload_tags=offload_tags)
        assert sim.stats().live_handles == 0
        world.wake()

    def test_a_wake_sets_access_that_one_before_it_could_not(self, world: World) -> None:
        """What that mapped is mapped still, since the driver refuses to unmap anything."""
        world.allocator.sleep()
        world.note_drops()
        sim.fail("cuMemUnmap", times=MANY, error="CUDA_ERROR_UNKNOWN")
        sim.fail("cuMemSetAccess", after=1, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemSetAccess"):
            world.allocator.wake_up()
        assert all(segment.sleep != AWAKE for segment in world.segments)
        world.allocator.wake_up()
        assert all(is_accessible(segment.address) for segment in world.segments)
        world.check_bytes()

    @pytest.mark.slow
    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_full_device_and_a_failed_wait(self, times: int) -> None:
        """On a full device freeing waits by way of host memory; if that fails, nothing of it may stay."""
        process = run_script(
            f"TIMES = {times}",
            """
            reset_simulation()
            allocator = fresh_allocator()
            allocator.malloc(PAGE)
            eater = allocator.malloc(_core.memory_info(0)[0])
            sim.fail("cuMemHostUnregister", error="CUDA_ERROR_UNKNOWN", times=TIMES)
            try:
                allocator.free(eater)
            except DriverError:
                allocator.free(eater)
            assert sim.stats().registered_bytes == 0
            free_everything()
            """,
        )
        assert_clean_exit(process)


class TestCopiesInFlight:
    """When a later step fails, earlier copies still run: no memory of theirs may be taken away before they end."""

    SCRIPT = """
        reset_simulation()
        allocator, memory = fresh_allocator(verify="off", retain_backups=False), Memory()
        contents = {}
        for tag in ("weights", "default", "lora"):
            address = allocator.malloc(PAGE, tag)
            contents[address] = memory.fill_random(address, PAGE)
        memory.close()
        if OPERATION == "wake_up":
            allocator.sleep()
        sim.fail(CALL, after=AFTER, error="CUDA_ERROR_UNKNOWN", times=TIMES)
        try:
            getattr(allocator, OPERATION)()
        except DriverError as error:
            failed = error  # and with it, all that its frames hold
        assert failed.call == CALL
        assert len({segment.sleep for segment in _core.segments()}) == 1
        _core.synchronize(0)  # fails if work on the device found its memory gone
        allocator.wake_up()
        for address, content in contents.items():
            assert memory.read(address, PAGE) == content
        memory.close()
        del failed
        free_everything()
        """

    def check(self, operation: str, call: str, after: int = 2, times: int = 1) -> None:
        constants = f"OPERATION, CALL, AFTER, TIMES = {operation!r}, {call!r}, {after}, {times}\n"
        assert_clean_exit(run_script(constants, self.SCRIPT, CUMEM_SLEEP_SIM_COPY_DELAY_US="20000"))

    @pytest.mark.slow
    @pytest.mark.parametrize("call", ["cuMemMap", "cuMemCreate", "cuMemSetAccess", "cuMemcpyHtoDAsync"])
    def test_at_wake(self, call: str) -> None:
        """The first three in the thread that maps ahead, while what it mapped before is being filled."""
        self.check("wake_up", call)

    @pytest.mark.slow
    @pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemcpyDtoHAsync"])
    def test_at_sleep(self, call: str) -> None:
        self.check("sleep", call)

    # Three times: also while the stream is given back.
    @pytest.mark.slow
    @pytest.mark.parametrize(("operation", "times"), [("sleep", 1), ("sleep", 3), ("wake_up", 1), ("wake_up", 3)])
    def test_waiting_for_them_fails(self, operation: str, times: int) -> None:
        self.check(operation, "cuStreamSynchronize", after=0, times=times)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "calls", [("cuCtxPushCurrent",), ("cuStreamSynchronize", "cuMemAlloc", "cuCtxSynchronize")], ids=str
    )
    def test_no_wait_at_all_succeeds(self, calls: tuple[str, ...]) -> None:
        """Then the memory stays until one does."""
        script = """
            from cumem_sleep.core.pinned import pinned_block
            reset_simulation()
            allocator = fresh_allocator()
            allocator.malloc(PAGE, "weights")
            held = sim.stats().live_handles
            memory, stream = _core.Scratch(0, PAGE), _core.CopyStream(0)
            block = pinned_block(PAGE, 0)
            stream.fill(memory.address, 1, PAGE)
            stream.to_device(memory.address, block, 0, PAGE)
            for call in CALLS:
                sim.fail(call, error="CUDA_ERROR_UNKNOWN", times=1_000_000)
            with stream:
                pass
            memory.close()
            assert sim.stats().live_handles == held + 1
            sim.reset()
            block.close()
            assert _core.reclaim() == 0
            assert (sim.stats().live_handles, sim.stats().registered_bytes) == (held, 0)
            _core.synchronize(0)
            free_everything()
            """
        assert_clean_exit(run_script(f"CALLS = {calls!r}\n", script, CUMEM_SLEEP_SIM_COPY_DELAY_US="200000"))


class TestErrors:
    def test_of_the_driver_say_which_memory(self, world: World) -> None:
        sim.fail("cuMemUnmap", after=1, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError) as raised:
            world.allocator.sleep(2)
        assert (raised.value.call, raised.value.error) == ("cuMemUnmap", "CUDA_ERROR_UNKNOWN")
        assert "0x" in raised.value.segment
        assert raised.value.segment in str(raised.value)

    def test_out_of_memory_at_wake_says_how_much(self, world: World) -> None:
        """The device had room when asked, and none when the memory was taken."""
        world.allocator.sleep()
        world.note_drops()
        sim.fail("cuMemCreate", after=1)
        with pytest.raises(OutOfDeviceMemory) as raised:
            world.allocator.wake_up()
        assert (raised.value.needed_bytes, raised.value.device) == (PAGE, 0)
        assert raised.value.free_bytes == _core.memory_info(0)[0] - PAGE
        world.wake()

    def test_a_capture_elsewhere_refuses_a_sleep(self, world: World) -> None:
        sim.fail("cuCtxSynchronize", error="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        with pytest.raises(InvalidState, match="graph is being captured"):
            world.allocator.sleep()
        world.check_bytes()

    @pytest.mark.slow
    @pytest.mark.parametrize("error_name", ["CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED"])
    def test_handles_that_the_device_refuses_are_done_without(self, error_name: str) -> None:
        """Support for fabric, GPUDirect RDMA and file descriptors is tried out, and remembered."""
        process = run_script(
            f"""
            reset_simulation()
            allocator = fresh_allocator()
            _core.open_driver(str(sim.library_path()))
            info = _core.device_info(0)
            advertised = [info.fabric, info.gpu_direct_rdma, info.posix_fd].count(True)
            assert advertised >= 2
            sim.fail("cuMemCreate", times=advertised, error={error_name!r})
            address = allocator.malloc(PAGE)
            assert sim.stats().calls["cuMemCreate"] == advertised + 1
            info = _core.device_info(0)
            assert not (info.fabric or info.gpu_direct_rdma or info.posix_fd)
            allocator.free(address)
            allocator.malloc(PAGE)
            assert sim.stats().calls["cuMemCreate"] == advertised + 2
            free_everything()
            """,
            CUMEM_SLEEP_SIM_FABRIC="1",
        )
        assert_clean_exit(process)
