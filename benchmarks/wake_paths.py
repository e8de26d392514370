"""Ways to copy while the driver scrubs freed memory, and what a running model notices of copies and pinning.

    python benchmarks/wake_paths.py --out benchmarks/results/wake_paths.json

Each question runs in a process of its own, so that none sees memory that another one freed:

- `copies_while_wiping`: GB/s to memory that was never freed, by time after 115 GiB were freed, by the copy engine on
  one and on four streams, by a kernel that reads pinned memory, and of copies to the host.
- `mixed`: the same by the vault's kernel, by the engine, and by both in turns, 64 MiB each and several in flight; and
  seconds until what was freed is mapped again meanwhile.
- `calls`: the same by other calls of the driver for the same copy, which might use another engine: as between device
  addresses, between contexts, of two dimensions, as a batch, from host memory that was made by cuMemCreate, with a
  stream of high priority, and from a second context.
- `mapping_beside_copies`: seconds until 115 GiB that were just freed are mapped again, beside copies of each kind.
- `wakes`: seconds of a verified wake of 61 GiB + 54 GiB, right after its sleep and 3 s later, by the engine alone in
  batches of 64 and 256 MiB, and with the copy kernel.
- `trials`: seconds of a wake of 16 GiB + 108 GiB right after its sleep, by how many bytes the engine is tried with, and
  with one trial alone; and how long the sleeps took.
- `decode_beside_work`: ms of a decode step in a CUDA graph beside touching and pinning blocks, and copying pieces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import cupy
import torch
from cuda.bindings import driver as cuda
from driver_behaviour import access, call
from prepare_cost import decode_graph, step_ms, summary
from questions import main
from record import GIB, touch_host_memory

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.tools.bench.workload import kv_segments, model_like

MIB = 1 << 20
PIECE_BYTES = 256 * MIB
WATCHED_S = 0.5
MIXED_IN_FLIGHT, WINDOW_S, PIPELINED_BYTES = 6, 0.02, 64 * MIB
KERNEL = cupy.RawKernel(
    """
    extern "C" __global__ void copy(uint4* target, const uint4* source, size_t words) {
        const size_t step = (size_t)gridDim.x * blockDim.x;
        for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) target[i] = source[i];
    }
    """,
    "copy",
)
Copy = Callable[[int], None]  # begins the copy number so and so


class Link:
    """A pinned block and device memory that is never freed, and the ways to copy between them."""

    def __init__(self, streams: int = 4) -> None:
        self.address = CuMemAllocator.get_instance().malloc(GIB, "kept")
        self.block = _core.HostBlock(GIB, -1)
        self.block.prefault(0, GIB)
        self.block.pin(0)
        self.streams = [_core.CopyStream(0) for _ in range(streams)]
        self.kernel(512)(0)  # compiled now
        self.synchronize()

    def engine(self, streams: int = 1, nbytes: int = PIECE_BYTES) -> Copy:
        return lambda n: self.streams[n % streams].to_device(self.address, self.block, 0, nbytes)

    def to_host(self, nbytes: int = PIECE_BYTES) -> Copy:
        return lambda _: self.streams[0].to_host(self.block, 0, self.address, nbytes)

    def kernel(self, blocks: int, nbytes: int = PIECE_BYTES) -> Copy:
        stream = cupy.cuda.ExternalStream(self.streams[0].handle)

        def start(_: int) -> None:
            with stream:
                KERNEL((blocks,), (512,), (self.address, self.block.address, nbytes // 16))

        return start

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()


def drop() -> None:
    """Free what `mapped` mapped: from here on the driver scrubs it."""
    CuMemAllocator.get_instance().discard("kv_cache")


@cache
def dropped_bytes() -> int:
    """As much as a 32B model has on an H200; on a smaller GPU nearly all."""
    return min(115 * GIB, (torch.cuda.mem_get_info()[0] // GIB - 8) * GIB)


def map_all() -> None:
    for _ in range(dropped_bytes() // PIECE_BYTES):
        CuMemAllocator.get_instance().malloc(PIECE_BYTES, "kv_cache")


def copies_while_wiping() -> dict[str, Any]:
    link = Link()
    ways = {
        "engine, 1 stream": link.engine(1),
        "engine, 4 streams": link.engine(4),
        "kernel, 32 blocks": link.kernel(32),
        "kernel, 8 blocks": link.kernel(8),
        "to the host": link.to_host(),
    }
    rows: dict[str, Any] = {"nothing freed": {name: rates(link, way, 0.1) for name, way in ways.items()}}
    map_all()
    for name, way in ways.items():
        drop()
        rows[name] = rates(link, way, WATCHED_S)
        time.sleep(2)
        CuMemAllocator.get_instance().wake_up()
    return rows


def mixed() -> dict[str, Any]:
    link = Link(MIXED_IN_FLIGHT)
    _core.load_copy_kernel(0)
    map_all()
    rows: dict[str, Any] = {"freed_bytes": dropped_bytes(), "pieces in flight": MIXED_IN_FLIGHT}
    for _ in range(2):
        for ways in ("engine", "kernel", "kernel engine", "kernel kernel engine", "kernel kernel kernel engine"):
            drop()
            found = pipelined(link, ways.split(), WATCHED_S)
            time.sleep(2)
            CuMemAllocator.get_instance().wake_up()
            drop()
            with ThreadPoolExecutor(1) as pool:
                copying = pool.submit(pipelined, link, ways.split(), WATCHED_S)
                seconds = CuMemAllocator.get_instance().wake_up().seconds
                beside = copying.result()
            rows.setdefault(ways, []).append({"rates": found, "mapped_s": round(seconds, 4), "beside mapping": beside})
            time.sleep(2)
    return rows


def calls() -> dict[str, Any]:
    link = Link()
    streams = [each.handle for each in link.streams]
    context, device = call(cuda.cuCtxGetCurrent), call(cuda.cuDeviceGet, 0)
    host, to, nbytes = link.block.address, link.address, PIPELINED_BYTES
    least, greatest = call(cuda.cuCtxGetStreamPriorityRange)
    urgent = [call(cuda.cuStreamCreateWithPriority, 1, min(least, greatest)) for _ in streams]

    def two_dimensions(at: int, stream: Any) -> None:
        copy = cuda.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.dstDevice, copy.srcPitch, copy.dstPitch = host + at, to + at, MIB, MIB
        copy.WidthInBytes, copy.Height = MIB, nbytes // MIB
        call(cuda.cuMemcpy2DAsync, copy, stream)

    def batch(flags: Any) -> Callable[[int, Any], None]:
        attributes = cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes.flags = flags

        def copy(at: int, stream: Any) -> None:
            targets, sources = [cuda.CUdeviceptr(to + at)], [cuda.CUdeviceptr(host + at)]
            call(cuda.cuMemcpyBatchAsync, targets, sources, [nbytes], 1, [attributes], [0], 1, stream)

        return copy

    ways: dict[str, tuple[Callable[[int, Any], None], list[Any]]] = {
        "cuMemcpyHtoDAsync": (lambda at, s: call(cuda.cuMemcpyHtoDAsync, to + at, host + at, nbytes, s), streams),
        "cuMemcpyDtoDAsync": (lambda at, s: call(cuda.cuMemcpyDtoDAsync, to + at, host + at, nbytes, s), streams),
        "cuMemcpyPeerAsync": (
            lambda at, s: call(cuda.cuMemcpyPeerAsync, to + at, context, host + at, context, nbytes, s),
            streams,
        ),
        "cuMemcpy2DAsync": (two_dimensions, streams),
        "cuMemcpyBatchAsync": (batch(0), streams),
        "cuMemcpyBatchAsync, overlap": (batch(1), streams),
    }
    ways["a stream of high priority"] = (ways["cuMemcpyHtoDAsync"][0], urgent)
    try:
        other = host_memory_of_cuda(GIB)
        ways["memory of cuMemCreate"] = (
            lambda at, s: call(cuda.cuMemcpyDtoDAsync, to + at, other + at, nbytes, s),
            streams,
        )
    except Exception as error:
        print("no host memory of cuMemCreate:", error)
    map_all()
    rows: dict[str, Any] = {}
    for name, (copy, mine) in ways.items():
        try:
            quiet = watched(copy, mine, 0.06)
            drop()
            rows[name] = {"nothing freed": quiet, "scrubbing": watched(copy, mine, 0.3)}
        except Exception as error:
            rows[name] = {"refused": str(error)}
        time.sleep(1)
        CuMemAllocator.get_instance().wake_up()
    try:
        second = call(cuda.cuCtxCreate, None, 0, device)
        mine = [call(cuda.cuStreamCreate, 1) for _ in streams]
        call(cuda.cuCtxSetCurrent, context)
        drop()
        call(cuda.cuCtxSetCurrent, second)
        rows["a second context"] = {"scrubbing": watched(ways["cuMemcpyHtoDAsync"][0], mine, 0.3)}
    except Exception as error:
        rows["a second context"] = {"refused": str(error)}
    call(cuda.cuCtxSetCurrent, context)
    return rows


def host_memory_of_cuda(nbytes: int) -> int:
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type, prop.location.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA, 0
    handle = call(cuda.cuMemCreate, nbytes, prop, 0)
    address = int(call(cuda.cuMemAddressReserve, nbytes, 0, 0, 0))
    call(cuda.cuMemMap, address, nbytes, 0, handle, 0)
    call(cuda.cuMemSetAccess, address, nbytes, [access()], 1)
    return address


def watched(copy: Callable[[int, Any], None], streams: list[Any], seconds: float) -> list[float]:
    """As `windows`, on CUDA's own streams; `copy` is told where in the block it begins."""

    def begin(n: int) -> None:
        copy(n * PIPELINED_BYTES % GIB, streams[n % len(streams)])

    return windows(begin, lambda n: call(cuda.cuStreamSynchronize, streams[n % len(streams)]), len(streams), seconds)


