"""The tier of the host: the vault keeps the bytes and copies them, and processes that sleep pin nothing.

What a vault that has ended has kept, and while none answers, is read from its slabs by this process.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from .. import _core
from ..core import log
from ..core.extents import Extent, Lane, LaneGroup, PieceRows, PieceTable
from ..core.pinned import pinned_block
from ..errors import CumemSleepError, OutOfHostMemory, VaultError, VaultLost, VaultUnavailable
from ..report import BackupPlace
from ..settings import Settings
from ..vault import protocol
from ..vault.client import DEADLINE_S, LentMemory, VaultBackup, VaultClient
from ..vault.files import read_into
from ..vault.ledger import FILES, Key
from ..vault.slabs import SlabRange
from .tier import Content, Footprint, HostLimit, NotYet, Tier, budget_limits

_STAGING_BYTES = 16 << 20
_ENOUGH_BYTES = 1 << 62  # the vault finds room in its slabs


class VaultTier(Tier):
    """Extents are backups of the vault's, one for each segment."""

    def __init__(self, settings: Settings, path: Path | None) -> None:
        self._settings = settings
        self._path = path
        self._client: VaultClient | None = None
        self._held: set[VaultBackup] = set()
        self._left: list[VaultClient] = []  # of vaults that have ended, in whose slabs backups lie still
        self._loans: set[_core.Loan] = set()  # of memory of this process that the vault has, or may have still
        self._gpus: dict[int, str] = {}
        self._relays: set[str] = set()  # GPUs whose links carried copies of the last operation
        self._warned = False

    @property
    def bytes(self) -> int:  # noqa: D102
        return sum(extent.bytes for extent in self._held)

    def limits(self, needed_bytes: int | None = None) -> list[HostLimit]:  # noqa: ARG002, D102
        return budget_limits(self._settings, self.bytes)

    def place(self) -> BackupPlace:  # noqa: D102
        if self._client is None:
            return BackupPlace(str(self._path or protocol.default_socket()))
        return BackupPlace(str(self._client.path), str(self._client.lost or ""), tuple(sorted(self._relays)))

    def footprints(self, backups: Sequence[Sequence[Extent]]) -> list[Footprint]:  # noqa: D102
        self.hear()
        counted: set[tuple[int, tuple[SlabRange, ...]]] = set()
        owners = self._owners([extent for extents in backups for extent in _mine(extents)])
        held = []
        for extents in backups:
            shared_by = [owners.get(extent, 1) for extent in _mine(extents)]
            if 0 in shared_by:
                held.append(Footprint(is_gone=True))
                continue
            places = {(id(extent.slabs), extent.extents) for extent in _mine(extents)} - counted
            counted |= places
            nbytes = sum(there.nbytes for _, ranges in places for there in ranges if there.slab != FILES)
            is_shared = max(shared_by, default=1) > 1
            held.append(Footprint(nbytes, vault_bytes=nbytes, shared_bytes=nbytes if is_shared else 0))
        return held

    def _owners(self, extents: Sequence[VaultBackup]) -> dict[VaultBackup, int]:
        """How many processes share each of these, of those that the vault keeps that there is now; 0: it evicted it."""
        client = self._client
        if client is None:
            return {}
        known = [extent for extent in extents if self._keeps(extent)]
        owners = client.owners(known) if known else None
        return {} if owners is None else dict(zip(known, owners, strict=True))

    @property
    def extent_bytes(self) -> int:  # noqa: D102
        return _ENOUGH_BYTES

    def reserve(self, device: int, sizes: Sequence[int], *, beside_work: bool = False) -> Sequence[Extent]:  # noqa: D102
        client = self.client()
        backups = (client.reserve_now if beside_work else client.reserve)(self.gpu(device), sizes)
        if backups is None:
            raise NotYet
        self._held.update(backups)
        return backups

    def reserve_expendable(self, device: int, sizes: Sequence[int]) -> Sequence[Extent]:  # noqa: D102
        budgets = self.limits()
        if any(limit.available_bytes < sum(sizes) for limit in budgets):
            raise OutOfHostMemory(sum(sizes), budgets[0].available_bytes, budgets[0].name)
        client = self.client()
        backups = client.reserve_now(self.gpu(device), sizes, expendable=True)
        if backups is None:
            raise OutOfHostMemory(sum(sizes), client.expendable_bytes(), "vault", "it is still taking memory")
        self._held.update(backups)
        for backup in backups:
            backup.needed = False
        return backups

    def expendable_room(self, sharers: int = 1) -> int:  # noqa: D102
        try:
            free_bytes = self.client().expendable_bytes()
        except (CumemSleepError, OSError):
            return 0
        return min([free_bytes // sharers, *(limit.available_bytes for limit in self.limits())])

    def has_free(self, nbytes: int) -> bool:
        """Whether this much is free and ready, or soon will be: so an operation may reserve it bit by bit."""
        return self.client().free_bytes() >= nbytes

    def can_rewrite(self, extents: Sequence[Extent]) -> bool:
        """Whether a backup in these extents may be rewritten: not if others share them."""
        return all(each.sealed is None and self._keeps(each) for each in _mine(extents))

    def find(self, device: int, contents: Sequence[Content]) -> list[tuple[Extent, ...] | None]:
        """For each content, sealed extents that hold it (the caller shares them from now on), or None."""
        keys = [Key(str(content.digest), content.bytes, "") for content in contents]
        found = self.client().find(self.gpu(device), keys)
        for backup, key in zip(found, keys, strict=True):
            if backup is not None:
                backup.sealed = key
                self._held.add(backup)
        return [None if backup is None else (backup,) for backup in found]

    def seal(self, backups: Sequence[tuple[Sequence[Extent], Content]]) -> None:
        """These extents have been written and verified to hold that content: others may share them from now on.

        Raises:
            CumemSleepError: the caller must no longer trust them.
        """
        client = self.client()
        described = []
        for extents, content in backups:
            (extent,) = _mine(extents)
            self.check(extent, client)
            if extent.sealed is None:
                # Only bytes that are stored as they are may be shared: the same bytes can be encoded in several ways,
                # and not everybody can decode them. Under a name of its own, a backup can be spilled still.
                encoding = f"private {uuid.uuid4()}" if content.is_encoded else ""
                extent.sealed = Key(str(content.digest), content.bytes, encoding)
                described.append((extent, extent.sealed))
        if described:
            client.seal(described)

    def keeps_names(self) -> bool:
        """Whether the vault keeps backups under names when their process has ended. Raises VaultError: none answers."""
        return self.client().keep_bytes > 0

    def kept_names(self) -> frozenset[str]:
        """The names that something is kept under. Raises VaultError: none answers."""
        return frozenset(each["name"] for each in self.client().status()["kept"])

    def keep(self, name: str, manifest: str, backups: Sequence[Sequence[Extent]]) -> None:
        """Have these, which are sealed, kept under a name. Raises as `VaultClient.keep`."""
        client = self.client()
        mine = [extent for extents in backups for extent in _mine(extents)]
        for extent in mine:
            self.check(extent, client)
        client.keep(name, manifest, mine)

    def adopt(self, device: int, name: str) -> tuple[str, Sequence[Extent]] | None:
        """What is kept under a name, and its manifest, for copies to `device`; the caller shares the extents then."""
        found = self.client().adopt(self.gpu(device), name)
        if found is not None:
            self._held.update(found[1])
        return found

    def set_needed(self, backups: Sequence[Sequence[Extent]], *, needed: bool) -> list[int]:
        """These backups, each given by its extents, are needed from now on, or merely retained, and may be evicted.

        Returns:
            The indices of those that have been evicted.
        """
        changing = [
            (place, extent)
            for place, extents in enumerate(backups)
            for extent in _mine(extents)
            if extent.needed is not needed
        ]
        client = self._client
        lost = client.lost if client is not None else None
        # Of what was not needed nobody knows whether the vault has evicted it before it was lost. What a vault that has
        # ended kept for who does not need it, no other one has.
        is_over = lost is not None and not lost.may_go_on
        doubtful = {place for place, extent in changing if needed or extent.is_lost or is_over}
        for _, extent in changing:  # whatever becomes of the question: what is not needed, the vault may evict now
            extent.needed = extent.needed and needed
        if client is None or lost is not None:
            return sorted(doubtful)
        known = [extent for _, extent in changing if not extent.is_lost]
        try:
            gone = client.mark(known, needed) if known else []
        except VaultError:  # lost, or it cannot be heard because this process can open no more files
            return sorted(doubtful)
        for extent in known:
            extent.needed = needed
        return sorted({place for place, extent in changing if extent.is_lost or extent in gone})

    def mark_corrupt(self, backups: Sequence[Sequence[Extent]]) -> None:
        """These backups hold other bytes than those that were verified: nobody else is to share them."""
        mine = [extent for extents in backups for extent in _mine(extents)]
        for extent in mine:  # a vault that is silent is told when it goes on
            extent.is_distrusted = True
        if self._client is not None:
            with suppress(VaultError):
                self._client.distrust([extent for extent in mine if self._keeps(extent)])

    def release(self, extents: Iterable[Extent]) -> None:  # noqa: D102
        mine = _mine(extents)
        self._held.difference_update(mine)
        for client in [*self._left, *([] if self._client is None else [self._client])]:
            client.release([extent for extent in mine if extent.slabs is client.slabs])
        for client in [client for client in self._left if not client.slabs.by_number]:
            self._left.remove(client)
            client.close()

    def content(self, extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:  # noqa: D102
        (mine,) = _mine([extent])
        self.hear()
        while True:
            place = mine.extents
            ranges = mine.ranges(offset, nbytes)
            content = b"".join(_read_all(mine.descriptor(slab), size, start) for slab, start, size in ranges)
            self.hear()
            if mine.extents == place:
                return np.frombuffer(content, np.uint8)

    def hear(self) -> None:
        """Where backups lie by now. The vault says so before it gives their memory to others."""
        if self._client is not None:
            self._client.slabs.hear()

    def lane_group(self) -> VaultLaneGroup:  # noqa: D102
        self._relays.clear()
        return VaultLaneGroup(self)

    def relayed(self, gpus: Iterable[str]) -> None:
        """The links of these GPUs have carried copies."""
        self._relays.update(gpus)

    def lend(self, address: int, *, filled: bool) -> _core.Loan:
        """The vault is about to get the memory under `address`."""
        loan = _core.lend_memory(address, filled)
        self._loans.add(loan)
        return loan

    def taken_back(self, loans: Iterable[_core.Loan]) -> None:
        """The vault has that memory no more."""
        for loan in loans:
            loan.end()
        self._loans.difference_update(loans)

    def regain(self) -> None:
        """Get back, if that is possible now, device memory that the vault still has after a failure."""
        if self._client is None or not self._loans:
            return
        if self._client.is_gone:
            self.taken_back([*self._loans])
        else:
            with suppress(CumemSleepError, OSError):
                self.client()

    def read_ahead(self) -> None:
        """What sleeps is about to be woken: let it come from files into memory. Returns at once."""
        if self._client is not None and self._client.slabs.moves:
            with suppress(VaultError):
                self._client.read_ahead()

    def leave(self) -> None:
        """Let the vault go, for no extent is left, and no memory that it might have. It is found anew."""
        for client in [*self._left, *([] if self._client is None else [self._client])]:
            client.close()
        self._client, self._left = None, []
        self.taken_back([*self._loans])

    def gpu(self, device: int) -> str:
        """The UUID of `device`: processes number GPUs differently."""
        if device not in self._gpus:
            self._gpus[device] = _core.device_info(device).uuid
        return self._gpus[device]

    def client(self) -> VaultClient:
        """The connection, made at the first use, and anew when the vault goes on, or was replaced by another.

        Raises:
            VaultUnavailable: no vault answers.
            VaultLost: the one that there was is silent still. It may yet do what it was asked, so it cannot be left.
        """
        before = self._client
        if before is None:
            self._client = self._connect(None)
            return self._client
        lost = before.lost
        if lost is None:
            return before
        if lost.may_go_on and before.is_silent:
            raise lost.with_traceback(None)
        client = self._connect(before)
        if before.instance == client.instance:
            self._resume(before, client)
        else:
            self._leave(before, client)
        self._warned = False
        return client

    def _connect(self, before: VaultClient | None) -> VaultClient:
        deadline_s = DEADLINE_S if before is None else before.deadline_s
        client = VaultClient(self._path, _process_name(), deadline_s, _core.stop_if_asked, before)
        try:
            here = {self.gpu(device) for device in range(_core.device_count())}
        except BaseException:
            client.close()
            raise
        if here & set(client.gpus):
            return client
        client.close()
        raise VaultUnavailable(
            f"the vault at {client.path} serves {', '.join(client.gpus) or 'no GPU'}, and this process has"
            f" {', '.join(sorted(here))}: give the vault the GPUs that this process uses (--gpus)"
        )

    def _resume(self, before: VaultClient, client: VaultClient) -> None:
        """The vault was stopped, or the connection has broken, and it is there again, with what it had."""
        kept = [extent for extent in self._held if extent.slabs is before.slabs and not extent.is_lost]
        self._client = client  # whatever becomes of this: it has the slabs from here on
        gone = client.succeed(before, kept)
        self.taken_back([*self._loans])
        for extent in kept:
            extent.is_lost = extent in gone
        client.distrust([extent for extent in kept if extent.is_distrusted])
        retained = [extent for extent in kept if not extent.needed and not extent.is_lost]
        evicted = client.mark(retained, needed=False)  # that may not have been heard
        for extent in retained:
            extent.is_lost = extent in evicted
        log.info("the vault at %s answers again: it keeps all backups that there were", client.path)

    def _leave(self, before: VaultClient, client: VaultClient) -> None:
        """The vault has ended, and another one, which has nothing of what it kept, serves its socket."""
        if before.lost is not None and before.lost.may_go_on:
            client.close()
            raise before.lost.with_traceback(None)
        self.hear()
        self.taken_back([*self._loans])
        for extent in self._held:
            extent.is_lost = True
        self._left.append(before)  # its slabs are read as long as backups lie there
        self._client = client
        log.info("another vault serves %s: what the one before kept is read by this process itself", client.path)

    def reader(self) -> VaultClient | None:
        """The connection for reading backups back; None where this process has to do it itself."""
        try:
            return self.client()
        except (CumemSleepError, OSError) as error:
            if self._client is None:
                raise
            if not self._warned:
                self._warned = True
                log.warning("backups are read by this process itself, more slowly, until a vault answers: %s", error)
            return None

    def _keeps(self, extent: VaultBackup) -> bool:
        """Whether the vault that was connected last keeps it."""
        return self._client is not None and extent.slabs is self._client.slabs and not extent.is_lost

    @staticmethod
    def check(extent: VaultBackup, client: VaultClient) -> None:
        """It is this vault that keeps the extent.

        Raises:
            VaultLost: it was another one.
        """
        if extent.slabs is not client.slabs or extent.is_lost:
            raise VaultLost("the vault was replaced by another in the middle of this: call again")


class VaultLaneGroup(LaneGroup):
    """The lanes of one operation. What the vault was lent for them it has given back when this is left.

    Unless it was given up: then the loans stay open, and no wake uses memory that the vault may still fill.
    """

    most_lanes = 8  # batches end in order, while pieces of several are on several links

    def __init__(self, tier: VaultTier) -> None:
        self.tier = tier
        self._lent: dict[int, LentMemory] = {}  # by base address
        self._loans: dict[tuple[int, bool], _core.Loan] = {}  # by base address, and whether the vault fills it
        self._client: VaultClient | None = None
        self._reads_itself = False
        self._begun: list[int] = []  # copies
        self._returning: list[int] = []  # requests by which lent memory is given back
        self._slabs: dict[tuple[int, int], _core.HostBlock] = {}  # by the table's id and the number there
        self._staging: _core.HostBlock | None = None
        self._stack = ExitStack()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        begun, self._begun = self._begun, []
        with self._stack:
            if self._client is None:
                return
            if kind is None:
                self._take_back(self._client)
                return
            # What an error left in flight has to end before its memory can come back. The first error tells more.
            waits: list[Callable[[], object]] = [
                *(partial(self._client.wait, [request]) for request in begun),
                partial(self._take_back, self._client),
            ]
            for wait in waits:
                try:
                    wait()
                except VaultLost:
                    return
                except CumemSleepError:
                    pass

    def _take_back(self, client: VaultClient) -> None:
        """Return when the vault has given all of it back."""
        self.end()
        client.wait(self._returning)
        self.tier.taken_back(self._loans.values())

    def done_with(self, addresses: Iterable[int]) -> None:
        """Let the vault begin to give this memory back: it needs 54 µs for each segment (`vault_four_slots.json`)."""
        mine = [address for address in addresses if address in self._lent]
        lent = [self._lent[address] for address in mine]
        if self._client is not None and (request := self._client.begin_to_take_back(lent)) is not None:
            self._returning.append(request)
        for address in mine:  # not before: what could not be asked for is asked for again at the end
            del self._lent[address]

    def end(self) -> None:
        """Let it begin to give all of it back."""
        self.done_with([*self._lent])

    def lane(self, stream: _core.CopyStream) -> VaultLane:
        """A lane in the order of `stream`."""
        return VaultLane(stream, self)

    def lend(self, client: VaultClient, address: int, device: int) -> tuple[LentMemory, int]:
        """The memory under `address`, for the vault to map, and the offset of `address` in it."""
        for base, lent in self._lent.items():
            if base <= address < base + lent.nbytes:
                return lent, address - base
        descriptor, base, nbytes = _core.export_memory(address)
        self._client = client
        lent = client.lend(self.tier.gpu(device), descriptor, nbytes)
        self.note_loan(base, filled=False)
        self._lent[base] = lent
        return lent, address - base

    def note_loan(self, base: int, *, filled: bool) -> None:
        """The vault has the memory from `base` on, and is about to write to it if it is to be `filled`."""
        if (base, filled) not in self._loans:
            self._loans[base, filled] = self.tier.lend(base, filled=filled)

    def reader(self, extent: VaultBackup) -> VaultClient | None:
        """Who reads `extent`; None: this process. A vault that does not answer is asked once for all copies."""
        client = None if self._reads_itself else self.tier.reader()
        self._reads_itself = client is None
        return client if client is not None and extent.slabs is client.slabs and not extent.is_lost else None

    def begin(self, client: VaultClient, extent: VaultBackup) -> None:
        """A copy of `extent` is about to begin.

        Raises:
            VaultLost: the vault was replaced meanwhile.
        """
        self.tier.check(extent, client)
        if self._client is not None and self._client is not client:
            raise VaultLost("the vault was replaced by another in the middle of this: call again")

    def begun(self, request: int) -> None:
        """That copy has begun."""
        self._begun.append(request)

    def staging(self, device: int) -> _core.HostBlock:
        """Pinned memory for what this process reads from files."""
        if self._staging is None:
            self._staging = self._stack.enter_context(closing(pinned_block(_STAGING_BYTES, device)))
        return self._staging

    def slab(self, extent: VaultBackup, number: int, device: int) -> _core.HostBlock:
        """That slab, mapped for reading, and registered if the driver does that."""
        key = id(extent.slabs), number
        if key not in self._slabs:
            descriptor = extent.descriptor(number)
            block = _core.HostBlock.mapped(descriptor, extent.slabs.by_number[number][1], writable=False)
            self._stack.callback(block.close)
            with suppress(CumemSleepError):  # a driver that registers nothing read-only: copies are slower then
                block.pin(device)
            self._slabs[key] = block
        return self._slabs[key]


class _OwnRead(NamedTuple):
    """A copy that this process makes, from where the backup lay when it began."""

    address: int
    extent: VaultBackup
    offset: int
    nbytes: int
    extents: tuple[SlabRange, ...]


class VaultLane(Lane):
    """Copies that the vault makes; where none answers, this process reads the slabs."""

    def __init__(self, stream: _core.CopyStream, lane_group: VaultLaneGroup) -> None:
        super().__init__(stream)
        self._lane_group = lane_group
        self._begun: list[tuple[VaultClient, int]] = []
        self._read: list[_OwnRead] = []  # by this process

    def content(self, extent: Extent, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The bytes there, for the CPU."""
        return self._lane_group.tier.content(extent, offset, nbytes)

    def begin(self, extent: Extent, rows: PieceRows, *, out: bool, by_kernel: bool = False) -> bool:  # noqa: ARG002
        """Begin to copy, when what runs on the stream has ended.

        Raises:
            VaultError: the vault is gone, or has evicted what was expendable; it was lent nothing.
        """
        (mine,) = _mine([extent])
        if out:
            self._copy(self._lane_group.tier.client(), mine, np.array(rows), filled=False)
            return False
        client = self._lane_group.reader(mine)
        if not mine.needed:
            _look(mine, client)
        if client is not None:
            self._copy(client, mine, np.array(rows), filled=True)
            return False
        self._lane_group.tier.hear()
        for address, offset, nbytes in np.array(rows).tolist():
            self._read_itself(_OwnRead(address, mine, offset, nbytes, mine.extents))
        return False

    def _read_itself(self, read: _OwnRead) -> None:
        if read.extent.slabs.moves:
            self._read.append(read)
        address = read.address
        for slab, start, size in read.extent.ranges(read.offset, read.nbytes):
            if slab == FILES:
                self._read_file(address, read.extent, slab, start, size)
            else:
                block = self._lane_group.slab(read.extent, slab, self.stream.device)
                self.stream.to_device(address, block, start, size)
            address += size

    def _read_file(self, address: int, extent: VaultBackup, slab: int, start: int, nbytes: int) -> None:
        """By this process, one part after another."""
        block = self._lane_group.staging(self.stream.device)
        for at in range(0, nbytes, block.bytes):
            size = min(block.bytes, nbytes - at)
            self.stream.synchronize()  # the block may be in use
            read_into(extent.descriptor(slab), memoryview(block)[:size], start + at, extent.slabs.folder)
            self.stream.to_device(address + at, block, 0, size)
        self.stream.synchronize()

    def _copy(self, client: VaultClient, extent: VaultBackup, pieces: PieceTable, *, filled: bool) -> None:
        """Let the vault copy: from the device's memory, or to it if that is to be `filled`."""
        self._lane_group.begin(client, extent)
        self.stream.synchronize()
        while len(pieces):
            some = pieces[: protocol.MAX_ROWS]
            lent, at = self._lane_group.lend(client, int(some[0, 0]), self.stream.device)
            base = int(some[0, 0]) - at
            if filled:
                self._lane_group.note_loan(base, filled=True)
            beyond = np.flatnonzero((some[:, 0] < base) | (some[:, 0] >= base + lent.nbytes))
            some = some[: beyond[0]] if len(beyond) else some
            request = client.copy(lent, extent, some - np.array((base, 0, 0)), to_host=not filled)
            self._begun.append((client, request))
            self._lane_group.begun(request)
            pieces = pieces[len(some) :]

    def join(self) -> None:
        """The vault's copies are on no stream of this process, so they are waited for.

        What this process reads while a vault is silent, that may have moved to files meanwhile, and go on to do so.
        """
        begun, self._begun = self._begun, []
        for client, request in begun:
            self._lane_group.tier.relayed(client.wait([request]))
        while self._read:
            self.stream.synchronize()
            self._lane_group.tier.hear()
            read, self._read = self._read, []
            for each in read:
                if each.extent.extents != each.extents:
                    self._read_itself(each._replace(extents=each.extent.extents))

    def synchronize(self) -> None:
        """Wait for all of it."""
        self.join()
        super().synchronize()


def _look(extent: VaultBackup, client: VaultClient | None) -> None:
    """The vault has not evicted it yet. Raises VaultError: it has, or does not answer."""
    if client is None:
        raise VaultError("the vault that kept this has ended, or does not answer")
    try:
        evicted = client.mark([extent], needed=False)
    except VaultLost as lost:
        raise VaultError(f"the vault that kept this is lost: {lost}") from None
    if evicted:
        extent.is_lost = True
        raise VaultError("the vault needed the memory for backups")


def _mine(extents: Iterable[Extent]) -> list[VaultBackup]:
    return [cast(VaultBackup, extent) for extent in extents]


def _read_all(descriptor: int, nbytes: int, offset: int) -> bytes:
    """One request reads 2 GiB at most. Raises VaultError: the disk failed."""
    parts = []
    while nbytes:
        try:
            parts.append(os.pread(descriptor, nbytes, offset))
        except OSError as error:
            raise VaultError(f"reading {nbytes} bytes of a backup at {offset}: {error.strerror}") from None
        if not parts[-1]:
            raise VaultError(f"reading {nbytes} bytes of a backup at {offset}: there are none")
        nbytes, offset = nbytes - len(parts[-1]), offset + len(parts[-1])
    return b"".join(parts)


def _process_name() -> str:
    """The title that this process gave itself (vLLM's workers do), its script, or its program."""
    try:
        title = Path("/proc/self/cmdline").read_text(errors="replace").split("\0")[0]
    except OSError:
        title = "python"
    script = Path(getattr(sys, "argv", [""])[0]).name if Path(title).name.startswith("python") else ""
    return Path(title).name if script in ("", "-c") else script
