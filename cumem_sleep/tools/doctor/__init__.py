"""`cumem-sleep doctor`: is this machine ready for sleep mode, is it fast, and what to do where it is not.

Every check is a small function that takes a `Machine` (a root directory, an environment, where packages are
installed) and returns a `Check`. Each group of checks has a file: `variables`, `gpus`, `level_3`,
`vault`, `host`, `packages`.
"""

from __future__ import annotations

from .examine import examine
from .report import SIMULATED_NOTE, Check, CheckStatus, DoctorReport

__all__ = ["SIMULATED_NOTE", "Check", "CheckStatus", "DoctorReport", "examine"]
