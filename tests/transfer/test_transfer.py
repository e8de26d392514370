"""A transfer copies every byte once and in order, over whichever link is free, as its pieces become ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count, cycle

import pytest
from stand_ins import Block, Part, Store, parts_of

from cumem_sleep.core.extents import Piece
from cumem_sleep.transfer.link import Batch, Link
from cumem_sleep.transfer.transfer import Transfer


class FakeLink(Link):
    """Takes batches of the next of `sizes`; each arrives after `latency` looks at whether this link is free."""

    def __init__(self, sizes: Iterator[int], latency: int = 0) -> None:
        self.sizes = sizes
        self.latency = latency
        self.batches: list[Batch] = []
        self._flying: deque[tuple[Batch, int]] = deque()
        self._looks = 0

    def most_bytes(self) -> int:
        return next(self.sizes)

    def begin(self, batch: Batch) -> list[Batch]:
        arrived = self.wait()
        self.batches.append(batch)
        self._flying.append((batch, self._looks + self.latency))
        return arrived

    def is_free(self) -> bool:
        self._looks += 1
        return not self._flying or self._looks > self._flying[0][1]

    def wait(self) -> list[Batch]:
        arrived = [batch for batch, _ in self._flying]
        self._flying.clear()
        return arrived

    @property
    def in_flight(self) -> Sequence[Batch]:
        return [batch for batch, _ in self._flying]


def batches_of(parts: list[Part], store: Store, sizes: Iterator[int]) -> tuple[list[Batch], list[int]]:
    """All there are, each of at most the next of `sizes`; and which segments have arrived, in order."""
    arrived: list[int] = []
    link = FakeLink(sizes)
    transfer = store.add_all(Transfer([link], lambda some: arrived.extend(part.id for part in some)), parts)
    while nbytes := transfer.step():
        assert nbytes == link.batches[-1].bytes
    transfer.finish()
    return link.batches, arrived


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
        transfer = Store(parts, 3).add_all(Transfer([FakeLink(iter([3]))], list), parts)  # type: ignore[arg-type]
        assert [transfer.step() for _ in range(3)] == [3, 0, 0]


class TestSeveralLinks:
    @pytest.mark.parametrize("latency", [0, 3, 10])
    def test_they_share_every_byte(self, latency: int) -> None:
        """A slow one takes less, and keeps the others waiting at no time."""
        parts = parts_of(*range(1, 60))
        store = Store(parts, 8)
        quick, slow = FakeLink(cycle([8]), 1), FakeLink(cycle([8]), 1 + latency)
        arrived: list[int] = []
        transfer = Transfer([quick, slow], lambda some: arrived.extend(part.id for part in some))
        store.add_all(transfer, parts)
        while transfer.step():
            pass
        transfer.finish()
        wanted = bytes_of([piece for part in parts for piece in store.backups[part.id].pieces()])
        copied = bytes_of([piece for link in (quick, slow) for batch in link.batches for piece in batch.pieces])
        assert sorted(copied) == sorted(wanted)
        assert sorted(arrived) == [part.id for part in parts], "once each"
        if latency:
            assert len(quick.batches) > 1.5 * len(slow.batches) > 0

    def test_a_segment_has_arrived_when_all_links_have_copied_their_part_of_it(self) -> None:
        (part,) = parts = parts_of(16)
        arrived: list[object] = []
        first, second = FakeLink(cycle([8]), 100), FakeLink(cycle([8]), 100)
        transfer = Store(parts, 16).add_all(Transfer([first, second], arrived.extend), parts)
        assert (transfer.step(), transfer.step(), transfer.step()) == (8, 8, 0)
        assert transfer.in_flight == {part.id}
        transfer._note_arrived(second.wait())
        assert arrived == []
        transfer.finish()
        assert arrived == parts
        assert transfer.in_flight == set()


class TestReadiness:
    def test_pieces_that_become_ready_late(self) -> None:
        """As from a file. The transfer says that it has nothing to do, and goes on when there is more."""
        parts = parts_of(30, 10)
        store, arrived = Store(parts, 10), list[int]()
        link = FakeLink(cycle([1000]))
        transfer = Transfer([link], lambda some: arrived.extend(part.id for part in some))
        late, whole = parts
        pieces = list(store.backups[late.id].pieces())
        for number, piece in enumerate(pieces):
            assert transfer.step() == 0
            transfer.add(late, [piece], more_follows=number < 2)  # type: ignore[arg-type]
            if number == 1:
                transfer.add(whole, store.backups[whole.id].pieces())  # type: ignore[arg-type]
            assert transfer.step() > 0
            transfer.finish()
            assert arrived == [[], [whole.id], [whole.id, late.id]][number]
        assert bytes_of([p for batch in link.batches for p in batch.pieces]) == bytes_of(
            [*pieces[:2], *store.backups[whole.id].pieces(), pieces[2]]
        )

    @pytest.mark.parametrize("copied_before", [True, False])
    def test_a_segment_that_turns_out_to_have_no_more_has_arrived(self, copied_before: bool) -> None:
        (part,) = parts_of(16)
        arrived: list[object] = []
        transfer = Transfer([FakeLink(cycle([8]))], arrived.extend)
        transfer.add(part, [Piece(Block(8), 0, part.address, 8)], more_follows=True)  # type: ignore[arg-type]
        assert transfer.step() == 8
        if copied_before:
            transfer.finish()
        transfer.add(part, [])  # type: ignore[arg-type]
        transfer.finish()
        assert arrived == [part]

    @pytest.mark.parametrize("sizes", [(), (0,), (0, 8), (8, 0), (8, 0, 8, 0, 0)], ids=str)
    def test_pieces_without_bytes_are_no_copies(self, sizes: tuple[int, ...]) -> None:
        """Each segment arrives once, as without them."""
        first, second = parts_of(16, 16)
        arrived: list[object] = []
        link = FakeLink(cycle([32]))
        transfer = Transfer([link], arrived.extend)
        for part in (first, second):
            transfer.add(part, [Piece(Block(8), 0, part.address, size) for size in sizes])  # type: ignore[arg-type]
        while transfer.step():
            pass
        transfer.finish()
        assert arrived == [first, second]
        assert all(piece.bytes for batch in link.batches for piece in batch.pieces)

    @pytest.mark.parametrize("nbytes", [32 << 10, 2 << 20])
    def test_ranges_of_a_segment(self, nbytes: int) -> None:
        """As blocks of a KV cache: many pieces, which are not all of the segment."""
        (part,) = parts_of(64 << 20)
        block = Block(8 * nbytes)
        ranges = [Piece(block, n * nbytes, part.address + 3 * n * nbytes, nbytes) for n in range(8)]  # type: ignore[arg-type]
        arrived: list[object] = []
        link = FakeLink(count(3 * nbytes))  # type: ignore[arg-type]
        transfer = Transfer([link], arrived.extend)
        transfer.add(part, ranges)  # type: ignore[arg-type]
        while transfer.step():
            assert arrived == []
        transfer.finish()
        assert arrived == [part]
        total = sum(piece.bytes for batch in link.batches for piece in batch.pieces)
        assert total == 8 * nbytes
