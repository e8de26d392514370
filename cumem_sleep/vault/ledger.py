"""Who keeps which bytes where in the vault's memory. Facts only: it copies nothing, and waits for nothing.

Memory comes in slabs. An *entry* is a backup: extents of slabs, shared by the *shares* of their owners, one for each
segment. A share is needed (its segment sleeps, or is about to) or retained (its segment is awake). What nobody needs
may be evicted, least recently used first, and before it what is *expendable*: nothing is evicted for that.

Entries that have a name (`Kept`) outlive their shares. They are retained; but where there are files, they are spilled
there first, and may be evicted then. With one entry all of a name goes.

Where there is room in files, sealed entries may lie there, too, or there only. What may be done to an entry:

| | in memory, not sealed | in memory, sealed | in memory and in files | in files |
|---|---|---|---|---|
| needed | write | read, share, spill | read, share, drop from memory | read, share |
| retained | evict | evict | drop from memory, evict | evict |

All but reading and sharing wait for copies to and from it. Room is made in that order: what is expendable goes, then
retained entries; then needed ones are dropped from memory, and then spilled, those that are needed longest first.

What a call costs does not depend on what else is held, unless it says so: 10 µs or so for each backup that it is about,
and 2 µs for each extent.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..errors import InvalidArgument, InvalidState, OutOfHostMemory, format_bytes
from .slabs import UNIT_BYTES, SlabRange, Slabs

MOST_NAMES = 256  # of what is kept; each may have a manifest of a MiB
FILES = 0  # the slab that is the file to spill to
_HOLDERS_NAMED = 5  # when memory is short


class Key(NamedTuple):
    """What equal backups have in common: the digest, the number of bytes, and the encoding ("" if not encoded)."""

    digest: str
    nbytes: int
    encoding: str


@dataclass(eq=False)
class Share:
    """One owner's share in an entry, for one segment.

    Attributes:
        number: what the owner calls it; it stays the same when the owner comes to share an older entry.
        gpu: on which GPU the segment is, by its UUID.
        needed: False if the owner can do without it.
    """

    number: int
    owner: Hashable
    gpu: str
    entry: Entry
    needed: bool = True


@dataclass(eq=False)
class Kept:
    """Entries that stay when their process has ended, together or not at all.

    Attributes:
        manifest: what lies where in them, in the words of who offered them.
        entries: in that order; all are sealed.
        nbytes: what they take.
    """

    manifest: str
    entries: Sequence[Entry]
    nbytes: int


@dataclass(eq=False)
class Entry:
    """A backup: where it is, what it is (`key`, once its bytes are proven), and who holds it.

    Attributes:
        nbytes: how many bytes are stored.
        taken_bytes: how many bytes of the slabs it takes.
        is_expendable: it is never sealed.
        is_distrusted: it holds other bytes than its key says. Nobody finds it, and only who needs it has it still.
        names: under which it is kept.
        copies: how many copies to and from the extents are under way: until they end nobody else gets the extents.
        spilled: where it lies in the files, or is to lie once it is written.
        is_in_files: it lies there, and all its owners know.
        used: when it was last marked, or came into its queue; a number that grows with each time.
        used_at: the same by the monotonic clock.
    """

    nbytes: int
    taken_bytes: int
    extents: list[SlabRange] = field(default_factory=list)
    key: Key | None = None
    is_expendable: bool = False
    is_distrusted: bool = False
    shares: set[Share] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    copies: int = 0
    spilled: list[SlabRange] = field(default_factory=list)
    is_in_files: bool = False
    used: int = 0
    used_at: float = 0.0
    queue: _Queue | None = None  # in which it waits for its turn to give way
    _ends: list[int] = field(default_factory=list)  # of the extents, in the backup

    @property
    def needed(self) -> bool:
        """Whether it has to stay."""
        return self.copies > 0 or any(share.needed for share in self.shares)

    @property
    def is_held(self) -> bool:
        """Whether there is anybody or anything that it is for."""
        return bool(self.shares or self.copies or self.names)

    @property
    def owners(self) -> set[Hashable]:
        """Who holds it."""
        return {share.owner for share in self.shares}

    @cached_property
    def in_files(self) -> Entry:
        """The same bytes, where they lie once they are in files only."""
        return Entry(self.nbytes, self.taken_bytes, self.spilled)

    def ranges(self, offset: int, nbytes: int) -> Iterator[SlabRange]:
        """Where `nbytes` of the backup, from `offset` on, lie, in order."""
        if len(self._ends) != len(self.extents):
            self._ends = list(accumulate(extent.nbytes for extent in self.extents))
        at = bisect_right(self._ends, offset)
        while nbytes > 0 and at < len(self.extents):
            extent = self.extents[at]
            skipped = offset - (self._ends[at] - extent.nbytes)
            size = min(nbytes, extent.nbytes - skipped)
            yield SlabRange(extent.slab, extent.offset + skipped, size)
            offset, nbytes, at = offset + size, nbytes - size, at + 1


class _Queue(OrderedDict[Entry, None]):
    """Entries that may give way, the least recently used first, and how many bytes they take."""

    nbytes = 0


_Group = tuple[Hashable, str | None]  # an owner and a GPU; None: all of them


class HeldBytes(NamedTuple):
    """What an owner, a GPU or the whole vault holds, as the status says it.

    Attributes:
        asleep_bytes: of backups that are needed, as a rule because their segments sleep.
        awake_bytes: of the other backups, which may be evicted.
        shared_bytes: how many of both are held by several processes.
        spilled_bytes: how many of both lie in files only.
    """

    asleep_bytes: int = 0
    awake_bytes: int = 0
    shared_bytes: int = 0
    spilled_bytes: int = 0


class Ledger:
    """The slabs of one vault, its entries and their shares. An owner is any hashable object of the caller's.

    Args:
        file_bytes: how much may be spilled.
        freed: is called with ranges of the files that hold nothing any more, before anything new is placed there.
    """

    def __init__(self, file_bytes: int = 0, freed: Callable[[Sequence[SlabRange]], None] = lambda _: None) -> None:
        self._freed = freed
        self._entries: set[Entry] = set()
        self._expendable, self._evictable = _Queue(), _Queue()  # in memory
        self._droppable, self._spillable = _Queue(), _Queue()  # likewise; needed
        self._unsealed = _Queue()  # likewise; they may be spilled once they are sealed
        self._evictable_in_files = _Queue()  # and nowhere else
        self._shares: dict[Hashable, dict[int, Share]] = {}  # by owner
        self._by_key: dict[Key, Entry] = {}  # but those that are distrusted
        self.kept: OrderedDict[str, Kept] = OrderedDict()  # by name, the least recently used first
        self._last_number = self._clock = self.kept_bytes = 0
        self.claims: Counter[Hashable] = Counter()  # bytes that are set aside for what an owner reserves next
        self.evicted_bytes = 0
        self.memory, self.files = Slabs(), Slabs()
        if file_bytes >= UNIT_BYTES:
            self.files.add(FILES, file_bytes // UNIT_BYTES * UNIT_BYTES)

    # Entries

    def available_bytes(self, owner: Hashable = None, *, expendable: bool = False) -> int:
        """What the owner could reserve: what is free, and not set aside for others.

        But for what is expendable itself, that includes what may be evicted.
        """
        others = self.claims.total() - self.claims[owner]
        may_go = 0 if expendable else self._expendable.nbytes + self._evictable.nbytes + self._droppable.nbytes
        return max(0, self.memory.free_bytes + may_go - others)

    def reserve(
        self, owner: Hashable, gpu: str, sizes: Sequence[int], node: int = -1, *, expendable: bool = False
    ) -> list[Share]:
        """Reserve an entry of each size for the owner, which needs them: all of them, or none.

        Args:
            node: the NUMA node to be preferred.
            expendable: the owner can do without them from the beginning.

        Raises:
            OutOfHostMemory: too little is free, and too little may be evicted: nothing has changed.
            InvalidArgument: a size is not positive. Likewise.
        """
        needed = needed_bytes(sizes)
        available = self.available_bytes(owner, expendable=expendable)
        if needed > available:
            raise OutOfHostMemory(needed, available, "vault")
        while self.memory.free_bytes < needed:
            self._evict(next(iter(self._expendable or self._evictable or self._droppable)))
        entries = [Entry(size, _rounded(size), is_expendable=expendable) for size in sizes]
        for entry in entries:
            entry.extents = self.memory.take(entry.taken_bytes, node)
        self._entries.update(entries)
        return [self._new_share(entry, owner, gpu) for entry in entries]

    def find(self, owner: Hashable, gpu: str, key: Key) -> Share | None:
        """A new share on the entry of these bytes, if there is one; the owner needs it."""
        entry = self._by_key.get(key)
        return None if entry is None else self._new_share(entry, owner, gpu)

    def distrust(self, owner: Hashable, numbers: Iterable[int]) -> None:
        """These hold other bytes than their keys say: nobody finds them from now on, and who can do without has them
        no more. Those that the owner does not have, or that are not sealed, are passed over.
        """
        held = [share.entry for number in numbers if (share := self.find_share(owner, number))]
        for entry in dict.fromkeys(held):
            if entry.key is None or entry.is_distrusted:
                continue
            entry.is_distrusted = True
            del self._by_key[entry.key]
            for name in [*entry.names]:
                self.forget(name)
            for share in [share for share in entry.shares if not share.needed]:
                self._leave(share)

    def seal(self, owner: Hashable, number: int, key: Key) -> Share:
        """Note that the entry has the bytes of this key: from now on it may be shared, and nobody writes to it.

        If there is an older entry of the same bytes, the share moves to that one, and this entry is given back.

        Raises:
            InvalidState: the owner has no such share, the entry is sealed, or bytes are still being copied there.
        """
        share = self.sealable(owner, number)
        entry, older = share.entry, self._by_key.get(key)
        if older is None:
            entry.key = key
            self._by_key[key] = entry
            self._settle(entry)
        else:
            self._leave(share)
            self._join(share, older)
        return share

    def share(self, owner: Hashable, number: int) -> Share:
        """The share of that number. Raises InvalidState: the owner has none, or not any more."""
        share = self.find_share(owner, number)
        if share is None:
            raise InvalidState(f"backup {number} is not held by this process, or not any more")
        return share

    def find_share(self, owner: Hashable, number: int) -> Share | None:
        """The share of that number, if the owner has it."""
        return self._shares.get(owner, {}).get(number)

    def writable(self, owner: Hashable, number: int) -> Share:
        """As `share`, for an entry to write to. Raises InvalidState: it is sealed, so others may rely on its bytes."""
        share = self.share(owner, number)
        if share.entry.key is not None:
            raise InvalidState(f"backup {number} is sealed: reserve another one for other bytes")
        return share

    def sealable(self, owner: Hashable, number: int) -> Share:
        """As `writable`, for an entry to seal. Raises InvalidState: bytes are still being copied there."""
        share = self.writable(owner, number)
        if share.entry.copies:
            raise InvalidState(f"backup {number} is still being written: it cannot be sealed yet")
        if share.entry.is_expendable:
            raise InvalidState(f"backup {number} is expendable: nobody shares it")
        return share

    def mark(self, owner: Hashable, numbers: Iterable[int], needed: bool) -> list[int]:
        """Note that the owner needs these, or can do without them. Returns those that have been evicted meanwhile."""
        gone = []
        for number in numbers:
            share = self.find_share(owner, number)
            if share is None:
                gone.append(number)
            else:
                share.needed = needed
                self._settle(share.entry)
                self._touch(share.entry)
                if share.entry.is_distrusted and not needed:
                    self._leave(share)
                    gone.append(number)
        return gone

    def release(self, owner: Hashable, numbers: Iterable[int]) -> None:
        """Give these shares back; those that the owner does not have are passed over."""
        for number in numbers:
            share = self.find_share(owner, number)
            if share is not None:
                self._leave(share)

    # Names

    def keep(self, name: str, manifest: str, owner: Hashable, numbers: Sequence[int], most_bytes: int) -> None:
        """Keep these entries under a name, in place of what had it. What was used least recently goes, until all that
        is kept takes at most so many bytes.

        Raises:
            InvalidState: the owner has no such share, or an entry is not sealed or holds other bytes than it says.
            OutOfHostMemory: these alone take more. In both cases nothing has changed.
        """
        entries = [self.share(owner, number).entry for number in numbers]
        for number, entry in zip(numbers, entries, strict=True):
            if entry.key is None or entry.is_distrusted:
                raise InvalidState(f"backup {number} is not proven: it cannot be kept under a name")
        needed = sum(entry.taken_bytes for entry in set(entries))
        if needed > most_bytes:
            raise OutOfHostMemory(needed, most_bytes, "vault", "its --keep-weights is all that it keeps under names")
        self.forget(name)
        for entry in set(entries):
            self.kept_bytes += 0 if entry.names else entry.taken_bytes
            entry.names.add(name)
            self._settle(entry)
        self.kept[name] = Kept(manifest, entries, needed)
        while self.kept_bytes > most_bytes or len(self.kept) > MOST_NAMES:
            self.forget(next(iter(self.kept)))

    def adopt(self, owner: Hashable, gpu: str, name: str) -> tuple[str, list[Share]] | None:
        """What is kept under a name: its manifest, and a new share on each entry, which the owner needs."""
        if name not in self.kept:
            return None
        self.kept.move_to_end(name)
        kept = self.kept[name]
        return kept.manifest, [self._new_share(entry, owner, gpu) for entry in kept.entries]

    def forget(self, name: str) -> bool:
        """Keep that no longer; returns whether it was kept. Who has a share has it still."""
        kept = self.kept.pop(name, None)
        for entry in set(kept.entries) if kept else ():
            entry.names.discard(name)
            self.kept_bytes -= 0 if entry.names else entry.taken_bytes
            self._settle(entry)
        return kept is not None

    def forget_for_room(self, nbytes: int) -> bool:
        """Forget a name whose entries would be spilled first, the one used least recently, if such take so much, with
        what else may be spilled where files have room.
        """
        stuck = {
            name: {e for e in kept.entries if e.queue is self._spillable and not e.needed}
            for name, kept in self.kept.items()
        }
        stuck_bytes = sum(entry.taken_bytes for entry in set().union(*stuck.values()))
        room = self.files.free_bytes + sum(entry.taken_bytes for entry in self._retained_in_files())
        if not stuck_bytes or stuck_bytes + min(room, self._spillable.nbytes - stuck_bytes) < nbytes:
            return False
        return self.forget(next(name for name, entries in stuck.items() if entries))

    def drop_owner(self, owner: Hashable) -> None:
        """Give back what the owner has."""
        del self.claims[owner]
        self.release(owner, self.numbers(owner))

    def begin_copy(self, entry: Entry) -> None:
        """Keep the extents of the entry until `end_copy`, even if all its shares are released."""
        entry.copies += 1
        self._settle(entry)

    def end_copy(self, entry: Entry) -> None:
        """One copy fewer is under way."""
        entry.copies -= 1
        self._settle(entry)

    # Files

    @property
    def spillable_bytes(self) -> int:
        """What `to_spill` chooses from."""
        return self._spillable.nbytes

    def to_spill(self, nbytes: int, may: Callable[[Entry], bool]) -> list[Entry]:
        """What to spill so that so much more can be dropped from memory, or as much as there is, and room in files.

        Copies of some may be under way. Unlike other calls this one takes longer where more is held.

        Args:
            may: whether an entry may be spilled.
        """
        room = self.files.free_bytes + sum(entry.taken_bytes for entry in self._retained_in_files())
        chosen: list[Entry] = []
        for entry in self._spillable:
            if nbytes <= 0:
                break
            if entry.taken_bytes <= room and may(entry):
                chosen.append(entry)
                room -= entry.taken_bytes
                nbytes -= entry.taken_bytes
        return chosen

    def may_seal_enough(self, nbytes: int, since: float, may: Callable[[Entry], bool]) -> bool:
        """Whether so much more can be dropped from memory once what is not sealed yet is, and not before.

        Takes longer where more of that is held.

        Args:
            since: what was marked before is not about to be sealed.
            may: whether an entry may be spilled once it is sealed.
        """
        missing = nbytes - self._spillable.nbytes
        if missing <= 0 or nbytes > self.files.free_bytes + self._evictable_in_files.nbytes:
            return False
        for entry in reversed(self._unsealed):
            if missing <= 0 or entry.used_at < since:
                break
            missing -= entry.taken_bytes if may(entry) else 0
        return missing <= 0

    def evict_in_files(self, nbytes: int) -> bool:
        """Evict what is merely retained there until so much more is free, or as much as there is; returns whether any
        was.
        """
        before = self.files.free_bytes
        while self.files.free_bytes - before < nbytes and (retained := next(self._retained_in_files(), None)):
            while retained.shares or retained.names:
                self._evict(retained)
        return self.files.free_bytes > before

    def begin_spill(self, entry: Entry) -> bool:
        """Set its place in files aside, and evict what is merely retained there; a copy of it is under way then.

        Returns:
            False if nobody holds it by now: what was evicted may have had its name.
        """
        if not entry.is_held:
            return False
        self.begin_copy(entry)
        self.evict_in_files(entry.taken_bytes - self.files.free_bytes)
        entry.spilled = self.files.take(entry.taken_bytes)
        self._settle(entry)
        return True

    def end_spill(self, entry: Entry, *, is_written: bool) -> None:
        """The copy is not under way any more. If it `is_written`, its owners know, and look for it in files only."""
        if is_written:
            entry.is_in_files = True
        else:
            self._free_in_files(entry)
        self.end_copy(entry)

    def touch(self, entries: Iterable[Entry]) -> int:
        """They are about to be used, so they give way after all others. Returns the clock before."""
        before = self._clock
        for entry in entries:
            self._touch(entry)
        return before

    def begin_read_ahead(self, entry: Entry, unused_since: int) -> list[SlabRange]:
        """Memory to read it into from its files; a copy of it is under way.

        Args:
            unused_since: what is in files and was used after that is not dropped for it.

        Returns:
            Nothing if there is too little.
        """
        if not (entry.needed and entry.is_in_files and not entry.extents and not entry.copies):
            return []
        missing = entry.taken_bytes + self.claims.total() - self.memory.free_bytes
        dropped: list[Entry] = []
        for each in self._droppable:
            if missing <= 0 or each.used > unused_since:
                break
            dropped.append(each)
            missing -= each.taken_bytes
        if missing > 0:
            return []
        for each in dropped:
            self._evict(each)
        extents = self.memory.take(entry.taken_bytes)
        self.begin_copy(entry)
        return extents

    def end_read_ahead(self, entry: Entry, extents: list[SlabRange], *, is_read: bool) -> None:
        """The copy is not under way any more. If it `is_read`, it is in memory, too."""
        if is_read:
            entry.extents = extents
        else:
            self.memory.give_back(extents)
        self.end_copy(entry)

    def _retained_in_files(self) -> Iterator[Entry]:
        yield from self._evictable_in_files
        yield from (entry for entry in self._evictable if entry.is_in_files)

    # What is held

    def held(self) -> defaultdict[_Group, HeldBytes]:
        """What each owner holds for segments of each GPU; None: of all owners, of all GPUs. Each entry counts once.

        Takes longer where more is held.
        """
        held: defaultdict[_Group, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for entry in self._entries:
            needed: dict[_Group, bool] = {(None, None): True} if entry.copies else {}  # a copy is nobody's
            for share in entry.shares:
                for group in ((None, None), (share.owner, None), (None, share.gpu), (share.owner, share.gpu)):
                    needed[group] = needed.get(group, False) or share.needed
            if entry.names:
                needed.setdefault((None, None), False)
            is_shared = len(entry.owners) > 1
            for each, is_needed in needed.items():
                sums = held[each]
                sums[0 if is_needed else 1] += entry.taken_bytes
                sums[2] += entry.taken_bytes if is_shared else 0
                sums[3] += 0 if entry.extents else entry.taken_bytes
        return defaultdict(HeldBytes, {group: HeldBytes(*sums) for group, sums in held.items()})

    @property
    def saved_bytes(self) -> int:
        """What is not held a second time because it is shared. Takes longer where more is held."""
        return sum(entry.taken_bytes * (len(entry.shares) - 1) for entry in self._entries if entry.shares)

    def owners(self, owner: Hashable, numbers: Iterable[int]) -> list[int]:
        """How many owners share each of these entries; 0 where the owner has no such share, or not any more."""
        shares = [self.find_share(owner, number) for number in numbers]
        return [len(share.entry.owners) if share else 0 for share in shares]

    def shares(self, owner: Hashable) -> list[Share]:
        """All that the owner has."""
        return list(self._shares.get(owner, {}).values())

    def numbers(self, owner: Hashable) -> list[int]:
        """Of all shares that the owner has."""
        return list(self._shares.get(owner, ()))

    def who_holds(self, names: Mapping[Hashable, str]) -> str:
        """Which of these owners hold most, and how much, in words."""
        all_held = self.held()
        held = [(all_held[owner, None].asleep_bytes, name) for owner, name in names.items()]
        held.sort(key=lambda each: -each[0])
        said = [f"{name} holds {format_bytes(nbytes)}" for nbytes, name in held[:_HOLDERS_NAMED] if nbytes]
        return ", ".join(said) or "nobody holds anything"

    def _new_share(self, entry: Entry, owner: Hashable, gpu: str) -> Share:
        self._last_number += 1
        share = Share(self._last_number, owner, gpu, entry, needed=not entry.is_expendable)
        self._join(share, entry)
        return share

    def _join(self, share: Share, entry: Entry) -> None:
        """The share is one of this entry from here on."""
        share.entry = entry
        self._shares.setdefault(share.owner, {})[share.number] = share
        entry.shares.add(share)
        self._settle(entry)

    def _leave(self, share: Share) -> None:
        """The share is none of its entry any more, which goes if it was the last one."""
        entry, of_owner = share.entry, self._shares[share.owner]
        del of_owner[share.number]
        if not of_owner:
            del self._shares[share.owner]
        entry.shares.remove(share)
        self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """Let it wait where it belongs now: after all others, if that is another queue. If it is nobody's, it goes."""
        if not entry.is_held:
            self._free(entry)
        queue = self._queue_for(entry)
        if queue is entry.queue:
            return
        if entry.queue is not None:
            del entry.queue[entry]
            entry.queue.nbytes -= entry.taken_bytes
        entry.queue = queue
        if queue is not None:
            queue[entry] = None
            queue.nbytes += entry.taken_bytes
            self._touch(entry)

    def _queue_for(self, entry: Entry) -> _Queue | None:
        """As the table above says."""
        if not entry.is_held:
            return None
        is_to_be_spilled = bool(entry.names) and self.files.nbytes > 0 and not entry.is_in_files
        if not entry.needed and not is_to_be_spilled:
            if entry.is_expendable:
                return self._expendable
            return self._evictable if entry.extents else self._evictable_in_files
        if not entry.extents:
            return None
        if entry.key is None:
            return None if entry.is_expendable else self._unsealed
        if not entry.spilled:
            return self._spillable  # once no copy of it is under way
        return self._droppable if entry.is_in_files and not entry.copies else None

    def _touch(self, entry: Entry) -> None:
        """It was used: if it waits for its turn to give way, then after all others."""
        if entry.queue is not None:
            self._clock += 1
            entry.used, entry.used_at = self._clock, time.monotonic()
            entry.queue.move_to_end(entry)

    def _evict(self, entry: Entry) -> None:
        """Drop it from memory, if it is in files, too; otherwise whoever had it finds it gone."""
        if entry.is_in_files and entry.extents:
            self.memory.give_back(entry.extents)
            entry.extents, entry._ends = [], []
            self._settle(entry)
            return
        for share in list(entry.shares):
            self._leave(share)
        for name in [*entry.names]:
            self.forget(name)
        self.evicted_bytes += entry.taken_bytes

    def _free(self, entry: Entry) -> None:
        self._entries.remove(entry)
        if entry.key is not None and not entry.is_distrusted:
            del self._by_key[entry.key]
        self.memory.give_back(entry.extents)
        self._free_in_files(entry)

    def _free_in_files(self, entry: Entry) -> None:
        self.files.give_back(entry.spilled)
        if entry.spilled:
            self._freed(entry.spilled)
        entry.spilled, entry.is_in_files = [], False


def needed_bytes(sizes: Sequence[int]) -> int:
    """What entries of these sizes take. Raises InvalidArgument: a size is not positive."""
    if min(sizes, default=1) < 1:
        raise InvalidArgument(f"size={min(sizes)}: expected at least 1")
    return sum(map(_rounded, sizes))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // UNIT_BYTES) * UNIT_BYTES
