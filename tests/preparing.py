"""Preparations of segments of two pieces, and what acts between their steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from support import (
    MIB,
    PAGE,
    SIMULATED,
    Memory,
    ample_host_memory,
    in_thread,
    patch_prefault,
    quick_sums,
    thread_name,
)

from cumem_sleep import CuMemAllocator, OutOfHostMemory, _core
from cumem_sleep.operations.prepare import Preparation

PREPARING = "cumem-prepare"  # the thread's name
TAGS = ("weights", "default")
# For two segments of two pieces: each is begun, copied twice, finished and tidied up after; and at the end once more.
STEPS = 9
COPYING = (1, 2, 3)  # steps of the first segment between its two digests


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces, each a block of its own, in every segment."""
    monkeypatch.setattr(CuMemAllocator.tuning, "prepare_piece_bytes", MIB)
    monkeypatch.setattr(CuMemAllocator.tuning, "slab_bytes", MIB)
    ample_host_memory(monkeypatch)
    if SIMULATED:
        monkeypatch.setattr("cumem_sleep.digest.digester.sums_of", quick_sums)


def until_asked_to_stop(preparation: Preparation) -> None:
    while not preparation._worker.asked_to_stop:
        time.sleep(0.0005)


def on_preparing_thread() -> bool:
    return thread_name() == PREPARING


def fill(allocator: CuMemAllocator, memory: Memory, *tags: str) -> dict[int, bytes]:
    """A segment of random bytes for each tag: the bytes by address."""
    addresses = [allocator.malloc(PAGE, tag) for tag in tags]
    return {address: memory.fill_random(address, PAGE) for address in addresses}


def check_bytes(memory: Memory, contents: dict[int, bytes]) -> None:
    for address, content in contents.items():
        assert memory.read(address, PAGE) == content


def changed(content: bytes, place: int = 0) -> bytes:
    new = bytearray(content)
    new[place] ^= 0xFF
    return bytes(new)


def finished(preparation: Preparation) -> Preparation:
    assert preparation.wait(30)
    assert not preparation.running
    return preparation


def backed_up_bytes(allocator: CuMemAllocator) -> int:
    return sum(usage.backed_up_bytes for usage in allocator.usage().values())


class Steps:
    """Counts the steps of a preparation (each begins with taking the allocator's lock), and acts just before one.

    The act runs on a thread of its own while the preparing thread waits for it.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object] | None = None, at: int | None = None
    ) -> None:
        self.count = 0
        self.preparation: Preparation | None = None
        self._act = act
        self._at = at
        self._begun = threading.Event()
        self._errors: list[BaseException] = []
        hold = _core.OperationLock.hold

        def counted(lock: _core.OperationLock, wait: bool = True) -> _core.LockGuard:
            if on_preparing_thread() and not self._errors:
                self._take()
            return hold(lock, wait)

        monkeypatch.setattr(_core.OperationLock, "hold", counted)

    def begin(self, allocator: CuMemAllocator) -> Preparation:
        self.preparation = allocator.prepare()
        self._begun.set()
        return self.preparation

    def prepare(self, allocator: CuMemAllocator) -> Preparation:
        """Begin, wait for the end, and see that the act went well."""
        preparation = finished(self.begin(allocator))
        if self._errors:
            raise self._errors[0]
        assert self._at is None or self.count > self._at, "there was no such turn"
        return preparation

    def _take(self) -> None:
        assert self._begun.wait(30)
        number, self.count = self.count, self.count + 1
        if self._act is not None and (self._at is None or number == self._at):
            try:
                in_thread(self._act)
            except BaseException as error:
                self._errors.append(error)


def refuse_prefault(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The kernel has no page for the block after so many of a preparation's blocks."""
    prefault, prefaulted = _core.HostBlock.prefault, []

    def refusing(block: _core.HostBlock, offset: int, nbytes: int) -> None:
        if on_preparing_thread() and block.bytes == MIB:
            prefaulted.append(offset)
            if len(prefaulted) > after:
                raise OutOfHostMemory(nbytes, 0, "madvise")
        prefault(block, offset, nbytes)

    patch_prefault(monkeypatch, refusing)


class Gate:
    """Stops the first preparing thread that comes to copy, until it is opened. The thread holds the lock meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()
        to_host = _core.CopyStream.to_host
        self.address = 0

        def gated(stream: _core.CopyStream, block: _core.HostBlock, offset: int, address: int, nbytes: int) -> None:
            to_host(stream, block, offset, address, nbytes)
            if on_preparing_thread() and block.bytes == MIB and not self._reached.is_set():
                self.address = address
                self._reached.set()
                assert self._opened.wait(30)

        monkeypatch.setattr(_core.CopyStream, "to_host", gated)

    def wait(self) -> None:
        assert self._reached.wait(30)

    def open(self) -> None:
        self._opened.set()


class Opened:
    """Runs what waits for a preparation on a thread of its own, and opens the gate once the thread runs."""

    def __init__(self, gate: Gate, preparation: Preparation, work: Callable[[], Preparation]) -> None:
        self._results: list[Preparation] = []
        started = threading.Event()

        def run() -> None:
            started.set()
            self._results.append(work())

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(30)
        assert preparation.running
        gate.open()

    def result(self) -> Preparation:
        self._thread.join(30)
        return self._results[0]
