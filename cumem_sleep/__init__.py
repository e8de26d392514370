"""cumem-sleep: GPU memory that sleeps and wakes at the same addresses. See README.md."""

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
