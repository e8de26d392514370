"""`cumem-sleep bench`: what sleep and wake cost on this machine, compared with the link in the same run.

`workload` chooses the segments, `memory` fills and checks them, `link` measures the ceiling, `run` runs the steps, and
`report` and `plot` show them.
"""

from __future__ import annotations

from .plot import check_plot, draw
from .report import BenchReport
from .run import BenchOptions, run
from .workload import Request, Room, Workload, plan

__all__ = [
    "BenchOptions",
    "BenchReport",
    "Request",
    "Room",
    "Workload",
    "check_plot",
    "draw",
    "plan",
    "run",
]