def pipelined(link: Link, ways: list[str], seconds: float) -> list[float]:
    """As `windows`, each piece by the next of `ways`."""

    def begin(n: int) -> None:
        stream, offset = link.streams[n % len(link.streams)], n * PIPELINED_BYTES % GIB
        copy = stream.to_device if ways[n % len(ways)] == "engine" else stream.to_device_by_kernel
        copy(link.address + offset, link.block, offset, PIPELINED_BYTES)

    return windows(begin, lambda n: link.streams[n % len(link.streams)].synchronize(), len(link.streams), seconds)


def windows(begin: Callable[[int], None], wait: Callable[[int], None], in_flight: int, seconds: float) -> list[float]:
    """GB/s in windows of `WINDOW_S`, of pieces of which so many are in flight; `wait` waits for a piece's stream."""
    nbytes, start = [0] * (int(seconds / WINDOW_S) + 1), time.perf_counter()
    for n in count():
        wait(n)  # for the one before it on its stream
        now = time.perf_counter() - start
        if n >= in_flight:
            nbytes[min(int(now / WINDOW_S), len(nbytes) - 1)] += PIPELINED_BYTES
        if now > seconds:
            break
        begin(n)
    for n in range(in_flight):
        wait(n)
    return [round(each / WINDOW_S / 1e9, 1) for each in nbytes[:-1]]


