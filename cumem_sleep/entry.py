"""`Entry`: what happens around every call into the layer that looks at memory or changes it.

The driver is opened at the first use; a process at level 3 comes back first, unless the call needs no GPU; the lock is
taken, on a thread of its own; what was done is logged and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from . import _core, log
from .driver import open_driver
from .errors import InvalidState
from .integrations.torch import TorchPools
from .levels import Group
from .operations.agreement import Call
from .operations.deepen import DeepSleep
from .operations.first_allocation import FirstAllocation
from .operations.layer import Layer
from .operations.look import usage_by_tag
from .operations.room import make_room
from .operations.wake import asleep, fits, wanting
from .pools import Pools
from .report import OperationTotals, SleepReport, TagUsage, WakeReport
from .scopes import scoped

_Report = TypeVar("_Report", SleepReport, WakeReport)
_Result = TypeVar("_Result")


class Entry:
    """The way into one allocator's layer.

    Args:
        left_pool: called when a thread has left a pool in which it allocated.
        freed_by_hook: called, on a thread of its own, after PyTorch freed segments through the hook.
        when_idle: called after what put memory to sleep, and what kept the process from level 3: if everything sleeps
            then, the time until it goes there is counted anew.

    Attributes:
        deep: level 3 of this process.
        first_allocation: what is done after a sleep.
        totals: what was done so far, by operation.
        when_idle: as given.
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
        self._layer = layer
        self._lock = layer.lock
        self._store = layer.store
        self._pools = pools
        self._left_pool = left_pool
        self._freed_by_hook = freed_by_hook
        self.when_idle = when_idle
        self._driver_checked = False
        self.deep = DeepSleep()
        self.first_allocation = FirstAllocation(layer.store.turns, layer.tuning)
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
            open_driver(self._layer.settings.driver)
            log.info("cumem-sleep: memory pools come from this layer (%s)", self._layer.settings.summary())
            _core.on_free(self._freed_by_hook)
            self._driver_checked = True
        if _core.driver_is_forked():
            _core.device_count()  # raises, and says why

    # Allocating

    @scoped
    def allocating(
        self, tag: str, backup: _core.Backup = _core.Backup.BY_LEVEL, *, ordinary: bool = False
    ) -> Iterator[None]:
        """As `Pools.allocating`, with the driver open and the process back from level 3; then the pool was left."""
        self.open()
        self.come_back()
        try:
            pools = self._pools.find(import_torch=True)
            if pools is not None and (device := pools.device_in_use()) is not None:
                self._layer.left.note_before(device)
            with self._pools.allocating(tag, backup, ordinary=ordinary):
                yield
            if not ordinary:
                self._left_pool()
        finally:
            self.when_idle()

    def capturing(
        self, call: str, tag: str, backup: _core.Backup = _core.Backup.BY_LEVEL
    ) -> AbstractContextManager[TorchPools]:
        """As `Pools.capturing`, with the driver open and the process back from level 3."""
        self.open()
        self.come_back()
        return self._pools.capturing(call, tag, backup)

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

    # What a free leaves

    def after_a_free(self) -> None:
        """Forget the backup of what was freed, unless an operation is at work, which does so at its end."""
        if _core.has_freed():
            log.run(self._lock, self._store.turns.after_a_free)
        else:
            _core.reclaim()

    def clear_store(self) -> None:
        """Forget all backups that are retained. Does not open the driver, so nothing refuses it."""
        log.run(self._lock, self._clear_store)

    def _clear_store(self) -> None:
        with self._lock.hold():
            self._store.clear()

    # Operations

    def operate(
        self,
        call: Call,
        work: Callable[..., _Report],
        operation: str,
        woken: Group | None = None,
        make_way: Callable[[TorchPools], None] | None = None,
    ) -> _Report:
        """The report of `work`, logged and counted; if it raises, that is counted among the failures.

        Args:
            woken: for a wake: what it wakes, for which room is made. `work` takes what `wake` takes: `known_to_fit`.
            make_way: for what is not a wake: as for `locked`.
        """
        counted = partial(self.counted, work, operation, call)
        if woken is None:
            slept = self.locked(operation, counted, make_way, stays_away=True)
            if isinstance(slept, SleepReport) and not self.deep.is_away:
                self.first_allocation.after(slept.freed_bytes)
            return slept
        self.deep.stay()
        try:
            return self._wake(counted, partial(self.counted, partial(work, known_to_fit=True), operation, call), woken)
        finally:
            self.deep.forget_return()
            self.when_idle()  # it may have failed, or found nothing to wake

    def _wake(self, counted: Callable[[], _Report], at_once: Callable[[], _Report], woken: Group) -> _Report:
        come_back = partial(self._come_back_to_wake, woken)
        if self._pools.find() is not None:
            report = self.locked(
                "wake_up", lambda: at_once() if fits(self._layer, woken) else None, come_back=come_back
            )
            if report is not None:
                return report
        return self.locked("wake_up", counted, make_room, come_back=come_back)

    def counted(self, work: Callable[[], _Report], operation: str, call: Call | None = None) -> _Report:
        """As `operate`, of what needs no lock, or has it."""
        with self._failures_counted(operation):
            try:
                if call is not None:
                    call.begin()
                report = work()
                place = report.place if report.note else self._store.place()
                report = self.deep.told(replace(report, simulated=_core.driver_is_simulated(), place=place))
            except BaseException as error:
                if call is not None:
                    call.refuse(error)  # with the lock held still: no other operation comes between
                raise
        if not report.note:
            self.totals[operation] = self.totals.get(operation, OperationTotals()).plus(report)
        log.info("cumem-sleep: %s", report)
        return report

    @contextmanager
    def _failures_counted(self, operation: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            totals = self.totals.get(operation, OperationTotals())
            self.totals[operation] = replace(totals, failures=totals.failures + 1)
            raise

    def usage(self, meant: Group) -> dict[str, TagUsage]:
        """What the segments of each tag hold, and their backups; calls no driver."""
        if not _core.driver_is_open():
            return {}
        return self.locked("usage", partial(usage_by_tag, self._layer, meant), stays_away=True)

    def locked(
        self,
        name: str,
        work: Callable[[], _Result],
        make_way: Callable[[TorchPools], None] | None = None,
        *,
        stays_away: bool = False,
        come_back: Callable[[], None] | None = None,
    ) -> _Result:
        """The result of `work`, which runs with the lock held, on a thread of its own.

        Args:
            make_way: called before, on the caller's thread and without the lock: so what the garbage collector runs
                there may call the allocator.
            stays_away: at level 3 `work` calls no driver, and the process stays there. Otherwise it comes back first.
            come_back: does that.

        Raises:
            InvalidState: this thread captures a CUDA graph.
        """
        self.open()
        if (pools := self._pools.find()) is not None:
            with _core.DriverCalls() as allowed:  # not at level 3, where no thread captures a graph
                if allowed:
                    _prepare_thread(name, pools, make_way)
        if stays_away or come_back is not None:
            return log.run(self._lock, partial(self._with_lock, work, come_back))
        try:
            return log.run(self._lock, partial(self._with_lock, work, self.deep.come_back))
        finally:
            self.when_idle()

    def _with_lock(self, work: Callable[[], _Result], come_back: Callable[[], None] | None) -> _Result:
        with self._store.turns.operation(come_back):
            return work()

    # Level 3

    def come_back(self) -> None:
        """If the process sleeps at level 3, it is at level 1 afterwards."""
        if self.deep.is_away:
            # Whoever calls this says when it is idle again.
            self.locked("coming back from level 3", lambda: None, come_back=self.deep.come_back)

    def _come_back_to_wake(self, woken: Group) -> None:
        with self._failures_counted("wake"):
            self.deep.come_back(wanting(self._layer, asleep(woken)), to_wake=True)


def _prepare_thread(name: str, pools: TorchPools, make_way: Callable[[TorchPools], None] | None) -> None:
    """What is to be done on the caller's thread, and without the lock, before an operation."""
    with _core.CurrentContext():
        if pools.is_capturing():
            raise InvalidState(f"{name} while this thread captures a CUDA graph: call it after the capture")
        if make_way is not None:
            make_way(pools)
