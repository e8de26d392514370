"""Many small copies by one launch of a kernel, from a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import PAGE, Memory

from cumem_sleep import CuMemAllocator, InvalidState, _core
from cumem_sleep.store.lanes import HostLaneGroup


def rows(*pieces: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """A table of these: addresses, offsets in the block, and bytes."""
    return np.array(pieces, np.int64).reshape(-1, 3)


@pytest.fixture
def blocks(allocator: CuMemAllocator) -> Iterator[tuple[_core.HostBlock, _core.HostBlock]]:
    """A table with room for four pieces at least, and what they are copied to and from."""
    made = (_core.HostBlock(4 * 32, -1), _core.HostBlock(PAGE, -1))
    for block in made:
        block.prefault(0, block.bytes)
    yield made
    for block in made:
        block.close()


def test_there_and_back(
    allocator: CuMemAllocator, memory: Memory, blocks: tuple[_core.HostBlock, _core.HostBlock]
) -> None:
    table, block = blocks
    address = allocator.malloc(2 * PAGE)
    before = memory.fill_random(address, 2 * PAGE)
    table.pin(0)
    block.pin(0)
    pieces = [(address + 16, 0, 65536), (address + PAGE, 65536, 16), (address + PAGE + 4096, 65552, 8208)]
    with _core.CopyStream(0) as stream:
        stream.copy_pieces(table, 0, block, rows(), to_host=True)
        stream.copy_pieces(table, 1, block, rows(*pieces), to_host=True)
        stream.synchronize()
        content = bytes(memoryview(block))
        for at, offset, nbytes in pieces:
            assert content[offset : offset + nbytes] == before[at - address : at - address + nbytes]
        memory.write(address, bytes(2 * PAGE))
        stream.copy_pieces(table, 0, block, rows(*pieces), to_host=False)
        stream.synchronize()
    expected = bytearray(2 * PAGE)
    for at, _, nbytes in pieces:
        expected[at - address : at - address + nbytes] = before[at - address : at - address + nbytes]
    assert memory.read(address, 2 * PAGE) == bytes(expected)


def test_what_is_refused(allocator: CuMemAllocator, blocks: tuple[_core.HostBlock, _core.HostBlock]) -> None:
    table, block = blocks
    address = allocator.malloc(PAGE)
    with _core.CopyStream(0) as stream:
        with pytest.raises(InvalidState, match="registered"):
            stream.copy_pieces(table, 0, block, rows((address, 0, 16)), to_host=True)
        table.pin(0)
        with pytest.raises(InvalidState, match="registered"):
            stream.copy_pieces(table, 0, block, rows((address, 0, 16)), to_host=True)
        block.pin(0)
        for piece in ((address + 8, 0, 16), (address, 8, 16), (address, 0, 8)):
            with pytest.raises(InvalidState, match="multiples of 16"):
                stream.copy_pieces(table, 0, block, rows(piece), to_host=False)
        for piece in ((address, PAGE, 16), (address, 0, PAGE + 16), (address, -16, 16)):
            with pytest.raises(IndexError):
                stream.copy_pieces(table, 0, block, rows(piece), to_host=True)
        for begin, count in ((0, 200), (1 << 60, 1), (127, 2)):
            with pytest.raises(IndexError, match="room"):
                stream.copy_pieces(table, begin, block, rows(*[(address, 0, 16)] * count), to_host=True)
        for wrong in (np.zeros(3, np.int64), np.zeros((2, 2), np.int64), np.zeros((2, 3), np.int32)):
            with pytest.raises(ValueError, match="three in each row"):
                stream.copy_pieces(table, 0, block, wrong, to_host=True)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="contiguous"):
            stream.digest(table, 0, np.zeros((4, 6), np.int64)[:, ::2])


def test_no_table_is_overwritten_while_a_kernel_may_read_it(
    allocator: CuMemAllocator, blocks: tuple[_core.HostBlock, _core.HostBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    block, address = blocks[1], allocator.malloc(PAGE)
    used: list[tuple[int, int]] = []
    copy = _core.CopyStream.copy_pieces

    def note(stream: _core.CopyStream, table: _core.HostBlock, begin: int, *rest: Any, to_host: bool) -> None:
        used.append((table.address, begin))
        copy(stream, table, begin, *rest, to_host=to_host)

    monkeypatch.setattr(_core.CopyStream, "copy_pieces", note)
    with HostLaneGroup(1, 0) as lane_group, _core.CopyStream(0) as stream:
        lane = lane_group.lane(stream)
        for count in (3, 4, 600):
            lane.begin(block, rows(*[(address, 0, 16)] * count), out=True, by_kernel=True)
        lane.synchronize()
        lane.begin(block, rows((address, 0, 16)), out=True, by_kernel=True)
        lane.synchronize()
    (first, begin), (second, after), third, last = used
    assert (begin, second, after) == (0, first, 3)
    assert third == (last[0], 0)
    assert third[0] != first
    assert last[1] == 0
