"""The tier in this process: its own pinned host memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from .. import _core, host_facts
from ..core.commitment import BETWEEN_TRIES_S, Commitment, left_bytes, require_room, reserved_bytes
from ..core.extents import Extent
from ..core.pinned import node_of
from ..core.tuning import Tuning
from ..errors import InvalidState, OutOfHostMemory
from ..report import BackupPlace
from ..settings import Settings
from ..store.lanes import HostLane, HostLaneGroup, blocks_of
from .tier import Footprint, HostLimit, NotYet, Tier, TryLock, budget_limits

_BETWEEN_LOOKS_S = 0.02  # at the limits, while pages are prefaulted
# To a look at thousands of blocks, which takes milliseconds of the thread that pins, for which all else waits.
_PAUSE_PER_LOOK = 20
_TRIES = 10  # of two that look at the same time both may find too little


class HostTier(Tier):
    """Extents are blocks of host memory: address space once reserved, pinned pages once written, until `unpin`."""

    def __init__(self, settings: Settings, tuning: Tuning, try_lock: TryLock) -> None:
        self._settings = settings
        self._tuning = tuning
        # By id; `_not_pinned` drops the pinned ones.
        self._untouched: WeakValueDictionary[int, _core.HostBlock] = WeakValueDictionary()
        self._to_touch: WeakValueDictionary[int, _core.HostBlock] = WeakValueDictionary()  # of these, not released
        self._commitment = Commitment()
        self._to_come: Callable[[], int] = int  # of what is taken ahead, which leaves so much of each limit:
        self._reserved: Mapping[str, int] = {}
        self._look_at = 0.0  # when the limits are next looked at while pages are prefaulted
        self._held_bytes = 0  # without what waits to be released
        self._releasing = _Releasing(try_lock, tuning)

    @property
    def bytes(self) -> int:  # noqa: D102
        return self._held_bytes + self._releasing.bytes

    def limits(self, needed_bytes: int | None = None) -> list[HostLimit]:  # noqa: D102
        return self._limits(needed_bytes, {})

    def _limits(self, needed_bytes: int | None, others: Mapping[Path, int]) -> list[HostLimit]:
        promised = self._promised_bytes()
        left = left_bytes(None if needed_bytes is None else needed_bytes + promised, others)
        found = [HostLimit(name, max(0, nbytes - promised)) for name, nbytes in left.items()]
        return [*budget_limits(self._settings, self._held_bytes), *found]

    def _promised_bytes(self) -> int:
        """Reserved but not touched yet, which the system still counts as available."""
        untouched = sum(block.bytes - block.prefaulted_bytes for block in _not_pinned(self._untouched))
        # What waits to be released is room too: `reserve` takes it, or releases it first.
        return untouched - self._releasing.bytes

    def reserve_expendable(self, device: int, sizes: Sequence[int]) -> Sequence[Extent]:  # noqa: D102
        nbytes = sum(sizes)
        limits = self.limits(nbytes)
        for limit in limits:
            if limit.available_bytes < nbytes:
                raise OutOfHostMemory(nbytes, limit.available_bytes, limit.name)
        with suppress(NotYet), self.commit(nbytes, beside_work=True) as is_left:
            if is_left:
                return self.reserve(device, sizes)
        tightest = min(limits, key=lambda limit: limit.available_bytes)
        raise OutOfHostMemory(nbytes, tightest.available_bytes, tightest.name, "other processes are taking it")

    def expendable_room(self, sharers: int = 1) -> int:  # noqa: D102
        limits = self._limits(None, self._commitment.others())  # of which the budget is this process's alone
        return min((left if name == "budget" else left // sharers for name, left in limits), default=0)

    @contextmanager
    def commit(self, nbytes: int, *, beside_work: bool = False) -> Iterator[bool]:
        """For what `reserve` takes inside: from now on no other process counts on these bytes.

        Gives whether they are left. Waits for others, at most a minute, if they have found the same bytes and have yet
        to touch them.

        Raises:
            NotYet: beside work, it would wait.
            OperationStopped: asked to stop meanwhile.
        """
        try:
            yield not nbytes or self._commit(nbytes, beside_work)
        finally:
            self._show()

    def _commit(self, nbytes: int, beside_work: bool) -> bool:
        def before_wait() -> None:
            if beside_work:
                raise NotYet
            _core.stop_if_asked()
            self._show()

        def check(others: Mapping[Path, int]) -> None:
            require_room(nbytes + self._promised_bytes(), others)

        self._show()
        try:
            self._commitment.take(nbytes, check, before_wait)
        except OutOfHostMemory:
            return False
        return True

    def _show(self) -> list[_core.HostBlock]:
        """Show other processes what is yet to be touched. Returns its blocks."""
        blocks = _not_pinned(self._to_touch)
        to_touch = sum(max(0, block.bytes - block.prefaulted_bytes) for block in blocks)
        self._commitment.set(to_touch + self._to_come())
        return blocks

    def commit_ahead(self, nbytes: int, to_come: Callable[[], int]) -> None:
        """What nobody asked for is about to take so much, bit by bit: until `to_come` says 0, no other process counts
        on what that says.

        Raises:
            OutOfHostMemory: a limit leaves less than that, beside its reserve and what others are about to touch.
        """

        def not_yet() -> None:
            raise NotYet

        self._reserved = reserved_bytes()
        self._show()
        for _ in range(_TRIES):
            with suppress(NotYet):
                self._commitment.take(nbytes, partial(self._check_reserve, nbytes), not_yet)
                self._to_come = to_come
                return
            time.sleep(random.uniform(*BETWEEN_TRIES_S))
        self._check_reserve(nbytes, self._commitment.others())
        raise OutOfHostMemory(nbytes, 0, "MemAvailable", "other processes are taking it")

    def check_reserve(self) -> None:
        """
        Raises:
            OutOfHostMemory: a limit leaves less than its reserve.
        """
        self._check_reserve(0, {})

    def _check_reserve(self, nbytes: int, others: Mapping[Path, int]) -> None:
        require_room(nbytes + self._promised_bytes(), others, reserved=self._reserved)

    def _all_touched(self) -> None:
        self._show()
        self._commitment.short_since = None

    def _look_again(self) -> None:
        """Between the blocks that are prefaulted: whoever does not commit what he takes is seen here at the latest.

        Raises:
            OutOfHostMemory: a limit no longer leaves what is yet to be touched.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        needed = sum(max(0, block.bytes - block.prefault_begun_bytes) for block in self._show())
        try:
            require_room(needed, note="other processes took it meanwhile")
        except OutOfHostMemory:
            if not self._releasing.bytes:
                raise
            self._releasing.finish()
        ended = time.monotonic()
        self._look_at = ended + max(_BETWEEN_LOOKS_S, _PAUSE_PER_LOOK * (ended - now))

    def place(self) -> BackupPlace:  # noqa: D102
        return BackupPlace()

    def footprints(self, backups: Sequence[Sequence[Extent]]) -> list[Footprint]:  # noqa: D102
        return [Footprint(sum(extent.bytes for extent in extents)) for extents in backups]

    def reserve(  # noqa: D102
        self,
        device: int,
        sizes: Sequence[int],
        *,
        beside_work: bool = False,  # noqa: ARG002
    ) -> Sequence[Extent]:
        limits = self._limits(None, self._commitment.others()) if self._releasing.bytes else []
        pinned = [self._releasing.take(device, size) for size in sizes]
        most_bytes = sum(sizes) + self._releasing.bytes  # if what is left there stays
        if None in pinned and any(limit.available_bytes < most_bytes for limit in limits):
            self._releasing.finish()
        node = node_of(device)
        blocks = [block or _core.HostBlock(size, node) for block, size in zip(pinned, sizes, strict=True)]
        for noted in (self._untouched, self._to_touch):
            noted.update((id(block), block) for block in blocks if not block.pinned)
        self._held_bytes += sum(sizes)
        return blocks

    @property
    def extent_bytes(self) -> int:  # noqa: D102
        return self._tuning.slab_bytes

    def release(self, extents: Iterable[Extent]) -> None:  # noqa: D102
        blocks = blocks_of(extents)
        nbytes = sum(block.bytes for block in blocks)
        self._held_bytes -= nbytes
        for block in blocks:
            self._to_touch.pop(id(block), None)
        self._show()
        if nbytes < self._tuning.release_later_bytes:
            for block in blocks:
                self._untouched.pop(id(block), None)
                block.close()
            blocks = []
        # Those that are untouched stay noted as such: to release them makes no more memory available.
        self._releasing.start(blocks)

    def finish_releasing(self) -> None:
        """Finish now what `release` has left to the thread."""
        self._releasing.finish()

    def pin(self, device: int, extents: Iterable[Extent]) -> None:
        """Pin now what the first copy to it would pin.

        Raises:
            DriverError, OutOfHostMemory: refused.
        """
        for block in blocks_of(extents):
            if not block.pinned:
                self._look_again()
                block.prefault(0, block.bytes)
                block.pin(device)
        self._show()

    def unpin(self, extents: Iterable[Extent]) -> None:
        """Leave the bytes, but do not keep them pinned until they are copied again. No copy of them is in flight."""
        for block in blocks_of(extents):
            if block.pinned:
                for noted in (self._untouched, self._to_touch):
                    noted.pop(id(block), None)
                block.unpin()

    def device_bytes_to_pin(self, extents: Iterable[Extent]) -> int:
        """How much memory of each GPU it takes to pin those of `extents` that are not."""
        nbytes = sum(block.bytes for block in blocks_of(extents) if not block.pinned)
        return nbytes * self._tuning.table_bytes_per_gib >> 30

    content = staticmethod(HostLane.content)

    def lane_group(self) -> HostLaneGroup:  # noqa: D102
        threads, nbytes = self._settings.prefault_threads, self._tuning.prefault_bytes
        return HostLaneGroup(threads, nbytes, self._look_again, self._all_touched)

    def stop(self) -> None:
        """End the thread, for the process exits. May be called without the lock."""
        self._releasing.stop()


