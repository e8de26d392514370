"""The ledger: nothing is held twice or lost, whatever its owners do in whatever order."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st

from cumem_sleep import InvalidState, OutOfHostMemory
from cumem_sleep.vault import ledger as ledger_module
from cumem_sleep.vault.ledger import Entry, HeldBytes, Key, Ledger, Share
from cumem_sleep.vault.slabs import UNIT_BYTES, SlabRange, Slabs

GPU = "GPU-0"
SLAB = 8 * UNIT_BYTES
FILE_BYTES = 4 * SLAB


def key(name: str, nbytes: int = UNIT_BYTES, encoding: str = "") -> Key:
    return Key(name, nbytes, encoding)


def ledger(slabs: int = 2) -> Ledger:
    made = Ledger()
    for number in range(slabs):
        made.memory.add(number, SLAB)
    return made


def free_in(slabs: Slabs) -> list[SlabRange]:
    return [SlabRange(*at, nbytes) for runs in slabs._runs.values() for at, nbytes in runs._sizes_at.items()]


def shares_of(books: Ledger) -> dict[int, Share]:
    """All shares, by their numbers."""
    return {number: share for shares in books._shares.values() for number, share in shares.items()}


def check(books: Ledger, coming: Mapping[Entry, Sequence[SlabRange]] = MappingProxyType({})) -> None:
    """What is always true. `coming`: where entries are being read to."""
    free = free_in(books.memory)
    covered: dict[int, list[tuple[int, int]]] = {slab: [] for slab in books.memory._nodes}
    for extent in free:
        covered[extent.slab].append((extent.offset, extent.nbytes))
    assert shares_of(books) == {share.number: share for entry in books._entries for share in entry.shares}
    for entry in books._entries:
        assert entry.shares or entry.copies or entry.names, "an entry that nobody holds"
        assert entry.names == {name for name, kept in books.kept.items() if entry in kept.entries}
        assert not entry.names or (entry.key is not None and not entry.is_distrusted)
        assert all(share.entry is entry for share in entry.shares)
        assert entry.key is None or entry.is_distrusted or books._by_key[entry.key] is entry, "two of the same bytes"
        assert not entry.is_distrusted or all(share.needed for share in entry.shares)
        assert entry.nbytes <= entry.taken_bytes
        check_queue(books, entry)
        for extent in (*entry.extents, *coming.get(entry, ())):
            covered[extent.slab].append((extent.offset, extent.nbytes))
    for number in books.memory._nodes:
        at = 0
        for offset, nbytes in sorted(covered[number]):
            assert offset == at, "extents overlap, or bytes are lost"
            at += nbytes
        assert at == SLAB
    runs = sorted(free)
    assert all(left.slab != right.slab or left.offset + left.nbytes < right.offset for left, right in pairwise(runs))
    assert books.memory.free_bytes == sum(run.nbytes for run in free)
    for queue in queues(books).values():
        assert queue.nbytes == sum(entry.taken_bytes for entry in queue)
        assert [entry.used for entry in queue] == sorted(entry.used for entry in queue)
    check_files(books)
    trusted = {entry.key for entry in books._entries if not entry.is_distrusted}
    assert books._by_key.keys() == trusted - {None}
    assert books.kept_bytes == sum(entry.taken_bytes for entry in books._entries if entry.names)
    assert books._entries >= {entry for kept in books.kept.values() for entry in kept.entries}
    check_what_is_held(books)


def queues(books: Ledger) -> dict[str, ledger_module._Queue]:
    names = ("expendable", "evictable", "droppable", "spillable", "evictable_in_files")
    return {name: getattr(books, f"_{name}") for name in names}


def check_queue(books: Ledger, entry: Entry) -> None:
    """It waits in the one queue that the ledger's table says, or in none."""
    is_needed = entry.needed or bool(entry.names and books.files.nbytes and not entry.is_in_files)
    is_retained = not is_needed
    wanted = {
        "expendable": is_retained and entry.is_expendable,
        "evictable": is_retained and not entry.is_expendable and entry.extents != [],
        "evictable_in_files": is_retained and not entry.extents,
        "spillable": is_needed and entry.key is not None and not entry.spilled,
        "droppable": is_needed and entry.is_in_files and entry.extents != [] and not entry.copies,
    }
    assert {name: entry in queue for name, queue in queues(books).items()} == wanted


