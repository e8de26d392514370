"""The simulated driver is as strict as CUDA: through ctypes, without the rest of the package.

Each test loads a copy of the library of its own, hence starts from an untouched driver. What ends the process (a fault,
a fork) runs in one of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cumem_sleep
from cumem_sleep import sim
from cumem_sleep.errors import InvalidArgument, InvalidArgumentType, InvalidState

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


@pytest.fixture
def load(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Load a fresh copy of the library under an environment, and let `cumem_sleep.sim` control it."""

    def load_copy(**environment: object) -> Driver:
        for name, value in environment.items():
            monkeypatch.setenv(f"CUMEM_SLEEP_SIM_{name}", str(value))
        copy = tmp_path / f"libcuda_sim_{len(list(tmp_path.iterdir()))}.so"
        shutil.copy(sim.library_path(), copy)
        core = types.SimpleNamespace(driver_path=lambda: str(copy), driver_is_simulated=lambda: True)
        monkeypatch.setitem(sys.modules, "cumem_sleep._core", core)
        monkeypatch.setattr(cumem_sleep, "_core", core, raising=False)
        return Driver(copy)

    return load_copy


@pytest.fixture
def driver(load: Callable[..., Driver]) -> Driver:
    loaded = load(DEVICE_BYTES=256 * MIB)
    loaded.start()
    return loaded


def run_alone(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own; `driver` is a Driver there."""
    head = f"""
        import ctypes, os, sys, threading, time
        sys.path[:0] = {[str(pathlib.Path(__file__).parent), str(pathlib.Path(cumem_sleep.__path__[0]).parent)]!r}
        from test_sim_driver import *
        driver = Driver(sim.library_path())
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(script)],
        cwd=pathlib.Path(__file__).parent,  # not the checkout, whose package may not be built
        env={**os.environ, "CUMEM_SLEEP_SIM_DEVICE_BYTES": str(64 * MIB), **environment},
        capture_output=True,
        text=True,
        timeout=60,
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


class TestStart:
    def test_every_call_needs_init(self, load: Callable[..., Driver]) -> None:
        driver = load()
        value = ctypes.c_uint64()
        assert driver("cuDeviceGetCount", ctypes.byref(value)) == NOT_INITIALIZED
        assert driver("cuCtxGetCurrent", ctypes.byref(value)) == NOT_INITIALIZED
        assert driver("cuMemCreate", ctypes.byref(value), PAGE, properties(), 0) == NOT_INITIALIZED
        assert driver("cuStreamSynchronize", None) == NOT_INITIALIZED
        assert driver("cuMemAddressFree", 0, 0) == NOT_INITIALIZED
        assert driver("cuInit", 1) == INVALID_VALUE
        driver.ok("cuInit", 0)
        driver.ok("cuInit", 0)
        driver.ok("cuDeviceGetCount", ctypes.byref(value))

    def test_version_works_before_init(self, load: Callable[..., Driver]) -> None:
        assert load().get(Int, "cuDriverGetVersion") == 13000

    def test_version_from_environment(self, load: Callable[..., Driver]) -> None:
        assert load(DRIVER_VERSION=12020).get(Int, "cuDriverGetVersion") == 12020

    @pytest.mark.parametrize("value", ["0", "many", "-1", "65", "1.5", "1 "])
    def test_bad_environment_is_an_error(
        self, load: Callable[..., Driver], capfd: pytest.CaptureFixture[str], value: str
    ) -> None:
        assert load(DEVICES=value)("cuInit", 0) == INVALID_VALUE
        assert f'CUMEM_SLEEP_SIM_DEVICES="{value}"' in capfd.readouterr().err

    def test_error_names_and_strings(self, load: Callable[..., Driver]) -> None:
        driver = load()
        assert driver.error_name(700) == ILLEGAL_ADDRESS
        text = ctypes.c_char_p()
        driver.ok("cuGetErrorString", 2, ctypes.byref(text))
        assert text.value == b"out of memory"
        for call in ("cuGetErrorName", "cuGetErrorString"):
            assert driver(call, 12345, ctypes.byref(text)) == INVALID_VALUE
            assert text.value is None

    def test_proc_address_finds_every_call(self, load: Callable[..., Driver]) -> None:
        driver = load()
        for name, (suffix, _) in CALLS.items():
            pointer, status = ctypes.c_void_p(), Int(-1)
            arguments = (name.encode(), ctypes.byref(pointer), 13000, 0, ctypes.byref(status))
            driver.ok("cuGetProcAddress", *arguments)
            exported = ctypes.cast(getattr(driver.library, name + suffix), ctypes.c_void_p).value
            assert (pointer.value, status.value) == (exported, 0), name

    @pytest.mark.parametrize("name", ["cuMemFantasy", "malloc", "cumemSimReset", ""])
    def test_proc_address_of_unknown(self, load: Callable[..., Driver], name: str) -> None:
        pointer, status = ctypes.c_void_p(1), Int(-1)
        driver = load()
        driver.ok("cuGetProcAddress", name.encode(), ctypes.byref(pointer), 12000, 0, ctypes.byref(status))
        assert (pointer.value, status.value) == (None, 1)

    def test_proc_address_of_newer_cuda(self, load: Callable[..., Driver]) -> None:
        driver, pointer = load(DRIVER_VERSION=12000), ctypes.c_void_p()
        assert driver("cuGetProcAddress", b"cuInit", ctypes.byref(pointer), 13000, 0, None) == INVALID_VALUE

    @pytest.mark.slow
    def test_exports_nothing_else(self) -> None:
        tool = shutil.which("nm")
        if tool is None:
            pytest.skip("nm (binutils) is not installed")
        listing = subprocess.run(
            [tool, "-D", "--defined-only", sim.library_path()], capture_output=True, text=True, check=True
        ).stdout
        strong = {fields[2] for fields in map(str.split, listing.splitlines()) if fields[1] == "T"}
        calls = {name + suffix for name, (suffix, _) in CALLS.items()} | {"cuDeviceGetUuid"}
        assert {name for name in strong if not name.startswith("cumemSim")} == calls

    def test_is_not_libcuda_by_name(self) -> None:
        assert b"libcuda.so.1" not in sim.library_path().read_bytes()

    @pytest.mark.usefixtures("driver")
    def test_table_of_calls_is_complete(self) -> None:
        assert set(sim.stats().calls) == set(CALLS)


class TestDevices:
    def test_describes_itself(self, driver: Driver) -> None:
        name = ctypes.create_string_buffer(64)
        driver.ok("cuDeviceGetName", name, 64, 0)
        assert name.value == b"Simulated GPU"
        driver.ok("cuDeviceGetPCIBusId", name, 64, 0)
        assert name.value == b"0000:01:00.0"
        assert driver.get(Size, "cuDeviceTotalMem", 0) == 256 * MIB

    @pytest.mark.parametrize(
        ("attribute", "value"),
        [
            pytest.param(75, 9, id="compute capability, major"),
            pytest.param(76, 0, id="compute capability, minor"),
            pytest.param(33, 1, id="PCI bus"),
            pytest.param(41, 1, id="unified addressing"),
            pytest.param(91, 1, id="host pointer of registered memory"),
            pytest.param(102, 1, id="virtual memory management"),
            pytest.param(103, 1, id="POSIX file descriptors"),
            pytest.param(110, 1, id="GPUDirect RDMA with virtual memory management"),
            pytest.param(128, 0, id="fabric handles"),
            pytest.param(134, -1, id="NUMA node of the host"),
            pytest.param(9999, 0, id="unknown"),
        ],
    )
    def test_attributes(self, driver: Driver, attribute: int, value: int) -> None:
        assert driver.get(Int, "cuDeviceGetAttribute", attribute, 0) == value

    def test_fabric_handles_may_be_claimed_and_are_refused_all_the_same(self, load: Callable[..., Driver]) -> None:
        driver = load(FABRIC=1)
        driver.start()
        assert driver.get(Int, "cuDeviceGetAttribute", 128, 0) == 1
        handle = ctypes.c_uint64()
        assert driver("cuMemCreate", ctypes.byref(handle), PAGE, properties(handle_types=FABRIC), 0) == NOT_PERMITTED

    def test_host_pointers_may_be_disclaimed(self, load: Callable[..., Driver]) -> None:
        driver = load(HOST_POINTERS=0)
        driver.start()
        assert driver.get(Int, "cuDeviceGetAttribute", 91, 0) == 0

    def test_invalid_ordinals(self, driver: Driver) -> None:
        value = ctypes.c_uint64()
        for ordinal in (-1, 1):
            assert driver("cuDeviceGet", ctypes.byref(value), ordinal) == INVALID_DEVICE
            assert driver("cuDeviceTotalMem", ctypes.byref(value), ordinal) == INVALID_DEVICE
            assert driver("cuDevicePrimaryCtxRetain", ctypes.byref(value), ordinal) == INVALID_DEVICE
            assert driver("cuMemCreate", ctypes.byref(value), PAGE, properties(ordinal), 0) == INVALID_DEVICE

    def test_two_devices_are_apart(self, load: Callable[..., Driver]) -> None:
        driver = load(DEVICES=2, DEVICE_BYTES=4 * PAGE)
        driver.start()
        assert driver.get(Int, "cuDeviceGetCount") == 2
        uuids = set()
        for device in (0, 1):
            uuid = ctypes.create_string_buffer(16)
            driver.ok("cuDeviceGetUuid", uuid, device)
            first_version = ctypes.create_string_buffer(16)
            assert driver.library.cuDeviceGetUuid(first_version, device) == 0
            assert uuid.raw == first_version.raw
            uuids.add(uuid.raw)
        assert len(uuids) == 2
        driver.allocate(3 * PAGE, device=1)
        assert driver.free_bytes() == 4 * PAGE
        driver.enter(1)
        assert driver.free_bytes() == PAGE
        assert driver.get(Int, "cuCtxGetDevice") == 1
        assert driver.get(Int, "cuDeviceCanAccessPeer", 0, 1) == 1
        assert driver.get(Int, "cuDeviceCanAccessPeer", 1, 1) == 0

    def test_may_be_numbered_differently(self, load: Callable[..., Driver]) -> None:
        """The first two are named, those that follow are not."""

        def describe(driver: Driver, device: int) -> tuple[bytes, bytes]:
            uuid, bus = ctypes.create_string_buffer(16), ctypes.create_string_buffer(16)
            driver.ok("cuDeviceGetUuid", uuid, device)
            driver.ok("cuDeviceGetPCIBusId", bus, 16, device)
            return uuid.raw, bus.value

        plain = load(DEVICES=4)
        plain.start()
        expected = [describe(plain, device) for device in (2, 0, 1, 3)]
        other = load(DEVICES=4, DEVICE_ORDER="2,0")
        other.start()
        assert [describe(other, device) for device in range(4)] == expected

    @pytest.mark.parametrize("order", ["1,1", "64", "a", "1,", ",1", "1 2", "-1"])
    def test_orders_that_cannot_be(self, load: Callable[..., Driver], order: str) -> None:
        assert load(DEVICE_ORDER=order)("cuInit", 0) == INVALID_VALUE

    def test_configure_at_any_time(self, driver: Driver) -> None:
        address = driver.allocate(8 * PAGE)
        sim.configure(device_bytes=4 * PAGE)
        assert driver.free_bytes() == 0
        write(address, b"still here")
        handle = ctypes.c_uint64()
        assert driver("cuMemCreate", ctypes.byref(handle), PAGE, properties(), 0) == OUT_OF_MEMORY
        sim.configure(devices=3)
        assert driver.get(Int, "cuDeviceGetCount") == 3
        sim.configure(device_bytes=9 * PAGE)
        driver.create(PAGE)
        assert read(address, 10) == b"still here"


