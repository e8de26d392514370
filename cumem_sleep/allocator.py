"""`CuMemAllocator`: tags what is allocated, and orders its sleep and its waking.

Segments belong to the C++ table (`csrc/allocator.h`), host memory to the backup store. This module owns neither; it
decides what happens to which, in such an order that a failure leaves a whole state (see `sleep` and `wake_up`).
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, ClassVar, TypeVar

from . import _core, log
from .backups.store import BackupStore
from .codec.workbench import Compressor, Encoding, Workbench, close_all
from .digest.device import DeviceDigester, Digest, DigestRun
from .errors import (
    BackupMismatch,
    CodecError,
    CumemSleepError,
    DriverError,
    InvalidArgument,
    InvalidArgumentType,
    InvalidState,
    OutOfDeviceMemory,
    OutOfHostMemory,
    format_bytes,
)
from .integrations.torch import TorchPools, torch_with_cuda
from .operations.prepare import Preparation
from .report import OperationTotals, PhaseTimer, SleepReport, TagUsage, WakeReport
from .settings import Settings
from .transfer.restorer import Restorer
from .variables import warn_of_misspelt

DEFAULT_TAG = "default"
GRAPH_TAG = "cudagraph"
RUNTIME_TAG = "runtime"  # vLLM's, for what belongs to no model, as LoRA's buffers
# The only tags that a selective wake may leave asleep, and that a level may drop (as in vLLM).
DEFERRABLE_TAGS = ("weights", "kv_cache")

# Whose threads are to end in good order at exit; those that were let go of as well, as long as a thread works for them.
_allocators: weakref.WeakSet[CuMemAllocator] = weakref.WeakSet()
_stores: weakref.WeakSet[BackupStore] = weakref.WeakSet()

_Report = TypeVar("_Report", SleepReport, WakeReport)
_Result = TypeVar("_Result")
_Sleep = _core.Segment.Sleep
_HEAD_BYTES = 2 << 30
_PART_BYTES = 8 << 30  # digested in a few milliseconds, about as long as what is in flight lasts
_IDLE_S = 0.003  # waiting for a device without work takes less than 1 ms, also in a vLLM worker (`vllm_serve.json`)
_CAPTURE_ERRORS = "CUDA_ERROR_STREAM_CAPTURE_"


class CuMemAllocator:
    """The sleep-mode allocator of this process.

    Its methods may be called from any thread; sleep, wake and what else changes memory run one after the other. PyTorch
    is used where it is installed and reaches the GPU; without it, `malloc` and `free` serve.

    What holds the lock runs on a thread of its own, and the caller waits (`csrc/operation.h`): so a signal handler may
    raise at any time, and any number of times, and may call any of these methods. What it raises asks the operation to
    stop, and is raised when that has ended; then either all was done or nothing.

    Args:
        settings: how to behave; by default what the environment says (`Settings.from_environment`).

    Raises:
        InvalidArgument: an environment variable has a bad value.
        InvalidState: another allocator of this process still has memory handed out.
    """

    instance: ClassVar[CuMemAllocator | None] = None
    default_tag: ClassVar[str] = DEFAULT_TAG
    # Whether leaving a pool is when `Settings.prepare` begins; vLLM's plugin begins after the warm-up instead.
    prepares_after_pools: ClassVar[bool] = True
    _warned_of_empty_pool: ClassVar[bool] = False
    _instance_lock: ClassVar[_core.OperationLock] = _core.OperationLock()

    def __init__(self, settings: Settings | None = None) -> None:
        if settings is not None and not isinstance(settings, Settings):
            raise InvalidArgumentType(f"settings={settings!r}: a cumem_sleep.Settings is wanted, or None")
        self.settings = Settings.from_environment() if settings is None else settings
        warn_of_misspelt()
        other = CuMemAllocator.instance
        if other is not None:
            if _core.segments():
                raise InvalidState(
                    "this process already has a CuMemAllocator with memory handed out; use get_instance()"
                )
            other._stop_background_work()
            if not _core.driver_is_forked():
                # What its thread has left, which nobody could ask it for any more.
                log.run(other._lock, other._clear_store)
        self._lock: _core.OperationLock = _core.OperationLock()
        self._retired: bool = False
        self._driver_checked = False
        self._store: BackupStore = BackupStore(self.settings, self._lock)
        _allocators.add(self)
        _stores.add(self._store)
        self._digester = DeviceDigester()
        self._restorer = Restorer()
        self._compressor = Compressor(self.settings.compress == "auto")
        self._torch_pools: TorchPools | None = None
        self._used_tags: set[str] = set()
        self._warm_devices: set[int] = set()
        self._preparation: Preparation | None = None
        self._totals: dict[str, OperationTotals] = {}
        # Nothing fails, and no signal is handled, between these two: there is always one that can be used.
        CuMemAllocator.instance = self
        if other is not None:
            other._retired = True

    @classmethod
    def get_instance(cls) -> CuMemAllocator:
        """The allocator of this process, made at the first call. Touches no GPU."""
        instance = cls.instance
        return instance if instance is not None else log.run(cls._instance_lock, cls._make_instance)

    @classmethod
    def _make_instance(cls) -> CuMemAllocator:
        with cls._instance_lock.hold():
            return cls.instance if cls.instance is not None else cls()

    # Allocating

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """What this thread's PyTorch allocates inside is tagged and can sleep.

        Pools nest (the innermost tag counts) and a tag may be entered again. Memory that is free when the pool is left
        goes back to the device. On the simulated driver, and without PyTorch, only `malloc` and the CuPy allocator take
        the tag.

        Args:
            tag: names what the memory holds: `weights`, `kv_cache`, or any other name. None: `default`.

        Raises:
            InvalidArgument: not a tag.
            DriverError: no usable driver.
        """
        tag = DEFAULT_TAG if tag is None else _checked_tag(tag)
        self._open()
        pools = self._pools(import_torch=True)
        self._used_tags.add(tag)
        with _core.ThreadTag(tag), nullcontext() if pools is None else pools.use():
            yield
            self._warn_of_empty_pool(tag)
        if pools is not None and not pools.is_capturing():
            log.run(self._lock, self._warm_up)
        if self.settings.prepare and self.prepares_after_pools:
            try:
                self.prepare()
            except CumemSleepError as error:
                log.warning("prepare did not begin, the next sleep copies everything: %s", error)

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Tag what is allocated while a CUDA graph is captured `cudagraph`; gives the id of the pool to capture into.

        Use as `with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool): ...`. Such memory is backed
        up at every level.

        Raises:
            InvalidState: PyTorch does not reach a GPU here.
        """
        self._open()
        pools = self._pools(import_torch=True)
        if pools is None:
            raise InvalidState("cudagraph_pool needs PyTorch and a GPU that it reaches")
        self._used_tags.add(GRAPH_TAG)
        with _core.ThreadTag(GRAPH_TAG):
            yield pools.graph_pool_id()

    def malloc(self, nbytes: int, tag: str | None = None, device: int = 0) -> int:
        """Allocate device memory without PyTorch.

        Args:
            nbytes: at least 1; rounded up to the device's granularity (2 MiB).
            tag: as for `use_memory_pool`; None is the pool's that this thread is in, `default` outside.
            device: CUDA ordinal.

        Returns:
            The device address. Give it to `free`.

        Raises:
            InvalidArgument: a size below 1, a bad tag, no such device.
            OutOfDeviceMemory: the device has too little free memory. Nothing was taken.
            DriverError: any other refusal.
        """
        _check_integer("nbytes", nbytes, minimum=1)
        _check_integer("device", device, minimum=0)
        self._open()
        tag = _core.thread_tag() if tag is None else _checked_tag(tag)
        if device >= (count := _core.device_count()):
            raise InvalidArgument(f"device={device}: there are {count}, numbered from 0")
        free_bytes, total_bytes = _core.memory_info(device)
        if nbytes > total_bytes:  # beyond what the driver can be asked for, it answers "invalid value"
            raise OutOfDeviceMemory(nbytes, free_bytes, device)
        self._used_tags.add(tag)
        return _core.Allocation(
            nbytes, tag, device
        ).handed_out  # no call after this, nor signal: the address may be lost

    def free(self, address: int) -> None:
        """Give back what `malloc` returned, asleep or awake. Waits for the work that runs on its device first; a graph
        capture, here or on another thread, is left intact.

        Raises:
            InvalidState: not the address of an allocation (never was, or freed before).
            DriverError: the driver refused; the memory is still there.
        """
        _check_integer("address", address, minimum=0)
        if address >= 1 << 64:
            raise InvalidState(f"0x{address:x} is not an address: more than 64 bits")
        self._open()
        _core.free(address)
        self._forget_freed()

    # Sleeping and waking

    def sleep(
        self, level: int | str | Iterable[str] | None = None, offload_tags: str | Iterable[str] | None = None
    ) -> SleepReport:
        """Give device memory back; addresses stay.

        In order: wait for the devices; take host memory for what has no backup; digest what is to be backed up, to see
        what changed; copy that; digest again, to see that nothing wrote to it meanwhile; only then take the physical
        memory away. Where backups are compressed, host memory is taken after the digest, when their sizes are known;
        what has a compressed backup already takes some only if it does not fit there again, while others are copied.
        An error or an interrupt before that last step leaves everything mapped with its bytes. Should the driver refuse
        to undo a step as well, the error says what sleeps all the same (`asleep_segments`: the next wake brings its
        bytes back) and what was dropped (`lost_segments`); `usage` counts both as asleep. An interrupt after that step
        finds everything asleep, with its backups. What sleeps already stays as it is, whatever the level.

        Args:
            level: 0 touches nothing. 1 (the default) backs up all but `kv_cache`, which it drops. 2 drops `weights`
                and `kv_cache` and backs up the rest. As in vLLM, tags given here are taken as `offload_tags`.
            offload_tags: instead of a level: exactly these tags are backed up, every other one is dropped. (vLLM's own
                allocator, called without arguments, backs up `default` alone; this one sleeps at level 1.)

        Returns:
            What was done. Where everything sleeps already, nothing, and the report says so.

        Raises:
            InvalidArgument: no such level; tags to back up of which not one was ever used (they may be misspelt).
            InvalidState: a CUDA graph is being captured, or something wrote to the memory while it was backed up.
            OutOfHostMemory: a limit leaves too little for the backups.
            DriverError: the driver refused a call.
        """
        if level is not None and offload_tags is not None:
            raise InvalidArgument(f"sleep(level={level!r}, offload_tags={offload_tags!r}): give one of the two")
        if isinstance(level, Iterable) and not (isinstance(level, str) and _is_number(level)):
            level, offload_tags = None, level
        if offload_tags is None:
            is_dropped = _dropped_at_level(level)
        else:
            kept = self._tags_to_back_up(offload_tags)

            def is_dropped(tag: str) -> bool:
                return tag not in kept

        if is_dropped is None:
            return self._logged(SleepReport(note="level 0 keeps all memory; nothing was done"))
        return self._operate("sleep", partial(self._sleep_awake, None, is_dropped, "sleep"), _trim)

    def discard(self, tags: str | Iterable[str]) -> SleepReport:
        """Drop these tags, without a backup, and leave the rest as it is. What sleeps already keeps its backup.

        Raises:
            InvalidArgument: a tag that is neither `weights` nor `kv_cache` and was never used.
            InvalidState, DriverError: as `sleep`.
        """
        chosen = self._known_tags(tags)
        return self._operate("discard", partial(self._sleep_awake, chosen, lambda _: True, "discard"))

    def wake_up(self, tags: str | Iterable[str] | None = None) -> WakeReport:
        """Take device memory again, at the same addresses, and restore what was backed up.

        Restored bytes are compared with the bytes at sleep by their digests (unless `verify` is `off`). If anything
        fails, what was taken goes back, everything stays asleep with its backups, and the same call can be made again.
        What was dropped comes back with undefined bytes.

        Args:
            tags: what to wake; None wakes all. Only `weights` and `kv_cache` can be left asleep: every other tag wakes
                with the first.

        Raises:
            InvalidArgument: a tag that is neither `weights` nor `kv_cache` and was never used.
            OutOfDeviceMemory: the device has too little free memory.
            BackupMismatch: restored bytes are not those at sleep.
            CodecError: a compressed backup cannot be decoded here.
            DriverError: the driver refused a call.
        """
        chosen = None if tags is None else self._known_tags(tags)
        return self._operate("wake_up", partial(self._wake_asleep, chosen), partial(self._make_way, chosen))

    # Preparing

    def prepare(self) -> Preparation:
        """Back up in the background what a sleep at level 1 would copy, so that it will copy nothing. Returns at once.

        Host memory is taken, pinned and filled by a thread while the model runs, also beside the capture of CUDA
        graphs, at no more than `Settings.prepare_bytes_per_second`. What changes after that is found out, and copied,
        by the sleep. Memory allocated later is not included: call it again. A new call ends the one before.

        How much compressed backups take, the thread finds out segment by segment. So this call only refuses what no
        code could make fit (five eighths of the bytes); a limit that is reached later ends the preparation.

        Returns:
            What can be waited for and stopped, and says why it ended early if it did.

        Raises:
            InvalidState: the settings do not retain backups; this thread captures a CUDA graph.
            OutOfHostMemory: a limit leaves too little for all of it, compressed or not; nothing was taken.
        """
        if not self.settings.retain_backups:
            raise InvalidState("prepare() makes backups ahead, but retain_backups is off: none would be kept")
        return self._operate("prepare", self._begin_preparing)

    def _begin_preparing(self) -> Preparation:
        self._stop_preparing()
        is_dropped = _dropped_at_level(1)
        wanted = [s for s in _core.segments() if s.sleep == _Sleep.AWAKE and is_dropped and not is_dropped(s.tag)]
        self._store.check(self._store.needed_bytes(wanted, compressed=self._compressor.on), wanted)
        preparation = Preparation(
            wanted,
            self._lock,
            self._store,
            self._digester,
            self.settings.prepare_bytes_per_second,
            self._warm_up,
            self._compressor,
        )
        self._preparation = preparation  # before it starts: whatever happens, it can be stopped
        preparation.start()
        return preparation

    def _stop_preparing(self) -> None:
        """May be called with or without the lock held, which the thread never waits for."""
        if self._preparation is not None:
            self._preparation.stop()

    def _stop_background_work(self) -> None:
        self._stop_preparing()
        self._store.stop()

    # Looking

    def usage(self) -> dict[str, TagUsage]:
        """What the segments of each tag hold, and their backups."""
        if not _core.driver_is_open():
            return {}
        return self._operate("usage", self._usage)

    def _usage(self) -> dict[str, TagUsage]:
        by_tag: dict[str, list[_core.Segment]] = {}
        for segment in _core.segments():
            by_tag.setdefault(segment.tag, []).append(segment)
        return {
            tag: TagUsage(
                segments=len(segments),
                bytes=sum(segment.bytes for segment in segments),
                mapped_bytes=sum(segment.bytes for segment in segments if segment.has_memory),
                host_bytes=sum(self._store.host_bytes_of(segment) for segment in segments),
                asleep_segments=sum(segment.sleep != _Sleep.AWAKE for segment in segments),
                backed_up_bytes=_total(segment for segment in segments if self._store.get(segment) is not None),
            )
            for tag, segments in by_tag.items()
        }

    def get_current_usage(self) -> int:
        """Bytes of all segments, mapped or not (vLLM's call)."""
        return _total(_core.segments())

    def totals(self) -> dict[str, OperationTotals]:
        """What all sleeps, wakes and discards did so far, by operation."""
        return dict(self._totals)

    # Ending

    def release_backups(self) -> int:
        """Give back the host memory of backups that are kept only to make the next sleep cheaper; returns its bytes.

        Ends what `prepare` has begun.
        """
        return self._operate("release_backups", self._release_backups)

    def _release_backups(self) -> int:
        self._stop_preparing()
        before = self._store.host_bytes
        self._store.clear()
        return before - self._store.host_bytes

    def release_pools(self) -> None:
        """Give up the PyTorch pool for CUDA graphs and return free pool memory to the device. Live tensors stay."""
        if self._torch_pools is not None and not _core.driver_is_forked():
            gc.collect()
            self._torch_pools.release()
            self._forget_freed()

    def close(self) -> None:
        """`release_pools`, and the host memory of backups of awake segments. The allocator stays usable."""
        self.release_pools()
        if _core.driver_is_open() and not _core.driver_is_forked():
            self.release_backups()

    # The sequences

    def _sleep_awake(self, tags: set[str] | None, is_dropped: Callable[[str], bool], operation: str) -> SleepReport:
        with self._counted(operation):
            of_tags = [s for s in _core.segments() if tags is None or s.tag in tags]
            # What an earlier failure left asleep, with its memory, is dropped for good.
            segments = [s for s in of_tags if s.sleep == _Sleep.AWAKE or (s.keeps_bytes and is_dropped(s.tag))]
            return self._sleep(segments, is_dropped, operation)

    @staticmethod
    def _asleep(tags: set[str] | None) -> list[_core.Segment]:
        """What a wake of these tags wakes."""
        return [
            segment
            for segment in _core.segments()
            if segment.sleep != _Sleep.AWAKE
            and (tags is None or segment.tag in tags or segment.tag not in DEFERRABLE_TAGS)
        ]

    def _wake_asleep(self, tags: set[str] | None) -> WakeReport:
        with self._counted("wake"):
            return self._wake(self._asleep(tags))

    def _sleep(
        self, segments: Sequence[_core.Segment], is_dropped: Callable[[str], bool], operation: str = "sleep"
    ) -> SleepReport:
        timer = PhaseTimer()
        if not segments:
            note = "nothing to do, no memory of these tags is awake; what sleeps stays as it is"
            return self._logged(SleepReport(seconds=timer.seconds, note=note, operation=operation))
        with _told_if_not_undone(segments), _core.Pinned(list(segments)) as pinned:
            dropped = [segment for segment in pinned if is_dropped(segment.tag)]
            backed_up = [segment for segment in pinned if not is_dropped(segment.tag)]
            with timer("quiesce"):
                self._quiesce(pinned)
            with self._digester.run(backed_up) as run:
                digests = _Digests(backed_up if self._digests_are_compared else [], run)
                if self._compressor.on or any(map(self._store.encoding_of, backed_up)):
                    dirty = self._back_up_compressed(backed_up, dropped, digests, timer)
                else:
                    dirty = self._back_up(backed_up, digests, timer)
                with timer("check"):
                    if dirty:
                        self._check_unchanged(backed_up, dirty, digests)
                    self._store.require(backed_up, digests.taken)
            with timer("release"):
                freed_bytes = _core.put_to_sleep(backed_up, dropped)
        copied_bytes = _total(dirty)
        return self._logged(
            SleepReport(
                freed_bytes=freed_bytes,
                copied_bytes=copied_bytes,
                stored_bytes=self._store.stored_bytes(dirty),
                clean_bytes=_total(backed_up) - copied_bytes,
                dropped_bytes=_total(dropped),
                left_bytes=self._left_on_devices(segments),
                seconds=timer.seconds,
                phases=timer.phases,
                operation=operation,
            )
        )

    def _back_up(self, segments: Sequence[_core.Segment], digests: _Digests, timer: PhaseTimer) -> list[_core.Segment]:
        """Copy what changed of `segments`, and return that. Each part is copied while the next is digested."""
        with timer("host_memory"):
            self._store.take(segments, keep=segments)
        changed_parts = self._changed_parts(segments, digests)
        with timer("digest"):
            first_changed = next(changed_parts, [])
        if not first_changed:
            return []
        with timer("copy"):
            return self._store.fill(chain([first_changed], changed_parts), digests.begin_check)

    def _back_up_compressed(
        self,
        segments: Sequence[_core.Segment],
        dropped: Sequence[_core.Segment],
        digests: _Digests,
        timer: PhaseTimer,
    ) -> list[_core.Segment]:
        """The same, compressed where that is worth it.

        Sizes are counted, and host memory is taken, before any copy. Only what has a compressed backup is digested, and
        counted, while what comes before it is copied: it fits there again, as a rule. If a limit is reached then, all
        begins anew without such backups.
        """
        with timer("digest"):
            known = {segment.id for segment in segments if self._store.encoding_of(segment) is not None}
            changed = [*chain.from_iterable(self._changed_parts([s for s in segments if s.id not in known], digests))]
            later = self._changed_parts([s for s in segments if s.id in known], digests)
            changed += next(later, [])
        while changed:
            encodings: dict[int, Encoding] = {}
            workbenches: dict[int, Workbench] = {}
            again: list[_core.Segment] = []
            try:
                with ExitStack() as stack:
                    with timer("plan"):
                        maybe = [s for s in segments if s.id in known and s.id not in digests.taken]
                        devices = sorted({segment.device for segment in changed + maybe})
                        for device in devices if self._compressor.on else ():
                            spare_bytes = _core.memory_info(device)[0]
                            lenders = [segment for segment in dropped if segment.sleep == _Sleep.AWAKE]
                            workbench = self._compressor.workbench(device, spare_bytes, lenders=lenders)
                            workbenches[device] = stack.enter_context(workbench)
                        can_encode = {device for device, workbench in workbenches.items() if workbench.has_memory}
                        if len(can_encode) < len(devices):
                            changed += chain.from_iterable(later)
                        for device in sorted({segment.device for segment in changed} & workbenches.keys() - can_encode):
                            log.warning(
                                "device %d has no memory left for the codec to work in: its backups are stored"
                                " uncompressed this time",
                                device,
                            )
                        new: list[_core.Segment] = []
                        for segment in changed:
                            is_known = segment.device in can_encode and self._store.encoding_of(segment) is not None
                            (again if is_known else new).append(segment)
                        for device, workbench in workbenches.items():
                            encodings.update(workbench.plan([s for s in new if s.device == device]))
                    with timer("host_memory"):
                        self._store.take(new, keep=segments, encodings=encodings)
                    with timer("copy"):
                        parts = chain([new], self._planned_again(again, later, changed, segments, workbenches))
                        return self._store.fill(parts, digests.begin_check, workbenches)
            except CodecError as error:
                self._compressor.give_up(error)
            except OutOfHostMemory:
                if not again:
                    raise
                # What the changed ones hold is worth nothing, and may be what is missing. Without it all is planned,
                # and checked, at once.
                self._store.forget(segment.id for segment in changed)
                rest = [*chain.from_iterable(later)]
                self._store.forget(segment.id for segment in rest)
                changed += rest
            finally:  # once more: that may have failed, and who lent memory wants its bytes
                close_all(workbenches.values())
        return []

    def _planned_again(
        self,
        again: list[_core.Segment],
        later: Iterator[list[_core.Segment]],
        changed: list[_core.Segment],
        keep: Sequence[_core.Segment],
        workbenches: Mapping[int, Workbench],
    ) -> Iterator[list[_core.Segment]]:
        """Part by part, what has a compressed backup: in the same code, unless its values are very different now.

        Args:
            again: those known to have changed; others come `later`, and then are added to it and to `changed`.
        """

        def so_far_and_later() -> Iterator[_core.Segment]:
            yield from tuple(again)
            for part in later:
                again.extend(part)
                changed.extend(part)
                yield from part

        for device, workbench in workbenches.items():
            mine = (segment for segment in so_far_and_later() if segment.device == device)
            coded = ((segment, e.code) for segment in mine if (e := self._store.encoding_of(segment)))
            for part, encodings in workbench.plan_again(coded):
                unfit = [s for s in part if not self._store.has_room_for(s, encodings.get(s.id))]
                if unfit:
                    encodings.update(workbench.plan(unfit))
                self._store.take(part, keep=keep, encodings=encodings)
                yield part

    def _wake(self, asleep: list[_core.Segment]) -> WakeReport:
        timer = PhaseTimer()
        if not asleep:
            return self._logged(
                WakeReport(seconds=timer.seconds, note="nothing to do, no memory of these tags is asleep")
            )
        with _core.Pinned(asleep) as segments:
            restored = [segment for segment in segments if segment.sleep == _Sleep.BACKED_UP]
            restored.sort(key=lambda segment: self._store.encoding_of(segment) is not None)  # as they are copied
            blank = [segment for segment in segments if segment.sleep == _Sleep.DROPPED]
            for device in sorted({segment.device for segment in segments}):
                _core.release_waiter(device)
            self._check_device_memory(segments)
            expected = self._digests_at_sleep(restored) if self.settings.verify == "wake" else {}
            checked = [segment for segment in restored if segment.id in expected]
            keep_bytes = {segment.id for segment in blank if segment.keeps_bytes}
            encoded = [segment for segment in restored if self._store.encoding_of(segment) is not None]
            mapping = _core.Ahead(1, {segment.id: [_core.map_task(segment)] for segment in restored})
            # Begins when half of the bytes are there, because it costs nothing then. Earlier it could have to wait for
            # the driver to wipe freed memory, and hold a lock of the driver meanwhile that copies need.
            mapping_blank = _core.Ahead(1, {segment.id: [_core.map_task(segment)] for segment in blank})
            try:
                with mapping, mapping_blank, self._digester.run(checked) as digests:
                    with self._workbenches(encoded, segments, blank) as workbenches:
                        mapping.start()
                        if restored:
                            with timer("copy"):
                                self._restorer.restore(
                                    restored,
                                    self._store,
                                    mapping.wait,
                                    mapping_blank.start,
                                    digests if checked else None,
                                    workbenches,
                                )
                    with timer("map"):
                        for segment in blank:
                            mapping_blank.wait(segment.id)
                        if self.settings.poison:
                            self._poison([s for s in blank if s.tag != "kv_cache" and s.id not in keep_bytes])
                    if checked:
                        with timer("verify"):
                            self._verify(checked, expected, digests.finish())
                _core.finish_wake(segments)
            except BaseException:
                _core.undo_wake(segments)  # leaves alone what finish_wake has woken
                raise
        return self._logged(
            WakeReport(
                mapped_bytes=_total(segments),
                restored_bytes=_total(restored),
                verified_bytes=_total(checked),
                stored_bytes=self._store.stored_bytes(restored),
                seconds=timer.seconds,
                phases=timer.phases,
            )
        )

    @contextmanager
    def _workbenches(
        self, encoded: Sequence[_core.Segment], waking: Sequence[_core.Segment], blank: Sequence[_core.Segment]
    ) -> Iterator[dict[int, Workbench]]:
        """One for each device of `encoded`, with memory that `waking` does not need, or else that of `blank`."""
        workbenches: dict[int, Workbench] = {}
        lenders = [segment for segment in blank if not segment.keeps_bytes]
        try:
            with ExitStack() as stack:
                for device in sorted({segment.device for segment in encoded}):
                    needed = _total(s for s in waking if s.device == device and not s.has_memory)
                    spare_bytes = _core.memory_info(device)[0] - needed
                    workbench = self._compressor.workbench(device, spare_bytes, lenders=lenders, keep_bytes=False)
                    workbenches[device] = stack.enter_context(workbench)
                yield workbenches
        finally:  # once more: that may have failed
            close_all(workbenches.values())

    def _poison(self, segments: Sequence[_core.Segment]) -> None:
        for segment in segments:
            _core.stop_if_asked()
            with _core.CopyStream(segment.device) as stream:
                stream.poison(segment.address, segment.bytes)
                stream.synchronize()

    def _quiesce(self, segments: Sequence[_core.Segment]) -> None:
        for device in sorted({segment.device for segment in segments}):
            _core.stop_if_asked()
            try:
                _core.synchronize(device)
                _core.release_waiter(device)
            except DriverError as error:
                if error.error.startswith(_CAPTURE_ERRORS):
                    raise InvalidState(
                        f"a CUDA graph is being captured on device {device} ({error.error}): its memory cannot sleep"
                        " now; that capture is invalid, capture again"
                    ) from error
                raise

    @staticmethod
    def _left_on_devices(segments: Sequence[_core.Segment]) -> int:
        """Bytes in use on the devices of these segments; 0 if the driver does not say, since all is asleep by now."""
        try:
            information = [_core.memory_info(device) for device in {segment.device for segment in segments}]
        except DriverError:
            return 0
        return sum(total_bytes - free_bytes for free_bytes, total_bytes in information)

    def _changed_parts(self, segments: Sequence[_core.Segment], digests: _Digests) -> Iterator[list[_core.Segment]]:
        """Segments that do not equal their backup, in parts: while one is copied, the next is digested."""

        def changed_of(part: Sequence[_core.Segment]) -> list[_core.Segment]:
            digests.take(part)
            return [segment for segment in part if not self._store.is_clean(segment, digests.taken.get(segment.id))]

        # Beside the touching of new pages a digest takes long, for its table wants memory: all at once then, before.
        is_new = any(self._store.get(segment) is None for segment in segments)
        return _ChangedParts(segments, changed_of, None if is_new else _HEAD_BYTES)

    @property
    def _digests_are_compared(self) -> bool:
        """With those of backups now, or after a wake."""
        return self.settings.retain_backups or self.settings.verify != "off"

    def _check_unchanged(
        self, segments: Sequence[_core.Segment], copied: Sequence[_core.Segment], digests: _Digests
    ) -> None:
        """Refuse a sleep whose backups may hold other bytes than the device does by now; the others are complete."""
        changed = digests.changed(lambda: self._quiesce(segments))
        self._store.prove((segment for segment in copied if segment not in changed), digests.taken)
        if changed:
            self._store.forget(segment.id for segment in changed)
            raise InvalidState(
                f"{_describe(changed[0])} was written to while it was backed up ({len(changed)} segments were): let no"
                " work run on the GPU during sleep, and call again; everything is awake"
            )

    def _digests_at_sleep(self, segments: Sequence[_core.Segment]) -> dict[int, Digest]:
        """Of those whose digest was taken."""
        backups = [backup for backup in map(self._store.get, segments) if backup is not None]
        return {backup.segment.id: backup.digest for backup in backups if backup.digest is not None}

    @staticmethod
    def _verify(segments: Sequence[_core.Segment], expected: dict[int, Digest], actual: dict[int, Digest]) -> None:
        for segment in segments:
            if actual[segment.id] != expected[segment.id]:
                raise BackupMismatch(_describe(segment), str(expected[segment.id]), str(actual[segment.id]))

    def _check_device_memory(self, segments: Sequence[_core.Segment]) -> None:
        """Refuse a wake that cannot fit before it maps anything."""
        for device, mine in _without_memory(segments).items():
            needed, free_bytes = _total(mine), _core.memory_info(device)[0]
            if needed > free_bytes:
                raise OutOfDeviceMemory(needed, free_bytes, device, segment=f"{len(mine)} sleeping segments")

    def _make_way(self, tags: set[str] | None, pools: TorchPools) -> None:
        """Where a wake of these tags would not fit, PyTorch's unused cache goes."""
        wanting = _without_memory(self._asleep(tags))
        if any(_total(mine) > _core.memory_info(device)[0] for device, mine in wanting.items()):
            gc.collect()
            pools.trim()

    # Around every operation

    def _open(self) -> None:
        """Open the driver at the first use."""
        if self._retired:
            raise InvalidState("this CuMemAllocator was replaced by a newer one: use CuMemAllocator.get_instance()")
        if not self._driver_checked:
            open_driver(self.settings.driver)
            log.info("cumem-sleep: memory pools come from this layer (%s)", self.settings.summary())
            _core.on_free(_forget_freed_backups)
            self._driver_checked = True
        if _core.driver_is_forked():
            _core.device_count()  # raises, and says why

    def _warn_of_empty_pool(self, tag: str) -> None:
        """Say once why a pool is left while this layer holds no memory at all: nothing of it would sleep."""
        if CuMemAllocator._warned_of_empty_pool or _core.segments():
            return
        CuMemAllocator._warned_of_empty_pool = True
        if _core.driver_is_simulated():
            why = "on the simulated driver PyTorch does not allocate from this layer, only `malloc` and CuPy do"
        elif self._torch_pools is None:
            why = "PyTorch is not installed, or reaches no GPU (a build for the CPU?)"
        else:
            why = "what is built on the CPU and moved to the GPU later is not in it: build, or move, inside the pool"
        log.warning("nothing was allocated in the memory pool %r, so nothing of it can sleep: %s", tag, why)

    def _warm_up(self) -> None:
        """Compile what the first sleep and wake would otherwise wait for, once, when a pool is left."""
        if self._torch_pools is None:
            return
        for device in {segment.device for segment in _core.segments()} - self._warm_devices:
            self._warm_devices.add(device)
            with _core.CurrentContext(), _core.RelaxedCapture():
                if self.settings.verify == "wake" or self.settings.retain_backups:
                    self._digester.warm_up(device)
                if self._digester.on_gpu:
                    self._restorer.warm_up(device)
                self._compressor.warm_up(device)

    def _pools(self, *, import_torch: bool = False) -> TorchPools | None:
        """The PyTorch pools, if PyTorch is in use (or `import_torch`) and reaches the GPU of this driver."""
        if self._torch_pools is None and not _core.driver_is_simulated() and (import_torch or "torch" in sys.modules):
            torch = torch_with_cuda()
            if torch is not None:
                self._torch_pools = TorchPools(torch)
        return self._torch_pools

    def _operate(
        self, name: str, work: Callable[[], _Result], make_way: Callable[[TorchPools], None] | None = None
    ) -> _Result:
        """The result of `work`, which runs with the lock held, on a thread of its own.

        Args:
            make_way: called before, on the caller's thread and without the lock: so what the garbage collector runs
                there may call the allocator.
        """
        self._open()
        if (pools := self._pools()) is not None:
            with _core.CurrentContext():
                if pools.is_capturing():
                    raise InvalidState(f"{name} while this thread captures a CUDA graph: call it after the capture")
                if make_way is not None:
                    make_way(pools)
        return log.run(self._lock, partial(self._with_lock, work))

    def _with_lock(self, work: Callable[[], _Result]) -> _Result:
        try:
            with self._lock.hold(), _core.CurrentContext():
                _core.reclaim()
                self._store.prune()
                try:
                    return work()
                finally:
                    self._store.prune()
        finally:
            self._store.look_for_freed()

    def _clear_store(self) -> None:
        with self._lock.hold():
            self._store.clear()

    @contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        """Count it among the failures if it raises."""
        try:
            yield
        except BaseException:
            totals = self._totals.get(operation, OperationTotals())
            self._totals[operation] = replace(totals, failures=totals.failures + 1)
            raise

    def _forget_freed(self) -> None:
        """Host memory of freed segments goes now, unless an operation runs: then when that ends."""
        if _core.has_freed():
            log.run(self._lock, self._forget_freed_now)
        else:
            _core.reclaim()

    def _forget_freed_now(self) -> None:
        with self._lock.hold(wait=False) as held:
            if held:
                _core.reclaim()
                self._store.prune_freed()
        self._store.look_for_freed()

    def _known_tags(self, tags: str | Iterable[str]) -> set[str]:
        """The tags, if memory was ever given each of them (`weights` and `kv_cache` always count)."""
        chosen = _checked_tags(tags, "tags")
        known = self._all_tags()
        if unknown := chosen - known:
            raise InvalidArgument(
                f"tags={sorted(unknown)!r}: no memory was ever given such a tag; known are {', '.join(sorted(known))}"
            )
        return chosen

    def _tags_to_back_up(self, tags: str | Iterable[str]) -> set[str]:
        """The tags. vLLM names all that it may use; but if not one is known they are misspelt, and all is lost."""
        chosen = _checked_tags(tags, "offload_tags")
        known = {DEFAULT_TAG, RUNTIME_TAG, GRAPH_TAG, *self._all_tags()}
        if chosen and not chosen & known:
            raise InvalidArgument(
                f"offload_tags={sorted(chosen)!r}: no memory was ever given any of these tags, so everything would be"
                f" dropped; known are {', '.join(sorted(known))}. offload_tags=() drops everything"
            )
        return chosen

    def _all_tags(self) -> set[str]:
        return {*DEFERRABLE_TAGS, *self._used_tags, *(segment.tag for segment in _core.segments())}

    def _logged(self, report: _Report) -> _Report:
        report = replace(report, simulated=_core.driver_is_simulated())
        if not report.note:
            self._totals[report.operation] = self._totals.get(report.operation, OperationTotals()).plus(report)
        log.info("cumem-sleep: %s", report)
        return report


