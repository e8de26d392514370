"""`Regions`: pools whose plan is fixed where they are entered, as torch_memory_saver's calls need them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from . import _core
from .core import preload
from .core.driver import driver_path
from .core.levels import SegmentGroup, by_plan, with_own_plan
from .core.operation import CudaUse, Operation, Operations, Vote
from .core.pools import entered
from .core.tags import DEFAULT_TAG, UsedTags, checked_tag, tag_or_default
from .errors import InvalidArgument, InvalidState, check_bool, check_integer
from .operations.components import Components
from .operations.look import usage
from .operations.sleep import sleep
from .operations.wake import wake, waking
from .report import SleepReport, TagUsage, WakeReport


class Regions:
    """The pools of an allocator with a plan of their own, `CuMemAllocator.regions`.

    A region is `CuMemAllocator.use_memory_pool(tag, backup=...)`. The calls here are about regions alone, whatever
    other memory has the same tags, and about this process alone.
    """

    def __init__(
        self,
        components: Components,
        tags: UsedTags,
        operations: Operations,
        use_pool: Callable[..., AbstractContextManager[None]],
    ) -> None:
        self._components = components
        self._tags = tags
        self._operations = operations
        self._use_pool = use_pool

    # Allocating

    def use(self, tag: str | None = None, *, backup: bool = False) -> AbstractContextManager[None]:
        """`CuMemAllocator.use_memory_pool`; without `backup` its bytes are dropped."""
        check_bool("backup", backup)
        return self._use_pool(tag, backup=backup)

    def use_without_pool(self, tag: str | None = None, *, backup: bool = False) -> AbstractContextManager[None]:
        """What this thread gets from cudaMalloc inside belongs to a region, if the hook is in front of cudaMalloc.

        PyTorch takes it into whatever pool is in use. The driver is opened by this call, and not inside, where a CUDA
        graph may be captured.

        Args:
            tag, backup: as for `use`.

        Raises:
            InvalidArgument: not a tag.
            DriverError: no usable driver.
        """
        tag = tag_or_default(tag)
        self._operations.open()
        return self._within(tag, plan_of(backup))

    @contextmanager
    def _within(self, tag: str, plan: _core.BackupPlan) -> Iterator[None]:
        with self._operations.cuda.lease(), entered(tag, plan):
            self._tags.add(tag)
            yield

    def outside(self) -> AbstractContextManager[None]:
        """What this thread's PyTorch allocates inside is ordinary memory, even in a region or pool.

        What is free of it at the end goes back to the device. PyTorch's other unused memory stays as it is.
        """
        return self._operations.allocating(DEFAULT_TAG, ordinary=True)

    @contextmanager
    def graph_pool(
        self, tag: str | None = None, *, backup: bool = False, shared_by: Hashable = None
    ) -> Iterator[tuple[int, int]]:
        """As `CuMemAllocator.cudagraph_pool`, for memory of a region.

        Args:
            tag, backup: as for `use`.
            shared_by: graphs that are captured with the same value share a pool, as graphs do that are given one pool
                of PyTorch's. None: the graph has its own, whose memory is free once the graph is gone.

        Raises:
            InvalidArgument: not a tag.
            InvalidState: PyTorch does not reach a GPU here.
        """
        tag = tag_or_default(tag)
        with self._operations.capturing("regions.graph_pool", tag, plan_of(backup)) as pools:
            self._tags.add(tag)
            if shared_by is None:
                with pools.pool_of_one_graph() as pool_id:
                    yield pool_id
            else:
                yield pools.graph_pool_id((tag, backup, shared_by))

    def use_for_process(self, tag: str | None = None, *, backup: bool = False) -> None:
        """From here on, what threads get from cudaMalloc belongs to a region, unless they are in another, or in a pool.

        So PyTorch's own caching allocator gets memory that sleeps, on every thread, as does any library that calls the
        CUDA runtime. What was allocated before is not concerned. Touches no GPU.

        Args:
            tag, backup: as for `use`.

        Raises:
            InvalidArgument: not a tag.
            InvalidState: the hook is not in front of cudaMalloc: the process has to be started with it in LD_PRELOAD
                (`cumem_sleep.core.preload.library_path()`).
        """
        tag, plan = tag_or_default(tag), plan_of(backup)
        if not preload.serve():
            raise InvalidState(
                "cudaMalloc is not hooked in this process, so the process cannot be used as one region: start it with"
                f" LD_PRELOAD={preload.library_path()}"
            )
        self._tags.add(tag)
        _core.set_process_pool(tag, plan, driver_path(self._components.settings.driver))

    def set_margin_bytes(self, nbytes: int) -> None:
        """Refuse memory of regions, as if the device were full, where less than this would stay free; 0: no margin.

        Raises:
            InvalidArgument: not a number of bytes.
        """
        check_integer("nbytes", nbytes, minimum=0)
        _core.set_region_margin(nbytes)

    # Sleeping and waking

    def sleep(self, tags: str | Iterable[str] | None = None, *, with_left: bool = True) -> SleepReport:
        """Give the device memory of regions back: all or nothing, as `CuMemAllocator.sleep`, but of this process alone.

        PyTorch keeps its unused cache, which the process that goes on without these regions would allocate again; where
        another process needs that memory, call `torch.cuda.empty_cache()` before. Such memory of the regions themselves
        sleeps with them.

        Args:
            tags: of which regions; None: of all.
            with_left: whether the report says what is left on the devices (`left_bytes`); the driver has to be asked.

        Raises:
            InvalidArgument: a tag that was never used, or a flag that is not True or False.
            InvalidState, OutOfHostMemory, DriverError: as `CuMemAllocator.sleep`.
        """
        check_bool("with_left", with_left)
        meant = self._meant(tags)
        work, arguments = partial(sleep, with_left=with_left), (self._components, Vote(), meant, _by_its_plan)
        uses = CudaUse.LEASE_UNLESS_AWAY
        return Operation(self._operations, "sleep", work, arguments, counts_as="sleep", uses_cuda=uses).run()

    def wake(
        self,
        tags: str | Iterable[str] | None = None,
        *,
        restore: bool = True,
        retain_backups: bool | None = None,
        wait_for_release: bool = False,
    ) -> WakeReport:
        """Take the device memory of regions again, at the same addresses, and restore what was backed up.

        Args:
            tags: of which regions, exactly; None: of all.
            restore: False: all of them come back with undefined bytes, and their backups go.
            retain_backups: whether the backups stay until the next sleep, which then copies only what changed. None: as
                the settings say.
            wait_for_release: return when the host memory of backups that do not stay has gone back to the system.
                Otherwise a thread gives back more than 1 GiB of it after this has returned.

        Raises:
            InvalidArgument: a tag that was never used, or a flag that is not True or False.
            OutOfDeviceMemory, OutOfHostMemory, BackupMismatch, CodecError, DriverError: as `CuMemAllocator.wake_up`.
        """
        check_bool("restore", restore)
        if retain_backups is not None:
            check_bool("retain_backups", retain_backups)
        check_bool("wait_for_release", wait_for_release)
        meant = self._meant(tags)

        def work() -> WakeReport:
            report = wake(self._components, Vote(), meant, retain_backups, None if restore else meant)
            if wait_for_release:
                self._components.store.memory.settle()
            return report

        return waking(self._operations, self._components, meant, work, vote=Vote()).run()

    def has(self, tag: str) -> bool:
        """Whether a region with this tag has memory, asleep or awake. Waits for nothing."""
        try:
            return bool(with_own_plan({checked_tag(tag)})())
        except InvalidArgument:  # no region can have it
            return False

    def usage(self) -> dict[str, TagUsage]:
        """What the segments of regions of each tag hold, and their backups."""
        return usage(self._operations, self._components, with_own_plan())

    def _meant(self, tags: str | Iterable[str] | None) -> SegmentGroup:
        return with_own_plan(None if tags is None else self._tags.checked(tags))


_by_its_plan = by_plan(lambda _: False)


def plan_of(backup: bool) -> _core.BackupPlan:
    """The plan of a pool that is entered so.

    Raises:
        InvalidArgument: `backup` is no bool.
    """
    check_bool("backup", backup)
    return _core.BackupPlan.ALWAYS if backup else _core.BackupPlan.NEVER
