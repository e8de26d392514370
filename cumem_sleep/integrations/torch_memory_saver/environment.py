"""torch_memory_saver's environment: its TMS_ variables, and LD_PRELOAD for child processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...core import preload
from ...errors import InvalidArgument, VaultError
from ...settings import Settings
from ...vault.client import VaultClient

_TRUE, _FALSE = ("1", "true", "TRUE", "yes", "YES"), ("0", "false", "FALSE", "no", "NO")
MMAP, PINNED = BACKENDS = ("mmap", "pinned")
DEFAULT_BACKEND = PINNED


@dataclass(frozen=True)
class Environment:
    """What the TMS_ variables say.

    Attributes:
        enable: TMS_INIT_ENABLE: the whole process is a region, called `default`.
        enable_cpu_backup: TMS_INIT_ENABLE_CPU_BACKUP: and is backed up.
        enable_disk_backup: TMS_INIT_ENABLE_DISK_BACKUP: likewise, where the vault spills to files.
        cpu_backup_backend: TMS_INIT_CPU_BACKUP_BACKEND: where no region names one.
        retain_cpu_backup: TMS_RETAIN_CPU_BACKUP: what `retain_cpu_backup` is at first.
    """

    enable: bool = False
    enable_cpu_backup: bool = False
    enable_disk_backup: bool = False
    cpu_backup_backend: str = DEFAULT_BACKEND
    retain_cpu_backup: bool = False

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Environment:
        """What they say now. TMS_DISK_BACKUP_DIR and TMS_DISK_BACKUP_CHUNK_MB say nothing: the vault has its folder.

        Raises:
            InvalidArgument: one has a bad value; the message names it.
        """
        environment = os.environ if environment is None else environment
        return cls(
            enable=_flag(environment, "TMS_INIT_ENABLE"),
            enable_cpu_backup=_flag(environment, "TMS_INIT_ENABLE_CPU_BACKUP"),
            enable_disk_backup=_flag(environment, "TMS_INIT_ENABLE_DISK_BACKUP"),
            cpu_backup_backend=checked_backend(
                "TMS_INIT_CPU_BACKUP_BACKEND", environment.get("TMS_INIT_CPU_BACKUP_BACKEND") or DEFAULT_BACKEND
            ),
            retain_cpu_backup=_flag(environment, "TMS_RETAIN_CPU_BACKUP"),
        )


def is_backed_up(what: str, settings: Settings, enable_cpu_backup: object, enable_disk_backup: object) -> bool:
    """Whether a region is, in host memory or through it in the files of the vault.

    Raises:
        InvalidArgument: it is to be both.
        NotImplementedError: there are no files; the message begins with `what`.
    """
    if not enable_disk_backup:
        return bool(enable_cpu_backup)
    if enable_cpu_backup:
        raise InvalidArgument(f"{what}: expected enable_cpu_backup or enable_disk_backup, not both")
    check_vault_spills(what, settings)
    return True


def check_vault_spills(what: str, settings: Settings) -> None:
    """Backups go to files when the vault's memory is short. Raises NotImplementedError: there is no such vault."""
    spills, path = False, None if settings.vault == "auto" else Path(settings.vault)
    if settings.vault != "off":
        with suppress(VaultError), closing(VaultClient(path, "torch_memory_saver")) as vault:
            spills = bool(vault.slabs.moves)
    if not spills:
        raise NotImplementedError(
            f"{what}: only a vault keeps backups on disk: run `cumem-sleep vault --spill DIR --spill-size SIZE`, and"
            " set CUMEM_SLEEP_VAULT; or use enable_cpu_backup=True, or a region without a backup whose contents are"
            " rewritten"
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


@contextmanager
def configure_subprocess(library: Path | None = None) -> Iterator[None]:
    """Processes that are started inside, by any thread, get the hook in front of cudaMalloc, before other libraries.

    Args:
        library: instead of the hook; None: the hook.
    """
    libraries = filter(None, [str(library or preload.library_path()), os.environ.get("LD_PRELOAD", "")])
    with changed("LD_PRELOAD", ":".join(libraries)):
        yield


@contextmanager
def changed(name: str, value: str) -> Iterator[None]:
    """An environment variable, which is the whole process's, has this value inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
