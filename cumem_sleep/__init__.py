"""cumem-sleep: GPU memory that sleeps and wakes at the same addresses. See README.md."""

from importlib.util import find_spec

from .interpreter import is_main_interpreter

if not is_main_interpreter():  # before the extension is loaded: up to Python 3.11 that would hang
    raise ImportError(
        "cumem-sleep does not work in a subinterpreter: there is one allocator for the process, and its extension can"
        " be loaded by the main interpreter only. Import it there, or use a process instead"
    )

if find_spec(f"{__name__}._core") is None:  # else Python speaks of a circular import
    raise ImportError(
        f"{__path__[0]} has the sources of cumem-sleep, but no extension was built there. Python takes this folder"
        " rather than the installed package when it is started beside it: start it elsewhere, or install with"
        " `pip install -e .`"
    )

from .allocator import CuMemAllocator, cupy_allocator
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
)
from .prepare import Preparation
from .report import OperationTotals, SleepReport, TagUsage, WakeReport
from .settings import Settings

__all__ = [
    "BackupMismatch",
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
    "Settings",
    "SleepReport",
    "TagUsage",
    "WakeReport",
    "cupy_allocator",
]
__version__ = "0.1.0"
