"""A group is joined, left and replaced: whatever fails meanwhile, the one before is as it was, and nothing is left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import HANGS_S, PAGE, run_script

from cumem_sleep import CuMemAllocator, InvalidArgument, InvalidState, OutOfDeviceMemory, _core
from cumem_sleep.for_plugin import agreement as agreement_of
from cumem_sleep.for_plugin import vote_of_ranks
from cumem_sleep.ranks.agreement import Agreement, RankVote
from cumem_sleep.ranks.decisions import Record, RecordPlace
from cumem_sleep.ranks.mesh import Mesh, connect
from cumem_sleep.report import PhaseTimer

pytestmark = pytest.mark.sim


class Group:
    """Two ranks, both in this process."""

    size, address = 2, "127.0.0.1"

    def __init__(self, rank: int, gathered: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank, self._gathered, self._barrier = rank, gathered, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._gathered[self.rank] = value
        self._barrier.wait(HANGS_S)
        all_values = [self._gathered[rank] for rank in range(self.size)]
        self._barrier.wait(HANGS_S)
        return all_values


class Broken(Group):
    """A collective fails."""

    def __init__(self) -> None:
        self.rank = 0

    def all_gather(self, value: Any) -> list[Any]:
        raise RuntimeError(f"connection reset: {type(value).__name__}")


def beside_another(join: Callable[[Group], object]) -> Mesh:
    """Call `join` as rank 0; what rank 1 has of the group."""
    gathered: dict[int, Any] = {}
    barrier = threading.Barrier(2)
    others: list[Mesh] = []
    other = threading.Thread(target=lambda: others.append(connect(Group(1, gathered, barrier), HANGS_S)))
    other.start()
    join(Group(0, gathered, barrier))
    other.join(HANGS_S)
    return others[0]


def has_heard_the_end(mesh: Mesh) -> bool:
    mesh.receive(0.5, lambda *_: None)
    return 0 in mesh.gone


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def joined(make_allocator: Callable[..., CuMemAllocator]) -> CuMemAllocator:
    return make_allocator(agreement_timeout_s=HANGS_S)


class TestAnAllocatorThatCannotBeMade:
    """The one that there is goes on as it was."""

    def test_with_a_group_that_cannot_be_used(self, joined: CuMemAllocator) -> None:
        other = beside_another(joined.join)
        agreement = agreement_of(joined)
        for group, error in (("bad", InvalidArgument), (Broken(), RuntimeError)):
            with pytest.raises(error):
                CuMemAllocator(joined.settings, group=group)
        assert CuMemAllocator.instance is joined
        assert agreement_of(joined) is agreement is not None
        assert not has_heard_the_end(other)
        other.close()

    def test_goes_on_preparing(self, make_allocator: Callable[..., CuMemAllocator]) -> None:
        allocator = make_allocator()
        stopped: list[bool] = []
        allocator._stop_background_work = lambda: stopped.append(True)  # type: ignore[method-assign]
        with pytest.raises(InvalidArgument):
            CuMemAllocator(allocator.settings, group="bad")
        assert not stopped

    def test_beside_one_that_cannot_come_back(self, joined: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ranks of the new group are told."""
        other = beside_another(joined.join)

        def refused() -> None:
            raise OutOfDeviceMemory(2, 1, 0)

        monkeypatch.setattr(joined._cuda, "lease", refused)

        def make(group: Group) -> None:
            with pytest.raises(OutOfDeviceMemory):
                CuMemAllocator(joined.settings, group=group)

        another = beside_another(make)
        assert has_heard_the_end(another)
        assert not has_heard_the_end(other)
        assert CuMemAllocator.instance is joined
        for mesh in (other, another):
            mesh.close()

    def test_one_that_is_made_takes_its_place(self, joined: CuMemAllocator) -> None:
        other = beside_another(joined.join)
        another = beside_another(lambda group: CuMemAllocator(joined.settings, group=group))
        assert has_heard_the_end(other)
        replacement = CuMemAllocator.get_instance()
        assert replacement is not joined
        assert agreement_of(replacement) is not None
        assert not has_heard_the_end(another)
        replacement._leave()
        for mesh in (other, another):
            mesh.close()