class _Releasing:
    """Unpins and frees host memory in a thread, one block at a time, as long as no operation runs.

    Whatever else calls the driver meanwhile waits for the block: an operation, and a model that decodes after its wake.
    So the thread works for a small share of the time only, unless the host is short of memory. What an operation needs
    itself, it takes from here: such a block is pinned already.
    """

    def __init__(self, try_lock: TryLock, tuning: Tuning) -> None:
        self._try_lock = try_lock
        self._tuning = tuning
        # By the device that they are pinned for (-1: none), and their size. Guarded by the lock.
        self._blocks: dict[tuple[int, int], list[_core.HostBlock]] = {}
        self._worker: _core.Worker | None = None
        self._stopped = False
        self.bytes = 0  # not freed yet

    def start(self, blocks: Iterable[_core.HostBlock]) -> None:
        """Free these soon. The lock must be held, as for `take` and `finish`."""
        for block in blocks:
            self._blocks.setdefault((block.pinned_device, block.bytes), []).append(block)
            self.bytes += block.bytes
        if not self.bytes or self._stopped or (self._worker is not None and self._worker.running):
            return
        self._worker = _core.Worker("cumem-give-back")
        try:
            self._worker.start(partial(self._run, self._worker))
        except InvalidState:  # no thread can be started: at exit, or at a limit
            self._worker = None
            self.finish()

    def take(self, device: int, nbytes: int) -> _core.HostBlock | None:
        """A block of this size that is pinned for `device`, which is no longer freed; None if none is left."""
        blocks = self._blocks.get((device, nbytes))
        if not blocks:
            return None
        self.bytes -= nbytes
        return blocks.pop()

    def finish(self) -> None:
        """Free now what is left."""
        while self.bytes:
            self._release_one()

    def stop(self) -> None:
        """End the thread because the process exits, which frees what is left."""
        self._stopped = True
        if self._worker is not None:
            self._worker.stop()

    def _release_one(self) -> None:
        block = next(filter(None, self._blocks.values())).pop()
        self.bytes -= block.bytes
        block.close()

    def _run(self, worker: _core.Worker) -> None:
        pause_s = self._tuning.before_releases_s
        while not worker.pause(pause_s):
            begin = time.perf_counter()
            with self._try_lock() as held:
                if held and not self.bytes:
                    self._worker = None
                    return
                if held:
                    self._release_one()
            pause_s = self._tuning.between_releases_s
            if not self._is_short():
                pause_s = max(pause_s, (time.perf_counter() - begin) * self._tuning.pause_per_release)

    def _is_short(self) -> bool:
        """Whether another process might miss what is not freed yet."""
        left = (host_facts.mem_available_bytes(enough=self.bytes), host_facts.cgroup_available_bytes())
        return any(nbytes is not None and nbytes < self.bytes for nbytes in left)


def _not_pinned(blocks: WeakValueDictionary[int, _core.HostBlock]) -> list[_core.HostBlock]:
    """Those of them, of which only they stay noted."""
    left, pinned = [], []
    for key, block in blocks.items():
        if block.pinned:
            pinned.append(key)
        else:
            left.append(block)
    for key in pinned:
        blocks.pop(key, None)
    return left