@contextmanager
def _told_if_not_undone(segments: Sequence[_core.Segment]) -> Iterator[None]:
    """Around a sleep of `segments`: its error says which of them sleep although it failed."""
    try:
        yield
    except BaseException as error:
        asleep = [segment for segment in segments if segment.sleep != _Sleep.AWAKE and not segment.freed]
        lost = [segment for segment in asleep if segment.sleep == _Sleep.DROPPED and not segment.keeps_bytes]
        if isinstance(error, CumemSleepError):
            error.asleep_segments = tuple(_describe(segment) for segment in asleep if segment not in lost)
            error.lost_segments = tuple(map(_describe, lost))
        elif 0 < len(asleep) < len(segments):  # else it came when all slept
            log.error(
                "an interrupted sleep could not be undone: %s", ", ".join(f"{_describe(s)} sleeps" for s in asleep)
            )
        raise


class _ChangedParts(Iterator[list[_core.Segment]]):
    """What changed of `segments`, part by part; parts without a change are passed over.

    The first part is small, so that its copies begin soon. Where it did not change, the rest probably did not either,
    and is one part. After an error the same part comes again: none may be left out.

    Args:
        first_bytes: of the first part, at least; None: it is all.
    """

    def __init__(
        self,
        segments: Sequence[_core.Segment],
        changed_of: Callable[[Sequence[_core.Segment]], list[_core.Segment]],
        first_bytes: int | None,
    ) -> None:
        self._segments = segments
        self._changed_of = changed_of
        self._start = 0
        self._part_bytes = first_bytes  # None: all that is left

    def __next__(self) -> list[_core.Segment]:
        while self._start < len(self._segments):
            _core.stop_if_asked()
            sums = accumulate(segment.bytes for segment in self._segments[self._start :])
            ends = (end for end, nbytes in enumerate(sums, self._start + 1) if nbytes >= (self._part_bytes or math.inf))
            end = next(ends, len(self._segments))
            changed = self._changed_of(self._segments[self._start : end])
            self._start, self._part_bytes = end, _PART_BYTES if changed else None
            if changed:
                return changed
        raise StopIteration


