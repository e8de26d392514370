"""A worker, by `--worker-cls checkpointed_worker.CheckpointedWorker`, that calls the driver itself, as PyTorch does.

At level 3 such a call waits until the process is restored, which here would be for ever.
"""

from __future__ import annotations

import ctypes

from watched_worker import WatchedWorker

from cumem_sleep import _core


class CheckpointedWorker(WatchedWorker):
    """`WatchedWorker`, at whose ends the driver is called past this layer."""

    def sleep(self, level: int = 1) -> None:
        super().sleep(level)
        self.call_driver()

    def call_driver(self) -> int:
        count = ctypes.c_int()
        assert ctypes.CDLL(_core.driver_path()).cuDeviceGetCount(ctypes.byref(count)) == 0
        return count.value

    def list_loras(self) -> set[int]:
        self.call_driver()
        return set()

    def shutdown(self) -> None:
        self.call_driver()
