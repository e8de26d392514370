"""The digest by the kernel, which the simulated driver computes in C++: the reference's sums, of what was asked for."""

from __future__ import annotations

import numpy as np
import pytest
from support import PAGE, Memory, assert_clean_exit, run_script

from cumem_sleep import CuMemAllocator, InvalidState, _core
from cumem_sleep.digest.kernel import GpuSums
from cumem_sleep.digest.reference import CHUNK_BYTES, sums_of

CHUNKS = PAGE // CHUNK_BYTES


def expected_sums(content: bytes, first_chunk: int = 0) -> list[int]:
    return [*sums_of(np.frombuffer(content, np.uint8), first_chunk)]


def test_of_several_contents_in_several_launches(allocator: CuMemAllocator, memory: Memory) -> None:
    contents = {}
    for pages in (2, 1, 3):
        address = allocator.malloc(pages * PAGE)
        contents[address] = memory.fill_random(address, pages * PAGE)
    sums = GpuSums(0, 6 * CHUNKS)
    for first_chunk in (0, 5):  # the table is used anew after each `finish`
        first, *others = ((address, len(content)) for address, content in contents.items())
        sums.start([first], first_chunk)
        sums.start([])
        sums.start(others, first_chunk)
        assert sums.finish().tolist() == [expected_sums(content, first_chunk) for content in contents.values()]
    sums.close()


def test_of_a_part_and_of_host_memory(allocator: CuMemAllocator, memory: Memory) -> None:
    address = allocator.malloc(PAGE)
    content = memory.fill_random(address, PAGE)
    block = _core.HostBlock(PAGE, -1)
    block.pin(0)
    memoryview(block)[:] = content
    sums = GpuSums(0, CHUNKS)
    for start in (address, block.address):
        sums.start([(start + CHUNK_BYTES, CHUNK_BYTES)], 1)
        assert sums.finish().tolist() == [expected_sums(content[CHUNK_BYTES:], 1)]
    sums.close()
    block.close()


def test_every_place_of_a_chunk_counts(allocator: CuMemAllocator, memory: Memory) -> None:
    address = allocator.malloc(PAGE)
    content = memory.fill_random(address, PAGE)
    sums = GpuSums(0, CHUNKS)
    seen = set()
    for row in range(64):
        place = row * CHUNK_BYTES // 64 + 8 * (row * 32 + 7)
        memory.write(address + place, bytes([content[place] ^ 1]))
        sums.start([(address, CHUNK_BYTES)])
        seen.add(tuple(sums.finish()[0].tolist()))
        memory.write(address + place, content[place : place + 1])
    assert len(seen) == 64
    sums.close()


def test_what_it_refuses(allocator: CuMemAllocator) -> None:
    address = allocator.malloc(PAGE)
    sums = GpuSums(0, 1)
    with pytest.raises(IndexError, match="room"):
        sums.start([(address, PAGE)])
    for content in ((address + 8, CHUNK_BYTES), (address, CHUNK_BYTES - 16)):
        with pytest.raises(InvalidState, match="whole chunks at addresses that are multiples of 16"):
            sums.start([content])
    sums.start([(address, CHUNK_BYTES)])
    assert len(sums.finish()) == 1, "what was refused left nothing"
    sums.close()
    with _core.CopyStream(0) as stream, pytest.raises(InvalidState, match="registered"):
        stream.digest(_core.HostBlock(PAGE, -1), 0, [(address, CHUNK_BYTES)], 0)
    table = _core.HostBlock(4096, -1)
    table.pin(0)
    with _core.CopyStream(0) as stream, pytest.raises(IndexError):
        stream.digest(table, 1 << 62, [(address, CHUNK_BYTES)], 0)
    table.close()


@pytest.mark.sim
@pytest.mark.parametrize("which", ["copy", "digest"])
def test_a_module_is_loaded_once_whatever_is_refused(which: str) -> None:
    process = run_script(
        f"""
        load = _core.load_{which}_kernel
        reset_simulation()
        fresh_allocator()._operations.open()
        sim.fail("cuModuleGetFunction", error="CUDA_ERROR_OUT_OF_MEMORY", times=2)
        for _ in range(2):
            with raises(DriverError, "cuModuleGetFunction"):
                load(0)
        load(0)
        load(0)
        assert sim.stats().calls["cuModuleLoadData"] == 1, sim.stats().calls
        """
    )
    assert_clean_exit(process)


@pytest.mark.sim
def test_in_a_forked_child() -> None:
    process = run_script(
        """
        from cumem_sleep.digest.kernel import GpuSums

        reset_simulation()
        allocator = fresh_allocator()
        address = allocator.malloc(PAGE)
        sums = GpuSums(0, PAGE >> 20)
        child = os.fork()
        if not child:
            with raises(InvalidState, "fork"):
                sums.start([(address, PAGE)])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        sums.start([(address, PAGE)])
        assert len(sums.finish()) == 1
        sums.close()
        free_everything()
        """
    )
    assert_clean_exit(process)
