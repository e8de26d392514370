"""`CuMemAllocator`: the public calls.

What happens around each of them, from the lock to the counts, is in `operation`.
Segments belong to the C++ table (`csrc/allocator.h`), their backups to the store (`backups`). What a level means is in
`levels`, and what happens in which order in `operations`.
"""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from . import _core
from .backups.memory import BackupStore
from .backups.ranges import NOTHING_DECLARED, Declared, declared, ranges_to_keep
from .checkpoint.process import THIS_PROCESS, Checkpointed
from .codec.compressor import Compressor
from .core import log
from .core.cuda_state import CudaState
from .core.levels import (
    DEFERRABLE_TAGS,
    DROPPED_AT_LEVEL_1,
    IsDropped,
    by_plan,
    dropped_at_level,
    in_pools,
    is_checkpoint,
    named,
    woken,
)
from .core.misspelt import warn_of_misspelt
from .core.operation import CudaUse, Operation, Operations, Vote
from .core.pools import Pools
from .core.segments import awake_in_words, total_bytes
from .core.tags import DEFAULT_TAG, GRAPH_TAG, UsedTags, checked_tag, tag_or_default
from .core.tuning import Tuning
from .digest.digester import DeviceDigester
from .errors import (
    MOST_ADDRESS,
    CumemSleepError,
    InvalidArgument,
    InvalidArgumentType,
    InvalidState,
    OutOfDeviceMemory,
    check_bool,
    check_integer,
    format_bytes,
    shown,
)
from .operations.checkpoint import checkpoint, why_not_for_ranks
from .operations.components import Components
from .operations.forget import forget
from .operations.look import digests, read_backup, usage
from .operations.named import adopt, offer
from .operations.prepare import Preparation, Unasked, wanted_ahead
from .operations.sleep import sleep
from .operations.wake import wake, waking
from .ranks.agreement import Agreement, RankVote
from .ranks.group import as_group
from .ranks.mesh import connect
from .regions import Regions, plan_of
from .report import BackupPlace, OperationTotals, PhaseTimer, SleepReport, TagUsage, WakeReport
from .settings import PREFIX, Settings
from .store.copier import CopyChoosers

# Their threads are stopped in order at exit. One that nobody uses any more stays here while a thread works for it.
_allocators: weakref.WeakSet[CuMemAllocator] = weakref.WeakSet()
_stores: weakref.WeakSet[BackupStore] = weakref.WeakSet()

_Sleep = _core.Segment.Sleep


