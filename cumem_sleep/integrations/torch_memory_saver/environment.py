"""torch_memory_saver's environment: its TMS_ variables, and LD_PRELOAD for child processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...core.scopes import scoped
from ...errors import InvalidArgument
from .. import preload

_TRUE, _FALSE = ("1", "true", "TRUE", "yes", "YES"), ("0", "false", "FALSE", "no", "NO")
MMAP, PINNED = BACKENDS = ("mmap", "pinned")
DEFAULT_BACKEND = PINNED


@dataclass(frozen=True)
class Environment:
    """What the TMS_ variables say.

    Attributes:
        enable: TMS_INIT_ENABLE: the whole process is a region, called `default`.
        enable_cpu_backup: TMS_INIT_ENABLE_CPU_BACKUP: and is backed up.
        cpu_backup_backend: TMS_INIT_CPU_BACKUP_BACKEND: where no region names one.
        retain_cpu_backup: TMS_RETAIN_CPU_BACKUP: what `retain_cpu_backup` is at first.
    """

    enable: bool = False
    enable_cpu_backup: bool = False
    cpu_backup_backend: str = DEFAULT_BACKEND
    retain_cpu_backup: bool = False

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Environment:
        """What they say now. TMS_DISK_BACKUP_DIR and TMS_DISK_BACKUP_CHUNK_MB say nothing without disk backups.

        Raises:
            InvalidArgument: one has a bad value; the message names it.
            NotImplementedError: TMS_INIT_ENABLE_DISK_BACKUP is on.
        """
        environment = os.environ if environment is None else environment
        if _flag(environment, "TMS_INIT_ENABLE_DISK_BACKUP"):
            raise NotImplementedError("TMS_INIT_ENABLE_DISK_BACKUP: " + NO_DISK_BACKUP)
        return cls(
            enable=_flag(environment, "TMS_INIT_ENABLE"),
            enable_cpu_backup=_flag(environment, "TMS_INIT_ENABLE_CPU_BACKUP"),
            cpu_backup_backend=checked_backend(
                "TMS_INIT_CPU_BACKUP_BACKEND", environment.get("TMS_INIT_CPU_BACKUP_BACKEND") or DEFAULT_BACKEND
            ),
            retain_cpu_backup=_flag(environment, "TMS_RETAIN_CPU_BACKUP"),
        )


NO_DISK_BACKUP = (
    "cumem-sleep does not support disk backups: use enable_cpu_backup=True, or a region without a backup whose"
    " contents are rewritten"
)


def checked_backend(name: str, value: object) -> str:
    """A backend of backups in host memory.

    Raises:
        InvalidArgument: it is none; the message begins with `name`.
    """
    if value not in BACKENDS:
        raise InvalidArgument(f"{name}={value!r}: expected mmap or pinned")
    return str(value)


def check_backend(enable_cpu_backup: object, backend: object) -> None:
    """What a region says of its backups.

    Raises:
        InvalidArgument: `backend` is neither None nor one of backups in host memory, or the region has no backup.
    """
    if backend is None:
        return
    if not enable_cpu_backup:
        raise InvalidArgument(f"cpu_backup_backend={backend!r}: needs enable_cpu_backup=True")
    checked_backend("cpu_backup_backend", backend)


def _flag(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "")
    if text not in ("", *_TRUE, *_FALSE):
        raise InvalidArgument(f"{name}={text!r}: expected 1, true, yes, 0, false or no")
    return text in _TRUE


def hook_path() -> Path:
    """The library for LD_PRELOAD."""
    return preload.library_path()


@scoped
def configure_subprocess() -> Iterator[None]:
    """Processes that are started inside get the hook in front of cudaMalloc, before what LD_PRELOAD names already.

    Threads that are not inside start theirs with it, too, as long as one is.
    """
    with preloaded(str(hook_path())):
        yield


@scoped
def preloaded(library: str) -> Iterator[None]:
    """LD_PRELOAD names this library inside, before what it names already."""
    with changed("LD_PRELOAD", ":".join(filter(None, [library, os.environ.get("LD_PRELOAD", "")]))):
        yield


@scoped
def changed(name: str, value: str) -> Iterator[None]:
    """An environment variable has this value inside.

    It is the whole process's: of blocks that overlap, the one entered last counts, and the last one to end puts back
    what was there before the first.
    """
    variable, block = _variables[name], object()
    try:
        variable.add(block, value)
        yield
    finally:
        try:
            variable.remove(block)
        except BaseException:  # of a signal handler, half-way
            variable.remove(block)
            raise


class _Variable:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # signal handlers, and what the garbage collector closes, come here too
        self._values: dict[object, str] = {}  # by block
        self._before: str | None = None
        self._is_changed = False

    def add(self, block: object, value: str) -> None:
        with self._lock:
            if not self._is_changed:
                self._before = os.environ.get(self._name)
                self._is_changed = True
            self._values[block] = value
            os.environ[self._name] = value

    def remove(self, block: object) -> None:
        with self._lock:
            self._values.pop(block, None)
            if not self._is_changed:
                return
            value = next(reversed(tuple(self._values.values())), self._before)
            if value is None:
                os.environ.pop(self._name, None)
            else:
                os.environ[self._name] = value
            self._is_changed = bool(self._values)


class _Variables(dict[str, _Variable]):
    def __missing__(self, name: str) -> _Variable:
        return self.setdefault(name, _Variable(name))


_variables = _Variables()