class TestContexts:
    def test_calls_need_a_context(self, load: Callable[..., Driver]) -> None:
        driver = load()
        driver.ok("cuInit", 0)
        value, buffer = ctypes.c_uint64(), HostBuffer()
        address = driver.allocate()  # VMM needs no context
        assert driver("cuStreamCreate", ctypes.byref(value), 0) == INVALID_CONTEXT
        assert driver("cuStreamSynchronize", None) == INVALID_CONTEXT
        assert driver("cuEventCreate", ctypes.byref(value), 0) == INVALID_CONTEXT
        assert driver("cuMemcpyHtoDAsync", address, buffer.address, 16, None) == INVALID_CONTEXT
        assert driver("cuMemsetD8Async", address, 0, 16, None) == INVALID_CONTEXT
        assert driver("cuCtxSynchronize") == INVALID_CONTEXT
        assert driver("cuCtxGetDevice", ctypes.byref(value)) == INVALID_CONTEXT
        assert driver("cuMemGetInfo", ctypes.byref(value), ctypes.byref(value)) == INVALID_CONTEXT
        assert driver("cuMemHostRegister", buffer.address, PAGE, 0) == INVALID_CONTEXT
        assert driver("cuCtxPopCurrent", None) == INVALID_CONTEXT
        assert driver.get(Handle, "cuCtxGetCurrent") is None

    def test_retain_count(self, load: Callable[..., Driver]) -> None:
        driver = load()
        driver.ok("cuInit", 0)
        flags, active = UInt(), Int()

        def is_active() -> bool:
            driver.ok("cuDevicePrimaryCtxGetState", 0, ctypes.byref(flags), ctypes.byref(active))
            return bool(active.value)

        assert driver("cuDevicePrimaryCtxRelease", 0) == INVALID_CONTEXT
        assert not is_active()
        first = driver.get(Handle, "cuDevicePrimaryCtxRetain", 0)
        assert driver.get(Handle, "cuDevicePrimaryCtxRetain", 0) == first
        driver.ok("cuDevicePrimaryCtxRelease", 0)
        assert is_active()
        driver.ok("cuDevicePrimaryCtxRelease", 0)
        assert not is_active()
        assert driver("cuDevicePrimaryCtxRelease", 0) == INVALID_CONTEXT

    def test_last_release_destroys(self, driver: Driver) -> None:
        stream, event, buffer = driver.stream(), driver.event(), HostBuffer()
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        driver.ok("cuDevicePrimaryCtxRelease", 0)
        assert driver("cuCtxSynchronize") == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
        assert sim.stats().registered_bytes == 0
        driver.enter()
        assert driver("cuStreamSynchronize", stream) == INVALID_HANDLE
        assert driver("cuEventQuery", event) == INVALID_HANDLE

    def test_last_release_waits_for_work(self, load: Callable[..., Driver]) -> None:
        driver = load(COPY_DELAY_US=50_000)
        driver.start()
        address, buffer, stream = driver.allocate(), HostBuffer(fill=7), driver.stream()
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        driver.ok("cuMemcpyHtoDAsync", address, buffer.address, PAGE, stream)
        driver.ok("cuDevicePrimaryCtxRelease", 0)
        assert read(address) == b"\x07" * 16
        driver.enter()
        driver.ok("cuCtxSynchronize")

    def test_stack_is_per_thread(self, load: Callable[..., Driver]) -> None:
        driver = load(DEVICES=2)
        first = driver.start()
        second = driver.get(Handle, "cuDevicePrimaryCtxRetain", 1)
        driver.ok("cuCtxPushCurrent", second)
        assert driver.get(Handle, "cuCtxGetCurrent") == second
        assert in_thread(lambda: driver.get(Handle, "cuCtxGetCurrent")) is None
        assert driver.get(Handle, "cuCtxPopCurrent") == second
        assert driver.get(Handle, "cuCtxGetCurrent") == first
        driver.ok("cuCtxSetCurrent", None)
        assert driver.get(Handle, "cuCtxGetCurrent") is None
        assert driver("cuCtxSetCurrent", 12345) == INVALID_CONTEXT

    def test_streams_belong_to_their_context(self, load: Callable[..., Driver]) -> None:
        driver = load(DEVICES=2)
        driver.start(0)
        stream, event, address = driver.stream(), driver.event(), driver.allocate()
        driver.enter(1)
        other_stream = driver.stream()
        kernel = HostFunction(lambda _: None)
        assert driver("cuMemsetD8Async", address, 0, PAGE, stream) == INVALID_HANDLE
        assert driver("cuLaunchHostFunc", stream, kernel, None) == INVALID_HANDLE
        assert driver("cuEventRecord", event, other_stream) == INVALID_HANDLE
        assert driver("cuStreamBeginCapture", stream, RELAXED) == INVALID_HANDLE
        # CUDA allows waiting for other devices' work.
        driver.ok("cuStreamSynchronize", stream)
        driver.ok("cuEventSynchronize", event)
        # Device 1 has no access to the memory.
        assert driver("cuMemsetD8Async", address, 0, PAGE, other_stream) == INVALID_VALUE


