"""A transfer copies every byte once and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import pytest
from stand_ins import Block, FakeStream, Log, Part, Store, parts_of

from cumem_sleep import CuMemAllocator, _core
from cumem_sleep.core.extents import Piece
from cumem_sleep.transfer.transfer import Batch, Transfer


class FakeTransfer(Transfer):
    """Its batches are of the next of `sizes`; each arrives when the next begins."""

    def __init__(self, sizes: Iterator[int], arrived: Callable[[Sequence[_core.Segment]], None] = list) -> None:
        super().__init__([FakeStream(0, Log())], arrived, CuMemAllocator.tuning)  # type: ignore[list-item]
        self.sizes = sizes
        self.batches: list[Batch] = []

    def step(self) -> int:
        if not self._pieces:
            return 0
        batch = self._next_batch(next(self.sizes))
        self._note_arrived(self._wait_until(0))
        self.batches.append(batch)
        self._in_flight.append((batch, self._next_lane()))
        return batch.bytes


def batches_of(parts: list[Part], store: Store, sizes: Iterator[int]) -> tuple[list[Batch], list[int]]:
    """All there are, each of at most the next of `sizes`; and which segments have arrived, in order."""
    arrived: list[int] = []
    transfer = FakeTransfer(sizes, lambda some: arrived.extend(part.id for part in some))
    store.add_all(transfer, parts)
    while nbytes := transfer.step():
        assert nbytes == transfer.batches[-1].bytes
    transfer.finish()
    return transfer.batches, arrived


def bytes_of(pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    return [
        (piece.address + place, id(piece.extent), piece.offset + place)
        for piece in pieces
        for place in range(piece.bytes)
    ]


class TestBatches:
    @pytest.mark.parametrize("block_bytes", [3, 8, 10, 128])
    @pytest.mark.parametrize(
        "sizes", [(1,), (8,), (9,), (4, 4, 4), (8, 8), (20, 1, 1), (1, 20, 1), (7, 7, 7), (1,) * 30, (64, 64), ()]
    )
    @pytest.mark.parametrize("wanted_bytes", [(8,), (1,), (8, 32), (5, 1, 13), (1000,)], ids=str)
    def test_hold_every_byte_once_and_in_order(
        self, sizes: tuple[int, ...], block_bytes: int, wanted_bytes: tuple[int, ...]
    ) -> None:
        parts = parts_of(*sizes)
        store = Store(parts, block_bytes)
        batches, arrived = batches_of(parts, store, cycle(wanted_bytes))
        for batch, wanted in zip(batches[:-1], cycle(wanted_bytes)):
            assert batch.bytes == wanted, "many small segments are not many small copies"
        assert not batches or 0 < batches[-1].bytes <= wanted_bytes[(len(batches) - 1) % len(wanted_bytes)]
        wanted_there = [
            (part.address + start + place, id(block), place)
            for part in parts
            for start, block in zip(range(0, part.bytes, block_bytes), store.backups[part.id].extents, strict=True)
            for place in range(block.bytes)
        ]
        assert bytes_of([piece for batch in batches for piece in batch.pieces]) == wanted_there
        assert arrived == [part.id for part in parts]
        for batch in batches:
            assert [segment.id for segment in batch.segments] == [piece.address >> 32 for piece in batch.pieces]

    def test_split_no_more_than_they_must(self) -> None:
        """A piece for each block, where the batch has room for it: copies of a block are one copy."""
        parts = parts_of(20, 6)
        batches, _ = batches_of(parts, Store(parts, 10), iter([4, 100, 100]))
        assert [[piece.bytes for piece in batch.pieces] for batch in batches] == [[4], [6, 10, 6]]

    def test_none_is_left_after_the_last(self) -> None:
        parts = parts_of(3)
        transfer = Store(parts, 3).add_all(FakeTransfer(iter([3])), parts)  # type: ignore[arg-type]
        assert [transfer.step() for _ in range(3)] == [3, 0, 0]


class TestPieces:
    @pytest.mark.parametrize("sizes", [(), (0,), (0, 8), (8, 0), (8, 0, 8, 0, 0)], ids=str)
    def test_pieces_without_bytes_are_no_copies(self, sizes: tuple[int, ...]) -> None:
        """Each segment arrives once, as without them."""
        first, second = parts_of(16, 16)
        arrived: list[object] = []
        transfer = FakeTransfer(cycle([32]), arrived.extend)
        for part in (first, second):
            transfer.add(part, [Piece(Block(8), 0, part.address, size) for size in sizes])  # type: ignore[arg-type]
        while transfer.step():
            pass
        transfer.finish()
        assert arrived == [first, second]
        assert all(piece.bytes for batch in transfer.batches for piece in batch.pieces)

    @pytest.mark.parametrize("nbytes", [32 << 10, 2 << 20])
    def test_ranges_of_a_segment(self, nbytes: int) -> None:
        """As blocks of a KV cache: many pieces, which are not all of the segment."""
        (part,) = parts_of(64 << 20)
        block = Block(8 * nbytes)
        ranges = [Piece(block, n * nbytes, part.address + 3 * n * nbytes, nbytes) for n in range(8)]  # type: ignore[arg-type]
        arrived: list[object] = []
        transfer = FakeTransfer(cycle([3 * nbytes]), arrived.extend)
        transfer.add(part, ranges)  # type: ignore[arg-type]
        while transfer.step():
            assert arrived == []
        transfer.finish()
        assert arrived == [part]
        total = sum(piece.bytes for batch in transfer.batches for piece in batch.pieces)
        assert total == 8 * nbytes
