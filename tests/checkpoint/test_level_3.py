"""Level 3: the CUDA state leaves the GPU and comes back, and nothing calls the driver meanwhile."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import MagicMock

import pytest
from checkpointing import LEFT_AT_LEVEL_1, LEFT_AT_LEVEL_3
from support import (
    HANGS_S,
    PAGE,
    Memory,
    ample_host_memory,
    assert_no_threads,
    hooks,
    in_thread,
    raises,
    run_together,
    threads_refused,
)

from cumem_sleep import (
    CuMemAllocator,
    DriverError,
    InvalidState,
    OutOfDeviceMemory,
    OutOfHostMemory,
    SleepReport,
    _core,
    sim,
)
from cumem_sleep.checkpoint import process
from cumem_sleep.core.levels import DEFERRABLE_TAGS
from cumem_sleep.core.torch_pools import TorchPools
from cumem_sleep.core.tuning import Tuning
from cumem_sleep.for_plugin import checkpoint, drop_kept, may_checkpoint, stay_at_level_1

BYTES = bytes(range(256)) * (PAGE // 256)
TABLES_OF_A_PAGE = PAGE >> 9  # of device memory, to pin as much host memory, on a GPU


@pytest.fixture
def weights(allocator: CuMemAllocator, memory: Memory) -> int:
    """An address with `BYTES`, beside a KV cache."""
    address = allocator.malloc(PAGE, "weights")
    memory.write(address, BYTES)
    allocator.malloc(2 * PAGE, "kv_cache")
    return address


@functools.cache
def uuid() -> str:
    return _core.device_info(0).uuid


def used_bytes() -> int:
    """As another process sees it."""
    return sim.process_memory(os.getpid(), uuid())[0]


@pytest.fixture(autouse=True)
def _uuid_is_known(left_at_level_1: None) -> None:  # noqa: ARG001  (opens the driver)
    uuid()


def assert_deep(allocator: CuMemAllocator) -> None:
    assert _core.driver_calls_suspended()
    assert allocator.checkpoint is not None
    assert used_bytes() == LEFT_AT_LEVEL_3


def assert_at_level_1(allocator: CuMemAllocator) -> None:
    assert not _core.driver_calls_suspended()
    assert allocator.checkpoint is None
    assert used_bytes() > LEFT_AT_LEVEL_3
    assert all(segment.sleep != _core.Segment.Sleep.AWAKE for segment in _core.segments())


def wait_until(is_so: Callable[[], object]) -> None:
    ends_at = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def assert_nothing_asked() -> None:
    assert sim.stats().blocked_calls == 0


class TestSleepAndWake:
    def test_there_and_back(self, allocator: CuMemAllocator, memory: Memory, weights: int) -> None:
        report = allocator.sleep(level=3)
        assert_deep(allocator)
        assert (report.freed_bytes, report.dropped_bytes) == (3 * PAGE, 2 * PAGE)
        assert report.checkpointed_bytes >= LEFT_AT_LEVEL_1 - LEFT_AT_LEVEL_3
        assert report.left_bytes == LEFT_AT_LEVEL_3
        assert report.why_not_deeper == ""
        assert {"lock", "checkpoint"} <= report.phases.keys()
        woken = allocator.wake_up()
        assert woken.restored_bytes == PAGE
        assert list(woken.phases)[:2] == ["restore", "unlock"]
        assert woken.seconds >= sum(woken.phases.values())
        assert allocator.checkpoint is None
        assert memory.read(weights, PAGE) == BYTES
        assert_nothing_asked()

    def test_what_survives_is_nobodys_to_give_up(self, allocator: CuMemAllocator, memory: Memory, weights: int) -> None:
        (cache,) = (segment.address for segment in _core.segments() if segment.tag == "kv_cache")
        content = memory.fill_random(cache, 2 * PAGE)
        assert allocator.sleep(level=3, drop={cache: [(16, PAGE)]}).dropped_bytes == PAGE
        assert_deep(allocator)
        assert allocator.release_backups(DEFERRABLE_TAGS, drop={weights: [(0, 16)]}) == 16
        assert allocator.release_backups("kv_cache") == drop_kept(allocator) == 0
        read = allocator.read_backup(cache + PAGE + 16, 64)
        assert read is not None
        assert read.tobytes() == content[PAGE + 16 : PAGE + 80]
        assert_deep(allocator)
        assert allocator.release_backups() == 0
        assert_at_level_1(allocator)
        assert allocator.wake_up().restored_bytes == 2 * PAGE
        assert memory.read(cache, 16) == content[:16]
        assert memory.read(cache + PAGE + 16, PAGE - 16) == content[PAGE + 16 :]
        assert memory.read(weights, PAGE) == BYTES
        assert_nothing_asked()

    @pytest.mark.parametrize("go_on", [checkpoint, functools.partial(CuMemAllocator.sleep, level=3)])
    def test_from_level_2(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        weights: int,  # noqa: ARG002
        go_on: Callable[[CuMemAllocator], SleepReport],
    ) -> None:
        """What level 2 dropped stays dropped."""
        other = allocator.malloc(PAGE, "other")
        memory.write(other, BYTES)
        allocator.sleep(level=2)
        report = go_on(allocator)
        assert_deep(allocator)
        assert (report.freed_bytes, report.why_not_deeper) == (0, "")
        assert allocator.wake_up().restored_bytes == PAGE
        assert memory.read(other, PAGE) == BYTES
        assert_nothing_asked()

    @pytest.mark.parametrize("level", [1, 2, 3, None])
    def test_asking_again(self, allocator: CuMemAllocator, memory: Memory, weights: int, level: int | None) -> None:
        """What sleeps already stays as it is, and keeps its backups."""
        allocator.sleep(level=3)
        assert "nothing to do" in allocator.sleep(level=level).note
        assert "nothing to do" in allocator.discard("weights").note
        assert_deep(allocator)
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES
        assert_nothing_asked()

    def test_by_tags(self, allocator: CuMemAllocator, memory: Memory, weights: int) -> None:
        allocator.sleep(level=3)
        allocator.wake_up(["weights"])
        assert memory.read(weights, PAGE) == BYTES
        assert allocator.usage()["kv_cache"].asleep_segments == 1
        assert "still have device memory" not in allocator.sleep(level=3).why_not_deeper
        assert_deep(allocator)
        allocator.wake_up()

    def test_going_on_without_a_sleep(self, allocator: CuMemAllocator, weights: int) -> None:
        with raises(InvalidState, "2 segments (tags kv_cache, weights) still have device memory"):
            checkpoint(allocator)
        allocator.free(weights)
        for segment in _core.segments():
            allocator.free(segment.address)
        with raises(InvalidState, "there is no memory"):
            checkpoint(allocator)

    @pytest.mark.parametrize("unasked", [False, True])
    def test_ends_a_preparation(
        self,
        allocator: CuMemAllocator,
        weights: int,  # noqa: ARG002
        monkeypatch: pytest.MonkeyPatch,
        unasked: bool,
    ) -> None:
        ample_host_memory(monkeypatch)
        if unasked:
            allocator._prepare_where_there_is_room()
        else:
            allocator.prepare()
        preparation = allocator._preparation
        assert preparation is not None
        allocator.sleep(level=3)
        assert_deep(allocator)
        preparation.wait(30)
        assert not preparation.running
        assert_nothing_asked()
        allocator.wake_up()

    def test_nothing_is_left_to_be_given_back(self, allocator: CuMemAllocator, memory: Memory, weights: int) -> None:
        """At level 3 nobody could, and host memory would be held for nothing."""
        allocator.sleep(offload_tags=("weights", "kv_cache"))
        allocator.wake_up()
        assert allocator.usage()["kv_cache"].host_bytes == 2 * PAGE
        allocator.sleep(level=3)
        assert_deep(allocator)
        assert allocator.usage()["kv_cache"].host_bytes == 0
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES

    def test_what_is_freed_at_the_last_moment(
        self, allocator: CuMemAllocator, weights: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By a hook, when driver calls are suspended already."""
        ask = process._Helper.ask

        def free_and_ask(self: process._Helper, request: dict[str, object]) -> dict[str, object]:
            in_thread(lambda: hooks().cumem_sleep_free(ctypes.c_void_p(weights), PAGE, 0, None))
            return ask(self, request)

        with monkeypatch.context() as patch:
            patch.setattr(process._Helper, "ask", free_and_ask)
            allocator.sleep(level=3)
        assert_deep(allocator)
        allocator.wake_up()
        assert "weights" not in allocator.usage()
        assert_nothing_asked()

    def test_backups_are_not_pinned_there(self, allocator: CuMemAllocator, memory: Memory, weights: int) -> None:
        """A checkpoint would unpin them, and a restore pin all of them again before the first byte is copied."""
        other = allocator.malloc(3 * PAGE, "other")
        memory.write(other, BYTES * 3)
        allocator.sleep(level=1)
        at_level_1 = sim.stats().registered_bytes
        report = allocator.sleep(level=3)
        assert_deep(allocator)
        assert "unpin" in report.phases
        assert sim.stats().registered_bytes == at_level_1 - 4 * PAGE
        allocator.wake_up("kv_cache")
        assert sim.stats().registered_bytes < at_level_1, "what was not copied is not pinned either"
        allocator.wake_up()
        assert sim.stats().registered_bytes == at_level_1
        assert memory.read(weights, PAGE) == BYTES
        assert_nothing_asked()

    def test_a_backup_that_cannot_be_pinned_again(
        self, allocator: CuMemAllocator, memory: Memory, weights: int
    ) -> None:
        allocator.sleep(level=3)
        sim.fail("cuMemHostRegister_v2")
        with pytest.raises(OutOfHostMemory, match="cuMemHostRegister"):
            allocator.wake_up()
        assert_at_level_1(allocator)
        assert allocator.wake_up().verified_bytes == PAGE
        assert memory.read(weights, PAGE) == BYTES

    def test_a_backup_that_cannot_be_unpinned(self, allocator: CuMemAllocator, memory: Memory, weights: int) -> None:
        """Then it is a matter of the checkpoint, as it is for all other pinned memory."""
        allocator.sleep(level=1)
        registered = sim.stats().registered_bytes
        sim.fail("cuMemHostUnregister", times=2, error="CUDA_ERROR_UNKNOWN")
        allocator.sleep(level=3)
        assert_deep(allocator)
        assert sim.stats().registered_bytes == registered
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES
        allocator.sleep(level=3)
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES

    def test_work_that_does_not_end(
        self, allocator: CuMemAllocator, memory: Memory, weights: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To unpin would wait for it without a limit, with the lock held: nothing is unpinned before it ended."""
        ends, begun = threading.Event(), threading.Event()

        def never(_: int) -> None:
            begun.set()
            ends.wait(60)

        allocator.sleep(level=1)
        registered = sim.stats().registered_bytes
        monkeypatch.setattr(_core, "wait_for_running_work", never)
        monkeypatch.setattr(process.THIS_PROCESS.deadlines, "lock_s", 0.2)
        report = allocator.sleep(level=3)
        assert begun.wait(30)
        assert "work on the GPU did not end" in report.why_not_deeper
        assert "unpin" not in report.phases
        assert sim.stats().registered_bytes == registered
        assert_at_level_1(allocator)
        ends.set()
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES

    @pytest.mark.parametrize(
        ("patched", "error", "said"),
        [
            ((_core.Worker, "start"), InvalidState("no thread can be started"), "no thread can be started"),
            ((_core, "wait_for_running_work"), DriverError("cuMemFree", "CUDA_ERROR_UNKNOWN", "", ""), "cuMemFree"),
        ],
    )
    def test_work_that_cannot_be_waited_for(
        self,
        allocator: CuMemAllocator,
        weights: int,  # noqa: ARG002
        monkeypatch: pytest.MonkeyPatch,
        patched: tuple[object, str],
        error: Exception,
        said: str,
    ) -> None:
        def fail(*_: object) -> None:
            raise error

        allocator.sleep(level=1)
        registered = sim.stats().registered_bytes
        monkeypatch.setattr(*patched, fail)
        assert said in allocator.sleep(level=3).why_not_deeper
        assert sim.stats().registered_bytes == registered
        assert_at_level_1(allocator)
        allocator.wake_up()

    @pytest.mark.parametrize("step", ["unpin", "checkpoint"])
    def test_a_wake_while_it_goes_down(
        self, allocator: CuMemAllocator, memory: Memory, weights: int, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """It waits until the process is at level 3, and brings it back."""
        goes_down, woken = threading.Event(), threading.Event()
        ask, unpin = process._Helper.ask, allocator._store.memory.unpin

        def until_a_wake_waits() -> None:
            goes_down.set()
            woken.wait(0.3)
            assert not woken.is_set(), "the wake did not wait"

        def ask_late(self: process._Helper, request: dict[str, object]) -> dict[str, object]:
            if step == request["do"]:
                until_a_wake_waits()
            return ask(self, request)

        def unpin_late() -> None:
            if step == "unpin":
                until_a_wake_waits()
            unpin()

        def wake() -> None:
            assert goes_down.wait(HANGS_S)
            report = allocator.wake_up()
            woken.set()
            assert "restore" in report.phases

        monkeypatch.setattr(process._Helper, "ask", ask_late)
        monkeypatch.setattr(allocator._store.memory, "unpin", unpin_late)
        run_together(lambda: allocator.sleep(level=3), wake)
        assert allocator.checkpoint is None
        assert memory.read(weights, PAGE) == BYTES
        assert_nothing_asked()


class TestMeanwhile:
    """What is asked of the allocator at level 3."""

    @pytest.mark.slow
    def test_doctor_answers_beside_it(self, allocator: CuMemAllocator, weights: int) -> None:  # noqa: ARG002
        allocator.sleep(level=3)
        doctor = [sys.executable, "-m", "cumem_sleep", "doctor", "--json"]
        done = subprocess.run(doctor, capture_output=True, text=True, timeout=HANGS_S, check=False)
        said = json.loads(done.stdout)
        assert (done.returncode, said["ok"]) == (0, True)
        assert "level 3" in {check["name"] for check in said["checks"]}
        assert_deep(allocator)
        assert_nothing_asked()
        allocator.wake_up()

    @pytest.mark.parametrize(
        "look",
        [
            lambda allocator, _: allocator.usage(),
            lambda allocator, _: allocator.regions.usage(),
            lambda allocator, _: allocator.backup_place(),
            lambda allocator, _: allocator.totals(),
            lambda allocator, _: allocator.get_current_usage(),
            lambda allocator, weights: allocator.read_backup(weights, PAGE),
            lambda allocator, _: allocator.digests("weights"),
        ],
    )
    def test_looks_leave_it_there(
        self, allocator: CuMemAllocator, weights: int, look: Callable[[CuMemAllocator, int], object]
    ) -> None:
        before = str(look(allocator, weights)) if look(allocator, weights) is not None else None
        allocator.sleep(level=1)
        before = str(look(allocator, weights))
        allocator.sleep(level=3)
        seen = str(look(allocator, weights))
        assert_deep(allocator)
        assert_nothing_asked()
        if "checkpoint" not in seen:  # the totals count it
            assert seen == before
        allocator.wake_up()

    @pytest.mark.parametrize(
        "use",
        [
            lambda allocator, _: allocator.free(allocator.malloc(PAGE, "more")),
            lambda allocator, weights: allocator.free(weights),
            lambda allocator, _: allocator.prepare().wait(30),
            lambda allocator, _: allocator.release_backups(),
            lambda allocator, _: allocator.close(),
            lambda allocator, _: allocator.use_memory_pool("weights").__enter__(),
        ],
    )
    def test_what_needs_the_gpu_comes_back_first(
        self, allocator: CuMemAllocator, weights: int, use: Callable[[CuMemAllocator, int], object]
    ) -> None:
        allocator.sleep(level=3)
        in_thread(lambda: use(allocator, weights))
        assert_at_level_1(allocator)
        assert_nothing_asked()
        allocator.wake_up()

    def test_threads_of_all_kinds(self, allocator: CuMemAllocator, memory: Memory, weights: int) -> None:
        """Whatever comes between two steps of going down and coming back."""

        def repeat(work: Callable[[], object]) -> Callable[[], None]:
            return lambda: [work() for _ in range(25)] and None

        run_together(
            repeat(lambda: allocator.sleep(level=3)),
            repeat(allocator.wake_up),
            repeat(lambda: allocator.free(allocator.malloc(PAGE, "weights"))),
            repeat(allocator.usage),
        )
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES


class TestMemory:
    """Coming back takes memory, which is looked up before anything is done."""

    @pytest.fixture(autouse=True)
    def _as_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CuMemAllocator.tuning, "table_bytes_per_gib", Tuning().table_bytes_per_gib)

    def fill(self, free_bytes: int) -> None:
        used = used_bytes()
        sim.configure(device_bytes=used + free_bytes)

    @pytest.mark.parametrize("short_bytes", [1, LEFT_AT_LEVEL_1])
    def test_too_little_for_both(
        self, allocator: CuMemAllocator, memory: Memory, weights: int, short_bytes: int
    ) -> None:
        report = allocator.sleep(level=3)
        needed = report.checkpointed_bytes + 3 * PAGE + TABLES_OF_A_PAGE  # for the backup, which is pinned again
        self.fill(needed - short_bytes)
        with pytest.raises(OutOfDeviceMemory) as refused:
            allocator.wake_up()
        assert (refused.value.needed_bytes, refused.value.free_bytes) == (needed, needed - short_bytes)
        assert refused.value.call == "cuCheckpointProcessRestore"
        assert_deep(allocator)
        assert allocator.totals()["wake"].failures == 1
        self.fill(needed)
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES
        assert_nothing_asked()


def entered_and_left(scope: AbstractContextManager[object]) -> None:
    with scope:
        pass


class TestByItself:
    """`deep_after_s`."""

    @pytest.fixture
    def counting(self, make_allocator: Callable[..., CuMemAllocator]) -> CuMemAllocator:
        """Asleep, and at level 3 in an hour."""
        allocator = make_allocator(deep_after_s=3600)
        allocator.malloc(PAGE, "weights")
        allocator.sleep()
        assert may_checkpoint(allocator)
        return allocator

    def test_after_a_wake_that_failed(self, counting: CuMemAllocator) -> None:
        sim.fail("cuMemCreate")
        with pytest.raises(OutOfDeviceMemory):
            counting.wake_up()
        assert may_checkpoint(counting)
        counting.wake_up()
        assert not may_checkpoint(counting)

    @pytest.mark.parametrize("in_a_region", [False, True])
    def test_after_the_last_that_was_awake_sleeps(
        self, make_allocator: Callable[..., CuMemAllocator], in_a_region: bool
    ) -> None:
        allocator = make_allocator(deep_after_s=3600)
        allocator.malloc(PAGE, "kv_cache")
        with allocator.regions.use("rollout"):
            allocator.malloc(PAGE)
        sleeps = [allocator.regions.sleep, lambda: allocator.discard("kv_cache")]
        for sleep in reversed(sleeps) if in_a_region else sleeps:
            assert not may_checkpoint(allocator)
            sleep()
        assert may_checkpoint(allocator)

    @pytest.mark.parametrize(
        "use",
        [
            lambda allocator: allocator.free(allocator.malloc(PAGE, "more")),
            lambda allocator: allocator.prepare().wait(30),
            lambda allocator: allocator.release_backups(),
            lambda allocator: allocator.use_memory_pool("weights").__enter__(),
            lambda allocator: entered_and_left(allocator.regions.outside()),
            lambda allocator: entered_and_left(allocator.regions.use_without_pool()),
            lambda allocator: entered_and_left(allocator.cudagraph_pool()),
            lambda allocator: entered_and_left(allocator.regions.graph_pool()),
            lambda allocator: allocator.release_pools(),
        ],
    )
    def test_after_another_call_for_which_it_came_back(
        self, make_allocator: Callable[..., CuMemAllocator], use: Callable[[CuMemAllocator], object]
    ) -> None:
        allocator = make_allocator(deep_after_s=0.1)
        allocator.malloc(PAGE, "weights")
        allocator.sleep()
        wait_until(lambda: allocator.checkpoint)
        allocator._pools.found = MagicMock(spec=TorchPools)  # which there are only on a GPU
        allocator._pools.found.is_capturing.return_value = False
        in_thread(lambda: use(allocator))
        wait_until(lambda: allocator.checkpoint)
        allocator.wake_up()
        assert_nothing_asked()

    def test_not_beside_memory_that_was_allocated_since(self, counting: CuMemAllocator) -> None:
        address = counting.malloc(PAGE, "more")
        assert not may_checkpoint(counting)
        counting.free(address)
        assert may_checkpoint(counting)

    def test_not_while_a_block_may_call_the_driver(self, counting: CuMemAllocator) -> None:
        """Only the last of several that overlap ends the wait."""
        blocks = [counting.using_cuda(), counting.use_memory_pool("weights")]
        for block in blocks:
            block.__enter__()
            counting.free(counting.malloc(PAGE))
            assert not may_checkpoint(counting)
        for block in blocks:
            assert not may_checkpoint(counting)
            block.__exit__(None, None, None)
        assert may_checkpoint(counting)

    def test_not_once_it_was_said_why(self, counting: CuMemAllocator, caplog: pytest.LogCaptureFixture) -> None:
        stay_at_level_1(counting, "somebody needs it")
        assert counting.sleep(level=3).why_not_deeper == "somebody needs it"
        assert not may_checkpoint(counting)
        assert "does not go deeper than this level by itself: somebody needs it" in caplog.text
        assert_nothing_asked()

    def test_it_may_no_more_once_it_was_refused(
        self, make_allocator: Callable[..., CuMemAllocator], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_core, "can_checkpoint", lambda: False)
        allocator = make_allocator(deep_after_s=0.1)
        allocator.malloc(PAGE, "weights")
        allocator.sleep()
        wait_until(lambda: not may_checkpoint(allocator))
        assert_at_level_1(allocator)

    def test_a_sleep_is_over_without_it_where_no_thread_can_be_started(
        self, make_allocator: Callable[..., CuMemAllocator], caplog: pytest.LogCaptureFixture
    ) -> None:
        allocator = make_allocator(deep_after_s=3600)
        allocator.malloc(PAGE, "weights")
        with threads_refused(after=1):  # the first is the operation's own
            assert allocator.sleep().freed_bytes == PAGE
        assert "does not go from level 1 to level 3 by itself: " in caplog.text
        assert not may_checkpoint(allocator)
        with threads_refused(), allocator.using_cuda():
            pass
        allocator.wake_up()

    def test_after_a_while(self, make_allocator: Callable[..., CuMemAllocator], memory: Memory) -> None:
        allocator = make_allocator(deep_after_s=0.1)
        address = allocator.malloc(PAGE, "weights")
        memory.write(address, BYTES)
        for _ in range(2):
            assert allocator.sleep().checkpointed_bytes == 0
            wait_until(lambda: allocator.checkpoint)
            allocator.wake_up()
            assert memory.read(address, PAGE) == BYTES
        assert_nothing_asked()
        assert_no_threads("cumem-level-3")

    def test_not_once_it_was_told_to_stay(
        self,
        make_allocator: Callable[..., CuMemAllocator],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """While it waited for an operation: that is no failure."""
        allocator = make_allocator(deep_after_s=60)
        allocator.malloc(PAGE, "weights")
        allocator.sleep()
        began = threading.Event()
        monkeypatch.setattr(allocator._cuda, "_deep_after_s", 0.0)
        monkeypatch.setattr(allocator._cuda, "_checkpoint", lambda: (began.set(), checkpoint(allocator)))
        with allocator._lock.hold():
            allocator._cuda.start_timer()
            began.wait()
            allocator._cuda.stop()
        assert_no_threads("cumem-level-3")
        assert allocator.checkpoint is None
        assert "did not go" not in caplog.text


class TestRefused:
    """It stays at level 1, and says why."""

    def assert_refused(self, allocator: CuMemAllocator, report: SleepReport, *words: str) -> None:
        assert all(word in report.why_not_deeper for word in words), report.why_not_deeper
        assert "stays at level 1" in str(report) or report.note
        assert report.checkpointed_bytes == 0
        assert_at_level_1(allocator)

    @pytest.mark.usefixtures("weights")
    @pytest.mark.parametrize(("version", "bites"), [("595.71.05", "hangs the host"), ("610.57.04", "SIGSEGV")])
    def test_a_driver_that_bites(
        self, allocator: CuMemAllocator, version: str, bites: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(process.host_facts, "nvidia_driver", lambda: version)
            patch.setattr(_core, "driver_is_simulated", lambda: False)
            report = allocator.sleep(level=3)
        self.assert_refused(allocator, report, version, bites)

    def test_memory_of_regions(self, allocator: CuMemAllocator, memory: Memory, weights: int) -> None:
        with allocator.regions.use("rollout", backup=True):
            allocator.malloc(PAGE)
        report = allocator.sleep(level=3)
        assert "rollout" in report.why_not_deeper
        assert allocator.checkpoint is None
        allocator.regions.sleep()
        allocator.sleep(level=3)
        assert_deep(allocator)
        allocator.regions.wake()
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES

    def test_what_a_thread_allocates_while_it_goes_down(
        self, allocator: CuMemAllocator, memory: Memory, weights: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After the look whether all sleeps, and before driver calls fail."""
        suspend = _core.suspend_driver_calls
        late: list[int] = []

        def after_a_malloc(timeout_s: float) -> bool:
            late.append(in_thread(lambda: allocator.malloc(PAGE, "late")))
            return suspend(timeout_s)

        with monkeypatch.context() as patch:
            patch.setattr(_core, "suspend_driver_calls", after_a_malloc)
            report = allocator.sleep(level=3)
        assert "1 segment (tags late) still have device memory" in report.why_not_deeper
        assert not _core.driver_calls_suspended()
        allocator.sleep(level=3)
        assert_deep(allocator)
        allocator.wake_up()
        assert memory.read(weights, PAGE) == BYTES
        allocator.free(late[0])

    @pytest.mark.usefixtures("weights")
    def test_a_thread_that_stays_in_the_driver(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inside, leave = threading.Event(), threading.Event()

        def stay() -> None:
            with _core.DriverCalls() as allowed:
                assert allowed
                inside.set()
                leave.wait(30)

        thread = threading.Thread(target=stay)
        thread.start()
        inside.wait(30)
        with monkeypatch.context() as patch:
            patch.setattr(process.THIS_PROCESS.deadlines, "calls_end_s", 0.05)
            self.assert_refused(allocator, allocator.sleep(level=3), "other threads")
        leave.set()
        thread.join()
        allocator.sleep(level=3)
        assert_deep(allocator)
        allocator.wake_up()

    @pytest.mark.usefixtures("weights")
    @pytest.mark.parametrize(
        "block",
        [
            lambda allocator: allocator.using_cuda(),
            lambda allocator: allocator.use_memory_pool("weights"),
            lambda allocator: allocator.regions.use_without_pool(),
            lambda allocator: allocator.regions.outside(),
        ],
    )
    def test_a_block_that_may_call_the_driver_until_it_ends(
        self,
        allocator: CuMemAllocator,
        monkeypatch: pytest.MonkeyPatch,
        block: Callable[[CuMemAllocator], AbstractContextManager[None]],
    ) -> None:
        with block(allocator), monkeypatch.context() as patch:
            patch.setattr(process.THIS_PROCESS.deadlines, "calls_end_s", 0.05)
            self.assert_refused(allocator, allocator.sleep(level=3), "using_cuda()")
        allocator.sleep(level=3)
        assert_deep(allocator)
        allocator.wake_up()

    @pytest.mark.usefixtures("weights")
    def test_a_block_may_call_cuda_while_another_thread_asks_for_level_3(
        self, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if the block was entered twice, and one of the two ended elsewhere."""
        monkeypatch.setattr(process.THIS_PROCESS.deadlines, "calls_end_s", 60.0)
        inner = allocator.using_cuda()
        reports: list[SleepReport] = []
        with allocator.using_cuda():
            inner.__enter__()
            in_thread(lambda: inner.__exit__(None, None, None))
            thread = threading.Thread(target=lambda: reports.append(allocator.sleep(level=3)))
            thread.start()
            wait_until(_core.driver_calls_suspended)
            _core.memory_info(0)
        thread.join()
        assert reports[0].why_not_deeper == ""
        assert_deep(allocator)
        allocator.wake_up()
