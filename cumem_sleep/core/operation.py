"""`Operation`: one call that looks at this layer's memory or changes it, from the caller's thread to its report.

On the caller's thread the driver is opened, and PyTorch makes way. The rest runs with the lock held, on a thread of its
own (`csrc/operation_lock.h`): the process comes back from level 3 or stays there, a sequence of `operations` does its
work, and what it did is counted. Its log messages follow when it has ended.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from .. import _core
from ..errors import InvalidState, OutOfDeviceMemory
from ..report import BackupPlace, OperationTotals, PhaseTimer, SleepReport, WakeReport
from ..settings import Settings
from . import log
from .cuda_state import CudaState
from .driver import open_driver
from .pools import Pools, entered
from .torch_pools import TorchPools

_Result = TypeVar("_Result")


class CudaUse(Enum):
    """What an operation needs of the CUDA state."""

    LEASE = "it calls the driver, so the process comes back from level 3 first"
    LEASE_UNLESS_AWAY = "it has nothing to do at level 3, and the process stays there"
    NONE = "it calls no driver, or ends at level 3: the time until the process goes there is not counted anew"


class Vote:
    """How one operation agrees with other ranks. This one is of a process that is alone; `RankVote` is of several.

    A context manager: of several ranks, the others are told of what fails before the operation begins, too.
    """

    def __enter__(self) -> Vote:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pass

    def begin(self) -> None:
        """The operation begins; with the lock held, as the others."""

    def agree(self, timer: PhaseTimer) -> None:
        """Return if the second half is to follow.

        Raises:
            RankFailed: another rank failed.
            OperationStopped: this one was asked to stop while it waited for the others.
        """

    def refuse(self, error: BaseException) -> None:
        """The operation failed; unless the ranks have agreed already, they undo their half."""


@dataclass(eq=False)
class Operation(Generic[_Result]):
    """One operation, to be `run` once.

    Attributes:
        shared: what it shares with the other operations of its allocator.
        name: what errors call it.
        work: its sequence; called with `arguments`, and with the lock held.
        vote: through which the ranks agree.
        counts_as: the name by which its report is counted; "": it has none.
        uses_cuda: whether it comes back from level 3.
        frees_unused: PyTorch's unused memory is freed first; for what sleeps, which need not be backed up then.
        needs: for a wake: bytes by device that it takes.
        check_device_memory: for a wake: raises OutOfDeviceMemory if there is too little. PyTorch's unused memory is
            freed then, and the operation begins again.
    """

    shared: Operations
    name: str
    work: Callable[..., _Result]
    arguments: tuple[Any, ...] = ()
    vote: Vote = field(default_factory=Vote)
    counts_as: str = ""
    uses_cuda: CudaUse = CudaUse.LEASE
    frees_unused: bool = False
    needs: Callable[[], Mapping[int, int]] = dict
    check_device_memory: Callable[[], None] | None = None
    _pools: TorchPools | None = None
    _came_back_s: Mapping[str, float] = field(default_factory=dict)
    _notes: log.Notes = field(default_factory=log.Notes)

    def run(self) -> _Result:
        """The result of `work`. If it raises, that is counted among the failures, and the other ranks are told.

        Raises:
            InvalidState: this thread captures a CUDA graph, or this allocator was replaced.
        """
        shared = self.shared
        shared.open()
        self._pools = shared.pools.find()
        try:
            if self.uses_cuda is not CudaUse.NONE:
                shared.cuda.stop_timer()
            while True:  # a second time only after `check_device_memory` has failed
                self._prepare_thread()
                try:
                    return shared.lock.run(self._perform)
                except _DoesNotFit:
                    self.frees_unused = True
                    gc.collect()
        finally:
            try:
                self._notes.log()
            finally:
                if self.uses_cuda is not CudaUse.NONE:
                    shared.cuda.start_timer()

    def _prepare_thread(self) -> None:
        """On the caller's thread, and without the lock: what the garbage collector runs may call the allocator."""
        if (pools := self._pools) is None:
            return
        with _core.DriverCalls() as allowed:
            if not allowed:
                return  # at level 3, where no thread captures a graph
            with _core.CurrentContext():
                if pools.is_capturing():
                    raise InvalidState(
                        f"{self.name} while this thread captures a CUDA graph: call it after the capture"
                    )
                if self.frees_unused:
                    pools.trim()

    def _perform(self) -> _Result:
        """On the operation's own thread."""
        with self._notes, self.shared.locked(self._come_back if self.uses_cuda is CudaUse.LEASE else None):
            try:
                if self.check_device_memory is not None:
                    try:
                        self.check_device_memory()
                    except OutOfDeviceMemory:
                        if self._pools is None or self.frees_unused:
                            raise
                        raise _DoesNotFit from None
                self.vote.begin()
                return self._counted(self.work(*self.arguments))
            except BaseException as error:
                if not isinstance(error, _DoesNotFit):
                    self.vote.refuse(error)  # with the lock held still: no other operation comes between
                    self.shared.count_failure(self.counts_as)
                raise
            finally:
                self.shared.may_be_asleep |= bool(self.counts_as)

    def _come_back(self) -> None:
        try:
            self._came_back_s = self.shared.cuda.come_back(self.needs())
        except BaseException:
            self.shared.count_failure(self.counts_as)
            raise

    def _counted(self, result: _Result) -> _Result:
        if not isinstance(result, (SleepReport, WakeReport)):
            return result
        report = replace(
            result,
            simulated=_core.driver_is_simulated(),
            place=result.place if result.note else self.shared.place(),
            seconds=result.seconds + sum(self._came_back_s.values()),
            phases={**self._came_back_s, **result.phases},
        )
        self.shared.count(self.counts_as, report)
        return cast(_Result, report)