def rates(link: Link, way: Copy, seconds: float) -> list[tuple[float, float]]:
    """(seconds since the start, GB/s) of four pieces after another."""
    start, found = time.perf_counter(), []
    while (begun := time.perf_counter()) - start < seconds:
        for n in range(4):
            way(n)
        link.synchronize()
        found.append((round(begun - start, 4), round(4 * PIECE_BYTES / (time.perf_counter() - begun) / 1e9, 1)))
    return found


def mapping_beside_copies() -> dict[str, Any]:
    link = Link()
    map_all()
    ways: dict[str, Copy | None] = {
        "nothing": None,
        "engine, 256 MiB": link.engine(1),
        "kernel, 8 blocks, 16 MiB": link.kernel(8, 16 * MIB),
        "kernel, 32 blocks, 16 MiB": link.kernel(32, 16 * MIB),
        "kernel, 32 blocks, 256 MiB": link.kernel(32),
        "kernel, 132 blocks, 256 MiB": link.kernel(132),
    }
    rows = {}
    for name, way in ways.items():
        drop()
        with going_on(link, way):
            rows[name] = round(CuMemAllocator.get_instance().wake_up().seconds, 4)
        time.sleep(2)
    return rows


@contextmanager
def going_on(link: Link, way: Copy | None) -> Iterator[None]:
    """Copies by a thread, two in flight."""
    ended = threading.Event()

    def work() -> None:
        n = 0
        while way is not None and not ended.is_set():
            way(n)
            way(n)
            link.streams[0].synchronize()
            n += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def wakes() -> dict[str, Any]:
    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool("warm"):  # compiles the kernels, and times both ways
        small = torch.ones(1, device="cuda")
    for nbytes in model_like(62488 * MIB):
        allocator.malloc(nbytes, "weights")
    for nbytes in kv_segments(int(54.63 * GIB)):
        allocator.malloc(nbytes, "kv_cache")
    kernel_devices = set(allocator._copiers._kernel_devices)
    assert kernel_devices, f"the copy kernel is not in use on {small.device}"
    touch_host_memory(64 * GIB)
    allocator.sleep()
    allocator.wake_up()
    rows: dict[str, Any] = {}
    batch_bytes = CuMemAllocator.tuning.engine_batch_bytes
    for name, devices, nbytes in (
        ("engine, 64 MiB", set(), 64 * MIB),
        ("engine, 256 MiB", set(), batch_bytes),
        ("engine or kernel", kernel_devices, batch_bytes),
    ):
        allocator._copiers._kernel_devices = set(devices)
        CuMemAllocator.tuning.engine_batch_bytes = nbytes
        rows[name] = {"at once_s": [], "later_s": []}
        for pause_s, key in ((0, "at once_s"), (3, "later_s")) * 3:
            allocator.sleep()
            time.sleep(pause_s)
            rows[name][key].append(round(allocator.wake_up().seconds, 4))
    return rows


