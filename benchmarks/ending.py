"""Processes that a benchmark has started, ended."""

from __future__ import annotations

import signal
import subprocess


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
