"""What trainers ask of torch_memory_saver past its public interface, in terms of the thread's label."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

from ... import _core
from ...allocator import CuMemAllocator
from ...tags import DEFAULT_TAG
from .environment import MMAP, NO_DISK_BACKUP, check_backend


class Native:
    """In the place of `torch_memory_saver._impl`: its `_binary_wrapper.cdll` has what is known to be called.

    slime and miles keep the buffers of DeepEP out of the region that the process is, by `tms_set_interesting_region`.

    Attributes:
        tags_of_mmap: of regions with backups of that backend.
    """

    def __init__(self, backend: str) -> None:
        self._default_backend = backend
        self._thread = threading.local()
        self._binary_wrapper = SimpleNamespace(cdll=self)
        self._mem_pools = NoPools()
        self._process = ctypes.CDLL(None)
        self.tags_of_mmap: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        """Of CUDA's runtime, if it is loaded: torch_memory_saver's library, linked to it, has its functions as well."""
        if name.startswith("cuda"):
            return getattr(self._process, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def in_region(self) -> bool:
        """Whether what this thread allocates belongs to a region."""
        return _core.thread_backup() != _core.Backup.BY_LEVEL

    def region(self, tag: str, backend: str | None, *, backup: bool) -> AbstractContextManager[None]:
        """`Regions.use_without_pool`."""
        labelled = CuMemAllocator.get_instance().regions.use_without_pool(tag, backup=backup)
        return self._entered(labelled, tag, backend, backup=backup)

    @contextmanager
    def _entered(
        self, labelled: AbstractContextManager[None], tag: str, backend: str | None, *, backup: bool
    ) -> Iterator[None]:
        with labelled, self.backend(tag, backend, backup=backup):
            yield

    def _with_region_config(
        self,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> AbstractContextManager[None]:
        """`region`, as torch_memory_saver calls it."""
        if enable_disk_backup:
            raise NotImplementedError(f"enable_disk_backup=True: {NO_DISK_BACKUP}")
        check_backend(enable_cpu_backup, cpu_backup_backend)
        return self.region(tag, cpu_backup_backend, backup=bool(enable_cpu_backup))

    @contextmanager
    def backend(self, tag: str, backend: str | None, *, backup: bool) -> Iterator[None]:
        """Within a region: the backend that was named for it. That the thread has left the region ends with it, too."""
        before, outside = getattr(self._thread, "backend", None), getattr(self._thread, "outside", None)
        self._thread.backend, self._thread.outside = backend or before, None
        try:
            self.note_region(tag, backup=backup)
            yield
        finally:
            self._return()
            self._thread.backend, self._thread.outside = before, outside

    def note_region(self, tag: str, *, backup: bool) -> None:
        """Remember the tag, if backups that are made from here on are of the backend `mmap`."""
        if backup and self.tms_get_cpu_backup_backend() == MMAP.encode():
            self.tags_of_mmap.add(tag)

    def tms_get_interesting_region(self) -> bool:
        """`in_region`."""
        return self.in_region

    def tms_set_interesting_region(self, value: bool) -> None:
        """False: this thread leaves its region, until True."""
        if value == self.in_region:
            return
        if value:
            self._return()
        else:
            self._thread.outside = _core.ThreadLabel(DEFAULT_TAG)

    def _return(self) -> None:
        """To the region that this thread has left, if it has."""
        outside = getattr(self._thread, "outside", None)
        if outside is not None:
            self._thread.outside = None
            outside.__exit__(None, None, None)

    def tms_get_enable_cpu_backup(self) -> bool:
        """Whether that region is backed up."""
        return _core.thread_backup() == _core.Backup.ALWAYS

    def tms_get_enable_disk_backup(self) -> bool:
        """False."""
        return False

    def tms_get_current_tag(self) -> bytes:
        """The region's."""
        return _core.thread_tag().encode()

    def tms_get_cpu_backup_backend(self) -> bytes:
        """What was named last."""
        return str(getattr(self._thread, "backend", None) or self._default_backend).encode()


class NoPools:
    """In the place of `_mem_pools`, from which code takes the pool of a region to let its unused memory go.

    There is nothing to take: this layer holds no pool after a region, so `torch.cuda.empty_cache()` frees that memory.
    """

    def pop(self, key: object, default: object = None) -> None:
        """No pool."""

    def clear(self) -> None:
        """Nothing to do."""
