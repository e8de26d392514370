"""What processes show one another of the host memory that they are about to touch."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import pytest
from forking import PATH
from support import MIB

from cumem_sleep import OutOfHostMemory, host_facts
from cumem_sleep.core import commitment
from cumem_sleep.core.commitment import Commitment, require_room


@pytest.fixture
def groups(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[pathlib.Path]:
    """Folders of two memory control groups, one in the other, which these processes alone look at."""
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.setattr(host_facts, "memory_groups", lambda: [tmp_path, inner])
    monkeypatch.setattr(host_facts, "mem_available_bytes", lambda **_: 100 * MIB)
    monkeypatch.setattr(host_facts, "cgroup_available_bytes", lambda **_: None)
    return [tmp_path, inner]


@pytest.fixture
def other(groups: list[pathlib.Path]) -> Iterator[Commitment]:  # noqa: ARG001
    other = Commitment()
    yield other
    other.set(0)


@pytest.fixture
def mine(groups: list[pathlib.Path]) -> Iterator[Commitment]:  # noqa: ARG001
    mine = Commitment()
    yield mine
    mine.set(0)


class TestOthers:
    def test_see_it_in_every_group(self, groups: list[pathlib.Path], mine: Commitment, other: Commitment) -> None:
        for nbytes in (3 * MIB, 5 * MIB, MIB, 4097, 0, 2 * MIB):
            other.set(nbytes)
            seen = -(-nbytes // 4096) * 4096
            assert mine.others() == dict.fromkeys(groups, seen)
            mine.set(MIB)  # whether it has committed anything itself or not
            assert mine.others() == dict.fromkeys(groups, seen)
            assert set(other.others().values()) == {MIB}
            mine.set(0)

    def test_are_only_those_of_the_same_groups(
        self, groups: list[pathlib.Path], mine: Commitment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere = Commitment()
        with monkeypatch.context() as patch:
            patch.setattr(host_facts, "memory_groups", lambda: groups[:1])
            elsewhere.set(MIB)
        assert mine.others() == {groups[0]: MIB, groups[1]: 0}
        elsewhere.set(0)

    @pytest.mark.parametrize("forked", [False, True])
    def test_that_are_killed_give_it_back(self, groups: list[pathlib.Path], mine: Commitment, forked: bool) -> None:
        """Also if a child lives longer."""
        script = f"""
import os, pathlib, sys
from cumem_sleep import host_facts
from cumem_sleep.core.commitment import Commitment
host_facts.memory_groups = lambda: [pathlib.Path({str(groups[0])!r})]
killed = Commitment()
killed.set({MIB})
if not {forked} or os.fork() == 0:
    print("set", flush=True)