class CuMemAllocator:
    """The sleep-mode allocator of this process.

    Its methods may be called from any thread; sleep, wake and everything else that changes memory run one at a time.
    PyTorch is used if it is installed and reaches the GPU; without it, allocate with `malloc` and `free`.

    Code that holds the lock runs on a thread of its own while the caller waits (`csrc/operation_lock.h`). Signal
    handlers run when it has ended, with either everything done or nothing, or while it waits for others: for the lock,
    other ranks, the vault's memory, or host memory that other processes are about to touch. What a handler raises then
    ends the wait, and nothing was done.

    Args:
        settings: how to behave; None: what the environment says (`Settings.from_environment`).
        group: the ranks that sleep and wake together, see `join`; None: this process sleeps and wakes alone.

    Raises:
        InvalidArgument: an environment variable has a bad value, or the group cannot be used.
        InvalidState: another allocator of this process still has memory handed out; a rank cannot be reached.
    """

    instance: ClassVar[CuMemAllocator | None] = None
    default_tag: ClassVar[str] = DEFAULT_TAG
    tuning: ClassVar[Tuning] = Tuning()
    # Whether `Settings.prepare` takes effect when a pool is left; vLLM's plugin begins after the warm-up instead.
    _prepares_after_pools: ClassVar[bool] = True
    _instance_lock: ClassVar[_core.OperationLock] = _core.OperationLock()

    def __init__(self, settings: Settings | None = None, group: Any = None) -> None:
        if settings is not None and not isinstance(settings, Settings):
            raise InvalidArgumentType(f"settings={settings!r}: expected a cumem_sleep.Settings or None")
        self.settings = Settings.from_environment() if settings is None else settings
        warn_of_misspelt()
        other = CuMemAllocator.instance
        if other is not None and _core.segments():
            raise InvalidState("this process already has a CuMemAllocator with memory handed out; use get_instance()")
        self._lock: _core.OperationLock = _core.OperationLock()
        self._store: BackupStore = BackupStore(self.settings, self._lock, self.tuning)
        self._preparation: Preparation | None = None
        self._whole_sleeps = 0  # without those of some tags
        self._agreement: Agreement | None = None
        _stores.add(self._store)
        self._digester = DeviceDigester(self.tuning)
        self._paces = CopyChoosers(self.tuning)
        self._compressor = Compressor(self.settings.compress == "auto", self.tuning)
        self._components = Components(
            self.settings, self.tuning, self._store, self._digester, self._compressor, self._paces
        )
        self._pools = Pools()
        self._cuda = CudaState(self._lock, THIS_PROCESS.bring_back, _checkpoint, self.settings.deep_after_s)
        self._operations: Operations = Operations(
            settings=self.settings,
            lock=self._lock,
            pools=self._pools,
            cuda=self._cuda,
            locked=self._store.lock.for_operation,
            place=self._store.memory.place,
            left_pool=_left_pool,
            freed_by_hook=_forget_freed_backups,
        )
        _allocators.add(self)  # only now: stopping it at exit uses what was set above
        self._used_tags = UsedTags(DEFERRABLE_TAGS)
        agreement = None if group is None else self._connected(group)
        try:
            self._cuda.why_not = why_not_for_ranks(1 if agreement is None else agreement.mesh.size)
            if other is not None:
                other._give_way()  # what else can fail has not, so that one that works is given up for one that works
        except BaseException:
            if agreement is not None:
                agreement.mesh.close()
            raise
        self._agreement = agreement
        # Nothing fails, and no signal is handled, between these two: there is always one that can be used.
        CuMemAllocator.instance = self
        if other is not None:
            other._operations.retired = True
            other._cuda.successor = self._cuda

    @classmethod
    def get_instance(cls) -> CuMemAllocator:
        """The allocator of this process, made at the first call. Touches no GPU."""
        instance = cls.instance
        return instance if instance is not None else log.run(cls._instance_lock, cls._make_instance)

    @classmethod
    def _make_instance(cls) -> CuMemAllocator:
        with cls._instance_lock.hold():
            return cls.instance if cls.instance is not None else cls()

    # Several ranks

    def join(self, group: Any) -> None:
        """From now on sleep, wake and discard together with the other ranks of a group: all of them, or none.

        Every rank of the group calls this, at the same time, and later every sleep (but at level 0), wake, discard and
        release of backups by tags, whichever these are. Each does its first half, waits until all are ready, and only
        then goes on. If one fails, ends, or is not ready within `Settings.agreement_timeout_s`, all undo their half.
        Another group takes the place of the one before. A group of one changes nothing.

        Args:
            group: a `torch.distributed` process group with a CPU backend (gloo), which is used in this call only.

        Raises:
            InvalidArgument: a group without a CPU backend, or that this process is not in.
            InvalidState: a rank cannot be reached.
        """
        agreement = self._connected(group)
        try:
            log.run(self._lock, partial(self._agree_by, agreement))
        finally:
            if agreement is not None and self._agreement is not agreement:
                agreement.mesh.close()

    def _connected(self, group: Any) -> Agreement | None:
        """Connections to the other ranks of `group`; None: there are no others."""
        ranks = as_group(group)
        if ranks.size == 1:
            return None
        mesh = connect(ranks, self.settings.agreement_timeout_s)
        how = "" if mesh.record is not None else ", on several hosts"
        log.info("cumem-sleep: rank %d of %d sleeps and wakes with the others%s", mesh.rank, mesh.size, how)
        return Agreement(mesh, self.settings.agreement_timeout_s)

    def _agree_by(self, agreement: Agreement | None) -> None:
        """Not while an operation agrees by the one before: it would find its connections closed."""
        with self._lock.hold():
            before, self._agreement = self._agreement, agreement
            self._cuda.why_not = why_not_for_ranks(1 if agreement is None else agreement.mesh.size)
            if before is not None:
                before.mesh.close()

    def _leave(self) -> None:
        """Leave the group: to the other ranks this one has ended."""
        if self._agreement is not None and not self._agreement.mesh.is_closed:  # as it is in a fork
            log.run(self._lock, partial(self._agree_by, None))

    def _vote_of_ranks(self, operation: str) -> Vote:
        """Through which the ranks agree on one operation. What fails inside, the others are told at once."""
        return Vote() if self._agreement is None else RankVote(self._agreement, operation, self._lock)

    # Allocating

    @contextmanager
    def use_memory_pool(self, tag: str | None = None, *, backup: bool | None = None) -> Iterator[None]:
        """What this thread's PyTorch allocates inside is tagged and can sleep.

        Pools nest (the innermost tag counts) and a tag may be entered again. They may be left in any order, and on any
        thread. Memory that is free when the pool is left goes back to the device. On the simulated driver, and without
        PyTorch, only `malloc` takes the tag.

        PyTorch cannot tell the asyncio tasks of a thread apart, so only one of them can be in a pool.

        Args:
            tag: names what the memory holds: `weights`, `kv_cache`, or any other name. None: `default`.
            backup: whether a sleep keeps the bytes, whatever the tag. Such memory sleeps and wakes only where its tag
                is named, at no level. None: levels decide.

        Raises:
            InvalidArgument: not a tag; `backup` is neither a bool nor None.
            InvalidState: another asyncio task of this thread is in a pool.
            DriverError: no usable driver.
        """
        tag = tag_or_default(tag)
        with self._operations.allocating(tag, _core.BackupPlan.BY_LEVEL if backup is None else plan_of(backup)):
            self._used_tags.add(tag)
            yield
            self._pools.warn_of_empty(tag)

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Tag what is allocated while a CUDA graph is captured `cudagraph`; gives the id of the pool to capture into.

        Use as `with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool): ...`. Such memory is backed
        up at every level.

        Raises:
            InvalidState: PyTorch does not reach a GPU here.
        """
        with self._operations.capturing("cudagraph_pool", GRAPH_TAG) as pools:
            self._used_tags.add(GRAPH_TAG)
            yield pools.graph_pool_id()

    @property
    def regions(self) -> Regions:
        """Pools with a plan of their own (`use_memory_pool(backup=...)`), as torch_memory_saver's calls need them."""
        return Regions(self._components, self._used_tags, self._operations, self.use_memory_pool)

    def malloc(self, nbytes: int, tag: str | None = None, device: int = 0) -> int:
        """Allocate device memory without PyTorch.

        Args:
            nbytes: at least 1; rounded up to the device's granularity (2 MiB).
            tag: as for `use_memory_pool`; None: the tag of the pool that this thread is in, or `default`.
            device: CUDA ordinal.

        Returns:
            The device address. Give it to `free`.

        Raises:
            InvalidArgument: a size that is not from 1 to 2⁶³ - 1, a bad tag, no such device.
            OutOfDeviceMemory: the device has too little free memory. Nothing was taken.
            DriverError: any other refusal.
        """
        check_integer("nbytes", nbytes, minimum=1)
        check_integer("device", device, minimum=0)
        self._operations.open()
        if tag is None:
            tag, backup = _core.thread_tag(), _core.thread_backup()
        else:
            tag, backup = checked_tag(tag), _core.BackupPlan.BY_LEVEL
        with self._cuda.lease():
            if device >= (count := _core.device_count()):
                raise InvalidArgument(f"device={device}: there are {count}, numbered from 0")
            free_bytes, total_on_device = _core.memory_info(device)
            if nbytes > total_on_device:  # beyond what the driver can be asked for, it answers "invalid value"
                raise OutOfDeviceMemory(nbytes, free_bytes, device)
            allocation = _core.Allocation(nbytes, tag, device, backup)
        self._used_tags.add(tag)
        return allocation.handed_out  # no call, no signal may come after this: the address could be lost

    def free(self, address: int) -> None:
        """Give back what `malloc` returned, asleep or awake. Waits for the work that runs on its device first; a graph
        capture, here or on another thread, is left intact.

        Raises:
            InvalidState: not the address of an allocation (never was, or freed before).
            DriverError: the driver refused; the memory is still there.
        """
        check_integer("address", address, minimum=0, maximum=MOST_ADDRESS)
        self._operations.open()
        with self._cuda.lease():
            _core.free(address)
        self._after_a_free()

    def _after_a_free(self) -> None:
        """Forget the backup of what was freed, unless an operation is at work, which does so at its end."""
        if _core.has_freed():
            log.run(self._lock, self._store.lock.after_a_free)
        else:
            _core.reclaim()

    # Sleeping and waking

    def sleep(
        self,
        level: int | str | Iterable[str] | None = None,
        offload_tags: str | Iterable[str] | None = None,
        *,
        tags: str | Iterable[str] | None = None,
        keep: Mapping[int, npt.ArrayLike] | None = None,
        drop: Mapping[int, npt.ArrayLike] | None = None,
    ) -> SleepReport:
        """Give device memory back; addresses stay.

        In order: wait for the devices; take host memory for what has no backup; digest what is to be backed up, to see
        what changed; copy that; digest again, to see that nothing wrote to it meanwhile; only then take the physical
        memory away. Where backups are compressed, host memory is taken after the digest, when their sizes are known;
        what has a compressed backup already takes some only if it does not fit there again, while others are copied.
        An error before that last step leaves everything mapped with its bytes. Should the driver refuse to undo a step
        as well, the error says what sleeps all the same (`asleep_segments`: the next wake brings its bytes back) and
        what was dropped (`lost_segments`); `usage` counts both as asleep. What sleeps already stays as it is, whatever
        the level.

        Args:
            level: 0 touches nothing. 1 (the default) backs up all but `kv_cache`, which it drops. 2 drops `weights`
                and `kv_cache` and backs up the rest. 3 is level 1, after which the CUDA state of the process
                (context, modules, graphs) leaves the GPU too, and no thread may use CUDA until the process wakes; where
                that is not possible, it stays at level 1, and the report says why. A process at level 2 goes on to 3
                from there. As in vLLM, tags given here are taken as `offload_tags`.
            offload_tags: instead of a level: exactly these tags are backed up, every other one is dropped. (vLLM's own
                allocator, called without arguments, backs up `default` alone; this one sleeps at level 1.)
            tags: which memory sleeps: what has these tags. What has a plan of its own (`use_memory_pool(backup=...)`)
                follows that. None: all memory but such.
            keep: ranges of memory that this sleep drops, whose bytes come back with the wake all the same, if nothing
                goes wrong. By an address of a segment: integers of shape (n, 2), offsets from that address and bytes,
                all multiples of 16. They are expendable: if there is too little host memory, or the driver refuses,
                none of them is kept, which fails neither the sleep nor the wake (`not_kept` in the reports). They give
                way to backups. The rest of such a segment comes back with undefined bytes.
            drop: what may be lost of the tags that this sleep drops, because somebody writes it again: in the form of
                `keep`, of any size (rounded inwards to 16 bytes; ranges may overlap). Everything else of these tags
                that is in use is backed up and proven like any backup. A tag of which no address is given is dropped
                whole; an address with no ranges only says that its tag is meant.

        Returns:
            What was done. If everything is already asleep, nothing is done, and the report says so.

        Raises:
            InvalidArgument: no such level, or none of the tags to back up was ever used (they may be misspelt), or one
                of `tags` never was; ranges to keep that overlap, or were given at level 0 or 2; ranges that do not lie
                in this memory.
            InvalidState: a CUDA graph is being captured, or something wrote to the memory while it was backed up.
            OutOfHostMemory: a limit leaves too little for the backups.
            DriverError: the driver refused a call.
            CheckpointFailed: at level 3: all memory is asleep, but the CUDA state can neither leave the GPU nor be used
                there.
            RankFailed: another rank failed, or did not answer, so that no rank sleeps.
        """
        with self._vote_of_ranks("sleep") as vote:
            is_dropped = self._dropped(level, offload_tags)
            kept = {} if keep is None else ranges_to_keep(keep, in_pools()())
            if kept and isinstance(level, int) and level in (0, 2):
                raise InvalidArgument(f"sleep(level={level}, keep=...): this level keeps nothing of what it drops")
            if is_dropped is None:
                note = "level 0 keeps all memory; nothing was done"
                return SleepReport(note=note, simulated=_core.driver_is_simulated())
            meant = named(None if tags is None else self._used_tags.checked(tags))
            arguments = (self._components, vote, meant, by_plan(is_dropped), "sleep", kept, self._declared(drop))
            uses = CudaUse.LEASE_UNLESS_AWAY
            if is_checkpoint(level):
                report = self._with_checkpoint(lambda: sleep(*arguments), vote, uses)
            else:
                work = sleep, arguments, vote
                report = Operation(self._operations, "sleep", *work, "sleep", uses, frees_unused=True).run()
            self._whole_sleeps += tags is None
            return report

    def _dropped(
        self, level: int | str | Iterable[str] | None, offload_tags: str | Iterable[str] | None
    ) -> IsDropped | None:
        """Which tags a sleep with these arguments drops; None: it touches no memory."""
        if level is not None and offload_tags is not None:
            given = f"level={shown(level)}, offload_tags={shown(offload_tags)}"
            raise InvalidArgument(f"sleep({given}): give one of the two")
        is_number = isinstance(level, str) and level.strip().lstrip("+-").isdecimal()
        if isinstance(level, Iterable) and not is_number:
            level, offload_tags = None, level
        if offload_tags is None:
            return dropped_at_level(level)
        kept = self._used_tags.to_back_up(offload_tags)
        return lambda tag: tag not in kept

    def _declared(self, drop: Mapping[int, npt.ArrayLike] | None) -> Declared:
        """What may be lost. PyTorch is asked what is in use before the lock is taken: a thread that has PyTorch's may
        wait for that.
        """
        if drop is None:
            return NOTHING_DECLARED
        segments = in_pools()()
        return declared(drop, segments, self._pools.in_use())

    def _with_checkpoint(self, sleep_first: Callable[[], SleepReport], vote: Vote, uses_cuda: CudaUse) -> SleepReport:
        """A sleep at level 1, and then on to level 3."""
        if not _core.driver_calls_suspended():
            gc.collect()  # a finaliser that runs later might call the driver, and wait forever
        work = self._checkpoint, (sleep_first,)
        return Operation(self._operations, "sleep", *work, vote, "sleep", uses_cuda, frees_unused=True).run()

    def _checkpoint(self, sleep_first: Callable[[], SleepReport]) -> SleepReport:
        self._stop_preparing()
        atexit.unregister(_come_back_at_exit)
        atexit.register(_come_back_at_exit)
        return checkpoint(self._store, sleep_first, self._cuda.why_not)

    def _checkpoint_asleep(self) -> SleepReport:
        return self._with_checkpoint(_all_asleep_still, Vote(), CudaUse.NONE)

    def using_cuda(self) -> AbstractContextManager[None]:
        """Put this around CUDA calls that are not this layer's own: at level 3 they would wait forever.

        The process comes back to level 1 first, and stays there until the block ends. Then `Settings.deep_after_s` is
        counted anew.

        Raises:
            OutOfDeviceMemory, CheckpointFailed: it cannot come back; nothing was called.
        """
        return self._cuda.lease()

    def _prepare_to_end(self) -> None:
        """Come back from level 3 before this process ends, so that libraries can let go of the GPU.

        If that fails the process ends at once: the libraries' calls would wait forever.
        """
        if not _core.driver_is_forked():
            self._cuda.stop()
            # A signal handler may raise meanwhile, and call this.
            log.run(self._lock, THIS_PROCESS.end_with_process)

    @property
    def checkpoint(self) -> Checkpointed | None:
        """The checkpoint of this process's CUDA state: what it freed, and what must be free to bring the state back.

        None unless the process is at level 3. Touches no GPU.
        """
        return THIS_PROCESS.taken

    def discard(self, tags: str | Iterable[str], *, drop: Mapping[int, npt.ArrayLike] | None = None) -> SleepReport:
        """Drop these tags, without a backup, and leave the rest as it is. What is already asleep keeps its backup.

        Args:
            drop: as for `sleep`: what else lies in this memory is backed up.

        Raises:
            InvalidArgument: a tag that is neither `weights` nor `kv_cache` and was never used; a range that does not
                lie in this memory.
            InvalidState, DriverError, RankFailed: as `sleep`.
        """
        with self._vote_of_ranks("discard") as vote:
            meant, may_go = in_pools(self._used_tags.checked(tags)), self._declared(drop)
            arguments = (self._components, vote, meant, lambda _: True, "discard", None, may_go)
            uses = CudaUse.LEASE_UNLESS_AWAY
            return Operation(self._operations, "discard", sleep, arguments, vote, "discard", uses).run()

    def wake_up(
        self,
        tags: str | Iterable[str] | None = None,
        *,
        restore: bool = True,
        drop: Mapping[int, npt.ArrayLike] | None = None,
        retain_backups: bool | None = None,
    ) -> WakeReport:
        """Take device memory again, at the same addresses, and restore what was backed up.

        Restored bytes are compared with the bytes at sleep by their digests (unless `verify` is `off`). If anything
        fails, what was taken goes back, everything stays asleep with its backups, and the same call can be made again.
        What was dropped comes back with undefined bytes.

        Args:
            tags: what to wake; None: all memory without a plan of its own. Of that only `weights` and `kv_cache` can be
                left asleep: every other tag wakes with the first.
            restore: False: these tags (None: `weights` and `kv_cache`) come back with undefined bytes, as after
                `release_backups`; once all is awake, their backups go.
            drop: with `restore=False`, as for `release_backups`.
            retain_backups: whether the backups stay until the next sleep, which then copies only what changed; all, if
                the settings neither retain nor verify: then it has no digests. None: as the settings say.

        Raises:
            InvalidArgument: a tag that is neither `weights` nor `kv_cache` and was never used; `restore` or
                `retain_backups` is no bool; a range that does not lie in this memory.
            OutOfDeviceMemory: the device has too little free memory. At level 3 the CUDA state of the process needs
                some as well; it then stays off the GPU.
            CheckpointFailed: the driver did not bring that state back.
            OutOfHostMemory: the driver cannot pin again what was unpinned for level 3. The process is at level 1 then.
            BackupMismatch: restored bytes are not those at sleep.
            CodecError: a compressed backup cannot be decoded here.
            DriverError: the driver refused a call.
            RankFailed: another rank failed, or did not answer, so that no rank wakes.
        """
        with self._vote_of_ranks("wake_up") as vote:
            check_bool("restore", restore)
            if retain_backups is not None:
                check_bool("retain_backups", retain_backups)
            chosen = None if tags is None else self._used_tags.checked(tags)
            meant = woken(chosen)
            unwanted = None if restore else in_pools(set(DEFERRABLE_TAGS) if chosen is None else chosen)
            work = wake, self._components, vote, meant, retain_backups, unwanted, self._declared(drop)
            return waking(self._operations, self._components, meant, *work, vote=vote).run()

    # Preparing

    def prepare(self, *, keep_bytes: int = 0) -> Preparation:
        """Back up in the background what a sleep at level 1 would copy, so that it will copy nothing. Returns at once.

        Host memory is taken, pinned and filled by a thread while the model runs, also beside the capture of CUDA
        graphs, at no more than `Settings.prepare_bytes_per_second`. The sleep detects and copies what changes
        after that. Memory allocated later is not included: call it again. A new call ends the one before. The vault
        begins to read what it has of sleepers in files.

        The thread finds out the sizes of compressed backups segment by segment. So this call only refuses what no code
        could make fit (at five eighths of the bytes); a limit that is reached later ends the preparation.

        Args:
            keep_bytes: pin host memory for so much that sleeps keep of each GPU (`sleep(keep=...)`), too, if the limits
                leave it beside the backups, which it gives way to.

        Returns:
            The preparation: it can be waited for and stopped, and says why it ended early, if it did.

        Raises:
            InvalidArgument: `keep_bytes` is no such number.
            InvalidState: the settings do not retain backups; this thread captures a CUDA graph.
            OutOfHostMemory: a limit leaves too little for all of it, compressed or not; nothing was taken.
        """
        if not self.settings.retain_backups:
            raise InvalidState("prepare() makes backups ahead, but retain_backups is off: none would be kept")
        check_integer("keep_bytes", keep_bytes, minimum=0)
        return Operation(self._operations, "prepare", self._begin_preparing, (keep_bytes,)).run()

    # Outliving the process

    def offer(self, name: str, tensors: Mapping[str, tuple[int, int]]) -> None:
        """Let [the vault](vault.md) keep tensors under a name, also when this process has ended, for `adopt`.

        They are backed up now, as by a sleep, in whole segments; the next sleep copies only what has changed since. The
        name stands for these bytes from here on. Say the same name for the same bytes only: whoever adopts it gets
        what was offered last.

        Args:
            name: 1 to 256 characters.
            tensors: the address and the bytes of each, both multiples of 16, by its name. They are awake, and nothing
                writes to them meanwhile. (Memory of PyTorch's may be rounded up: its blocks are multiples of 512.)

        Raises:
            InvalidArgument: bad names; a tensor does not lie in one segment, or there are too many.
            InvalidState: there is no vault that keeps names; backups are compressed; a tensor sleeps, or something
                wrote to it meanwhile.
            OutOfHostMemory: the vault has too little, or keeps less.
            VaultError: the vault is lost, or another was found meanwhile.
            DriverError: the driver refused a call.
        """
        Operation(self._operations, "offer", offer, (self._components, name, tensors)).run()

    def adopt(self, name: str, tensors: Mapping[str, tuple[int, int]]) -> bool:
        """Fill tensors with what was kept under a name (`offer`). Every byte is proven by the digests made then.

        Args:
            tensors: as in `offer`: the same names and sizes, anywhere in memory of this layer.

        Returns:
            False: nothing is kept under that name, or there is no vault; the tensors are as they were.

        Raises:
            InvalidArgument: as `offer`.
            InvalidState: other tensors are kept under that name, or these sleep.
            VaultError: the vault does not answer, or what it says cannot be read.
            AdoptionFailed: the bytes that came are not those that were offered (nobody is given them again), the vault
                was lost meanwhile, or the driver refused a call. These tensors are filled with NaN (0xFF), unless the
                driver refuses that, too, as the error says then. After all other errors they are as they were.
        """
        return Operation(self._operations, "adopt", adopt, (self._components, name, tensors)).run()

    def _begin_preparing(self, keep_bytes: int) -> Preparation:
        self._stop_preparing()
        if self._store.memory.vault is not None:
            self._store.memory.vault.read_ahead()
        segments, _ = wanted_ahead(self._components)
        preparation = Preparation(segments, self._components, keep_bytes)
        self._preparation = preparation  # before it starts: whatever happens, it can be stopped
        preparation.start()
        return preparation

    def _prepare_where_there_is_room(self) -> None:
        """As `prepare`, which nobody asked for: if host memory has room for all ranks, and as long as it has.

        Ends with the first sleep, unless that is of some tags; what it has backed up stays as ever.
        """
        speaks = self._agreement is None or self._agreement.mesh.rank == 0
        try:
            with self._vote_of_ranks("prepare") as vote:
                said = Operation(self._operations, "prepare", self._begin_unasked, (vote,), vote=vote).run()
        except CumemSleepError as error:
            said = f"cumem-sleep makes no backups ahead, so the first sleep copies everything: {error}"
        if speaks:
            log.info("%s (%sPREPARE=auto)", said, PREFIX)

    def _begin_unasked(self, vote: Vote) -> str:
        self._stop_preparing()
        segments, needed_bytes = wanted_ahead(self._components)
        own = self._store.catalogue.own
        if self._agreement is not None:
            self._agreement.gave_back = False
        unasked = Unasked(own, self._agreement, lambda: self._whole_sleeps)
        preparation = Preparation(segments, self._components, unasked=unasked)
        try:
            if own is not None:  # the vault's limits are looked at when it takes the memory
                # Each rank commits its own and then looks, so the last one sees what all of them will take.
                own.commit_ahead(needed_bytes, lambda: preparation.share_to_come(needed_bytes))
            vote.agree(PhaseTimer())
        except BaseException:
            preparation.stop()
            raise
        self._preparation = preparation
        preparation.start()
        each = "" if self._agreement is None else " in each worker"
        return f"cumem-sleep makes backups ahead, so the first sleep copies nothing: {format_bytes(needed_bytes)}{each}"

    def _left_pool(self) -> None:
        """A thread has left a pool, whose memory is complete now."""
        pools = self._pools.found
        if pools is not None and not pools.is_capturing():
            try:
                log.run(self._lock, self._components.warm_up)
            except CumemSleepError as error:  # no reason for what was allocated to fail
                log.warning("sleep and wake were not made ready, the first ones take longer: %s", error)
        if self.settings.prepare is True and self._prepares_after_pools:
            try:
                self.prepare()
            except CumemSleepError as error:
                log.warning("prepare did not begin, the next sleep copies everything: %s", error)

    def _stop_preparing(self) -> None:
        """May be called with or without the lock held, which the thread never waits for."""
        if self._preparation is not None:
            self._preparation.stop()

    def _give_way(self) -> None:
        """Let go of everything, for the allocator that takes this one's place."""
        if not _core.driver_is_forked():
            with self._cuda.lease():
                pass
        self._stop_background_work()
        self._leave()
        if not _core.driver_is_forked():
            log.run(self._lock, self._leave_store)  # what its thread has left, which nobody could ask it for any more

    def _leave_store(self) -> None:
        """Forget all backups, and whoever keeps them. Does not open the driver, so nothing refuses it."""
        with self._lock.hold():
            self._store.memory.leave()

    def _stop_background_work(self) -> None:
        self._cuda.stop()
        self._stop_preparing()
        self._store.memory.stop()

    # Looking

    def usage(self) -> dict[str, TagUsage]:
        """What the segments of each tag hold, and their backups."""
        return usage(self._operations, self._components, _core.segments)

    def backup_place(self) -> BackupPlace:
        """Where backups lie: in memory of this process, or in which vault. Touches no GPU."""
        if not _core.driver_is_open():  # then there are no backups, and `auto` does not look for a vault yet
            return BackupPlace("" if self.settings.vault in ("off", "auto") else self.settings.vault)
        return self._operations.look("backup_place", self._store.memory.place)

    def read_backup(self, address: int, nbytes: int, *, copy: bool = True) -> npt.NDArray[np.uint8] | None:
        """The bytes that the backup of this device memory holds: those at its last sleep. It may be asleep or awake.

        Args:
            address: in memory of this layer, with `nbytes` from there on in the same segment.
            copy: False: not copied, where the bytes lie together and uncompressed in memory of this process.
                Then the array is valid only until the next call that puts memory to sleep, wakes, frees or releases
                some, whichever memory that is.

        Returns:
            The bytes, which without a copy cannot be written to; None: it is awake, and has no backup (any more).

        Raises:
            InvalidArgument: not in one segment of this layer.
            InvalidState: it sleeps without a backup.
        """
        check_integer("address", address, minimum=0, maximum=MOST_ADDRESS)
        check_bool("copy", copy)
        check_integer("nbytes", nbytes, minimum=1)
        return self._operations.look("read_backup", read_backup, self._components, address, nbytes, copy)

    def digests(self, tags: str | Iterable[str]) -> dict[int, str]:
        """The 128-bit digest of each segment of these tags, by its address: of its bytes if it is awake, else of those
        that its backup holds. The same bytes have the same digest, in any process. Let nothing write to it meanwhile.

        Segments without bytes are left out, and those that fell asleep with `verify` `off` and nothing retained.

        Raises:
            InvalidArgument: a tag that is neither `weights` nor `kv_cache` and was never used.
            DriverError, OutOfHostMemory: the memory could not be read.
        """
        meant = in_pools(self._used_tags.checked(tags))
        uses_cuda = CudaUse.LEASE_UNLESS_AWAY
        return Operation(self._operations, "digests", digests, (self._components, meant), uses_cuda=uses_cuda).run()

    def kept_room(self) -> int:
        """How many bytes a sleep at level 1 could keep of what it drops (`sleep(keep=...)`): what the limits on host
        memory, or the vault's free memory, leave beside the backups; of a group, to each rank on this host. 0 where no
        vault answers.
        """
        return Operation(self._operations, "kept_room", self._kept_room, uses_cuda=CudaUse.LEASE_UNLESS_AWAY).run()

    def _kept_room(self) -> int:
        sharers = 1 if self._agreement is None else self._agreement.mesh.size_here
        return self._store.memory.left_bytes([s for s in in_pools()() if s.tag not in DROPPED_AT_LEVEL_1], sharers)

    def get_current_usage(self) -> int:
        """Bytes of all segments without a plan of their own, mapped or not (vLLM wants none before its own)."""
        return total_bytes(in_pools()())

    def totals(self) -> dict[str, OperationTotals]:
        """What all sleeps, wakes and discards did so far, by operation."""
        return dict(self._operations.totals)

    # Ending

    def release_backups(
        self, tags: str | Iterable[str] | None = None, *, drop: Mapping[int, npt.ArrayLike] | None = None
    ) -> int:
        """Give up backups, and their host memory.

        Args:
            tags: None: all that is kept only to make the next sleep cheaper, the backups of what is awake; ends what
                `prepare` has begun. Otherwise backups of what sleeps: new bytes are about to be loaded. Memory of these
                tags comes back with undefined bytes then, in the time that mapping takes, as after level 2. What sleeps
                have kept of dropped memory goes, too. What is awake keeps its backup, as does memory with a plan of its
                own. A process at level 3 stays there.
            drop: with `tags`, as for `sleep`. A segment that holds anything else keeps its backup, and comes back
                whole.

        Returns:
            How many bytes of host memory it gave back; with `tags`, how many bytes will not come back, or are to be
            loaded again all the same.

        Raises:
            InvalidArgument: a tag that is neither `weights` nor `kv_cache` and was never used; a range that does not
                lie in this memory.
            RankFailed: with `tags`: another rank failed, or did not answer, so that no rank gives up any.
        """
        if tags is None:
            if drop is not None:
                raise InvalidArgument("release_backups(drop=...) needs tags: of what sleeps")
            return Operation(self._operations, "release_backups", self._release_retained).run()
        with self._vote_of_ranks("release_backups") as vote:
            meant = in_pools(self._used_tags.checked(tags))
            arguments = (self._components, vote, meant, self._declared(drop))
            uses = CudaUse.LEASE_UNLESS_AWAY
            return Operation(self._operations, "release_backups", forget, arguments, vote, uses_cuda=uses).run()

    def _release_retained(self) -> int:
        self._stop_preparing()
        before = self._store.memory.bytes
        self._store.memory.clear()
        return before - self._store.memory.bytes

    def release_pools(self) -> None:
        """Give up the PyTorch pool for CUDA graphs and return free pool memory to the device. Live tensors stay."""
        if self._pools.found is not None and not _core.driver_is_forked():
            with self.using_cuda():
                gc.collect()
                self._pools.found.release()
                self._after_a_free()

    def close(self) -> None:
        """`release_pools`, and the host memory of backups of awake segments. The allocator stays usable."""
        self.release_pools()
        if _core.driver_is_open() and not _core.driver_is_forked():
            self.release_backups()


