"""vLLM's sleep-mode backend `cumem_sleep`, for versions that choose one by name.

The default backend `cumem` also uses this layer, by naming the tags to back up; this backend uses the layer's own
levels and reports its real state.
"""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from ..allocator import CuMemAllocator
from ..core.levels import is_checkpoint


class CumemSleepBackend(SleepModeBackend):  # type: ignore[misc]
    """Sleeps and wakes this process's `CuMemAllocator`."""

    def suspend(self, level: int = 1) -> None:
        """Level 1 backs up all but the KV cache; level 2 drops the weights too. A failure changes nothing.

        Level 3 is level 1 here: the worker calls CUDA after this, so the plugin goes on when it has done so.
        """
        CuMemAllocator.get_instance().sleep(level=1 if is_checkpoint(level) else level)
        self._state = self._state_of_memory()

    def resume(self, tags: list[str] | None = None) -> None:
        """Wake these tags, or all. A failure leaves everything asleep."""
        self._state = "RESUMING"
        try:
            CuMemAllocator.get_instance().wake_up(tags)
        finally:
            self._state = self._state_of_memory()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Drop these tags and leave the rest awake."""
        CuMemAllocator.get_instance().discard(tags)
        self._state = self._state_of_memory()

    @staticmethod
    def _state_of_memory() -> str:
        usage = CuMemAllocator.get_instance().usage()
        return "SUSPENDED" if any(tag.asleep_segments for tag in usage.values()) else "RUNNING"

    @classmethod
    def is_supported(cls) -> bool:
        """Whether vLLM's memory really comes from this layer."""
        from vllm.device_allocator import cumem

        return cumem.CuMemAllocator is CuMemAllocator

    @classmethod
    def preserves_communicators(cls) -> bool:
        """NCCL's buffers are not in the pools, so nothing happens to them."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """The process and its CUDA context live on, and no address changes."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Neither the communicators nor any address in a graph changes."""
        return True
