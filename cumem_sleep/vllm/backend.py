"""vLLM's sleep-mode backend `cumem_sleep`, for versions that choose one by name.

The default backend `cumem` reaches this layer as well, by naming the tags to back up; this one goes by the layer's own
levels and tells its state as it is.
"""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from ..allocator import CuMemAllocator


class CumemSleepBackend(SleepModeBackend):  # type: ignore[misc]
    """Sleeps and wakes this process's `CuMemAllocator`."""

    def suspend(self, level: int = 1) -> None:
        """Level 1 backs up all but the KV cache; level 2 drops the weights too. A failure changes nothing."""
        CuMemAllocator.get_instance().sleep(level=level)
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
        """NCCL's buffers are not in the pools: nothing happens to them."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """The process and its CUDA context live on, and no address changes."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Neither the communicators nor any address that a graph holds changes."""
        return True