# These reach the allocator through its class, so that one that was replaced is freed when nobody uses it.


def _left_pool() -> None:
    if CuMemAllocator.instance is not None:
        CuMemAllocator.instance._left_pool()


def _forget_freed_backups() -> None:
    instance = CuMemAllocator.instance
    if instance is not None and not _core.driver_is_forked():
        instance._store.lock.after_a_free()


def _checkpoint() -> None:
    if CuMemAllocator.instance is not None:
        CuMemAllocator.instance._checkpoint_asleep()


def _all_asleep_still() -> SleepReport:
    """The report of a sleep at level 1 that finds nothing awake.

    Raises:
        InvalidState: something is awake, or there is no memory.
    """
    if awake := awake_in_words():
        raise InvalidState(f"level 3 comes after a sleep: {awake}")
    if not _core.segments():
        raise InvalidState("level 3 comes after a sleep: there is no memory of this layer that sleeps")
    return SleepReport(note="everything sleeps already")


def _come_back_at_exit() -> None:
    """Registered last, to run first: what libraries do at exit, imported later than this module, may call CUDA."""
    THIS_PROCESS.stays = True
    for allocator in list(_allocators):
        allocator._prepare_to_end()


@atexit.register
def _stop_at_exit() -> None:
    _core.on_free(None)
    _come_back_at_exit()
    for allocator in list(_allocators):
        allocator._stop_background_work()
    for store in list(_stores):
        store.memory.stop()