class TestVirtualMemory:
    def test_mapped_memory_is_memory(self, driver: Driver) -> None:
        address = driver.allocate(2 * PAGE)
        assert address % PAGE == 0
        assert read(address, 2 * PAGE) == bytes([FILL]) * (2 * PAGE)
        write(address, b"bytes")
        write(address + 2 * PAGE - 5, b"bytes")
        assert read(address, 5) == read(address + 2 * PAGE - 5, 5) == b"bytes"
        driver.free(address, 2 * PAGE)

    def test_memory_is_gone_after_unmap(self, driver: Driver) -> None:
        address = driver.reserve(PAGE)
        for _ in range(3):
            handle = driver.create()
            driver.ok("cuMemMap", address, PAGE, 0, handle, 0)
            assert driver.allow(address, PAGE) == OK
            assert read(address, PAGE) == bytes([FILL]) * PAGE
            write(address, b"secret" * 100)
            driver.ok("cuMemUnmap", address, PAGE)
            driver.ok("cuMemRelease", handle)

    def test_a_handle_keeps_its_bytes(self, driver: Driver) -> None:
        first, second, handle = driver.reserve(PAGE), driver.reserve(PAGE), driver.create()
        for address in (first, second):
            driver.ok("cuMemMap", address, PAGE, 0, handle, 0)
            assert driver.allow(address, PAGE) == OK
        write(first, b"aliased")
        assert read(second, 7) == b"aliased"

    def test_bytes_count_until_released_and_unmapped(self, driver: Driver) -> None:
        address, handle = driver.reserve(PAGE), driver.create()
        free = driver.free_bytes()
        driver.ok("cuMemMap", address, PAGE, 0, handle, 0)
        driver.ok("cuMemRelease", handle)
        assert sim.stats().live_handles == 0
        assert driver.free_bytes() == free
        assert driver("cuMemRelease", handle) == INVALID_VALUE
        other = driver.reserve(PAGE)
        assert driver("cuMemMap", other, PAGE, 0, handle, 0) == INVALID_VALUE
        driver.ok("cuMemUnmap", address, PAGE)
        assert driver.free_bytes() == free + PAGE

    def test_limit_is_exact(self, load: Callable[..., Driver]) -> None:
        driver, handle = load(DEVICE_BYTES=3 * PAGE), ctypes.c_uint64()
        driver.start()
        first = driver.create(2 * PAGE)
        assert driver("cuMemCreate", ctypes.byref(handle), 2 * PAGE, properties(), 0) == OUT_OF_MEMORY
        driver.create(PAGE)
        assert driver("cuMemCreate", ctypes.byref(handle), PAGE, properties(), 0) == OUT_OF_MEMORY
        assert driver("cuMemCreate", ctypes.byref(handle), 2**63, properties(), 0) == OUT_OF_MEMORY
        driver.ok("cuMemRelease", first)
        driver.create(2 * PAGE)

    @pytest.mark.parametrize(
        ("size", "property_block", "flags", "error"),
        [
            (0, properties(), 0, INVALID_VALUE),
            (PAGE + 4096, properties(), 0, INVALID_VALUE),
            (PAGE, properties(), 1, INVALID_VALUE),
            (PAGE, None, 0, INVALID_VALUE),
            (PAGE, properties(kind=0), 0, INVALID_VALUE),
            (PAGE, properties(location=2), 0, INVALID_VALUE),
            (PAGE, properties(handle_types=FABRIC), 0, NOT_PERMITTED),
            (PAGE, properties(handle_types=FABRIC | POSIX_FD), 0, NOT_PERMITTED),
            (PAGE, properties(handle_types=2), 0, NOT_SUPPORTED),
        ],
    )
    def test_create_is_strict(self, driver: Driver, size: int, property_block: Any, flags: int, error: str) -> None:
        handle = ctypes.c_uint64()
        assert driver("cuMemCreate", ctypes.byref(handle), size, property_block, flags) == error
        assert sim.stats().live_handles == 0

    def test_granularity(self, driver: Driver) -> None:
        for option in (0, 1):
            assert driver.get(Size, "cuMemGetAllocationGranularity", properties(), option) == PAGE
        assert driver("cuMemGetAllocationGranularity", ctypes.byref(Size()), properties(), 2) == INVALID_VALUE

    @pytest.mark.parametrize("alignment", [PAGE, 64 * MIB, 1 << 30])
    def test_reserve_aligns(self, driver: Driver, alignment: int) -> None:
        addresses = [driver.reserve(PAGE, alignment) for _ in range(4)]
        assert all(address % alignment == 0 for address in addresses)
        assert sim.stats().reserved_bytes == 4 * PAGE
        for address in addresses:
            driver.ok("cuMemAddressFree", address, PAGE)

    def test_reserve_takes_a_hint(self, driver: Driver) -> None:
        address = driver.reserve(4 * PAGE)
        driver.ok("cuMemAddressFree", address, 4 * PAGE)
        assert driver.get(Address, "cuMemAddressReserve", PAGE, 0, address, 0) == address
        assert driver.get(Address, "cuMemAddressReserve", PAGE, 0, address, 0) != address

    def test_reserve_is_strict(self, driver: Driver) -> None:
        value = ctypes.c_uint64()
        reference = ctypes.byref(value)
        assert driver("cuMemAddressReserve", reference, 0, 0, 0, 0) == INVALID_VALUE
        assert driver("cuMemAddressReserve", reference, 4096, 0, 0, 0) == INVALID_VALUE
        assert driver("cuMemAddressReserve", reference, PAGE, 3 * PAGE, 0, 0) == INVALID_VALUE
        assert driver("cuMemAddressReserve", reference, PAGE, 0, 0, 1) == INVALID_VALUE
        assert driver("cuMemAddressReserve", reference, 1 << 60, 0, 0, 0) == OUT_OF_MEMORY

    def test_free_is_exact(self, driver: Driver) -> None:
        address = driver.reserve(4 * PAGE)
        assert driver("cuMemAddressFree", address, PAGE) == INVALID_VALUE
        assert driver("cuMemAddressFree", address + PAGE, 3 * PAGE) == INVALID_VALUE
        handle = driver.create()
        driver.ok("cuMemMap", address + 2 * PAGE, PAGE, 0, handle, 0)
        assert driver("cuMemAddressFree", address, 4 * PAGE) == INVALID_VALUE
        driver.ok("cuMemUnmap", address + 2 * PAGE, PAGE)
        driver.ok("cuMemAddressFree", address, 4 * PAGE)
        assert driver("cuMemAddressFree", address, 4 * PAGE) == INVALID_VALUE

    def test_map_is_strict(self, driver: Driver) -> None:
        address, handle = driver.reserve(4 * PAGE), driver.create(2 * PAGE)
        for arguments in [
            (address, PAGE, 0, handle, 0),  # part of the handle
            (address, 2 * PAGE, PAGE, handle, 0),
            (address, 2 * PAGE, 0, handle, 1),
            (address, 2 * PAGE, 0, handle + 1, 0),
            (address + 4096, 2 * PAGE, 0, handle, 0),
            (address + 3 * PAGE, 2 * PAGE, 0, handle, 0),  # beyond the reservation
            (address - PAGE, 2 * PAGE, 0, handle, 0),
            (0, 2 * PAGE, 0, handle, 0),
        ]:
            assert driver("cuMemMap", *arguments) == INVALID_VALUE, arguments
        driver.ok("cuMemMap", address + PAGE, 2 * PAGE, 0, handle, 0)
        for place in (address, address + PAGE, address + 2 * PAGE):
            assert driver("cuMemMap", place, 2 * PAGE, 0, handle, 0) == INVALID_VALUE
        assert sim.stats().mapped_bytes == 2 * PAGE

    def test_unmap_takes_whole_mappings(self, driver: Driver) -> None:
        address = driver.reserve(6 * PAGE)
        for start in (0, 2, 4):
            driver.ok("cuMemMap", address + start * PAGE, 2 * PAGE, 0, driver.create(2 * PAGE), 0)
        for start, pages in [(0, 1), (1, 1), (1, 2), (0, 3), (0, 5), (1, 5), (0, 7), (0, 0)]:
            assert driver("cuMemUnmap", address + start * PAGE, pages * PAGE) == INVALID_VALUE, (start, pages)
        driver.ok("cuMemUnmap", address, 4 * PAGE)
        assert driver("cuMemUnmap", address, 6 * PAGE) == INVALID_VALUE
        driver.ok("cuMemUnmap", address + 4 * PAGE, 2 * PAGE)
        assert driver("cuMemUnmap", address, 2 * PAGE) == INVALID_VALUE
        assert sim.stats().mapped_bytes == 0

    def test_access_takes_whole_mappings(self, driver: Driver) -> None:
        address = driver.reserve(4 * PAGE)
        driver.ok("cuMemMap", address, 2 * PAGE, 0, driver.create(2 * PAGE), 0)
        assert driver.allow(address, 4 * PAGE) == INVALID_VALUE
        assert driver.allow(address, PAGE) == INVALID_VALUE
        driver.ok("cuMemMap", address + 2 * PAGE, 2 * PAGE, 0, driver.create(2 * PAGE), 0)
        assert driver.allow(address, 4 * PAGE, flags=2) == INVALID_VALUE
        assert driver.allow(address, 4 * PAGE, device=1) == INVALID_DEVICE
        assert driver("cuMemSetAccess", address, 4 * PAGE, None, 0) == INVALID_VALUE
        assert driver.allow(address, 4 * PAGE) == OK
        write(address + 2 * PAGE - 4, b"spanning")

    def test_access_is_per_device(self, load: Callable[..., Driver]) -> None:
        driver = load(DEVICES=2)
        driver.start()
        address = driver.allocate()

        def access(device: int) -> int:
            flags = ctypes.c_ulonglong()
            location = Location(1, device)
            driver.ok("cuMemGetAccess", ctypes.byref(flags), ctypes.byref(location), address)
            return flags.value

        assert (access(0), access(1)) == (READ_WRITE, NO_ACCESS)
        assert driver.allow(address, PAGE, READ, device=1) == OK
        assert (access(0), access(1)) == (READ_WRITE, READ)
        driver.enter(1)
        stream, buffer = driver.stream(), HostBuffer()
        driver.ok("cuMemcpyDtoHAsync", buffer.address, address, PAGE, stream)
        assert driver("cuMemcpyHtoDAsync", address, buffer.address, PAGE, stream) == INVALID_VALUE
        assert driver.allow(address, PAGE, READ_WRITE, device=1) == OK
        driver.ok("cuMemcpyHtoDAsync", address, buffer.address, PAGE, stream)
        driver.ok("cuMemUnmap", address, PAGE)
        location = Location(1, 0)
        assert driver("cuMemGetAccess", ctypes.byref(Size()), ctypes.byref(location), address) == INVALID_VALUE

    def test_export(self, driver: Driver) -> None:
        address, handle = driver.reserve(PAGE), driver.create(handle_types=POSIX_FD)
        driver.ok("cuMemMap", address, PAGE, 0, handle, 0)
        assert driver.allow(address, PAGE) == OK
        write(address, b"shared")
        descriptor = driver.get(Int, "cuMemExportToShareableHandle", handle, POSIX_FD, 0)
        with mmap.mmap(descriptor, PAGE) as view:
            assert view[:6] == b"shared"
        os.close(descriptor)
        value = ctypes.c_uint64()
        assert driver("cuMemExportToShareableHandle", ctypes.byref(value), handle, FABRIC, 0) == NOT_SUPPORTED
        plain = driver.create()
        assert driver("cuMemExportToShareableHandle", ctypes.byref(value), plain, POSIX_FD, 0) == INVALID_VALUE

    def test_import_is_a_handle_of_the_same_memory(self, driver: Driver) -> None:
        address, handle = driver.reserve(2 * PAGE), driver.create(handle_types=POSIX_FD)
        descriptor = driver.get(Int, "cuMemExportToShareableHandle", handle, POSIX_FD, 0)
        imported = driver.get(ctypes.c_uint64, "cuMemImportFromShareableHandle", descriptor, POSIX_FD)
        assert imported != handle
        for place, mapped in ((address, handle), (address + PAGE, imported)):
            driver.ok("cuMemMap", place, PAGE, 0, mapped, 0)
            assert driver.allow(place, PAGE) == OK
        write(address, b"shared")
        assert read(address + PAGE, 6) == b"shared"
        found = AllocationProperties()
        driver.ok("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(found), imported)
        assert (found.type, found.handle_types, found.location.type, found.location.id) == (1, POSIX_FD, 1, 0)
        # Counted once, and until the last of it is gone.
        assert driver.free_bytes() == 254 * MIB
        driver.ok("cuMemUnmap", address, PAGE)
        driver.ok("cuMemRelease", handle)
        assert driver.free_bytes() == 254 * MIB
        driver.ok("cuMemRelease", imported)
        assert driver.free_bytes() == 254 * MIB
        driver.ok("cuMemUnmap", address + PAGE, PAGE)
        assert driver.free_bytes() == 256 * MIB
        os.close(descriptor)

    def test_import_is_strict(self, driver: Driver) -> None:
        value = ctypes.c_uint64()
        read_end, write_end = os.pipe()
        other = os.memfd_create("other")
        os.ftruncate(other, PAGE)
        for wrong in (-1, 987654, read_end, other):
            assert driver("cuMemImportFromShareableHandle", ctypes.byref(value), wrong, POSIX_FD) == INVALID_VALUE
        for descriptor in (read_end, write_end, other):
            os.close(descriptor)
        descriptor = driver.get(Int, "cuMemExportToShareableHandle", driver.create(handle_types=POSIX_FD), POSIX_FD, 0)
        assert driver("cuMemImportFromShareableHandle", None, descriptor, POSIX_FD) == INVALID_VALUE
        assert driver("cuMemImportFromShareableHandle", ctypes.byref(value), descriptor, FABRIC) == NOT_SUPPORTED
        assert driver("cuMemGetAllocationPropertiesFromHandle", None, 1) == INVALID_VALUE
        found = AllocationProperties()
        assert driver("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(found), 1) == INVALID_VALUE
        os.close(descriptor)

    def test_nothing_is_left(self, driver: Driver) -> None:
        open_files = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            driver.free(driver.allocate(4 * PAGE), 4 * PAGE)
        left = sim.stats()
        assert (left.live_handles, left.mapped_bytes, left.reserved_bytes) == (0, 0, 0)
        assert driver.free_bytes() == 256 * MIB
        assert len(os.listdir("/proc/self/fd")) == open_files

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "step",
        [
            "address = driver.reserve(PAGE)",
            "address = driver.reserve(PAGE); driver.ok('cuMemMap', address, PAGE, 0, driver.create(), 0)",
            "address = driver.allocate(); driver.ok('cuMemUnmap', address, PAGE)",
            "address = driver.allocate(); driver.free(address)",
            "address = driver.allocate(); assert driver.allow(address, PAGE, NO_ACCESS) == OK",
        ],
        ids=["reserved", "no access granted", "unmapped", "freed", "access withdrawn"],
    )
    def test_address_faults(self, step: str) -> None:
        result = run_alone(f"driver.start(); {step}; print('before', flush=True); read(address); print('after')")
        assert result.returncode == -signal.SIGSEGV
        assert result.stdout == "before\n"

    def test_read_only_access_faults_on_write(self) -> None:
        result = run_alone(
            """
            driver.start()
            address = driver.allocate()
            assert driver.allow(address, PAGE, READ) == OK
            print(read(address, 1)[0], flush=True)
            write(address, b'x')
            """
        )
        assert result.returncode == -signal.SIGSEGV
        assert result.stdout == f"{FILL}\n"


class TestStreams:
    def test_create_is_strict(self, driver: Driver) -> None:
        value = Handle()
        assert driver("cuStreamCreate", ctypes.byref(value), 2) == INVALID_VALUE
        driver.ok("cuStreamCreateWithPriority", ctypes.byref(value), NON_BLOCKING, -5)
        driver.ok("cuStreamDestroy", value)
        assert driver("cuStreamDestroy", value) == INVALID_HANDLE
        assert driver("cuStreamSynchronize", value) == INVALID_HANDLE
        assert driver("cuStreamDestroy", None) == INVALID_HANDLE
        assert driver("cuStreamSynchronize", PER_THREAD_STREAM) == NOT_SUPPORTED
        driver.ok("cuStreamSynchronize", LEGACY_STREAM)

    def test_work_runs_in_order_on_a_thread_of_its_own(self, driver: Driver) -> None:
        stream, seen = driver.stream(), []
        kernels = [HostFunction(lambda _, i=i: seen.append((i, threading.get_native_id()))) for i in range(20)]
        for kernel in kernels:
            driver.ok("cuLaunchHostFunc", stream, kernel, None)
        driver.ok("cuStreamSynchronize", stream)
        assert [i for i, _ in seen] == list(range(20))
        assert {thread for _, thread in seen}.isdisjoint({threading.get_native_id()})

    def test_query_while_busy(self, driver: Driver) -> None:
        stream, event = driver.stream(), driver.event()
        driver.ok("cuEventQuery", event)  # never recorded
        with driver.busy(stream):
            driver.ok("cuEventRecord", event, stream)
            assert driver("cuStreamQuery", stream) == NOT_READY
            assert driver("cuEventQuery", event) == NOT_READY
        driver.ok("cuStreamQuery", stream)
        driver.ok("cuEventQuery", event)

    def test_streams_run_beside_each_other(self, driver: Driver) -> None:
        slow, fast, address = driver.stream(), driver.stream(), driver.allocate()
        with driver.busy(slow):
            driver.ok("cuMemsetD8Async", address, 3, PAGE, fast)
            driver.ok("cuStreamSynchronize", fast)
            assert read(address, 1) == b"\x03"

    def test_wait_event_orders_streams(self, driver: Driver) -> None:
        first, second, event, address = driver.stream(), driver.stream(), driver.event(), driver.allocate()
        driver.ok("cuStreamWaitEvent", second, event, 0)  # never recorded: nothing to wait for
        with driver.busy(first):
            driver.ok("cuEventRecord", event, first)
            driver.ok("cuStreamWaitEvent", second, event, 0)
            driver.ok("cuMemsetD8Async", address, 3, PAGE, second)
            time.sleep(0.05)
            assert driver("cuStreamQuery", second) == NOT_READY
            assert read(address, 1)[0] == FILL
        driver.ok("cuStreamSynchronize", second)
        assert read(address, 1)[0] == 3

    def test_wait_event_waits_for_the_record_before_it(self, driver: Driver) -> None:
        first, second, event = driver.stream(), driver.stream(), driver.event()
        driver.ok("cuEventRecord", event, first)
        driver.ok("cuStreamWaitEvent", second, event, 0)
        with driver.busy(first):
            driver.ok("cuEventRecord", event, first)
            driver.ok("cuStreamSynchronize", second)

    def test_event_synchronize_waits(self, load: Callable[..., Driver]) -> None:
        driver = load(COPY_DELAY_US=50_000)
        driver.start()
        stream, event, address = driver.stream(), driver.event(), driver.allocate()
        driver.ok("cuMemsetD8Async", address, 3, PAGE, stream)
        driver.ok("cuEventRecord", event, stream)
        driver.ok("cuEventSynchronize", event)
        assert read(address, 1)[0] == 3
        driver.ok("cuEventDestroy", event)
        assert driver("cuEventDestroy", event) == INVALID_HANDLE

    @pytest.mark.parametrize("flags", [8, 4], ids=["unknown", "interprocess with timing"])
    def test_event_flags(self, driver: Driver, flags: int) -> None:
        assert driver("cuEventCreate", ctypes.byref(Handle()), flags) == INVALID_VALUE

    def test_context_synchronize_waits_for_all(self, load: Callable[..., Driver]) -> None:
        driver = load(COPY_DELAY_US=30_000)
        driver.start()
        addresses = [driver.allocate() for _ in range(3)]
        streams = [driver.stream(), driver.stream(flags=0), None]
        for address, stream in zip(addresses, streams, strict=True):
            driver.ok("cuMemsetD8Async", address, 5, PAGE, stream)
        driver.ok("cuStreamDestroy", streams[0])  # its work still counts
        driver.ok("cuCtxSynchronize")
        assert all(read(address, 1)[0] == 5 for address in addresses)

    def test_legacy_stream_waits_for_blocking_streams_and_they_for_it(self, driver: Driver) -> None:
        blocking, free, address = driver.stream(flags=0), driver.stream(), driver.allocate()
        with driver.busy(blocking):
            driver.ok("cuMemsetD8Async", address, 1, PAGE, None)
            time.sleep(0.05)
            assert driver("cuStreamQuery", None) == NOT_READY
        driver.ok("cuStreamSynchronize", None)
        with driver.busy(None):
            driver.ok("cuMemsetD8Async", address, 2, PAGE, blocking)
            driver.ok("cuMemsetD8Async", address, 3, PAGE, free)
            driver.ok("cuStreamSynchronize", free)
            assert driver("cuStreamQuery", blocking) == NOT_READY
            assert read(address, 1)[0] == 3
        driver.ok("cuStreamSynchronize", blocking)
        assert read(address, 1)[0] == 2

    def test_host_functions_must_not_call_the_driver(self, driver: Driver) -> None:
        stream, answers = driver.stream(), []
        kernel = HostFunction(lambda _: answers.append(driver("cuStreamQuery", stream)))
        driver.ok("cuLaunchHostFunc", stream, kernel, None)
        driver.ok("cuStreamSynchronize", stream)
        assert answers == [NOT_PERMITTED]

    @pytest.mark.slow
    def test_process_ends_with_work_in_flight(self) -> None:
        result = run_alone(
            """
            driver.start()
            stream, address = driver.stream(), driver.allocate()
            buffer = HostBuffer()
            driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
            kernel = HostFunction(lambda _: time.sleep(0.2))
            for i in range(10):
                driver.ok("cuMemcpyHtoDAsync", address, buffer.address, PAGE, driver.stream())
            driver.ok("cuLaunchHostFunc", stream, kernel, None)
            driver.ok("cuMemsetD8Async", address, 3, PAGE, stream)
            print("end", flush=True)
            """,
            CUMEM_SLEEP_SIM_COPY_DELAY_US="20000",
        )
        assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr


class TestCopies:
    def test_round_trip(self, driver: Driver) -> None:
        first, second, stream = driver.allocate(), driver.allocate(), driver.stream()
        data = os.urandom(PAGE)
        source, target = HostBuffer(), HostBuffer()
        write(source.address, data)
        for buffer in (source, target):
            driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        driver.ok("cuMemcpyHtoDAsync", first, source.address, PAGE, stream)
        driver.ok("cuMemcpyDtoDAsync", second, first, PAGE, stream)
        driver.ok("cuMemcpyDtoHAsync", target.address, second, PAGE, stream)
        driver.ok("cuStreamSynchronize", stream)
        assert read(target.address, PAGE) == data

    def test_fills(self, driver: Driver) -> None:
        address, stream = driver.allocate(), driver.stream()
        driver.ok("cuMemsetD8Async", address, 0x11, PAGE, stream)
        driver.ok("cuMemsetD32Async", address + 4, 0x01020304, 2, stream)
        driver.ok("cuMemsetD32Async", address, 1, 0, stream)
        driver.ok("cuStreamSynchronize", stream)
        assert read(address, 13) == b"\x11" * 4 + bytes([4, 3, 2, 1]) * 2 + b"\x11"
        assert driver("cuMemsetD32Async", address + 2, 1, 1, stream) == INVALID_VALUE
        assert driver("cuMemsetD32Async", address, 1, 2**62 + 1, stream) == INVALID_VALUE

    def test_registered_memory_is_copied_while_the_program_goes_on(self, driver: Driver) -> None:
        address, stream, buffer = driver.allocate(), driver.stream(), HostBuffer()
        write(address, b"device bytes")
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        with driver.busy(stream):
            driver.ok("cuMemcpyDtoHAsync", buffer.address, address, PAGE, stream)
            assert read(buffer.address, 12) == bytes(12)
        driver.ok("cuStreamSynchronize", stream)
        assert read(buffer.address, 12) == b"device bytes"

    def test_forgotten_synchronisation_shows(self, load: Callable[..., Driver]) -> None:
        driver = load(COPY_DELAY_US=500_000)
        driver.start()
        address, stream, buffer = driver.allocate(), driver.stream(), HostBuffer(fill=7)
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        driver.ok("cuMemcpyHtoDAsync", address, buffer.address, PAGE, stream)
        assert read(address)[0] == FILL

    def test_pageable_memory_is_copied_before_the_call_returns(self, load: Callable[..., Driver]) -> None:
        driver = load(COPY_DELAY_US=20_000)
        driver.start()
        address, stream, buffer = driver.allocate(), driver.stream(), HostBuffer()
        driver.ok("cuMemsetD8Async", address, 9, PAGE, stream)
        driver.ok("cuMemcpyDtoHAsync", buffer.address, address, PAGE, stream)
        assert read(buffer.address) == b"\x09" * 16
        driver.ok("cuStreamQuery", stream)

    def test_device_range_is_checked_when_enqueued(self, driver: Driver) -> None:
        stream, buffer = driver.stream(), HostBuffer(4 * PAGE)
        address = driver.reserve(4 * PAGE)
        driver.ok("cuMemMap", address, 2 * PAGE, 0, driver.create(2 * PAGE), 0)

        def copy(start: int, size: int) -> str:
            return driver("cuMemcpyHtoDAsync", address + start, buffer.address, size, stream)

        assert copy(0, PAGE) == INVALID_VALUE  # no access yet
        assert driver.allow(address, 2 * PAGE) == OK
        assert copy(100, PAGE) == OK
        assert copy(0, 0) == OK
        assert copy(PAGE, PAGE + 1) == INVALID_VALUE
        assert copy(3 * PAGE, 1) == INVALID_VALUE
        assert copy(-1, 1) == INVALID_VALUE
        driver.ok("cuMemMap", address + 2 * PAGE, PAGE, 0, driver.create(), 0)
        assert driver.allow(address + 2 * PAGE, PAGE) == OK
        assert copy(PAGE, 2 * PAGE) == OK  # over two mappings
        assert driver("cuMemcpyDtoDAsync", address, address + 3 * PAGE, 1, stream) == INVALID_VALUE
        assert driver("cuMemcpyHtoDAsync", address, None, 1, stream) == INVALID_VALUE
        assert driver("cuMemcpyHtoDAsync", address, buffer.address, 2**64 - 1, stream) == INVALID_VALUE
        driver.ok("cuStreamSynchronize", stream)

    def test_host_range_is_checked_when_enqueued(self, driver: Driver) -> None:
        stream, buffer, address = driver.stream(), HostBuffer(4 * PAGE), driver.allocate(4 * PAGE)
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        driver.ok("cuMemHostRegister", buffer.address + PAGE, PAGE, 0)

        def copy(start: int, size: int) -> str:
            return driver("cuMemcpyDtoHAsync", buffer.address + start, address, size, stream)

        assert copy(PAGE // 2, PAGE // 2) == OK
        assert copy(2 * PAGE, 2 * PAGE) == OK
        # "Memory regions requested must be either entirely registered with CUDA, or not at all."
        assert copy(0, 2 * PAGE) == INVALID_VALUE
        assert copy(PAGE, 2 * PAGE) == INVALID_VALUE
        unmapped = HostBuffer()
        gone = unmapped.address
        del unmapped
        assert driver("cuMemcpyDtoHAsync", gone, address, PAGE, stream) == INVALID_VALUE

    def test_host_address_may_be_a_device_address(self, driver: Driver) -> None:
        first, second, stream = driver.allocate(), driver.allocate(), driver.stream()
        write(first, b"unified")
        driver.ok("cuMemcpyDtoHAsync", second, first, PAGE, stream)
        driver.ok("cuStreamSynchronize", stream)
        assert read(second, 7) == b"unified"
        driver.ok("cuMemUnmap", second, PAGE)
        assert driver("cuMemcpyDtoHAsync", second, first, PAGE, stream) == INVALID_VALUE


class TestFaults:
    """Memory that is taken away from work in flight fails the context, until reset()."""

    @pytest.fixture
    def copying(self, driver: Driver) -> tuple[Driver, int, int, HostBuffer]:
        buffer = HostBuffer()
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        return driver, driver.stream(), driver.allocate(), buffer

    def assert_faulted(self, driver: Driver, stream: int, address: int) -> None:
        assert driver("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
        assert driver("cuStreamQuery", stream) == ILLEGAL_ADDRESS
        assert driver("cuCtxSynchronize") == ILLEGAL_ADDRESS
        assert driver("cuMemsetD8Async", address, 0, 1, None) == ILLEGAL_ADDRESS
        assert driver("cuStreamCreate", ctypes.byref(Handle()), 0) == ILLEGAL_ADDRESS
        assert driver("cuEventCreate", ctypes.byref(Handle()), 0) == ILLEGAL_ADDRESS
        assert driver("cuLaunchHostFunc", stream, HostFunction(lambda _: None), None) == ILLEGAL_ADDRESS
        sim.reset()
        driver.ok("cuStreamSynchronize", stream)
        driver.ok("cuCtxSynchronize")

    def test_unmapped_before_the_copy(self, copying: tuple[Driver, int, int, HostBuffer]) -> None:
        driver, stream, address, buffer = copying
        event = driver.event()
        with driver.busy(stream):
            driver.ok("cuMemcpyDtoHAsync", buffer.address, address, PAGE, stream)
            driver.ok("cuEventRecord", event, stream)
            free = driver.free_bytes()
            driver.ok("cuMemUnmap", address, PAGE)
            assert driver.free_bytes() == free + PAGE  # work in flight does not keep the memory
        assert driver("cuEventSynchronize", event) == ILLEGAL_ADDRESS
        assert driver("cuEventQuery", event) == ILLEGAL_ADDRESS
        self.assert_faulted(driver, stream, address)
        assert read(buffer.address) == bytes(16)

    def test_unmapped_and_mapped_anew(self, copying: tuple[Driver, int, int, HostBuffer]) -> None:
        driver, stream, address, buffer = copying
        with driver.busy(stream):
            driver.ok("cuMemcpyDtoHAsync", buffer.address, address, PAGE, stream)
            driver.ok("cuMemUnmap", address, PAGE)
            driver.ok("cuMemMap", address, PAGE, 0, driver.create(), 0)
            assert driver.allow(address, PAGE) == OK
        self.assert_faulted(driver, stream, address)

    def test_access_withdrawn(self, copying: tuple[Driver, int, int, HostBuffer]) -> None:
        driver, stream, address, buffer = copying
        with driver.busy(stream):
            driver.ok("cuMemcpyHtoDAsync", address, buffer.address, PAGE, stream)
            assert driver.allow(address, PAGE, READ) == OK
        self.assert_faulted(driver, stream, address)

    def test_unregistered_before_the_copy(self, copying: tuple[Driver, int, int, HostBuffer]) -> None:
        driver, stream, address, buffer = copying
        context = driver.get(ctypes.c_void_p, "cuCtxGetCurrent")

        def unregister() -> None:
            driver.ok("cuCtxSetCurrent", ctypes.c_void_p(context))
            driver.ok("cuMemHostUnregister", buffer.address)

        # The call waits for the work that runs, as the real one does; what is enqueued is too late all the same.
        thread = threading.Thread(target=unregister)
        with driver.busy(stream):
            driver.ok("cuMemcpyHtoDAsync", address, buffer.address, PAGE, stream)
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
        thread.join(10)
        assert not thread.is_alive()
        self.assert_faulted(driver, stream, address)
        assert read(address)[0] == FILL

    def test_host_memory_gone_before_the_copy(self, copying: tuple[Driver, int, int, HostBuffer]) -> None:
        driver, stream, address, buffer = copying
        gone = buffer.address
        with driver.busy(stream):
            driver.ok("cuMemcpyHtoDAsync", address, gone, PAGE, stream)
            del buffer.view
            buffer.memory.close()  # unmapped, but still registered
        self.assert_faulted(driver, stream, address)
        driver.ok("cuMemHostUnregister", gone)

    def test_unmapped_during_the_copy(self, driver: Driver) -> None:
        size = 64 * MIB
        stream, address = driver.stream(), driver.allocate(size)
        for _ in range(1000):  # more than can be done until then
            driver.ok("cuMemsetD8Async", address, 1, size, stream)
        time.sleep(0.02)
        driver.ok("cuMemUnmap", address, size)
        assert driver("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS

    def test_other_devices_go_on(self, load: Callable[..., Driver]) -> None:
        driver = load(DEVICES=2)
        driver.start()
        stream, address = driver.stream(), driver.allocate()
        with driver.busy(stream):
            driver.ok("cuMemsetD8Async", address, 1, PAGE, stream)
            driver.ok("cuMemUnmap", address, PAGE)
        assert driver("cuCtxSynchronize") == ILLEGAL_ADDRESS
        driver.enter(1)
        driver.ok("cuCtxSynchronize")
        driver.ok("cuMemsetD8Async", driver.allocate(device=1), 1, PAGE, None)
        driver.ok("cuCtxSynchronize")


class TestRegistration:
    def test_overlap(self, driver: Driver) -> None:
        buffer = HostBuffer(4 * PAGE)
        driver.ok("cuMemHostRegister", buffer.address + PAGE, PAGE, 0)
        assert sim.stats().registered_bytes == PAGE
        for start, size in [(PAGE, PAGE), (0, PAGE + 1), (2 * PAGE - 1, PAGE), (0, 4 * PAGE), (PAGE + 8, 8)]:
            assert driver("cuMemHostRegister", buffer.address + start, size, 0) == ALREADY_REGISTERED, (start, size)
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        driver.ok("cuMemHostRegister", buffer.address + 2 * PAGE, 2 * PAGE, 3)
        assert sim.stats().registered_bytes == 4 * PAGE

    def test_unregister_takes_the_base(self, driver: Driver) -> None:
        buffer = HostBuffer()
        assert driver("cuMemHostUnregister", buffer.address) == NOT_REGISTERED
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        assert driver("cuMemHostUnregister", buffer.address + 4096) == NOT_REGISTERED
        driver.ok("cuMemHostUnregister", buffer.address)
        assert driver("cuMemHostUnregister", buffer.address) == NOT_REGISTERED
        assert sim.stats().registered_bytes == 0

    def test_bad_ranges(self, driver: Driver) -> None:
        buffer = HostBuffer(2 * PAGE)
        assert driver("cuMemHostRegister", None, PAGE, 0) == INVALID_VALUE
        assert driver("cuMemHostRegister", buffer.address, 0, 0) == INVALID_VALUE
        assert driver("cuMemHostRegister", buffer.address, PAGE, 16) == INVALID_VALUE
        assert driver("cuMemHostRegister", buffer.address, 2**64 - 1, 0) == INVALID_VALUE
        assert driver("cuMemHostRegister", 4096, PAGE, 0) == INVALID_VALUE
        assert driver("cuMemHostRegister", driver.allocate(), PAGE, 0) == INVALID_VALUE  # device memory
        assert sim.stats().registered_bytes == 0

    def test_memory_that_cannot_be_written_to(self, driver: Driver) -> None:
        """Is registered for reading only, and read by copies only."""
        read_only = 8
        address, stream = driver.allocate(), driver.stream()
        with tempfile.TemporaryFile() as file:
            file.write(b"r" * PAGE)
            file.flush()
            view = mmap.mmap(file.fileno(), PAGE, mmap.MAP_SHARED, mmap.PROT_READ)
        host = np.frombuffer(view, np.uint8).ctypes.data
        assert driver("cuMemHostRegister", host, PAGE, 0) == INVALID_VALUE
        driver.ok("cuMemHostRegister", host, PAGE, read_only)
        driver.ok("cuMemcpyHtoDAsync", address, host, PAGE, stream)
        driver.ok("cuStreamSynchronize", stream)
        assert read(address) == b"r" * 16
        assert driver("cuMemcpyDtoHAsync", host, address, PAGE, stream) == INVALID_VALUE
        driver.ok("cuMemHostUnregister", host)

    def test_range_with_a_hole(self, driver: Driver) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, Size, Int, Int, Int, ctypes.c_long]
        address = libc.mmap(None, 4 * PAGE, 3, 0x22, -1, 0)
        assert libc.munmap(ctypes.c_void_p(address + 2 * PAGE), Size(PAGE)) == 0
        assert driver("cuMemHostRegister", address, 4 * PAGE, 0) == INVALID_VALUE
        driver.ok("cuMemHostRegister", address, 2 * PAGE, 0)
        driver.ok("cuMemHostUnregister", address)
        libc.munmap(ctypes.c_void_p(address), Size(4 * PAGE))


class TestPlainMemory:
    def test_is_memory_of_the_device(self, driver: Driver) -> None:
        address = driver.get(Address, "cuMemAlloc", 100)
        assert read(address, 100) == bytes([FILL]) * 100
        write(address, b"bytes")
        assert driver.free_bytes() == 256 * MIB - PAGE
        driver.ok("cuMemFree", address)
        assert driver.free_bytes() == 256 * MIB
        assert driver("cuMemFree", address) == INVALID_VALUE
        driver.ok("cuMemFree", 0)

    def test_alloc_is_strict(self, driver: Driver) -> None:
        assert driver("cuMemAlloc", None, PAGE) == INVALID_VALUE
        assert driver("cuMemAlloc", ctypes.byref(Size()), 0) == INVALID_VALUE
        assert driver("cuMemAlloc", ctypes.byref(Size()), 257 * MIB) == OUT_OF_MEMORY
        assert driver("cuMemAlloc", ctypes.byref(Size()), 2**64 - 1) == OUT_OF_MEMORY

    def test_free_waits_for_all_work(self, load: Callable[..., Driver]) -> None:
        driver = load(COPY_DELAY_US=50_000)
        driver.start()
        plain, address = driver.get(Address, "cuMemAlloc", PAGE), driver.allocate()
        driver.ok("cuMemsetD8Async", address, 1, PAGE, driver.stream())
        driver.ok("cuMemFree", plain)
        assert read(address)[0] == 1

    def test_free_leaves_captures_alone_in_a_relaxed_thread(self, driver: Driver) -> None:
        stream, plain = driver.stream(), driver.get(Address, "cuMemAlloc", PAGE)
        driver.set_capture_mode(RELAXED)
        driver.ok("cuStreamBeginCapture", stream, GLOBAL)
        driver.ok("cuMemFree", plain)
        assert driver.end_capture(stream)[0] == OK


class TestCaptures:
    def test_work_is_recorded_not_run(self, driver: Driver) -> None:
        stream, address = driver.stream(), driver.allocate()
        ran = []
        kernel = HostFunction(lambda _: ran.append(1))
        assert driver.capture_status(stream) == CAPTURE_NONE
        driver.ok("cuStreamBeginCapture", stream, GLOBAL)
        assert driver.capture_status(stream) == CAPTURE_ACTIVE
        driver.ok("cuMemsetD8Async", address, 1, PAGE, stream)
        driver.ok("cuLaunchHostFunc", stream, kernel, None)
        error, graph = driver.end_capture(stream)
        assert error == OK
        driver.ok("cuCtxSynchronize")
        assert not ran
        assert read(address)[0] == FILL
        driver.ok("cuGraphDestroy", graph)
        assert driver("cuGraphDestroy", graph) == INVALID_VALUE

    def test_begin_and_end_are_strict(self, driver: Driver) -> None:
        stream = driver.stream()
        assert driver("cuStreamBeginCapture", None, GLOBAL) == CAPTURE_UNSUPPORTED
        assert driver("cuStreamBeginCapture", stream, 3) == INVALID_VALUE
        assert driver.end_capture(stream)[0] == ILLEGAL_STATE
        driver.ok("cuStreamBeginCapture", stream, THREAD_LOCAL)
        assert driver("cuStreamBeginCapture", stream, GLOBAL) == ILLEGAL_STATE

        def end_elsewhere() -> str:
            driver.enter()
            return driver.end_capture(stream)[0]

        assert in_thread(end_elsewhere) == "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"
        assert driver.end_capture(stream)[0] == OK
        driver.ok("cuStreamBeginCapture", stream, RELAXED)
        assert in_thread(end_elsewhere) == OK

    @pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
    @pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery", "cuCtxSynchronize"])
    def test_waiting_for_a_capture_invalidates_it(self, driver: Driver, mode: int, call: str) -> None:
        stream, address = driver.stream(), driver.allocate()
        driver.set_capture_mode(RELAXED)  # allows no more than the unsafe calls
        driver.ok("cuStreamBeginCapture", stream, mode)
        arguments = [] if call == "cuCtxSynchronize" else [stream]
        assert driver(call, *arguments) == CAPTURE_UNSUPPORTED
        assert driver.capture_status(stream) == CAPTURE_INVALID
        assert driver("cuMemsetD8Async", address, 1, PAGE, stream) == CAPTURE_INVALIDATED
        assert driver.end_capture(stream) == (CAPTURE_INVALIDATED, None)
        assert driver.capture_status(stream) == CAPTURE_NONE
        driver.ok("cuMemsetD8Async", address, 1, PAGE, stream)
        driver.ok("cuCtxSynchronize")

    def unsafe_calls(self, driver: Driver) -> dict[str, Callable[[], str]]:
        registered, other = HostBuffer(), HostBuffer()
        driver.ok("cuMemHostRegister", registered.address, PAGE, 0)
        stream, event = driver.stream(), driver.event()
        return {
            "cuMemHostRegister": lambda: driver("cuMemHostRegister", other.address, PAGE, 0),
            "cuMemHostUnregister": lambda: driver("cuMemHostUnregister", registered.address),
            "cuStreamSynchronize": lambda: driver("cuStreamSynchronize", stream),
            "cuEventSynchronize": lambda: driver("cuEventSynchronize", event),
            "cuEventQuery": lambda: driver("cuEventQuery", event),
        }

    # (mode of the capture, mode of the calling thread, is it the capturing thread) -> forbidden?
    @pytest.mark.parametrize(
        ("capture_mode", "thread_mode", "same_thread", "forbidden"),
        [
            (GLOBAL, GLOBAL, True, True),
            (GLOBAL, THREAD_LOCAL, True, True),
            (GLOBAL, RELAXED, True, False),
            (THREAD_LOCAL, GLOBAL, True, True),
            (THREAD_LOCAL, THREAD_LOCAL, True, True),
            (THREAD_LOCAL, RELAXED, True, False),
            (RELAXED, GLOBAL, True, False),
            (GLOBAL, GLOBAL, False, True),
            (GLOBAL, THREAD_LOCAL, False, False),
            (GLOBAL, RELAXED, False, False),
            (THREAD_LOCAL, GLOBAL, False, False),
            (RELAXED, GLOBAL, False, False),
        ],
    )
    @pytest.mark.parametrize(
        "call",
        ["cuMemHostRegister", "cuMemHostUnregister", "cuStreamSynchronize", "cuEventSynchronize", "cuEventQuery"],
    )
    def test_unsafe_calls(
        self, driver: Driver, *, call: str, capture_mode: int, thread_mode: int, same_thread: bool, forbidden: bool
    ) -> None:
        capturing, unsafe_call = driver.stream(), self.unsafe_calls(driver)[call]
        driver.ok("cuStreamBeginCapture", capturing, capture_mode)

        def make_call() -> str:
            if not same_thread:
                driver.enter()
            before = driver.set_capture_mode(thread_mode)
            assert before == GLOBAL
            answer = unsafe_call()
            assert driver.set_capture_mode(before) == thread_mode
            return answer

        answer = make_call() if same_thread else in_thread(make_call)
        assert answer == (CAPTURE_UNSUPPORTED if forbidden else OK)
        assert driver.end_capture(capturing)[0] == (CAPTURE_INVALIDATED if forbidden else OK)
        if forbidden:
            assert unsafe_call() == OK  # it had no effect then

    def test_virtual_memory_calls_are_safe(self, driver: Driver) -> None:
        stream = driver.stream()
        driver.ok("cuStreamBeginCapture", stream, GLOBAL)
        driver.free(driver.allocate())
        driver.free_bytes()
        assert driver.end_capture(stream)[0] == OK

    def test_query_of_another_stream_is_safe(self, driver: Driver) -> None:
        stream, other = driver.stream(), driver.stream()
        driver.ok("cuStreamBeginCapture", stream, GLOBAL)
        driver.ok("cuStreamQuery", other)
        assert driver.end_capture(stream)[0] == OK

    @pytest.mark.parametrize("call", ["cuMemsetD8Async", "cuStreamSynchronize", "cuStreamQuery", "cuEventRecord"])
    def test_legacy_stream_beside_a_blocking_capture(self, driver: Driver, call: str) -> None:
        stream, address, event = driver.stream(flags=0), driver.allocate(), driver.event()
        arguments = {"cuMemsetD8Async": [address, 1, 1, None], "cuEventRecord": [event, None]}.get(call, [None])
        driver.ok("cuStreamBeginCapture", stream, RELAXED)
        status = Int()
        assert driver("cuStreamIsCapturing", None, ctypes.byref(status)) == CAPTURE_IMPLICIT
        assert driver.capture_status(stream) == CAPTURE_ACTIVE  # asking never invalidates
        assert driver(call, *arguments) == CAPTURE_IMPLICIT
        assert driver.end_capture(stream)[0] == CAPTURE_INVALIDATED

    def test_legacy_stream_beside_a_non_blocking_capture(self, driver: Driver) -> None:
        stream, address = driver.stream(), driver.allocate()
        driver.ok("cuStreamBeginCapture", stream, RELAXED)
        driver.ok("cuMemsetD8Async", address, 1, PAGE, None)
        driver.ok("cuStreamSynchronize", None)
        assert driver.end_capture(stream)[0] == OK

    @pytest.mark.parametrize("call", ["cuEventQuery", "cuEventSynchronize"])
    def test_captured_event_cannot_be_waited_for(self, driver: Driver, call: str) -> None:
        stream, event = driver.stream(), driver.event()
        driver.ok("cuStreamBeginCapture", stream, RELAXED)
        driver.ok("cuEventRecord", event, stream)
        assert driver(call, event) == CAPTURED_EVENT
        assert driver.end_capture(stream)[0] == CAPTURE_INVALIDATED
        driver.ok("cuEventRecord", event, stream)
        driver.ok("cuEventSynchronize", event)

    def test_events_join_streams_to_a_capture(self, driver: Driver) -> None:
        origin, side, event, address = driver.stream(), driver.stream(), driver.event(), driver.allocate()
        driver.ok("cuStreamBeginCapture", origin, GLOBAL)
        driver.ok("cuEventRecord", event, origin)
        driver.ok("cuStreamWaitEvent", side, event, 0)
        assert driver.capture_status(side) == CAPTURE_ACTIVE
        driver.ok("cuMemsetD8Async", address, 1, PAGE, side)
        assert driver.end_capture(side)[0] == "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"
        assert driver.end_capture(origin)[0] == OK
        assert driver.capture_status(side) == CAPTURE_NONE
        driver.ok("cuCtxSynchronize")
        assert read(address)[0] == FILL

    def test_captures_stay_apart(self, driver: Driver) -> None:
        first, second, event = driver.stream(), driver.stream(), driver.event()
        driver.ok("cuStreamBeginCapture", first, RELAXED)
        driver.ok("cuStreamBeginCapture", second, RELAXED)
        driver.ok("cuEventRecord", event, first)
        assert driver("cuStreamWaitEvent", second, event, 0) == "CUDA_ERROR_STREAM_CAPTURE_MERGE"
        assert driver.end_capture(first)[0] == driver.end_capture(second)[0] == CAPTURE_INVALIDATED

    def test_capture_cannot_wait_for_outside_work(self, driver: Driver) -> None:
        stream, other, event = driver.stream(), driver.stream(), driver.event()
        driver.ok("cuEventRecord", event, other)
        driver.ok("cuStreamBeginCapture", stream, GLOBAL)
        assert driver("cuStreamWaitEvent", stream, event, 0) == "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"
        assert driver.end_capture(stream)[0] == CAPTURE_INVALIDATED

    def test_exchange_of_the_thread_mode(self, driver: Driver) -> None:
        assert driver.set_capture_mode(RELAXED) == GLOBAL
        assert in_thread(lambda: driver.set_capture_mode(THREAD_LOCAL)) == GLOBAL
        assert driver.set_capture_mode(GLOBAL) == RELAXED
        bad = Int(7)
        assert driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(bad)) == INVALID_VALUE

    def test_captures_of_other_contexts_do_not_stop_a_synchronize(self, load: Callable[..., Driver]) -> None:
        driver = load(DEVICES=2)
        first = driver.start(0)
        stream = driver.stream()
        driver.ok("cuStreamBeginCapture", stream, RELAXED)
        driver.enter(1)
        driver.ok("cuCtxSynchronize")
        driver.ok("cuCtxSetCurrent", first)
        assert driver.end_capture(stream)[0] == OK


class TestControls:
    def test_failure_after_and_times(self, driver: Driver) -> None:
        sim.fail("cuMemCreate", after=2, times=2)
        answers = [driver("cuMemCreate", ctypes.byref(Size()), PAGE, properties(), 0) for _ in range(6)]
        assert answers == [OK, OK, OUT_OF_MEMORY, OUT_OF_MEMORY, OK, OK]
        assert sim.stats().live_handles == 4
        assert sim.stats().calls["cuMemCreate"] == 6

    def test_failed_call_has_no_effect(self, driver: Driver) -> None:
        address = driver.allocate()
        sim.fail("cuMemUnmap", error=INVALID_VALUE)
        assert driver("cuMemUnmap", address, PAGE) == INVALID_VALUE
        write(address, b"mapped")
        sim.fail("cuMemAddressReserve", error="CUDA_ERROR_UNKNOWN")
        before = sim.stats().reserved_bytes
        assert driver("cuMemAddressReserve", ctypes.byref(Size()), PAGE, 0, 0, 0) == "CUDA_ERROR_UNKNOWN"
        assert sim.stats().reserved_bytes == before

    def test_rules_add_up(self, driver: Driver) -> None:
        sim.fail("cuCtxSynchronize", after=1, error="CUDA_ERROR_LAUNCH_FAILED")
        sim.fail("cuCtxSynchronize", after=2, error="CUDA_ERROR_ECC_UNCORRECTABLE")
        answers = [driver("cuCtxSynchronize") for _ in range(5)]
        assert answers == [OK, "CUDA_ERROR_LAUNCH_FAILED", OK, "CUDA_ERROR_ECC_UNCORRECTABLE", OK]

    def test_every_call_can_fail(self, driver: Driver) -> None:
        for name, (_, kinds) in CALLS.items():
            sim.fail(name, error="CUDA_ERROR_TIMEOUT")
            arguments = [HostFunction() if kind is HostFunction else kind(0) for kind in kinds]
            code = driver.calls[name](*arguments)
            assert code == 909, name
            assert sim.stats().calls[name] >= 1

    def test_versioned_names(self, driver: Driver) -> None:
        sim.fail("cuMemHostRegister_v2", error=NOT_PERMITTED)
        buffer = HostBuffer()
        assert driver("cuMemHostRegister", buffer.address, PAGE, 0) == NOT_PERMITTED

    def test_before_init_a_rule_is_kept(self, load: Callable[..., Driver]) -> None:
        driver = load()
        sim.fail("cuDeviceGetCount")
        value = Int()
        assert driver("cuDeviceGetCount", ctypes.byref(value)) == NOT_INITIALIZED
        driver.ok("cuInit", 0)
        assert driver("cuDeviceGetCount", ctypes.byref(value)) == OUT_OF_MEMORY
        driver.ok("cuDeviceGetCount", ctypes.byref(value))

    def test_reset(self, driver: Driver) -> None:
        address = driver.allocate()
        sim.fail("cuCtxSynchronize", times=100)
        sim.reset()
        driver.ok("cuCtxSynchronize")
        after = sim.stats()
        assert {name: count for name, count in after.calls.items() if count} == {
            "cuCtxSynchronize": 1,
            "cuGetErrorName": 1,
        }
        assert after.mapped_bytes == PAGE
        write(address, b"untouched")

    @pytest.mark.usefixtures("driver")
    def test_stats_are_facts(self) -> None:
        facts = sim.stats()
        with pytest.raises(AttributeError):
            facts.live_handles = 1  # type: ignore[misc]
        with pytest.raises(TypeError):
            facts.calls["cuInit"] = 0  # type: ignore[index]
        assert facts == sim.SimStats(0, 0, 0, 0, facts.calls)

    @pytest.mark.parametrize(
        ("arguments", "wrong"),
        [
            ({"device_bytes": 0}, "device_bytes=0"),
            ({"device_bytes": -1}, "device_bytes=-1"),
            ({"device_bytes": 2**64}, f"device_bytes={2**64}"),
            ({"devices": 0}, "devices=0"),
            ({"devices": -3}, "devices=-3"),
            ({"devices": 65}, "devices=65"),
        ],
    )
    def test_bad_sizes(self, driver: Driver, arguments: dict[str, int], wrong: str) -> None:
        with pytest.raises(InvalidArgument, match=wrong):
            sim.configure(**arguments)
        assert driver.get(Int, "cuDeviceGetCount") == 1

    @pytest.mark.usefixtures("driver")
    @pytest.mark.parametrize("value", [True, "8", 1.0, b"1"])
    def test_bad_types(self, value: Any) -> None:
        with pytest.raises(InvalidArgumentType, match="device_bytes="):
            sim.configure(device_bytes=value)
        with pytest.raises(InvalidArgumentType, match="devices="):
            sim.configure(devices=value)
        with pytest.raises(InvalidArgumentType, match="after="):
            sim.fail("cuMemMap", after=value)
        with pytest.raises(InvalidArgumentType, match="times="):
            sim.fail("cuMemMap", times=value)

    def test_bad_rules(self, driver: Driver) -> None:
        with pytest.raises(InvalidArgument, match=r"cuMemFantasy.*cuMemCreate"):
            sim.fail("cuMemFantasy")
        with pytest.raises(InvalidArgument, match="CUDA_ERROR_FANTASY"):
            sim.fail("cuMemMap", error="CUDA_ERROR_FANTASY")
        with pytest.raises(InvalidArgument, match="CUDA_SUCCESS"):
            sim.fail("cuMemMap", error=OK)
        with pytest.raises(InvalidArgument, match="after=-1"):
            sim.fail("cuMemMap", after=-1)
        with pytest.raises(InvalidArgument, match="times=0"):
            sim.fail("cuMemMap", times=0)
        with pytest.raises(InvalidArgumentType, match="call=None"):
            sim.fail(None)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentType, match="error=2"):
            sim.fail("cuMemMap", error=2)  # type: ignore[arg-type]
        driver.free(driver.allocate())

    def test_controls_refuse_a_real_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        core = types.SimpleNamespace(driver_path=lambda: "/usr/lib/libcuda.so.1", driver_is_simulated=lambda: False)
        monkeypatch.setitem(sys.modules, "cumem_sleep._core", core)
        monkeypatch.setattr(cumem_sleep, "_core", core, raising=False)
        for control in (sim.configure, sim.stats, sim.reset, lambda: sim.fail("cuInit")):
            with pytest.raises(InvalidState, match=r"/usr/lib/libcuda\.so\.1"):
                control()

    def test_without_a_loaded_driver_the_package_s_own_is_meant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        core = types.SimpleNamespace(driver_path=lambda: None, driver_is_simulated=lambda: False)
        monkeypatch.setitem(sys.modules, "cumem_sleep._core", core)
        monkeypatch.setattr(cumem_sleep, "_core", core, raising=False)
        assert set(sim.stats().calls) == set(CALLS)

    def test_library_is_missing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
        monkeypatch.setattr(sim, "__file__", str(tmp_path / "sim.py"))
        with pytest.raises(InvalidState, match=r"libcuda_sim\.so does not exist"):
            sim.library_path()


class TestProcess:
    @pytest.mark.slow
    def test_forked_child_has_no_driver(self) -> None:
        result = run_alone(
            """
            driver.start()
            stream, address = driver.stream(), driver.allocate()
            driver.ok("cuMemsetD8Async", address, 1, PAGE, stream)
            child = os.fork()
            if child == 0:
                value = ctypes.c_uint64()
                wrong = [
                    answer
                    for answer in (
                        driver("cuInit", 0),
                        driver("cuDeviceGetCount", ctypes.byref(value)),
                        driver("cuCtxSynchronize"),
                        driver("cuStreamSynchronize", stream),
                        driver("cuMemUnmap", address, PAGE),
                        driver("cuMemCreate", ctypes.byref(value), PAGE, properties(), 0),
                    )
                    if answer != NOT_INITIALIZED
                ]
                os._exit(len(wrong))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            driver.ok("cuStreamSynchronize", stream)
            driver.free(address)
            print("parent goes on")
            """
        )
        assert result.stdout == "parent goes on\n", result.stderr

    @pytest.mark.slow
    def test_forked_child_has_no_device_memory(self) -> None:
        result = run_alone(
            """
            driver.start()
            address = driver.allocate()
            child = os.fork()
            if child == 0:
                read(address)
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            read(address)
            """
        )
        assert result.stdout == f"{-signal.SIGSEGV}\n", result.stderr
        assert result.returncode == 0

    @pytest.mark.slow
    def test_fork_before_init_is_harmless(self) -> None:
        result = run_alone(
            """
            sizes = ctypes.c_uint64()
            assert driver("cuDeviceGetCount", ctypes.byref(sizes)) == NOT_INITIALIZED
            child = os.fork()
            driver.start()
            driver.free(driver.allocate())
            if child == 0:
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            """
        )
        assert result.stdout == "7\n", result.stderr

    @pytest.mark.slow
    @pytest.mark.skipif(
        "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer's malloc may stop in a child forked so"
    )
    def test_fork_while_streams_and_threads_work(self) -> None:
        result = run_alone(
            """
            driver.start()
            stop = False

            def work():
                driver.enter()
                stream = driver.stream()
                while not stop:
                    address = driver.allocate()
                    driver.ok("cuMemsetD8Async", address, 1, PAGE, stream)
                    driver.ok("cuStreamSynchronize", stream)
                    driver.free(address)

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    os._exit(0 if driver("cuCtxSynchronize") == NOT_INITIALIZED else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            stop = True
            for thread in threads:
                thread.join()
            print("done")
            """
        )
        assert result.stdout == "done\n", result.stderr

    def test_stands_in_for_libcuda(self, tmp_path: pathlib.Path) -> None:
        """A program linked to libcuda.so.1 finds what the extensions of vLLM's wheels (0.11.2 to 0.33.0) name.

        What they name and this driver lacks fails the import of all of vLLM's kernels, and its allocator with them;
        tests/vllm looks into the installed wheel.
        """
        (tmp_path / "libcuda.so.1").symlink_to(sim.library_path())
        calls = [
            # vllm.cumem_allocator
            *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"),
            *("cuGetErrorString", "cuMemAddressFree", "cuMemAddressReserve", "cuMemCreate"),
            *("cuMemGetAllocationGranularity", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemUnmap"),
            # vllm._C (custom all-reduce, quantised kernels), vllm.vllm_flash_attn, FlashMLA, QuTLASS
            *("cuPointerGetAttribute", "cuTensorMapEncodeTiled", "cuGetProcAddress_v2", "cuDriverGetVersion"),
        ]
        result = run_alone(
            f"""
            by_name = ctypes.CDLL("libcuda.so.1")
            for name in {calls!r}:
                getattr(by_name, name)
            # One instance: initialised through one name, it is so through the other.
            driver.ok("cuInit", 0)
            print(by_name.cuCtxSetCurrent(None))
            """,
            LD_LIBRARY_PATH=str(tmp_path),
        )
        assert result.stdout == "0\n", result.stderr

    @pytest.mark.parametrize("name", ["cuPointerGetAttribute", "cuTensorMapEncodeTiled"])
    def test_is_there_to_be_linked_against(self, load: Callable[..., Driver], name: str) -> None:
        driver = load()
        arguments = [kind(0) for kind in CALLS[name][1]]
        assert driver(name, *arguments) == NOT_INITIALIZED
        driver.ok("cuInit", 0)
        assert driver(name, *arguments) == NOT_SUPPORTED

    def test_many_threads(self, load: Callable[..., Driver]) -> None:
        driver = load(DEVICES=2, COPY_DELAY_US=0)
        driver.start()
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                device = number % 2
                driver.enter(device)
                stream, event, buffer = driver.stream(), driver.event(), HostBuffer(2 * PAGE)
                for turn in range(15):
                    driver.ok("cuMemHostRegister", buffer.address, 2 * PAGE, 0)
                    address = driver.allocate(2 * PAGE, device)
                    value = (number * 16 + turn) % 256
                    driver.ok("cuMemsetD8Async", address, value, 2 * PAGE, stream)
                    driver.ok("cuMemcpyDtoHAsync", buffer.address, address, 2 * PAGE, stream)
                    driver.ok("cuEventRecord", event, stream)
                    driver.ok("cuEventSynchronize", event)
                    assert read(buffer.address, 2 * PAGE) == bytes([value]) * (2 * PAGE)
                    driver.free(address, 2 * PAGE)
                    driver.ok("cuMemHostUnregister", buffer.address)
                driver.ok("cuEventDestroy", event)
                driver.ok("cuStreamDestroy", stream)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        left = sim.stats()
        assert (left.live_handles, left.mapped_bytes, left.reserved_bytes, left.registered_bytes) == (0, 0, 0, 0)

    def test_unmapping_beside_copies_never_crashes(self, load: Callable[..., Driver]) -> None:
        driver = load(COPY_DELAY_US=0)
        driver.start()
        stream, buffer = driver.stream(), HostBuffer()
        for _ in range(200):
            driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
            address = driver.allocate()
            driver.ok("cuMemcpyDtoHAsync", buffer.address, address, PAGE, stream)
            driver.free(address)  # forgot to wait: the context fails, or the copy was quick
            driver.ok("cuMemHostUnregister", buffer.address)
            assert driver("cuStreamSynchronize", stream) in (OK, ILLEGAL_ADDRESS)
            sim.reset()
