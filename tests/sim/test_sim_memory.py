"""Device memory of the simulated driver: virtual, and plain."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from sim_driver import (
    FABRIC,
    FILL,
    INVALID_DEVICE,
    INVALID_VALUE,
    MIB,
    NO_ACCESS,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OK,
    OUT_OF_MEMORY,
    PAGE,
    POSIX_FD,
    READ,
    READ_WRITE,
    Address,
    AllocationProperties,
    Driver,
    HostBuffer,
    Int,
    Location,
    Size,
    properties,
    read,
    run_alone,
    write,
)

from cumem_sleep import sim


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

    @pytest.mark.parametrize("alignment", [PAGE, 64 * MIB, 1 << 30])
    def test_reserve_aligns(self, driver: Driver, alignment: int) -> None:
        addresses = [driver.reserve(PAGE, alignment) for _ in range(4)]
        assert all(address % alignment == 0 for address in addresses)
        assert sim.stats().reserved_bytes == 4 * PAGE
        for address in addresses:
            driver.ok("cuMemAddressFree", address, PAGE)

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