sys.stdin.read()
"""
        environment, pipe = {**os.environ, "PYTHONPATH": PATH}, subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"set\n"
            assert mine.others()[groups[0]] == MIB
            process.kill()
            process.wait()
            assert mine.others()[groups[0]] == 0

    def test_do_not_see_what_was_given_up_after_a_fork(
        self, groups: list[pathlib.Path], mine: Commitment, other: Commitment
    ) -> None:
        """The child lives longer, and has the folders open still."""
        mine.set(MIB)
        folders = [os.dup(folder) for folder in mine._folders.values()]  # as a child has them
        mine.set(0)
        assert other.others() == dict.fromkeys(groups, 0)
        for folder in folders:
            os.close(folder)

    def test_cannot_make_it_take_long(self, groups: list[pathlib.Path], mine: Commitment) -> None:
        """Somebody locks a page here and a page there."""
        calls: list[object] = []
        asked = commitment.fcntl.fcntl
        folder = os.open(groups[0], os.O_RDONLY)
        try:
            for page in range(600):
                asked(folder, commitment.fcntl.F_OFD_SETLK, commitment._flock(commitment.fcntl.F_RDLCK, 2 * page, 1))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(commitment, "_MOST_LOCKS", 100)
                patch.setattr(commitment.fcntl, "fcntl", lambda *each: calls.append(each) or asked(*each))
                assert 0 < mine.others()[groups[0]] <= 100 * 4096
            assert len(calls) <= 101
        finally:
            os.close(folder)


def test_folders_that_cannot_be_opened_are_passed_over(
    groups: list[pathlib.Path], mine: Commitment, other: Commitment
) -> None:
    groups[1].rmdir()
    mine.set(MIB)
    assert other.others() == {groups[0]: MIB}
    groups[0].rmdir()
    assert Commitment().others() == {}
    take(other, MIB)
    assert other.bytes == MIB


class Waits(Exception):
    pass


def waits() -> None:
    raise Waits


def take(commitment: Commitment, nbytes: int, before_wait: Callable[[], object] = waits) -> None:
    total = commitment.bytes + nbytes
    commitment.take(nbytes, lambda others: require_room(total, others), before_wait)


class TestTaking:
    def test_counts_what_others_have_committed(self, mine: Commitment, other: Commitment) -> None:
        other.set(60 * MIB)
        with pytest.raises(Waits):
            take(mine, 41 * MIB)
        assert (mine.bytes, set(other.others().values())) == (0, {0})
        take(mine, 30 * MIB)
        with pytest.raises(Waits):
            take(mine, 11 * MIB)
        assert (mine.bytes, set(other.others().values())) == (30 * MIB, {30 * MIB})
        take(mine, 10 * MIB)
        assert (mine.bytes, set(other.others().values())) == (40 * MIB, {40 * MIB})

    def test_is_refused_whatever_others_do(self, mine: Commitment, other: Commitment) -> None:
        for committed in (0, 60 * MIB):
            other.set(committed)
            with pytest.raises(OutOfHostMemory):
                take(mine, 101 * MIB)
            assert mine.bytes == 0

    def test_each_group_counts_what_was_committed_in_it(
        self, groups: list[pathlib.Path], mine: Commitment, other: Commitment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def left(committed: Mapping[pathlib.Path, int]) -> int:
            return min(50 * MIB - committed.get(groups[0], 0), 30 * MIB - committed.get(groups[1], 0))

        monkeypatch.setattr(host_facts, "cgroup_available_bytes", left)
        with monkeypatch.context() as patch:
            patch.setattr(host_facts, "memory_groups", lambda: groups[:1])
            other.set(15 * MIB)
        take(mine, 30 * MIB)
        mine.set(0)
        other.set(25 * MIB)
        with pytest.raises(Waits):
            take(mine, 30 * MIB)

    def test_waits_for_others(self, mine: Commitment, other: Commitment, monkeypatch: pytest.MonkeyPatch) -> None:
        other.set(60 * MIB)
        waited: list[float] = []

        def pause(seconds: float) -> None:
            assert set(other.others().values()) == {0}  # meanwhile others may go first
            waited.append(seconds)
            if len(waited) == 3:
                other.set(0)

        monkeypatch.setattr(commitment.time, "sleep", pause)
        take(mine, 50 * MIB, lambda: None)
        assert len(waited) == 3
        assert mine.bytes == 50 * MIB

    def test_passes_over_who_does_not_touch_it(
        self, mine: Commitment, other: Commitment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From then on it waits for nobody, until it is told to."""
        other.set(60 * MIB)
        monkeypatch.setattr(commitment.time, "sleep", lambda _: waits())
        mine.short_since = commitment.time.monotonic() - commitment.FOR_OTHERS_S - 1
        for _ in range(2):
            take(mine, 50 * MIB, lambda: None)
        with pytest.raises(OutOfHostMemory):
            take(mine, MIB, lambda: None)
        assert mine.bytes == 100 * MIB
        mine.set(0)
        mine.short_since = None
        with pytest.raises(Waits):
            take(mine, 50 * MIB, lambda: None)


class TestGroups:
    def test_of_v2(self, tmp_path: pathlib.Path) -> None:
        top = tmp_path / "sys/fs/cgroup"
        (top / "pod/engine").mkdir(parents=True)
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text("0::/pod/engine\n")
        assert sorted(host_facts.memory_groups(tmp_path)) == [top, top / "pod", top / "pod/engine"]

    def test_of_v1(self, tmp_path: pathlib.Path) -> None:
        top = tmp_path / "sys/fs/cgroup"
        (top / "memory/pod").mkdir(parents=True)
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text("4:memory:/pod\n")
        assert host_facts.memory_groups(tmp_path) == [top, top / "memory/pod", top / "memory"]
