"""`TorchMemorySaver`: each of its calls, in terms of the allocator's regions. It decides nothing about memory."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from ...allocator import CuMemAllocator
from ...core import log, preload
from ...core.tags import DEFAULT_TAG
from ...errors import CumemSleepError, InvalidArgument, InvalidState, OutOfDeviceMemory
from .environment import Environment, check_backend, check_vault_spills, is_backed_up
from .native import Native

HOOK_MODES = ("preload", "torch")
_BETWEEN_RESUMES_S = 0.2  # each try makes PyTorch free its unused memory


class TorchMemorySaver:
    """torch_memory_saver's singleton, served by the allocator of this process.

    Its errors are those of this package. What is asleep already may be paused again, and what is awake resumed.
    """

    def __init__(self) -> None:
        self._impl: Native | None = None  # as in torch_memory_saver, None until the first use: trainers ask
        self._hook_mode = "preload"
        self._retain_cpu_backup = False
        self._lock = threading.RLock()  # a signal handler may call while this thread is at its first use

    # Regions

    @contextmanager
    def region(
        self,
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """What this thread's PyTorch allocates inside can be paused: `Regions.use`.

        Raises:
            NotImplementedError: `enable_disk_backup` without a vault that spills.
            InvalidArgument: not a tag; a backend that does not exist, or without a backup; both kinds of backups.
        """
        check_backend(enable_cpu_backup, cpu_backup_backend)
        native, allocator = self._initialized(), CuMemAllocator.get_instance()
        what = f"region(tag={tag!r}, enable_disk_backup=True)"
        backup = is_backed_up(what, allocator.settings, enable_cpu_backup, enable_disk_backup)
        with (
            allocator.regions.use(tag, backup=backup),
            native.backend(tag, cpu_backup_backend, backup=backup),
        ):
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = True,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """`torch.cuda.graph`, with memory that can be paused.

        It is backed up unless `enable_cpu_backup` is False, which is the default in torch_memory_saver: kernels keep
        state there that a capture writes and replays only read (sglang#32718).

        With the hook in front of cudaMalloc it comes from `pool` itself. Without, from a pool of the region instead,
        one for each `pool` that is given.
        """
        import torch

        check_backend(enable_cpu_backup, cpu_backup_backend)
        native = self._initialized()
        allocator, backup = CuMemAllocator.get_instance(), bool(enable_cpu_backup)
        capture = {"stream": stream, "capture_error_mode": capture_error_mode}
        if preload.serve():
            labelled = allocator.regions.use_without_pool(tag, backup=backup)  # before the capture: it opens the driver
            with (
                torch.cuda.graph(cuda_graph, pool=pool, **capture),
                labelled,
                native.backend(tag, cpu_backup_backend, backup=backup),
            ):
                yield
            return
        with (
            allocator.regions.graph_pool(tag, backup=backup, shared_by=pool) as own_pool,
            torch.cuda.graph(cuda_graph, pool=cast(Any, own_pool), **capture),
            native.backend(tag, cpu_backup_backend, backup=backup),
        ):
            yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """What this thread's PyTorch allocates inside is ordinary memory.

        Raises:
            InvalidState: the thread is in no region, and the process is none.
        """
        native = self._initialized()
        if not native.tms_get_interesting_region():
            raise InvalidState(
                "disable() outside of a region: enter one first, or start the process with TMS_INIT_ENABLE=1 and the"
                " hook in LD_PRELOAD"
            )
        with CuMemAllocator.get_instance().regions.outside():
            yield

    def pause(self, tag: str | None = None) -> None:
        """Regions of this tag (None: all) give their memory back: all or nothing, `Regions.sleep`.

        A tag that no region has is passed over, as in torch_memory_saver.
        """
        self._initialized()
        regions = CuMemAllocator.get_instance().regions
        if not tag or regions.has(tag):
            regions.sleep(tag or None, with_left=log.tells_info())  # nobody else gets the report

    def resume(self, tag: str | None = None, *, restore: bool = True) -> None:
        """They take it again: all or nothing, `Regions.wake`, to which `restore` goes.

        Where there is too little device memory, this tries again for `Settings.resume_wait_s`: a trainer may just be
        releasing its own, and SGLang's scheduler ends with the error (sglang#14092).

        Host memory that is not retained has gone back when this returns if the backend of a region's backups is `mmap`,
        as in torch_memory_saver, and otherwise soon after.

        Raises:
            OutOfDeviceMemory: there is still too little; all that slept is asleep.
            OutOfHostMemory, BackupMismatch, CodecError, DriverError: as `Regions.wake`, at once.
        """
        native, allocator = self._initialized(), CuMemAllocator.get_instance()
        regions, wait_s = allocator.regions, allocator.settings.resume_wait_s
        if tag and not regions.has(tag):
            return
        is_of_mmap = any(regions.has(each) for each in tuple(native.tags_of_mmap) if not tag or each == tag)
        deadline, is_told = time.monotonic() + wait_s, False
        while True:
            try:
                regions.wake(
                    tag or None, restore=restore, retain_backups=self._retain_cpu_backup, wait_for_release=is_of_mmap
                )
                return
            except OutOfDeviceMemory as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
                if not is_told:
                    log.warning("resume waits up to %g s for device memory: %s", wait_s, error)
                    is_told = True
            time.sleep(min(left_s, _BETWEEN_RESUMES_S))

    # Backups

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether `resume` leaves backups in host memory: then the next `pause` copies only what changed."""
        self._initialized()
        return self._retain_cpu_backup

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._initialized()
        self._retain_cpu_backup = bool(value)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """The bytes of a tensor at the last pause, as a tensor on the CPU; None: it is awake and has no backup.

        Args:
            zero_copy: not copied where they lie together and uncompressed in memory of this process. It may be
                read, until the tensor's memory is paused or resumed the next time, or freed.

        Raises:
            InvalidArgument: not a contiguous tensor on the GPU, in memory of a region.
            InvalidState: it sleeps without a backup.
        """
        if not x.is_cuda or not x.is_contiguous():
            raise InvalidArgument(f"get_cpu_backup: expected a contiguous tensor on a GPU, not {x.shape} on {x.device}")
        self._initialized()
        import torch

        if not x.nbytes:
            return torch.empty(x.shape, dtype=x.dtype)
        content = CuMemAllocator.get_instance().read_backup(x.data_ptr(), x.nbytes, copy=not zero_copy)
        if content is None:
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(content).view(x.dtype).view(x.shape)

    def set_disk_backup_dir(self, path: str) -> None:
        """Changes nothing: the vault has a folder already.

        Raises:
            NotImplementedError: there is no vault that spills.
        """
        check_vault_spills(f"set_disk_backup_dir({path!r})", CuMemAllocator.get_instance().settings)

    # What else it exports

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    @property
    def hook_mode(self) -> str:
        """`preload` or `torch`: it makes no difference, regions are served by hooks of PyTorch's in both."""
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, hook_mode: str) -> None:
        if hook_mode not in HOOK_MODES:
            raise InvalidArgument(f"hook_mode={hook_mode!r}: expected preload or torch")
        self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """Can only be set: an allocation in a region fails, as if the GPU were full, where less would stay free."""
        raise NotImplementedError("memory_margin_bytes can only be set")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._initialized()
        CuMemAllocator.get_instance().regions.set_margin_bytes(value)

    # Its first use

    def begin_with_process(self) -> None:
        """Where TMS_INIT_ENABLE is on, initialise on import, since memory is allocated before anything is asked of us.

        What stands in the way is raised at the first use.
        """
        with suppress(CumemSleepError, NotImplementedError):
            if Environment.read().enable and preload.serve():
                self._initialized()

    def _initialized(self) -> Native:
        """Read the environment, at the first use: then, and not on import, the layer is opened."""
        if self._impl is not None:
            return self._impl
        with self._lock:
            if self._impl is None:
                environment = Environment.read()
                allocator = CuMemAllocator.get_instance()
                flags = environment.enable_cpu_backup, environment.enable_disk_backup
                backup = is_backed_up("TMS_INIT_ENABLE_DISK_BACKUP", allocator.settings, *flags)
                if environment.enable:
                    allocator.regions.use_for_process(backup=backup)
                is_hooked = preload.serve()
                preload.take_calls(self.pause, self.resume)
                self._retain_cpu_backup = environment.retain_cpu_backup
                self._impl = self._impl or Native(environment.cpu_backup_backend)
                if environment.enable:
                    self._impl.note_region(DEFAULT_TAG, backup=backup)
                log.info(
                    "cumem-sleep: torch_memory_saver is served by this layer (%s hook in front of cudaMalloc%s)",
                    "with the" if is_hooked else "without a",
                    ", the whole process is a region" if environment.enable else "",
                )
            return self._impl

    _ensure_initialized = _initialized  # as trainers call it
