"""Ranks as processes on the simulated driver, and what a test has them do.

They live over many cases. They are forked from a server that has imported everything, so that new ones cost little.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from support import PAGE, fresh_allocator, holds, quick_sums

from cumem_sleep import CuMemAllocator, CumemSleepError, RankFailed, _core, host_facts, sim
from cumem_sleep.backups import host_tier
from cumem_sleep.digest import digester as digest_device
from cumem_sleep.operations import prepare
from cumem_sleep.ranks import mesh as mesh_module
from cumem_sleep.ranks.decisions import Record
from cumem_sleep.ranks.mesh import Mesh

ANSWER_S = 60.0  # a rank that takes longer hangs
SHORT_S = 0.3  # how long an impatient one waits
READY_S = 20.0  # for how long ranks wait for each other, where nobody is missing
TAGS = ("weights", "kv_cache", "default")
# What the protocol does: a rank is stopped, or killed, before and after any of these.
STEPS = ((Mesh, "send"), (Mesh, "receive"), (Record, "of"), (Record, "decide"))

_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(["numpy", "cumem_sleep.allocator", "cumem_sleep.sim"])


@dataclass(frozen=True)
class Outcome:
    """What became of one call on one rank, and how its memory is now.

    Attributes:
        error: name of the type, "" if there was none.
        failed_rank: that a `RankFailed` names, or that an error says it was; -1 if none.
        asleep: how many segments sleep, of each tag.
        whole: memory that is awake, and was not dropped, has its bytes.
        held: handles and bytes that the driver has given out.
        calls: of the driver, and the `steps` that were counted.
    """

    error: str
    text: str
    failed_rank: int
    asleep: tuple[int, ...]
    whole: bool
    held: tuple[int, int]
    phases: dict[str, float] = field(default_factory=dict, compare=False)
    calls: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def state(self) -> tuple[object, ...]:
        return self.asleep, self.held


class ThroughTest:
    """The group, in a rank: the test gathers."""

    def __init__(self, link: Connection, rank: int, size: int) -> None:
        self._link, self.rank, self.size, self.address = link, rank, size, "127.0.0.1"

    def all_gather(self, value: Any) -> list[Any]:
        self._link.send(value)
        return list(self._link.recv())


class _Worker:
    """One rank, in its process."""

    def __init__(self, link: Connection, rank: int, size: int, timeout_s: float, several_hosts: bool) -> None:
        digest_device.sums_of = quick_sums
        host_facts.mem_available_bytes = lambda **_: None  # type: ignore[assignment]
        CuMemAllocator.tuning.slab_bytes = PAGE
        if several_hosts:
            mesh_module._host = lambda: f"host {rank}"
        self._link = link
        sim.configure(device_bytes=64 * PAGE)
        self._allocator = fresh_allocator(agreement_timeout_s=timeout_s)
        self._lost: list[tuple[int, int]] = []  # ranges of the weights
        self._content: dict[int, bytes] = {}
        for number, tag in enumerate(TAGS):
            address = self._allocator.malloc(PAGE, tag)
            self._content[address] = bytes([number + 17 * rank + 1]) * PAGE
            ctypes.memmove(address, self._content[address], PAGE)
        self._allocator.join(ThroughTest(link, rank, size))
        link.send(self._allocator._agreement is not None)

    def run(self) -> None:
        while (command := self._link.recv()) is not None:
            self._link.send(getattr(self, command[0])(*command[1:]))

    def operate(
        self, operation: str, arguments: dict[str, Any], fault: tuple[str, int] | None, extra: dict[str, Any]
    ) -> Outcome:
        if "drop" in arguments:  # of the weights
            (weights,) = (segment.address for segment in _core.segments() if segment.tag == "weights")
            arguments = {**arguments, "drop": {weights: arguments["drop"]}}
        error: BaseException | None = None
        phases: dict[str, float] = {}
        sim.reset()
        if fault is not None:
            sim.fail(fault[0], after=fault[1], error="CUDA_ERROR_UNKNOWN")
        if "device_bytes" in extra:
            sim.configure(device_bytes=extra["device_bytes"])
        with _signalled(extra.get("step"), extra.get("signal")) as count:
            try:
                phases = dict(getattr(getattr(self._allocator, operation)(**arguments), "phases", {}))
            except (CumemSleepError, KeyboardInterrupt) as raised:
                error = raised.with_traceback(None)
        if error is None:
            self._note_loss(operation, arguments)
        calls = dict(sim.stats().calls)
        sim.reset()
        sim.configure(device_bytes=64 * PAGE)
        failed = error.failed_rank if isinstance(error, RankFailed) else getattr(error, "rank", None)
        name = type(error).__name__ if error is not None else ""
        calls["steps"] = count[0]
        return self._outcome(name, str(error or ""), -1 if failed is None else failed, phases, calls)

    def _note_loss(self, operation: str, arguments: dict[str, Any]) -> None:
        """Weights that were dropped are loaded anew, as a server does it."""
        if operation == "forget" or (operation == "sleep" and arguments.get("level") == 2):
            (self._lost,) = arguments.get("drop", {0: [(0, PAGE)]}).values()
        elif operation == "wake_up" and self._lost:
            for segment in _core.segments():
                for offset, nbytes in self._lost if segment.tag == "weights" else ():
                    content = self._content[segment.address][offset : offset + nbytes]
                    ctypes.memmove(segment.address + offset, content, nbytes)
            self._lost = []

    def _outcome(self, error: str, text: str, failed: int, phases: dict[str, float], calls: dict[str, int]) -> Outcome:
        asleep, whole = dict.fromkeys(TAGS, 0), True
        for segment in _core.segments():
            if segment.sleep != _core.Segment.Sleep.AWAKE:
                asleep[segment.tag] += 1
            elif segment.tag != "kv_cache" and not (self._lost and segment.tag == "weights"):
                whole &= holds(segment.address, self._content[segment.address])
        stats = sim.stats()
        return Outcome(
            error,
            text,
            failed,
            tuple(asleep.values()),
            whole,
            (stats.live_handles, stats.mapped_bytes),
            phases,
            calls,
        )

    def limit(self, seconds: float) -> None:
        """For how long it waits for the others from now on."""
        assert self._allocator._agreement is not None
        self._allocator._agreement.timeout_s = seconds

    def cost(self, rounds: int) -> list[tuple[float, float]]:
        """Seconds of agreeing, of sleeps and of wakes."""
        return [
            (self._allocator.sleep(1).phases["agree"], self._allocator.wake_up().phases["agree"]) for _ in range(rounds)
        ]

    def begin_unasked(self, ledger: str, left_bytes: int, reserve: int) -> int:
        """Backups ahead, where so much of host memory is left; how many bytes have one in the end."""
        host_facts.memory_groups = lambda: [pathlib.Path(ledger)]  # type: ignore[assignment]
        host_facts.cgroup_available_bytes = lambda **_: None  # type: ignore[assignment]
        host_facts.mem_available_bytes = lambda **_: left_bytes  # type: ignore[assignment]
        host_tier.reserved_bytes = lambda: {"MemAvailable": reserve}  # type: ignore[assignment]
        prepare.LOOK_S = 0.001
        self._allocator._prepare_where_there_is_room()
        preparation = self._allocator._preparation
        while preparation is not None and preparation.running and self._backed_up() < preparation.wanted_bytes:
            time.sleep(0.001)
        return self._backed_up()

    def kept_room(self, left_bytes: int) -> int:
        """Where so much of host memory is left."""
        host_facts.memory_groups = list  # type: ignore[assignment]
        host_facts.cgroup_available_bytes = lambda **_: None  # type: ignore[assignment]
        host_facts.mem_available_bytes = lambda **_: left_bytes  # type: ignore[assignment]
        try:
            return self._allocator.kept_room()
        finally:
            host_facts.mem_available_bytes = lambda **_: None  # type: ignore[assignment]

    def _backed_up(self) -> int:
        return sum(usage.backed_up_bytes for usage in self._allocator.usage().values())

    def short_of_host_memory(self) -> None:
        host_facts.mem_available_bytes = lambda **_: 0  # type: ignore[assignment]

    def gave_back(self) -> bool:
        preparation = self._allocator._preparation
        assert preparation is not None
        is_over = preparation.wait(ANSWER_S)
        host_facts.mem_available_bytes = lambda **_: None  # type: ignore[assignment]
        return is_over and self._allocator._store.memory.bytes == 0

    def raised_before(self, operation: str) -> Outcome:
        """A call whose arguments are refused."""
        return self.operate(operation, {"level": 7} if operation == "sleep" else {"tags": "unknown"}, None, {})


@contextlib.contextmanager
def _signalled(at: int | None, number: int | None) -> Iterator[list[int]]:
    """The process sends itself a signal at one step of the protocol."""
    count = [0]
    if at is None:
        yield count
        return

    def tick() -> None:
        count[0] += 1
        if count[0] - 1 == at and number:
            os.kill(os.getpid(), number)

    def around(called: Callable[..., Any]) -> Callable[..., Any]:
        def ticking(*arguments: Any, **names: Any) -> Any:
            tick()
            try:
                return called(*arguments, **names)
            finally:
                tick()

        return ticking

    kept = [(owner, name, getattr(owner, name)) for owner, name in STEPS]
    for owner, name, called in kept:
        setattr(owner, name, around(called))
    try:
        yield count
    finally:
        for owner, name, called in kept:
            setattr(owner, name, called)


def _live(link: Connection, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _Worker(link, *arguments).run()


class Ranks:
    """Some ranks, seen from the test."""

    def __init__(self, size: int, timeout_s: float = READY_S, several_hosts: bool = False) -> None:
        self.size = size
        self.links: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = _forkserver.Pipe()
            process = _forkserver.Process(
                target=_live, args=(theirs, rank, size, timeout_s, several_hosts), daemon=True
            )
            process.start()
            theirs.close()
            self.links.append(ours)
            self.processes.append(process)
        for _ in range(2):
            gathered = self.answers()
            for link in self.links:
                link.send(gathered)
        assert self.answers() == [True] * size

    def answer(self, rank: int, within_s: float = ANSWER_S) -> Any:
        assert self.links[rank].poll(within_s), f"rank {rank} hangs"
        return self.links[rank].recv()

    def answers(self) -> list[Any]:
        return [self.answer(rank) for rank in range(self.size)]

    def begin(self, rank: int, *command: Any) -> None:
        self.links[rank].send(command)

    def all(self, *command: Any) -> list[Any]:
        """What all answer, asked at once."""
        for rank in range(self.size):
            self.begin(rank, *command)
        return self.answers()

    def operate(
        self,
        operation: str,
        arguments: dict[str, Any] | None = None,
        at: int = -1,
        fault: tuple[str, int] | None = None,
        **extra: Any,
    ) -> list[Outcome]:
        """Of all ranks, with a fault in one of them."""
        for rank in range(self.size):
            mine = rank == at
            self.begin(rank, "operate", operation, arguments or {}, fault if mine else None, extra if mine else {})
        return self.answers()

    @contextlib.contextmanager
    def impatient(self, *impatient: int) -> Iterator[None]:
        """These soon give up others, which are missing. Ranks that are merely slow are given up by nobody."""
        self._limit(SHORT_S, impatient)
        yield
        self._limit(READY_S, impatient)

    def _limit(self, seconds: float, whose: tuple[int, ...]) -> None:
        for rank in whose:
            self.begin(rank, "limit", seconds)
            self.answer(rank)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def until_stopped(self, rank: int) -> bool:
        """Wait until the rank is stopped; False if it has answered instead."""
        ends_at = time.monotonic() + ANSWER_S
        path = f"/proc/{self.processes[rank].pid}/stat"
        while time.monotonic() < ends_at:
            if self.links[rank].poll(0.001):
                return False
            with open(path) as file:
                if file.read().rpartition(")")[2].split()[0] in "TZ":
                    return True
        raise AssertionError(f"rank {rank} neither stops nor answers")

    def is_killed(self, rank: int) -> bool:
        """Wait until the rank has ended; False if it has answered instead."""
        try:
            self.answer(rank)
        except (EOFError, ConnectionResetError):
            return True
        return False

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for link in self.links:
            link.close()


@contextlib.contextmanager
def ranks(size: int, **how: Any) -> Iterator[Ranks]:
    them = Ranks(size, **how)
    try:
        yield them
    finally:
        them.end()
