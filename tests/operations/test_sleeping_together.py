"""Processes that fall asleep at the same time, where the host has memory for some of them: none takes another's."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pathlib
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from forking import PATH
from support import HANGS_S, MIB, PAGE, PREAMBLE
from world import World, awake_with_backups

from cumem_sleep import CuMemAllocator, OutOfHostMemory, _core, host_facts
from cumem_sleep.backups import host_tier
from cumem_sleep.backups.tier import NotYet
from cumem_sleep.core import commitment
from cumem_sleep.core.commitment import Commitment
from cumem_sleep.store import lanes

COUNT, ROOM_FOR = 6, 3
BACKUP_BYTES = 64 * MIB
LIMIT_BYTES = ROOM_FOR * BACKUP_BYTES + BACKUP_BYTES * 7 // 8  # what else they take when they sleep is in it, too

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SLEEPER = """
import json, sys
import cumem_sleep.digest.digester
cumem_sleep.digest.digester.sums_of = quick_sums

def say(**what):
    sys.stdout.write(json.dumps(what) + chr(10))
    sys.stdout.flush()

size = int(sys.argv[1])
CuMemAllocator.tuning.bounce_bytes = MIB  # what the CPU digests passes through them
allocator = fresh_allocator()
memory = Memory()
address = allocator.malloc(size, "weights")
content = memory.fill_random(address, size)
say(ready=True)
sys.stdin.readline()
try:
    allocator.sleep()
    say(asleep=True, refused="")
except OutOfHostMemory as error:
    asleep = [segment for segment in _core.segments() if segment.sleep != AWAKE]
    say(asleep=False, refused=str(error), whole=not asleep and holds(address, content))
sys.stdin.readline()
allocator.wake_up()
say(whole=holds(address, content))
"""


class Sleeper:
    """A process with one backup's worth of memory, which does as the lines say that it reads."""

    def __init__(self, before: str = "", *arguments: object) -> None:
        script = "\n".join((PREAMBLE, textwrap.dedent(before), SLEEPER))
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(BACKUP_BYTES), *map(str, arguments)],
            cwd=pathlib.Path(__file__).parent,
            env={**os.environ, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that `select` sees what was not read
        )

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended: {self.process.wait()}"
        said: dict[str, Any] = json.loads(line)
        return said


@contextlib.contextmanager
def sleepers(before: str = "", *arguments: object) -> Iterator[list[Sleeper]]:
    processes = [Sleeper(before, *arguments) for _ in range(COUNT)]
    try:
        for process in processes:
            assert process.hear() == {"ready": True}
        yield processes
    finally:
        for each in processes:
            each.process.kill()
            each.process.communicate()


class Groups:
    """Memory control groups of this test, the first of them with a limit, as the system has them (v1 or v2)."""

    def __init__(self, inside: int) -> None:
        v1 = pathlib.Path("/sys/fs/cgroup/memory")
        self.is_v1 = v1.is_dir()
        top = (v1 if self.is_v1 else pathlib.Path("/sys/fs/cgroup")) / f"cumem-sleep-test-{os.getpid()}"
        self.folders = [top, *(top / str(number) for number in range(inside))]
        self._limit = top / ("memory.limit_in_bytes" if self.is_v1 else "memory.max")
        self._counts = top / ("memory.oom_control" if self.is_v1 else "memory.events")
        try:
            for folder in self.folders:
                folder.mkdir()
                if inside and folder is top and not self.is_v1:
                    (top / "cgroup.subtree_control").write_text("+memory")
            self.limit(str(LIMIT_BYTES))
        except OSError as error:
            self.close()
            pytest.skip(f"no memory control group can be made here: {error}")

    def close(self) -> None:
        for folder in reversed(self.folders):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()

    def limit(self, limit: str) -> None:
        self._limit.write_text(limit)

    def killed(self) -> int:
        """How many processes the kernel has killed in it."""
        counts = dict(line.split() for line in self._counts.read_text().splitlines())
        return int(counts["oom_kill"])


