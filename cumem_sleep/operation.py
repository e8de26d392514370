"""`Operation`: one call that looks at this layer's memory or changes it, from the caller's thread to its report.

On the caller's thread the driver is opened, and PyTorch makes way. The rest runs with the lock held, on a thread of its
own (`csrc/operation.h`): the process comes back from level 3 or stays there, the ranks begin, a sequence of
`operations` does its work, and what it did is counted. Its log messages follow when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Generic, TypeVar, cast

from . import _core, log
from .driver import open_driver
from .errors import InvalidState, OutOfDeviceMemory
from .integrations.torch import TorchPools
from .levels import Group
from .operations.agreement import Call
from .operations.deepen import DeepSleep
from .operations.first_allocation import FirstAllocation
from .operations.layer import Layer
from .operations.look import usage_by_tag
from .operations.room import make_room
from .operations.wake import asleep, check_device_memory, wanting
from .pools import Pools
from .report import OperationTotals, SleepReport, TagUsage, WakeReport
from .scopes import scoped

_Result = TypeVar("_Result")


class AtLevel3(Enum):
    """What an operation does if the process is at level 3 when it begins."""

    COME_BACK = "it calls the driver, so the CUDA state comes back first"
    STAY = "it calls no driver then, and the process stays there"


class Operation(Generic[_Result]):
    """One operation, to be `run` once.

    Args:
        shared: what it shares with the other operations of its allocator.
        name: what errors call it.
        work: its sequence; called with `arguments`, and with the lock held.
        call: through which the ranks agree; None: it is this process's alone.
        counts_as: the name by which its report is counted; "": it has none.
        at_level_3: what becomes of level 3.
        make_way: frees what PyTorch does not use, on the caller's thread and without the lock: so what the garbage
            collector runs there may call the allocator.
        woken: for a wake: what it wakes. PyTorch's unused memory is freed only if that does not fit beside it.
        ends_idle: if everything sleeps when it has ended, the time until level 3 is counted anew.
    """

    def __init__(
        self,
        shared: Operations,
        name: str,
        work: Callable[..., _Result],
        *arguments: object,
        call: Call | None = None,
        counts_as: str = "",
        at_level_3: AtLevel3 = AtLevel3.COME_BACK,
        make_way: Callable[[TorchPools], None] | None = None,
        woken: Group | None = None,
        ends_idle: bool = True,
    ) -> None:
        self._shared = shared
        self._name = name
        self._work = work
        self._arguments = arguments
        self._call = call
        self._counts_as = counts_as
        self._at_level_3 = at_level_3
        self._make_way = make_way
        self._woken = woken
        self._ends_idle = ends_idle
        self._may_make_room = False
        self._came_back_s: Mapping[str, float] = {}
        self._notes = log.Notes()

    def run(self) -> _Result:
        """The result of `work`. If it raises, that is counted among the failures, and the other ranks are told.

        Raises:
            InvalidState: this thread captures a CUDA graph, or this allocator was replaced.
        """
        shared = self._shared
        shared.open()
        pools = shared.pools.find()
        self._may_make_room = self._woken is not None and pools is not None
        try:
            if self._woken is not None:
                shared.deep.stay()
            self._prepare_thread(pools, self._make_way)
            try:
                return shared.lock.run(self._perform)
            except _DoesNotFit:
                self._may_make_room = False
                self._prepare_thread(pools, make_room)
                return shared.lock.run(self._perform)
        finally:
            self._notes.log()
            if self._ends_idle:
                shared.when_idle()

    def _prepare_thread(self, pools: TorchPools | None, make_way: Callable[[TorchPools], None] | None) -> None:
        """What is to be done on the caller's thread, and without the lock."""
        if pools is None:
            return
        with _core.DriverCalls() as allowed:
            if not allowed:
                return  # at level 3, where no thread captures a graph
            with _core.CurrentContext():
                if pools.is_capturing():
                    raise InvalidState(
                        f"{self._name} while this thread captures a CUDA graph: call it after the capture"
                    )
                if make_way is not None:
                    make_way(pools)

    def _perform(self) -> _Result:
        """On the operation's own thread."""
        stays = self._at_level_3 is AtLevel3.STAY
        with self._notes, self._shared.turns.operation(None if stays else self._come_back):
            try:
                if self._woken is not None:
                    self._check_room(self._woken)
                if self._call is not None:
                    self._call.begin()
                return self._counted(self._work(*self._arguments))
            except _DoesNotFit:
                raise
            except BaseException as error:
                if self._call is not None:
                    self._call.refuse(error)  # with the lock held still: no other operation comes between
                self._shared.count_failure(self._counts_as)
                raise

    def _check_room(self, woken: Group) -> None:
        try:
            check_device_memory(self._shared.layer, asleep(woken))
        except OutOfDeviceMemory:
            if self._may_make_room:
                raise _DoesNotFit from None
            raise

    def _come_back(self) -> None:
        try:
            needed = {} if self._woken is None else wanting(self._shared.layer, asleep(self._woken))
            self._came_back_s = self._shared.deep.come_back(needed)
        except BaseException:
            self._shared.count_failure(self._counts_as)
            raise

    def _counted(self, result: _Result) -> _Result:
        if not isinstance(result, (SleepReport, WakeReport)):
            return result
        came_back_s = self._came_back_s
        report = replace(
            result,
            simulated=_core.driver_is_simulated(),
            place=result.place if result.note else self._shared.layer.store.room.place(),
            seconds=result.seconds + sum(came_back_s.values()),
            phases={**came_back_s, **result.phases},
        )
        self._shared.count(self._counts_as, report)
        return cast(_Result, report)