class _DoesNotFit(Exception):
    """A wake needs the memory that PyTorch keeps and does not use; nothing has begun."""


@dataclass(eq=False)
class Operations:
    """What the operations of one allocator share.

    Attributes:
        lock: the allocator's.
        cuda: level 3.
        locked: entered for an operation: it has the lock inside. Called with what comes back from level 3, or None.
        place: says where backups lie.
        left_pool: called when a thread has left a pool in which it allocated.
        freed_by_hook: called, on a thread of its own, after PyTorch freed segments through the hook.
        totals: what was done so far, by operation.
        retired: a newer allocator has taken this one's place.
        may_be_asleep: something has slept or woken since nothing was seen asleep.
    """

    settings: Settings
    lock: _core.OperationLock
    pools: Pools
    cuda: CudaState
    locked: Callable[[Callable[[], None] | None], AbstractContextManager[None]]
    place: Callable[[], BackupPlace]
    left_pool: Callable[[], None]
    freed_by_hook: Callable[[], None]
    totals: dict[str, OperationTotals] = field(default_factory=dict)
    retired: bool = False
    may_be_asleep: bool = False
    _driver_checked: bool = False

    def open(self) -> None:
        """Open the driver at the first use.

        Raises:
            InvalidState: this allocator was replaced, or this process is a fork.
            DriverError: no usable driver.
        """
        if self.retired:
            raise InvalidState("this CuMemAllocator was replaced by a newer one: use CuMemAllocator.get_instance()")
        if not self._driver_checked:
            open_driver(self.settings.driver)
            log.info("cumem-sleep: memory pools come from this layer (%s)", self.settings.summary())
            _core.on_free(self.freed_by_hook)
            self._driver_checked = True
        if _core.driver_is_forked():
            _core.device_count()  # raises, and says why

    def look(self, name: str, work: Callable[..., _Result], *arguments: object) -> _Result:
        """The result of `work`, which calls no driver."""
        return Operation(self, name, work, arguments, uses_cuda=CudaUse.NONE).run()

    def count(self, counts_as: str, report: SleepReport | WakeReport) -> None:
        """Add what was done to the totals, and log it."""
        if not report.note:
            self.totals[counts_as] = self.totals.get(counts_as, OperationTotals()).plus(report)
        log.info("cumem-sleep: %s", report)

    def count_failure(self, counts_as: str) -> None:
        """Add a failure; of what is not counted, none."""
        if counts_as:
            totals = self.totals.get(counts_as, OperationTotals())
            self.totals[counts_as] = replace(totals, failures=totals.failures + 1)

    # Allocating

    @contextmanager
    def allocating(
        self, tag: str, backup: _core.BackupPlan = _core.BackupPlan.BY_LEVEL, *, ordinary: bool = False
    ) -> Iterator[None]:
        """What this thread allocates inside has this tag and plan; `ordinary`: PyTorch's comes from no pool."""
        self.open()
        with self.cuda.lease():
            pools = self.pools.find(import_torch=True)
            with (
                entered(tag, backup),
                nullcontext() if pools is None else pools.leave() if ordinary else pools.use(),
            ):
                yield
        if not ordinary:
            self.left_pool()

    @contextmanager
    def capturing(
        self, call: str, tag: str, backup: _core.BackupPlan = _core.BackupPlan.BY_LEVEL
    ) -> Iterator[TorchPools]:
        """As `allocating`, for CUDA graphs, whose pool the caller chooses.

        Raises:
            InvalidState: PyTorch does not reach a GPU here, which `call` needs.
        """
        self.open()
        with self.cuda.lease():
            pools = self.pools.find(import_torch=True)
            if pools is None:
                raise InvalidState(f"{call} needs PyTorch and a GPU that it reaches")
            with entered(tag, backup):
                yield pools
