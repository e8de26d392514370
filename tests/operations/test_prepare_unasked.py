"""Backups that nobody asked for: made where host memory has room, given back when others need it."""

from __future__ import annotations

import logging
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
from preparing import (
    STEPS,
    TAGS,
    Gate,
    Steps,
    backed_up_bytes,
    check_bytes,
    fill,
    finished,
    refuse_prefault,
    small_pieces,  # noqa: F401  (autouse)
)
from ranks import ranks
from support import MIB, PAGE, Memory, assert_clean_exit, assert_thread_ends_in_order, run_script

sys.path.append(str(pathlib.Path(__file__).parents[1] / "vault"))

from running import RunningVault, eventually

from cumem_sleep import CuMemAllocator, InvalidState, OutOfHostMemory, Settings, _core, host_facts
from cumem_sleep.backups import host_tier
from cumem_sleep.backups.host_tier import HostTier
from cumem_sleep.core.commitment import Commitment
from cumem_sleep.operations import prepare
from cumem_sleep.operations.prepare import Preparation

MakeAllocator = Callable[..., CuMemAllocator]

RESERVE, NEEDED = 64 * MIB, len(TAGS) * PAGE
ENOUGH = RESERVE + NEEDED


@dataclass
class Host:
    """What each limit leaves."""

    MemAvailable: int | None = ENOUGH
    cgroup: int | None = None
    looks: int = 0

    def available(self, **_: object) -> int | None:
        self.looks += 1
        return self.MemAvailable

    def of_group(self, committed: Mapping[pathlib.Path, int] | None = None, **_: object) -> int | None:
        return None if self.cgroup is None else self.cgroup - max((committed or {}).values(), default=0)


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host of which these tests alone say what it has left, and whose ledger is theirs."""
    host = Host()
    monkeypatch.setattr(host_facts, "memory_groups", lambda: [tmp_path])
    monkeypatch.setattr(host_facts, "mem_available_bytes", host.available)
    monkeypatch.setattr(host_facts, "cgroup_available_bytes", host.of_group)
    monkeypatch.setattr(host_tier, "reserved_bytes", lambda: dict.fromkeys(("MemAvailable", "cgroup"), RESERVE))
    monkeypatch.setattr(prepare, "LOOK_S", 0.001)
    return host


@pytest.fixture
def other(host: Host) -> Iterator[Commitment]:
    """Another process."""
    other = Commitment()
    yield other
    other.set(0)


def begin(allocator: CuMemAllocator) -> Preparation:
    allocator._prepare_where_there_is_room()
    assert allocator._preparation is not None, "there was no room"
    return allocator._preparation


def does_not_begin(allocator: CuMemAllocator) -> bool:
    allocator._prepare_where_there_is_room()
    return allocator._preparation is None


def begin_and_make_all(allocator: CuMemAllocator, nbytes: int = NEEDED) -> Preparation:
    preparation = begin(allocator)
    eventually(lambda: backed_up_bytes(allocator) == nbytes, "all has a backup")
    return preparation


@pytest.mark.parametrize("limit", ["MemAvailable", "cgroup"])
@pytest.mark.parametrize("is_enough", [True, False])
def test_begins_where_there_is_room_and_says_which(
    allocator: CuMemAllocator, memory: Memory, host: Host, caplog: pytest.LogCaptureFixture, limit: str, is_enough: bool
) -> None:
    contents = fill(allocator, memory, *TAGS, "kv_cache")
    host.MemAvailable = None
    setattr(host, limit, ENOUGH if is_enough else ENOUGH - 1)
    with caplog.at_level(logging.INFO, "cumem_sleep"):
        if is_enough:
            begin_and_make_all(allocator)
        else:
            assert does_not_begin(allocator)
    (said,) = (text for text in caplog.messages if "CUMEM_SLEEP_PREPARE=auto" in text)
    if is_enough:
        assert "makes backups ahead, so the first sleep copies nothing: 4.00 MiB" in said
    else:
        assert "makes no backups ahead, so the first sleep copies everything" in said
        assert f"limit: {limit}" in said
        assert "64.00 MiB are reserved for others" in said
        assert allocator._store.memory.bytes == 0
    assert allocator.sleep().copied_bytes == (0 if is_enough else NEEDED)
    allocator.wake_up()
    del contents[list(contents)[-1]]
    check_bytes(memory, contents)


@pytest.mark.parametrize("limit", ["MemAvailable", "cgroup"])
@pytest.mark.parametrize("at", [*range(STEPS - 1), None])
def test_is_given_back_when_less_is_left_than_is_reserved(
    allocator: CuMemAllocator,
    memory: Memory,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: str,
    at: int | None,
) -> None:
    """Before any of its steps, or when all is made."""
    monkeypatch.setattr(prepare, "LOOK_S", 0)
    contents = fill(allocator, memory, *TAGS)

    def fall() -> None:
        setattr(host, limit, RESERVE - 1)

    if at is None:
        preparation = begin_and_make_all(allocator)
        looks = host.looks
        eventually(lambda: host.looks > looks + 5, "it is looked at again and again")
        assert preparation.running
        fall()
    else:
        monkeypatch.setattr(allocator, "prepare", lambda: begin(allocator))
        preparation = Steps(monkeypatch, fall, at).prepare(allocator)
    assert isinstance(finished(preparation).error, OutOfHostMemory)
    assert limit in str(preparation.error)
    assert allocator._store.memory.bytes == backed_up_bytes(allocator) == 0
    assert ("gives back" in caplog.text) == (at != 0)
    host.MemAvailable = ENOUGH
    assert allocator.sleep().copied_bytes == NEEDED
    allocator.wake_up()
    check_bytes(memory, contents)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("at", [*range(STEPS - 1), None])
def test_ends_with_the_first_sleep(
    allocator: CuMemAllocator,
    memory: Memory,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    level: int,
    at: int | None,
) -> None:
    """What that has backed up stays, as ever. A process that sleeps at level 2 has none of its weights."""
    contents = fill(allocator, memory, "default", "weights")

    def sleep_and_wake() -> None:
        allocator.sleep(level)
        allocator.wake_up()

    if at is None:
        preparation = begin_and_make_all(allocator)
        sleep_and_wake()
    else:
        monkeypatch.setattr(allocator, "prepare", lambda: begin(allocator))
        preparation = Steps(monkeypatch, sleep_and_wake, at).prepare(allocator)
    assert finished(preparation).error is None
    host.MemAvailable = 0
    usage = allocator.usage()
    assert usage["default"].backed_up_bytes == PAGE
    assert usage["weights"].backed_up_bytes == (PAGE if level == 1 else 0)
    assert "gives back" not in caplog.text
    if level == 2:
        del contents[list(contents)[-1]]
    check_bytes(memory, contents)


@pytest.mark.parametrize("call", ["discard", "sleep"])
def test_a_discard_or_a_sleep_of_some_tags_is_no_sleep(
    allocator: CuMemAllocator, memory: Memory, host: Host, call: str
) -> None:
    """As a trainer does it with the KV cache before it updates weights: what was made ahead is given back later."""
    fill(allocator, memory, *TAGS, "kv_cache")
    preparation = begin_and_make_all(allocator)
    allocator.discard("kv_cache") if call == "discard" else allocator.sleep(tags="kv_cache")
    allocator.wake_up("kv_cache")
    looks = host.looks
    eventually(lambda: host.looks > looks + 5 or not preparation.running, "it is looked at again and again")
    host.MemAvailable = RESERVE - 1
    assert isinstance(finished(preparation).error, OutOfHostMemory)
    assert allocator._store.memory.bytes == 0


@pytest.mark.parametrize("at", range(STEPS - 1))
def test_what_a_sleep_of_some_tags_leaves_awake_is_made_all_the_same(
    allocator: CuMemAllocator, memory: Memory, host: Host, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    contents = fill(allocator, memory, *TAGS)

    def sleep_and_wake() -> None:
        allocator.sleep(tags=TAGS[0])
        allocator.wake_up(TAGS[0])

    with monkeypatch.context() as patch:
        patch.setattr(allocator, "prepare", lambda: begin(allocator))
        steps = Steps(patch, sleep_and_wake, at)
        steps.begin(allocator)
        eventually(lambda: steps.count > at and backed_up_bytes(allocator) == NEEDED, "all has a backup")
    assert allocator.sleep().copied_bytes == 0
    allocator.wake_up()
    check_bytes(memory, contents)


def test_what_sleeps_is_not_given_back(
    allocator: CuMemAllocator, memory: Memory, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    fill(allocator, memory, *TAGS)
    preparation = begin_and_make_all(allocator)
    allocator.sleep(tags=TAGS[0])
    host.MemAvailable = RESERVE - 1
    finished(preparation)
    assert allocator._store.memory.bytes == PAGE
    assert "gives back 2.00 MiB" in caplog.text


def test_what_was_made_before_an_error_is_given_back(
    allocator: CuMemAllocator, memory: Memory, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(allocator, memory, *TAGS)
    refuse_prefault(monkeypatch, after=2)
    preparation = begin(allocator)
    eventually(lambda: preparation.error is not None, "the second segment gets no memory")
    assert backed_up_bytes(allocator) == PAGE
    host.MemAvailable = RESERVE - 1
    eventually(lambda: allocator._store.memory.bytes == 0, "it is given back")
    finished(preparation)


class TestOthers:
    """Of the same host."""

    @pytest.mark.parametrize("committed", [PAGE, 0])
    def test_have_what_they_are_about_to_touch(
        self, allocator: CuMemAllocator, memory: Memory, other: Commitment, committed: int
    ) -> None:
        fill(allocator, memory, *TAGS)
        other.set(committed)
        assert does_not_begin(allocator) == bool(committed)

    @pytest.mark.parametrize("ending", ["sleep", "release_backups", "made"])
    def test_see_what_is_to_come(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        other: Commitment,
        host: Host,
        monkeypatch: pytest.MonkeyPatch,
        ending: str,
    ) -> None:
        fill(allocator, memory, *TAGS, *["more"] * 6)
        host.MemAvailable = RESERVE + 8 * PAGE
        gate = Gate(monkeypatch)
        preparation = begin(allocator)
        gate.wait()
        (seen,) = other.others().values()
        assert 7 * PAGE <= seen <= 8 * PAGE
        gate.open()
        if ending == "made":
            eventually(lambda: backed_up_bytes(allocator) == 8 * PAGE, "all has a backup")
            assert preparation.running
        else:
            getattr(allocator, ending)()
            finished(preparation)
        assert set(other.others().values()) == {0}

    def test_see_nothing_to_come_where_no_thread_can_be_started(
        self, allocator: CuMemAllocator, memory: Memory, other: Commitment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(worker: _core.Worker, work: Callable[[], object]) -> None:
            raise InvalidState("no thread can be started")

        fill(allocator, memory, *TAGS)
        monkeypatch.setattr(_core.Worker, "start", refuse)
        allocator._prepare_where_there_is_room()
        assert set(other.others().values()) == {0}

    def test_that_begin_at_the_same_moment_do_not_both(self, host: Host) -> None:
        tiers = [HostTier(Settings(), CuMemAllocator.tuning, None) for _ in range(3)]  # type: ignore[arg-type]
        together, began = threading.Barrier(3), []

        def commit(tier: HostTier) -> None:
            together.wait()
            try:
                tier.commit_ahead(NEEDED, lambda: NEEDED)
                began.append(True)
            except OutOfHostMemory:
                began.append(False)

        threads = [threading.Thread(target=commit, args=(tier,)) for tier in tiers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(began) == [False, False, True]
        for tier in tiers:
            tier._commitment.set(0)


def test_in_a_vault_its_limits_decide(
    make_allocator: MakeAllocator, memory: Memory, host: Host, tmp_path: pathlib.Path
) -> None:
    host.MemAvailable = 0
    running = RunningVault(tmp_path)
    try:
        running.wait_until_ready()
        allocator = make_allocator(vault=str(running.socket))
        contents = fill(allocator, memory, *TAGS)
        preparation = finished(begin_and_make_all(allocator))
        assert preparation.error is None
        assert allocator.sleep().copied_bytes == 0
        allocator.wake_up()
        check_bytes(memory, contents)
        for address in contents:
            allocator.free(address)
        allocator._store.memory.leave()
    finally:
        running.close()


@pytest.mark.sim
class TestRanks:
    @pytest.mark.parametrize("several_hosts", [False, True])
    def test_begin_and_give_back_together(self, tmp_path: pathlib.Path, several_hosts: bool) -> None:
        """What all of them take counts, and each has room for its own."""
        with ranks(2, several_hosts=several_hosts) as both:
            needed = 2 * PAGE  # of each, without its KV cache
            assert both.all("begin_unasked", str(tmp_path), RESERVE + 2 * needed - 1, RESERVE) == [0, 0]
            assert both.all("begin_unasked", str(tmp_path), RESERVE + 2 * needed, RESERVE) == [needed, needed]
            both.begin(1, "short_of_host_memory")
            both.answer(1)
            assert both.all("gave_back") == [True, True]
            assert not any(each.error for each in both.operate("sleep"))
            assert not any(each.error or not each.whole for each in both.operate("wake_up"))

    def test_one_that_has_no_room_is_enough(self, tmp_path: pathlib.Path) -> None:
        with ranks(2) as both:
            for rank, left in enumerate((1 << 40, 0)):
                both.begin(rank, "begin_unasked", str(tmp_path), left, RESERVE)
            assert both.answers() == [0, 0]

    @pytest.mark.parametrize("several_hosts", [False, True])
    def test_keep_as_much_as_leaves_the_others_of_their_host_the_same(self, several_hosts: bool) -> None:
        """Beside the backups of all of them, made or not."""
        with ranks(2, several_hosts=several_hosts) as both:
            sharers = 1 if several_hosts else 2
            assert both.all("kept_room", sharers * (2 * PAGE + 4096)) == [4096, 4096]
            both.operate("sleep")
            both.operate("wake_up")
            assert both.all("kept_room", sharers * 4096) == [4096, 4096]


@pytest.mark.sim
class TestProcess:
    """That looks again and again when all is made."""

    BEGUN = """
        reset_simulation()
        allocator, memory = fresh_allocator(), Memory()
        address = allocator.malloc(PAGE, "weights")
        content = memory.fill_random(address, PAGE)
        allocator._prepare_where_there_is_room()
        preparation = allocator._preparation
        while sum(usage.backed_up_bytes for usage in allocator.usage().values()) < PAGE:
            preparation.wait(0.01)
        assert preparation.running
        """

    def test_ends(self) -> None:
        assert_thread_ends_in_order(self.BEGUN, "memory.close()", thread="preparation._worker")

    def test_forks(self) -> None:
        process = run_script(
            self.BEGUN,
            """
            fork_beside(preparation._worker, allocator, allocator.prepare, allocator.usage, as_python_does=False)
            assert preparation.running
            assert allocator.sleep().copied_bytes == 0
            allocator.wake_up()
            assert memory.read(address, PAGE) == content
            memory.close()
            free_everything()
            """,
        )
        assert_clean_exit(process)


@pytest.mark.parametrize("prepare_setting", [None, False, True])
def test_only_when_it_is_set_does_a_pool_begin_it(
    make_allocator: MakeAllocator, host: Host, prepare_setting: bool | None
) -> None:
    allocator = make_allocator() if prepare_setting is None else make_allocator(prepare=prepare_setting)
    with allocator.use_memory_pool("weights"):
        allocator.malloc(PAGE)
    assert (allocator._preparation is not None) == (prepare_setting is True)
    if allocator._preparation is not None:
        assert finished(allocator._preparation).error is None  # nobody looks what is left from then on
        assert backed_up_bytes(allocator) == PAGE