class _DoesNotFit(Exception):
    """A wake needs the memory that PyTorch keeps and does not use; nothing has begun."""


class Operations:
    """What the operations of one allocator share.

    Args:
        left_pool: called when a thread has left a pool in which it allocated.
        freed_by_hook: called, on a thread of its own, after PyTorch freed segments through the hook.
        when_idle: called after what put memory to sleep, and what kept the process from level 3: if everything sleeps
            then, the time until it goes there is counted anew.

    Attributes:
        layer, pools, when_idle: as given.
        lock: the layer's.
        turns: of whoever has the lock.
        deep: level 3 of this process.
        first_allocation: what is done after a sleep.
        totals: what was done so far, by operation.
        retired: a newer allocator has taken this one's place.
    """

    def __init__(
        self,
        layer: Layer,
        pools: Pools,
        left_pool: Callable[[], None],
        freed_by_hook: Callable[[], None],
        when_idle: Callable[[], None],
    ) -> None:
        self.layer = layer
        self.lock = layer.lock
        self.turns = layer.store.turns
        self.pools = pools
        self._left_pool = left_pool
        self._freed_by_hook = freed_by_hook
        self.when_idle = when_idle
        self._driver_checked = False
        self.deep = DeepSleep()
        self.first_allocation = FirstAllocation(self.turns, layer.tuning)
        self.totals: dict[str, OperationTotals] = {}
        self.retired = False

    def open(self) -> None:
        """Open the driver at the first use.

        Raises:
            InvalidState: this allocator was replaced, or this process is a fork.
            DriverError: no usable driver.
        """
        if self.retired:
            raise InvalidState("this CuMemAllocator was replaced by a newer one: use CuMemAllocator.get_instance()")
        if not self._driver_checked:
            open_driver(self.layer.settings.driver)
            log.info("cumem-sleep: memory pools come from this layer (%s)", self.layer.settings.summary())
            _core.on_free(self._freed_by_hook)
            self._driver_checked = True
        if _core.driver_is_forked():
            _core.device_count()  # raises, and says why

    # What there is to do

    def of_sleep(
        self,
        name: str,
        work: Callable[..., SleepReport],
        *arguments: object,
        call: Call | None = None,
        make_way: Callable[[TorchPools], None] | None = None,
        ends_idle: bool = True,
    ) -> Operation[SleepReport]:
        """One that puts memory to sleep, after which nothing of it may be left on the GPU."""
        stay = AtLevel3.STAY
        return Operation(
            self,
            name,
            work,
            *arguments,
            call=call,
            counts_as=name,
            at_level_3=stay,
            make_way=make_way,
            ends_idle=ends_idle,
        )

    def of_wake(
        self, work: Callable[..., WakeReport], *arguments: object, woken: Group, call: Call | None = None
    ) -> Operation[WakeReport]:
        """One that wakes these."""
        return Operation(self, "wake_up", work, *arguments, call=call, counts_as="wake", woken=woken)

    def look(self, name: str, work: Callable[..., _Result], *arguments: object) -> _Result:
        """The result of `work`, which calls no driver: the process stays at level 3, and the time until it goes there
        is not counted anew.
        """
        return Operation(self, name, work, *arguments, at_level_3=AtLevel3.STAY, ends_idle=False).run()

    def usage(self, meant: Group) -> dict[str, TagUsage]:
        """What the segments of each tag hold, and their backups."""
        if not _core.driver_is_open():
            return {}
        return self.look("usage", usage_by_tag, self.layer, meant)

    # Counting

    def count(self, counts_as: str, report: SleepReport | WakeReport) -> None:
        """Add what was done to the totals, and log it."""
        if not report.note:
            self.totals[counts_as] = self.totals.get(counts_as, OperationTotals()).plus(report)
        log.info("cumem-sleep: %s", report)
        if isinstance(report, SleepReport) and not self.deep.is_away:
            self.first_allocation.after(report.freed_bytes)

    def count_failure(self, counts_as: str) -> None:
        """Add a failure; of what is not counted, none."""
        if counts_as:
            totals = self.totals.get(counts_as, OperationTotals())
            self.totals[counts_as] = replace(totals, failures=totals.failures + 1)

    # Allocating

    @scoped
    def allocating(
        self, tag: str, backup: _core.Backup = _core.Backup.BY_LEVEL, *, ordinary: bool = False
    ) -> Iterator[None]:
        """As `Pools.allocating`, with the driver open and the process back from level 3; then the pool was left."""
        self.open()
        self.come_back()
        try:
            pools = self.pools.find(import_torch=True)
            if pools is not None and (device := pools.device_in_use()) is not None:
                self.layer.left.note_before(device)
            with self.pools.allocating(tag, backup, ordinary=ordinary):
                yield
            if not ordinary:
                self._left_pool()
        finally:
            self.when_idle()

    @scoped
    def capturing(self, call: str, tag: str, backup: _core.Backup = _core.Backup.BY_LEVEL) -> Iterator[TorchPools]:
        """As `Pools.capturing`, with the driver open and the process back from level 3."""
        self.open()
        self.come_back()
        try:
            with self.pools.capturing(call, tag, backup) as pools:
                yield pools
        finally:
            self.when_idle()

    def on_the_gpu(self, work: Callable[[], _Result]) -> _Result:
        """The result of `work`, which calls the driver; the process does not go to level 3 meanwhile.

        As `CuMemAllocator.using_cuda`. But that is a generator, in which signal handlers may raise.
        """
        try:
            while True:
                self.come_back()
                with _core.DriverCalls() as allowed:  # or it went deeper again meanwhile
                    if allowed:
                        return work()
        finally:
            self.when_idle()

    def come_back(self) -> None:
        """If the process sleeps at level 3, it is at level 1 afterwards; whoever calls this says when it is idle."""
        if self.deep.is_away:
            Operation(self, "coming back from level 3", _nothing, ends_idle=False).run()

    # What a free leaves

    def after_a_free(self) -> None:
        """Forget the backup of what was freed, unless an operation is at work, which does so at its end."""
        if _core.has_freed():
            log.run(self.lock, self.turns.after_a_free)
        else:
            _core.reclaim()

    def leave_store(self) -> None:
        """Forget all backups, and whoever keeps them. Does not open the driver, so nothing refuses it."""
        log.run(self.lock, self._leave_store)

    def _leave_store(self) -> None:
        with self.lock.hold():
            self.layer.store.room.leave()


def _nothing() -> None:
    pass
