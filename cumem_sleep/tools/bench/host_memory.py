"""Host memory that the hypervisor has yet to provide."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing

from ... import _core, host_facts

_BLOCK_BYTES = 1 << 30
_PIECE_BYTES = 64 << 20


def touch_host_memory(nbytes: int, numa_node: int = -1) -> None:
    """Prefault this much host memory, all of it at the same time, and give it back.

    Virtual machines get some of their RAM only at its first use, at a tenth of the speed: without this, a first
    sleep measures the hypervisor. Needs no driver.

    Args:
        numa_node: where to allocate; -1 is anywhere.

    Raises:
        OutOfHostMemory: the system refuses.
    """
    with ExitStack() as stack:
        blocks = [
            stack.enter_context(closing(_core.HostBlock(min(_BLOCK_BYTES, nbytes - start), numa_node)))
            for start in range(0, nbytes, _BLOCK_BYTES)
        ]
        pool = ThreadPoolExecutor(host_facts.usable_cores(), thread_name_prefix="cumem-sleep-prefault")
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)  # before the blocks are closed, also after Ctrl-C
        pieces = [
            pool.submit(block.prefault, start, min(_PIECE_BYTES, block.bytes - start))
            for block in blocks
            for start in range(0, block.bytes, _PIECE_BYTES)
        ]
        for piece in as_completed(pieces):
            piece.result()
