"""Batches of copies hold every byte once and in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest
from stand_ins import Part, Store, parts_of

from cumem_sleep.transfer.lanes import Batch


def batches_of(parts: list[Part], store: Store, sizes: Iterator[int]) -> list[Batch]:
    """All there are, each of at most the next of `sizes`."""
    batches = store.batches(parts)
    return list(iter(lambda: batches.next(next(sizes)), Batch()))


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
        batches = batches_of(parts, store, cycle(wanted_bytes))
        for batch, wanted in zip(batches[:-1], cycle(wanted_bytes)):
            assert batch.bytes == wanted, "many small segments are not many small copies"
        assert not batches or 0 < batches[-1].bytes <= wanted_bytes[(len(batches) - 1) % len(wanted_bytes)]
        bytes_there = [
            (piece.address + place, id(piece.extent), piece.offset + place)
            for batch in batches
            for piece in batch.pieces
            for place in range(piece.bytes)
        ]
        wanted_there = [
            (part.address + start + place, id(block), place)
            for part in parts
            for start, block in zip(range(0, part.bytes, block_bytes), store.backups[part.id].extents, strict=True)
            for place in range(block.bytes)
        ]
        assert bytes_there == wanted_there
        completed = [segment.id for batch in batches for segment in batch.completed]
        assert completed == [part.id for part in parts]
        for number, batch in enumerate(batches):
            in_it = [piece.address >> 32 for piece in batch.pieces]
            assert [segment.id for segment in batch.segments] == in_it
            later = {piece.address >> 32 for after in batches[number + 1 :] for piece in after.pieces}
            assert {segment.id for segment in batch.completed} == set(in_it) - later

    def test_split_no_more_than_they_must(self) -> None:
        """A piece for each block, where the batch has room for it: copies of a block are one copy."""
        parts = parts_of(20, 6)
        batches = batches_of(parts, Store(parts, 10), iter([4, 100, 100]))
        assert [[piece.bytes for piece in batch.pieces] for batch in batches] == [[4], [6, 10, 6]]

    def test_none_is_left_after_the_last(self) -> None:
        parts = parts_of(3)
        batches = Store(parts, 3).batches(parts)
        assert batches.next(3).bytes == 3
        for _ in range(2):
            assert batches.next(3) == Batch()