class _Digests:
    """Digests of one sleep: `taken` before the copies, by the segments' ids, and compared with others after them.

    The check begins when the last copies are in flight. What is written to a segment after its turn goes unnoticed, as
    it does between the check and the release.
    """

    def __init__(self, segments: Sequence[_core.Segment], run: DigestRun) -> None:
        self.taken: dict[int, Digest] = {}
        self._segments = {segment.id: segment for segment in segments}
        self._run = run

    def take(self, part: Iterable[_core.Segment]) -> None:
        """Of those of `part` that are among the segments; waits for it."""
        self._begin(segment.id for segment in part if segment.id in self._segments)
        self.taken.update(self._run.finish())

    def begin_check(self, in_flight: set[int]) -> None:
        """Of all but those whose ids these are."""
        self._begin(segment_id for segment_id in self.taken if segment_id not in in_flight)

    def _begin(self, ids: Iterable[int]) -> None:
        self._run.finish()  # what a try began that failed
        self._run.start([self._segments[segment_id] for segment_id in ids])

    def changed(self, quiesce: Callable[[], None]) -> list[_core.Segment]:
        """Those that have other digests by now; waits for all work on their devices.

        If there was any, it may have written until it ended: then what was begun before that does not count.
        """
        now = self._run.finish()
        start = time.perf_counter()
        quiesce()
        if time.perf_counter() - start > _IDLE_S:
            now = {}
        self._begin(segment_id for segment_id in self.taken if segment_id not in now)
        now.update(self._run.finish())
        return [self._segments[segment_id] for segment_id in self.taken if now[segment_id] != self.taken[segment_id]]