def check_files(books: Ledger) -> None:
    free = [(offset, nbytes) for _, offset, nbytes in free_in(books.files)]
    spilled = [(offset, nbytes) for entry in books._entries for _, offset, nbytes in entry.spilled]
    at = 0
    for offset, nbytes in sorted(free + spilled):
        assert offset == at, "places in files overlap, or bytes are lost"
        at += nbytes
    assert books.files.free_bytes == sum(nbytes for _, nbytes in free)
    for entry in books._entries:
        assert entry.extents or entry.is_in_files, "bytes that are nowhere"
        assert sum(nbytes for *_, nbytes in entry.spilled) == (entry.taken_bytes if entry.spilled else 0)
        assert entry.spilled or not entry.is_in_files


def check_what_is_held(books: Ledger) -> None:
    held = books.held()
    for owner, gpu in itertools.product((None, "a", "b", "c", "d"), (None, "GPU-0", "GPU-1")):
        needed = retained = shared = spilled = 0
        for entry in books._entries:
            meant = [share for share in entry.shares if owner in (None, share.owner) and gpu in (None, share.gpu)]
            copies = entry.copies if owner is gpu is None else 0
            if meant or copies or (entry.names and owner is gpu is None):
                is_needed = copies > 0 or any(share.needed for share in meant)
                needed += entry.taken_bytes * is_needed
                retained += entry.taken_bytes * (not is_needed)
                shared += entry.taken_bytes * (len({share.owner for share in entry.shares}) > 1)
                spilled += entry.taken_bytes * (not entry.extents)
        assert held[owner, gpu] == HeldBytes(needed, retained, shared, spilled)
    saved = [entry.taken_bytes * (len(entry.shares) - 1) for entry in books._entries if entry.shares]
    assert books.saved_bytes == sum(saved)


def test_a_reservation_is_exact_to_a_unit() -> None:
    books = ledger()
    (small, large) = books.reserve("a", GPU, [1, UNIT_BYTES + 1])
    assert (small.entry.taken_bytes, large.entry.taken_bytes) == (UNIT_BYTES, 2 * UNIT_BYTES)
    assert books.memory.free_bytes == 2 * SLAB - 3 * UNIT_BYTES


def test_a_reservation_that_does_not_fit_changes_nothing_and_says_who_holds_what() -> None:
    books = ledger()
    books.reserve("a", GPU, [SLAB])
    kept = books.reserve("b", GPU, [UNIT_BYTES])[0]
    books.mark("b", [kept.number], needed=False)
    with pytest.raises(OutOfHostMemory, match="vault") as failure:
        books.reserve("b", GPU, [UNIT_BYTES, SLAB])
    assert books.who_holds({"a": "pid 1 (vllm)", "b": "pid 2"}) == "pid 1 (vllm) holds 512.00 KiB"
    assert (failure.value.needed_bytes, failure.value.available_bytes) == (SLAB + UNIT_BYTES, SLAB)
    assert books.share("b", kept.number) is kept
    assert books.memory.free_bytes == SLAB - UNIT_BYTES


def test_ranges_of_a_backup_cross_its_extents() -> None:
    books = ledger(1)
    shares = books.reserve("a", GPU, [UNIT_BYTES] * 8)
    books.release("a", [shares[0].number, shares[4].number])
    (large,) = books.reserve("a", GPU, [2 * UNIT_BYTES])
    first, second = large.entry.extents
    assert list(large.entry.ranges(10, 5)) == [SlabRange(0, first.offset + 10, 5)]
    assert list(large.entry.ranges(UNIT_BYTES - 1, 2)) == [
        SlabRange(0, first.offset + UNIT_BYTES - 1, 1),
        SlabRange(0, second.offset, 1),
    ]
    assert list(large.entry.ranges(UNIT_BYTES, 7)) == [SlabRange(0, second.offset, 7)]


