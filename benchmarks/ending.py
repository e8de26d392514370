"""Processes that a benchmark has started, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str], limit_s: float, number: int = signal.SIGTERM) -> bool:
    """Whether the signal ended it within so many seconds; if not, it is killed. Does nothing the second time."""
    process.send_signal(number)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def kill_descendants(root: int | None = None) -> None:
    """Every process that this one, or `root`, started, that those started, and so on, whatever sessions they made."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [os.getpid() if root is None else root]
    for process in found:
        found += children.get(process, ())
    for process in found[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
