"""Streams and events of the simulated driver."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from sim_driver import (
    FILL,
    INVALID_HANDLE,
    INVALID_VALUE,
    LEGACY_STREAM,
    NON_BLOCKING,
    NOT_PERMITTED,
    NOT_READY,
    NOT_SUPPORTED,
    PAGE,
    PER_THREAD_STREAM,
    Driver,
    Handle,
    HostFunction,
    read,
)


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
