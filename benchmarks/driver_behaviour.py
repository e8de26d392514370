"""What the CUDA driver does where its documentation says nothing: the facts that decisions rest on.

    python benchmarks/driver_behaviour.py --out benchmarks/results/driver_behaviour.json

Each question runs in a process of its own, because some answers leave a context unusable:

- `waits`: ms that each call takes beside a kernel of 200 ms on another stream, and so whether it waits for that.
- `captures`: the result of each call on the thread that captures a graph, and on another one, in global and in relaxed
  capture mode, and whether the capture survives.
- `memlock`: whether an unprivileged user with RLIMIT_MEMLOCK 0 can register 256 MiB.
- `page_tables`: device memory that registering 8 GiB of host memory takes.
- `handles`: the kinds of shareable handles that the device promises, and those that it gives.
- `many`: ms that 256 segments of 112 MiB take in all for each call: in address ranges of their own, and side by side in
  one range, where one call covers all of them; the same for an import of each. And how fast copies to host memory are
  meanwhile, while imports are unmapped either way.
- `threads`: ms to unmap and to release those segments and 28 more of 1 GiB, by one thread, by two and by four.
- `pool_retry`: whether PyTorch frees its cache and tries again when an allocation in a pool finds the device full.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from cuda.bindings import driver as cuda
from questions import main
from record import GIB

MIB = 1 << 20
KERNEL_MS = 200
SEGMENTS, SEGMENT_BYTES = 256, 112 * MIB
NOBODY = 65534
CAPTURED = (
    *("cuMemCreate", "cuMemUnmap", "cuMemRelease", "cuMemHostUnregister", "cuMemFree"),
    *("cuEventRecord, legacy stream", "cuCtxSynchronize"),
)


class Refused(Exception):
    """The driver's answer was not CUDA_SUCCESS."""


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a driver function returns beside its result."""
    result, *values = function(*arguments)
    if result != cuda.CUresult.CUDA_SUCCESS:
        raise Refused(result.name)
    return values[0] if len(values) == 1 else values


def location() -> Any:
    where = cuda.CUmemLocation()
    where.type, where.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    return where


def properties(handles: Any = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE) -> Any:
    prop = cuda.CUmemAllocationProp()
    prop.type, prop.location = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, location()
    prop.requestedHandleTypes = handles
    return prop


def access() -> Any:
    description = cuda.CUmemAccessDesc()
    description.location, description.flags = location(), cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return description


class Mapped:
    """64 MiB of VMM memory, to be unmapped, released and so on."""

    def __init__(self) -> None:
        self.address = call(cuda.cuMemAddressReserve, 64 * MIB, 0, 0, 0)
        self.handle = call(cuda.cuMemCreate, 64 * MIB, properties(), 0)
        self.map()
        self.set_access()

    def map(self) -> None:
        call(cuda.cuMemMap, self.address, 64 * MIB, 0, self.handle, 0)

    def set_access(self) -> None:
        call(cuda.cuMemSetAccess, self.address, 64 * MIB, [access()], 1)

    def unmap(self) -> None:
        call(cuda.cuMemUnmap, self.address, 64 * MIB)

    def release(self) -> None:
        call(cuda.cuMemRelease, self.handle)


class Host:
    """64 MiB of touched host memory."""

    def __init__(self, nbytes: int = 64 * MIB) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self._map.write(b"\1" * nbytes)
        self.nbytes = nbytes
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def register(self) -> None:
        call(cuda.cuMemHostRegister, self.address, self.nbytes, 0)

    def unregister(self) -> None:
        call(cuda.cuMemHostUnregister, self.address)


def steps() -> dict[str, Callable[[], None]]:
    """Calls to try, in an order in which each finds what it needs."""
    mapped, created, host = Mapped(), [], Host()
    spare = call(cuda.cuMemAlloc, 1)
    kept = call(cuda.cuMemAlloc, 1)  # else freeing the spare one would give a page back, which is another question
    assert kept
    event = call(cuda.cuEventCreate, 0)
    return {
        "cuMemCreate": lambda: created.append(call(cuda.cuMemCreate, 64 * MIB, properties(), 0)),
        "cuMemUnmap": mapped.unmap,
        "cuMemMap": mapped.map,
        "cuMemSetAccess": mapped.set_access,
        "cuMemUnmap again": mapped.unmap,
        "cuMemRelease": mapped.release,
        "cuMemHostRegister": host.register,
        "cuMemHostUnregister": host.unregister,
        "cuMemGetInfo": lambda: call(cuda.cuMemGetInfo),
        "cuMemFree": lambda: call(cuda.cuMemFree, spare),
        "cuEventRecord, legacy stream": lambda: call(cuda.cuEventRecord, event, 0),
        "cuCtxSynchronize": lambda: call(cuda.cuCtxSynchronize),
    }


def cycles_per_ms() -> int:
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    return int(100_000_000 / ((time.perf_counter() - start) * 1e3))


def waits() -> dict[str, Any]:
    torch.cuda.init()
    cycles = cycles_per_ms() * KERNEL_MS
    stream = torch.cuda.Stream()
    rows: dict[str, Any] = {}
    for name, step in steps().items():
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        time.sleep(0.01)  # it runs by now
        start = time.perf_counter()
        step()
        took_ms = (time.perf_counter() - start) * 1e3
        rows[name] = {"ms": round(took_ms, 3), "waits": took_ms > KERNEL_MS / 2}
        torch.cuda.synchronize()
    return rows


def captures() -> dict[str, Any]:
    """Every call in a fresh capture and a fresh process, since a broken one may leave either unusable."""
    tried = [
        (name, where, mode)
        for mode in ("global", "relaxed")
        for where in ("same thread", "other thread")
        for name in CAPTURED
    ]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda arguments: inner("capture", *arguments), tried)
        return {"; ".join(arguments): answer for arguments, answer in zip(tried, answers, strict=True)}


def inner(*arguments: str, **options: Any) -> Any:
    """What a fresh process answers."""
    command = [sys.executable, __file__, "--inner", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, **options)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-600:]}


def capture(name: str, where: str, mode: str) -> dict[str, Any]:
    """Make the calls up to `name` before a capture of relaxed interactions, that one inside it."""
    torch.cuda.init()
    weight = torch.ones(1 << 20, device="cuda")
    (weight * 2).sum().item()
    todo = steps()
    for before in [*todo][: [*todo].index(name)]:
        todo[before]()
    torch.cuda.synchronize()
    answer: dict[str, Any] = {}

    def step() -> None:
        call(cuda.cuCtxSetCurrent, context)
        if mode == "relaxed":
            call(cuda.cuThreadExchangeStreamCaptureMode, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            todo[name]()
            answer["result"] = "CUDA_SUCCESS"
        except Refused as refused:
            answer["result"] = str(refused)
        if mode == "relaxed":
            call(cuda.cuThreadExchangeStreamCaptureMode, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)

    context = call(cuda.cuCtxGetCurrent)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="global"):
            doubled = weight * 2
            if where == "same thread":
                step()
            else:
                thread = threading.Thread(target=step)
                thread.start()
                thread.join()
        weight.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        answer["capture"] = "intact" if float(doubled[0]) == 6 else "wrong"
    except Exception as error:
        answer["capture"] = f"broken: {str(error).splitlines()[0]}"
    return answer


def memlock() -> dict[str, Any]:
    """Asks as an unprivileged user: root is never limited."""
    return inner(
        "memlock_as_nobody",
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={**os.environ, "HOME": "/tmp"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)),
    )


def memlock_as_nobody() -> dict[str, Any]:
    torch.ones(1, device="cuda")
    host = Host(256 * MIB)
    try:
        host.register()
        result = "CUDA_SUCCESS"
    except Refused as refused:
        result = str(refused)
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {"uid": os.getuid(), "limit_bytes": limit_bytes, "registered_bytes": 256 * MIB, "result": result}


def page_tables() -> dict[str, Any]:
    torch.ones(1, device="cuda")
    hosts = [Host(GIB) for _ in range(8)]
    before = torch.cuda.mem_get_info()[0]
    for host in hosts:
        host.register()
    taken = before - torch.cuda.mem_get_info()[0]
    for host in hosts:
        host.unregister()
    return {
        "registered_bytes": 8 * GIB,
        "device_bytes": taken,
        "device_bytes_after": before - torch.cuda.mem_get_info()[0],
    }


def handles() -> dict[str, Any]:
    torch.cuda.init()
    torch.ones(1, device="cuda")
    kinds = cuda.CUmemAllocationHandleType
    attributes = cuda.CUdevice_attribute
    rows = {}
    for name, kind, attribute in (
        (
            "POSIX file descriptor",
            kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        ),
        ("fabric", kinds.CU_MEM_HANDLE_TYPE_FABRIC, attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),
    ):
        promised = bool(call(cuda.cuDeviceGetAttribute, attribute, 0))
        try:
            call(cuda.cuMemRelease, call(cuda.cuMemCreate, 2 * MIB, properties(kind), 0))
            given = "CUDA_SUCCESS"
        except Refused as refused:
            given = str(refused)
        rows[name] = {"promised": promised, "cuMemCreate": given}
    return rows


class Many:
    """Segments that are mapped and unmapped together."""

    def __init__(self, adjacent: bool, handles: list[Any] | None = None) -> None:
        self.ms: dict[str, float] = {}
        count = range(SEGMENTS)
        self._nbytes = nbytes = SEGMENTS * SEGMENT_BYTES if adjacent else SEGMENT_BYTES
        self.ranges = self._timed(
            "cuMemAddressReserve",
            lambda: [call(cuda.cuMemAddressReserve, nbytes, 0, 0, 0) for _ in (count if not adjacent else range(1))],
        )
        self.addresses = (
            [int(self.ranges[0]) + n * SEGMENT_BYTES for n in count] if adjacent else [*map(int, self.ranges)]
        )
        kinds = cuda.CUmemAllocationHandleType
        shareable = properties(kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        self.handles = handles or self._timed(
            "cuMemCreate", lambda: [call(cuda.cuMemCreate, SEGMENT_BYTES, shareable, 0) for _ in count]
        )
        self.map()

    def map(self) -> None:
        self._timed(
            "cuMemMap",
            lambda: [
                call(cuda.cuMemMap, address, SEGMENT_BYTES, 0, handle, 0)
                for address, handle in zip(self.addresses, self.handles, strict=True)
            ],
        )
        self._timed(
            "cuMemSetAccess",
            lambda: [call(cuda.cuMemSetAccess, address, self._nbytes, [access()], 1) for address in self.ranges],
        )

    def unmap(self) -> None:
        self._timed("cuMemUnmap", lambda: [call(cuda.cuMemUnmap, address, self._nbytes) for address in self.ranges])

    def release(self) -> None:
        self._timed("cuMemRelease", lambda: [call(cuda.cuMemRelease, handle) for handle in self.handles])

    def free(self) -> None:
        self._timed(
            "cuMemAddressFree", lambda: [call(cuda.cuMemAddressFree, each, self._nbytes) for each in self.ranges]
        )

    def _timed(self, name: str, calls: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        answer = calls()
        self.ms[name] = round((time.perf_counter() - start) * 1e3, 2)
        return answer


def many() -> dict[str, Any]:
    torch.ones(1, device="cuda")
    host = Host(GIB)
    host.register()
    rows: dict[str, Any] = {"segments": SEGMENTS, "segment_bytes": SEGMENT_BYTES, "copies of 1 GiB, GB/s": {}}
    for _ in range(3):
        for adjacent in (False, True):
            way = "side by side" if adjacent else "one by one"
            own = Many(adjacent)
            imported = Many(adjacent, [imported_handle(handle) for handle in own.handles])
            rows["copies of 1 GiB, GB/s"].setdefault("alone", []).append(copies(own.addresses, host, lambda: None))
            rows["copies of 1 GiB, GB/s"].setdefault(f"{way}, imports unmapped", []).append(
                copies(own.addresses, host, imported.unmap)
            )
            rows.setdefault(f"{way}, imports, beside copies", []).append(imported.ms)
            imported.ms = {}
            imported.map()
            for one in (imported, own):
                one.unmap()
                one.release()
                one.free()
            rows.setdefault(f"{way}, imports", []).append(imported.ms)
            rows.setdefault(f"{way}, own memory", []).append(own.ms)
    return rows


def threads() -> dict[str, Any]:
    torch.ones(1, device="cuda")
    context = call(cuda.cuCtxGetCurrent)
    sizes = [SEGMENT_BYTES] * SEGMENTS + [GIB] * 28
    rows: dict[str, Any] = {"bytes": sum(sizes)}
    for _ in range(3):
        for count in (1, 2, 4):
            addresses = [call(cuda.cuMemAddressReserve, nbytes, 0, 0, 0) for nbytes in sizes]
            handles = [call(cuda.cuMemCreate, nbytes, properties(), 0) for nbytes in sizes]
            for address, handle, nbytes in zip(addresses, handles, sizes, strict=True):
                call(cuda.cuMemMap, address, nbytes, 0, handle, 0)
                call(cuda.cuMemSetAccess, address, nbytes, [access()], 1)
            with ThreadPoolExecutor(count, initializer=lambda: call(cuda.cuCtxSetCurrent, context)) as pool:
                unmap = timed(pool, partial(call, cuda.cuMemUnmap), [*zip(addresses, sizes, strict=True)])
                release = timed(pool, partial(call, cuda.cuMemRelease), [(handle,) for handle in handles])
            rows.setdefault(f"{count} threads", []).append({"cuMemUnmap": unmap, "cuMemRelease": release})
            for address, nbytes in zip(addresses, sizes, strict=True):
                call(cuda.cuMemAddressFree, address, nbytes)
            time.sleep(1)  # until it is scrubbed
    return rows


def timed(pool: ThreadPoolExecutor, function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> float:
    """Ms until all threads of the pool have made their shares of the calls."""
    count = pool._max_workers

    def share(number: int) -> None:
        for each in arguments[number::count]:
            function(*each)

    start = time.perf_counter()
    for ended in [pool.submit(share, number) for number in range(count)]:
        ended.result()
    return round((time.perf_counter() - start) * 1e3, 2)


def imported_handle(handle: Any) -> Any:
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fd = call(cuda.cuMemExportToShareableHandle, handle, kind, 0)
    imported = call(cuda.cuMemImportFromShareableHandle, fd, kind)
    os.close(fd)
    return imported


def copies(addresses: list[int], host: Host, meanwhile: Callable[[], None]) -> float:
    """GB/s of sixteen copies of 64 MiB each, of which `meanwhile` begins when two are done."""
    stream = call(cuda.cuStreamCreate, 1)
    events = []
    start = time.perf_counter()
    for n in range(16):
        call(cuda.cuMemcpyDtoHAsync, host.address + n * 64 * MIB, addresses[n], 64 * MIB, stream)
        event = call(cuda.cuEventCreate, 0)
        call(cuda.cuEventRecord, event, stream)
        events.append(event)
    call(cuda.cuEventSynchronize, events[1])
    meanwhile()
    call(cuda.cuStreamSynchronize, stream)
    return round(GIB / (time.perf_counter() - start) / 1e9, 2)


def pool_retry() -> dict[str, Any]:
    from cumem_sleep import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    torch.ones(1, device="cuda")
    half = torch.cuda.mem_get_info()[0] // 2
    cached = torch.empty(half, dtype=torch.uint8, device="cuda")
    del cached  # PyTorch keeps the memory, and could give it back
    kept = torch.cuda.memory_reserved()
    with allocator.use_memory_pool("weights"):
        try:
            torch.empty(half + half // 2, dtype=torch.uint8, device="cuda")
            answer = "allocated: the cache was freed first"
        except torch.OutOfMemoryError:
            answer = "out of memory: no retry"
    return {"cached_bytes": kept, "answer": answer}


INNER: dict[str, Callable[..., Any]] = {f.__name__: f for f in (capture, memlock_as_nobody)}
QUESTIONS = {f.__name__: f for f in (waits, captures, memlock, page_tables, handles, many, threads, pool_retry)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        print(json.dumps(INNER[sys.argv[2]](*sys.argv[3:])))
    else:
        main(__doc__, QUESTIONS, timeout_s=200)
