"""Backups made in the background, when it goes wrong: short host memory, damage, and errors of the driver."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from preparing import (
    TAGS,
    Steps,
    backed_up_bytes,
    check_bytes,
    fill,
    finished,
    on_preparing_thread,
    refuse_prefault,
    small_pieces,  # noqa: F401  (autouse)
)
from support import AWAKE, MIB, PAGE, Memory, forget_devices

from cumem_sleep import (
    CuMemAllocator,
    CumemSleepError,
    DriverError,
    InvalidState,
    OutOfHostMemory,
    _core,
    host_facts,
    sim,
)
from cumem_sleep.backups.tier import HostLimit

MakeAllocator = Callable[..., CuMemAllocator]
MANY = 1_000_000


def refuse_mmap(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    make, made = _core.HostBlock, []

    class Refusing:
        table = make.table

        def __new__(cls, nbytes: int, numa_node: int) -> _core.HostBlock:  # type: ignore[misc]
            if on_preparing_thread() and nbytes == MIB:
                made.append(nbytes)
                if len(made) > after:
                    raise OutOfHostMemory(nbytes, 0, "mmap")
            return make(nbytes, numa_node)

    monkeypatch.setattr(_core, "HostBlock", Refusing)


def refuse_register(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    pin, pinned = _core.HostBlock.pin, []

    def refusing(block: _core.HostBlock, device: int) -> None:
        if on_preparing_thread() and block.bytes == MIB:
            pinned.append(block.bytes)
            if len(pinned) > after:
                raise OutOfHostMemory(block.bytes, 0, "cuMemHostRegister")
        pin(block, device)

    monkeypatch.setattr(_core.HostBlock, "pin", refusing)


class TestHostMemoryIsShort:
    @pytest.mark.parametrize("limit", ["budget", "cgroup", "MemAvailable"])
    def test_for_all_of_it(
        self, make_allocator: MakeAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch, limit: str
    ) -> None:
        """Known at once: the call itself refuses, and nothing is begun or taken."""
        short = 2 * PAGE - 1
        allocator = make_allocator(host_budget_bytes=short if limit == "budget" else None)
        contents = fill(allocator, memory, *TAGS)
        with monkeypatch.context() as patch:
            if limit == "cgroup":
                patch.setattr(host_facts, "cgroup_available_bytes", lambda **_: short)
            elif limit == "MemAvailable":
                patch.setattr(host_facts, "mem_available_bytes", lambda enough=None: short)
            with pytest.raises(OutOfHostMemory) as raised:
                allocator.prepare()
        error = raised.value
        assert (error.needed_bytes, error.available_bytes, error.limit) == (2 * PAGE, short, limit)
        assert allocator._preparation is None
        assert allocator._store.memory.bytes == 0
        check_bytes(memory, contents)

    def test_what_is_backed_up_already_is_not_counted(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(host_budget_bytes=2 * PAGE)
        fill(allocator, memory, *TAGS)
        for _ in range(2):
            assert finished(allocator.prepare()).error is None
        assert allocator._store.memory.bytes == 2 * PAGE

    def test_backups_that_no_sleep_would_use_give_way(self, make_allocator: MakeAllocator, memory: Memory) -> None:
        allocator = make_allocator(host_budget_bytes=2 * PAGE)
        contents = fill(allocator, memory, "weights", "kv_cache")
        allocator.sleep(offload_tags=["kv_cache", "weights"])
        allocator.wake_up()
        contents |= fill(allocator, memory, "default")
        assert finished(allocator.prepare()).error is None
        assert {tag: usage.backed_up_bytes for tag, usage in allocator.usage().items()} == {
            "weights": PAGE,
            "kv_cache": 0,
            "default": PAGE,
        }
        check_bytes(memory, contents)

    @pytest.mark.parametrize("stage", ["cgroup", "budget", "mmap", "prefault", "register"])
    @pytest.mark.parametrize("complete", [0, 1])
    def test_half_way(
        self,
        make_allocator: MakeAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        stage: str,
        complete: int,
    ) -> None:
        """What was complete stays; the next sleep copies the rest, once there is memory again."""
        allocator = make_allocator()
        contents = fill(allocator, memory, *TAGS)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "cumem_sleep"):
            steps = Steps(patch)
            if stage in ("cgroup", "budget"):

                def shrink() -> None:
                    if stage == "cgroup":
                        patch.setattr(host_facts, "cgroup_available_bytes", lambda **_: PAGE - 1)
                    else:  # of another sort: settings do not change, but other backups may fill the budget
                        limit = HostLimit("budget", PAGE - 1)
                        patch.setattr(allocator._store.memory.tier, "limits", lambda needed=None: [limit])

                steps._act, steps._at = shrink, 4 * complete
            else:
                refuse = {"mmap": refuse_mmap, "prefault": refuse_prefault, "register": refuse_register}[stage]
                refuse(patch, after=2 * complete + 1)  # in the middle of a segment
            preparation = steps.prepare(allocator)
        limit = {"prefault": "madvise", "register": "cuMemHostRegister"}.get(stage, stage)
        assert isinstance(preparation.error, OutOfHostMemory)
        assert preparation.error.limit == limit
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "prepare ended early" in caplog.text
        assert limit in caplog.text
        assert all(segment.sleep == AWAKE for segment in _core.segments())
        assert backed_up_bytes(allocator) == allocator._store.memory.bytes == complete * PAGE
        report = allocator.sleep()
        assert (report.clean_bytes, report.copied_bytes) == (complete * PAGE, (2 - complete) * PAGE)
        allocator.wake_up()
        check_bytes(memory, contents)


@pytest.mark.sim
class TestDriverErrors:
    def check(self, allocator: CuMemAllocator, memory: Memory, contents: dict[int, bytes], call: str) -> None:
        """Prepare while `call` fails; then all is awake, and sleeps and wakes as if nothing had been."""
        try:
            error: CumemSleepError | None = finished(allocator.prepare()).error
        except CumemSleepError as raised:
            error = raised
        _core.release_idle(0)  # the others go at once
        reached = sim.stats().calls[call]
        sim.reset()
        if error is not None:
            assert isinstance(error, DriverError) or (isinstance(error, OutOfHostMemory) and error.limit == call)
            assert call in str(error)
        assert reached
        assert all(segment.sleep == AWAKE for segment in _core.segments())
        ready_bytes = backed_up_bytes(allocator)
        assert allocator._store.memory.bytes == ready_bytes
        report = allocator.sleep()
        assert (report.clean_bytes, report.copied_bytes) == (ready_bytes, 2 * PAGE - ready_bytes)
        allocator.wake_up()
        check_bytes(memory, contents)
        memory.close()
        allocator.release_backups()
        assert _core.reclaim() == 0
        assert sim.stats().registered_bytes == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("error_name", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
    def test_at_every_call(self, allocator: CuMemAllocator, memory: Memory, error_name: str) -> None:
        contents = fill(allocator, memory, *TAGS)
        memory.close()
        forget_devices()
        sim.reset()
        finished(allocator.prepare())
        calls = {
            call: count
            for call, count in sim.stats().calls.items()
            if count and (error_name == "CUDA_ERROR_UNKNOWN" or not call.startswith(("cuCtx", "cuThread")))
        }
        assert calls["cuMemcpyDtoHAsync"] == 4 + 2  # and the digests
        allocator.release_backups()
        problems = []
        for call, count in calls.items():
            for position in range(count):
                sim.reset()
                forget_devices()
                sim.fail(call, after=position, error=error_name)
                try:
                    self.check(allocator, memory, contents, call)
                except Exception as error:
                    problems.append(f"{call} number {position + 1} of {count}: {type(error).__name__}: {error}")
                    sim.reset()
                    allocator.wake_up()
                    allocator.release_backups()
        assert not problems, f"{len(problems)} of {sum(calls.values())}:\n" + "\n".join(problems[:20])


class TestForeignErrorsAndPromisedMemory:
    def test_an_error_of_another_kind_is_told(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, memory, *TAGS)

        def fails(*_: object, **__: object) -> None:
            raise MemoryError("no more")

        with monkeypatch.context() as patch:
            patch.setattr("cumem_sleep.digest.digester.DigestRun.add_copy", fails)
            preparation = finished(allocator.prepare())
        assert isinstance(preparation.error, InvalidState)
        assert "no more" in str(preparation.error)
        assert allocator._store.memory.bytes == 0
        allocator.sleep()
        allocator.wake_up()
        check_bytes(memory, contents)

    def test_memory_that_was_taken_but_not_touched_is_not_offered_again(
        self, allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contents = fill(allocator, memory, *TAGS)
        first, second = _core.segments()
        monkeypatch.setattr(host_facts, "mem_available_bytes", lambda enough=None: 2 * PAGE - 1)
        allocator._store.memory.reserve([first], [first, second], {})
        with pytest.raises(OutOfHostMemory, match="MemAvailable"):
            allocator._store.memory.reserve([second], [first, second], {})
        allocator._store.memory.clear()
        monkeypatch.undo()
        check_bytes(memory, contents)
