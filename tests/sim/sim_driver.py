"""Copies of the simulated driver's library, called through ctypes, without the rest of the package."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cumem_sleep

MIB = 1 << 20
PAGE = 2 * MIB  # the granularity of device memory
FILL = 0xDB

OK = "CUDA_SUCCESS"
INVALID_VALUE = "CUDA_ERROR_INVALID_VALUE"
INVALID_DEVICE = "CUDA_ERROR_INVALID_DEVICE"
INVALID_CONTEXT = "CUDA_ERROR_INVALID_CONTEXT"
INVALID_HANDLE = "CUDA_ERROR_INVALID_HANDLE"
NOT_INITIALIZED = "CUDA_ERROR_NOT_INITIALIZED"
NOT_READY = "CUDA_ERROR_NOT_READY"
NOT_SUPPORTED = "CUDA_ERROR_NOT_SUPPORTED"
NOT_PERMITTED = "CUDA_ERROR_NOT_PERMITTED"
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
ILLEGAL_ADDRESS = "CUDA_ERROR_ILLEGAL_ADDRESS"
ILLEGAL_STATE = "CUDA_ERROR_ILLEGAL_STATE"
CAPTURE_UNSUPPORTED = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
CAPTURE_INVALIDATED = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
CAPTURE_IMPLICIT = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
CAPTURED_EVENT = "CUDA_ERROR_CAPTURED_EVENT"
ALREADY_REGISTERED = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
NOT_REGISTERED = "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"

NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_INVALID = 0, 1, 2
NO_ACCESS, READ, READ_WRITE = 0, 1, 3
POSIX_FD, FABRIC = 1, 8
LEGACY_STREAM, PER_THREAD_STREAM = 1, 2

Handle = ctypes.c_void_p
Size = ctypes.c_size_t
Int = ctypes.c_int
UInt = ctypes.c_uint
Address = ctypes.c_uint64
Ref = ctypes.c_void_p
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Location(ctypes.Structure):
    _fields_ = [("type", Int), ("id", Int)]


class AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", Int),
        ("handle_types", Int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AccessDescription(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", Int)]


# CUDA name -> (suffix of the exported symbol, argument types)
CALLS: dict[str, tuple[str, list[Any]]] = {
    "cuInit": ("", [UInt]),
    "cuDriverGetVersion": ("", [Ref]),
    "cuGetErrorName": ("", [Int, Ref]),
    "cuGetErrorString": ("", [Int, Ref]),
    "cuGetProcAddress": ("_v2", [ctypes.c_char_p, Ref, Int, ctypes.c_uint64, Ref]),
    "cuDeviceGetCount": ("", [Ref]),
    "cuDeviceGet": ("", [Ref, Int]),
    "cuDeviceGetName": ("", [Ref, Int, Int]),
    "cuDeviceGetUuid": ("_v2", [Ref, Int]),
    "cuDeviceGetAttribute": ("", [Ref, Int, Int]),
    "cuDeviceTotalMem": ("_v2", [Ref, Int]),
    "cuDeviceGetPCIBusId": ("", [Ref, Int, Int]),
    "cuDeviceCanAccessPeer": ("", [Ref, Int, Int]),
    "cuDevicePrimaryCtxRetain": ("", [Ref, Int]),
    "cuDevicePrimaryCtxRelease": ("_v2", [Int]),
    "cuDevicePrimaryCtxGetState": ("", [Int, Ref, Ref]),
    "cuCtxGetCurrent": ("", [Ref]),
    "cuCtxSetCurrent": ("", [Handle]),
    "cuCtxPushCurrent": ("_v2", [Handle]),
    "cuCtxPopCurrent": ("_v2", [Ref]),
    "cuCtxGetDevice": ("", [Ref]),
    "cuCtxSynchronize": ("", []),
    "cuMemGetInfo": ("_v2", [Ref, Ref]),
    "cuMemAlloc": ("_v2", [Ref, Size]),
    "cuMemFree": ("_v2", [Address]),
    "cuMemGetAllocationGranularity": ("", [Ref, Ref, Int]),
    "cuMemAddressReserve": ("", [Ref, Size, Size, Address, ctypes.c_uint64]),
    "cuMemAddressFree": ("", [Address, Size]),
    "cuMemCreate": ("", [Ref, Size, Ref, ctypes.c_uint64]),
    "cuMemRelease": ("", [ctypes.c_uint64]),
    "cuMemMap": ("", [Address, Size, Size, ctypes.c_uint64, ctypes.c_uint64]),
    "cuMemUnmap": ("", [Address, Size]),
    "cuMemSetAccess": ("", [Address, Size, Ref, Size]),
    "cuMemGetAccess": ("", [Ref, Ref, Address]),
    "cuMemExportToShareableHandle": ("", [Ref, ctypes.c_uint64, Int, ctypes.c_uint64]),
    "cuMemImportFromShareableHandle": ("", [Ref, ctypes.c_void_p, Int]),
    "cuMemGetAllocationPropertiesFromHandle": ("", [Ref, ctypes.c_uint64]),
    "cuMemHostRegister": ("_v2", [Ref, Size, UInt]),
    "cuMemHostUnregister": ("", [Ref]),
    "cuMemcpyHtoDAsync": ("_v2", [Address, Ref, Size, Handle]),
    "cuMemcpyDtoHAsync": ("_v2", [Ref, Address, Size, Handle]),
    "cuMemcpyDtoDAsync": ("_v2", [Address, Address, Size, Handle]),
    "cuMemsetD8Async": ("", [Address, ctypes.c_ubyte, Size, Handle]),
    "cuMemsetD32Async": ("", [Address, UInt, Size, Handle]),
    "cuModuleLoadData": ("", [Ref, ctypes.c_char_p]),
    "cuModuleGetFunction": ("", [Ref, Handle, ctypes.c_char_p]),
    "cuLaunchKernel": ("", [Handle, *[UInt] * 7, Handle, Ref, Ref]),
    "cuStreamCreate": ("", [Ref, UInt]),
    "cuStreamCreateWithPriority": ("", [Ref, UInt, Int]),
    "cuStreamDestroy": ("_v2", [Handle]),
    "cuStreamSynchronize": ("", [Handle]),
    "cuStreamQuery": ("", [Handle]),
    "cuStreamWaitEvent": ("", [Handle, Handle, UInt]),
    "cuStreamIsCapturing": ("", [Handle, Ref]),
    "cuStreamBeginCapture": ("_v2", [Handle, Int]),
    "cuStreamEndCapture": ("", [Handle, Ref]),
    "cuGraphDestroy": ("", [Handle]),
    "cuThreadExchangeStreamCaptureMode": ("", [Ref]),
    "cuEventCreate": ("", [Ref, UInt]),
    "cuEventDestroy": ("_v2", [Handle]),
    "cuEventRecord": ("", [Handle, Handle]),
    "cuEventSynchronize": ("", [Handle]),
    "cuEventQuery": ("", [Handle]),
    "cuLaunchHostFunc": ("", [Handle, HostFunction, ctypes.c_void_p]),
    "cuPointerGetAttribute": ("", [Ref, Int, Address]),
    "cuCheckpointProcessGetState": ("", [Int, Ref]),
    "cuCheckpointProcessLock": ("", [Int, Ref]),
    "cuCheckpointProcessCheckpoint": ("", [Int, Ref]),
    "cuCheckpointProcessRestore": ("", [Int, Ref]),
    "cuCheckpointProcessUnlock": ("", [Int, Ref]),
    "cuTensorMapEncodeTiled": ("", [Ref, Int, UInt, Ref, Ref, Ref, Ref, Ref, Int, Int, Int, Int]),
}


class Driver:
    """One loaded copy of the library. A call returns the name of its error."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.calls: dict[str, Any] = {}
        for name, (suffix, arguments) in CALLS.items():
            function = getattr(self.library, name + suffix)
            function.argtypes = arguments
            self.calls[name] = function

    def __call__(self, name: str, *arguments: object) -> str:
        return self.error_name(self.calls[name](*arguments))

    def ok(self, name: str, *arguments: object) -> None:
        error = self(name, *arguments)
        assert error == OK, f"{name}: {error}"

    def error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        assert self.calls["cuGetErrorName"](code, ctypes.byref(text)) == 0
        assert text.value is not None
        return text.value.decode()

    def get(self, kind: type[Any], name: str, *arguments: object) -> Any:
        """For calls that return one value through their first argument."""
        value = kind()
        self.ok(name, ctypes.byref(value), *arguments)
        return value.value

    def start(self, device: int = 0) -> int:
        """cuInit, and the device's primary context current to this thread."""
        self.ok("cuInit", 0)
        return self.enter(device)

    def enter(self, device: int = 0) -> int:
        context = self.get(Handle, "cuDevicePrimaryCtxRetain", device)
        self.ok("cuCtxSetCurrent", context)
        return int(context)

    def free_bytes(self) -> int:
        free, total = Size(), Size()
        self.ok("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def reserve(self, size: int, alignment: int = 0) -> int:
        return int(self.get(Address, "cuMemAddressReserve", size, alignment, 0, 0))

    def create(self, size: int = PAGE, device: int = 0, handle_types: int = 0) -> int:
        return int(self.get(ctypes.c_uint64, "cuMemCreate", size, properties(device, handle_types), 0))

    def allow(self, address: int, size: int, flags: int = READ_WRITE, device: int = 0) -> str:
        description = AccessDescription(Location(1, device), flags)
        return self("cuMemSetAccess", address, size, ctypes.byref(description), 1)

    def allocate(self, size: int = PAGE, device: int = 0) -> int:
        """Reserve, create, map, grant access; the handle is released at once, so that unmapping frees."""
        address, handle = self.reserve(size), self.create(size, device)
        self.ok("cuMemMap", address, size, 0, handle, 0)
        self.ok("cuMemRelease", handle)
        assert self.allow(address, size, device=device) == OK
        return address

    def free(self, address: int, size: int = PAGE) -> None:
        self.ok("cuMemUnmap", address, size)
        self.ok("cuMemAddressFree", address, size)

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return int(self.get(Handle, "cuStreamCreate", flags))

    def event(self) -> int:
        return int(self.get(Handle, "cuEventCreate", 0))

    def capture_status(self, stream: int) -> int:
        return int(self.get_second(Int, "cuStreamIsCapturing", stream))

    def end_capture(self, stream: int) -> tuple[str, int | None]:
        graph = Handle(1)
        error = self("cuStreamEndCapture", stream, ctypes.byref(graph))
        return error, graph.value

    def get_second(self, kind: type[Any], name: str, first: object) -> Any:
        value = kind()
        self.ok(name, first, ctypes.byref(value))
        return value.value

    def set_capture_mode(self, mode: int) -> int:
        exchanged = Int(mode)
        self.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
        return exchanged.value

    @contextlib.contextmanager
    def busy(self, stream: int | None) -> Iterator[None]:
        """A kernel in flight on the stream, until the block ends."""
        started, finish = threading.Event(), threading.Event()

        def run(_: int) -> None:
            started.set()
            finish.wait(30)

        kernel = HostFunction(run)
        self.ok("cuLaunchHostFunc", stream, kernel, None)
        try:
            if not any_capturing(self, stream):
                assert started.wait(30)
            yield
        finally:
            finish.set()
            self.calls["cuStreamSynchronize"](stream)  # the callback must outlive its run


def any_capturing(driver: Driver, stream: int | None) -> bool:
    return bool(driver.get_second(Int, "cuStreamIsCapturing", stream))


def properties(device: int = 0, handle_types: int = 0, kind: int = 1, location: int = 1) -> Any:
    return ctypes.byref(AllocationProperties(type=kind, handle_types=handle_types, location=Location(location, device)))


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def read(address: int, size: int = 16) -> bytes:
    return ctypes.string_at(address, size)


class HostBuffer:
    """Host memory of its own pages, so that registrations do not meet."""

    def __init__(self, size: int = PAGE, fill: int = 0) -> None:
        self.memory = mmap.mmap(-1, size)
        self.view = (ctypes.c_ubyte * size).from_buffer(self.memory)
        self.address = ctypes.addressof(self.view)
        self.size = size
        ctypes.memset(self.address, fill, size)


def run_alone(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own; `driver` is a Driver there."""
    head = f"""
        import ctypes, os, sys, threading, time
        sys.path[:0] = {[str(pathlib.Path(__file__).parent), str(pathlib.Path(cumem_sleep.__path__[0]).parent)]!r}
        from cumem_sleep import sim
        from sim_driver import *
        driver = Driver(sim.library_path())
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(script)],
        cwd=pathlib.Path(__file__).parent,  # not the checkout, whose package may not be built
        env={**os.environ, "CUMEM_SLEEP_SIM_DEVICE_BYTES": str(64 * MIB), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def in_thread(work: Callable[[], object]) -> Any:
    """The result of `work` on another thread."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(30)
    assert results, "the thread failed or hangs"
    return results[0]
