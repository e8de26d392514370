"""All ranks sleep, or wake, or none does: whatever fails, ends or stops, at whatever rank and wherever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import ANSWER_S, Outcome, Ranks, ranks
from snippets import snippet_at
from support import PAGE, two_free_ports

pytestmark = pytest.mark.sim

# `CUMEM_SLEEP_TEST_RANKS=1`: every position of every call, and every step; else some of them.
FULL = os.environ.get("CUMEM_SLEEP_TEST_RANKS") == "1"

CYCLE: list[tuple[str, dict[str, Any]]] = [
    ("sleep", {"level": 1}),
    ("wake_up", {}),
    ("discard", {"tags": "kv_cache"}),
    ("sleep", {"level": 2, "drop": [(PAGE // 2, PAGE // 4)]}),
    ("wake_up", {"tags": ["weights"]}),
    ("wake_up", {}),
]


# What a rank is stopped or killed in.
ARGUMENTS: dict[str, dict[str, Any]] = {"sleep": {}, "wake_up": {}, "discard": {"tags": "kv_cache"}}


def assert_together(outcomes: list[Outcome]) -> None:
    """All or none."""
    assert len({bool(each.error) for each in outcomes}) == 1, outcomes
    assert len({each.state for each in outcomes}) == 1, outcomes


def assert_failed(outcomes: list[Outcome], before: list[Outcome], rank: int) -> None:
    """All, because of this rank, and as they were before."""
    assert_together(outcomes)
    assert all(each.error for each in outcomes), outcomes
    assert {each.failed_rank for each in outcomes} == {rank}, outcomes
    assert [each.state for each in outcomes] == [each.state for each in before]


def assert_done(outcomes: list[Outcome]) -> None:
    assert_together(outcomes)
    assert not any(each.error for each in outcomes), outcomes


@pytest.fixture
def two() -> Any:
    with ranks(2) as them:
        yield them


def test_all_sleep_and_wake(two: Ranks) -> None:
    for operation, arguments in CYCLE:
        outcomes = _done(two, operation, arguments)
        assert all(each.phases["agree"] > 0 for each in outcomes)


def test_level_3_stays_at_level_1(two: Ranks) -> None:
    """CUDA does not restore several ranks: a checkpoint of one of them would be the end of all."""
    outcomes = _done(two, "sleep", {"level": 3})
    assert all(not {"lock", "checkpoint"} & each.phases.keys() for each in outcomes)
    assert all(each.calls["cuMemUnmap"] > 0 for each in outcomes)
    _done(two, "wake_up", {})


@pytest.mark.parametrize("operation", ["sleep", "wake_up", "discard"])
def test_arguments_that_one_rank_refuses(two: Ranks, operation: str) -> None:
    """It fails before its operation begins, and the other one is told at once."""
    before = two.operate("sleep", {"level": 0})
    arguments = {"discard": {"tags": "kv_cache"}}.get(operation, {})
    two.begin(0, "raised_before", operation)
    two.begin(1, "operate", operation, arguments, None, {})
    outcomes = two.answers()
    assert [each.error for each in outcomes] == ["InvalidArgument", "RankFailed"]
    assert_failed(outcomes, before, 0)
    assert_done(two.operate(operation, arguments))


def test_what_one_rank_cannot_tell(two: Ranks) -> None:
    """What may be dropped of its memory; so nothing is dropped of anybody's."""
    before = two.operate("sleep", {"level": 0})
    for rank, nbytes in enumerate((PAGE, PAGE + 1)):
        two.begin(rank, "operate", "sleep", {"level": 2, "drop": [(0, nbytes)]}, None, {})
    outcomes = two.answers()
    assert [each.error for each in outcomes] == ["RankFailed", "InvalidArgument"]
    assert_failed(outcomes, before, 1)
    assert all(each.whole for each in outcomes)


