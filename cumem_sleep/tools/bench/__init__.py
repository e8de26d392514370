"""`cumem-sleep bench`: what sleep and wake cost on this machine, beside the link measured in the same run.

`workload` decides which segments there are, `memory` fills and checks them, `link` measures the ceiling, `run` makes
the steps, `report` and `plot` show them.
"""

from __future__ import annotations

from .plot import check_plot, draw
from .report import BenchReport
from .run import Options, run
from .workload import Request, Room, Workload, plan

__all__ = [
    "BenchReport",
    "Options",
    "Request",
    "Room",
    "Workload",
    "check_plot",
    "draw",
    "plan",
    "run",
]