def cupy_allocator(tag: str = "weights") -> Callable[[int], Any]:
    """An allocator for `cupy.cuda.set_allocator`: arrays get memory that can sleep.

    Every array takes whole 2 MiB pages; `cupy.cuda.MemoryPool(cupy_allocator(tag)).malloc` packs small ones.

    Raises:
        InvalidArgument: not a tag.
        ImportError: CuPy is not installed.
    """
    if importlib.util.find_spec("cupy") is None:
        raise ModuleNotFoundError(
            "cupy_allocator needs CuPy, which is not installed: pip install 'cumem-sleep[cupy13]' for CUDA 13,"
            " 'cumem-sleep[cupy12]' for CUDA 12",
            name="cupy",
        )
    import cupy

    tag = _checked_tag(tag)

    class Owner:
        """Frees the memory when the last array that uses it is gone."""

        def __init__(self, nbytes: int, device: int) -> None:
            self.address = 0
            self.address = CuMemAllocator.get_instance().malloc(nbytes, tag, device)

        def __del__(self) -> None:
            if self.address and not _core.driver_is_forked():
                CuMemAllocator.get_instance().free(self.address)

    def allocate(nbytes: int) -> Any:
        device = cupy.cuda.runtime.getDevice()
        owner = Owner(max(nbytes, 1), device)
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(owner.address, nbytes, owner, device), 0)

    return allocate