def test_all_forget_or_none(two: Ranks) -> None:
    asleep = two.operate("sleep")
    with two.impatient(1):
        two.begin(1, "operate", "forget", {}, None, {})
        alone = two.answer(1)
    assert (alone.failed_rank, alone.state) == (0, asleep[1].state)
    two.begin(0, "raised_before", "forget")
    two.begin(1, "operate", "forget", {}, None, {})
    assert_failed(two.answers(), asleep, 0)
    woken = two.operate("wake_up")
    assert_done(woken)
    assert all(each.whole for each in woken), "one has forgotten"
    for operation in ("sleep", "forget", "wake_up"):
        assert_done(two.operate(operation))


def test_arguments_that_all_refuse(two: Ranks) -> None:
    """Nobody is a round behind afterwards."""
    for _ in range(3):
        assert [each.error for each in two.all("raised_before", "sleep")] == ["InvalidArgument"] * 2
    assert_done(two.operate("sleep"))


def test_different_operations(two: Ranks) -> None:
    before = two.operate("sleep", {"level": 0})
    two.begin(0, "operate", "sleep", {}, None, {})
    two.begin(1, "operate", "discard", {"tags": "weights"}, None, {})
    outcomes = two.answers()
    assert_together(outcomes)
    assert [each.state for each in outcomes] == [each.state for each in before]
    assert all("something else" in each.text for each in outcomes)
    assert_done(two.operate("sleep"))


def test_a_rank_without_memory_for_its_wake(two: Ranks) -> None:
    """The error says so on every rank; the same call works when there is memory."""
    asleep = two.operate("sleep")
    outcomes = two.operate("wake_up", at=1, device_bytes=2 * PAGE)
    assert_failed(outcomes, asleep, 1)
    assert [each.error for each in outcomes] == ["RankFailed", "OutOfDeviceMemory"]
    assert "rank 1 of 2 failed: OutOfDeviceMemory" in outcomes[0].text
    assert "this was rank 1" in outcomes[1].text
    awake = two.operate("wake_up")
    assert_done(awake)
    assert all(each.whole for each in awake)


def test_a_rank_that_has_nothing_to_do_takes_part(two: Ranks) -> None:
    assert_done(two.operate("sleep"))
    assert_done(two.operate("sleep"))  # sleeps already
    assert_done(two.operate("wake_up"))


def test_a_rank_that_is_not_called(two: Ranks) -> None:
    """It is named; and the next call of both works, whichever comes first."""
    with ranks(2) as them:
        before = them.operate("sleep", {"level": 0})
        for _ in range(2):
            with them.impatient(0):
                them.begin(0, "operate", "sleep", {}, None, {})
                outcome = them.answer(0)
            assert (outcome.error, outcome.failed_rank) == ("RankFailed", 1)
            assert "was not called" in outcome.text
            assert outcome.state == before[0].state
        assert_done(them.operate("sleep"))


def test_a_rank_that_is_called_when_the_others_have_given_up() -> None:
    """As a worker that was stopped with the call in its queue: it does not wait for nobody."""
    with ranks(2) as them:
        before = them.operate("sleep", {"level": 0})
        with them.impatient(0):
            them.begin(0, "operate", "sleep", {}, None, {})
            assert them.answer(0).failed_rank == 1
        them.begin(1, "operate", "sleep", {}, None, {})
        late = them.answer(1)
        assert (late.error, late.state) == ("RankFailed", before[1].state)
        assert_done(them.operate("sleep"))


def test_an_interrupt(two: Ranks) -> None:
    """Ctrl-C on one rank while it waits for the other: both are as before."""
    before = two.operate("sleep", {"level": 0})
    two.begin(0, "operate", "sleep", {}, None, {"step": 20, "signal": int(signal.SIGINT)})
    outcomes = [two.answer(0)]
    two.begin(1, "operate", "sleep", {}, None, {})
    outcomes.append(two.answer(1))
    assert [each.error for each in outcomes] == ["KeyboardInterrupt", "RankFailed"]
    assert "was interrupted" in outcomes[1].text
    assert [each.state for each in outcomes] == [each.state for each in before]
    assert_done(two.operate("sleep"))


def test_a_rank_that_has_ended() -> None:
    """The others are told at once, do nothing, and say so at every call."""
    with ranks(3) as them:
        before = them.operate("sleep", {"level": 0})
        them.processes[1].kill()
        them.processes[1].join()
        for _ in range(2):
            for rank in (0, 2):
                them.begin(rank, "operate", "sleep", {}, None, {})
            for rank in (0, 2):
                outcome = them.answer(rank)
                assert (outcome.error, outcome.failed_rank, outcome.state) == ("RankFailed", 1, before[rank].state)
                assert "has ended" in outcome.text


