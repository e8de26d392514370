"""Host memory that is unpinned and pinned again, as for level 3: what that takes, and how far copies hide it.

    python benchmarks/pinned_again.py --out result.json          # on a GPU; about half a minute

The pages are there all the time. Each question has a process of its own; answers are seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import questions
from record import GIB

from cumem_sleep import CuMemAllocator, _core

MIB = 1 << 20
BYTES = int(os.environ.get("PINNED_AGAIN_BYTES", 16 * GIB))
SLABS = (32 * MIB, 128 * MIB, 512 * MIB)
TIMES = 3
LANES = 4


@contextmanager
def pinned(slab_bytes: int, nbytes: int = BYTES) -> Iterator[list[_core.HostBlock]]:
    """Blocks of this size, touched and pinned."""
    blocks = [_core.HostBlock(slab_bytes, -1) for _ in range(nbytes // slab_bytes)]
    touch_all(blocks)
    for block in blocks:
        block.pin(0)
    yield blocks
    for block in blocks:
        block.close()


def touch_all(blocks: Sequence[_core.HostBlock]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda block: block.prefault(0, block.bytes), blocks))


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return round(time.perf_counter() - start, 4)


def on_threads(threads: int, call: Callable[[_core.HostBlock], object], blocks: Sequence[_core.HostBlock]) -> None:
    if threads == 1:
        for block in blocks:
            call(block)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, blocks))


def unpin_and_pin() -> dict[str, Any]:
    """By how many threads, in blocks of which size; nothing else runs."""
    CuMemAllocator.get_instance().malloc(2 * MIB)
    found: dict[str, Any] = {}
    for slab_bytes in SLABS:
        with pinned(slab_bytes) as blocks:
            for threads in (1, 2, 4):
                for _ in range(TIMES):
                    unpin = seconds(lambda: on_threads(threads, _core.HostBlock.unpin, blocks))  # noqa: B023
                    pin = seconds(lambda: on_threads(threads, lambda block: block.pin(0), blocks))  # noqa: B023
                    name = f"{slab_bytes // MIB} MiB, {threads} threads"
                    found.setdefault(name, []).append({"unpin": unpin, "pin": pin})
    return found


def device(nbytes: int) -> int:
    return CuMemAllocator.get_instance().malloc(nbytes)


def copy_in(blocks: Sequence[_core.HostBlock], address: int, ready: Callable[[int], object]) -> None:
    """All of them, on four streams in turns; each is waited for before its stream is used again."""
    streams = [_core.CopyStream(0) for _ in range(LANES)]
    for number, block in enumerate(blocks):
        ready(number)
        stream = streams[number % LANES]
        stream.synchronize()
        stream.to_device(address + number * block.bytes, block, 0, block.bytes)
    for stream in streams:
        stream.synchronize()
        with stream:
            pass


def copies() -> dict[str, Any]:
    """A copy of all blocks to the GPU: pinned already; pinned one by one before their copies, by the thread that begins
    these, or by another; all pinned first.
    """
    address = device(BYTES)
    found: dict[str, Any] = {}
    for slab_bytes in SLABS:
        with pinned(slab_bytes) as blocks:

            def pin(number: int) -> None:
                blocks[number].pin(0)

            def ahead(threads: int) -> None:
                tasks = {number: [_core.Task(lambda number=number: pin(number))] for number in range(len(blocks))}
                with _core.Ahead(threads, tasks) as others:
                    others.start()
                    copy_in(blocks, address, others.wait)

            def unpin() -> None:
                on_threads(1, _core.HostBlock.unpin, blocks)

            def pin_first() -> None:
                on_threads(1, lambda block: block.pin(0), blocks)
                copy_in(blocks, address, lambda _: None)

            ways: dict[str, tuple[bool, Callable[[], None]]] = {
                "pinned already": (False, lambda: copy_in(blocks, address, lambda _: None)),
                "one by one": (True, lambda: copy_in(blocks, address, pin)),
                "ahead, by 1 thread": (True, lambda: ahead(1)),
                "ahead, by 2 threads": (True, lambda: ahead(2)),
                "all first": (True, pin_first),
            }
            for name, (is_unpinned, way) in ways.items():
                for _ in range(TIMES):
                    if is_unpinned:
                        unpin()
                    found.setdefault(f"{slab_bytes // MIB} MiB, {name}", []).append(seconds(way))
    return found


def during_copies() -> dict[str, Any]:
    """How long one block takes to be pinned and unpinned while copies of others are in flight, and without."""
    address = device(BYTES // 2)
    found: dict[str, Any] = {}
    with pinned(128 * MIB, BYTES // 2) as others, pinned(128 * MIB, GIB) as blocks:
        for name, busy in (("nothing in flight", False), ("copies in flight", True)):
            with _core.CopyStream(0) as stream:
                if busy:
                    for number, block in enumerate(others):
                        stream.to_device(address + number * block.bytes, block, 0, block.bytes)
                found[f"unpin, {name}"] = [seconds(block.unpin) for block in blocks]
                found[f"pin, {name}"] = [seconds(lambda: block.pin(0)) for block in blocks]  # noqa: B023
                found[f"copies took, after that, {name}"] = seconds(stream.synchronize)
    return found


QUESTIONS = {"during_copies": during_copies, "copies": copies, "unpin_and_pin": unpin_and_pin}

if __name__ == "__main__":
    questions.main(__doc__, QUESTIONS, timeout_s=60)
