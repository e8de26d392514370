"""What the thread that registers host memory waits for in a first sleep of `cumem-sleep bench`: one line a process.

    PYTHONPATH=SITE python benchmarks/first_sleep_waits.py [WAY]     # nine seconds on an H200

SITE is the folder of a build, which may be as old as 8377592: then only the sleep's phases are said. Ways: `mainthread`
(the operation runs on the main thread), `warm` (its thread's heap is enlarged first, by 50 MiB), `touchN` (pages are
prefaulted N MiB at a time); without one, all is as it is. MALLOC_ARENA_MAX=1 has all threads share a heap.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

PIECES, PIECE_BYTES = 500, 100 << 10
SIZES = ("--weights", "16GiB", "--kv", "12GiB")
found: dict[str, float] = {}


def watch_registrations(host: Any) -> None:
    """How long they take, and the page faults and waits of their thread meanwhile."""

    def have_pinned(self: Any, block: Any, device: int) -> None:
        if block.pinned:
            return
        begin = time.perf_counter()
        if self._prefaulted is not None and id(block) in self._expected:
            self._prefaulted.wait(id(block))
        else:
            block.prefault(0, block.bytes)
        used, touched = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter()
        block.pin(device)
        now = resource.getrusage(resource.RUSAGE_THREAD)
        more = {
            "prefault_wait_s": touched - begin,
            "register_s": time.perf_counter() - touched,
            "register_system_s": now.ru_stime - used.ru_stime,
            "page_faults": now.ru_minflt - used.ru_minflt,
            "waits": now.ru_nvcsw - used.ru_nvcsw,
            "registered": 1,
        }
        for name, value in more.items():
            found[name] = found.get(name, 0) + value

    host.HostTransfers.have_pinned = have_pinned


def with_larger_heap(work: Callable[[], Any]) -> Any:
    """The result of `work`, on a thread whose heap has free memory."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    pieces = [libc.malloc(PIECE_BYTES) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE_BYTES)
    libc.malloc(100)  # the end of the heap, so that it does not shrink again
    for piece in pieces:
        libc.free(piece)
    return work()


def main() -> None:
    way = sys.argv[1] if len(sys.argv) > 1 else ""
    is_new = importlib.util.find_spec("cumem_sleep.backup") is None
    bench = importlib.import_module("cumem_sleep.tools.bench.run" if is_new else "cumem_sleep.bench.run")
    log = importlib.import_module("cumem_sleep.log") if is_new else None
    if way and not (way.startswith("touch") or (way in ("mainthread", "warm") and is_new)):
        sys.exit(
            f"{way}: expected touchN, mainthread or warm, the last two with a build that has operations of its own"
        )
    if is_new:
        watch_registrations(importlib.import_module("cumem_sleep.backups.host"))
    if way == "mainthread" and log is not None:
        log.run = lambda _lock, work: work()
    if way == "warm" and log is not None:
        run = log.run
        log.run = lambda lock, work: run(lock, partial(with_larger_heap, work))

    def play(self: Any, touch: Callable[[], None]) -> None:
        if way.startswith("touch"):
            nbytes = int(way.removeprefix("touch")) << 20
            if is_new:
                self._allocator.tuning.prefault_bytes = nbytes
            else:
                importlib.import_module("cumem_sleep.backup")._PREFAULT_BYTES = nbytes  # type: ignore[attr-defined]
        self._rewrite(self._weights)
        touch()
        self._sleep("first sleep")
        step = self.steps[-1]
        said = {"way": way, "seconds": step.seconds, "phases": dict(step.phases), **found}
        print(
            json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in said.items()})
        )
        sys.stdout.flush()
        os._exit(0)  # the rest of the benchmark is not wanted

    bench._Bench.play = play
    sys.argv = ["cumem-sleep", "bench", "--rounds", "1", *SIZES, "--json"]
    importlib.import_module("cumem_sleep.tools.cli" if is_new else "cumem_sleep.cli").main()


if __name__ == "__main__":
    main()