@pytest.mark.skipif(_core.CHECKS_INVARIANTS, reason="sanitizers take memory of their own, which no limit counts")
@pytest.mark.parametrize("inside", [0, 2], ids=["one group", "groups in a group"])
def test_none_is_killed_in_a_control_group(inside: int) -> None:
    groups = Groups(inside)
    try:
        with sleepers() as processes:
            for number, each in enumerate(processes):  # their memory so far stays where it was taken
                folder = groups.folders[1 + number % inside if inside else 0]
                (folder / "cgroup.procs").write_text(str(each.process.pid))
            for each in processes:
                each.go_on()
            answers = [each.hear() for each in processes]
            assert groups.killed() == 0
            refused = [answer for answer in answers if not answer["asleep"]]
            assert len(refused) == COUNT - ROOM_FOR
            for answer in refused:
                assert answer["whole"]
                assert "limit: cgroup" in answer["refused"]
            groups.limit("-1" if groups.is_v1 else "max")  # what is mapped is simulated, and takes host memory
            for each in processes:
                each.go_on()
                assert each.hear() == {"whole": True}
    finally:
        groups.close()


# A limit of this test alone: the first argument is a folder, in which each process says what it has touched.
LIMITED = """
import os, pathlib, pytest
from cumem_sleep import host_facts
from cumem_sleep.core import commitment

folder, limit = pathlib.Path(sys.argv[2]), int(sys.argv[3])
touched = os.open(folder / "touched", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
host_facts.memory_groups = lambda: [folder]
host_facts.mem_available_bytes = lambda **_: None
host_facts.cgroup_available_bytes = lambda committed: (
    limit - sum(map(int, (folder / "touched").read_text().split())) - committed.get(folder, 0)
)
prefault, sleep, said = _core.HostBlock.prefault, commitment.time.sleep, []

def touch(block, offset, nbytes):
    if block.bytes == TOUCHED_AT_ONCE:
        if "touches" not in said:
            said.append("touches")
            say(does="touches")
            sys.stdin.readline()
        os.write(touched, b"%d " % nbytes)
    prefault(block, offset, nbytes)

def wait(seconds):
    if "waits" not in said:
        said.append("waits")
        say(does="waits")
    sleep(seconds)

TOUCHED_AT_ONCE = CuMemAllocator.tuning.slab_bytes
patch_prefault(pytest.MonkeyPatch(), touch)
commitment.time.sleep = wait
"""


def test_who_finds_memory_that_another_is_about_to_touch_waits_for_it(tmp_path: pathlib.Path) -> None:
    """Nobody touches anything before all have looked at the limit."""
    (tmp_path / "touched").touch()
    with sleepers("import sys" + LIMITED, tmp_path, LIMIT_BYTES) as processes:
        for each in processes:
            each.go_on()
        does: dict[Sleeper, set[str]] = {each: set() for each in processes}
        while not all(does.values()) or sum("touches" in each for each in does.values()) < ROOM_FOR:
            ready, _, _ = select.select(processes, [], [], HANGS_S)
            assert ready, does
            for each in ready:
                does[each].add(each.hear()["does"])
        touching = [each for each in processes if "touches" in does[each]]
        waiting = [each for each in processes if each not in touching]
        assert len(touching) == ROOM_FOR
        for each in touching:
            each.go_on()
        assert [each.hear()["asleep"] for each in touching] == [True] * ROOM_FOR
        for each in waiting:
            answer = each.hear()
            assert not answer["asleep"]
            assert answer["whole"]
            assert "limit: cgroup" in answer["refused"]
    assert sum(map(int, (tmp_path / "touched").read_text().split())) == ROOM_FOR * BACKUP_BYTES


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, world: World) -> Iterator[Commitment]:
    """Another process, where there is host memory for two backups: all that a sleep of `world` needs."""
    monkeypatch.setattr(host_facts, "memory_groups", lambda: [tmp_path])
    monkeypatch.setattr(host_facts, "mem_available_bytes", lambda **_: None)
    monkeypatch.setattr(
        host_facts, "cgroup_available_bytes", lambda committed: 2 * PAGE - sum(committed.values(), start=0)
    )
    other = Commitment()
    yield other
    other.set(0)


