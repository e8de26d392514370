"""Registered host memory of the simulated driver."""

from __future__ import annotations

import ctypes
import mmap
import tempfile

import numpy as np
from sim_driver import ALREADY_REGISTERED, INVALID_VALUE, NOT_REGISTERED, PAGE, Driver, HostBuffer, Int, Size, read

from cumem_sleep import sim


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
