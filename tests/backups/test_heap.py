"""The thread that registers host memory has heap for what the driver allocates, before pages are prefaulted."""

from __future__ import annotations

import mmap
import os

import pytest
from support import MIB, PAGE, Memory, run_script

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.store import lanes

# How many page faults it takes a thread to allocate 3.5 MiB in small pieces. Neither thread ends before both have
# counted, because a new one would get the heap of one that has.
COUNT_FAULTS = """
import ctypes, resource, threading
from cumem_sleep.store.lanes import _grown_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
all_counted = threading.Barrier(2)
faults = {}

def count(nbytes):
    top = _grown_heap(nbytes) if nbytes else b""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(300):
        ctypes.memset(libc.malloc(12 << 10), 1, 12 << 10)
    faults[nbytes] = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    all_counted.wait()

threads = [threading.Thread(target=count, args=(nbytes,)) for nbytes in (0, 4 << 20)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(faults[0], faults[4 << 20])
"""


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer has a heap of its own")
def test_what_is_reserved_takes_no_page_fault() -> None:
    process = run_script(COUNT_FAULTS, MALLOC_ARENA_MAX="8")
    assert process.returncode == 0, process.stderr
    without, with_reserve = map(int, process.stdout.split())
    assert without > (2 * MIB) // mmap.PAGESIZE, "its heap was large enough already, so the other one shows nothing"
    assert with_reserve < without / 10


def test_it_comes_before_pages_are_prefaulted_and_for_every_block(
    allocator: CuMemAllocator, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, each step by which the heap grows would wait for the threads that prefault."""
    seen: list[str] = []
    grown_heap = lanes._grown_heap

    def grow(nbytes: int) -> bytes:
        seen.append(f"grow {nbytes}")
        return grown_heap(nbytes)

    def prefault_ahead(block: _core.HostBlock, offset: int, nbytes: int) -> _core.Task:
        def run() -> None:
            seen.append("prefault")
            block.prefault(offset, nbytes)

        return _core.Task(run)

    address = allocator.malloc(3 * PAGE)
    content = memory.fill_random(address, 3 * PAGE)
    monkeypatch.setattr(lanes, "_grown_heap", grow)
    monkeypatch.setattr(_core, "prefault_task", prefault_ahead)
    allocator.sleep()
    blocks = -(-3 * PAGE // allocator.tuning.slab_bytes)
    assert seen[0] == f"grow {blocks * lanes._HEAP_BYTES}"
    assert "prefault" in seen[1:]
    assert seen.count(seen[0]) == 1
    allocator.wake_up()
    assert memory.read(address, 3 * PAGE) == content
