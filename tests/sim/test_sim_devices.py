"""Devices and contexts of the simulated driver are as strict as those of CUDA."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import pytest
from sim_driver import (
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    MIB,
    OUT_OF_MEMORY,
    PAGE,
    RELAXED,
    Driver,
    Handle,
    HostBuffer,
    HostFunction,
    Int,
    in_thread,
    properties,
    read,
    write,
)

from cumem_sleep import sim


class TestDevices:
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

    def test_takes_time_for_registered_memory_of_those_who_want_it(self, load: Callable[..., Driver]) -> None:
        driver = load(DEVICES=2, DEVICE_BYTES=64 * MIB)
        driver.ok("cuInit", 0)
        first = driver.get(Handle, "cuDevicePrimaryCtxRetain", 0)
        driver.ok("cuCtxSetCurrent", first)
        buffer = HostBuffer(4 * MIB)
        driver.ok("cuMemHostRegister", buffer.address, buffer.size, 0)
        sim.configure(context_us_per_mib=500_000)
        ended: list[object] = []

        def retain() -> None:
            ended.append(driver.get(Handle, "cuDevicePrimaryCtxRetain", 1))

        threads = [threading.Thread(target=retain) for _ in range(2)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        while sim.stats().calls["cuDevicePrimaryCtxRetain"] < 3:
            time.sleep(0.001)
        assert driver.get(Handle, "cuDevicePrimaryCtxRetain", 0) == first
        driver.ok("cuCtxSynchronize")
        assert not ended
        for thread in threads:
            thread.join(30)
        assert ended == [ended[0]] * 2
        assert time.monotonic() - began >= 2
        for _ in range(2):
            driver.ok("cuDevicePrimaryCtxRelease", 1)

    def test_last_release_destroys(self, driver: Driver) -> None:
        stream, event, buffer = driver.stream(), driver.event(), HostBuffer()
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        driver.ok("cuDevicePrimaryCtxRelease", 0)
        assert driver("cuCtxSynchronize") == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
        assert sim.stats().registered_bytes == 0
        driver.enter()
        assert driver("cuStreamSynchronize", stream) == INVALID_HANDLE
        assert driver("cuEventQuery", event) == INVALID_HANDLE

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
