"""The simulated driver's digest kernel: what it computes, and where it fails as a GPU would."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

import numpy as np
import pytest
from sim_driver import ILLEGAL_ADDRESS, INVALID_VALUE, MIB, OK, PAGE, Driver, Handle, HostBuffer, read, write

from cumem_sleep.digest.reference import CHUNK_BYTES, sums_of

SUMS_AT = 4096  # in the buffer; the table is at its start


def rows(*chunks: tuple[int, int]) -> bytes:
    """Of the kernel's table, for whole chunks: their addresses and numbers."""
    kind = np.dtype([("address", "<u8"), ("number", "<u4"), ("bytes", "<u4")])
    return np.array([(*chunk, CHUNK_BYTES) for chunk in chunks], kind).tobytes()


class Digesting(NamedTuple):
    """A page of device memory, with its table and the sums of its two chunks in a buffer."""

    driver: Driver
    kernel: Handle
    stream: Handle
    content: bytes
    address: int
    buffer: HostBuffer

    def launch(self, shift: int = 0, threads: int = 512, chunks: int = 2) -> object:
        table, sums = (ctypes.c_uint64(self.buffer.address + at) for at in (shift, SUMS_AT))
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(table), ctypes.addressof(sums))
        return self.driver("cuLaunchKernel", self.kernel, chunks, 1, 1, threads, 1, 1, 0, self.stream, arguments, None)

    def note(self, *chunks: tuple[int, int]) -> None:
        write(self.buffer.address, rows(*chunks))

    def ended(self) -> object:
        return self.driver("cuStreamSynchronize", self.stream)

    def sums(self, chunks: int = 2) -> list[list[int]]:
        found: list[list[int]] = (
            np.frombuffer(read(self.buffer.address + SUMS_AT, 16 * chunks), np.uint64).reshape(-1, 2).tolist()
        )
        return found


def begin(driver: Driver) -> Digesting:
    content, address, stream, buffer = os.urandom(PAGE), driver.allocate(), driver.stream(), HostBuffer()
    write(address, content)
    driver.ok("cuMemHostRegister", buffer.address, PAGE, 0)
    module, kernel = Handle(), Handle()
    driver.ok("cuModuleLoadData", ctypes.byref(module), b".entry cumem_sleep_digest()")
    driver.ok("cuModuleGetFunction", ctypes.byref(kernel), module, b"cumem_sleep_digest")
    digesting = Digesting(driver, kernel, stream, content, address, buffer)
    digesting.note((address, 7), (address + CHUNK_BYTES, 1))
    return digesting


@pytest.fixture
def digesting(driver: Driver) -> Digesting:
    return begin(driver)


def test_of_device_memory_and_of_host_memory(digesting: Digesting) -> None:
    other = HostBuffer()
    write(other.address, digesting.content)
    digesting.driver.ok("cuMemHostRegister", other.address, PAGE, 0)
    expected = [
        list(sums_of(np.frombuffer(digesting.content[start : start + CHUNK_BYTES], np.uint8), number))
        for start, number in ((0, 7), (CHUNK_BYTES, 1))
    ]
    for address in (digesting.address, other.address):
        digesting.note((address, 7), (address + CHUNK_BYTES, 1))
        assert digesting.launch() == OK
        assert digesting.ended() == OK
        assert digesting.sums() == expected
        write(digesting.buffer.address + SUMS_AT, bytes(32))


def test_memory_that_is_not_mapped_is_refused(digesting: Digesting) -> None:
    digesting.note((digesting.address, 0), (digesting.driver.reserve(PAGE), 1))
    assert digesting.launch() == INVALID_VALUE


@pytest.mark.parametrize("what", ["table", "content", "the host memory of the content"])
def test_it_faults_where_a_gpu_would(digesting: Digesting, what: str) -> None:
    other = HostBuffer()
    address = digesting.address + 8 if what == "content" else digesting.address
    if what.startswith("the host"):
        address = other.address  # which is not registered
    shift = 8 if what == "table" else 0
    write(digesting.buffer.address + shift, rows((address, 0)))
    digesting.launch(shift, chunks=1)
    assert digesting.ended() == ILLEGAL_ADDRESS


def test_a_table_that_is_overwritten_too_early(digesting: Digesting) -> None:
    with digesting.driver.busy(digesting.stream):
        assert digesting.launch() == OK
        digesting.note((digesting.address, 3), (digesting.address, 4))
    assert digesting.ended() == ILLEGAL_ADDRESS


def test_device_memory_gone_before_it_runs(digesting: Digesting) -> None:
    with digesting.driver.busy(digesting.stream):
        assert digesting.launch() == OK
        digesting.driver.ok("cuMemUnmap", digesting.address, PAGE)
    assert digesting.ended() == ILLEGAL_ADDRESS


def test_large_tables(driver: Driver) -> None:
    """Several times the chunks of one page: each has its place."""
    digesting = begin(driver)
    chunks = SUMS_AT // 16
    digesting.note(*((digesting.address + number % 2 * CHUNK_BYTES, number) for number in range(chunks)))
    assert digesting.launch(chunks=chunks) == OK
    assert digesting.ended() == OK
    halves = [digesting.content[:MIB], digesting.content[MIB:]]
    found = digesting.sums(chunks)
    for number in (0, 1, chunks // 2, chunks - 1):
        assert found[number] == list(sums_of(np.frombuffer(halves[number % 2], np.uint8), number))
    assert len({tuple(each) for each in found}) == chunks
