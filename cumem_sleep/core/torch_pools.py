"""PyTorch memory pools whose memory comes from this layer, and what it takes for freed memory to really go back.

A new `torch.cuda.MemPool` is made for each time a pool is entered, one per device, and given up on leaving: its live
tensors stay where they are. Memory that is free in it is released at once; memory that is freed later is released by
the next `torch.cuda.empty_cache()`. Keeping the MemPool, as PyTorch's documentation suggests, keeps all its free memory
as well: `empty_cache()` passes over pools that somebody still holds (pytorch#145168).
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from .. import _core

OLDEST_TORCH = (2, 8)
# From this version on (seen with 2.11) such pools simply do not use them.
POOLS_IGNORE_EXPANDABLE_SEGMENTS = (2, 11)
CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def torch_with_cuda() -> Any:
    """PyTorch, if it is installed and reaches a GPU, else None. Imports it if need be."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch if torch.cuda.is_available() else None


class TorchPools:
    """Makes and gives up the memory pools of one process."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._allocator: Any = None
        self._graph_pools: dict[tuple[int, Hashable], Any] = {}  # by device, and who shares it
        self._open: set[tuple[int, int]] = set()  # ids of pools that somebody allocates from
        self._configuration_lock = threading.RLock()  # what is closed by the garbage collector may interrupt it
        self._configuration: str | None = None  # to be put back when the last thread has left its pool
        self._inside: set[object] = set()  # one for each
        self._version = tuple(int(part) for part in torch.__version__.split(".")[:2])

    @contextmanager
    def use(self) -> Iterator[None]:
        """What this thread allocates inside comes from the layer's hooks, on every visible device."""
        try:
            with self._in_new_pools():
                yield
        finally:
            self.trim()

    @contextmanager
    def leave(self) -> Iterator[None]:
        """The opposite: it comes from PyTorch's own allocator, although the thread is in a pool of ours.

        What is free of it afterwards goes back. The rest of PyTorch's cache stays: it is the process's own, and sleeps
        with it where the process is a region.
        """
        try:
            with self._in_new_pools(ordinary=True):
                yield
        finally:
            # Inside of any pool, empty_cache() passes over that cache, and frees what given-up pools have left.
            with self._in_new_pools(ordinary=True):
                self.trim()

    @contextmanager
    def _in_new_pools(self, *, ordinary: bool = False) -> Iterator[None]:
        pools: list[tuple[int, Any]] = []
        try:
            with self._without_expandable_segments(), ExitStack() as stack:
                for device in range(self._torch.cuda.device_count()):
                    pool = self._new_pool(device, ordinary=ordinary)
                    pools.append((device, pool))
                    self._open.add(pool.id)
                    stack.enter_context(self._torch.cuda.use_mem_pool(pool, device=device))
                yield
        finally:
            for device, pool in pools:
                self._open.discard(pool.id)
                self._give_up(device, pool)

    def in_use(self) -> dict[int, list[tuple[int, int]]]:
        """What is in use of PyTorch's segments, by their addresses: where each block begins and ends in the segment.

        Left out are segments of pools that are open, since more of them may be in use a moment later, and of pools for
        graphs: a replay uses blocks that PyTorch counts as free. Of all others no block is ever handed out again.
        """
        graphs = {pool.id for pool in self._graph_pools.values()}
        found: dict[int, list[tuple[int, int]]] = {}
        for segment in self._torch.cuda.memory_snapshot() if self._torch.cuda.is_initialized() else ():
            if segment["segment_pool_id"] == (0, 0) or segment["segment_pool_id"] in self._open | graphs:
                continue
            blocks = (
                (block["address"] - segment["address"], block["requested_size"])
                for block in segment["blocks"]
                if block["state"] != "inactive"
            )
            found[segment["address"]] = [(begin, begin + nbytes) for begin, nbytes in blocks]
        return found

    def graph_pool_id(self, shared_by: Hashable = None) -> tuple[int, int]:
        """The id of the pool to capture CUDA graphs of the current device into, made at first use.

        Args:
            shared_by: those who give the same share a pool.
        """
        key = self._torch.cuda.current_device(), shared_by
        if key not in self._graph_pools:
            self._graph_pools[key] = self._new_pool(key[0])
            _make_immortal(self._graph_pools[key])
        pool_id: tuple[int, int] = self._graph_pools[key].id
        return pool_id

    @contextmanager
    def pool_of_one_graph(self) -> Iterator[tuple[int, int]]:
        """The id of a pool for the graph that is captured inside: its memory is free once the graph is gone."""
        device = self._torch.cuda.current_device()
        pool = self._new_pool(device)
        self._open.add(pool.id)  # for good: graphs go on using it
        try:
            yield pool.id
        finally:
            self._give_up(device, pool)

    def release(self) -> None:
        """Give up the graph pools: their memory goes back once the graphs that use it are gone."""
        while self._graph_pools:
            (device, _), pool = self._graph_pools.popitem()
            self._open.add(pool.id)  # for good, as above
            self._torch._C._cuda_releasePool(device, pool.id)
        self.trim()

    def trim(self) -> None:
        """Give free memory of pools that were given up back to the device, and PyTorch's own cache with it."""
        if self._torch.cuda.is_initialized():
            self._torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        """Whether this thread's current stream is capturing a CUDA graph."""
        return bool(self._torch.cuda.is_initialized() and self._torch.cuda.is_current_stream_capturing())

    def _new_pool(self, device: int, *, ordinary: bool = False) -> Any:
        if self._allocator is None and not ordinary:
            self._allocator = self._torch.cuda.memory.CUDAPluggableAllocator(
                _core.__file__, "cumem_sleep_malloc", "cumem_sleep_free"
            )
            # PyTorch keeps calling it, through plain pointers in some versions, as long as a pool has memory.
            _make_immortal(self._allocator)
            _make_immortal(self._allocator._allocator)
        self._torch.cuda.init()
        # A pool knows its allocator only on the device that is current when it is made. This way of changing the
        # device, unlike torch.cuda.device, does not create a context (half a GiB) on a GPU that is not in use; but only
        # the other call undoes it.
        previous = self._torch.cuda.current_device()
        self._torch.cuda._maybe_exchange_device(device)
        try:
            return self._torch.cuda.MemPool(None if ordinary else self._allocator._allocator)
        finally:
            self._torch.cuda._exchange_device(previous)

    def _give_up(self, device: int, pool: Any) -> None:
        # PyTorch releases memory of pools that nobody holds, so the hold goes now. Not by destroying the MemPool: its
        # destructor asserts that no capture and no other pool is active, and a failed assertion there ends the process.
        # So the object (a few hundred bytes) stays, without the hold that its destructor would give back.
        _make_immortal(pool)
        self._torch._C._cuda_releasePool(device, pool.id)

    @contextmanager
    def _without_expandable_segments(self) -> Iterator[None]:
        """Older PyTorch refuses a pool with an allocator of its own beside expandable segments (pytorch#147851)."""
        if self._version >= POOLS_IGNORE_EXPANDABLE_SEGMENTS:
            yield
            return
        mine = object()
        try:
            with self._configuration_lock:
                self._inside.add(mine)
                if len(self._inside) == 1:
                    settings = self._torch.cuda.memory._snapshot()["allocator_settings"]
                    if settings.get("expandable_segments"):
                        # A setter resets every option that its text leaves out, so the whole text is written back.
                        self._configuration = next(
                            (settings[name] for name in CONF_VARIABLES if settings.get(name)),
                            "expandable_segments:True",
                        )
                        self._set_configuration(_with_expandable_segments(self._configuration, enabled=False))
            yield
        finally:
            with self._configuration_lock:
                self._inside.discard(mine)
                if not self._inside and self._configuration is not None:
                    self._set_configuration(self._configuration)
                    self._configuration = None

    def _set_configuration(self, text: str) -> None:
        setter = getattr(self._torch._C, "_accelerator_setAllocatorSettings", None)
        (setter or self._torch.cuda.memory._set_allocator_settings)(text)


def _with_expandable_segments(text: str, *, enabled: bool) -> str:
    options = [option.strip() for option in text.split(",") if option.strip()]
    kept = [option for option in options if option.partition(":")[0].strip() != "expandable_segments"]
    return ",".join([*kept, f"expandable_segments:{enabled}"])


def _make_immortal(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
