"""`cumem-sleep demo`: weights sleep and wake, and after every wake each byte is compared with the source it came from.

`source` provides the weights, `run` takes them through sleep and wake, `copies` writes and reads device memory, and
`report` shows what was found.
"""

from __future__ import annotations

from .report import DemoReport
from .run import run
from .source import Source, source_from_files, synthetic_source

__all__ = [
    "DemoReport",
    "Source",
    "run",
    "source_from_files",
    "synthetic_source",
]
