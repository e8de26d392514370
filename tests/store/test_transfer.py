"""A transfer copies every byte once and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import pytest
from stand_ins import Block, FakeStream, Log, Part, Store, parts_of

from cumem_sleep import _core
from cumem_sleep.core.extents import Piece
from cumem_sleep.core.tuning import Tuning
from cumem_sleep.store.transfer import Batch, Transfer


def transfer_of(tuning: Tuning, arrived: Callable[[Sequence[_core.Segment]], None] = list) -> Transfer:
    return Transfer([FakeStream(0, Log())], None, arrived, tuning, out=True)  # type: ignore[list-item]


def batches_of(parts: list[Part], store: Store, sizes: Iterator[int]) -> tuple[list[Batch], list[int]]:
    """All there are, each of at most the next of `sizes`; and which segments have arrived, in order."""
    arrived: list[int] = []
    tuning = Tuning()
    transfer = store.add_all(transfer_of(tuning, lambda some: arrived.extend(part.id for part in some)), parts)
    batches: list[Batch] = []
    tuning.engine_batch_bytes = next(sizes)
    while nbytes := transfer.step():
        batches.append(transfer._copier.in_flight[-1])
        assert nbytes == bytes_of(batches[-1])
        transfer._copier.end_batch()
        tuning.engine_batch_bytes = next(sizes)
    transfer.finish()
    return batches, arrived


def bytes_of(batch: Batch) -> int:
    return sum(piece.bytes for piece in batch.pieces)


def all_bytes_of(pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
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
            assert bytes_of(batch) == wanted, "many small segments are not many small copies"
        assert not batches or 0 < bytes_of(batches[-1]) <= wanted_bytes[(len(batches) - 1) % len(wanted_bytes)]
        wanted_there = [
            (part.address + start + place, id(block), place)
            for part in parts
            for start, block in zip(range(0, part.bytes, block_bytes), store.backups[part.id].extents, strict=True)
            for place in range(block.bytes)
        ]
        assert all_bytes_of([piece for batch in batches for piece in batch.pieces]) == wanted_there
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
        transfer = Store(parts, 3).add_all(transfer_of(Tuning()), parts)
        assert [transfer.step() for _ in range(3)] == [3, 0, 0]


class TestPieces:
    @pytest.mark.parametrize("sizes", [(), (0,), (0, 8), (8, 0), (8, 0, 8, 0, 0)], ids=str)
    def test_pieces_without_bytes_are_no_copies(self, sizes: tuple[int, ...]) -> None:
        """Each segment arrives once, as without them."""
        first, second = parts_of(16, 16)
        arrived: list[object] = []
        transfer = transfer_of(Tuning(engine_batch_bytes=32), arrived.extend)
        for part in (first, second):
            transfer.add(part, [Piece(Block(8), 0, part.address, size) for size in sizes])  # type: ignore[arg-type]
        begun = 0
        while nbytes := transfer.step():
            begun += nbytes
            assert all(piece.bytes for batch in transfer._copier.in_flight for piece in batch.pieces)
        transfer.finish()
        assert arrived == [first, second]
        assert begun == 2 * sum(sizes)

    @pytest.mark.parametrize("nbytes", [32 << 10, 2 << 20])
    def test_ranges_of_a_segment(self, nbytes: int) -> None:
        """As blocks of a KV cache: many pieces, which are not all of the segment."""
        (part,) = parts_of(64 << 20)
        block = Block(8 * nbytes)
        ranges = [Piece(block, n * nbytes, part.address + 3 * n * nbytes, nbytes) for n in range(8)]  # type: ignore[arg-type]
        arrived: list[object] = []
        transfer = transfer_of(Tuning(engine_batch_bytes=3 * nbytes), arrived.extend)
        transfer.add(part, ranges)  # type: ignore[arg-type]
        total = 0
        while begun := transfer.step():
            assert arrived == []
            total += begun
        transfer.finish()
        assert arrived == [part]
        assert total == 8 * nbytes