def trials() -> dict[str, Any]:
    allocator, tuning = CuMemAllocator.get_instance(), CuMemAllocator.tuning
    with allocator.use_memory_pool("warm"):
        small = torch.ones(1, device="cuda")
    for nbytes in model_like(16280 * MIB):
        allocator.malloc(nbytes, "weights")
    for nbytes in kv_segments(108 * GIB):
        allocator.malloc(nbytes, "kv_cache")
    assert allocator._copiers._kernel_devices, f"the copy kernel is not in use on {small.device}"
    for _ in range(2):
        allocator.sleep()
        allocator.wake_up()
    rows: dict[str, Any] = {}
    between = tuning.batches_between_trials
    for _ in range(6):
        for name, nbytes, batches in (
            ("64 MiB", 64 * MIB, between),
            ("32 MiB", 32 * MIB, between),
            ("16 MiB", 16 * MIB, between),
            ("8 MiB", 8 * MIB, between),
            ("one of 16 MiB", 16 * MIB, 10**6),
        ):
            tuning.trial_bytes, tuning.batches_between_trials = nbytes, batches
            row = rows.setdefault(name, {"sleep_s": [], "at once_s": [], "later_s": []})
            for pause_s, key in ((0, "at once_s"), (1.2, "later_s")):
                time.sleep(0.2)
                row["sleep_s"].append(round(allocator.sleep().seconds, 4))
                time.sleep(pause_s)
                row[key].append(round(allocator.wake_up().seconds, 4))
    return rows


def decode_beside_work() -> dict[str, Any]:
    weights = [torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(140)]
    token = torch.zeros(256, device="cuda")
    graph = decode_graph(weights, token)
    touch_host_memory(16 * GIB)
    link = Link(1)

    def touch_and_pin(nbytes: int) -> Callable[[], None]:
        def work() -> None:
            block = _core.HostBlock(nbytes, -1)
            block.prefault(0, nbytes)
            block.pin(0)
            held.append(block)
            if len(held) * nbytes > 8 * GIB:
                held.pop(0).close()

        return work

    def copy(nbytes: int) -> Callable[[], None]:
        way = link.to_host(nbytes)

        def work() -> None:
            way(0)
            link.synchronize()

        return work

    jobs: dict[str, Callable[[], None] | None] = {"nothing": None}
    jobs |= {f"touch and pin {size} MiB": touch_and_pin(size * MIB) for size in (256, 64, 32, 16)}
    jobs |= {f"copy {size} MiB": copy(size * MIB) for size in (256, 64, 32, 8, 2)}
    rows = {}
    for name, job in jobs.items():
        held: list[_core.HostBlock] = []
        ended = threading.Event()

        def work(job: Callable[[], None] | None = job, ended: threading.Event = ended) -> None:
            while job is not None and not ended.is_set():
                job()

        thread = threading.Thread(target=work)
        thread.start()
        end = time.monotonic() + 1.5
        rows[name] = summary(step_ms(graph, token, lambda end=end: time.monotonic() < end))
        ended.set()
        thread.join()
        for block in held:
            block.close()
    return rows


QUESTIONS = {
    f.__name__: f for f in (copies_while_wiping, mixed, calls, mapping_beside_copies, wakes, trials, decode_beside_work)
}


if __name__ == "__main__":
    main(__doc__, QUESTIONS, timeout_s=200)