@pytest.mark.slow
@pytest.mark.timeout(3600 if FULL else 600)
@pytest.mark.parametrize(("size", "stride"), [(2, 11), (4, 37)])
def test_every_driver_call_of_every_rank_may_fail(size: int, stride: int) -> None:
    """Every rank × every driver call × every position: all ranks fail or none, and the same call works then."""
    stride = 1 if FULL else stride
    with ranks(size) as them:
        for _ in range(2):  # the first cycle makes calls that later ones do not
            calls_of = [_most_calls(_done(them, *step)) for step in CYCLE]
        cases = [
            [(rank, call, after) for call, count in calls.items() for after in range(count) for rank in range(size)]
            for calls in calls_of
        ]
        before, failed = them.operate("sleep", {"level": 0}), 0
        for turn in range(0, max(map(len, cases)), stride):
            for (operation, arguments), wanted in zip(CYCLE, cases, strict=True):
                if turn < len(wanted):
                    rank, call, after = wanted[turn]
                    before, has_failed = _with_fault(them, operation, arguments, before, rank, (call, after))
                    failed += has_failed
                else:
                    before = _done(them, operation, arguments)
        assert failed > 10


def _most_calls(outcomes: list[Outcome]) -> dict[str, int]:
    """How often any rank made each call."""
    return {call: max(each.calls.get(call, 0) for each in outcomes) for call in outcomes[0].calls}


def _done(them: Ranks, operation: str, arguments: dict[str, Any]) -> list[Outcome]:
    outcomes = them.operate(operation, arguments)
    assert_done(outcomes)
    assert all(each.whole for each in outcomes)
    return outcomes


def _with_fault(
    them: Ranks,
    operation: str,
    arguments: dict[str, Any],
    before: list[Outcome],
    rank: int,
    fault: tuple[str, int],
) -> tuple[list[Outcome], bool]:
    """The outcomes in the end, and whether all had failed first."""
    outcomes = them.operate(operation, arguments, at=rank, fault=fault)
    assert_together(outcomes)
    assert all(each.whole for each in outcomes)
    if not outcomes[0].error:
        return outcomes, False
    assert_failed(outcomes, before, rank)
    return _done(them, operation, arguments), True


@pytest.mark.slow
@pytest.mark.parametrize("operation", ARGUMENTS)
@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_is_stopped_at_every_step(operation: str, at: int) -> None:
    """It goes on when the others have given up, or gone on: it does the same. Then the same call works."""
    with ranks(2) as them:
        before = _come_to(them, operation)
        step, stopped = 0, True
        while stopped:
            with them.impatient(1 - at):
                for rank in range(2):
                    extra = {"step": step, "signal": int(signal.SIGSTOP)} if rank == at else {}
                    them.begin(rank, "operate", operation, ARGUMENTS[operation], None, extra)
                stopped = them.until_stopped(at)
                others = them.answer(1 - at)
            if stopped:
                them.signal(at, signal.SIGCONT)
            outcomes = [others, them.answer(at)]
            assert_together(outcomes)
            assert all(each.whole for each in outcomes)
            if outcomes[0].error:
                assert {each.failed_rank for each in outcomes} == {at}
                assert outcomes[0].state == before[0].state
                _done(them, operation, ARGUMENTS[operation])
            _done(them, "sleep" if operation == "wake_up" else "wake_up", {})
            if outcomes[0].error and not stopped:  # given up on a busy machine, before it came there
                stopped = True
            else:
                step += 1
        assert step > 10


@pytest.mark.slow
@pytest.mark.timeout(3600 if FULL else 600)
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (4, 1)] if FULL else [(2, 3), (4, 7)])
@pytest.mark.parametrize("operation", ARGUMENTS)
def test_a_rank_that_is_killed_at_every_step(operation: str, size: int, stride: int) -> None:
    """Those that live sleep all, or are all awake; nobody waits for the time that a hanging rank is given."""
    step, killed = 0, True
    while killed:
        victims = range(size) if FULL else [step % size]
        killed = max(_is_killed(operation, size, at, step) for at in victims)
        step += stride
    assert step > 10