def test_equal_bytes_are_found_by_another_owner_and_held_once() -> None:
    books = ledger()
    (first,) = books.reserve("a", "GPU-0", [UNIT_BYTES])
    books.seal("a", first.number, key("x"))
    second = books.find("b", "GPU-1", key("x"))
    assert second is not None
    assert second.entry is first.entry
    assert books.find("b", "GPU-1", key("x", encoding="other")) is None
    held = books.held()
    assert held[None, None] == held["a", None] == held[None, "GPU-1"] == HeldBytes(UNIT_BYTES, 0, UNIT_BYTES)
    assert books.saved_bytes == UNIT_BYTES
    books.drop_owner("a")
    assert books.held()[None, None] == HeldBytes(UNIT_BYTES, 0, 0)


def test_a_sealed_entry_is_written_by_nobody() -> None:
    books = ledger()
    (share,) = books.reserve("a", GPU, [UNIT_BYTES])
    assert books.writable("a", share.number) is share
    books.seal("a", share.number, key("x"))
    for refused in (books.writable, lambda *given: books.seal(*given, key("y"))):
        with pytest.raises(InvalidState, match="sealed"):
            refused("a", share.number)


def test_retained_backups_go_least_recently_used_first_whoever_has_them() -> None:
    books = ledger(1)
    shares = [books.reserve(owner, GPU, [SLAB // 4])[0] for owner in "abcd"]
    for at in (2, 0, 3, 1):
        books.mark("abcd"[at], [shares[at].number], needed=False)
    books.mark("a", [shares[0].number], needed=True)
    books.reserve("e", GPU, [SLAB // 2])
    gone = [owner for owner, share in zip("abcd", shares, strict=True) if books.mark(owner, [share.number], True)]
    assert gone == ["c", "d"]
    assert books.evicted_bytes == SLAB // 2


def test_nobody_gets_extents_that_are_being_copied() -> None:
    books = ledger(1)
    (share,) = books.reserve("a", GPU, [SLAB])
    entry = share.entry
    books.begin_copy(entry)
    with pytest.raises(InvalidState, match="still being written"):
        books.seal("a", share.number, key("x"))
    books.drop_owner("a")
    check(books)
    with pytest.raises(OutOfHostMemory):
        books.reserve("b", GPU, [1])
    books.end_copy(entry)
    books.reserve("b", GPU, [SLAB])


def test_what_is_distrusted_is_found_by_nobody_and_stays_with_who_needs_it() -> None:
    books = ledger(2)
    (bad,) = books.reserve("a", GPU, [UNIT_BYTES])
    books.seal("a", bad.number, key("x"))
    needed, retained = (books.find(owner, GPU, key("x")) for owner in "bc")
    assert needed is not None
    assert retained is not None
    books.mark("c", [retained.number], needed=False)
    for owner, share in (("a", bad), ("b", needed)):
        books.distrust(owner, [share.number])
    check(books)
    assert books.mark("c", [retained.number], needed=True) == [retained.number]
    assert books.find("d", GPU, key("x")) is None
    (good,) = books.reserve("d", GPU, [UNIT_BYTES])
    assert books.seal("d", good.number, key("x")).entry is not bad.entry
    check(books)
    assert books.mark("a", [bad.number], needed=False) == [bad.number]
    books.drop_owner("b")
    check(books)
    assert books.find("e", GPU, key("x")).entry is good.entry  # type: ignore[union-attr]


def test_what_is_set_aside_for_one_owner_is_reserved_by_no_other() -> None:
    books = ledger(2)
    retained = books.reserve("a", GPU, [SLAB])
    books.mark("a", [retained[0].number], needed=False)
    books.claims["b"] = SLAB + UNIT_BYTES
    assert (books.available_bytes("a"), books.available_bytes("b")) == (SLAB - UNIT_BYTES, 2 * SLAB)
    with pytest.raises(OutOfHostMemory):
        books.reserve("a", GPU, [SLAB])
    books.reserve("a", GPU, [SLAB - UNIT_BYTES])
    books.reserve("b", GPU, [UNIT_BYTES])
    books.claims["b"] = SLAB
    assert books.available_bytes("b") == SLAB
    books.drop_owner("b")
    assert books.available_bytes("a") == SLAB + UNIT_BYTES
    check(books)


class TestKept:
    def kept(self, books: Ledger, names: str, units: int = 2) -> None:
        """Each under a name, by an owner of that name that has ended."""
        for name in names:
            shares = books.reserve(name, GPU, [UNIT_BYTES] * units)
            for share in shares:
                books.seal(name, share.number, key(f"{name}{share.number}"))
            books.keep(name, f"of {name}", name, [share.number for share in shares], 6 * UNIT_BYTES)
            books.drop_owner(name)
            check(books)

    def test_it_outlives_its_owner_within_the_quota_the_least_recently_used_going_first(self) -> None:
        books = ledger()
        self.kept(books, "xyz")
        assert (list(books.kept), books.kept_bytes) == (["x", "y", "z"], 6 * UNIT_BYTES)
        assert books.adopt("a", GPU, "x")
        self.kept(books, "w")
        assert list(books.kept) == ["z", "x", "w"]
        with pytest.raises(OutOfHostMemory, match="keep-weights"):
            self.kept(books, "u", 7)
        assert list(books.kept) == ["z", "x", "w"]
        manifest, shares = books.adopt("b", GPU, "x")  # type: ignore[misc]
        assert (manifest, len(shares)) == ("of x", 2)
        assert books.forget("x")
        assert not books.forget("x")
        books.drop_owner("a")
        assert all(books.find_share("b", share.number) for share in shares)
        check(books)

    def test_there_are_not_too_many_names(self) -> None:
        books = ledger()
        self.kept(books, "x")
        _, shares = books.adopt("a", GPU, "x")  # type: ignore[misc]
        for number in range(ledger_module.MOST_NAMES):
            books.keep(f"{number}", "", "a", [shares[0].number], SLAB)
        assert len(books.kept) == ledger_module.MOST_NAMES
        assert "x" not in books.kept
        check(books)

    def test_equal_bytes_are_held_once_whoever_has_them(self) -> None:
        books = ledger()
        self.kept(books, "x", 3)
        found = books.find("a", GPU, key("x1"))
        assert found is not None
        books.keep("other", "", "a", [found.number], 6 * UNIT_BYTES)
        assert books.kept_bytes == 3 * UNIT_BYTES
        books.drop_owner("a")
        books.forget("x")
        check(books)
        assert books.kept_bytes == UNIT_BYTES == 2 * SLAB - books.memory.free_bytes

    def test_what_is_not_proven_is_not_kept(self) -> None:
        books = ledger()
        good, bad = books.reserve("a", GPU, [UNIT_BYTES] * 2)
        books.seal("a", good.number, key("x"))
        self.kept(books, "y")
        for doubtful in ([good.number, bad.number], [good.number, 99]):
            with pytest.raises(InvalidState):
                books.keep("y", "", "a", doubtful, SLAB)
        assert books.kept["y"].manifest == "of y"
        books.keep("z", "", "a", [good.number], SLAB)
        books.distrust("a", [good.number])
        assert list(books.kept) == ["y"]
        check(books)

    def test_with_one_entry_all_of_a_name_gives_way(self) -> None:
        books = ledger(1)
        self.kept(books, "xy", 3)
        books.reserve("a", GPU, [3 * UNIT_BYTES])
        assert list(books.kept) == ["y"]
        check(books)

    def test_it_moves_to_files_before_it_gives_way(self) -> None:
        books = Ledger(4 * UNIT_BYTES)
        books.memory.add(1, SLAB)
        self.kept(books, "xyz")
        assert books.available_bytes() == 2 * UNIT_BYTES
        for entry in books.to_spill(4 * UNIT_BYTES, lambda _: True):
            assert books.begin_spill(entry)
            books.end_spill(entry, is_written=True)
        check(books)
        assert books.available_bytes() == 6 * UNIT_BYTES
        books.reserve("a", GPU, [6 * UNIT_BYTES])
        assert list(books.kept) == ["x", "y", "z"]
        check(books)
        chosen = books.to_spill(2 * UNIT_BYTES, lambda _: True)  # of z, in place of x
        assert [books.begin_spill(entry) for entry in chosen] == [True, True]
        assert list(books.kept) == ["y", "z"]
        for entry in chosen:
            books.end_spill(entry, is_written=True)
        check(books)

    def test_what_lost_its_name_for_another_is_not_spilled(self) -> None:
        books = Ledger(2 * UNIT_BYTES)
        books.memory.add(1, SLAB)
        self.kept(books, "x", 3)
        first, second, third = (entry for entry in books.kept["x"].entries)
        for entry in (first, second):
            books.begin_spill(entry)
            books.end_spill(entry, is_written=True)
        assert books.begin_spill(third)  # and all of x goes for it
        assert not books.kept
        books.end_spill(third, is_written=False)
        check(books)
        assert not books.begin_spill(third)
        assert (books.memory.free_bytes, books.files.free_bytes) == (SLAB, 2 * UNIT_BYTES)

    def test_without_room_in_files_it_gives_way_if_that_is_enough(self) -> None:
        books = Ledger(UNIT_BYTES)
        books.memory.add(1, SLAB)
        self.kept(books, "xyz")
        assert not books.forget_for_room(7 * UNIT_BYTES)
        assert books.forget_for_room(6 * UNIT_BYTES)
        assert list(books.kept) == ["y", "z"]
        assert books.available_bytes() == 4 * UNIT_BYTES


class TestExpendable:
    @pytest.fixture
    def books(self) -> Ledger:
        return ledger()

    def test_nothing_is_evicted_for_it(self, books: Ledger) -> None:
        (retained,) = books.reserve("a", GPU, [SLAB])
        books.mark("a", [retained.number], needed=False)
        books.reserve("a", GPU, [SLAB // 2], expendable=True)
        assert books.available_bytes("b") == 2 * SLAB
        assert books.available_bytes("b", expendable=True) == SLAB // 2
        books.claims["c"] = SLAB // 4
        assert books.available_bytes("b", expendable=True) == SLAB // 4
        with pytest.raises(OutOfHostMemory):
            books.reserve("b", GPU, [SLAB // 2], expendable=True)
        assert books.find_share("a", retained.number) is not None

    @pytest.mark.parametrize("how", ["released", "evicted", "its owner goes"])
    def test_others_get_its_memory_once_no_copy_uses_it(self, books: Ledger, how: str) -> None:
        (share,) = books.reserve("a", GPU, [2 * SLAB], expendable=True)
        books.mark("a", [share.number], needed=False)
        books.begin_copy(share.entry)
        if how != "evicted":
            books.release("a", [share.number]) if how == "released" else books.drop_owner("a")
        check(books)
        with pytest.raises(OutOfHostMemory):
            books.reserve("b", GPU, [UNIT_BYTES])
        books.end_copy(share.entry)
        check(books)
        books.reserve("b", GPU, [2 * SLAB])
        assert books.find_share("a", share.number) is None
        check(books)


def test_memory_of_the_gpu_s_own_numa_node_comes_first() -> None:
    books = Ledger()
    for number in range(4):
        books.memory.add(number, SLAB, node=number % 2)
    shares = books.reserve("a", GPU, [SLAB] * 3, node=1)
    assert [extent.slab % 2 for share in shares for extent in share.entry.extents] == [1, 1, 0]


def lines_run(work: Callable[[], object]) -> int:
    """Of the ledger."""
    count = 0
    files = {sys.modules[each.__module__].__file__ for each in (Ledger, Slabs)}

    def trace(frame: types.FrameType, event: str, _: object) -> Callable[..., object] | None:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename in files else None

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def in_fragments(count: int) -> tuple[Ledger, list[Share], list[Share]]:
    """So many backups with as many gaps between them; some of the others are retained."""
    books = ledger(2 * count // 4)
    shares = books.reserve("a", GPU, [UNIT_BYTES] * 2 * count)
    retained = books.reserve("b", GPU, [UNIT_BYTES] * count)
    books.mark("b", [share.number for share in retained], needed=False)
    books.release("a", [share.number for share in shares[::2]])
    books.reserve("c", GPU, [UNIT_BYTES])  # what was given back is among the free runs now
    return books, shares[1::2], retained


FEW, MANY = 32, 256


@pytest.mark.parametrize(
    "call",
    [
        lambda books, _mine, _others: books.reserve("a", GPU, [UNIT_BYTES]),
        lambda books, _mine, _others: books.find("a", GPU, key("x")),
        lambda books, mine, _others: books.seal("a", mine[0].number, key("x")),
        lambda books, mine, _others: books.mark("a", [mine[0].number], needed=False),
        lambda books, mine, _others: books.release("a", [mine[0].number]),
        lambda books, _mine, others: books.mark("b", [others[0].number], needed=True),
        lambda books, mine, _others: books.distrust("a", [mine[0].number]),
        lambda books, mine, _others: books.owners("a", [mine[0].number]),
        lambda books, _mine, _others: books.available_bytes(),
    ],
    ids=["reserve", "find", "seal", "mark", "release", "need", "distrust", "owners", "what is left"],
)
def test_what_one_backup_costs_does_not_depend_on_others(
    call: Callable[[Ledger, list[Share], list[Share]], object],
) -> None:
    few, many = (lines_run(partial(call, *in_fragments(count))) for count in (FEW, MANY))
    assert 0 < few == many


class LedgerMachine(stateful.RuleBasedStateMachine):
    """Beside a model that knows only which share is whose, and of which bytes."""

    owners = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.writing: list[Entry] = []
        self.reading: dict[Entry, list[SlabRange]] = {}
        self.freed_bytes = 0
        self.books = Ledger(FILE_BYTES, self.free)
        for number in range(3):
            self.books.memory.add(number, SLAB)
        self.mine: dict[int, str] = {}
        self.copies: list[tuple[int, object]] = []

    def free(self, extents: Sequence[SlabRange]) -> None:
        self.freed_bytes += sum(extent.nbytes for extent in extents)

    @stateful.rule(units=st.integers(1, 24))
    def spill(self, units: int) -> None:
        retained = {number for number, share in shares_of(self.books).items() if not share.entry.needed}
        for entry in self.books.to_spill(units * UNIT_BYTES, lambda _: True):
            if not entry.copies and self.books.begin_spill(entry):
                self.writing.append(entry)
        assert self.mine.keys() - shares_of(self.books).keys() <= retained, "something needed was evicted"
        self.forget_evicted()

    @stateful.precondition(lambda self: self.writing)
    @stateful.rule(is_written=st.booleans())
    def end_spill(self, is_written: bool) -> None:
        self.books.end_spill(self.writing.pop(), is_written=is_written)

    @stateful.rule()
    def read_ahead(self) -> None:
        before = self.mine.keys()
        for entry in {share.entry for share in shares_of(self.books).values() if not share.entry.extents}:
            if extents := self.books.begin_read_ahead(entry, sys.maxsize):
                self.reading[entry] = extents
        assert shares_of(self.books).keys() == before, "something was evicted for what nobody waits for"

    @stateful.precondition(lambda self: self.reading)
    @stateful.rule(is_read=st.booleans())
    def end_read_ahead(self, is_read: bool) -> None:
        entry, extents = self.reading.popitem()
        self.books.end_read_ahead(entry, extents, is_read=is_read)

    def some(self, data: st.DataObject) -> tuple[str, int]:
        number = data.draw(st.sampled_from(sorted(self.mine)))
        return self.mine[number], number

    @stateful.rule(owner=owners, units=st.integers(8, 24), gap=st.integers(2, 3))
    def fragment(self, owner: str, units: int, gap: int) -> None:
        """Many small ones, of which some go at once."""
        if units * UNIT_BYTES > self.books.available_bytes(owner):
            return
        shares = self.books.reserve(owner, GPU, [UNIT_BYTES] * units)
        self.forget_evicted()
        self.mine.update((share.number, owner) for share in shares)
        for share in shares[::gap]:
            self.books.release(owner, [share.number])
            del self.mine[share.number]

    @stateful.rule(owner=owners, units=st.integers(0, 10))
    def claim(self, owner: str, units: int) -> None:
        """It is the owner's, whatever others do, unless they come to need what could be evicted."""
        self.books.claims[owner] = 0
        if units * UNIT_BYTES <= self.books.available_bytes(owner):
            self.books.claims[owner] = units * UNIT_BYTES
            assert self.books.available_bytes(owner) >= units * UNIT_BYTES

    def forget_evicted(self) -> None:
        for number in self.mine.keys() - shares_of(self.books).keys():
            del self.mine[number]

    @stateful.rule(
        owner=owners,
        units=st.lists(st.integers(1, 10), min_size=1, max_size=4),
        odd=st.integers(0, 99),
        expendable=st.booleans(),
    )
    def reserve(self, owner: str, units: list[int], odd: int, expendable: bool) -> None:
        sizes = [count * UNIT_BYTES - odd for count in units]
        before = set(self.mine)
        fits = sum(units) * UNIT_BYTES <= self.books.available_bytes(owner, expendable=expendable)
        needed = {share.number for share in shares_of(self.books).values() if share.entry.needed}
        try:
            shares = self.books.reserve(owner, GPU, sizes, expendable=expendable)
        except OutOfHostMemory:
            assert not fits
            self.forget_evicted()
            assert set(self.mine) == before
            return
        assert fits
        self.forget_evicted()
        assert set(self.mine) == before or not expendable
        assert needed <= set(self.mine), "something needed was evicted"
        for share, size in zip(shares, sizes, strict=True):
            assert share.entry.nbytes == size
            self.mine[share.number] = owner

    @stateful.precondition(lambda self: self.mine)
    @stateful.rule(data=st.data(), name=st.sampled_from("xyz"))
    def seal(self, data: st.DataObject, name: str) -> None:
        owner, number = self.some(data)
        share = self.books.share(owner, number)
        may = share.entry.key is None and not share.entry.copies and not share.entry.is_expendable
        try:
            assert self.books.seal(owner, number, key(name, share.entry.nbytes)) is share
        except InvalidState:
            assert not may
        else:
            assert may
            assert share.entry.key == key(name, share.entry.nbytes)

    @stateful.rule(owner=owners, name=st.sampled_from("xyz"), units=st.integers(1, 10))
    def find(self, owner: str, name: str, units: int) -> None:
        wanted = key(name, units * UNIT_BYTES)
        trusted = [entry for entry in self.books._entries if not entry.is_distrusted]
        is_there = wanted in {entry.key for entry in trusted}  # maybe for a copy alone
        found = self.books.find(owner, GPU, wanted)
        assert (found is not None) == is_there
        if found is not None:
            self.mine[found.number] = owner

    @stateful.precondition(lambda self: self.mine)
    @stateful.rule(data=st.data(), name=st.sampled_from("mn"), count=st.integers(1, 3), units=st.integers(0, 24))
    def keep(self, data: st.DataObject, name: str, count: int, units: int) -> None:
        owner, first = self.some(data)
        numbers = [first, *(number for number, whose in self.mine.items() if whose == owner)][:count]
        entries = [self.books.share(owner, number).entry for number in numbers]
        may = all(entry.key is not None and not entry.is_distrusted for entry in entries)
        fits = sum(entry.taken_bytes for entry in set(entries)) <= units * UNIT_BYTES
        before = dict(self.books.kept)
        try:
            self.books.keep(name, "manifest", owner, numbers, units * UNIT_BYTES)
        except InvalidState:
            assert not may
            assert self.books.kept == before
        except OutOfHostMemory:
            assert not fits
            assert self.books.kept == before
        else:
            assert may
            assert fits
            assert self.books.kept[name].entries == entries
            assert self.books.kept_bytes <= units * UNIT_BYTES
        self.forget_evicted()

    @stateful.rule(owner=owners, name=st.sampled_from("mn"))
    def adopt(self, owner: str, name: str) -> None:
        found = self.books.adopt(owner, GPU, name)
        assert (found is not None) == (name in self.books.kept)
        if found is not None:
            assert [share.entry for share in found[1]] == self.books.kept[name].entries
            self.mine.update((share.number, owner) for share in found[1])

    @stateful.rule(name=st.sampled_from("mn"))
    def forget(self, name: str) -> None:
        was_kept = name in self.books.kept
        assert self.books.forget(name) == was_kept
        assert name not in self.books.kept

    @stateful.rule(units=st.integers(1, 24))
    def forget_for_room(self, units: int) -> None:
        before = self.books.available_bytes(), self.books._spillable.nbytes
        if self.books.forget_for_room(units * UNIT_BYTES):
            assert (self.books.available_bytes(), self.books._spillable.nbytes) != before

    @stateful.precondition(lambda self: self.mine)
    @stateful.rule(data=st.data(), needed=st.booleans())
    def mark(self, data: st.DataObject, needed: bool) -> None:
        owner, number = self.some(data)
        goes = self.books.share(owner, number).entry.is_distrusted and not needed
        assert self.books.mark(owner, [number], needed) == [number] * goes
        self.forget_evicted()

    @stateful.precondition(lambda self: self.mine)
    @stateful.rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        owner, number = self.some(data)
        entry = self.books.share(owner, number).entry
        needed = {share for share in entry.shares if share.needed}
        self.books.distrust(owner, [number, number, 0])
        assert entry.is_distrusted is (entry.key is not None)
        self.forget_evicted()
        assert needed <= entry.shares

    @stateful.precondition(lambda self: self.mine)
    @stateful.rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner, number = self.some(data)
        self.books.release(owner, [number])
        del self.mine[number]

    @stateful.rule(owner=owners)
    def drop_owner(self, owner: str) -> None:
        self.books.drop_owner(owner)
        self.mine = {number: whose for number, whose in self.mine.items() if whose != owner}

    @stateful.precondition(lambda self: self.mine)
    @stateful.rule(data=st.data())
    def begin_copy(self, data: st.DataObject) -> None:
        entry = self.books.share(*self.some(data)).entry
        self.books.begin_copy(entry)
        self.copies.append((id(entry), entry))

    @stateful.precondition(lambda self: self.copies)
    @stateful.rule()
    def end_copy(self) -> None:
        self.books.end_copy(self.copies.pop()[1])  # type: ignore[arg-type]

    @stateful.invariant()
    def shares(self) -> None:
        check(self.books, self.reading)
        assert {share.number: share.owner for share in shares_of(self.books).values()} == self.mine
        held = self.books.held()[None, None]
        coming = sum(extent.nbytes for extents in self.reading.values() for extent in extents)
        in_memory = held.asleep_bytes + held.awake_bytes - held.spilled_bytes + coming
        assert in_memory + self.books.memory.free_bytes == self.books.memory.nbytes


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
