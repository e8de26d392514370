"""What trainers ask of torch_memory_saver's C library, past its Python interface, in terms of the thread's label."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from ... import _core
from ...tags import DEFAULT_TAG, checked_tag


class Native:
    """In the place of `torch_memory_saver._impl`: its `_binary_wrapper.cdll` has what is known to be called.

    slime and miles keep the buffers of DeepEP out of the region that the process is, by `tms_set_interesting_region`.
    """

    def __init__(self, backend: str) -> None:
        self._default_backend = backend
        self._thread = threading.local()
        self._binary_wrapper = SimpleNamespace(cdll=self)

    @property
    def in_region(self) -> bool:
        """Whether what this thread allocates belongs to a region."""
        return _core.thread_backup() != _core.Backup.BY_LEVEL

    def region(self, tag: str, *, backup: bool) -> _core.ThreadLabel:
        """A context: what this thread gets from cudaMalloc inside belongs to a region, without a pool of PyTorch's."""
        return _core.ThreadLabel(checked_tag(tag), _core.Backup.ALWAYS if backup else _core.Backup.NEVER)

    @contextmanager
    def backend(self, backend: str | None) -> Iterator[None]:
        """The backend of backups that was named for a scope."""
        before = getattr(self._thread, "backend", None)
        self._thread.backend = backend or before
        try:
            yield
        finally:
            self._thread.backend = before

    def tms_get_interesting_region(self) -> bool:
        """`in_region`."""
        return self.in_region

    def tms_set_interesting_region(self, value: bool) -> None:
        """False: this thread leaves its region, until True."""
        if value == self.in_region:
            return
        if value:
            outside = getattr(self._thread, "outside", None)
            if outside is not None:
                self._thread.outside = None
                outside.__exit__(None, None, None)
        else:
            self._thread.outside = _core.ThreadLabel(DEFAULT_TAG)

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