def _is_killed(operation: str, size: int, at: int, step: int) -> bool:
    """Whether the rank got as far as this step, at which it is killed."""
    with ranks(size, timeout_s=2 * ANSWER_S) as them:
        before = _come_to(them, operation)
        for rank in range(size):
            extra = {"step": step, "signal": int(signal.SIGKILL)} if rank == at else {}
            them.begin(rank, "operate", operation, ARGUMENTS[operation], None, extra)
        others = [them.answer(rank) for rank in range(size) if rank != at]
        assert_together(others)
        assert all(each.whole for each in others)
        if others[0].error:
            assert others[0].state == before[0].state
            assert {each.failed_rank for each in others} == {at}
        return them.is_killed(at)


def _come_to(them: Ranks, operation: str) -> list[Outcome]:
    """Where `operation` has something to do."""
    return _done(them, "sleep", {} if operation == "wake_up" else {"level": 0})


@pytest.mark.slow
def test_a_group_of_torch_distributed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = Path(__file__).with_name("gloo_rank.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0].split() for process in processes]
    assert said == [["DriverError", str(PAGE), str(PAGE)], ["RankFailed", str(PAGE), str(PAGE)]]


@pytest.mark.slow
def test_the_group_of_the_docs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    snippet = snippet_at("pytorch", "new_group").text
    if not torch.distributed.is_nccl_available():
        assert "cpu:gloo,cuda:nccl" in snippet
        snippet = snippet.replace("cpu:gloo,cuda:nccl", "cpu:gloo")
    code = f"""
import torch.distributed
from cumem_sleep import CuMemAllocator
{snippet}
allocator.malloc(1, "weights")
report = allocator.sleep()
print("agree" in report.phases, report.freed_bytes, allocator.wake_up().mapped_bytes)
"""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(two_free_ports()), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0].split() for process in processes]
    assert said == [["True", str(PAGE), str(PAGE)]] * 2


class TestSeveralHosts:
    """Without a record that all can reach: rank 0 decides."""

    def test_all_or_none(self) -> None:
        with ranks(3, several_hosts=True) as them:
            before = _done(them, "sleep", {"level": 0})
            for operation, arguments in CYCLE:
                for rank in range(3):
                    if operation != "wake_up":
                        outcomes = them.operate(operation, arguments, at=rank, fault=("cuMemUnmap", 0))
                        assert_failed(outcomes, before, rank)
                before = _done(them, operation, arguments)

    def test_a_rank_that_is_not_called(self) -> None:
        with ranks(2, several_hosts=True) as them:
            before = _done(them, "sleep", {"level": 0})
            for other in (0, 1):
                with them.impatient(other):
                    them.begin(other, "operate", "sleep", {}, None, {})
                    outcome = them.answer(other)
                assert (outcome.failed_rank, outcome.state) == (1 - other, before[other].state)
                _done(them, "sleep", {})
                _done(them, "wake_up", {})

    @pytest.mark.slow
    def test_a_rank_that_is_stopped_at_every_step(self) -> None:
        """One that left the decision to rank 0, which stopped then, says that it does not know; a call mends that."""
        undecided, step, stopped = 0, 0, True
        with ranks(2, several_hosts=True) as them:
            while stopped:
                with them.impatient(1):
                    for rank in range(2):
                        extra = {"step": step, "signal": int(signal.SIGSTOP)} if rank == 0 else {}
                        them.begin(rank, "operate", "sleep", {}, None, extra)
                    stopped = them.until_stopped(0)
                    other = them.answer(1)
                if stopped:
                    them.signal(0, signal.SIGCONT)
                outcomes = [them.answer(0), other]
                if "it may have committed" in other.text:
                    undecided += 1
                    assert "this rank has undone its half" in other.text
                else:
                    assert_together(outcomes)
                _done(them, "sleep", {})
                _done(them, "wake_up", {})
                if other.error and not stopped:  # as above
                    stopped = True
                else:
                    step += 1
        assert undecided < step