def open_driver(driver: str) -> None:
    """Open what the setting `driver` names, `cuda` or `sim`; once per process, opening the same again does nothing.

    Raises:
        DriverError: it was not found, is too old, or does not initialise.
        InvalidState: the process runs on the other one.
    """
    if driver == "sim":
        from .sim import library_path

        _core.open_driver(str(library_path()))
        return
    try:
        _core.open_driver("libcuda.so.1")
    except DriverError as error:
        if error.call != "dlopen":
            raise
        raise DriverError(
            "dlopen",
            error.error,
            "libcuda.so.1 was not found: install the NVIDIA driver, or set CUMEM_SLEEP_DRIVER=sim to run on the"
            f" simulated driver ({error.detail})",
        ) from None


def _forget_freed_backups() -> None:
    """Called, on a thread of its own, after PyTorch freed segments through the hook."""
    instance = CuMemAllocator.instance
    if instance is not None and not _core.driver_is_forked():
        instance._forget_freed_now()


@atexit.register
def _stop_at_exit() -> None:
    _core.on_free(None)
    for allocator in list(_allocators):
        allocator._stop_background_work()
    for store in list(_stores):
        store.stop()


def _is_number(text: str) -> bool:
    return text.strip().lstrip("+-").isdecimal()


def _dropped_at_level(level: object) -> Callable[[str], bool] | None:
    """Which tags a level drops; None for the level that touches nothing."""
    if level is None:
        level = 1
    allowed = "0 (keep all), 1 (back up all but kv_cache) and 2 (drop weights and kv_cache) are allowed"
    if isinstance(level, bool) or not isinstance(level, int):
        raise InvalidArgumentType(f"level={level!r}: {allowed}")
    if level not in (0, 1, 2):
        raise InvalidArgument(f"level={level!r}: {allowed}")
    if level == 0:
        return None
    dropped = ("kv_cache",) if level == 1 else DEFERRABLE_TAGS
    return lambda tag: tag in dropped


