"""Who keeps which bytes where in the vault's memory. Facts only: it copies nothing, and waits for nothing.

Memory comes in slabs. An *entry* is a backup: extents of slabs, shared by the *holds* of their owners, one for each
segment. A hold is needed (its segment sleeps, or is about to) or retained (its segment is awake). What nobody needs may
be evicted, least recently used first. A slab that another vault has left behind is *adopted*: it has the entries that
its owners show, and nothing new is written there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ..errors import InvalidArgument, InvalidState, OutOfHostMemory, format_bytes

UNIT_BYTES = 64 << 10  # what an extent's size is rounded up to: small beside a backup, large for a copy
_HOLDERS_NAMED = 5  # when memory is short


class Extent(NamedTuple):
    """A range of a slab: `nbytes` from `offset` on."""

    slab: int
    offset: int
    nbytes: int


class Key(NamedTuple):
    """What equal backups have in common: the digest, the number of bytes, and the encoding ("" if not encoded)."""

    digest: str
    nbytes: int
    encoding: str


@dataclass(eq=False)
class Hold:
    """One owner's share in an entry, for one segment.

    Attributes:
        number: what the owner calls it; it stays the same when the owner comes to share an older entry.
        gpu: on which GPU the segment is, by its UUID.
        needed: False if the owner can do without it.
        used: when it was last marked; a number that grows with each mark.
    """

    number: int
    owner: Hashable
    gpu: str
    entry: Entry
    used: int
    needed: bool = True


@dataclass(eq=False)
class Entry:
    """A backup: where it is, what it is (`key`, once its bytes are proven), and who holds it.

    Attributes:
        nbytes: how many bytes are stored.
        note: what the owner wrote down about the encoding, for those that share it.
        copies: how many copies to and from the extents are under way: until they end nobody else gets the extents.
    """

    nbytes: int
    extents: Sequence[Extent]
    key: Key | None = None
    note: str = ""
    holds: list[Hold] = field(default_factory=list)
    copies: int = 0

    @property
    def needed(self) -> bool:
        """Whether it has to stay."""
        return self.copies > 0 or any(hold.needed for hold in self.holds)

    @property
    def used(self) -> int:
        """When any of its holds was last marked, see `Hold.used`."""
        return max((hold.used for hold in self.holds), default=0)

    @property
    def owners(self) -> set[Hashable]:
        """The owners of its holds."""
        return {hold.owner for hold in self.holds}

    @property
    def taken_bytes(self) -> int:
        """How many bytes of the slabs it takes."""
        return sum(extent.nbytes for extent in self.extents)

    def ranges(self, offset: int, nbytes: int) -> Iterator[Extent]:
        """Where `nbytes` of the backup, from `offset` on, lie, in order."""
        for extent in self.extents:
            if nbytes <= 0:
                return
            if offset < extent.nbytes:
                size = min(nbytes, extent.nbytes - offset)
                yield Extent(extent.slab, extent.offset + offset, size)
                nbytes -= size
            offset = max(0, offset - extent.nbytes)


@dataclass(frozen=True)
class Held:
    """What an owner, a GPU or the whole vault holds, in bytes.

    Attributes:
        needed: bytes of backups that are needed, as a rule because their segments sleep.
        retained: bytes of the other backups, which may be evicted.
        shared: how many of both are held by several processes.
    """

    needed: int = 0
    retained: int = 0
    shared: int = 0


class _Slab:
    """The free runs of one slab, by offset."""

    def __init__(self, nbytes: int, node: int, is_adopted: bool) -> None:
        self.nbytes = nbytes
        self.node = node
        self.is_adopted = is_adopted
        self.entries = 0
        self.runs: list[tuple[int, int]] = [] if is_adopted else [(0, nbytes)]

    def take(self, offset: int, nbytes: int) -> None:
        """Take `nbytes` from the beginning of the free run at `offset`."""
        at = bisect_left(self.runs, (offset, 0))
        _, run_bytes = self.runs.pop(at)
        if run_bytes > nbytes:
            self.runs.insert(at, (offset + nbytes, run_bytes - nbytes))

    def give_back(self, offset: int, nbytes: int) -> None:
        """Make these bytes free again, in one run with the free ones beside them."""
        at = bisect_left(self.runs, (offset, 0))
        if at < len(self.runs) and self.runs[at][0] == offset + nbytes:
            nbytes += self.runs.pop(at)[1]
        if at and sum(self.runs[at - 1]) == offset:
            offset, before = self.runs.pop(at - 1)
            nbytes += before
        insort(self.runs, (offset, nbytes))


class Ledger:
    """The slabs of one vault, its entries and their holds. An owner is any hashable object of the caller's."""

    def __init__(self) -> None:
        self._slabs: dict[int, _Slab] = {}
        self._entries: set[Entry] = set()
        self._holds: dict[int, Hold] = {}
        self._by_key: dict[Key, Entry] = {}
        self._last_number = 0
        self._clock = 0
        self.free_bytes = 0
        self.evicted_bytes = 0

    # Slabs

    def add_slab(self, slab: int, nbytes: int, node: int = -1) -> None:
        """Add memory for new backups, on that NUMA node."""
        if nbytes % UNIT_BYTES:
            raise InvalidArgument(f"slab of {nbytes} bytes: expected a multiple of {UNIT_BYTES}")
        self._slabs[slab] = _Slab(nbytes, node, is_adopted=False)
        self.free_bytes += nbytes

    def add_adopted_slab(self, slab: int, nbytes: int) -> None:
        """Add memory that already has backups in it: `show` says which."""
        self._slabs[slab] = _Slab(nbytes, -1, is_adopted=True)

    def remove_slab(self, slab: int) -> None:
        """Forget a slab that has no entries."""
        if self._slabs[slab].entries:
            raise InvalidState(f"slab {slab} has {self._slabs[slab].entries} entries")
        gone = self._slabs.pop(slab)
        self.free_bytes -= 0 if gone.is_adopted else gone.nbytes

    def empty_slabs(self, adopted: bool) -> list[int]:
        """The adopted slabs, or those of our own, that have no entries."""
        return [number for number, slab in self._slabs.items() if slab.is_adopted == adopted and not slab.entries]

    @property
    def own_bytes(self) -> int:
        """The size of all slabs but adopted ones."""
        return sum(slab.nbytes for slab in self._slabs.values() if not slab.is_adopted)

    @property
    def adopted_bytes(self) -> int:
        """The size of all adopted slabs."""
        return sum(slab.nbytes for slab in self._slabs.values() if slab.is_adopted)

    def empty(self, nbytes: int) -> list[int]:
        """Evict so much that own slabs of at least `nbytes` are empty; returns these, or none if that is impossible."""
        users: dict[int, list[Entry]] = {number: [] for number, slab in self._slabs.items() if not slab.is_adopted}
        for entry in self._entries:
            for slab in {extent.slab for extent in entry.extents} & users.keys():
                users[slab].append(entry)
        candidates = [slab for slab, entries in users.items() if not any(entry.needed for entry in entries)]
        candidates.sort(key=lambda slab: max((entry.used for entry in users[slab]), default=0))
        chosen: list[int] = []
        for slab in candidates:
            if nbytes <= 0:
                break
            chosen.append(slab)
            nbytes -= self._slabs[slab].nbytes
        if nbytes > 0:
            return []
        for entry in {entry for slab in chosen for entry in users[slab]}:
            self._evict(entry)
        return chosen

    # Entries

    def available_bytes(self) -> int:
        """What could be reserved now: what is free, and what may be evicted from slabs of our own."""
        return self.free_bytes + sum(self._own_bytes_of(entry) for entry in self._evictable())

    def require_room(self, sizes: Sequence[int], names: Mapping[Hashable, str]) -> None:
        """Check that this much can be reserved. `names` are what the error calls the owners.

        Raises:
            OutOfHostMemory: too little is free, and too little may be evicted.
            InvalidArgument: a size is not positive.
        """
        if any(size < 1 for size in sizes):
            raise InvalidArgument(f"size={min(sizes)}: expected at least 1")
        needed, available = sum(map(_rounded, sizes)), self.available_bytes()
        if needed > available:
            raise OutOfHostMemory(needed, available, "vault", self.who_holds(names))

    def reserve(
        self,
        owner: Hashable,
        gpu: str,
        sizes: Sequence[int],
        node: int = -1,
        names: Mapping[Hashable, str] | None = None,
    ) -> list[Hold]:
        """Reserve an entry of each size for the owner, which needs them: all of them, or none.

        Args:
            node: the NUMA node to be preferred.

        Raises:
            OutOfHostMemory, InvalidArgument: as `require_room`. Nothing has changed.
        """
        self.require_room(sizes, names or {})
        needed = sum(map(_rounded, sizes))
        evictable = sorted(self._evictable(), key=lambda entry: entry.used)
        for entry in evictable:
            if self.free_bytes >= needed:
                break
            if self._own_bytes_of(entry):
                self._evict(entry)
        entries = [self._add(Entry(size, self._allocate(_rounded(size), node))) for size in sizes]
        return [self._new_hold(entry, owner, gpu) for entry in entries]

    def find(self, owner: Hashable, gpu: str, key: Key) -> Hold | None:
        """A new hold on the entry of these bytes, if there is one; the owner needs it."""
        entry = self._by_key.get(key)
        return None if entry is None else self._new_hold(entry, owner, gpu)

    def show(self, owner: Hashable, gpu: str, key: Key, note: str, nbytes: int, extents: Sequence[Extent]) -> Hold:
        """A new hold on an entry that lies in adopted slabs, or on another one of the same bytes; the owner needs it.

        Raises:
            InvalidArgument: the extents do not lie in adopted slabs, or have too few bytes.
        """
        found = self.find(owner, gpu, key)
        if found is not None:
            return found
        for slab, offset, size in extents:
            known = self._slabs.get(slab)
            if known is None or not known.is_adopted or size < 1 or offset + size > known.nbytes:
                raise InvalidArgument(f"extent {slab}:{offset}+{size}: it does not lie in an adopted slab")
        if not 0 < nbytes <= sum(extent.nbytes for extent in extents):
            raise InvalidArgument(f"extents of {sum(e.nbytes for e in extents)} bytes cannot hold {nbytes} bytes")
        entry = self._by_key[key] = self._add(Entry(nbytes, tuple(extents), key, note))
        return self._new_hold(entry, owner, gpu)

    def seal(self, owner: Hashable, number: int, key: Key, note: str = "") -> Hold:
        """Note that the entry has the bytes of this key: from now on it may be shared, and nobody writes to it.

        If there is an older entry of the same bytes, the hold moves to that one, and this entry is given back.

        Raises:
            InvalidState: the owner has no such hold, the entry is sealed, or bytes are still being copied there.
        """
        hold = self.writable(owner, number)
        entry, older = hold.entry, self._by_key.get(key)
        if entry.copies:
            raise InvalidState(f"backup {number} is still being written: it cannot be sealed yet")
        if older is None:
            entry.key, entry.note = key, note
            self._by_key[key] = entry
        else:
            entry.holds.remove(hold)
            older.holds.append(hold)
            hold.entry = older
            self._free_if_unused(entry)
        return hold

    def hold(self, owner: Hashable, number: int) -> Hold:
        """The hold of that number. Raises InvalidState: the owner has none, or not any more."""
        hold = self.find_hold(owner, number)
        if hold is None:
            raise InvalidState(f"backup {number} is not held by this process, or not any more")
        return hold

    def find_hold(self, owner: Hashable, number: int) -> Hold | None:
        """The hold of that number, if the owner has it."""
        hold = self._holds.get(number)
        return hold if hold is not None and hold.owner == owner else None

    def writable(self, owner: Hashable, number: int) -> Hold:
        """As `hold`, for an entry to write to. Raises InvalidState: it is sealed, so others may rely on its bytes."""
        hold = self.hold(owner, number)
        if hold.entry.key is not None:
            raise InvalidState(f"backup {number} is sealed: reserve another one for other bytes")
        return hold

    def mark(self, owner: Hashable, numbers: Iterable[int], needed: bool) -> list[int]:
        """Note that the owner needs these, or can do without them. Returns those that have been evicted meanwhile."""
        gone = []
        for number in numbers:
            hold = self._holds.get(number)
            if hold is None or hold.owner != owner:
                gone.append(number)
            else:
                hold.needed, hold.used = needed, self._tick()
        return gone

    def release(self, owner: Hashable, numbers: Iterable[int]) -> None:
        """Give these holds back; those that the owner does not have are passed over."""
        for number in numbers:
            hold = self._holds.get(number)
            if hold is not None and hold.owner == owner:
                self._drop(hold)

    def drop_owner(self, owner: Hashable) -> None:
        """Give back whatever the owner holds."""
        for hold in [hold for hold in self._holds.values() if hold.owner == owner]:
            self._drop(hold)

    def move(self, before: Hashable, owner: Hashable, numbers: Iterable[int]) -> None:
        """Make these holds of `before` the owner's; those that `before` does not have are passed over."""
        for number in numbers:
            hold = self._holds.get(number)
            if hold is not None and hold.owner == before:
                hold.owner = owner

    def begin_copy(self, entry: Entry) -> None:
        """Keep the extents of the entry until `end_copy`, even if all its holds are released."""
        entry.copies += 1

    def end_copy(self, entry: Entry) -> None:
        """One copy fewer is under way."""
        entry.copies -= 1
        self._free_if_unused(entry)

    # What is held

    def held(self) -> Held:
        """What all owners together hold; each entry counts once."""
        return _sum((entry, entry.needed) for entry in self._entries)

    def held_by(self, owner: Hashable, gpu: str | None = None) -> Held:
        """What one owner holds, shared or not, for segments of one GPU, or of all."""
        return self._held_where(lambda hold: hold.owner == owner and gpu in (None, hold.gpu))

    def held_for(self, gpu: str) -> Held:
        """What is held for segments of one GPU."""
        return self._held_where(lambda hold: hold.gpu == gpu)

    def owners(self, owner: Hashable, numbers: Iterable[int]) -> list[int]:
        """How many owners share each of these entries; 0 where the owner has no such hold, or not any more."""
        holds = [self._holds.get(number) for number in numbers]
        return [len(hold.entry.owners) if hold and hold.owner == owner else 0 for hold in holds]

    def who_holds(self, names: Mapping[Hashable, str]) -> str:
        """Which of these owners hold most, and how much, in words."""
        held = sorted(((self.held_by(owner), name) for owner, name in names.items()), key=lambda each: -each[0].needed)
        said = [f"{name} holds {format_bytes(each.needed)}" for each, name in held[:_HOLDERS_NAMED] if each.needed]
        return ", ".join(said) or "nobody holds anything"

    def saved_bytes(self) -> int:
        """What is not held a second time because it is shared."""
        return sum(entry.taken_bytes * (len(entry.holds) - 1) for entry in self._entries if entry.holds)

    def check(self) -> None:
        """Assert what is always true; for tests."""
        covered: dict[int, list[tuple[int, int]]] = {slab: list(s.runs) for slab, s in self._slabs.items()}
        counts = dict.fromkeys(self._slabs, 0)
        assert self._holds == {hold.number: hold for entry in self._entries for hold in entry.holds}
        for entry in self._entries:
            assert entry.holds or entry.copies, "an entry that nobody holds"
            assert all(hold.entry is entry for hold in entry.holds)
            assert entry.key is None or self._by_key[entry.key] is entry, "two entries of the same bytes"
            assert entry.nbytes <= entry.taken_bytes
            for slab in {extent.slab for extent in entry.extents}:
                counts[slab] += 1
            for extent in entry.extents:
                if not self._slabs[extent.slab].is_adopted:
                    covered[extent.slab].append((extent.offset, extent.nbytes))
        for number, each in self._slabs.items():
            assert counts[number] == each.entries
            if each.is_adopted:
                continue
            at = 0
            for offset, nbytes in sorted(covered[number]):
                assert offset == at, "extents overlap, or bytes are lost"
                at += nbytes
            assert at == each.nbytes
            assert all(sum(left) < right[0] for left, right in pairwise(each.runs)), "runs that touch"
        assert self.free_bytes == sum(nbytes for slab in self._slabs.values() for _, nbytes in slab.runs)
        assert self._by_key.keys() == {entry.key for entry in self._entries if entry.key is not None}

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _evictable(self) -> list[Entry]:
        return [entry for entry in self._entries if not entry.needed]

    def _own_bytes_of(self, entry: Entry) -> int:
        return sum(extent.nbytes for extent in entry.extents if not self._slabs[extent.slab].is_adopted)

    def _held_where(self, is_meant: Callable[[Hold], bool]) -> Held:
        return _sum(
            (entry, any(hold.needed for hold in meant))
            for entry in self._entries
            if (meant := [hold for hold in entry.holds if is_meant(hold)])
        )

    def _add(self, entry: Entry) -> Entry:
        self._entries.add(entry)
        for slab in {extent.slab for extent in entry.extents}:
            self._slabs[slab].entries += 1
        return entry

    def _new_hold(self, entry: Entry, owner: Hashable, gpu: str) -> Hold:
        self._last_number += 1
        hold = self._holds[self._last_number] = Hold(self._last_number, owner, gpu, entry, self._tick())
        entry.holds.append(hold)
        return hold

    def _allocate(self, nbytes: int, node: int) -> list[Extent]:
        """The smallest free run that is large enough, or the largest ones until it is enough."""
        extents: list[Extent] = []
        while nbytes:
            runs = [
                (each.node != node, size, slab, offset)
                for slab, each in self._slabs.items()
                for offset, size in each.runs
            ]
            fits = min((run for run in runs if run[1] >= nbytes), default=None)
            _, size, slab, offset = fits or max(runs, key=lambda run: run[1])
            extent = Extent(slab, offset, min(size, nbytes))
            self._slabs[extent.slab].take(extent.offset, extent.nbytes)
            self.free_bytes -= extent.nbytes
            extents.append(extent)
            nbytes -= extent.nbytes
        return extents

    def _evict(self, entry: Entry) -> None:
        self.evicted_bytes += entry.taken_bytes
        for hold in list(entry.holds):
            self._drop(hold)

    def _drop(self, hold: Hold) -> None:
        del self._holds[hold.number]
        hold.entry.holds.remove(hold)
        self._free_if_unused(hold.entry)

    def _free_if_unused(self, entry: Entry) -> None:
        if entry.holds or entry.copies:
            return
        self._entries.remove(entry)
        if entry.key is not None:
            del self._by_key[entry.key]
        for slab in {extent.slab for extent in entry.extents}:
            self._slabs[slab].entries -= 1
        for extent in entry.extents:
            if not self._slabs[extent.slab].is_adopted:
                self._slabs[extent.slab].give_back(extent.offset, extent.nbytes)
                self.free_bytes += extent.nbytes


def _rounded(nbytes: int) -> int:
    return -(-nbytes // UNIT_BYTES) * UNIT_BYTES


def _sum(entries: Iterable[tuple[Entry, bool]]) -> Held:
    needed = retained = shared = 0
    for entry, is_needed in entries:
        nbytes = entry.taken_bytes
        needed += nbytes if is_needed else 0
        retained += 0 if is_needed else nbytes
        shared += nbytes if len(entry.owners) > 1 else 0
    return Held(needed, retained, shared)
