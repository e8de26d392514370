"""cumem-sleep: GPU memory that sleeps and wakes at the same addresses. See README.md."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .allocator import CuMemAllocator
    from .checkpoint.process import Checkpointed
    from .errors import (
        AdoptionFailed,
        BackupMismatch,
        CheckpointFailed,
        CodecError,
        CumemSleepError,
        DriverError,
        InvalidArgument,
        InvalidArgumentType,
        InvalidState,
        OutOfDeviceMemory,
        OutOfHostMemory,
        RankFailed,
        VaultError,
        VaultLost,
        VaultUnavailable,
    )
    from .integrations.cupy import cupy_allocator
    from .operations.prepare import Preparation
    from .report import BackupPlace, OperationTotals, SleepReport, TagUsage, WakeReport
    from .settings import Settings

__all__ = [
    "AdoptionFailed",
    "BackupMismatch",
    "BackupPlace",
    "CheckpointFailed",
    "Checkpointed",
    "CodecError",
    "CuMemAllocator",
    "CumemSleepError",
    "DriverError",
    "InvalidArgument",
    "InvalidArgumentType",
    "InvalidState",
    "OperationTotals",
    "OutOfDeviceMemory",
    "OutOfHostMemory",
    "Preparation",
    "RankFailed",
    "Settings",
    "SleepReport",
    "TagUsage",
    "VaultError",
    "VaultLost",
    "VaultUnavailable",
    "WakeReport",
    "cupy_allocator",
]
__version__ = "0.1.0"

_MODULES = {
    "old_names": ("CuMemAllocator",),
    "checkpoint.process": ("Checkpointed",),
    "integrations.cupy": ("cupy_allocator",),
    "operations.prepare": ("Preparation",),
    "report": ("BackupPlace", "OperationTotals", "SleepReport", "TagUsage", "WakeReport"),
    "settings": ("Settings",),
}
_DEFINED_IN = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: the command line must handle Ctrl-C before NumPy is imported."""
    if name in __all__:
        value = getattr(importlib.import_module(f".{_DEFINED_IN.get(name, 'errors')}", __name__), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:  # cumem_sleep.sim
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _has_extension(folders: Sequence[str] | None) -> bool:
    return PathFinder.find_spec(f"{__name__}._core", folders) is not None


def _use_installed_package() -> None:
    """Become the installed package: this one is in a checkout, where no extension was built.

    Python looks in the folder that it is started in before installed packages (`python -m pytest`).
    """
    here = Path(__path__[0]).parent.resolve()
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = PathFinder.find_spec(__name__, elsewhere)
    if spec is None or spec.loader is None or not _has_extension(spec.submodule_search_locations):
        raise ImportError(
            f"{__path__[0]} has the sources of cumem-sleep, but no extension was built there, and none is installed:"
            " install with `pip install .`, or `pip install -e .` to work on the sources"
        )
    installed = sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(installed)


def _is_main_interpreter() -> bool:
    """False in a subinterpreter."""
    if sys.version_info >= (3, 13):
        from _thread import _is_main_interpreter

        return _is_main_interpreter()
    try:
        import _xxsubinterpreters as interpreters
    except ImportError:  # a Python built without them
        return True
    return bool(interpreters.get_current() == interpreters.get_main())


if not _is_main_interpreter():  # before loading the extension, which would hang up to Python 3.11
    raise ImportError(
        "cumem-sleep does not work in a subinterpreter: there is one allocator for the process, and its extension can"
        " be loaded by the main interpreter only. Import it there, or use a process instead"
    )
if not _has_extension(__path__):
    _use_installed_package()