def test_a_sleep_waits_until_others_have_touched_theirs_or_failed(
    world: World, other: Commitment, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.set(PAGE)
    seen: list[set[int]] = []

    def pause(_seconds: float) -> None:
        seen.append(set(other.others().values()))
        other.set(0)

    monkeypatch.setattr(host_tier.time, "sleep", pause)
    assert world.allocator.sleep().copied_bytes == 2 * PAGE
    assert seen == [{0}]  # it commits nothing while it waits
    assert set(other.others().values()) == {0}
    world.note_drops()
    world.wake()


def test_a_sleep_passes_over_who_does_not_touch_what_it_has_committed(
    world: World, other: Commitment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by anybody who locks the folder of a control group."""
    monkeypatch.setattr(commitment, "FOR_OTHERS_S", 0.0)
    other.set(1 << 60)
    with caplog.at_level(logging.WARNING, "cumem_sleep"):
        world.allocator.sleep()
    assert "goes on, although others have committed" in caplog.text
    world.note_drops()
    world.wake()


def test_a_sleep_that_waits_for_others_can_be_interrupted(
    world: World, other: Commitment, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.set(PAGE)
    before = world.state()
    monkeypatch.setattr(host_tier.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        world.allocator.sleep()
    assert world.state() == before
    world.check_bytes()
    assert set(other.others().values()) == {0}


def look_at_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BETWEEN_LOOKS_S", "_PAUSE_PER_LOOK"):
        monkeypatch.setattr(host_tier, name, 0)


def test_others_see_what_is_yet_to_be_touched(world: World, other: Commitment, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    look_at_every_block(monkeypatch)
    have_pinned = lanes.HostLaneGroup.have_pinned

    def look(lane_group: lanes.HostLaneGroup, block: _core.HostBlock, device: int) -> None:
        seen.append(max(other.others().values()))
        have_pinned(lane_group, block, device)
        lane_group._look_again()
        seen.append(max(other.others().values()))

    monkeypatch.setattr(lanes.HostLaneGroup, "have_pinned", look)
    monkeypatch.setattr(lanes.HostLaneGroup, "expect", lambda *_: None)  # nothing is prefaulted ahead
    world.allocator.sleep()
    steps = [*range(2 * PAGE, -1, -CuMemAllocator.tuning.slab_bytes)]
    assert seen == [each for step in itertools.pairwise(steps) for each in step]
    world.note_drops()
    world.wake()


def test_memory_that_is_taken_while_pages_are_prefaulted_is_missed_before_they_are(
    world: World, other: Commitment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody who commits nothing."""
    before = world.state()
    monkeypatch.setattr(lanes.HostLaneGroup, "expect", lambda *_: None)
    prefault = _core.HostBlock.prefault

    def take(block: _core.HostBlock, offset: int, nbytes: int) -> None:
        prefault(block, offset, nbytes)
        if block.bytes == CuMemAllocator.tuning.slab_bytes:
            monkeypatch.setattr(host_facts, "cgroup_available_bytes", lambda **_: PAGE // 2)

    look_at_every_block(monkeypatch)
    monkeypatch.setattr(_core.HostBlock, "prefault", take)
    with pytest.raises(OutOfHostMemory, match=r"limit: cgroup\): other processes took it meanwhile"):
        world.allocator.sleep()
    assert world.state() == before
    world.check_bytes()
    assert set(other.others().values()) == {0}


def test_prepare_waits_beside_the_model(world: World, other: Commitment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the allocator's lock, as for a vault that is still taking memory."""
    other.set(2 * PAGE)
    refused = threading.Event()

    class Noted(NotYet):
        def __init__(self) -> None:
            refused.set()

    monkeypatch.setattr(host_tier, "NotYet", Noted)
    preparation = world.allocator.prepare()
    assert refused.wait(HANGS_S)
    assert preparation.running
    world.allocator.usage()  # has the lock meanwhile
    other.set(0)
    assert preparation.wait(HANGS_S)
    assert preparation.error is None
    assert world.allocator.sleep().copied_bytes == 0
    world.note_drops()
    world.wake()


def test_a_sleep_that_needs_no_memory_looks_at_no_group(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that rewrites its backups."""
    awake_with_backups(world)
    monkeypatch.setattr(host_facts, "memory_groups", lambda: pytest.fail("it did"))
    for _ in range(2):
        report = world.allocator.sleep()
        world.note_drops()
        world.wake()
        world.define()
        world.change()
    assert report.copied_bytes == 2 * PAGE
