"""`cumem-sleep bench`: what sleep and wake cost on this machine, compared with the link in the same run.

`workload` chooses the segments, `memory` fills them, `link` measures the ceiling, `run` runs the steps, and `report`
shows them.
"""

from __future__ import annotations

from .run import BenchOptions, run
from .workload import Room, plan

__all__ = ["BenchOptions", "Room", "plan", "run"]
