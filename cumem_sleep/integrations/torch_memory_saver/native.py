"""What trainers ask of torch_memory_saver past its public interface, in terms of the thread's pools."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ... import _core
from ...allocator import CuMemAllocator
from ...core.pools import entered
from ...core.tags import DEFAULT_TAG
from .environment import MMAP, check_backend, is_backed_up


@dataclass(eq=False)
class _Region:
    """A region that a thread has entered.

    Attributes:
        backend: which was named last, in it or around it.
        outside: while the thread has left it.
    """

    backend: str | None
    is_open: bool = False
    outside: _core.PoolScope | None = None

    def come_back(self) -> None:
        """The thread is in the region again, if it has left it."""
        outside, self.outside = self.outside, None
        if outside is not None:
            outside.leave()


class _OfThread(threading.local):
    """The regions of a thread, from the outermost. They end in any order, and on any thread, as pools do."""

    def __init__(self) -> None:
        self.regions: list[_Region] = []

    def innermost(self) -> _Region | None:
        return next((each for each in reversed(self.regions) if each.is_open), None)


_here = _OfThread()


class Native:
    """In the place of `torch_memory_saver._impl`: its `_binary_wrapper.cdll` has what is known to be called.

    slime and miles keep the buffers of DeepEP out of the region that the process is, by `tms_set_interesting_region`.

    Attributes:
        tags_of_mmap: of regions with backups of that backend.
    """

    def __init__(self, backend: str) -> None:
        self._default_backend = backend
        self._binary_wrapper = SimpleNamespace(cdll=self)
        # Code takes the pool of a region from here to let its unused memory go. This layer holds none after a region:
        # `torch.cuda.empty_cache()` frees that memory.
        self._mem_pools = SimpleNamespace(pop=lambda *_: None, clear=lambda: None)
        self._process = ctypes.CDLL(None)
        self.tags_of_mmap: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        """Of CUDA's runtime, if it is loaded: torch_memory_saver's library, linked to it, has its functions as well."""
        if name.startswith("cuda"):
            return getattr(self._process, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _with_region_config(
        self,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> AbstractContextManager[None]:
        """`Regions.use_without_pool`."""
        check_backend(enable_cpu_backup, cpu_backup_backend)
        allocator = CuMemAllocator.get_instance()
        backup = is_backed_up("enable_disk_backup=True", allocator.settings, enable_cpu_backup, enable_disk_backup)
        labelled = allocator.regions.use_without_pool(tag, backup=backup)
        return self._entered(labelled, tag, cpu_backup_backend, backup=backup)

    @contextmanager
    def _entered(
        self, labelled: AbstractContextManager[None], tag: str, backend: str | None, *, backup: bool
    ) -> Iterator[None]:
        with labelled, self.backend(tag, backend, backup=backup):
            yield

    @contextmanager
    def backend(self, tag: str, backend: str | None, *, backup: bool) -> Iterator[None]:
        """Within a region: the backend that was named for it. That the task has left the region ends with it, too."""
        region = self._enter(backend)
        try:
            region.is_open = True
            self.note_region(tag, backup=backup)
            yield
        finally:
            region.is_open = False
            region.come_back()

    def _enter(self, backend: str | None) -> _Region:
        """A region that is not open yet."""
        outer = _here.innermost()
        region = _Region(backend or (outer.backend if outer else None))
        _here.regions = [*(each for each in _here.regions if each.is_open), region]
        return region

    def note_region(self, tag: str, *, backup: bool) -> None:
        """Remember the tag, if backups that are made from here on are of the backend `mmap`."""
        if backup and self.tms_get_cpu_backup_backend() == MMAP.encode():
            self.tags_of_mmap.add(tag)

    def tms_get_interesting_region(self) -> bool:
        """Whether what this thread allocates belongs to a region."""
        return _core.thread_backup() != _core.BackupPlan.BY_LEVEL

    def tms_set_interesting_region(self, value: bool) -> None:
        """False: this thread leaves its region, until True."""
        if value == self.tms_get_interesting_region():
            return
        region = _here.innermost()
        if region is None and not value:  # it is in the one that the process is
            region = self._enter(None)
            region.is_open = True
        if region is not None:
            region.come_back()
            region.outside = None if value else entered(DEFAULT_TAG)

    def tms_get_enable_cpu_backup(self) -> bool:
        """Whether that region is backed up."""
        return _core.thread_backup() == _core.BackupPlan.ALWAYS

    def tms_get_enable_disk_backup(self) -> bool:
        """False: whether it goes to files is the vault's choice."""
        return False

    def tms_get_current_tag(self) -> bytes:
        """The region's."""
        return _core.thread_tag().encode()

    def tms_get_cpu_backup_backend(self) -> bytes:
        """What was named last."""
        region = _here.innermost()
        return str((region.backend if region else None) or self._default_backend).encode()