def _checked_tag(tag: object) -> str:
    if not isinstance(tag, str):
        raise InvalidArgumentType(f"tag={tag!r}: a string is wanted")
    if not tag or "\0" in tag:
        raise InvalidArgument(f"tag={tag!r}: a tag has at least one character, and none that is zero")
    try:
        tag.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"tag={tag!r}: not valid Unicode") from None
    return tag


def _checked_tags(tags: object, name: str) -> set[str]:
    if isinstance(tags, str):
        tags = (tags,)
    if not isinstance(tags, Iterable) or isinstance(tags, bytes):
        raise InvalidArgumentType(f"{name}={tags!r}: a string or several strings are wanted")
    return {_checked_tag(tag) for tag in tags}


def _check_integer(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentType(f"{name}={value!r}: a whole number is wanted")
    if value < minimum:
        raise InvalidArgument(f"{name}={value!r}: at least {minimum} is allowed")


def _trim(pools: TorchPools) -> None:
    """Memory that no tensor uses need not be backed up."""
    pools.trim()


def _without_memory(segments: Iterable[_core.Segment]) -> dict[int, list[_core.Segment]]:
    """Those that have to be given memory to be mapped, by device."""
    by_device: dict[int, list[_core.Segment]] = {}
    for segment in segments:
        if not segment.has_memory:
            by_device.setdefault(segment.device, []).append(segment)
    return dict(sorted(by_device.items()))


def _total(segments: Iterable[_core.Segment]) -> int:
    return sum(segment.bytes for segment in segments)


def _describe(segment: _core.Segment) -> str:
    return f"segment {segment.tag} at 0x{segment.address:x} ({format_bytes(segment.bytes)}, device {segment.device})"