def sleep_as_rank_1(mesh: Mesh) -> None:
    call = RankVote(Agreement(mesh, HANGS_S), "sleep", _core.OperationLock())
    call.begin()
    call.agree(PhaseTimer())


def test_another_group_is_joined_when_the_sleep_at_work_has_ended(
    joined: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would find its connections closed when the others have gone on."""
    other = beside_another(joined.join)
    joined.malloc(PAGE, "weights")
    assert agreement_of(joined) is not None
    mine, receive = agreement_of(joined).mesh, Mesh.receive
    waits, goes_on = threading.Event(), threading.Event()

    def receive_late(mesh: Mesh, *arguments: Any) -> None:
        if mesh is mine and joined._agreement is not None and _core.segments()[0].sleep == _core.Segment.Sleep.AWAKE:
            waits.set()
            goes_on.wait(0.3)  # for as long as the join could be over, and no longer
        receive(mesh, *arguments)

    monkeypatch.setattr(Mesh, "receive", receive_late)
    others: list[Mesh] = []

    def join() -> None:
        waits.wait(HANGS_S)
        others.append(beside_another(joined.join))
        goes_on.set()

    threads = [threading.Thread(target=work) for work in (join, lambda: sleep_as_rank_1(other))]
    for thread in threads:
        thread.start()
    assert joined.sleep().freed_bytes == PAGE
    for thread in threads:
        thread.join(HANGS_S)
    monkeypatch.setattr(Mesh, "receive", receive)
    assert has_heard_the_end(other)
    joined._leave()
    joined.wake_up()
    for mesh in (other, *others):
        mesh.close()


def test_a_sleep_that_waited_while_the_group_was_left(joined: CuMemAllocator) -> None:
    other = beside_another(joined.join)
    joined.malloc(PAGE, "weights")
    with vote_of_ranks(joined, "sleep") as call:
        joined._leave()
        with pytest.raises(InvalidState, match="sleep: this process has left the group"):
            call.begin()
    assert joined.sleep().freed_bytes == PAGE  # alone
    joined.wake_up()
    other.close()


@pytest.mark.slow
def test_in_a_fork_every_call_says_so() -> None:
    """Also while another thread has the lock, which nobody gives back there."""
    process = run_script(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})",
        """
        import os, signal, threading
        from test_joining import beside_another

        allocator = fresh_allocator()
        other = beside_another(allocator.join)
        allocator.malloc(PAGE, "weights")
        held, done = threading.Event(), threading.Event()

        def hold():
            with allocator._lock.hold():
                held.set()
                done.wait()

        for holder in (None, threading.Thread(target=hold)):
            if holder is not None:
                holder.start()
                held.wait()
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                for call in (allocator.sleep, allocator.wake_up, lambda: allocator.discard("weights")):
                    with raises(InvalidState, "fork"):
                        call()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        done.set()
        holder.join()
        allocator._leave()
        free_everything()
        """,
    )
    assert process.returncode == 0, process.stderr


class TestDescriptors:
    """Nothing that fails leaves any open."""

    def test_of_a_group_that_fails(self, joined: CuMemAllocator) -> None:
        before = open_descriptors()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="connection reset"):
                joined.join(Broken())
        assert open_descriptors() == before
        assert agreement_of(joined) is None

    def test_of_a_group_that_fails_later(self, joined: CuMemAllocator) -> None:
        """When this rank listens already."""
        before = open_descriptors()

        class FailsLater(Broken):
            def all_gather(self, value: Any) -> list[Any]:
                return [value, value] if type(value).__name__ == "_Facts" else super().all_gather(value)

        with pytest.raises(RuntimeError, match="_Door"):
            joined.join(FailsLater())
        assert open_descriptors() == before

    def test_of_a_record_that_cannot_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        record = Record.make()
        before = open_descriptors()

        def refused(*_: object) -> bytes:
            raise OSError("refused")

        monkeypatch.setattr(os, "pread", refused)
        assert Record.open(record.place) is None
        assert open_descriptors() == before
        record.close()

    def test_of_another_file(self) -> None:
        record = Record.make()
        before = open_descriptors()
        place = record.place
        assert Record.open(RecordPlace(place.process, record._descriptor, b"another")) is None
        assert open_descriptors() == before
        record.close()
