"""Stream captures of the simulated driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from sim_driver import (
    CAPTURE_ACTIVE,
    CAPTURE_IMPLICIT,
    CAPTURE_INVALID,
    CAPTURE_INVALIDATED,
    CAPTURE_NONE,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    FILL,
    GLOBAL,
    ILLEGAL_STATE,
    INVALID_VALUE,
    OK,
    PAGE,
    RELAXED,
    THREAD_LOCAL,
    Driver,
    HostBuffer,
    HostFunction,
    Int,
    in_thread,
    read,
)


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
