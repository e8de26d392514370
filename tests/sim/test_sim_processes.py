"""The simulated driver beside forks and threads, and in the place of libcuda."""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Callable

import pytest
from sim_driver import (
    CALLS,
    ILLEGAL_ADDRESS,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    OK,
    PAGE,
    Driver,
    HostBuffer,
    read,
    run_alone,
)

from cumem_sleep import sim


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

    @pytest.mark.slow
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

    @pytest.mark.slow
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
