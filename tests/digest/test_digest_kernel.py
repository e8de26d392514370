"""The digest by the kernel, which the simulated driver computes in C++: the reference's sums, of what was asked for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from support import PAGE, Memory, assert_clean_exit, run_script

from cumem_sleep import CuMemAllocator, InvalidState, _core
from cumem_sleep.digest.kernel import GpuSums
from cumem_sleep.digest.reference import CHUNK_BYTES, sums_of

CHUNKS = PAGE // CHUNK_BYTES


def rows(*contents: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """A table of these: addresses, bytes and first chunks."""
    return np.array(contents, np.int64).reshape(-1, 3)


def expected_sums(content: bytes, first_chunk: int = 0) -> list[int]:
    return [*sums_of(np.frombuffer(content, np.uint8), first_chunk)]


def test_of_several_contents_in_several_launches(allocator: CuMemAllocator, memory: Memory) -> None:
    contents = {}
    for pages in (2, 1, 3):
        address = allocator.malloc(pages * PAGE)
        contents[address] = memory.fill_random(address, pages * PAGE)
    sums = GpuSums(0, 6 * CHUNKS)
    for first_chunk in (0, 5):  # the table is used anew after each `finish`
        first, *others = ((address, len(content), first_chunk) for address, content in contents.items())
        sums.start(rows(first))
        sums.start(rows())
        sums.start(rows(*others))
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
        sums.start(rows((start + CHUNK_BYTES, CHUNK_BYTES, 1)))
        assert sums.finish().tolist() == [expected_sums(content[CHUNK_BYTES:], 1)]
    sums.close()
    block.close()


@pytest.mark.parametrize("nbytes", [16, 8192, 16384 - 16, 16384 + 16, 32768, 49152 + 8208, CHUNK_BYTES - 16])
def test_of_short_chunks(allocator: CuMemAllocator, memory: Memory, nbytes: int) -> None:
    """Alone, as the last one of a content, and several of them in one launch."""
    address = allocator.malloc(3 * PAGE)
    content = memory.fill_random(address, 3 * PAGE)
    places = [(32, nbytes, 7), (PAGE + 16, CHUNK_BYTES + nbytes, 0), (5 * CHUNK_BYTES, nbytes, 1)]
    sums = GpuSums(0, 4)
    sums.start(rows(*((address + at, size, first) for at, size, first in places)))
    assert sums.finish().tolist() == [expected_sums(content[at : at + size], first) for at, size, first in places]
    sums.close()


def test_every_place_of_a_chunk_counts(allocator: CuMemAllocator, memory: Memory) -> None:
    address = allocator.malloc(PAGE)
    content = memory.fill_random(address, PAGE)
    sums = GpuSums(0, CHUNKS)
    seen = set()
    for row in range(64):
        place = row * CHUNK_BYTES // 64 + 8 * (row * 32 + 7)
        memory.write(address + place, bytes([content[place] ^ 1]))
        sums.start(rows((address, CHUNK_BYTES, 0)))
        seen.add(tuple(sums.finish()[0].tolist()))
        memory.write(address + place, content[place : place + 1])
    assert len(seen) == 64
    sums.close()


def test_what_it_refuses(allocator: CuMemAllocator) -> None:
    address = allocator.malloc(PAGE)
    sums = GpuSums(0, 1)
    with pytest.raises(IndexError, match="room"):
        sums.start(rows((address, PAGE, 0)))
    for content in ((address + 8, CHUNK_BYTES, 0), (address, CHUNK_BYTES - 8, 0)):
        with pytest.raises(InvalidState, match="multiples of 16 bytes at addresses that are multiples of 16"):
            sums.start(rows(content))
    sums.start(rows((address, CHUNK_BYTES, 0)))
    assert len(sums.finish()) == 1, "what was refused left nothing"
    sums.close()
    with _core.CopyStream(0) as stream, pytest.raises(InvalidState, match="registered"):
        stream.digest(_core.HostBlock(PAGE, -1), 0, rows((address, CHUNK_BYTES, 0)))
    table = _core.HostBlock(4096, -1)
    table.pin(0)
    with _core.CopyStream(0) as stream, pytest.raises(IndexError):
        stream.digest(table, 1 << 62, rows((address, CHUNK_BYTES, 0)))
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
        import numpy as np

        from cumem_sleep.digest.kernel import GpuSums

        reset_simulation()
        allocator = fresh_allocator()
        address = allocator.malloc(PAGE)
        sums = GpuSums(0, PAGE >> 20)
        child = os.fork()
        if not child:
            with raises(InvalidState, "fork"):
                sums.start(np.array([(address, PAGE, 0)]))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        sums.start(np.array([(address, PAGE, 0)]))
        assert len(sums.finish()) == 1
        sums.close()
        free_everything()
        """
    )
    assert_clean_exit(process)
