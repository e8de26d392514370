"""Copies of the simulated driver, and what happens when memory is taken away under them."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import pytest
from sim_driver import (
    FILL,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    MIB,
    OK,
    PAGE,
    Driver,
    Handle,
    HostBuffer,
    HostFunction,
    read,
    write,
)

from cumem_sleep import sim


def copy_kernel(driver: Driver) -> Handle:
    module, kernel = Handle(), Handle()
    driver.ok("cuModuleLoadData", ctypes.byref(module), b".entry cumem_sleep_copy()")
    driver.ok("cuModuleGetFunction", ctypes.byref(kernel), module, b"cumem_sleep_copy")
    return kernel


def launch(
    driver: Driver, kernel: Handle, target: int, source: int, nbytes: int, stream: object, threads: int = 512
) -> object:
    values = [ctypes.c_uint64(value) for value in (target, source, nbytes)]
    arguments = (ctypes.c_void_p * 3)(*[ctypes.addressof(value) for value in values])
    return driver("cuLaunchKernel", kernel, 16, 1, 1, threads, 1, 1, 0, stream, arguments, None)


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

    def test_by_the_kernel(self, driver: Driver) -> None:
        address, stream, buffer = driver.allocate(), driver.stream(), HostBuffer()
        data = os.urandom(PAGE)
        write(buffer.address, data)
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        kernel = copy_kernel(driver)
        assert launch(driver, kernel, address, buffer.address + 64, PAGE - 64, stream) == OK
        driver.ok("cuStreamSynchronize", stream)
        assert read(address, PAGE - 64) == data[64:]
        assert launch(driver, kernel, address + PAGE, buffer.address, 16, stream) == INVALID_VALUE, "not mapped"
        assert launch(driver, kernel, address, buffer.address, 16, stream, threads=0) == INVALID_VALUE
        assert launch(driver, Handle(7), address, buffer.address, 16, stream) == "CUDA_ERROR_INVALID_HANDLE"

    @pytest.mark.parametrize("fault", ["not registered", "not aligned"])
    def test_a_kernel_faults_where_a_gpu_would(self, driver: Driver, fault: str) -> None:
        address, stream, buffer = driver.allocate(), driver.stream(), HostBuffer()
        if fault == "not aligned":
            driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        shift = 8 if fault == "not aligned" else 0
        launch(driver, copy_kernel(driver), address + shift, buffer.address, 16, stream)
        assert driver("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS

    def test_kernels_that_do_not_reach_host_memory(self, load: Callable[..., Driver]) -> None:
        driver = load(HOST_POINTERS=0)
        driver.start()
        address, stream, buffer = driver.allocate(), driver.stream(), HostBuffer()
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        launch(driver, copy_kernel(driver), address, buffer.address, 16, stream)
        assert driver("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS

    def test_registered_memory_is_copied_while_the_program_goes_on(self, driver: Driver) -> None:
        address, stream, buffer = driver.allocate(), driver.stream(), HostBuffer()
        write(address, b"device bytes")
        driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
        with driver.busy(stream):
            driver.ok("cuMemcpyDtoHAsync", buffer.address, address, PAGE, stream)
            assert read(buffer.address, 12) == bytes(12)
        driver.ok("cuStreamSynchronize", stream)
        assert read(buffer.address, 12) == b"device bytes"

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

    def test_unregistered_before_the_copy(self, copying: tuple[Driver, int, int, HostBuffer]) -> None:
        driver, stream, address, buffer = copying
        context = driver.get(ctypes.c_void_p, "cuCtxGetCurrent")
        begins = threading.Event()

        def unregister() -> None:
            driver.ok("cuCtxSetCurrent", ctypes.c_void_p(context))
            begins.set()
            driver.ok("cuMemHostUnregister", buffer.address)

        # The call waits for the work that runs, as the real one does; what is enqueued is too late all the same.
        thread = threading.Thread(target=unregister)
        with driver.busy(stream):
            driver.ok("cuMemcpyHtoDAsync", address, buffer.address, PAGE, stream)
            thread.start()
            assert begins.wait(30)
            thread.join(0.2)
            assert thread.is_alive()
        thread.join(30)
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
